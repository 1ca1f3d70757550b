"""The runner of the experiments: what a kill, a full disk, a damaged file and a user can't do to a result."""

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgd_lit.experiments import runner
from psgd_lit.experiments.__main__ import main, planned
from psgd_lit.experiments.methods import METHODS, PAPER, SGD, Step, make_optimizer
from psgd_lit.experiments.runner import (
    ExperimentError,
    Result,
    Run,
    Store,
    Training,
    load_result,
    load_results,
    pack,
    solved_at,
    stop_signals,
    thin,
    train,
    unpack,
    write_atomically,
)
from psgd_lit.experiments.sequences import PROBLEMS

ROOT = Path(__file__).resolve().parents[1]
SHORT = Run("addition_rnn", "kron", steps=200, length=6)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in an empty folder."""
    return Store(tmp_path / "results", tmp_path / "checkpoints")


def trained(run: Run, steps: int) -> Training:
    """A training, so many steps on, in memory alone."""
    training = Training(run)
    while training.t < steps:
        training.step()
    return training


def is_same(a: Training, b: Training) -> bool:
    """True if two trainings have the same bits in parameters and optimizer, generator and records."""

    def tensors(tree: Any) -> list[torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            return [tree]
        inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
        return [tensor for part in inner for tensor in tensors(part)]

    one, other = (tensors([t.params, t.optimizer.state_dict(), t.source.get_state()]) for t in (a, b))
    numbers = [(t.t, t.smoothed, t.curve, t.state) for t in (a, b)]
    return numbers[0] == numbers[1] and all(map(torch.equal, one, other)) and len(one) == len(other)


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder and what they hold."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(store: Store, line: str) -> list[str]:
    """The words of a command line with the folders of a store."""
    return ["--results", str(store.results), "--checkpoints", str(store.checkpoints), *line.split()]


def process(store: Store, line: str) -> "subprocess.Popen[str]":
    """Start the command line in a process of its own, with nothing of a terminal about it."""
    words = [sys.executable, "-m", "psgd_lit.experiments", *command(store, line)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, env=environment, **pipes)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


# Stopped and continued -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_resume_is_bit_equal(method: str) -> None:
    """Packed and unpacked anywhere, a training goes on with the same bits."""
    run = Run("addition_rnn", method, seed=1, steps=30, length=6)
    for cut in (1, 13):
        rest = Training(run)
        unpack(rest, pack(trained(run, cut)))
        while rest.t < 30:
            rest.step()
        assert is_same(rest, trained(run, 30))


@pytest.mark.parametrize(
    "options",
    [
        {"hvp": "approx"},
        {"update_every": "log10"},
        {"update_every": 5},
        {"settings": {"batch": 3, "momentum": 0.9, "max_norm": math.inf}},
    ],
)
def test_resume_with_options(options: dict[str, Any]) -> None:
    """Approximate products, skipped updates and settings continue as well."""
    run = Run("addition_rnn", "kron", steps=30, length=6, **options)
    rest = Training(run)
    unpack(rest, pack(trained(run, 11)))
    while rest.t < 30:
        rest.step()
    assert is_same(rest, trained(run, 30))
    assert not is_same(rest, trained(replace(run, seed=1), 30))


def test_killed_training_continues(store: Store) -> None:
    """After SIGKILL in the middle of anything, the last checkpoint leads to the same end."""
    run = replace(SHORT, steps=100_000)
    script = f"""
from pathlib import Path
from psgd_lit.experiments.runner import Run, Store, Training, train
train(Training({run!r}), Store(Path({str(store.results)!r}), Path({str(store.checkpoints)!r})), save_every=0.05)
"""
    with subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}) as child:
        wait_for(lambda: store.checkpoint(run).exists() and store.restore(run).t > 100)
        child.kill()
    rest = store.restore(run)
    result = store.result(run)
    assert result is not None
    assert result.state == "running"
    assert result.run.steps == 100_000
    assert abs(result.steps_done - rest.t) < 1000
    assert child.returncode == -signal.SIGKILL
    end = rest.t + 50
    while rest.t < end:
        rest.step()
    assert is_same(rest, trained(run, end))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_a_checkpoint(store: Store, number: int, code: int) -> None:
    """Ctrl-C and a request to end leave checkpoint and result; nothing is drawn where nobody watches."""
    # the line that says so is the only output
    line = "run addition_rnn --method sgd --length 6"
    with process(store, line) as child:
        time.sleep(1)
        wait_for(lambda: "SigCgt" in status(child.pid) and catches(child.pid, number))
        time.sleep(0.5)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    run = Run("addition_rnn", "sgd", length=6)
    result = store.result(run)
    assert child.returncode == code
    assert err == ""
    assert len(out.splitlines()) == 1
    assert result is not None
    assert result.state == "running"
    assert 0 < result.steps_done < run.steps
    assert f"step {result.steps_done} of 100000" in out
    assert is_same(store.restore(run), trained(run, result.steps_done))


def status(pid: int) -> str:
    """What the system says of a process."""
    return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")


def catches(pid: int, number: int) -> bool:
    """True if a process handles a signal itself, and SIGTERM too, which Python doesn't by default."""
    mask = int(status(pid).partition("SigCgt:")[2].split()[0], 16)
    return all(mask >> (n - 1) & 1 for n in (number, signal.SIGTERM))


def test_second_signal_is_obeyed_at_once() -> None:
    """Whoever says it twice means it."""
    before = signal.getsignal(signal.SIGINT)
    with stop_signals() as received:
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_finished_run_can_be_extended(store: Store) -> None:
    """More steps go on where the run ended, and end where a longer run ends."""
    train(Training(SHORT), store)
    longer = replace(SHORT, steps=400)
    train(store.restore(longer), store)
    assert is_same(store.restore(longer), trained(longer, 400))


# Nothing is lost -------------------------------------------------------------------------------------------------


def full_disk(number: int) -> None:
    """What writing to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says so, what was there is untouched, and no half file is left."""
    train(Training(SHORT), store)
    before = files(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ExperimentError, match="No space left on device; what stood there before is untouched"):
        train(store.restore(replace(SHORT, steps=300)), store)
    assert files(tmp_path) == before


def test_unwritable_folder(tmp_path: Path) -> None:
    """A folder that can't be made is an error too."""
    (tmp_path / "file").touch()
    with pytest.raises(ExperimentError, match="can't write"):
        write_atomically(tmp_path / "file" / "below" / "path", b"")


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04", b"\x80\x04N.", None])
def test_damaged_checkpoint(
    store: Store, damage: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that can't be read is named and left alone."""
    train(Training(replace(SHORT, steps=100)), store)
    path = store.checkpoint(SHORT)
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    before = files(tmp_path)
    line = "run addition_rnn --method kron --length 6 --steps 200 --resume"
    assert main(command(store, line)) == 1
    assert f"error: {path}" in capsys.readouterr().err
    assert files(tmp_path) == before


def test_shorter_run_keeps_the_longer_result(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result is replaced by one that reaches as far, and never by less."""
    line = "run addition_rnn --method sgd --length 6 --steps"
    assert main(command(store, f"{line} 300")) == 0
    before = files(tmp_path)
    assert main(command(store, f"{line} 100")) == 1
    assert files(tmp_path) == before
    assert "say --resume or --restart" in capsys.readouterr().err
    assert main(command(store, f"{line} 300 --resume")) == 0
    assert files(tmp_path) == before
    assert main(command(store, f"{line} 100 --restart")) == 0
    (result,) = load_results(store.results)
    assert result.steps_done == 300
    assert main(command(store, f"{line} 400 --restart")) == 0
    (result,) = load_results(store.results)
    assert result.steps_done == 400


def test_missing_checkpoint(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """A result whose checkpoint is gone isn't extended behind the user's back."""
    train(Training(SHORT), store)
    store.checkpoint(SHORT).unlink()
    assert main(command(store, "run addition_rnn --method kron --length 6 --steps 300 --resume")) == 1
    assert "is missing: say --restart" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run xor --method kron", "unknown problem 'xor'; there are addition_rnn"),
        ("run xor_rnn --method adamw", "unknown method 'adamw'; there are sgd"),
        ("run xor_rnn --method sgd --hvp approx", "sgd takes no Hessian-vector products"),
        ("run xor_rnn --method adam --update-every 5", "adam learns no preconditioner"),
        ("run xor_rnn --method kron --seed -1", "seeds from 0"),
        ("run xor_rnn --method kron --steps -5", "steps are at least 1"),
        ("run xor_rnn --method kron --device nowhere", "nowhere"),
        ("run xor_rnn --method kron --set momentum=2", "momentum must be"),
        ("run xor_rnn --method kron --set damping_kind=odd", "damping_kind must be one of"),
        ("run xor_rnn --method sgd --set lr=0", "lr must be above 0"),
        ("run xor_rnn --method sgd --set batch=1.5", "batch must be a whole number, not '1.5'"),
        ("run xor_rnn --method sgd --set momentum=0.9", "sgd has no setting 'momentum'; it has batch, lr, max_norm"),
        ("run xor_rnn --method adam --set max_norm=1", "adam has no setting 'max_norm'; it has batch, beta1"),
        ("run xor_rnn --method kron --set seed=1", "kron has no setting 'seed'"),
        ("run xor_rnn --method kron --set lr=1 --set lr=2", "once a name"),
        ("run xor_rnn --method kron --set lr", "say NAME=VALUE"),
        ("compare xor", "unknown problem 'xor'"),
    ],
)
def test_errors_of_users(store: Store, line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is one line that says what to do, exit code 1, and no file."""
    assert main(command(store, line)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert says in err
    assert len(err.splitlines()) == 1
    assert not store.results.exists()
    assert not store.checkpoints.exists()


# Results ---------------------------------------------------------------------------------------------------------


def test_schema(store: Store) -> None:
    """A result is strict JSON with the fields that the book reads, and reads back as it was written."""
    result, _ = train(Training(SHORT), store)
    (path,) = store.results.iterdir()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    fields = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert set(fields) == set(Result.__dataclass_fields__)
    assert fields["run"] == {
        "problem": "addition_rnn",
        "method": "kron",
        "seed": 0,
        "steps": 200,
        "length": 6,
        "hvp": "exact",
        "update_every": 1,
        "device": "cpu",
    }
    assert set(fields["settings"]) == {"lr", "max_norm", "batch", "parameters", "solved_below", "record_every"}
    assert set(fields["sessions"][0]) == {"first_step", "date", "device", "threads", "torch", "python", "commit"}
    assert fields["curve"]["step"] == [100, 200]
    assert set(fields["ms_per_step"]) == {"p10", "median"}
    assert (fields["state"], fields["steps_done"], fields["test_samples"]) == ("finished", 200, 10_000)
    assert load_result(path).to_json() == path.read_text(encoding="utf-8")
    assert path.stat().st_size < 3000
    assert result.run == SHORT


def test_committed_results() -> None:
    """Every result of the book reads, is honest about its steps, and has a name that says what it is."""
    for path in (ROOT / "nbs" / "results").glob("*-T*-s*.json"):
        result = load_result(path)
        steps = result.curve["step"]
        assert path.stem == result.run.name
        assert path.stat().st_size < 40_000
        assert len(steps) <= 500
        assert steps == sorted(set(steps))
        assert not steps or steps[-1] <= result.steps_done
        assert (result.state == "finished") == (result.steps_done == result.run.steps and result.solved_at is None)


def test_results_are_byte_stable() -> None:
    """Reading a result and writing it again changes nothing, whether or not it has settings of its own."""
    for path in (ROOT / "nbs" / "results").glob("*-s*.json"):
        assert load_result(path).to_json() == path.read_text(encoding="utf-8")


# Settings --------------------------------------------------------------------------------------------------------

SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "batch": st.integers(1, 5),
        "lr": st.floats(1e-6, 1e-2),
        "max_norm": st.floats(1e-3, 1e3) | st.just(math.inf),
        "momentum": st.floats(0, 0.99),
        "lr_preconditioner": st.floats(1e-3, 0.5),
        "damping_kind": st.sampled_from(["nonconvex", "traditional"]),
    },
)


@given(SETTINGS)
def test_settings_survive_a_file(settings: dict[str, Any]) -> None:
    """A run and what it is described by are one, and its name is one that any file system takes."""
    run = replace(SHORT, settings=settings)
    assert Run(**json.loads(json.dumps(run.description))) == run
    assert hash(run) == hash(SHORT)
    assert run.name == Run(**run.description).name
    assert not set(run.name) - set("abcdefghijklmnopqrstuvwxyzT0123456789_.+-")


def test_settings_reach_the_training(store: Store) -> None:
    """They override problem and method, stand in name and result, and tell two runs apart."""
    line = "run addition_rnn --method kron --length 6 --steps 20 --set lr=0.05 --set momentum=0.5 --set batch=4"
    assert main(command(store, line)) == 0
    assert main(command(store, line.replace("0.05", "5e-2"))) == 1
    assert main(command(store, line.replace("0.05", "0.04"))) == 0
    first, second = load_results(store.results)
    assert first.run.name == "addition_rnn-T6-kron-batch4-lr0.04-momentum0.5-s0"
    group = store.restore(second.run).optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["max_norm"]) == (0.05, 0.5, 1.0)
    assert {"lr": 0.05, "momentum": 0.5, "batch": 4, "max_norm": 1.0}.items() <= second.settings.items()
    assert first.train_loss != second.train_loss


def test_one_value_has_one_name() -> None:
    """However a setting is written, the run is the same; and the paper's own settings are the default."""
    texts = [{"lr": lr, "batch": batch} for lr, batch in ((1, 64), (1.0, 64.0), ("1e0", "64"))]
    assert len({replace(SHORT, settings=text).name for text in texts}) == 1
    told = Training(replace(SHORT, settings=dict(PAPER)))
    assert is_same(trained(SHORT, 5), trained(told.run, 5))


@given(st.lists(st.integers(), max_size=40), st.integers(2, 20))
def test_thin(values: list[int], limit: int) -> None:
    """At most so many, in order, with both ends, and all of them where there is room."""
    kept = thin(list(enumerate(values)), limit)
    assert len(kept) == min(len(values), limit)
    assert kept == sorted(set(kept))
    if values:
        assert kept[0] == (0, values[0])
        assert kept[-1] == (len(values) - 1, values[-1])


def test_diverged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that isn't finite ends the run, and the result says so."""
    monkeypatch.setattr(runner, "step_size", lambda problem, method: Step(1e30, math.inf))
    result, _ = train(Training(replace(SHORT, method="sgd")), store)
    assert result.state == "diverged"
    assert result.steps_done < 200
    (saved,) = load_results(store.results)
    assert saved.train_loss is None
    assert saved.reach == 200


def test_solved(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem that is solved at five records running ends there."""
    easy = replace(PROBLEMS["addition_rnn"], solved=1e9)
    easy = replace(easy, task=replace(easy.task, error=lambda output, target: torch.zeros(())))
    monkeypatch.setitem(PROBLEMS, "addition_rnn", easy)
    result, _ = train(Training(replace(SHORT, method="sgd", steps=5000)), store)
    assert (result.state, result.steps_done, result.solved_at) == ("solved", 500, 100)
    assert train(store.restore(result.run), store)[0].steps_done == 500


def test_solved_needs_five_records_running() -> None:
    """A spike begins the count anew."""
    losses = [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    curve = {"step": list(range(10)), "train_loss": losses, "test_error": [0.0] * 10}
    assert solved_at(curve, 0.01) == 5
    assert solved_at({name: values[:9] for name, values in curve.items()}, 0.01) is None


# On a terminal ---------------------------------------------------------------------------------------------------


class Bar(contextlib.AbstractContextManager[Any]):
    """Stands for tqdm's bar and counts."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, **settings: Any) -> None:
        self.settings, self.count = settings, 0
        Bar.made.append(self)

    def __exit__(self, *error: object) -> None:
        self.settings["closed"] = True

    def set_postfix(self, **shown: Any) -> None:
        """Show a loss."""
        assert float(shown["loss"]) > 0

    def update(self) -> None:
        """Count a step."""
        self.count += 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bar_is_for_terminals(store: Store, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """A bar counts the steps that are made, on a terminal only, and goes away."""
    Bar.made = []
    monkeypatch.setitem(sys.modules, "tqdm", type(sys)("tqdm"))
    monkeypatch.setattr(sys.modules["tqdm"], "tqdm", Bar, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    train(Training(replace(SHORT, steps=20)), store)
    train(store.restore(replace(SHORT, steps=30)), store)
    assert [bar.count for bar in Bar.made] == ([20, 10] if is_terminal else [])
    assert all(bar.settings["closed"] for bar in Bar.made)
    assert [bar.settings["initial"] for bar in Bar.made] == ([0, 20] if is_terminal else [])


def test_without_tqdm(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal without tqdm trains without a bar."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert train(Training(replace(SHORT, steps=5)), store)[0].steps_done == 5


# Methods and plan ------------------------------------------------------------------------------------------------


def test_esgd_by_hand() -> None:
    """Three steps of ESGD on a diagonal quadratic, with means kept in lists."""
    curvature = torch.tensor([1.0, 10.0], dtype=torch.float64)
    x = torch.tensor([3.0, -2.0], dtype=torch.float64, requires_grad=True)
    y, squares = x.detach().clone(), []
    esgd = make_optimizer("esgd", [x], 0.1, 0.5, seed=4)
    for t in range(3):
        esgd.step(lambda: (curvature * x**2).sum() / 2)
        v = torch.randn(2, generator=torch.Generator().manual_seed((4 * 0x9E3779B1 + t) % 2**32)).double()
        squares.append((v**2, (curvature * v) ** 2))
        v2, h2 = (torch.stack(column).mean(0) for column in zip(*squares, strict=True))
        u = curvature * y * (v2 / (h2 + 1e-9)).sqrt()
        y -= 0.1 * u * min(1.0, 0.5 / u.norm().item())
        assert torch.allclose(x.detach(), y, rtol=1e-9)


def test_methods_of_one_seed_see_the_same_data() -> None:
    """Methods differ in what they do, not in what they are shown."""
    seen = []
    for method in ("sgd", "kron"):
        training = trained(replace(SHORT, method=method), 10)
        seen.append(training.problem.sample(3, training.source).inputs)
    assert torch.equal(*seen)


def test_base_has_no_direction_of_its_own() -> None:
    """An heir that changes nothing is SGD."""
    params = [torch.ones(2, requires_grad=True)]
    SGD(params, 0.25).step(lambda: params[0].square().sum())
    assert params[0].tolist() == [0.5, 0.5]


def test_plan_is_runnable() -> None:
    """Every planned run has a name of its own, a step size and an optimizer."""
    runs = planned()
    assert len({run.name for run in runs}) == len(runs)
    for run in {replace(run, seed=0) for run in runs}:
        assert Training(run).state == "running"


def test_report(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """What is done disappears from the commands that remain, and moves in the table."""
    assert main(command(store, "report --commands")) == 0
    before = capsys.readouterr().out.splitlines()
    text = train(Training(SHORT), store)[0]
    done = replace(text, run=planned()[0], state="finished", steps_done=planned()[0].steps)
    write_atomically(store.results / f"{done.run.name}.json", done.to_json().encode())
    assert main(command(store, "report --commands")) == 0
    assert capsys.readouterr().out.splitlines() == before[1:]
    assert main(command(store, "report")) == 0
    row = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("addition_rnn T=30 kron "))
    assert row.split()[3:6] == ["1", "3", "200000"]
