"""What Sphinx needs to know of our notebooks: nbdev's directives become cell tags and figure settings.

A directive is a leading comment `#| name: value`.
The page hides it; the notebook that the page offers for download keeps it.
What a page folds, and the line that stands for it, is the business of `folding`.
"""

import re
from html import escape
from inspect import cleandoc
from pathlib import Path
from typing import Any
from zlib import crc32

import folding
import nbformat

DIRECTIVE = re.compile(r"#\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<value>.*)")
PROMISE = re.compile(r"^(You get )(`psgd_lit\.[\w.]+`)", re.MULTILINE)
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


def annotate(cell: Any) -> None:
    """Move the directives of a code cell into the metadata that MyST-NB reads."""
    directives, cell.source = split_directives(cell.source)
    tags = [tag for (name, value), tag in TAGS.items() if name in directives and value in (None, directives[name])]
    cell.metadata.tags = [*cell.metadata.get("tags", []), *tags]
    mystnb: dict[str, Any] = {}
    if (line := folding.folded_line(cell, directives)) is not None:
        cell.metadata.tags = [*dict.fromkeys([*cell.metadata.tags, "hide-input"])]
        mystnb["code_prompt_show"] = line
    if "fig-alt" in directives:
        mystnb["image"] = {"alt": directives["fig-alt"]}
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
    for cell in notebook.cells:
        if cell.cell_type == "code":
            annotate(cell)
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


def setup(app: Any) -> dict[str, int | bool]:
    """Sphinx asks every extension for this; most of the work is done in `read_nb`.

    Where this file or `folding` has changed, all pages are read again.
    """
    from myst_nb.sphinx_ import HideCodeCellNode  # only a build needs it; the writer imports this module too

    app.add_node(HideCodeCellNode, override=True, html=(open_fold, close_fold))
    app.connect("autodoc-process-docstring", drop_borrowed, priority=100)
    sources = b"".join(Path(path).read_bytes() for path in (__file__, folding.__file__))
    return {"env_version": crc32(sources), "parallel_read_safe": True, "parallel_write_safe": True}
