"""The built pages, read as files: complete, self-contained, with links that lead somewhere."""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cache, cached_property
from html import unescape
from inspect import get_annotations
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup, Tag
from gates import HTML, LIBRARY, PAGES, ROOT, ids, name_of, read_page, report, short
from lxml import html
from single import prefix
from test_library import modules
from writer import pages

import psgd_lit.groups

Gate = Callable[[Path, BeautifulSoup], Iterator[str]]

PAGE_BYTES = 2_000_000
LOADED = {"src", "srcset", "poster", "data", "background"}
"""Attributes with the address of something that a browser fetches by itself."""
LOADING_LINKS = {
    "stylesheet",
    "icon",
    "shortcut",
    "preload",
    "prefetch",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
}
"""Kinds of `<link>` that make a browser fetch something."""
CSS_ADDRESS = re.compile(r"""@import\s+(?:url\()?\s*["']?([^"')\s;]+)|url\(\s*["']?([^"')]+)""")


TAG = re.compile(r"<[a-zA-Z](?:[^<>\"]|\"[^\"]*\")*>")
PLACE = re.compile(r"\s(?:id|name)=\"([^\"]*)\"")
"""In a tag, a place on the page that a link can lead to."""


def html_of(notebook: Path, site: Path = HTML) -> Path:
    """Where the page of a notebook is."""
    return site / notebook.relative_to(ROOT).with_suffix(".html")


def soup_of(path: Path) -> BeautifulSoup:
    """Parse a page."""
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def is_elsewhere(address: str) -> bool:
    """True for what is not in a file of the book or in the page itself."""
    scheme = urlsplit(address.strip()).scheme
    return address.strip().startswith("//") or (scheme not in ("", "data", "blob"))


def value(tag: Tag, attribute: str) -> str:
    """An attribute as text; empty if the tag hasn't got it."""
    return " ".join(text for text in tag.get_attribute_list(attribute) if text)


def loaded(soup: BeautifulSoup) -> Iterator[str]:
    """The addresses that a browser fetches by itself to show the page."""
    for tag in soup.find_all(True):
        for attribute in LOADED & tag.attrs.keys():
            addresses = value(tag, attribute).split(",") if attribute == "srcset" else [value(tag, attribute)]
            yield from (address.split()[0] for address in addresses if address.strip())
        if tag.name == "link" and LOADING_LINKS & set(value(tag, "rel").split()) and tag.has_attr("href"):
            yield value(tag, "href")
        yield from css_addresses(value(tag, "style"))
    for style in soup.find_all("style"):
        yield from css_addresses(style.get_text())


def css_addresses(text: str) -> Iterator[str]:
    """The addresses that a style sheet loads."""
    yield from (one or other for one, other in CSS_ADDRESS.findall(text))


def self_contained(path: Path, soup: BeautifulSoup) -> Iterator[str]:
    """No script, style, font or picture comes from elsewhere, neither by the page nor by its style sheets."""
    for address in loaded(soup):
        if is_elsewhere(address):
            yield f"loads {address[:100]}"
    for link in soup.find_all("link", rel="stylesheet"):
        sheet = local_file(path, value(link, "href"))
        if sheet is not None and sheet.exists():
            for address in css_addresses(sheet.read_text(encoding="utf-8")):
                if is_elsewhere(address):
                    yield f"{sheet.name} loads {address[:100]}"


def local_file(path: Path, address: str) -> Path | None:
    """The file that an address on a page means; None if it is not a file of the book."""
    parts = urlsplit(address)
    if is_elsewhere(address) or parts.scheme or parts.netloc:
        return None
    return (path.parent / unquote(parts.path)).resolve() if parts.path else path


@cache
def anchors(path: Path) -> set[str]:
    """The places on a page that a link can lead to."""
    return {unescape(name) for tag in TAG.findall(path.read_text(encoding="utf-8")) for name in PLACE.findall(tag)}


def links(path: Path, soup: BeautifulSoup) -> Iterator[str]:
    """Every link inside the book leads to a file that exists, and to an anchor on it."""
    for tag in soup.find_all("a", href=True):
        href = value(tag, "href")
        target, fragment = local_file(path, href), unquote(urlsplit(href).fragment)
        if target is not None and not target.exists():
            yield f"the link {href} leads nowhere"
        elif target is not None and fragment and target.suffix == ".html" and fragment not in anchors(target):
            yield f"the link {href} leads to a page without such an anchor"
    for address in loaded(soup):
        target = local_file(path, address)
        if target is not None and not target.exists():
            yield f"{address[:100]} is loaded and doesn't exist"


def size(path: Path, soup: BeautifulSoup) -> Iterator[str]:
    """A page has at most 2 MB."""
    if path.stat().st_size > PAGE_BYTES:
        yield f"{path.stat().st_size:,} bytes, and {PAGE_BYTES:,} are the limit"


def alternatives(path: Path, soup: BeautifulSoup) -> Iterator[str]:
    """Every picture has a text that stands for it, and it isn't the name of a file."""
    for image in soup.find_all("img"):
        alternative = value(image, "alt").strip()
        if not alternative or alternative.endswith((".png", ".svg", ".webp")):
            yield f"the picture {value(image, 'src')[-60:]} has the alternative {alternative!r}"


def rendered(path: Path, soup: BeautifulSoup) -> Iterator[str]:
    """No directive and no role is left as raw text."""
    article = soup.find("article") or soup
    text = article.get_text("\n")
    for pattern in (
        r"#\| ?[\w-]+",
        r"\{(?:ref|prf:ref|eq|cite|numref|doc|func|class)[\w:]*\}`?",
        r"^\([a-z]+-[\w-]+\)=$",
    ):
        for found in dict.fromkeys(re.findall(pattern, text, re.MULTILINE)):
            yield f"shows {found!r} as text"


GATES: list[Gate] = [self_contained, links, size, alternatives, rendered]


def test_start_page() -> None:
    """The file that `make book` tells the reader to open leads to the first page."""
    start = HTML / "index.html"
    assert start.exists(), "_build/html/index.html is missing; run `make book`"
    assert html_of(pages()[0]).relative_to(HTML).as_posix() in start.read_text()


def test_book_is_up_to_date() -> None:
    """No notebook was changed after the book was built from it."""
    built = HTML / ".done"
    assert built.exists(), "the book has not been built; run `make book`"
    newer = [short(path) for path in PAGES if path.stat().st_mtime > built.stat().st_mtime]
    assert not newer, f"run `make book`; changed since the book was built: {', '.join(newer)}"


def test_one_page_holds_the_book() -> None:
    """It has every chapter in order, its links lead to places on it or to files, and nothing moves or is folded."""
    page = html.parse(HTML / "book.html", html.HTMLParser(huge_tree=True, encoding="utf-8"))
    chapters = [section.get("id") for section in page.xpath("//main/article/section")]
    assert chapters == [prefix(path.relative_to(ROOT)) for path in pages()]
    places, links = (
        {*page.xpath("//@id | //@name")},
        {*page.xpath("//article//@href | //article//@src")},
    )
    assert [link for link in links if link.startswith("#") and link[1:] not in places] == []
    files = {unquote(urlsplit(link).path) for link in links if not urlsplit(link).scheme} - {""}
    assert [file for file in files if not (HTML / file).exists()] == []
    assert page.xpath("//article//script | //article//button | //article//details[not(@open)]") == []


@pytest.mark.parametrize("notebook", pages(), ids=short)
def test_page(notebook: Path) -> None:
    """The page is there, stands on its own, and everything on it leads somewhere; a chapter leads to its reference."""
    path = html_of(notebook)
    assert path.exists(), f"{short(path)} is missing; run `make book`"
    soup = soup_of(path)
    report(f"{gate.__name__}: {fault}" for gate in GATES for fault in gate(path, soup))
    module = read_page(notebook).module
    assert module is None or links_to_reference(module, soup), "the chapter doesn't link to the reference of its module"


# The reference ---------------------------------------------------------------------------------------------------

REFERENCE = [path for path in PAGES if name_of(path).startswith("api")]
REFERENCE_BYTES = 300_000
METHODS = FunctionType | property | cached_property | classmethod | staticmethod


def own_methods(value: Any) -> list[str]:
    """The public methods of a class that no class of the library has before it; none for what is no class."""
    bases = value.__mro__[1:] if isinstance(value, type) else ()
    known = {name for base in bases if base.__module__.startswith("psgd_lit") for name in vars(base)}
    known |= set(get_annotations(value)) if bases else set()  # a field whose value is a function is no method
    own = vars(value).items() if bases else ()
    return [name for name, method in own if isinstance(method, METHODS) and name[0] != "_" and name not in known]


def missing_entries(module: ModuleType, packages: Iterable[ModuleType], found: Set[str]) -> Iterator[str]:
    """Every public name has an entry, as its module's or as that of a package which exports it, with its methods."""
    for name in module.__all__:
        value = vars(module)[name]
        homes = [module, *(package for package in packages if vars(package).get(name) is value)]
        full = [f"{home.__name__}.{name}" for home in homes]
        for suffix in ("", *(f".{method}" for method in own_methods(value))):
            if found.isdisjoint(one + suffix for one in full):
                yield f"the reference lacks {full[0]}{suffix}"


def test_reference_has_every_public_name() -> None:
    """Nothing that a module lists as public is missing."""
    found = set[str]().union(*(anchors(html_of(path)) for path in REFERENCE))
    names = [name for name, path in modules(LIBRARY).items() if path.name != "__init__.py"]
    for name in names:
        report(missing_entries(importlib.import_module(f"psgd_lit.{name}"), (psgd_lit, psgd_lit.groups), found))


def test_names_gate_fails() -> None:
    """A name and a method without an entry are seen, and an entry under an exported name is one."""
    packages, found = (
        (psgd_lit, psgd_lit.groups),
        {"psgd_lit.groups.Bordered", "psgd_lit.groups.Bordered.diagonal"},
    )
    assert list(missing_entries(importlib.import_module("psgd_lit.groups.bordered"), packages, found)) == [
        "the reference lacks psgd_lit.groups.bordered.bordered_difference",
        "the reference lacks psgd_lit.groups.bordered.side_by_side",
        "the reference lacks psgd_lit.groups.bordered.bordered_step",
        "the reference lacks psgd_lit.groups.bordered.Bordered.scale_columns",
    ]


@pytest.mark.parametrize("notebook", REFERENCE, ids=short)
def test_reference_is_light(notebook: Path) -> None:
    """A page of the reference loads at once."""
    assert html_of(notebook).stat().st_size < REFERENCE_BYTES


def links_to_reference(module: str, soup: BeautifulSoup) -> bool:
    """True if a chapter links to the entry of the module that it gives."""
    return any(value(tag, "href").endswith(f"#module-psgd_lit.{module}") for tag in soup.find_all("a", href=True))


def test_reference_link_gate_fails() -> None:
    """A link to another module is not enough, nor is the name alone."""
    soup = BeautifulSoup('<code>psgd_lit.hvp</code><a href="x.html#module-psgd_lit.hvp2">a</a>', "html.parser")
    assert links_to_reference("hvp2", soup)
    assert not links_to_reference("hvp", soup)


# The gates can fail ----------------------------------------------------------------------------------------------

GOOD = """<!doctype html><html><head>
<link rel="stylesheet" href="style.css"><link rel="canonical" href="https://example.com/">
<script src="script.js"></script></head>
<body><article id="top"><h1>Title</h1>
<p>See <a href="https://example.com">elsewhere</a>, <a href="#top">above</a>, <a href="other.html#there">there</a>.</p>
<img src="data:image/png;base64,AAAA" alt="A curve that falls.">
</article></body></html>"""

SPOILED: list[tuple[Gate, str, str, str]] = [
    (
        self_contained,
        "script.js",
        "https://cdn.example.com/script.js",
        "loads https://cdn.example.com/script.js",
    ),
    (
        self_contained,
        "script.js",
        "//cdn.example.com/script.js",
        "loads //cdn.example.com/script.js",
    ),
    (
        self_contained,
        'href="style.css"',
        'href="https://fonts.example.com/a.css"',
        "loads https://fonts.example.com/a.css",
    ),
    (
        self_contained,
        "data:image/png;base64,AAAA",
        "http://example.com/a.png",
        "loads http://example.com/a.png",
    ),
    (
        self_contained,
        "<h1>",
        '<style>@import "https://example.com/a.css";</style><h1>',
        "loads https://example.com/a.css",
    ),
    (
        self_contained,
        "<h1>",
        '<h1 style="background: url(//example.com/a.png)">',
        "loads //example.com/a.png",
    ),
    (
        self_contained,
        "<h1>",
        '<iframe src="https://example.com/"></iframe><h1>',
        "loads https://example.com/",
    ),
    (
        self_contained,
        'href="style.css"',
        'href="fonts.css"',
        "fonts.css loads https://example.com/font.woff2",
    ),
    (links, "#top", "#bottom", "#bottom leads to a page without such an anchor"),
    (
        links,
        "other.html#there",
        "other.html#here",
        "other.html#here leads to a page without such an anchor",
    ),
    (links, "other.html#there", "gone.html", "gone.html leads nowhere"),
    (links, "script.js", "gone.js", "gone.js is loaded and doesn't exist"),
    (size, "Title", "x" * PAGE_BYTES, "2,000,000 are the limit"),
    (alternatives, ' alt="A curve that falls."', "", "has the alternative ''"),
    (
        alternatives,
        "A curve that falls.",
        "../figure.png",
        "has the alternative '../figure.png'",
    ),
    (rendered, "Title", "#| export", "shows '#| export'"),
    (rendered, "Title", "{ref}`chap-lie`", "shows '{ref}`'"),
    (rendered, "Title", "{prf:ref}`thm-lie`", "shows '{prf:ref}`'"),
]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A small site with one good page and what it refers to."""
    (tmp_path / "page.html").write_text(GOOD)
    (tmp_path / "other.html").write_text('<p id="there">There.</p>')
    (tmp_path / "style.css").write_text("p { background: url(data:image/png;base64,AAAA) }")
    (tmp_path / "fonts.css").write_text("@font-face { src: url('https://example.com/font.woff2') }")
    (tmp_path / "script.js").touch()
    return tmp_path


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_good_page_passes(gate: Gate, site: Path) -> None:
    """No gate complains about a good page, and each is broken below."""
    assert list(gate(site / "page.html", soup_of(site / "page.html"))) == []
    assert gate in {spoiled for spoiled, *_ in SPOILED}


@pytest.mark.parametrize(("gate", "old", "new", "complaint"), SPOILED, ids=ids(SPOILED))
def test_spoiled_page(gate: Gate, old: str, new: str, complaint: str, site: Path) -> None:
    """The gate complains, in words that help, when the good page is spoiled."""
    assert old in GOOD
    page = site / "page.html"
    page.write_text(GOOD.replace(old, new))
    assert complaint in "\n".join(gate(page, soup_of(page)))
