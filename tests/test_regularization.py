"""Damping and clipping: what they promise beside their value, over shapes, dtypes, sizes and devices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from psgd_lit.criterion import optimal_preconditioner
from psgd_lit.groups.diagonal import Diagonal, Equilibration
from psgd_lit.groups.fit import learn, start
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.protocol import Group
from psgd_lit.groups.triangular import Triangular
from psgd_lit.problems import with_spectrum
from psgd_lit.regularization import DAMPING_KINDS, clip_factor, damp

seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
dampings = st.floats(1e-6, 1e3)
every_kind = pytest.mark.parametrize("kind", DAMPING_KINDS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def draws(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """A product, a probe and noise for parameters of these shapes."""
    generator = seeded(seed)
    return [[normal(*shape, generator=generator, dtype=dtype) for shape in shapes] for _ in range(3)]


class NoReading(TorchDispatchMode):
    """Fails when an operation hands a value to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        return func(*args, **(kwargs or {}))


# Damping ---------------------------------------------------------------------------------------------------------


@given(
    shapes=shapes,
    dtype=dtypes,
    seed=seeds,
    damping=dampings,
    kind=st.sampled_from(DAMPING_KINDS),
)
@settings(max_examples=examples(60), deadline=None)
def test_damp_adds_the_named_vector(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int, damping: float, kind: str
) -> None:
    product, probe, noise = draws(shapes, seed, dtype)
    before = [x.clone() for x in (*product, *probe, *noise)]
    damped = damp(product, probe, noise, damping, kind)
    added = {"traditional": probe, "nonconvex": noise}[kind]
    for new, h, x in zip(damped, product, added, strict=True):
        assert (new.dtype, new.shape) == (dtype, h.shape)
        exact = h.double() + damping * x.double()
        size = h.double().abs() + damping * x.double().abs()
        assert ((new.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * size).all()
    assert all(torch.equal(x, y) for x, y in zip((*product, *probe, *noise), before, strict=True))


@every_kind
def test_no_damping_gives_back_what_it_was_given(kind: str) -> None:
    product, probe, noise = draws([(2, 3), ()], 0, torch.float32)
    assert damp(product, probe, noise, 0.0, kind) is product
    assert damp(product, probe, noise, 0, kind) is product


def test_each_kind_reads_only_its_own_vector() -> None:
    product, probe, noise = draws([(3,)], 0, torch.float32)
    nothing = [torch.full((3,), torch.nan)]
    assert damp(product, nothing, noise, 0.1, "nonconvex")[0].isfinite().all()
    assert damp(product, probe, nothing, 0.1, "traditional")[0].isfinite().all()
    assert torch.equal(damp(product, probe, noise, 0.1)[0], damp(product, probe, noise, 0.1, "nonconvex")[0])


@pytest.mark.parametrize("damping", [-1e-9, math.nan, math.inf, -math.inf])
def test_damping_out_of_range_is_refused(damping: float) -> None:
    x = [torch.ones(1)]
    with pytest.raises(ValueError, match="damping must be at least 0 and finite"):
        damp(x, x, x, damping)


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_unknown_kind_is_refused_with_the_names(damping: float) -> None:
    x = [torch.ones(1)]
    with pytest.raises(ValueError, match="nonconvex, traditional, not 'Traditional'"):
        damp(x, x, x, damping, "Traditional")


def test_parameters_must_match() -> None:
    x = [torch.ones(1)]
    with pytest.raises(RuntimeError, match="same number of tensors"):
        damp(x, x, [*x, *x], 0.1)


@every_kind
def test_damp_on_another_device_reads_and_moves_nothing(kind: str) -> None:
    one, other = (
        torch.empty(2, 3, device="meta"),
        torch.empty(4, device="meta", dtype=torch.float16),
    )
    damped = damp([one, other], [one, other], [one, other], 0.1, kind)
    assert [(x.device.type, x.dtype, x.shape) for x in damped] == [
        ("meta", torch.float32, (2, 3)),
        ("meta", torch.float16, (4,)),
    ]


@given(seed=seeds, damping=st.floats(0.01, 10), n=st.integers(1, 5))
@settings(max_examples=examples(30), deadline=None)
def test_nonconvex_damping_never_raises_p(seed: int, damping: float, n: int) -> None:
    """With any Hessian the damped optimum is below both 1 / lambda and the undamped one."""
    generator = seeded(seed)
    H = with_spectrum(normal(n, generator=generator), generator=generator)
    identity = torch.eye(n, dtype=torch.float64)
    P = optimal_preconditioner(H @ H + damping**2 * identity)
    assert torch.linalg.eigvalsh(P)[-1] <= (1 + 1e-9) / damping
    slight = optimal_preconditioner(H @ H + (damping / 2) ** 2 * identity)
    assert torch.linalg.eigvalsh(slight - P)[0] > -1e-9 / damping


@every_kind
@pytest.mark.parametrize(
    "group",
    [Triangular(), Diagonal(), Equilibration(), Kron(Triangular(), Diagonal())],
    ids=repr,
)
def test_a_dead_block_learns_one_over_damping(group: Group, kind: str) -> None:
    """Undamped it keeps its start; damped it comes to 1 / lambda, for every group and in float32."""
    source, shape = seeded(0), group.shape_for((2, 2))
    Q = group.init(shape)
    still = start(group, Q)
    for _ in range(600):
        v, u = torch.randn(2, 4, 8, generator=source)
        h = torch.zeros(4, 8)
        still = learn(group, still, v, h, 0.02)
        Q = group.update(Q, v, damp([h], [v], [u], 0.25, kind)[0], 0.02)
    assert torch.equal(group.matrix(still.Q), torch.eye(4))
    P = group.matrix(Q).mT @ group.matrix(Q)
    torch.testing.assert_close(P, 4 * torch.eye(4), rtol=0.2, atol=0.8)


def test_only_traditional_damping_has_a_pole() -> None:
    """A millionth away from the curvature -lambda, P reaches a million over lambda."""
    source, group = seeded(0), Diagonal()
    found = {}
    for kind in DAMPING_KINDS:
        Q, history = group.init(1, dtype=torch.float64), []
        for _ in range(2000):
            v, u = torch.randn(2, 1, 16, dtype=torch.float64, generator=source)
            Q = group.update(Q, v, damp([-(1 + 1e-6) * v], [v], [u], 1.0, kind)[0], 0.01)
            history.append(group.diagonal(Q).square())
        found[kind] = torch.stack(history[-1000:]).log().mean().exp().item()
    assert found["traditional"] == pytest.approx(1e6, rel=0.05)
    assert found["nonconvex"] == pytest.approx(0.5**0.5, rel=0.05)


# Clipping --------------------------------------------------------------------------------------------------------


@given(shapes=shapes, dtype=dtypes, seed=seeds, max_norm=st.floats(1e-3, 1e3))
@settings(max_examples=examples(80), deadline=None)
def test_factor_is_the_ratio_of_norms(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int, max_norm: float
) -> None:
    tensors, *_ = draws(shapes, seed, dtype)
    norm = math.sqrt(sum(x.double().square().sum().item() for x in tensors))
    factor = clip_factor(tensors, max_norm)
    wide = torch.promote_types(dtype, torch.float32)
    assert (factor.dtype, factor.shape) == (wide, ())
    exact = min(1.0, max_norm / norm) if norm else 1.0
    assert factor.item() == pytest.approx(exact, rel=10 * torch.finfo(wide).eps)
    assert 0 < factor <= 1


def test_tensors_without_entries_or_length_are_not_clipped() -> None:
    assert clip_factor([torch.zeros(3)], 1e-30) == 1
    assert clip_factor([torch.zeros(0), torch.zeros(2, 0)], 1.0) == 1


def test_dtypes_mix_and_the_widest_counts() -> None:
    tensors = [
        torch.tensor([3.0]).half(),
        torch.tensor(4.0),
        torch.tensor([12.0], dtype=torch.float64),
    ]
    factor = clip_factor(tensors, 1.0)
    assert factor.dtype == torch.float64
    assert factor == 1 / 13


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_precision_may_exceed_it(dtype: torch.dtype) -> None:
    """The norm of 2^20 entries of 2^9 is 2^19, beyond float16."""
    assert clip_factor([torch.full((2**20,), 2.0**9, dtype=dtype)], 2.0**16) == 2.0**-3


def test_a_norm_that_overflows_drops_the_step_and_not_the_run() -> None:
    huge = torch.full((2,), 1e30)
    assert clip_factor([huge], math.inf) == clip_factor([huge], 1.0) == 0


def test_nan_is_not_hidden() -> None:
    assert clip_factor([torch.ones(2), torch.tensor([torch.nan])], 1.0) == 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_threshold_out_of_range_is_refused(max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm must be positive"):
        clip_factor([torch.ones(1)], max_norm)


@given(seed=seeds, power=st.integers(-60, 60))
@settings(max_examples=examples(30), deadline=None)
def test_factor_is_free_of_units(seed: int, power: int) -> None:
    """Measured in other units, step and threshold together, the factor keeps its bits."""
    tensors, *_ = draws([(3, 2), (4,)], seed, torch.float64)
    scale = 2.0**power
    assert clip_factor([scale * x for x in tensors], 0.5 * scale) == clip_factor(tensors, 0.5)


def test_clipping_reads_nothing_on_the_host_and_keeps_the_device() -> None:
    tensors = [
        torch.empty(2, device="meta"),
        torch.empty(3, device="meta", dtype=torch.float64),
    ]
    factor = clip_factor(tensors, 1.0)
    assert (factor.device.type, factor.dtype) == ("meta", torch.float64)
    with NoReading():
        clip_factor([torch.ones(2), torch.ones(3)], 1.0)
        damp([torch.ones(2)], [torch.ones(2)], [torch.ones(2)], 0.1)
    with pytest.raises(AssertionError, match="the host reads"), NoReading():
        torch.ones(1).item()
