"""The canonical writer: one notebook, one text, however often and by whomever it is run."""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import nbformat
import pytest
from gates import PAGES, short
from nbclient.exceptions import CellExecutionError
from nbformat import v4
from provenance import is_as_written
from writer import WIDGET_VIEW, canonical, execute, readme


def tiny(*sources: str) -> Any:
    """A notebook of code cells, as an editor would save it: random ids, no outputs."""
    return v4.new_notebook(cells=[v4.new_code_cell(source) for source in sources])


def executed(first_count: int, view: str) -> Any:
    """A notebook as JupyterLab leaves it: gaps in the counts, editor metadata, a widget with a random model."""
    data = {"text/plain": "4", "text/html": "<b>4</b>", WIDGET_VIEW: {"model_id": view}}
    result = v4.new_output("execute_result", data, execution_count=first_count, metadata={})
    cells = [
        v4.new_markdown_cell("# Title\n", metadata={"tags": ["readme"], "editable": True}),
        v4.new_code_cell(
            "\n2 + 2\n",
            execution_count=first_count,
            outputs=[result],
            metadata={"collapsed": False},
        ),
        v4.new_code_cell("x = 1", execution_count=first_count + 7),
    ]
    widgets: dict[str, Any] = {"application/vnd.jupyter.widget-state+json": {"state": {view: {}}}}
    return v4.new_notebook(
        cells=cells,
        metadata={"widgets": widgets, "kernelspec": {"name": view, "display_name": view}},
    )


def save(notebook: Any, folder: Path) -> Path:
    """Write a notebook as an editor would."""
    path = folder / "tiny.ipynb"
    nbformat.write(notebook, path)
    return path


def test_one_text_for_what_runs_differ_in() -> None:
    """Ids, counts, widget models and editor metadata leave no trace; sources, results and tags stay."""
    text = canonical(executed(3, "a"))
    assert text == canonical(executed(8, "b"))
    notebook = nbformat.reads(text, as_version=4)
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2]
    assert [cell.source for cell in notebook.cells] == ["# Title", "2 + 2", "x = 1"]
    assert notebook.cells[0].metadata == {"tags": ["readme"]}
    assert set(notebook.cells[1].outputs[0].data) == {"text/plain", "text/html"}
    assert "widgets" not in notebook.metadata


def test_canonical_text_is_a_fixed_point() -> None:
    """Reading the canonical text and writing it again changes nothing."""
    text = canonical(executed(3, "a"))
    assert canonical(nbformat.reads(text, as_version=4)) == text
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")


def test_equal_cells_have_ids_of_their_own() -> None:
    """Two cells with one source are still two cells, and a change in one cell renames no other."""
    before = nbformat.reads(canonical(tiny("x = 1", "x = 1", "y = 2")), as_version=4).cells
    after = nbformat.reads(canonical(tiny("x = 1", "x = 1", "z = 3")), as_version=4).cells
    assert len({cell.id for cell in before}) == 3
    assert [cell.id for cell in before[:2]] == [cell.id for cell in after[:2]]


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (v4.new_output("stream", name="stderr", text="UserWarning: no"), "UserWarning: no"),
        (
            v4.new_output("error", ename="NameError", evalue="name 'gone' is not defined"),
            "name 'gone' is not defined",
        ),
    ],
)
def test_refuses_stderr_and_errors(output: Any, complaint: str) -> None:
    """What a reader should never meet is not stored, and the message says what it was."""
    notebook = tiny("1")
    notebook.cells[0].outputs = [output]
    with pytest.raises(ValueError, match=complaint):
        canonical(notebook)


@pytest.mark.parametrize(
    ("source", "failure", "complaint"),
    [
        ("import sys\nprint('no', file=sys.stderr)", ValueError, "no"),
        ("raise KeyError('gone')", CellExecutionError, "gone"),
    ],
)
def test_execution_refuses_stderr_and_errors(
    source: str, failure: type[Exception], complaint: str, tmp_path: Path
) -> None:
    """A cell that warns or fails while it runs stops the writer, and the file stays as it was."""
    path = save(tiny(source), tmp_path)
    before = path.read_bytes()
    with pytest.raises(failure, match=complaint):
        execute(path)
    assert path.read_bytes() == before


def test_executes_in_the_folder_of_the_notebook(tmp_path: Path) -> None:
    """A tiny notebook runs in a fresh kernel, beside its own files, and gives the same text twice."""
    (tmp_path / "value.txt").write_text("42")
    path = save(
        tiny(
            "from pathlib import Path",
            "Path('value.txt').read_text()",
            "print('a')\nprint('b')",
        ),
        tmp_path,
    )
    text = execute(path)
    cells = nbformat.reads(text, as_version=4).cells
    assert cells[1].outputs[0].data == {"text/plain": "'42'"}
    assert [output.text for output in cells[2].outputs] == ["a\nb\n"]
    assert execute(path) == text


def test_readme_is_the_tagged_cells(tmp_path: Path) -> None:
    """The README holds the cells with the tag and no other, code as a Python block without directives."""
    tag = {"tags": ["readme"]}
    cells = [
        v4.new_markdown_cell("# Title", metadata=tag),
        v4.new_markdown_cell("Only on the page."),
        v4.new_code_cell("#| echo: true\nprint(1)", metadata=tag),
    ]
    text = readme(save(v4.new_notebook(cells=cells), tmp_path))
    assert text.endswith("# Title\n\n```python\nprint(1)\n```\n")
    assert "Only on the page" not in text


def first_difference(run: Callable[[], str]) -> str:
    """Run twice and say where the texts differ; empty if they don't."""
    pairs = zip_longest(run().splitlines(), run().splitlines(), fillvalue="")
    return next(
        (f"{one.strip()[:200]!r} and then {other.strip()[:200]!r}" for one, other in pairs if one != other),
        "",
    )


def printed(text: str) -> str:
    """All text that the cells of a notebook print or return."""
    outputs = [output for cell in nbformat.reads(text, as_version=4).cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def test_printed_text() -> None:
    """What is printed and what is returned counts, in order; pictures don't."""
    picture = v4.new_output("display_data", {"image/png": "AAAA"})
    notebook = tiny("print(1)", "2")
    notebook.cells[0].outputs = [v4.new_output("stream", text="1\n"), picture]
    notebook.cells[1].outputs = [v4.new_output("execute_result", {"text/plain": "2"}, execution_count=2)]
    assert printed(nbformat.writes(notebook)).split() == ["1", "2"]


@pytest.mark.elsewhere
@pytest.mark.parametrize("path", PAGES, ids=short)
def test_same_bytes_twice(path: Path) -> None:
    """Running a notebook twice gives the same bytes; where it was stored on such a machine, that was the first run.

    Those that stand as the writer has run them, with the same library, data and packages, have had that run.

    On any machine it prints what is stored.
    """
    if is_as_written(path):
        pytest.skip("it stands as the writer has run it")
    stored, again = path.read_text(encoding="utf-8"), execute(path)
    if again != stored:
        assert first_difference(map(printed, [stored, again]).__next__) == ""
        runs = iter([again, execute(path)])
        assert first_difference(lambda: next(runs)) == ""


@pytest.mark.parametrize(
    ("second", "difference"),
    [("a\nb\n", ""), ("a\nc\n", "'b' and then 'c'"), ("a\n", "'b' and then ''")],
)
def test_difference_is_seen(second: str, difference: str) -> None:
    """Texts that change from run to run are seen."""
    texts = iter(["a\nb\n", second])
    assert first_difference(lambda: next(texts)) == difference
