"""What Sphinx needs to know of our notebooks: nbdev's directives become cell tags and figure settings.

A directive is a leading comment `#| name: value`.
The page hides it; the notebook that the page offers for download keeps it.
What a page folds, and the line that stands for it, is the business of `folding`.
"""

import re
from base64 import b64decode
from html import escape
from inspect import cleandoc
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import folding
import nbformat
from PIL import Image

DIRECTIVE = re.compile(r"#\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<value>.*)")
SOLUTION = re.compile(r"\{solution-(start|end)\}")
PROMISE = re.compile(r"^(You get )(`psgd_lit\.[\w.]+`)", re.MULTILINE)
COLUMNS = re.compile(r"^\s*\S.*\S {2,}\S.*\n.*\S {2,}\S", re.MULTILINE)
"""Two lines of printed text that are set in columns."""
INCH = 110
"""Pixels of a page on which an inch of a figure is shown; figures are drawn with twice as many."""
TAGS = {
    ("default_exp", None): "remove-cell",
    ("hide", None): "remove-cell",
    ("export", None): "nbdev-export",
    ("echo", "false"): "remove-input",
    ("code-fold", "true"): "hide-input",
}


def split_directives(source: str) -> tuple[dict[str, str], str]:
    """Return the directives at the head of a cell, by name, and the source below them."""
    directives: dict[str, str] = {}
    lines = source.splitlines()
    while lines and (match := DIRECTIVE.match(lines[0])):
        directives[match["name"]] = match["value"].strip().strip('"')
        lines.pop(0)
    return directives, "\n".join(lines).strip("\n")


def prints_columns(cell: Any) -> bool:
    """True if a cell prints a table, whose lines can't be wrapped."""
    return any(COLUMNS.search(output.get("text", "")) for output in cell.get("outputs", []))


def width(cell: Any) -> int | None:
    """How many pixels wide the page shows the figure of a cell; None if it has none."""
    images = [
        output["data"]["image/png"] for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    if not images:
        return None
    figure = Image.open(BytesIO(b64decode(images[0])))
    dots: float = figure.info["dpi"][0]
    return round(figure.width / dots * INCH)


def annotate(cell: Any, folds: bool = True) -> None:
    """Move the directives of a code cell into the metadata that MyST-NB reads, and fold what is folded."""
    directives, cell.source = split_directives(cell.source)
    tags = [tag for (name, value), tag in TAGS.items() if name in directives and value in (None, directives[name])]
    cell.metadata.tags = [*cell.metadata.get("tags", []), *tags, *(["columns"] if prints_columns(cell) else [])]
    mystnb: dict[str, Any] = {}
    if folds and (line := folding.folded_line(cell, directives)) is not None:
        cell.metadata.tags = [*dict.fromkeys([*cell.metadata.tags, "hide-input"])]
        mystnb["code_prompt_show"] = line
    if "fig-alt" in directives:
        mystnb["image"] = {"alt": directives["fig-alt"]}
    if shown := width(cell):
        mystnb.setdefault("image", {})["width"] = f"{shown}px"
    if "fig-cap" in directives:
        mystnb["figure"] = {"caption": directives["fig-cap"], "name": directives["label"]}
    if mystnb:
        cell.metadata.mystnb = mystnb


def link_module(source: str) -> str:
    """Make the module that a chapter gives a link to its entry in the reference."""
    return PROMISE.sub(r"\1{py:mod}\2", source)


def read_nb(text: str) -> Any:
    """Parse a notebook for the book; the hook of `nb_custom_formats`."""
    notebook = nbformat.reads(text, as_version=4)
    if notebook.cells and notebook.cells[0].cell_type == "markdown":
        notebook.cells[0].source = link_module(notebook.cells[0].source)
    in_solution = False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            annotate(cell, folds=not in_solution)  # a solution is folded as a whole
        elif marks := SOLUTION.findall(cell.source):
            in_solution = marks[-1] == "start"
    return notebook


def open_fold(translator: Any, node: Any) -> None:
    """Begin a fold: its line is its name, so that a screen reader says it too."""
    classes = " ".join(["admonition", "hide", *node["classes"]])
    line = f'<p class="admonition-title">{escape(node["prompt_show"])}</p>'
    translator.body.append(f'<details class="{classes}">\n<summary>{line}</summary>\n')


def close_fold(translator: Any, node: Any) -> None:
    """End a fold."""
    translator.body.append("</details>\n")


def drop_borrowed(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show no text below a constant that only its type has written."""
    if what == "data" and cleandoc("\n".join(lines)) == cleandoc(obj.__doc__ or ""):
        lines.clear()


def name_entries(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Call the entries of a list of references items, for the role that docutils gives them is deprecated."""
    if "body" in context:
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')


def setup(app: Any) -> dict[str, int | bool]:
    """Sphinx asks every extension for this; most of the work is done in `read_nb`.

    Where this file or `folding` has changed, all pages are read again.
    """
    from myst_nb.sphinx_ import HideCodeCellNode  # only a build needs it; the writer imports this module too

    app.add_node(HideCodeCellNode, override=True, html=(open_fold, close_fold))
    app.connect("autodoc-process-docstring", drop_borrowed, priority=100)
    app.connect("html-page-context", name_entries)
    sources = b"".join(Path(path).read_bytes() for path in (__file__, folding.__file__))
    return {"env_version": crc32(sources), "parallel_read_safe": True, "parallel_write_safe": True}
