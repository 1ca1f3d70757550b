"""The whole book as one page, to be searched by the browser and printed: made from the built pages.

Usage: `python nbs/_ext/single.py _build/html`; it writes `book.html` there.
What moves stays behind: an exhibit is the picture that it shows at first, and a live one is a link to its page.
"""

import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag
from writer import ROOT, pages

LOADED = ("src", "href")
NAMES = ("id", "name", "for", "aria-labelledby", "aria-describedby")


def prefix(page: Path) -> str:
    """What makes the names of a page its own among those of all pages."""
    return "-".join(page.with_suffix("").parts)


def address(link: str, page: Path, site: Path, book: set[Path]) -> str:
    """Where a link of a page leads from the one page: to a place on it, or to the file that it meant."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return link
    target = Path((site / page).parent / unquote(parts.path)).resolve().relative_to(site) if parts.path else page
    if target in book:
        return f"#{prefix(target)}" + (f"-{parts.fragment}" if parts.fragment else "")
    return f"{target.as_posix()}{'#' if parts.fragment else ''}{parts.fragment}"


def still(article: Tag, page: Path) -> None:
    """Leave nothing that moves, folds opened and no button."""
    for exhibit in article.select("[data-live]"):
        words = f'<p><a href="/{page.as_posix()}">An exhibit that computes is on the page of this chapter.</a></p>'
        exhibit.replace_with(BeautifulSoup(words.replace('"/', '"'), "html.parser"))
    for part in article.select("script, .control, .headerlink, button"):
        part.decompose()
    for frames in article.select("[data-frames]"):
        del frames["data-frames"]
    for fold in article.select("details"):
        fold["open"] = ""


def chapter(page: Path, site: Path, book: set[Path]) -> str:
    """The text of a page, with names and links that hold on the one page."""
    soup = BeautifulSoup((site / page).read_text(encoding="utf-8"), "html.parser")
    article = soup.select_one("article")
    if article is None:
        raise ValueError(f"{page} has no article; build the book anew: make clean book")
    for tag in article.find_all(True):
        for name in NAMES:
            if tag.has_attr(name) and tag.name != "meta":
                tag[name] = " ".join(f"{prefix(page)}-{word}" for word in str(tag[name]).split())
        for name in LOADED:
            if tag.has_attr(name) and not str(tag[name]).startswith("data:"):
                tag[name] = address(str(tag[name]), page, site, book)
    still(article, page)
    return f'<section id="{prefix(page)}">{article.decode_contents()}</section>'


def head(first: Path, site: Path) -> str:
    """The style sheets, the settings of formulas and their script, as the first page loads them."""
    soup = BeautifulSoup((site / first).read_text(encoding="utf-8"), "html.parser")
    kept = [tag for tag in soup.select("link[rel=stylesheet], script") if "athJax" in str(tag) or tag.name == "link"]
    kept += [tag for tag in soup.select("script[src*=mathjax]") if tag not in kept]
    for tag in kept:
        for name in LOADED:
            if tag.has_attr(name):
                link = str(tag[name])
                tag[name] = address(link.partition("?")[0], first, site, set())
    return "\n".join(map(str, kept))


STYLE = """<style>body { max-width: 54rem; margin: 0 auto; padding: 0 1rem }
section[id^=nbs-] { break-before: page } @media print { details > summary { display: none } }</style>"""


def main(folder: str) -> None:
    """Write the one page into the folder of the built book."""
    site = Path(folder).resolve()
    names = [page.relative_to(ROOT).with_suffix(".html") for page in pages()]
    body = "\n".join(chapter(name, site, set(names)) for name in names)
    title = "<title>PSGD, derived and executed: the whole book</title>"
    text = f"""<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width">{title}{head(names[0], site)}{STYLE}</head>
<body><main class="bd-content"><article class="bd-article">{body}</article></main></body></html>"""
    (site / "book.html").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
