"""What people try in their first hour with a model that isn't ours, and what went wrong there."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from toys import equal, fill, generator, loss_of, network, quiet

from psgd_lit import PSGD, PreconditionedLBFGS, affine_blocks, doctor, optim
from psgd_lit.affine import Block, Piece
from psgd_lit.experiments.digits import load_digits
from psgd_lit.regularization import clip_blocks, clip_factor
from psgd_lit.sharding import planned


class Residual(nn.Module):
    """A block that is added through a gate, which nearly shuts it out at first."""

    def __init__(self, width: int, gate: float) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.gate = nn.Parameter(torch.full((width,), gate))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.outer(self.inner(self.norm(x)).relu())


def after_training(gate: float, **settings: Any) -> float:
    """The loss of a small residual network after 250 steps on batches of four groups of points."""
    torch.manual_seed(0)
    centres, source = torch.randn(4, 8), torch.Generator().manual_seed(1)
    net = nn.Sequential(
        nn.Linear(8, 16),
        *[Residual(16, gate) for _ in range(3)],
        nn.LayerNorm(16),
        nn.Linear(16, 4),
    )
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
        [{"params": [p, q], "init_scale": 1e6}, {"params": [r]}],
        lr=0.1,
        hvp="whiten",
        init_scale=1.0,
        blocks=[block],
    )
    opt.diagnostics()
    opt.step(lambda: (p.sum() + r.sum()) / 10)
    assert opt.diagnostics()["clip"] > 0.5
    assert (torch.arange(1.0, 5) - r.detach() > 0.5 * 0.1 * 0.1).all()


def test_what_an_owner_plans_is_measured_after_its_blocks_are_shortened():
    p, q, _, block = turned()
    opt = PSGD([p, q], lr=1.0, hvp="whiten", init_scale=1e6, blocks=[block])
    g = {p: torch.ones(6), q: torch.ones(3)}

    def clip(columns: list[Tensor], lengths: Any) -> tuple[Tensor, None]:
        clip_blocks(columns, opt.param_groups[0], 1, torch.tensor(1.0))
        return clip_factor(list(lengths), 1.0), None

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
        (
            lambda: PreconditionedLBFGS(torch.optim.Adam(network().parameters())),
            TypeError,
            "not Adam",
        ),
        (twin_blocks, ValueError, "none of the blocks holds a parameter"),
        (
            lambda: affine_blocks(network().parameters()),
            TypeError,
            "takes a model, a torch.nn.Module, not generator",
        ),
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
    net, i = (
        nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3)),
        torch.randint(0, 20, (32,)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = str(doctor(net, lambda: net(i).square().mean()))
    assert "sparse=False" in said


# Members of one bucket, and members without a pair ---------------------------------------------------------------


def experts(count: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(count)]


POINTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
ANSWERS = POINTS[:, :1].sin() + POINTS[:, 1:2] * POINTS[:, 2:3]


def fit_error(net: nn.Module) -> Tensor:
    return (net(POINTS) - ANSWERS).square().mean()


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_a_block_learns_alike_whether_or_not_its_neighbours_are_used(hvp):
    """As experts that take turns: blocks of one shape lie in one bucket, if they are of one param group."""
    ends = []
    for apart in (True, False):
        nets = experts(3)
        groups = [{"params": [*net.parameters()]} for net in nets]
        together = [{"params": [p for net in nets for p in net.parameters()]}]
        opt = PSGD(groups if apart else together, hvp=hvp)
        turns = torch.randint(3, (150,), generator=torch.Generator().manual_seed(2)).tolist()
        for i in turns:
            opt.step(lambda net=nets[i]: fit_error(net))
        ends.append([fit_error(net).item() for net in nets])
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
def test_a_layer_that_no_fit_meets_moves_all_the_same(hvp):
    """Its turn never coincides with that of the fits."""
    first, second = experts(2)
    opt = PSGD([*first.parameters(), *second.parameters()], hvp=hvp, update_every=2)
    before = fit_error(second).item()
    for _ in range(100):
        opt.step(lambda: fit_error(first))
        opt.step(lambda: fit_error(second))
    assert fit_error(second).item() < 0.8 * before


def test_a_first_batch_without_a_number_stops_nobody():
    (net,) = experts(1)
    opt = PSGD(net.parameters(), update_every=100)
    before = fit_error(net).item()
    opt.step(lambda: fit_error(net) * math.nan)
    for _ in range(50):
        opt.step(lambda: fit_error(net))
    assert opt.skipped == 1
    assert fit_error(net).item() < 0.8 * before


def test_a_block_at_a_point_without_curvature_leaves_it():
    """The second derivative of a norm at zero isn't a number, and its gradient is."""
    a, b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(1, 2))
    opt = PSGD([a, b])

    def loss() -> Tensor:
        return (POINTS @ a.T @ b.T - ANSWERS).square().mean() + 1e-3 * b.norm()

    before = loss().item()
    for _ in range(20):
        opt.step(loss)
    assert opt.dropped_fits >= 1
    assert loss().item() < 0.9 * before


# Trials -----------------------------------------------------------------------------------------------------------


def test_trials_go_on_after_the_loss_has_changed():
    """As points of a physics-informed network that are drawn anew."""
    (net,), ends = experts(1), []
    opt = PSGD(net.parameters(), lr=1.0, monotone=True)
    for size in (1.0, 3.0):
        for _ in range(150):
            opt.step(lambda size=size: (net(size * POINTS) - ANSWERS).square().mean())
        ends.append((net(size * POINTS) - ANSWERS).square().mean().item())
    start = (net(POINTS) - ANSWERS).square().mean().item()
    assert max(ends) < 0.3 * start


def test_weights_that_were_loaded_after_settle_stay():
    net, other = experts(2)
    opt = PSGD(net.parameters(), lr=1.0, monotone=True)
    for _ in range(60):
        opt.step(lambda: fit_error(net))
    opt.settle()
    net.load_state_dict(other.state_dict())
    loss = opt.step(lambda: fit_error(net))
    assert loss.item() == pytest.approx(fit_error(other).item())
    opt.settle()
    assert equal([*net.parameters()], [*other.parameters()])


def test_settling_twice_takes_nothing_back():
    """As a hand-over to L-BFGS does, and its user at the end."""
    (net,) = experts(1)
    opt = PSGD(net.parameters(), lr=1.0, monotone=True)
    for _ in range(30):
        opt.step(lambda: fit_error(net))
    lbfgs = PreconditionedLBFGS(opt)
    lbfgs.step(lambda: fit_error(net))
    end = fit_error(net).item()
    opt.settle()
    assert fit_error(net).item() == end


@pytest.mark.filterwarnings("ignore:many steps were taken back")
def test_no_start_of_a_step_rises_however_wrong_the_preconditioner_is():
    x = nn.Parameter(torch.ones(3))
    free = {"max_norm": math.inf, "max_decrease": math.inf}
    opt = PSGD([x], lr=1.0, preconditioner="dense", monotone=True, init_scale=1.0, **free)
    starts = []
    for _ in range(150):
        opt.step(lambda: 5e8 * x.square().sum())
        starts.append(float(opt.param_groups[0]["loss"]))
    assert starts == sorted(starts, reverse=True)
    assert starts[-1] < starts[0]


def test_trials_and_weight_decay_exclude_each_other():
    (net,) = experts(1)
    with pytest.raises(ValueError, match="add the penalty to the loss"):
        PSGD(net.parameters(), monotone=True, weight_decay=0.1)


@pytest.mark.parametrize(
    ("maximize", "losses", "exploded"),
    [(False, 12 * [0.0] + [3.0], 0), (True, [1.0] + 12 * [999.0], 0)],
)
def test_a_success_is_no_explosion(maximize, losses, exploded):
    x = nn.Parameter(torch.ones(2))
    opt = PSGD([x], maximize=maximize)
    for value in losses:
        opt.step(lambda value=value: x.sum() * 0 + value)
    assert opt.exploded == exploded


# Settings in param groups -----------------------------------------------------------------------------------------


def test_the_step_size_follows_the_product_of_the_group():
    (net,) = experts(1)
    assert PSGD([{"params": net.parameters(), "hvp": "whiten"}]).param_groups[0]["lr"] == 0.003
    assert PSGD([{"params": net.parameters(), "lr": None}]).param_groups[0]["lr"] == 0.1


def test_another_preconditioner_in_a_group_is_refused_once_it_has_learned():
    (net,) = experts(1)
    opt = PSGD(net.parameters())
    opt.param_groups[0]["preconditioner"] = "diagonal"
    opt.step(lambda: fit_error(net))
    opt.param_groups[0]["preconditioner"] = "kron"
    for act in (lambda: opt.step(lambda: fit_error(net)), opt.state_dict):
        with pytest.raises(ValueError, match="put them back"):
            act()
    opt.param_groups[0]["preconditioner"] = "diagonal"
    opt.step(lambda: fit_error(net))
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["preconditioner"] = "kron"
    with pytest.raises(ValueError, match="put them back"):
        opt.step(lambda: fit_error(net))


def test_gradients_that_are_divided_with_their_graph_are_as_good():
    (net,) = experts(1)
    opt = PSGD(net.parameters(), update_every=1)
    with quiet():
        fit_error(net).backward(create_graph=True)
    for p in net.parameters():
        p.grad.div_(4)
    opt.step()


def test_a_step_size_that_is_no_number_skips_the_step():
    (net,) = experts(1)
    opt = PSGD(net.parameters(), lr=torch.tensor(0.1), weight_decay=0.1)
    opt.step(lambda: fit_error(net))
    opt.param_groups[0]["lr"].fill_(math.nan)
    before = [p.detach().clone() for p in net.parameters()]
    opt.step(lambda: fit_error(net))
    assert opt.skipped == 1
    assert equal(before, [p.detach() for p in net.parameters()])


def test_lazy_modules_are_told_to_run_once():
    net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    with pytest.raises(ValueError, match="run the model once"):
        PSGD(net.parameters())
    net(POINTS)
    PSGD(net.parameters()).step(lambda: fit_error(net))


@pytest.mark.parametrize("to_none", [True, False])
def test_graphs_of_layers_that_take_turns(to_none):
    """What an unused layer keeps of an earlier step is no gradient without a graph."""
    nets = experts(2)
    opt = PSGD([p for net in nets for p in net.parameters()], update_every=2)
    for i in range(6):
        opt.zero_grad(set_to_none=to_none)
        with quiet():
            fit_error(nets[(0, 1, 0)[i % 3]]).backward(create_graph=opt.due)
        opt.step()
    assert opt.skipped == 0


def test_gradients_that_are_divided_by_hand_are_told():
    """Q is then fitted to the curvature of the loss as it was."""
    (net,) = experts(1)
    opt = PSGD(net.parameters(), update_every=1)
    for factor in (1.0, 0.25):
        opt.zero_grad()
        with quiet():
            (fit_error(net) * factor).backward(create_graph=True)
        opt.step()
    opt.zero_grad()
    with quiet():
        fit_error(net).backward(create_graph=True)
    with torch.no_grad():
        for p in net.parameters():
            p.grad.div_(4)
    with pytest.warns(UserWarning, match="divide the loss"):
        opt.step()


@pytest.mark.parametrize("preconditioner", ["kron", "dense"])
def test_lbfgs_leaves_frozen_layers_and_takes_new_ones(preconditioner):
    net, late = experts(2)
    opt = PSGD(
        [*net.parameters(), *late.parameters()],
        preconditioner=preconditioner,
        lr=1.0,
        monotone=True,
    )
    for _ in range(30):
        opt.step(lambda: fit_error(net))
    net[0].requires_grad_(False)
    lbfgs = PreconditionedLBFGS(opt)
    frozen, before = net[0].weight.detach().clone(), fit_error(late).item()
    late[0].requires_grad_(False)
    for _ in range(5):
        lbfgs.step(lambda: fit_error(net) + fit_error(late))
    assert torch.equal(net[0].weight, frozen)
    assert fit_error(late).item() < 0.9 * before


def digits_classifier(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_classifier_that_separates_its_classes_stays_there(seed, momentum):
    """Once all is right, the curvature is next to nothing and P huge: long steps must not feed on each other."""
    images, labels, others, truth = load_digits()
    net, source = digits_classifier(seed), generator(seed)
    opt = PSGD(net.parameters(), momentum=momentum)
    for _ in range(1800):
        i = torch.randint(len(images), (50,), generator=source)
        opt.step(lambda i=i: nn.functional.cross_entropy(net(images[i]), labels[i]))
    with torch.no_grad():
        assert nn.functional.cross_entropy(net(images), labels) < 0.1
        assert (net(others).argmax(1) != truth).float().mean() < 0.13


def test_the_threshold_follows_a_hundred_steps_and_then_stands_still():
    x = nn.Parameter(torch.full((4,), 10.0))
    opt = PSGD([x], lr=1e-3)
    seen = []
    for t in range(130):
        if t == 60:
            x.data.fill_(50.0)
        if t == 110:
            x.data.fill_(1e3)
        opt.step(lambda: x.square().sum())
        seen.append(opt.param_groups[0]["reference"].item())
    assert seen[0] == 20
    assert 90 < seen[60] <= 100
    assert len(set(seen[99:])) == 1
    late = nn.Parameter(torch.ones(4))
    opt.add_param_group({"params": [late]})
    opt.step(lambda: x.square().sum() + late.square().sum())
    assert opt.param_groups[1]["reference"].item() > 1e3  # it follows again


def test_the_threshold_is_a_part_of_the_state():
    ends = []
    for breaks in (False, True):
        x = nn.Parameter(torch.arange(1.0, 5.0))
        opt = PSGD([x], seed=3, max_decrease=math.inf)
        for t in range(140):
            if breaks and t == 120:
                saved, opt = copy.deepcopy(opt.state_dict()), PSGD([x], seed=3, max_decrease=math.inf)
                opt.load_state_dict(saved)
            opt.step(lambda x=x: (x - 300).abs().pow(1.5).sum())
        ends.append(x.detach().clone())
    assert torch.equal(*ends)


def test_another_rule_forgets_the_threshold():
    x = nn.Parameter(torch.ones(4))
    opt = PSGD([x])
    opt.step(lambda: x.square().sum())
    assert opt.param_groups[0]["reference"] is not None
    opt.param_groups[0]["max_norm"] = 3.0
    opt.step(lambda: x.square().sum())
    assert opt.param_groups[0]["reference"] is None


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten", "forward"])
@pytest.mark.parametrize("form", ["kron", "scan-or-kron", "dense", "splu", "diagonal"])
def test_masked_entries_stay(hvp, form):
    """P couples coordinates, and one without gradient and without pair must not wander."""
    layer, out = nn.Linear(6, 5), nn.Linear(5, 1)
    net = nn.Sequential(layer, nn.Tanh(), out)
    fill(net)
    mask = (torch.rand(5, 6, generator=generator(1)) < 0.5).float()
    before = layer.weight.detach().clone()
    points = torch.randn(32, 6, generator=generator(2))
    opt = PSGD(net.parameters(), hvp=hvp, preconditioner=form, blocks=affine_blocks(net))

    def loss():
        weight = layer.weight * mask + (1 - mask) * before
        hidden = torch.tanh(points @ weight.mT + layer.bias)
        return (out(hidden) - points.sum(1, keepdim=True).sin()).square().mean()

    first = loss().item()
    for _ in range(120):
        opt.step(loss)
    assert torch.equal(layer.weight[mask == 0], before[mask == 0])
    assert loss().item() < 0.7 * first


def test_signs_that_torch_keeps_in_a_parameter_stay():
    """The orthogonal parametrization reads signs from the diagonal of its parameter."""
    net = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(10, 6)), nn.Tanh(), nn.Linear(6, 1))
    points = torch.randn(64, 10, generator=generator(0))
    opt = PSGD(net.parameters())
    for _ in range(100):
        opt.step(lambda: (net(points) - points[:, :1].sin()).square().mean())
    weight = net[0].weight.detach()
    torch.testing.assert_close(weight @ weight.mT, torch.eye(6), rtol=0, atol=1e-5)


def test_coordinates_that_are_met_late_learn():
    """What no pair has met yet moves with its own gradient, and is a coordinate like others from its first pair on."""
    x = nn.Parameter(torch.ones(3, 4))
    opt = PSGD([x], update_every=2)
    for t in range(200):
        rows = x if t >= 20 else x[:2]
        opt.step(lambda rows=rows: rows.square().sum())
        if t == 19:
            assert torch.equal(x[2], torch.ones(4))
    assert x.norm() < 1e-2


def test_a_complex_number_is_a_parameter():
    z = nn.Parameter(torch.tensor(1 + 1j))
    opt = PSGD([z])
    for _ in range(200):
        opt.step(lambda: (z**2 - 1j).abs().square())
    assert abs(z.item() ** 2 - 1j) < 1e-3


def test_another_optimizer_beside_psgd_by_one_backward():
    (net,) = experts(1)
    few, many = (list(filter(choose, net.parameters())) for choose in (lambda p: p.ndim > 1, lambda p: p.ndim < 2))
    ours, theirs = PSGD(few), torch.optim.AdamW(many, 1e-2)
    first, biases = fit_error(net).item(), [p.detach().clone() for p in many]
    for _ in range(40):
        net.zero_grad()
        with quiet():
            fit_error(net).backward(create_graph=ours.due, inputs=list(net.parameters()))
        ours.step()
        theirs.step()
    assert fit_error(net).item() < 0.5 * first
    assert not any(torch.equal(p, x) for p, x in zip(many, biases, strict=True))


def test_two_of_them_on_one_loss_are_told_to_be_one():
    (net,) = experts(1)
    first, second = PSGD(net[0].parameters()), PSGD(net[2].parameters())
    with quiet():
        fit_error(net).backward(create_graph=True, inputs=list(net.parameters()))
    first.step()
    with pytest.raises(RuntimeError, match="param groups"):
        second.step()
    loss = fit_error(net)
    first.step(lambda: loss)
    with pytest.raises(ValueError, match="param groups"):
        second.step(lambda: loss)


def test_a_second_optimizer_looks_anew_whether_its_closure_is_one_function():
    """As where a cell of a notebook is run again with another closure."""
    (net,) = experts(1)
    source = generator(0)

    def noisy() -> Tensor:
        return fit_error(net) + (torch.randn(2, 1, generator=source) * net[0].weight.sum()).mean()

    for _ in range(2):
        opt = PSGD(net.parameters(), hvp="approx")
        with pytest.warns(UserWarning, match="closure"):
            opt.step(noisy)
        for _ in range(3):
            opt.step(lambda: fit_error(net))
