"""The canonical writer: run notebooks in fresh kernels and store them in one form, byte for byte, and record that.

Usage: `python nbs/_ext/writer.py [NOTEBOOK ...]`; without arguments, all pages of `_toc.yml`, then the README.
"""

import hashlib
import os
import sys
from base64 import b64decode, b64encode
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
import yaml
from book_ext import split_directives
from nbclient import NotebookClient
from PIL import Image
from provenance import digest, record

ROOT = Path(__file__).resolve().parents[2]
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def pages(toc: Path = ROOT / "_toc.yml") -> list[Path]:
    """The notebooks of the book in reading order."""
    contents = yaml.safe_load(toc.read_text())
    names = [contents["root"], *(chapter["file"] for part in contents["parts"] for chapter in part["chapters"])]
    return [toc.parent / f"{name}.ipynb" for name in names]


def cell_id(source: str, taken: set[str]) -> str:
    """Name a cell by its content, so that nbdev's markers in the library change only where a cell does."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    name = next(digest[i : i + 8] for i in range(len(digest)) if digest[i : i + 8] not in taken)
    taken.add(name)
    return name


def canonical_output(output: Any) -> Any:
    """Drop what changes from run to run, and refuse what a reader should never meet."""
    if output.output_type == "error" or output.get("name") == "stderr":
        raise ValueError(f"a cell wrote to stderr or failed:\n{output.get('text') or output.get('evalue')}")
    if "data" in output:
        output.data.pop(WIDGET_VIEW, None)
    if "execution_count" in output:
        output.execution_count = None
    output.pop("transient", None)
    return output


def canonical(notebook: Any) -> str:
    """The one text of an executed notebook."""
    count, taken = 0, set[str]()
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = {"tags": tags} if tags else {}
        cell.source = cell.source.strip("\n")
        cell.id = cell_id(cell.source, taken)
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
            cell.outputs = [canonical_output(output) for output in cell.outputs]
    notebook.metadata = KERNEL
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    text: str = nbformat.writes(notebook, indent=1)
    return text.rstrip("\n") + "\n"


def execute(path: Path) -> str:
    """Run a notebook in a fresh kernel, in its own folder, and return its canonical text."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources, coalesce_streams=True).execute()
    lighten(notebook)
    return canonical(notebook)


def lighten(notebook: Any) -> None:
    """Leave 128 colours to each picture, some translucent: a drawing looks as before, in a quarter of the bytes."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            picture, light = Image.open(BytesIO(b64decode(output.data["image/png"]))), BytesIO()
            few = picture.convert("RGBA").quantize(128, method=Image.Quantize.FASTOCTREE)
            few.save(light, "png", optimize=True, dpi=picture.info["dpi"])
            output.data["image/png"] = b64encode(light.getvalue()).decode() + "\n"


def readme(index: Path) -> str:
    """The README: the cells of the index page that carry the tag `readme`."""
    blocks = ["<!-- Written from nbs/index.ipynb by `make run`; edit that page instead. -->"]
    for cell in nbformat.read(index, as_version=4).cells:
        if "readme" in cell.metadata.get("tags", []):
            source = split_directives(cell.source)[1] if cell.cell_type == "code" else cell.source
            blocks.append(f"```python\n{source}\n```" if cell.cell_type == "code" else source)
    return "\n\n".join(blocks) + "\n"


def rewrite(path: Path) -> None:
    """Execute a notebook and store it."""
    path.write_text(execute(path), encoding="utf-8")
    print(path.relative_to(ROOT), flush=True)


def main(arguments: list[str]) -> None:
    """Write the notebooks named on the command line, or all of them, and the README; one that fails stays as it was."""
    book = pages()
    chosen = [Path(argument).resolve() for argument in arguments] or book
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {path: pool.submit(rewrite, path) for path in chosen}
    names = {path: str(path.relative_to(ROOT)) for path in [*book, *chosen]}
    record({names[path]: digest(path) for path, run in runs.items() if run.exception() is None}, names.values())
    for run in runs.values():
        run.result()  # raises what went wrong
    (ROOT / "README.md").write_text(readme(book[0]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
