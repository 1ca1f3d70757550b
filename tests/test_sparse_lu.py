"""Sparse LU: what it promises beside the properties that all groups share (tests/test_groups.py)."""

import pytest
import torch
from expressions import learned as learned_by
from expressions import normal, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples, first
from torch import Tensor

from psgd_lit.criterion import expected_criterion, optimal_preconditioner
from psgd_lit.groups.bordered import Bordered, bordered_difference
from psgd_lit.groups.protocol import State, power_below
from psgd_lit.groups.sparse_lu import SparseLU
from psgd_lit.problems import NoisyHessian, with_spectrum

SEEDS = st.integers(0, 2**20)
SIZES = st.sampled_from([0, 1, 2, 5, 9])
BATCHES = st.sampled_from([(), (3,), (2, 2), (0,)])
few = settings(max_examples=examples(40), deadline=None, derandomize=True)


@st.composite
def sized_ranks(draw: st.DrawFn) -> tuple[int, int]:
    """A size n and one of the ranks 0, 1, n - 1, n and n + 3."""
    n = draw(SIZES)
    return n, draw(st.sampled_from(sorted({0, 1, max(n - 1, 0), n, n + 3})))


def learned(
    rank: int,
    n: int,
    batch: tuple[int, ...] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> State:
    """Where bold steps on random pairs lead a sparse LU of that rank."""
    return learned_by(SparseLU(rank), n, batch, seed, dtype)


def factors(rank: int, Q: State) -> tuple[Tensor, Tensor]:
    """The dense L and U, entry by entry from the state."""
    dense = []
    for columns, rest in Q:
        n, r = columns.shape[-2:]
        full = torch.zeros(*columns.shape[:-2], n, n, dtype=columns.dtype)
        full[..., :r] = columns
        for i in range(n - r):
            full[..., r + i, r + i] = rest[..., i]
        dense.append(full)
    return dense[0], dense[1].mT


def pattern(rank: int, n: int) -> Tensor:
    """Where L may differ from zero, by the words of the paper."""
    return torch.tensor(
        [[i >= j and (j < rank or i == j) for j in range(n)] for i in range(n)],
        dtype=torch.bool,
    ).reshape(n, n)


@few
@given(sized=sized_ranks(), batch=BATCHES, k=st.sampled_from([0, 1, 3]), seed=SEEDS)
def test_actions_equal_dense_factors(sized, batch, k, seed):
    (n, rank), group = sized, SparseLU(sized[1])
    Q = learned(rank, n, batch, seed)
    L, U = factors(rank, Q)
    dense, x = L @ U, normal(*batch, n, k, seed=seed)
    close = {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(group.matrix(Q), dense, **close)
    torch.testing.assert_close(group.apply(Q, x), dense @ x, **close)
    torch.testing.assert_close(group.apply_t(Q, x), dense.mT @ x, **close)
    torch.testing.assert_close(group.solve(Q, x), torch.linalg.solve(dense, x), **close)
    torch.testing.assert_close(group.solve_t(Q, x), torch.linalg.solve(dense.mT, x), **close)
    for half, x_half in ((Q[0], L), (Q[1], U.mT)):
        torch.testing.assert_close(group.half.apply(half, x), x_half @ x, **close)
        torch.testing.assert_close(group.half.apply_t(half, x), x_half.mT @ x, **close)
        torch.testing.assert_close(group.half.solve(half, x), torch.linalg.solve(x_half, x), **close)
        torch.testing.assert_close(group.half.solve_t(half, x), torch.linalg.solve(x_half.mT, x), **close)


@few
@given(sized=sized_ranks(), seed=SEEDS)
def test_factors_keep_their_pattern_through_products_and_inverses(sized, seed):
    n, rank = sized
    L, U = factors(rank, learned(rank, n, seed=seed))
    other, _ = factors(rank, learned(rank, n, seed=seed + 50))
    outside = ~pattern(rank, n)
    for inside in (L, U.mT, L @ other, torch.linalg.inv(L)):
        assert (inside[outside].abs() < 1e-14).all()
    assert not L[outside].any()
    assert not U.mT[outside].any()
    assert int((L != 0).sum()) + int((U != 0).sum()) == SparseLU(rank).numel(n) == 2 * int(pattern(rank, n).sum())


@few
@given(sized=sized_ranks(), k=st.sampled_from([1, 3]), seed=SEEDS)
def test_step_equals_the_papers_formulas(sized, k, seed):
    """The dense formulas of Appendix A, with h, v, P h and P^-1 v as given, and a max norm for L and for U."""
    (n, rank), group = sized, SparseLU(sized[1])
    Q = learned(rank, n, seed=seed)
    L, U = factors(rank, Q)
    v, h = normal(2, n, k, seed=seed)
    dense = L @ U
    P, a, b = dense.mT @ dense, dense @ h, torch.linalg.solve(dense.mT, v)
    E_L = torch.where(pattern(rank, n), a @ a.mT - b @ b.mT, 0.0)
    E_U = torch.where(pattern(rank, n).mT, P @ h @ h.mT - v @ torch.linalg.solve(P, v).mT, 0.0)
    if n:
        L = L - 0.1 * E_L / E_L.abs().max() @ L
        U = U - U @ (0.1 * E_U / E_U.abs().max())
    torch.testing.assert_close(group.matrix(group.update(Q, v, h, lr=0.1)), L @ U, rtol=1e-7, atol=1e-7)


@few
@given(sized=sized_ranks(), seed=SEEDS)
def test_slopes_are_half_the_derivatives(sized, seed):
    (n, rank), group = sized, SparseLU(sized[1])
    Q, (v, h) = learned(rank, n, seed=seed), normal(2, n, 2, seed=seed)
    halves = [e for half in group.half_gradient(Q, group.apply(Q, h), group.solve_t(Q, v)) for e in half]
    zeros = [torch.zeros_like(e, requires_grad=True) for e in halves]
    moved = group.matrix(group.move(Q, (tuple(zeros[:2]), tuple(zeros[2:]))))
    value = (moved @ h).square().sum() + torch.linalg.solve(moved.mT, v).square().sum()
    for derivative, e in zip(torch.autograd.grad(value, zeros), halves, strict=True):
        torch.testing.assert_close(derivative, 2 * e, rtol=1e-7, atol=1e-7)


@few
@given(
    sized=sized_ranks(),
    batch=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=SEEDS,
)
def test_balance_moves_scale_and_nothing_else(sized, batch, dtype, seed):
    """Powers of two between column i of L and row i of U: exact, idempotent, for live members only."""
    (n, rank), group = sized, SparseLU(sized[1])
    Q = learned(rank, n, batch, seed, dtype)
    source = torch.Generator().manual_seed(seed)
    c = 2.0 ** torch.randint(-40, 40, (*batch, n), generator=source).to(dtype)
    live = torch.randint(0, 2, batch, generator=source).bool()
    wild = (group.half.scale_columns(Q[0], c), group.half.scale_columns(Q[1], 1 / c))
    once = group.balance(wild, live)
    assert torch.equal(group.matrix(once), group.matrix(Q))
    assert same_bits(group.balance(once, live), once)
    for before, after in zip([x for half in wild for x in half], [x for half in once for x in half], strict=True):
        assert torch.equal(before[~live], after[~live])
    left, right = (group.half.diagonal(half)[live] for half in once)
    assert ((left / right).log2().abs() < 2).all()
    v, h = normal(2, *batch, n, 1, seed=seed, dtype=dtype)
    for lr in (0.01, 0.9):
        after = group.matrix(group.update(Q, v, h, lr))
        assert torch.equal(group.matrix(group.update(wild, v, h, lr)), after)
        assert torch.equal(group.matrix(group.update(once, v, h, lr)), after)


@few
@given(n=st.sampled_from([1, 4, 9]), exponent=st.integers(-50, 50), seed=SEEDS)
def test_equivariant_under_uniform_scaling(n, exponent, seed):
    """theta = c theta': v' = v / c, h' = c h, Q' = Q / c, and the same bits for a power of two."""
    group, c = SparseLU(2), 2.0**exponent
    Q = learned(2, n, seed=seed)
    other = group.scale(Q, torch.tensor(1 / c, dtype=torch.float64))
    for t in range(5):
        v, h = normal(2, n, 1, seed=seed + t)
        Q, other = group.update(Q, v, h, lr=0.1), group.update(other, v / c, h * c, lr=0.1)
    assert torch.equal(group.matrix(other) * c, group.matrix(Q))


def test_not_equivariant_under_other_diagonals():
    """The half gradient of U depends on the units: what the chapter says, so that a change of it is noticed."""
    group, S = SparseLU(1), torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64)
    Q, (v, h) = group.init(3, dtype=torch.float64), normal(2, 3, 1, seed=1)
    other = (Q[0], group.half.scale_columns(Q[1], 1 / S))
    torch.testing.assert_close(group.matrix(other), group.matrix(Q) / S)
    after = group.matrix(group.update(Q, v, h, 0.1)) / S
    assert (group.matrix(group.update(other, v / S[:, None], h * S[:, None], 0.1)) - after).abs().max() > 1e-3


@pytest.mark.parametrize("rank", first(2, [1, 6, 0, 3]))
def test_diagonals_stay_positive_for_gradients_of_any_size(rank):
    """2000 noisy float32 steps of three sizes on products from 1e-20 to 1e15, member by member."""
    group, n = SparseLU(rank), 6
    lr = torch.tensor([0.999, 0.5, 0.01]).repeat_interleave(8)
    scales = 10.0 ** torch.arange(-20, 16, 5).repeat(3)[:, None, None]
    source, Q = torch.Generator().manual_seed(rank), group.init(n, (len(scales),))
    for _ in range(4):
        v, h = torch.randn(2, 500, len(scales), n, 1, generator=source)
        for probe, product in zip(v, scales * (h + v), strict=True):
            Q = group.update(Q, probe, product, lr)
        for half in Q:
            diagonal = group.half.diagonal(half)
            assert (diagonal > 0).all()
            assert all(part.isfinite().all() for part in half)
    left, right = (group.half.diagonal(half) for half in Q)
    assert ((left / right).log2().abs() < 2).all()


def test_gradients_of_all_sizes_within_one_block():
    """Curvatures from 1e-15 to 1e10 side by side: positive and finite in float32."""
    group = SparseLU(2)
    curvature = 10.0 ** torch.tensor([-5.0, 10.0, 0.0, -15.0, 5.0, -10.0])[:, None]
    Q, v = group.init(6, (3,)), normal(1000, 3, 6, 1, seed=0, dtype=torch.float32)
    for probe in v:
        Q = group.update(Q, probe, curvature * probe, lr=0.1)
    assert all((group.half.diagonal(half) > 0).all() and half[0].isfinite().all() for half in Q)


@pytest.mark.parametrize(("rank", "is_dense"), [(0, False), (5, True), (9, True)])
def test_ends_of_the_scale_reach_their_optimum(rank, is_dense):
    """Noisy products of an indefinite Hessian: full factors reach the best dense P, none the best diagonal."""
    H = with_spectrum(
        torch.tensor([3.0, -2.0, 1.0, 0.5, -0.4]).double(),
        generator=torch.Generator().manual_seed(1),
    )
    problem, source, group = (
        NoisyHessian(H, 0.1),
        torch.Generator().manual_seed(2),
        SparseLU(rank),
    )
    moment, Q = problem.second_moment(), group.init(5, dtype=torch.float64)
    for t in range(1500):
        Q = group.update(Q, *problem.sample(10, generator=source), lr=0.2 * 0.01 ** (t / 1500))
    ideal = optimal_preconditioner(moment) if is_dense else torch.diag(moment.diagonal().rsqrt())
    P = group.precondition(Q, torch.eye(5, dtype=torch.float64))
    assert expected_criterion(P, moment) < 1.01 * expected_criterion(ideal, moment)
    torch.testing.assert_close(P, ideal, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("rank", first(1, [2, 0, 1, 3]))
def test_learns_what_it_can_represent(rank):
    """|H| diagonal plus rank r beside r free rows is reached; with one column fewer it is not."""
    n, source = 8, torch.Generator().manual_seed(3)
    W = 1.5 * torch.randn(n, rank, dtype=torch.float64, generator=source)
    H = torch.diag(0.5 + torch.rand(n, dtype=torch.float64, generator=source)) + W @ W.T
    lowest, v, excess = (
        expected_criterion(torch.linalg.inv(H), H @ H),
        torch.eye(n, dtype=torch.float64),
        {},
    )
    for r in {max(rank - 1, 0), rank}:
        group = SparseLU(r)
        Q = group.init(n, dtype=torch.float64)
        for t in range(750):
            Q = group.update(Q, v, H, lr=0.3 * 0.01 ** (t / 750))
        excess[r] = expected_criterion(group.precondition(Q, v), H @ H) / lowest - 1
    assert excess[rank] < 2e-3
    assert rank == 0 or excess[rank - 1] > 5e-3


@pytest.mark.parametrize(("n", "rank"), [(3, 1), (5, 0), (6, 1), (7, 2), (8, 2), (4, 3), (5, 5)])
def test_dimensions_of_all_q_and_of_all_p(n, rank):
    """The three counts of Table I: n less than the free entries for Q; fewer still for P, by the rank of dP."""
    group = SparseLU(rank)
    Q = tuple((c + 0.3 * normal(*c.shape, seed=i).tril(), d + 0.1 * i) for i, (c, d) in enumerate(learned(rank, n), 1))
    zeros = tuple(tuple(torch.zeros_like(x) for x in half) for half in Q)

    def dimension(of) -> int:
        jacobian = torch.func.jacrev(lambda E: of(group.matrix(group.move(Q, E))))(zeros)
        columns = [x.reshape(n * n, -1) for half in jacobian for x in half]
        values = torch.linalg.svdvals(torch.cat(columns, 1))
        small, large = values[values < 1e-9 * values[0]], values[values >= 1e-9 * values[0]]
        assert not small.numel() or large.min() > 100 * small.max()
        return len(large)

    m = n - rank
    block = min(m * (m + 1) // 2, m + m * min(rank, m) - min(rank, m) * (min(rank, m) - 1) // 2)
    assert dimension(lambda Q: Q) == group.numel(n) - n == (2 * rank + 1) * n - rank**2 - rank
    assert dimension(lambda Q: Q.T @ Q) == rank * (rank + 1) // 2 + rank * m + block


@few
@given(sized=sized_ranks(), seed=SEEDS)
def test_bordered_difference_is_exactly_zero_where_the_products_are_equal(sized, seed):
    n, rank = sized
    x, p = normal(2, n, 2, seed=seed, dtype=torch.float32)
    assert not any(part.any() for part in bordered_difference(x, p, x, p, rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_power_below_is_exact_over_the_whole_range(dtype):
    limits = torch.finfo(dtype)
    lowest, highest = int(torch.frexp(torch.tensor(limits.tiny)).exponent), 126
    powers = torch.tensor([2.0**e for e in range(lowest, highest)], dtype=dtype)
    for factor in (1.0, 1.5, 2 - limits.eps):
        assert torch.equal(power_below(factor * powers), powers)


@pytest.mark.parametrize("kind", [SparseLU, Bordered])
@pytest.mark.parametrize(
    ("rank", "error"),
    [
        (-1, ValueError),
        (2.0, TypeError),
        ("2", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_bad_ranks_are_refused(kind, rank, error):
    with pytest.raises(error, match="rank"):
        kind(rank)


def test_default_is_the_papers_rank():
    assert SparseLU() == SparseLU(rank=10)
    assert SparseLU(10).numel(7591) == 166892


@pytest.mark.parametrize("n", [0, 1, 3, 20])
@pytest.mark.parametrize("rank", [0, 1, 3, 30])
def test_runs_without_reading_values(n, rank):
    """On the meta device a read of a value, a branch on one, or a tensor made elsewhere raises."""
    group = SparseLU(rank)
    Q, v = group.init(n, (2,), device="meta"), torch.empty(2, n, 1, device="meta")
    Q = group.update(Q, v, v, lr=torch.tensor(0.1, device="meta"))
    assert all(part.device.type == "meta" for half in Q for part in half)
    assert group.matrix(Q).shape == (2, n, n)
