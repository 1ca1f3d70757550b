"""A browser for the tests, without a network: the screens, and a tab that goes from page to page."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

try:
    from playwright.sync_api import (
        Browser,
        ConsoleMessage,
        Page,
        Request,
        ViewportSize,
        sync_playwright,
    )
except ImportError:
    pytest.skip(
        "no browser tests: playwright is not installed; say `pip install playwright`",
        allow_module_level=True,
    )

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
if CHROMIUM is None:
    pytest.skip(
        "no browser tests: no chromium on the PATH; say `apt-get install chromium`",
        allow_module_level=True,
    )

FLAGS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    *(["--no-sandbox"] if os.geteuid() == 0 else []),
]
PHONE: ViewportSize = {"width": 400, "height": 800}
LAPTOP: ViewportSize = {"width": 1280, "height": 800}
PATIENCE = 15_000
"""Milliseconds until something that doesn't happen is a failure."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all pages."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def watch(page: Page) -> list[str]:
    """Collect what goes wrong while a page is open: errors on the console, in scripts, in requests."""
    found: list[str] = []

    def on_console(line: ConsoleMessage) -> None:
        if line.type == "error":
            found.append(f"console: {line.text}")

    def on_failure(request: Request) -> None:
        found.append(f"a request fails: {request.url[:100]}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: found.append(f"a script fails: {error.message}"))
    page.on("requestfailed", on_failure)
    return found


class Tab(NamedTuple):
    """A tab of a browser, in which one page is opened after the other.

    Attributes:
        page: what it shows.
        found: what has gone wrong since the page was opened.
    """

    page: Page
    found: list[str]

    def open(self, path: Path, screen: ViewportSize = LAPTOP) -> Page:
        """Show a page on a screen."""
        self.page.goto("about:blank")
        self.page.set_viewport_size(screen)
        self.found.clear()
        self.page.goto(path.as_uri(), wait_until="load")
        return self.page


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Tab]:
    """One tab for all pages, since a new one costs as much as a page."""
    context = browser.new_context(offline=True, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    yield Tab(page, watch(page))
    context.close()
