"""The test functions of optimization: written once more, number by number, and against what was published of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError

import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor

from psgd_lit.experiments.functions import (
    BROWN_BADLY_SCALED,
    HELICAL_VALLEY,
    MORE_GARBOW_HILLSTROM,
    TRIGONOMETRIC,
    SumOfSquares,
    extended_rosenbrock,
)

FUNCTIONS = (extended_rosenbrock(6), *MORE_GARBOW_HILLSTROM)
EVERY = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)


def start_of(function: SumOfSquares) -> Tensor:
    return torch.tensor(function.start, dtype=torch.float64)


def near_start(function: SumOfSquares, seed: int, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*batch, len(function.start), dtype=dtype, generator=generator)
    return start_of(function).to(dtype) + noise


# Values ----------------------------------------------------------------------------------------------------------


def rosenbrock(x: Sequence[float]) -> float:
    return sum(100 * (x[i + 1] - x[i] ** 2) ** 2 + (1 - x[i]) ** 2 for i in range(0, len(x), 2))


def brown(x: Sequence[float]) -> float:
    return (x[0] - 1e6) ** 2 + (x[1] - 2e-6) ** 2 + (x[0] * x[1] - 2) ** 2


def beale(x: Sequence[float]) -> float:
    return sum((y - x[0] * (1 - x[1] ** i)) ** 2 for i, y in enumerate((1.5, 2.25, 2.625), 1))


def helical(x: Sequence[float]) -> float:
    theta = math.atan(x[1] / x[0]) / (2 * math.pi) + (0.5 if x[0] < 0 else 0.0)
    return 100 * (x[2] - 10 * theta) ** 2 + 100 * (math.sqrt(x[0] ** 2 + x[1] ** 2) - 1) ** 2 + x[2] ** 2


def powell(x: Sequence[float]) -> float:
    return (x[0] + 10 * x[1]) ** 2 + 5 * (x[2] - x[3]) ** 2 + (x[1] - 2 * x[2]) ** 4 + 10 * (x[0] - x[3]) ** 4


def wood(x: Sequence[float]) -> float:
    first = 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
    second = 90 * (x[3] - x[2] ** 2) ** 2 + (1 - x[2]) ** 2
    return first + second + 10 * (x[1] + x[3] - 2) ** 2 + (x[1] - x[3]) ** 2 / 10


def variably_dimensioned(x: Sequence[float]) -> float:
    s = sum(j * (xj - 1) for j, xj in enumerate(x, 1))
    return sum((xj - 1) ** 2 for xj in x) + s**2 + s**4


def trigonometric(x: Sequence[float]) -> float:
    cosines = sum(map(math.cos, x))
    return sum((len(x) - cosines + i * (1 - math.cos(xi)) - math.sin(xi)) ** 2 for i, xi in enumerate(x, 1))


def broyden(x: Sequence[float]) -> float:
    y = [0.0, *x, 0.0]
    return sum(((3 - 2 * y[i]) * y[i] - y[i - 1] - 2 * y[i + 1] + 1) ** 2 for i in range(1, len(x) + 1))


WRITTEN_AGAIN: dict[str, Callable[[Sequence[float]], float]] = {
    "extended Rosenbrock": rosenbrock,
    "Brown badly scaled": brown,
    "Beale": beale,
    "helical valley": helical,
    "Powell singular": powell,
    "Wood": wood,
    "variably dimensioned": variably_dimensioned,
    "trigonometric": trigonometric,
    "Broyden tridiagonal": broyden,
}


@EVERY
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(25), deadline=None)
def test_values_agree_with_plain_numbers(function: SumOfSquares, seed: int) -> None:
    x = near_start(function, seed)
    assert function(x).item() == pytest.approx(WRITTEN_AGAIN[function.name](x.tolist()), rel=1e-10)


@EVERY
@pytest.mark.parametrize("batch", [(), (0,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_and_dtypes(function: SumOfSquares, batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = near_start(function, 0, *batch, dtype=dtype)
    values = function(x)
    assert values.shape == batch
    assert values.dtype == dtype
    for point, value in zip(x.reshape(-1, x.shape[-1]), values.reshape(-1), strict=True):
        torch.testing.assert_close(function(point), value, rtol=1e-5, atol=0)


@EVERY
def test_made_on_the_device_of_the_points(function: SumOfSquares) -> None:
    assert function(torch.empty(2, len(function.start), device="meta")).shape == (2,)


# Minima ----------------------------------------------------------------------------------------------------------


@EVERY
def test_minimum_is_zero_stationary_and_a_minimum(function: SumOfSquares) -> None:
    if function.minimiser is None:
        pytest.skip("no closed form; the next test finds it")
    x = torch.tensor(function.minimiser, dtype=torch.float64)
    assert function(x) < 1e-25
    assert torch.func.grad(function)(x).abs().max() < 1e-9
    eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(function, x))
    assert eigenvalues.min() > -1e-12 * eigenvalues.max()


@EVERY
def test_least_squares_finds_the_published_minimum_from_the_start(
    function: SumOfSquares,
) -> None:
    """Levenberg and Marquardt's method, which is given the residuals, reaches the value that the collection lists."""
    found = scipy.optimize.least_squares(
        lambda x: function.residuals(torch.from_numpy(x)).numpy(),
        start_of(function).numpy(),
        jac=lambda x: torch.func.jacrev(function.residuals)(torch.from_numpy(x)).numpy(),
        method="lm",
        x_scale="jac",
        ftol=1e-15,
        xtol=1e-15,
        gtol=1e-15,
        max_nfev=2000,
    )
    value = function(torch.from_numpy(found.x)).item()
    if function is TRIGONOMETRIC:
        assert value < 1e-18 or value == pytest.approx(2.79506e-5, rel=1e-5)
    else:
        assert value < 1e-18


def test_trigonometric_has_its_published_local_minimum() -> None:
    found = scipy.optimize.minimize(
        lambda x: TRIGONOMETRIC(torch.from_numpy(x)).item(),
        start_of(TRIGONOMETRIC).numpy(),
        jac=lambda x: torch.func.grad(TRIGONOMETRIC)(torch.from_numpy(x)).numpy(),
        method="BFGS",
        options={"gtol": 1e-10},
    )
    x = torch.from_numpy(found.x)
    assert found.fun == pytest.approx(2.79506e-5, rel=1e-5)
    assert torch.linalg.eigvalsh(torch.autograd.functional.hessian(TRIGONOMETRIC, x)).min() > 0


# Shape -----------------------------------------------------------------------------------------------------------


def test_helical_valley_jumps_on_the_negative_second_axis_only() -> None:
    def jump(angle: float) -> float:
        sides = [[math.cos(angle + d), math.sin(angle + d), 0.0] for d in (-1e-9, 1e-9)]
        return abs(HELICAL_VALLEY(torch.tensor(sides, dtype=torch.float64)).diff().item())

    assert all(jump(degrees * math.pi / 180) < 1e-3 for degrees in range(-60, 241, 30))
    assert jump(-math.pi / 2) > 1000


def test_brown_badly_scaled_spans_many_orders() -> None:
    best = torch.tensor(BROWN_BADLY_SCALED.minimiser, dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(torch.autograd.functional.hessian(BROWN_BADLY_SCALED, best))
    assert eigenvalues.max() > 1e11 * eigenvalues.min()


@pytest.mark.parametrize("n", [-2, 0, 1, 3])
def test_rosenbrock_needs_pairs(n: int) -> None:
    with pytest.raises(ValueError, match=f"n is {n}"):
        extended_rosenbrock(n)


def test_a_function_is_a_value() -> None:
    """It can't be changed, and names, starts and minimisers fit together."""
    with pytest.raises(FrozenInstanceError):
        HELICAL_VALLEY.name = "other"  # type: ignore[misc]
    assert len({function.name for function in FUNCTIONS}) == len(FUNCTIONS) == len(WRITTEN_AGAIN)
    assert all(f.minimiser is None or len(f.minimiser) == len(f.start) for f in FUNCTIONS)
