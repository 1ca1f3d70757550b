"""Properties that every group keeps, for all shapes, batches and dtypes: one list of groups, one list of properties."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from psgd_lit.blocks import leaves, map_leaves
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.direct_sum import DirectSum
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.protocol import Group, State
from psgd_lit.groups.sparse_lu import Bordered, SparseLU
from psgd_lit.groups.triangular import Triangular

GROUPS: list[Group] = [
    Triangular(),
    Diagonal(),
    Normalization(),
    SparseLU(0),
    SparseLU(2),
    SparseLU(10),
    SparseLU(200),
    Bordered(2),
    Kron(Triangular()),
    Kron(Triangular(), Triangular()),
    Kron(Diagonal(), Normalization()),
    Kron(Triangular(), Kron(Diagonal(), SparseLU(1))),
    DirectSum(Triangular(), Diagonal()),
    Kron(DirectSum(Triangular(), Normalization()), Diagonal()),
]
LONG = [
    *[Triangular(), Diagonal(), Normalization(), SparseLU(2)],
    Kron(DirectSum(Triangular(), Normalization()), Diagonal()),
]
"""The groups of the longest test: each kind once, and a nesting."""

EVERY_GROUP = pytest.mark.parametrize("group", GROUPS, ids=repr)
SIZES = st.sampled_from([0, 1, 2, 3, 7, 64, 65, 130])
BATCHES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
COLUMNS = st.sampled_from([0, 1, 2, 5])
SEEDS = st.integers(0, 2**20)
few = settings(max_examples=12, deadline=None, derandomize=True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator(seed))


def shape_of(group: Group, n: int) -> Any:
    """A shape of size n for a group: an int, or n divided over the factors, or cut into the parts."""
    if not isinstance(group, Kron):
        return group.shape_for((n,))
    sizes = []
    for _ in group.factors[1:]:
        sizes.append(max((d for d in range(1, math.isqrt(n) + 1) if n % d == 0), default=2))
        n //= sizes[-1]
    return tuple(shape_of(factor, m) for factor, m in zip(group.factors, [*sizes, n], strict=True))


def learned(
    group: Group, n: int, batch: tuple[int, ...] = (), seed: int = 0, dtype: torch.dtype = torch.float64
) -> State:
    """A state away from the identity: where twenty bold steps on random pairs lead."""
    Q = group.init(shape_of(group, n), batch, dtype=dtype)
    for t in range(20):
        v, h = normal(2, *batch, n, 1, seed=seed + t, dtype=dtype)
        Q = group.update(Q, v, h, lr=0.1)
    return Q


def same_bits(one: State, other: State) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(one), leaves(other), strict=True))


def diagonals(group: Group, Q: State) -> list[Tensor]:
    """The diagonals that keep Q in its group as long as they are positive."""
    if isinstance(group, Kron):
        return [d for factor, q in zip(group.factors, Q, strict=True) for d in diagonals(factor, q)]
    if isinstance(group, DirectSum):
        return [d for part, q in zip(group.parts, Q, strict=True) for d in diagonals(part, q)]
    if isinstance(group, SparseLU):
        return [group.half.matrix(q).diagonal(dim1=-2, dim2=-1) for q in Q]
    return [group.matrix(Q).diagonal(dim1=-2, dim2=-1)]


def pair_criterion(Q: Tensor, v: Tensor, h: Tensor) -> Tensor:
    """The criterion of a dense Q on the pairs, summed: the oracle that knows no group."""
    return (Q @ h).square().sum() + torch.linalg.solve(Q.mT, v).square().sum()


@EVERY_GROUP
@few
@given(n=SIZES, batch=BATCHES, k=COLUMNS, seed=SEEDS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_actions_equal_the_dense_matrix(group, n, batch, k, seed, dtype):
    Q = learned(group, n, batch, seed, dtype)
    dense, x = group.matrix(Q), normal(*batch, n, k, seed=seed, dtype=dtype)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(group.apply(Q, x), dense @ x, **close)
    torch.testing.assert_close(group.apply_t(Q, x), dense.mT @ x, **close)
    torch.testing.assert_close(group.apply(Q, group.solve(Q, x)), x, **close)
    torch.testing.assert_close(group.apply_t(Q, group.solve_t(Q, x)), x, **close)
    torch.testing.assert_close(group.precondition(Q, x), dense.mT @ dense @ x, **close)
    assert group.size(Q) == n
    assert all(leaf.dtype == dtype for leaf in leaves(Q))


@EVERY_GROUP
@few
@given(n=st.sampled_from([1, 2, 3, 7]), k=st.sampled_from([1, 2, 5]), seed=SEEDS)
def test_slope_is_half_the_derivative_along_move(group, n, k, seed):
    Q = learned(group, n, seed=seed)
    v, h = normal(2, n, k, seed=seed)
    slope = group.slope(Q, group.apply(Q, h), group.solve_t(Q, v))
    at_zero = map_leaves(lambda e: torch.zeros_like(e, requires_grad=True), slope)
    value = pair_criterion(group.matrix(group.move(Q, at_zero)), v, h)
    derivatives = torch.autograd.grad(value, leaves(at_zero), allow_unused=True, materialize_grads=True)
    for derivative, e in zip(derivatives, leaves(slope), strict=True):
        torch.testing.assert_close(derivative, 2 * e, rtol=1e-8, atol=1e-8)


@EVERY_GROUP
@few
@given(n=st.sampled_from([1, 2, 7, 130]), seed=SEEDS)
def test_descent_rate(group, n, seed):
    """The criterion's derivative in lr at 0 is 2 <E, -E / max|E|>, and a step of 0.01 lowers it on its own pair."""
    Q = learned(group, n, seed=seed)
    v, h = normal(2, n, 1, seed=seed)
    a, b = group.apply(Q, h), group.solve_t(Q, v)
    E = group.slope(Q, a, b)
    descent = zip(leaves(E), leaves(group.descent(E, 1.0, 0)), strict=True)
    rate = torch.stack([2 * (e * d).sum() for e, d in descent]).sum()

    def value(lr: float) -> Tensor:
        return pair_criterion(group.matrix(group.relative_step(Q, a, b, lr)), v, h)

    small = 1e-6
    measured = (value(small) - value(-small)) / (2 * small)
    torch.testing.assert_close(measured, rate, rtol=1e-5, atol=1e-6)
    assume(-rate > 0.2 * value(0))  # not already closer to this pair's minimum than one step
    assert value(0.01) < value(0)


@EVERY_GROUP
@few
@given(n=SIZES, batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_batched_equals_one_by_one(group, n, batch, k, seed):
    Q = learned(group, n, batch, seed)
    v, h = normal(2, *batch, n, k, seed=seed)
    after = group.matrix(group.update(Q, v, h, lr=0.1))
    assert after.shape == (*batch, n, n)
    for member in itertools.product(*map(range, batch)):
        alone = group.update(map_leaves(lambda leaf, member=member: leaf[member], Q), v[member], h[member], lr=0.1)
        torch.testing.assert_close(group.matrix(alone), after[member], rtol=1e-10, atol=1e-10)


@EVERY_GROUP
@few
@given(n=SIZES, batch=BATCHES, k=COLUMNS)
def test_starts_at_the_identity(group, n, batch, k):
    Q = group.init(shape_of(group, n), batch, dtype=torch.float64)
    assert torch.equal(group.matrix(Q), torch.eye(n, dtype=torch.float64).expand(*batch, n, n))
    leaf_of = [leaf.untyped_storage().data_ptr() for leaf in leaves(Q) if leaf.numel()]
    assert len(set(leaf_of)) == len(leaf_of)


@EVERY_GROUP
@few
@given(n=st.sampled_from([1, 2, 7, 65]), seed=SEEDS)
def test_numel_counts_the_entries_that_move(group, n, seed):
    """As many entries of the state differ from zero as Table I counts."""
    state = leaves(learned(group, n, seed=seed))
    assert sum(int((leaf != 0).sum()) for leaf in state) == group.numel(shape_of(group, n))


@EVERY_GROUP
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("n", [1, 3, 130])
def test_zero_and_bad_pairs_leave_every_bit(group, n, bad):
    Q = learned(group, n, batch=(2,))
    v, h = normal(2, 2, n, 1, seed=1)
    h[1] = h[1] * 0 if bad == 0 else torch.where(torch.arange(n)[:, None] == n - 1, bad, h[1])
    after = group.update(Q, v, h, lr=0.1)
    assert same_bits(map_leaves(lambda leaf: leaf[1], Q), map_leaves(lambda leaf: leaf[1], after))
    assert not torch.equal(group.matrix(Q)[0], group.matrix(after)[0])


@EVERY_GROUP
def test_a_bad_probe_or_an_overflowing_action_is_a_zero_pair_too(group):
    Q = learned(group, 3, dtype=torch.float32)
    v, h = normal(2, 3, 1, seed=2, dtype=torch.float32)
    assert same_bits(Q, group.update(Q, v * torch.nan, h, lr=0.1))
    large = group.scale(Q, torch.tensor(1e10))
    assert same_bits(large, group.update(large, v, h * 1e35, lr=0.1))


@EVERY_GROUP
def test_equal_pairs_move_nothing(group):
    """Where a = b the criterion is at its minimum for that pair, and rounding must not be mistaken for a slope."""
    for n in (1, 3, 130):
        Q, v = group.init(shape_of(group, n)), normal(n, 1, seed=3, dtype=torch.float32)
        assert same_bits(Q, group.update(Q, v, v, lr=0.9))


@EVERY_GROUP
@few
@given(n=st.sampled_from([1, 2, 7, 65]), exponent=st.integers(-60, 60), seed=SEEDS)
def test_units_of_the_loss_do_not_matter(group, n, exponent, seed):
    """A loss in other units, by a power of two, and Q with it: the same bits, up to that power."""
    Q = learned(group, n, seed=seed, dtype=torch.float32)
    v, h = normal(2, n, 1, seed=seed, dtype=torch.float32)
    unit = 2.0**exponent
    after = group.matrix(group.update(Q, v, h, lr=0.1))
    other = group.matrix(group.update(group.scale(Q, torch.tensor(1 / unit)), v * unit**-1, h * unit, lr=0.1))
    assert torch.equal(other, after / unit)


@few
@given(n=st.sampled_from([1, 2, 7]), seed=SEEDS)
def test_triangular_is_equivariant_under_its_own_group(n, seed):
    """theta = S theta', with S^-T upper triangular: Q' = Q S^-T learns S^-1 P S^-T, step by step."""
    group = Triangular()
    Q, (T,) = learned(group, n, seed=seed), learned(group, n, seed=seed + 100)
    other = (Q[0] @ T,)  # T = S^-T, so h' = S^T h = T^-1 h and v' = S^-1 v = T^T v
    for t in range(5):
        v, h = normal(2, n, 1, seed=seed + t)
        Q = group.update(Q, v, h, lr=0.1)
        other = group.update(other, T.T @ v, torch.linalg.solve(T, h), lr=0.1)
    torch.testing.assert_close(other[0], Q[0] @ T, rtol=1e-6, atol=1e-8)


@EVERY_GROUP
@pytest.mark.parametrize("lr", [0.01, 0.5, 0.99, 0.999])
def test_never_leaves_the_group(group, lr):
    Q = group.init(shape_of(group, 6), batch=(40,))
    for t in range(300):
        v, h = normal(2, 40, 6, 1, seed=t, dtype=torch.float32)
        Q = group.update(Q, v, h * 10.0 ** (t % 7 - 3), lr=lr)
        for diagonal in diagonals(group, Q):
            assert (diagonal > 0).all()
            assert diagonal.isfinite().all()


@EVERY_GROUP
@pytest.mark.parametrize("n", [2, 20, 100])
def test_inverses_stay_accurate_for_small_steps(group, n):
    Q = group.init(shape_of(group, n), dtype=torch.float32)
    for t in range(400):
        v, h = normal(2, n, 1, seed=t, dtype=torch.float32)
        Q = group.update(Q, v, h, lr=0.1)
    x = normal(n, 1, seed=0, dtype=torch.float32)
    error = (group.apply(Q, group.solve(Q, x)) - x).norm() / x.norm()
    assert error < 1e-4


@pytest.mark.parametrize("group", LONG, ids=repr)
@pytest.mark.slow
def test_hundred_thousand_noisy_steps(group):
    """Gradients from 1e-20 to 1e15 in float32: after 100,000 steps Q is positive, finite, and P H near the identity."""
    scales = 10.0 ** torch.arange(-20, 16, 5, dtype=torch.float64)
    n, source = 3, generator(0)
    curvature = (scales[:, None] * torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)).float()
    Q = group.init(shape_of(group, n), batch=(len(scales),))
    for _ in range(100):
        v = torch.randn(1000, len(scales), n, 1, generator=source)
        noise = torch.randn(1000, len(scales), n, 1, generator=source)
        h = curvature[:, :, None] * v + 0.1 * curvature[:, -1:, None] * noise
        for v_one, h_one in zip(v, h, strict=True):
            Q = group.update(Q, v_one, h_one, lr=0.01)
    for diagonal in diagonals(group, Q):
        assert (diagonal > 0).all()
        assert diagonal.isfinite().all()
    whitened = group.apply(Q, curvature.diag_embed().float())
    whitened = group.apply_t(Q, whitened).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(whitened, torch.ones_like(whitened), rtol=0.25, atol=0)


@EVERY_GROUP
@pytest.mark.parametrize("n", [0, 1, 3, 130])
def test_no_host_synchronisation_and_no_second_device(group, n):
    """On the meta device a read of a value, a branch on one, or a tensor made elsewhere raises."""
    Q = group.init(shape_of(group, n), batch=(2,), device="meta")
    v = torch.empty(2, n, 1, device="meta")
    Q = group.update(Q, v, v, lr=torch.tensor(0.1, device="meta"))
    assert group.precondition(Q, v).device.type == "meta"
    assert group.magnitude(group.scale(Q, torch.ones(2, device="meta"))).device.type == "meta"
    assert all(leaf.device.type == "meta" and leaf.dtype == torch.float32 for leaf in leaves(Q))


@EVERY_GROUP
def test_step_size_of_each_member(group):
    """A tensor lr may hold one step size for each member."""
    Q = learned(group, 3, batch=(2,))
    v, h = normal(2, 2, 3, 1, seed=5)
    mixed = group.update(Q, v, h, lr=torch.tensor([0.1, 0.2], dtype=torch.float64))
    for i, lr in enumerate((0.1, 0.2)):
        alone = group.update(Q, v, h, lr=lr)
        torch.testing.assert_close(group.matrix(mixed)[i], group.matrix(alone)[i])


@EVERY_GROUP
@pytest.mark.parametrize("lr", [0, 1, -0.1, 1.5, float("nan"), float("inf")])
def test_step_sizes_out_of_range_are_refused(group, lr):
    Q = group.init(shape_of(group, 2))
    with pytest.raises(ValueError, match=r"\(0, 1\)"):
        group.update(Q, torch.ones(2, 1), torch.ones(2, 1), lr=lr)


@EVERY_GROUP
def test_scale_and_magnitude(group):
    Q = learned(group, 4, batch=(3,))
    c = torch.tensor([0.5, 1.0, 8.0], dtype=torch.float64)
    scaled = group.scale(Q, c)
    assert torch.equal(group.matrix(scaled), c[:, None, None] * group.matrix(Q))
    assert torch.equal(group.magnitude(scaled), c * group.magnitude(Q))


@EVERY_GROUP
def test_a_group_is_a_value(group):
    assert dataclasses.is_dataclass(group)
    again = eval(repr(group), {type(member).__name__: type(member) for member in GROUPS})
    assert again == group
    assert hash(again) == hash(group)
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.new_field = 1


@few
@given(n=st.sampled_from([4, 63, 64, 65, 129, 200]), k=st.sampled_from([1, 2, 7]), batch=BATCHES, seed=SEEDS)
def test_quick_triangular_step_equals_the_protocols(n, k, batch, seed):
    group = Triangular()
    Q = learned(group, n, batch, seed)
    a, b = normal(2, *batch, n, k, seed=seed)
    quick = group.relative_step(Q, a, b, 0.1)
    plain = Group.relative_step(group, Q, a, b, 0.1)
    torch.testing.assert_close(quick, plain, rtol=1e-10, atol=1e-12)
