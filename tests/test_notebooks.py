"""The stored form of every notebook, the table of contents, and the README and Makefile beside them."""

import base64
import configparser
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from html import escape, unescape
from pathlib import Path
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from gates import NBS, PAGES, ROOT, Page, as_page, ids, read_page, report, short
from nbformat import v4
from writer import canonical, pages, readme

Gate = Callable[[str], Iterator[str]]

NOTEBOOK_BYTES = 2_000_000
IMAGE_BYTES = 160_000
FRAME = re.compile(r"data:image/[\w+.-]+;base64,([A-Za-z0-9+/=]+)")
TRACES = {
    "an absolute path": r"(?<![\w.:/])/(home|Users|work|root|tmp|usr|opt|var|mnt|private)/"
    r"|\b[A-Za-z]:\\\w|site-packages|\.venv",
    "a memory address": r"0x[0-9a-fA-F]{6,}|<[\w.]+ object at ",
    "a time": r"\b\d+(\.\d+)? ?(ns|us|µs|ms|s|sec|secs|seconds|minutes|hours)\b|\b\d{1,2}:\d{2}:\d{2}\b",
    "a date": r"\b(19|20)\d\d-\d\d-\d\d\b|\b\d{1,2}/\d{1,2}/(19|20)\d\d\b"
    r"|\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{1,2},? (19|20)\d\d\b",
    "a progress bar": r"\r|[█▏▎▍▌▋▊▉━]|\d+%\||\bit/s\b",
}


RECORDED = "".join(path.read_text(encoding="utf-8") for path in sorted((NBS / "results").glob("*.json")))
"""The recorded results: a page that is made from them may say when they were measured."""


@lru_cache(maxsize=2)
def parsed(text: str) -> Any:
    """A notebook, which the gates read one after the other and none changes."""
    return nbformat.reads(text, as_version=4)


def outputs(notebook: Any) -> Iterator[tuple[str, Any]]:
    """Yield every output with the place where it is."""
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            yield f"cell {number} ({cell.source.strip().split(chr(10))[-1][:50]})", output


def visible_text(output: Any) -> str:
    """All text that a reader may meet in an output: of html, what stands between the tags and in alternatives."""
    parts = [output.get("text", "")]
    for kind, value in output.get("data", {}).items():
        if kind in ("text/html", "image/svg+xml"):
            soup = BeautifulSoup(value, "html.parser")
            for silent in soup(["script", "style"]):
                silent.decompose()
            parts += [soup.get_text(" "), *(str(tag["alt"]) for tag in soup.find_all(alt=True))]
        elif kind.startswith("text/"):
            parts.append(value)
    return "\n".join(parts)


def canonical_form(text: str) -> Iterator[str]:
    """The file is, byte for byte, what the canonical writer makes of it."""
    try:
        expected = canonical(nbformat.reads(text, as_version=4))
    except ValueError as error:
        yield f"the writer refuses it: {error}"
        return
    pairs = enumerate(zip(text.splitlines(), expected.splitlines(), strict=False), 1)
    if text != expected:
        where = next(
            (f"line {number}: {one.strip()[:60]!r}" for number, (one, other) in pairs if one != other),
            "its end",
        )
        yield f"not in the canonical form, first at {where}; say `make run NB=...`"


def run_cells(text: str) -> Iterator[str]:
    """Every code cell was run, in order, and none failed or wrote to stderr."""
    notebook = parsed(text)
    code = [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]
    if never := [str(number) for number, cell in code if cell.execution_count is None]:
        yield f"cell {', '.join(never)} was not run"
    for count, (number, cell) in enumerate(code, 1):
        if not cell.source.strip():
            yield f"cell {number} is empty"
        if cell.execution_count not in (None, count):
            yield f"cell {number} was run as [{cell.execution_count}] and should be [{count}]"
    for place, output in outputs(notebook):
        if output.output_type == "error":
            yield f"{place}: failed with {output.ename}"
        if output.get("name") == "stderr":
            yield f"{place}: wrote to stderr: {output.text[:80]!r}"


def traces(text: str) -> Iterator[str]:
    """No output tells where, when or how long it was run; the dates of recorded results are theirs."""
    for place, output in outputs(parsed(text)):
        shown = visible_text(output)
        for what, pattern in TRACES.items():
            found = [match[0] for match in re.finditer(pattern, shown)]
            unrecorded = [text for text in found if what != "a date" or text not in RECORDED]
            if unrecorded:
                yield f"{place}: prints {what}: {unrecorded[0]!r}"


def sizes(text: str) -> Iterator[str]:
    """A notebook has at most 2 MB, and each picture 160 kB."""
    if len(text.encode()) > NOTEBOOK_BYTES:
        yield f"{len(text.encode()):,} bytes, and {NOTEBOOK_BYTES:,} are the limit"
    for place, output in outputs(parsed(text)):
        data = output.get("data", {})
        images = [value for kind, value in data.items() if kind.startswith("image/") and kind != "image/svg+xml"]
        images += FRAME.findall(data.get("text/html", ""))
        counts = [len(base64.b64decode(image)) for image in images] + [len(data.get("image/svg+xml", "").encode())]
        if max(counts) > IMAGE_BYTES:
            yield f"{place}: a picture of {max(counts):,} bytes, and {IMAGE_BYTES:,} are the limit"


def frames(text: str) -> Iterator[str]:
    """No two frames of an exhibit are equal, none is of a run that is missing, and each has words of its own kind."""
    for place, output in outputs(parsed(text)):
        found = re.search(r'data-frames="([^"]*)"', output.get("data", {}).get("text/html", ""))
        shown = json.loads(unescape(found[1])) if found else {"frames": [], "alts": []}
        if len({*shown["frames"]}) < len(shown["frames"]):
            yield f"{place}: {len(shown['frames'])} frames, and {len({*shown['frames']})} of them differ"
        for words in shown["alts"]:
            if re.search("not yet run|^Picture for ", words):
                yield f"{place}: a frame says {words!r}"


def opt_outs(text: str) -> Iterator[str]:
    """No cell opts out of being compared."""
    for number, cell in enumerate(parsed(text).cells, 1):
        marks = re.findall(r"NBVAL_\w+", cell.source if cell.cell_type == "code" else "")
        marks += [tag for tag in cell.metadata.get("tags", []) if re.match("nbval|raises-exception|skip", tag)]
        for mark in marks:
            yield f"cell {number} opts out of its test: {mark}"


GATES: list[Gate] = [canonical_form, run_cells, traces, sizes, frames, opt_outs]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
@pytest.mark.parametrize("path", PAGES, ids=short)
def test_stored_form(path: Path, gate: Gate) -> None:
    """The notebook is stored as the canonical writer stores it, and gives nothing away."""
    report(gate(path.read_text(encoding="utf-8")))


def hidden(sanitizer: str, text: str) -> Iterator[str]:
    """The sanitiser of nbval hides no text that a reader reads, but the size that stands for a figure."""
    rules = configparser.RawConfigParser()
    rules.read_string(sanitizer)
    shown = [visible_text(output) for _, output in outputs(parsed(text))]
    for section in rules.sections():
        for words in shown:
            for match in re.finditer(rules[section]["regex"], words):
                if not match[0].startswith("<Figure size"):
                    yield f"[{section}] keeps nbval from comparing {match[0][:60]!r}"


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_sanitizer_hides_no_text(path: Path) -> None:
    """Whatever the notebook prints is compared."""
    sanitizer = (NBS / "_ext" / "sanitize.cfg").read_text(encoding="utf-8")
    report(hidden(sanitizer, path.read_text(encoding="utf-8")))


def test_sanitizer_gate_fails() -> None:
    """A sanitiser that hides numbers is seen; one that hides frames and figures is not complained about."""
    text = canonical(small_notebook())
    assert list(hidden("[frames]\nregex: base64,[A-Za-z0-9+/=]+\nreplace: FRAME\n", text)) == []
    assert list(hidden("[numbers]\nregex: \\d+\nreplace: N\n", text)) == ["[numbers] keeps nbval from comparing '2'"]


def missing_pages(listed: list[Path], folder: Path) -> Iterator[str]:
    """The table of contents and the folder hold the same notebooks."""
    present = {
        path for path in folder.rglob("*.ipynb") if not any(part[0] in "._" for part in path.relative_to(folder).parts)
    }
    yield from (f"{short(path)} is in _toc.yml and doesn't exist" for path in listed if path not in present)
    yield from (f"{short(path)} is not in _toc.yml" for path in sorted(present - set(listed)))
    yield from (
        f"{short(path)} is in _toc.yml twice" for path in sorted({path for path in listed if listed.count(path) > 1})
    )


def test_toc() -> None:
    """Every page exists, and every notebook is a page."""
    report(missing_pages(pages(), NBS))


def test_toc_gate_fails(tmp_path: Path) -> None:
    """A missing page, a page too many and a page listed twice are seen; checkpoints aren't pages."""
    for name in ("there.ipynb", "extra.ipynb", ".ipynb_checkpoints/there.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(missing_pages([tmp_path / f"{name}.ipynb" for name in ("there", "there", "gone")], tmp_path)) == [
        "gone.ipynb is in _toc.yml and doesn't exist",
        "extra.ipynb is not in _toc.yml",
        "there.ipynb is in _toc.yml twice",
    ]


def misnumbered(listed: list[Path], folder: Path) -> Iterator[str]:
    """In each part the files are numbered from 1 in the order of the contents, and no part comes twice."""
    parts = [path.parent.relative_to(folder).as_posix() for path in listed[1:]]
    in_a_row = [part for part, before in zip(parts, [None, *parts], strict=False) if part != before]
    yield from (f"{part} comes {count} times" for part, count in Counter(in_a_row).items() if count > 1)
    for part in dict.fromkeys(parts):
        pages = [path for path in listed[1:] if path.parent == folder / part]
        for number, path in enumerate(pages, 1):
            if not path.stem.startswith(f"{number:02d}_"):
                yield f"{path.relative_to(folder)} should have the number {number:02d}"


def after_the_tools(book: list[Page]) -> Iterator[str]:
    """No mathematics stands among the tools or after them: no equation of the paper, and no page of another part."""
    first = next((number for number, page in enumerate(book) if page.is_tool), len(book))
    for page in book[first:]:
        if not page.is_tool:
            yield f"{short(page.path)} comes after the tools, which stand in the appendix"
        elif re.search(r"^Paper: .*equation", page.cells[0].source, re.MULTILINE):
            yield f"{short(page.path)} is about an equation of the paper, and stands among the tools"


def test_order() -> None:
    """The pages are numbered as the contents list them, mathematics before tools."""
    report(misnumbered(pages(), NBS))
    report(after_the_tools([read_page(path) for path in PAGES]))


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ("a/01_x a/02_y b/01_z", ""),
        ("a/01_x a/03_y", "a/03_y.ipynb should have the number 02"),
        ("a/02_x", "a/02_x.ipynb should have the number 01"),
        ("a/01_x a/01_y", "a/01_y.ipynb should have the number 02"),
        ("a/02_x a/01_y", "a/02_x.ipynb should have the number 01"),
        ("a/x", "a/x.ipynb should have the number 01"),
        ("a/01_x b/01_y a/02_z", "a comes 2 times"),
    ],
)
def test_numbers_gate(names: str, complaint: str, tmp_path: Path) -> None:
    """A gap, a number twice, a file without one, another order and a part in two pieces are seen."""
    listed = [tmp_path / f"{name}.ipynb" for name in ("index", *names.split())]
    found = "\n".join(misnumbered(listed, tmp_path))
    assert complaint in found if complaint else found == ""


@pytest.mark.parametrize(
    ("names", "paper", "complaint"),
    [
        ("forms/01_x appendix/01_y", "none of it", ""),
        ("appendix/01_y forms/01_x", "none of it", "01_x.ipynb comes after the tools"),
        (
            "forms/01_x appendix/01_y",
            "section II.B, equations (4) and (5)",
            "01_y.ipynb is about an equation",
        ),
    ],
)
def test_tools_gate(names: str, paper: str, complaint: str) -> None:
    """A page after the tools is seen, and one about an equation among them."""
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell(f"(chap-x)=\n# X\n\nPaper: {paper}.")])
    found = "\n".join(after_the_tools([as_page(Path(f"{name}.ipynb"), notebook) for name in names.split()]))
    assert complaint in found if complaint else found == ""


# The gates can fail ----------------------------------------------------------------------------------------------


def small_notebook() -> Any:
    """A notebook that passes every gate: one cell of text and two of code."""
    frame = base64.b64encode(b"picture").decode()
    html = f'<style>a {{ top: 2s }}</style><img src="data:image/webp;base64,{frame}" alt="A curve.">'
    cells = [
        v4.new_markdown_cell("# Title"),
        v4.new_code_cell("1 + 1", outputs=[v4.new_output("execute_result", {"text/plain": "2"})]),
        v4.new_code_cell(
            "show()",
            outputs=[v4.new_output("display_data", {"text/html": html, "image/png": frame})],
        ),
    ]
    return nbformat.reads(canonical(v4.new_notebook(cells=cells)), as_version=4)


def spoil_result(text: str) -> Callable[[Any], None]:
    """Make the notebook print something else."""

    def spoil(notebook: Any) -> None:
        notebook.cells[1].outputs[0].data["text/plain"] = text

    return spoil


def add_output(**output: Any) -> Callable[[Any], None]:
    """Give the first code cell one more output."""
    return lambda notebook: notebook.cells[1].outputs.append(v4.new_output(**output))


def heavy(kind: str) -> Callable[[Any], None]:
    """Put a picture of more than 160 kB in."""
    picture = base64.b64encode(bytes(IMAGE_BYTES + 1)).decode()
    value = f'<img alt="" src="data:image/webp;base64,{picture}">' if kind == "text/html" else picture
    return lambda notebook: notebook.cells[2].outputs[0].data.update({kind: value})


def exhibit(pictures: list[str], words: list[str]) -> Callable[[Any], None]:
    """Give the first code cell an exhibit of such frames."""
    data = escape(json.dumps({"frames": pictures, "alts": words}))
    return add_output(output_type="display_data", data={"text/html": f'<form data-frames="{data}"></form>'})


SPOILED: list[tuple[Gate, Callable[[Any], None], str]] = [
    (
        canonical_form,
        lambda nb: nb.metadata.update(kernelspec={"name": "mine", "display_name": "Mine"}),
        "canonical",
    ),
    (
        canonical_form,
        lambda nb: nb.cells[1].metadata.update(collapsed=True),
        "not in the canonical form",
    ),
    (
        canonical_form,
        lambda nb: nb.cells[1].update(execution_count=7),
        "not in the canonical form",
    ),
    (canonical_form, lambda nb: nb.cells[1].update(id="random"), "not in the canonical form"),
    (
        canonical_form,
        add_output(output_type="stream", name="stderr", text="Warning!"),
        "refuses it",
    ),
    (run_cells, lambda nb: nb.cells[1].update(execution_count=None), "cell 2 was not run"),
    (run_cells, lambda nb: nb.cells[1].update(execution_count=7), "cell 2 was run as [7]"),
    (run_cells, lambda nb: nb.cells[1].update(source=" "), "cell 2 is empty"),
    (
        run_cells,
        add_output(output_type="stream", name="stderr", text="Warning!"),
        "wrote to stderr: 'Warning!'",
    ),
    (
        run_cells,
        add_output(output_type="error", ename="NameError", evalue="x"),
        "failed with NameError",
    ),
    (traces, spoil_result("saved to /home/me/model.pt"), "an absolute path"),
    (traces, spoil_result(r"saved to C:\Users\me"), "an absolute path"),
    (traces, spoil_result("'.venv/lib/torch'"), "an absolute path"),
    (traces, spoil_result("<Model object at 0x7f3a12bc9d00>"), "a memory address"),
    (traces, spoil_result("done in 0.21 s"), "a time"),
    (traces, spoil_result("12 ms"), "a time"),
    (traces, spoil_result("started 09:41:07"), "a time"),
    (traces, spoil_result("on 2026-03-01"), "a date"),
    (traces, spoil_result("March 1, 2026"), "a date"),
    (traces, spoil_result(" 50%|████     | 5/10"), "a progress bar"),
    (
        traces,
        add_output(output_type="display_data", data={"text/html": "<p>took 3 seconds</p>"}),
        "a time",
    ),
    (
        traces,
        add_output(output_type="stream", name="stdout", text="in /tmp/x"),
        "an absolute path",
    ),
    (
        sizes,
        lambda nb: nb.cells.append(v4.new_markdown_cell("x" * NOTEBOOK_BYTES)),
        "2,000,000 are the limit",
    ),
    (sizes, heavy("image/png"), "a picture of 160,001 bytes"),
    (sizes, heavy("text/html"), "a picture of 160,001 bytes"),
    (
        frames,
        exhibit(["a", "b", "a"], ["One.", "Two.", "Three."]),
        "3 frames, and 2 of them differ",
    ),
    (
        frames,
        exhibit(["a", "b"], ["One.", "k = 2: not yet run."]),
        "a frame says 'k = 2: not yet run.'",
    ),
    (
        frames,
        exhibit(["a", "b"], ["One.", "Picture for k 2"]),
        "a frame says 'Picture for k 2'",
    ),
    (
        opt_outs,
        lambda nb: nb.cells[1].update(source="# NBVAL_IGNORE_OUTPUT\n1 + 1"),
        "NBVAL_IGNORE_OUTPUT",
    ),
    (opt_outs, lambda nb: nb.cells[1].metadata.update(tags=["nbval-skip"]), "nbval-skip"),
    (
        opt_outs,
        lambda nb: nb.cells[1].metadata.update(tags=["raises-exception"]),
        "raises-exception",
    ),
]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_small_notebook_passes(gate: Gate) -> None:
    """No gate complains about a good notebook, and each is broken below."""
    assert list(gate(canonical(small_notebook()))) == []
    assert gate in {spoiled for spoiled, *_ in SPOILED}


@pytest.mark.parametrize(("gate", "spoil", "complaint"), SPOILED, ids=ids(SPOILED))
def test_spoiled_notebook(gate: Gate, spoil: Callable[[Any], None], complaint: str) -> None:
    """The gate complains, in words that help, when the good notebook is spoiled."""
    notebook = small_notebook()
    spoil(notebook)
    assert complaint in "\n".join(gate(nbformat.writes(notebook, indent=1) + "\n"))


@pytest.mark.parametrize(
    "shown",
    ["a 0.5 step, 3 steps", "x[1:10]", "see https://example.com/home/x", "1/2 or 3/4", "P > 0"],
)
def test_harmless_outputs(shown: str) -> None:
    """What only looks like a trace is let through."""
    notebook = small_notebook()
    spoil_result(shown)(notebook)
    assert list(traces(json.dumps(notebook))) == []


# README and Makefile ---------------------------------------------------------------------------------------------


def readme_differs(text: str, index: Path) -> Iterator[str]:
    """The README is what the writer makes of the index page."""
    if text != readme(index):
        yield "README.md is not what the index page says; edit nbs/index.ipynb and say `make run`"


def test_readme() -> None:
    """The README is written from the index page."""
    report(readme_differs((ROOT / "README.md").read_text(encoding="utf-8"), pages()[0]))


def test_readme_gate_fails(tmp_path: Path) -> None:
    """A README that was edited by hand is seen."""
    index = tmp_path / "index.ipynb"
    nbformat.write(
        v4.new_notebook(cells=[v4.new_markdown_cell("# Title", metadata={"tags": ["readme"]})]),
        index,
    )
    assert list(readme_differs(readme(index), index)) == []
    assert list(readme_differs(readme(index) + "More.\n", index)) != []


def targets(makefile: str) -> list[str]:
    """The targets that a Makefile declares phony."""
    return " ".join(re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)).split()


def unlisted_targets(makefile: Path) -> Iterator[str]:
    """`make help` lists every phony target with a few words."""
    listed = subprocess.run(
        ["make", "-f", str(makefile), "help"],
        cwd=makefile.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    for target in targets(makefile.read_text()):
        if not re.search(rf"^ *make {target} +\w.+", listed.stdout, re.MULTILINE):
            yield f"`make help` doesn't list {target}"


def test_make_help() -> None:
    """`make help` lists every target."""
    report(unlisted_targets(ROOT / "Makefile"))


def test_make_help_gate_fails(tmp_path: Path) -> None:
    """A target without a description is seen."""
    makefile = tmp_path / "Makefile"
    makefile.write_text((ROOT / "Makefile").read_text().replace("## remove what was built", "# remove what was built"))
    assert list(unlisted_targets(makefile)) == ["`make help` doesn't list clean"]


def recipe(makefile: str, target: str) -> list[str]:
    """The commands of a target, with those of the targets that they make."""
    lines = re.findall(r"^\t(.*)$", makefile[makefile.index(f"\n{target}:") :].split("\n\n")[0], re.MULTILINE)
    made = [word for line in lines if line.startswith("$(MAKE)") for word in line.split() if word in targets(makefile)]
    return [*lines, *(command for other in made for command in recipe(makefile, other))]


def left_out_of_check(makefile: str) -> Iterator[str]:
    """`make check` runs all tests and all notebooks, so that `make test` may leave out what takes long."""
    runs = [command for command in recipe(makefile, "check") if "/pytest " in command]
    for command in runs:
        yield from (f"`make check` runs pytest with {option}" for option in re.findall(CHOOSING, command))
    for place in ("tests", "nbs"):
        if not any(place in command.split() for command in runs):
            yield f"`make check` doesn't run {place}"


CHOOSING = r"(?<= )(?:-m|-k|--changed|--deselect|--ignore\S*|--nbval-lax)\b"
"""Options of pytest that leave something out."""


def test_check_leaves_nothing_out() -> None:
    """What has the mark `slow`, and a notebook that stands as it was run, is run there."""
    report(left_out_of_check((ROOT / "Makefile").read_text()))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "--dist load tests",
            '--dist load -m "not slow" tests',
            "`make check` runs pytest with -m",
        ),
        (
            "$(PARALLEL) nbs",
            "--changed $(PARALLEL) nbs",
            "`make check` runs pytest with --changed",
        ),
        ("$(PARALLEL) nbs", "$(PARALLEL)", "`make check` doesn't run nbs"),
        ("lint book notebooks", "lint book", "`make check` doesn't run nbs"),
    ],
)
def test_check_gate_fails(old: str, new: str, complaint: str) -> None:
    """A choice in its commands is seen."""
    makefile = (ROOT / "Makefile").read_text()
    assert old in makefile
    assert list(left_out_of_check(makefile.replace(old, new))) == [complaint]


def test_ci_runs_what_the_readme_says() -> None:
    """CI calls the commands of the README, and both name targets that exist."""
    commands = r"\bmake ([a-z]+)"
    script = set(re.findall(rf"^{commands}", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    text = set(re.findall(commands, (ROOT / "README.md").read_text()))
    known = set(targets((ROOT / "Makefile").read_text()))
    assert {"book", "test"} <= text & known
    assert script, ".ci/run calls no make"
    assert script <= text & known, f".ci/run calls {script - text} beside the README's commands"
