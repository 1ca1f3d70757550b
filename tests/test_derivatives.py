"""What a step knows of the loss: probes, gradients and products, from closures of both kinds and from `.grad`."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from toys import HVP, fill, generator, network, quiet, same, take, ways_of, weights

from psgd_lit.derivatives import (
    Derivatives,
    amp_scale,
    closure_derivatives,
    draw_probes,
    stored_derivatives,
    used_derivatives,
)
from psgd_lit.optim import PSGD

D = torch.float64


@pytest.fixture(autouse=True)
def torch_talks() -> Iterator[None]:
    with quiet():
        yield


# Probes


def test_probes_depend_on_seed_iteration_and_order_alone():
    """Neither layout nor dtype nor the user's stream matters; each of the three does."""
    p, q = torch.zeros(4, 3), torch.zeros(2)
    first = draw_probes([p, q], seed=1, t=2)
    stream = torch.get_rng_state()
    assert same(first, draw_probes([p.T.contiguous().T, q.double()], seed=1, t=2)[:1] + first[1:])
    assert torch.equal(draw_probes([p, q.double()], 1, 2)[1], first[1].double())
    assert torch.equal(torch.get_rng_state(), stream)
    for other in (draw_probes([p, q], 2, 2)[0], draw_probes([p, q], 1, 3)[0], draw_probes([q, p], 1, 2)[1]):
        assert not torch.equal(first[0], other)


def test_probes_fit_their_parameters():
    """In shape and dtype, also complex, half, empty and single ones."""
    kinds = [
        torch.zeros(3, 2, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, D, torch.complex64, torch.complex128)
    ]
    kinds += [torch.zeros(()), torch.zeros(0, 3), torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)]
    for p, v in zip(kinds, draw_probes(kinds, 0, 0), strict=True):
        assert (v.shape, v.dtype, v.device) == (p.shape, p.dtype, p.device)
    assert draw_probes([], 0, 0) == []


def test_a_complex_probe_is_two_real_ones():
    """With the numbers that view_as_real's parameter gets."""
    z, x = torch.zeros(3, dtype=torch.complex64), torch.zeros(3, 2)
    assert torch.equal(torch.view_as_real(draw_probes([z], 5, 6)[0]), draw_probes([x], 5, 6)[0])


def test_probes_are_standard_normal_and_independent():
    """Mean, variance, fourth moment, and correlation over neighbouring seeds and iterations, at six deviations."""
    n = 40_000
    draws = {(seed, t): draw_probes([torch.zeros(n)], seed, t)[0].double() for seed in (0, 1) for t in (0, 1, 2)}
    bound = 6 / math.sqrt(n)
    for v in draws.values():
        assert abs(v.mean()) < bound
        assert abs(v.square().mean() - 1) < bound * math.sqrt(2)
        assert abs(v.pow(4).mean() - 3) < bound * math.sqrt(96)
    values = list(draws.values())
    for i, v in enumerate(values):
        for w in values[i + 1 :]:
            assert abs((v * w).mean()) < bound


def test_seeds_share_no_stream():
    """A hundred seeds, ten million iterations: what the 32 bits of a generator's seed would mix up is kept apart."""
    starts = sorted(seed * 0x9E3779B1 % 2**32 for seed in range(100))
    gaps = [b - a for a, b in zip(starts, [*starts[1:], starts[0] + 2**32], strict=True)]
    assert min(gaps) > 10_000_000
    p = torch.zeros(4)
    seen = {tuple(draw_probes([p], seed, t)[0].tolist()) for seed in range(20) for t in range(20)}
    assert len(seen) == 400


# Products, against a Hessian in closed form


class Quartic:
    """f(x, y) = x^T A x / 2 + sum y^4 / 4 + (1^T x)(1^T y), and a parameter that it doesn't use."""

    def __init__(self) -> None:
        source = generator(2)
        root = torch.randn(3, 3, dtype=D, generator=source)
        self.A = root + root.T
        self.x, self.y = (torch.randn(n, dtype=D, generator=source).requires_grad_() for n in (3, 2))
        self.unused = torch.ones(2, dtype=D, requires_grad=True)
        self.params = [self.x, self.y, self.unused]
        self.probe = draw_probes(self.params, 0, 0)

    def loss(self) -> Tensor:
        return self.x @ self.A @ self.x / 2 + self.y.pow(4).sum() / 4 + self.x.sum() * self.y.sum()

    def backward(self, create_graph: bool) -> Tensor:
        loss = self.loss()
        loss.backward(create_graph=create_graph)
        return loss

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        x, y, (v, w, _) = self.x.detach(), self.y.detach(), self.probe
        gradient = [self.A @ x + y.sum(), y**3 + x.sum()]
        return gradient, [self.A @ v + w.sum(), 3 * y**2 * w + v.sum(), torch.zeros(2, dtype=D)]


def check(task: Quartic, found: Derivatives, product: bool, rtol: float = 1e-12) -> None:
    """Compare with the closed form; an unused parameter has gradient None and product zero."""
    gradient, expected = task.expected()
    for one, other in zip(found.gradient, gradient, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        assert not one.requires_grad
    assert len(found.gradient) == 3
    if not product:
        assert found.product is None
        return
    for h, other in zip(found.product, expected, strict=True):
        torch.testing.assert_close(h, other, rtol=rtol, atol=rtol)
        assert not h.requires_grad


@pytest.mark.parametrize("hvp", ["exact", "approx", "forward"])
@pytest.mark.parametrize("way", ["returns", "calls backward", "no closure"])
@pytest.mark.parametrize("due", [True, False])
def test_products_in_closed_form(hvp, way, due):
    """Gradient and product from each way that serves a kind, and the gradient alone from every way."""
    if due and way not in ways_of(hvp):
        return
    task = Quartic()
    task.unused.grad = torch.ones(2, dtype=D)  # left over from another loss
    probe = task.probe if due else None
    if way == "returns":
        found = closure_derivatives(task.loss, task.params, probe, hvp)
    elif way == "calls backward":
        closure = lambda: task.backward(create_graph=hvp == "exact")  # noqa: E731
        found = closure_derivatives(closure, task.params, probe, hvp)
    else:
        task.unused.grad = None
        task.backward(create_graph=True)
        found = stored_derivatives(task.params, probe, hvp)
    check(task, found, due, rtol=1e-2 if hvp == "approx" else 1e-12)
    assert found.gradient[2] is None, "an unused parameter has no gradient"
    if way == "no closure":
        assert found.loss is None
    else:
        torch.testing.assert_close(found.loss, task.loss().detach())
        assert not found.loss.requires_grad
    assert not any(p.grad is not None and p.grad.requires_grad for p in task.params)


@pytest.mark.parametrize("way", ["returns", "calls backward", "no closure"])
def test_whitening_takes_the_gradient_for_the_product(way):
    task = Quartic()
    if way == "no closure":
        task.backward(create_graph=False)
        found = stored_derivatives(task.params, task.probe, "whiten")
    else:
        closure = task.loss if way == "returns" else lambda: task.backward(create_graph=False)
        found = closure_derivatives(closure, task.params, task.probe, "whiten")
    gradient, _ = task.expected()
    for g, h, expected in zip(found.gradient, found.product, gradient, strict=False):
        torch.testing.assert_close(g, expected)
        assert torch.equal(g, h)
    assert found.gradient[2] is None
    assert not found.product[2].any()


def test_stored_gradients_let_their_graph_go():
    """Also when the product cannot be had."""
    for hvp in ("exact", "approx"):
        task = Quartic()
        task.backward(create_graph=True)
        if hvp == "approx":
            with pytest.raises(RuntimeError, match="Three ways"):
                stored_derivatives(task.params, task.probe, hvp)
        else:
            stored_derivatives(task.params, task.probe, hvp)
        assert not any(p.grad.requires_grad for p in task.params[:2])


def test_a_closure_may_return_a_number():
    """If it calls `backward`; the product by difference needs the value for nothing."""
    for hvp in ("approx", "whiten"):
        task = Quartic()
        found = closure_derivatives(
            lambda task=task: task.backward(create_graph=False).item(), task.params, task.probe, hvp
        )
        assert float(found.loss) == pytest.approx(task.loss().item())
        check(task, found._replace(product=None), product=False)


def test_a_closure_that_accumulates_backward_over_parts():
    """Each `backward` adds to `.grad`; the product is that of the sum."""
    task = Quartic()

    def closure() -> Tensor:
        parts = (0.25 * task.loss(), 0.75 * task.loss())
        for part in parts:
            part.backward(create_graph=True)
        return sum(parts)

    check(task, closure_derivatives(closure, task.params, task.probe, "exact"), product=True)


# What the loss is asked for


class Counting(torch.autograd.Function):
    """The square, which counts how often it is computed, differentiated, and differentiated twice."""

    counts: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counting.counts["forward"] += 1
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return CountingGradient.apply(x, g)


class CountingGradient(torch.autograd.Function):
    """The gradient of the square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        Counting.counts["gradient"] += 1
        ctx.save_for_backward(x, g)
        return 2 * x * g

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        Counting.counts["product"] += 1
        x, g = ctx.saved_tensors
        return 2 * g * u, 2 * x * u


@pytest.mark.parametrize(("hvp", "way"), [(hvp, way) for hvp in ("exact", "approx", "whiten") for way in ways_of(hvp)])
@pytest.mark.parametrize("every", [1, 4])
def test_the_work_of_a_step(hvp, way, every):
    """One product on a step that fits Q, none on the others; a difference takes one more gradient instead."""
    x = torch.ones(3, requires_grad=True)
    opt = PSGD([x], lr=0.01, hvp=hvp, update_every=every)
    dues = []
    for t in range(2 * every + 1):
        Counting.counts.clear()
        dues.append(opt.due)
        take(opt, lambda: Counting.apply(x).sum(), way)
        extra = dues[-1] and hvp == "approx"
        assert Counting.counts["forward"] == 1 + extra
        assert Counting.counts["gradient"] == 1 + extra
        assert Counting.counts["product"] == (dues[-1] and hvp == "exact")
        assert dues[-1] == (t % every == 0)


@pytest.mark.parametrize(("hvp", "way"), [(hvp, way) for hvp in HVP for way in ways_of(hvp)])
def test_running_statistics_move_once_a_step(hvp, way):
    """BatchNorm's, and closures are run once; only a difference of gradients runs them twice, when Q is due."""
    net = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    opt = PSGD(net.parameters(), lr=0.01, hvp=hvp, update_every=2)
    x = torch.randn(8, 3, generator=generator())
    for t in range(4):
        take(opt, lambda: net(x).square().mean(), way)
        extra = (t // 2 + 1) if hvp == "approx" else 0
        assert net[1].num_batches_tracked == t + 1 + extra


@pytest.mark.parametrize(("hvp", "way"), [(hvp, way) for hvp in HVP for way in ways_of(hvp)])
def test_dropout_is_one_function_within_a_step(hvp, way):
    """Two calls of a closure see the same mask; the user's stream moves as by one call."""
    net = nn.Sequential(fill(nn.Linear(3, 8)), nn.Dropout(0.5), fill(nn.Linear(8, 1), 1)).double()
    opt = PSGD(net.parameters(), lr=0.0, hvp=hvp)
    x = torch.randn(8, 3, generator=generator()).double()
    seen = []

    def loss() -> Tensor:
        seen.append(torch.get_rng_state())
        return net(x).square().mean()

    torch.random.default_generator.manual_seed(3)
    net(x)
    after = torch.get_rng_state()
    torch.random.default_generator.manual_seed(3)
    take(opt, loss, way)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(state, seen[0]) for state in seen)


# What a step uses


def test_a_factor_and_what_is_unused():
    """Gradient and product are scaled alike; a parameter without a gradient is left out of both."""
    p, q = torch.ones(2), torch.ones(3)
    found = Derivatives(None, [torch.full((2,), 3.0), None], [torch.full((2,), 5.0), torch.zeros(3)])
    v = [torch.ones(2), torch.ones(3)]
    gradient, pairs = used_derivatives([p, q], v, found, -0.5, None)
    assert list(gradient) == list(pairs) == [p]
    assert torch.equal(gradient[p], torch.full((2,), -1.5))
    assert torch.equal(pairs[p][0], v[0])
    assert torch.equal(pairs[p][1], torch.full((2,), -2.5))
    assert used_derivatives([p, q], None, found._replace(product=None), 1.0, None)[1] == {}


def test_sparse_gradients_are_refused():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        used_derivatives([torch.ones(3, 3)], None, Derivatives(None, [sparse], None), 1.0, None)


def test_the_scale_of_a_scaler():
    """None, a scale, and one that was taken out before: only then is a graph wrong."""
    assert amp_scale(SimpleNamespace(), differentiates=True) == 1.0
    scale = torch.tensor(8.0)
    assert amp_scale(SimpleNamespace(grad_scale=scale, found_inf=torch.tensor(0.0)), differentiates=True) is scale
    unscaled = SimpleNamespace(grad_scale=None, found_inf=torch.tensor(0.0))
    assert amp_scale(unscaled, differentiates=False) == 1.0
    with pytest.raises(RuntimeError, match="max_norm"):
        amp_scale(unscaled, differentiates=True)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


def test_a_closure_that_raises_leaves_all_as_it_was():
    """Also in the middle of a difference, with parameters moved: they come back bit for bit."""
    for hvp in HVP:
        net = fill(network(), scale=1e-4)  # below the step, so that what is added can't be taken away again
        before = weights(net)
        opt = PSGD(net.parameters(), lr=0.1, hvp=hvp)
        moved = []

        def closure(net: nn.Module = net, before: list[Tensor] = before, moved: list[bool] = moved) -> Tensor:
            moved.append(not same(before, weights(net)))
            raise RuntimeError("the data ran out")

        assert "the data ran out" in error_of(lambda opt=opt, closure=closure: opt.step(closure))
        assert same(before, weights(net))
        assert moved == [hvp == "approx"]
        assert opt.param_groups[0]["t"] == 0
        assert not opt.state
