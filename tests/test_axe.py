"""axe-core finds nothing on the pages that no notebook makes; `test_browser` looks at the others."""

from pathlib import Path

import pytest
from axe import findings
from chromium import Tab, browser, tab
from gates import HTML, ROOT, report
from quick import first
from writer import pages

__all__ = ["browser", "tab"]


def book() -> list[Path]:
    """The pages that no notebook makes, but the one that only leads to the first, and the one that repeats all.

    Of the listings of modules, which one template makes, there are three.
    """
    own = sorted(page.relative_to(HTML) for page in HTML.rglob("*.html"))
    listings = [page for page in own if page.parts[0] == "_modules"]
    chapters = [page.relative_to(ROOT).with_suffix(".html") for page in pages()]
    left_out = {Path("index.html"), Path("book.html"), *listings[3:], *chapters}
    return [page for page in own if page.parts[0] != "_static" and page not in left_out]


@pytest.mark.parametrize("page", first(1, book()), ids=str)
def test_axe_finds_nothing(page: Path, tab: Tab) -> None:
    """Nothing of levels A and AA, neither in what the book writes nor in what its theme does."""
    report(findings(tab.open(HTML / page)))


def test_pages_are_found() -> None:
    """The index and the search are among those of the built book."""
    assert {Path("genindex.html"), Path("search.html")} <= {*book()}, "run `make book`"


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
    ("a link</a>", 'a link</a> <a href="#y"></a> <a href="#z">another</a>', "light: link-name"),
    ("</main>", '<button title="Copy"></button><button></button></main>', "light: button-name"),
    ("<h1>Title</h1>", '<h1>Title</h1><img src="data:,">', "light: image-alt"),
    ("color: #222", "color: #999", "light: color-contrast"),
    ("color: #ddd", "color: #444", "dark: color-contrast"),
    ("</pre>", '<span style="color: #aaa">faint</span></pre>', "light: color-contrast"),
    ("color: #555", "color: #aaa", "light: 'note ' has a contrast of 2.3"),
    ("color: #bbb", "color: #444", "dark: 'note ' has a contrast of"),
]


@pytest.mark.parametrize("spoiled", first(3, SPOILED), ids=[complaint or "nothing" for *_, complaint in SPOILED])
def test_axe_gate(spoiled: tuple[str, str, str], tab: Tab, tmp_path: Path) -> None:
    """A fault is found in the theme in which it is, also in a fold and in code; a good page passes."""
    old, new, complaint = spoiled
    assert old in GOOD
    path = tmp_path / "page.html"
    path.write_text(GOOD.replace(old, new, 1))
    found = "\n".join(findings(tab.open(path)))
    assert complaint in found if complaint else found == ""
