"""Forked kernels are kernels: apart from each other and from the library, judged by nbval, and gone with their run."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kernel_server
import nbformat
import pytest
from gates import NBS, PAGES, ROOT
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat import v4
from writer import KERNEL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels() -> Iterator[None]:
    """One server for all tests of this file."""
    with kernel_server.serving():
        yield


def run(folder: Path, *sources: str) -> list[str]:
    """What some cells return, or print, in one forked kernel."""
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name="forked", resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [cell.outputs[0] for cell in notebook.cells if cell.outputs]
    return [output.get("text") or output.data["text/plain"] for output in outputs]


def alive(process: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_kernel_is_fresh_and_knows_only_others_libraries(kernels: None, tmp_path: Path) -> None:
    """In its folder, in its own process, without this library and without what another kernel has done."""
    look = "import os, sys\nsorted(m for m in sys.modules if m.startswith('psgd_lit')), 'torch' in sys.modules"
    state = "print('x' in globals(), os.getcwd(), hasattr(sys.modules['torch'], 'spoiled'))"
    first = run(tmp_path, look, state, "import torch\nx = torch.spoiled = 1", "os.getpid()")
    second = run(tmp_path, look, state, "os.getpid()")
    assert first[:2] == second[:2] == ["([], True)", f"False {tmp_path} False\n"]
    assert first[2] != second[2]


def test_no_random_number_is_shared(kernels: None, tmp_path: Path) -> None:
    """A chapter that forgets a seed draws something else in each kernel, as in plain ones."""
    draw = "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(()).item())"
    (one,), (other,) = run(tmp_path, draw), run(tmp_path, draw)
    assert not set(one.split()) & set(other.split())


def test_figures_and_subprocesses_are_as_in_a_plain_kernel(kernels: None, tmp_path: Path) -> None:
    """The backend of matplotlib, the number of threads, and the end of a subprocess."""
    cells = [
        "import matplotlib\nmatplotlib.get_backend()",
        "import torch\ntorch.get_num_threads()",
    ]
    cells += ["import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''], check=True).returncode"]
    plain = v4.new_notebook(cells=[v4.new_code_cell(source) for source in cells])
    NotebookClient(plain, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert run(tmp_path, *cells) == [cell.outputs[-1].data["text/plain"] for cell in plain.cells]


def test_a_kernel_ends_with_the_process_that_stands_for_it(kernels: None, tmp_path: Path) -> None:
    """What kills the one kills the other."""
    manager = KernelManager(kernel_name="forked")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    reply: dict[str, Any] = client.execute_interactive("import os", user_expressions={"pid": "os.getpid()"}, timeout=60)
    kernel = int(reply["content"]["user_expressions"]["pid"]["data"]["text/plain"])
    assert alive(kernel)
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    for _ in range(200):
        if not alive(kernel):
            return
        time.sleep(0.05)
    pytest.fail(f"kernel {kernel} has outlived its manager")


def test_nbval_sees_what_is_wrong(tmp_path: Path) -> None:
    """A cell that prints what is stored passes; one that prints something else, or fails, fails."""
    cells = [
        v4.new_code_cell(source, execution_count=1, outputs=[v4.new_output("stream", text=text)])
        for source, text in [
            ("print(1)", "1\n"),
            ("print(1)", "2\n"),
            ("print(1)\n1 / 0", "1\n"),
        ]
    ]
    nbformat.write(v4.new_notebook(cells=cells, metadata=KERNEL), tmp_path / "a.ipynb")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "nbs.conftest",
        "-p",
        "no:cacheprovider",
        "--nbval",
    ]
    told = subprocess.run(
        [*command, "--nbval-kernel-name", "forked", str(tmp_path / "a.ipynb")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "2 failed, 1 passed" in told.stdout
    assert "ZeroDivisionError" in told.stdout


def test_only_what_stands_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--changed`; without it, nothing is."""
    spec = importlib.util.spec_from_file_location("choice", NBS / "conftest.py")
    assert spec
    assert spec.loader
    choice = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(choice)
    monkeypatch.setattr(choice, "is_as_written", lambda path: path == PAGES[0])
    for changed, left_out in ((True, [True, None, None]), (False, [None] * 3)):
        config = SimpleNamespace(getoption={"--changed": changed}.__getitem__)
        assert [choice.pytest_ignore_collect(path, config) for path in (*PAGES[:2], NBS / "claims.toml")] == left_out


def test_the_server_says_that_it_could_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that can't be imported is an error here, not a kernel that never answers."""
    before = dict(os.environ)
    monkeypatch.setattr(kernel_server.sys, "executable", "/bin/false")
    with (
        pytest.raises(RuntimeError, match="the server of kernels ended"),
        kernel_server.serving(),
    ):
        pass
    assert dict(os.environ) == before


def test_no_server_is_left(tmp_path: Path) -> None:
    """The server ends with its user, and the environment is as before."""
    before = dict(os.environ)
    with kernel_server.serving():
        (process,) = json.loads(run(tmp_path, "import os\n[os.getppid()]")[0])
    assert not alive(process)
    assert dict(os.environ) == before
