"""The low-rank form: what a user of the optimizer meets."""

import math

import pytest
import torch
from expressions import assert_acts_as_its_matrix
from torch import Tensor
from toys import generator, goes_on_from_its_state

from psgd_lit.criterion import optimal_preconditioner, spread
from psgd_lit.groups import Diagonal
from psgd_lit.groups.protocol import State
from psgd_lit.low_rank import LowRank

EVERY_RANK = pytest.mark.parametrize("rank", [0, 1, 4, 40])
SIZE = 12


def pairs(batch: tuple[int, ...] = (3,), k: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A probe and a product of normal numbers."""
    v, h = torch.randn(2, *batch, SIZE, k, dtype=torch.float64, generator=generator(seed))
    return v, h


def learned(form: LowRank, fits: int = 20, lr: float = 0.3) -> State:
    """A state of three members after fits to pairs of many scales."""
    Q = form.init(SIZE, (3,), dtype=torch.float64)
    for t in range(fits):
        v, h = pairs(seed=t)
        Q = form.update(Q, v, h * 10.0 ** (t % 5 - 2), lr)
    return Q


@EVERY_RANK
def test_actions_equal_the_dense_oracle(rank: int) -> None:
    form = LowRank(rank)
    Q, (x, _) = learned(form), pairs(k=2)
    dense, close = form.matrix(Q), {"rtol": 1e-8, "atol": 1e-8}
    assert_acts_as_its_matrix(form, Q, x, **close)
    diagonal = dense.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(form.magnitude(Q), diagonal.abs().amax(-1), **close)
    assert sum(x.numel() for x in form.init(SIZE)[:3]) == form.numel(SIZE)


def test_it_starts_at_the_identity_and_rank_zero_is_the_diagonal_form() -> None:
    assert torch.equal(LowRank(3).matrix(LowRank(3).init(SIZE, (2,))), torch.eye(SIZE).expand(2, -1, -1))
    form, plain = LowRank(0), Diagonal()
    Q, q = form.init(SIZE, dtype=torch.float64), plain.init(SIZE, dtype=torch.float64)
    for t in range(10):
        v, h = pairs((), seed=t)
        Q, q = form.update(Q, v, h, 0.2), plain.update(q, v, h, 0.2)
    torch.testing.assert_close(form.matrix(Q), plain.matrix(q), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("turn", [0.0, 1.0])
def test_it_is_half_the_derivative_of_the_criterion(turn: float) -> None:
    form = LowRank(3)
    Q = (*learned(form)[:3], torch.full((3,), turn, dtype=torch.float64))
    v, h = pairs(k=2)
    K, c, e = form.half_gradient(Q, form.apply(Q, h), form.solve_t(Q, v))
    moves = torch.randn(3, SIZE, 4, dtype=torch.float64, generator=generator(5)).split([3, 1], -1)
    direction = moves[0], c, moves[1][..., 0]

    def value(t: float) -> Tensor:
        moved = form.move(Q, (t * direction[0], c, t * direction[2]))
        return (form.apply(moved, h).square() + form.solve_t(moved, v).square()).sum((-2, -1))

    promised = 2 * ((K * direction[0]).sum((-2, -1)) + (e * direction[2]).sum(-1))
    torch.testing.assert_close((value(1e-6) - value(-1e-6)) / 2e-6, promised, rtol=1e-4, atol=1e-4)


def test_it_rests_at_the_best_preconditioner_where_it_can_hold_it() -> None:
    axes = torch.linalg.qr(torch.randn(SIZE, 2, dtype=torch.float64, generator=generator(0)))[0]
    scale = torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float64).exp()
    stiff = torch.tensor([10.0, 50.0], dtype=torch.float64)
    H = scale[:, None] * (torch.eye(SIZE, dtype=torch.float64) + (axes * stiff) @ axes.mT) * scale
    form, probes = LowRank(2), torch.eye(SIZE, dtype=torch.float64)
    best = (axes * ((1 + stiff).rsqrt() - 1), axes, 1 / scale)
    for turn in (0.0, 1.0):
        Q = (*best, torch.tensor(turn, dtype=torch.float64))
        K, _, e = form.half_gradient(Q, form.apply(Q, H), form.solve_t(Q, probes))
        assert max(K.abs().max(), e.abs().max()) < 1e-10 * H.max()
        torch.testing.assert_close(form.precondition(Q, probes), optimal_preconditioner(H @ H))
    Q = form.init(SIZE, dtype=torch.float64)
    for t in range(2000):
        Q = form.update(Q, probes, H, 0.1 / (1 + t / 100))
    assert spread(form.precondition(Q, probes), H) < 3 < 30 < spread(probes, H)


@EVERY_RANK
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lr", [0.01, 0.99])
@pytest.mark.parametrize("exponent", [-20, 0, 15])
def test_finite_and_invertible_for_every_step_and_scale(
    rank: int, dtype: torch.dtype, lr: float, exponent: int
) -> None:
    form, source = LowRank(rank), generator(0)
    Q = form.init(SIZE, dtype=dtype)
    for _ in range(30):
        v, h = torch.randn(2, SIZE, 1, dtype=dtype, generator=source)
        Q = form.update(Q, v, h * 10.0**exponent, lr)
    dense = form.matrix(tuple(x.double() for x in Q))
    assert dense.isfinite().all()
    assert torch.linalg.det(dense / Q[2].double()) > 0
    assert form.precondition(Q, v).isfinite().all()


@EVERY_RANK
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_bad_pair_changes_no_member_but_its_own(rank: int, bad: float) -> None:
    form = LowRank(rank)
    Q, (v, h) = learned(form), pairs(seed=9)
    good = form.update(Q, v, h, 0.1)
    v[1], h[1] = (0.0, 0.0) if bad == 0.0 else (v[1], torch.full_like(h[1], bad))
    after = form.update(Q, v, h, 0.1)
    for new, old, other in zip(after, Q, good, strict=True):
        assert torch.equal(new[1], old[1])
        torch.testing.assert_close(new[[0, 2]], other[[0, 2]], rtol=1e-10, atol=1e-12)


@EVERY_RANK
def test_a_batch_equals_its_members_one_by_one(rank: int) -> None:
    form = LowRank(rank)
    Q, (v, h) = learned(form), pairs(k=2, seed=9)
    after = form.matrix(form.update(Q, v, h, 0.2))
    alone = [form.matrix(form.update(tuple(x[i] for x in Q), v[i], h[i], 0.2)) for i in range(3)]
    torch.testing.assert_close(after, torch.stack(alone), rtol=1e-9, atol=1e-11)


def test_the_optimizer_takes_it_saves_it_and_goes_on() -> None:
    goes_on_from_its_state(preconditioner=LowRank(3))


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="int"):
        LowRank(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0"):
        LowRank(-1)
