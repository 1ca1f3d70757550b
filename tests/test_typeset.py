"""How pages are set: what stays on one line, where a name may break, and labels that tell references apart."""

import re
from collections import Counter

import pytest
from docutils import nodes
from docutils.utils import new_document
from gates import HTML, ROOT
from pybtex.database import parse_file
from typeset import PRE, RAW, breakable, cited_as, join_marks, keep_names


def paragraph(*children: nodes.Node) -> nodes.document:
    """A document of one paragraph."""
    tree = new_document("a page")
    tree += nodes.paragraph("", "", *children)
    return tree


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("with ", ", and", ["x,"]),
        ("with ", ".", ["x."]),
        ("(", "), and", ["(x),"]),
        ("(", " or", ["(x"]),
        ("with ", " and", []),
        ("", "", []),
    ],
)
def test_a_formula_keeps_its_marks(before: str, after: str, kept: list[str]) -> None:
    """A formula is in one node with the marks beside it, and the text is as it was."""
    tree = paragraph(nodes.Text(before), nodes.math("", "x"), nodes.Text(after))
    join_marks(tree)
    assert [node.astext() for node in tree.findall(nodes.inline)] == kept
    assert tree.astext() == f"{before}x{after}"


def test_a_name_with_a_hyphen_is_whole() -> None:
    """A name that begins with a letter and a hyphen is in a node of its own, and the text is as it was."""
    tree = paragraph(nodes.Text("Beside L-BFGS, K-FAC and one-sided bounds."))
    keep_names(tree)
    assert [node.astext() for node in tree.findall(nodes.inline)] == ["L-BFGS", "K-FAC"]
    assert tree.astext() == "Beside L-BFGS, K-FAC and one-sided bounds."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("psgd_lit", "psgd_lit"),
        ("lr_preconditioner", "lr_<wbr>preconditioner"),
        ("psgd_lit.diagnosis", "psgd_lit.<wbr>diagnosis"),
        ("torch.distributed", "torch.<wbr>distributed"),
        ("f(first=1,second)", "f(<wbr>first=<wbr>1,<wbr>second)"),
        ("&lt;preconditioner&gt;", "&lt;preconditioner&gt;"),
    ],
)
def test_a_long_name_breaks_between_its_parts(name: str, expected: str) -> None:
    """A long name may break after a dot, an underscore or a bracket; a short one never does."""
    assert PRE.sub(breakable, f'<span class="pre">{name}</span>') == f'<span class="pre">{expected}</span>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(a: int = <factory>, b=3)", "(a: int = ..., b=3)"),
        ("(a=<function Contender.<lambda>>, b: bool)", "(a=..., b: bool)"),
        ("(a: int = 2)", "(a: int = 2)"),
    ],
)
def test_signatures_show_no_object(text: str, expected: str) -> None:
    """The default that Python can't write is an ellipsis."""
    assert RAW.sub(r"\1...", text) == expected


def test_no_two_references_are_cited_alike() -> None:
    """Authors and year tell a reference from all others."""
    labels = Counter(map(cited_as, parse_file(str(ROOT / "nbs/references.bib")).entries.values()))
    assert [label for label, count in labels.items() if count > 1] == []


def test_references_carry_the_labels_of_citations() -> None:
    """What the text cites is a label of the list of references."""
    listed = (HTML / "nbs/appendix/31_references.html").read_text(encoding="utf-8")
    labels = re.findall(r'<span class="label"><span class="fn-bracket">\[</span>(.*?)<', listed)
    text = (HTML / "nbs/problem/03_history.html").read_text(encoding="utf-8")
    cited = re.findall(
        r'<a class="reference internal" href="[^"]*31_references.html#id\d+"[^>]*>(.*?)</a>',
        text,
    )
    assert cited
    assert {re.sub("<.*?>", "", label).replace("\xa0", " ") for label in cited} <= set(labels)


def test_no_table_breaks_a_word_anywhere() -> None:
    """A number or a name in a table isn't cut."""
    sheet = (ROOT / "nbs/_static/book.css").read_text(encoding="utf-8")
    rules = re.findall(r"([^{}]*)\{([^{}]*)\}", sheet)
    assert not [heads for heads, body in rules if re.search(r"table|\bt[dh]\b", heads) and ": anywhere" in body]
