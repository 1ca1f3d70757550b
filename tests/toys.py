"""Small networks and the ways to take a step that the optimizer's tests share."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from psgd_lit.affine import affine_block
from psgd_lit.blocks import leaves
from psgd_lit.optim import PSGD

NAMES = ("dense", "splu", "kron", "diagonal", "esgd")
HVP = ("exact", "approx", "forward", "whiten")
WAYS = ("returns", "calls backward", "no closure")


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns of backward(create_graph=True) and deprecates its own forward mode's helper; both are its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fill(module: nn.Module, seed: int = 0, scale: float = 0.5) -> nn.Module:
    """Give a module normal weights that depend on the seed alone."""
    source = generator(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(scale * torch.randn(p.shape, generator=source))
    return module


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """A small tanh network with fixed weights."""
    return fill(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), seed).to(dtype)


def batch(dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Inputs and targets for the network, or some of the 32 rows."""
    source = generator(1)
    x, y = (torch.randn(32, n, generator=source).to(dtype)[rows] for n in (4, 2))
    return x, y


def loss_of(net: nn.Module, rows: slice = slice(None)) -> Tensor:
    x, y = batch(next(net.parameters()).dtype, rows)
    return (net(x) - y).square().mean()


def calling_backward(opt: PSGD, loss: Callable[[], Tensor], create_graph: bool) -> Callable[[], Tensor]:
    """A closure as torch.optim.LBFGS expects it."""

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward(create_graph=create_graph)
        return value

    return closure


def take(opt: PSGD, loss: Callable[[], Tensor], way: str = "returns") -> Any:
    """Take a step in one of the three ways, with a graph where one is needed."""
    if way == "returns":
        return opt.step(loss)
    closure = calling_backward(opt, loss, create_graph=opt.due and opt.param_groups[0]["hvp"] == "exact")
    with quiet():
        if way == "calls backward":
            return opt.step(closure)
        closure()
        return opt.step()


def ways_of(hvp: str) -> tuple[str, ...]:
    """The ways to call `step` that serve a kind of Hessian-vector product."""
    return {"exact": WAYS, "whiten": WAYS, "approx": WAYS[:2], "forward": WAYS[:1]}[hvp]


def blocks_of(preconditioner: Any, weight: Tensor, bias: Tensor) -> Any:
    """The affine block that "scan" needs; every other preconditioner takes the parameters as they are."""
    return affine_block(weight, bias) if preconditioner == "scan" else None


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def states(opt: PSGD) -> list[Tensor]:
    """All tensors of the state, as copies."""
    found = []
    for state in opt.state.values():
        found += [leaf.clone() for leaf in leaves(state.get("Q", ()))]
        found += [state["momentum"].clone()] if "momentum" in state else []
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether lists of tensors have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def equal(one: Any, other: Any) -> bool:
    """Whether states are the same in form, dtypes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def forks_with_torch() -> Any:
    """The kind of processes that ranks are: forks of one that has imported torch for all of them, and done no more."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "pytest",
            "torch.distributed.checkpoint.format_utils",
            "torch.distributed.checkpoint.state_dict",
            "torch.distributed.fsdp",
            "torch.distributed.tensor",
        ]
    )
    return context


def live_tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def goes_on_from_its_state(**settings: Any) -> None:
    """A valley of a matrix is descended, and an optimizer with the loaded state takes the same path to the last bit.

    Args:
        settings: of PSGD.
    """

    def made() -> tuple[nn.Parameter, PSGD]:
        x = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
        return x, PSGD([x], 0.1, update_every=1, normalizer="running", **settings)

    weights = torch.logspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    (x, opt), (y, other) = made(), made()

    def loss(z: Tensor) -> Tensor:
        return (weights * z * z).sum()

    first = float(opt.step(lambda: loss(x)))
    for _ in range(30):
        opt.step(lambda: loss(x))
    other.load_state_dict(opt.state_dict())
    y.data.copy_(x.data)
    for _ in range(30):
        opt.step(lambda: loss(x))
        other.step(lambda: loss(y))
    assert torch.equal(x, y)
    assert float(loss(x.detach())) < 0.05 * first
