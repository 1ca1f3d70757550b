"""The contest of optimizers: its tasks, its contenders, and what is kept of their runs."""

import argparse
import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from psgd_lit.experiments import contenders, contest
from psgd_lit.experiments.__main__ import main
from psgd_lit.experiments.contenders import CONTENDERS, OURS, Contender, Race
from psgd_lit.experiments.contest import (
    FACTORS,
    SEEDS,
    TUNING_SEED,
    Outcome,
    Sheet,
    load_sheet,
    run_race,
    run_task,
)
from psgd_lit.experiments.noiseless import TASKS
from psgd_lit.experiments.records import ExperimentError, locked
from psgd_lit.experiments.runner import Store

EVERY_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
EVERY_METHOD = pytest.mark.parametrize("method", CONTENDERS)
QUICK = ["--seconds", "0.005", "--allow-dirty"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The clock wants one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., int]:
    """The contest's command, with its files in an empty folder."""
    folders = [
        "--results",
        str(tmp_path / "results"),
        "--checkpoints",
        str(tmp_path / "checkpoints"),
    ]
    return lambda *words: main([*folders, "contest", *words])


@pytest.fixture
def sheet_path(tmp_path: Path) -> Path:
    """Where the command keeps what it finds of Rosenbrock's function."""
    return tmp_path / "results" / "contest" / "rosenbrock.json"


# Tasks -----------------------------------------------------------------------------------------------------------


def two_steps(task: Any, seed: int) -> list[Any]:
    """Judgements and losses of two steps of gradient descent."""
    problem = task.make(seed)
    params, seen = list(problem.model.parameters()), [*problem.judge()]
    for _ in range(2):
        loss = problem.loss(*problem.draw())
        gradient = torch.autograd.grad(loss, params)
        assert all(g.isfinite().all() for g in gradient)
        assert any(g.any() for g in gradient)
        with torch.no_grad():
            for p, g in zip(params, gradient, strict=True):
                p.sub_(1e-6 * g)
        seen.append(loss.item())
    return [*seen, *problem.judge()]


@EVERY_TASK
def test_tasks_are_finite_and_determined_by_their_seed(task):
    torch.rand(3)  # whatever the hidden state is
    once, again, other = two_steps(task, 0), two_steps(task, 0), two_steps(task, 1)
    assert once == again
    assert once != other
    assert all(math.isfinite(value) for value in once)


@EVERY_TASK
def test_making_a_task_leaves_the_hidden_state_alone(task):
    before = torch.get_rng_state()
    task.make(3).draw()
    assert torch.equal(before, torch.get_rng_state())


@EVERY_TASK
def test_data_are_the_same_for_all_seeds_and_batches_where_there_is_noise(task):
    one, other = task.make(0), task.make(1)
    assert all(torch.equal(a, b) for a, b in zip(one.shown, other.shown, strict=True))
    first, second = one.draw(), one.draw()
    is_same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert is_same == (not task.is_noisy)


@EVERY_TASK
def test_losses_have_exact_second_derivatives(task):
    """The Hessian is symmetric: u H v = v H u, for probes of every parameter."""
    problem = task.make(0)
    params, source = list(problem.model.parameters()), torch.Generator().manual_seed(1)
    u, v = ([torch.randn(p.shape, dtype=p.dtype, generator=source) for p in params] for _ in range(2))
    gradient = torch.autograd.grad(problem.loss(*problem.draw()), params, create_graph=True)

    def product(v: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(gradient, params, v, retain_graph=True, materialize_grads=True)

    def dot(a: Any, b: Any) -> Tensor:
        return torch.stack([(x * y).sum().double() for x, y in zip(a, b, strict=True)]).sum()

    one, other = dot(u, product(v)), dot(v, product(u))
    size = dot(u, u).sqrt() * dot(product(v), product(v)).sqrt()
    assert abs(one - other) < 1e-5 * size
    assert size > 0


# Contenders ------------------------------------------------------------------------------------------------------


@EVERY_METHOD
def test_contenders_step_on_a_network_and_count(method):
    if method in ("soap", "psgd-torch"):
        pytest.importorskip({"soap": "pytorch_optimizer", "psgd-torch": "psgd_torch"}[method])
    task = TASKS["poisson"]
    race = Race(task, method, 1.0, seed=0)
    before = [p.detach().clone() for p in race.problem.model.parameters()]
    for _ in range(2):
        race.step()
    after = list(race.problem.model.parameters())
    assert all(p.isfinite().all() for p in after)
    assert any(not torch.equal(p, b) for p, b in zip(after, before, strict=True))
    assert race.steps == 2
    assert race.seconds > 0
    counts = dict.fromkeys(("exact", "alternating", "default", "psgd-lbfgs"), 6)
    assert race.gradients == counts.get(method, 2) or method == "lbfgs"


@EVERY_METHOD
def test_the_factor_multiplies_the_default_step_size(method):
    if method in ("soap", "psgd-torch"):
        pytest.importorskip({"soap": "pytorch_optimizer", "psgd-torch": "psgd_torch"}[method])
    one, ten = (Race(TASKS["poisson"], method, factor, seed=0).lr for factor in (1.0, 10.0))
    assert ten == pytest.approx(10 * one)


def test_products_count_where_they_are_made(monkeypatch):
    told = OURS["exact"] | {"update_every": 3}
    monkeypatch.setitem(CONTENDERS, "rare", replace(CONTENDERS["exact"], settings=told))
    race = Race(TASKS["rosenbrock"], "rare", 1.0, seed=0)
    counts = []
    for _ in range(6):
        race.step()
        counts.append(race.gradients)
    assert counts == [3, 4, 5, 8, 9, 10]


def test_a_contender_that_cannot_run_a_task_says_why():
    with pytest.raises(ExperimentError, match=r"lbfgs can't run gpt: .* noisy"):
        Race(TASKS["gpt"], "lbfgs", 1.0, seed=0)
    with pytest.raises(ExperimentError, match="muon can't run rosenbrock: it has no matrices"):
        Race(TASKS["rosenbrock"], "muon", 1.0, seed=0)


def test_a_missing_package_is_named(monkeypatch):
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(contenders.importlib, "import_module", missing)
    with pytest.raises(ExperimentError, match="pip install pytorch-optimizer"):
        Race(TASKS["poisson"], "soap", 1.0, seed=0)


# Outcomes --------------------------------------------------------------------------------------------------------


class Exploding:
    """An optimizer that leaves its parameters undefined at its third step, or gives up there."""

    def __init__(self, problem: Any, seed: int, gives_up: bool) -> None:
        self.params, self.gives_up = list(problem.model.parameters()), gives_up
        self.param_groups = [{"lr": 1.0}]
        self.t = 0

    def step(self, closure: Callable[[], Tensor]) -> None:
        """Call the closure, and explode when the time has come."""
        closure()
        self.t += 1
        if self.t == 3:
            if self.gives_up:
                raise torch.linalg.LinAlgError("no convergence")
            with torch.no_grad():
                self.params[0].fill_(math.nan)


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_run_that_diverges_is_kept(gives_up, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "bomb", Contender(Exploding, {"gives_up": gives_up}, calls_backward=False))
    outcome = run_race(TASKS["rosenbrock"], "bomb", 1.0, 0, seconds=30.0)
    assert outcome.state == "diverged"
    assert outcome.curve["objective"][-1] is None
    assert outcome.curve["objective"][0] > 0
    assert outcome.at("objective", "seconds") == math.inf
    assert outcome.curve["gradients"][-1] <= 4
    text = Sheet("rosenbrock", [], [outcome]).to_json()
    assert "NaN" not in text
    assert Outcome(**json.loads(text)["outcomes"][0]) == outcome


def test_several_threads_are_refused():
    torch.set_num_threads(2)
    with pytest.raises(ExperimentError, match="OMP_NUM_THREADS=1"):
        run_race(TASKS["rosenbrock"], "sgd", 1.0, 0, seconds=0.01)


def test_curves_rise_in_both_clocks_and_end_at_the_end():
    curve = run_race(TASKS["rosenbrock"], "adamw", 1.0, 0, seconds=0.1).curve
    for clock in ("seconds", "gradients"):
        assert list(curve[clock]) == sorted(curve[clock])
    assert curve["seconds"][0] == 0
    assert curve["seconds"][-1] >= 0.1
    assert 10 < len(curve["seconds"]) < 60


# The command -----------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_run_again(command, sheet_path, capsys):
    words = ["--task", "rosenbrock", "--method", "sgd", *QUICK]
    assert command(*words) == 0
    first, ran = sheet_path.read_bytes(), capsys.readouterr().out.splitlines()
    keys = [o.key for o in load_sheet(sheet_path, "rosenbrock").outcomes]
    assert len(ran) == len(keys) == len(set(keys))
    assert {(1.0, seed) for seed in SEEDS} | {(f, TUNING_SEED) for f in FACTORS} <= {key[1:] for key in keys}
    assert command(*words) == 0
    assert (sheet_path.read_bytes(), capsys.readouterr().out) == (first, "")
    assert command(*words, "--seed", "1", "--again") == 0
    assert 1 <= len(capsys.readouterr().out.splitlines()) <= 2
    assert [o.key for o in load_sheet(sheet_path, "rosenbrock").outcomes] == keys


def test_more_time_or_other_settings_run_again_and_less_time_does_not(command, sheet_path, monkeypatch, capsys):
    words = ["--task", "rosenbrock", "--method", "sgd", "--seed", "0", "--allow-dirty"]
    for seconds, count in (("0.02", 1), ("0.01", 0), ("0.03", 1), ("0.03", 0)):
        assert command(*words, "--seconds", seconds) == 0
        assert len(capsys.readouterr().out.splitlines()) == count
    (outcome,) = load_sheet(sheet_path, "rosenbrock").outcomes
    assert outcome.seconds == 0.03
    monkeypatch.setitem(CONTENDERS, "sgd", replace(CONTENDERS["sgd"], settings={"momentum": 0.5}))
    assert command(*words, "--seconds", "0.01") == 0
    (outcome,) = load_sheet(sheet_path, "rosenbrock").outcomes
    assert (outcome.seconds, outcome.settings) == (0.01, {"momentum": 0.5})


def test_a_run_that_is_cut_off_goes_on(command, sheet_path, monkeypatch):
    """The power fails in the fourth run: three are there, and the others follow."""
    calls = []

    def failing(*args: Any) -> Outcome:
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return run_race(*args)

    monkeypatch.setattr(contest, "run_race", failing)
    with pytest.raises(KeyboardInterrupt):
        command("--task", "rosenbrock", "--method", "sgd", *QUICK)
    assert len(load_sheet(sheet_path, "rosenbrock").outcomes) == 3
    assert command("--task", "rosenbrock", "--method", "sgd", *QUICK) == 0
    assert len(load_sheet(sheet_path, "rosenbrock").outcomes) == len(calls) - 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--task", "chess"], "unknown task 'chess'; the tasks are perceptron"),
        (["--method", "adam"], "unknown method 'adam'; the methods are whiten"),
        (["--seed", "5"], "no run has the seed 5: there are 0, 1, 2, and 100 for tuning"),
        (["--seconds", "-1"], "a run needs a positive time"),
    ],
)
def test_bad_names_are_errors(words, complaint, command, tmp_path, capsys):
    assert command(*words, "--allow-dirty") == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{}", "is no sheet"),
        ("broken", "is no sheet"),
        (Sheet("gpt", [], []).to_json(), "the sheet of gpt"),
    ],
)
def test_a_file_that_is_no_sheet_stays(content, complaint, command, sheet_path, capsys):
    sheet_path.parent.mkdir(parents=True)
    sheet_path.write_text(content)
    assert command("--task", "rosenbrock", "--method", "sgd", *QUICK) == 1
    assert complaint in capsys.readouterr().err
    assert sheet_path.read_text() == content


def test_code_that_differs_from_its_commit_is_refused(command, monkeypatch, sheet_path, capsys):
    monkeypatch.setattr(contest, "environment", lambda device: {"commit": "abc-dirty"})
    assert command("--task", "rosenbrock", "--method", "sgd", "--seconds", "0.01") == 1
    assert "--allow-dirty" in capsys.readouterr().err
    assert not sheet_path.exists()


def test_two_processes_share_no_task(command, tmp_path, capsys):
    """A lock is held by an open file, so a second one in the same process is refused, too."""
    with locked(tmp_path / "checkpoints" / "contest-rosenbrock.lock"):
        assert command("--task", "rosenbrock", "--method", "sgd", *QUICK) == 1
    assert "contest-rosenbrock is being trained" in capsys.readouterr().err


def test_recorded_sheets_can_be_read():
    """What is recorded for the book is sheets of its tasks, of contenders that exist."""
    folder = Path(__file__).resolve().parents[1] / "nbs" / "results" / "contest"
    for path in folder.glob("*.json"):
        sheet = load_sheet(path, path.stem)
        assert sheet.task in TASKS
        assert {o.method for o in sheet.outcomes} <= CONTENDERS.keys()
        assert len({o.key for o in sheet.outcomes}) == len(sheet.outcomes)
        assert all(o.session < len(sheet.sessions) for o in sheet.outcomes)


def test_a_signal_ends_the_contest_after_the_run(tmp_path, monkeypatch):
    def interrupted(*args: Any) -> Outcome:
        signal.raise_signal(signal.SIGTERM)
        return run_race(*args)

    monkeypatch.setattr(contest, "run_race", interrupted)
    args = argparse.Namespace(seed=None, seconds=0.005, again=False, allow_dirty=True)
    store = Store(tmp_path / "results", tmp_path / "checkpoints")
    assert run_task(TASKS["rosenbrock"], ["sgd"], store, args) == 128 + signal.SIGTERM
    assert len(load_sheet(store.results / "contest" / "rosenbrock.json", "rosenbrock").outcomes) == 1
