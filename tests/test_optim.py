"""PSGD is the iteration it says: step and fit against the groups by hand, buckets, settings of its own.

What every torch optimizer must do is in test_conformance.py, what went wrong for others in test_cases.py.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import HVP, NAMES, equal, generator, loss_of, network, quiet, same, take, weights

from psgd_lit import optim
from psgd_lit.blocks import KronRule, choose, leaves
from psgd_lit.buckets import Bucket
from psgd_lit.derivatives import draw_probes
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.sparse_lu import SparseLU
from psgd_lit.groups.triangular import Triangular
from psgd_lit.optim import PSGD, period

D = torch.float64


def test_a_step_uses_the_previous_q_and_then_fits_it():
    """The first step is one of SGD, the second has Q of the first pair: an independent copy of the iteration."""
    x = torch.tensor([1.0, -2.0, 3.0], dtype=D, requires_grad=True)
    root = torch.randn(3, 3, dtype=D, generator=generator())
    H = root + root.T
    settings = {"preconditioner": "dense", "lr_preconditioner": 0.2, "init_scale": 0.5, "probes": "normal"}
    opt = PSGD([x], lr=0.1, seed=3, **settings)
    plain, group = x.detach().clone(), Triangular()
    Q = group.scale(group.init(3, (), dtype=D), torch.tensor(0.5, dtype=D))
    for t in range(5):
        opt.step(lambda: x @ H @ x / 2)
        (v,) = draw_probes([x], 3, t)
        matrix = group.matrix(Q)
        plain -= 0.1 * (matrix.T @ matrix @ (H @ plain))
        Q = group.update(Q, v[:, None], (H @ v)[:, None], 0.2)
        torch.testing.assert_close(x.detach(), plain, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(opt.state[x]["Q"][0][0], Q[0], rtol=1e-12, atol=1e-13)


def test_init_scale_is_that_of_q():
    """Of all factors together."""
    for name in ("dense", "splu", "kron", "diagonal", "esgd"):
        x = torch.ones(3, 2, requires_grad=True)
        PSGD([x], lr=1.0, init_scale=0.1, preconditioner=name).step(lambda x=x: x.square().sum())
        torch.testing.assert_close(x.detach(), torch.full((3, 2), 1 - 2 * 0.1**2))


def test_a_closure_that_calls_backward_may_return_a_loss_for_each_sample():
    model, x = nn.Linear(3, 2), torch.randn(5, 3, generator=generator(0))
    opt = PSGD(model.parameters(), hvp="whiten", seed=0)
    before = model.weight.clone()

    def closure():
        opt.zero_grad()
        losses = model(x).square().mean(1)
        losses.mean().backward()
        return losses

    assert opt.step(closure).shape == (5,)
    assert not torch.equal(model.weight, before)


def test_clipping_bounds_the_whole_step():
    """Over all parameters and groups, by one factor; what is shorter stays as it is."""
    net, free = network(), network()
    groups = [
        {"params": net[0].parameters(), "preconditioner": "diagonal"},
        {"params": net[2].parameters()},
    ]
    opt = PSGD(groups, lr=0.5, max_norm=0.01, init_scale=1.0)
    other = PSGD(
        [{**g, "params": layer.parameters()} for g, layer in zip(groups, (free[0], free[2]), strict=True)],
        lr=0.5,
        max_norm=math.inf,
        init_scale=1.0,
    )
    before = torch.cat([p.flatten() for p in weights(net)])
    opt.step(lambda: 100 * loss_of(net))
    other.step(lambda: 100 * loss_of(free))
    moved = torch.cat([p.flatten() for p in weights(net)]) - before
    expected = torch.cat([p.flatten() for p in weights(free)]) - before
    torch.testing.assert_close(moved.norm(), torch.tensor(0.5 * 0.01), rtol=1e-3, atol=0)
    torch.testing.assert_close(moved, expected * (moved.norm() / expected.norm()), rtol=1e-3, atol=1e-7)
    loose = network()
    PSGD(loose.parameters(), lr=0.5, max_norm=1e6, init_scale=1.0).step(lambda: loss_of(loose))
    plain = network()
    PSGD(plain.parameters(), lr=0.5, init_scale=1.0).step(lambda: loss_of(plain))
    assert same(weights(loose), weights(plain))


def test_momentum_is_a_mean_at_first_and_keeps_the_size_of_a_step():
    x = torch.zeros(1, dtype=D, requires_grad=True)
    opt = PSGD([x], lr=1.0, momentum=0.9, update_every=10**9, preconditioner="diagonal", init_scale=1.0)
    opt.step(lambda: x.sum())
    for slope in (1.0, 4.0, 1.0):
        before = x.item()
        opt.step(lambda slope=slope: slope * x.sum())
    assert before - x.item() == pytest.approx((1 + 1 + 4 + 1) / 4)


@pytest.mark.parametrize("name", NAMES)
def test_maximizing_is_minimizing_the_negative(name):
    """Bit for bit, with damping too: gradient and product change their sign before it is added."""
    net, twin = network(), network()
    kind: dict[str, Any] = {
        "lr": 0.02,
        "preconditioner": name,
        "damping": 0.1,
        "momentum": 0.5,
        "weight_decay": 0.1,
    }
    opt, other = PSGD(net.parameters(), **kind, maximize=True), PSGD(twin.parameters(), **kind)
    for _ in range(4):
        opt.step(lambda: -loss_of(net))
        other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))


@pytest.mark.parametrize("kind", ["nonconvex", "traditional"])
def test_damping_bounds_p(kind):
    """Where there is no curvature P tends to 1 / lambda, so that Q has a finite place to go."""
    x = torch.zeros(4, dtype=D, requires_grad=True)
    damping = 0.5
    opt = PSGD(
        [x],
        lr=0.0,
        preconditioner="diagonal",
        damping=damping,
        damping_kind=kind,
        lr_preconditioner=0.05,
    )
    for _ in range(400):
        opt.step(lambda: x.sum())
    Q = Diagonal().matrix(opt.state[x]["Q"])[0]
    torch.testing.assert_close((Q.T @ Q).diagonal(), torch.full((4,), 1 / damping, dtype=D), rtol=0.3, atol=0)
    assert (Q.T @ Q).max() < 2 / damping


def test_whitening_normalizes_gradients():
    """P tends to the inverse of the gradient's deviation, whatever the loss."""
    x = torch.zeros(3, dtype=D, requires_grad=True)
    opt = PSGD(
        [x],
        lr=0.0,
        preconditioner="diagonal",
        hvp="whiten",
        lr_preconditioner=0.1,
        update_every=1,
    )
    source, deviation = generator(), torch.tensor([0.1, 1.0, 10.0], dtype=D)
    total = torch.zeros(3, dtype=D)
    for t in range(1500):
        x.grad = deviation * torch.randn(3, dtype=D, generator=source)
        opt.param_groups[0]["lr_preconditioner"] = 0.1 if t < 200 else 0.01
        opt.step()
        if t >= 500:
            total += Diagonal().matrix(opt.state[x]["Q"])[0].diagonal().square() / 1000
    torch.testing.assert_close(total * deviation, torch.ones(3, dtype=D), rtol=0.2, atol=0)


# Buckets


def one_by_one(net: torch.nn.Module, name: Any, **kwargs: Any) -> PSGD:
    """Each parameter in a param group of its own, so that no two blocks share a bucket."""
    return PSGD([{"params": [p]} for p in net.parameters()], preconditioner=name, **kwargs)


def stack(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Three layers of one shape, with a head of another."""
    layers = [torch.nn.Linear(4, 4) for _ in range(3)] + [torch.nn.Linear(4, 2)]
    net = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh()))).to(dtype)
    source = generator()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=source) / 2)
    return net


@pytest.mark.parametrize("name", ["kron", "diagonal", "esgd", KronRule(max_size=3), Triangular()], ids=str)
@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_buckets_equal_one_by_one(name, hvp):
    """To the rounding of batched products, in double precision; with parameters that are missing and come back."""
    net, plain = stack(D), stack(D)
    kind: dict[str, Any] = {
        "lr": 0.02,
        "momentum": 0.5,
        "weight_decay": 0.01,
        "damping": 0.01,
        "hvp": hvp,
    }
    opt, other = (
        PSGD(net.parameters(), preconditioner=name, **kind),
        one_by_one(plain, name, **kind),
    )
    for t in range(8):
        for model in (net, plain):
            model[2].weight.requires_grad_(t not in (0, 4, 5))  # there at t = 1, frozen again for a while
        for o, model in ((opt, net), (other, plain)):
            take(o, lambda model=model: loss_of(model), "calls backward")
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
        for a, b in zip(leaves(opt.state[p]["Q"]), leaves(other.state[q]["Q"]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_step_makes_as_many_operations_as_there_are_shapes():
    """Not as there are parameters: what batching is for."""

    def operations(depth: int) -> int:
        params = [torch.ones(3, 3, requires_grad=True) for _ in range(depth)]
        opt = PSGD(params, lr=0.01, hvp="whiten")
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            opt.step()
        heavy = (
            "aten::bmm",
            "aten::triangular_solve",
            "aten::linalg_solve_triangular",
            "aten::cumsum",
            "aten::triu",
        )
        return sum(event.count for event in profile.key_averages() if event.key in heavy)

    assert operations(2) == operations(8) > 0


def test_a_group_added_later_joins_the_run():
    """It starts at the iteration where the others are; what they have learned stays, bit for bit."""
    net = network()
    opt = PSGD(net[0].parameters(), lr=0.05, init_scale=1.0)
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    first = [leaf.clone() for leaf in leaves(opt.state[net[0].weight]["Q"])]
    opt.add_param_group({"params": list(net[2].parameters()), "preconditioner": "diagonal"})
    assert opt.param_groups[1]["t"] == 3
    before = weights(net)
    opt.describe()
    assert same(first, leaves(opt.state[net[0].weight]["Q"]))
    opt.step(lambda: loss_of(net))
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


@pytest.mark.parametrize("every", ["auto", "log10", 7, lambda t: min(1 + t, 7)])
def test_a_group_added_later_begins_the_schedule_anew(every):
    """What is due is what a fresh run has, also after a checkpoint, and an older checkpoint loads."""

    def dues(opt: PSGD, steps: int) -> list[bool]:
        found = []
        for _ in range(steps):
            found.append(opt.due)
            opt.step(lambda: loss_of(net))
        return found

    net = network()
    fresh = dues(PSGD(net.parameters(), lr=0.0, update_every=every), 30)
    opt = PSGD(net[0].parameters(), lr=0.0, update_every=every)
    dues(opt, 200)
    opt.add_param_group({"params": list(net[2].parameters())})
    assert dues(opt, 10) == fresh[:10]
    other = PSGD(
        [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}],
        update_every=every,
    )
    state = opt.state_dict()
    other.load_state_dict(state)
    assert dues(other, 20) == fresh[10:]
    for group in state["param_groups"]:
        del group["joined"]
    old = PSGD(
        [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}],
        update_every=every,
    )
    old.load_state_dict(state)
    t = old.param_groups[0]["t"]
    assert old.due == (t % period(every, t) == 0)


def test_states_are_the_optimizers_own_memory():
    """What `state` shows is what the next step reads, also after it was copied or changed by hand."""
    net, twin = network(), network()
    opt, other = PSGD(net.parameters(), lr=0.05), PSGD(twin.parameters(), lr=0.05)
    for o, model in ((opt, net), (other, twin)):
        o.step(lambda model=model: loss_of(model))
    for o in (opt, other):
        for state in o.state.values():
            torch._foreach_mul_(leaves(state["Q"]), 0.5)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for o, model in ((opt, net), (other, twin)):
        o.step(lambda model=model: loss_of(model))
    assert same(weights(net), weights(twin))
    assert equal(opt.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("name", ["kron", "splu"])
def test_factors_are_levelled_at_every_tenth_fit(name, monkeypatch):
    """P is the same to the last bit as if they were levelled at each one, and a run goes on at the same one."""
    form = {"kron": Kron, "splu": SparseLU}[name]
    level, calls = form.balance, []

    def counted(self, Q, active):
        calls.append(self)
        return level(self, Q, active)

    monkeypatch.setattr(form, "balance", counted)

    def run(every: int, steps: int, net: nn.Module, opt: PSGD) -> int:
        monkeypatch.setattr(optim, "_LEVEL_EVERY", every)
        calls.clear()
        for _ in range(steps):
            opt.step(lambda: loss_of(net))
        return len(calls) // len(list(opt.buckets.active(list(net.parameters()))))

    kind: dict[str, Any] = {
        "lr": 0.02,
        "preconditioner": name,
        "lr_preconditioner": 0.5,
        "hvp": "whiten",
        "update_every": 1,
    }
    nets = [network() for _ in range(3)]
    opts = [PSGD(net.parameters(), **kind) for net in nets]
    assert run(1, 25, nets[0], opts[0]) == 25
    assert run(10, 25, nets[1], opts[1]) == 3
    assert run(10, 12, nets[2], opts[2]) == 2
    other = PSGD(nets[2].parameters(), **kind)
    other.load_state_dict(opts[2].state_dict())
    assert run(10, 13, nets[2], other) == 1
    assert same(weights(nets[0]), weights(nets[1]))
    assert same(weights(nets[1]), weights(nets[2]))
    assert equal(opts[1].state_dict()["state"], other.state_dict()["state"])


# Frozen parameters


def thawable(frozen: bool) -> tuple[list[Tensor], Any]:
    """Three parameters, of which the middle one may be frozen, and a loss that doesn't need it."""
    source = generator()
    params = [torch.randn(n, 3, dtype=D, generator=source) for n in (2, 5, 4)]
    for i, p in enumerate(params):
        p.requires_grad_(not frozen or i != 1)
    return (
        params,
        lambda: (params[0] @ params[2].T).tanh().sum() + params[2].square().sum() + params[1].square().sum(),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hvp", HVP)
def test_frozen_parameters_change_nothing_for_others(name, hvp):
    """The run is bit for bit that without them: no probe, no place in a flat block, no state, no line in the table."""
    (params, loss), (others, same_loss) = thawable(frozen=True), thawable(frozen=True)
    kind: dict[str, Any] = {
        "lr": 0.02,
        "preconditioner": name,
        "hvp": hvp,
        "damping": 0.01,
        "momentum": 0.5,
    }
    opt, plain = PSGD(params, **kind), PSGD(others[::2], **kind)
    with quiet():
        for _ in range(4):
            opt.step(loss)
            plain.step(same_loss)
    assert same(weights_of(params), weights_of(others))
    assert params[1] not in opt.state
    assert len(opt.describe().splitlines()) == len(plain.describe().splitlines())
    assert [row.split()[-2:] for row in opt.describe().splitlines()] == [
        row.split()[-2:] for row in plain.describe().splitlines()
    ]


def weights_of(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def test_probes_are_drawn_for_what_is_trained(monkeypatch):
    """As many numbers as the others have entries, twice with damping."""
    params, loss = thawable(frozen=True)
    drawn, randn = [], torch.randn

    def counting(*sizes: Any, **kwargs: Any) -> Tensor:
        drawn.append(sizes)
        return randn(*sizes, **kwargs)

    opt = PSGD(params, lr=0.01, damping=0.1)
    monkeypatch.setattr(torch, "randn", counting)
    opt.step(loss)
    assert drawn == [(18,), (18,)]


def test_dense_counts_what_is_trained():
    large = torch.zeros(30_000)
    table = PSGD([large, *thawable(True)[0][::2]], lr=0.1, preconditioner="dense").describe()
    assert table.splitlines()[1].split()[-2:] == [
        str(18 * 19 // 2),
        str((18 * 18 + 18 + 2) * 8),
    ]
    with pytest.raises(ValueError, match="30000 parameters"):
        PSGD([large.requires_grad_()], lr=0.1, preconditioner="dense")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_are_thawed_join_the_run(name):
    """What was learned stays, bit for bit, the new one gets a state of its own, and a copy and a checkpoint go on."""
    params, loss = thawable(frozen=True)
    opt = PSGD(params, lr=0.02, preconditioner=name, init_scale=1.0)
    for _ in range(3):
        opt.step(loss)
    early = copy.deepcopy(opt.state_dict())
    learned = [leaf.clone() for leaf in leaves(opt.state[params[0]]["Q"])]
    params[1].requires_grad_()
    assert len(opt.describe().splitlines()) == (4 if name not in ("dense", "splu") else 3)
    opt.param_groups[0]["update_every"] = 10**6
    opt.step(loss)
    assert same(learned, leaves(opt.state[params[0]]["Q"]))
    opt.param_groups[0]["update_every"] = 1
    before = params[1].detach().clone()
    opt.step(loss)
    assert not torch.equal(before, params[1])
    assert not same(learned, leaves(opt.state[params[0]]["Q"]))
    for saved in (early, copy.deepcopy(opt.state_dict())):
        for frozen in (True, False):
            twins, twin_loss = thawable(frozen)
            other = PSGD(twins, lr=0.02, preconditioner=name, init_scale=1.0)
            other.load_state_dict(saved)
            for key, entry in other.state_dict()["state"].items():
                assert equal(entry, saved["state"].get(key, {"block": torch.tensor(1)}))
            first = twin_loss().item()
            for _ in range(3):
                other.step(twin_loss)
            assert twin_loss() < first
    twins, twin = copy.deepcopy((params, opt))
    opt.step(loss)
    other_loss = (twins[0] @ twins[2].T).tanh().sum() + twins[2].square().sum() + twins[1].square().sum()
    twin.step(lambda: other_loss)
    assert same(weights_of(params), weights_of(twins))


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_frozen_for_a_while_keeps_its_state(name):
    params, loss = thawable(frozen=False)
    opt = PSGD(params, lr=0.02, preconditioner=name)
    opt.step(loss)
    entries = opt.state_dict()["state"].keys()
    for t in range(4):
        params[1].requires_grad_(t % 2 == 1)
        before = params[1].detach().clone()
        opt.step(loss)
        assert torch.equal(before, params[1]) == (t % 2 == 0)
        assert opt.state_dict()["state"].keys() == entries


# All or nothing


class BrokenError(Exception):
    """What goes wrong in the middle of a step."""


@pytest.mark.parametrize("name", ["dense", "kron"])
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Bucket, "fit"),
        (Bucket, "precondition"),
        (Bucket, "gather"),
        (Bucket, "scatter"),
        (Bucket, "__init__"),
    ]
    + [
        (optim, x)
        for x in (
            "clip_factor",
            "damp",
            "average",
            "planned_move",
            "probes_of_step",
            "used_derivatives",
        )
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_an_error_inside_a_step_leaves_nothing_half_done(monkeypatch, name, owner, method):
    """Whichever call it is that fails: all is as before, and after it the run is that without the error."""
    kind: dict[str, Any] = {
        "lr": 0.05,
        "preconditioner": name,
        "momentum": 0.5,
        "damping": 0.01,
        "weight_decay": 0.1,
    }
    net, twin = network(), network()
    opt, other = PSGD(net.parameters(), **kind), PSGD(twin.parameters(), **kind)
    real = getattr(owner, method)
    for _ in range(2):
        for failing in range(3):
            calls = []

            def breaking(*args: Any, calls: list[int] = calls, failing: int = failing, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) > failing:
                    raise BrokenError
                return real(*args, **kwargs)

            before, state = weights(net), copy.deepcopy(opt.state_dict())
            monkeypatch.setattr(owner, method, breaking)
            broken = False
            try:
                opt.step(lambda: loss_of(net))
            except BrokenError:
                broken = True
            monkeypatch.setattr(owner, method, real)
            if broken:
                assert same(before, weights(net))
                assert equal(state, opt.state_dict())
            else:
                other.step(lambda: loss_of(twin))
        opt.step(lambda: loss_of(net))
        other.step(lambda: loss_of(twin))
        assert same(weights(net), weights(twin))
        assert equal(opt.state_dict(), other.state_dict())


# Settings


def test_a_preconditioner_by_name_group_and_rule():
    """The same run, whichever way it is asked for."""
    pairs = [
        ("kron", KronRule()),
        ("kron", Kron(Triangular(), Triangular())),
        ("diagonal", Diagonal()),
        ("diagonal", lambda shape: Diagonal()),
    ]
    for name, value in pairs:
        ends = []
        for preconditioner in (name, value):
            x = torch.ones(3, 2, requires_grad=True)
            opt = PSGD([x], lr=0.05, preconditioner=preconditioner)
            for _ in range(4):
                opt.step(lambda x=x: x.pow(4).sum() + x.sum() ** 2)
            ends.append(x.detach())
        assert torch.equal(*ends), name


def test_a_group_per_param_group_is_a_direct_sum():
    """Each part of the parameters has the preconditioner of its group, and that alone."""
    net = network()
    opt = PSGD(
        [
            {"params": net[0].parameters(), "preconditioner": "esgd"},
            {"params": net[2].parameters()},
        ],
        lr=0.02,
    )
    first = loss_of(net)
    for _ in range(5):
        opt.step(lambda: loss_of(net))
    assert loss_of(net) < first
    table = opt.describe()
    assert table.count("Equilibration()") == 2
    assert table.count("Kron(") == 2


def test_describe_allocates_nothing_and_names_what_it_is_given():
    net = torch.nn.Linear(5000, 3, device="meta")
    table = PSGD(net.named_parameters(), lr=0.1).describe().splitlines()
    assert table[0].split() == ["parameters", "shape", "group", "entries", "bytes"]
    assert table[1].startswith("weight")
    assert "Kron(Triangular(), Diagonal())" in table[1]
    assert str(3 * 4 // 2 + 5000) in table[1]
    assert len(table) == 3


@pytest.mark.parametrize("name", NAMES)
def test_describe_counts_what_a_step_makes(name):
    """Bytes are those of the state, block by block."""
    net = network()
    opt = PSGD(net.parameters(), lr=0.01, preconditioner=name)
    rows = opt.describe().splitlines()[1:]
    opt.step(lambda: loss_of(net))
    assert opt.describe().splitlines()[1:] == rows
    for choice, row in zip(choose(name, net.parameters()), rows, strict=True):
        held = leaves(tuple(opt.state[choice.block.params[0]].values()))
        assert sum(leaf.nbytes for leaf in held) == int(row.split()[-1])


def test_period_of_the_paper():
    assert [period("log10", t) for t in (0, 1, 9, 10, 99, 100, 1000, 999_999)] == [
        1,
        1,
        1,
        1,
        1,
        2,
        3,
        5,
    ]
    assert period(lambda t: t + 1, 4) == 5


def test_a_schedule_that_is_a_function():
    """`due` asks it before the step, and Q changes on those steps alone."""
    x = torch.ones(3, requires_grad=True)
    opt = PSGD([x], lr=0.01, update_every=lambda t: 1 if t < 2 else 3)
    changed = []
    for t in range(8):
        due = opt.due
        before = [leaf.clone() for leaf in leaves(opt.state[x]["Q"])] if t else []
        opt.step(lambda: x.square().sum())
        changed.append(not same(before, leaves(opt.state[x]["Q"])) if t else True)
        assert changed[-1] == due
    assert changed == [True, True, False, True, False, False, True, False]


def test_the_step_size_of_q_may_change_between_steps():
    """It is read at each step, as every setting is."""
    x = torch.ones(3, requires_grad=True)
    opt = PSGD([x], lr=0.0, preconditioner="diagonal", init_scale=1.0)
    sizes = []
    for rate in (0.1, 0.001):
        opt.param_groups[0]["lr_preconditioner"] = rate
        before = [leaf.clone() for leaf in leaves(opt.state[x]["Q"])] if x in opt.state else [torch.ones(1, 3)]
        opt.step(lambda: x.square().sum())
        sizes.append(max(float((a - b).abs().max()) for a, b in zip(leaves(opt.state[x]["Q"]), before, strict=True)))
    assert sizes[0] == pytest.approx(0.1, rel=0.05)
    assert 0 < sizes[1] < 0.002


def test_the_loss_of_rosenbrock_goes_to_zero():
    """From the start of the class's example, and to its end."""
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    opt = PSGD(
        [x],
        lr=0.5,
        preconditioner="dense",
        lr_preconditioner=0.2,
        init_scale=0.1,
        update_every=1,
    )

    def loss() -> Tensor:
        return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2

    for _ in range(300):
        last = opt.step(loss)
    assert last < 1e-6
    assert math.isclose(x[0].item(), 1.0, abs_tol=1e-3)
