"""The built pages in a real browser, without a network: formulas, exhibits, both themes, a phone's width, axe."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from axe import findings
from chromium import LAPTOP, PATIENCE, PHONE, Tab, browser, tab
from gates import HTML, ROOT, read_page, report, short
from playwright.sync_api import Locator, Page, ViewportSize
from quick import first
from writer import pages

__all__ = ["browser", "tab"]


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
    """On a phone nothing sticks out, in either theme."""
    for theme in ("dark", "light"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        width = page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        if width > PHONE["width"]:
            widest = page.evaluate(STICKING_OUT, PHONE["width"])
            yield f"{theme} theme: the page is {width} wide on a screen of {PHONE['width']}; look at {widest}"


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


def width_faults(page: Page, screen: ViewportSize) -> Iterator[str]:
    """No formula is cut, and nothing scrolls sideways on a laptop, no table on a phone."""
    yield from (f"cut on a screen of {screen['width']}: {text!r}" for text in page.evaluate(CUT))
    for shown, needed, text in page.evaluate(SCROLLING if screen is LAPTOP else TABLES):
        yield f"scrolls sideways on a screen of {screen['width']}, {needed} wide in {shown}: {text!r}"


def faults(tab: Tab, path: Path, exhibits: int, live: int = 0) -> Iterator[str]:
    """All that is wrong with a page that should have so many exhibits of each kind, in a browser without a network.

    It is opened on a phone, with its folds closed; then they are opened, and the screen becomes that of a laptop.
    """
    page = tab.open(path, PHONE)
    yield from formula_faults(page)
    yield from overflow_faults(page)
    page.evaluate("document.querySelectorAll('article details').forEach(e => { e.open = true })")
    yield from width_faults(page, PHONE)
    page.set_viewport_size(LAPTOP)
    yield from width_faults(page, LAPTOP)
    roots = page.locator(".explore")
    if roots.count() != exhibits:
        yield f"{roots.count()} exhibits on the page, and {exhibits} in the notebook"
    for number, exhibit in enumerate(roots.all(), 1):
        yield from exhibit_faults(exhibit, f"exhibit {number}")
    roots = page.locator("[data-live]")
    if roots.count() != live:
        yield f"{roots.count()} live exhibits on the page, and {live} in the notebook"
    for number, exhibit in enumerate(roots.all(), 1):
        yield from live_faults(exhibit, f"live exhibit {number}")
    yield from tab.found


@pytest.mark.parametrize("notebook", first(3, pages()), ids=short)
def test_page_works(notebook: Path, tab: Tab) -> None:
    """Offline nothing is requested, formulas are typeset, sliders turn, nothing sticks out; and axe finds nothing."""
    path = HTML / notebook.relative_to(ROOT).with_suffix(".html")
    assert path.exists(), f"{short(path)} is missing; run `make book`"
    shown = [cell.is_live for cell in read_page(notebook).code if cell.is_exhibit]
    found = [
        *faults(tab, path, exhibits=shown.count(False), live=shown.count(True)),
        *findings(tab.page),
    ]
    report(found)


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
    (
        "<p>Text.</p>",
        '<mjx-merror data-mjx-error="Undefined">x</mjx-merror>',
        "a formula is an error: Undefined",
    ),
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
    (
        '<mjx-container style="display: inline-block">x</mjx-container>',
        "x",
        "1 formulas, and only 0 are typeset",
    ),
    ("output.textContent = input.value;", "", "control 1 doesn't change the value"),
    ("image.src = ", "", "control 1 doesn't change the picture"),
    (PICTURES[1], "data:image/png;base64,AAAA", "control 1 shows a broken picture"),
    ('class="control"', 'class="slider"', "1 pictures and 0 controls"),
    (
        '<label class="control">angle',
        '<fieldset class="control"><label><input type="radio" checked>a</label></fieldset><label class="control">angle',
        "control 1 has no legend",
    ),
    (
        '<label class="control">angle',
        '<div class="control"><label></label>angle',
        "control 1 has no label",
    ),
    (
        'data-difference="2e-14"',
        'data-difference="2e-8"',
        "live exhibit 1 differs from the library by 2e-08",
    ),
    (
        'data-difference="2e-14"',
        'data-difference="NaN"',
        "live exhibit 1 differs from the library by nan",
    ),
    ('data-difference="2e-14"', "", "live exhibit 1 differs from the library by inf"),
    ("It agrees with", "It differs from", "live exhibit 1 doesn't say that it agrees"),
    ('class="lv-agrees"', 'class="agrees"', "live exhibit 1 compares itself with nothing"),
    (".fillRect(0, 0, 9, 9)", "", "live exhibit 1 has an empty picture"),
    (
        'data-live="race"',
        'data-dead="race"',
        "0 live exhibits on the page, and 1 in the notebook",
    ),
    ('class="explore"', 'class="picture"', "0 exhibits on the page, and 1 in the notebook"),
]


@pytest.mark.parametrize("spoiled", first(6, SPOILED), ids=[complaint or "nothing" for *_, complaint in SPOILED])
def test_browser_gate(spoiled: tuple[str, str, str], tab: Tab, tmp_path: Path) -> None:
    """A page that fails in a browser is seen, and a good one passes."""
    old, new, complaint = spoiled
    assert old in GOOD
    path = tmp_path / "page.html"
    path.write_text(GOOD.replace(old, new))
    found = "\n".join(faults(tab, path, exhibits=1, live=1))
    assert complaint in found if complaint else found == ""
