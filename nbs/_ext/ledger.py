"""The claims ledger: claims come from `nbs/claims.toml`, verdicts from the stored outputs of the notebooks.

`read_nb` puts a box with the claim in place of the output of a verdict.
The directive `claims-ledger` lists all claims.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import book_ext
import nbformat
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective
from writer import ROOT, pages

from psgd_lit.claims import MIME, UNDECIDED, UNTRIED, VERDICTS

CLAIMS = ROOT / "nbs" / "claims.toml"
NUMBERED = {"equation": "Equation ({})", "table": "Table {}", "figure": "Figure {}"}
FINDINGS = {"erratum": "Errata", "contradiction": "Contradictions", "observation": "Observations"}
KINDS = (*NUMBERED, "sentence", *FINDINGS)
"""The kinds of claims: those of the paper, with a number or without, and ours about the paper."""
DEFINITION, READ = "definition", "found by reading"
WORDS = (*VERDICTS, UNDECIDED, UNTRIED, DEFINITION, READ)
"""What a row of the ledger can say; definitions and what was found by reading have no verdict, nothing is computed."""


@dataclass(frozen=True)
class Claim:
    """One row of the ledger.

    Attributes:
        id: what a chapter calls it.
        kind: one of `KINDS`.
        section: where it stands in the paper.
        text: what is claimed, in our words.
        number: of the equation, table or figure.
        read: what was read, for what is found by reading.
        used: the label of the chapter that uses it, for a definition and for arithmetic.
        rule: what must be measured for it to hold, for a claim whose words do not say it.
        missing: why nothing is known of it yet.
    """

    id: str
    kind: str
    section: str
    text: str
    number: str = ""
    read: str = ""
    used: str = ""
    rule: str = ""
    missing: str = ""

    @property
    def place(self) -> str:
        """Where a reader of the paper finds it."""
        return NUMBERED[self.kind].format(self.number) if self.kind in NUMBERED else self.section

    @property
    def target(self) -> str:
        """The anchor of its row."""
        return f"claim-{self.id}"


@dataclass(frozen=True)
class Finding:
    """A verdict that a notebook has stored, and the label and the title of that chapter."""

    claim: str
    verdict: str
    note: str
    label: str
    title: str

    @property
    def target(self) -> str:
        """The anchor of its box."""
        return f"verdict-{self.label}-{self.claim}"


@dataclass(frozen=True)
class Ledger:
    """The claims, the titles of the paper's sections in order, and the verdicts in reading order."""

    claims: tuple[Claim, ...]
    sections: Mapping[str, str]
    findings: tuple[Finding, ...]

    @cached_property
    def by_id(self) -> dict[str, Claim]:
        """The claims by id."""
        return {claim.id: claim for claim in self.claims}

    def on(self, claim: Claim) -> list[Finding]:
        """The verdicts on a claim."""
        return [finding for finding in self.findings if finding.claim == claim.id]

    def word(self, claim: Claim) -> str:
        """The weakest verdict on a claim of those that decide, or what stands there without any."""
        found = {finding.verdict for finding in self.on(claim)}
        if found & {*VERDICTS}:
            return max(found & {*VERDICTS}, key=VERDICTS.index)
        return UNDECIDED if found else DEFINITION if claim.used else READ if claim.read else UNTRIED

    def parts(self) -> Iterator[tuple[str, list[Claim]]]:
        """The claims by heading: the paper's sections, then what was found about the paper."""
        for section, title in self.sections.items():
            inside = re.compile(rf"{re.escape(section)}(?!\w)")
            yield f"{section}: {title}", [c for c in self.claims if inside.match(c.section) and c.kind not in FINDINGS]
        for kind, title in FINDINGS.items():
            yield title, [c for c in self.claims if c.kind == kind]


def heading(notebook: Any) -> tuple[str, str]:
    """The label and the title with which a chapter begins; empty where it has none."""
    first = notebook.cells[0].source if notebook.cells else ""
    found = re.search(r"\((?P<label>chap-[\w-]+)\)=\s+# (?P<title>.+)", first)
    return (found["label"], found["title"]) if found else ("", "")


def stored(notebook: Any) -> Iterator[tuple[Any, Finding]]:
    """Yield each output of a notebook that stores a verdict, and the verdict."""
    label, title = heading(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if MIME in output.get("data", {}):
                yield output, Finding(**output.data[MIME], label=label, title=title)


def read_ledger(path: Path, notebooks: Iterable[Path]) -> Ledger:
    """Read a list of claims, and the verdicts that notebooks have stored."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    found = [finding for page in notebooks for _, finding in stored(nbformat.read(page, as_version=4))]
    return Ledger(tuple(Claim(**claim) for claim in listed["claim"]), listed["section"], tuple(found))


def read_nb(text: str) -> Any:
    """Parse a notebook for the book, with a directive in place of the output of each verdict."""
    notebook = book_ext.read_nb(text)
    for output, found in stored(notebook):
        lines = [f"```{{claim-verdict}} {found.claim}", f":verdict: {found.verdict}", f":target: {found.target}"]
        output.data = {"text/markdown": "\n".join([*lines, "", found.note, "```"])}
    return notebook


class LedgerDirective(SphinxDirective):  # type: ignore[misc]
    """What both directives share: paragraphs, badges and anchors."""

    def paragraph(self, *inline: Any) -> Any:
        """A paragraph of nodes, and of texts with roles and formulas."""
        parts = [self.parse_inline(part)[0] if isinstance(part, str) else [part] for part in inline]
        return nodes.paragraph("", "", *(node for part in parts for node in part))

    def badge(self, word: str) -> Any:
        """A verdict as a word with a mark."""
        return nodes.inline(word, word.capitalize(), classes=["verdict", f"verdict-{word.replace(' ', '-')}"])

    def anchor(self, node: Any, name: str) -> Any:
        """Let a role refer to a node by a name."""
        node["ids"], node["names"] = [name], [name]
        self.state.document.note_explicit_target(node)
        return node


class ClaimVerdict(LedgerDirective):
    """The box that a page shows where a chapter judges a claim."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"verdict": directives.unchanged, "target": directives.unchanged}

    def run(self) -> list[Any]:
        """Show the verdict, the claim with its place in the paper, and the note."""
        self.env.note_dependency(str(CLAIMS))
        claim = read_ledger(CLAIMS, notebooks=[]).by_id[self.arguments[0]]
        badge = self.badge(self.options["verdict"])
        box = nodes.container("", self.paragraph(badge, f" {{ref}}`{claim.place} <{claim.target}>`: {claim.text}"))
        if note := " ".join(self.content):
            box += self.paragraph(note)
        box["classes"] = ["claim"]
        return [self.anchor(box, self.options["target"])]


class ClaimsLedger(LedgerDirective):
    """A count of the verdicts, and a section with a table for each part of the paper."""

    def run(self) -> list[Any]:
        """Read the data and build the nodes."""
        for path in (CLAIMS, *pages()):
            self.env.note_dependency(str(path))
        ledger = read_ledger(CLAIMS, pages())
        return [self.summary(ledger), *(self.part(ledger, *part) for part in ledger.parts())]

    def row(self, *cells: list[Any]) -> Any:
        """A row of cells, each a list of blocks."""
        return nodes.row("", *(nodes.entry("", *blocks) for blocks in cells))

    def table(self, widths: Mapping[str, int], rows: Iterable[Any], style: str) -> Any:
        """A table whose columns have these headings and relative widths."""
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in widths.values()), cols=len(widths))
        group += nodes.thead("", self.row(*([self.paragraph(name)] for name in widths)))
        group += nodes.tbody("", *rows)
        return nodes.table("", group, classes=[style, "colwidths-given"])

    def summary(self, ledger: Ledger) -> Any:
        """How many claims have which verdict: the paper's, and ours about it."""
        counts = Counter((ledger.word(claim), claim.kind in FINDINGS) for claim in ledger.claims)
        rows = [
            self.row(
                [self.paragraph(self.badge(word))],
                *([self.paragraph(f"{counts[word, ours]}")] for ours in (False, True)),
            )
            for word in WORDS
        ]
        return self.table({"verdict": 2, "claims of the paper": 1, "ours about it": 1}, rows, "summary")

    def part(self, ledger: Ledger, title: str, claims: list[Claim]) -> Any:
        """A section with its table."""
        section = nodes.section("", nodes.title("", title), names=[nodes.fully_normalize_name(title)])
        self.state.document.note_implicit_target(section, section)
        rows = [self.claim_row(ledger, claim) for claim in claims]
        section += self.table({"claim": 5, "verdict": 2, "where, and what to know": 5}, rows, "ledger")
        return section

    def claim_row(self, ledger: Ledger, claim: Claim) -> Any:
        """The row of a claim: what and where in the paper, the verdict, and what each chapter has to say."""
        said = [
            self.paragraph(f"{{ref}}`{found.title} <{found.target}>`{': ' * bool(found.note)}{found.note}")
            for found in ledger.on(claim)
        ]
        if claim.used:
            said.append(self.paragraph(f"Used in {{ref}}`{claim.used}`."))
        if claim.read:
            said.append(self.paragraph(f"Read in {claim.read}."))
        if claim.missing:
            said.append(self.paragraph(claim.missing))
        what = [self.paragraph(nodes.strong("", f"{claim.place}."), f" {claim.text}")]
        if claim.rule:
            what.append(self.paragraph(nodes.emphasis("", "Rule."), f" {claim.rule}"))
        row = self.row(what, [self.paragraph(self.badge(ledger.word(claim)))], said)
        return self.anchor(row, claim.target)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx asks every extension for this."""
    app.add_directive("claim-verdict", ClaimVerdict)
    app.add_directive("claims-ledger", ClaimsLedger)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
