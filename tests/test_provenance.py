"""Which notebooks are run again: those of which something has changed that their outputs may depend on."""

import json
from pathlib import Path

import nbformat
import pytest
from gates import PAGES, ROOT, read_page
from nbformat import v4
from provenance import RECORD, digest, is_as_written, reached, record, recorded

LIBRARY = {
    "psgd_lit/__init__.py": "from .used import f\n",
    "psgd_lit/used.py": "from .deep.core import g\n\n\ndef f():\n    return g() + 1\n",
    "psgd_lit/deep/__init__.py": "",
    "psgd_lit/deep/core.py": "def g():\n    return 1\n",
    "psgd_lit/idle.py": "x = 1\n",
    "psgd_lit/table.txt": "1 2 3\n",
    "constraints.txt": "torch==1\n",
    "nbs/results/run.json": "{}\n",
    "nbs/claims.toml": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small library with a notebook that has been run."""
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    write(tmp_path, "#| export\nimport psgd_lit\npsgd_lit.f()", "1")
    remember(tmp_path)
    return tmp_path


def write(tree: Path, source: str, printed: str) -> None:
    """Store a notebook of one cell that has printed something."""
    cell = v4.new_code_cell(source, id="one", outputs=[v4.new_output("stream", text=printed)])
    nbformat.write(v4.new_notebook(cells=[cell]), tree / "nbs" / "page.ipynb")


def remember(tree: Path) -> None:
    """Put the digest of the notebook on record."""
    record({"nbs/page.ipynb": digest(tree / "nbs" / "page.ipynb", tree)}, ["nbs/page.ipynb"], tree)


def stands(tree: Path) -> bool:
    """Whether the notebook need not be run again."""
    return is_as_written(tree / "nbs" / "page.ipynb", tree)


def test_a_notebook_that_was_run_stands(tree: Path) -> None:
    """Until it is on record it doesn't."""
    assert stands(tree)
    (tree / RECORD).unlink()
    assert not stands(tree)


@pytest.mark.parametrize(
    "name",
    ["psgd_lit/used.py", "psgd_lit/deep/core.py", "psgd_lit/table.txt", "constraints.txt"],
)
def test_what_it_depends_on_counts(tree: Path, name: str) -> None:
    """Code that is reached over other modules, the library's data, and the packages."""
    path = tree / name
    path.write_text(path.read_text(encoding="utf-8").replace("1", "2"), encoding="utf-8")
    assert not stands(tree)


@pytest.mark.parametrize("name", ["psgd_lit/idle.py", "nbs/results/run.json", "nbs/claims.toml"])
def test_what_it_does_not_name_does_not_count(tree: Path, name: str) -> None:
    """A module that nobody imports, and files that it doesn't read."""
    (tree / name).write_text("y = 2\n", encoding="utf-8")
    assert stands(tree)


@pytest.mark.parametrize("words", ["# %% a marker\n", '"""What it is."""\n'])
def test_words_of_the_library_do_not_count(tree: Path, words: str) -> None:
    """Markers of cells change with every edit of a chapter, and no output depends on what is said of a function."""
    path = tree / "psgd_lit" / "used.py"
    path.write_text(words + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert stands(tree)


@pytest.mark.parametrize(("source", "printed"), [("import psgd_lit\n2", "1"), ("import psgd_lit\npsgd_lit.f()", "2")])
def test_its_own_text_counts(tree: Path, source: str, printed: str) -> None:
    """Its sources and its outputs."""
    write(tree, source, printed)
    assert not stands(tree)


@pytest.mark.parametrize(("word", "name"), [("../results", "nbs/results/run.json"), ("claims", "nbs/claims.toml")])
def test_files_that_it_names_count(tree: Path, word: str, name: str) -> None:
    """Recorded results and the ledger, for pages that read them."""
    write(tree, f"open('{word}')", "1")
    remember(tree)
    assert stands(tree)
    (tree / name).write_text("other\n", encoding="utf-8")
    assert not stands(tree)


def test_record_forgets_what_is_gone(tree: Path) -> None:
    """Only pages that are known stay on record."""
    record({"nbs/new.ipynb": "0"}, ["nbs/new.ipynb"], tree)
    assert recorded(tree) == {"nbs/new.ipynb": "0"}


@pytest.mark.slow
def test_all_of_the_library_can_be_reached() -> None:
    """The whole book together reaches every module but those that only their own page runs, and the command line."""
    code = "\n".join(cell.source for page in PAGES for cell in read_page(page).code)
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "psgd_lit").rglob("*.py")
        if path.name != "_modidx.py"
    }
    found = reached(code, ROOT)
    own = {
        "costs",
        "experiments.timing",
        "features",
        "later",
        "low_rank",
        "experiments.__main__",
    }
    assert modules - found.keys() <= {f"psgd_lit.{name}" for name in own}


def test_the_record_names_pages_of_the_book() -> None:
    """No digest of a page that is gone."""
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert set(json.loads((ROOT / RECORD).read_text(encoding="utf-8"))) <= names
