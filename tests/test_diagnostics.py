"""What `opt.diagnostics()` tells of a run, and that asking changes nothing."""

import math
from typing import Any

import pytest
import torch
from toys import HVP, NAMES, equal, loss_of, network, quiet, same, take, ways_of, weights

from psgd_lit.affine import affine_blocks
from psgd_lit.optim import PSGD

SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.9, "weight_decay": 0.1},
    {"update_every": 3},
    {"monotone": True, "lr": 1.0},
    {"damping": 0.1, "max_norm": 0.01, "normalizer": "running"},
]


def pair_of_runs(hvp: str = "exact", **settings: Any) -> list[tuple[Any, PSGD]]:
    """Two runs from one start."""
    nets = network(), network()
    return [(net, PSGD(net.parameters(), hvp=hvp, **settings)) for net in nets]


@pytest.mark.parametrize("name", [*NAMES, "scan-or-kron"])
@pytest.mark.parametrize("hvp", HVP)
def test_asking_changes_no_bit(name, hvp):
    """One run is asked at every step, the other never: weights, states and counts have the same bits."""
    (net, opt), (twin, other) = pair_of_runs(hvp, preconditioner=name)
    way = ways_of(hvp)[-1]
    for _ in range(4):
        opt.diagnostics(blocks=True)
        with quiet():
            take(opt, lambda: loss_of(net), way)
            take(other, lambda: loss_of(twin), way)
    assert same(weights(net), weights(twin))
    assert equal(opt.state_dict(), other.state_dict())
    assert all(x.isfinite().all() for x in opt.diagnostics(blocks=True).values())


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_asking_changes_no_bit_with_any_setting(settings):
    (net, opt), (twin, other) = pair_of_runs(**settings)
    for t in range(7):
        if t == 2:
            opt.diagnostics()
        opt.step(lambda: loss_of(net))
        other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))
    assert equal(opt.state_dict(), other.state_dict())


def test_numbers_of_a_quadratic():
    """The loss (4 x^2 + 9 y^2) / 2 with P = 1/4: every number by hand."""
    p = torch.tensor([1.0, 2.0], requires_grad=True)
    opt = PSGD([p], lr=0.5, preconditioner="diagonal", init_scale=0.5, max_norm=1.0)
    opt.diagnostics()
    h = torch.tensor([4.0, 9.0])
    opt.step(lambda: (h * p.square()).sum() / 2)
    found = {name: float(x) for name, x in opt.diagnostics().items()}
    g = h * torch.tensor([1.0, 2.0])
    assert found["gradient_norm"] == pytest.approx(g.norm().item())
    assert found["direction_norm"] == pytest.approx(g.norm().item() / 4)
    assert found["clip"] == pytest.approx(4 / g.norm().item())
    assert found["step_norm"] == pytest.approx(0.5)
    assert found["age"] == found["skipped"] == found["dropped_fits"] == found["refused"] == 0
    assert (p - torch.tensor([1.0, 2.0])).norm().item() == pytest.approx(found["step_norm"])
    v = torch.randn(2, generator=torch.Generator().manual_seed(0))
    one, other = (h * v).square().sum() / 4, 4 * v.square().sum()
    assert found["criterion"] == pytest.approx((one + other).item())
    assert found["balance"] == pytest.approx((one / other).item())


def test_nothing_is_known_before_a_step_and_nothing_is_kept_unless_asked():
    net = network()
    opt = PSGD(net.parameters())
    opt.step(lambda: loss_of(net))
    assert opt._seen is None
    found = opt.diagnostics()
    assert all(math.isnan(found[name]) for name in ("criterion", "clip", "step_norm", "age"))
    assert found["q_max"] > 0


def test_the_age_of_each_block():
    """A block grows older on steps without a fit, with a fit that was dropped, and without a gradient."""
    net = network()
    names, blocks = net.named_parameters(), affine_blocks(net)
    opt = PSGD(names, blocks=blocks, update_every=lambda t: 1 if t < 4 else 100)
    opt.diagnostics()
    ages = []
    for t in range(6):
        net[2].requires_grad_(t < 2)
        opt.step(lambda t=t: loss_of(net))
        ages.append({name: float(x) for name, x in opt.diagnostics(blocks=True).items() if name.startswith("age")})
    assert [age["age/0.weight"] for age in ages] == [0, 0, 0, 0, 1, 2]
    assert [age["age/2.weight"] for age in ages] == [0, 0, 1, 2, 3, 4]
    assert [age["age"] for age in ages] == [0, 0, 1, 2, 3, 4]


def test_a_step_that_is_not_finite():
    """Nothing moves, and the numbers say so."""
    net = network()
    opt = PSGD(net.parameters())
    opt.diagnostics()
    opt.step(lambda: loss_of(net) * math.nan)
    found = opt.diagnostics()
    assert found["clip"] == found["step_norm"] == 0
    assert found["skipped"] == found["age"] == 1
