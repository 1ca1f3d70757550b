"""Properties of the test problems that the chapter states, over sizes, dtypes and seeds."""

from dataclasses import FrozenInstanceError

import pytest
import scipy.optimize
import scipy.stats
import torch
from expressions import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor

from psgd_lit.problems import (
    NoisyHessian,
    Quadratic,
    random_orthogonal,
    rosenbrock,
    with_spectrum,
)

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 7)
dtypes = st.sampled_from([torch.float32, torch.float64])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to a hundred units of rounding, relative to the largest entry."""
    assert actual.dtype == expected.dtype
    tolerance = 100 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


# ----------------------------------------------------------------------------------------------------------- Rosenbrock


@given(n=st.integers(2, 9), seed=seeds)
@settings(max_examples=examples(25), deadline=None)
def test_rosenbrock_and_its_derivatives_agree_with_scipy(n: int, seed: int) -> None:
    x, p = normal(2, n, seed=seed)
    close(rosenbrock(x), torch.tensor(scipy.optimize.rosen(x.numpy())))
    close(torch.func.grad(rosenbrock)(x), torch.from_numpy(scipy.optimize.rosen_der(x.numpy())))
    _, product = torch.autograd.functional.hvp(rosenbrock, x, p)
    close(product, torch.from_numpy(scipy.optimize.rosen_hess_prod(x.numpy(), p.numpy())))


@given(batch=st.lists(st.integers(0, 3), max_size=3), n=st.integers(2, 5), dtype=dtypes)
@settings(max_examples=examples(25), deadline=None)
def test_rosenbrock_takes_batches_and_keeps_the_dtype(batch: list[int], n: int, dtype: torch.dtype) -> None:
    x = normal(*batch, n, seed=0, dtype=dtype)
    values = rosenbrock(x)
    assert values.shape == tuple(batch)
    assert values.dtype == dtype
    for one, value in zip(x.reshape(-1, n), values.reshape(-1), strict=True):
        close(rosenbrock(one), value)
    assert not rosenbrock(torch.ones(*batch, n, dtype=dtype)).any()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4, 1)])
def test_rosenbrock_refuses_fewer_than_two_coordinates(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two coordinates"):
        rosenbrock(torch.ones(shape))


# ------------------------------------------------------------------------------------------------ rotations and spectra


@given(
    n=sizes,
    seed=seeds,
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
@settings(max_examples=examples(30), deadline=None)
def test_a_seed_means_one_orthogonal_matrix_in_every_dtype(n: int, seed: int, dtype: torch.dtype) -> None:
    U = random_orthogonal(n, generator=seeded(seed))
    close(U.T @ U, torch.eye(n, dtype=torch.float64))
    assert torch.equal(random_orthogonal(n, generator=seeded(seed), dtype=dtype), U.to(dtype))


def test_rotations_of_the_plane_have_a_uniform_angle_and_half_are_reflections() -> None:
    generator = seeded(0)
    U = torch.stack([random_orthogonal(2, generator=generator) for _ in range(2000)])
    angle = torch.atan2(U[:, 1, 0], U[:, 0, 0]) / (2 * torch.pi) + 0.5
    assert scipy.stats.kstest(angle.numpy(), "uniform").pvalue > 1e-3
    reflections = int((torch.linalg.det(U) < 0).sum())
    assert scipy.stats.binomtest(reflections, len(U)).pvalue > 1e-3


def test_one_dimension_has_both_signs() -> None:
    generator = seeded(0)
    assert {random_orthogonal(1, generator=generator).item() for _ in range(20)} == {-1.0, 1.0}


@given(
    eigenvalues=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=7),
    seed=seeds,
    dtype=dtypes,
)
@settings(max_examples=examples(30), deadline=None)
def test_with_spectrum_has_the_spectrum_and_exact_symmetry(
    eigenvalues: list[float], seed: int, dtype: torch.dtype
) -> None:
    spectrum = torch.tensor(eigenvalues, dtype=dtype)
    H = with_spectrum(spectrum, generator=seeded(seed))
    assert torch.equal(H, H.T)
    close(torch.linalg.eigvalsh(H), spectrum.sort().values)
    assert torch.equal(H, with_spectrum(spectrum, generator=seeded(seed)))


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_with_spectrum_refuses_what_is_no_vector(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="vector"):
        with_spectrum(torch.ones(shape), generator=seeded(0))


# ----------------------------------------------------------------------------------------------------------- quadratics


@given(n=sizes, seed=seeds, dtype=dtypes, k=st.integers(0, 4))
@settings(max_examples=examples(30), deadline=None)
def test_quadratic_agrees_with_autograd(n: int, seed: int, dtype: torch.dtype, k: int) -> None:
    spectrum, centre, theta = normal(3, n, seed=seed, dtype=dtype)
    problem = Quadratic(with_spectrum(spectrum, generator=seeded(seed)), centre)
    close(problem.gradient(theta), torch.func.grad(problem.loss)(theta))
    hessian = torch.autograd.functional.hessian(problem.loss, theta)
    v = normal(n, k, seed=seed, dtype=dtype)
    assert problem.hessian_vector_product(v).shape == (n, k)
    if k:
        close(problem.hessian_vector_product(v), hessian @ v)
        close(problem.hessian_vector_product(v[:, 0]), hessian @ v[:, 0])
    assert not problem.gradient(centre).any()


def test_quadratic_takes_batches_and_is_centred_at_the_origin_by_default() -> None:
    problem = Quadratic(with_spectrum(normal(3, seed=0), generator=seeded(1)))
    theta = normal(4, 5, 3, seed=2)
    assert problem.loss(theta).shape == (4, 5)
    close(problem.loss(theta)[2, 3], theta[2, 3] @ problem.hessian @ theta[2, 3] / 2)
    close(problem.gradient(theta)[2, 3], problem.hessian @ theta[2, 3])
    assert problem.loss(torch.zeros(3, dtype=torch.float64)) == 0


def test_problems_are_values_that_cannot_change() -> None:
    for problem in [Quadratic(torch.eye(2)), NoisyHessian(torch.eye(2), 0.1)]:
        with pytest.raises(FrozenInstanceError):
            problem.hessian = torch.zeros(2, 2)
        assert problem == problem
        assert len({problem}) == 1


# ---------------------------------------------------------------------------------------------------- noisy Hessians


@given(n=sizes, k=st.integers(1, 5), seed=seeds, dtype=dtypes)
@settings(max_examples=examples(30), deadline=None)
def test_pairs_have_the_right_shape_and_follow_from_the_seed(n: int, k: int, seed: int, dtype: torch.dtype) -> None:
    noisy = NoisyHessian(with_spectrum(normal(n, seed=seed, dtype=dtype), generator=seeded(seed)), noise=0.3)
    before = torch.get_rng_state()
    v, h = noisy.sample(k, generator=seeded(seed))
    assert v.shape == h.shape == (n, k)
    assert v.dtype == h.dtype == noisy.second_moment().dtype == dtype
    for again, first in zip(noisy.sample(k, generator=seeded(seed)), (v, h), strict=True):
        assert torch.equal(again, first)
    assert torch.equal(torch.get_rng_state(), before)
    exact = NoisyHessian(noisy.hessian, noise=0.0)
    assert torch.equal(exact.hessian_vector_product(v, generator=seeded(seed)), noisy.hessian @ v)


def test_every_column_meets_its_own_noise() -> None:
    noisy = NoisyHessian(torch.eye(3), noise=1.0)
    h = noisy.hessian_vector_product(torch.ones(3, 2), generator=seeded(0))
    assert not torch.isclose(h[:, 0], h[:, 1]).any()
    assert noisy.hessian_vector_product(torch.ones(3), generator=seeded(0)).shape == (3,)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_noise_has_the_covariance_of_a_symmetric_gaussian_matrix(n: int) -> None:
    noise, k = 0.7, 100_000
    noisy = NoisyHessian(torch.zeros(n, n, dtype=torch.float64), noise)
    v = normal(n, 1, seed=n).expand(-1, k)
    epsilon = noisy.hessian_vector_product(v, generator=seeded(n))
    # The covariance of S v, written entry by entry from the variances of the free entries of S.
    rows, columns = torch.triu_indices(n, n)
    entries = torch.zeros(n, len(rows), dtype=torch.float64)
    for entry, (i, j) in enumerate(zip(rows, columns, strict=True)):
        entries[i, entry] = v[j, 0]
        entries[j, entry] = v[i, 0]
    expected = entries @ torch.diag(noise**2 * (1 + (rows == columns).double())) @ entries.T
    products = torch.einsum("ik,jk->ijk", epsilon, epsilon)
    assert ((products.mean(-1) - expected).abs() < 5 * products.std(-1) / k**0.5).all()


@pytest.mark.parametrize("n", [1, 2, 5])
def test_second_moment_is_what_samples_average_to(n: int) -> None:
    k = 100_000
    noisy = NoisyHessian(with_spectrum(normal(n, seed=n), generator=seeded(n)), noise=0.5)
    v, h = noisy.sample(k, generator=seeded(n + 1))
    for sample, expected in [
        (v, torch.eye(n, dtype=torch.float64)),
        (h, noisy.second_moment()),
    ]:
        products = torch.einsum("ik,jk->ijk", sample, sample)
        assert ((products.mean(-1) - expected).abs() < 5 * products.std(-1) / k**0.5).all()
