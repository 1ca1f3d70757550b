"""What the two diagonal groups promise beyond the list of every group: closed forms, and equilibration's own guards."""

import itertools

import pytest
import torch
from expressions import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples
from torch import Tensor

from psgd_lit.groups.diagonal import Diagonal, Equilibration, running_rms
from psgd_lit.groups.protocol import State
from psgd_lit.groups.triangular import Triangular

BOTH = pytest.mark.parametrize("group", [Diagonal(), Equilibration()], ids=repr)
BATCHES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
SIZES = st.sampled_from([0, 1, 2, 7])
COLUMNS = st.sampled_from([0, 1, 2, 5])
SEEDS = st.integers(0, 2**20)
few = settings(max_examples=examples(25), deadline=None, derandomize=True)


def learned(group: Diagonal, n: int, batch: tuple[int, ...] = (), seed: int = 0) -> State:
    """A state away from the identity, where twenty random pairs lead."""
    Q = group.init(n, batch, dtype=torch.float64)
    for t in range(20):
        v, h = normal(2, *batch, n, 1, seed=seed + t)
        Q = group.update(Q, v, h, lr=0.1)
    return Q


def preconditioner(group: Diagonal, Q: State) -> Tensor:
    """The diagonal of P."""
    return group.diagonal(Q).square()


# The group step ---------------------------------------------------------------------------------------------------


@few
@given(n=SIZES, k=COLUMNS, batch=BATCHES, seed=SEEDS)
def test_slope_is_the_diagonal_of_the_triangular_slope(n, k, batch, seed):
    a, b = normal(2, *batch, n, k, seed=seed)
    (dense,) = Triangular().half_gradient((), a, b)
    torch.testing.assert_close(
        Diagonal().half_gradient((), a, b)[0],
        dense.diagonal(dim1=-2, dim2=-1),
        rtol=1e-10,
        atol=1e-10,
    )


@few
@given(n=st.sampled_from([1, 2, 7]), seed=SEEDS, lr=st.sampled_from([0.01, 0.5, 0.999]))
def test_step_is_the_formula(n, seed, lr):
    """q (1 - lr E / max|E|), written out."""
    group = Diagonal()
    Q = learned(group, n, seed=seed)
    v, h = normal(2, n, 1, seed=seed + 50)
    q = Q[0]
    E = (q * h[:, 0]) ** 2 - (v[:, 0] / q) ** 2
    expected = q * (1 - lr * E / E.abs().max())
    torch.testing.assert_close(group.update(Q, v, h, lr)[0], expected, rtol=1e-10, atol=0)


@few
@given(n=st.sampled_from([1, 2, 7]), seed=SEEDS)
def test_group_step_is_equivariant_under_diagonals(n, seed):
    """theta = S theta' with diagonal S: Q' = Q S^-1 learns S^-1 P S^-1."""
    group = Diagonal()
    Q, d = learned(group, n, seed=seed), normal(n, seed=seed + 99).exp()
    other = group.multiply(Q, 1 / d)
    for t in range(5):
        v, h = normal(2, n, 1, seed=seed + t)
        Q = group.update(Q, v, h, lr=0.1)
        other = group.update(other, v / d[:, None], h * d[:, None], lr=0.1)
    torch.testing.assert_close(other[0], Q[0] / d, rtol=1e-8, atol=0)


# The closed form --------------------------------------------------------------------------------------------------


@few
@given(k=st.sampled_from([0, 1, 3]), weight=st.floats(0, 1), seed=SEEDS)
def test_running_rms_is_the_formula(k, weight, seed):
    rms, x = normal(2, 3, seed=seed).abs(), normal(2, 3, k, seed=seed + 1)
    square = (1 - weight) * rms**2 + (weight * x.square().mean(-1) if k else 0)
    weights = torch.full((2, 3), weight, dtype=torch.float64)
    torch.testing.assert_close(running_rms(rms, x, weights), square.sqrt(), rtol=1e-12, atol=1e-15)


@few
@given(
    n=st.sampled_from([1, 2, 7]),
    k=st.sampled_from([1, 3]),
    lr=st.sampled_from([0.02, 0.1, 0.9]),
    seed=SEEDS,
)
def test_equilibration_is_a_running_mean_of_squares(n, k, lr, seed):
    """The author's form: a plain mean until the weight has fallen to lr, squares and all."""
    group = Equilibration()
    Q, v_mean, h_mean = group.init(n, dtype=torch.float64), 0.0, 0.0
    for t in range(70):
        v, h = normal(2, n, k, seed=seed + t)
        weight = max(1 / (t + 1), lr)
        v_mean = (1 - weight) * v_mean + weight * v.square().mean(-1)
        h_mean = (1 - weight) * h_mean + weight * h.square().mean(-1)
        Q = group.update(Q, v, h, lr)
        torch.testing.assert_close(preconditioner(group, Q), (v_mean / h_mean).sqrt(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e15, 1e30])
@pytest.mark.parametrize("k", [1, 3])
def test_equilibration_at_every_scale_of_float32(scale, k):
    """Squares would leave float32; entries of one member may lie at both ends of it."""
    group, curvature = Equilibration(), torch.tensor([[scale], [1.0], [1 / scale]])
    Q = group.init(3)
    for t in range(200):
        v = normal(3, k, seed=t, dtype=torch.float32)
        Q = group.update(Q, v, curvature * v, lr=0.01)
    torch.testing.assert_close(preconditioner(group, Q) * curvature[:, 0], torch.ones(3), rtol=1e-5, atol=0)
    assert all(leaf.dtype == torch.float32 for leaf in Q)


def test_equilibration_stays_positive_and_finite_at_the_ends_of_float32():
    """A subnormal h, or a probe that is exactly zero, saturates P instead of making Q singular or infinite."""
    group = Equilibration()
    v = torch.tensor([[1.0], [0.0], [1e38], [1e-38]])
    h = torch.tensor([[1e-44], [1.0], [1e-38], [1e38]])
    q = group.diagonal(group.update(group.init(4), v, h, lr=0.01))
    assert q.isfinite().all()
    assert (q > 0).all()
    assert group.solve(group.update(group.init(4), v, h, lr=0.01), v).isfinite().all()


def test_a_late_entry_starts_with_the_weight_of_a_first_pair():
    """An entry without curvature keeps all its bits, and its first pair replaces the 1 wholly."""
    group, Q = Equilibration(), Equilibration().init(2, dtype=torch.float64)
    before, late = torch.tensor([[[2.0], [0.0]], [[2.0], [1e-9]]], dtype=torch.float64)
    for t in range(500):
        v = normal(2, 1, seed=t)
        Q = group.update(Q, v, before * v, lr=0.01)
    assert [leaf[1].item() for leaf in Q] == [1, 1, 0]
    v = normal(2, 1, seed=1000)
    Q = group.update(Q, v, late * v, lr=0.01)
    expected = torch.tensor([0.5, 1e9], dtype=torch.float64)
    torch.testing.assert_close(preconditioner(group, Q), expected, rtol=1e-12, atol=0)


def test_a_column_that_met_nothing_does_not_dilute_the_others():
    """With h = 0 in one of two columns the entry learns from the other alone."""
    group, v = Equilibration(), torch.tensor([[3.0, 5.0]])
    Q = group.update(group.init(1), v, torch.tensor([[6.0, 0.0]]), lr=0.01)
    torch.testing.assert_close(preconditioner(group, Q), torch.tensor([0.5]))


@few
@given(n=st.sampled_from([1, 2, 7]), seed=SEEDS)
def test_equilibration_is_equivariant_under_diagonals(n, seed):
    group = Equilibration()
    Q, d = learned(group, n, seed=seed), normal(n, seed=seed + 99).exp()
    other = group.multiply(Q, 1 / d)
    v, h = normal(2, n, 1, seed=seed)
    after = group.update(Q, v, h, lr=0.1)
    moved = group.update(other, v / d[:, None], h * d[:, None], lr=0.1)
    torch.testing.assert_close(group.diagonal(moved), group.diagonal(after) / d, rtol=1e-12, atol=0)


@few
@given(n=SIZES, batch=BATCHES, k=COLUMNS, seed=SEEDS)
def test_equilibration_batched_equals_one_by_one(n, batch, k, seed):
    group = Equilibration()
    Q = learned(group, n, batch, seed)
    v, h = normal(2, *batch, n, k, seed=seed)
    after = group.update(Q, v, h, lr=0.1)
    for member in itertools.product(*map(range, batch)):
        alone = group.update(tuple(leaf[member] for leaf in Q), v[member], h[member], lr=0.1)
        torch.testing.assert_close(alone, tuple(leaf[member] for leaf in after), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", [0, 1], ids=["probe", "product"])
def test_equilibration_keeps_every_bit_of_a_bad_member(bad, where):
    group = Equilibration()
    Q, pair = learned(group, 3, (2,)), normal(2, 2, 3, 1, seed=7)
    pair[where, 1, 2] = bad
    for old, new in zip(Q, group.update(Q, *pair, lr=0.1), strict=True):
        assert torch.equal(old[1], new[1])
        assert not torch.equal(old[0], new[0])


@pytest.mark.parametrize("lr", [0, 1, -0.1, 1.5, float("nan"), float("inf")])
def test_equilibration_refuses_step_sizes_out_of_range(lr):
    with pytest.raises(ValueError, match=r"\(0, 1\)"):
        Equilibration().update(Equilibration().init(2), torch.ones(2, 1), torch.ones(2, 1), lr=lr)


@BOTH
def test_step_size_of_each_member(group):
    Q, (v, h) = learned(group, 3, (2,)), normal(2, 2, 3, 1, seed=5)
    mixed = group.update(Q, v, h, lr=torch.tensor([0.1, 0.2], dtype=torch.float64))
    for i, lr in enumerate((0.1, 0.2)):
        torch.testing.assert_close(group.diagonal(mixed)[i], group.diagonal(group.update(Q, v, h, lr=lr))[i])


@BOTH
@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, device="meta"), torch.tensor([0.1, 0.2], device="meta")])
def test_no_host_synchronisation_and_no_second_device(group, n, lr):
    Q = group.init(n, (2,), device="meta")
    v = torch.empty(2, n, 1, device="meta")
    Q = group.update(Q, v, v, lr=lr)
    assert all(leaf.device.type == "meta" and leaf.dtype == torch.float32 and leaf.shape == (2, n) for leaf in Q)
    assert group.precondition(Q, v).shape == v.shape


def test_equilibration_is_a_group_also_for_who_has_only_a_and_b():
    """Its group step is that of `Diagonal` from the same Q."""
    memory, plain = Equilibration(), Diagonal()
    Q = learned(memory, 4)
    a, b = normal(2, 4, 1, seed=3)
    stepped = memory.diagonal(memory.step(Q, a, b, lr=0.1))
    torch.testing.assert_close(stepped, plain.step((memory.diagonal(Q),), a, b, lr=0.1)[0], rtol=1e-12, atol=0)


def test_diagonal_values_differ():
    assert Equilibration() != Diagonal()
    assert Equilibration() == Equilibration()


# The limit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "tolerance"), [(Diagonal(), 0.05), (Equilibration(), 0.02)], ids=repr)
def test_both_arrive_at_the_row_norms(group, tolerance):
    """With 32 probes an update, the mean over 50 members is the inverse norm of each row of H."""
    M = normal(5, 5, seed=11)
    H, Q = M + M.T, group.init(5, (50,), dtype=torch.float64)
    total = torch.zeros(5, dtype=torch.float64)
    for t in range(1500):
        v = normal(50, 5, 32, seed=t)
        Q = group.update(Q, v, H @ v, lr=0.01)
        total += preconditioner(group, Q).log().mean(0) * (t >= 1000) / 500
    torch.testing.assert_close(total.exp() * H.norm(dim=1), torch.ones_like(total), rtol=tolerance, atol=0)
