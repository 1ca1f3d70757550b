"""The library: exported from the notebooks and nothing else, importable in pieces, and built in floors."""

import ast
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from gates import LIBRARY, NBS, PAGES, ROOT, Page, name_of, read_page, report

from psgd_lit import PSGD, groups
from psgd_lit.blocks import FLAT_RULES, RULES
from psgd_lit.derivatives import HVP

FLOORS = {
    "": 7,
    "affine": 0,
    "blocks": 1,
    "buckets": 2,
    "claims": None,
    "closures": 0,
    "costs": 1,
    "criterion": None,
    "derivatives": 1,
    "descent": 1,
    "diagnosis": 6,
    "examination": 5,
    "exhibit": 0,
    "experiments": 4,
    "features": 1,
    "groups": 1,
    "groups.bordered": 0,
    "groups.combinator": 0,
    "groups.diagonal": 0,
    "groups.direct_sum": 0,
    "groups.first_scale": 0,
    "groups.fit": 0,
    "groups.halves": 0,
    "groups.kron": 0,
    "groups.normalization": 0,
    "groups.protocol": 0,
    "groups.sparse_lu": 0,
    "groups.triangular": 0,
    "graphs": 0,
    "hvp": 0,
    "later": 1,
    "lbfgs": 3,
    "live": 2,
    "low_rank": 1,
    "optim": 3,
    "probes": 2,
    "problems": None,
    "promise": 2,
    "quality": 4,
    "regularization": 0,
    "settings": 3,
    "sharding": 4,
    "viz": None,
}
"""The floor of each module, without `psgd_lit.`; theory and drawing (None) import none and are imported by none."""

SHOWS_THEORY = {"live"}
"""What computes for exhibits, and so may import theory too."""

SAME_FLOOR = {
    "groups.protocol": "groups.",
    "groups.halves": "groups.triangular",
    "groups.combinator": "groups.",
    "groups.first_scale": "groups.",
    "graphs": "hvp",
    "groups.bordered": "groups.sparse_lu",
    "settings": "optim",
    "optim": "lbfgs",
    "experiments.author": "experiments.runner",
    "experiments.digits": "experiments.",
    "experiments.image_data": "experiments.images",
    "experiments.images": "experiments.",
    "experiments.sequences": "experiments.",
    "experiments.methods": "experiments.",
    "experiments.records": "experiments.",
    "experiments.functions": "experiments.noiseless",
    "experiments.noisy": "experiments.",
    "experiments.noiseless": "experiments.",
    "experiments.contenders": "experiments.",
    "experiments.bench": "experiments.__main__",
    "experiments.timing": "experiments.bench",
    "experiments.contest": "experiments.",
    "experiments.tuning": "experiments.__main__",
    "experiments.runner": "experiments.",
}
"""What is imported on its own floor, and by whom."""

THIRD_PARTY = {
    "exhibit": {"anywidget", "traitlets"},
    "experiments.image_data": {"PIL", "numpy", "pooch"},
    "experiments.runner": {"tqdm"},
    "viz": {"IPython", "PIL", "ipywidgets", "matplotlib", "numpy"},
}
"""What a module imports beside the standard library and torch."""

HANDWRITTEN = {"__init__.py", "py.typed"}

DATA = {"book_text", "exhibits", "mnist_mini"}
"""Folders of data that the package ships."""


def module_name(path: Path, package: Path) -> str:
    """The dotted name of a file inside a package; empty for the package itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def modules(package: Path) -> dict[str, Path]:
    """The modules of a package by name; nbdev's index is none."""
    paths = [path for path in sorted(package.rglob("*.py")) if path.name != "_modidx.py"]
    return {module_name(path, package): path for path in paths}


# Exported --------------------------------------------------------------------------------------------------------


def export(root: Path) -> Path:
    """Run nbdev's export in a tree and return the library that it writes."""
    nbdev = Path(sys.executable).with_name("nbdev_export")
    done = subprocess.run([nbdev], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"nbdev_export failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return root / "psgd_lit"


def files(package: Path) -> dict[Path, bytes]:
    """The files of a package and what they hold."""
    paths = [path for path in package.rglob("*") if path.is_file() and not {"__pycache__", *DATA} & {*path.parts}]
    return {path.relative_to(package): path.read_bytes() for path in sorted(paths)}


def differences(exported: Path, committed: Path) -> Iterator[str]:
    """The library holds what the notebooks export, byte for byte, and only `__init__.py` is written by hand."""
    new, old = files(exported), files(committed)
    for path in sorted(new.keys() | old.keys()):
        if path not in new:
            if path.name != "py.typed":
                yield f"psgd_lit/{path} is stale: no notebook exports it"
        elif path not in old:
            yield f"psgd_lit/{path} is missing; say `make export`"
        elif path.name not in HANDWRITTEN and new[path] != old[path]:
            yield f"psgd_lit/{path} is not what the notebooks export; say `make export`"


def copy_of_book(folder: Path) -> Path:
    """Copy what the export reads: the settings and the notebooks."""
    shutil.copy(ROOT / "settings.ini", folder)
    shutil.copytree(NBS, folder / "nbs", ignore=shutil.ignore_patterns(".*", "_*", "results"))
    return folder


def test_library_is_exported(tmp_path: Path) -> None:
    """Exporting the notebooks again gives the library that is committed."""
    report(differences(export(copy_of_book(tmp_path)), LIBRARY))


def test_export_gate_fails(tmp_path: Path) -> None:
    """A module that was edited, left over or forgotten is seen."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, texts in ((new, {"a": "1", "b": "2"}), (old, {"a": "1 ", "c": "3"})):
        folder.mkdir()
        for name, text in texts.items():
            (folder / f"{name}.py").write_text(text)
        (folder / "__init__.py").write_text(f"# {folder}")
    assert [complaint.split("; ")[0] for complaint in differences(new, old)] == [
        "psgd_lit/a.py is not what the notebooks export",
        "psgd_lit/b.py is missing",
        "psgd_lit/c.py is stale: no notebook exports it",
    ]


def version_differs(package: Path, settings: Path) -> Iterator[str]:
    """The package and the settings name one version."""
    text = (package / "__init__.py").read_text()
    version = next(
        line.split("=")[1].strip() for line in settings.read_text().splitlines() if line.startswith("version")
    )
    if f'__version__ = "{version}"\n' not in text:
        yield f'psgd_lit/__init__.py should say __version__ = "{version}", as settings.ini does'


def test_version() -> None:
    """The package and the settings name one version, and the package says that it is typed."""
    report(version_differs(LIBRARY, ROOT / "settings.ini"))
    assert (LIBRARY / "py.typed").exists()


def test_version_gate_fails(tmp_path: Path) -> None:
    """Another version is seen."""
    (tmp_path / "__init__.py").write_text('__version__ = "0.0.9"\n')
    assert list(version_differs(tmp_path, ROOT / "settings.ini"))


# Importable ------------------------------------------------------------------------------------------------------

IMPORT_EACH = """
import contextlib, importlib, json, os, sys, traceback, torch
sys.dont_write_bytecode = True
root, package, *modules = sys.argv[1:]
sys.path.insert(0, root)
with contextlib.suppress(BaseException):
    importlib.import_module(package)
for module in modules:
    if os.fork() == 0:
        try:
            importlib.import_module(f"{package}.{module}".strip("."))
        except BaseException:
            print(json.dumps([module, traceback.format_exc(limit=-1)]), flush=True)
        os._exit(0)
    os.wait()
"""
"""Torch is imported once, and so is the package itself, which Python imports before any module of it.

Each module is then imported in a process of its own that has seen no other module.
"""


def import_failures(package: Path) -> Iterator[str]:
    """Every module imports alone."""
    names = list(modules(package))
    command = [sys.executable, "-c", IMPORT_EACH, str(package.parent), package.name, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for module, trace in map(json.loads, done.stdout.splitlines()):
        yield f"import {package.name}.{module} fails: {trace.strip().splitlines()[-1]}"


@pytest.mark.slow
def test_every_module_imports_alone() -> None:
    """Each module imports in an interpreter that has imported nothing else of the library."""
    report(import_failures(LIBRARY))


def test_import_gate_fails(tmp_path: Path) -> None:
    """A module that leans on what another one imported is seen."""
    package = tmp_path / "broken"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("import broken.b\n")
    (package / "b.py").write_text("import broken\n")
    (package / "c.py").write_text("import broken\nbroken.b\n")
    (complaint,) = import_failures(package)
    assert complaint.startswith("import broken.c fails: AttributeError")


# In the reference ------------------------------------------------------------------------------------------------


REFERENCE = [read_page(path) for path in PAGES if name_of(path).startswith("api")]
"""The pages of the reference; the first is about PSGD, the second about matrix groups."""


def sections(pages: Iterable[Page]) -> list[str]:
    """The sections of some pages, each with its heading."""
    texts = ["\n".join(cell.source for cell in page.text) for page in pages]
    return [part for text in texts for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)]


def reference_faults(derived: Mapping[str, str], parts: list[str]) -> Iterator[str]:
    """Every module has an entry, and what is documented of it stands beside a link to the chapter that derives it.

    Args:
        derived: the label of a chapter by the module that it exports.
        parts: the sections of the reference.
    """
    for module, label in derived.items():
        name = re.escape(f"psgd_lit.{module}")
        if not any(re.search(rf"automodule:: {name}$", part, re.MULTILINE) for part in parts):
            yield f"the reference lacks psgd_lit.{module}"
        for part in parts:
            if re.search(rf"\.\. auto\w+:: {name}(?!\w)", part) and f"{{ref}}`{label}`" not in part:
                yield f"{part.splitlines()[0]!r} documents psgd_lit.{module} without a link to {label}"


def test_reference_lists_every_module() -> None:
    """A reader finds each module in the reference, and from there the chapter that derives it."""
    derived = {page.module: page.label for page in map(read_page, PAGES) if page.module}
    names = {name for name, path in modules(LIBRARY).items() if path.name != "__init__.py"}
    assert names == derived.keys()
    report(reference_faults(derived, sections(REFERENCE)))


def test_reference_gate_fails() -> None:
    """A module that the reference lacks is seen, and an entry without a link to its chapter."""
    derived = {"hvp": "chap-hvp", "groups.kron": "chap-kron", "optim": "chap-psgd"}
    parts = [
        "## A\n{ref}`chap-hvp`\n.. automodule:: psgd_lit.hvp\n",
        "## B\n{ref}`chap-hvp`\n.. automodule:: psgd_lit.optim\n",
        "## C\n.. autofunction:: psgd_lit.hvp.hvp_exact\n",
    ]
    assert list(reference_faults(derived, parts)) == [
        "'## C' documents psgd_lit.hvp without a link to chap-hvp",
        "the reference lacks psgd_lit.groups.kron",
        "'## B' documents psgd_lit.optim without a link to chap-psgd",
    ]


def argument_faults(defaults: Mapping[str, Any], text: str) -> Iterator[str]:
    """The table of arguments has a row for each, with its default."""
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    yield from (f"the table of arguments has {name}, which PSGD hasn't" for name in rows if name not in defaults)
    for name, default in defaults.items():
        if name not in rows:
            yield f"the table of arguments lacks {name}"
        elif repr(ast.literal_eval(rows[name])) != repr(default):
            yield f"the table of arguments has {rows[name]} for {name}, whose default is {default!r}"


def row_faults(names: Iterable[str], text: str) -> Iterator[str]:
    """A page has a row for each of these names, and none for another."""
    rows, names = set(re.findall(r'^\| "([\w-]+)" \|', text, re.MULTILINE)), set(names)
    yield from (f'no row for "{name}"' for name in sorted(names - rows))
    yield from (f'a row for "{name}", which there is not' for name in sorted(rows - names))


def test_reference_tables() -> None:
    """The tables of the page about PSGD have its arguments with their defaults, and all names that these take."""
    text = "\n".join(sections(REFERENCE[:1]))
    arguments = list(inspect.signature(PSGD).parameters.values())[1:]
    report(argument_faults({argument.name: argument.default for argument in arguments}, text))
    report(row_faults([*HVP, *RULES, *FLAT_RULES], text))


def test_tables_gate_fails() -> None:
    """Another default, an argument too few or too many, and a name too few or too many are seen."""
    text = '| `lr` | `0.1` | step |\n| `hvp` | `"exact"` | h |\n| `old` | `1` | x |\n| "kron" | a |\n| "cron" | b |\n'
    assert list(argument_faults({"lr": 0.2, "hvp": "exact", "seed": 0}, text)) == [
        "the table of arguments has old, which PSGD hasn't",
        "the table of arguments has 0.1 for lr, whose default is 0.2",
        "the table of arguments lacks seed",
    ]
    assert list(row_faults(["kron", "scan"], text)) == [
        'no row for "scan"',
        'a row for "cron", which there is not',
    ]


def test_every_group_is_exported() -> None:
    """`psgd_lit.groups` has every group of its modules, and nothing else."""
    found = [importlib.import_module(f"psgd_lit.{name}") for name in modules(LIBRARY) if name.startswith("groups.")]
    classes = {name: vars(module)[name] for module in found for name in module.__all__}
    public = {name for name, value in classes.items() if isinstance(value, type) and issubclass(value, groups.Group)}
    assert set(groups.__all__) == public
    assert all(getattr(groups, name) is classes[name] for name in public)


# Floors ----------------------------------------------------------------------------------------------------------


def floor(module: str) -> int | None:
    """The floor of a module; `experiments` is one floor."""
    return FLOORS[module if module in FLOORS else module.split(".")[0]]


def is_known(module: str) -> bool:
    """True if the module has a floor."""
    return module in FLOORS or module.startswith("experiments.")


def imported(path: Path, package: Path) -> Iterator[str]:
    """The full names of the modules that a file imports, anywhere in it; `from x import y` may name `x.y`."""
    here = [package.name, *module_name(path, package).split(".")]
    known = modules(package)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = len(here) - node.level + (path.name == "__init__.py")
            base = ".".join([*(here[:above] if node.level else []), *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}".partition(".")[2]
                yield (f"{base}.{alias.name}" if base.startswith(package.name) and inner in known else base)


def may_import(module: str, other: str) -> bool:
    """True if the floors let a module of the library import another one."""
    mine, theirs = floor(module), floor(other)
    if module in SHOWS_THEORY and theirs is None:
        return True
    if mine is None or theirs is None:
        return False
    is_neighbour = other in SAME_FLOOR and module.startswith(SAME_FLOOR[other])
    return theirs < mine or (theirs == mine and is_neighbour)


def floor_faults(package: Path) -> Iterator[str]:
    """A module imports from lower floors, the standard library and torch only."""
    for module, path in modules(package).items():
        if not is_known(module):
            yield f"psgd_lit.{module}: unknown module; give it a floor in tests/test_library.py"
            continue
        allowed = sys.stdlib_module_names | {"torch"} | THIRD_PARTY.get(module, set())
        for name in dict.fromkeys(imported(path, package)):
            root, _, other = name.partition(".")
            if root != package.name:
                if root not in allowed:
                    yield f"psgd_lit.{module} imports {name}; torch is the only dependency"
            elif is_known(other) and not may_import(module, other):
                yield f"psgd_lit.{module} (floor {floor(module)}) imports {name} (floor {floor(other)})"


def test_floors() -> None:
    """The import graph of the library follows its floors."""
    report(floor_faults(LIBRARY))


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (
            "hvp",
            "from psgd_lit.optim import PSGD",
            "psgd_lit.hvp (floor 0) imports psgd_lit.optim (floor 3)",
        ),
        (
            "hvp",
            "def f():\n    from . import optim",
            "psgd_lit.hvp (floor 0) imports psgd_lit.optim (floor 3)",
        ),
        ("hvp", "import psgd_lit", "psgd_lit.hvp (floor 0) imports psgd_lit (floor 7)"),
        (
            "hvp",
            "from .groups.protocol import Group",
            "psgd_lit.hvp (floor 0) imports psgd_lit.groups.protocol (floor 0)",
        ),
        (
            "optim",
            "from .viz import COLOURS",
            "psgd_lit.optim (floor 3) imports psgd_lit.viz (floor None)",
        ),
        (
            "criterion",
            "from .hvp import exact",
            "psgd_lit.criterion (floor None) imports psgd_lit.hvp (floor 0)",
        ),
        ("groups.diagonal", "from .kron import Kron", "imports psgd_lit.groups.kron (floor 0)"),
        (
            "hvp",
            "import numpy as np",
            "psgd_lit.hvp imports numpy; torch is the only dependency",
        ),
        ("novelty", "", "psgd_lit.novelty: unknown module; give it a floor"),
        ("hvp", "import math\nfrom torch import Tensor", ""),
        ("optim", "from psgd_lit.groups.kron import Kron\nfrom .hvp import exact", ""),
        ("groups.diagonal", "from .protocol import Group", ""),
        ("groups.diagonal", "from ..groups.protocol import Group", ""),
        ("viz", "import matplotlib.pyplot as plt", ""),
    ],
)
def test_floor_gate(module: str, source: str, complaint: str, tmp_path: Path) -> None:
    """Imports upwards, sideways and from outside are seen; imports downwards pass."""
    package = tmp_path / "psgd_lit"
    for name in {module, "hvp", "optim", "viz", "groups.kron", "groups.protocol"}:
        path = package / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source if name == module else "")
    found = "\n".join(floor_faults(package))
    assert complaint in found if complaint else found == ""


# Documented and typed --------------------------------------------------------------------------------------------


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Public functions, classes and methods have docstrings, and all their arguments and results have types."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}{node.name}"
        is_public = not any(part.startswith("_") for part in name.split("."))
        is_overload = any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)
        if is_public and not is_overload and not ast.get_docstring(node):
            yield f"{name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{name}.")
        else:
            yield from (f"{name} lacks the type of {what}" for what in untyped(node))


def untyped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The arguments of a function that have no type, and its result if that has none."""
    names = function.args
    arguments = [
        *names.posonlyargs,
        *names.args,
        *names.kwonlyargs,
        *filter(None, (names.vararg, names.kwarg)),
    ]
    yield from (a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls"))
    if function.returns is None:
        yield "its result"


@pytest.mark.parametrize("module", modules(LIBRARY))
def test_documented_and_typed(module: str) -> None:
    """Every public name says what it is, and what it takes and gives."""
    report(undocumented(ast.parse(modules(LIBRARY)[module].read_text()).body))


def test_documentation_gate_fails() -> None:
    """A missing docstring and missing types are seen, in methods too; private names need types only."""
    source = """
def f(x, *args) -> int:
    '''Has a docstring.'''
class A:
    def method(self, x: int):
        def inner(x): ...
    def __init__(self) -> None: ...
def _private(x: int): ...
"""
    assert list(undocumented(ast.parse(source).body)) == [
        "f lacks the type of x",
        "f lacks the type of args",
        "A has no docstring",
        "A.method has no docstring",
        "A.method lacks the type of its result",
        "_private lacks the type of its result",
    ]


GROUP_LINES = 240


def long_modules(paths: Iterable[Path]) -> Iterator[str]:
    """Group modules with more lines than a reader takes in at once."""
    for path in paths:
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > GROUP_LINES:
            yield f"{path.name} has {count} lines, and {GROUP_LINES} are the limit"


def test_groups_are_short() -> None:
    report(long_modules(sorted((ROOT / "psgd_lit" / "groups").glob("*.py"))))


def test_length_gate(tmp_path: Path) -> None:
    for name, count in (("short", GROUP_LINES), ("long", GROUP_LINES + 1)):
        (tmp_path / f"{name}.py").write_text("x = 1\n" * count)
    assert list(long_modules(sorted(tmp_path.glob("*.py")))) == ["long.py has 241 lines, and 240 are the limit"]
