"""What the gates share: where things are, and how a notebook is read.

A gate is a function that returns its complaints as a list of sentences; an empty list is a pass.
So the same function judges the book, and, in a test beside it, a broken example that it must complain about.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import nbformat
import pytest
from book_ext import split_directives
from writer import pages

ROOT = Path(__file__).resolve().parents[1]
NBS = ROOT / "nbs"
LIBRARY = ROOT / "psgd_lit"
HTML = ROOT / "_build" / "html"
PAGES = [page for page in pages() if page.exists()]
"""The pages of the book in reading order; that none is missing is a gate of its own."""

LOOK_AHEAD = "a look ahead at"
"""The words of a first cell after which chapters may be named that come later."""
HIDDEN = {"hide", "default_exp"}
HIDING_TAGS = {"remove-cell", "remove-input", "hide-cell", "hide-input"}


def name_of(path: Path) -> str:
    """The name of a page, without its number in its part."""
    return path.stem.lstrip("0123456789").lstrip("_")


def short(path: Path) -> str:
    """The name of a file in messages and test ids: relative to the tree where possible."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def report(complaints: Iterable[str]) -> None:
    """Fail with one complaint a line, and nothing else."""
    if lines := list(complaints):
        pytest.fail("\n".join(lines), pytrace=False)


def ids(spoiled: Iterable[tuple[Any, ...]]) -> list[str]:
    """Test ids for a table of broken examples: the gate, which comes first, and its complaint, which comes last."""
    return [f"{gate.__name__}: {complaint}" for gate, *_, complaint in spoiled]


@dataclass(frozen=True)
class Cell:
    """One cell, with its directives taken off; cells are counted from 1 in messages."""

    number: int
    kind: str
    source: str
    directives: dict[str, str]
    tags: frozenset[str]
    outputs: tuple[Any, ...]

    def __str__(self) -> str:
        """Say where: the number and the first words."""
        first = self.source.strip().split("\n")[0]
        return f"cell {self.number} ({first[:50]})"

    @property
    def is_code(self) -> bool:
        """True for a code cell."""
        return self.kind == "code"

    @property
    def is_export(self) -> bool:
        """True for code that goes into the library."""
        return "export" in self.directives

    @property
    def is_visible(self) -> bool:
        """True if the page shows the source without a click."""
        folded = self.directives.get("echo") == "false" or self.directives.get("code-fold") == "true"
        return not (folded or HIDDEN & self.directives.keys() or HIDING_TAGS & self.tags)

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; empty for text, and for code that isn't plain Python (a gate says so)."""
        try:
            return ast.parse(self.source if self.is_code else "")
        except SyntaxError:
            return ast.parse("")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All that the syntax tree is made of."""
        return list(ast.walk(self.tree))

    @property
    def has_assert(self) -> bool:
        """True if the cell checks something."""
        return any(isinstance(node, ast.Assert) for node in self.nodes)

    @property
    def is_check(self) -> bool:
        """True if the page shows that the cell checks something."""
        return self.has_assert and self.is_visible and not self.is_export

    @property
    def is_figure(self) -> bool:
        """True if the output holds a picture."""
        return any(kind.startswith("image/") for output in self.outputs for kind in output.get("data", {}))

    @property
    def shown_by(self) -> str:
        """The name of the function whose result the cell ends by showing; empty if it ends in another way."""
        match self.tree.body:
            case [*_, ast.Expr(ast.Call(ast.Name(name)))]:
                return name
        return ""

    @property
    def is_exhibit(self) -> bool:
        """True if the cell ends by showing what `explore`, `live` or `recorded` returns."""
        return self.shown_by in {"explore", "live", "recorded"}

    @property
    def is_live(self) -> bool:
        """True if that is an exhibit which computes in the page."""
        return self.shown_by in {"live", "recorded"}

    @cached_property
    def names(self) -> set[str]:
        """All names and attributes that the code uses."""
        attributes = {node.attr for node in self.nodes if isinstance(node, ast.Attribute)}
        return attributes | {node.id for node in self.nodes if isinstance(node, ast.Name)}


@dataclass(frozen=True)
class Page:
    """One notebook of the book."""

    path: Path
    cells: tuple[Cell, ...]

    @cached_property
    def code(self) -> list[Cell]:
        """The code cells."""
        return [cell for cell in self.cells if cell.is_code]

    @cached_property
    def text(self) -> list[Cell]:
        """The markdown cells."""
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @cached_property
    def module(self) -> str | None:
        """The module that the page exports, without `psgd_lit.`; None if it exports none."""
        return next(
            (cell.directives["default_exp"] for cell in self.code if "default_exp" in cell.directives),
            None,
        )

    @cached_property
    def label(self) -> str:
        """The label with which the page begins; empty if it has none."""
        found = re.match(r"\((chap-[\w-]+)\)=", self.cells[0].source) if self.cells else None
        return found[1] if found else ""

    @property
    def is_tool(self) -> bool:
        """True for a page of the appendix: software, reference and the book's own machinery."""
        return self.path.parent.name == "appendix"

    @cached_property
    def needs(self) -> tuple[list[str], list[str]]:
        """The labels of the chapters that the first cell says it needs, and of those at which it looks ahead."""
        line = re.search(r"^You need .*$", self.cells[0].source, re.MULTILINE) if self.cells else None
        before, _, ahead = line[0].partition(LOOK_AHEAD) if line else ("", "", "")
        return re.findall(r"chap-[\w-]+", before), re.findall(r"chap-[\w-]+", ahead)

    @cached_property
    def defined_equations(self) -> list[str]:
        """The labels of the page's equations."""
        return [label for cell in self.text for label in re.findall(r"\$\$\s*\((eq-[\w-]+)\)", cell.source)]

    @cached_property
    def named_equations(self) -> list[str]:
        """The labels of equations that its text names, and then those that its code does."""
        in_text, in_code = (
            re.compile(r"\{eq\}`(?:[^`<]*<)?(eq-[\w-]+)>?`"),
            re.compile(r"\beq-\w+(?:-\w+)*"),
        )
        found = [label for cell in self.text for label in in_text.findall(cell.source)]
        return found + [label for cell in self.code for label in in_code.findall(cell.source)]

    def after(self, cell: Cell, count: int) -> tuple[Cell, ...]:
        """The cells that follow a cell, at most `count`."""
        return self.cells[cell.number : cell.number + count]


def read_cell(number: int, cell: Any) -> Cell:
    """Take the directives off a cell of a notebook."""
    is_code = cell.cell_type == "code"
    directives, source = split_directives(cell.source) if is_code else ({}, cell.source)
    tags = frozenset(cell.metadata.get("tags", []))
    return Cell(number, cell.cell_type, source, directives, tags, tuple(cell.get("outputs", [])))


def as_page(path: Path, notebook: Any) -> Page:
    """Read a notebook's cells."""
    return Page(path, tuple(read_cell(number, cell) for number, cell in enumerate(notebook.cells, 1)))


def read_page(path: Path) -> Page:
    """Read a notebook from its file, once for all gates as long as the file stays."""
    return read_as_it_was(path, path.stat().st_mtime_ns)


@cache
def read_as_it_was(path: Path, time: int) -> Page:
    """Read a notebook whose file was last changed at that time."""
    return as_page(path, nbformat.read(path, as_version=4))
