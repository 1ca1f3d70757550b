"""What a fit remembers, and what it makes of it: for every group, alone and in batches."""

import math

import pytest
import torch
from expressions import diagonals, normal, same_bits
from hypothesis import given
from hypothesis import strategies as st
from quick import first
from test_groups import EVERY_FAMILY, EVERY_GROUP, GROUPS, fewer, shape_of
from torch import Tensor

from psgd_lit.blocks import leaves
from psgd_lit.buckets import map_leaves
from psgd_lit.groups.diagonal import Diagonal, Equilibration
from psgd_lit.groups.fit import NORMALIZERS, Fit, learn, start
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.protocol import Group
from psgd_lit.groups.sparse_lu import SparseLU
from psgd_lit.groups.triangular import Triangular

VECTOR_GROUPS = [Diagonal(), Equilibration(), Triangular(), SparseLU(2), Normalization()]
EVERY_NORMALIZER = pytest.mark.parametrize("normalizer", NORMALIZERS)


def started(group: Group, n: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> Fit:
    """A fit of n coordinates that has learned nothing."""
    return start(group, group.init(shape_of(group, n), batch, dtype=dtype))


def inverse_curvatures(group: Group, fit: Fit) -> Tensor:
    """The diagonal of P, from the dense Q."""
    dense = group.matrix(fit.Q)
    return (dense.mT @ dense).diagonal(dim1=-2, dim2=-1)


def on_and_off(
    group: Group,
    normalizer: str,
    share: Tensor,
    steps: int,
    members: int = 60,
    lr: float = 0.04,
) -> Tensor:
    """The mean logarithm of diag P, where H is the identity on the coordinates that a pair meets."""
    n, source, logs = len(share), torch.Generator().manual_seed(1), []
    fit = started(group, n, (members,))
    for t in range(steps):
        v = torch.randn(members, n, 1, dtype=torch.float64, generator=source)
        met = torch.rand(members, n, 1, dtype=torch.float64, generator=source) < share[:, None]
        fit = learn(group, fit, v, torch.where(met, v, 0.0), lr, normalizer)
        if t > steps // 2 and t % 10 == 0:
            logs.append(inverse_curvatures(group, fit).log().mean(0))
    return torch.stack(logs).mean(0)


# Coordinates that are met always, sometimes and never ------------------------------------------------------------


@pytest.mark.parametrize("group", VECTOR_GROUPS, ids=repr)
@EVERY_NORMALIZER
def test_a_coordinate_goes_where_the_criterion_says_and_a_dead_one_is_held(group, normalizer):
    """P is the root of one over the share, as in equation (12) with the zeros counted, and 1 where nothing is met."""
    share = torch.tensor([1.0, 0.1, 0.3, 0.0, 1.0], dtype=torch.float64)
    found = on_and_off(group, normalizer, share, steps=900).exp()
    alive = share > 0
    torch.testing.assert_close(found[alive], share[alive].rsqrt(), rtol=0.12, atol=0)
    assert found[3] == 1


@pytest.mark.parametrize("factor", [Diagonal(), Triangular()], ids=repr)
def test_rows_of_a_kronecker_product(factor):
    """Rows that are met together, as in an embedding, get the level of their share; a dead row keeps its factor."""
    group, source = Kron(factor, Triangular()), torch.Generator().manual_seed(2)
    share = torch.tensor([0.8, 0.2, 0.05, 0.0], dtype=torch.float64)
    fit, logs = start(group, group.init((4, 2), (60,), dtype=torch.float64)), []
    for t in range(1200):
        v = torch.randn(60, 4, 2, dtype=torch.float64, generator=source)
        rows = torch.rand(60, 4, 1, dtype=torch.float64, generator=source) < share[:, None]
        h = torch.where(rows, v, 0.0)
        fit = learn(group, fit, v.flatten(1)[..., None], h.flatten(1)[..., None], 0.05)
        if t > 600 and t % 10 == 0:
            logs.append(inverse_curvatures(group, fit).unflatten(-1, (4, 2)).log().mean((0, 2)))
    rows = torch.stack(logs).mean(0).exp()
    torch.testing.assert_close(rows[:3] / rows[0], (share[:3] / share[0]).rsqrt(), rtol=0.2, atol=0)
    exponents = torch.frexp(factor.matrix(fit.Q[0])[:, 3, 3]).mantissa
    assert (exponents == 0.5).all()  # balancing alone has touched it


@EVERY_GROUP
def test_what_dies_is_held(group):
    """A block that was met for a while, and then never again, keeps every bit."""
    n, fit = 4, started(group, 4)
    for t in range(40):
        v = normal(n, 1, seed=t)
        fit = learn(group, fit, v, 2 * v, 0.1)
    before = fit.Q
    for t in range(40, 60):
        v = normal(n, 1, seed=t)
        fit = learn(group, fit, v, 0 * v, 0.1)
    assert same_bits(before, fit.Q)
    assert fit.pairs == 60
    torch.testing.assert_close(fit.share, torch.full((n,), 40 / 60, dtype=torch.float64))


def test_shares_forget():
    """After thousands of pairs a share follows a change within a thousand pairs or so."""
    fit = started(Diagonal(), 2, dtype=torch.float32)
    one, v = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)
    for t in range(6000):
        fit = learn(Diagonal(), fit, v, one if t < 3000 else one.flip(0), 0.01)
    expected = math.exp(-3.0)  # of 3000 pairs with the weight of a thousandth
    torch.testing.assert_close(fit.share, torch.tensor([expected, 1 - expected]), rtol=0.02, atol=0)


# What the half gradients are divided by -------------------------------------------------------------------------


def curvature_of_two(group: Group, normalizer: str, chance: float, lr: Tensor) -> Tensor:
    """P over its minimum for each step size, where the curvature is 1 with this chance and 0.01 else."""
    source, members = torch.Generator().manual_seed(3), (len(lr), 60)
    fit, logs = started(group, 1, members), []
    for t in range(1100):
        v = torch.randn(*members, 1, 1, dtype=torch.float64, generator=source)
        rare = torch.rand(*members, 1, 1, dtype=torch.float64, generator=source) < chance
        fit = learn(
            group,
            fit,
            v,
            torch.where(rare, 1.0, 0.01) * v,
            lr[:, None].expand(members),
            normalizer,
        )
        if t > 600 and t % 5 == 0:
            logs.append(inverse_curvatures(group, fit).log().mean((1, 2)))
    return torch.stack(logs).mean(0).exp() * (chance + (1 - chance) * 1e-4) ** 0.5


RARE = [Triangular(), Diagonal(), SparseLU(1)]


@pytest.mark.parametrize("group", first(1, RARE), ids=map(repr, RARE))
def test_rare_curvature(group):
    """One pair in ten has a curvature of 1: the paper's rule rests at a median, the other near the minimum."""
    lr = torch.tensor([0.1, 0.03], dtype=torch.float64)
    assert (curvature_of_two(group, "pair", 0.1, lr) > 25).all()
    assert (curvature_of_two(group, "running", 0.1, lr).log().abs() < math.log(1.4)).all()


@EVERY_FAMILY
@fewer
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_the_papers_rule_is_the_plain_update(family, data, seed):
    group, shape = data.draw(family(smallest=1, largest=7))
    Q = group.init(shape, (2,), dtype=torch.float32)
    fit = start(group, Q)
    for t in range(5):
        v, h = normal(2, 2, group.size(Q), 1, seed=seed + t, dtype=torch.float32)
        Q, fit = group.update(Q, v, h, 0.1), learn(group, fit, v, h, 0.1, "pair")
    assert same_bits(Q, fit.Q)


@EVERY_GROUP
def test_gradients_of_any_scale(group):
    """About 1, 1e-20 and 1e15: positive and finite after bold steps in float32, and the same P but for its unit."""
    members, n, units = 20, 4, 2.0 ** torch.tensor([0.0, -66.0, 50.0])
    fit = started(group, n, (3, members), torch.float32)
    fit = fit._replace(Q=group.scale(fit.Q, units[:, None].rsqrt().expand(3, members)))
    for t in range(150):
        v, h = normal(2, members, n, 1, seed=t, dtype=torch.float32)
        fit = learn(group, fit, v.expand(3, -1, -1, -1), h * units[:, None, None, None], 0.3, "running")
    for diagonal in diagonals(group, fit.Q):
        assert (diagonal > 0).all()
        assert diagonal.isfinite().all()
    here, *there = inverse_curvatures(group, fit) * units[:, None, None]
    for P in there:
        torch.testing.assert_close((P / here).log().mean(), torch.tensor(0.0), rtol=0, atol=0.02)


@pytest.mark.parametrize("group", [Triangular(), Kron(Triangular(), Triangular()), SparseLU(2)], ids=repr)
def test_an_outlier_is_forgotten(group):
    """One product of 1e15 at the hundredth pair: a thousand pairs later P is as near to its place as without it."""
    source, curvature = (
        torch.Generator().manual_seed(4),
        torch.tensor([4.0, 2.0, 2.0, 1.0], dtype=torch.float64),
    )
    outlier, fit = (
        torch.tensor([1.0, 1e15], dtype=torch.float64)[:, None, None, None],
        started(group, 4, (2, 10)),
    )
    for t in range(1100):
        v = torch.randn(2, 10, 4, 1, dtype=torch.float64, generator=source)
        h = curvature[:, None] * v * (outlier if t == 100 else 1)
        fit = learn(group, fit, v, h, 0.03, "running")
    without, with_one = (inverse_curvatures(group, fit) * curvature).log().abs().mean((1, 2))
    assert with_one < without + 0.05
    assert without < 0.15


# Guards ----------------------------------------------------------------------------------------------------------


@EVERY_GROUP
@EVERY_NORMALIZER
def test_bad_and_untrusted_members_keep_every_bit(group, normalizer):
    fit = started(group, 3, (4,))
    for t in range(5):
        fit = learn(group, fit, *normal(2, 4, 3, 1, seed=t), 0.1, normalizer)
    v, h = normal(2, 4, 3, 1, seed=9)
    h[0, 1], v[1, 0] = math.nan, math.inf
    trusted = torch.tensor([True, True, False, True])
    after = learn(group, fit, v, h, 0.1, normalizer, trusted)
    for old, new in zip(leaves(tuple(fit)), leaves(tuple(after)), strict=True):
        assert torch.equal(old[:3], new[:3])
    assert not torch.equal(group.matrix(fit.Q)[3], group.matrix(after.Q)[3])
    assert after.pairs.tolist() == [5, 5, 5, 6]


@EVERY_GROUP
def test_a_batch_equals_its_members_one_by_one(group):
    fits = [started(group, 4) for _ in range(3)]
    together = started(group, 4, (3,))
    for t in range(30):
        v, h = normal(2, 3, 4, 1, seed=t)
        h = h * (normal(3, 4, 1, seed=t + 100) > 0)
        together = learn(group, together, v, h, 0.1, "running")
        fits = [learn(group, fit, v[i], h[i], 0.1, "running") for i, fit in enumerate(fits)]
    for i, fit in enumerate(fits):
        member = map_leaves(lambda leaf, i=i: leaf[i], tuple(together))
        for one, other in zip(leaves(member), leaves(tuple(fit)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_several_columns_are_several_pairs():
    """k columns count k pairs, and a share counts columns."""
    fit = started(Diagonal(), 2)
    h = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    fit = learn(Diagonal(), fit, torch.ones_like(h), h, 0.1)
    assert fit.pairs == 4
    assert fit.share.tolist() == [0.5, 0.25]


def test_unknown_normalizer():
    with pytest.raises(ValueError, match="pair, running"):
        learn(Diagonal(), started(Diagonal(), 1), *normal(2, 1, 1, seed=0), 0.1, "mean")


@pytest.mark.parametrize("group", GROUPS, ids=repr)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_start(group, batch):
    """No memory: zero peaks, one for each half with a maximum of its own; shares of 1; no pair."""
    fit = started(group, 4, batch)
    assert fit.peaks.shape == (*batch, group.maxima)
    assert fit.share.shape == (*batch, 4)
    assert fit.pairs.shape == batch
    assert not fit.peaks.any()
    assert not fit.pairs.any()
    assert (fit.share == 1).all()
    assert {leaf.dtype for leaf in leaves(tuple(fit))} == {torch.float64}


@pytest.mark.slow
def test_hundred_thousand_noisy_steps():
    """13 runs, gradients from 1e-20 to 1e15 in float32, with memory: positive, finite, and P H near the identity.

    Five thousand bolder steps lead there from the identity, and three thousand small ones stay.
    """
    group, n, source = Kron(Triangular(), Diagonal()), 4, torch.Generator().manual_seed(0)
    runs, steps = 13, [0.03] * 5000 + [0.01] * 3000
    scales = (10.0 ** torch.arange(-20, 16, 5)).repeat(runs)
    fit = start(group, group.init((2, 2), (len(scales),)))
    for lr in steps:
        v, noise = torch.randn(2, len(scales), n, 1, generator=source)
        fit = learn(group, fit, v, scales[:, None, None] * (v + 0.1 * noise), lr, "running")
    for diagonal in diagonals(group, fit.Q):
        assert (diagonal > 0).all()
        assert diagonal.isfinite().all()
    whitened = inverse_curvatures(group, fit) * scales[:, None] * 1.01**0.5
    torch.testing.assert_close(whitened, torch.ones_like(whitened), rtol=0.15, atol=0)
