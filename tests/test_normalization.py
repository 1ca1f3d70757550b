"""What the group of normalizations and SCAN keep beyond what tests/test_groups.py asks of every group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization, normalization_slope
from psgd_lit.groups.protocol import State
from psgd_lit.groups.triangular import triangular_slope

GROUP = Normalization()
SCAN = Kron(Diagonal(), Normalization())
SIZES = st.sampled_from([0, 1, 2, 3, 17])
BATCHES = st.sampled_from([(), (1,), (2, 2), (0,)])
SEEDS = st.integers(0, 2**20)
few = settings(max_examples=25, deadline=None, derandomize=True)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


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
    full = triangular_slope(a, b)
    kept = torch.eye(n).bool()
    kept[:, -1:] = True
    expected = torch.where(kept, full, 0.0)
    torch.testing.assert_close(GROUP.matrix(normalization_slope(a, b)), expected, rtol=1e-10, atol=1e-12)


@few
@given(n=st.sampled_from([1, 2, 3, 17]), seed=SEEDS)
def test_one_maximum_over_both_parts(n, seed):
    Q = learned(GROUP, n, (), seed)
    a, b = normal(2, n, 1, seed=seed)
    slope = GROUP.matrix(normalization_slope(a, b))
    expected = torch.eye(n).double() - 0.1 * slope / slope.abs().max()
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
