"""The exhibit of recorded runs: its numbers are those on record, and the page draws what is chosen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import PHONE, browser, watch
from gates import NBS
from playwright.sync_api import Browser, Page
from test_browser import AGREEMENT, live_faults
from test_live import SHELL, get, pictures, put

from psgd_lit.exhibit import Live, recorded, static_page
from psgd_lit.experiments.runner import load_results

__all__ = ["browser"]

RESULTS = NBS / "results"
ROOT = "[data-live]"


@pytest.fixture(scope="module")
def exhibit() -> Live:
    """All runs on record."""
    return recorded(load_results(RESULTS))


@pytest.fixture
def page(exhibit: Live, browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The exhibit in a page of its own, on a phone, offline; in the end nothing may have gone wrong."""
    path = tmp_path / "page.html"
    body = static_page(exhibit.name, exhibit.state, exhibit.check)
    path.write_text(SHELL.format(theme="light", body=body), encoding="utf-8")
    context = browser.new_context(offline=True, viewport=PHONE)
    page = context.new_page()
    found = watch(page)
    page.goto(path.as_uri())
    page.locator(".lv-agrees[data-difference]").wait_for()
    yield page
    context.close()
    assert found == []


def files() -> dict[tuple[str, str, int], Any]:
    """The files of the runs that are over, by problem, method and seed."""
    found = {}
    for path in sorted(RESULTS.glob("*-s[0-9]*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        name, _, seed = path.stem.rpartition("-s")
        if file["state"] != "running":
            problem, length = file["run"]["problem"], file["run"].get("length")
            method = name.removeprefix(f"{problem}-").removeprefix(f"T{length}-")
            found[f"{problem}, T = {length}" if length else problem, method, int(seed)] = file
    return found


def test_curves_are_those_on_record(exhibit: Live) -> None:
    """Each run that is over is there once, each of its points is on record, and its end is the record's end."""
    on_record = files()
    runs = {(run["problem"], run["method"], run["seed"]): run for run in exhibit.state["runs"]}
    assert runs.keys() == on_record.keys()
    assert len(runs) == len(exhibit.state["runs"])
    for key, run in runs.items():
        curve = on_record[key]["curve"]
        points = list(zip(curve["step"], curve["test_error"], curve["train_loss"], strict=True))
        shown = list(zip(run["steps"], run["test error"], run["training loss"], strict=True))
        assert set(shown) <= set(points)
        assert shown[-1] == points[-1]
        assert len(shown) <= 200
        assert run["ms"] == on_record[key]["ms_per_step"]["median"]


def test_gradients_are_counted(exhibit: Live) -> None:
    """A first-order step costs one gradient, an exact product two more, a difference one more, and skipping saves."""
    ends = {run["method"]: run["gradients"][-1] / run["steps"][-1] for run in exhibit.state["runs"]}
    expected = {"sgd": 1, "adam": 1, "kron": 3, "kron-approx": 2, "kron-k2": 2, "kron-k10": 1.2}
    assert {name: ends[name] for name in expected} == pytest.approx(expected)


def test_page_is_light(exhibit: Live) -> None:
    """All curves together are a small part of a page."""
    assert len(static_page(exhibit.name, exhibit.state, exhibit.check)) < 500_000


def test_page_agrees(page: Page) -> None:
    """The page's means are the library's, it has drawn, and nothing sticks out."""
    assert list(live_faults(page.locator(ROOT), "runs")) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    unnamed = "[...document.querySelectorAll('input')].filter(e => !e.labels[0]?.textContent.trim()).length"
    assert page.evaluate(unnamed) == 0


def test_every_choice_draws(page: Page) -> None:
    """Each control changes the picture, and what is chosen is said."""
    for setting in (
        {"axis": "seconds"},
        {"axis": "gradients"},
        {"quantity": "training loss"},
        {"span": 9},
    ):
        before = pictures(page)
        put(page, **setting)
        assert pictures(page) != before
    before = pictures(page)
    page.get_by_label("sgd", exact=True).uncheck()
    put(page)
    assert get(page, "methods") == ["kron"]
    assert pictures(page) != before
    other = next(label for label in page.locator(".lv-problem label").all() if not label.locator("input").is_checked())
    other.click()
    put(page)
    assert get(page, "problem") == other.inner_text().strip()
    page.get_by_label("kron", exact=True).uncheck()
    put(page)
    assert "No run is chosen" in page.locator(".lv-say").inner_text()


def test_end_is_said(page: Page, exhibit: Live) -> None:
    """The words below the picture hold the last value of the run that is shown."""
    put(page, methods=["sgd"], seeds=[0])
    [run] = [
        run
        for run in exhibit.state["runs"]
        if (run["problem"], run["method"], run["seed"]) == (exhibit.state["problem"], "sgd", 0)
    ]
    said = page.locator(".lv-say").inner_text()
    value = float(said.split("sgd ")[1].rstrip("."))
    assert value == pytest.approx(run["test error"][-1], rel=0.06)


def test_agreement_can_fail(exhibit: Live, browser: Browser, tmp_path: Path) -> None:
    """A number that is off in the sixth digit is seen."""
    check = json.loads(json.dumps(exhibit.check))
    check["cases"][1]["means"][7] *= 1 + 1e-6
    path = tmp_path / "page.html"
    path.write_text(
        SHELL.format(theme="dark", body=static_page(exhibit.name, exhibit.state, check)),
        encoding="utf-8",
    )
    page = browser.new_page()
    page.goto(path.as_uri())
    difference = page.locator(".lv-agrees[data-difference]").get_attribute("data-difference")
    page.close()
    assert float(difference or 0) > AGREEMENT
