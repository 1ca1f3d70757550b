"""PSGD as users call it: three ways, every product, states that travel, and errors that change nothing."""

import copy
import gc
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psgd_lit.derivatives
from psgd_lit.blocks import KronRule, leaves
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.triangular import Triangular
from psgd_lit.derivatives import draw_probes
from psgd_lit.optim import PSGD, period

PRECONDITIONERS = ["dense", "splu", "kron", "diagonal", "esgd", Diagonal(), Triangular(), KronRule(max_size=4)]
CASES = pytest.mark.parametrize("preconditioner", PRECONDITIONERS, ids=repr)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Torch warns of backward(create_graph=True) and deprecates its own forward mode's helper; both are its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A small tanh network with fixed weights."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
    source = generator(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=source) / 2)
    return net


def loss_of(net: nn.Module) -> Tensor:
    source = generator(1)
    dtype = next(net.parameters()).dtype
    x, y = (torch.randn(32, n, generator=source).to(dtype) for n in (4, 2))
    return (net(x) - y).square().mean()


def calling_backward(net: nn.Module, create_graph: bool) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        net.zero_grad()
        loss = loss_of(net)
        loss.backward(create_graph=create_graph)
        return loss

    return closure


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@CASES
@pytest.mark.parametrize("hvp", ["exact", "approx", "forward"])
def test_every_preconditioner_lowers_the_loss(preconditioner, hvp):
    net = network()
    opt = PSGD(net.parameters(), lr=0.05, preconditioner=preconditioner, hvp=hvp)
    first = loss_of(net)
    for _ in range(30):
        loss = opt.step(lambda: loss_of(net))
    assert loss < first
    assert loss.shape == ()
    assert not loss.requires_grad
    assert not math.isclose(loss, loss_of(net).item(), rel_tol=1e-12), "the returned loss is the one before the step"


@pytest.mark.parametrize("every", [1, 3, "log10", lambda t: 2])
def test_three_ways_walk_one_path(every):
    ends = []
    for way in ("returns", "calls backward", "no closure"):
        net = network(torch.float64)
        opt = PSGD(net.parameters(), lr=0.05, momentum=0.5, update_every=every)
        for _ in range(12):
            closure = calling_backward(net, create_graph=opt.due)
            if way == "returns":
                opt.step(lambda net=net: loss_of(net))
            elif way == "calls backward":
                opt.step(closure)
            else:
                closure()
                opt.step()
        ends.append(torch.cat([p.flatten() for p in weights(net)]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-9, atol=1e-12)


def test_approximate_product_from_a_closure_that_calls_backward():
    one, other = network(torch.float64), network(torch.float64)
    first = PSGD(one.parameters(), lr=0.05, hvp="approx")
    second = PSGD(other.parameters(), lr=0.05, hvp="approx")
    for _ in range(5):
        first.step(lambda: loss_of(one))
        second.step(calling_backward(other, create_graph=False))
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def wrong_calls() -> list[tuple[str, str, Callable[[PSGD, nn.Module], Any]]]:
    def after_backward(opt: PSGD, net: nn.Module) -> None:
        loss_of(net).backward()
        opt.step()

    def without_graph(opt: PSGD, net: nn.Module) -> None:
        opt.step(calling_backward(net, create_graph=False))

    def no_loss(opt: PSGD, net: nn.Module) -> None:
        opt.step(lambda: None)

    return [
        ("exact", "Three ways to call step", after_backward),
        ("approx", "Three ways to call step", after_backward),
        ("forward", "Three ways to call step", after_backward),
        ("exact", "Three ways to call step", without_graph),
        ("forward", "only return the loss", without_graph),
        ("exact", "must return its loss", no_loss),
        ("approx", "must return its loss", no_loss),
    ]


@pytest.mark.parametrize(("hvp", "message", "call"), wrong_calls())
def test_a_wrong_call_says_what_to_do_and_changes_nothing(hvp, message, call):
    net = network()
    opt = PSGD(net.parameters(), lr=0.1, hvp=hvp, momentum=0.9)
    opt.step(lambda: loss_of(net))
    before, state = weights(net), copy.deepcopy(opt.state_dict())
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        call(opt, net)
    assert same(weights(net), before)
    assert repr(opt.state_dict()) == repr(state)
    opt.step(lambda: loss_of(net))


def test_step_with_nothing_to_do():
    net = network()
    opt = PSGD(net.parameters(), lr=0.1)
    before = weights(net)
    assert opt.step() is None
    assert same(weights(net), before)


def test_products_are_counted(monkeypatch):
    """One Hessian-vector product on a step that is due, none on the others."""
    calls = []
    original = psgd_lit.derivatives.hvp_exact
    monkeypatch.setattr(psgd_lit.derivatives, "hvp_exact", lambda *args: calls.append(1) or original(*args))
    net = network()
    opt = PSGD(net.parameters(), lr=0.05, update_every=4)
    due, closures = [], 0

    def closure() -> Tensor:
        nonlocal closures
        closures += 1
        return loss_of(net)

    for _ in range(12):
        due.append(opt.due)
        opt.step(closure)
        assert len(calls) == sum(due)
    assert due == [t % 4 == 0 for t in range(12)]
    assert closures == 12


def test_previous_q_preconditions_the_current_gradient():
    net, plain = network(), network()
    opt = PSGD(net.parameters(), lr=0.1, init_scale=1.0)
    opt.step(lambda: loss_of(net))
    gradient = torch.autograd.grad(loss_of(plain), list(plain.parameters()))
    for p, q, g in zip(net.parameters(), plain.parameters(), gradient, strict=True):
        torch.testing.assert_close(p, q - 0.1 * g)


def test_init_scale_is_that_of_q():
    x = torch.ones(3, requires_grad=True)
    PSGD([x], lr=1.0, init_scale=0.1, preconditioner="dense").step(lambda: x.square().sum())
    torch.testing.assert_close(x.detach(), torch.full((3,), 1 - 2 * 0.1**2))


def test_clipping_bounds_the_whole_step():
    net = network()
    opt = PSGD(net.parameters(), lr=0.5, max_norm=0.01)
    for _ in range(3):
        before = torch.cat([p.flatten() for p in weights(net)])
        opt.step(lambda: 100 * loss_of(net))
        moved = torch.cat([p.flatten() for p in weights(net)]) - before
        torch.testing.assert_close(moved.norm(), torch.tensor(0.5 * 0.01), rtol=1e-3, atol=0)


def test_momentum_is_a_mean_at_first_and_keeps_the_size_of_a_step():
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    opt = PSGD([x], lr=1.0, momentum=0.9, update_every=10**9, preconditioner="diagonal")
    opt.step(lambda: x.sum())
    for slope in (1.0, 4.0, 1.0):
        before = x.item()
        opt.step(lambda slope=slope: slope * x.sum())
    assert before - x.item() == pytest.approx((1 + 1 + 4 + 1) / 4)


def test_settings_of_each_param_group():
    net = network()
    opt = PSGD([{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}], lr=0.1)
    before = weights(net)
    opt.step(lambda: loss_of(net))
    after = weights(net)
    assert same(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


def test_a_group_added_later_joins_the_run():
    net = network()
    opt = PSGD(net[0].parameters(), lr=0.05)
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


@CASES
def test_frozen_and_unused_parameters_are_left_alone(preconditioner):
    net, unused = network(), torch.ones(3, requires_grad=True)
    opt = PSGD([*net.parameters(), unused], lr=0.05, preconditioner=preconditioner)
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    for _ in range(4):
        opt.step(lambda: loss_of(net))
    assert torch.equal(net[0].weight, before)
    assert torch.equal(unused, torch.ones(3))
    net[0].weight.requires_grad_(True)
    opt.step(lambda: loss_of(net))
    assert not torch.equal(net[0].weight, before)


@CASES
def test_odd_shapes(preconditioner):
    params = [torch.ones(shape, requires_grad=True) for shape in ((), (1,), (0, 3), (2, 3, 2), (2, 1, 2, 2))]
    opt = PSGD(params, lr=0.1, preconditioner=preconditioner)

    def loss() -> Tensor:
        return sum((p.square() * (1 + i)).sum() for i, p in enumerate(params))

    first = loss()
    for _ in range(5):
        opt.step(loss)
    assert loss() < first


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_state_is_float32_or_wider(dtype):
    net = network(dtype)
    opt = PSGD(net.parameters(), lr=0.05)
    first = loss_of(net)
    for _ in range(10):
        opt.step(lambda: loss_of(net))
    assert loss_of(net) < first
    assert all(p.dtype == dtype for p in net.parameters())
    Q = opt.state[net[0].weight]["Q"]
    wide = torch.promote_types(dtype, torch.float32)
    assert all(leaf.dtype == wide for leaf in leaves(Q))


@CASES
def test_a_saved_run_continues_with_the_same_bits(preconditioner):
    def optimizer(net: nn.Module) -> PSGD:
        return PSGD(net.parameters(), lr=0.05, preconditioner=preconditioner, momentum=0.9, update_every=2, seed=3)

    net = network()
    opt = optimizer(net)
    for _ in range(7):
        opt.step(lambda: loss_of(net))
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    twin = copy.deepcopy(net)
    resumed = optimizer(twin)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for _ in range(7):
        opt.step(lambda: loss_of(net))
        resumed.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))


def test_loading_clones():
    net = network()
    opt = PSGD(net.parameters(), lr=0.05)
    opt.step(lambda: loss_of(net))
    saved = opt.state_dict()
    twin = network()
    other = PSGD(twin.parameters(), lr=0.05)
    other.load_state_dict(saved)
    kept = [leaf.clone() for leaf in leaves(opt.state[net[0].bias]["Q"])]
    for _ in range(3):
        other.step(lambda: loss_of(twin))
    assert same(kept, leaves(opt.state[net[0].bias]["Q"]))


def test_half_precision_keeps_its_wide_state_through_a_checkpoint():
    net = network(torch.bfloat16)
    opt = PSGD(net.parameters(), lr=0.05)
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    other = PSGD(network(torch.bfloat16).parameters(), lr=0.05)
    other.load_state_dict(opt.state_dict())
    one, two = opt.state_dict()["state"], other.state_dict()["state"]
    for key, state in one.items():
        assert same(leaves(state["Q"]), leaves(two[key]["Q"]))
        assert all(leaf.dtype == torch.float32 for leaf in leaves(two[key]["Q"]))


def test_another_preconditioner_is_refused_on_loading():
    net = network()
    opt, other = PSGD(net.parameters(), lr=0.1), PSGD(net.parameters(), lr=0.1, preconditioner="diagonal")
    opt.step(lambda: loss_of(net))
    before = repr(other.state_dict())
    with pytest.raises(ValueError, match="saved with preconditioner kron, and this optimizer has diagonal"):
        other.load_state_dict(opt.state_dict())
    assert repr(other.state_dict()) == before


def test_an_old_checkpoint_keeps_present_values():
    net = network()
    opt = PSGD(net.parameters(), lr=0.1, max_norm=2.0)
    opt.step(lambda: loss_of(net))
    old = opt.state_dict()
    del old["param_groups"][0]["max_norm"]
    other = PSGD(net.parameters(), lr=0.1, max_norm=3.0)
    other.load_state_dict(old)
    assert other.param_groups[0]["max_norm"] == 3.0
    assert other.param_groups[0]["t"] == 1


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_alone(duplicate):
    net = network()
    opt = PSGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    twin, other = duplicate((net, opt))
    for _ in range(3):
        opt.step(lambda: loss_of(net))
        other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))


def test_probes_depend_on_seed_iteration_and_order_alone():
    p, q = torch.zeros(4, 3), torch.zeros(2)
    first = draw_probes([p, q], seed=1, t=2)
    state = torch.get_rng_state()
    again = draw_probes([p.T.contiguous().T, q], seed=1, t=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, again)
    for other in (draw_probes([p, q], 2, 2), draw_probes([p, q], 1, 3)):
        assert not torch.equal(first[0], other[0])


def test_a_step_leaves_the_users_random_stream():
    net = network()
    opt = PSGD(net.parameters(), lr=0.05)
    state = torch.get_rng_state()
    opt.step(lambda: loss_of(net))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["returns", "calls backward", "no closure"])
@pytest.mark.parametrize("every", [1, 3])
def test_memory_is_flat(way, every):
    net = network()
    opt = PSGD(net.parameters(), lr=0.01, momentum=0.9, update_every=every)

    def take() -> None:
        closure = calling_backward(net, create_graph=opt.due)
        if way == "returns":
            opt.step(lambda: loss_of(net))
        elif way == "calls backward":
            opt.step(closure)
        else:
            closure()
            opt.step()

    def tensors() -> int:
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    for _ in range(2 * every):
        take()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(12):
            take()
        assert tensors() == before
    finally:
        gc.enable()


def test_schedulers_and_a_tensor_step_size():
    net = network()
    opt = PSGD(net.parameters(), lr=torch.tensor(0.1))
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    for _ in range(2):
        opt.step(lambda: loss_of(net))
        schedule.step()
    assert isinstance(opt.param_groups[0]["lr"], Tensor)
    assert opt.param_groups[0]["lr"].item() == pytest.approx(0.025)


def test_describe_allocates_nothing_and_names_what_it_is_given():
    net = nn.Linear(5000, 3, device="meta")
    table = PSGD(net.named_parameters(), lr=0.1).describe().splitlines()
    assert table[0].split() == ["parameters", "shape", "group", "entries", "bytes"]
    assert table[1].startswith("weight")
    assert "Kron(Triangular(), Diagonal())" in table[1]
    assert str(3 * 4 // 2 + 5000) in table[1]
    assert len(table) == 3


BAD = [
    ({"lr": -0.1}, ValueError, "at least 0"),
    ({"lr": "fast"}, TypeError, "lr must be a number"),
    ({"lr_preconditioner": 0.0}, ValueError, r"\(0, 1\)"),
    ({"lr_preconditioner": 1}, ValueError, r"\(0, 1\)"),
    ({"init_scale": 0}, ValueError, "positive"),
    ({"hvp": "newton"}, ValueError, "exact, approx, forward"),
    ({"update_every": 0}, ValueError, "integer from 1"),
    ({"update_every": "often"}, ValueError, "log10"),
    ({"max_norm": -1}, ValueError, "positive"),
    ({"momentum": 1.0}, ValueError, r"\[0, 1\)"),
    ({"seed": -1}, ValueError, "seed"),
    ({"seed": 0.5}, ValueError, "integer"),
    ({"preconditioner": "newton"}, ValueError, "dense, splu, kron, scan, diagonal, esgd"),
    ({"preconditioner": 3}, TypeError, "a name, a group or a rule"),
    ({"preconditioner": Kron(Triangular())}, ValueError, "does not fit"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), BAD, ids=str)
def test_bad_settings_are_refused_by_name(wrong, kind, message):
    net = network()
    with pytest.raises(kind, match=message):
        PSGD(net.parameters(), **{"lr": 0.1, **wrong})
    opt = PSGD(net[0].parameters(), lr=0.1)
    with pytest.raises(kind, match=message):
        opt.add_param_group({"params": list(net[2].parameters()), **wrong})
    assert len(opt.param_groups) == 1


def test_shared_settings_are_refused():
    net = network()
    opt = PSGD(net[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="hvp is shared"):
        opt.add_param_group({"params": list(net[2].parameters()), "hvp": "approx"})


def test_dense_that_is_too_large_is_refused():
    with pytest.raises(ValueError, match="20000 parameters"):
        PSGD([torch.empty(200, 200, device="meta", requires_grad=True)], lr=0.1, preconditioner="dense")


def test_period_of_the_paper():
    assert [period("log10", t) for t in (0, 1, 9, 10, 99, 100, 1000, 999_999)] == [1, 1, 1, 1, 1, 2, 3, 5]


def test_a_step_under_no_grad():
    net = network()
    opt = PSGD(net.parameters(), lr=0.05)
    first = loss_of(net)
    with torch.no_grad():
        for _ in range(5):
            opt.step(lambda: loss_of(net))
    assert loss_of(net) < first
