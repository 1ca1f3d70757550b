"""What PSGD does where the user has given no number: scale of Q, threshold, step size, and steps on trial."""

import copy
import io
import math
import warnings

import pytest
import torch
from quick import first
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from toys import HVP, loss_of, network, same, states, weights

from psgd_lit import PAPER, PSGD
from psgd_lit.affine import affine_blocks
from psgd_lit.experiments.digits import load_digits
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.first_scale import ASLEEP, begin, first_scale, is_asleep
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.triangular import Triangular
from psgd_lit.settings import LR

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
NAMES = ("dense", "splu", "kron", "diagonal", "esgd", "scan-or-kron")


def run(unit: float, steps: int = 12, **settings: object) -> list[Tensor]:
    """The weights after some steps on a loss in another unit."""
    net = network(torch.float64)
    opt = PSGD(net.parameters(), blocks=affine_blocks(net), **settings)
    for _ in range(steps):
        opt.step(lambda: unit * loss_of(net))
    assert opt.skipped == 0
    return weights(net)


# The first scale -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_a_run_is_the_same_in_every_unit_of_the_loss(name, hvp):
    """Bit for bit where the units are powers of four, whose roots of roots are exact."""
    settings = {"preconditioner": name, "hvp": hvp}
    one = run(1.0, **settings)
    assert not same(one, weights(network(torch.float64)))
    for unit in (2.0**-40, 2.0**40):
        assert same(one, run(unit, **settings))


@pytest.mark.parametrize("hvp", HVP)
def test_the_first_step_moves_with_the_scale_of_its_own_pair(hvp):
    """By a thousand times more in another unit of the parameters would be wrong: whatever the unit, it is the same."""
    net, other = network(), network()
    for model, unit in ((net, 1.0), (other, 2.0**-20)):
        opt, before = PSGD(model.parameters(), hvp=hvp), weights(model)
        opt.step(lambda model=model, unit=unit: unit * loss_of(model))
        assert not any(torch.equal(p, q) for p, q in zip(before, weights(model), strict=True))
    for p, q in zip(weights(net), weights(other), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss", ["linear", "hinge", "absolute"])
def test_a_loss_without_curvature_is_descended_from_the_identity(loss):
    w = torch.zeros(4, requires_grad=True)
    x, y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.ones(16)
    losses = {
        "linear": lambda: (x @ w).mean(),
        "hinge": lambda: (1 - y * (x @ w)).relu().mean(),
        "absolute": lambda: (x @ w - y).abs().mean(),
    }
    opt = PSGD([w], lr=0.05)
    (gradient,) = torch.autograd.grad(losses[loss](), [w])
    opt.step(losses[loss])
    torch.testing.assert_close(w.detach(), -0.05 * gradient)


def test_a_step_that_is_skipped_leaves_a_block_asleep():
    w = torch.ones(3, requires_grad=True)
    opt = PSGD([w], preconditioner="diagonal", hvp="whiten")
    opt.step(lambda: w.square().sum() * torch.where(w.detach().sum() > 0, math.nan, 1.0))
    assert opt.skipped == 1
    assert not opt.state.get(w) or bool(is_asleep(Diagonal(), opt.state[w]["Q"]).all())


def test_whitened_steps_have_the_size_of_lr_from_the_first():
    w = torch.zeros(50, requires_grad=True)
    opt = PSGD([w], hvp="whiten", preconditioner="diagonal", lr=0.01)
    slope = 1e-6 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    w.grad = slope.clone()
    opt.step()
    assert w.detach().square().mean().sqrt().item() == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("name", ["kron", "diagonal", "esgd"])
def test_a_block_that_gets_its_first_gradient_late_sleeps_until_then(name):
    """The last layer starts at zero, so no gradient reaches the first one at the first step."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    nn.init.zeros_(net[1].weight)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = {"preconditioner": name, "hvp": "whiten"}
    opt = PSGD(net.parameters(), **made)
    opt.step(lambda: (net(x) - 1).square().mean())
    choices = {choice.block.params[0]: choice.group for choice in opt.buckets.choices[0]}

    def asleep(layer: int, opt: PSGD) -> bool:
        w = net[layer].weight
        return bool(is_asleep(choices[w], opt.state[w]["Q"]).all())

    assert asleep(0, opt)
    assert not asleep(1, opt)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    other = PSGD(net.parameters(), **made)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert asleep(0, other)
    for _ in range(3):
        other.step(lambda: (net(x) - 1).square().mean())
    assert not asleep(0, other)
    assert all(leaf.isfinite().all() for leaf in states(other))


def test_blocks_that_sleep_begin_also_after_the_host_has_looked():
    """A parameter that joins after twenty steps begins with its own first pair."""
    first, late = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    opt = PSGD([first, late], lr=0.05, preconditioner="diagonal")
    for t in range(40):
        opt.step(lambda t=t: first.square().sum() + (late.square().sum() if t >= 20 else 0.0))
    assert (late < 1).all()


def test_the_scale_is_that_of_the_coordinates_that_are_met():
    v = torch.randn(2, 6, 1, generator=torch.Generator().manual_seed(0))
    h = torch.where(torch.arange(6)[:, None] < 2, 3.0 * v, 0.0)
    torch.testing.assert_close(first_scale(v, h), torch.full((2,), 3.0**-0.5))
    group = Kron(Triangular(), Triangular())
    Q = group.scale(group.init((2, 3), (2,)), torch.tensor([ASLEEP, 1.0]))
    after = group.matrix(begin(group, Q, v, h))
    torch.testing.assert_close(after, torch.tensor([3.0**-0.5, 1.0])[:, None, None] * torch.eye(6))


def test_a_first_scale_lies_between_balance_and_secant():
    """P is their geometric mean, and no smaller cosine is believed than strangers have."""
    v = torch.randn(3, 8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    h = torch.linspace(0.1, 3.0, 8, dtype=torch.float64)[:, None] * v
    dot = (v * h).sum((-2, -1))
    balance, secant = (
        v.norm(dim=(-2, -1)) / h.norm(dim=(-2, -1)),
        dot / h.square().sum((-2, -1)),
    )
    torch.testing.assert_close(first_scale(v, h).square(), (balance * secant).sqrt())
    signs = torch.ones(4, 1)
    pair = signs, torch.tensor([[3.0], [-3.0], [3.0], [-3.0]])
    torch.testing.assert_close(first_scale(*pair).square(), torch.tensor(0.5**0.5 / 3))


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
@pytest.mark.parametrize("activation", first(1, [nn.ReLU, nn.GELU, nn.Tanh]))
def test_plain_networks_learn_the_digits_at_the_defaults(activation, hvp):
    """A hundred steps leave the loss of guessing behind; from a start in balance seven of these nine stay near it."""
    images, labels, *_ = load_digits()
    torch.manual_seed(0)
    layers = (
        nn.Linear(784, 64),
        activation(),
        nn.Linear(64, 64),
        activation(),
        nn.Linear(64, 10),
    )
    net = nn.Sequential(nn.Flatten(), *layers)
    opt = PSGD(net.parameters(), hvp=hvp)
    batches = list(zip(images.split(50), labels.split(50), strict=True))
    losses = [opt.step(lambda x=x, y=y: cross_entropy(net(x), y)).item() for x, y in (3 * batches)[:100]]
    assert sum(losses[-20:]) / 20 < 0.75 * math.log(10)


# Step sizes and thresholds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hvp", HVP)
def test_lr_has_a_default_for_each_product(hvp):
    opt = PSGD([torch.ones(2, requires_grad=True)], hvp=hvp)
    assert opt.param_groups[0]["lr"] == LR[hvp]
    assert isinstance(opt.param_groups[0]["lr"], float)


def test_the_threshold_is_the_norm_of_the_parameters_or_the_root_of_their_number():
    for size, hvp, most in ((10.0, "exact", 20.0), (0.1, "exact", 1.0), (0.1, "whiten", 2.0)):
        w = torch.full((4,), size, requires_grad=True)
        opt = PSGD([w], lr=1.0, hvp=hvp, preconditioner="diagonal", init_scale=1e6, max_decrease=math.inf)
        opt.step(lambda w=w: w.sum() + w.square().sum() / 2)
        assert (w.detach() - size).norm().item() == pytest.approx(most, rel=1e-5)


def test_the_papers_settings_by_one_name():
    group = PSGD([torch.ones(2, requires_grad=True)], **PAPER).param_groups[0]
    assert (group["lr_preconditioner"], group["init_scale"], group["normalizer"]) == (
        0.01,
        1.0,
        "pair",
    )
    assert group["max_norm"] == math.inf


# A loss that explodes --------------------------------------------------------------------------------------------


def test_a_loss_that_explodes_is_counted_and_told():
    w = torch.ones(1, requires_grad=True)
    opt = PSGD([w], lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(100):
            opt.step(lambda t=t: w.sum() * (500.0 if t > 95 else 1.0))
    assert opt.exploded == 4
    with pytest.warns(UserWarning, match="the loss has exploded.*opt.exploded") as heard:
        opt.step(lambda: w.sum())
    assert heard[0].filename == __file__
    assert opt.exploded == 4
    assert opt.skipped == 0


def test_an_undefined_loss_is_skipped_and_not_an_explosion():
    w = torch.ones(1, requires_grad=True)
    opt = PSGD([w], lr=0.0)
    for t in range(15):
        opt.step(lambda t=t: w.sum() * (math.nan if t in (3, 12) else 1.0))
    assert (opt.exploded, opt.skipped) == (0, 2)


# Steps on trial --------------------------------------------------------------------------------------------------


def valley(x: Tensor) -> Tensor:
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


@pytest.mark.parametrize("hvp", ["exact", "approx", "forward"])
@pytest.mark.parametrize("lr", [1.0, 5.0])
def test_the_place_where_it_settles_never_rises(hvp, lr):
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    opt = PSGD([x], lr=lr, hvp=hvp, preconditioner="dense", monotone=True)
    lowest = math.inf
    for _ in range(60):
        opt.step(lambda: valley(x))
        loss = float(opt.param_groups[0]["loss"])
        assert loss <= lowest + 1e-12
        lowest = loss
    assert lowest < 4
    opt.settle()
    assert valley(x).item() == pytest.approx(lowest, rel=1e-9)
    assert lr == 1.0 or opt.refused > 5


def test_a_step_into_the_undefined_is_taken_back_and_nothing_is_learned_there():
    x = torch.tensor([1.0], requires_grad=True)
    opt = PSGD([x], lr=1.0, init_scale=2.0, max_norm=math.inf, preconditioner="diagonal", monotone=True)
    opt.step(lambda: x.log().sum())  # from 1 to -3, where there is no logarithm
    assert x.item() < 0
    state = states(opt)
    opt.step(lambda: x.log().sum())
    assert (opt.refused, opt.skipped) == (1, 0)
    assert same([s for s in states(opt) if s.numel()], state)
    assert x.item() == pytest.approx(1 - 4 / 2)
    opt.step(lambda: x.log().sum())
    assert x.item() == pytest.approx(1 - 4 / 4)


def test_steps_on_trial_go_on_from_a_checkpoint():
    x = torch.tensor([-1.0, 1.0], dtype=torch.float64, requires_grad=True)
    settings = {"lr": 8.0, "preconditioner": "dense", "monotone": True, "momentum": 0.5}
    opt = PSGD([x], **settings)
    for _ in range(15):
        opt.step(lambda: valley(x))
    y = x.detach().clone().requires_grad_()
    other = PSGD([y], **settings)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(15):
        opt.step(lambda: valley(x))
        other.step(lambda: valley(y))
    assert torch.equal(x, y)
    assert opt.refused == other.refused > 0


def test_a_trial_needs_the_loss():
    x = torch.ones(2, requires_grad=True)
    opt = PSGD([x], hvp="whiten", monotone=True)
    x.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="compares the losses of successive calls"):
        opt.step()
    assert (x == 1).all()
    assert opt.param_groups[0]["t"] == 0


def test_climbing_is_on_trial_too():
    x = torch.tensor([2.0], requires_grad=True)
    opt = PSGD([x], lr=1.0, preconditioner="diagonal", monotone=True, maximize=True)
    for _ in range(30):
        opt.step(lambda: -x.square().sum())
    opt.settle()
    assert x.abs() < 1e-3


# Names and layers ------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As the layer of transformers stores its weight: inputs first."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))


def test_the_linear_layer_of_transformers_is_one_block():
    layer = Conv1D()
    [block] = affine_blocks(layer)
    assert block.constant
    assert block.shape == (2, 4)
    values = {layer.weight: layer.weight.detach(), layer.bias: layer.bias.detach()}
    expected = torch.cat([layer.weight.mT, layer.bias[:, None]], 1).detach()
    torch.testing.assert_close(block.join(values, torch.float32)[0], expected)


def test_scan_where_there_is_a_bias_and_kron_elsewhere():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    opt = PSGD(net.parameters(), preconditioner="scan-or-kron", blocks=affine_blocks(net))
    kinds = [repr(choice.group) for choice in opt.buckets.choices[0]]
    assert kinds == ["Kron(Diagonal(), Normalization())", "Kron(Triangular(), Triangular())"]


def test_an_error_names_the_parameter():
    net = nn.Sequential(nn.Linear(4, 3), nn.Conv2d(3, 64, 7, bias=False))
    with pytest.raises(ValueError, match=r"1\.weight \(64, 3, 7, 7\) has no column"):
        PSGD(net.named_parameters(), preconditioner="scan", blocks=affine_blocks(net))
    with pytest.raises(ValueError, match=r"0\.weight \(3, 4\): .*does not fit"):
        PSGD(net.named_parameters(), preconditioner=Kron(Triangular()))
