"""The claims ledger: the list is complete, verdicts are computed in view, and the page shows all of them."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup, SoupStrainer
from gates import PAGES, Page, as_page, name_of, read_page, report, short
from ledger import (
    CLAIMS,
    DEFINITION,
    FINDINGS,
    KINDS,
    READ,
    WORDS,
    Claim,
    Finding,
    Ledger,
    read_ledger,
    stored,
)
from nbformat import v4
from test_pages import html_of, soup_of

from psgd_lit.claims import MIME, UNDECIDED, UNTRIED, VERDICTS, verdict

EQUATIONS = {str(number) for number in range(1, 21)}
FIGURES = {str(number) for number in range(1, 6)}
TABLE_ROWS = {
    "I, dense",
    "I, sparse LU",
    "I, Kronecker",
    "I, diagonal",
    "I, SCAN",
    "I, caption",
    "of times",
}
CONTRADICTIONS = {f"contradiction-{number}" for number in range(1, 18)}
"""What the paper numbers, the rows of its two tables, and the contradictions that were found in it."""


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    """The ledger of the book."""
    return read_ledger(CLAIMS, PAGES)


# The list --------------------------------------------------------------------------------------------------------


def missing(ledger: Ledger) -> Iterator[str]:
    """Everything that the paper numbers is listed once."""
    for kind, numbers in (("equation", EQUATIONS), ("figure", FIGURES), ("table", TABLE_ROWS)):
        found = Counter(claim.number for claim in ledger.claims if claim.kind == kind)
        yield from (f"{kind} {number} is not listed" for number in sorted(numbers - found.keys()))
        yield from (f"the paper has no {kind} {number!r}" for number in sorted(found.keys() - numbers))
        yield from (f"{kind} {number} is listed {count} times" for number, count in found.items() if count > 1)
    listed = {claim.id for claim in ledger.claims if claim.kind == "contradiction"}
    yield from (f"{name} is not listed" for name in sorted(CONTRADICTIONS ^ listed))


def malformed(ledger: Ledger) -> Iterator[str]:
    """Each claim has an id of its own, a known kind, a place in the paper, and one short sentence."""
    shown = Counter(claim.id for _, claims in ledger.parts() for claim in claims)
    for name, count in Counter(claim.id for claim in ledger.claims).items():
        if count > 1:
            yield f"{name} is the id of {count} claims"
    for claim in ledger.claims:
        if not re.fullmatch(r"[a-z0-9.-]+", claim.id):
            yield f"{claim.id}: an id has small letters, digits, points and hyphens"
        if claim.kind not in KINDS:
            yield f"{claim.id}: {claim.kind!r} is none of the kinds"
        elif shown[claim.id] != 1 and claim.kind not in FINDINGS:
            yield f"{claim.id}: section {claim.section!r} is in none of the parts"
        if not re.fullmatch(r"[A-Z].*\.", claim.text) or len(claim.text.split()) > 45:
            yield f"{claim.id}: the claim should be a sentence of at most 45 words"
        if claim.read and claim.kind not in FINDINGS:
            yield f"{claim.id}: a claim of the paper is executed, not read"
        if claim.kind in FINDINGS and (claim.used or claim.rule):
            yield f"{claim.id}: only a claim of the paper is a definition or has a rule"
        for text in filter(None, (claim.rule, claim.missing)):
            if not re.fullmatch(r"[A-Z].*\.", text) or len(text.split()) > 45:
                yield f"{claim.id}: a rule, and what is missing, is a sentence of at most 45 words"


TRAINING = re.compile(r"V\.B, Experiment|V\.C\.2|V\.D|VI")
"""The sections of the paper whose claims are judged by recorded runs."""
WITHOUT_RUNS = {
    "digits-dense",
    "diagonal-larger-than-scan",
    "large-batch-directions",
    "unit-eigenvalues",
}
"""Claims of these sections that need no training to be judged."""


def unruled(ledger: Ledger) -> Iterator[str]:
    """What recorded runs judge has a rule, and what nobody tries says why."""
    for claim in ledger.claims:
        by_runs = TRAINING.match(claim.section) and claim.id not in WITHOUT_RUNS and claim.kind not in FINDINGS
        if by_runs and not (claim.rule or claim.used):
            yield f"{claim.id}: a claim about training needs a rule, before it is tried"


def unexplained(ledger: Ledger) -> Iterator[str]:
    """A claim that no chapter judges says why, and one that a chapter judges doesn't say that nothing is known."""
    for claim in ledger.claims:
        is_open = not (ledger.on(claim) or claim.used or claim.read)
        if is_open and not claim.missing:
            yield f"{claim.id}: no chapter judges it, and the list doesn't say what is missing"
        if claim.missing and not is_open:
            yield f"{claim.id}: a chapter judges it, and the list still says what is missing"


def test_list_is_complete(ledger: Ledger) -> None:
    """Nothing that the paper numbers is left out."""
    report(missing(ledger))


def test_list_is_well_formed(ledger: Ledger) -> None:
    """Each claim can be shown."""
    report(malformed(ledger))


def with_claim(ledger: Ledger, **changes: str) -> Ledger:
    """A ledger with one more claim."""
    claim = {"id": "more", "kind": "sentence", "section": "II.B", "text": "It holds."} | changes
    return Ledger((*ledger.claims, Claim(**claim)), ledger.sections, ledger.findings)


def test_training_has_rules(ledger: Ledger) -> None:
    """No claim about training is tried without a rule."""
    report(unruled(ledger))


def test_what_is_missing_is_said(ledger: Ledger) -> None:
    """No claim is open without a reason."""
    report(unexplained(ledger))


def test_reason_and_verdict_exclude_each_other(ledger: Ledger) -> None:
    """A claim is explained by a chapter or by a reason, not by both."""
    judged = (Finding("more", "holds", "", "chap-x", "X"),)
    for missing, findings, count in (
        ("", (), 1),
        ("No runs.", (), 0),
        ("", judged, 0),
        ("No runs.", judged, 1),
    ):
        claim = Claim("more", "sentence", "II.B", "It holds.", missing=missing)
        assert len(list(unexplained(Ledger((claim,), ledger.sections, findings)))) == count


@pytest.mark.parametrize(
    ("gate", "changes", "complaint"),
    [
        (unruled, {"section": "V.D"}, "a claim about training needs a rule"),
        (malformed, {"rule": "it is lower"}, "a rule, and what is missing, is a sentence"),
        (malformed, {"missing": "no runs"}, "a rule, and what is missing, is a sentence"),
        (
            malformed,
            {"kind": "observation", "used": "chap-hvp"},
            "only a claim of the paper is a definition",
        ),
        (missing, {"kind": "equation", "number": "21"}, "the paper has no equation '21'"),
        (missing, {"kind": "equation", "number": "8"}, "equation 8 is listed 2 times"),
        (
            missing,
            {"kind": "contradiction", "id": "contradiction-18"},
            "contradiction-18 is not listed",
        ),
        (malformed, {"id": "equation-8"}, "equation-8 is the id of 2 claims"),
        (malformed, {"id": "More"}, "small letters"),
        (malformed, {"kind": "opinion"}, "'opinion' is none of the kinds"),
        (malformed, {"section": "VII"}, "is in none of the parts"),
        (malformed, {"text": "it holds"}, "should be a sentence"),
        (malformed, {"read": "the paper"}, "is executed, not read"),
    ],
)
def test_list_gate_fails(
    gate: Callable[[Ledger], Iterator[str]],
    changes: dict[str, str],
    complaint: str,
    ledger: Ledger,
) -> None:
    """A number too many, and each kind of malformed claim, is seen."""
    assert complaint in "\n".join(gate(with_claim(ledger, **changes)))


def test_missing_number_is_seen(ledger: Ledger) -> None:
    """A claim that was dropped is missed."""
    rest = tuple(
        claim for claim in ledger.claims if claim.id not in ("equation-8", "figure-3", "table-scan", "contradiction-2")
    )
    assert list(missing(Ledger(rest, ledger.sections, ()))) == [
        "equation 8 is not listed",
        "figure 3 is not listed",
        "table I, SCAN is not listed",
        "contradiction-2 is not listed",
    ]


# The verdicts ----------------------------------------------------------------------------------------------------


def calls(tree: ast.Module) -> list[tuple[ast.Call, ast.expr | None]]:
    """The calls of `verdict` whose results the cell shows: its last expression, or what `display` is given.

    Beside each stands the condition under which it is called, in `verdict(...) if ready else "not yet run"`, or None.
    """
    shown: list[ast.expr] = []
    for node in tree.body:
        match node:
            case ast.Expr(ast.Call(ast.Name("display"), args=arguments)):
                shown += arguments
            case ast.Expr(value) if node is tree.body[-1]:
                shown.append(value)
    pairs = [(it.body, it.test) if isinstance(it, ast.IfExp) else (it, None) for it in shown]
    return [(it, when) for it, when in pairs if isinstance(it, ast.Call) and ast.unparse(it.func) == "verdict"]


def lost(page: Page, ledger: Ledger) -> Iterator[str]:
    """A verdict that stands alone on a line is shown, so it is the last of its cell."""
    for cell in page.code:
        for node in cell.tree.body[:-1]:
            if isinstance(node, ast.Expr) and ast.unparse(node).startswith("verdict("):
                yield f"{cell}: nobody sees this verdict, since more follows in its cell: {ast.unparse(node)[:60]}"


def literals(page: Page) -> set[str]:
    """The names to which a page assigns what it has not computed, and those that Python brings along.

    An empty list or dictionary is no value yet.
    """
    typed = set(dir(builtins))
    for node in (node for cell in page.code for node in cell.nodes):
        if not isinstance(node, ast.Assign) or ast.unparse(node.value) in ("[]", "{}"):
            continue
        if not any(isinstance(inner, ast.Name) for inner in ast.walk(node.value)):
            typed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return typed


def is_computed(condition: ast.expr, typed: set[str]) -> bool:
    """True if a condition rests on a name that is no literal, and contains no literal truth outside a call."""
    match condition:
        case ast.Constant(bool()):
            return False
        case ast.BoolOp(values=parts):
            return all(is_computed(part, typed) for part in parts)
        case ast.UnaryOp(ast.Not(), operand):
            return is_computed(operand, typed)
    return any(isinstance(node, ast.Name) and node.id not in typed for node in ast.walk(condition))


def typed_by_hand(page: Page, ledger: Ledger) -> Iterator[str]:
    """Each stored verdict comes from a visible call in its cell, with an id as a literal and computed conditions."""
    typed = literals(page)
    for cell in page.code:
        seen, optional = {}, set()
        for call, when in calls(cell.tree):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            name = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            seen[name] = [given[key] for key in ("holds", "changed", "enough") if key in given] + (
                [when] if when else []
            )
            optional |= {name} if when else set()
            if name is None or len(call.args) != 1 or "holds" not in given:
                yield f"{cell}: write verdict('id', holds=condition, ...), not {ast.unparse(call)[:60]}"
        names = [output.data[MIME]["claim"] for output in cell.outputs if MIME in output.get("data", {})]
        if names and not cell.is_visible:
            yield f"{cell}: a verdict stands in view"
        if sorted({*names, *optional} - {None}) != sorted(filter(None, seen)):
            yield f"{cell}: stores verdicts on {names}, and calls verdict in view for {sorted(filter(None, seen))}"
        for name, conditions in seen.items():
            yield from (
                f"{cell}: the condition on {name} is not computed: {ast.unparse(condition)}"
                for condition in conditions
                if not is_computed(condition, typed)
            )


def unknown(page: Page, ledger: Ledger) -> Iterator[str]:
    """Verdicts are on claims of the list, one for each claim in a chapter, and as `verdict` returns them."""
    names: Counter[str] = Counter()
    for cell in page.code:
        for data in (output.data[MIME] for output in cell.outputs if MIME in output.get("data", {})):
            name, word, note = data["claim"], data["verdict"], data["note"]
            names[name] += 1
            if name not in ledger.by_id:
                yield f"{cell}: no claim has the id {name!r}; add it to nbs/claims.toml"
            elif ledger.by_id[name].used:
                yield f"{cell}: {name} is a definition, and nothing to judge"
            if word not in (*VERDICTS, UNDECIDED):
                yield f"{cell}: {word!r} is no verdict"
            if word != VERDICTS[0] and not note:
                yield f"{cell}: {name} is {word}, and the note should say why"
            if note and not re.fullmatch(r"[A-Z0-9$].*\.", note):
                yield f"{cell}: the note on {name} should be a sentence on one line"
    yield from (f"{count} verdicts on {name}; one for each chapter" for name, count in names.items() if count > 1)


Bound = tuple[str, str, float | None]
"""An expression, how it is compared, and with which number; None where it is compared with no number."""
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}


def number_in(node: ast.expr) -> float | None:
    """The number that an expression of literals stands for."""
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
    except Exception:
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def bound(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Bound:
    """One comparison, with a number on the right."""
    kind, number = type(operator), number_in(right)
    if number is None and number_in(left) is not None and kind in TURNED:
        left, right, kind, number = right, left, TURNED[kind], number_in(left)
    words = ast.unparse(left) if number is not None else f"{ast.unparse(left)} ? {ast.unparse(right)}"
    return words, kind.__name__.removesuffix("E"), number


def parts_of(condition: ast.expr) -> Iterator[Bound]:
    """The statements that a condition joins by `and`."""
    match condition:
        case ast.BoolOp(ast.And(), values):
            for value in values:
                yield from parts_of(value)
        case ast.Compare(left, operators, rights):
            for one, operator, other in zip([left, *rights], operators, rights, strict=False):
                yield bound(one, operator, other)
        case ast.Call(ast.Name("bool"), [inner]) | ast.Call(ast.Attribute(inner, "all"), []):
            yield from parts_of(inner)
        case _:
            yield ast.unparse(condition), "", None


def implies(asserted: Bound, judged: Bound) -> bool:
    """Whether one statement leaves the other no choice."""
    (words, kind, number), (others, other_kind, limit) = asserted, judged
    if (words, kind) != (others, other_kind) or (number is None) != (limit is None):
        return False
    if number is None or limit is None:
        return True
    return number <= limit if kind == "Lt" else number >= limit if kind == "Gt" else number == limit


def settled(page: Page, ledger: Ledger) -> Iterator[str]:
    """A verdict judges nothing that an assertion above it has settled, under its name or written out."""
    asserted: set[Bound] = set()
    named: dict[str, ast.expr] = {}
    for cell in page.code:
        for node in cell.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                named[node.targets[0].id] = node.value
        tests = [node.test for node in cell.nodes if isinstance(node, ast.Assert)]
        asserted |= {part for test in tests for part in (*parts_of(test), *written_out(test, named))}
        for call, _ in calls(cell.tree):
            holds = next((keyword.value for keyword in call.keywords if keyword.arg == "holds"), None)
            parts = {*parts_of(holds), *written_out(holds, named)} if holds else set()
            for part in parts:
                if any(implies(known, part) for known in asserted):
                    yield f"{cell}: {ast.unparse(call.args[0])} judges what is asserted before: {part[0]}"


def written_out(condition: ast.expr, named: dict[str, ast.expr]) -> Iterator[Bound]:
    """The parts of the conditions that the names in a condition stand for."""
    joined = (
        condition.values if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And) else [condition]
    )
    for part in joined:
        if isinstance(part, ast.Name) and part.id in named:
            yield from parts_of(named[part.id])


VERDICT_GATES = [typed_by_hand, unknown, settled, lost]


@pytest.mark.parametrize("gate", VERDICT_GATES, ids=lambda gate: gate.__name__)
@pytest.mark.parametrize("path", PAGES, ids=short)
def test_verdicts(path: Path, gate: Callable[[Page, Ledger], Iterator[str]], ledger: Ledger) -> None:
    """The verdicts of a chapter are computed, in view, and on claims of the list."""
    report(gate(read_page(path), ledger))


GOOD = """error = measure()
verdict("equation-8", holds=error < 1e-9, note="For small n.")"""
SPOILED_CODE = [
    ("error < 1e-9", "True", "is not computed: True"),
    ("error < 1e-9", "not False", "is not computed: not False"),
    ("error < 1e-9", "True or error < 1e-9", "is not computed: True or"),
    ("error < 1e-9", "bool(1)", "is not computed: bool(1)"),
    ("measure()", "1e-12", "is not computed: error < 1e-09"),
    (", note", ", changed=True, note", "is not computed: True"),
    ('"equation-8"', "name", "write verdict('id'"),
    ("holds=", "", "write verdict('id'"),
    (
        "verdict(",
        "found = verdict(",
        "stores verdicts on ['equation-8'], and calls verdict in view for []",
    ),
    (
        '"equation-8"',
        '"equation-9"',
        "stores verdicts on ['equation-8'], and calls verdict in view for ['equation-9']",
    ),
    ("error = ", "#| code-fold: true\nerror = ", "a verdict stands in view"),
    ('small n.")', 'small n.") if True else "not yet run"', "is not computed: True"),
]
SPOILED_DATA = [
    ({"claim": "equation-0"}, "no claim has the id 'equation-0'"),
    ({"verdict": "is obvious"}, "'is obvious' is no verdict"),
    ({"note": "small n"}, "should be a sentence on one line"),
    ({"claim": "equation-7"}, "equation-7 is a definition"),
    (
        {"verdict": "not reproduced", "note": ""},
        "equation-8 is not reproduced, and the note should say why",
    ),
]
SETTLED = [
    "assert error < 1e-9",
    "assert error < 1e-12",
    "assert 1e-12 > error > 0",
    "assert ready and error < 1e-10",
    "small = error < 1e-9\nassert small",
]
OPEN = ["assert error < 1e-3", "assert error > 0", "assert other < 1e-12"]


def sample(source: str = GOOD, times: int = 1, **data: str) -> Page:
    """A page with one verdict, whose stored data may be changed."""
    bundle = verdict("equation-8", holds=1 < 2, note="For small n.")._repr_mimebundle_()
    bundle[MIME] |= data
    cell = v4.new_code_cell(source, outputs=[v4.new_output("execute_result", bundle)])
    notebook = v4.new_notebook(cells=[cell])
    notebook.cells *= times
    return as_page(Path("sample.ipynb"), notebook)


def test_good_verdict_passes(ledger: Ledger) -> None:
    """A computed verdict in view passes, alone or among others that are displayed together."""
    together = GOOD.replace("verdict(", "display(verdict(") + ")"
    waiting = GOOD + ' if error else "not yet run"'
    collected = GOOD.replace("error = measure()", "error = []\nerror.append(measure())")
    for source in (GOOD, together, collected, waiting):
        report(complaint for gate in VERDICT_GATES for complaint in gate(sample(source), ledger))


def test_verdict_that_waits_may_be_missing(ledger: Ledger) -> None:
    """A verdict that waits for results has no output before they are there; any other has."""
    for source, count in ((GOOD + ' if error else "not yet run"', 0), (GOOD, 1)):
        notebook = v4.new_notebook(cells=[v4.new_code_cell(source)])
        assert len(list(typed_by_hand(as_page(Path("sample.ipynb"), notebook), ledger))) == count


def test_lost_verdict_is_seen(ledger: Ledger) -> None:
    """A verdict after which the cell goes on is printed by nobody."""
    assert "nobody sees this verdict" in "\n".join(lost(sample(GOOD + "\nprint(error)"), ledger))


@pytest.mark.parametrize(("old", "new", "complaint"), SPOILED_CODE)
def test_verdict_by_hand_is_seen(old: str, new: str, complaint: str, ledger: Ledger) -> None:
    """A verdict that is typed, hidden or on another claim than it says is seen."""
    assert old in GOOD
    assert complaint in "\n".join(typed_by_hand(sample(GOOD.replace(old, new)), ledger))


@pytest.mark.parametrize(("data", "complaint"), SPOILED_DATA)
def test_unknown_verdict_is_seen(data: dict[str, str], complaint: str, ledger: Ledger) -> None:
    """Stored data that `verdict` would not return, or on no claim, are seen."""
    assert complaint in "\n".join(unknown(sample(**data), ledger))


@pytest.mark.parametrize("source", [*SETTLED, *OPEN])
def test_settled_verdict_is_seen(source: str, ledger: Ledger) -> None:
    """A condition that is asserted before, or one that is stronger, is seen; others may be."""
    page = sample(GOOD.replace("\n", f"\n{source}\n", 1))
    assert bool(list(settled(page, ledger))) == (source in SETTLED)


def test_settled_under_a_name_is_seen(ledger: Ledger) -> None:
    """A condition with a name is the same condition."""
    source = GOOD.replace("error < 1e-9", "small").replace("\n", "\nsmall = error < 1e-9\nassert error < 1e-9\n", 1)
    assert "judges what is asserted before" in "\n".join(settled(sample(source), ledger))


def test_repeated_verdict_is_seen(ledger: Ledger) -> None:
    """A chapter judges a claim once."""
    assert list(unknown(sample(times=2), ledger)) == ["2 verdicts on equation-8; one for each chapter"]


# The ledger ------------------------------------------------------------------------------------------------------


def test_weakest_verdict_counts() -> None:
    """Several chapters may judge one claim, and the weakest of their verdicts is shown."""
    claims = [
        Claim("a", "sentence", "I", "It holds."),
        Claim("b", "erratum", "I", "It errs.", read="the paper"),
    ]
    claims.append(Claim("c", "equation", "I", "It is called so.", used="chap-x"))
    assert [Ledger(tuple(claims), {}, ()).word(claim) for claim in claims] == [
        UNTRIED,
        READ,
        DEFINITION,
    ]
    thin = (
        Finding("a", UNDECIDED, "One seed.", "chap-x", "X"),
        Finding("a", VERDICTS[1], "So.", "chap-y", "Y"),
    )
    assert [Ledger(tuple(claims), {}, thin[:n]).word(claims[0]) for n in (1, 2)] == [
        UNDECIDED,
        VERDICTS[1],
    ]
    for words in (VERDICTS[:2], VERDICTS[1::-1], VERDICTS):
        found = tuple(Finding("b", word, "", "chap-x", "X") for word in words)
        assert Ledger(tuple(claims), {}, found).word(claims[1]) == max(words, key=WORDS.index)


def test_verdicts_are_read_from_notebooks(tmp_path: Path) -> None:
    """A verdict is found with the label and the title of its chapter."""
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("(chap-x)=\n# X\n\nText."), v4.new_code_cell("1")])
    notebook.cells[1].outputs = [v4.new_output("display_data", verdict("equation-8", holds=1 < 2)._repr_mimebundle_())]
    nbformat.write(notebook, tmp_path / "x.ipynb")
    assert read_ledger(CLAIMS, [tmp_path / "x.ipynb"]).findings == (Finding("equation-8", "holds", "", "chap-x", "X"),)
    assert [found for _, found in stored(notebook)] == [Finding("equation-8", "holds", "", "chap-x", "X")]


# The page --------------------------------------------------------------------------------------------------------

PAGE = next(path for path in PAGES if name_of(path) == "ledger")


def not_shown(soup: BeautifulSoup, ledger: Ledger) -> Iterator[str]:
    """Each claim has a row with its verdict and its chapters, and the summary counts all of them."""
    for claim in ledger.claims:
        row = soup.find(id=claim.target)
        badge = row and row.find(class_="verdict")
        if not badge:
            yield f"{claim.id} has no row"
        elif badge.get_text().lower() != ledger.word(claim):
            yield f"{claim.id} is shown as {badge.get_text()!r} and should be {ledger.word(claim)!r}: run `make book`"
        elif len(row.find_all("a", href=re.compile("#verdict-"))) != len(ledger.on(claim)):
            yield f"{claim.id} doesn't name its chapters"
    counts = [int(cell.get_text()) for cell in soup.select("table.summary td") if cell.get_text().isdigit()]
    if sum(counts) != len(ledger.claims):
        yield f"the summary counts {sum(counts)} claims of {len(ledger.claims)}"


def boxes(soup: BeautifulSoup, found: list[Finding], ledger: Ledger) -> Iterator[str]:
    """A chapter shows each verdict in a box that leads to its row."""
    for finding in found:
        box = soup.find(id=finding.target)
        if not box or not box.find("a", href=re.compile(f"#{ledger.by_id[finding.claim].target}$")):
            yield f"no box for the verdict on {finding.claim}"


def test_ledger_page(ledger: Ledger) -> None:
    """The built page shows every claim."""
    report(not_shown(soup_of(html_of(PAGE)), ledger))


def test_ledger_page_gate_fails(ledger: Ledger) -> None:
    """A row that is missing, stale or without its chapter is seen, and so is a wrong count."""
    page = html_of(PAGE).read_text(encoding="utf-8")
    for old, new, complaint in [
        ('id="claim-equation-8"', 'id="claim-equation-88"', "equation-8 has no row"),
        ("Holds", "Fails", "equation-8 is shown as 'Fails' and should be 'holds'"),
        ("#verdict-", "#", "equation-8 doesn't name its chapters"),
        (
            "Not yet tried</span></p></td>\n<td><p>",
            "Not yet tried</span></p></td>\n<td><p>1",
            "the summary counts",
        ),
    ]:
        assert old in page
        assert complaint in "\n".join(not_shown(BeautifulSoup(page.replace(old, new), "html.parser"), ledger))


def test_boxes(ledger: Ledger) -> None:
    """Each verdict has its box on the page of its chapter."""
    path_of = {read_page(path).label: path for path in PAGES}
    for label in sorted({finding.label for finding in ledger.findings}):
        found = [finding for finding in ledger.findings if finding.label == label]
        text = html_of(path_of[label]).read_text(encoding="utf-8")
        only = SoupStrainer(id=[finding.target for finding in found])
        report(boxes(BeautifulSoup(text, "html.parser", parse_only=only), found, ledger))


def test_boxes_gate_fails(ledger: Ledger) -> None:
    """A page without the box is seen."""
    found = [Finding("equation-8", "holds", "", "chap-x", "X")]
    assert list(boxes(BeautifulSoup("<p></p>", "html.parser"), found, ledger)) == [
        "no box for the verdict on equation-8"
    ]
