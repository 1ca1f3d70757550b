"""Signs, sampled columns and inverse-free rules: what a user of the optimizer meets."""

import math

import pytest
import torch
from expressions import assert_acts_as_its_matrix
from torch import Tensor
from toys import fill, generator, goes_on_from_its_state, loss_of, network, states

from psgd_lit.derivatives import draw_probes, random_signs
from psgd_lit.groups import Diagonal, Kron, Triangular
from psgd_lit.groups.protocol import Group
from psgd_lit.later import InverseFree, Sampled, Symmetric, caught_up, towards_symmetry
from psgd_lit.optim import PSGD

FORMS: list[Group] = [
    Symmetric("quad"),
    Symmetric("procrustes"),
    InverseFree(Symmetric("quad"), Symmetric("procrustes")),
    InverseFree(Diagonal(), Symmetric()),
    Kron(Symmetric("quad"), Triangular()),
    Sampled(Kron(Triangular(), Triangular()), 0.3),
    Sampled(Kron(Diagonal(), Triangular()), 1.0),
]
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=repr)


def learned(form: Group, batch: tuple[int, ...] = (3,), fits: int = 20, lr: float = 0.3) -> tuple[object, ...]:
    """A state after fits to pairs of many scales."""
    Q, source = form.init(form.shape_for((4, 6)), batch, dtype=torch.float64), generator(1)
    for t in range(fits):
        v, h = torch.randn(2, *batch, 24, 1, dtype=torch.float64, generator=source)
        Q = form.update(Q, v, h * 10.0 ** (t % 5 - 2), lr)
    return Q


@EVERY_FORM
def test_actions_equal_the_dense_oracle(form: Group) -> None:
    Q, x = learned(form), torch.randn(3, 24, 2, dtype=torch.float64, generator=generator(2))
    close = {"rtol": 1e-8, "atol": 1e-8}
    assert_acts_as_its_matrix(form, Q, x, **close)


@EVERY_FORM
@pytest.mark.parametrize("lr", [0.01, 0.99])
@pytest.mark.parametrize("exponent", [-15, 0, 15])
def test_positive_definite_and_finite_for_every_step_and_scale(form: Group, lr: float, exponent: int) -> None:
    Q, source = form.init(form.shape_for((4, 6)), dtype=torch.float64), generator(0)
    for _ in range(15):
        v, h = torch.randn(2, 24, 1, dtype=torch.float64, generator=source)
        Q = form.update(Q, v, h * 10.0**exponent, lr)
    dense = form.matrix(Q)
    assert dense.isfinite().all()
    assert torch.linalg.svdvals(dense).min() > 0


@EVERY_FORM
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_bad_pair_changes_no_member_but_its_own(form: Group, bad: float) -> None:
    Q = learned(form)
    v, h = torch.randn(2, 3, 24, 1, dtype=torch.float64, generator=generator(3))
    good = form.matrix(form.update(Q, v, h, 0.1))
    v[1], h[1] = (0.0, 0.0) if bad == 0.0 else (v[1], torch.full_like(h[1], bad))
    after = form.matrix(form.update(Q, v, h, 0.1))
    assert torch.equal(after[1], form.matrix(Q)[1])
    torch.testing.assert_close(after[[0, 2]], good[[0, 2]], rtol=1e-10, atol=1e-12)


@EVERY_FORM
def test_the_optimizer_takes_it_saves_it_and_goes_on(form: Group) -> None:
    goes_on_from_its_state(preconditioner=form, probes="rademacher")


@pytest.mark.parametrize("rule", ["quad", "procrustes"])
def test_symmetric_stays_symmetric(rule: str) -> None:
    Q = learned(Symmetric(rule), lr=0.2)[0]
    assert isinstance(Q, Tensor)
    size = (Q - Q.mT).norm() / Q.norm()
    assert size == 0 if rule == "quad" else size < 0.3
    assert (towards_symmetry(Q) - towards_symmetry(Q).mT).norm() <= (Q - Q.mT).norm()


def test_signs_are_signs_of_every_type_and_hang_on_seed_and_step_alone() -> None:
    kinds = [torch.zeros(3, 5, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)]
    probes = draw_probes(kinds, 3, 4, "rademacher")
    for p, v in zip(kinds, probes, strict=True):
        parts = torch.view_as_real(v) if v.is_complex() else v
        assert v.shape == p.shape
        assert torch.equal(parts.abs(), torch.ones_like(parts))
    again, other = (
        draw_probes(kinds, 3, 4, "rademacher"),
        draw_probes(kinds, 3, 5, "rademacher"),
    )
    assert torch.equal(again[1], probes[1])
    assert not torch.equal(other[1], probes[1])
    assert len(random_signs(0, generator())) == 0
    assert len(random_signs(65, generator())) == 65


def test_signs_train_a_network() -> None:
    net = fill(network())
    opt = PSGD(net.parameters(), 0.1, probes="rademacher")
    values = [float(opt.step(lambda: loss_of(net))) for _ in range(40)]
    assert values[-1] < 0.5 * values[0]
    assert states(opt)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="normal, rademacher"):
        PSGD([torch.ones(2, requires_grad=True)], probes="sign")
    with pytest.raises(ValueError, match="quad"):
        Symmetric("cubic")
    with pytest.raises(ValueError, match=r"Symmetric\(\) or Diagonal\(\)"):
        InverseFree(Triangular())
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        Sampled(Kron(Triangular(), Triangular()), 0.0)
    with pytest.raises(ValueError, match="one factor"):
        Sampled(Kron(Triangular()), 0.5)
    with pytest.raises(ValueError, match="pause"):
        caught_up(0.1, 0)
