"""How pages are set: what stays on one line, where a long name may break, and what the lists of the book say.

* A formula and the mark beside it stay on one line, and so does a name such as "L-BFGS".
* A long name in code may break after a dot, an underscore or a bracket, and nowhere else.
* Signatures show no object of Python as raw text.
* The list of references carries the labels with which the text cites them.
* The index of statements names them as the text does.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from docutils import nodes
from pybtex.plugin import register_plugin
from pybtex.style.formatting.alpha import Style as AlphaStyle
from pybtex.style.labels import BaseLabelStyle
from sphinx_proof.domain import ProofIndex

CLOSING = re.compile(r"[.,;:!?)\]\u2019\u201d]+")
OPENING = re.compile(r"[(\[\u2018\u201c]+$")
WHOLE = re.compile(r"\b[A-Z]-[A-Z]\w*")
"""Names that begin with one letter and a hyphen."""
PRE = re.compile(r'(<span class="pre">)([^<]*)(?=</span>)')
BREAK = re.compile(r"(?<=\w)(?!_lit\b)([._(=/,]+|::)(?=\w|$)")
LONG_NAME = 12
"""Characters of a name that never breaks."""
RAW = re.compile(r"(=\s*)<(?:[^<>]|<[^<>]*>)*>")
"""The default of a parameter that is an object without a text of its own."""


def text_at(parent: Any, place: int) -> str:
    """The text that stands at a place among the children of a node; none beyond them, or if it is no text."""
    child = parent[place] if 0 <= place < len(parent) else None
    return child.astext() if isinstance(child, nodes.Text) else ""


def join_marks(tree: nodes.document) -> None:
    """Let no line begin with the mark after a formula, nor end with the bracket before it."""
    for formula in [*tree.findall(nodes.math)]:
        parent = formula.parent
        place = parent.index(formula)
        before, after = text_at(parent, place - 1), text_at(parent, place + 1)
        opening, closing = OPENING.search(before), CLOSING.match(after)
        if closing:
            parent[place + 1] = nodes.Text(after[closing.end() :])
        if opening:
            parent[place - 1] = nodes.Text(before[: opening.start()])
        if opening or closing:
            marks = [nodes.Text(match[0] if match else "") for match in (opening, closing)]
            kept = nodes.inline("", "", marks[0], formula, marks[1], classes=["kept"])
            parent[place] = kept


def pieces(text: str) -> Iterator[nodes.Node]:
    """A text, with each name that stays whole in a node of its own."""
    end = 0
    for match in WHOLE.finditer(text):
        yield nodes.Text(text[end : match.start()])
        yield nodes.inline("", match[0], classes=["whole"])
        end = match.end()
    yield nodes.Text(text[end:])


def keep_names(tree: nodes.document) -> None:
    """Break no name at its hyphen, in titles and in paragraphs."""
    for text in [*tree.findall(nodes.Text)]:
        if isinstance(text.parent, nodes.title | nodes.paragraph) and WHOLE.search(text):
            text.parent.replace(text, [piece for piece in pieces(text) if piece.astext()])


def set_lines(app: Any, tree: nodes.document) -> None:
    """Decide what stays together on a page, before titles are collected."""
    join_marks(tree)
    keep_names(tree)


def breakable(match: re.Match[str]) -> str:
    """A piece of code that may break between the parts of its name, if it is long."""
    name = match[2] if len(match[2]) <= LONG_NAME else BREAK.sub(r"\1<wbr>", match[2])
    return match[1] + name


def break_names(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Say where long names may break, and write a space as a space."""
    if "body" in context:
        body = context["body"].replace('<span class="w"> </span>', " ")
        context["body"] = PRE.sub(breakable, body)


# The reference ---------------------------------------------------------------------------------------------------


def plain_signature(app: Any, what: str, name: str, obj: Any, options: Any, text: str, result: str) -> Any:
    """Show an ellipsis for a default that Python can't write."""
    return (RAW.sub(r"\1...", text), result) if text and RAW.search(text) else None


FIELD = type(vars(NamedTuple("One", [("only", int)]))["only"])
"""What Python makes of the field of a named tuple."""


def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave the fields of a named tuple to the text of their class."""
    return True if type(obj) is FIELD else None


# The references --------------------------------------------------------------------------------------------------


def cited_as(entry: Any) -> str:
    """The label of a reference: "Robbins and Monro, 1951"."""
    people = [" ".join([*person.prelast_names, *person.last_names]) for person in entry.persons["author"]]
    who = f"{people[0]} et al." if len(people) > 2 else " and ".join(people)
    return f"{who}, {entry.fields['year']}"


class AuthorYear(BaseLabelStyle):  # type: ignore[misc]
    """Labels that say who and when, as the citations in the text do."""

    def format_labels(self, entries: list[Any]) -> Iterator[str]:
        """A label for each entry."""
        return map(cited_as, entries)


class BookStyle(AlphaStyle):  # type: ignore[misc]
    """The list of references."""

    default_label_style = AuthorYear


# The index of statements -----------------------------------------------------------------------------------------


def note_titles(app: Any, tree: nodes.document) -> None:
    """Keep the titles of statements for their index."""
    known = getattr(app.env, "proof_list", {})
    for node in tree.findall(nodes.Element):
        if node.get("label") in known and isinstance(node[0], nodes.title):
            known[node["label"]]["title"] = node[0].astext().strip(" ()")


class Statements(ProofIndex):  # type: ignore[misc]
    """Definitions, theorems and the like, by kind and number."""

    localname = "Index of statements"
    shortname = "statements"

    def generate(self, docnames: Any = None) -> tuple[list[tuple[str, list[Any]]], bool]:
        """A row for each statement: its kind and number, its title, and a link to it."""
        env, rows = self.domain.env, defaultdict(list)
        for label, found in env.proof_list.items():
            if found["nonumber"]:
                continue
            number = env.toc_fignumbers[found["docname"]][found["countertype"]][label]
            name = f"{found['realtype'].title()} {'.'.join(map(str, number))}"
            rows[found["realtype"]].append((number, (name, 0, found["docname"], label, found["title"], "", "")))
        return [(kind.title(), [row for _, row in sorted(rows[kind])]) for kind in sorted(rows)], True


def setup(app: Any) -> dict[str, int | bool]:
    """Sphinx asks every extension for this."""
    register_plugin("pybtex.style.formatting", "book", BookStyle)
    app.connect("doctree-read", set_lines, priority=100)
    app.connect("doctree-read", note_titles)
    app.connect("html-page-context", break_names)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-skip-member", skip_fields)
    app.registry.domains["prf"].indices = {Statements}
    return {"env_version": crc32(Path(__file__).read_bytes()), "parallel_read_safe": True, "parallel_write_safe": True}
