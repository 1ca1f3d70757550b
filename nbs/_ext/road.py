"""The directive `road`: a card for each chapter of a part, with its title and its first picture, drawn small.

Usage in a notebook: a fence of `{road} forms`, where `forms` is a folder of `nbs`.
"""

import re
from base64 import b64decode, b64encode
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from PIL import Image
from sphinx.util.docutils import SphinxDirective
from writer import ROOT, pages

FRAME = re.compile(r'src="data:image/webp;base64,([\w+/=]+)"')
WIDTH = 320
"""Pixels of a picture on a card; a card is about half as wide on a page."""


def first_picture(notebook: Any) -> bytes | None:
    """The first figure of a notebook, or what its first exhibit shows at first, where one comes before."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        if "image/png" in data:
            return b64decode(data["image/png"])
        if found := FRAME.search(data.get("text/html", "")):
            return b64decode(found[1])
    return None


def small(picture: bytes) -> str:
    """The address of a picture that holds itself, as wide as a card."""
    image, file = Image.open(BytesIO(picture)).convert("RGBA"), BytesIO()
    image.thumbnail((WIDTH, WIDTH))
    image.save(file, "webp", quality=60, method=5)
    return f"data:image/webp;base64,{b64encode(file.getvalue()).decode()}"


def title(notebook: Any) -> str:
    """The first heading of a notebook."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return next(match[1] for source in sources if (match := re.search(r"^# (.+)$", source, re.MULTILINE)))


def face(notebook: Any) -> str:
    """What a card shows: a picture, if the chapter has one, and the title."""
    words = f'<span class="road-title">{escape(title(notebook))}</span>'
    picture = first_picture(notebook)
    if picture is None:
        return words
    return f'<span class="road-picture" style="background-image: url({small(picture)})"></span>{words}'


class Road(SphinxDirective):  # type: ignore[misc]
    """Cards for the chapters of a part, in their order."""

    required_arguments = 1

    def card(self, chapter: Path) -> nodes.list_item:
        """A link to a chapter; the page is read again when the chapter has changed."""
        self.env.note_dependency(str(chapter))
        name = str(chapter.relative_to(ROOT).with_suffix(""))
        address = self.env.app.builder.get_relative_uri(self.env.docname, name)
        html = nodes.raw("", face(nbformat.read(chapter, as_version=4)), format="html")
        return nodes.list_item(
            "", nodes.paragraph("", "", nodes.reference("", "", html, internal=True, refuri=address))
        )

    def run(self) -> list[nodes.Node]:
        """Return a list of cards."""
        chapters = [page for page in pages() if page.parent.name == self.arguments[0]]
        if not chapters:
            raise self.error(f"no chapter in nbs/{self.arguments[0]}")
        return [nodes.bullet_list("", *map(self.card, chapters), classes=["road"])]


def setup(app: Any) -> dict[str, bool]:
    """Sphinx asks every extension for this."""
    app.add_directive("road", Road)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
