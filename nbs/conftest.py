"""What a run of the notebooks by nbval has beside nbval: kernels that start at once, and a choice of what to run."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "_ext"))
from kernel_server import ADDRESS, serving
from provenance import is_as_written


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--changed`."""
    text = "leave out notebooks that stand as the writer has run them, with the same library, data and packages"
    parser.addoption("--changed", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """If kernels of the name `forked` are asked for, serve them before workers start: one server for all workers."""
    if session.config.getoption("--nbval-kernel-name") == "forked" and ADDRESS not in os.environ:
        kernels = serving()
        kernels.__enter__()
        session.config.add_cleanup(lambda: kernels.__exit__(None, None, None))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what nothing has changed for, if that is asked for."""
    is_left_out = (
        config.getoption("--changed") and collection_path.suffix == ".ipynb" and is_as_written(collection_path)
    )
    return True if is_left_out else None
