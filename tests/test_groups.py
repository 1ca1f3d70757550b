"""Properties that every group keeps, for all shapes, batches and dtypes, and for random nestings.

One list of properties, in the order and the words of the design, and one list of families that each is tried on:
the groups of `GROUPS` in many sizes, and three families of random expressions.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expressions import (
    ELEMENTARY,
    Case,
    PlainIndexing,
    assert_acts_as_its_matrix,
    diagonals,
    expressions,
    learned,
    moves,
    normal,
    overlap,
    plain_step,
    same_bits,
    scale_columns,
)
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from quick import examples, first
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from psgd_lit.blocks import leaves
from psgd_lit.buckets import map_leaves
from psgd_lit.groups.bordered import Bordered
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.direct_sum import DirectSum
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.protocol import Group, State, largest_entry
from psgd_lit.groups.sparse_lu import SparseLU
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

SIZES = [0, 1, 2, 3, 7, 64, 65, 130]
BATCHES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
COLUMNS = st.sampled_from([0, 1, 2, 5])
DTYPES = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 2**20)
STEPS = st.one_of(st.floats(1e-6, 0.9999), st.sampled_from([0.01, 0.1, 0.5, 0.99, 0.999, 0.9999]))
RUNS = st.tuples(STEPS, st.integers(-20, 15).map(float))
"""A step size and a decimal exponent of the gradients."""
few = settings(max_examples=examples(12), deadline=None, derandomize=True)
fewer = settings(max_examples=examples(5), deadline=None, derandomize=True)


def shape_of(group: Group, n: int) -> Any:
    """A shape of size n for a group: an int, or n divided over the factors, or cut into the parts."""
    if not isinstance(group, Kron):
        return group.shape_for((n,))
    sizes = []
    for _ in group.factors[1:]:
        sizes.append(max((d for d in range(1, math.isqrt(n) + 1) if n % d == 0), default=2))
        n //= sizes[-1]
    return tuple(shape_of(factor, m) for factor, m in zip(group.factors, [*sizes, n], strict=True))


Family = Callable[..., st.SearchStrategy[Case]]
"""Makes a strategy for a group and a shape, from the smallest size and, for listed groups, the largest."""


def listed(group: Group) -> Family:
    """One group in many sizes."""

    def family(smallest: int = 0, largest: int = 130) -> st.SearchStrategy[Case]:
        sizes = st.sampled_from([n for n in SIZES if smallest <= n <= largest])
        return sizes.map(lambda n: (group, shape_of(group, n)))

    return family


def random(top: Any) -> Family:
    """Random expressions with one outermost combinator, or any."""
    return lambda smallest=0, largest=130: expressions(smallest, top)


FAMILIES = {repr(group): listed(group) for group in GROUPS}
FAMILIES |= {
    "random": random(None),
    "random Kron": random(Kron),
    "random DirectSum": random(DirectSum),
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
EVERY_GROUP = pytest.mark.parametrize("group", GROUPS, ids=repr)


def pair_criterion(Q: Tensor, v: Tensor, h: Tensor) -> Tensor:
    """The criterion of a dense Q on the pairs, summed: the oracle that knows no group."""
    return (Q @ h).square().sum() + torch.linalg.solve(Q.mT, v).square().sum()


@given(case=expressions())
@settings(max_examples=examples(200), deadline=None, derandomize=True)
def test_expressions_stay_within_their_bounds(case):
    group, shape = case

    def depth(group: Group) -> int:
        return 1 + max(map(depth, group.parts)) if isinstance(group, Kron | DirectSum) else 0

    assert depth(group) <= 3
    assert group.size(group.init(shape, device="meta")) <= 36


# Actions ---------------------------------------------------------------------------------------------------------


@EVERY_FAMILY
@few
@given(data=st.data(), batch=BATCHES, k=COLUMNS, seed=SEEDS, dtype=DTYPES)
def test_action_and_inverse_equal_the_dense_oracle(family, data, batch, k, seed, dtype):
    group, shape = data.draw(family())
    Q = learned(group, shape, batch, seed, dtype)
    n, dense = group.size(Q), group.matrix(Q)
    x = normal(*batch, n, k, seed=seed, dtype=dtype)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    assert_acts_as_its_matrix(group, Q, x, **close)
    torch.testing.assert_close(group.apply(Q, group.solve(Q, x)), x, **close)
    torch.testing.assert_close(group.apply_t(Q, group.solve_t(Q, x)), x, **close)
    assert dense.shape == (*batch, n, n)
    assert {(leaf.dtype, leaf.device.type) for leaf in leaves(Q)} == {(dtype, "cpu")}


@EVERY_FAMILY
@few
@given(data=st.data(), batch=BATCHES, seed=SEEDS)
def test_preconditioner_is_symmetric_positive_definite(family, data, batch, seed):
    group, shape = data.draw(family())
    Q = learned(group, shape, batch, seed)
    P = group.precondition(Q, torch.eye(group.size(Q), dtype=torch.float64).expand_as(group.matrix(Q)))
    torch.testing.assert_close(P, P.mT, rtol=1e-9, atol=1e-9)
    assert (torch.linalg.eigvalsh((P + P.mT) / 2) > 0).all()


@EVERY_FAMILY
@few
@given(data=st.data(), batch=BATCHES, seed=SEEDS)
def test_starts_at_the_identity(family, data, batch, seed):
    group, shape = data.draw(family())
    Q = group.init(shape, batch, dtype=torch.float64)
    n = group.size(Q)
    assert torch.equal(group.matrix(Q), torch.eye(n, dtype=torch.float64).expand(*batch, n, n))
    storages = [leaf.untyped_storage().data_ptr() for leaf in leaves(Q) if leaf.numel()]
    assert len(set(storages)) == len(storages)


@EVERY_FAMILY
@few
@given(data=st.data(), seed=SEEDS)
def test_numel_counts_the_entries_that_move(family, data, seed):
    """As many entries of the state differ from zero as Table I counts."""
    group, shape = data.draw(family(smallest=1))
    assert sum(int(leaf.count_nonzero()) for leaf in leaves(learned(group, shape, seed=seed))) == group.numel(shape)


# Slope and descent -----------------------------------------------------------------------------------------------


@EVERY_FAMILY
@few
@given(data=st.data(), k=st.sampled_from([1, 2, 5]), seed=SEEDS)
def test_it_is_half_the_derivative_along_move(family, data, k, seed):
    group, shape = data.draw(family(largest=7))
    Q = learned(group, shape, seed=seed)
    v, h = normal(2, group.size(Q), k, seed=seed)
    half = group.half_gradient(Q, group.apply(Q, h), group.solve_t(Q, v))
    at_zero = map_leaves(lambda e: torch.zeros_like(e, requires_grad=True), half)
    value = pair_criterion(group.matrix(group.move(Q, at_zero)), v, h)
    derivatives = torch.autograd.grad(value, leaves(at_zero), allow_unused=True, materialize_grads=True)
    for derivative, e in zip(derivatives, leaves(half), strict=True):
        torch.testing.assert_close(derivative, 2 * e, rtol=1e-7, atol=1e-7)


@EVERY_FAMILY
@few
@given(data=st.data(), seed=SEEDS)
def test_descent(family, data, seed):
    """The derivative in lr at 0 is -2 sum |E|^2 / max |E|, and the criterion falls on its own pair at lr 0.01.

    It falls unless one step leads past the minimum for this pair: where it is very near, or many moves meet.
    """
    group, shape = data.draw(family(smallest=1))
    Q = learned(group, shape, seed=seed)
    v, h = normal(2, group.size(Q), 1, seed=seed)
    a, b = group.apply(Q, h), group.solve_t(Q, v)
    rate = torch.zeros((), dtype=torch.float64)
    for move in moves(group, group.half_gradient(Q, a, b)):
        entries = torch.cat([e.flatten() for e in leaves(move)])
        if len(entries):
            rate -= 2 * entries.square().sum() / entries.abs().max()

    def value(lr: float) -> Tensor:
        return pair_criterion(
            group.matrix(group.step_of_sums(Q, a + b, a - b, lr, torch.zeros(group.maxima))[0]),
            v,
            h,
        )

    small = 1e-6
    measured = (value(small) - value(-small)) / (2 * small)
    torch.testing.assert_close(measured, rate, rtol=1e-5, atol=1e-6)
    assume(-rate > 0.2 * overlap(group) * value(0))
    assert value(0.01) < value(0)


def test_a_step_of_a_tenth_may_climb_in_many_dimensions():
    """The max norm hides the dimension: for n = 500 a pair's own criterion rises at lr 0.1, and falls at 0.01."""
    group, n = Triangular(), 500
    Q = group.init(n, dtype=torch.float64)
    climbs = 0
    for seed in range(10):
        v, h = normal(2, n, 1, seed=seed)
        values = [pair_criterion(group.matrix(group.update(Q, v, h, lr)), v, h) for lr in (0.01, 0.1)]
        here = pair_criterion(group.matrix(Q), v, h)
        assert values[0] < here
        climbs += int(values[1] > here)
    assert climbs > 0


# Positivity and accuracy -----------------------------------------------------------------------------------------


@EVERY_FAMILY
@fewer
@given(
    data=st.data(),
    runs=st.lists(RUNS, min_size=8, max_size=8),
    decay=st.sampled_from([0.0, 0.99]),
    seed=SEEDS,
)
def test_diagonals_stay_positive_and_finite(family, data, runs, decay, seed):
    """For every step size in (0, 1) and gradients of any scale, in float32.

    Steps nearer to 1 than the spacing of float32 are 1, and no test; at 0.9999 a few steps don't underflow.
    """
    group, shape = data.draw(family(smallest=1, largest=7))
    lr, exponents = torch.tensor(runs).T
    Q, peaks = group.init(shape, batch=(8,)), torch.zeros(8, group.maxima)
    v, h = normal(2, 20, 8, group.size(Q), 1, seed=seed, dtype=torch.float32)
    for probe, product in zip(v, h * 10.0 ** exponents[:, None, None], strict=True):
        Q, peaks = group.update_with_peaks(Q, peaks, probe, product, lr, decay)
        for diagonal in diagonals(group, Q):
            assert (diagonal > 0).all()
            assert diagonal.isfinite().all()


@EVERY_FAMILY
@fewer
@given(data=st.data(), lr=st.floats(1e-3, 0.1), seed=SEEDS)
def test_inverses_are_accurate_for_small_steps(family, data, lr, seed):
    group, shape = data.draw(family(smallest=1))
    Q = group.init(shape, (2,), dtype=torch.float32)
    v, h = normal(2, 30, 2, group.size(Q), 1, seed=seed, dtype=torch.float32)
    for probe, product in zip(v, h, strict=True):
        Q = group.update(Q, probe, product, lr)
    x = normal(2, group.size(Q), 1, seed=seed, dtype=torch.float32)
    for there, back in ((group.apply, group.solve), (group.apply_t, group.solve_t)):
        assert ((there(Q, back(Q, x)) - x).norm(dim=1) < 1e-4 * x.norm(dim=1)).all()


# Equivariance ----------------------------------------------------------------------------------------------------


@EVERY_FAMILY
@few
@given(data=st.data(), exponents=st.lists(st.integers(-8, 8), min_size=1, max_size=5), seed=SEEDS)
def test_equivariant_bit_for_bit_under_powers_of_two(family, data, exponents, seed):
    """theta = S theta' with S^-T = T in the group: Q' = Q T, v' = T v, h' = T^-1 h; for sparse LU T is uniform."""
    group, shape = data.draw(family(smallest=1, largest=65))
    Q = learned(group, shape, seed=seed)
    other, t = scale_columns(group, Q, exponents)
    assert torch.equal(group.matrix(other), group.matrix(Q) * t)
    for s in range(3):
        v, h = normal(2, group.size(Q), 1, seed=seed + s)
        Q = group.update(Q, v, h, lr=0.1)
        other = group.update(other, t[:, None] * v, h / t[:, None], lr=0.1)
        assert torch.equal(group.matrix(other), group.matrix(Q) * t)


GROUPS_PROPER = tuple(group for group in ELEMENTARY if not isinstance(group, SparseLU))
"""Groups in the strict sense, products of whose members are members; and so are all expressions of them."""


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(case=expressions(1, choices=GROUPS_PROPER), seed=SEEDS)
def test_equivariant_under_the_group_itself(case, seed):
    """theta = S theta', with S^-T = T in the group: Q' = Q T learns S^-1 P S^-T, step by step."""
    group, shape = case
    Q, T = learned(group, shape, seed=seed), learned(group, shape, seed=seed + 100)
    identity = group.init(shape, dtype=torch.float64)
    other = group.move(T, map_leaves(torch.sub, Q, identity))  # (I + (Q - I)) T
    dense = group.matrix(T)
    torch.testing.assert_close(group.matrix(other), group.matrix(Q) @ dense, rtol=1e-9, atol=1e-9)
    for t in range(5):
        v, h = normal(2, group.size(Q), 1, seed=seed + t)
        Q = group.update(Q, v, h, lr=0.1)
        other = group.update(other, dense.mT @ v, torch.linalg.solve(dense, h), lr=0.1)
    torch.testing.assert_close(group.matrix(other), group.matrix(Q) @ dense, rtol=1e-6, atol=1e-7)


@EVERY_GROUP
def test_not_equivariant_under_rotations(group):
    """What is not promised: turned coordinates lead elsewhere, so that a change of this is noticed."""
    n, turn = 6, torch.linalg.qr(normal(6, 6, seed=0)).Q
    Q = R = group.init(shape_of(group, n), dtype=torch.float64)
    for t in range(5):
        v, h = normal(2, n, 1, seed=t)
        Q, R = group.update(Q, v, h, lr=0.1), group.update(R, turn @ v, turn @ h, lr=0.1)
    P, turned = (group.precondition(q, torch.eye(n, dtype=torch.float64)) for q in (Q, R))
    assert (turn @ P @ turn.T - turned).abs().max() > 1e-2


# Batches, dtypes, devices ----------------------------------------------------------------------------------------


@EVERY_FAMILY
@few
@given(data=st.data(), batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_batched_equals_one_by_one(family, data, batch, k, seed):
    group, shape = data.draw(family())
    Q = learned(group, shape, batch, seed)
    n = group.size(Q)
    v, h = normal(2, *batch, n, k, seed=seed)
    after = group.matrix(group.update(Q, v, h, lr=0.1))
    assert after.shape == (*batch, n, n)
    for member in itertools.product(*map(range, batch)):
        alone = group.update(
            map_leaves(lambda leaf, member=member: leaf[member], Q),
            v[member],
            h[member],
            lr=0.1,
        )
        torch.testing.assert_close(group.matrix(alone), after[member], rtol=1e-10, atol=1e-10)


@EVERY_FAMILY
@few
@given(data=st.data(), batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_what_is_preconditioned_may_be_written_over(family, data, batch, k, seed):
    """P g is a new tensor, so a step may be scaled in its place: neither the gradient nor the state changes."""
    group, shape = data.draw(family())
    Q = learned(group, shape, batch, seed)
    before = map_leaves(torch.clone, Q)
    g = normal(*batch, group.size(Q), k, seed=seed)
    kept = g.clone()
    for made in (group.precondition(Q, g), group.precondition_by(group.product(Q), g)):
        made.zero_()
        assert torch.equal(g, kept)
        assert same_bits(Q, before)


def use_everything(group: Group, shape: Any, k: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Every tensor that a group's methods return."""
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    Q = group.init(shape, (2,), **kind)
    x = torch.empty(2, group.size(Q), k, **kind)
    after = group.update(Q, x, x, lr=torch.tensor(0.1, **kind))
    after = group.update(after, x, x, lr=0.1)
    actions = [f(after, x) for f in (group.apply, group.apply_t, group.solve, group.solve_t, group.precondition)]
    scaled = group.scale(after, torch.ones(2, **kind))
    return [
        *leaves(after),
        *leaves(scaled),
        *actions,
        group.magnitude(scaled),
        group.matrix(after),
    ]


@EVERY_FAMILY
@fewer
@given(data=st.data(), k=COLUMNS, dtype=DTYPES)
def test_device_and_dtype_are_kept_and_no_value_is_read(family, data, k, dtype):
    """On the meta device a read of a value, a branch on one, or a tensor made elsewhere raises."""
    group, shape = data.draw(family())
    found = use_everything(group, shape, k, dtype, "meta")
    assert {(x.dtype, x.device.type) for x in found} == {(dtype, "meta")}


FAKE_CUDA = FakeTensorMode()


@EVERY_FAMILY
@settings(fewer, max_examples=2, phases=[Phase.generate])
@given(data=st.data())
def test_no_value_is_read_on_a_fake_gpu(family, data):
    """The same on tensors that say they are CUDA's, without gradients, where a machine has none."""
    group, shape = data.draw(family(largest=7))
    with FAKE_CUDA, PlainIndexing(), torch.no_grad():
        found = use_everything(group, shape, 1, torch.float32, "cuda")
    assert {(x.dtype, x.device.type) for x in found} == {(torch.float32, "cuda")}


class Branching(Diagonal):
    """Reads a value."""

    def solve(self, Q: State, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else super().solve(Q, x)


class Elsewhere(Diagonal):
    """Makes a tensor on the processor."""

    def half_gradient_of_sums(self, Q: State, s: Tensor, d: Tensor) -> State:
        return (super().half_gradient_of_sums(Q, s, d)[0] + torch.ones(s.shape[-2]),)


@pytest.mark.parametrize("wrong", [Branching(), Elsewhere()], ids=repr)
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_read_or_a_second_device_is_seen(wrong, device):
    """The test above can fail."""
    mode = FAKE_CUDA if device == "cuda" else nullcontext()
    with mode, PlainIndexing(), torch.no_grad():
        use_everything(Diagonal(), 3, 1, torch.float32, device)
        with pytest.raises((RuntimeError, DataDependentOutputException)):
            use_everything(wrong, 3, 1, torch.float32, device)


# Guards ----------------------------------------------------------------------------------------------------------


@EVERY_FAMILY
@few
@given(
    data=st.data(),
    bad=st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf]),
    seed=SEEDS,
    dtype=DTYPES,
)
def test_zero_and_bad_pairs_leave_every_bit(family, data, bad, seed, dtype):
    group, shape = data.draw(family(smallest=1))
    Q = learned(group, shape, (2,), seed, dtype)
    v, h = normal(2, 2, group.size(Q), 1, seed=seed + 50, dtype=dtype)
    h[1, -1] = bad
    if bad == 0:
        v[1] = h[1] = 0
    after = group.update(Q, v, h, lr=0.1)
    assert same_bits(map_leaves(lambda leaf: leaf[1], Q), map_leaves(lambda leaf: leaf[1], after))
    assert not torch.equal(group.matrix(Q)[0], group.matrix(after)[0])


@EVERY_FAMILY
@few
@given(data=st.data(), seed=SEEDS)
def test_peaks_divide_the_slopes_and_nothing_else(family, data, seed):
    """With peaks above all maxima each half is divided by its own peak; with none each by its own maximum."""
    group, shape = data.draw(family(smallest=1, largest=7))
    Q = learned(group, shape, seed=seed)
    v, h = normal(2, group.size(Q), 1, seed=seed + 50)
    a, b = group.apply(Q, h), group.solve_t(Q, v)
    halves = moves(group, group.half_gradient(Q, a, b))
    own = torch.stack([largest_entry(half, 0) for half in halves])
    least = own * torch.linspace(2, 3, len(own), dtype=own.dtype)
    for divisor, peaks in ((own, 0 * own), (least, least.sqrt())):
        steps, maxima = group.descent(group.half_gradient(Q, a, b), 0.1, peaks.square())
        torch.testing.assert_close(maxima, own)
        for step, half, d in zip(moves(group, steps), halves, divisor, strict=True):
            expected = [-0.1 * e / d if d else e for e in leaves(half)]
            torch.testing.assert_close(leaves(step), expected)
        after, _ = group.step_with_peaks(Q, peaks, a, b, 0.1, decay=1.0)
        torch.testing.assert_close(group.matrix(after), group.matrix(group.move(Q, steps)))


@EVERY_FAMILY
@few
@given(
    data=st.data(),
    exponent=st.integers(-60, 60),
    decay=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    seed=SEEDS,
)
def test_peaks_have_the_unit_of_a_and_b(family, data, exponent, decay, seed):
    """Pairs in other units, by a power of two, and the peaks with them: the same Q, bit for bit."""
    group, shape = data.draw(family(smallest=1, largest=7))
    Q = learned(group, shape, seed=seed, dtype=torch.float32)
    a, b = normal(2, group.size(Q), 1, seed=seed, dtype=torch.float32)
    peaks, unit = normal(group.maxima, seed=seed, dtype=torch.float32).abs(), 2.0**exponent
    one, after = group.step_with_peaks(Q, peaks, a, b, 0.1, decay)
    other, scaled = group.step_with_peaks(Q, peaks * unit, a * unit, b * unit, 0.1, decay)
    assert same_bits(one, other)
    assert torch.equal(after * unit, scaled)
    assert (after <= 10 * (decay**0.5 * peaks)).all() or decay == 0
    assert (after >= decay**0.5 * peaks).all()


@EVERY_FAMILY
@few
@given(data=st.data(), seed=SEEDS)
def test_a_bad_probe_or_an_overflowing_action_is_a_zero_pair_too(family, data, seed):
    group, shape = data.draw(family(smallest=1, largest=7))
    Q = learned(group, shape, seed=seed, dtype=torch.float32)
    v, h = normal(2, group.size(Q), 1, seed=seed, dtype=torch.float32)
    assert same_bits(Q, group.update(Q, v * torch.nan, h, lr=0.1))
    large = group.scale(Q, torch.tensor(1e10))
    assert same_bits(large, group.update(large, v, h.sign() * 1e37, lr=0.1))


@EVERY_FAMILY
@few
@given(data=st.data(), seed=SEEDS)
def test_equal_pairs_move_nothing(family, data, seed):
    """Where a = b the criterion is at its minimum for that pair, and rounding must not pass for a half gradient."""
    group, shape = data.draw(family(smallest=1))
    Q = group.init(shape)
    v = normal(group.size(Q), 1, seed=seed, dtype=torch.float32)
    assert same_bits(Q, group.update(Q, v, v, lr=0.9))


@EVERY_FAMILY
@few
@given(data=st.data(), exponent=st.integers(-60, 60), seed=SEEDS)
def test_units_of_the_loss_do_not_matter(family, data, exponent, seed):
    """A loss in other units, by a power of two, and Q with it: the same bits, up to that power."""
    group, shape = data.draw(family(smallest=1))
    Q = learned(group, shape, seed=seed, dtype=torch.float32)
    v, h = normal(2, group.size(Q), 1, seed=seed, dtype=torch.float32)
    unit = 2.0**exponent
    after = group.matrix(group.update(Q, v, h, lr=0.1))
    other = group.matrix(group.update(group.scale(Q, torch.tensor(1 / unit)), v * unit**-1, h * unit, lr=0.1))
    assert torch.equal(other, after / unit)


@EVERY_FAMILY
@few
@given(data=st.data(), seed=SEEDS)
def test_scale_and_magnitude(family, data, seed):
    group, shape = data.draw(family(smallest=1, largest=7))
    Q = learned(group, shape, (3,), seed)
    c = torch.tensor([0.5, 1.0, 8.0], dtype=torch.float64)
    scaled = group.scale(Q, c)
    assert torch.equal(group.matrix(scaled), c[:, None, None] * group.matrix(Q))
    assert torch.equal(group.magnitude(scaled), c * group.magnitude(Q))
    largest = group.matrix(Q).diagonal(dim1=-2, dim2=-1).abs().amax(-1)
    torch.testing.assert_close(group.magnitude(Q), largest, rtol=1e-12, atol=0)


@EVERY_FAMILY
@few
@given(data=st.data())
def test_a_group_is_a_value(family, data):
    group, _ = data.draw(family())
    assert dataclasses.is_dataclass(group)
    names = {type(member).__name__: type(member) for member in (*GROUPS, *ELEMENTARY)}
    again = eval(repr(group), names)
    assert again == group
    assert hash(again) == hash(group)
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.new_field = 1


# Long runs and other settings ------------------------------------------------------------------------------------


@EVERY_GROUP
def test_never_leaves_the_group(group):
    lr = torch.tensor([0.999, 0.99, 0.5, 0.01]).repeat_interleave(40)
    Q = group.init(shape_of(group, 6), batch=(160,))
    for t in range(300):
        v, h = normal(2, 160, 6, 1, seed=t, dtype=torch.float32)
        Q = group.update(Q, v, h * 10.0 ** (t % 7 - 3), lr=lr)
        for diagonal in diagonals(group, Q):
            assert (diagonal > 0).all()
            assert diagonal.isfinite().all()


@EVERY_GROUP
@pytest.mark.parametrize("n", first(1, [20, 2, 100]))
def test_inverses_stay_accurate_for_small_steps(group, n):
    """Four runs of 100 noisy steps each."""
    Q = group.init(shape_of(group, n), (4,), dtype=torch.float32)
    for t in range(100):
        v, h = normal(2, 4, n, 1, seed=t, dtype=torch.float32)
        Q = group.update(Q, v, h, lr=0.1)
    x = normal(4, n, 1, seed=0, dtype=torch.float32)
    errors = (group.apply(Q, group.solve(Q, x)) - x).norm(dim=1) / x.norm(dim=1)
    assert (errors < 1e-4).all()


@pytest.mark.parametrize("group", LONG, ids=repr)
@pytest.mark.slow
def test_hundred_thousand_noisy_steps(group):
    """Gradients from 1e-20 to 1e15 in float32: after 84 times 1,200 steps Q is positive, finite, and P H near I.

    Seven hundred bold steps of falling size lead there from the identity, and five hundred small ones stay.
    """
    runs, steps = 84, [0.1] * 500 + [0.03] * 200 + [0.01] * 500
    scales = (10.0 ** torch.arange(-20, 16, 5, dtype=torch.float64)).repeat(runs)
    n, source = 3, torch.Generator().manual_seed(0)
    curvature = (scales[:, None] * torch.tensor([4.0, 1.0, 0.25], dtype=torch.float64)).float()
    Q = group.init(shape_of(group, n), batch=(len(scales),))
    for lr in steps:
        v, noise = torch.randn(2, len(scales), n, 1, generator=source)
        Q = group.update(Q, v, curvature[:, :, None] * v + 0.1 * curvature[:, -1:, None] * noise, lr=lr)
    for diagonal in diagonals(group, Q):
        assert (diagonal > 0).all()
        assert diagonal.isfinite().all()
    whitened = group.apply(Q, curvature.diag_embed().float())
    whitened = group.apply_t(Q, whitened).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(whitened, torch.ones_like(whitened), rtol=0.25, atol=0)


@EVERY_GROUP
def test_step_size_of_each_member(group):
    """A tensor lr may hold one step size for each member."""
    Q = learned(group, shape_of(group, 3), batch=(2,))
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


@few
@given(
    n=st.sampled_from([4, 63, 64, 65, 129, 200]),
    k=st.sampled_from([1, 2, 7]),
    batch=BATCHES,
    seed=SEEDS,
)
def test_quick_triangular_step_equals_the_protocols(n, k, batch, seed):
    group = Triangular()
    Q = learned(group, n, batch, seed)
    a, b = normal(2, *batch, n, k, seed=seed)
    none = torch.zeros(*batch, 1, dtype=a.dtype)
    quick, largest = group.step_of_sums(Q, a + b, a - b, 0.1, none)
    plain, maxima = plain_step(group, Q, a, b, 0.1, none)
    torch.testing.assert_close((quick, largest), (plain, maxima), rtol=1e-10, atol=1e-12)
