"""Kronecker products of any groups: orders 1 to 5, nested, with sizes 0 and 1, against the dense matrix."""

import copy
import dataclasses
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from expressions import assert_acts_as_its_matrix, learned, normal, same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor

from psgd_lit.blocks import leaves
from psgd_lit.buckets import map_leaves
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.kron import (
    Kron,
    act_along,
    kronecker_product,
    levelling_shifts,
    power_of_two,
    unfold,
)
from psgd_lit.groups.protocol import Group, State
from psgd_lit.groups.triangular import Triangular

T, D = Triangular(), Diagonal()
LARGEST = 72
BATCHES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
COLUMNS = st.sampled_from([0, 1, 2, 5])
DTYPES = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 2**20)
some = settings(max_examples=examples(60), deadline=None, derandomize=True)
few = settings(max_examples=examples(25), deadline=None, derandomize=True)


@st.composite
def members(draw: st.DrawFn, order: int, smallest: int) -> tuple[Group, Any]:
    """A group over that many dimensions, and a shape for it."""
    if order == 1 and draw(st.booleans()):
        return draw(st.sampled_from([T, D])), draw(st.integers(smallest, 4))
    if order == 1:
        group, shape = draw(members(1, smallest))
        return Kron(group), (shape,)
    cuts = draw(st.lists(st.integers(1, order - 1), min_size=1, unique=True).map(sorted))
    orders = [end - start for start, end in itertools.pairwise([0, *cuts, order])]
    groups, shapes = zip(*(draw(members(o, smallest)) for o in orders), strict=True)
    return Kron(*groups), shapes


@st.composite
def krons(draw: st.DrawFn, smallest: int = 0) -> tuple[Kron, Any]:
    """A Kronecker product of order 1 to 5, perhaps nested, and a shape of at most LARGEST entries."""
    group, shape = draw(members(draw(st.integers(1, 5)), smallest))
    assume(math.prod(flat(shape)) <= LARGEST)
    return (group, shape) if isinstance(group, Kron) else (Kron(group), (shape,))


def flat(shape: Any) -> list[int]:
    """The dimensions of a nested shape, in order."""
    return [shape] if isinstance(shape, int) else [size for entry in shape for size in flat(entry)]


def elementary(group: Group) -> list[Group]:
    """The factors of a nested product that are no products, in order."""
    return [leaf for f in group.factors for leaf in elementary(f)] if isinstance(group, Kron) else [group]


def states(group: Group, Q: State) -> list[State]:
    """The states of the elementary factors, in order."""
    if not isinstance(group, Kron):
        return [Q]
    return [state for f, q in zip(group.factors, Q, strict=True) for state in states(f, q)]


def exponents(group: Kron, Q: State) -> Tensor:
    """The binary exponents of the factors' magnitudes, shape (d, *batch)."""
    return torch.stack([torch.frexp(f.magnitude(q)).exponent for f, q in zip(group.factors, Q, strict=True)])


def is_level(group: Group, Q: State) -> bool:
    """True if the exponents agree within one, in every product of the nest."""
    if not isinstance(group, Kron):
        return True
    here = exponents(group, Q)
    inside = all(is_level(f, q) for f, q in zip(group.factors, Q, strict=True))
    return inside and bool((here.amax(0) - here.amin(0) <= 1).all())


def unbalance(group: Group, Q: State, exponent: int, seed: int) -> State:
    """Move scale at random, by at most 2^exponent, between the factors of every product of the nest."""
    if not isinstance(group, Kron):
        return Q
    d = len(group.factors)
    source = torch.Generator().manual_seed(seed)
    moved = torch.randint(-exponent, exponent + 1, (d,), generator=source)
    moved[-1] -= moved.sum()
    parts = []
    for f, q, e in zip(group.factors, Q, moved.tolist(), strict=True):
        c = torch.full_like(f.magnitude(q), 2.0**e)
        parts.append(unbalance(f, f.scale(q, c), exponent, seed + 1))
    return tuple(parts)


@some
@given(case=krons(), batch=BATCHES, k=COLUMNS, seed=SEEDS, dtype=DTYPES)
def test_actions_equal_the_dense_matrix(case, batch, k, seed, dtype):
    group, shape = case
    Q, n = learned(group, shape, batch, seed, dtype), math.prod(flat(shape))
    dense, x = group.matrix(Q), normal(*batch, n, k, seed=seed, dtype=dtype)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    assert group.size(Q) == n
    assert dense.shape == (*batch, n, n)
    assert all(leaf.dtype == dtype for leaf in leaves(Q))
    assert_acts_as_its_matrix(group, Q, x, **close)


@some
@given(case=krons(), batch=BATCHES, seed=SEEDS)
def test_matrix_is_the_product_of_the_elementary_matrices(case, batch, seed):
    group, shape = case
    Q = learned(group, shape, batch, seed)
    parts = [f.matrix(q) for f, q in zip(elementary(group), states(group, Q), strict=True)]
    dense = group.matrix(Q)
    for member in itertools.product(*map(range, batch)):
        expected = torch.ones(1, 1, dtype=torch.float64)
        for part in parts:
            expected = torch.kron(expected, part[member])
        torch.testing.assert_close(dense[member], expected, rtol=1e-12, atol=1e-12)


@some
@given(case=krons(), batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_steps_of_the_factors_equal_slope_descent_and_move(case, batch, k, seed):
    group, shape = case
    Q = learned(group, shape, batch, seed)
    a, b = normal(2, *batch, group.size(Q), k, seed=seed)
    none = torch.zeros(*batch, group.maxima, dtype=a.dtype)
    descent, maxima = group.descent(group.half_gradient(Q, a, b), 0.1, none)
    after, largest = group.step_of_sums(Q, a + b, a - b, 0.1, none)
    torch.testing.assert_close(leaves(after), leaves(group.move(Q, descent)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(largest, maxima, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@some
@given(case=krons(smallest=1), batch=st.sampled_from([(), (3,)]), seed=SEEDS)
def test_each_elementary_factor_has_a_maximum_of_its_own(case, batch, seed):
    group, shape = case
    Q = learned(group, shape, batch, seed)
    a, b = normal(2, *batch, group.size(Q), 1, seed=seed)
    descent, _ = group.descent(group.half_gradient(Q, a, b), 0.25, torch.zeros(*batch, group.maxima, dtype=a.dtype))
    for part in states(group, descent):
        (e,) = part
        torch.testing.assert_close(e.abs().flatten(len(batch)).amax(-1), torch.full(batch, 0.25, dtype=torch.float64))


@few
@given(M=st.integers(1, 5), N=st.integers(1, 5), k=st.integers(1, 3), seed=SEEDS)
def test_step_on_a_matrix_equals_appendix_a(M, N, k, seed):
    """The rule as the paper writes it, with its B and its order of factors, column by column."""
    group = Kron(T, T)
    Q = (Q1,), (Q2,) = learned(group, (M, N), seed=seed)
    G, V = normal(2, M, N, k, seed=seed)
    A = torch.einsum("ij,jlk,ml->kim", Q1, G, Q2)
    B = torch.linalg.inv(Q2).mT @ V.permute(2, 1, 0) @ torch.linalg.inv(Q1)
    expected = []
    for q, half in ((Q1, A @ A.mT - B.mT @ B), (Q2, A.mT @ A - B @ B.mT)):
        E = half.sum(0).triu()
        expected.append(q - 0.1 * E / E.abs().max() @ q)
    columns_first = kronecker_product(expected[1], expected[0])
    after = group.matrix(group.update(Q, V.reshape(M * N, k), G.reshape(M * N, k), lr=0.1))
    rows_to_columns = torch.arange(M * N).reshape(M, N).T.flatten()
    torch.testing.assert_close(after[rows_to_columns][:, rows_to_columns], columns_first, rtol=1e-9, atol=1e-10)


@few
@given(case=krons(smallest=1), k=st.sampled_from([1, 3]), seed=SEEDS)
def test_a_nested_product_learns_what_a_flat_one_does(case, k, seed):
    nested, shape = case
    plain, sizes = Kron(*elementary(nested)), flat(shape)
    Q, Q_plain = nested.init(shape, dtype=torch.float64), plain.init(sizes, dtype=torch.float64)
    for t in range(10):
        v, h = normal(2, math.prod(sizes), k, seed=seed + t)
        Q, Q_plain = nested.update(Q, v, h, lr=0.1), plain.update(Q_plain, v, h, lr=0.1)
    torch.testing.assert_close(nested.matrix(Q), plain.matrix(Q_plain), rtol=1e-8, atol=1e-9)


@few
@given(n=st.integers(0, 70), batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_a_product_of_one_factor_is_that_factor(n, batch, k, seed):
    for factor in (T, D):
        Q, Q_alone = learned(Kron(factor), (n,), batch, seed), learned(factor, n, batch, seed)
        v, h = normal(2, *batch, n, k, seed=seed)
        assert same_bits(Kron(factor).update(Q, v, h, lr=0.1), (factor.update(Q_alone, v, h, lr=0.1),))


@few
@given(case=krons(), batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_batched_equals_one_by_one(case, batch, k, seed):
    group, shape = case
    Q = learned(group, shape, batch, seed)
    v, h = normal(2, *batch, group.size(Q), k, seed=seed)
    after = group.matrix(group.update(Q, v, h, lr=0.1))
    for member in itertools.product(*map(range, batch)):
        alone = group.update(map_leaves(lambda leaf, at=member: leaf[at], Q), v[member], h[member], lr=0.1)
        torch.testing.assert_close(group.matrix(alone), after[member], rtol=1e-10, atol=1e-10)


def test_numel_is_table_1():
    assert Kron(T, T).numel((7, 5)) == (7**2 + 5**2 + 7 + 5) // 2
    assert Kron(T, D, Kron(T, D)).numel((3, 4, (2, 5))) == 6 + 4 + 3 + 5


@few
@given(
    case=krons(smallest=1),
    bad=st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf]),
    seed=SEEDS,
    dtype=DTYPES,
)
def test_zero_and_bad_pairs_leave_every_bit(case, bad, seed, dtype):
    group, shape = case
    Q = learned(group, shape, (2,), seed, dtype)
    Q = unbalance(group, Q, 6, seed)  # a member that isn't live isn't balanced either
    v, h = normal(2, 2, group.size(Q), 1, seed=seed, dtype=dtype)
    h[1] = h[1] * 0 if bad == 0 else bad
    v[1] = v[1] * 0 if bad == 0 else v[1]
    after = group.update(Q, v, h, lr=0.1)
    for before, now in zip(leaves(Q), leaves(after), strict=True):
        assert torch.equal(before[1], now[1])
    assert not same_bits(map_leaves(lambda leaf: leaf[0], Q), map_leaves(lambda leaf: leaf[0], after))


@some
@given(case=krons(smallest=1), exponent=st.sampled_from([0, 1, 5, 20]), seed=SEEDS, dtype=DTYPES)
def test_balance_levels_once_and_changes_no_bit(case, exponent, seed, dtype):
    group, shape = case
    level = learned(group, shape, (2,), seed, dtype)
    Q = unbalance(group, level, exponent, seed)
    assert torch.equal(group.matrix(Q), group.matrix(level))
    balanced = group.balance(Q, torch.tensor([True, False]))
    first, second = (map_leaves(lambda leaf, at=i: leaf[at], balanced) for i in (0, 1))
    assert is_level(group, first)
    assert same_bits(second, map_leaves(lambda leaf: leaf[1], Q))
    assert same_bits(group.balance(balanced, torch.tensor([True, False])), balanced)
    assert torch.equal(group.matrix(balanced), group.matrix(Q))
    v, h = normal(2, 2, group.size(Q), 1, seed=seed, dtype=dtype)
    after = group.update(Q, v, h, lr=0.1)
    assert is_level(group, after)
    assert torch.equal(group.matrix(after), group.matrix(group.update(balanced, v, h, lr=0.1)))
    x = normal(2, group.size(Q), 1, seed=seed, dtype=dtype)
    assert torch.equal(group.precondition(Q, x), group.precondition(balanced, x))


@pytest.mark.parametrize(
    ("dtype", "powers"),
    [
        (torch.float32, (125, -125)),
        (torch.float32, (-120, 120)),
        (torch.float32, (125, -125, 0)),
        (torch.float32, (120, 120, -125, -115)),
        (torch.float64, (1000, -1000)),
        (torch.float64, (-900, 500, 400)),
    ],
    ids=str,
)
def test_balance_far_out(dtype, powers):
    """Shifts beyond the exponents of float32, in float64, and shifts that are no power of two of the dtype.

    The factors are diagonal, since small entries beside the diagonal would have underflowed before.
    """
    group = Kron(*[D] * len(powers))
    Q = learned(group, [2] * len(powers), dtype=dtype)
    level = group.matrix(Q)
    far = tuple(D.scale(q, torch.tensor(2.0**p, dtype=dtype)) for q, p in zip(Q, powers, strict=True))
    balanced = group.balance(far, torch.tensor(True))
    assert is_level(group, balanced)
    assert torch.equal(group.matrix(balanced), level * 2.0 ** sum(powers))


@given(st.lists(st.integers(-1100, 1100), min_size=1, max_size=6))
def test_levelling_shifts(numbers):
    before = torch.tensor(numbers, dtype=torch.int32)
    after = before + levelling_shifts(before)
    assert after.sum() == before.sum()
    assert after.amax() - after.amin() <= 1
    assert not levelling_shifts(after).any()


@pytest.mark.parametrize(
    ("dtype", "lowest", "highest"),
    [
        (torch.float64, -1074, 1023),
        (torch.float32, -149, 127),
        (torch.bfloat16, -126, 127),
        (torch.float16, -14, 15),
    ],
)
def test_powers_of_two_are_exact(dtype, lowest, highest):
    powers = power_of_two(torch.arange(lowest, highest + 1), dtype)
    assert powers.dtype == dtype
    assert powers.tolist() == [2.0**e for e in range(lowest, highest + 1)]


@few
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    k=COLUMNS,
    batch=BATCHES,
    seed=SEEDS,
)
def test_unfolding_and_back(sizes, k, batch, seed):
    n = math.prod(sizes)
    x = normal(*batch, n, k, seed=seed)
    for i, size in enumerate(sizes):
        columns = unfold(x, sizes, i)
        assert columns.shape == (
            *batch,
            size,
            n // size * k if size else math.prod(sizes[:i] + sizes[i + 1 :]) * k,
        )
        gram = columns @ columns.mT
        left, right = math.prod(sizes[:i]), math.prod(sizes[i + 1 :]) * k
        lines = x.reshape(*batch, left, size, right)
        torch.testing.assert_close(gram, torch.einsum("...lir,...ljr->...ij", lines, lines), rtol=1e-12, atol=1e-12)
        assert torch.equal(act_along(lambda y: 2 * y, x, sizes, i), 2 * x)


@pytest.mark.parametrize(
    ("group", "shape"),
    [(Kron(T, T), (3, 2)), (Kron(T, D, T), (2, 3, 1)), (Kron(Kron(T, T), D), ((1, 3), 2))],
    ids=repr,
)
def test_never_leaves_the_group(group, shape):
    lr = torch.tensor([0.01, 0.5, 0.999]).repeat_interleave(40)
    Q = group.init(shape, batch=(120,))
    for t in range(300):
        v, h = normal(2, 120, 6, 1, seed=t, dtype=torch.float32)
        Q = group.update(Q, v, h * 10.0 ** (t % 7 - 3), lr=lr)
        diagonal = group.matrix(Q).diagonal(dim1=-2, dim2=-1)
        assert (diagonal > 0).all()
        assert diagonal.isfinite().all()
    assert is_level(group, Q)


@pytest.mark.parametrize(
    ("group", "shape"),
    [
        (Kron(T, T), (2, 3)),
        (Kron(T, D), (3, 2)),
        (Kron(T, D, T), (2, 2, 2)),
        (Kron(T, Kron(T, D)), (2, (1, 3))),
    ],
    ids=repr,
)
def test_long_runs_stay_balanced_and_finite(group, shape):
    """Gradients of 1e-20 and 1e15 in float32, four times 500 bold steps, from an identity that is far from both."""
    scales = torch.tensor([1e-20, 1.0, 1e15]).repeat(4)
    n, source = math.prod(flat(shape)), torch.Generator().manual_seed(0)
    curvature = scales[:, None, None] * torch.linspace(0.5, 2, n)[:, None]
    Q = group.init(shape, batch=(12,))
    for _ in range(500):
        v = torch.randn(12, n, 1, generator=source)
        Q = group.update(Q, v, curvature * v, lr=0.2)
        assert is_level(group, Q)
    assert all(leaf.isfinite().all() for leaf in leaves(Q))
    whitened = group.apply_t(Q, group.apply(Q, torch.diag_embed(curvature[..., 0])))
    eigenvalues = torch.linalg.eigvals(whitened.double()).abs()
    assert (eigenvalues > 0.05).all()
    assert (eigenvalues < 20).all()


@pytest.mark.slow
def test_without_balancing_the_factors_drift_apart():
    """What balancing is for, and that it is needed: the same products, in factors that part without end."""

    class Unbalanced(Kron):
        def balance(self, Q: State, active: Tensor) -> State:
            return Q

    group, drifting = Kron(T, T), Unbalanced(T, T)
    Q, Q_drifting = group.init((2, 4), (20,)), drifting.init((2, 4), (20,))
    curvature, source = torch.linspace(0.5, 2, 8)[:, None], torch.Generator().manual_seed(0)
    for _ in range(1000):
        v = torch.randn(20, 8, 1, generator=source)
        Q = group.update(Q, v, curvature * v, lr=0.5)
        Q_drifting = drifting.update(Q_drifting, v, curvature * v, lr=0.5)
    assert torch.equal(group.matrix(Q), drifting.matrix(Q_drifting))
    apart = exponents(drifting, Q_drifting)
    assert (apart[1] - apart[0]).double().mean() > 8


def test_learns_the_product_of_the_inverse_magnitudes():
    """Order 3, exact products with an indefinite H that is a Kronecker product: P H has eigenvalues +1 and -1."""
    spectra = [
        torch.tensor([2.0, -0.5]),
        torch.tensor([1.0, 3.0, -0.3]),
        torch.tensor([0.7, -4.0]),
    ]
    parts = []
    for seed, spectrum in enumerate(spectra):
        axes = torch.linalg.qr(normal(len(spectrum), len(spectrum), seed=seed)).Q
        parts.append(axes @ torch.diag(spectrum.double()) @ axes.mT)
    H = kronecker_product(kronecker_product(parts[0], parts[1]), parts[2])
    group, n = Kron(T, T, T), len(H)
    Q = group.init((2, 3, 2), dtype=torch.float64)
    for t in range(1000):
        v = normal(n, 3, seed=t)
        Q = group.update(Q, v, H @ v, lr=0.1 / (1 + t / 100))
    eigenvalues = torch.linalg.eigvals(group.precondition(Q, H)).real
    torch.testing.assert_close(eigenvalues.abs(), torch.ones(n, dtype=torch.float64), rtol=0, atol=0.05)
    assert (eigenvalues > 0).sum() == (torch.linalg.eigvalsh(H) > 0).sum()


def test_step_size_of_each_member():
    group = Kron(T, Kron(D, T))
    Q = learned(group, (2, (3, 2)), batch=(2,))
    v, h = normal(2, 2, 12, 1, seed=5)
    mixed = group.matrix(group.update(Q, v, h, lr=torch.tensor([0.1, 0.2], dtype=torch.float64)))
    for i, lr in enumerate((0.1, 0.2)):
        torch.testing.assert_close(mixed[i], group.matrix(group.update(Q, v, h, lr=lr))[i])


@pytest.mark.parametrize("shape", [3, (3,), (3, 4, 5), (), None], ids=str)
def test_a_shape_that_does_not_fit_is_refused(shape):
    group = Kron(T, D)
    for use in (group.init, group.numel):
        with pytest.raises(ValueError, match="one entry for each") as caught:
            use(shape)
        assert str(shape) in str(caught.value)


def test_a_product_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one part"):
        Kron()


@given(krons())
def test_a_group_is_a_value(case):
    group, _ = case
    again = eval(repr(group), {"Kron": Kron, "Triangular": Triangular, "Diagonal": Diagonal})
    for other in (again, copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert other == group
        assert hash(other) == hash(group)
    assert group != Kron(group)
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.factors = ()
