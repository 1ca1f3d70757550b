"""Which notebooks stand as they were run: a digest of each with all that its outputs can depend on.

The writer records digests in `nbs/written.json`.
A test runs again what has none, or whose text, library code, data or pinned packages have changed since.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import nbformat
from book_ext import split_directives

ROOT = Path(__file__).resolve().parents[2]
RECORD = "nbs/written.json"
DATA = {"../results": "nbs/results", "claims": "nbs/claims.toml", "exhibits": "psgd_lit/exhibits"}
"""Files that a page may read, by the words without which neither it nor the library can name them."""


def imported(tree: ast.AST, package: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The modules that a piece of code imports, or may: `from a import b` names `a` and `a.b`.

    Args:
        tree: plain Python.
        package: what relative imports start from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(name.name.split(".")) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = base + tuple(node.module.split(".") if node.module else ())
            yield module
            yield from ((*module, name.name) for name in node.names)


def file_of(module: tuple[str, ...], root: Path) -> Path | None:
    """The file of a module of the library, if it is one."""
    stem = root.joinpath(*module)
    if not module or module[0] != "psgd_lit":
        return None
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@functools.cache
def read(path: Path, package: tuple[str, ...], time: int) -> tuple[str, frozenset[tuple[str, ...]]]:
    """The code of a module without comments and docstrings, and what it imports.

    Args:
        path: of the module.
        package: what relative imports start from.
        time: of the file's last change.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[:1] = [] if node.body[1:] else [ast.Pass()]
    return ast.unparse(tree), frozenset(imported(tree, package))


def reached(source: str, root: Path) -> dict[str, str]:
    """The code of all modules of the library that some code imports, and those import, by the name of the module."""
    found: dict[str, str] = {}
    waiting = set(imported(ast.parse(source)))
    while waiting:
        module = waiting.pop()
        path, name = file_of(module, root), ".".join(module)
        if path is not None and name not in found:
            package = module if path.name == "__init__.py" else module[:-1]
            found[name], more = read(path, package, path.stat().st_mtime_ns)
            waiting |= more | {module[:-1]}
    return found


def files(names: Iterable[str], root: Path) -> Iterator[Path]:
    """All files below some places, in order."""
    for name in names:
        place = root / name
        yield from sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]


def digest(path: Path, root: Path = ROOT) -> str:
    """The digest of a notebook: its text with outputs, the library that it reaches, what it may read, the packages."""
    text = path.read_text(encoding="utf-8")
    cells = [cell for cell in nbformat.reads(text, as_version=4).cells if cell.cell_type == "code"]
    source = "\n".join(split_directives(cell.source)[1] for cell in cells)
    code = reached(source, root)
    every = "\n".join([source, *code.values()])
    parts = [text, *(f"{name}\n{code[name]}" for name in sorted(code))]
    total = hashlib.sha256("\0".join(parts).encode())
    named = [place for word, place in DATA.items() if word in every]
    everywhere = [one for one in files(["constraints.txt", "psgd_lit"], root) if one.parent.name != "exhibits"]
    for one in [*everywhere, *files(named, root)]:
        if one.suffix not in {".py", ".pyc"}:
            total.update(one.read_bytes())
    return total.hexdigest()[:16]


def recorded(root: Path = ROOT) -> dict[str, str]:
    """The digests on record, by the path of the notebook."""
    path = root / RECORD
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def record(new: Mapping[str, str], known: Iterable[str], root: Path = ROOT) -> None:
    """Write digests beside those on record, and drop notebooks that are no longer known."""
    kept = {name: value for name, value in (recorded(root) | dict(new)).items() if name in set(known)}
    (root / RECORD).write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", encoding="utf-8")


def is_as_written(path: Path, root: Path = ROOT) -> bool:
    """Whether nothing that the outputs of a notebook depend on has changed since it was run."""
    return recorded(root).get(str(path.relative_to(root))) == digest(path, root)
