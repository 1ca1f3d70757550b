"""axe-core finds nothing on any page of the built book, in light and dark, at levels A and AA of WCAG 2.

What formulas, lines of code, signatures and the index repeat is looked at once a page for each look that it has: so a
page takes seconds, not a minute.
The names of the rules are axe's; https://dequeuniversity.com/rules/axe/ explains them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gates import HTML, report

axe_playwright_python = pytest.importorskip("axe_playwright_python", reason="say `pip install axe-playwright-python`")

from test_browser import DESK, PATIENCE, browser  # noqa: E402

__all__ = ["browser"]

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
OF_COLOUR = ["color-contrast", "link-in-text-block"]
"""The rules that depend on the theme; the others are tried in one theme alone."""
STILL = "*, *::before, *::after { transition: none !important; animation: none !important }"

THIN = """() => {
  document.querySelectorAll("details").forEach(e => { e.open = true });
  const seen = new Set(), twice = e => {
    const s = getComputedStyle(e), place = e.closest(".cell_input, .cell_output, summary, td, div")?.className;
    const key = [s.color, s.backgroundColor, s.fontSize, s.fontWeight, s.opacity, place].join();
    return seen.has(key) || !seen.add(key);
  };
  const words = [...document.querySelectorAll(".highlight pre span, .sig span, .indextable a")];
  const whole = e => e.matches("a") || !e.closest("a");  // a link keeps its words
  words.filter(e => !e.children.length && whole(e) && twice(e)).forEach(e => e.remove());
  [...document.querySelectorAll("mjx-container")].slice(1).forEach(e => e.replaceChildren());
}"""
"""Open all folds; leave a word of code, of signatures and of the index for each look, and the first formula."""

RUN = """async ([theme, rules]) => {
  document.documentElement.dataset.theme = theme;
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const found = await axe.run(document, { runOnly: rules, resultTypes: ["violations"] });
  return found.violations.flatMap(v => v.nodes.map(n => [v.id, n.html.slice(0, 90), n.failureSummary]));
}"""

WRITTEN = """theme => {
  document.documentElement.dataset.theme = theme;
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/^rgba\\(.*, 0\\)$|^transparent$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("article *")].flatMap(e => ["::before", "::after"].flatMap(part => {
    const style = getComputedStyle(e, part), words = style.content.match(/^"(.*\\w.*)"$/);
    return words && e.checkVisibility() ? [[words[1], style.color, ground(e)]] : [];
  }));
}"""
"""The words that style sheets write into the text, which axe can't judge: the words, their colour and their ground."""


def luminance(colour: str) -> float:
    """The relative luminance of `rgb(...)`, as WCAG defines it."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in parts]
    return sum(weight * s for weight, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def findings(browser: Any, path: Path) -> Iterator[str]:
    """What axe finds on a page, and words of style sheets that are too faint, a line each."""
    context = browser.new_context(offline=True, viewport=DESK, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(4 * PATIENCE)
    page.goto(path.as_uri(), wait_until="load")
    page.add_style_tag(content=STILL)
    page.evaluate("async () => { await window.MathJax?.startup?.promise }")
    page.evaluate(THIN)
    page.add_script_tag(content=AXE)
    for theme, rules in (("light", LEVELS), ("dark", OF_COLOUR)):
        for rule, html, why in page.evaluate(RUN, [theme, rules]):
            yield f"{theme}: {rule}: {html}: {' '.join(why.split())[:160]}"
        for words, ink, ground in {tuple(one) for one in page.evaluate(WRITTEN, theme)}:
            if contrast(ink, ground) < 4.5:
                yield f"{theme}: {words!r} has a contrast of {contrast(ink, ground):.1f}, and 4.5 is the least"
    context.close()


def book() -> list[Path]:
    """All pages of the built book but the one that only leads to the first, and the one that repeats them all.

    Of the listings of modules, which one template makes, there are three.
    """
    own = sorted(page.relative_to(HTML) for page in HTML.rglob("*.html"))
    listings = [page for page in own if page.parts[0] == "_modules"]
    left_out = {Path("index.html"), Path("book.html"), *listings[3:]}
    return [page for page in own if page.parts[0] != "_static" and page not in left_out]


QUICK = {Path("nbs/index.html"), Path("nbs/appendix/01_notation.html"), Path("search.html")}


@pytest.mark.parametrize(
    "page", [page if page in QUICK else pytest.param(page, marks=pytest.mark.slow) for page in book()], ids=str
)
def test_axe_finds_nothing(page: Path, browser: Any) -> None:
    """Nothing of levels A and AA, neither in what the book writes nor in what its theme does."""
    report(findings(browser, HTML / page))


def test_pages_are_found() -> None:
    """The quick pages are among those of the built book."""
    assert set(book()) >= QUICK, "run `make book`"


GOOD = """<!doctype html><html lang="en"><head><title>Page</title><style>
body { background: #fff; color: #222 } [data-theme=dark] body { background: #111; color: #ddd }
p::before { content: "note "; color: #555 } [data-theme=dark] p::before { color: #bbb }
a { color: #0b57b0 } [data-theme=dark] a { color: #8ab4f8 }</style></head><body><main><article><h1>Title</h1>
<p>Text with <a href="#x">a link</a>.</p><label>angle <input type="range"></label>
<details><summary>Fold</summary><div class="highlight"><pre><span>code</span> <span>code</span></pre></div></details>
</article></main></body></html>"""
SPOILED = [
    ("<h1>", "<h1>", ""),
    ("<label>angle", "<label></label>angle", "light: label"),
    (' lang="en"', "", "light: html-has-lang"),
    ("<h1>Title</h1>", '<h1>Title</h1><img src="data:,">', "light: image-alt"),
    ("color: #222", "color: #999", "light: color-contrast"),
    ("color: #ddd", "color: #444", "dark: color-contrast"),
    ("</pre>", '<span style="color: #aaa">faint</span></pre>', "light: color-contrast"),
    ("color: #555", "color: #aaa", "light: 'note ' has a contrast of 2.3"),
    ("color: #bbb", "color: #444", "dark: 'note ' has a contrast of"),
]


@pytest.mark.parametrize(
    ("old", "new", "complaint"), SPOILED, ids=[complaint or "nothing" for *_, complaint in SPOILED]
)
def test_axe_gate(old: str, new: str, complaint: str, browser: Any, tmp_path: Path) -> None:
    """A fault is found in the theme in which it is, also in a fold and in code; a good page passes."""
    assert old in GOOD
    path = tmp_path / "page.html"
    path.write_text(GOOD.replace(old, new, 1))
    found = "\n".join(findings(browser, path))
    assert complaint in found if complaint else found == ""
