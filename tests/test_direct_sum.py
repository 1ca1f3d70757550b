"""Direct sums of any groups, nested with products up to three deep, with empty pieces, against the dense matrix."""

import copy
import dataclasses
import itertools
import pickle
from typing import Any

import pytest
import torch
from expressions import learned, normal, plain_step, same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor

from psgd_lit.blocks import leaves
from psgd_lit.buckets import map_leaves
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.direct_sum import DirectSum, block_diagonal, even_pieces
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.protocol import Group, State
from psgd_lit.groups.sparse_lu import SparseLU
from psgd_lit.groups.triangular import Triangular

T, D = Triangular(), Diagonal()
ELEMENTARY: list[Group] = [T, D, Normalization(), SparseLU(0), SparseLU(1)]
BATCHES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
COLUMNS = st.sampled_from([0, 1, 2, 5])
DTYPES = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 2**20)
some = settings(max_examples=examples(60), deadline=None, derandomize=True)
LARGEST = 4
"""The largest size of an elementary group in a nesting."""


@st.composite
def nestings(draw: st.DrawFn, depth: int, smallest: int) -> tuple[Group, Any]:
    """A group and a shape for it: sums of one to three parts and products of one or two factors."""
    combinator = draw(st.sampled_from([DirectSum, Kron, None])) if depth else None
    if combinator is None:
        return draw(st.sampled_from(ELEMENTARY)), draw(st.integers(smallest, LARGEST))
    order = draw(st.integers(1, 3 if combinator is DirectSum else 2))
    groups, shape = zip(*(draw(nestings(depth - 1, smallest)) for _ in range(order)), strict=True)
    return combinator(*groups), shape


@st.composite
def sums(draw: st.DrawFn, smallest: int = 0) -> tuple[Group, Any]:
    """A direct sum at most three deep, alone or as a factor, and a shape for it."""
    parts = [draw(nestings(draw(st.integers(0, 1)), smallest)) for _ in range(draw(st.integers(1, 3)))]
    groups, shape = zip(*parts, strict=True)
    group: Group = DirectSum(*groups)
    other, size = draw(nestings(0, smallest))
    wraps = [
        (group, shape),
        (Kron(group, other), (shape, size)),
        (Kron(other, group), (size, shape)),
    ]
    return draw(st.sampled_from([*wraps, (DirectSum(other, group), (size, shape))]))


def size_of(group: Group, shape: Any) -> int:
    return group.size(group.init(shape, device="meta"))


def dense(group: Group, Q: State) -> Tensor:
    """The matrix of an unbatched state, by torch.kron and torch.block_diag."""
    if isinstance(group, Kron):
        matrix = torch.ones(1, 1, dtype=leaves(Q)[0].dtype)
        for factor, q in zip(group.factors, Q, strict=True):
            matrix = torch.kron(matrix, dense(factor, q))
        return matrix
    if isinstance(group, DirectSum):
        return torch.block_diag(*(dense(p, q) for p, q in zip(group.parts, Q, strict=True)))
    return group.matrix(Q)


def pair_criterion(Q: Tensor, v: Tensor, h: Tensor) -> Tensor:
    return (Q @ h).square().sum() + torch.linalg.solve(Q.mT, v).square().sum()


@some
@given(case=sums(), batch=BATCHES, k=COLUMNS, seed=SEEDS, dtype=DTYPES)
def test_actions_equal_the_dense_matrix(case, batch, k, seed, dtype):
    group, shape = case
    Q = learned(group, shape, batch, seed, dtype)
    n, matrix = group.size(Q), group.matrix(Q)
    for member in itertools.product(*map(range, batch)):
        alone = map_leaves(lambda leaf, member=member: leaf[member], Q)
        torch.testing.assert_close(matrix[member], dense(group, alone), rtol=1e-6, atol=0)
    x = normal(*batch, n, k, seed=seed, dtype=dtype)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(group.apply(Q, x), matrix @ x, **close)
    torch.testing.assert_close(group.apply_t(Q, x), matrix.mT @ x, **close)
    torch.testing.assert_close(group.apply(Q, group.solve(Q, x)), x, **close)
    torch.testing.assert_close(group.apply_t(Q, group.solve_t(Q, x)), x, **close)
    torch.testing.assert_close(group.precondition(Q, x), matrix.mT @ matrix @ x, **close)
    assert matrix.shape == (*batch, n, n)
    assert all(leaf.dtype == dtype for leaf in leaves(Q))


@some
@given(case=sums(), batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_quick_paths_equal_the_protocols_step(case, batch, k, seed):
    group, shape = case
    Q = learned(group, shape, batch, seed)
    a, b = normal(2, *batch, group.size(Q), k, seed=seed)
    none = torch.zeros(*batch, group.maxima, dtype=a.dtype)
    quick, largest = group.step_of_sums(Q, a + b, a - b, 0.1, none)
    plain, maxima = plain_step(group, Q, a, b, 0.1, none)
    torch.testing.assert_close(largest, maxima, rtol=1e-9, atol=1e-11)
    for x, y in zip(leaves(quick), leaves(plain), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@some
@given(case=sums(), batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_batched_equals_one_by_one(case, batch, k, seed):
    group, shape = case
    Q = learned(group, shape, batch, seed)
    v, h = normal(2, *batch, group.size(Q), k, seed=seed)
    after = group.matrix(group.update(Q, v, h, lr=0.1))
    for member in itertools.product(*map(range, batch)):
        alone = group.update(
            map_leaves(lambda leaf, member=member: leaf[member], Q),
            v[member],
            h[member],
            lr=0.1,
        )
        torch.testing.assert_close(group.matrix(alone), after[member], rtol=1e-10, atol=1e-10)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    case=sums(smallest=1),  # an empty product has no scale, and nothing to balance
    seed=SEEDS,
    dtype=DTYPES,
    exponents=st.lists(st.integers(-20, 20), min_size=3, max_size=3),
)
@example(
    case=(Kron(DirectSum(T, T), D), ((0, 3), 2)),
    seed=0,
    dtype=torch.float32,
    exponents=[9, 0, 0],
)
@example(
    case=(DirectSum(Kron(T, D), T), ((2, 3), 0)),
    seed=0,
    dtype=torch.float32,
    exponents=[-9, 0, 0],
)
def test_balancing_happens_once_and_changes_no_product(case, seed, dtype, exponents):
    group, shape = case
    Q = learned(group, shape, (2,), seed, dtype)
    draws = itertools.cycle(exponents)

    def tilt(group: Group, Q: State) -> State:
        """The same product, with scale moved between the factors wherever there is a Kron."""
        if isinstance(group, DirectSum):
            return tuple(tilt(p, q) for p, q in zip(group.parts, Q, strict=True))
        if not isinstance(group, Kron):
            return Q
        first, *rest = (tilt(f, q) for f, q in zip(group.factors, Q, strict=True))
        if not rest:
            return (first,)
        c = torch.full((2,), 2.0 ** next(draws), dtype=dtype)
        return (
            group.factors[0].scale(first, c),
            group.factors[1].scale(rest[0], 1 / c),
            *rest[1:],
        )

    tilted, live = tilt(group, Q), torch.tensor([True, False])
    once = group.balance(tilted, live)
    assert torch.equal(group.matrix(once), group.matrix(Q))
    assert torch.equal(group.magnitude(once), group.magnitude(tilted))
    assert same_bits(group.balance(once, live), once)
    assert same_bits(map_leaves(lambda leaf: leaf[1], once), map_leaves(lambda leaf: leaf[1], tilted))
    v, h = normal(2, 2, group.size(Q), 1, seed=seed, dtype=dtype)
    assert torch.equal(group.matrix(group.update(once, v, h, 0.1)), group.matrix(group.update(Q, v, h, 0.1)))


def test_every_part_is_balanced():
    group = DirectSum(Kron(T, D), DirectSum(D, Kron(T, T)))
    (first, (single, second)) = learned(group, ((2, 3), (2, (2, 2))), dtype=torch.float32)
    up, down = torch.tensor(2.0**40), torch.tensor(2.0**-40)
    tilted = (
        (T.scale(first[0], up), D.scale(first[1], down)),
        (single, (second[0], T.scale(second[1], up))),
    )
    balanced = group.balance(tilted, torch.tensor(True))
    for factors, pair in (
        (group.parts[0].factors, balanced[0]),
        (group.parts[1].parts[1].factors, balanced[1][1]),
    ):
        left, right = (f.magnitude(q) for f, q in zip(factors, pair, strict=True))
        assert 1 / 4 < left / right < 4
    assert same_bits(balanced[1][0], single)


@some
@given(case=sums())
def test_a_composition_is_a_value(case):
    group, _ = case
    names = {type(member).__name__: type(member) for member in (*ELEMENTARY, DirectSum(T), Kron(T))}
    for again in (
        eval(repr(group), names),
        pickle.loads(pickle.dumps(group)),
        copy.deepcopy(group),
    ):
        assert again == group
        assert hash(again) == hash(group)


@some
@given(
    members=st.lists(nestings(2, 0), min_size=1, max_size=4),
    batch=BATCHES,
    k=COLUMNS,
    dtype=DTYPES,
    seed=SEEDS,
)
def test_parts_learn_as_they_do_alone(members, batch, k, dtype, seed):
    """From the same pieces of a and b, a part ends at the bits that it reaches without the others."""
    groups, shape = zip(*members, strict=True)
    group = DirectSum(*groups)
    Q = learned(group, shape, batch, seed, dtype)
    a, b = normal(2, *batch, group.size(Q), k, seed=seed, dtype=dtype)
    after = group.step(Q, a, b, lr=0.2)
    for i, (part, piece_a, piece_b) in enumerate(
        zip(groups, a.split(group.sizes(Q), -2), b.split(group.sizes(Q), -2), strict=True)
    ):
        alone = part.step(Q[i], piece_a, piece_b, lr=0.2)
        assert torch.equal(part.matrix(after[i]), part.matrix(alone))


@pytest.mark.parametrize("other", [T, D, Normalization(), SparseLU(1)], ids=repr)
def test_a_product_distributes_over_a_sum_on_its_left(other):
    left, right = Kron(DirectSum(T, D), other), DirectSum(Kron(T, other), Kron(D, other))
    (rows, column) = learned(left, ((2, 3), 4))
    assert torch.equal(left.matrix((rows, column)), right.matrix(tuple((q, column) for q in rows)))


@some
@given(n=st.integers(0, 1000), count=st.integers(1, 20))
def test_even_pieces_follow_tensor_split(n, count):
    assert even_pieces(n, count) == [len(piece) for piece in torch.tensor_split(torch.empty(n), count)]


@pytest.mark.parametrize("batch", [(), (2,), (0,), (2, 3)])
def test_block_diagonal(batch):
    blocks = [normal(*batch, n, n, seed=n) for n in (2, 0, 3, 1)]
    whole = block_diagonal(blocks)
    assert whole.shape == (*batch, 6, 6)
    for member in itertools.product(*map(range, batch)):
        assert torch.equal(whole[member], torch.block_diag(*(block[member] for block in blocks)))


@pytest.mark.parametrize(
    ("group", "dimensions", "shape"),
    [
        (DirectSum(T, D), (5,), (3, 2)),
        (DirectSum(T, D), (5, 4), (12, 8)),
        (DirectSum(T, D, T), (1, 4), (4, 0, 0)),
        (DirectSum(Kron(T, T), Kron(D, T)), (5, 4), ((3, 4), (2, 4))),
        (DirectSum(Kron(T, T, D), D), (3, 2, 4), ((2, 2, 4), 8)),
        (Kron(DirectSum(T, T), D), (5, 4), ((3, 2), 4)),
        (DirectSum(DirectSum(T, D), T), (7,), ((2, 2), 3)),
    ],
    ids=repr,
)
def test_shape_for_a_block(group, dimensions, shape):
    assert group.shape_for(dimensions) == shape
    assert size_of(group, shape) == torch.Size(dimensions).numel()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at least one part"):
        DirectSum()
    for shape in (3, (3,), (1, 2, 3)):
        with pytest.raises(ValueError, match="does not fit"):
            DirectSum(T, D).init(shape)
        with pytest.raises(ValueError, match="does not fit"):
            DirectSum(T, D).numel(shape)
    with pytest.raises(ValueError, match="does not fit"):
        DirectSum(Kron(T, T), Kron(T, T)).shape_for((6,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        DirectSum(T).parts = ()  # type: ignore[misc]
