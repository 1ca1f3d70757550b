"""The whole book as one page, to be searched by the browser and printed: made from the built pages.

Usage: `python nbs/_ext/single.py _build/html`; it writes `book.html` there.
What moves stays behind: an exhibit is the picture that it shows at first, and a live one is a link to its page.
"""

import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lxml import html
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


def still(article: html.HtmlElement, page: Path) -> None:
    """Leave nothing that moves, folds opened and no button."""
    for exhibit in article.xpath(".//*[@data-live]"):
        words = f'<p><a href="{page.as_posix()}">An exhibit that computes is on the page of this chapter.</a></p>'
        link = html.fragment_fromstring(words)
        link.tail = exhibit.tail
        exhibit.getparent().replace(exhibit, link)
    moving = [
        *article.iter("script", "button"),
        *article.find_class("control"),
        *article.find_class("headerlink"),
    ]
    for part in dict.fromkeys(moving):
        part.drop_tree()
    for frames in article.xpath(".//*[@data-frames]"):
        del frames.attrib["data-frames"]
    for fold in article.iter("details"):
        fold.set("open", "")


def parsed(page: Path, site: Path) -> html.HtmlElement:
    """A page of the built book."""
    text = (site / page).read_text(encoding="utf-8").replace("<wbr>", "<wbr/>")  # libxml2 asks where it ends
    return html.document_fromstring(text, html.HTMLParser(huge_tree=True))


def chapter(page: Path, site: Path, book: set[Path]) -> str:
    """The text of a page, with names and links that hold on the one page."""
    article = parsed(page, site).find(".//article")
    if article is None:
        raise ValueError(f"{page} has no article; build the book anew: make clean book")
    for tag in article.iter("*"):
        for name in NAMES:
            if name in tag.attrib and tag.tag != "meta":
                tag.set(name, " ".join(f"{prefix(page)}-{word}" for word in tag.get(name).split()))
        for name in LOADED:
            if name in tag.attrib and not tag.get(name).startswith("data:"):
                tag.set(name, address(tag.get(name), page, site, book))
    still(article, page)
    article.tag = "section"
    article.attrib.clear()
    article.set("id", prefix(page))
    text: str = html.tostring(article, encoding="unicode", with_tail=False)
    return text


def head(first: Path, site: Path) -> str:
    """The style sheets, the settings of formulas and their script, as the first page loads them."""
    formulas = "contains(., 'athJax') or contains(@src, 'athJax') or contains(@src, 'mathjax')"
    kept = parsed(first, site).xpath(f"//link[@rel='stylesheet'] | //script[{formulas}]")
    for tag in kept:
        for name in LOADED:
            if name in tag.attrib:
                tag.set(name, address(tag.get(name).partition("?")[0], first, site, set()))
    return "\n".join(html.tostring(tag, encoding="unicode", with_tail=False) for tag in kept)


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
