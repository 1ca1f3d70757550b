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
from dataclasses import asdict, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgd_lit.experiments import records, runner
from psgd_lit.experiments.__main__ import main, planned
from psgd_lit.experiments.methods import METHODS, SGD, Step, make_optimizer
from psgd_lit.experiments.records import (
    BINS,
    ExperimentError,
    Stopwatch,
    Times,
    check_clean,
    commit_of,
    environment,
    write_atomically,
)
from psgd_lit.experiments.runner import (
    CATALOGUE,
    RECORD_EVERY,
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
    unpack,
)
from psgd_lit.settings import PAPER

ROOT = Path(__file__).resolve().parents[1]
SHORT = Run("addition_rnn", "kron", steps=200, length=6)
PLAIN = replace(SHORT, method="sgd", steps=100)
"""A run for what does not depend on the method."""
train = partial(runner.train, allow_dirty=True)  # whoever changes the library runs its tests before the commit


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

    one, other = (tensors([t.params, t.optimizer.state_dict(), t.source.get_state(), t.best]) for t in (a, b))
    numbers = [(t.t, t.mean.item(), t.curve, t.state, t.best.get("step"), len(t.watch.read())) for t in (a, b)]
    return numbers[0] == numbers[1] and all(map(torch.equal, one, other)) and len(one) == len(other)


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder and what they hold."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command(store: Store, line: str) -> list[str]:
    """The words of a command line with the folders of a store."""
    words = [
        "--results",
        str(store.results),
        "--checkpoints",
        str(store.checkpoints),
        *line.split(),
    ]
    return [*words, "--allow-dirty"] if line.startswith("run") else words


def process(store: Store, line: str) -> "subprocess.Popen[str]":
    """Start the command line in a process of its own, with nothing of a terminal about it."""
    words = [sys.executable, "-m", "psgd_lit.experiments", *command(store, line)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, env=variables, **pipes)


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
    whole = trained(run, 30)
    for cut in (1, 13):
        rest = Training(run)
        unpack(rest, pack(trained(run, cut)))
        while rest.t < 30:
            rest.step()
        assert is_same(rest, whole)


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


@pytest.mark.slow
def test_killed_training_continues(store: Store) -> None:
    """After SIGKILL in the middle of anything, the last checkpoint leads to the same end."""
    run = replace(SHORT, steps=100_000)
    script = f"""
from pathlib import Path
from psgd_lit.experiments.runner import Run, Store, Training, train
store = Store(Path({str(store.results)!r}), Path({str(store.checkpoints)!r}))
train(Training({run!r}), store, save_every=0.05, allow_dirty=True)
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


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
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


@pytest.mark.slow
def test_finished_run_can_be_extended(store: Store) -> None:
    """More steps go on where the run ended, and end where a longer run ends."""
    train(Training(replace(SHORT, steps=100)), store)
    train(store.restore(SHORT), store)
    assert is_same(store.restore(SHORT), trained(SHORT, 200))


def test_state_with_all_times_continues() -> None:
    """A state that holds every time and no best network goes on with the same bits."""
    run = replace(SHORT, steps=150)
    state = torch.load(BytesIO(pack(trained(run, 70))), weights_only=True)
    del state["best"]
    state["times"] = torch.tensor([0.001] * 70, dtype=torch.float64)
    buffer = BytesIO()
    torch.save(state, buffer)
    rest = Training(run)
    unpack(rest, buffer.getvalue())
    while rest.state == "running":
        rest.step()
    assert is_same(rest, trained(run, 150))


def test_best_network_is_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint holds the network of the lowest smoothed loss beside the last one, across stops too."""
    losses = iter([0.5, 0.2, 0.4, 0.3])
    run = replace(SHORT, method="sgd", steps=400)
    training, kept = Training(run), []
    for loss in losses:
        training = store.restore(run)
        training.t += RECORD_EVERY
        training.mean.fill_(loss)
        training.params[0].data.fill_(loss)
        training.record()
        store.save(training)
        state = torch.load(store.checkpoint(run), weights_only=True)
        kept.append((state["best"]["step"], round(state["best"]["params"][0][0, 0].item(), 3)))
    assert kept == [(100, 0.5), (200, 0.2), (200, 0.2), (200, 0.2)]
    assert round(training.params[0][0, 0].item(), 3) == 0.3


# Nothing is lost -------------------------------------------------------------------------------------------------


def full_disk(number: int) -> None:
    """What writing to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says so, what was there is untouched, and no half file is left."""
    train(Training(PLAIN), store)
    before = files(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ExperimentError, match="No space left on device; what stood there before is untouched"):
        train(store.restore(replace(PLAIN, steps=300)), store)
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
    train(Training(PLAIN), store)
    path = store.checkpoint(PLAIN)
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    before = files(tmp_path)
    line = "run addition_rnn --method sgd --length 6 --steps 200 --resume"
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
    train(Training(PLAIN), store)
    store.checkpoint(PLAIN).unlink()
    assert main(command(store, "run addition_rnn --method sgd --length 6 --steps 300 --resume")) == 1
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
        (
            "run xor_rnn --method sgd --set momentum=0.9",
            "sgd has no setting 'momentum'; it has batch, dtype, lr, max_norm",
        ),
        (
            "run xor_rnn --method adam --set max_norm=1",
            "adam has no setting 'max_norm'; it has batch, beta1",
        ),
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


def test_two_processes(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """A second process on the same run is told who trains it and changes nothing; a kill frees the run."""
    line = "run addition_rnn --method sgd --length 6"
    run = Run("addition_rnn", "sgd", length=6)
    with process(store, line) as child:
        wait_for(lambda: store.lock(run).exists() and store.lock(run).read_text(encoding="utf-8") == str(child.pid))
        assert main(command(store, f"{line} --resume")) == 1
        assert f"is being trained by process {child.pid}: wait for it, or stop it" in capsys.readouterr().err
        assert main(command(store, f"{line} --seed 1 --steps 5")) == 0
        child.kill()
        child.communicate()
    assert main(command(store, f"{line} --restart --steps 5")) == 0


# Where a result comes from ---------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    """Run git in a folder, as somebody."""
    somebody = [
        "-c",
        "user.name=somebody",
        "-c",
        "user.email=somebody@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    subprocess.run(["git", "-C", str(folder), *somebody, *words], check=True, capture_output=True)


def test_commit_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change anywhere but in recorded results is seen; what git doesn't know has no commit."""
    code, other = tmp_path / "package" / "code.py", tmp_path / "README"
    result = tmp_path / "nbs" / "results" / "result.json"
    for path in (code, other, result):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    assert commit_of(code) is None
    git(tmp_path, "init")
    assert commit_of(code) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = commit_of(code)
    assert clean
    assert set(clean) <= set("0123456789abcdef")
    (tmp_path / "package" / "scratch.py").touch()
    result.write_text("2")
    assert commit_of(code) == clean
    assert commit_of(tmp_path / "package" / "scratch.py") is None
    for path in (code, other):
        path.write_text("2")
        assert commit_of(code) == f"{clean}-dirty"
        path.write_text("1")
    assert commit_of(code) == clean
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(code) is None


@pytest.mark.parametrize("commit", ["1234abc", "1234abc-dirty", None])
def test_dirty_tree(
    store: Store,
    commit: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Code that differs from its commit records nothing unless it is told to; the commit is recorded."""
    monkeypatch.setattr(records, "commit_of", lambda file: commit)
    line = command(store, "run addition_rnn --method sgd --length 6 --steps 5")
    is_dirty = commit == "1234abc-dirty"
    assert main([word for word in line if word != "--allow-dirty"]) == is_dirty
    assert ("differs from its commit 1234abc, " in capsys.readouterr().err) == is_dirty
    if is_dirty:
        assert not store.results.exists()
        assert not store.checkpoints.exists()
        assert main(line) == 0
    (result,) = load_results(store.results)
    assert result.sessions[0]["commit"] == commit
    check_clean(commit, allow_dirty=True)


def test_environment_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides about times and roundings there is recorded."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    facts = environment("cuda:1")
    assert facts["device"] == "name of cuda:1"
    assert facts.keys() - environment("cpu").keys() == {"cuda", "cudnn", "driver", "tf32"}
    assert facts["tf32"].keys() == {"matmul", "cudnn"}
    assert json.loads(json.dumps(facts)) == facts


# Times -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=60), st.floats(0, 1))
def test_times(seconds: list[float], share: float) -> None:
    """A quantile is within half a bin of the one of the sorted list, and count and sum are those of the list."""
    times = Times()
    for value in seconds:
        times.add(value)
    exact = sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)]
    assert abs(math.log2(times.quantile(share) / exact)) <= 0.5 / BINS + 1e-9
    assert len(times) == len(seconds)
    assert math.isclose(times.seconds, sum(seconds))
    assert Times(**json.loads(json.dumps(asdict(times)), object_hook=with_numbers)).quantile(share) == times.quantile(
        share
    )


def with_numbers(table: dict[str, Any]) -> dict[Any, Any]:
    """A table of JSON whose keys are numbers where they look like it."""
    return {int(key) if key.lstrip("-").isdigit() else key: value for key, value in table.items()}


class Event:
    """Stands for a mark in a GPU's queue: the device reaches it only when somebody waits for it."""

    clock: ClassVar[float] = 0.0
    waited: ClassVar[int] = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        """Stand 5 ms behind the last mark."""
        Event.clock += 5.0
        self.at = Event.clock

    def synchronize(self) -> None:
        """Wait."""
        Event.waited += 1

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return end.at - self.at


def test_stopwatch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks go into the queue, and nobody waits for the device until the times are read."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    watch = Stopwatch("cuda")
    for _ in range(4):
        watch.mark()
        watch.mark()
    assert (len(watch.times), Event.waited) == (0, 0)
    assert len(watch.read()) == 4
    assert math.isclose(watch.times.seconds, 0.02)
    assert math.isclose(watch.times.quantile(0.5), 0.005, rel_tol=0.006)


@pytest.mark.parametrize("method", ["sgd", "rmsprop", "esgd", "kron", "scan", "splu"])
def test_steps_read_no_tensor(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all coordinates have met a pair, no number is read between records, for which a GPU would make us wait."""
    training = trained(replace(SHORT, method=method), 2)
    read = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, name=name: read.append(name))
    while training.t < RECORD_EVERY - 1:
        training.step()
    monkeypatch.undo()
    assert read == []


def test_work_at_a_record_does_not_grow() -> None:
    """What a step leaves behind does not grow with the number of steps."""
    training = Training(replace(SHORT, method="sgd", steps=10_000))
    sizes = []
    for end in (500, 1000):
        while training.t < end:
            training.step()
        sizes.append(len(pack(training)))
    assert len(training.watch.marks) == 0
    assert sizes[1] - sizes[0] < 2000


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
    assert set(fields["settings"]) == {
        "lr",
        "max_norm",
        "batch",
        "parameters",
        "solved_below",
        "record_every",
    }
    assert set(fields["sessions"][0]) == {
        "first_step",
        "date",
        "device",
        "threads",
        "torch",
        "python",
        "commit",
    }
    assert fields["curve"]["step"] == [100, 200]
    assert set(fields["ms_per_step"]) == {"p10", "median"}
    assert (fields["state"], fields["steps_done"], fields["test_samples"]) == (
        "finished",
        200,
        10_000,
    )
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


@pytest.mark.slow
def test_the_authors_draw_is_a_run_of_its_own(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a name, starts elsewhere, and goes on with the same bits; images have none."""
    his = replace(SHORT, draw="author")
    assert Run(**json.loads(json.dumps(his.description))) == his != SHORT
    assert his.name != SHORT.name
    assert not torch.equal(Training(his).params[0], Training(SHORT).params[0])
    whole, rest = trained(his, 8), Training(his)
    unpack(rest, pack(trained(his, 3)))
    while rest.t < 8:
        rest.step()
    assert is_same(whole, rest)
    line = f"run {his.problem} --method {his.method} --steps 3 --length {his.length} --draw author"
    assert main(command(store, line)) == 0
    assert [path.name for path in store.results.iterdir()] == [f"{replace(his, seed=0).name}.json"]
    assert main(command(store, "run mnist_cnn --method sgd --draw author")) == 1
    error = capsys.readouterr().err
    assert "the author's draw is one of addition_rnn," in error
    assert "not of mnist_cnn on cpu" in error


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
    assert {
        "lr": 0.05,
        "momentum": 0.5,
        "batch": 4,
        "max_norm": 1.0,
    }.items() <= second.settings.items()
    assert first.train_loss != second.train_loss


def test_double_precision(store: Store) -> None:
    """A run in double precision starts where the one in single precision does, stays double, and says so."""
    run = replace(SHORT, steps=4, settings={"dtype": "float64"})
    single, double = Training(replace(run, settings={})), Training(run)
    assert all(torch.equal(a, b.float()) for a, b in zip(single.params, double.params, strict=True))
    train(double, store)
    assert {p.dtype for p in store.restore(run).params} == {torch.float64}
    single = trained(replace(run, settings={}), 4)
    for a, b in zip(single.params, double.params, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-4)
        assert not torch.equal(a.double(), b)
    result = load_result(store.results / f"{run.name}.json")
    assert run.name.endswith("-kron-dtypefloat64-s0")
    assert result.settings["dtype"] == "float64"


def test_one_value_has_one_name() -> None:
    """However a setting is written, the run is the same; and the paper's own settings are the default."""
    texts = [{"lr": lr, "batch": batch} for lr, batch in ((1, 64), (1.0, 64.0), ("1e0", "64"))]
    assert len({replace(SHORT, settings=text).name for text in texts}) == 1
    paper = {name: value for name, value in PAPER.items() if name not in ("max_norm", "update_every")}
    told = Training(replace(SHORT, settings=paper))
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
    """A loss that isn't finite ends the run at the next record, and the result says so."""
    monkeypatch.setattr(runner, "step_size", lambda problem, method: Step(1e30, math.inf))
    result, _ = train(Training(replace(SHORT, method="sgd")), store)
    assert result.state == "diverged"
    assert result.steps_done == RECORD_EVERY
    (saved,) = load_results(store.results)
    assert saved.train_loss is None
    assert saved.reach == 200


def test_solved(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem that is solved at five records running ends there."""
    easy = replace(CATALOGUE["addition_rnn"], solved=1e9)
    easy = replace(easy, task=replace(easy.task, error=lambda output, target: torch.zeros(())))
    monkeypatch.setitem(CATALOGUE, "addition_rnn", easy)
    result, _ = train(Training(replace(SHORT, method="sgd", steps=5000)), store)
    assert (result.state, result.steps_done, result.solved_at) == ("solved", 500, 100)
    assert train(store.restore(result.run), store)[0].steps_done == 500


def test_solved_needs_five_records_running() -> None:
    """A spike begins the count anew, and what was long ago is not looked at."""
    losses = [math.nan, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
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
    text = train(Training(PLAIN), store)[0]
    done = replace(text, run=planned()[0], state="finished", steps_done=planned()[0].steps)
    write_atomically(store.results / f"{done.run.name}.json", done.to_json().encode())
    assert main(command(store, "report --commands")) == 0
    assert capsys.readouterr().out.splitlines() == before[1:]
    assert main(command(store, "report")) == 0
    row = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("addition_rnn T=30 kron "))
    assert row.split()[3:6] == ["1", "3", "200000"]
