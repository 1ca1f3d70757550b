"""Every message that the guide quotes is one that the library raises, word for word."""

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gates import read_page
from torch import nn
from toys import loss_of, network

from psgd_lit.affine import affine_block, affine_blocks
from psgd_lit.groups.kron import Kron
from psgd_lit.optim import PSGD

GUIDE = Path(__file__).parent.parent / "nbs/start/02_using_psgd.ipynb"
ROW = re.compile(r'^\| "(.+?)" \| .+ \|$', re.MULTILINE)


def quoted() -> list[str]:
    """The messages in the guide's table, in order."""
    (table,) = (cell.source for cell in read_page(GUIDE).cells if "## When it says no" in cell.source)
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    found = ROW.findall(table)
    assert len(found) == len(rows), "a row of the table quotes no message"
    return found


def new(net: nn.Module | None = None, **settings: Any) -> PSGD:
    return PSGD((net or network()).parameters(), lr=0.05, **settings)


def plain_backward() -> None:
    net = network()
    opt = new(net)
    loss_of(net).backward()
    opt.step()


def distances() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(3, 4)
    new(layer).step(lambda: torch.cdist(layer(x), x).square().sum())


def clipped() -> None:
    net = network()

    def closure() -> None:
        net.zero_grad()
        loss_of(net).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    new(net, hvp="approx").step(closure)


def accumulated() -> None:
    net = network()
    state = SimpleNamespace(GradientState=lambda: SimpleNamespace(num_steps=4))
    with patch.dict(sys.modules, {"accelerate.state": state}):
        new(net).step(lambda: loss_of(net))


def compiled() -> None:
    net = network()
    model = torch.compile(net, backend="aot_eager")
    new(net).step(lambda: loss_of(model))


def sharded() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.placements = ()  # what tells a DTensor
    new(layer, hvp="whiten")


def sparse() -> None:
    layer = nn.Embedding(3, 2, sparse=True)
    new(layer, hvp="whiten").step(lambda: layer(torch.tensor([0])).sum())


def two_blocks_of_one() -> None:
    layer = network()[0]
    new(layer, blocks=[*affine_blocks(layer), *affine_block(layer.weight)])


def half_a_block() -> None:
    net = network()
    PSGD([net[0].weight], lr=0.05, blocks=affine_blocks(net[0]))


def another_preconditioner() -> None:
    net = network()
    opt = new(net)
    opt.step(lambda: loss_of(net))
    new(net, preconditioner="diagonal").load_state_dict(opt.state_dict())


def changed_by_hand() -> None:
    net = network()
    opt = new(net)
    opt.step(lambda: loss_of(net))
    opt.param_groups[0]["preconditioner"] = "diagonal"
    opt.step(lambda: loss_of(net))


def another_optimizer() -> None:
    net = network()
    adam = torch.optim.Adam(net.parameters())
    loss_of(net).backward()
    adam.step()
    new(net).load_state_dict(adam.state_dict())


def norms_at_zero() -> None:
    w = nn.Parameter(torch.zeros(2))
    opt = PSGD([w], lr=0.05)
    for _ in range(101):
        opt.step(lambda: torch.linalg.vector_norm(w - w.detach()))


def a_burst() -> None:
    w = nn.Parameter(torch.ones(2))
    opt = PSGD([w], lr=0.0)
    for t in range(101):
        opt.step(lambda t=t: w.sum() * (1e6 if t > 50 else 1.0))


def a_trial_without_a_closure() -> None:
    net = network()
    opt = new(net, hvp="whiten", monotone=True)
    loss_of(net).backward()
    opt.step()


RAISED: dict[str, Callable[[], Any]] = {
    "Three ways to call step": plain_backward,
    "derivative for ... is not implemented": distances,
    "has no column for it": lambda: new(preconditioner="scan"),
    "gradients are changed after backward()": clipped,
    "have been changed, but its state was learned with others": changed_by_hand,
    "batches and calls the closure for one of them": accumulated,
    "the parameters are sharded": sharded,
    "double backward": compiled,
    "a gradient is sparse": sparse,
    "another block holds one too": two_blocks_of_one,
    "give all parameters of a block to one param group": half_a_block,
    "is the class of a group: call it": lambda: new(preconditioner=Kron),
    "process_group must be None or a group": lambda: new(process_group="nccl"),
    "make it with the same preconditioner and blocks": another_preconditioner,
    "not that of another optimizer": another_optimizer,
    "the loss has exploded": a_burst,
    "compares the losses of successive calls": a_trial_without_a_closure,
    "some fits of the preconditioner were dropped": norms_at_zero,
}
"""What raises each message, by its text in the guide."""


def test_every_quoted_message_has_a_case():
    assert quoted() == list(RAISED)


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_raised(message):
    """The dots in a quotation stand for any words."""
    pattern = ".*".join(re.escape(part) for part in message.split("..."))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises((RuntimeError, ValueError, TypeError, UserWarning), match=pattern):
            RAISED[message]()
