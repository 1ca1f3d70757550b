"""In JupyterLab, with a real kernel and a real browser: a live exhibit and one of `explore` each move."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
from chromium import browser
from gates import ROOT
from nbformat import v4
from playwright.sync_api import Browser, Page, expect
from test_browser import live_faults

pytest.importorskip("jupyterlab", reason="say `pip install jupyterlab`")

__all__ = ["browser"]
pytestmark = pytest.mark.slow

PATIENCE = 240_000
"""Milliseconds for a server, a kernel and torch to start."""
TRY = 5_000
"""Milliseconds until a cell that was told to run has its number or its star."""
CELLS = [
    'from psgd_lit.live import live\nrace = live("race", t=0)\nrace',
    """
import matplotlib.pyplot as plt
from psgd_lit.viz import explore

def draw(power, colour):
    figure, axes = plt.subplots(figsize=(3, 2))
    axes.plot([0, 1, 2], [0, 1, 2**power], color=colour)
    return figure

explore(draw, power=[1, 2, 3], colour=["black", "red"])""",
    'print("start:", race.widget.start)\nrace.widget.angle = 1.25',
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a notebook of such cells, in a JupyterLab of its own."""
    folder = tmp_path_factory.mktemp("lab")
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell.strip()) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "exhibits.ipynb")
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.port=0",
        "--IdentityProvider.token=",
        "--LabApp.news_url=",
    ]
    options += [
        f"--ServerApp.root_dir={folder}",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    places = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    log = folder / "log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env={**os.environ, **places, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=out,
        )
    try:
        yield f"{url_of(server, Path(places['JUPYTER_RUNTIME_DIR']), log)}doc/tree/exhibits.ipynb"
    finally:
        server.terminate()
        server.wait(30)


def url_of(server: "subprocess.Popen[bytes]", runtime: Path, log: Path) -> str:
    """The address of the server, as soon as it says one."""
    for _ in range(PATIENCE // 500):
        assert server.poll() is None, log.read_text()
        for file in runtime.glob("jpserver-*.json"):
            if found := [part for part in file.read_text().split('"') if part.startswith("http")]:
                return found[0]
        time.sleep(0.5)
    raise AssertionError(log.read_text())


def run(page: Page, number: int) -> None:
    """Run a cell, as a reader does: again where JupyterLab, not yet connected to its kernel, lost the first try."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    for _ in range(PATIENCE // TRY):
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        with suppress(AssertionError):
            return expect(cell.locator(".jp-InputPrompt")).not_to_have_text(re.compile(r"^\[ \]:$"), timeout=TRY)
    raise AssertionError(f"cell {number} does not run")


@pytest.fixture(scope="module")
def lab(address: str, browser: Browser) -> Iterator[Page]:
    """The notebook, with its first two cells run."""
    context = browser.new_context(viewport={"width": 1100, "height": 1400})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    page.locator(".jp-Notebook .jp-CodeCell").nth(2).wait_for()
    run(page, 0)
    page.locator(".lv-agrees[data-difference]").wait_for()
    run(page, 1)
    page.locator(".widget-image").wait_for()
    yield page
    context.close()


def live_exhibit_moves(lab: Page) -> None:
    """The reader moves the point, Python reads where it is, and what Python sets moves in the page."""
    assert list(live_faults(lab.locator(".psgd-live"), "race")) == []
    grip = lab.locator(".lv-grip")
    grip.press("ArrowLeft")
    grip.press("ArrowDown")
    lab.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    x, y = [float(part.split()[-1]) for part in (grip.get_attribute("aria-valuetext") or "").split(",")]
    run(lab, 2)
    said = lab.locator(".jp-CodeCell").nth(2).locator(".jp-OutputArea-output pre")
    said.wait_for()
    start = [float(part) for part in said.inner_text().partition("[")[2].rstrip("]\n").split(",")]
    assert start == pytest.approx([x, y], abs=0.006)
    lab.wait_for_function("document.querySelector('.lv-angle output').textContent.startsWith('72')")


def explore_moves(lab: Page) -> None:
    """A slider and a radio button each renew the picture."""
    picture = "document.querySelector('.widget-image').src"
    before = lab.evaluate(picture)
    lab.locator(".widget-slider .noUi-handle").first.press("ArrowRight")
    lab.wait_for_function(f"before => {picture} !== before", arg=before)
    before = lab.evaluate(picture)
    lab.locator(".widget-radio-box input").nth(1).check()
    lab.wait_for_function(f"before => {picture} !== before", arg=before)


def test_exhibits_move(lab: Page) -> None:
    """Both kinds of exhibit move, in one notebook of one server."""
    live_exhibit_moves(lab)
    explore_moves(lab)
