"""What Sphinx needs to know of our notebooks: nbdev's directives become cell tags and figure settings.

A directive is a leading comment `#| name: value`.
The page hides it; the notebook that the page offers for download keeps it.
"""

import re
from typing import Any

import nbformat

DIRECTIVE = re.compile(r"#\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<value>.*)")
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
    if "fig-alt" in directives:
        mystnb["image"] = {"alt": directives["fig-alt"]}
    if "fig-cap" in directives:
        mystnb["figure"] = {"caption": directives["fig-cap"], "name": directives["label"]}
    if mystnb:
        cell.metadata.mystnb = mystnb


def read_nb(text: str) -> Any:
    """Parse a notebook for the book; the hook of `nb_custom_formats`."""
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            annotate(cell)
    return notebook


def setup(app: Any) -> dict[str, bool]:
    """Sphinx asks every extension for this; all the work is done in `read_nb`."""
    return {"parallel_read_safe": True, "parallel_write_safe": True}
