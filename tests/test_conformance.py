"""What every torch optimizer promises: the kinds of checks in PyTorch's own generic suite, on its installed tools.

Each mode is a kind of Hessian-vector product and a preconditioner. Checks that don't depend on the mode, such as the
order of hooks, run in one mode.
"""

import copy
import io
import itertools
import pickle
import sys
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from toys import (
    HVP,
    NAMES,
    blocks_of,
    equal,
    generator,
    loss_of,
    network,
    quiet,
    same,
    take,
    ways_of,
    weights,
)

from psgd_lit.affine import affine_blocks
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.fit import Fit
from psgd_lit.optim import PSGD
from psgd_lit.settings import PAPER

# For a class that no test here meets, torch's table of optimizers imports that of operators, which takes seconds.
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "torch.testing._internal.common_methods_invocations", Mock())
    from torch.testing._internal.common_optimizers import (
        ErrorOptimizerInput,
        OptimizerErrorEnum,
        OptimizerInfo,
        OptimizerInput,
        TensorTracker,
        get_error_inputs_for_all_optims,
    )


class Mode(NamedTuple):
    """How Q is fitted, and to what form."""

    hvp: str
    preconditioner: Any

    def __str__(self) -> str:
        """For the test's id."""
        return f"{self.hvp}-{self.preconditioner}"


def inputs(mode: Mode, device: Any, dtype: Any = None) -> list[OptimizerInput]:
    """The settings that the generic checks run with."""
    rate = 0.02
    settings = {
        "default": {},
        "tensor lr": {"lr": torch.tensor(rate)},
        "weight decay and momentum": {"weight_decay": 0.1, "momentum": 0.9},
        "maximize": {"maximize": True, "max_norm": 1.0},
        "every third step, damped": {"update_every": 3, "damping": 0.01},
    }
    base = {"lr": rate, "hvp": mode.hvp, "preconditioner": mode.preconditioner}
    return [OptimizerInput(params=None, kwargs={**base, **kwargs}, desc=desc) for desc, kwargs in settings.items()]


def errors(device: Any, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
    """Torch's own wrong inputs, with the step size that we require, and some of ours."""
    generic = get_error_inputs_for_all_optims(device, dtype)
    for wrong in generic:
        wrong.optimizer_error_input.kwargs.setdefault("lr", 0.1)
    p = nn.Parameter(torch.ones(1, 1))
    own = [
        ErrorOptimizerInput(
            OptimizerInput(params=None, kwargs={"lr": -0.5}, desc="negative lr"),
            error_type=ValueError,
            error_regex="lr must be at least 0",
        ),
        ErrorOptimizerInput(
            OptimizerInput(params=None, kwargs={"lr": 0.1, "momentum": -0.5}, desc="negative momentum"),
            error_type=ValueError,
            error_regex=r"momentum must be in \[0, 1\)",
        ),
        ErrorOptimizerInput(
            OptimizerInput(params=[p * 1.0], kwargs={"lr": 0.1}, desc="not a leaf"),
            error_type=ValueError,
            error_regex="can't optimize a non-leaf Tensor",
        ),
        ErrorOptimizerInput(
            OptimizerInput(params=[], kwargs={"lr": 0.1}, desc="no parameters"),
            error_type=ValueError,
            error_regex="empty parameter list",
        ),
        ErrorOptimizerInput(
            OptimizerInput(
                params=[p],
                kwargs={"lr": 0.1},
                desc="plain backward is not enough for exact products",
            ),
            error_on=OptimizerErrorEnum.STEP_ERROR,
            error_type=RuntimeError,
            error_regex="Three ways to call step",
        ),
    ]
    return generic + own


def info(mode: Mode) -> OptimizerInfo:
    """PyTorch's description of an optimizer under test."""
    return OptimizerInfo(
        PSGD,
        optim_inputs_func=partial(inputs, mode),
        optim_error_inputs_func=errors,
        scheduler_inputs=(
            [lambda opt: lr_scheduler.StepLR(opt, gamma=0.9, step_size=10)],
            [
                lambda opt: lr_scheduler.ExponentialLR(opt, 0.99),
                lambda opt: lr_scheduler.ReduceLROnPlateau(opt),
            ],
        ),
        supported_impls=(),
        not_og_supported_flags=(
            "weight_decay",
            "maximize",
            "damping",
            "damping_kind",
            "t",
            "skipped",
        ),
        supports_sparse=False,
    )


MODES = [Mode(hvp, name) for hvp in ("whiten", "exact") for name in (*NAMES, "scan")]
MODES += [Mode("approx", "kron"), Mode("forward", "kron")]
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=str)
MAIN_MODES = pytest.mark.parametrize("mode", [Mode("whiten", "kron"), Mode("exact", "kron")], ids=str)


class Line:
    """The generic suite's problem: the square of an affine function of a fixed input."""

    def __init__(self, layout: str = "contiguous", rows: int = 6, columns: int = 4) -> None:
        source = generator()
        weight, bias, self.x = (torch.randn(s, generator=source) for s in ((rows, columns), (rows,), (columns,)))
        if layout == "strided":
            weight = torch.stack([weight, weight], -1)[..., 0]
            bias = torch.stack([bias, bias], -1)[..., 0]
        elif layout == "transposed":
            weight = weight.T.contiguous().T
        self.weight, self.bias = weight.requires_grad_(), bias.requires_grad_()
        self.params = [self.weight, self.bias]

    def loss(self) -> Tensor:
        """The loss, without backward."""
        return (self.weight.mv(self.x) + self.bias).square().sum()

    def optimizer(self, kwargs: dict[str, Any], params: Any = None) -> PSGD:
        """An optimizer of weight and bias; "scan" gets them as a block."""
        blocks = blocks_of(kwargs.get("preconditioner"), self.weight, self.bias)
        return PSGD(self.params if params is None else params, **kwargs, blocks=blocks)


class Comparing(unittest.TestCase):
    """The test case that a TensorTracker compares by."""

    def assertEqual(self, one: Tensor, other: Tensor, **tolerance: float) -> None:  # noqa: N802
        """Compare tensors."""
        torch.testing.assert_close(one, other, **tolerance)


def schedule(schedulers: list[Any], loss: Tensor) -> None:
    """Step the schedulers, the plateau's with the loss."""
    for scheduler in schedulers:
        scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


@EVERY_MODE
@pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed"])
def test_steps_go_in_the_right_direction(mode, layout):
    """Down, or up with maximize, in every way to call `step`."""
    for given in info(mode).optim_inputs_func("cpu"):
        for way in ways_of(mode.hvp):
            line = Line(layout)
            opt = line.optimizer(given.kwargs)
            first = line.loss().item()
            for _ in range(4):
                take(opt, line.loss, way)
            assert (line.loss().item() > first) == bool(given.kwargs.get("maximize")), (
                given.desc,
                way,
            )


@EVERY_MODE
@pytest.mark.parametrize("which", [0, 1])
def test_steps_with_schedulers_go_in_the_right_direction(mode, which):
    for given in info(mode).optim_inputs_func("cpu")[:3]:
        line = Line()
        opt = line.optimizer(given.kwargs)
        schedulers = [make(opt) for make in info(mode).scheduler_inputs[which]]
        first = line.loss().item()
        for _ in range(12):
            schedule(schedulers, take(opt, line.loss, ways_of(mode.hvp)[-1]) or line.loss())
        assert line.loss().item() < first


@pytest.mark.parametrize("hvp", HVP)
@pytest.mark.parametrize("name", NAMES)
def test_images_in_channels_last(hvp, name):
    """A convolution in the other memory format walks the same path."""
    source = generator()
    image, weight = (
        torch.randn(2, 3, 5, 5, generator=source),
        torch.randn(4, 3, 3, 3, generator=source),
    )
    ends = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        w = weight.clone(memory_format=memory_format).requires_grad_()
        x = image.contiguous(memory_format=memory_format)
        opt = PSGD([w], lr=0.01, hvp=hvp, preconditioner=name)

        def loss(w: Tensor = w, x: Tensor = x) -> Tensor:
            return torch.conv2d(x, w).tanh().square().mean()

        first = loss()
        for _ in range(4):
            opt.step(loss)
        assert loss() < first
        assert w.is_contiguous(memory_format=memory_format)
        ends.append(w.detach())
    # the two formats sum a convolution in different orders, and a difference of gradients divides that by the step
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-3 if hvp == "approx" else 1e-5)


@EVERY_MODE
def test_param_groups_with_a_step_size_of_their_own(mode):
    """A group moves by its own lr, and not at all at lr 0."""
    for lr in (0.0, torch.tensor(0.0)):
        line, still = Line(), torch.ones(3, requires_grad=True)
        groups = [
            {"params": line.params},
            {"params": [still], "lr": lr, "preconditioner": "diagonal", "blocks": ()},
        ]
        opt = line.optimizer({"lr": 0.02, "hvp": mode.hvp, "preconditioner": mode.preconditioner}, groups)
        schedulers = [lr_scheduler.LambdaLR(opt, lambda t: 0.9**t)]
        first = line.loss().item()
        for _ in range(5):
            take(
                opt,
                lambda line=line, still=still: line.loss() + still.square().sum(),
                ways_of(mode.hvp)[-1],
            )
            schedule(schedulers, line.loss())
        assert line.loss().item() < first
        assert torch.equal(still, torch.ones(3))


@EVERY_MODE
def test_param_groups_with_a_weight_decay_of_their_own(mode):
    """Decay is decoupled: `1 - lr weight_decay` before what P g does, and only in its group."""
    decay, lr = 0.5, 0.1
    p, q, plain = (torch.full((3,), 2.0, requires_grad=True) for _ in range(3))
    kind = {
        "hvp": mode.hvp,
        "preconditioner": "diagonal" if mode.preconditioner == "scan" else mode.preconditioner,
    }
    groups = [{"params": [p], "weight_decay": decay}, {"params": [q], "weight_decay": 0.0}]
    opt, reference = PSGD(groups, lr, **PAPER, **kind), PSGD([plain], lr, **PAPER, **kind)
    take(opt, lambda: p.square().sum() + q.square().sum(), ways_of(mode.hvp)[-1])
    take(reference, lambda: plain.square().sum(), ways_of(mode.hvp)[-1])
    torch.testing.assert_close(q, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(p.detach(), plain.detach() - decay * lr * 2.0, rtol=1e-6, atol=0)


@EVERY_MODE
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_step_size_is_a_number(mode, shape):
    """Of any number of dimensions, under a scheduler too: the same bits, and it stays the user's tensor."""
    tracker, case = TensorTracker(), Comparing()
    for given in info(mode).optim_inputs_func("cpu"):
        rate = float(given.kwargs["lr"])
        for lr in (rate, torch.full(shape, rate)):
            line = Line()
            opt = line.optimizer({**given.kwargs, "lr": lr})
            scheduler = lr_scheduler.ExponentialLR(opt, 0.5)
            for _ in range(3):
                take(opt, line.loss, ways_of(mode.hvp)[-1])
                scheduler.step()
                for p in line.params:
                    if isinstance(lr, Tensor):
                        # the number is a Python float, whose product with a float32 tensor is rounded once more
                        tracker.pop_check_set(p, case, {"rtol": 2e-6, "atol": 1e-6})
                    else:
                        tracker.add(p)
        assert opt.param_groups[0]["lr"].shape == shape
        assert opt.param_groups[0]["lr"].item() == pytest.approx(rate / 8)
        assert tracker.all_popped()


def schedulers_with_defaults() -> dict[str, Callable[[PSGD], Any]]:
    """Every public scheduler, with its defaults and no more than the arguments that it requires."""
    chain = [
        lambda opt: lr_scheduler.ConstantLR(opt),
        lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    ]
    arguments: dict[str, dict[str, Any]] = {
        "LambdaLR": {"lr_lambda": lambda t: 0.9**t},
        "MultiplicativeLR": {"lr_lambda": lambda t: 0.9},
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [2, 4]},
        "ConstantLR": {},
        "LinearLR": {},
        "ExponentialLR": {"gamma": 0.9},
        "CosineAnnealingLR": {"T_max": 10},
        "ReduceLROnPlateau": {"patience": 0},
        "CyclicLR": {"base_lr": 0.001, "max_lr": 0.02},
        "CosineAnnealingWarmRestarts": {"T_0": 3},
        "OneCycleLR": {"max_lr": 0.02, "total_steps": 20},
        "PolynomialLR": {},
    }
    made = {name: partial(_scheduler, name, kwargs) for name, kwargs in arguments.items()}
    made["SequentialLR"] = lambda opt: lr_scheduler.SequentialLR(opt, [make(opt) for make in chain], milestones=[3])
    made["ChainedScheduler"] = lambda opt: lr_scheduler.ChainedScheduler([make(opt) for make in chain])
    made["SWALR"] = lambda opt: swa_utils.SWALR(opt, swa_lr=0.01)
    return made


def _scheduler(name: str, kwargs: dict[str, Any], opt: PSGD) -> Any:
    return getattr(lr_scheduler, name)(opt, **kwargs)


def test_no_scheduler_is_forgotten():
    """All of torch's, but the base class."""
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(schedulers_with_defaults())


@pytest.mark.parametrize("name", schedulers_with_defaults())
@MAIN_MODES
def test_every_scheduler_works_by_default(mode, name):
    """The loss falls, the step size changes, a tensor lr stays the same tensor, momentum is cycled where asked."""
    for lr in (0.02, torch.tensor(0.02)):
        line = Line()
        opt = line.optimizer({"lr": lr, "hvp": mode.hvp, "preconditioner": mode.preconditioner})
        scheduler = schedulers_with_defaults()[name](opt)
        first, rates = line.loss().item(), []
        for _ in range(8):
            rates.append(float(opt.param_groups[0]["lr"]))
            take(opt, line.loss, ways_of(mode.hvp)[-1])
            schedule([scheduler], torch.tensor(1.0))
        assert line.loss().item() < first
        assert len(set(rates)) > 1
        if isinstance(lr, Tensor):
            assert opt.param_groups[0]["lr"] is lr
        if name in ("CyclicLR", "OneCycleLR"):
            assert 0.8 <= opt.param_groups[0]["momentum"] <= 0.95


@EVERY_MODE
def test_complex_parameters_are_pairs_of_real_ones(mode):
    """Given the gradients, bit for bit as the run on view_as_real; that with a graph is a row of cases."""
    for given in inputs(Mode("whiten", mode.preconditioner), "cpu") if mode.hvp == "whiten" else ():
        if mode.preconditioner == "scan":
            given.kwargs["preconditioner"] = "kron"  # the constant 1 is real: no column of a complex block is one
        source, tracker, case = generator(), TensorTracker({"rtol": 0, "atol": 0}), Comparing()
        z = torch.randn(3, 4, dtype=torch.complex64, generator=source).requires_grad_()
        x = torch.view_as_real(z).detach().clone().requires_grad_()
        twins = [PSGD([p], **given.kwargs) for p in (z, x)]
        for _ in range(3):
            z.grad = torch.randn(3, 4, dtype=torch.complex64, generator=source)
            x.grad = torch.view_as_real(z.grad).clone()
            for opt in twins:
                opt.step()
            tracker.add(torch.view_as_real(z))
            tracker.pop_check_set(x, case)


# PyTorch's second complex check compares a complex parameter with its real and imaginary parts as two parameters. It
# can't hold here: one block of n x 2 has another Q than two blocks of n, and each parameter has a probe of its own.


@EVERY_MODE
def test_nothing_happens_without_gradients(mode):
    """No parameter asks for one, or none has one: no state, no change, and the closure's value comes back."""
    for given in info(mode).optim_inputs_func("cpu"):
        line = Line()
        opt = line.optimizer(given.kwargs)
        before = [p.detach().clone() for p in line.params]
        assert opt.step() is None
        for p in line.params:
            p.requires_grad_(False)
        assert opt.step(lambda: torch.tensor([1.0])).item() == 1.0
        assert same(before, line.params)
        assert not opt.state


@EVERY_MODE
def test_nothing_moves_at_zero_gradients(mode):
    """Neither do parameters that the gradient doesn't move, except by weight decay."""
    for given in info(mode).optim_inputs_func("cpu"):
        for way in ways_of(mode.hvp):
            line = Line()
            opt = line.optimizer({**given.kwargs, "weight_decay": 0.0})
            before = [p.detach().clone() for p in line.params]
            for _ in range(2):
                take(opt, lambda line=line: 0.0 * line.loss(), way)
            assert same(before, line.params), (given.desc, way)


@EVERY_MODE
def test_a_closure_that_returns_a_constant_uses_the_stored_gradients(mode):
    """As torch's optimizers: they read `.grad` after the closure, whoever has written it."""
    if mode.hvp != "whiten":
        return  # the products of the other kinds can't be had from a gradient alone
    line, twin = Line(), Line()
    opt, other = (
        x.optimizer({"lr": 0.1, "hvp": "whiten", "preconditioner": mode.preconditioner}) for x in (line, twin)
    )
    for x in (line, twin):
        for p in x.params:
            p.grad = torch.ones_like(p)
    assert opt.step(lambda: torch.tensor([1.0])).item() == 1.0
    other.step()
    assert same(line.params, twin.params)


def test_its_text_has_every_setting():
    line = Line()
    opt = line.optimizer({"lr": 0.5, "damping": 0.125, "preconditioner": Diagonal()})
    for name, value in opt.defaults.items():
        assert f"{name}: {value}" in repr(opt)
    for part in (
        "damping: 0.125",
        "preconditioner: Diagonal()",
        "hvp: exact",
        "update_every: auto",
    ):
        assert part in repr(opt)


@EVERY_MODE
def test_state_is_not_empty_after_a_step(mode):
    line = Line()
    opt = line.optimizer({"lr": 0.1, "hvp": mode.hvp, "preconditioner": mode.preconditioner, "momentum": 0.5})
    take(opt, line.loss, ways_of(mode.hvp)[-1])
    assert set().union(*opt.state.values()) == {*Fit._fields, "momentum"}


@EVERY_MODE
def test_a_loaded_state_goes_on_the_same_way(mode):
    """Bit for bit, through weights_only; the dictionary is left as it was, and both end with equal states."""
    for given in info(mode).optim_inputs_func("cpu"):
        line, twin = Line(), Line()
        opt = line.optimizer(given.kwargs)
        for _ in range(4):
            take(opt, line.loss, ways_of(mode.hvp)[-1])
        with torch.no_grad():
            for p, q in zip(line.params, twin.params, strict=True):
                q.copy_(p)
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        kept = copy.deepcopy(saved)
        other = twin.optimizer(given.kwargs)
        other.load_state_dict(saved)
        assert equal(other.state_dict(), opt.state_dict())
        for _ in range(4):
            take(opt, line.loss, ways_of(mode.hvp)[-1])
            take(other, twin.loss, ways_of(mode.hvp)[-1])
            assert same(line.params, twin.params)
        assert equal(saved, kept)
        assert equal(other.state_dict(), opt.state_dict())


@MAIN_MODES
def test_an_older_state_lacks_later_settings(mode):
    """What came after the first release is filled in."""
    line = Line()
    opt = line.optimizer(inputs(mode, "cpu")[2].kwargs)
    take(opt, line.loss)
    saved = opt.state_dict()
    for name in info(mode).not_og_supported_flags:
        del saved["param_groups"][0][name]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["weight_decay"] == 0.1
    take(opt, line.loss)


@pytest.mark.parametrize(("named", "target"), list(itertools.product([False, True], repeat=2)))
def test_states_cross_between_named_and_unnamed_parameters(named, target):
    """Positions decide; the names that the target has, or lacks, stay as torch's optimizers keep them."""
    line, twin = Line(), Line()

    def params(x: Line, with_names: bool) -> Any:
        return list(zip(("weight", "bias"), x.params, strict=True)) if with_names else x.params

    kind = {"lr": 0.02, "momentum": 0.5}
    opt = line.optimizer(kind, params(line, named))
    reference = torch.optim.SGD(params(line, named), **kind)
    for _ in range(3):
        take(opt, line.loss)
    other = twin.optimizer(kind, params(twin, target))
    expected = torch.optim.SGD(params(twin, target), **kind)
    other.load_state_dict(opt.state_dict())
    expected.load_state_dict(reference.state_dict())
    assert other.param_groups[0].get("param_names") == expected.param_groups[0].get("param_names")
    with torch.no_grad():
        for p, q in zip(line.params, twin.params, strict=True):
            q.copy_(p)
    take(opt, line.loss)
    take(other, twin.loss)
    assert same(line.params, twin.params)
    other.describe()


def test_names_that_a_hook_reorders():
    """PyTorch's own recipe: a load pre-hook matches parameters by name, in another order of the model."""
    line, twin = Line(), Line()
    opt = line.optimizer({"lr": 0.02}, [("weight", line.weight), ("bias", line.bias)])
    for _ in range(3):
        take(opt, line.loss)
    other = twin.optimizer({"lr": 0.02}, [("bias", twin.bias), ("weight", twin.weight)])

    def by_name(optimizer: PSGD, saved: dict[str, Any]) -> dict[str, Any]:
        group = saved["param_groups"][0]
        position = dict(zip(group["param_names"], group["params"], strict=True))
        names = optimizer.param_groups[0]["param_names"]
        # the blocks are lists of positions, which change with the order
        changed = {**group, "params": [position[n] for n in names], "param_names": names}
        changed["blocks"] = optimizer.state_dict()["param_groups"][0]["blocks"]
        return {**saved, "param_groups": [changed]}

    other.register_load_state_dict_pre_hook(by_name)
    other.load_state_dict(opt.state_dict())
    for p, q in ((line.weight, twin.weight), (line.bias, twin.bias)):
        assert equal(opt.state[p]["Q"], other.state[q]["Q"])


def test_hooks_around_a_state_run_in_their_order():
    """Post hooks after pre hooks, prepended ones first, what they return is used, and removed ones are silent."""
    line, seen = Line(), []
    opt = line.optimizer({"lr": 0.1})
    take(opt, line.loss)

    def note(what: str, value: Any = None) -> Callable[..., Any]:
        return lambda *_: (seen.append(what), value)[1]

    def with_lr(lr: float) -> Callable[..., Any]:
        def change(_: PSGD, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "param_groups": [{**state["param_groups"][0], "lr": lr}]}

        return change

    handles = [
        opt.register_state_dict_post_hook(note("saved 1")),
        opt.register_state_dict_post_hook(note("saved 0"), prepend=True),
        opt.register_state_dict_pre_hook(note("save 1")),
        opt.register_state_dict_pre_hook(note("save 0"), prepend=True),
        opt.register_load_state_dict_post_hook(note("loaded 1")),
        opt.register_load_state_dict_post_hook(note("loaded 0"), prepend=True),
        opt.register_load_state_dict_pre_hook(note("load 1")),
        opt.register_load_state_dict_pre_hook(note("load 0"), prepend=True),
    ]
    opt.load_state_dict(opt.state_dict())
    assert seen == [
        "save 0",
        "save 1",
        "saved 0",
        "saved 1",
        "load 0",
        "load 1",
        "loaded 0",
        "loaded 1",
    ]
    handles.append(opt.register_state_dict_post_hook(with_lr(0.3)))
    assert opt.state_dict()["param_groups"][0]["lr"] == 0.3
    handles.append(opt.register_load_state_dict_pre_hook(with_lr(0.2)))
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.2
    for handle in handles:
        handle.remove()
    seen.clear()
    opt.load_state_dict(opt.state_dict())
    assert not seen
    assert opt.param_groups[0]["lr"] == 0.2


def test_what_a_post_hook_sees_is_the_whole_state():
    """A post hook of state_dict gets what is saved, and one of load_state_dict an optimizer that is loaded whole."""

    def make() -> PSGD:
        layer = network(torch.bfloat16)[0]
        return PSGD(layer.parameters(), lr=0.1, momentum=0.5, hvp="whiten", blocks=affine_blocks(layer))

    opt = make()
    take(opt, lambda: sum(p.square().sum() for p in opt.param_groups[0]["params"]))
    expected = opt.state_dict()
    saved: list[dict[str, Any]] = []
    handle = opt.register_state_dict_post_hook(lambda _, state: saved.append(copy.deepcopy(state)))
    opt.state_dict()
    handle.remove()
    assert equal(saved[0], expected)
    other = make()
    other.register_load_state_dict_post_hook(lambda loaded: saved.append(loaded.state_dict()))
    other.load_state_dict(expected)
    assert equal(saved[1], expected)


@MAIN_MODES
def test_hooks_around_a_step(mode):
    """Global ones around those of the optimizer; a pre hook can change the arguments."""
    line, seen = Line(), []
    opt = line.optimizer({"lr": 0.1, "hvp": mode.hvp})

    def note(what: str) -> Callable[..., None]:
        return lambda *_: seen.append(what)

    def replaced(_: PSGD, args: Any, kwargs: Any) -> Any:
        return (args[0], lambda: 2 * line.loss()), kwargs

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        opt.register_step_pre_hook(note("pre")),
        opt.register_step_pre_hook(replaced),
        opt.register_step_post_hook(note("post")),
        register_optimizer_step_post_hook(note("global post")),
    ]
    try:
        twice = 2 * line.loss().item()
        assert opt.step(line.loss).item() == pytest.approx(twice)
        assert seen == ["global pre", "pre", "post", "global post"]
    finally:
        for handle in handles:
            handle.remove()
    opt.step(line.loss)
    assert len(seen) == 4


@EVERY_MODE
@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_keep_all_and_go_on_alone(mode, duplicate):
    """Public attributes, state, and the next steps' bits; with a callable only where it can be pickled."""
    line = Line()
    opt = line.optimizer(inputs(mode, "cpu")[2].kwargs)
    for _ in range(2):
        take(opt, line.loss, ways_of(mode.hvp)[-1])
    twin, other = duplicate((line, opt))

    def public(x: PSGD) -> set[str]:
        return {name for name in vars(x) if not name.startswith("_")}

    assert public(opt) == public(other)
    assert repr(opt) == repr(other)
    for _ in range(3):
        take(opt, line.loss, ways_of(mode.hvp)[-1])
        take(other, twin.loss, ways_of(mode.hvp)[-1])
        assert same(line.params, twin.params)


@EVERY_MODE
def test_groups_are_added_before_and_after_steps(mode):
    line, late = Line(), torch.ones(3, requires_grad=True)
    opt = line.optimizer({"lr": 0.02, "hvp": mode.hvp, "preconditioner": mode.preconditioner, "init_scale": 1.0})
    take(opt, line.loss)
    opt.add_param_group({"params": late, "lr": 0.1, "preconditioner": "diagonal", "blocks": ()})
    take(opt, lambda: line.loss() + late.square().sum(), ways_of(mode.hvp)[-1])
    assert (late != 1).all()
    assert opt.param_groups[1]["lr"] == 0.1
    with pytest.raises(ValueError, match="appear in more than one"):
        opt.add_param_group({"params": [late]})
    assert len(opt.param_groups) == 2


@MAIN_MODES
def test_zero_grad_as_every_optimizer_has_it(mode):
    line = Line()
    opt = line.optimizer({"lr": 0.1, "hvp": mode.hvp})
    with quiet():
        line.loss().backward(create_graph=True)
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() and not p.grad.requires_grad for p in line.params)
    opt.zero_grad()
    assert all(p.grad is None for p in line.params)


@pytest.mark.parametrize("index", range(len(errors("cpu", torch.float32))))
def test_wrong_inputs_raise_what_torch_says(index):
    """Torch's own table of errors that every optimizer must raise, and ours in the same form."""
    wrong = errors("cpu", torch.float32)[index]
    given = wrong.optimizer_error_input
    params = [nn.Parameter(torch.ones(2, 3))] if given.params is None else given.params
    if wrong.error_on is OptimizerErrorEnum.STEP_ERROR:
        opt = PSGD(params, **given.kwargs)
        params[0].square().sum().backward()
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            opt.step()
    elif issubclass(wrong.error_type, Warning):
        with pytest.warns(wrong.error_type, match=wrong.error_regex):
            PSGD(params, **given.kwargs)
    else:
        with pytest.raises(wrong.error_type, match=wrong.error_regex):
            PSGD(params, **given.kwargs)


@pytest.mark.parametrize("hvp", HVP)
def test_the_closure_gives_its_loss_back(hvp):
    """As a tensor without a graph when it was one, and as a number when the closure returned a number."""
    for way in ways_of(hvp)[:2]:
        net = network()
        opt = PSGD(net.parameters(), lr=0.01, hvp=hvp)
        before = loss_of(net).item()
        loss = take(opt, lambda net=net: loss_of(net), way)
        assert isinstance(loss, Tensor)
        assert loss.item() == pytest.approx(before, rel=1e-6)
        assert not loss.requires_grad
    if hvp == "whiten":
        opt.zero_grad()
        loss_of(net).backward()

        def as_number() -> float:
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            return 3.5

        assert opt.step(as_number) == 3.5


def test_averaged_models():
    """torch.optim.swa_utils works on the parameters that a step has moved."""
    net = network()
    mean, opt = swa_utils.AveragedModel(net), PSGD(net.parameters(), lr=0.02)
    seen = []
    for _ in range(3):
        opt.step(lambda: loss_of(net))
        mean.update_parameters(net)
        seen.append(weights(net))
    for p, *parts in zip(mean.parameters(), *seen, strict=True):
        torch.testing.assert_close(p, torch.stack(parts).mean(0))
    assert loss_of(mean).isfinite()


@pytest.fixture(autouse=True)
def deprecations_of_forward_mode() -> Iterator[None]:
    with quiet():
        yield
