"""The built pages in a real browser, without a network: formulas, exhibits, both themes, a phone's width."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import HTML, ROOT, read_page, report, short
from writer import pages

try:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, ViewportSize, sync_playwright
except ImportError:
    pytest.skip("no browser tests: playwright is not installed; say `pip install playwright`", allow_module_level=True)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no browser tests: no chromium on the PATH; say `apt-get install chromium`", allow_module_level=True)

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
DESK: ViewportSize = {"width": 1200, "height": 900}
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


def formula_faults(page: Page) -> Iterator[str]:
    """Every formula is typeset, and none is an error or raw source."""
    expected = page.locator(".math").count()
    if expected:
        try:
            page.wait_for_function("window.MathJax?.startup?.promise", timeout=PATIENCE)
            page.evaluate("MathJax.startup.promise")
        except Exception as error:
            yield f"MathJax doesn't start: {str(error).splitlines()[0]}"
    boxes = page.evaluate(
        """[...document.querySelectorAll("mjx-container")].filter(e => e.checkVisibility())
        .map(e => [e.offsetWidth, e.offsetHeight, e.closest(".math")?.textContent.trim().slice(0, 60) ?? ""])"""
    )
    if page.locator("mjx-container").count() < expected:
        yield f"{expected} formulas, and only {page.locator('mjx-container').count()} are typeset"
    yield from (f"a formula has no size: {text!r}" for width, height, text in boxes if not (width and height))
    for fault in page.locator("mjx-merror").all():
        yield f"a formula is an error: {fault.get_attribute('data-mjx-error') or fault.inner_text()}"
    text = page.locator("body").inner_text()
    yield from (f"shows {raw!r}" for raw in ("$$", "Math input error", "\\begin{") if raw in text)


def exhibit_faults(exhibit: Locator, where: str) -> Iterator[str]:
    """Each control of an exhibit has a name and, moved by the keyboard, changes the picture and the value shown."""
    image, controls = exhibit.locator("img"), exhibit.locator(".control")
    if image.count() != 1 or controls.count() == 0:
        yield f"{where} has {image.count()} pictures and {controls.count()} controls"
        return
    chosen = "e => [...e.querySelectorAll('output, label:has(:checked)')].map(o => o.textContent).join()"
    for number, control in enumerate(controls.all(), 1):
        if not control.evaluate("e => [...e.querySelectorAll('input')].every(i => i.labels.length || i.ariaLabel)"):
            yield f"{where}: control {number} has no label"
        if not control.evaluate("e => e.matches('label') || e.querySelector('legend')?.textContent.trim()"):
            yield f"{where}: control {number} has no legend"
        first = control.locator("input").first
        first.press("Home") if first.get_attribute("type") == "range" else first.check()
        before = image.get_attribute("src"), exhibit.evaluate(chosen)
        first.press("ArrowRight")
        after = image.get_attribute("src"), exhibit.evaluate(chosen)
        if after[0] == before[0]:
            yield f"{where}: control {number} doesn't change the picture"
        if after[1] == before[1]:
            yield f"{where}: control {number} doesn't change the value that is shown"
        if not image.evaluate(
            "async e => { try { await e.decode() } catch { return false } return e.naturalWidth > 0 }"
        ):
            yield f"{where}: control {number} shows a broken picture"


AGREEMENT = 1e-9
"""How far the numbers that a live exhibit computes may be from the library's."""


def live_faults(exhibit: Locator, where: str) -> Iterator[str]:
    """A live exhibit has compared itself with the library, agrees, says so, and has drawn."""
    agrees = exhibit.locator(".lv-agrees")
    if agrees.count() != 1:
        yield f"{where} compares itself with nothing"
        return
    difference = float(agrees.get_attribute("data-difference") or "inf")
    if not difference < AGREEMENT:
        yield f"{where} differs from the library by {difference:.0e}"
    if "agrees with psgd_lit to" not in agrees.inner_text():
        yield f"{where} doesn't say that it agrees"
    empty = "e => !e.getContext('2d').getImageData(0, 0, e.width, e.height).data.some(x => x)"
    if any(canvas.evaluate(empty) for canvas in exhibit.locator("canvas").all()):
        yield f"{where} has an empty picture"


STICKING_OUT = """limit => {
  const clips = e => e && (getComputedStyle(e).overflowX !== "visible" || clips(e.parentElement));
  const out = e => e.getBoundingClientRect().right > limit + 1 && !clips(e.parentElement?.closest("body *"));
  return [...(document.querySelector("article") ?? document.body).querySelectorAll("*")]
    .filter(e => e.checkVisibility() && out(e)).map(e => e.outerHTML.slice(0, 90)).slice(0, 3);
}"""
"""The first elements of the text that reach beyond the screen and are not inside something that scrolls."""


def overflow_faults(page: Page) -> Iterator[str]:
    """On a phone's width nothing sticks out, in either theme."""
    page.set_viewport_size(PHONE)
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        width = page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        if width > PHONE["width"]:
            widest = page.evaluate(STICKING_OUT, PHONE["width"])
            yield f"{theme} theme: the page is {width} wide on a screen of {PHONE['width']}; look at {widest}"
    page.set_viewport_size(DESK)


SCROLLING = """() => [...document.querySelectorAll("article *")]
  .filter(e => e.checkVisibility() && !e.closest("mjx-container *") && e.scrollWidth > e.clientWidth + 1
    && ["auto", "scroll"].includes(getComputedStyle(e).overflowX))
  .map(e => [e.clientWidth, e.scrollWidth, (e.closest(".math") ?? e).textContent.trim().slice(0, 60)])"""
"""What has to be scrolled sideways: its width, that of what it holds, and its first words."""

TABLES = SCROLLING.replace("article *", "article table")
"""The tables of those."""

CUT = """() => [...document.querySelectorAll("article mjx-container")].filter(e => {
  if (!e.checkVisibility()) return false;
  const column = (e.closest("p, li, td, th, dd, summary, .math") ?? e.parentElement).getBoundingClientRect();
  const formula = (e.querySelector("mjx-math") ?? e).getBoundingClientRect();
  const scrolls = n => n && n.tagName !== "ARTICLE"
    && (["auto", "scroll"].includes(getComputedStyle(n).overflowX) || scrolls(n.parentElement));
  return formula.left < column.left - 1 || (formula.right > column.right + 1 && !scrolls(e));
}).map(e => (e.closest(".math") ?? e).textContent.trim().slice(0, 60))"""
"""The formulas of which a part is neither seen nor reached by scrolling."""


def width_faults(page: Page) -> Iterator[str]:
    """With all folds open nothing scrolls sideways on a laptop, no table does on a phone, and no formula is cut."""
    page.evaluate("document.querySelectorAll('article details').forEach(e => { e.open = true })")
    for screen in (LAPTOP, PHONE):
        page.set_viewport_size(screen)
        yield from (f"cut on a screen of {screen['width']}: {text!r}" for text in page.evaluate(CUT))
        for shown, needed, text in page.evaluate(SCROLLING if screen is LAPTOP else TABLES):
            yield f"scrolls sideways on a screen of {screen['width']}, {needed} wide in {shown}: {text!r}"
    page.evaluate("document.querySelectorAll('article details').forEach(e => { e.open = false })")
    page.set_viewport_size(DESK)


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


def faults(browser: Browser, path: Path, exhibits: int, live: int = 0) -> list[str]:
    """All that is wrong with a page that should have so many exhibits of each kind, in a browser without a network."""
    context = browser.new_context(offline=True, viewport=DESK)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    found = watch(page)
    page.goto(path.as_uri(), wait_until="load")
    found += formula_faults(page)
    roots = page.locator(".explore")
    if roots.count() != exhibits:
        found.append(f"{roots.count()} exhibits on the page, and {exhibits} in the notebook")
    for number, exhibit in enumerate(roots.all(), 1):
        found += exhibit_faults(exhibit, f"exhibit {number}")
    roots = page.locator("[data-live]")
    if roots.count() != live:
        found.append(f"{roots.count()} live exhibits on the page, and {live} in the notebook")
    for number, exhibit in enumerate(roots.all(), 1):
        found += live_faults(exhibit, f"live exhibit {number}")
    found += overflow_faults(page)
    found += width_faults(page)
    context.close()
    return found


@pytest.mark.parametrize(
    "notebook", [*pages()[:3], *(pytest.param(page, marks=pytest.mark.slow) for page in pages()[3:])], ids=short
)
def test_page_works(notebook: Path, browser: Browser) -> None:
    """The page works offline: nothing is requested, formulas are typeset, sliders turn, nothing sticks out."""
    path = HTML / notebook.relative_to(ROOT).with_suffix(".html")
    assert path.exists(), f"{short(path)} is missing; run `make book`"
    shown = [cell.is_live for cell in read_page(notebook).code if cell.is_exhibit]
    report(faults(browser, path, exhibits=shown.count(False), live=shown.count(True)))


# The gate can fail -----------------------------------------------------------------------------------------------

PICTURES = [
    f"data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' width='9' height='{size}'/>" for size in (8, 9)
]
GOOD = f"""<!doctype html><html><head><meta name="viewport" content="width=device-width"></head><body>
<p>Text.</p><span class="math"><mjx-container style="display: inline-block">x</mjx-container></span>
<script>window.MathJax = {{startup: {{promise: Promise.resolve()}}}}</script>
<div class="explore">
<label class="control">angle <input type="range" min="0" max="1" value="0"><output>0</output></label>
<img src="{PICTURES[0]}" alt="A square."></div>
<script>
const [input, output, image] = ["input", "output", "img"].map(name => document.querySelector(name));
input.addEventListener("input", () => {{
  output.textContent = input.value;
  image.src = [{", ".join(f'"{picture}"' for picture in PICTURES)}][input.value];
}});
</script>
<div data-live="race"><canvas></canvas>
<p class="lv-agrees" data-difference="2e-14">It agrees with psgd_lit to 2e-14.</p></div>
<script>document.querySelector("canvas").getContext("2d").fillRect(0, 0, 9, 9)</script></body></html>"""


SPOILED = [
    ("<p>Text.</p>", "<p>Text.</p>", ""),
    (
        "<p>Text.</p>",
        '<script src="https://example.com/a.js"></script>',
        "a request fails: https://example.com/a.js",
    ),
    ("<p>Text.</p>", '<img src="gone.png">', "a request fails: file://"),
    ("<p>Text.</p>", "<script>gone()</script>", "a script fails: gone is not defined"),
    ("<p>Text.</p>", "<script>console.error('no')</script>", "console: no"),
    ("<p>Text.</p>", "<p>$$ x $$</p>", "shows '$$'"),
    ("<p>Text.</p>", '<mjx-merror data-mjx-error="Undefined">x</mjx-merror>', "a formula is an error: Undefined"),
    ("<p>Text.</p>", '<p style="width: 900px">Text.</p>', "wide on a screen of 400"),
    (
        "<p>Text.</p>",
        "<style>[data-theme=dark] p { width: 900px }</style><p>Text.</p>",
        "dark theme: the page is",
    ),
    ("inline-block", "inline-block; overflow: hidden; width: 0", "a formula has no size"),
    (
        "<p>Text.</p>",
        '<article><pre style="overflow-x: auto; width: 300px">' + "x" * 99 + "</pre></article>",
        "scrolls sideways on a screen of 1280",
    ),
    (
        "<p>Text.</p>",
        '<article><details><summary>Fold</summary><pre style="overflow-x: auto; width: 300px">'
        + "x" * 99
        + "</pre></details></article>",
        "scrolls sideways on a screen of 1280",
    ),
    (
        "<p>Text.</p>",
        '<article><table style="display: block; overflow-x: auto; width: 300px"><tr><td>'
        + "x" * 60
        + "</table></article>",
        "scrolls sideways on a screen of 400",
    ),
    (
        "<p>Text.</p>",
        '<article><p style="width: 300px; overflow: hidden"><mjx-container style="display: block; width: 350px">'
        "x</mjx-container></p></article>",
        "cut on a screen of 400",
    ),
    (
        "<p>Text.</p>",
        '<article><p style="width: 300px; overflow: hidden"><mjx-container style="display: block; margin-left: -9px">'
        "x</mjx-container></p></article>",
        "cut on a screen of 1280",
    ),
    (
        "<p>Text.</p>",
        '<article><div class="math" style="width: 300px"><mjx-container style="display: block; overflow-x: auto">'
        '<mjx-math style="display: block; width: 290px">x</mjx-math></mjx-container></div></article>',
        "",
    ),
    ('<mjx-container style="display: inline-block">x</mjx-container>', "x", "1 formulas, and only 0 are typeset"),
    ("output.textContent = input.value;", "", "control 1 doesn't change the value"),
    ("image.src = ", "", "control 1 doesn't change the picture"),
    (PICTURES[1], "data:image/png;base64,AAAA", "control 1 shows a broken picture"),
    ('class="control"', 'class="slider"', "1 pictures and 0 controls"),
    (
        '<label class="control">angle',
        '<fieldset class="control"><label><input type="radio" checked>a</label></fieldset><label class="control">angle',
        "control 1 has no legend",
    ),
    ('<label class="control">angle', '<div class="control"><label></label>angle', "control 1 has no label"),
    ('data-difference="2e-14"', 'data-difference="2e-8"', "live exhibit 1 differs from the library by 2e-08"),
    ('data-difference="2e-14"', 'data-difference="NaN"', "live exhibit 1 differs from the library by nan"),
    ('data-difference="2e-14"', "", "live exhibit 1 differs from the library by inf"),
    ("It agrees with", "It differs from", "live exhibit 1 doesn't say that it agrees"),
    ('class="lv-agrees"', 'class="agrees"', "live exhibit 1 compares itself with nothing"),
    (".fillRect(0, 0, 9, 9)", "", "live exhibit 1 has an empty picture"),
    ('data-live="race"', 'data-dead="race"', "0 live exhibits on the page, and 1 in the notebook"),
    ('class="explore"', 'class="picture"', "0 exhibits on the page, and 1 in the notebook"),
]


@pytest.mark.parametrize(
    ("old", "new", "complaint"), SPOILED, ids=[complaint or "nothing" for *_, complaint in SPOILED]
)
def test_browser_gate(old: str, new: str, complaint: str, browser: Browser, tmp_path: Path) -> None:
    """A page that fails in a browser is seen, and a good one passes."""
    assert old in GOOD
    path = tmp_path / "page.html"
    path.write_text(GOOD.replace(old, new))
    found = "\n".join(faults(browser, path, exhibits=1, live=1))
    assert complaint in found if complaint else found == ""
