"""What a step knows of the loss: probes, gradients and products, from closures of both kinds and from `.grad`."""

import copy
import math
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from toys import (
    HVP,
    batch,
    fill,
    generator,
    loss_of,
    network,
    quiet,
    same,
    states,
    take,
    ways_of,
    weights,
)

from psgd_lit.closures import histories
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
    for other in (
        draw_probes([p, q], 2, 2)[0],
        draw_probes([p, q], 1, 3)[0],
        draw_probes([q, p], 1, 2)[1],
    ):
        assert not torch.equal(first[0], other)


def test_probes_fit_their_parameters():
    """In shape and dtype, also complex, half, empty and single ones."""
    kinds = [
        torch.zeros(3, 2, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, D, torch.complex64, torch.complex128)
    ]
    kinds += [
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
    ]
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
    probe = task.probe if due else None
    if way == "returns":
        task.unused.grad = torch.ones(2, dtype=D)  # left over from another loss
        found = closure_derivatives(task.loss, task.params, probe, hvp)
    elif way == "calls backward":
        closure = lambda: task.backward(create_graph=hvp == "exact")  # noqa: E731
        found = closure_derivatives(closure, task.params, probe, hvp)
    else:
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
            lambda task=task: task.backward(create_graph=False).item(),
            task.params,
            task.probe,
            hvp,
        )
        assert float(found.loss) == pytest.approx(task.loss().item())
        check(task, found._replace(product=None), product=False)


# Gradients that belong to the user


@pytest.mark.parametrize("clears", ["not", "to None", "to zero"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("before", ["nothing", "constants", "part"])
@pytest.mark.parametrize(("hvp", "due"), [("exact", True), ("exact", False), ("approx", True), ("whiten", True)])
def test_what_a_closure_leaves_in_grad_is_left(clears, create_graph, before, hvp, due):
    """Object and values as after one call without an optimizer; a gradient is the sum that stands there."""
    if hvp == "exact" and due and not create_graph:
        return
    task = Quartic()
    histories(task.params)

    def closure() -> Tensor:
        for p in task.params:
            if clears == "to None":
                p.grad = None
            elif clears == "to zero" and p.grad is not None:
                p.grad.detach_().zero_()
        return task.backward(create_graph=create_graph)

    def prepare() -> list[Tensor | None]:
        for p in task.params:
            p.grad = torch.full_like(p, 3.0) if before == "constants" else None
        if before == "part":
            (2 * task.loss()).backward(create_graph=create_graph)
        return [p.grad for p in task.params]

    given = prepare()
    with quiet():
        closure()
    expected = [None if p.grad is None else p.grad.detach().clone() for p in task.params]
    same_object = [p.grad is g for p, g in zip(task.params, given, strict=True)]
    given = prepare()
    found = closure_derivatives(closure, task.params, task.probe if due else None, hvp)
    for p, g, values, kept in zip(task.params, given, expected, same_object, strict=True):
        assert (p.grad is None) == (values is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, values, rtol=1e-12, atol=1e-12)
            assert not p.grad.requires_grad
            assert p.grad is g or not kept
    for g, values in zip(found.gradient, expected, strict=True):
        assert (g is None) == (values is None)
        assert g is None or torch.allclose(g, values, rtol=1e-12)
    if hvp == "approx":
        check(task, found._replace(gradient=[*task.expected()[0], None]), product=True, rtol=1e-2)
    elif hvp == "exact" and due:
        share = 3 if before == "part" and clears == "not" else 1
        for h, other in zip(found.product, task.expected()[1], strict=True):
            torch.testing.assert_close(h, share * other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hvp", HVP)
@pytest.mark.parametrize("due", [True, False])
def test_a_closure_without_backward_leaves_grad_alone(hvp, due):
    task = Quartic()
    given = []
    for p in task.params:
        p.grad = torch.full_like(p, 3.0)
        given.append((p.grad, p.grad._version))
    check(task, closure_derivatives(task.loss, task.params, None, hvp), product=False)
    closure_derivatives(task.loss, task.params, task.probe if due else None, hvp)
    for p, (g, version) in zip(task.params, given, strict=True):
        assert p.grad is g
        assert g._version == version


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
def test_micro_batches_are_one_batch(hvp):
    """The last of four goes through the step, as in trainers that accumulate; so does the whole batch."""

    def train(parts: int) -> list[Tensor]:
        net = network(D)
        opt = PSGD(
            net.parameters(),
            lr=0.1,
            hvp=hvp,
            lr_preconditioner=1e-9 if hvp == "approx" else 0.01,
            init_scale=1.0,
        )
        for _ in range(3):
            for i in range(parts):
                rows = slice(32 // parts * i, 32 // parts * (i + 1))

                def closure(i: int = i, rows: slice = rows) -> Tensor:
                    if i == 0:
                        opt.zero_grad()
                    loss = loss_of(net, rows) / parts
                    loss.backward(create_graph=hvp == "exact")
                    return loss

                opt.step(closure) if i == parts - 1 else closure()
        return weights(net)

    torch.testing.assert_close(train(4), train(1), rtol=1e-9 if hvp != "approx" else 1e-7, atol=1e-9)


def test_a_difference_does_not_contain_what_stood_in_grad():
    """A gradient a billion times larger, from before, doesn't round the difference away."""
    task = Quartic()
    for p in task.params:
        p.grad = torch.full_like(p, 1e12)
    found = closure_derivatives(lambda: task.backward(create_graph=False), task.params, task.probe, "approx")
    for h, other in zip(found.product, task.expected()[1], strict=True):
        torch.testing.assert_close(h, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("hvp", ["approx", "forward"])
def test_an_error_in_a_difference_leaves_grad_as_it_was(hvp):
    task = Quartic()
    task.x.grad = given = torch.ones(3, dtype=D)

    def closure() -> Tensor:
        task.backward(create_graph=False)
        raise RuntimeError("the data ran out")

    with pytest.raises(RuntimeError, match="the data ran out"):
        closure_derivatives(closure, task.params, task.probe, hvp)
    assert task.x.grad is given
    assert torch.equal(given, torch.ones(3, dtype=D))
    assert task.y.grad is None


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda w: (ROWS @ w).mean(),
    "hinge": lambda w: (1 - ROWS @ w).clamp(min=0).mean(),
    "absolute": lambda w: (ROWS @ w).abs().mean(),
}
ROWS = torch.randn(16, 4, dtype=D, generator=generator(5))


@pytest.mark.parametrize("loss", LINEAR)
@pytest.mark.parametrize("way", ["calls backward", "backward before", "by hand"])
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_constant_gradient_has_product_zero(loss, way, create_graph):
    """If its graph was asked for; without, nobody knows whether it is constant."""
    w = torch.ones(4, dtype=D, requires_grad=True)
    opt, before = PSGD([w], lr=0.1, init_scale=1.0), w.detach().clone()

    def closure() -> Tensor:
        opt.zero_grad()
        value = LINEAR[loss](w)
        if way == "by hand":
            (w.grad,) = torch.autograd.grad(value, [w], create_graph=create_graph)
        else:
            value.backward(create_graph=create_graph)
        return value

    if way == "backward before":
        closure()
    step = opt.step if way == "backward before" else lambda: opt.step(closure)
    if create_graph:
        step()
        assert not torch.equal(w, before)
        for leaf in states(opt):
            assert torch.equal(leaf, torch.eye(leaf.shape[-1], dtype=leaf.dtype).expand_as(leaf))
        return
    with pytest.raises(RuntimeError, match=r"(?s)create_graph=True in every backward.*Three ways"):
        step()
    assert torch.equal(w, before)


def test_a_part_without_its_graph_is_noticed():
    """The product of the sum can't be had from a part; a gradient that was cleared in between is no part."""
    for clears in ("not", "to None", "to zero"):
        task = Quartic()
        histories(task.params)
        task.backward(create_graph=False)
        for p in task.params[:2]:
            p.grad = None if clears == "to None" else p.grad
            p.grad = p.grad.zero_() if clears == "to zero" else p.grad
        task.backward(create_graph=True)
        if clears == "not":
            with pytest.raises(RuntimeError, match=r"zero_grad\(\) before the first"):
                stored_derivatives(task.params, task.probe, "exact")
        else:
            check(task, stored_derivatives(task.params, task.probe, "exact"), product=True)


def test_histories_don_t_keep_a_parameter_and_are_not_copied():
    p = nn.Parameter(torch.ones(3))
    (history,) = histories([p])
    for twin in (
        copy.deepcopy(p),
        pickle.loads(pickle.dumps(p)),
        p.detach().clone().requires_grad_(),
    ):
        assert histories([twin]) != [history]
        assert len(twin._backward_hooks) == 1
    assert histories([p]) == [history]
    gone, watched = weakref.ref(p), weakref.ref(history)
    del p, history, twin
    assert gone() is None
    assert watched() is None


@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
@pytest.mark.parametrize("answer", [None, {"loss": 1.0}, (1.0, "more"), 2.5])
def test_a_closure_that_calls_backward_may_return_anything(hvp, answer):
    """It is handed back as it is."""
    net = network()
    opt = PSGD(net.parameters(), lr=0.1, hvp=hvp, update_every=2, init_scale=1.0)
    for _ in range(2):
        before = weights(net)

        def closure() -> Any:
            opt.zero_grad()
            loss_of(net).backward(create_graph=hvp == "exact")
            return answer

        assert opt.step(closure) is answer
        assert not same(before, weights(net))


@pytest.mark.parametrize("hvp", HVP)
@pytest.mark.parametrize("way", ["returns", "calls backward"])
def test_a_loss_of_other_parameters_is_an_error(hvp, way):
    """The model was made again, say; nothing has changed then. Without gradients at all a plain step does nothing."""
    net, other = network(), network(seed=1)
    opt, before = PSGD(net.parameters(), lr=0.1, weight_decay=0.1, hvp=hvp), weights(net)
    assert opt.step() is None
    with pytest.raises((RuntimeError, ValueError), match=r"none of the optimizer's 4 trainable|ran backward"):
        take(opt, lambda: loss_of(other), way)
    assert same(before, weights(net))
    assert opt.param_groups[0]["t"] == 0
    assert not opt.state
    take(opt, lambda: loss_of(net), way if way in ways_of(hvp) else "returns")
    assert not same(before, weights(net))


@pytest.mark.parametrize("hvp", HVP)
@pytest.mark.parametrize("part", ["loss", "prediction", "penalty"])
@pytest.mark.parametrize("linear", [True, False])
def test_a_loss_from_outside_the_closure(hvp, part, linear):
    """Exact products differentiate the graph that is there; the others need the loss at another point."""
    net = fill(nn.Linear(4, 2)) if linear else network()
    opt, before = PSGD(net.parameters(), lr=0.1, hvp=hvp, init_scale=1.0), weights(net)
    x, y = batch()
    prediction, penalty = net(x), sum(p.square().sum() for p in net.parameters())
    loss = (prediction - y).square().mean()
    closure = {
        "loss": lambda: loss,
        "prediction": lambda: (prediction - y).square().mean(),
        "penalty": lambda: (net(x) - y).square().mean() + penalty,
    }[part]
    if hvp in ("exact", "whiten"):
        opt.step(closure)
        assert not same(before, weights(net))
        return
    with pytest.raises(ValueError, match=r"before the closure ran.*compute all of it in the closure"):
        opt.step(closure)
    assert same(before, weights(net))
    assert opt.param_groups[0]["t"] == 0


@pytest.mark.parametrize("hvp", ["approx", "forward"])
def test_losses_that_are_kept_and_other_models_are_no_part_of_a_loss(hvp):
    """A list of old losses, features of another model, a linear loss: all that is inside is inside."""
    net, teacher = network(), network(seed=2)
    opt, kept = PSGD(net.parameters(), lr=0.01, hvp=hvp), []
    features = teacher(batch()[0])

    def closure() -> Tensor:
        kept.append((net(batch()[0]) * features).mean())
        return kept[-1]

    for _ in range(3):
        opt.step(closure)
    assert len(kept) >= 3


# Closures that are not one function


@pytest.mark.parametrize("kind", ["own data", "own dropout", "spectral norm"])
@pytest.mark.parametrize("way", ["returns", "calls backward"])
def test_a_closure_that_is_another_function_at_each_call(kind, way):
    """A difference of gradients says so once, and the step is taken; an exact product has no need to."""
    source = generator()
    layer = nn.Linear(32, 64)
    fill(layer, scale=0.3)
    if kind == "spectral norm":
        with torch.random.fork_rng([]):
            torch.random.default_generator.manual_seed(0)
            layer = nn.utils.parametrizations.spectral_norm(layer)
    net = nn.Sequential(layer, nn.Tanh(), fill(nn.Linear(64, 2)))
    x, y = (torch.randn(64, n, generator=generator(3)) for n in (32, 2))

    def loss() -> Tensor:
        data = torch.randn(64, 32, generator=source) if kind == "own data" else x
        mask = torch.rand(64, 32, generator=source) > 0.5 if kind == "own dropout" else 1.0
        return (net(data * mask) - y).square().mean()

    before = weights(net)
    opt = PSGD(net.parameters(), lr=1e-3, hvp="approx")
    with pytest.warns(UserWarning, match=r'same point give different gradients.*hvp="exact"') as caught:
        take(opt, loss, way)
    assert [Path(w.filename).name for w in caught] == ["toys.py"]
    take(opt, loss, way)
    assert not same(before, weights(net))
    take(PSGD(net.parameters(), lr=1e-3), loss, way)


def test_a_closure_that_is_one_function_is_not_suspected():
    """With torch's dropout, batch statistics, kinks, no curvature at all, and in single precision."""
    stack = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2))
    for net in (fill(stack), fill(nn.Linear(4, 2))):
        x, y = batch()
        PSGD(net.parameters(), lr=0.01, hvp="approx").step(lambda net=net, x=x, y=y: (net(x) - y).abs().mean())


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


@pytest.mark.parametrize(
    ("hvp", "way"),
    [(hvp, way) for hvp in ("exact", "approx", "whiten") for way in ways_of(hvp)],
)
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
        extra = (dues[-1] + (t == 0)) if hvp == "approx" else 0  # the first difference is looked at again
        assert Counting.counts["forward"] == 1 + extra
        assert Counting.counts["gradient"] == 1 + extra
        assert Counting.counts["product"] == (dues[-1] and hvp == "exact")
        assert dues[-1] == (t % every == 0)


@pytest.mark.parametrize(("hvp", "way"), [(hvp, way) for hvp in HVP for way in ways_of(hvp)])
def test_running_statistics_move_once_a_step(hvp, way):
    """Closures are run once, and BatchNorm sees it; a difference of gradients runs them twice, at first three times."""
    net = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    opt = PSGD(net.parameters(), lr=0.01, hvp=hvp, update_every=2)
    x = torch.randn(8, 3, generator=generator())
    for t in range(4):
        take(opt, lambda: net(x).square().mean(), way)
        extra = (t // 2 + 2) if hvp == "approx" else 0
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
    fine = torch.tensor(False)
    gradient, pairs, bad = used_derivatives([p, q], v, found, -0.5, None, fine)
    assert list(gradient) == list(pairs) == [p]
    assert torch.equal(gradient[p], torch.full((2,), -1.5))
    assert torch.equal(pairs[p][0], v[0])
    assert torch.equal(pairs[p][1], torch.full((2,), -2.5))
    assert bad is fine
    assert used_derivatives([p, q], None, found._replace(product=None), 1.0, None, fine)[1] == {}


def test_sparse_gradients_are_refused():
    found = Derivatives(None, [torch.eye(3).to_sparse()], None)
    with pytest.raises(RuntimeError, match="sparse=False"):
        used_derivatives([torch.ones(3, 3)], None, found, 1.0, None, torch.tensor(False))


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
    for hvp, last in {"exact": 1, "approx": 2, "forward": 1, "whiten": 1}.items():
        net = fill(network(), scale=1e-4)  # below the step, so that what is added can't be taken away again
        before = weights(net)
        opt = PSGD(net.parameters(), lr=0.1, hvp=hvp)
        calls = []

        def closure(
            net: nn.Module = net,
            before: list[Tensor] = before,
            calls: list[bool] = calls,
            last: int = last,
        ) -> Tensor:
            calls.append(not same(before, weights(net)))
            if len(calls) < last:
                return loss_of(net)
            raise RuntimeError("the data ran out")

        assert "the data ran out" in error_of(lambda opt=opt, closure=closure: opt.step(closure))
        assert same(before, weights(net))
        assert calls == [False, True][:last]
        assert opt.param_groups[0]["t"] == 0
        assert not opt.state
