"""Comparisons with tuned step sizes: equal budgets, one rule, and results that are looked up and never guessed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgd_lit.experiments.contest import SEEDS, TUNING_SEED
from psgd_lit.experiments.methods import METHODS, PRECONDITIONERS, make_optimizer, step_size
from psgd_lit.experiments.records import ExperimentError
from psgd_lit.experiments.runner import CATALOGUE, Result, Run, Store, load_result, load_results
from psgd_lit.experiments.tuning import (
    COMPARISONS,
    GRID,
    SHARE,
    Comparison,
    bring,
    has_enough,
    is_lower,
    latest_loss,
    price,
    run_row,
    standing,
    trial_row,
    tuned,
)

RESULTS = Path(__file__).resolve().parents[1] / "nbs" / "results"
SUMS = Comparison("addition_rnn", batch=2, images=600)


def ended(run: Run, loss: float | None, state: str = "finished") -> Result:
    """A run that ended so."""
    curve: dict[str, list[Any]] = {"step": [], "train_loss": [], "test_error": []}
    return Result(run, {}, state, run.steps, None, loss, None, 0, curve, {}, 0.0, [])


@given(st.sampled_from(sorted(CATALOGUE)), st.integers(1, 2000), st.integers(10_000, 10**7))
def test_budgets_are_equal(problem: str, batch: int, images: int) -> None:
    """What the runs of all methods cost differs by less than the dearest step, and so do their trials."""
    dearest = max(map(price, METHODS)) * batch
    comparison = Comparison(problem, batch, max(images, SHARE * dearest))
    for share in (1, SHARE):
        costs = [comparison.run(m, 0, 0.1, share).steps * price(m) * batch for m in METHODS]
        assert comparison.images // share - dearest < min(costs) <= max(costs) <= comparison.images // share


@given(st.sampled_from(METHODS), st.integers(1, 300), st.sampled_from([1, 3, "log10", "auto"]))
def test_a_budget_counts_the_steps_that_learn(method: str, budget: int, update_every: int | str) -> None:
    """One more step would cost more than the budget, and a method without a schedule pays as if there were none."""
    comparison = Comparison("addition_rnn", batch=5, images=5 * (budget + 3), update_every=update_every)
    run = comparison.run(method, 0, 0.1)
    costs = [comparison.cost(method, steps) for steps in (run.steps, run.steps + 1)]
    assert costs[0] <= budget + 3 < costs[1]
    assert run.update_every == (update_every if method in PRECONDITIONERS else 1)


@pytest.mark.parametrize("update_every", [1, 4, "log10", "auto"])
def test_costs_are_those_of_the_steps_that_learn(update_every: int | str) -> None:
    """A preconditioner changes on as many steps as are paid for."""
    p = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer: Any = make_optimizer("dense", [p], 0.01, math.inf, update_every=update_every)
    fits, seen = 0, ""
    for _ in range(150):
        optimizer.step(lambda: (p**4).sum())
        fits += (state := str(optimizer.state_dict()["state"])) != seen
        seen = state
    assert SUMS._replace(update_every=update_every).cost("dense", 150) == 150 + 2 * fits


@pytest.mark.parametrize("method", METHODS)
def test_trials_surround_the_usual_step_size(method: str) -> None:
    """Each method has as many trials, from a quarter to four times its usual step size, on a seed that no run has."""
    for comparison in COMPARISONS.values():
        trials = comparison.trials(method)
        usual = step_size(comparison.problem, method).lr
        assert [trial.settings["lr"] / usual for trial in trials] == pytest.approx(GRID)
        assert {trial.seed for trial in trials}.isdisjoint(SEEDS)
        assert len({trial.name for trial in trials}) == len(GRID)


@given(
    st.permutations([0.3, 0.2, 0.1]),
    st.sets(st.integers(0, 2)),
    st.sampled_from(["running", "diverged", "gone"]),
)
def test_the_lowest_loss_chooses(losses: list[float], hit: set[int], state: str) -> None:
    """A trial that isn't over or isn't there leaves the choice open, and one that diverged is never chosen."""
    trials = SUMS.trials("kron")
    pairs = list(enumerate(zip(trials, losses, strict=True)))
    spoiled = {"running": 0.0, "diverged": None}
    results = [ended(run, loss) for i, (run, loss) in pairs if i not in hit]
    results += [ended(run, spoiled[state], state) for i, (run, _) in pairs if i in hit and state != "gone"]
    rest = [i for i in range(3) if i not in hit]
    expected = None
    if rest and (state == "diverged" or not hit):
        expected = trials[min(rest, key=losses.__getitem__)].settings["lr"]
    assert tuned(trials, results) == expected
    assert tuned(iter(trials), iter(results)) == expected


def test_a_trial_of_another_length_is_another_trial() -> None:
    """Changing a budget afterwards makes the old trials count for nothing."""
    results = [ended(trial, 0.1) for trial in SUMS.trials("sgd")]
    assert tuned(SUMS.trials("sgd"), results) is not None
    assert tuned(SUMS._replace(images=800).trials("sgd"), results) is None


def test_price_of_an_unknown_method() -> None:
    """The error names those that there are."""
    with pytest.raises(ExperimentError, match=r"unknown method 'newton'; there are sgd, "):
        price("newton")


def test_a_run_is_brought_to_its_end_once(tmp_path: Path) -> None:
    """What is over is read, what is begun goes on, and what was chosen by trials is what stands."""
    store, drafts = (Store(tmp_path / name, tmp_path / "checkpoints" / name) for name in ("", "tuning"))
    for trial in SUMS.trials("sgd"):
        bring(drafts, trial, allow_dirty=True)
    lr = tuned(SUMS.trials("sgd"), load_results(drafts.results))
    assert lr is not None
    assert standing(SUMS, tmp_path) == {}
    run = SUMS.run("sgd", SEEDS[1], lr)
    first, _ = bring(store, run, allow_dirty=True)
    again, _ = bring(store, run, allow_dirty=True)
    assert again.to_json() == first.to_json()
    assert standing(SUMS, tmp_path) == {("sgd", SEEDS[1]): load_result(tmp_path / f"{run.name}.json")}


LOSSES = st.one_of(st.none(), st.floats(0.01, 10))
"""Training losses at the end of a run; None where it diverged."""


@given(st.dictionaries(st.tuples(st.sampled_from(["kron", "sgd"]), st.sampled_from(SEEDS)), LOSSES))
def test_lower_is_lower_on_every_seed(losses: dict[tuple[str, int], float | None]) -> None:
    """At most one of two methods is lower, none is without a common seed, and a run that diverged never is."""
    found = {(m, s): ended(SUMS.run(m, s, 0.1), loss) for (m, s), loss in losses.items()}
    one, other = (is_lower(found, *pair, "train_loss") for pair in (("kron", "sgd"), ("sgd", "kron")))
    common = [s for s in SEEDS if {("kron", s), ("sgd", s)} <= losses.keys()]
    assert not (one and other)
    assert not one or (common and all(losses["kron", s] is not None for s in common))
    assert not is_lower(found, "kron", "sgd", "train_loss", factor=2.0) or one


@given(st.sets(st.sampled_from(SEEDS)), st.integers(-1, 1))
def test_enough_is_every_seed_and_every_step(seeds: set[int], more: int) -> None:
    """A seed or a step that is missing is too little, and steps beyond the author's are enough."""
    steps = CATALOGUE["mnist_cnn"].steps + more
    found = {("kron", s): ended(Run("mnist_cnn", "kron", s, steps), 0.1) for s in seeds}
    assert has_enough(found, ["kron"]) == (len(seeds) == len(SEEDS) and more >= 0)
    assert not has_enough(found, ["kron", "sgd"])


@pytest.mark.parametrize(("steps", "losses"), [([], []), ([100], [0.5]), ([50, 100], [0.5, 0.4])])
def test_latest_loss_takes_two_records(steps: list[int], losses: list[float]) -> None:
    """The error says which records there are."""
    result = ended(SUMS.run("sgd", 0, 0.1), 0.1)
    result.curve.update(step=steps, train_loss=losses)
    with pytest.raises(ExperimentError, match=r"has the records \["):
        latest_loss(result)


def test_rows_have_one_width() -> None:
    """What isn't there, and what diverged, has its place in a table."""
    lost = ended(SUMS.run("sgd", 0, 0.1), None, "diverged")
    rows = [run_row("sgd", found) for found in ({}, {("sgd", 0): lost})]
    assert [len(row) for row in rows] == [5, 5]
    assert "inf" in rows[1]
    assert trial_row(SUMS, "sgd", []) == ["sgd", "-", "-", "-"]


def test_committed_trials_are_trials_of_a_comparison() -> None:
    """Nothing but trials lies among the trials, each of a commit that is not dirty."""
    known = {trial.name: trial for c in COMPARISONS.values() for m in METHODS for trial in c.trials(m)}
    for result in load_results(RESULTS / "tuning"):
        assert result.run.seed == TUNING_SEED
        assert result.run == known[result.run.name]
        assert not any(session["commit"].endswith("-dirty") for session in result.sessions)
