"""Oracles that share no code with the library: sympy for halves, and the PyPI package psgd-torch for where Q ends.

psgd-torch 0.6.1 is by the paper's author. It is optional here (`pip install psgd_lit[oracles]`); it states no licence,
and nothing of it is copied. Its steps divide by a spectral norm, so single steps are equal only up to their length;
where it still divides by the largest entry, for SCAN, they are equal.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
from expressions import learned, moves, normal
from quick import first
from torch import Tensor

from psgd_lit.blocks import leaves
from psgd_lit.criterion import expected_criterion
from psgd_lit.groups.bordered import Bordered
from psgd_lit.groups.combinator import Combinator
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.direct_sum import DirectSum
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.protocol import Group, State
from psgd_lit.groups.sparse_lu import SparseLU
from psgd_lit.groups.triangular import Triangular
from psgd_lit.problems import with_spectrum

# torch itself says so when psgd-torch, which uses it, is imported
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

T, D, N = Triangular(), Diagonal(), Normalization()

# Sympy ----------------------------------------------------------------------------------------------------------------

Symbols = Iterator[sympy.Symbol]


def triangular(x: Symbols) -> sympy.Matrix:
    """An upper triangular 2 x 2 matrix of the next symbols, row by row."""
    return sympy.Matrix([[next(x), next(x)], [0, next(x)]])


def diagonal(x: Symbols, n: int = 2) -> sympy.Matrix:
    """A diagonal matrix of the next n symbols."""
    return sympy.diag(*(next(x) for _ in range(n)))


def normalization(x: Symbols) -> sympy.Matrix:
    """A diagonal and a last column, n = 3: the diagonal first."""
    matrix = diagonal(x, 3)
    matrix[0, 2], matrix[1, 2] = next(x), next(x)
    return matrix


def bordered(x: Symbols) -> sympy.Matrix:
    """A full first column and a diagonal, n = 3: the column first."""
    matrix = sympy.zeros(3, 3)
    matrix[0, 0], matrix[1, 0], matrix[2, 0], matrix[1, 1], matrix[2, 2] = (next(x) for _ in range(5))
    return matrix


Build = Callable[[list[sympy.Matrix]], sympy.Matrix]
SMALL: list[tuple[Group, Any, list[Callable[[Symbols], sympy.Matrix]], Build]] = [
    (T, 2, [triangular], lambda Q: Q[0]),
    (D, 2, [diagonal], lambda Q: Q[0]),
    (N, 3, [normalization], lambda Q: Q[0]),
    (Bordered(1), 3, [bordered], lambda Q: Q[0]),
    (SparseLU(1), 3, [bordered, bordered], lambda Q: Q[0] * Q[1].T),
    (Kron(T, T), (2, 2), [triangular, triangular], lambda Q: sympy.kronecker_product(*Q)),
    (Kron(D, N), (2, 3), [diagonal, normalization], lambda Q: sympy.kronecker_product(*Q)),
    (DirectSum(T, D), (2, 2), [triangular, diagonal], lambda Q: sympy.diag(*Q)),
]
"""Groups, shapes, how their factors are written with symbols, and how the factors make Q.

The factor of U in a sparse LU is its transpose, which moves from the left like all others.
"""


def free(tree: State, pattern: State) -> Tensor:
    """The entries of a state, or of a half gradient, where the pattern differs from zero; elsewhere it must be zero."""
    pairs = list(zip(leaves(tree), leaves(pattern), strict=True))
    assert not any(x[p == 0].any() for x, p in pairs)
    return torch.cat([x[p != 0] for x, p in pairs])


@pytest.mark.parametrize(("group", "shape", "factors", "build"), SMALL, ids=[repr(case[0]) for case in SMALL])
def test_it_is_half_the_symbolic_derivative(group, shape, factors, build):
    """Differentiate |(I + E) Q h|^2 + |((I + E) Q)^-T v|^2 in symbols, and put ten states and pairs in."""
    count = group.numel(shape)
    q, e = (sympy.symbols(f"{name}:{count}") for name in "qe")
    Q, E = ([factor(x) for factor in factors] for x in map(iter, (q, e)))
    moved = [(sympy.eye(small.rows) + step) * small for small, step in zip(Q, E, strict=True)]
    n = build(moved).rows
    h, v = (sympy.Matrix(sympy.symbols(f"{name}:{n}")) for name in "hv")
    a, b = build(moved) * h, build([small.inv() for small in moved]).T * v
    if isinstance(group, SparseLU):  # (L R^T)^-T = L^-T R^-1
        b = moved[0].inv().T * moved[1].inv() * v
    value = a.dot(a) + b.dot(b)
    half = [value.diff(x).subs(dict.fromkeys(e, 0)) / 2 for x in e]
    formula = sympy.lambdify([q, list(h), list(v)], half, "math", cse=True)
    for seed in range(10):
        state = learned(group, shape, seed=100 * seed)
        probe, product = normal(2, n, 1, seed=seed)
        half = group.half_gradient(state, group.apply(state, product), group.solve_t(state, probe))
        known = formula(free(state, state).tolist(), product.flatten().tolist(), probe.flatten().tolist())
        torch.testing.assert_close(free(half, state), torch.tensor(known, dtype=torch.float64), rtol=1e-9, atol=1e-9)


# psgd-torch -----------------------------------------------------------------------------------------------------------

Psgd = types.ModuleType
Update = Callable[[Psgd, Group, State, Tensor, Tensor, float], State]


@pytest.fixture(scope="module")
def psgd() -> Psgd:
    """The functions of psgd-torch."""
    package = pytest.importorskip("psgd_torch.psgd", reason="psgd-torch is not installed")
    assert isinstance(package, types.ModuleType)
    return package


def update_dense(psgd: Psgd, group: Group, Q: State, v: Tensor, h: Tensor, lr: float) -> State:
    """One step of a triangular Q by psgd-torch."""
    return (psgd.update_precond_dense(Q[0], [v], [h], lr),)


def update_splu(psgd: Psgd, group: Group, Q: State, v: Tensor, h: Tensor, lr: float) -> State:
    """One step of a sparse LU by psgd-torch, which changes what it is given."""
    (L, left), (R, right) = Q
    state = (L.clone(), left[:, None].clone(), R.mT.clone(), right[:, None].clone())
    L, left, U, right = psgd.update_precond_splu(*state, [v], [h], lr)
    return ((L, left[:, 0]), (U.mT, right[:, 0]))


def to_matrix(factor: Group, q: State) -> Tensor:
    """A factor as psgd-torch stores it: square, one row for a diagonal, two rows for a diagonal and last column."""
    if isinstance(factor, Diagonal):
        return q[0][None].clone()
    if isinstance(factor, Normalization):
        return torch.stack([q[0], torch.cat([q[1], q[1].new_zeros(1)])])
    return q[0].clone()


def to_state(factor: Group, x: Tensor) -> State:
    """The way back."""
    if isinstance(factor, Normalization):
        return (x[0], x[1, :-1])
    return (x[0] if isinstance(factor, Diagonal) else x,)


def update_kron(psgd: Psgd, group: Group, Q: State, v: Tensor, h: Tensor, lr: float) -> State:
    """One step of a Kronecker product of two factors by psgd-torch."""
    assert isinstance(group, Combinator)
    factors = [to_matrix(f, q) for f, q in zip(group.parts, Q, strict=True)]
    sizes = group.sizes(Q)
    after = psgd.update_precond_kron(*factors, v.reshape(sizes), h.reshape(sizes), lr)
    return tuple(to_state(f, x) for f, x in zip(group.parts, after, strict=True))


SCAN = Kron(D, N)
BOTH: list[tuple[Group, Any, Update]] = [
    (T, 5, update_dense),
    (SparseLU(2), 6, update_splu),
    (Kron(T, T), (2, 3), update_kron),
    (Kron(T, D), (2, 3), update_kron),
    (Kron(T, D), (1, 5), update_kron),
    (Kron(N, T), (3, 2), update_kron),
    (SCAN, (2, 4), update_kron),
]
"""What both packages have. With one row, a product of a dense and a diagonal factor is diagonal."""

EVERY = pytest.mark.parametrize(("group", "shape", "update"), BOTH, ids=[f"{g} {shape}" for g, shape, _ in BOTH])


def of_elementary(group: Group, Q: State) -> list[Tensor]:
    """The dense matrices of what moves: the factors, or L and the transpose of U."""
    if isinstance(group, SparseLU):
        return [group.half.matrix(q) for q in Q]
    if isinstance(group, Kron):
        return [f.matrix(q) for f, q in zip(group.factors, Q, strict=True)]
    return [group.matrix(Q)]


@EVERY
def test_single_steps_go_the_same_way(psgd, group, shape, update):
    """Each factor after their step is (I + E) times the one before, with our E up to its length, to 1e-9."""
    Q = group.balance(learned(group, shape, seed=1), torch.tensor(True))
    lr = 1e-3
    for seed in range(5):
        v, h = normal(2, group.size(Q), 1, seed=seed)
        after = of_elementary(group, update(psgd, group, Q, v, h, lr))
        half = group.half_gradient(Q, group.apply(Q, h), group.solve_t(Q, v))
        still = group.matrix(Q)
        assert len(moves(group, half)) == len(after)
        for i, (old, new) in enumerate(zip(of_elementary(group, Q), after, strict=True)):
            theirs = new @ torch.linalg.inv(old)  # c (I - mu E), c from their balancing
            ours = of_elementary(group, group.move(Q, half))[i] @ torch.linalg.inv(old) - torch.eye(len(old))
            basis = torch.stack([torch.eye(len(old), dtype=torch.float64).flatten(), ours.flatten()], 1)
            solution = torch.linalg.lstsq(basis, theirs.flatten()[:, None]).solution
            assert len(old) == 1 or solution[1] < 0  # one entry has no direction but itself
            torch.testing.assert_close((basis @ solution).flatten(), theirs.flatten(), rtol=0, atol=1e-9)
        assert torch.equal(group.matrix(Q), still)


def test_steps_of_scan_are_equal(psgd):
    """Three hundred noisy steps of both, whose normalisation is the same here, to 1e-9."""
    ours = theirs = SCAN.init((3, 4), dtype=torch.float64)
    for t in range(300):
        v, h = normal(2, 12, 1, seed=t)
        ours, theirs = SCAN.update(ours, v, h, 0.1), update_kron(psgd, SCAN, theirs, v, h, 0.1)
        torch.testing.assert_close(SCAN.matrix(ours), SCAN.matrix(theirs), rtol=1e-9, atol=1e-9)


def run_both(
    psgd: Psgd, group: Group, shape: Any, update: Update, H: Tensor, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """P of both after each of the last steps on one stationary stream of exact pairs, with a size that falls."""
    ours = theirs = group.init(shape, dtype=torch.float64)
    stream = normal(steps, len(H), 1, seed=7)
    for t, v in enumerate(stream):
        lr = 0.1 * 0.01 ** (t / steps)
        ours, theirs = (
            group.update(ours, v, H @ v, lr),
            update(psgd, group, theirs, v, H @ v, lr),
        )
        if t >= steps // 2:
            Q, R = group.matrix(ours), group.matrix(theirs)
            yield Q.T @ Q, R.T @ R


@EVERY
def test_fixed_points_are_equal_where_the_form_fits(psgd, group, shape, update):
    """H is the inverse of a P that the group holds: both end there, within two percent."""
    Q = group.matrix(learned(group, shape, seed=3))
    P = Q.T @ Q
    *_, (ours, theirs) = run_both(psgd, group, shape, update, torch.linalg.inv(P), 600)
    for found, known in ((ours, P), (theirs, P), (ours, theirs)):
        assert (found - known).norm() < 0.02 * known.norm()


@pytest.mark.parametrize("form", first(1, BOTH), ids=[f"{g} {shape}" for g, shape, _ in BOTH])
def test_fixed_points_are_close_where_nothing_fits(psgd, form):
    """An indefinite H that only the dense form represents: means over the last half of the run.

    Each comes to rest where the mean of its normalised half is zero, so these agree within five percent, the spectra
    of P H too, and the criterion, whose minimum is flat, within one percent. A sparse LU needs more steps for that.
    """
    group, shape, update = form
    steps = 3000 if isinstance(group, SparseLU) else 1500
    n = group.size(group.init(shape, device="meta"))
    spectrum = torch.linspace(0.5, 3, n, dtype=torch.float64) * torch.tensor([1.0, -1.0] * n)[:n]
    H = with_spectrum(spectrum, generator=torch.Generator().manual_seed(5))
    ours, theirs = (torch.stack(Ps).mean(0) for Ps in zip(*run_both(psgd, group, shape, update, H, steps), strict=True))
    assert (ours - theirs).norm() < 0.05 * theirs.norm()
    eigenvalues = [torch.linalg.eigvals(P @ H).real.sort().values for P in (ours, theirs)]
    torch.testing.assert_close(*eigenvalues, rtol=0, atol=0.05)
    values = [expected_criterion(P, H @ H) for P in (ours, theirs)]
    torch.testing.assert_close(*values, rtol=0.01, atol=0)
