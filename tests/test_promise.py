"""No step promises more than twice the loss, where the loss is known and was never negative."""

import copy
import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from psgd_lit import PAPER, PSGD
from psgd_lit.groups.triangular import Triangular

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
WILD = {"init_scale": 10.0, "update_every": 10**9, "preconditioner": "dense", "max_norm": math.inf}
BOUND = WILD | {"max_decrease": 2.0}


def number(value: float = 3.0) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


def parabola(x: Tensor) -> Tensor:
    return x.square().sum() / 2


def test_newton_step_from_a_huge_preconditioner():
    """P is a hundred times the inverse curvature, and the step ends at the minimum all the same."""
    x = number()
    PSGD([x], lr=0.1, **BOUND).step(lambda: parabola(x))
    torch.testing.assert_close(x.detach(), torch.zeros(1).double())
    x = number()
    PSGD([x], lr=0.1, max_decrease=math.inf, **WILD).step(lambda: parabola(x))
    torch.testing.assert_close(x.detach(), torch.full((1,), 3 - 0.1 * 100 * 3.0).double())


@pytest.mark.parametrize("most", [0.5, 1.0, 2.0])
def test_promise_is_what_is_allowed(most):
    """A long step promises exactly so many times the loss; a short one is not touched."""
    for scale in (10.0, 0.1):
        x, y = (nn.Parameter(torch.tensor([1.0, -2.0, 0.5]).double()) for _ in range(2))
        settings = WILD | {"init_scale": scale}
        f, (g,) = parabola(x), torch.autograd.grad(parabola(x), x)
        PSGD([x], lr=0.1, max_decrease=most, **settings).step(lambda: parabola(x))  # noqa: B023
        PSGD([y], lr=0.1, max_decrease=math.inf, **settings).step(lambda: parabola(y))  # noqa: B023
        promise = g @ (torch.tensor([1.0, -2.0, 0.5]).double() - x.detach())
        if scale > 1:
            torch.testing.assert_close(promise, most * f.detach())
        else:
            assert torch.equal(x, y)
            assert promise < most * f


def test_groups_of_other_rates():
    """The promise is summed over blocks, each with its step size."""
    x, y = number(1.0), number(2.0)
    groups = [{"params": [x], "lr": torch.tensor([0.1])}, {"params": [y], "lr": 0.3}]
    PSGD(groups, **BOUND).step(lambda: parabola(x) + parabola(y))
    factor = 2 * 2.5 / (0.1 * 100 * 1 + 0.3 * 100 * 4)
    torch.testing.assert_close(x.detach(), torch.tensor([1 - factor * 10]).double())
    torch.testing.assert_close(y.detach(), torch.tensor([2 - factor * 60]).double())


def test_momentum_counts_by_the_step():
    """What is bounded is the promise of the step that is taken, by the gradient of this batch."""
    x = number()
    opt = PSGD([x], lr=0.001, momentum=0.9, **BOUND)
    for slope in (1.0, 4.0):
        before, f = x.detach().clone(), slope * x.detach().abs().sum()
        opt.step(lambda: slope * x.abs().sum())  # noqa: B023
    mean = 0.5 * 1.0 + 0.5 * 4.0
    assert slope * 0.001 * 100 * mean < 2 * f
    torch.testing.assert_close(x.detach(), before - 0.001 * 100 * mean)
    opt.param_groups[0]["lr"] = 10.0
    before, f = x.detach().clone(), 4 * x.detach().abs().sum()
    opt.step(lambda: 4 * x.abs().sum())
    torch.testing.assert_close((4 * (before - x.detach())).sum(), 2 * f)


def test_negative_losses_end_it():
    """A loss that goes below zero is crossed, and from then on nothing is bounded."""
    x = number()
    opt = PSGD([x], lr=0.1, **BOUND)
    opt.step(lambda: x.sum())
    torch.testing.assert_close(x.detach(), torch.tensor([-3.0]).double())
    opt.step(lambda: x.sum())
    torch.testing.assert_close(x.detach(), torch.tensor([-13.0]).double())
    opt.step(lambda: x.sum() + 100)
    torch.testing.assert_close(x.detach(), torch.tensor([-23.0]).double())


def test_a_loss_that_is_always_zero():
    """A loss without a value, as made from a reward, has no bound; zero after a positive loss allows no step."""
    x = number()
    opt = PSGD([x], lr=0.1, **BOUND)
    opt.step(lambda: (x - x.detach()).sum())
    torch.testing.assert_close(x.detach(), torch.tensor([-7.0]).double())
    opt.step(lambda: parabola(x))
    before = x.detach().clone()
    opt.step(lambda: (x - x.detach()).sum())
    assert torch.equal(x.detach(), before)


def test_an_undefined_loss_is_forgotten():
    """A step that is skipped leaves the lowest loss as it was."""
    x = number()
    opt = PSGD([x], lr=0.1, **BOUND)
    opt.step(lambda: parabola(x) * math.nan)
    assert opt.skipped == 1
    assert x.item() == 3.0
    opt.step(lambda: parabola(x))
    assert abs(x.item()) < 1e-12


def test_maximize():
    """A reward that is never positive is bounded like a loss."""
    x = number()
    PSGD([x], lr=0.1, maximize=True, **BOUND).step(lambda: -parabola(x))
    torch.testing.assert_close(x.detach(), torch.zeros(1).double())
    PSGD([x := number()], lr=0.1, maximize=True, **BOUND).step(lambda: x.sum())
    torch.testing.assert_close(x.detach(), torch.tensor([13.0]).double())


@pytest.mark.parametrize("way", ["calls backward", "no closure"])
def test_needs_the_loss_of_the_gradient(way):
    """Where the loss may be another one, "auto" bounds nothing, and a number is refused before anything changes."""
    for most in ("auto", 2.0):
        x = number()
        opt = PSGD([x], lr=0.1, hvp="approx" if way == "calls backward" else "whiten", max_decrease=most, **WILD)

        def closure(x=x):
            x.grad = None
            parabola(x).backward()
            return 1e-9

        closure()
        given = [closure] if way == "calls backward" else []
        if most == "auto":
            opt.step(*given)
            assert x.item() < -1
        else:
            with pytest.raises(RuntimeError, match="returns the loss"):
                opt.step(*given)
            assert x.item() == 3.0
            assert not opt.state
            assert opt.param_groups[0]["t"] == 0


def test_several_processes():
    """Each rank has a loss of its own, so there is no bound, and a number is refused."""
    with patch("psgd_lit.promise.in_one_process", return_value=False):
        x = number()
        PSGD([x], lr=0.1, **WILD).step(lambda: parabola(x))
        assert x.item() < -1
        with pytest.raises(RuntimeError, match="one process"):
            PSGD([x], lr=0.1, **BOUND).step(lambda: parabola(x))


@pytest.mark.parametrize("hvp", ["exact", "forward", "approx", "whiten"])
def test_every_product_knows_its_loss(hvp):
    """Whatever the product, and on a step with a fit and one without."""
    x = number()
    opt = PSGD([x], lr=0.1, hvp=hvp, **BOUND | {"update_every": lambda t: 2})
    for _ in range(2):
        with torch.no_grad():
            x.fill_(3.0)
        opt.param_groups[0]["lr"] = 1e6
        opt.step(lambda: x.square().sum() / 2)
        assert abs(x.item()) < 1e-5


def test_state_goes_on():
    """The lowest loss is part of the state, and a copy and a loaded state have it."""
    x = number()
    opt = PSGD([x], lr=0.1, **BOUND)
    opt.step(lambda: x.sum() - 4)
    y = x.detach().clone().requires_grad_()
    other = PSGD([y], lr=0.1, **BOUND)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for o, z in ((opt, x), (other, y)):
        o.step(lambda: parabola(z))  # noqa: B023
    assert torch.equal(x, y)
    assert abs(x.item()) > 1


def test_bad_values():
    for wrong in (0.0, -1.0):
        with pytest.raises(ValueError, match='positive or "auto"'):
            PSGD([number()], max_decrease=wrong)
    with pytest.raises(TypeError, match="max_decrease"):
        PSGD([number()], max_decrease="twice")
    with pytest.raises(ValueError, match="shared"):
        PSGD([{"params": [number()]}, {"params": [number()], "max_decrease": 1.0}])
    assert PAPER["max_decrease"] == math.inf


def test_a_network_that_has_nothing_left_to_learn():
    """Down to a loss of rounding and beyond, it keeps what it knows."""
    source = torch.Generator().manual_seed(0)
    x = torch.randint(6, (200, 4), generator=source)
    net = nn.Sequential(nn.Embedding(6, 8), nn.Flatten(), nn.Linear(32, 16), nn.SiLU(), nn.LayerNorm(16))
    net.append(nn.Linear(16, 6))
    for p in net.parameters():
        nn.init.uniform_(p, -0.4, 0.4, generator=source)
    opt, late = PSGD(net.parameters()), []
    for t in range(900):
        rows = torch.randint(200, (32,), generator=source)
        loss = opt.step(lambda: nn.functional.cross_entropy(net(x[rows]), x[rows, 1]))  # noqa: B023
        late += [loss.detach()] if t >= 500 else []
    assert torch.stack(late).max() < 1e-5


def test_blocks_of_half_precision():
    """The promise is formed in the dtype of the state, and the factor reaches every block."""
    x = nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.bfloat16))
    y = nn.Parameter(torch.tensor([2.0]))
    opt = PSGD([x, y], lr=0.1, **BOUND | {"preconditioner": Triangular()})
    loss = opt.step(lambda: parabola(x.float()) + parabola(y))
    after = parabola(x.float()) + parabola(y)
    assert after < 0.01 * loss


def test_a_loss_in_float16():
    """A promise beyond float16 is compared in float32."""
    x = nn.Parameter(torch.full((100,), 30.0))
    PSGD([x], lr=1.0, **BOUND).step(lambda: (x.square().sum() / 10).half())
    assert x.detach().abs().max() < 0.1


def surrogate(x: Tensor) -> Tensor:
    """A value that is the same at each call, with the gradient of (x - 5)^2."""
    return ((x - x.detach()) * 2 * (x.detach() - 5)).sum() + 1e-3


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_a_value_that_says_nothing(hvp):
    """The rule doesn't starve a loss that is made for its gradient alone, as in policy gradients."""
    ends = []
    for most in ("auto", math.inf):
        x = number(2.0)
        opt = PSGD([x], 0.1, hvp=hvp, max_decrease=most)
        for _ in range(300):
            opt.step(lambda: surrogate(x))  # noqa: B023
        ends.append(x.item())
    assert ends[0] == pytest.approx(ends[1], abs=0.2)


def test_steps_that_are_cut_are_counted():
    """By the rule, most steps shortened is a warning; whoever has given a number has the number in the diagnostics."""
    x = number(2.0)
    opt = PSGD([x], 0.1, max_decrease=2.0)
    for _ in range(101):
        opt.step(lambda: surrogate(x))
    assert opt.diagnostics()["cut"] > 90
    assert x.item() < 3
    opt.param_groups[0]["max_decrease"] = "auto"
    opt.param_groups[0]["t"] = 100
    with pytest.warns(UserWarning, match="policy gradients"):
        opt.step(lambda: surrogate(x))


def test_a_rounding_below_zero_is_no_negative_loss():
    x = number()
    opt = PSGD([x], lr=0.0, **WILD)
    opt.step(lambda: parabola(x))
    opt.step(lambda: parabola(x) * 0 - 1e-7)
    with torch.no_grad():
        x.fill_(0.1)
    opt.param_groups[0]["lr"] = 0.1
    opt.step(lambda: parabola(x))
    assert abs(x.item()) < 1e-9


def test_frozen_attention_keeps_its_kernel():
    """Only a kernel that has refused is replaced."""
    seen, x = [], torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    head = nn.Linear(4, 1)
    opt = PSGD(head.parameters(), update_every=1)

    def loss() -> Tensor:
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        with torch.no_grad():
            hidden = nn.functional.scaled_dot_product_attention(x, x, x).mean((1, 2))
        return (head(hidden) - 1).square().mean()

    for _ in range(3):
        opt.step(loss)
    assert seen == [True] * 3
