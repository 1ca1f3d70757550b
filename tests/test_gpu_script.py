"""`make gpu` itself needs a GPU; that its script runs, and says so where there is none, does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "gpu.py"


def test_the_script_runs_on_the_cpu(tmp_path: Path) -> None:
    """The same checks on small sizes, without the environment of the book."""
    out = tmp_path / "results" / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    results = json.loads(out.read_text())
    assert results["torch"] == torch.__version__
    assert max(results["groups agree with the host"].values()) < 1e-6
    assert results["seconds a step"].keys() == {"sgd", "kron", "kron, not due", "esgd"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU; say `make gpu`")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    """A machine without CUDA gets one sentence, and no file."""
    out = tmp_path / "gpu.json"
    run = subprocess.run([sys.executable, str(SCRIPT), "--out", str(out)], capture_output=True, text=True)
    assert run.returncode == 1
    assert "no CUDA device" in run.stderr
    assert not out.exists()
