"""The chapter rules that a script can see, for every page of the book.

A rule takes a page and the whole book in reading order, and yields its complaints.
`SAMPLE` below is a small chapter that keeps every rule, and `SPOILED` breaks each rule in turn.
"""

import ast
import dataclasses
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from gates import (
    LOOK_AHEAD,
    PAGES,
    ROOT,
    Cell,
    Page,
    as_page,
    ids,
    name_of,
    read_page,
    report,
    short,
)
from nbformat import v4

Rule = Callable[[Page, list[Page]], Iterator[str]]

NOT_CHAPTERS = {"index", "notation", "claims", "reading", "using_psgd", "ledger", "references"}
NOT_CHAPTERS |= {"recipes", "recipes_for_trainers", "several_machines", "bench"}
NOT_CHAPTERS |= {"api", "api_groups", "api_hvp", "api_optimizer", "api_machines"}
NOT_CHAPTERS |= {"api_measuring", "api_tasks", "api_runs", "api_exhibits"}
"""Pages of reference: the rules of their text and code hold for them, those of a chapter's shape do not."""
WITHOUT_MODULE = {"family", "history", "skipped_updates", "ten_lines", "two_noises", "workshop"}
"""Chapters that use the library and add nothing to it."""
TEMPLATE_WORDS = {
    "Question",
    "Derive",
    "Code",
    "Check",
    "See",
    "Touch",
    "Break",
    "Recap",
    "Claim",
    "Setup",
    "Run",
}
TEMPLATE_WORDS |= {"Verdict", "Background", "Conclusion", "Introduction", "Results", "Theory"}
"""Headings that would fit any chapter, and so say nothing of this one."""
ENDING = ["Summary", "Exercises"]
SUMMARY_LINES = range(3, 6)
EXERCISES = range(3, 7)
GRADES = ["Easy", "Harder", "Project"]
PROVED_PARTS = {"problem", "criterion", "learning", "forms"}
"""Parts whose chapters state what they derive as definitions, theorems and propositions."""
CELLS = range(25, 61)
WORDS = range(800, 2001)
FUNCTION_LINES = 30
CLASS_LINES = {"PSGD": 125, "Group": 72}
DEFAULT_CLASS_LINES = 60
ROWS = 8
DIGITS = 4
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


# Text ------------------------------------------------------------------------------------------------------------

PROSE_FENCE = re.compile(
    r"^(?P<fence>```|:::)\{(?:prf:[\w-]+|exercise|admonition|note|margin|dropdown)\}[^\n]*\n"
    r"(?P<options>(?::[\w-]+:[^\n]*\n)*)(?P<text>.*?)^(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
"""A directive whose content is text of the page, such as a theorem."""
FENCE = re.compile(r"^(```|~~~|:::).*?^\1[`:]*\s*$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(\{[\w:-]+\})?`[^`]+`")
DISPLAY = re.compile(r"\$\$.*?\$\$(\s*\(eq-[\w-]+\))?", re.DOTALL)
MATHS = re.compile(r"\$[^$]+\$")
LIST_MARK = re.compile(r"^\s*([-*+]|\d+\.|\(\d+\))\s+", re.MULTILINE)
TARGET = re.compile(r"^\(.+\)=$", re.MULTILINE)
RUN_IN = re.compile(r"\*\*([^*]+)\.\*\*")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|resp|al|App|Eq|Eqs|Fig|Figs|Sec|Dr|Prof|[A-Z])\.(?= )")
NEW_SENTENCE = re.compile(r"[.!?][\"')\]*_]*\s+[\"'(\[*_]*[A-Z]")


def prose(text: str, stand_in: str) -> str:
    """Return markdown without code blocks, and with `stand_in` for each piece of code, role or formula."""
    text = LIST_MARK.sub("", TARGET.sub("", FENCE.sub("", PROSE_FENCE.sub(r"\g<text>", text))))
    text = DISPLAY.sub("", CODE_SPAN.sub(stand_in, text))
    return MATHS.sub(stand_in, text)


def words(page: Page) -> int:
    """Count the words of the markdown cells, without code and formulas."""
    return sum(len(re.findall(r"[A-Za-z][\w'-]*", prose(cell.source, ""))) for cell in page.text)


def headings(cell: Cell, level: str = "##") -> list[str]:
    """The headings of a markdown cell, those of `##` or of another pattern."""
    return [] if cell.is_code else re.findall(rf"^(?:{level}) +(.+?) *$", FENCE.sub("", cell.source), re.MULTILINE)


def section(page: Page, heading: str) -> list[Cell]:
    """The cells from a `##` heading up to the next."""
    inside, cells = False, []
    for cell in page.cells:
        found = headings(cell)
        inside = heading in found if found else inside
        if inside:
            cells.append(cell)
    return cells


def before(page: Page, heading: str) -> Page:
    """The page without the cells from a `##` heading on."""
    last = next(
        (place for place, cell in enumerate(page.cells) if heading in headings(cell)),
        len(page.cells),
    )
    return dataclasses.replace(page, cells=page.cells[:last])


def size(page: Page, book: list[Page]) -> Iterator[str]:
    """A chapter has 25 to 60 cells and 800 to 2000 words before its exercises."""
    page = before(page, "Exercises")
    if len(page.cells) not in CELLS:
        yield f"{len(page.cells)} cells, but a chapter has {CELLS[0]} to {CELLS[-1]}"
    if words(page) not in WORDS:
        yield f"{words(page)} words, but a chapter has {WORDS[0]} to {WORDS[-1]}"


def opening(page: Page, book: list[Page]) -> Iterator[str]:
    """The first cell begins with the lines that every chapter shares."""
    form = [
        (r"\(chap-[\w-]+\)=", "the label, `(chap-name)=`"),
        (r"# \S.*", "the title, `# Name`"),
        (r"[A-Z].*\.", "one sentence that states the claim"),
        (r"You need .*\.", "`You need ...`"),
        (
            r"You get `psgd_lit\.[\w.]+`.*\.|You get nothing to import\.",
            "`You get `psgd_lit.name`.`",
        ),
        (r"Paper: .*\.", "`Paper: section ...`"),
    ]
    lines = [line for line in page.cells[0].source.splitlines() if line.strip()]
    if len(lines) < len(form):
        yield f"the first cell has {len(lines)} lines of text, but its form has {len(form)}"
    for (pattern, meaning), line in zip(form, lines, strict=False):
        if not re.fullmatch(pattern, line):
            yield f"the first cell should have {meaning} where it has {line!r}"


def is_experiment(page: Page) -> bool:
    """True for a chapter that judges claims by trying them."""
    return page.path.parent.name == "evidence"


def module(page: Page, book: list[Page]) -> Iterator[str]:
    """The second cell names the module alone, and it is the one that the first cell promises.

    Only experiments, the family page and the workshop may export nothing, if their first cell says so.
    """
    if "You get nothing to import." in page.cells[0].source:
        if not is_experiment(page) and name_of(page.path) not in WITHOUT_MODULE:
            yield "only an experiment may export nothing"
        if page.module:
            yield f"the first cell promises no module, but the notebook exports {page.module}"
        return
    second = page.cells[1] if len(page.cells) > 1 else page.cells[0]
    if "default_exp" not in second.directives or second.source:
        yield "the second cell should be `#| default_exp name` alone"
    promised = re.search(r"You get `psgd_lit\.([\w.]+)`", page.cells[0].source)
    if promised and promised[1] != page.module:
        yield f"the first cell promises psgd_lit.{promised[1]}, but the notebook exports {page.module}"


def named_content(page: Page, book: list[Page]) -> Iterator[str]:
    """Headings name what stands below them, and the last two are "Summary" and "Exercises"."""
    for cell in page.text:
        for heading in headings(cell, "##|###"):
            if heading in TEMPLATE_WORDS:
                yield f"{cell}: the heading {heading!r} would fit any chapter; name what this section says"
    found = [heading for cell in page.cells for heading in headings(cell)]
    endings = [ENDING, ENDING[:1]] if is_experiment(page) else [ENDING]
    if not any(found[-len(ending) :] == ending for ending in endings):
        yield f"the last ## headings are {', '.join(found[-2:])}; they should be {', '.join(ENDING)}"


def lead(page: Page, book: list[Page]) -> Iterator[str]:
    """Before the first heading stand the question that the last chapter left and what a reader will be able to do."""
    text = re.split(r"^## ", "\n".join(cell.source for cell in page.text), maxsplit=1, flags=re.MULTILINE)[0]
    told = re.sub(r"^You (need|get) .*$", "", text, flags=re.MULTILINE)
    place = book.index(page)
    if place and f"`{book[place - 1].label}`" not in told:
        yield f"the text before the first heading doesn't refer to the page before, {{ref}}`{book[place - 1].label}`"
    if not re.search(r"\?$", told, re.MULTILINE):
        yield "the text before the first heading asks no question, in a line that ends with `?`"
    if not re.search(r"^After this chapter you can .*\.$", told, re.MULTILINE):
        yield "the text before the first heading doesn't say `After this chapter you can ...`"


def summary(page: Page, book: list[Page]) -> Iterator[str]:
    """The summary has three to five lines, then the question that comes next, then `Next`."""
    text = "\n".join(cell.source for cell in section(page, "Summary") if not cell.is_code)
    inside = re.split(r"^## ", text.partition("## Summary\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in inside.splitlines() if line.strip() and not TARGET.match(line)]
    if not lines or not lines[-1].startswith("Next: "):
        yield "the last line of the summary should begin with `Next: `"
    if len(lines) < 2 or not lines[-2].endswith("?"):
        yield "the line before `Next` should ask the question that comes next"
    if len(lines) - 2 not in SUMMARY_LINES:
        yield f"{len(lines) - 2} lines before that question, and a summary has 3 to 5"


def is_broken(page: Page) -> bool:
    """True if a heading with a label `(break-name)=` has a section that asserts something."""
    label = re.compile(r"^\(break-[\w-]+\)=\n##+ ", re.MULTILINE)
    for cell in [cell for cell in page.text if label.search(cell.source)]:
        rest = page.after(cell, len(page.cells))
        end = next((place for place, other in enumerate(rest) if headings(other, "##|###")), len(rest))
        if any(other.has_assert for other in rest[:end]):
            return True
    return False


def shown(page: Page, book: list[Page]) -> Iterator[str]:
    """A chapter has a figure, an exhibit with a check or the reason why none, and something that is broken."""
    if not any(cell.is_figure for cell in page.code):
        yield "no figure"
    if is_experiment(page):
        return
    reason = re.compile(r"^There is no exhibit here, because .*\.$", re.MULTILINE)
    found = [cell for cell in page.code if cell.is_exhibit]
    if not found and not any(reason.search(cell.source) for cell in page.text):
        yield "no exhibit, and no line `There is no exhibit here, because ...`"
    for cell in found:
        following = [other for other in page.after(cell, len(page.cells)) if other.is_code]
        if not (following and following[0].has_assert):
            yield f"{cell}: the next code cell should assert what the exhibit shows"
    if not is_broken(page):
        yield "nothing is broken: no heading with a label `(break-name)=` above it and an assertion below"


RULE = re.compile(r"^\(rule-[\w-]+\)=\n##+ ", re.MULTILINE)
"""The label and the heading under which an experiment says by which rule it judges."""
JUDGES = {"load_results", "load_sheet", "verdict"}
"""What reads recorded runs, or judges a claim."""


def ruled(page: Page, book: list[Page]) -> Iterator[str]:
    """An experiment says what it claims and by which rule it judges before it shows or reads any result."""
    if not is_experiment(page):
        return
    above = []
    for cell in page.cells:
        if not cell.is_code and RULE.search(cell.source):
            break
        above.append(cell)
    else:
        yield "an experiment needs a heading with a label `(rule-name)=`, which says by which rule it judges"
    for cell in above:
        if cell.outputs or cell.is_exhibit or JUDGES & cell.names:
            yield f"{cell}: shows a result, or reads one, before the rule by which it is judged"


STATEMENT = re.compile(r"^(?:```|:::)\{prf:(?P<kind>[\w-]+)\}.*(?P<label>\n:label: )?", re.MULTILINE)
PROVED = {"theorem", "proposition", "lemma", "corollary"}


def statements(page: Page, book: list[Page]) -> Iterator[str]:
    """What a chapter derives is stated, with a label, and what is not a definition has its proof after it."""
    found = list(STATEMENT.finditer("\n".join(cell.source for cell in page.text)))
    kinds = [match["kind"] for match in found]
    if page.path.parent.name in PROVED_PARTS and not {*kinds} & (PROVED | {"definition"}):
        yield "no {prf:definition}, {prf:theorem} or {prf:proposition}"
    for kind, following in zip(kinds, [*kinds, ""][1:], strict=True):
        if kind in PROVED and following != "proof":
            yield f"a {kind} without a {{prf:proof}} after it"
    for match in found:
        if match["kind"] != "proof" and not match["label"]:
            yield f"a {match['kind']} without `:label:` in the line below"


EXERCISE = re.compile(r"^(?:```|:::)\{exercise\} *(?P<title>.*)\n:label: (?P<label>ex-[\w-]+)$", re.MULTILINE)
SOLUTION = re.compile(r"^(?:```|:::)\{solution-start\} *(?P<label>[\w-]+)\n(?P<options>(?::.*\n)*)", re.MULTILINE)


def solved(page: Page) -> Iterator[str]:
    """The labels of the exercises whose solution is folded and runs: code with an assertion before its end."""
    label, is_folded, asserts = "", False, False
    for cell in section(page, "Exercises"):
        asserts = asserts or cell.has_assert
        if "{solution-end}" in cell.source and is_folded and asserts:
            yield label
        for match in SOLUTION.finditer("" if cell.is_code else cell.source):
            label, is_folded, asserts = (
                match["label"],
                ":class: dropdown" in match["options"],
                False,
            )


def exercises(page: Page, book: list[Page]) -> Iterator[str]:
    """Three to six exercises, graded, one of them a project, each with a folded solution that runs."""
    if is_experiment(page) and not section(page, "Exercises"):
        return
    found = [match for cell in section(page, "Exercises") for match in EXERCISE.finditer(cell.source)]
    if len(found) not in EXERCISES:
        yield f"{len(found)} exercises with a label `ex-name`, and a chapter has 3 to 6"
    grades = [match["title"].partition(":")[0] for match in found]
    unknown = [grade for grade in grades if grade not in GRADES]
    yield from (f"the title {grade!r} should begin with Easy:, Harder: or Project:" for grade in unknown)
    if not unknown and grades != sorted(grades, key=GRADES.index):
        yield f"the exercises are {', '.join(grades)}; the easier come first"
    if "Project" not in grades:
        yield "no exercise is a project"
    right = list(solved(page))
    for label in [match["label"] for match in found]:
        if right.count(label) != 1:
            yield f"{label} has no solution with `:class: dropdown` and code that asserts before its end"


def needs(page: Page, book: list[Page]) -> Iterator[str]:
    """What a chapter says it needs comes before it, and what it looks ahead at comes after it."""
    place = {other.label: number for number, other in enumerate(book)}
    required, ahead = page.needs
    for label in (*required, *ahead):
        if label not in place:
            yield f"needs {label}, which no page is"
    yield from (
        f"needs {label}, which comes later; move one of them, or say `{LOOK_AHEAD}`"
        for label in required
        if place.get(label, -1) >= place[page.label]
    )
    yield from (
        f"looks ahead at {label}, which comes earlier"
        for label in ahead
        if place.get(label, len(book)) <= place[page.label]
    )


def following(page: Page, book: list[Page]) -> Iterator[str]:
    """`Next` names the page that follows in the contents, and every chapter says it once."""
    named = [label for cell in page.text for label in re.findall(r"^Next: \{ref\}`([^`]+)`", cell.source, re.MULTILINE)]
    after = book.index(page) + 1
    expected = book[after].label if after < len(book) else "no other"
    if len(named) != 1 and name_of(page.path) not in NOT_CHAPTERS:
        yield f"{len(named)} lines begin with `Next: {{ref}}`, and one should"
    yield from (f"Next names {label}; the page that follows is {expected}" for label in named if label != expected)


def sentences(page: Page, book: list[Page]) -> Iterator[str]:
    """Each sentence of the text has a line of its own."""
    for cell in page.text:
        for line in prose(cell.source, "Mx").splitlines():
            plain_line = ABBREVIATION.sub(r"\1", RUN_IN.sub(r"\1", line))
            if not line.lstrip().startswith("|") and (match := NEW_SENTENCE.search(plain_line)):
                yield f"{cell}: two sentences on one line, at {match[0]!r} in {line.strip()[:100]!r}"


# Code ------------------------------------------------------------------------------------------------------------


def definitions(cell: Cell) -> list[Definition]:
    """The functions and classes that an export cell defines."""
    return [node for node in cell.tree.body if cell.is_export and isinstance(node, Definition)]


def is_alias(value: ast.expr | None) -> bool:
    """True for the right-hand side of a type alias, such as `tuple[Tensor, ...]` or `int | None`."""
    return isinstance(value, ast.Subscript) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr))


def public_names(cell: Cell) -> list[str]:
    """The names that an export cell adds to the library: functions, classes and constants, but not type aliases."""
    names = [node.name for node in definitions(cell)]
    for node in cell.tree.body if cell.is_export else []:
        if isinstance(node, ast.Assign | ast.AnnAssign) and not is_alias(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def span(*nodes: ast.stmt | ast.expr) -> set[int]:
    """The numbers of the lines that the nodes take."""
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def code_lines(cell: Cell, node: Definition) -> int:
    """Count the lines of a definition that hold code: not its docstrings, comments and blank lines."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(cell.source).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner):
            lines -= span(inner.body[0])
    return len(lines & span(node, *node.decorator_list))


def beats(page: Page, book: list[Page]) -> Iterator[str]:
    """An export cell defines one function or class, and text or a check stands before the next.

    A class that is nothing but a name and a docstring, as an exception is, may stand beside the code that raises it.
    """
    for cell in page.code:
        names = {node.name for node in definitions(cell) if not isinstance(node, ast.ClassDef) or len(node.body) > 1}
        if len(names) > 1:
            yield f"{cell}: {len(names)} definitions in one export cell ({', '.join(sorted(names))})"
        if names and any(definitions(following) for following in page.after(cell, 1)):
            yield f"{cell}: the next cell exports too, with no text or check between"


def at_full_width(cells: list[Cell]) -> list[Cell]:
    """The cells with lines of up to 120 characters, so that wrapping for the width of a page is not counted."""
    ruff = [Path(sys.executable).with_name("ruff"), "format", "--quiet", "--line-length", "120"]
    ruff += [
        "--no-cache",
        "--config",
        ROOT / "pyproject.toml",
        "--config",
        "format.skip-magic-trailing-comma = true",
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{cell.number}.py") for cell in cells]
        for path, cell in zip(paths, cells, strict=True):
            path.write_text(cell.source, encoding="utf-8")
        subprocess.run([*ruff, folder], check=True)
        return [
            dataclasses.replace(cell, source=path.read_text(encoding="utf-8"))
            for path, cell in zip(paths, cells, strict=True)
        ]


def lengths(page: Page, book: list[Page]) -> Iterator[str]:
    """Exported functions have at most 30 lines of code, and classes 60."""
    cells = [cell for cell in page.code if definitions(cell)]
    for cell in at_full_width(cells) if cells else []:
        for node in [inner for top in definitions(cell) for inner in ast.walk(top) if isinstance(inner, Definition)]:
            is_class = isinstance(node, ast.ClassDef)
            limit = CLASS_LINES.get(node.name, DEFAULT_CLASS_LINES) if is_class else FUNCTION_LINES
            if code_lines(cell, node) > limit:
                yield f"{cell}: {node.name} has {code_lines(cell, node)} lines of code, and {limit} are the limit"


def checked(page: Page, book: list[Page]) -> Iterator[str]:
    """Each public name is used in a visible cell with an assert, at most three cells below."""
    for cell in page.code:
        checks = [other for other in page.after(cell, 3) if other.is_check]
        for name in public_names(cell):
            if not any(name in check.names for check in checks):
                yield f"{cell}: no visible check of {name} in the next three cells (if it is private, call it _{name})"


def imports(page: Page, book: list[Page]) -> Iterator[str]:
    """From the library, chapters import names, and only from the modules of earlier chapters.

    What software the appendix has may be used by all parts of the book, and a first cell may look ahead.
    """
    _, ahead = page.needs
    known = [*book[: book.index(page)], *(other for other in book if other.label in ahead)]
    known += [] if page.is_tool else [other for other in book if other.is_tool]
    earlier = {f"psgd_lit.{other.module}" for other in known if other.module}
    for cell in page.code:
        for node in cell.nodes:
            if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "psgd_lit" for alias in node.names):
                yield f"{cell}: write `from psgd_lit.x import name`, not `{ast.unparse(node)}`"
            source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if source.split(".")[0] == "psgd_lit" and source not in earlier:
                yield f"{cell}: `{ast.unparse(node)}`, but no earlier chapter exports {source}"


FORBIDDEN = {
    "IPython.get_ipython": "is a magic",
    "datetime": "changes from run to run",
    "get_ipython": "is a magic",
    "numpy.random": "is not an explicit torch.Generator",
    "random": "is not an explicit torch.Generator",
    "requests": "needs a network",
    "socket": "needs a network",
    "time": "changes from run to run",
    "timeit": "changes from run to run",
    "torch.cuda.manual_seed": "sets hidden state; use a torch.Generator",
    "torch.hub": "needs a network",
    "torch.manual_seed": "sets hidden state; use a torch.Generator",
    "torch.random.manual_seed": "sets hidden state; use a torch.Generator",
    "torch.random.seed": "sets hidden state; use a torch.Generator",
    "torch.seed": "sets hidden state; use a torch.Generator",
    "urllib": "needs a network",
    "warnings.catch_warnings": "hides warnings",
    "warnings.filterwarnings": "hides warnings",
    "warnings.simplefilter": "hides warnings",
}
CLOCKS = {"datetime", "time"}
"""What a chapter's own code may not read, but the library may: the runner of the experiments measures time."""

RANDOM = {
    "torch.bernoulli",
    "torch.multinomial",
    "torch.normal",
    "torch.poisson",
    "torch.rand",
    "torch.rand_like",
    "torch.randint",
    "torch.randint_like",
    "torch.randn",
    "torch.randn_like",
    "torch.randperm",
}
RANDOM_IN_PLACE = re.compile(
    "(bernoulli|cauchy|exponential|geometric|(kaiming_|xavier_)?(normal|uniform)|log_normal|orthogonal|random|trunc_normal)_"
)


def aliases(page: Page) -> dict[str, str]:
    """Map each name that the page imports to its full name."""
    full: dict[str, str] = {}
    for node in (node for cell in page.code for node in cell.nodes):
        if isinstance(node, ast.Import):
            full |= {alias.asname: alias.name for alias in node.names if alias.asname}
            full |= {root: root for alias in node.names if not alias.asname for root in [alias.name.split(".")[0]]}
        if isinstance(node, ast.ImportFrom):
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return full


def full_name(node: ast.AST, imported: dict[str, str]) -> str:
    """The dotted name of `a.b.c`, with `a` spelled out as it was imported; empty for anything else."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id if node.id == "get_ipython" else "")
    if isinstance(node, ast.Attribute) and (inner := full_name(node.value, imported)):
        return f"{inner}.{node.attr}"
    return ""


def plain(page: Page, book: list[Page]) -> Iterator[str]:
    """Code is plain Python: no magics, no star imports, nothing hidden, timed or fetched."""
    imported = aliases(page)
    for cell in page.code:
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            yield f"{cell}: not plain Python (a magic or a shell line?) at {(error.text or '').strip()!r}"
        for node in cell.nodes:
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                yield f"{cell}: `{ast.unparse(node)}`; import names"
        used = {full_name(node, imported) for node in cell.nodes}
        for name, fault in FORBIDDEN.items():
            if name in CLOCKS and cell.is_export:
                continue
            if name == "torch.manual_seed" and name_of(page.path) == "recipes":  # a whole program, to be copied
                continue
            if any(other == name or other.startswith(f"{name}.") for other in used):
                yield f"{cell}: {name} {fault}"


def randomness(page: Page, book: list[Page]) -> Iterator[str]:
    """Every random draw names its generator."""
    imported = aliases(page)
    for cell in page.code:
        for node in cell.nodes:
            if isinstance(node, ast.Call) and not any(keyword.arg == "generator" for keyword in node.keywords):
                method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                if full_name(node.func, imported) in RANDOM or RANDOM_IN_PLACE.fullmatch(method):
                    yield f"{cell}: `{ast.unparse(node)[:80]}` draws without generator="


def equations(page: Page, book: list[Page]) -> Iterator[str]:
    """Equation labels are unique, those that text or code names exist, and each is named somewhere."""
    defined = Counter(label for other in book for label in other.defined_equations)
    named = {label for other in book for label in other.named_equations}
    for label in dict.fromkeys(page.defined_equations):
        if defined[label] > 1:
            yield f"({label}) labels {defined[label]} equations of the book"
        if label not in named:
            yield f"({label}) is named by no {{eq}}`{label}` and no comment in code"
    for label in dict.fromkeys(page.named_equations):
        if label not in defined:
            yield f"{label} is named, but no equation has this label"


# Figures, exhibits and what is printed ---------------------------------------------------------------------------


def is_show(call: ast.expr) -> bool:
    """True for `plt.show()`."""
    return ast.unparse(call) == "plt.show()"


def figures(page: Page, book: list[Page]) -> Iterator[str]:
    """A figure is one call and `plt.show()`, with a caption and an alternative; what it shows is asserted next."""
    labels = Counter(cell.directives["label"] for other in book for cell in other.code if "label" in cell.directives)
    drawers = set(aliases(page))
    for cell in page.code:
        if cell.directives.get("code-fold") == "true" or cell.is_export:
            drawers |= {node.name for node in cell.tree.body if isinstance(node, Definition)}
        if "fig-cap" in cell.directives and not cell.is_figure:
            yield f"{cell}: has a caption, but its output holds no picture"
        if not cell.is_figure:
            continue
        match cell.tree.body:
            case [
                ast.Expr(ast.Call(func)) | ast.Assign(value=ast.Call(func)),
                ast.Expr(show),
            ] if is_show(show):
                if isinstance(func, ast.Name) and func.id not in drawers:
                    yield f"{cell}: {func.id} should be defined above, in a cell of its own with `#| code-fold: true`"
            case _:
                yield f"{cell}: a figure cell is one call of a draw function and plt.show()"
        label, caption, alternative = (cell.directives.get(key, "") for key in ("label", "fig-cap", "fig-alt"))
        if not label.startswith("fig-") or labels[label] > 1:
            yield f"{cell}: needs a label of its own, `#| label: fig-name`, and has {label!r}"
        if len(caption.split()) < 5 or not caption.endswith("."):
            yield f"{cell}: needs a caption that says what to see, `#| fig-cap`, and has {caption!r}"
        if len(alternative.split()) < 8 or alternative == caption:
            yield f"{cell}: needs an alternative that describes the picture, `#| fig-alt`, and has {alternative!r}"
        following = [other for other in page.after(cell, len(page.cells)) if other.is_code]
        if not (following and following[0].has_assert):
            yield f"{cell}: the next code cell should assert what the figure shows"


def exhibits(page: Page, book: list[Page]) -> Iterator[str]:
    """The cell of an exhibit is the call of `explore` alone."""
    for cell in page.code:
        if cell.is_exhibit and len(cell.tree.body) > 1:
            yield f"{cell}: a cell that shows an exhibit is that call alone"


def digits(number: str) -> int:
    """Count the significant digits of a decimal number."""
    return len(re.sub(r"e.*", "", number, flags=re.IGNORECASE).replace(".", "").lstrip("0"))


def shown_text(output: Any) -> str:
    """What an output shows as text: nothing, where a front end prefers a picture or html."""
    data = output.get("data", {})
    if any(kind.startswith("image/") or kind == "text/html" for kind in data):
        return ""
    return str(output.get("text") or data.get("text/markdown") or data.get("text/plain", ""))


def printed(page: Page, book: list[Page]) -> Iterator[str]:
    """An output has at most eight rows below its heading, and numbers are rounded."""
    for cell in page.code:
        for text in map(shown_text, cell.outputs):
            rows = [line for line in text.splitlines() if re.search(r"\w", line)]
            if rows and not re.search(r"\d", rows[0]):
                rows = rows[1:] or rows
            if len(rows) > ROWS and name_of(page.path) not in NOT_CHAPTERS:
                yield f"{cell}: prints {len(rows)} rows, and {ROWS} are the limit"
            long = [number for number in re.findall(r"\d*\.\d+(?:e[+-]?\d+)?", text) if digits(number) > DIGITS]
            if long:
                yield f"{cell}: prints {', '.join(long[:3])}; round to 3 significant digits"


# The gates -------------------------------------------------------------------------------------------------------

CHAPTER_RULES: list[Rule] = [size, opening, module, needs, imports]
FORM_RULES: list[Rule] = [named_content, lead, summary, shown, ruled, statements, exercises]
PAGE_RULES: list[Rule] = [
    following,
    beats,
    lengths,
    checked,
    sentences,
    plain,
    randomness,
    equations,
    figures,
    exhibits,
    printed,
]


def rules_of(path: Path) -> list[Rule]:
    """The rules that hold for a page."""
    if name_of(path) in NOT_CHAPTERS:
        return PAGE_RULES
    return CHAPTER_RULES + FORM_RULES + PAGE_RULES


@pytest.fixture(scope="module")
def book() -> list[Page]:
    """All pages, in reading order."""
    return [read_page(path) for path in PAGES]


@pytest.mark.parametrize(
    ("path", "rule"),
    [(path, rule) for path in PAGES for rule in rules_of(path)],
    ids=lambda value: short(value) if isinstance(value, Path) else value.__name__,
)
def test_rule(path: Path, rule: Rule, book: list[Page]) -> None:
    """The page keeps the rule."""
    report(rule(book[PAGES.index(path)], book))


# The rules themselves can fail -----------------------------------------------------------------------------------

TALK = "\n".join(["Half of a half is a quarter, as everybody says."] * 12)
SAMPLE = r"""
%% markdown
(chap-halving)=
# Halving

Half of a half is a quarter.

You need {ref}`chap-drawing`.
You get `psgd_lit.halving`.
Paper: section II, equation (1).

{ref}`chap-drawing` left a question.
What is a half?
After this chapter you can halve.
%% code
#| default_exp halving
%% code
#| export
import torch
from torch import Tensor
%% code
import matplotlib.pyplot as plt

from psgd_lit.viz import explore
%% markdown
## A half of a half
TALK
%% markdown
:::{prf:proposition} Halving
:label: prop-halving

The half of $x$ is

$$ h = x / 2 $$ (eq-half)
:::

:::{prf:proof}
Twice this is the whole.
:::

TALK
%% markdown
Halving twice, with {eq}`eq-half`, gives a quarter.
TALK
%% code
assert torch.tensor(1.0) / 2 / 2 == 0.25
%% markdown
## Halving in code
TALK
%% code
#| export
def half(x: Tensor) -> Tensor:
    '''Return half of a tensor of any shape.'''
    return x / 2  # eq-half
%% markdown
Halving is also subtracting a half.
%% code
assert half(torch.tensor(3.0)) == 3 - 1.5
%% code
#| export
Pair = tuple[Tensor, Tensor]


class Halver:
    '''Halves what it is given.'''

    def both(self, pair: Pair) -> Pair:
        '''Return both halves.'''
        return half(pair[0]), half(pair[1])
%% code
one = torch.tensor(1.0)
assert Halver().both((one, one)) == (one / 2, one / 2)
%% markdown
## Twice a half
TALK
%% code
x = torch.randn(3, generator=torch.Generator().manual_seed(0))
assert torch.equal(2 * half(x), x)
round(0.25, 3)
%% output
0.25
%% markdown
## Halves fall
TALK
%% code
#| code-fold: true
def draw_halves(values):
    plt.plot(values)
%% code
#| label: fig-halves
#| fig-cap: "Each value is half of the last."
#| fig-alt: "A curve that falls by half at each of its four points."
draw_halves([1, 0.5, 0.25])
plt.show()
%% picture
%% markdown
The curve falls.
%% code
assert 0.25 < 0.5 < 1
%% markdown
## Halves in your hands
TALK
%% code
explore(draw_halves, values=[1, 2])
%% code
assert half(x).shape == x.shape
%% markdown
(break-halving)=
## Integers have no half
TALK
%% code
assert half(torch.tensor(1)).dtype != torch.int64
%% markdown
## Summary

- Halves are small.
- Quarters are smaller.
- Nothing is left.

What of thirds?

Next: {ref}`chap-thirds`.
%% markdown
## Exercises

:::{exercise} Easy: a third
:label: ex-third

Halve a third.
:::

:::{solution-start} ex-third
:class: dropdown
:::
It is a sixth.
%% code
assert abs(half(1 / 3) - 1 / 6) < 1e-9
%% markdown
:::{solution-end}
:::

:::{exercise} Harder: nothing
:label: ex-nothing

Halve nothing.
:::

:::{solution-start} ex-nothing
:class: dropdown
:::
%% code
assert half(0) == 0
%% markdown
:::{solution-end}
:::

:::{exercise} Project: all halves
:label: ex-all

Halve all.
:::

:::{solution-start} ex-all
:class: dropdown
:::
%% code
assert half(2) == 1
%% markdown
:::{solution-end}
:::
"""
EXPERIMENT = """
%% markdown
(chap-contest)=
# Halves against thirds

Halves win.
%% code
from psgd_lit.experiments.runner import load_results
%% markdown
(rule-contest)=
## The larger one wins

It is larger, so it wins.
%% code
runs = load_results("results")
%% output
2 runs
%% code
verdict("halves-win", holds=runs[0] > runs[1])
"""
LONG = "\n".join(["    x = x / 2"] * 30)

SPOILED: list[tuple[Rule, str, str, str]] = [
    (size, "%% markdown\n", "", "cells, but a chapter has 25 to 60"),
    (size, "TALK", "", "words, but a chapter has 800"),
    (opening, "(chap-halving)=\n", "", "the label, `(chap-name)=`"),
    (opening, "# Halving", "## Halving", "the title"),
    (
        opening,
        "Half of a half is a quarter.\n\nYou",
        "Half of a half\n\nYou",
        "states the claim",
    ),
    (opening, "You need", "You want", "You need"),
    (opening, "Paper: ", "From the paper: ", "Paper: section"),
    (
        module,
        "You get `psgd_lit.halving`",
        "You get `psgd_lit.thirds`",
        "promises psgd_lit.thirds",
    ),
    (module, "#| default_exp halving", "#| default_exp halving\nx = 1", "alone"),
    (
        module,
        "You get `psgd_lit.halving`",
        "You get nothing to import",
        "only an experiment may",
    ),
    (
        module,
        "You get `psgd_lit.halving`",
        "You get nothing to import",
        "promises no module, but",
    ),
    (named_content, "## Halves fall", "## See", "the heading 'See' would fit any chapter"),
    (named_content, "## Halves fall", "### Break", "the heading 'Break' would fit any chapter"),
    (named_content, "## Summary", "## Recap of halves", "should be Summary, Exercises"),
    (lead, "{ref}`chap-drawing` left", "Somebody left", "doesn't refer to the page before"),
    (lead, "What is a half?", "A half.", "asks no question"),
    (lead, "After this chapter you can", "You will", "After this chapter you can"),
    (summary, "- Nothing is left.\n", "", "2 lines before that question"),
    (
        summary,
        "- Nothing is left.\n",
        "- Nothing.\n- Is.\n- Left.\n- At all.\n",
        "6 lines before that question",
    ),
    (summary, "What of thirds?", "Thirds.", "should ask the question that comes next"),
    (summary, "Next: {ref}`chap-thirds`.", "", "should begin with `Next: `"),
    (shown, "%% picture", "", "no figure"),
    (shown, "explore(draw", "show(draw", "no exhibit, and no line"),
    (
        shown,
        "assert half(x).shape == x.shape",
        "half(x)",
        "should assert what the exhibit shows",
    ),
    (shown, "(break-halving)=\n", "", "nothing is broken"),
    (
        shown,
        "assert half(torch.tensor(1)).dtype != torch.int64",
        "half(torch.tensor(1))",
        "nothing is broken",
    ),
    (ruled, "(rule-contest)=\n", "", "an experiment needs a heading with a label"),
    (
        ruled,
        "load_results\n%% markdown",
        "load_results\nload_results('x')\n%% markdown",
        "before the rule",
    ),
    (
        ruled,
        "load_results\n%% markdown",
        "load_results\n%% output\n2\n%% markdown",
        "before the rule",
    ),
    (
        ruled,
        "load_results\n%% markdown",
        "load_results\n%% picture\n%% markdown",
        "before the rule",
    ),
    (
        statements,
        "{prf:proposition}",
        "{prf:remark}",
        "no {prf:definition}, {prf:theorem} or {prf:proposition}",
    ),
    (statements, "{prf:proof}", "{note}", "a proposition without a {prf:proof}"),
    (statements, ":label: prop-halving\n", "", "a proposition without `:label:`"),
    (exercises, ":label: ex-third\n", "", "2 exercises with a label"),
    (exercises, "Easy: a third", "A third", "should begin with Easy:"),
    (exercises, "Easy: a third", "Project: a third", "the easier come first"),
    (exercises, "Project: all", "Harder: all", "no exercise is a project"),
    (exercises, "ex-third\n:class: dropdown\n", "ex-third\n", "ex-third has no solution"),
    (exercises, "assert half(2) == 1", "half(2)", "ex-all has no solution"),
    (
        exercises,
        "{solution-start} ex-all",
        "{solution-start} ex-third",
        "ex-all has no solution",
    ),
    (
        needs,
        "{ref}`chap-drawing`.",
        "{ref}`chap-thirds`.",
        "needs chap-thirds, which comes later",
    ),
    (
        needs,
        "{ref}`chap-drawing`.",
        "{ref}`chap-halving`.",
        "needs chap-halving, which comes later",
    ),
    (
        needs,
        "{ref}`chap-drawing`.",
        "{ref}`chap-fifths`.",
        "needs chap-fifths, which no page is",
    ),
    (
        needs,
        "You need",
        "You need linear algebra, and a look ahead at",
        "looks ahead at chap-drawing",
    ),
    (following, "Next: {ref}`chap-thirds`.", "", "0 lines begin with"),
    (
        following,
        "Next: {ref}`chap-thirds`.",
        "Next: {ref}`chap-drawing`.",
        "the page that follows is chap-thirds",
    ),
    (
        following,
        "Next: {ref}`chap-thirds`.",
        "Next: {ref}`chap-thirds`.\nNext: {ref}`chap-thirds`.",
        "2 lines begin",
    ),
    (sentences, "The curve falls.", "The curve falls. It is steep.", "two sentences"),
    (sentences, "The curve falls.", "It is $x$. It is steep.", "two sentences"),
    (sentences, "The curve falls.", 'It falls (a "half"). $x$ is steep.', "two sentences"),
    (
        beats,
        "class Halver",
        "def third(x: Tensor) -> Tensor:\n    return x / 3\n\n\nclass Halver",
        "2 definitions",
    ),
    (
        beats,
        "%% markdown\nHalving is also subtracting a half.\n%% code\nassert",
        "%% code\n#| export\ndef f():",
        "too",
    ),
    (lengths, "    return x / 2  # eq-half", LONG, "31 lines of code"),
    (
        lengths,
        "        return half(pair[0])",
        LONG.replace("    x", "        x") + "\n        return half(pair[0])",
        "32",
    ),
    (
        lengths,
        "    def both",
        "".join(f"    x{i} = {i}\n" for i in range(60)) + "    def both",
        "63 lines of code",
    ),
    (
        checked,
        "assert half(torch.tensor(3.0))",
        "half(torch.tensor(3.0))",
        "no visible check of half",
    ),
    (
        checked,
        "%% code\nassert half(torch",
        "%% code\n#| hide\nassert half(torch",
        "no visible check of half",
    ),
    (checked, "#| export\nPair", "#| export\nSCALE = 2\nPair", "no visible check of SCALE"),
    (
        imports,
        "psgd_lit.viz import",
        "psgd_lit.thirds import",
        "no earlier chapter exports psgd_lit.thirds",
    ),
    (
        imports,
        "psgd_lit.viz import",
        "psgd_lit.halving import",
        "no earlier chapter exports psgd_lit.halving",
    ),
    (imports, "from psgd_lit.viz import explore", "import psgd_lit.viz", "import name`"),
    (plain, "round(0.25, 3)", "!pip install halving", "not plain Python"),
    (plain, "round(0.25, 3)", "%time half(x)", "not plain Python"),
    (plain, "round(0.25, 3)", "get_ipython().system('ls')", "is a magic"),
    (plain, "from torch import Tensor", "from torch import *", "import names"),
    (plain, "round(0.25, 3)", "torch.manual_seed(0)", "use a torch.Generator"),
    (
        plain,
        "round(0.25, 3)",
        "import numpy as np\nnp.random.rand(3)",
        "explicit torch.Generator",
    ),
    (
        plain,
        "round(0.25, 3)",
        "from warnings import simplefilter\nsimplefilter('ignore')",
        "hides warnings",
    ),
    (
        plain,
        "round(0.25, 3)",
        "from time import perf_counter\nperf_counter()",
        "changes from run to run",
    ),
    (
        plain,
        "round(0.25, 3)",
        "import urllib.request\nurllib.request.urlopen('https://x')",
        "needs a network",
    ),
    (
        randomness,
        "torch.randn(3, generator=torch.Generator().manual_seed(0))",
        "torch.randn(3)",
        "without generator",
    ),
    (
        randomness,
        "round(0.25, 3)",
        "from torch import randn as draw\ndraw(3)",
        "without generator",
    ),
    (randomness, "round(0.25, 3)", "x.normal_()", "without generator"),
    (equations, "x / 2  # eq-half", "x / 2  # eq-third", "eq-third is named, but"),
    (equations, "{eq}`eq-half`", "{eq}`eq-quarter`", "eq-quarter is named, but"),
    (equations, "$$ (eq-half)", "$$ (eq-half)\n\n$$ h = 1 $$ (eq-half)", "labels 2 equations"),
    (
        equations,
        "$$ (eq-half)",
        "$$ (eq-half)\n\n$$ h = 1 $$ (eq-other)",
        "(eq-other) is named by no",
    ),
    (
        figures,
        "draw_halves([1, 0.5, 0.25])\n",
        "values = [1]\ndraw_halves(values)\n",
        "one call of a draw function",
    ),
    (figures, "\nplt.show()", "", "plt.show()"),
    (figures, "#| code-fold: true\n", "", "with `#| code-fold: true`"),
    (figures, "#| label: fig-halves\n", "", "label of its own"),
    (figures, "Each value is half of the last.", "Halves.", "needs a caption"),
    (
        figures,
        '#| fig-alt: "A curve that falls by half at each of its four points."\n',
        "",
        "needs an alternative",
    ),
    (figures, "assert 0.25 < 0.5 < 1", "x", "should assert what the figure shows"),
    (figures, "%% picture", "", "holds no picture"),
    (exhibits, "explore(draw_halves", "values = [1]\nexplore(draw_halves", "that call alone"),
    (printed, "%% output\n0.25", "%% output\n" + "1\n" * 9, "9 rows"),
    (printed, "%% output\n0.25", "%% output\nheading\n" + "1\n" * 9, "9 rows"),
    (printed, "%% output\n0.25", "%% output\ntensor([0.33333])", "0.33333"),
]


def parse(text: str, part: str = "criterion") -> Page:
    """Make a page of a part of the book from the notation of `SAMPLE`."""
    cells = []
    for block in text.replace("TALK", TALK).split("%% ")[1:]:
        kind, _, source = block.partition("\n")
        source = source.strip("\n")
        match kind:
            case "markdown":
                cells.append(v4.new_markdown_cell(source))
            case "code":
                cells.append(v4.new_code_cell(source))
            case "output":
                cells[-1].outputs.append(v4.new_output("execute_result", {"text/plain": source}))
            case "picture":
                cells[-1].outputs.append(v4.new_output("display_data", {"image/png": "", "text/plain": "<Figure>"}))
    return as_page(Path(part, "sample.ipynb"), v4.new_notebook(cells=cells))


def judge(rule: Rule, text: str) -> list[str]:
    """Apply a rule to a page between two others, which export `viz` and `thirds`, with the tool `ink` at the end."""
    page, others = parse(text, "evidence" if rule is ruled else "criterion"), []
    for name, label, module in [
        ("earlier", "chap-drawing", "viz"),
        ("later", "chap-thirds", "thirds"),
        ("appendix/tool", "chap-ink", "ink"),
    ]:
        cells = [
            v4.new_markdown_cell(f"({label})=\n# Title"),
            v4.new_code_cell(f"#| default_exp {module}"),
        ]
        others.append(as_page(Path(f"{name}.ipynb"), v4.new_notebook(cells=cells)))
    return list(rule(page, [others[0], page, *others[1:]]))


def sample_for(rule: Rule) -> str:
    """The good chapter that a rule is tried on."""
    return EXPERIMENT if rule is ruled else SAMPLE


ALL_RULES = CHAPTER_RULES + FORM_RULES + PAGE_RULES


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.__name__)
def test_sample_keeps_rule(rule: Rule) -> None:
    """No rule complains about a good chapter, and each has a way to be broken below."""
    assert judge(rule, sample_for(rule)) == []
    assert rule in {spoiled for spoiled, *_ in SPOILED}


@pytest.mark.parametrize(("rule", "old", "new", "complaint"), SPOILED, ids=ids(SPOILED))
def test_spoiled_sample(rule: Rule, old: str, new: str, complaint: str) -> None:
    """The rule complains, in words that help, when the good chapter is spoiled."""
    assert old in sample_for(rule)
    assert complaint in "\n".join(judge(rule, sample_for(rule).replace(old, new)))


def test_reason_stands_for_an_exhibit() -> None:
    """A chapter without an exhibit says why it has none."""
    bare = SAMPLE.replace("explore(draw", "show(draw")
    reason = "\nThere is no exhibit here, because a half is a half.\n%% code\nshow(draw"
    assert judge(shown, bare) != []
    assert judge(shown, bare.replace("\n%% code\nshow(draw", reason)) == []


def test_exercises_are_not_counted() -> None:
    """A chapter may be at its limit of words and have exercises, too."""
    assert judge(size, SAMPLE.replace("Halve all.", "Halve all. " * 1000)) == []
    assert judge(size, SAMPLE.replace("Halves are small.", "Halves are small. " * 1000)) != []


def test_text_of_statements_is_text() -> None:
    """What stands in a theorem keeps the rules of sentences."""
    assert judge(sentences, SAMPLE.replace("Twice this is the whole.", "It is half. It is small.")) != []


def test_not_every_part_has_statements() -> None:
    """A chapter about software may state nothing; one that derives something may not."""
    bare = SAMPLE.replace("{prf:", "{tip:")
    assert list(statements(parse(bare, "appendix"), [])) == []
    assert list(statements(parse(bare), [])) != []


def test_tools_and_what_is_announced_may_be_imported() -> None:
    """A module of the appendix serves all parts, and that of a later chapter one that looks ahead at it."""
    assert judge(imports, SAMPLE.replace("psgd_lit.viz import", "psgd_lit.ink import")) == []
    later = SAMPLE.replace("psgd_lit.viz import", "psgd_lit.thirds import")
    assert judge(imports, later) != []
    ahead = later.replace("You need {ref}`chap-drawing`", f"You need tea, and {LOOK_AHEAD} {{ref}}`chap-thirds`")
    assert judge(imports, ahead) == judge(needs, ahead) == []


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("The step is small, e.g. Newton's, and X. Li says so.", True),
        ("| One. Two. | Three. Four. |", True),
        ("Run `a. B` and $x. Y$ first.", True),
        ("1. The first.\n2. The second.", True),
        ("1. The first. The second.", False),
        ("* **Read.** The book is built.", True),
        ("It works! **Then** it fails.", False),
    ],
)
def test_sentence_heuristic(line: str, is_one: bool) -> None:
    """Abbreviations, tables, code and formulas don't end a sentence."""
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell(line)])
    assert is_one == (not list(sentences(as_page(Path("page.ipynb"), notebook), [])))


def test_pages_are_read_as_written(tmp_path: Path) -> None:
    """A page read from its file has its directives taken off."""
    path = tmp_path / "page.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("#| export\n#| echo: false\nx = 1")]), path)
    (cell,) = read_page(path).cells
    assert (cell.source, cell.is_export, cell.is_visible) == ("x = 1", True, False)
