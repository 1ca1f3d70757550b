"""Alternating probes: one in three of covariance P, whatever the form, the dtype and the way of calling."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import HVP, fill, generator, loss_of, network

import psgd_lit.optim
from psgd_lit.affine import affine_blocks, from_real
from psgd_lit.derivatives import draw_by_parameter
from psgd_lit.groups import Diagonal, Group, Kron, SparseLU, Triangular
from psgd_lit.groups.diagonal import Equilibration
from psgd_lit.low_rank import LowRank
from psgd_lit.optim import PSGD
from psgd_lit.probes import coloured, probes_of_step

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

FORMS = ["dense", "splu", "kron", "scan", "scan-or-kron", "diagonal", LowRank(2)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]]:
    """The probes of each step that fits, and what they would have been without colour."""
    kept: list[tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]] = []

    def watched(
        params: Sequence[Tensor], head: Mapping[str, Any], active: Any, t: int, law: str = "normal"
    ) -> dict[Tensor, Tensor]:
        found = probes_of_step(params, head, active, t, law)
        kept.append((found, draw_by_parameter(params, head["seed"], t)))
        return found

    monkeypatch.setattr(psgd_lit.optim, "probes_of_step", watched)
    return kept


@pytest.mark.parametrize("form", [Diagonal(), Triangular(), Kron(Triangular(), Diagonal()), SparseLU(2)], ids=repr)
def test_coloured_probes_have_the_covariance_of_the_preconditioner(form: Group) -> None:
    w = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    opt = PSGD([w], 0.0, preconditioner=form, update_every=1)
    scale = torch.logspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    for _ in range(22):
        opt.step(lambda: (scale * w).square().sum() + w.sum().square())
    [(_, bucket)] = opt.buckets.active({})
    units = torch.eye(12, dtype=torch.float64).view(12, 3, 4)
    root = torch.stack([coloured(bucket, {w: u})[w].flatten() for u in units], 1)
    P = form.precondition(bucket.Q, torch.eye(12, dtype=torch.float64)[None])[0]
    torch.testing.assert_close(root @ root.mT, P, rtol=1e-10, atol=1e-12)


def test_one_fit_in_three_is_coloured_and_skipped_steps_do_not_count(seen) -> None:
    net = fill(network())
    opt = PSGD(net.parameters(), 0.1, probes="alternating", update_every=lambda t: 1 + t % 3)
    for _ in range(18):
        opt.step(lambda: loss_of(net))
    changed = [any(not torch.equal(v[p], u[p]) for p in v) for v, u in seen]
    assert changed == [i in (1, 4, 6, 9, 12, 14, 17) for i in range(len(seen))]
    assert 5 < len(seen) < 18


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_every_form_trains_with_them(form: Any) -> None:
    net = fill(network())
    blocks = affine_blocks(net) if form in ("scan", "scan-or-kron") else None
    opt = PSGD(net.parameters(), 0.1, preconditioner=form, blocks=blocks, probes="alternating")
    values = [float(opt.step(lambda: loss_of(net)).detach()) for _ in range(40)]
    assert values[-1] < 0.6 * values[0]


@pytest.mark.parametrize("hvp", ["exact", "approx", "forward"])
def test_flat_directions_are_found_with_every_product(hvp: str) -> None:
    """A quadratic of condition number 10^4, where normal probes leave most of the loss of the flattest direction."""
    left = {}
    scale = torch.logspace(0, -2, 6, dtype=torch.float64)
    axes = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator(0)))[0]
    for law in ("normal", "alternating"):
        x = (axes.T @ (1 / scale)).clone().requires_grad_()
        opt = PSGD([x], 0.1, hvp=hvp, probes=law, update_every=1)
        for _ in range(300):
            loss = opt.step(lambda x=x: (scale * (axes @ x)).square().sum())
        left[law] = float(loss.detach())
    assert left["alternating"] < 1e-2 * left["normal"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_probes_have_the_dtype_of_their_parameter(seen, dtype: torch.dtype) -> None:
    start = torch.randn(3, 4, generator=generator(1)).to(dtype)
    w, b = nn.Parameter(start), nn.Parameter(torch.ones(4))
    opt = PSGD([w, b], 0.01, probes="alternating", update_every=1)
    for _ in range(4):
        opt.step(lambda: (w.abs().float() ** 2).sum() + (b**4).sum())
    for v, _ in seen:
        assert {p: x.dtype for p, x in v.items()} == {w: dtype, b: torch.float32}
        assert all(x.shape == p.shape and x.isfinite().all() for p, x in v.items())
    assert opt.skipped == 0


def test_a_block_that_joins_late_keeps_its_first_probe(seen) -> None:
    a, b = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    opt = PSGD([a, b], 0.01, probes="alternating", update_every=1)
    for t in range(5):
        opt.step(lambda t=t: (a**4).sum() + ((b**4).sum() if t > 3 else 0))
    probes, plain = seen[4]
    assert not torch.equal(probes[a], plain[a])
    assert torch.equal(probes[b], plain[b])


def test_frozen_parts_and_several_groups(seen) -> None:
    net = fill(network())
    first, *rest = net.parameters()
    first.requires_grad_(False)
    opt = PSGD(
        [{"params": [first]}, {"params": rest, "preconditioner": "diagonal"}],
        0.1,
        probes="alternating",
        update_every=1,
    )
    for _ in range(6):
        opt.step(lambda: loss_of(net))
    assert set(seen[-1][0]) == set(rest)
    assert opt.skipped == 0


@pytest.mark.parametrize("form", ["dense", "kron", "splu"])
@pytest.mark.parametrize("steps", [30, 31])
def test_a_run_goes_on_from_its_state_to_the_last_bit(form: str, steps: int) -> None:
    weights = torch.logspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    x, y = (nn.Parameter(torch.ones(4, 6, dtype=torch.float64)) for _ in range(2))
    opt, other = (PSGD([z], 0.1, update_every=1, preconditioner=form, probes="alternating") for z in (x, y))
    for t in range(2 * steps):
        if t == steps:
            other.load_state_dict(opt.state_dict())
            y.data.copy_(x.data)
        opt.step(lambda: (weights * x * x).sum())
        if t >= steps:
            other.step(lambda: (weights * y * y).sum())
    assert torch.equal(x, y)


def eigenvalues(opt: PSGD, H: Tensor) -> Tensor:
    """The magnitudes of the eigenvalues of P H, of an optimizer with one block, in ascending order."""
    [(_, bucket)] = opt.buckets.active({})
    Q = bucket.group.matrix(bucket.Q)[0].double()
    return torch.linalg.eigvalsh(Q @ H.double() @ Q.mT).abs().sort().values


def test_blocks_that_take_turns_see_both_laws() -> None:
    """Two blocks of an indefinite Hessian, each used at every other step: neither drifts, both find flat directions."""
    axes = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator(0)))[0]
    values = torch.tensor([1.0, -1.0, 1e-3, -1e-3], dtype=torch.float64)
    H = axes @ torch.diag(values) @ axes.mT
    blocks = [nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2)]
    opt = PSGD(blocks, 0.0, preconditioner=Triangular(), probes="alternating", update_every=1)
    for t in range(4000):
        x = blocks[t % 2]
        opt.step(lambda x=x: x @ H @ x / 2)
    [(_, bucket)] = opt.buckets.active({})
    for Q in bucket.group.matrix(bucket.Q):
        found = torch.linalg.svdvals(Q @ axes @ torch.diag(values.abs().sqrt())).square()
        assert 0.05 < found.min() < found.max() < 20


def test_autocast_does_not_touch_the_probes() -> None:
    """The coloured probe is arithmetic of the optimizer, which is done in float32 whatever the loss is computed in."""
    H = torch.diag(torch.logspace(0, -6, 8))
    H = (axes := torch.linalg.qr(torch.randn(8, 8, generator=generator(0)))[0]) @ H @ axes.mT
    ends = []
    for enabled in (False, True):
        x = nn.Parameter(torch.ones(8))
        opt = PSGD([x], 0.0, preconditioner="dense", probes="alternating", update_every=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for _ in range(200):
                opt.step(lambda x=x: (x * (H * x).sum(1)).sum() / 2)
        ends.append(eigenvalues(opt, H))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["nonconvex", "traditional"])
@pytest.mark.parametrize("damping", [1e-2, 10.0])
def test_damping_bounds_the_preconditioner_as_with_normal_probes(kind: str, damping: float) -> None:
    x = nn.Parameter(torch.ones(3, dtype=torch.float64))
    scale = torch.tensor([1.0, 1e-2, 1e-6], dtype=torch.float64)
    settings = {"damping": damping, "damping_kind": kind, "probes": "alternating"}
    opt = PSGD([x], 0.0, preconditioner="dense", update_every=1, **settings)
    sums = torch.zeros((), dtype=torch.float64)
    for t in range(3000):
        opt.step(lambda: (scale * x * x).sum() / 2)
        if t >= 1000:
            [(_, bucket)] = opt.buckets.active({})
            sums += torch.linalg.matrix_norm(bucket.group.matrix(bucket.Q)[0], 2).square().log() / 2000
    assert 0.3 < sums.exp() * damping < 3


def test_the_first_fit_and_a_run_with_normal_probes_are_as_they_were(seen) -> None:
    ends = []
    for law in ("normal", "alternating"):
        net = fill(network())
        opt = PSGD(net.parameters(), 0.1, probes=law)
        opt.step(lambda net=net: loss_of(net))
        opt.step(lambda net=net: loss_of(net))
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(v[p], u[p]) for v, u in seen[:3] for p in v)  # the fourth fit alone is coloured
    assert all(torch.equal(x, y) for x, y in zip(*ends, strict=True))  # which the second step has not yet used


@pytest.mark.parametrize("hvp", HVP)
@pytest.mark.parametrize("settings", [{}, {"normalizer": "running"}, {"preconditioner": "esgd"}], ids=str)
def test_the_default_is_alternating_for_exact_products_and_else_normal(hvp: str, settings: dict[str, Any]) -> None:
    law = "alternating" if hvp in ("exact", "forward") and not settings else "normal"
    ends = []
    for probes in ({}, {"probes": "auto"}, {"probes": law}):
        net = fill(network())
        opt = PSGD(net.parameters(), 0.01, hvp=hvp, update_every=1, **settings, **probes)
        for _ in range(6):
            opt.step(lambda net=net: loss_of(net))
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(x, p) for end in ends[1:] for x, p in zip(ends[0], end, strict=True))


@pytest.mark.parametrize(
    "cautious", [{"preconditioner": "esgd"}, {"preconditioner": "diagonal", "normalizer": "running"}], ids=str
)
def test_one_group_that_refuses_them_keeps_them_from_all(cautious: dict[str, Any]) -> None:
    """Its product would hold what its neighbours' coloured probes show, by the curvature between them."""
    H = 1e-4 * torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    found = {}
    for law in ("normal", "auto"):
        x, y = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
        groups = [{"params": [x], **cautious}, {"params": [y], "preconditioner": "diagonal"}]
        opt = PSGD(groups, 0.0, probes=law, update_every=1, init_scale=10.0)
        for _ in range(30):
            opt.step(lambda x=x, y=y: torch.cat([x, y]) @ H @ torch.cat([x, y]) / 2)
        found[law] = [p for z in (x, y) for p in opt.state[z]["Q"]]
    assert all(torch.equal(a, b) for a, b in zip(found["normal"], found["auto"], strict=True))


def test_a_rule_that_mixes_them_keeps_them_from_all(seen) -> None:
    net = fill(network())
    opt = PSGD(net.parameters(), 0.01, preconditioner=lambda shape: Equilibration() if len(shape) < 2 else Diagonal())
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    assert all(torch.equal(v[p], u[p]) for v, u in seen for p in v)


class Slope(torch.autograd.Function):
    """A gradient of curvature 1e-4, whose derivative overflows along a long vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 1e-4 * x

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Tensor:
        return torch.where(v.norm() > 30, torch.inf, 1e-4 * v)


class Delicate(torch.autograd.Function):
    """A loss with that gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 5e-5 * x.square().sum()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Tensor:
        return scale * Slope.apply(ctx.saved_tensors[0])


@pytest.mark.filterwarnings("ignore:.*fits of Q")
def test_a_coloured_probe_that_overflows_does_not_stop_the_fits() -> None:
    """The fit is dropped, and the next one has the other law."""
    x = nn.Parameter(torch.ones(4))
    opt = PSGD([x], 1e-3, preconditioner="diagonal", init_scale=100.0, update_every=1)
    for _ in range(30):
        opt.step(lambda: Delicate.apply(x))
    assert opt.dropped_fits == 10 == opt.skipped
    assert float(opt.state[x]["pairs"]) == 20


def test_tasks_in_turn_see_both_laws_whatever_their_number(seen) -> None:
    for tasks in (2, 3, 4, 6, 9):
        seen.clear()
        blocks = [nn.Parameter(torch.ones(2)) for _ in range(tasks)]
        opt = PSGD(blocks, 0.01, probes="alternating", update_every=1)
        for t in range(40 * tasks):
            x = blocks[t % tasks]
            opt.step(lambda x=x: (x**4).sum())
        laws = [any(not torch.equal(v[p], u[p]) for p in v) for v, u in seen]
        for k in range(tasks):
            assert 0.2 < sum(laws[k::tasks]) / 40 < 0.45


def test_a_state_of_before_keeps_its_law_and_new_groups_follow_it() -> None:
    net = fill(network())
    older = PSGD(net.parameters(), 0.01, probes="normal")
    older.step(lambda: loss_of(net))
    opt = PSGD(net.parameters(), 0.01)
    opt.load_state_dict(older.state_dict())
    extra = nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [extra]})
    assert [group["probes"] for group in opt.param_groups] == ["normal", "normal"]
    with pytest.raises(ValueError, match="shared by all param groups"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "probes": "alternating"})


def test_a_rule_that_takes_running_means_refuses_them_at_the_first_fit_that_has_a_state() -> None:
    net = fill(network())
    opt = PSGD(net.parameters(), preconditioner=lambda shape: Equilibration(), probes="alternating")
    opt.step(lambda: loss_of(net))
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ValueError, match='choose "diagonal"'):
        opt.step(lambda: loss_of(net))
    assert all(torch.equal(x, p) for x, p in zip(before, net.parameters(), strict=True))


def test_the_default_follows_another_product(seen) -> None:
    net = fill(network())
    opt = PSGD(net.parameters(), 0.01, update_every=1)
    for hvp in ("exact", "approx", "exact", "exact", "exact"):  # the second and the fifth pair would be coloured
        opt.param_groups[0]["hvp"] = hvp
        opt.step(lambda: loss_of(net))
    changed = [any(not torch.equal(v[p], u[p]) for p in v) for v, u in seen]
    assert changed == [False, False, False, False, True]


def test_whitening_refuses_them_and_nothing_has_changed() -> None:
    net = network()
    with pytest.raises(ValueError, match="choose another hvp"):
        PSGD(net.parameters(), hvp="whiten", probes="alternating")
    opt = PSGD(net.parameters(), probes="alternating")
    opt.param_groups[0]["hvp"] = "whiten"
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ValueError, match="choose another hvp"):
        opt.step(lambda: loss_of(net))
    assert all(torch.equal(x, p) for x, p in zip(before, net.parameters(), strict=True))


def test_a_memory_of_half_gradients_refuses_them() -> None:
    with pytest.raises(ValueError, match='choose "pair"'):
        PSGD(network().parameters(), normalizer="running", probes="alternating")


@pytest.mark.parametrize("form", ["esgd", Equilibration()], ids=repr)
def test_running_means_of_squares_refuse_them(form: Any) -> None:
    with pytest.raises(ValueError, match='choose "diagonal"'):
        PSGD(network().parameters(), preconditioner=form, probes="alternating")


def test_real_numbers_go_back_to_what_they_were() -> None:
    z = torch.randn(3, 2, dtype=torch.complex128, generator=generator(0))
    assert torch.equal(from_real(torch.view_as_real(z), z), z)
    odd = torch.randn(7, generator=generator(0))[1:].view(3, 2)  # begins at an odd place in memory
    assert torch.equal(from_real(odd, torch.zeros(3, dtype=torch.complex64)), torch.complex(odd[:, 0], odd[:, 1]))
