"""Random expressions of the algebra, and what the tests of groups share."""

from functools import reduce
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from psgd_lit.blocks import leaves
from psgd_lit.groups.bordered import Bordered
from psgd_lit.groups.combinator import Combinator
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.direct_sum import DirectSum
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.protocol import Group, State
from psgd_lit.groups.sparse_lu import SparseLU
from psgd_lit.groups.triangular import Triangular

Case = tuple[Group, Any]
"""A group and a shape for it."""

DEPTH, ROWS, LARGEST = 3, 36, 7
"""How deep an expression nests, how many rows its matrix has at most, and an elementary part of it."""

ELEMENTARY: list[Group] = [
    *[Triangular(), Diagonal(), Normalization(), Bordered(1)],
    *[SparseLU(0), SparseLU(1), SparseLU(3)],
]


@st.composite
def expressions(
    draw: st.DrawFn,
    smallest: int = 0,
    top: type[Combinator] | None = None,
    choices: tuple[Group, ...] = tuple(ELEMENTARY),
) -> Case:
    """Draw a product of one to three factors or a sum of two or three parts, of any such parts, or of elementary ones.

    Args:
        draw: given by hypothesis.
        smallest: the least size of an elementary part; 0 makes empty ones.
        top: the outermost combinator; None leaves it open, and lets it be missing.
        choices: the elementary groups.
    """

    def nest(depth: int, rows: int, kind: type[Combinator] | None) -> tuple[Group, Any, int]:
        """Draw a group of at most that many rows, its shape and its size."""
        if kind is None:
            size = draw(st.integers(min(smallest, rows), min(LARGEST, rows)))
            return draw(st.sampled_from(choices)), size, size
        members, total = [], 1 if kind is Kron else 0
        for _ in range(draw(st.integers(1 if kind is Kron else 2, 3))):
            rest = rows // max(total, 1) if kind is Kron else rows - total
            inner = draw(st.sampled_from([None, Kron, DirectSum])) if depth > 1 and rest > LARGEST else None
            if rest < smallest:
                break
            members.append(nest(depth - 1, rest, inner))
            total = total * members[-1][2] if kind is Kron else total + members[-1][2]
        groups, shape, _ = zip(*members, strict=True)
        return kind(*groups), shape, total

    group, shape, _ = nest(DEPTH, ROWS, top or draw(st.sampled_from([None, Kron, DirectSum])))
    return group, shape


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def learned(
    group: Group,
    shape: Any,
    batch: tuple[int, ...] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> State:
    """A state away from the identity: where seven bold steps on random pairs lead."""
    Q = group.init(shape, batch, dtype=dtype)
    for v, h in normal(7, 2, *batch, group.size(Q), 1, seed=seed, dtype=dtype):
        Q = group.update(Q, v, h, lr=0.3)
    return Q


def same_bits(one: State, other: State) -> bool:
    """True if all tensors of two states are equal."""
    return all(torch.equal(x, y) for x, y in zip(leaves(one), leaves(other), strict=True))


def diagonals(group: Group, Q: State) -> list[Tensor]:
    """The diagonals that keep Q in its group as long as they are positive: of Triangular, Diagonal, ..., L and U."""
    if isinstance(group, Combinator):
        return [d for part, q in zip(group.parts, Q, strict=True) for d in diagonals(part, q)]
    halves = [group.half.matrix(q) for q in Q] if isinstance(group, SparseLU) else [group.matrix(Q)]
    return [half.diagonal(dim1=-2, dim2=-1) for half in halves]


def moves(group: Group, E: State) -> list[State]:
    """The half gradients that share a maximum: one for each elementary part, two for sparse LU."""
    if isinstance(group, Combinator):
        return [move for part, e in zip(group.parts, E, strict=True) for move in moves(part, e)]
    return list(E) if isinstance(group, SparseLU) else [E]


def overlap(group: Group) -> int:
    """How many moves meet in one entry of a vector."""
    if isinstance(group, Combinator):
        return (sum if isinstance(group, Kron) else max)(map(overlap, group.parts))
    return 2 if isinstance(group, SparseLU) else 1


def scale_columns(group: Group, Q: State, exponents: list[int]) -> tuple[State, Tensor]:
    """Return Q T and the diagonal of T, powers of two in the group: any for each column, one for all of a sparse LU."""
    if isinstance(group, Combinator):
        states, scales = [], []
        for i, (part, q) in enumerate(zip(group.parts, Q, strict=True)):
            state, scale = scale_columns(part, q, exponents[i:] + exponents[:i])
            states.append(state)
            scales.append(scale)
        together = torch.cat if isinstance(group, DirectSum) else lambda scales: reduce(torch.kron, scales)
        return tuple(states), together(scales)
    n = group.size(Q)
    t = torch.tensor([2.0 ** exponents[i % len(exponents)] for i in range(n)], dtype=torch.float64)
    if isinstance(group, SparseLU):
        t = torch.full_like(t, 2.0 ** exponents[0])
        return group.scale(Q, torch.tensor(2.0 ** exponents[0], dtype=torch.float64)), t
    if isinstance(group, Normalization):
        return (Q[0] * t, Q[1] * t[-1:]), t
    if isinstance(group, Bordered):
        return group.scale_columns(Q, t), t
    return (Q[0] * t,), t


class PlainIndexing(TorchFunctionMode):
    """Indexing by operators that need no device; torch's own looks for CUDA even where a tensor is fake."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "__getitem__":
            return view(*args)
        if function.__name__ == "__setitem__":
            return view(*args[:2]).zero_().add_(args[2])  # copy_ looks for the device too
        return function(*args, **(kwargs or {}))


def view(x: Tensor, index: Any) -> Tensor:
    """Index a tensor by integers, slices, None and one ellipsis."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in index:
        at, named = (
            index.index(Ellipsis),
            sum(i is not None and i is not Ellipsis for i in index),
        )
        index[at : at + 1] = [slice(None)] * (x.dim() - named)
    dim = 0
    for i in index:
        if isinstance(i, int):
            x = x.select(dim, i)
            continue
        x = x.unsqueeze(dim) if i is None else torch.ops.aten.slice.Tensor(x, dim, *i.indices(x.shape[dim]))
        dim += 1
    return x


def plain_step(group: Group, Q: State, a: Tensor, b: Tensor, lr: float | Tensor, least: Tensor) -> tuple[State, Tensor]:
    """One step by the formula, with the half gradient made and no sums or differences."""
    E, maxima = group.descent(group.half_gradient(Q, a, b), lr, least)
    return group.move(Q, E), maxima


def assert_acts_as_its_matrix(group: Group, Q: State, x: Tensor, **close: float) -> None:
    """All four actions and P are those of the dense matrix, which solves by being multiplied back."""
    dense = group.matrix(Q)
    torch.testing.assert_close(group.apply(Q, x), dense @ x, **close)
    torch.testing.assert_close(group.apply_t(Q, x), dense.mT @ x, **close)
    torch.testing.assert_close(dense @ group.solve(Q, x), x, **close)
    torch.testing.assert_close(dense.mT @ group.solve_t(Q, x), x, **close)
    torch.testing.assert_close(group.precondition(Q, x), dense.mT @ dense @ x, **close)
