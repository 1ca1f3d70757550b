"""Reading mode: which code a page folds, and what the line in its place says."""

import ast
import re
from html import unescape
from typing import Any

import nbformat
import pytest
from folding import LONG, count, folded_line
from gates import PAGES, short
from ledger import read_nb
from nbformat import v4
from test_pages import html_of

FOLD = re.compile(
    r'<details class="admonition hide[^"]*">\s*<summary><p class="admonition-title">(.*?)</p></summary>',
    re.S,
)


def line(source: str, output: bool = False, run: bool = True, **directives: str) -> str | None:
    """The line that stands for a cell."""
    outputs = [v4.new_output("stream", text="1")] if output else []
    cell = v4.new_code_cell(source, outputs=outputs, execution_count=1 if run else None)
    return folded_line(cell, directives)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("assert a == b", "1 equality"),
        ("assert a == b and torch.equal(x, y)\nassert c is None", "3 equalities"),
        ("assert torch.allclose(a, b, rtol=0, atol=1e-9)", "1 equality to 1e-09"),
        ("assert torch.allclose(a, b)", "1 equality"),
        ("assert (a - b).abs().max() < 1e-12", "1 equality to 1e-12"),
        ("assert a == b\nassert abs(x / y - 1) < 0.05", "2 equalities, the loosest to 0.05"),
        ("assert relative_error(a, b) < 1e-6", "1 equality to 1e-06"),
        ("assert loss < 1e-8", "1 bound"),
        ("assert 0 < a < b and c >= d", "2 bounds"),
        ("assert (a < b).all()\nassert all(p > 0 for p in ps)", "2 bounds"),
        ("assert 'no' in complaint(f)\nassert not a", "2 conditions"),
        ("assert a == b\nassert a < c\nassert a != d", "1 equality, 1 bound, 1 condition"),
        ("for a in xs:\n    assert a == b", "1 equality, in a loop"),
        ("def f():\n    assert a < b", "1 bound"),
    ],
)
def test_count(source: str, expected: str) -> None:
    """Each condition is counted once, by its kind; a tolerance is named where it is written."""
    assert count(ast.parse(source)) == expected


DEFINITION = "def half(x: Tensor, n: int = 1) -> Tensor:\n    '''Return a half.\n\n    Or less.\n    '''\n"


@pytest.mark.parametrize(
    ("source", "directives", "expected"),
    [
        ("import torch\nfrom a import b", {}, "imports"),
        ("import torch\nfrom a import b", {"export": ""}, "exported imports"),
        ("import a\n\nuse_style()\nT = Triangular()", {}, "imports"),
        ("import a\n\nT = 1", {"export": ""}, None),
        ("import a\n\nfor x in y:\n    a(x)", {}, None),
        ("x = 1", {}, None),
        ("", {"default_exp": "a"}, None),
        ("%magic", {}, None),
        (DEFINITION + "    return x / 2", {"export": ""}, None),
        (
            DEFINITION + "    x = x / 2\n" * LONG,
            {"export": ""},
            "def half(x: Tensor, n: int=1) → Tensor\n    Return a half.",
        ),
        (
            f"def f(a: {'A' * 90}, *, b: int = 2) -> int:\n" + "    a = b\n" * LONG,
            {"export": ""},
            "def f(a, b)",
        ),
        ("class A(B, C):\n" + "    x = 1\n" * LONG, {"export": ""}, "class A(B, C)"),
        ("NAMES = {\n" + "    1: 2,\n" * LONG + "}", {"export": ""}, "NAMES = ..."),
        ("x = 1\nassert x == 1", {"export": ""}, None),
        ("x = 1\nassert x == 1", {}, "checked: 1 equality"),
        ("def draw_a(x):\n    assert x > 0", {"code-fold": "true"}, "draw_a"),
        ("x = 1", {"code-fold": "true"}, "code"),
        ("x = 1\nassert x > 0", {"code-fold": "true"}, "checked: 1 bound"),
        ("explore(draw, x=[1, 2])", {}, "code of the exhibit"),
    ],
)
def test_folded_line(source: str, directives: dict[str, str], expected: str | None) -> None:
    """Imports, checks, drawing code, exhibits and long exports are folded; the rest is shown."""
    assert line(source, **directives) == expected


def test_a_check_with_an_output_is_shown() -> None:
    """What a cell prints belongs to the code above it, so that cell stays open."""
    assert line("print(x)\nassert x == 1", output=True) is None


def test_nothing_is_called_checked_before_it_has_run() -> None:
    """A cell that was not executed, or failed, claims nothing."""
    assert line("assert x == 1", run=False) == "not run: 1 equality"
    failed: Any = v4.new_code_cell("assert x == 1", execution_count=1)
    failed.outputs = [v4.new_output("error", ename="AssertionError")]
    assert folded_line(failed, {}) is None


def test_a_solution_is_folded_as_a_whole() -> None:
    """Between the marks of a solution a check stays open, and after it checks are folded again."""
    check = "assert 1 == 1"
    cells: list[Any] = [
        v4.new_markdown_cell(":::{solution-start} ex-one\n:::"),
        v4.new_code_cell(check),
        v4.new_markdown_cell(":::{solution-end}\n:::"),
        v4.new_code_cell(check),
    ]
    read = read_nb(nbformat.writes(v4.new_notebook(cells=cells))).cells
    assert ["hide-input" in cell.metadata.tags for cell in read if cell.cell_type == "code"] == [False, True]


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_folds_on_the_page(path: Any) -> None:
    """The built page has each line once, in order, as the name of a fold that needs no script."""
    expected = [
        cell.metadata.mystnb["code_prompt_show"]
        for cell in read_nb(path.read_text(encoding="utf-8")).cells
        if "hide-input" in cell.metadata.get("tags", [])
        and not {"remove-cell", "remove-input"} & set(cell.metadata.tags)
    ]
    page = html_of(path).read_text(encoding="utf-8")
    assert [unescape(line) for line in FOLD.findall(page)] == expected
