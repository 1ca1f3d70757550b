"""Every quick way of a group and of a bucket equals the plain one, to rounding, on many shapes, types and batches."""

import copy
from functools import cache
from itertools import product as every

import pytest
import torch
from expressions import plain_step
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from psgd_lit.affine import Block, affine_blocks
from psgd_lit.blocks import KronRule, choose, leaves
from psgd_lit.buckets import Bucket, Kept, map_leaves
from psgd_lit.groups.bordered import Bordered
from psgd_lit.groups.diagonal import Diagonal, Equilibration
from psgd_lit.groups.direct_sum import DirectSum
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.protocol import safe_pair
from psgd_lit.groups.sparse_lu import SparseLU
from psgd_lit.groups.triangular import Triangular
from psgd_lit.optim import PSGD, planned_move

T, D = Triangular(), Diagonal()
CASES = {
    "triangular": (T, 7),
    "triangular, cut in halves": (T, 101),
    "triangular, in several blocks": (T, 261),
    "diagonal": (D, 6),
    "closed form": (Equilibration(), 6),
    "normalization": (Normalization(), 6),
    "bordered": (Bordered(3), 9),
    "bordered, all columns": (Bordered(9), 5),
    "sparse LU": (SparseLU(3), 9),
    "sparse LU of diagonals": (SparseLU(0), 4),
    "Kronecker": (Kron(T, T), (5, 4)),
    "Kronecker, wide": (Kron(T, T), (3, 120)),
    "Kronecker, tall": (Kron(T, D), (130, 2)),
    "Kronecker, three": (Kron(T, D, T), (2, 3, 4)),
    "Kronecker, nested": (Kron(Kron(T, D), Normalization()), ((2, 3), 4)),
    "direct sum": (DirectSum(T, SparseLU(1)), (4, 5)),
}
BATCHES, TYPES = ((), (3,), (2, 2)), (torch.float32, torch.float64)
case = pytest.mark.parametrize("name", CASES)
kind = pytest.mark.parametrize(("batch", "dtype"), list(every(BATCHES, TYPES)), ids=str)


def pair(group, Q, batch, dtype, k, seed):
    """Two random columns as a step sees them."""
    source = torch.Generator().manual_seed(seed)
    return safe_pair(*torch.randn(2, *batch, group.size(Q), k, dtype=dtype, generator=source))[:2]


@cache
def learned(group, shape, batch, dtype):
    """Where a few updates on random pairs lead, found once for all tests, since none changes it."""
    Q = group.init(shape, batch, dtype=dtype)
    for seed in range(8):
        v, h = pair(group, Q, batch, dtype, 1, seed)
        Q = group.update(Q, v, h, 0.2)
    return Q


def assert_near(quick, plain, dtype):
    """Two states are equal to some hundred roundings of their largest entry."""
    for x, y in zip(leaves(quick), leaves(plain), strict=True):
        size = float(y.abs().amax()) if y.numel() else 0.0
        torch.testing.assert_close(x, y, rtol=0, atol=300 * torch.finfo(dtype).eps * size)


@case
@kind
def test_a_quick_step_is_the_plain_step(name, batch, dtype):
    group, shape = CASES[name]
    Q = learned(group, shape, batch, dtype)
    for k, bound in ((1, 0.0), (4, 0.0), (1, 50.0)):
        a, b = pair(group, Q, batch, dtype, k, seed=k)
        least = torch.full((*batch, group.maxima), bound, dtype=dtype)
        plain = plain_step(group, Q, a, b, 0.1, least)
        assert_near(group.step_of_sums(Q, a + b, a - b, 0.1, least), plain, dtype)
        half = group.half_gradient_of_sums(Q, a + b, a - b)
        assert_near(half, group.half_gradient(Q, a, b), dtype)


@pytest.mark.parametrize("rows", [1, 4, 50])
@pytest.mark.parametrize("name", ["bordered", "sparse LU", "sparse LU of diagonals"])
@kind
def test_a_step_in_pieces_of_rows_is_the_plain_step(name, rows, batch, dtype, monkeypatch):
    monkeypatch.setattr("psgd_lit.groups.bordered._ROWS", rows)
    group, shape = CASES[name]
    Q = learned(group, shape, batch, dtype)
    a, b = pair(group, Q, batch, dtype, 2, seed=5)
    least = torch.zeros(*batch, group.maxima, dtype=dtype)
    plain = plain_step(group, Q, a, b, 0.1, least)
    assert_near(group.step_of_sums(Q, a + b, a - b, 0.1, least), plain, dtype)


@case
@kind
def test_a_product_that_was_made_once_is_the_same_product(name, batch, dtype):
    group, shape = CASES[name]
    Q = learned(group, shape, batch, dtype)
    g, _ = pair(group, Q, batch, dtype, 3, seed=9)
    plain = group.apply_t(Q, group.apply(Q, g))
    assert_near(group.precondition(Q, g), plain, dtype)
    assert_near(group.precondition_by(group.product(Q), g), plain, dtype)


@case
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, -torch.inf])
def test_a_quick_step_leaves_a_member_without_a_pair_alone(name, bad):
    group, shape = CASES[name]
    Q = learned(group, shape, (2,), torch.float32)
    v, h = (x.clone() for x in pair(group, Q, (2,), torch.float32, 1, seed=3))
    h[1], v[1] = (bad, v[1]) if bad else (0.0, 0.0)
    after = group.update(Q, v, h, 0.1)
    for new, old in zip(leaves(after), leaves(Q), strict=True):
        assert torch.equal(new[1], old[1])
    assert not torch.equal(group.matrix(after)[0], group.matrix(Q)[0])


@case
@pytest.mark.parametrize("unit", [1e-20, 1e-8, 1e15])
def test_a_quick_step_in_a_far_unit(name, unit):
    """With a and b in a unit that is a power of two the step is the same, bit for bit."""
    group, shape = CASES[name]
    Q, scale = (
        learned(group, shape, (2,), torch.float32),
        2.0 ** round(torch.tensor(unit).log2().item()),
    )
    a, b = pair(group, Q, (2,), torch.float32, 1, seed=4)
    near, far = group.step(Q, a, b, 0.1), group.step(Q, scale * a, scale * b, 0.1)
    assert all(torch.equal(x, y) for x, y in zip(leaves(near), leaves(far), strict=True))


LAYERS = {
    "linear": lambda: torch.nn.Linear(3, 4),
    "without bias": lambda: torch.nn.Linear(3, 4, bias=False),
    "convolution": lambda: torch.nn.Conv2d(4, 4, 3, groups=2),
    "transposed": lambda: torch.nn.ConvTranspose2d(2, 3, 2),
    "transposed, in groups": lambda: torch.nn.ConvTranspose1d(4, 4, 3, groups=2),
    "recurrent": lambda: torch.nn.LSTM(3, 2),
    "embedding": lambda: torch.nn.Embedding(5, 3),
    "attention": lambda: torch.nn.MultiheadAttention(4, 2),
    "complex": lambda: torch.nn.Linear(3, 2, dtype=torch.complex64),
    "half": lambda: torch.nn.Linear(3, 2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("lacking", [(), (0,), (1, 2)])
def test_views_gather_and_scatter_what_joining_does(name, lacking):
    model = torch.nn.ModuleList([LAYERS[name]() for _ in range(3)])
    choices = choose("kron", model.parameters(), affine_blocks(model))
    kinds = {choice.shape: [c for c in choices if c.shape == choice.shape] for choice in choices}
    for members in kinds.values():
        bucket = Bucket(members, 1.0)
        values = {p: torch.randn_like(p) for p in bucket.params}
        values = {p: v for i, (p, v) in enumerate(values.items()) if i not in lacking}
        joined = torch.cat([c.block.join(values, bucket.dtype).flatten(1) for c in members])
        x = bucket.gather(values)
        assert torch.equal(x, joined[..., None])
        assert x.dtype == bucket.dtype
        parts, blocks = bucket.scatter(x), torch.split(joined, [c.block.batch for c in members])
        for choice, array in zip(members, blocks, strict=True):
            block: Block = choice.block
            for p, part in block.split(array.reshape(block.batch, *block.shape)).items():
                assert torch.equal(parts[p], part)


def test_a_kept_product_is_made_anew_for_another_factor():
    """For a Q that was replaced, and for one that was written to in place."""
    params = [torch.zeros(5, 5) for _ in range(2)]
    bucket = Bucket(choose("kron", params), 1.0)
    g = {p: torch.randn(5, 5, generator=torch.Generator().manual_seed(1)) for p in params}
    assert torch.allclose(bucket.precondition(bucket.gather(g), steps=100), bucket.gather(g))
    bucket.states()[1]["Q"][0][0].mul_(3.0)
    written = bucket.precondition(bucket.gather(g), steps=100)
    assert torch.allclose(written[1], 9 * bucket.gather(g)[1])
    bucket.state = bucket.state | {"Q": map_leaves(lambda leaf: 2 * leaf, bucket.Q)}
    assert torch.allclose(bucket.precondition(bucket.gather(g), steps=100), 16 * written)


@settings(max_examples=examples(15), deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    k=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_steps_between_fits_are_those_without_a_kept_product(rows, columns, k, seed):
    source = torch.Generator().manual_seed(seed)
    W = torch.randn(rows, columns, dtype=torch.float64, generator=source)
    x = torch.randn(8, columns, dtype=torch.float64, generator=source)
    p = W.clone().requires_grad_()
    opt = PSGD([p], lr=0.1, update_every=k)
    for _ in range(2 * k + 2):
        opt.step(lambda: (x @ p.T).tanh().square().mean())
        g = {p: torch.ones_like(p)}
        [(_, bucket)] = opt.buckets.active(g)
        kept, plain = (bucket.precondition(bucket.gather(g), steps=k) for k in (1000, 1))
        torch.testing.assert_close(kept, plain, rtol=1e-9, atol=1e-12)


def range_problem(curvature, shape=(4, 3), update_every=10, **settings):
    """A parameter, an optimizer and a closure whose curvature lies between `curvature` and four times that."""
    p = torch.ones(shape, requires_grad=True)
    H = curvature * torch.linspace(1, 4, p.numel(), dtype=torch.float64).reshape(shape).float()
    opt = PSGD([p], lr=0.1, max_norm=float("inf"), update_every=update_every, **settings)
    return p, opt, lambda: (H * p * p).sum() / 2


@pytest.mark.parametrize("curvature", [1e-40, 1e-30, 1e-10, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("preconditioner", ["kron", "dense", "diagonal", "splu", "scan-or-kron"])
def test_a_kept_product_is_right_at_every_curvature(curvature, preconditioner):
    """Where P would leave the range of float32 and Q does not, the steps are those of Q; none is dropped or lost."""
    p, opt, closure = range_problem(curvature, preconditioner=preconditioner)
    for _ in range(31):
        opt.step(closure)
    assert opt.skipped == 0
    assert p.isfinite().all()
    g = {p: torch.autograd.grad(closure(), p)[0]}
    [(_, bucket)] = opt.buckets.active(g)
    kept, plain = (bucket.precondition(bucket.gather(g), steps=k) for k in (10**6, 1))
    assert plain.isfinite().all()
    assert plain.abs().amax() > 1e-4
    torch.testing.assert_close(kept, plain, rtol=2e-5, atol=2e-6 * float(plain.abs().amax()))


@pytest.mark.parametrize("spread", [1e-20, 1e20])
def test_a_kept_product_is_right_for_columns_of_far_scales(spread):
    Q = torch.tensor([[1.0, 0.5 * spread], [0.0, spread]])
    g = torch.tensor([[1.0], [1 / spread]])
    exact = (Q.double().T @ Q.double() @ g.double()).float()
    torch.testing.assert_close(T.precondition_by(T.product((Q,)), g), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_kept_product_of_a_bad_factor_is_bad(bad):
    """What is not finite in Q stays visible to the guard of the step."""
    Q = torch.eye(3)
    Q[0, 1] = bad
    assert not T.precondition_by(T.product((Q,)), torch.ones(3, 1)).isfinite().all()


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_gradient_drops_the_step_and_is_counted(every, bad):
    p, opt, closure = range_problem(1.0, update_every=every)
    for _ in range(15):
        opt.step(closure)
    before = p.detach().clone()
    p.register_hook(lambda g: g.index_fill(0, torch.tensor([1]), bad))
    opt.step(closure)
    assert torch.equal(p, before)
    assert opt.skipped == 1


def test_a_finite_step_that_overflows_is_not_taken_for_zero():
    """A step size that takes a finite direction out of range shows in the parameters, as with any optimizer."""
    group, x = {"lr": 1e30, "weight_decay": 0.0}, torch.full((1, 2, 1), 1e10)
    w = torch.zeros(2)
    [move] = [
        planned_move(
            group,
            Bucket(choose("diagonal", [w]), 1.0),
            x,
            {w: w},
            torch.tensor(1.0),
            torch.tensor(True),
        )
    ]
    assert move.steps[0].isinf().all()
    stopped = planned_move(
        group,
        Bucket(choose("diagonal", [w]), 1.0),
        x,
        {w: w},
        torch.tensor(0.0),
        torch.tensor(False),
    )
    assert not stopped.steps[0].any()


def test_a_new_factor_at_the_place_of_an_old_one_is_seen():
    """A tensor that is freed may leave its address to the next one; a product must not be taken for that one's."""
    kept = Kept(T.product)
    for scale in range(1, 200):
        Q = T.scale(T.init(3, (1,)), torch.tensor([float(scale)]))
        made = T.precondition_by(kept.of(Q), torch.ones(1, 3, 1))
        assert torch.equal(made, torch.full((1, 3, 1), float(scale) ** 2))


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
@pytest.mark.parametrize("stop", [3, 10, 11, 17])
@pytest.mark.parametrize("preconditioner", ["kron", "dense", "splu"])
def test_a_run_that_stops_in_a_period_goes_on_bit_for_bit(hvp, stop, preconditioner):
    """The kept product is in no checkpoint; it is made anew from the same Q."""

    def begin():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        )
        return model, PSGD(model.parameters(), lr=0.05, hvp=hvp, update_every=10, preconditioner=preconditioner)

    def run(model, opt, steps):
        for t in steps:
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(t))

            def closure(x=x):
                return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()

            opt.step(closure)

    model, opt = begin()
    run(model, opt, range(stop))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    run(model, opt, range(stop, 32))
    again, other = begin()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    run(again, other, range(stop, 32))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    states = (leaves(tuple(b.state["Q"] for _, b in o.buckets.active({}))) for o in (opt, other))
    for x, y in zip(*states, strict=True):
        assert torch.equal(x, y)


class Made(TorchDispatchMode):
    """Counts the tensors of real numbers of one size that are made, views and results in place left out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = f(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            is_new = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given
            self.count += is_new and x.numel() == self.size and x.is_floating_point() and not f.is_view
        return out


@pytest.mark.parametrize("lacks", [False, True])
def test_a_step_between_fits_makes_two_tensors_of_a_parameter(lacks):
    """One for each factor of P g: no more of a large embedding is copied, whether or not all words have been met."""
    w = torch.randn(60, 50, requires_grad=True)
    c = torch.ones(60, 50)
    c[:9] = 0 if lacks else 1
    opt = PSGD([w], hvp="whiten", preconditioner=KronRule(max_size=0), update_every=3)
    opt.found_inf = torch.zeros(1)  # as after `GradScaler.unscale_`
    for _ in range(12):
        w.grad = c * w.detach()
        with Made(w.numel()) as made:
            opt.step()
    assert made.count == 2
    assert all(bucket.may_lack == lacks for _, bucket in opt.buckets.active({}))
