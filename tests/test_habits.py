"""What programs do with an optimizer beside calling `step` with a good loss."""

import math
import shutil
from typing import Any

import pytest
import torch
from quick import first
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils.checkpoint import checkpoint
from toys import HVP, batch, fill, loss_of, network, quiet, same, states, take, ways_of, weights

from psgd_lit import buckets
from psgd_lit.affine import affine_blocks
from psgd_lit.blocks import KronRule
from psgd_lit.derivatives import draw_probes
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.triangular import Triangular
from psgd_lit.optim import PSGD, average
from psgd_lit.settings import PAPER


def trained(net: nn.Module, steps: int = 3, **settings: Any) -> PSGD:
    """An optimizer that has learned something."""
    opt = PSGD(net.parameters(), lr=0.05, **settings)
    for _ in range(steps):
        opt.step(lambda: loss_of(net))
    return opt


# Checkpoints of states -------------------------------------------------------------------------------------------


def test_a_rule_is_known_by_what_it_chose():
    """Another function that chooses the same groups loads the state; one that chooses others is refused."""
    net, twin = network(), network()
    saved = trained(net, preconditioner=lambda shape: Kron(*(Triangular() for _ in shape))).state_dict()
    opt = PSGD(twin.parameters(), lr=0.05, preconditioner=KronRule(max_size=6))
    opt.load_state_dict(saved)
    assert same(
        states(opt),
        states(trained(network(), preconditioner=lambda shape: Kron(*(Triangular() for _ in shape)))),
    )
    other = PSGD(twin.parameters(), lr=0.05, preconditioner=KronRule(max_size=4))
    with pytest.raises(ValueError, match=r"saved with \['Kron\(Triangular\(\), Triangular\(\)\)', \[0\]"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("hvp", HVP)
def test_distributed_checkpoints_save_and_load(hvp):
    """Torch makes the state by a step without gradients and with lr 0, in both directions."""
    net, twin = network(), network()
    fresh = PSGD(twin.parameters(), lr=0.05, hvp=hvp, momentum=0.5)
    before = weights(twin)
    assert get_optimizer_state_dict(twin, fresh)["state"]
    assert same(before, weights(twin))
    assert fresh.param_groups[0]["lr"] == 0.05
    with quiet():
        opt = trained(net, hvp=hvp, momentum=0.5)
    resumed = PSGD(twin.parameters(), lr=0.05, hvp=hvp, momentum=0.5)
    twin.load_state_dict(net.state_dict())
    set_optimizer_state_dict(twin, resumed, get_optimizer_state_dict(net, opt))
    with quiet():
        opt.step(lambda: loss_of(net))
        resumed.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))
    assert same(states(opt), states(resumed))


def test_a_zero_step_size_is_no_excuse_for_a_missing_graph_later():
    net = network()
    opt = PSGD(net.parameters(), lr=0.05)
    loss_of(net).backward()
    with pytest.raises(RuntimeError, match="Three ways"):
        opt.step()


# Replacing what the optimizer holds ------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", ["replace", "clear"])
def test_a_state_that_is_thrown_away_starts_again(reset):
    net = network()
    opt = trained(net, steps=20, **PAPER)

    def distance() -> float:
        """How far Q is from the identity, at most."""
        return max((leaf - torch.eye(leaf.shape[-1])).abs().max().item() for leaf in states(opt))

    assert distance() > 0.05
    if reset == "replace":
        opt.state = type(opt.state)(dict)
    else:
        opt.state.clear()
    opt.step(lambda: loss_of(net))
    assert 0 < distance() < 0.011
    assert len(opt.state_dict()["state"]) == 4


def test_parameters_that_are_put_into_a_group_by_hand_are_trained():
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    opt = PSGD([first], lr=0.1, init_scale=1.0)
    opt.step(lambda: first.square().sum())
    opt.param_groups[0]["params"].append(second)
    opt.step(lambda: (first + second).square().sum())
    assert (second < 1).all()
    opt.param_groups[0]["params"] = [second]
    before = first.detach().clone()
    opt.step(lambda: (first + second).square().sum())
    assert torch.equal(first, before)


def test_blocks_may_be_an_iterator_for_several_groups():
    net = network()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    opt = PSGD(groups, lr=0.1, blocks=iter(affine_blocks(net)), preconditioner="scan")
    assert "(6, 5)" in opt.describe()
    assert "(2, 7)" in opt.describe()


def test_a_frozen_part_of_a_block_is_named():
    net = network()
    net[0].weight.requires_grad_(False)
    with pytest.raises(
        ValueError,
        match=r"lacks \[\(6, 4\)\]; give all parameters of a block to one param group, frozen",
    ):
        PSGD(
            [p for p in net.parameters() if p.requires_grad],
            lr=0.1,
            blocks=affine_blocks(net),
            init_scale=1.0,
        )
    opt = PSGD(
        net.parameters(),
        lr=0.1,
        blocks=affine_blocks(net),
        preconditioner="scan",
        init_scale=1.0,
    )
    before = weights(net)
    opt.step(lambda: loss_of(net))
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(net), strict=True)]
    assert moved == [False, True, True, True]


# Losses that aren't what they seem -------------------------------------------------------------------------------


@pytest.mark.parametrize(("hvp", "way"), [(hvp, way) for hvp in HVP for way in ways_of(hvp)[:2]])
def test_a_reentrant_checkpoint_is_refused_or_right(hvp, way):
    """It hides its parameters from autograd.grad; what `backward` computes through it is right to first order."""
    net, twin = network(), network()
    x = torch.ones(3, 4, requires_grad=True)

    def hidden(model: nn.Sequential, reentrant: bool | None) -> Tensor:
        inner = model[:2]
        z = inner(x) if reentrant is None else checkpoint(inner, x, use_reentrant=reentrant)
        return model[2](z).square().mean()

    opt, plain = (PSGD(m.parameters(), lr=0.1, hvp=hvp) for m in (net, twin))
    before = weights(net)
    if way == "calls backward" and hvp in ("approx", "whiten"):
        take(opt, lambda: hidden(net, True), way)
        take(plain, lambda: hidden(twin, None), way)
        torch.testing.assert_close(weights(net), weights(twin), rtol=1e-5, atol=1e-6)
        return
    with quiet(), pytest.raises(RuntimeError, match="use_reentrant=False"):
        take(opt, lambda: hidden(net, True), way)
    assert same(before, weights(net))
    assert opt.param_groups[0]["t"] == 0


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
def test_other_checkpoints_change_nothing(hvp):
    net, twin = network(), network()
    x = torch.ones(3, 4, requires_grad=True)
    opt, plain = (PSGD(m.parameters(), lr=0.1, hvp=hvp) for m in (net, twin))
    for _ in range(2):
        opt.step(lambda: net[2](checkpoint(net[:2], x, use_reentrant=False)).square().mean())
        plain.step(lambda: twin[2](twin[:2](x)).square().mean())
    torch.testing.assert_close(weights(net), weights(twin), rtol=1e-5, atol=1e-6)


# Scales and step sizes -------------------------------------------------------------------------------------------


def test_small_gradients_in_float16_survive_the_scaler():
    """Scaled they are representable and unscaled they aren't, so they are unscaled in float32."""
    p = torch.zeros(1, dtype=torch.float16, requires_grad=True)
    opt = PSGD([p], lr=1000.0, hvp="whiten", preconditioner="diagonal", init_scale=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale(p * 1e-8).sum().backward()
    scaler.step(opt)
    assert p.item() == pytest.approx(-1e-5, rel=0.05)


def test_a_scale_is_forgotten_after_an_error():
    net, twin = (fill(nn.Linear(3, 1)) for _ in range(2))
    x = torch.ones(2, 3)
    opt, plain = (PSGD(m.parameters(), lr=0.1) for m in (net, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(net(x).square().sum()).backward()
    with pytest.raises(RuntimeError, match="Three ways"):
        scaler.step(opt)
    opt.step(lambda: net(x).square().sum())
    plain.step(lambda: twin(x).square().sum())
    assert same(weights(net), weights(twin))


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_momentum_does_not_count_steps_that_were_skipped(bad):
    """Scalers skip the first steps as a rule; the first good one has its full size."""
    p = torch.zeros(1, requires_grad=True)
    opt = PSGD(
        [p],
        lr=1.0,
        momentum=0.9,
        hvp="whiten",
        lr_preconditioner=1e-7,
        preconditioner="diagonal",
        init_scale=1.0,
        max_norm=math.inf,
    )
    for slope in [float("inf")] * bad + [1.0, 3.0]:
        p.grad = torch.tensor([slope])
        opt.step()
    assert p.item() == pytest.approx(-1 - 2, rel=1e-5)


def test_averages_weigh_by_what_has_counted():
    past, g = torch.tensor([1.0]), torch.tensor([3.0])
    assert average(past, g, torch.tensor(99), momentum=0.5).item() == 2.0
    assert average(past, g, torch.tensor(3), momentum=0.9).item() == pytest.approx(1.5)
    assert average(past, g, torch.tensor(0), momentum=0.9).item() == 3.0
    assert average(None, g, torch.tensor(99), momentum=0.5).item() == 3.0


def test_a_step_size_that_leaves_its_range_is_found_before_anything_moves():
    net = network()
    opt = trained(net)
    before, state = weights(net), states(opt)
    opt.param_groups[0]["lr_preconditioner"] = 1.0
    with pytest.raises(ValueError, match=r"\(0, 1\)"):
        opt.step(lambda: loss_of(net))
    assert same(before, weights(net))
    assert same(state, states(opt))


class Placed(torch.Tensor):
    """A tensor that says that it is on another device."""

    place = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu", self.place)


def test_devices_of_one_kind_have_probes_of_their_own():
    params = [torch.zeros(1000).as_subclass(Placed) for _ in range(2)]
    params[1].place = 1
    first, second = draw_probes(params, seed=0, t=0)
    assert abs(first @ second) / 1000 < 0.1
    assert torch.equal(first, draw_probes([torch.zeros(1000)], seed=0, t=0)[0])
    third = draw_probes(params, seed=0, t=1)[1]
    assert not torch.equal(second, third)


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_a_compiled_step_is_the_step(hvp):
    """torch.compile leaves a step as it is: no graph is captured, nothing compiled again, and the bits are the same."""
    torch.compiler.reset()
    (net, twin), counters = (network(), network()), torch._dynamo.utils.counters
    opt, other = (PSGD(model.parameters(), hvp=hvp) for model in (net, twin))
    compiled = torch.compile(opt.step, backend="eager")
    counters.clear()
    for t in range(10):
        opt.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.1 / (t + 1)
        compiled(lambda: loss_of(net))
        other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))
    assert not counters["stats"]["unique_graphs"]
    assert not counters["recompile_limit"]


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
@pytest.mark.parametrize(
    "preconditioner",
    first(1, ["kron", "scan", "dense", "splu", "diagonal", "esgd"]),
)
def test_a_compiled_fit_is_the_fit(hvp, preconditioner, monkeypatch):
    """The curve is that of a fit that isn't compiled; each kind of block is compiled once, whatever the step sizes.

    The layers have one shape, so that blocks of one kind are several.
    The fit is the same for all products, so one of them shows that its graph can be lowered too.
    """
    monkeypatch.setitem(buckets._WHOLE, "backend", "aot_eager" if hvp == "exact" else "eager")
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    blocks = affine_blocks if preconditioner == "scan" else lambda _: None
    x, _ = batch()
    net, twin = (fill(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))) for _ in range(2))
    opt, other = (
        PSGD(
            model.parameters(),
            hvp=hvp,
            preconditioner=preconditioner,
            blocks=blocks(model),
            compile=flag,
        )
        for model, flag in ((net, True), (twin, False))
    )
    for _ in range(5):
        for one, model in ((opt, net), (other, twin)):
            for name in ("lr", "lr_preconditioner"):
                one.param_groups[0][name] *= 0.9
            one.step(lambda model=model: (model(x) - 1).square().mean())
    for p, q in zip(weights(net), weights(twin), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == len(opt.buckets.active(dict.fromkeys(net.parameters())))
    assert not counters["recompile_limit"]


def test_an_old_torch_does_not_compile_the_fit(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, *, fullgraph=False: model)
    with pytest.raises(ValueError, match=r"compile=True needs torch 2\.13 or newer, and this is"):
        PSGD([torch.zeros(2, requires_grad=True)], compile=True)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")]),
    ],
)
def test_a_compiled_model_has_the_curve_of_the_model(backend):
    """Bit for bit where the same kernels run, and to rounding where a compiler has made others."""
    if backend == "inductor" and not shutil.which("c++"):
        pytest.skip("no C++ compiler")
    torch.compiler.reset()
    net = network()
    model = torch.compile(net, backend=backend)
    for hvp in ("approx", "whiten"):
        fill(net)
        twin = network()
        opt, other = (PSGD(one.parameters(), hvp=hvp) for one in (net, twin))
        for _ in range(20):
            compiled, plain = (
                opt.step(lambda: loss_of(model)),
                other.step(lambda twin=twin: loss_of(twin)),
            )
            torch.testing.assert_close(compiled, plain, rtol=0 if backend == "aot_eager" else 1e-4, atol=0)
        assert plain < loss_of(network())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_is_left_out_on_the_steps_that_are_due(dynamic):
    """The way out for "exact", on a model whose shapes are fixed, and on one whose shapes vary."""
    torch.compiler.reset()
    net, twin = network(), network()
    model = torch.compile(net, backend="aot_eager", dynamic=dynamic)
    opt, other = (PSGD(one.parameters(), update_every=3) for one in (net, twin))
    for t in range(9):
        rows = slice(0, 8 + t)
        opt.step(lambda rows=rows: loss_of(net if opt.due else model, rows))
        other.step(lambda rows=rows: loss_of(twin, rows))
    for p, q in zip(weights(net), weights(twin), strict=True):
        torch.testing.assert_close(p, q)


def test_a_compiled_model_stays_compiled_inside_a_step():
    """The step isn't traced, but a model that the closure calls is."""
    torch.compiler.reset()
    net = network()
    opt = PSGD(net.parameters(), hvp="approx")
    model, counters = torch.compile(net, backend="aot_eager"), torch._dynamo.utils.counters
    counters.clear()
    for _ in range(2):
        opt.step(lambda: loss_of(model))
    assert counters["stats"]["unique_graphs"] == 1
