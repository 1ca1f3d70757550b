"""What normalizations and SCAN keep beyond what tests/test_groups.py asks of every group, and feature normalisation."""

import pytest
import torch
from expressions import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor

from psgd_lit.features import normalization_of
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization, normalization_half_gradient
from psgd_lit.groups.protocol import State
from psgd_lit.groups.triangular import triangular_half_gradient

GROUP = Normalization()
SCAN = Kron(Diagonal(), Normalization())
SIZES = st.sampled_from([0, 1, 2, 3, 17])
BATCHES = st.sampled_from([(), (1,), (2, 2), (0,)])
SEEDS = st.integers(0, 2**20)
few = settings(max_examples=examples(25), deadline=None, derandomize=True)


def learned(group: Normalization | Kron, shape: int | tuple[int, int], batch: tuple[int, ...], seed: int) -> State:
    """Where twenty steps on random pairs lead."""
    Q = group.init(shape, batch, dtype=torch.float64)
    for t in range(20):
        v, h = normal(2, *batch, group.size(Q), 1, seed=seed + t)
        Q = group.update(Q, v, h, lr=0.1)
    return Q


def read_back(dense: Tensor) -> State:
    """The state whose matrix this is, if there is one."""
    return (dense.diagonal(dim1=-2, dim2=-1), dense[..., :-1, -1])


@few
@given(n=st.sampled_from([1, 2, 3, 17]), batch=BATCHES, seed=SEEDS)
def test_products_and_inverses_stay_in_the_group(n, batch, seed):
    one, other = (GROUP.matrix(learned(GROUP, n, batch, seed + shift)) for shift in (0, 100))
    for dense in (one @ other, torch.linalg.inv(one)):
        state = read_back(dense)
        torch.testing.assert_close(GROUP.matrix(state), dense, rtol=1e-9, atol=1e-9)
        assert (state[0] > 0).all()


@few
@given(n=SIZES, k=st.sampled_from([0, 1, 3]), batch=BATCHES, seed=SEEDS)
def test_slope_is_the_triangular_one_at_the_entries_that_move(n, k, batch, seed):
    a, b = normal(2, *batch, n, k, seed=seed)
    full = triangular_half_gradient(a, b)
    kept = torch.eye(n).bool()
    kept[:, -1:] = True
    expected = torch.where(kept, full, 0.0)
    torch.testing.assert_close(GROUP.matrix(normalization_half_gradient(a, b)), expected, rtol=1e-10, atol=1e-12)


@few
@given(n=st.sampled_from([1, 2, 3, 17]), seed=SEEDS)
def test_one_maximum_over_both_parts(n, seed):
    Q = learned(GROUP, n, (), seed)
    a, b = normal(2, n, 1, seed=seed)
    half = GROUP.matrix(normalization_half_gradient(a, b))
    expected = torch.eye(n).double() - 0.1 * half / half.abs().max()
    torch.testing.assert_close(GROUP.matrix(GROUP.step(Q, a, b, lr=0.1)), expected @ GROUP.matrix(Q))


@few
@given(M=st.sampled_from([1, 2, 4]), N=st.sampled_from([1, 2, 5]), batch=BATCHES, seed=SEEDS)
def test_scan_equals_its_dense_matrix(M, N, batch, seed):
    Q = learned(SCAN, (M, N), batch, seed)
    dense, x = SCAN.matrix(Q), normal(*batch, M * N, 2, seed=seed)
    by_hand = torch.einsum("...i,ij,...kl->...ikjl", Q[0][0], torch.eye(M).double(), GROUP.matrix(Q[1]))
    torch.testing.assert_close(dense, by_hand.reshape(*batch, M * N, M * N), rtol=0, atol=0)
    torch.testing.assert_close(SCAN.precondition(Q, x), dense.mT @ dense @ x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dense @ SCAN.solve(Q, x), x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dense.mT @ SCAN.solve_t(Q, x), x, rtol=1e-9, atol=1e-9)
    assert SCAN.numel((M, N)) == M + 2 * N - 1


@few
@given(M=st.sampled_from([1, 3]), N=st.sampled_from([2, 5]), seed=SEEDS)
def test_units_and_offsets_of_the_features_do_not_matter(M, N, seed):
    """x -> T x with T in the group: gradients become G T^T, probes V T^-1, and Q2 T^-1 is learned step by step."""
    T = GROUP.matrix(learned(GROUP, N, (), seed))
    inverse = torch.linalg.inv(T)
    plain = SCAN.init((M, N), dtype=torch.float64)
    changed = (plain[0], read_back(inverse))
    for t in range(20):
        V, G = normal(2, M, N, seed=seed + t)
        plain = SCAN.update(plain, V.reshape(-1, 1), G.reshape(-1, 1), lr=0.1)
        changed = SCAN.update(changed, (V @ inverse).reshape(-1, 1), (G @ T.T).reshape(-1, 1), lr=0.1)
    expected = SCAN.matrix(plain) @ torch.kron(torch.eye(M).double(), inverse.contiguous())
    torch.testing.assert_close(SCAN.matrix(changed), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("N", [0, 1, 6])
def test_fresh_state(dtype, N):
    d, c = GROUP.init(N, (3,), dtype=dtype)
    assert (d.shape, c.shape) == ((3, N), (3, max(N - 1, 0)))
    assert d.dtype == c.dtype == dtype
    assert sum(part[0].numel() for part in (d, c)) == GROUP.numel(N)


@pytest.mark.parametrize("batch", [(), (3,), (2, 0)], ids=str)
@pytest.mark.parametrize("features", [0, 1, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-12)], ids=str)
def test_normalization_of_equals_batch_normalisation(batch, features, dtype, tolerance):
    x = 3 + 2 * normal(*batch, 50, features, seed=0, dtype=dtype)
    constant = torch.ones(*batch, 50, 1, dtype=dtype)
    after = GROUP.apply(normalization_of(x, eps=1e-3), torch.cat([x, constant], -1).mT).mT
    expected = torch.cat([torch.nn.functional.layer_norm(x.mT, (50,), eps=1e-3).mT, constant], -1)
    torch.testing.assert_close(after, expected, rtol=tolerance, atol=tolerance)


def test_constant_feature_needs_eps():
    x = torch.ones(5, 2, dtype=torch.float64)
    assert not normalization_of(x)[0][0].isfinite()
    assert all(part.isfinite().all() for part in normalization_of(x, eps=1e-5))


@few
@given(M=st.sampled_from([1, 3]), N=st.sampled_from([1, 2, 5]), seed=SEEDS)
def test_psgd_follows_sgd_on_transformed_features(M, N, seed):
    """Theta' = Q1^-T Theta Q2^-1 with x' = Q2 x and y = Q1^T y', through a tanh, ten steps."""
    Q = learned(SCAN, (M, N), (), seed)
    Q1, Q2 = (factor.matrix(q) for factor, q in zip(SCAN.factors, Q, strict=True))
    x, target = normal(20, N, seed=seed), normal(20, M, seed=seed + 1)
    old = normal(M, N, seed=seed + 2).requires_grad_()
    new = SCAN.solve_t(Q, old.detach().reshape(-1, 1)).reshape(M, N).requires_grad_()
    sgd = torch.optim.SGD([new], lr=0.01)
    for _ in range(10):
        (G,) = torch.autograd.grad((torch.tanh(x @ old.T) - target).square().mean(), old)
        sgd.zero_grad()
        (torch.tanh((x @ Q2.T) @ new.T @ Q1) - target).square().mean().backward()
        sgd.step()
        with torch.no_grad():
            old -= 0.01 * SCAN.precondition(Q, G.reshape(-1, 1)).reshape(M, N)
    torch.testing.assert_close(Q1.T @ new @ Q2, old, rtol=1e-9, atol=1e-9)
