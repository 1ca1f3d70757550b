"""Properties of the criterion and of its minimum, over sizes, batches, dtypes and seeds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor

from psgd_lit.criterion import (
    criterion,
    expected_criterion,
    optimal_preconditioner,
    preconditioned_eigenvalues,
)
from psgd_lit.problems import NoisyHessian, with_spectrum

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 6)
batches = st.lists(st.integers(1, 3), max_size=2)
dtypes = st.sampled_from([torch.float32, torch.float64])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def positive(*batch: int, n: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Positive definite matrices with random axes and eigenvalues between 0.1 and 10."""
    count = torch.Size(batch).numel()
    spectra = 10 ** (2 * torch.rand(count, n, generator=generator, dtype=torch.float64) - 1)
    return (
        torch.stack([with_spectrum(spectrum, generator=generator) for spectrum in spectra])
        .to(dtype)
        .reshape(*batch, n, n)
    )


def normal(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=dtype)


def close(actual: Tensor, expected: Tensor, factor: float = 1e4) -> None:
    """Equal up to rounding times a factor, relative to the largest entry; condition numbers here are at most 100."""
    assert actual.dtype == expected.dtype
    tolerance = factor * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------- values


@given(n=sizes, k=st.integers(1, 5), batch=batches, seed=seeds, dtype=dtypes)
@settings(max_examples=examples(30), deadline=None)
def test_criterion_is_the_mean_of_two_quadratic_forms(
    n: int, k: int, batch: list[int], seed: int, dtype: torch.dtype
) -> None:
    generator = seeded(seed)
    P = positive(*batch, n=n, generator=generator, dtype=dtype)
    v, h = normal(2, *batch, n, k, generator=generator, dtype=dtype)
    values = criterion(P, v, h)
    assert values.shape == tuple(batch)
    forms = (h * (P @ h)).sum(-2) + (v * (torch.linalg.inv(P) @ v)).sum(-2)
    close(values, forms.mean(-1))


@given(n=sizes, k=st.integers(1, 5), batch=batches, seed=seeds, dtype=dtypes)
@settings(max_examples=examples(30), deadline=None)
def test_expected_criterion_of_sample_moments_is_the_sampled_criterion(
    n: int, k: int, batch: list[int], seed: int, dtype: torch.dtype
) -> None:
    generator = seeded(seed)
    P = positive(*batch, n=n, generator=generator, dtype=dtype)
    v, h = normal(2, *batch, n, k, generator=generator, dtype=dtype)
    close(expected_criterion(P, h @ h.mT / k, v @ v.mT / k), criterion(P, v, h))


@given(n=sizes, seed=seeds)
@settings(max_examples=examples(25), deadline=None)
def test_gradient_is_a_minus_inverse_b_inverse(n: int, seed: int) -> None:
    generator = seeded(seed)
    P, A, B = positive(3, n=n, generator=generator)
    inverse = torch.linalg.inv(P)
    close(torch.func.grad(expected_criterion)(P, A, B), A - inverse @ B @ inverse)
    close(torch.func.grad(expected_criterion)(P, A), A - inverse @ inverse)


def test_one_preconditioner_serves_a_batch_of_moments() -> None:
    generator = seeded(0)
    P, A = positive(n=3, generator=generator), positive(4, n=3, generator=generator)
    v, h = normal(2, 4, 3, 5, generator=generator)
    close(expected_criterion(P, A), torch.stack([expected_criterion(P, one) for one in A]))
    close(
        criterion(P, v, h),
        torch.stack([criterion(P, *pair) for pair in zip(v, h, strict=True)]),
    )


@pytest.mark.parametrize("P", [torch.zeros(2, 2), -torch.eye(2), torch.ones(2, 2), torch.tensor([[1.0, 2], [2, 1]])])
def test_values_exist_for_positive_definite_matrices_only(P: Tensor) -> None:
    pair = torch.ones(2, 2, 1)
    for call in [lambda: criterion(P, *pair), lambda: expected_criterion(P, torch.eye(2))]:
        with pytest.raises(torch.linalg.LinAlgError):
            call()
    with pytest.raises(torch.linalg.LinAlgError):
        preconditioned_eigenvalues(P, torch.eye(2))


# ------------------------------------------------------------------------------------------------------------ minimum


@given(n=st.integers(1, 12), batch=batches, seed=seeds, dtype=dtypes)
@settings(max_examples=examples(30), deadline=None)
def test_optimum_is_the_symmetric_positive_definite_solution(
    n: int, batch: list[int], seed: int, dtype: torch.dtype
) -> None:
    generator = seeded(seed)
    A, B = positive(2, *batch, n=n, generator=generator, dtype=dtype)
    P = optimal_preconditioner(A, B)
    assert P.shape == A.shape
    assert torch.equal(P, P.mT)
    torch.linalg.cholesky(P)
    close(P @ A @ P, B)
    for one, moments in zip(
        P.reshape(-1, n, n),
        zip(A.reshape(-1, n, n), B.reshape(-1, n, n), strict=True),
        strict=True,
    ):
        close(one, optimal_preconditioner(*moments))


@given(n=sizes, seed=seeds, distance=st.floats(1e-3, 3))
@settings(max_examples=examples(30), deadline=None)
def test_every_other_preconditioner_is_worse(n: int, seed: int, distance: float) -> None:
    generator = seeded(seed)
    A, B = positive(2, n=n, generator=generator)
    P = optimal_preconditioner(A, B)
    direction = normal(n, n, generator=generator)
    Q = torch.linalg.cholesky(P).T @ torch.linalg.matrix_exp(distance * direction / torch.linalg.matrix_norm(direction))
    # A rotation of Q leaves P = Q^T Q alone, so the distance that counts is that of P.
    moved = torch.linalg.matrix_norm(Q.T @ Q - P) / torch.linalg.matrix_norm(P)
    gain = expected_criterion(Q.T @ Q, A, B) - expected_criterion(P, A, B)
    if moved > 1e-5:
        assert gain > 0


@given(n=sizes, seed=seeds, scale=st.sampled_from([1e-40, 0.1, 7.0, 1e40]))
@settings(max_examples=examples(30), deadline=None)
def test_optimum_inverts_scales_and_follows_coordinates(n: int, seed: int, scale: float) -> None:
    generator = seeded(seed)
    A, B = positive(2, n=n, generator=generator)
    P = optimal_preconditioner(A, B)
    close(optimal_preconditioner(B, A), torch.linalg.inv(P))
    close(optimal_preconditioner(scale * A, B), P / scale**0.5)
    S = torch.linalg.cholesky(positive(n=n, generator=generator))
    inverse = torch.linalg.inv(S)
    close(
        optimal_preconditioner(S.T @ A @ S, inverse @ B @ inverse.T),
        inverse @ P @ inverse.T,
        factor=1e6,
    )


def test_one_dimension_is_the_square_root_of_a_quotient() -> None:
    a, b = torch.rand(2, 50, 1, 1, generator=seeded(0), dtype=torch.float64) + 0.01
    close(optimal_preconditioner(a, b), (b / a).sqrt(), factor=10)


@given(n=sizes, seed=seeds, noise=st.floats(0.05, 2), dtype=dtypes)
@settings(max_examples=examples(30), deadline=None)
def test_isotropic_noise_damps_the_absolute_inverse(n: int, seed: int, noise: float, dtype: torch.dtype) -> None:
    generator = seeded(seed)
    spectrum = normal(n, generator=generator, dtype=dtype)
    H = with_spectrum(spectrum, generator=generator)
    P = optimal_preconditioner(NoisyHessian(H, noise).second_moment())
    damped = spectrum / (spectrum**2 + (n + 1) * noise**2) ** 0.5
    # The second moment loses half of the digits of small eigenvalues, relative to the noise.
    close(preconditioned_eigenvalues(P, H), damped.sort().values, factor=1e5)


@given(n=sizes, extra=st.integers(0, 4), seed=seeds)
@settings(max_examples=examples(30), deadline=None)
def test_as_many_pairs_as_dimensions_bring_every_eigenvalue_to_plus_or_minus_one(n: int, extra: int, seed: int) -> None:
    generator = seeded(seed)
    spectrum = torch.linspace(-1.5, 2.0, n, dtype=torch.float64)
    H = with_spectrum(spectrum, generator=generator)
    # Probes with a condition number of at most 10, so that the tolerance can be small.
    v = torch.linalg.cholesky(positive(n=n, generator=generator)) @ torch.eye(n, n + extra, dtype=torch.float64)
    h = H @ v
    P = optimal_preconditioner(h @ h.T, v @ v.T)
    close(preconditioned_eigenvalues(P, H), spectrum.sign(), factor=1e6)


# ------------------------------------------------------------------------------------------------------------- refusals


@given(n=st.integers(2, 6), seed=seeds, dtype=dtypes)
@settings(max_examples=examples(30), deadline=None)
def test_too_few_pairs_have_no_optimum(n: int, seed: int, dtype: torch.dtype) -> None:
    generator = seeded(seed)
    h = normal(n, n - 1, generator=generator, dtype=dtype)
    good = torch.eye(n, dtype=dtype)
    with pytest.raises(ValueError, match=f"gradient_moment must be positive definite.*at least {n}.*damp"):
        optimal_preconditioner(h @ h.T)
    with pytest.raises(ValueError, match="probe_moment must be positive definite"):
        optimal_preconditioner(good, h @ h.T)
    for bad in [h @ h.T, h @ h.T + good + good.cumsum(0)]:
        with pytest.raises(ValueError, match="gradient_moment"):
            optimal_preconditioner(torch.stack([good, bad]))


@pytest.mark.parametrize(
    ("moment", "reason"),
    [
        (torch.zeros(1, 1), "positive definite"),
        (-torch.eye(3), "positive definite"),
        (torch.diag(torch.tensor([1.0, 1.0, -1e-3])), "positive definite"),
        (torch.eye(3).cumsum(0), "symmetric"),
        (torch.full((2, 2), torch.nan), "finite"),
        (torch.diag(torch.tensor([1.0, torch.inf])), "finite"),
    ],
)
def test_other_matrices_are_no_moments(moment: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=f"gradient_moment.*{reason}"):
        optimal_preconditioner(moment)


# ---------------------------------------------------------------------------------------------------------- eigenvalues


@given(n=sizes, batch=batches, seed=seeds)
@settings(max_examples=examples(30), deadline=None)
def test_eigenvalues_are_those_of_the_product_and_have_the_signs_of_the_hessian(
    n: int, batch: list[int], seed: int
) -> None:
    generator = seeded(seed)
    P = positive(*batch, n=n, generator=generator)
    H = normal(*batch, n, n, generator=generator)
    H = H + H.mT
    eigenvalues = preconditioned_eigenvalues(P, H)
    assert eigenvalues.shape == (*batch, n)
    close(eigenvalues, torch.linalg.eigvals(P @ H).real.sort(-1).values, factor=1e6)
    assert torch.equal(eigenvalues.sign(), torch.linalg.eigvalsh(H).sign())
