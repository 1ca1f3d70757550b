"""What went wrong for others, as kinds: thirty-one of them, each with the behaviour that is right.

The numbers are those of a collection of public reports about second-order optimizers and double backward in PyTorch.
"""

import contextlib
import copy
import gc
import io
import itertools
import math
import pickle
import re
import resource
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy
import pytest
import test_distributed
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from toys import (
    HVP,
    NAMES,
    WAYS,
    batch,
    calling_backward,
    equal,
    fill,
    generator,
    live_tensors,
    loss_of,
    network,
    quiet,
    same,
    states,
    take,
    ways_of,
    weights,
)

from psgd_lit.affine import Block, Piece, affine_blocks
from psgd_lit.blocks import KronRule, choose, leaves
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.triangular import Triangular
from psgd_lit.optim import PSGD
from psgd_lit.settings import PAPER

ALL_NAMES = (*NAMES, "scan")
D = torch.float64
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
EVERY_HVP = pytest.mark.parametrize("hvp", HVP)
EVERY_CALL = pytest.mark.parametrize(("hvp", "way"), [(hvp, way) for hvp in HVP for way in ways_of(hvp)])


@pytest.fixture(autouse=True)
def torch_talks() -> Iterator[None]:
    with quiet():
        yield


def finite(tensors: list[Tensor]) -> bool:
    return all(x.isfinite().all() for x in tensors)


def optimizer(net: nn.Module, **kwargs: Any) -> PSGD:
    """PSGD with the blocks that "scan" needs."""
    blocks = affine_blocks(net) if kwargs.get("preconditioner") == "scan" else None
    return PSGD(net.parameters(), blocks=blocks, **{"lr": 0.02, **kwargs})


def test_every_number_is_here():
    """A gate: none of the 31 kinds lacks its test; number 17 takes two processes, and a file of its own."""
    names = (*globals(), *vars(test_distributed))
    numbers = {int(found[1]) for name in names if (found := re.match(r"test_(\d\d)_", name))}
    assert numbers == set(range(1, 32))


@pytest.mark.parametrize(
    ("hvp", "name"),
    [(h, n) for h in HVP for n in ALL_NAMES if h in ("exact", "whiten") or n == "kron"],
)
def test_01_zero_gradient_first(hvp, name):
    """An all-zero gradient and product at the first step leaves all as it is, and later steps work."""
    net = network()
    opt = optimizer(net, preconditioner=name, hvp=hvp, momentum=0.5)
    before, first = weights(net), loss_of(net)
    opt.step(lambda: 0.0 * loss_of(net))
    assert same(before, weights(net))
    assert finite(states(opt))
    for _ in range(10):
        opt.step(lambda: loss_of(net))
    assert finite(states(opt))
    assert loss_of(net) < first


@EVERY_NAME
def test_01_zero_product_at_a_slope(name):
    """A product that is all zero where the gradient is not: Q stays at its start, the step is one of SGD."""
    x = torch.zeros(4, requires_grad=True)
    opt = PSGD([x], lr=0.5, preconditioner=name, **PAPER)
    opt.step(lambda: (torch.arange(4.0) * x).sum())
    assert torch.equal(x, -0.5 * torch.arange(4.0))
    start = [leaf.clone() for leaf in leaves(opt.state[x]["Q"])]
    opt.step(lambda: (torch.arange(4.0) * x).sum())
    assert same(start, leaves(opt.state[x]["Q"]))


def test_02_wide_convolutions():
    """Deep stacks of convolutions: state is bounded by shape, and described before anything is allocated."""
    sizes = (3, 32, 64, 128, 256)
    net = nn.Sequential(*(nn.Conv2d(a, b, 4, bias=False, device="meta") for a, b in itertools.pairwise(sizes)))
    opt = PSGD(net.named_parameters(), lr=0.1)
    lines = opt.describe().splitlines()[1:]
    assert not opt.state
    entries, size = (sum(int(line.split()[i]) for line in lines) for i in (-2, -1))
    bound = 0
    for inputs, outputs in itertools.pairwise(sizes):
        for n in (outputs, 16 * inputs):
            bound += n * (n + 1) // 2 if n <= 1024 else n
    assert entries == bound
    assert size < 10e6
    assert "Diagonal()" in lines[-1]
    assert "Diagonal()" not in lines[0]
    held = PSGD([nn.Parameter(torch.ones(256, 128, 4, 4))], lr=0.1, hvp="whiten")
    (p,) = held.param_groups[0]["params"]
    p.grad = torch.ones_like(p)
    held.step()
    assert sum(leaf.nbytes for leaf in leaves(tuple(held.state[p].values()))) == int(lines[-1].split()[-1])


def test_02_a_larger_cap_only_if_asked_for():
    """The rule's cap is the user's choice; an explicit dense that is too large is an error that says what to do."""
    p = torch.empty(64, 3000, device="meta", requires_grad=True)
    assert "Diagonal()" in PSGD([p], lr=0.1).describe()
    assert "Diagonal()" not in PSGD([p], lr=0.1, preconditioner=KronRule(max_size=4096)).describe()
    with pytest.raises(ValueError, match=r'192000 parameters.*choose "kron" or "splu"'):
        PSGD([p], lr=0.1, preconditioner="dense")


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((2_000_000,), "kron"),
        ((2_000_000,), "diagonal"),
        ((50_000, 32), "kron"),
        ((5_000, 32), "splu"),
    ],
)
def test_03_long_vectors(shape, name):
    """Two million entries, or some for the largest state: no square of that, and at most 25 numbers for each."""
    p = torch.ones(shape, requires_grad=True)
    opt = PSGD([p], lr=0.01, preconditioner=name, hvp="whiten", **PAPER)
    p.grad = torch.ones_like(p)
    for _ in range(2):
        opt.step()
    assert sum(leaf.numel() for leaf in leaves(opt.state[p]["Q"])) <= 25 * p.numel()
    # a normalised step of a full triangle grows with the dimension, so that P g may point anywhere for a rank of ten
    assert (p < 1).all() if name != "splu" else p.isfinite().all()


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
@EVERY_NAME
def test_04_dtypes_mixed_in_one_group(hvp, name):
    """Half, single and double weights together: the state is float32 or wider, weights keep their dtype, it fits."""
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    params = [torch.full((3, 2), 1.0, dtype=dtype, requires_grad=True) for dtype in kinds]
    opt = PSGD(params, lr=0.05, preconditioner=name, hvp=hvp, momentum=0.5, **PAPER)

    def loss() -> Tensor:
        return sum((i + 1) * p.float().square().sum() for i, p in enumerate(params)) / 4

    first = loss()
    for _ in range(5):
        opt.step(loss)
    assert loss() < first
    assert [p.dtype for p in params] == list(kinds)
    assert all(p.detach().max() < 1 for p in params)
    assert all(x.dtype in (torch.float32, torch.float64) for x in states(opt))
    narrow, wide = opt.state[params[0]], opt.state[params[-1]]
    assert narrow["momentum"].dtype == torch.float32
    if name not in ("dense", "splu"):  # those have one block for all
        assert all(leaf.dtype == torch.float64 for leaf in leaves(wide["Q"]))


def test_04_no_difference_of_gradients_in_half_precision():
    """It would be rounding alone: a clear error, before anything changes."""
    net = network(torch.bfloat16)
    opt = PSGD(net.parameters(), lr=0.1, hvp="approx")
    before = weights(net)
    with pytest.raises(ValueError, match="drowns in rounding"):
        opt.step(lambda: loss_of(net))
    assert same(before, weights(net))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALL_NAMES)
def test_05_saving_is_the_identity(name, dtype):
    """Loaded state has the dtypes and bits of the saved one, is a copy of it, and the next step has the same bits."""
    net, twin = network(dtype), network(dtype)
    opt, other = (optimizer(n, preconditioner=name, momentum=0.9, update_every=2, seed=3) for n in (net, twin))
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    saved = opt.state_dict()
    other.load_state_dict(saved)
    twin.load_state_dict(net.state_dict())
    assert equal(other.state_dict(), saved)
    kept = states(opt)
    for _ in range(3):
        other.step(lambda: loss_of(twin))
    assert same(kept, states(opt)), "loading clones"
    fresh = optimizer(network(dtype), preconditioner=name, momentum=0.9, update_every=2, seed=3)
    fresh.load_state_dict(saved)
    memory = [{x.data_ptr() for state in o.state.values() for x in leaves(tuple(state.values()))} for o in (opt, fresh)]
    assert not (memory[0] & memory[1]) - {0}
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    assert same(weights(net), weights(twin))
    assert all(x.dtype == torch.float32 for x in states(other))


def kinds_in(saved: Any) -> Iterator[tuple[str, type]]:
    """Where a dictionary has values of what type."""
    if isinstance(saved, dict):
        for name, value in saved.items():
            yield from ((f"{name}/{path}", kind) for path, kind in kinds_in(value))
    elif isinstance(saved, list | tuple):
        for value in saved:
            yield from kinds_in(value)
    else:
        yield "", type(saved)


@pytest.mark.parametrize(
    "preconditioner",
    ["kron", Kron(Triangular(), Diagonal()), KronRule(8), lambda shape: Diagonal()],
)
def test_06_tensors_and_numbers_only(preconditioner):
    """No classes, no functions: `torch.load` reads it with weights_only, whatever was passed for an argument."""
    p = torch.ones(3, 2, requires_grad=True)

    def make() -> PSGD:
        return PSGD(
            [("p", p)],
            lr=0.1,
            preconditioner=preconditioner,
            update_every=lambda t: 1,
            momentum=0.5,
        )

    opt = make()
    opt.step(lambda: p.square().sum())
    saved = opt.state_dict()
    assert {kind for _, kind in kinds_in(saved["state"])} <= {Tensor, int, float}
    assert {kind for _, kind in kinds_in(saved["param_groups"])} <= {
        Tensor,
        int,
        float,
        str,
        bool,
    }
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert equal(loaded, saved)
    if not isinstance(preconditioner, str) and not isinstance(preconditioner, Kron | KronRule):
        return  # a function's text holds its address, so a state goes back to the same function only
    other = make()
    other.load_state_dict(loaded)
    other.step(lambda: p.square().sum())


@pytest.mark.parametrize("name", ALL_NAMES)
def test_07_the_model_changes_its_dtype(name):
    """State follows the parameter after `.double()`, with its values, and comes back; Q and momentum alike."""
    net, twin = network(), network()
    opt, other = (optimizer(n, preconditioner=name, momentum=0.5) for n in (net, twin))
    for dtype, steps in ((torch.float32, 3), (D, 2), (torch.float32, 2)):
        net.to(dtype)
        for _ in range(steps):
            opt.step(lambda: loss_of(net))
            other.step(lambda: loss_of(twin))
        assert all(x.dtype == dtype for x in states(opt))
        for x, y in zip(states(opt), states(other), strict=True):
            torch.testing.assert_close(x.float(), y, rtol=1e-3, atol=1e-3)  # as if it had always been single
    net.bfloat16()
    opt.step(lambda: loss_of(net))
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in states(opt))


def test_07_another_device(monkeypatch):
    """A state goes to the parameter's device; on this machine the only other one is meta, where no number is read."""
    net = network()
    opt = optimizer(net, momentum=0.5)
    opt.step(lambda: loss_of(net))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    elsewhere = torch.load(file, map_location="meta", weights_only=True)
    assert elsewhere["state"][0]["momentum"].is_meta
    file.seek(0)
    other = optimizer(net, momentum=0.5)
    other.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    other.step(lambda: loss_of(net))
    distant = network().to("meta")
    remote = optimizer(distant, momentum=0.5)
    remote.load_state_dict(opt.state_dict())
    assert all(x.is_meta for state in remote.state.values() for x in [*leaves(state["Q"]), state["momentum"]])
    for p in distant.parameters():
        p.grad = torch.ones_like(p)
    remote.param_groups[0]["hvp"] = "whiten"
    # torch has no generator for meta
    monkeypatch.setattr(
        "psgd_lit.derivatives.draw_probes",
        lambda params, *_: [torch.empty_like(p) for p in params],
    )
    remote.step()
    assert all(x.is_meta for x in states(remote))


@pytest.mark.parametrize(
    ("hvp", "way", "name"),
    [
        (hvp, way, name)
        for hvp in HVP
        for way in ways_of(hvp)
        for name in ALL_NAMES
        if name == "kron" or (hvp in ("exact", "whiten") and way != "calls backward")
    ],
)
def test_08_parameters_without_a_gradient(hvp, way, name):
    """Unused now and later, unused in this batch, frozen: untouched, with decay and momentum too; the others train."""
    net, late = network(), nn.Linear(2, 2)
    fill(late, 5)
    both = nn.ModuleList([net, late])
    opt = optimizer(both, preconditioner=name, hvp=hvp, weight_decay=0.1, momentum=0.5)
    frozen = net[0].bias
    frozen.requires_grad_(False)
    start, still = weights(both), [late.weight, late.bias, frozen]

    def small() -> Tensor:
        return loss_of(net)

    def large() -> Tensor:
        return loss_of(net) + late(torch.ones(3, 2)).square().mean()

    for _ in range(3):
        take(opt, small, way)
    assert same([p.detach() for p in still], [start[i] for i in (4, 5, 1)])
    assert not torch.equal(net[0].weight, start[0])
    assert all("momentum" not in opt.state.get(p, {}) for p in still), "state is made when a gradient comes"
    take(opt, large, way)
    moved = weights(late)
    assert not any(torch.equal(a, b) for a, b in zip(moved, start[4:], strict=True))
    momentum = opt.state[late.weight]["momentum"].clone()
    take(opt, small, way)
    assert same(moved, weights(late)), "unused in this batch"
    assert torch.equal(momentum, opt.state[late.weight]["momentum"])
    frozen.requires_grad_(True)
    take(opt, large, way)
    assert not torch.equal(frozen, start[1])
    assert finite(weights(both))


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
@EVERY_NAME
def test_09_shapes_of_zero_and_one(hvp, name):
    """Nothing to do for an empty parameter; numbers, single entries and dimensions of one fit."""
    shapes = ((), (1,), (0, 3), (0,), (2, 3, 2), (1, 1), (2, 1, 2, 2), (3, 0, 2))
    params = [torch.ones(shape, requires_grad=True) for shape in shapes]
    opt = PSGD(params, lr=0.05, preconditioner=name, hvp=hvp, **PAPER)

    def loss() -> Tensor:
        return sum((p.square() * (1 + i)).sum() for i, p in enumerate(params))

    first = loss()
    for _ in range(5):
        opt.step(loss)
    assert loss() < first
    assert all((p < 1).all() for p in params)
    assert not any(opt.state.get(p) for p in params if not p.numel())
    assert len(opt.describe().splitlines()) == (2 if name in ("dense", "splu") else 6)


def test_09_nothing_but_empty_parameters():
    p = torch.empty(0, 3, requires_grad=True)
    opt = PSGD([p], lr=0.1)
    assert opt.step(lambda: p.sum()) is not None
    assert not opt.state.get(p)


@EVERY_NAME
def test_10_layout_changes_nothing(name):
    """Channels-last, transposed and strided weights walk the contiguous path: same probes, same state, same bits."""
    source = generator()
    values = torch.randn(4, 3, 2, 2, generator=source)
    gradients = [torch.randn(values.shape, generator=source) for _ in range(3)]
    layouts = {
        "contiguous": lambda x: x.clone(),
        "channels last": lambda x: x.clone(memory_format=torch.channels_last),
        "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
        "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    }
    ends = {}
    for layout, arrange in layouts.items():
        p = arrange(values).requires_grad_()
        strides = p.stride()
        opt = PSGD([p], lr=0.1, preconditioner=name, hvp="whiten", momentum=0.5)
        for g in gradients:
            p.grad = arrange(g)
            opt.step()
        assert p.stride() == strides
        ends[layout] = p.detach().contiguous()
    assert all(torch.equal(end, ends["contiguous"]) for end in ends.values())


def test_10_expanded_weights_are_refused():
    """Their entries share memory, so that no step in place can be right: an error that says what to do instead."""
    p = torch.ones(1, 3).expand(4, 3).requires_grad_()
    with pytest.raises(ValueError, match="was expanded, so that its entries share memory"):
        PSGD([p], lr=0.1)
    assert PSGD([torch.ones(1, 3).expand(1, 3).requires_grad_()], lr=0.1).param_groups


@pytest.mark.parametrize(("hvp", "name"), [(h, n) for h in HVP for n in NAMES if h != "forward" or n == "kron"])
def test_11_complex_weights(hvp, name):
    """A complex parameter walks the path of its view_as_real, with products of the Hessian over real numbers."""
    start = torch.randn(3, 2, dtype=torch.complex64, generator=generator())
    z = start.clone().requires_grad_()
    x = torch.view_as_real(start).clone().requires_grad_()
    kind = {
        "lr": 0.05,
        "preconditioner": name,
        "hvp": hvp,
        "momentum": 0.5,
        "weight_decay": 0.01,
    }
    opt, other = PSGD([z], **kind), PSGD([x], **kind)

    def loss(w: Tensor) -> Tensor:
        return (w * w.conj().roll(1, 0)).real.square().sum() + (w.real * w.imag).sum() + (w - 1).abs().square().sum()

    first = loss(z)
    for _ in range(4):
        opt.step(lambda: loss(z))
        other.step(lambda: loss(torch.view_as_complex(x)))
    assert loss(z) < first
    tolerance = 1e-2 if hvp == "approx" else 1e-5  # a difference of gradients divides rounding by a small step
    torch.testing.assert_close(torch.view_as_real(z), x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("hvp", ["exact", "approx", "forward"])
def test_12_plain_backward(hvp):
    """A step that needs a second derivative after plain `backward`: our error, naming the three ways, and no change."""
    net = network()
    opt = optimizer(net, hvp=hvp, momentum=0.5)
    opt.step(lambda: loss_of(net))
    before, state = weights(net), copy.deepcopy(opt.state_dict())
    opt.zero_grad()
    loss_of(net).backward()
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    for way in (
        "opt.step(lambda: loss_fn(model(x), y))",
        "opt.step(closure)",
        "create_graph=True",
        'hvp="whiten"',
    ):
        assert way in str(caught.value)
    assert "does not require grad" not in str(caught.value)
    assert same(before, weights(net))
    assert equal(state, opt.state_dict())
    opt.step(lambda: loss_of(net))


def test_12_plain_backward_where_q_is_not_due():
    """Then nothing more than a gradient is needed."""
    net = network()
    opt = optimizer(net, update_every=2)
    for _ in range(6):
        opt.zero_grad()
        loss_of(net).backward(create_graph=opt.due)
        opt.step()
    opt.zero_grad()
    loss_of(net).backward()
    with pytest.raises(RuntimeError, match="Three ways"):
        opt.step()


@EVERY_HVP
def test_13_a_trainers_closure(hvp):
    """It zeroes, calls `backward` and returns the loss: it works where it can, else the same error."""
    net = network()
    opt = optimizer(net, hvp=hvp)
    closure = calling_backward(opt, lambda: loss_of(net), create_graph=False)
    if hvp in ("exact", "forward"):
        before = weights(net)
        with pytest.raises((RuntimeError, ValueError), match=r"Three ways to call step|only return the loss"):
            opt.step(closure)
        assert same(before, weights(net))
        return
    first = loss_of(net)
    for _ in range(5):
        loss = opt.step(closure)
    assert loss < first
    assert not loss.requires_grad


@pytest.mark.parametrize("hvp", ["exact", "approx"])
@pytest.mark.parametrize("every", [1, 3, "log10", lambda t: 2])
def test_13_every_way_walks_one_path(every, hvp):
    """The ways to call `step` differ in nothing but form."""
    ends = []
    for way in ways_of(hvp):
        net = network(torch.float64)
        opt = optimizer(net, hvp=hvp, momentum=0.5, update_every=every, weight_decay=0.01)
        for _ in range(8):
            take(opt, lambda net=net: loss_of(net), way)
        ends.append(torch.cat([p.flatten() for p in weights(net)]))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-9, atol=1e-12)


@EVERY_NAME
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_14_losses_without_curvature(name, damping):
    """Linear in some or all parameters: Hv is 0 there, the preconditioner stays bounded, steps are finite."""
    p, q = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    opt = PSGD([p, q], lr=0.01, preconditioner=name, damping=damping, init_scale=1.0)
    before = q.detach().clone()
    for _ in range(60):
        opt.step(lambda: p.square().sum() + (torch.tensor([1.0, 2.0]) * q).sum())
    assert finite(states(opt))
    assert p.norm() < math.sqrt(3)
    assert (q < before).all()
    assert (q > before - 60 * 0.01 * 2 * 30).all()
    linear = PSGD([q], lr=0.01, preconditioner=name, damping=damping, init_scale=1.0)
    for _ in range(60):
        linear.step(lambda: q.sum())
    for some, params in ((opt, [p, q]), (linear, [q])):
        for group, _, block in choose(name, params):
            Q = group.matrix(some.state[block.params[0]]["Q"])
            assert Q.abs().max() < 5


@pytest.mark.parametrize("hvp", ["exact", "approx", "forward"])
def test_14_relu_and_l1(hvp):
    """A Hessian that is zero almost everywhere."""
    net = fill(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    opt = optimizer(net, hvp=hvp, lr=0.01)
    x, y = batch()

    def loss() -> Tensor:
        return (net(x) - y).abs().mean()

    first = loss()
    for _ in range(20):
        opt.step(loss)
    assert loss() < first
    assert finite(states(opt))


@pytest.fixture
def only_its_own() -> Iterator[None]:
    """The collector looks at what a test makes, and not at all that there was before, which is slow."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("only_its_own")
@EVERY_CALL
def test_15_memory_is_flat(hvp, way):
    """No graph outlives its step, whether it fits Q or not: tensors and bytes of objects stand still over 60 steps."""
    net, every = network(), 3
    opt = optimizer(net, hvp=hvp, momentum=0.9, update_every=every, lr=0.001, max_norm=1.0)

    def steps(n: int) -> None:
        for _ in range(n):
            take(opt, lambda: loss_of(net), way)

    steps(2 * every)
    opt.zero_grad()
    gc.collect()
    tensors = live_tensors()
    tracemalloc.start()
    try:
        steps(3)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        steps(60)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    opt.zero_grad()
    assert live_tensors() == tensors
    assert grown < 200 * 500


@pytest.mark.parametrize("hvp", HVP)
def test_15_peak_memory_is_flat(hvp):
    """The graphs of 200 steps, a megabyte each, do not add up: the peak of the process hardly rises."""
    source = generator()
    weight = (torch.randn(128, 128, generator=source) / 16).requires_grad_()
    x = torch.randn(256, 128, generator=source)
    opt = PSGD([weight], lr=1e-4, hvp=hvp, update_every=3, max_norm=1.0)

    def steps(n: int) -> int:
        for _ in range(n):
            opt.step(lambda: (x @ weight).tanh().square().mean())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = steps(20)
    assert steps(200) - before < 10_000  # kilobytes


def test_15_the_graph_dies_with_the_step():
    """After `backward(create_graph=True)` a gradient holds the graph; a step lets it go."""
    net = network()
    opt = optimizer(net)
    loss_of(net).backward(create_graph=True)
    assert all(p.grad.requires_grad for p in net.parameters())
    opt.step()
    assert not any(p.grad.requires_grad for p in net.parameters())


class Refusing:
    """Losses through operators whose second derivative torch lacks on a CPU; cuDNN's RNN needs a GPU."""

    def __init__(self) -> None:
        source = generator()
        self.w = torch.randn(8, 8, generator=source).requires_grad_()
        self.x = torch.randn(2, 5, 8, generator=source)

    def attention(self) -> Tensor:
        return self.attention_by(self.w)

    def attention_by(self, w: Tensor) -> Tensor:
        q = (self.x @ w).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q).square().mean()

    def cdist(self) -> Tensor:
        y = self.x[0] @ self.w
        return torch.cdist(y, self.x[1]).square().mean()

    def ctc(self) -> Tensor:
        logits = (self.x @ self.w).transpose(0, 1).log_softmax(-1)
        return nn.functional.ctc_loss(logits, torch.tensor([[1, 2], [3, 4]]), (5, 5), (2, 2))

    def bag(self) -> Tensor:
        table = self.w.tanh()
        return nn.functional.embedding_bag(torch.tensor([[0, 1], [2, 3]]), table).square().mean()


@pytest.mark.parametrize("operator", ["cdist", "ctc", "bag"])
def test_16_no_second_derivative(operator):
    """One error that names the operator and the ways out, nothing changes, and each way out works."""
    told = {
        "cdist": "cdist",
        "ctc": "ctc_loss",
        "bag": "embedding_bag",
    }[operator]
    for way in WAYS:
        task = Refusing()
        opt = PSGD([task.w], lr=0.01)
        before = task.w.detach().clone()
        with pytest.raises(RuntimeError) as caught:
            take(opt, getattr(task, operator), way)
        message = str(caught.value)
        assert told in message
        for way_out in ('hvp="approx"', "MATH", "cudnn"):
            assert way_out in message
        assert torch.equal(task.w, before)
        assert not opt.state
    for hvp in ("approx", "whiten"):
        task = Refusing()
        opt = PSGD([task.w], lr=0.01, hvp=hvp)
        first = getattr(task, operator)()
        for _ in range(5):
            opt.step(getattr(task, operator))
        assert getattr(task, operator)() < first


@pytest.mark.parametrize("hvp", ["exact", "forward"])
def test_16_attention(hvp):
    """A step that needs a second derivative takes the plain kernel of attention, and leaves the choice as it was."""
    enabled = torch.backends.cuda.flash_sdp_enabled()
    opts = []
    for wrap in (contextlib.nullcontext, lambda: sdpa_kernel(SDPBackend.MATH)):
        task = Refusing()
        opt, first = PSGD([task.w], lr=0.01, hvp=hvp), task.attention()
        for _ in range(5):
            with wrap():
                opt.step(task.attention)
        assert task.attention() < first
        opts.append(task.w.detach())
    assert torch.equal(*opts)
    assert torch.backends.cuda.flash_sdp_enabled() == enabled


def test_16_attention_before_the_step():
    """Where the user calls backward, the kernel is the user's, and the error says which."""
    task = Refusing()
    opt = PSGD([task.w], lr=0.01)
    (task.w.grad,) = torch.autograd.grad(task.attention(), task.w, create_graph=True)
    with pytest.raises(RuntimeError, match="MATH"):
        opt.step()
    assert not opt.state


def test_16_attention_behind_a_checkpoint():
    """What a checkpoint computes again runs by the same kernel as at first."""
    task = Refusing()
    opt, first = PSGD([task.w], lr=0.01, update_every=1), task.attention()
    for _ in range(5):
        opt.step(lambda: checkpoint(lambda w: task.attention_by(w), task.w, use_reentrant=False))
    assert task.attention() < first


def test_16_compiled_models():
    """A compiled model has no double backward: the same error, and "approx" works."""
    net = network()
    compiled = torch.compile(net, backend="aot_eager")
    opt = optimizer(net)
    with pytest.raises(RuntimeError, match='hvp="approx"'):
        opt.step(lambda: loss_of(compiled))
    other, first = optimizer(net, hvp="approx"), loss_of(net)
    for _ in range(3):
        other.step(lambda: loss_of(compiled))
    assert loss_of(net) < first


@EVERY_HVP
def test_18_probes_are_the_optimizers_own(hvp):
    """The user's random stream is neither read nor moved, and the same seed gives the same run."""
    ends = []
    for user_seed, seed in ((1, 7), (2, 7), (1, 8)):
        net = network()
        opt = optimizer(net, hvp=hvp, seed=seed, damping=0.01)
        torch.random.default_generator.manual_seed(user_seed)
        stream = torch.get_rng_state()
        for _ in range(3):
            opt.step(lambda net=net: loss_of(net))
        assert torch.equal(torch.get_rng_state(), stream)
        ends.append(weights(net))
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])
    assert opt.state_dict()["param_groups"][0]["seed"] == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@EVERY_CALL
def test_19_one_bad_batch(hvp, way, bad):
    """Parameters, Q and momentum keep their bits, the skip is counted, and the next batch trains again."""
    net = network()
    opt = optimizer(net, hvp=hvp, momentum=0.9, weight_decay=0.1, damping=0.01)
    for _ in range(3):
        take(opt, lambda: loss_of(net), way)
    before, state = weights(net), states(opt)
    for _ in range(2):
        take(opt, lambda: bad * loss_of(net), way)
    assert same(before, weights(net))
    assert same(state, states(opt))
    assert opt.skipped == 2
    first = loss_of(net)
    take(opt, lambda: loss_of(net), way)
    assert opt.skipped == 2
    assert loss_of(net) < first
    assert opt.state_dict()["param_groups"][0]["skipped"] == 2


@pytest.mark.parametrize("name", ALL_NAMES)
def test_19_a_bad_first_batch(name):
    """Also before there is a state, for each preconditioner, and if one parameter alone is hit."""
    net = network()
    opt = optimizer(net, preconditioner=name, momentum=0.9)
    before = weights(net)
    opt.step(lambda: loss_of(net) + math.nan * net[2].bias.sum())
    assert same(before, weights(net))
    state = states(opt)
    opt.step(lambda: loss_of(net) + math.nan * net[2].bias.sum())
    assert same(state, states(opt)), "the product is finite here, and isn't learned from"
    assert finite(state)
    assert opt.skipped == 2
    first = loss_of(net)
    for _ in range(10):
        opt.step(lambda: loss_of(net))
    assert loss_of(net) < first


@EVERY_NAME
def test_19_a_product_alone_that_is_not_finite(name):
    """The gradient is fine where the curvature is infinite: Q keeps its good value."""
    x = torch.tensor([1.0, 1.0], requires_grad=True)
    opt = PSGD([x], lr=0.1, preconditioner=name)
    opt.step(lambda: x.square().sum())
    state = states(opt)
    y = torch.zeros(2)

    def kinked() -> Tensor:
        return x.square().sum() + ((x - x.detach() + y) ** 1.5).sum()

    opt.step(kinked)
    assert same(state, states(opt))
    assert x.isfinite().all()


class Undefined:
    """Losses that are not finite, though their gradient is."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def an_empty_batch(self) -> Tensor:
        return (self.net(torch.empty(0, 4)) - torch.empty(0, 2)).square().mean()

    def no_target_left(self) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch()[0]), torch.full((32,), -100))

    def a_constant_that_is_nan(self) -> Tensor:
        return loss_of(self.net) + math.nan

    def a_constant_that_is_infinite(self) -> Tensor:
        return loss_of(self.net) - math.inf


@EVERY_HVP
@pytest.mark.parametrize("kind", [name for name in vars(Undefined) if not name.startswith("_")])
def test_19_an_undefined_loss_with_a_finite_gradient(hvp, kind):
    """Neither weights, decay, momentum nor Q move, and it is counted, in both ways to pass a closure."""
    for way in ways_of(hvp)[:2]:
        net, twin = network(), network()
        opt, other = (optimizer(n, hvp=hvp, momentum=0.9, weight_decay=0.1) for n in (net, twin))
        for o, n in ((opt, net), (other, twin)):
            for _ in range(2):
                take(o, lambda n=n: loss_of(n), way)
        take(opt, getattr(Undefined(net), kind), way)
        assert same(weights(net), weights(twin))
        assert same(states(opt), states(other))
        assert opt.skipped == 1
        assert opt.dropped_fits == 0


def norm_at_zero(dead: Tensor, alive: Tensor) -> Tensor:
    """A loss whose gradient is finite, and whose curvature is not."""
    return torch.linalg.vector_norm(dead - dead.detach()) + (torch.arange(1.0, 5.0) * alive.square()).sum()


@EVERY_NAME
def test_19_a_dropped_fit_is_counted_and_told(name):
    """The weights move, the number is in the table and survives a checkpoint, with a warning after 100 steps."""
    dead, alive = torch.zeros(3, requires_grad=True), torch.ones(4, requires_grad=True)
    opt = PSGD([dead, alive], lr=0.01, preconditioner=name, init_scale=1.0, update_every=1)
    for _ in range(100):
        opt.step(lambda: norm_at_zero(dead, alive))
    assert opt.dropped_fits == opt.skipped == 100
    assert (alive < 1).all()
    assert opt.describe().endswith("dropped fits: 100 in 100 steps")
    with pytest.warns(UserWarning, match="fits of the preconditioner were dropped.*opt.dropped_fits") as heard:
        opt.step(lambda: norm_at_zero(dead, alive))
    assert heard[0].filename == __file__
    other = PSGD([dead, alive], lr=0.01, preconditioner=name, init_scale=1.0)
    other.load_state_dict(opt.state_dict())
    assert other.dropped_fits == 101
    state = states(opt)
    opt.step(lambda: norm_at_zero(dead, alive) * math.nan)
    assert same(state, states(opt))
    assert (opt.dropped_fits, opt.skipped) == (101, 102)


def test_19_good_fits_are_not_counted():
    net = network()
    opt = optimizer(net)
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    assert opt.dropped_fits == 0
    assert "dropped" not in opt.describe()


def scaled_step(scaler: Any, opt: PSGD, loss: Tensor) -> None:
    """A step as torch's page on mixed precision writes it, with a graph where one is needed."""
    opt.zero_grad()
    exact = opt.due and opt.param_groups[0]["hvp"] == "exact"
    inputs = opt.param_groups[0]["params"] if exact else None
    scaler.scale(loss).backward(create_graph=exact, inputs=inputs)
    scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hvp", ["exact", "whiten"])
@pytest.mark.parametrize("every", [1, 2])
def test_20_autocast_and_a_scaler(hvp, dtype, every):
    """Gradient and product are unscaled before the fit: the run is that without a scaler, and it fits."""
    net, twin = network(), network()
    opt, other = (optimizer(n, hvp=hvp, damping=0.01, update_every=every, momentum=0.5) for n in (net, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    first = loss_of(net)
    for _ in range(5):
        with torch.autocast("cpu", dtype):
            loss, twins = loss_of(net), loss_of(twin)
        scaled_step(scaler, opt, loss)
        scaled_step(torch.amp.GradScaler("cpu", enabled=False), other, twins)
    assert loss_of(net) < first
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        # small gradients of half precision are rounded less coarsely when they are scaled
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-3)
    assert opt.skipped == 0


@pytest.mark.parametrize("hvp", ["exact", "forward", "whiten"])
def test_20_a_step_under_autocast(hvp):
    """An autocast around many steps keeps casts of weights, which a step must not take for the moved ones."""
    net, twin = network(), network()
    opt, other = optimizer(net, hvp=hvp), optimizer(twin, hvp=hvp)

    def inside() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(twin)

    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            opt.step(lambda: loss_of(net))
    for _ in range(3):
        other.step(inside)
    assert same(weights(net), weights(twin))


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_20_a_scale_is_taken_out(hvp):
    """In single precision, where powers of two cost no bits, scaler or not is the same run to the bit."""
    net, twin = network(), network()
    opt, other = optimizer(net, hvp=hvp), optimizer(twin, hvp=hvp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for _ in range(4):
        scaled_step(scaler, opt, loss_of(net))
        scaled_step(torch.amp.GradScaler("cpu", enabled=False), other, loss_of(twin))
    assert same(weights(net), weights(twin))
    assert same(states(opt), states(other))


@pytest.mark.parametrize("hvp", ["exact", "whiten"])
def test_20_an_overflow_skips(hvp):
    """All keep their bits, the skip is counted, the scale is halved, and training goes on."""
    net = network()
    opt = optimizer(net, hvp=hvp, momentum=0.5, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaled_step(scaler, opt, loss_of(net))
    before, state = weights(net), states(opt)
    scaled_step(scaler, opt, loss_of(net) * math.inf)
    assert same(before, weights(net))
    assert same(state, states(opt))
    assert opt.skipped == 1
    assert scaler.get_scale() == 2.0**7
    first = loss_of(net)
    scaled_step(scaler, opt, loss_of(net))
    assert loss_of(net) < first


@pytest.mark.parametrize("clipped", [False, True])
def test_20_an_overflow_that_was_unscaled_skips(clipped):
    """Also where a clip has removed the infinities: the scaler has found them before, as torch's optimizers know."""
    net, twin = network(), network()
    opt, other = (
        optimizer(net, hvp="whiten", momentum=0.5, weight_decay=0.1),
        torch.optim.SGD(twin.parameters(), lr=0.1),
    )
    for o, n in ((opt, net), (other, twin)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        start = weights(n)
        scaler.scale(loss_of(n) * math.inf).backward()
        scaler.unscale_(o)
        for p in n.parameters():
            p.grad = p.grad.nan_to_num(1.0, 1.0, -1.0) if clipped else p.grad
        scaler.step(o)
        scaler.update()
        assert same(start, weights(n))
    assert opt.skipped == 1
    assert not any(state["momentum"].any() for state in opt.state.values())
    opt.zero_grad()
    loss_of(net).backward()
    opt.step()
    assert opt.skipped == 1


def test_20_unscaling_first():
    """It leaves the graph scaled: an error for exact products that names max_norm; "whiten" needs no graph."""
    for hvp in ("exact", "whiten"):
        net, twin = network(), network()
        opt, other = optimizer(net, hvp=hvp), optimizer(twin, hvp=hvp)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        scaler.scale(loss_of(net)).backward(create_graph=hvp == "exact")
        scaler.unscale_(opt)
        before = weights(net)
        if hvp == "exact":
            with pytest.raises(RuntimeError, match=r"after scaler.unscale_.*clip by max_norm"):
                scaler.step(opt)
            assert same(before, weights(net))
            assert not opt.state
        else:
            scaler.step(opt)
            scaler.update()
            take(other, lambda twin=twin: loss_of(twin))
            assert same(weights(net), weights(twin))


@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02), torch.tensor([0.02])], ids=["number", "0-d", "1-d"])
@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR", "ReduceLROnPlateau"])
def test_21_schedules_by_default(kind, lr):
    """The three that break most optimizers; all others are in the file on conformance."""
    net = network()
    opt = optimizer(net, lr=copy.deepcopy(lr), weight_decay=0.01)
    given = opt.param_groups[0]["lr"]
    scheduler = {
        "OneCycleLR": lambda: lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=10),
        "CyclicLR": lambda: lr_scheduler.CyclicLR(opt, 0.01, 0.05),
        "ReduceLROnPlateau": lambda: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    }[kind]()
    first = loss_of(net)
    for _ in range(6):
        loss = opt.step(lambda: loss_of(net))
        scheduler.step(*([loss] if kind == "ReduceLROnPlateau" else []))
    assert loss_of(net) < first
    if isinstance(lr, Tensor):
        assert opt.param_groups[0]["lr"] is given


@pytest.mark.parametrize("name", ALL_NAMES)
def test_22_copies_go_on(name):
    """After deepcopy or pickle both walk the same path and share no memory."""
    net = network()
    opt = optimizer(net, preconditioner=name, momentum=0.9, update_every=2)
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    pairs = [copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))]
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    for twin, other in pairs:
        for _ in range(3):
            other.step(lambda twin=twin: loss_of(twin))
        assert same(weights(net), weights(twin))
        assert same(states(opt), states(other))


class Tied(nn.Module):
    """An embedding whose table is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6)
        fill(self)
        self.out.weight = self.table.weight

    def loss(self) -> Tensor:
        tokens = torch.arange(6)
        return nn.functional.cross_entropy(self.out(self.table(tokens).tanh()), tokens.roll(1))


@pytest.mark.parametrize("blocks", [False, True])
@EVERY_NAME
def test_23_tied_weights(name, blocks):
    """One parameter in two layers: one preconditioner, one update by the sum of both gradients."""
    net = Tied()
    opt = PSGD(
        net.parameters(),
        lr=0.1,
        preconditioner=name,
        blocks=affine_blocks(net) if blocks else None,
        init_scale=1.0,
    )
    rows = opt.describe().splitlines()[1:]
    assert sum("0.0" in row.split("  ")[0] for row in rows) == 1
    start = net.table.weight.detach().clone()
    (gradient,) = torch.autograd.grad(net.loss(), [net.table.weight])
    first = opt.step(net.loss)
    torch.testing.assert_close(net.table.weight.detach(), start - 0.1 * gradient)
    for _ in range(5):
        opt.step(net.loss)
    assert net.loss() < first
    assert net.out.weight is net.table.weight


def test_23_duplicates_in_a_group():
    """Torch's warning, and one update all the same."""
    p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = PSGD([p, p], lr=0.1, momentum=0.5, weight_decay=0.1)
    other = PSGD([q], lr=0.1, momentum=0.5, weight_decay=0.1)
    for _ in range(3):
        opt.step(lambda: p.square().sum())
        other.step(lambda: q.square().sum())
    assert torch.equal(p, q)
    assert len(opt.describe().splitlines()) == 2
    copied = PSGD([q], lr=0.1, momentum=0.5, weight_decay=0.1)
    copied.load_state_dict(other.state_dict())


@EVERY_CALL
def test_24_sparse_gradients(hvp, way):
    """One error that names the option, before anything changes."""
    layer = fill(nn.Embedding(5, 3, sparse=True))
    opt = PSGD(layer.parameters(), lr=0.1, hvp=hvp)
    before = weights(layer)
    with pytest.raises(RuntimeError, match="sparse=False"):
        take(opt, lambda: layer(torch.tensor([1, 2])).tanh().square().sum(), way)
    assert same(before, weights(layer))
    assert not opt.state


@EVERY_HVP
def test_25_no_grad(hvp):
    """The closure runs with gradients on, whatever is around the step."""
    net, twin = network(), network()
    opt, other = optimizer(net, hvp=hvp), optimizer(twin, hvp=hvp)
    for _ in range(3):
        with torch.no_grad():
            opt.step(lambda: loss_of(net))
        other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))


def test_25_inference_mode():
    """It has no gradients at all, and its tensors can't be trained: clear errors."""
    net = network()
    opt = optimizer(net)
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"inference_mode\(\).*no_grad\(\)"),
    ):
        opt.step(lambda: loss_of(net))
    with torch.inference_mode():
        p = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="made in inference mode"):
        PSGD([p], lr=0.1)


@pytest.mark.parametrize("name", ["dense", "splu", "kron", "diagonal"])
@pytest.mark.parametrize("hvp", ["exact", "approx"])
def test_26_saddles(name, hvp):
    """P tends to the inverse of |H|, so that a step descends along negative curvature too."""
    z = torch.tensor([0.5, 0.1], requires_grad=True)
    settings = {"lr_preconditioner": 0.1, "init_scale": 0.1, "update_every": 1}
    opt = PSGD([z], lr=1e-3, preconditioner=name, hvp=hvp, **settings)
    for t in range(300):
        opt.param_groups[0]["lr_preconditioner"] = 0.1 if t < 200 else 0.01
        opt.step(lambda: 2 * z[0] ** 2 - z[1] ** 2)
    (choice,) = choose(name, [z])
    Q = choice.group.matrix(opt.state[z]["Q"])[0]
    torch.testing.assert_close(Q.T @ Q, torch.diag(torch.tensor([1 / 4, 1 / 2])), rtol=0.1, atol=0.03)
    assert abs(z[0].item()) < 0.5
    assert abs(z[1].item()) > 0.11


@pytest.mark.parametrize("name", ["dense", "kron", "diagonal"])
def test_26_a_monkey_saddle(name):
    """Where the Hessian itself is zero at the saddle, the run leaves it downwards."""
    z = torch.tensor([0.1, 0.05], requires_grad=True)
    opt = PSGD([z], lr=0.05, preconditioner=name, max_norm=1.0, lr_preconditioner=0.01, init_scale=1.0)
    loss = opt.step(lambda: z[0] ** 3 - 3 * z[0] * z[1] ** 2)
    for _ in range(60):
        last = opt.step(lambda: z[0] ** 3 - 3 * z[0] * z[1] ** 2)
    assert last < min(loss, -0.05)
    assert finite([z.detach(), *states(opt)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hvp", "name", "scale"),
    [("exact", "kron", 1e-20), ("exact", "kron", 1e15), ("whiten", "dense", 1e15)],
)
def test_27_extreme_scales(hvp, name, scale):
    """Gradients of 1e-20, a loss of 1e15, 600 steps: factors stay balanced, all stays finite, and it fits."""
    w = torch.ones(3, 2, requires_grad=True)
    opt = PSGD([w], lr=5e-3, preconditioner=name, hvp=hvp, max_norm=1.0)
    curvature = scale * torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    for _ in range(600):
        if hvp == "whiten":
            w.grad = curvature * w.detach()
            opt.step()
        else:
            opt.step(lambda: (curvature * w.square()).sum())
    assert opt.skipped == 0
    assert finite([w.detach(), *states(opt)])
    if name == "kron":
        left, right = (factor[0].diagonal(dim1=-2, dim2=-1).amax() for factor in opt.state[w]["Q"])
        assert 0.25 < left / right < 4
    assert w.norm() < 0.9 * math.sqrt(6)


@EVERY_NAME
@pytest.mark.parametrize("shape", [(2, 3, 2, 2, 2), (1,) * 24 + (2, 2, 3)])
def test_28_many_dimensions(name, shape):
    """Five dimensions, and more than an einsum has letters."""
    w = torch.ones(shape, requires_grad=True)
    opt = PSGD([w], lr=0.05, preconditioner=name)
    first = w.square().sum()
    for _ in range(3):
        opt.step(lambda: w.square().sum())
    assert w.square().sum() < first
    every_dimension = PSGD([w], lr=0.05, preconditioner=Diagonal())
    every_dimension.step(lambda: w.square().sum())


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": -0.1}, ValueError, "at least 0"),
    ({"lr": math.nan}, ValueError, "at least 0"),
    ({"lr": "fast"}, TypeError, "lr must be a number"),
    ({"lr": math.inf}, ValueError, "lr must be at least 0 and finite"),
    ({"lr": torch.tensor(math.inf)}, ValueError, "lr must be at least 0 and finite"),
    ({"lr": torch.tensor(1j)}, TypeError, "lr must be a number"),
    ({"update_every": True}, ValueError, "integer from 1"),
    ({"preconditioner": Kron}, TypeError, "Kron is the class of a group: call it"),
    ({"preconditioner": Diagonal}, TypeError, "Diagonal is the class of a group: call it"),
    (
        {"preconditioner": lambda rows, columns: Diagonal()},
        TypeError,
        "one argument, the shape of a block",
    ),
    ({"preconditioner": KronRule("8")}, ValueError, "max_size must be an integer from 0"),
    ({"preconditioner": KronRule(-1)}, ValueError, "max_size must be an integer from 0"),
    ({"lr": True}, TypeError, "lr must be a number"),
    ({"lr": 1j}, TypeError, "lr must be a number"),
    ({"lr_preconditioner": 0.0}, ValueError, r"\(0, 1\)"),
    ({"lr_preconditioner": 1}, ValueError, r"\(0, 1\)"),
    ({"lr_preconditioner": -0.5}, ValueError, r"\(0, 1\)"),
    ({"lr_preconditioner": [0.1]}, TypeError, "lr_preconditioner must be a number"),
    ({"init_scale": 0}, ValueError, "positive"),
    ({"init_scale": math.inf}, ValueError, "finite"),
    ({"hvp": "newton"}, ValueError, "exact, approx, forward, whiten"),
    ({"hvp": 3}, ValueError, "exact, approx, forward, whiten"),
    ({"hvp": ["exact"]}, ValueError, "exact, approx, forward, whiten"),
    ({"update_every": 0}, ValueError, "integer from 1"),
    ({"update_every": 1.5}, ValueError, "integer from 1"),
    ({"update_every": "often"}, ValueError, "log10"),
    ({"damping": -1.0}, ValueError, "damping must be at least 0"),
    ({"damping": math.inf}, ValueError, "finite"),
    ({"damping_kind": "heavy"}, ValueError, "nonconvex, traditional"),
    ({"max_norm": -1}, ValueError, "positive"),
    ({"max_norm": math.nan}, ValueError, "positive"),
    ({"momentum": 1.0}, ValueError, r"\[0, 1\)"),
    ({"momentum": "0.9"}, TypeError, "momentum must be a number"),
    ({"weight_decay": -0.1}, ValueError, "at least 0"),
    (
        {"weight_decay": torch.tensor([0.1, 0.2])},
        (TypeError, ValueError),
        "weight_decay must be",
    ),
    ({"maximize": "yes"}, ValueError, "False, True"),
    ({"seed": -1}, ValueError, "seed"),
    ({"seed": 2**31}, ValueError, "seed"),
    ({"seed": 0.5}, ValueError, "integer"),
    (
        {"preconditioner": "newton"},
        ValueError,
        "dense, splu, kron, scan, scan-or-kron, diagonal, esgd",
    ),
    ({"preconditioner": 3}, TypeError, "a name, a group or a rule"),
    ({"preconditioner": None}, TypeError, "a name, a group or a rule"),
    ({"preconditioner": lambda shape: "kron"}, TypeError, "group"),
    ({"preconditioner": Kron(Triangular())}, ValueError, "does not fit"),
    ({"preconditioner": "scan"}, ValueError, "affine_blocks"),
    ({"blocks": 3}, TypeError, "blocks"),
    ({"blocks": [torch.ones(3)]}, TypeError, "block"),
    ({"blocks": nn.Linear(2, 2)}, TypeError, "affine_blocks"),
]


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    BAD,
    ids=[f"{i}-{next(iter(wrong))}" for i, (wrong, *_) in enumerate(BAD)],
)
def test_29_bad_settings(wrong, kind, message):
    """An argument out of range, an unknown name, a wrong type: what is valid is said before anything changes."""
    net = network()
    before = weights(net)
    with pytest.raises(kind, match=message):
        PSGD(net.parameters(), **{"lr": 0.1, **wrong})
    opt = PSGD(net[0].parameters(), lr=0.1, init_scale=1.0)
    opt.step(lambda: loss_of(net))
    state, text = copy.deepcopy(opt.state_dict()), opt.describe()
    with pytest.raises(kind, match=message):
        opt.add_param_group({"params": list(net[2].parameters()), **wrong})
    assert equal(state, opt.state_dict())
    assert opt.describe() == text
    assert same(before[2:], weights(net)[2:])


class OddError(Exception):
    """No error that Python or torch would raise."""


def raising(error: BaseException) -> Any:
    def rule(shape: tuple[int, ...]) -> Any:
        raise error

    return rule


@pytest.mark.parametrize(
    "error",
    [KeyError(3), RuntimeError("x"), IndexError("x"), OddError("x"), KeyboardInterrupt()],
)
def test_29_whatever_a_rule_raises_leaves_nothing(error):
    """A param group that couldn't be added is not there, and steps go on."""
    net = network()
    opt = optimizer(net[0])
    with pytest.raises(type(error)):
        opt.add_param_group({"params": list(net[2].parameters()), "preconditioner": raising(error)})
    assert len(opt.param_groups) == 1
    opt.step(lambda: loss_of(net))


NUMBERS: dict[str, Any] = {
    "lr": 0.125,
    "momentum": 0.5,
    "weight_decay": 0.25,
    "damping": 0.125,
    "max_norm": 2.0,
}
NUMBERS |= {"lr_preconditioner": 0.125, "init_scale": 0.5, "seed": 3, "update_every": 2}


@pytest.mark.parametrize("kind", [numpy.float16, numpy.float32, numpy.float64, Fraction])
def test_29_numbers_of_other_libraries(kind):
    """The same run as with Python's, and a state that holds Python's alone, also if they come later."""
    other = {name: (numpy.int64 if isinstance(x, int) else kind)(x) for name, x in NUMBERS.items()}
    net, twin = network(), network()
    opt, reference = PSGD(net.parameters(), **other), PSGD(twin.parameters(), **NUMBERS)
    for _ in range(3):
        opt.param_groups[0]["lr"] = 0.125 if kind is Fraction else kind(0.125)  # torch multiplies by no Fraction
        opt.step(lambda: loss_of(net))
        reference.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))
    assert equal(opt.state_dict(), reference.state_dict())


LATER: list[tuple[dict[str, Any], str]] = [
    ({"hvp": "typo"}, "hvp must be one of"),
    ({"max_norm": 0}, "max_norm must be positive"),
    ({"lr": math.nan}, "lr must be at least 0 and finite"),
    ({"lr": math.inf}, "lr must be at least 0 and finite"),
    ({"damping": -1.0}, "damping must be at least 0"),
    ({"damping_kind": "none"}, "damping_kind must be one of"),
    ({"momentum": 1.5}, r"momentum must be in \[0, 1\)"),
    ({"weight_decay": -1}, "weight_decay must be at least 0"),
    ({"lr_preconditioner": 2}, r"lr_preconditioner must be in \(0, 1\)"),
    ({"update_every": 0}, "update_every must be an integer from 1"),
    ({"update_every": lambda t: 0}, "must return an integer from 1, not 0"),
    ({"update_every": lambda t: None}, "must return an integer from 1, not None"),
    ({"update_every": lambda t: -3}, "must return an integer from 1, not -3"),
    ({"update_every": lambda t: 0.5}, "must return an integer from 1, not 0.5"),
    ({"maximize": 2}, "maximize must be one of"),
    ({"seed": -1}, "seed must be an integer"),
]


@pytest.mark.parametrize(("wrong", "message"), LATER, ids=[f"{i}-{next(iter(w))}" for i, (w, _) in enumerate(LATER)])
def test_29_settings_are_checked_at_each_step(wrong, message):
    """What a user or a schedule writes into a param group is refused before the closure is called."""
    net = network()
    opt = optimizer(net, momentum=0.5)
    opt.step(lambda: loss_of(net))
    before, state, t = weights(net), states(opt), opt.param_groups[0]["t"]
    good = {name: opt.param_groups[0][name] for name in wrong}
    opt.param_groups[0] |= wrong
    with pytest.raises(ValueError, match=message):
        opt.step(lambda: pytest.fail("the closure was called"))
    assert same(before, weights(net))
    assert same(state, states(opt))
    assert opt.param_groups[0]["t"] == t
    opt.param_groups[0] |= good
    opt.step(lambda: loss_of(net))


@pytest.mark.parametrize("wrong", ["nccl", 3, object()])
def test_29_a_process_group_that_is_none(wrong):
    with pytest.raises(TypeError, match="process_group must be None or a group"):
        PSGD([torch.ones(2, requires_grad=True)], lr=0.1, process_group=wrong)


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 6, 2), (6,)])
def test_29_a_block_that_does_not_fit_its_parameter(shape):
    p = torch.ones(3, 2, requires_grad=True)
    with pytest.raises(ValueError, match="shape"):
        PSGD([p], lr=0.1, blocks=[Block((Piece(p, shape),))])


def test_29_tensors_of_integers():
    """A bare one is refused; a frozen parameter of any type is not."""
    kinds = (torch.int8, torch.bool, torch.float8_e4m3fn)
    for dtype in kinds[:2]:
        with pytest.raises(ValueError, match="no gradients"):
            PSGD([torch.ones(3).to(dtype)], lr=0.1)
    frozen = [nn.Parameter(torch.ones(3, 2).to(dtype), requires_grad=False) for dtype in kinds]
    p = torch.ones(3, 2, requires_grad=True)
    for name in NAMES:
        opt = PSGD([*frozen, p], lr=0.1, preconditioner=name)
        assert len(opt.describe().splitlines()) == 2
        opt.step(lambda: p.square().sum())
        assert len(opt.state_dict()["state"]) == 1


def test_29_settings_of_the_whole_optimizer():
    """What can't differ between groups is refused there, and an unknown argument is Python's TypeError."""
    net = network()
    opt = PSGD(net[0].parameters(), lr=0.1)
    for name, value in {
        "hvp": "approx",
        "update_every": 2,
        "max_norm": 1.0,
        "maximize": True,
        "seed": 1,
    }.items():
        with pytest.raises(ValueError, match=f"{name} is shared"):
            opt.add_param_group({"params": list(net[2].parameters()), name: value})
    with pytest.raises(TypeError, match="nesterov"):
        PSGD(net.parameters(), lr=0.1, nesterov=True)


def test_29_a_closure_that_returns_no_loss():
    """None, a vector, or a complex number: an error that says what to return, and no change."""
    net = network()
    for hvp in HVP:
        opt = optimizer(net, hvp=hvp)
        before = weights(net)
        for wrong in (None, torch.ones(2), torch.ones((), dtype=torch.complex64)):
            with pytest.raises((TypeError, ValueError), match="loss"):
                opt.step(lambda wrong=wrong: wrong if wrong is None else wrong * loss_of(net))
        assert same(before, weights(net))
        assert not opt.state


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
def test_30_accumulation(hvp, way):
    """Two half batches equal one batch, in gradient and product."""
    if way not in ways_of(hvp):
        return
    halves = (slice(0, 16), slice(16, 32))
    net, whole = network(torch.float64), network(torch.float64)
    opt, other = optimizer(net, hvp=hvp), optimizer(whole, hvp=hvp)

    def backward() -> Tensor:
        opt.zero_grad()
        total = 0.0
        for half in halves:
            loss = loss_of(net, half) / 2
            loss.backward(create_graph=hvp == "exact")
            total = total + loss.detach()
        return total

    for _ in range(4):
        if way == "returns":
            opt.step(lambda: sum(loss_of(net, half) / 2 for half in halves))
        elif way == "calls backward":
            opt.step(backward)
        else:
            backward()
            opt.step()
        other.step(lambda: loss_of(whole))
    for p, q in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_31_old_checkpoints():
    """A setting that was added later keeps its present value, whichever it is, and steps go on."""
    net = network()
    opt = optimizer(net)
    opt.step(lambda: loss_of(net))
    saved = opt.state_dict()
    for name in set(saved["param_groups"][0]) - {"params"}:
        old = copy.deepcopy(saved)
        del old["param_groups"][0][name]
        present = optimizer(network(), max_norm=3.0, damping=0.25, update_every=2, seed=5)
        expected = present.param_groups[0][name]
        present.load_state_dict(old)
        assert present.param_groups[0][name] == expected
        present.step(lambda p=present: sum(w.square().sum() for w in p.param_groups[0]["params"]))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_31_states_with_a_nest(name):
    """States with Q as a tuple, no memory, and no entry for the other parameters of a block, load and go on."""
    net, twin = network(), network()
    opt, other = (PSGD(n.parameters(), lr=0.05, preconditioner=name, blocks=affine_blocks(n)) for n in (net, twin))
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    old = opt.state_dict()
    old["state"] = {
        key: {"Q": opt.state[p]["Q"]} for key, p in enumerate(net.parameters()) if "Q" in opt.state.get(p, ())
    }
    del old["param_groups"][0]["parts"], old["param_groups"][0]["dropped"]
    other.load_state_dict(old)
    twin.load_state_dict(net.state_dict())
    for _ in range(2):
        opt.step(lambda: loss_of(net))
        other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))
    here, there = (
        {i: {k: x for k, x in entry.items() if k != "pairs"} for i, entry in o.state_dict()["state"].items() if entry}
        for o in (opt, other)
    )
    assert here.keys() == there.keys()
    assert all(equal(here[i], there[i]) for i in here)


def spoiled(saved: dict[str, Any], how: str) -> dict[str, Any]:
    """A state that is wrong in some way."""
    wrong = copy.deepcopy(saved)
    entry = wrong["state"][0]
    first = next(name for name in entry if name.startswith("Q"))
    if how == "shape":
        entry[first] = entry[first][..., :1]
    elif how == "momentum":
        entry["momentum"] = entry["momentum"][:1]
    elif how == "lacks":
        del entry[first]
    else:
        entry["exp_avg"] = entry["momentum"]
    return wrong


@pytest.mark.parametrize("how", ["shape", "momentum", "lacks", "exp_avg"])
@pytest.mark.parametrize("name", ["kron", "splu"])
def test_31_a_state_that_does_not_fit_is_refused_at_once(name, how):
    """Another shape, a part that is missing, or another optimizer's: an error at loading, and nothing has changed."""
    net = network()
    opt = optimizer(net, preconditioner=name, momentum=0.5)
    opt.step(lambda: loss_of(net))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=f"{how}|was saved with the shape"):
        opt.load_state_dict(spoiled(before, how))
    assert equal(opt.state_dict(), before)
    opt.step(lambda: loss_of(net))


def test_31_the_state_of_another_optimizer_is_refused():
    net = network()
    adam = torch.optim.Adam(net.parameters())
    loss_of(net).backward()
    adam.step()
    opt = optimizer(net)
    before = opt.state_dict()
    with pytest.raises(ValueError, match=r"exp_avg.*not that of another optimizer"):
        opt.load_state_dict(adam.state_dict())
    assert equal(opt.state_dict(), before)


def test_31_another_preconditioner_is_refused():
    """Not an older checkpoint but another one: an error that names both, and no change."""
    net = network()
    opt, other = optimizer(net), optimizer(net, preconditioner="diagonal")
    opt.step(lambda: loss_of(net))
    before = other.state_dict()
    with pytest.raises(ValueError, match=r"saved with \['Kron\(Triang.*this optimizer has \['Diagonal\(\)'"):
        other.load_state_dict(opt.state_dict())
    assert equal(other.state_dict(), before)
    with pytest.raises(ValueError, match=r"\[1, 6, 4\].*\[1, 6, 5\].*the same preconditioner and blocks"):
        PSGD(net.parameters(), lr=0.1, blocks=affine_blocks(net)).load_state_dict(opt.state_dict())


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("opt.pt", TypeError, "not str; a file is read by torch.load"),
        (None, TypeError, "not NoneType"),
        ({}, ValueError, "has no 'state' but no key at all"),
        (
            {"model": {}, "optimizer": {}},
            ValueError,
            "has no 'state' but 'model', 'optimizer': load what",
        ),
        ({"state": {}}, ValueError, "has no 'param_groups' but 'state'"),
    ],
)
def test_31_what_is_no_state_is_refused(given, error, words):
    """A path, nothing, or the checkpoint that holds the state: an error that says what to load, and no change."""
    net = network()
    opt = optimizer(net)
    opt.step(lambda: loss_of(net))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(error, match=re.escape(words)):
        opt.load_state_dict(given)
    assert equal(opt.state_dict(), before)
