"""The wheel: built from the tree, installed beside what it declares and nothing else, it runs the README's example."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from gates import LIBRARY, ROOT, report
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_library import modules

NOT_FOR_USERS = {
    "IPython",
    "anywidget",
    "execnb",
    "fastcore",
    "ipywidgets",
    "matplotlib",
    "nbclient",
    "nbdev",
    "nbformat",
    "PIL",
    "pytest",
    "scipy",
    "sphinx",
}
"""What the book needs and the library must not."""

EXTRA = "psgd_lit[viz]"
SHOWING = ("psgd_lit.exhibit", "psgd_lit.live", "psgd_lit.viz")
"""What shows pictures, and needs the extra for it."""
UNBUILT = (".*", "_build", "build", "dist", "*.egg-info", "__pycache__", "nbs", "tests")


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the tree, so that nothing is left behind in it."""
    tree = shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*UNBUILT))
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(tree),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the build failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    (wheel,) = folder.glob("*.whl")
    return wheel


def closure(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that the requirements mean here, and those that these require, without extras."""
    found: dict[str, metadata.Distribution] = {}
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[name] = metadata.distribution(name)
            todo += [Requirement(text) for text in found[name].requires or []]
    return found


def make_environment(wheel: Path, folder: Path) -> Path:
    """Make an environment with the wheel and the closure of its requirements, linked from here; return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (own,) = packages.glob("*.dist-info")
    for distribution in closure(metadata.PathDistribution(own).requires or []).values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = packages / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    return folder / "bin" / "python"


def run(python: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code with a Python that sees only its own packages, in an empty folder."""
    folder.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [python, "-I", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def content_faults(wheel: Path, version: str) -> Iterator[str]:
    """The wheel holds the library and the licence, nothing of the book, and has the right version."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    if f"-{version}-" not in wheel.name:
        yield f"{wheel.name} is not version {version}"
    for pattern in (r"psgd_lit/py\.typed", r".*\.dist-info/(licenses/)?LICENSE"):
        if not any(re.fullmatch(pattern, name) for name in names):
            yield f"the wheel holds no {pattern}"
    yield from (f"the wheel holds {name}" for name in names if not re.match(r"psgd_lit(/|-)", name))
    shipped = [*modules(LIBRARY).values(), *LIBRARY.glob("exhibits/*")]
    missing = {path.relative_to(LIBRARY.parent).as_posix() for path in shipped} - set(names)
    yield from (f"the wheel lacks {name}" for name in sorted(missing))


IMPORT_ALL = """
import importlib, json, traceback
from importlib.util import find_spec

unwanted, names = {unwanted!r}, {names!r}
said = dict.fromkeys(names, "")
there = [name for name in unwanted if find_spec(name)]
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        said[name] = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
print(json.dumps([there, said]))
"""


def import_faults(python: Path, names: list[str], folder: Path) -> Iterator[str]:
    """Every module imports without the book's tools; those that show something name the extra that they need."""
    names = [name for name in names if name not in SHOWING]
    done = run(
        python,
        IMPORT_ALL.format(unwanted=sorted(NOT_FOR_USERS), names=[*names, *SHOWING]),
        folder,
    )
    there, said = json.loads(done.stdout)
    yield from (f"{name} is there, so this environment proves nothing" for name in there)
    yield from (f"an import fails: {said[name]}" for name in names if said[name])
    for name in SHOWING:
        last_line = said[name]
        if not last_line.startswith("ImportError") or EXTRA not in last_line:
            yield f"importing {name} should raise an ImportError that names {EXTRA}; it says {last_line!r}"


def example_faults(python: Path, text: str, folder: Path) -> Iterator[str]:
    """The first Python example of the README runs and prints something."""
    example = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if not example:
        yield "the README has no Python example"
        return
    done = run(python, example[1], folder)
    if done.returncode:
        yield f"the README's example fails: {done.stderr.strip().splitlines()[-1]}"
    elif not done.stdout.strip():
        yield "the README's example prints nothing"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it declares."""
    return make_environment(wheel, tmp_path_factory.mktemp("environment"))


def test_content(wheel: Path) -> None:
    """The wheel holds what it should and no more."""
    (version,) = re.findall(r"^version *= *(\S+)", (ROOT / "settings.ini").read_text(), re.MULTILINE)
    report(content_faults(wheel, version))


@pytest.mark.slow
def test_imports(python: Path, tmp_path: Path) -> None:
    """The library imports where nothing but its declared requirements is installed."""
    report(import_faults(python, [f"psgd_lit.{name}".strip(".") for name in modules(LIBRARY)], tmp_path))


def test_readme_example(python: Path, tmp_path: Path) -> None:
    """A user who copies the README's example sees it work."""
    report(example_faults(python, (ROOT / "README.md").read_text(encoding="utf-8"), tmp_path))


# The gates can fail ----------------------------------------------------------------------------------------------


def test_content_gate_fails(tmp_path: Path) -> None:
    """A wheel with a wrong version, without its files and with others is seen."""
    wheel = tmp_path / "psgd_lit-0.0.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nbs/index.ipynb", "")
    found = "\n".join(content_faults(wheel, "0.1.0"))
    for complaint in (
        "is not version 0.1.0",
        "no psgd_lit/py",
        "LICENSE",
        "holds nbs/index.ipynb",
        "lacks psgd_lit/__init__.py",
    ):
        assert complaint in found


@pytest.mark.slow
def test_import_gate_fails(tmp_path: Path) -> None:
    """The environment of the book, a module that doesn't import and a helpful error that is missing are seen."""
    found = "\n".join(import_faults(Path(sys.executable), ["psgd_lit.gone"], tmp_path))
    for complaint in (
        "nbdev is there",
        "No module named 'psgd_lit.gone'",
        "should raise an ImportError that names",
    ):
        assert complaint in found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nprint(1)\n```\n", ""),
        ("```python\nimport gone\n```\n", "No module named 'gone'"),
        ("```python\nx = 1\n```\n", "prints nothing"),
        ("```\nprint(1)\n```\n", "no Python example"),
    ],
)
def test_example_gate(text: str, complaint: str, tmp_path: Path) -> None:
    """An example that is missing, fails or is silent is seen."""
    found = "\n".join(example_faults(Path(sys.executable), text, tmp_path))
    assert complaint in found if complaint else found == ""


def test_closure_leaves_extras_out() -> None:
    """Torch brings what it requires, and what only an extra would bring stays away."""
    names = closure(["torch>=2.6", 'matplotlib>=3.9; extra == "viz"'])
    assert {"torch", "sympy", "mpmath"} <= names.keys()
    assert not {"matplotlib", "numpy"} & names.keys()
