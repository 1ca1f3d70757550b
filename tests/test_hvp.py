"""What a Hessian-vector product promises beside its value, and its value where a chapter has no room for it."""

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import huber_loss, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from psgd_lit.graphs import SecondDerivativeError
from psgd_lit.hvp import (
    PAPER_STEP,
    HessianVectorProduct,
    gradient_difference,
    hvp_approx,
    hvp_exact,
    hvp_forward,
)

# Torch itself scripts a few formulas when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

Method = Callable[..., HessianVectorProduct]
METHODS: dict[str, Method] = {
    "exact": hvp_exact,
    "forward": hvp_forward,
    "approx": hvp_approx,
    "central": partial(hvp_approx, central=True),
}
CALLS = {"exact": 1, "forward": 1, "approx": 2, "central": 3}
TOLERANCE = {"exact": 1e-12, "forward": 1e-12, "approx": 1e-2, "central": 1e-5}

every_method = pytest.mark.parametrize("name", METHODS)
autograd_method = pytest.mark.parametrize("name", ["exact", "forward"])
difference_method = pytest.mark.parametrize("name", ["approx", "central"])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def assert_close(found: Tensor, known: Tensor, tolerance: float) -> None:
    assert found.shape == known.shape
    assert found.dtype == known.dtype
    assert float((found - known).norm()) <= tolerance * float(known.norm())


class Cube(torch.autograd.Function):
    """The cube, with a backward pass that must not be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * outer


# Values


@every_method
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_value_for_each_shape(name: str, shape: tuple[int, ...]) -> None:
    x, v = parameter(*shape), normal(*shape, seed=1)
    found = METHODS[name](lambda: x.sin().sum(), [x], [v])
    assert torch.equal(found.loss, x.detach().sin().sum())
    assert torch.equal(found.gradient[0], x.detach().cos())
    assert_close(found.product[0], -x.detach().sin() * v, TOLERANCE[name])


@every_method
def test_value_across_parameters_of_several_shapes(name: str) -> None:
    params = [parameter(3, 2), parameter(2, seed=1), parameter(seed=2), parameter(0, seed=3)]
    probe = [normal(*p.shape, seed=9) for p in params]

    def loss(W: Tensor, b: Tensor, c: Tensor, empty: Tensor) -> Tensor:
        return torch.tanh(W @ b * c).square().sum() + torch.exp(c) + empty.sum()

    known = torch.autograd.functional.hvp(loss, tuple(params), tuple(probe))[1]
    found = METHODS[name](lambda: loss(*params), params, probe)
    for h, k in zip(found.product, known, strict=True):
        assert_close(h, k, TOLERANCE[name])


@every_method
def test_value_in_float32(name: str) -> None:
    x, v = parameter(7, dtype=torch.float32), normal(7, seed=1, dtype=torch.float32)
    found = METHODS[name](lambda: x.sin().sum(), [x], [v])
    assert_close(
        found.product[0],
        -x.detach().sin() * v,
        max(TOLERANCE[name], 1e-3 if name == "central" else 1e-6),
    )


@every_method
def test_value_for_complex_parameters(name: str) -> None:
    z, v = parameter(4, dtype=torch.complex128), normal(4, seed=1, dtype=torch.complex128)
    pair = torch.view_as_real(z.detach()).clone().requires_grad_()

    def loss(parts: Tensor) -> Tensor:
        return (parts[:, 0] * parts[:, 1]).sin().sum() + (parts**4).sum()

    found = METHODS[name](lambda: loss(torch.view_as_real(z)), [z], [v])
    known = torch.autograd.functional.hvp(loss, pair, torch.view_as_real(v))[1]
    assert_close(torch.view_as_real(found.product[0]), known, TOLERANCE[name])


@autograd_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_served_without_differences(name: str, dtype: torch.dtype) -> None:
    x, v = normal(7).to(dtype).requires_grad_(), normal(7, seed=1).to(dtype)
    found = METHODS[name](lambda: (x**3).sum(), [x], [v]).product[0]
    assert_close(found.double(), 6 * x.detach().double() * v.double(), 3 * torch.finfo(dtype).eps)


@autograd_method
@pytest.mark.parametrize("exponent", [-60, -1, 7, 60])
def test_scaling_the_probe_by_a_power_of_two_changes_no_other_bit(name: str, exponent: int) -> None:
    x, v = parameter(7), normal(7, seed=1)
    one, scaled = (METHODS[name](lambda: x.sin().sum(), [x], [w]).product[0] for w in (v, v * 2.0**exponent))
    assert torch.equal(scaled, one * 2.0**exponent)


@every_method
def test_unused_and_linear_parameters_have_no_curvature(name: str) -> None:
    used, unused, linear = parameter(2), parameter(3), parameter(4)
    probe = [torch.ones_like(p) for p in (used, unused, linear)]
    found = METHODS[name](lambda: used.sin().sum() + linear.sum(), [used, unused, linear], probe)
    assert found.gradient[1] is None
    assert torch.equal(found.gradient[2], torch.ones_like(linear))
    assert torch.equal(found.product[1], torch.zeros_like(unused))
    assert torch.equal(found.product[2], torch.zeros_like(linear))
    assert found.product[0].all()


@every_method
def test_loss_linear_in_everything_or_in_none_of_the_parameters(name: str) -> None:
    x, elsewhere = parameter(3), parameter(2)
    for loss, gradient in (
        (lambda: 2 * x.sum(), torch.full_like(x, 2.0)),
        (lambda: elsewhere.sin().sum(), None),
    ):
        found = METHODS[name](loss, [x], [torch.ones_like(x)])
        assert (found.gradient[0] is None) if gradient is None else torch.equal(found.gradient[0], gradient)
        assert torch.equal(found.product[0], torch.zeros_like(x))


@every_method
def test_frozen_layers_beside_the_parameters_are_constants(name: str) -> None:
    frozen, x, v = normal(3, 3), parameter(3, seed=1), normal(3, seed=2)
    found = METHODS[name](lambda: (frozen @ x).square().sum(), [x], [v])
    assert_close(found.product[0], 2 * frozen.T @ frozen @ v, TOLERANCE[name])


@every_method
def test_parameters_may_share_one_buffer(name: str) -> None:
    buffer = normal(6)
    params = [nn.Parameter(buffer[:2]), nn.Parameter(buffer[2:])]
    before, probe = bits(buffer), [normal(2, seed=1), normal(4, seed=2)]
    found = METHODS[name](lambda: sum((p.sin().sum() for p in params), torch.zeros(())), params, probe)
    for h, p, v in zip(found.product, params, probe, strict=True):
        assert_close(h, -p.detach().sin() * v, TOLERANCE[name])
    assert bits(buffer) == before


@every_method
def test_a_loss_of_one_entry_counts_as_a_number(name: str) -> None:
    x = parameter(1)
    assert METHODS[name](lambda: x.sin(), [x], [torch.ones_like(x)]).loss.shape == ()


# What is left behind


@every_method
@pytest.mark.parametrize("grad", [None, 7.0])
def test_parameters_and_their_attributes_are_left_alone(name: str, grad: float | None) -> None:
    x, v = parameter(5), normal(5, seed=1)
    x.grad = None if grad is None else torch.full_like(x, grad)
    gradient, before, probe = x.grad, bits(x), bits(v)
    METHODS[name](lambda: x.exp().sum(), [x], [v])
    assert bits(x) == before
    assert bits(v) == probe
    assert x.grad is gradient
    assert gradient is None or torch.equal(gradient, torch.full_like(gradient, 7.0))
    assert x.is_leaf
    assert x.requires_grad
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(x).tangent is None


@every_method
def test_answers_carry_no_graph_and_no_tangent(name: str) -> None:
    x = parameter(5)
    answer = METHODS[name](lambda: x.exp().sum(), [x], [torch.ones_like(x)])
    with forward_ad.dual_level():
        for tensor in (answer.loss, *answer.gradient, *answer.product):
            assert not tensor.requires_grad
            assert forward_ad.unpack_dual(tensor).tangent is None


@pytest.mark.parametrize(("name", "call"), [(name, call) for name in METHODS for call in range(1, CALLS[name] + 1)])
def test_bits_come_back_when_the_closure_raises(name: str, call: int) -> None:
    values = torch.tensor([0.1, -0.0, math.nan, math.inf, 1e-310, 3.0], dtype=torch.float64)
    x, before, state = values.clone().requires_grad_(), bits(values), torch.get_rng_state()
    error, calls = RuntimeError("out of coffee"), 0

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return x.sin().sum()

    with pytest.raises(RuntimeError) as caught:
        METHODS[name](loss, [x], [torch.ones_like(x)])
    assert caught.value is error
    assert calls == call
    assert bits(x) == before
    assert torch.equal(torch.get_rng_state(), state)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(x).tangent is None


@every_method
def test_no_graph_outlives_the_call(name: str) -> None:
    x, v = parameter(5), normal(5, seed=1)

    def tensors_after(repeats: int) -> int:
        for _ in range(repeats):
            METHODS[name](lambda: x.exp().sin().sum(), [x], [v])
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    gc.collect()
    gc.freeze()  # what is there already isn't counted
    gc.disable()  # what needs the collector to go is a leak on the device too
    try:
        first = tensors_after(1)
        assert tensors_after(20) == first
    finally:
        gc.enable()
        gc.unfreeze()


# How the closure is called


@every_method
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_closure_sees_gradients_enabled_as_often_as_promised(name: str, context: Callable[[], Any]) -> None:
    x, seen = parameter(3), []

    def loss() -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x.exp().sum()

    with context():
        enabled = torch.is_grad_enabled()
        METHODS[name](loss, [x], [torch.ones_like(x)])
        assert torch.is_grad_enabled() is enabled
    assert seen == [True] * CALLS[name]


@every_method
def test_random_numbers_are_those_of_one_call(name: str) -> None:
    x, v = parameter(40), normal(40, seed=1)
    masks = []

    def loss() -> Tensor:
        masks.append(nn.functional.dropout(torch.ones_like(x), 0.5))
        return (masks[-1] * x).sin().sum()

    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(5)
        known = METHODS["exact"](loss, [x], [v])
        state = torch.get_rng_state()
        torch.random.default_generator.manual_seed(5)
        found = METHODS[name](loss, [x], [v])
        assert torch.equal(torch.get_rng_state(), state)
        loss()
    assert all(torch.equal(mask, masks[0]) for mask in masks[:-1])
    assert not torch.equal(masks[-1], masks[0])
    assert torch.equal(found.loss, known.loss)
    assert torch.equal(found.gradient[0], known.gradient[0])
    assert_close(found.product[0], known.product[0], TOLERANCE[name])


@every_method
def test_an_autocast_around_the_call_hands_out_no_stale_casts(name: str) -> None:
    W, v, x = (normal(4, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    W.requires_grad_()

    def loss() -> Tensor:
        return (x @ W).float().square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss()  # leaves casts behind
        if CALLS[name] > 1:  # unguarded, with a step that bfloat16 resolves
            found = gradient_difference(loss, [W], [v], 0.5, name == "central").product[0]
        else:
            found = METHODS[name](loss, [W], [v]).product[0]
    assert_close(found, 2 * x.T @ x @ v, 0.05)


@every_method
def test_nothing_waits_for_the_device(name: str) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    x, v, names = parameter(5), normal(5, seed=1), set()
    with Watch():
        METHODS[name](lambda: x.exp().sin().sum(), [x], [v])
    assert "aten::exp" in names
    assert not names & {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
    }


@difference_method
def test_the_step_is_the_callers(name: str) -> None:
    x, v = parameter(5), normal(5, seed=1)
    places: list[Tensor] = []

    def loss() -> Tensor:
        places.append(x.detach().clone())
        return x.exp().sum()

    METHODS[name](loss, [x], [v], step=0.5)
    home = x.detach()
    expected = [home + 0.5 * v, *([home - 0.5 * v] if name == "central" else []), home]
    for place, known in zip(places, expected, strict=True):
        torch.testing.assert_close(place, known, rtol=1e-15, atol=0)


def test_the_papers_step_has_variance_two_to_the_minus_23() -> None:
    assert math.isclose(PAPER_STEP**2, torch.finfo(torch.float32).eps, rel_tol=1e-15)


# Errors


@every_method
@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda x: x.sum().item(), TypeError, "as a tensor, not float"),
        (lambda x: None, TypeError, "as a tensor, not NoneType"),
        (
            lambda x: x * x,
            ValueError,
            r"one real number, not \(2,\) torch.float64: take its mean",
        ),
        (
            lambda x: torch.complex(x, x).sum(),
            ValueError,
            "one real number, not .* torch.complex128",
        ),
        (lambda x: x.sum().detach(), ValueError, "has no gradient"),
        (lambda x: torch.zeros(()), ValueError, "has no gradient"),
    ],
)
def test_bad_loss(name: str, loss: Callable[[Tensor], Any], error: type[Exception], words: str) -> None:
    x = parameter(2)
    with pytest.raises(error, match=words):
        METHODS[name](lambda: loss(x), [x], [torch.ones_like(x)])


@every_method
def test_loss_made_under_no_grad(name: str) -> None:
    x = parameter(2)

    @torch.no_grad()
    def loss() -> Tensor:
        return x.sin().sum()

    with pytest.raises(ValueError, match="without no_grad"):
        METHODS[name](loss, [x], [torch.ones_like(x)])


@every_method
def test_closure_that_runs_backward(name: str) -> None:
    x = parameter(2)

    def loss() -> Tensor:
        value = x.sin().sum()
        value.backward()
        return value

    with pytest.raises(ValueError, match="ran backward"):
        METHODS[name](loss, [x], [torch.ones_like(x)])


@every_method
@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ([torch.ones(2)], "2 parameters need as many probe tensors, not 1"),
        (
            [torch.ones(2), torch.ones(3)],
            r"probe\[1\] must be like params\[1\], which is \(4,\) .* is \(3,\)",
        ),
        (
            [torch.ones(2).double(), torch.ones(4)],
            r"probe\[0\] .* torch.float32 cpu, but is \(2,\) torch.float64",
        ),
        ([torch.ones(2), torch.ones(4, device="meta")], r"probe\[1\] .* cpu, but is .* meta"),
    ],
)
def test_probe_that_does_not_match(name: str, probe: list[Tensor], words: str) -> None:
    params = [torch.ones(2, requires_grad=True), torch.ones(4, requires_grad=True)]
    with pytest.raises(ValueError, match=words):
        METHODS[name](lambda: params[0].sum(), params, probe)


@every_method
def test_frozen_parameter(name: str) -> None:
    x, frozen = parameter(2), normal(2)
    with pytest.raises(ValueError, match=r"params\[1\] is frozen"):
        METHODS[name](lambda: x.sum(), [x, frozen], [torch.ones_like(x)] * 2)


@difference_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_difference_refuses_half_precision(name: str, dtype: torch.dtype) -> None:
    single, half = (
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=dtype, requires_grad=True),
    )
    with pytest.raises(ValueError, match=rf"params\[1\] is {dtype}.*hvp_exact or hvp_forward.*float32"):
        METHODS[name](lambda: single.sum(), [single, half], [torch.ones(2), torch.ones(2, dtype=dtype)])
    unguarded = gradient_difference(lambda: (half**2).sum(), [half], [torch.ones_like(half)], 0.125, name == "central")
    assert torch.equal(unguarded.product[0], torch.full_like(half, 2.0))


@difference_method
@pytest.mark.parametrize("step", [0.0, -1e-3, math.nan])
def test_step_must_be_positive(name: str, step: float) -> None:
    x = parameter(2)
    with pytest.raises(ValueError, match="step must be positive"):
        METHODS[name](lambda: x.sin().sum(), [x], [torch.ones_like(x)], step=step)


def attention(x: Tensor) -> Tensor:
    heads = x[None]  # the kernel without a second derivative wants four dimensions
    return scaled_dot_product_attention(heads, heads, heads).square().sum()


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "attention": (attention, "scaled_dot_product"),
    "cdist": (lambda x: torch.cdist(x[0], x[0] + 1).sum(), "cdist"),
    "ctc": (
        lambda x: nn.functional.ctc_loss(
            x.reshape(10, 2, 2).log_softmax(-1),
            torch.ones(2, 1, dtype=torch.long),
            [10, 10],
            [1, 1],
        ),
        "ctc_loss",
    ),
    "last": (lambda x: Cube.apply(x).sum(), "once_differentiable|jvp"),
    "inside": (lambda x: Cube.apply(x.sin()).cos().sum(), "once_differentiable|jvp"),
    "beside": (lambda x: (Cube.apply(x) * x).sum() + x.exp().sum(), "once_differentiable|jvp"),
}


@autograd_method
@pytest.mark.parametrize("operator", REFUSED)
def test_missing_derivative_is_explained_and_approx_is_a_way_out(name: str, operator: str) -> None:
    loss, words = REFUSED[operator]
    x, v = parameter(2, 5, 4), normal(2, 5, 4, seed=1)
    before = bits(x)
    with pytest.raises(SecondDerivativeError, match=rf"(?s)({words}).*hvp_approx.*SDPBackend.MATH.*cudnn"):
        METHODS[name](lambda: loss(x), [x], [v])
    assert bits(x) == before
    assert hvp_approx(lambda: loss(x), [x], [v]).product[0].isfinite().all()


@autograd_method
def test_the_math_kernel_is_a_way_out(name: str) -> None:
    x, v = parameter(1, 5, 4), normal(1, 5, 4, seed=1)

    def loss() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attention(x)

    found = METHODS[name](loss, [x], [v]).product[0]
    assert_close(hvp_approx(lambda: attention(x), [x], [v], central=True).product[0], found, 1e-5)


def test_exact_is_a_way_out_where_only_a_forward_formula_is_missing() -> None:
    x, v = parameter(4), normal(4, seed=1)
    zeros = torch.zeros_like(x)
    with pytest.raises(SecondDerivativeError, match=r'huber_loss_backward.*hvp="exact"'):
        hvp_forward(lambda: huber_loss(x.sin(), zeros), [x], [v])
    known = torch.autograd.functional.hvp(lambda y: y.sin().square().mean() / 2, x, v)[1]
    assert_close(hvp_exact(lambda: huber_loss(x.sin(), zeros), [x], [v]).product[0], known, 1e-12)


@pytest.mark.parametrize("name", ["exact", "forward", "approx", "central"])
@pytest.mark.parametrize("function", ["logdet", "solve", "mish", "silu"])
def test_formulas_that_look_whether_they_are_differentiated(name: str, function: str) -> None:
    x, v = parameter(3, 3), normal(3, 3, seed=1)
    eye, right = torch.eye(3, dtype=torch.float64), normal(3, seed=2)
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "logdet": lambda x: torch.logdet(x.T @ x + eye),
        "solve": lambda x: torch.linalg.solve(x.T @ x + eye, right).square().sum(),
        "mish": lambda x: nn.functional.mish(x).square().sum(),
        "silu": lambda x: nn.functional.silu(x).square().sum(),
    }
    loss = losses[function]
    known = torch.func.jvp(torch.func.grad(loss), (x.detach(),), (v,))[1]
    assert_close(METHODS[name](lambda: loss(x), [x], [v]).product[0], known, max(TOLERANCE[name], 1e-11))


@difference_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["inside", "around"])
def test_difference_refuses_autocast(name: str, dtype: torch.dtype, place: str) -> None:
    W, v, x = (normal(4, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    W.requires_grad_()

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=place == "inside" or torch.is_autocast_enabled("cpu")):
            return (x @ W).float().square().sum()

    with (
        torch.autocast("cpu", dtype=dtype, enabled=place == "around"),
        pytest.raises(ValueError, match=rf"partly in {dtype}.*autocast\(device_type, enabled=False\)"),
    ):
        METHODS[name](loss, [W], [v])
    known = 2 * x.T @ x @ v
    assert_close(METHODS[name](lambda: (x @ W).square().sum(), [W], [v]).product[0], known, 0.01)
    for way_out in (hvp_exact, hvp_forward):
        assert_close(way_out(loss, [W], [v]).product[0], known, 0.05)


@pytest.mark.parametrize("name", ["forward", "approx", "central"])
def test_losses_from_outside(name: str) -> None:
    """Also a part of a loss, and also where the rest is linear; what isn't made of the parameters may be outside."""
    x, other = parameter(3), parameter(3, seed=1)
    v, part, features = torch.ones_like(x), (x.detach() + x).sum(), other.exp()
    for loss in (
        lambda: part,
        lambda: part + x.sin().sum(),
        lambda: (part * features.sum()).sin(),
    ):
        with pytest.raises(ValueError, match="compute all of it in the closure"):
            METHODS[name](loss, [x], [v])
    found = METHODS[name](lambda: (x.exp() * features).sum(), [x], [v]).product[0]
    assert_close(found, (x.exp() * features).detach(), TOLERANCE[name])


@pytest.mark.parametrize("name", ["forward", "approx", "central"])
def test_parameters_may_be_made_of_others(name: str) -> None:
    """A parameter that is no leaf has a graph of its own, from before."""
    base = parameter(3)
    x = base * 2
    assert_close(
        METHODS[name](lambda: x.sin().sum(), [x], [torch.ones_like(x)]).product[0],
        -x.detach().sin(),
        1e-3,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_function_is_explained(dynamic: bool) -> None:
    """With shapes that vary torch frees what the backward pass has read, and says something else."""
    torch.compiler.reset()
    x = parameter(4)
    compiled = torch.compile(lambda y: (y.sin() * y).sum(), backend="aot_eager", dynamic=dynamic)
    with pytest.raises(SecondDerivativeError, match=r"double backward.*hvp_approx"):
        hvp_exact(lambda: compiled(x), [x], [torch.ones_like(x)])


@autograd_method
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2"),
        NotImplementedError("no kernel for this dtype"),
        KeyError("x"),
    ],
    ids=repr,
)
def test_other_errors_of_the_closure_pass_unchanged(name: str, error: Exception) -> None:
    def loss() -> Tensor:
        raise error

    x = parameter(2)
    with pytest.raises(type(error)) as caught:
        METHODS[name](loss, [x], [torch.ones_like(x)])
    assert caught.value is error


def test_forward_mode_of_mse_loss_is_a_refusal_of_torchs():
    """Torch's forward mode fails inside mse_loss; the error names the way out, and the formula itself works."""
    x, y = torch.ones(3, requires_grad=True), torch.zeros(3)
    with pytest.raises(SecondDerivativeError, match='where only "forward" fails'):
        hvp_forward(lambda: torch.nn.functional.mse_loss(x, y), [x], [torch.ones(3)])
    product = hvp_forward(lambda: (x - y).square().mean(), [x], [torch.ones(3)]).product[0]
    torch.testing.assert_close(product, torch.full((3,), 2 / 3))
