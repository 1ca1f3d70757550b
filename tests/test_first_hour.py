"""What people try in their first hour with a model that isn't ours, and what went wrong there."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from toys import equal, loss_of, network

from psgd_lit import PSGD, PreconditionedLBFGS, affine_blocks, doctor, optim
from psgd_lit.affine import Block, Piece
from psgd_lit.regularization import clip_blocks, clip_factor
from psgd_lit.sharding import planned


class Residual(nn.Module):
    """A block that is added through a gate, which nearly shuts it out at first."""

    def __init__(self, width: int, gate: float) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.gate = nn.Parameter(torch.full((width,), gate))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.outer(self.inner(self.norm(x)).relu())


def after_training(gate: float, **settings: Any) -> float:
    """The loss of a small residual network after 250 steps on batches of four groups of points."""
    torch.manual_seed(0)
    centres, source = torch.randn(4, 8), torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), *[Residual(16, gate) for _ in range(3)], nn.LayerNorm(16), nn.Linear(16, 4))
    opt = PSGD(net.parameters(), **settings)
    y = torch.arange(64) % 4

    def loss() -> Tensor:
        x = centres[y] + torch.randn(64, 8, generator=source)
        return nn.functional.cross_entropy(net(x), y)

    for _ in range(250):
        opt.step(loss)
    assert opt.skipped == 0
    return sum(loss().item() for _ in range(20)) / 20


def test_a_gate_that_is_nearly_shut_does_not_stop_the_others(monkeypatch):
    """Blocks behind it learn a huge P, and their steps are clipped by themselves."""
    clipped = after_training(1e-6, hvp="whiten")
    monkeypatch.setattr(optim, "clip_blocks", lambda columns, *rule: clip_blocks([], *rule))
    assert clipped < 0.7 * after_training(1e-6, hvp="whiten")


def turned() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter, Block]:
    """Three parameters, and a block of the first two, in which the first one lies so that it can't be a view."""
    p, q, r = (nn.Parameter(torch.arange(1.0, n + 1)) for n in (6, 3, 4))
    return p, q, r, Block((Piece(p, (1, 3, 2), (2, 3), (1, 0)), Piece(q, (1, 3, 1))))


def test_a_huge_block_of_which_a_part_is_frozen_does_not_stop_another():
    """What is measured of it is a copy, made after the block has been shortened."""
    p, q, r, block = turned()
    q.requires_grad_(False)
    opt = PSGD(
        [{"params": [p, q], "init_scale": 1e6}, {"params": [r]}], lr=0.1, hvp="whiten", init_scale=1.0, blocks=[block]
    )
    opt.diagnostics()
    opt.step(lambda: (p.sum() + r.sum()) / 10)
    assert opt.diagnostics()["clip"] > 0.5
    assert (torch.arange(1.0, 5) - r.detach() > 0.5 * 0.1 * 0.1).all()


def test_what_an_owner_plans_is_measured_after_its_blocks_are_shortened():
    p, q, _, block = turned()
    opt = PSGD([p, q], lr=1.0, hvp="whiten", init_scale=1e6, blocks=[block])
    g = {p: torch.ones(6), q: torch.ones(3)}

    def clip(columns: list[Tensor], lengths: Any) -> Tensor:
        clip_blocks(columns, opt.param_groups[0], 1, lambda: torch.tensor(1.0))
        return clip_factor(list(lengths), 1.0)

    with torch.no_grad():
        plan = planned(opt, g, {one: (x, x) for one, x in g.items()}, lambda t: {}, clip)
    assert torch.nn.utils.get_total_norm([*plan.steps.values()]) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_a_parameter_that_wakes_up_late(hvp):
    """One of six bumps is out of reach of all points: its P overflows, and the others go on."""
    torch.manual_seed(1)
    x = torch.rand(300, 2) * 2 - 1
    y = torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1])
    centres = [nn.Parameter(2 * torch.rand(1, 2) - 1 + (3.6 if i == 5 else 0)) for i in range(6)]
    w, b = nn.Parameter(0.1 * torch.randn(6)), nn.Parameter(torch.zeros(()))

    def loss() -> Tensor:
        bumps = (-((x[:, None] - torch.cat(centres)) ** 2).sum(-1) / 0.18).exp()
        return ((bumps @ w + b - y) ** 2).mean()

    opt = PSGD([*centres, w, b], hvp=hvp)
    for _ in range(400):
        opt.step(loss)
    assert opt.skipped == 0
    assert loss() < 0.05


def test_a_first_batch_with_next_to_no_loss():
    net, x = nn.Linear(2, 1), torch.rand(50, 2)
    opt = PSGD(net.parameters())

    def loss() -> Tensor:
        return (net(x)[:, 0] - x.sum(1)).square().mean()

    opt.step(lambda: 1e-20 * loss())
    for _ in range(300):
        opt.step(loss)
    assert opt.skipped == 0
    assert loss() < 0.02


def test_a_parameter_with_a_constant_gradient():
    """An L1 penalty has no curvature, and torch's zeros for it can't be written to."""
    net, gate = nn.Linear(6, 1), nn.Parameter(torch.ones(6))
    X, Y = torch.randn(32, 6), torch.randn(32, 1)
    opt = PSGD([*net.parameters(), gate])
    for _ in range(3):
        opt.step(lambda: (net(X) - Y).square().mean() + 1e-3 * gate.abs().sum())
    assert opt.skipped == 0
    assert (gate != 1).any()


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
def test_a_loss_with_a_derivative_by_torch_func(hvp):
    """As physics-informed networks have."""
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(8, 3)
    opt = PSGD(net.parameters(), hvp=hvp)
    losses = [opt.step(lambda: ((vmap(grad(lambda z: net(z).squeeze()))(x) - 1) ** 2).mean()) for _ in range(30)]
    assert losses[-1] < losses[0]


def test_trials_on_batches_are_told():
    torch.manual_seed(0)
    net, X = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(1000, 6)
    Y = X[:, :1].sin() + 0.5 * torch.randn(1000, 1)
    opt = PSGD(net.parameters(), lr=1.0, monotone=True)

    def train() -> None:
        for _ in range(120):
            i = torch.randint(0, 1000, (32,))
            opt.step(lambda i=i: (net(X[i]) - Y[i]).square().mean())

    with pytest.warns(UserWarning, match="same function at each call"):
        train()


def test_steps_that_are_never_taken_are_told():
    net = network()
    opt = PSGD(net.parameters())

    def train() -> None:
        for _ in range(101):
            opt.step(lambda: loss_of(net) * torch.nan)

    with pytest.warns(UserWarning, match=r"most steps were not taken.*opt\.skipped"):
        train()


def twin_blocks(**settings: Any) -> PSGD:
    net = network()
    blocks = affine_blocks(net)
    return PSGD(copy.deepcopy(net).parameters(), blocks=blocks, **settings)


def on_meta() -> None:
    with torch.device("meta"):
        net = nn.Linear(3, 1)
    opt = PSGD(net.parameters())
    net.to_empty(device="cpu")
    opt.step(lambda: net(torch.ones(2, 3)).square().mean())


def a_tensor_for_a_closure() -> None:
    net = network()
    PSGD(net.parameters()).step(loss_of(net))


def state_with(**wrong: Any) -> None:
    net = network()
    opt = PSGD(net.parameters())
    before = copy.deepcopy(opt.state_dict())
    spoilt = copy.deepcopy(before)
    spoilt["param_groups"][0] |= wrong
    try:
        opt.load_state_dict(spoilt)
    finally:
        assert equal(opt.state_dict(), before)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            lambda: PreconditionedLBFGS(network().parameters()),
            TypeError,
            "takes a PSGD that has taken steps, not generator",
        ),
        (lambda: PreconditionedLBFGS(torch.optim.Adam(network().parameters())), TypeError, "not Adam"),
        (twin_blocks, ValueError, "none of the blocks holds a parameter"),
        (lambda: affine_blocks(network().parameters()), TypeError, "takes a model, a torch.nn.Module, not generator"),
        (lambda: PSGD(network().parameters(), hvp=["exact"]), ValueError, "hvp must be one of"),
        (on_meta, RuntimeError, "make the optimizer after to_empty"),
        (a_tensor_for_a_closure, TypeError, "a function that returns the loss.*not Tensor"),
        (lambda: state_with(lr=-4.0), ValueError, "lr"),
        (lambda: state_with(hvp="whitten"), ValueError, "hvp must be one of"),
    ],
)
def test_a_slip_is_told(wrong: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        wrong()


def test_blocks_may_belong_to_any_group():
    net = network()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    assert "0.0, 0.1" in PSGD(groups, blocks=affine_blocks(net[0])).describe()


def test_the_doctor_sees_a_sparse_gradient():
    net, i = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3)), torch.randint(0, 20, (32,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = str(doctor(net, lambda: net(i).square().mean()))
    assert "sparse=False" in said
