"""`make gpu` itself needs a GPU; that its script runs, and says so where there is none, does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from psgd_lit.experiments.images import IMAGE_PROBLEMS
from psgd_lit.experiments.methods import METHODS

SCRIPT = Path(__file__).parent / "gpu.py"


@pytest.mark.slow
def test_the_script_runs_on_the_cpu(tmp_path: Path) -> None:
    """The same checks on small sizes, without the environment of the book."""
    out = tmp_path / "results" / "gpu.json"
    variables = os.environ | {"DEVICE": "cpu", "STEPS": "2", "OUT": str(out)}
    subprocess.run(
        [sys.executable, str(SCRIPT)],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        env=variables,
    )
    results = json.loads(out.read_text())
    assert results["torch"] == torch.__version__
    for check in ("groups agree with the host", "updates in a graph agree"):
        assert max(results[check].values()) < 1e-6
    assert results["experiments 3 to 5"].keys() == IMAGE_PROBLEMS.keys()
    for times in results["experiments 3 to 5"].values():
        assert times.keys() == set(METHODS) - {"dense"}
        assert all(found["median_ms"] > 0 for found in times.values())
        assert times["sgd"]["ratio"] == 1
    assert results["seconds a step"].keys() == {"sgd", "kron", "kron, not due", "esgd"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU; say `make gpu`")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    """A machine without CUDA gets one sentence, and no file."""
    out = tmp_path / "gpu.json"
    run = subprocess.run([sys.executable, str(SCRIPT), "--out", str(out)], capture_output=True, text=True)
    assert run.returncode == 1
    assert "no CUDA device" in run.stderr
    assert not out.exists()
