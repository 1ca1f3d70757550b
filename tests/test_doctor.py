"""What the doctor finds, and that it leaves no trace."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import batch, equal, fill, generator, loss_of, network, quiet

from psgd_lit import PSGD, doctor
from psgd_lit.diagnosis import Report
from psgd_lit.examination import unchanged

SHORT: dict[str, Any] = {"seconds": 600.0, "fits": 3, "rounds": 0}
"""A visit that takes no times and ends after a few fits."""


def works(report: Report) -> dict[str, str]:
    """What stops each kind of product; empty where nothing does."""
    return {trial.hvp: trial.reason for trial in report.trials}


class Noisy(nn.Module):
    """A network with everything that a call may change: statistics, random numbers, a counter, a replaced buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1).expand(6))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.last(self.drop(self.norm(self.first(x))) * self.mask)


def trace(net: nn.Module) -> dict[str, Any]:
    """All of a model that a user can see, and the random numbers to come."""
    return {
        "tensors": {name: x.clone() for name, x in net.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        "places": [(id(p), id(p.grad), p.data_ptr(), p.requires_grad) for p in net.parameters()],
        "buffers": [id(b) for b in net.buffers()],
        "modes": [m.training for m in net.modules()],
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("with_grad", [False, True])
def test_a_visit_leaves_no_trace(with_grad: bool, rounds: int) -> None:
    net = fill(Noisy())
    net.norm.eval()
    net.first.bias.requires_grad_(False)
    if with_grad:
        loss_of(net).backward()
    before = trace(net)
    report = doctor(net, lambda: loss_of(net), seconds=600, fits=3, rounds=rounds)
    assert equal(trace(net), before)
    assert bool(report.costs) == (rounds > 0)


@pytest.mark.parametrize("call", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("kind", [KeyError, StopIteration, KeyboardInterrupt])
def test_an_error_of_the_closure_leaves_no_trace_either(kind: type[BaseException], call: int) -> None:
    """What a closure raises reaches the user, or is the reason that stops a product; all is put back."""
    net, count = fill(Noisy()), iter(range(1, 10**6))
    before = trace(net)

    def loss() -> Tensor:
        net.train(next(count) % 2 == 0)
        if next(count) >= 2 * call:
            raise kind("the data is at its end")
        return loss_of(net)

    try:
        reached = works(doctor(net, loss, **SHORT))["exact"]
    except kind as error:
        reached = str(error)
    assert "the data is at its end" in reached
    assert equal(trace(net), before)


def test_parameters_come_back_to_the_bit_after_steps_of_any_size() -> None:
    net = network()
    with torch.no_grad():
        net[0].weight[0, 0], net[0].weight[0, 1], net[0].bias[0] = -0.0, math.nan, 1e-42
    bits = [p.detach().clone().view(torch.int32) for p in net.parameters()]
    with unchanged(net), torch.no_grad():
        for p in net.parameters():
            p.mul_(0).add_(1e20)
    assert all(torch.equal(p.view(torch.int32), q) for p, q in zip(net.parameters(), bits, strict=True))


def test_a_later_run_is_the_same_as_without_a_visit() -> None:
    """Also what an optimizer remembers of the closure's earlier calls: the warning comes at the first difference."""
    net, twin = network(), network()
    doctor(net, lambda: loss_of(net), **SHORT)
    opts = [PSGD(one.parameters(), lr=0.1, hvp="approx") for one in (net, twin)]
    for _ in range(3):
        for opt, one in zip(opts, (net, twin), strict=True):
            opt.step(lambda one=one: loss_of(one))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))
    source = generator(3)
    fresh = network()

    def unsteady() -> Tensor:
        return loss_of(fresh) * torch.rand((), generator=source)

    doctor(fresh, unsteady, **SHORT)
    with pytest.warns(UserWarning, match="two calls of the closure"):
        PSGD(fresh.parameters(), lr=0.1, hvp="approx").step(unsteady)


def calling_backward(loss: Tensor) -> Tensor:
    """What a closure for torch.optim.LBFGS returns."""
    loss.backward()
    return loss


def weight_normed() -> nn.Module:
    """A layer whose second derivative torch gets wrong."""
    return nn.utils.parametrizations.weight_norm(fill(nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("make", "loss", "stopped", "reason"),
    [
        (network, loss_of, set(), ""),
        (
            network,
            lambda net: torch.cdist(net(batch()[0]), batch()[1], p=3).mean(),
            {"exact", "forward"},
            "_cdist",
        ),
        (weight_normed, loss_of, {"exact"}, "weight_norm, differentiated twice"),
        (
            network,
            lambda net: nn.functional.mse_loss(net(batch()[0]), batch()[1]),
            {"forward"},
            "ZeroTensors",
        ),
        (lambda: network().to(torch.bfloat16), loss_of, {"approx"}, "drowns in rounding"),
        (
            network,
            lambda net: loss_of(net) + (net[2].bias - net[2].bias.detach()).norm(),
            {"exact"},
            "not finite",
        ),
    ],
    ids=["smooth", "cdist", "weight_norm", "mse_loss", "bfloat16", "norm at zero"],
)
def test_what_stops_a_product_is_named(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module], Tensor],
    stopped: set[str],
    reason: str,
) -> None:
    net = make()
    with quiet():
        report = doctor(net, lambda: loss(net), **SHORT)
    reasons = works(report)
    assert stopped <= {hvp for hvp, why in reasons.items() if why}
    assert all(reason in reasons[hvp] for hvp in stopped)
    assert reasons["whiten"] == ""
    assert all(why in str(report) for why in reasons.values())
    assert {q.preconditioner for q in report.qualities} >= {
        "kron",
        "diagonal",
        "esgd",
        "splu",
        "dense",
    }


class Forgetful(torch.autograd.Function):
    """A cube whose backward is right, and constant for torch."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.z = z.detach()
        return z**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * ctx.z**2 * grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_that_is_wrong_in_silence_is_seen(dtype: torch.dtype) -> None:
    net = network(dtype)
    x = batch(dtype)[0]
    right = doctor(net, lambda: (net(x) ** 3).mean(), **SHORT)
    wrong = doctor(net, lambda: Forgetful.apply(net(x)).mean(), **SHORT)
    off = [next(t.deviation for t in report.trials if t.hvp == "exact") for report in (right, wrong)]
    assert off[0] is not None
    assert off[1] is not None
    assert off[0] < 0.01 < 0.1 < off[1]
    assert works(wrong)["approx"] == ""
    assert "doubtful" in wrong.about_products()
    assert "doubtful" not in right.about_products()


def test_differences_that_are_apart_themselves_cannot_tell() -> None:
    """A tiny loss beside a large constant: single precision loses the differences of its gradients."""
    net = network(torch.float32)
    x = batch(torch.float32)[0]
    report = doctor(net, lambda: (1e-3 * net(x) + 30 * (1e4 * net(x)).sin()).mean(), **SHORT)
    assert report.bound is not None
    assert report.bound > 0.1
    assert "can't tell" in report.about_products()


def test_a_model_in_float64_is_seen_in_float64() -> None:
    """Curvatures that float32 can't tell apart beside one another; a form with a closed solution makes them equal."""
    net = nn.Linear(3, 1, bias=False).double()
    scales = torch.tensor([1.0, 1e-5, 1e-9], dtype=torch.float64)
    report = doctor(net, lambda: (net.weight * scales).square().sum() / 2, **SHORT)
    assert "float64" in report.model
    equal_sizes = next(q for q in report.qualities if q.preconditioner == "esgd")
    assert equal_sizes.evenness > 1 - 1e-9
    assert equal_sizes.magnitudes == pytest.approx((1, 1, 1), rel=1e-9)
    exact = next(trial for trial in report.trials if trial.hvp == "exact")
    assert exact.deviation is not None
    assert exact.deviation < 1e-8


def test_frozen_parameters_take_no_part() -> None:
    net = network()
    net[0].weight.requires_grad_(False)
    report = doctor(net, lambda: loss_of(net), **SHORT)
    assert report.model.startswith("20 trained numbers in 3 tensors")
    assert not report.condition.findings
    assert len(report.qualities) == 7
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="all are frozen"):
        doctor(net, lambda: loss_of(net))


def test_parameters_that_the_loss_misses_are_named() -> None:
    net = network()
    report = doctor(net, lambda: net[0](batch()[0]).square().mean(), **SHORT)
    assert report.condition.findings == ("the loss does not use 2.weight, 2.bias",)
    assert report.qualities
    other = network()
    nothing = doctor(net, lambda: loss_of(other), **SHORT)
    assert "0.weight, 0.bias, 2.weight, 2.bias" in nothing.condition.findings[0]
    assert not nothing.trials
    assert "all else" in nothing.left_out[0]


@pytest.mark.parametrize(
    ("factor", "finding"),
    [(math.inf, "the loss is inf"), (math.nan, "the loss is nan")],
    ids=["inf", "nan"],
)
def test_what_is_not_finite_ends_the_visit(factor: float, finding: str) -> None:
    net = network()
    report = doctor(net, lambda: loss_of(net) * factor, **SHORT)
    assert finding in report.condition.findings
    assert not report.trials
    assert finding in str(report)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    net = network()
    report = doctor(
        net,
        lambda: loss_of(net) + net[2].bias.sub(net[2].bias.detach()).abs().sqrt().sum(),
        **SHORT,
    )
    assert "the gradient of 2.bias is not finite" in report.condition.findings
    assert not report.trials


def test_losses_that_differ_from_call_to_call_are_told_apart() -> None:
    net = network()
    source, x = generator(5), batch()[0]
    dropped = doctor(net, lambda: nn.functional.dropout(net(x)).square().mean(), **SHORT)
    assert "dropout" in dropped.condition.findings[0]
    assert works(dropped)["approx"] == ""
    drawn = doctor(net, lambda: loss_of(net) * torch.rand((), generator=source), **SHORT)
    assert "two calls at one point" in drawn.condition.findings[0]
    assert "draw data outside" in works(drawn)["approx"]
    assert all(trial.deviation is None for trial in drawn.trials)
    steady = doctor(net, lambda: loss_of(net), **SHORT)
    assert not steady.condition.findings


def test_scan_needs_blocks_with_a_bias() -> None:
    net = network()
    assert "scan, affine_blocks" in {q.preconditioner for q in doctor(net, lambda: loss_of(net), **SHORT).qualities}
    bare = fill(nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)))
    report = doctor(bare, lambda: loss_of(bare), **SHORT)
    assert "scan, affine_blocks" not in {q.preconditioner for q in report.qualities}
    assert any(what.startswith("scan, affine_blocks: ") and "column" in what for what in report.left_out)


def test_time_is_bounded_and_what_it_cut_off_is_told() -> None:
    net = network()
    report = doctor(net, lambda: loss_of(net), seconds=1e-6)
    assert report.trials
    assert not report.qualities
    assert not report.costs
    assert any("fits" in what for what in report.left_out)
    assert any("times of kron" in what for what in report.left_out)


def test_costs_stand_beside_those_of_torch() -> None:
    net = network()
    report = doctor(net, lambda: loss_of(net), seconds=600, fits=1, rounds=3)
    state = {cost.optimizer: cost.state for cost in report.costs}
    assert state["SGD"] == 0
    assert state["Adam"] == sum(2 * p.nbytes + 4 for p in net.parameters())
    assert state["dense"] > state["splu"] > state["diagonal"] > state["SGD"]
    assert {cost.hvp for cost in report.costs if cost.optimizer == "kron"} == {
        "exact",
        "forward",
        "approx",
        "whiten",
    }
    assert all(min(cost.seconds + cost.beside) > 0 for cost in report.costs)


def test_a_loss_without_curvature_has_no_quality() -> None:
    net = nn.Linear(4, 1)
    report = doctor(net, lambda: net(batch()[0]).mean(), **SHORT)
    assert not report.qualities
    assert any("no curvature" in what for what in report.left_out)


def test_no_fits_judge_nothing() -> None:
    """Without fits there is a report of products, and no table of P H."""
    net = network()
    report = doctor(net, lambda: loss_of(net), seconds=600, fits=np.int64(0), rounds=0)
    assert report.trials
    assert not report.qualities
    assert "P H" not in str(report)


def test_what_makes_no_sense_is_refused_at_once() -> None:
    net: Any = network()
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        doctor(net.parameters(), lambda: loss_of(net))
    with pytest.raises(TypeError, match="must be a function"):
        doctor(net, loss_of(net))
    with pytest.raises(ValueError, match="seconds must be positive"):
        doctor(net, lambda: loss_of(net), seconds=0)
    with pytest.raises(ValueError, match="fits must be an integer from 0, not -1"):
        doctor(net, lambda: loss_of(net), fits=-1)
    with pytest.raises(ValueError, match="rounds must be an integer from 0"):
        doctor(net, lambda: loss_of(net), rounds=0.5)
    with pytest.raises(ValueError, match="ran backward"):
        doctor(net, lambda: calling_backward(loss_of(net)))
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        assert doctor(net, lambda: loss_of(net), **SHORT).qualities


def test_complex_parameters_count_twice() -> None:
    net = nn.Linear(2, 2, dtype=torch.complex64)
    x = torch.ones(3, 2, dtype=torch.complex64)
    report = doctor(net, lambda: net(x).abs().square().mean(), **SHORT)
    assert report.model.startswith("12 trained numbers")
    assert report.qualities
