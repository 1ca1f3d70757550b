"""Images: which files are read, what a step sees of them, and that runs on them continue with the same bits."""

import hashlib
import io
import os
import pickle
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quick import first

from psgd_lit.experiments import image_data
from psgd_lit.experiments.__main__ import main
from psgd_lit.experiments.digits import load_digits
from psgd_lit.experiments.image_data import (
    PUBLISHED,
    Images,
    check_file,
    find_files,
    kept_images,
    load_images,
)
from psgd_lit.experiments.images import (
    IMAGE_PROBLEMS,
    ImageProblem,
    place,
    random_warp,
    shifted_view,
    warp,
)
from psgd_lit.experiments.methods import METHODS, make_optimizer, step_size
from psgd_lit.experiments.runner import (
    CATALOGUE,
    Run,
    Store,
    Training,
    load_results,
    pack,
    unpack,
)


def generator(seed: int = 0) -> torch.Generator:
    """A generator in a known state."""
    return torch.Generator().manual_seed(seed)


def some_images(count: int, colours: int, side: int) -> Images:
    """Random images and labels, as bytes."""
    x = torch.randint(256, (2 * count, colours, side, side), generator=generator(1), dtype=torch.uint8)
    y = torch.randint(10, (2 * count,), generator=generator(2))
    return Images(x[:count], y[:count], x[count:], y[count:])


SMALL = {
    name: some_images(40, 1, 28) if name.startswith("mnist") else some_images(40, 3, 32) for name in IMAGE_PROBLEMS
}


@pytest.fixture
def small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problems, with images that need no file, and small batches."""
    for name, images in SMALL.items():
        problem = replace(IMAGE_PROBLEMS[name], load=lambda device, images=images: images.to(device), batch=4)
        monkeypatch.setitem(CATALOGUE, name, problem)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without images and without a network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PSGD_LIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PSGD_LIT_OFFLINE", "1")
    kept_images.cache_clear()
    yield tmp_path
    kept_images.cache_clear()


# The published files ---------------------------------------------------------------------------------------------


def published(name: str) -> Images:
    """The full set, where PSGD_LIT_DATA has it."""
    root = os.environ.get("PSGD_LIT_DATA")
    if root is None or not (Path(root) / name).is_dir():
        pytest.skip(f"no full {name}: PSGD_LIT_DATA is {root!r}")
    return load_images(name, download=False)


def test_mnist() -> None:
    """All of MNIST, with the counts of its labels; the digits of the package are among them, pixel by pixel."""
    images = published("mnist")
    assert images.x_train.shape == (60_000, 1, 28, 28)
    assert images.x_test.shape == (10_000, 1, 28, 28)
    assert images.y_train.bincount().tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert images.x_train.dtype == torch.uint8
    few = load_digits()
    for digit in range(10):
        all_of_it = images.x_train[images.y_train == digit][:200]
        assert torch.allclose(all_of_it / 127.5 - 1, few.x_train[few.y_train == digit], atol=1e-6)


@pytest.mark.slow
def test_cifar10() -> None:
    """All of CIFAR-10: the arrays have the published hashes, and each class as many images as the others."""
    images = published("cifar10")
    assert images.x_train.shape == (50_000, 3, 32, 32)
    assert images.x_test.shape == (10_000, 3, 32, 32)
    assert images.y_train.bincount().tolist() == [5000] * 10
    assert images.y_test.bincount().tolist() == [1000] * 10
    assert images.y_train[:5].tolist() == [
        6,
        9,
        9,
        4,
        1,
    ]  # a frog, two trucks, a deer, an automobile


# Which files are read --------------------------------------------------------------------------------------------


def put(folder: Path, name: str, content: bytes = b"") -> None:
    """Let a folder hold files of the right names."""
    (folder / name).mkdir(parents=True)
    for file in PUBLISHED[name].files:
        (folder / name / file).write_bytes(content)


def test_order_of_folders(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is named comes before the variable's, and that one before the cache."""
    monkeypatch.setattr(image_data, "check_file", lambda path, sha256: None)
    for folder in ("cache/psgd_lit", "data", "root"):
        put(nowhere / folder, "mnist")
        found = find_files("mnist", nowhere / "root")
        assert {path.parent.parent for path in found.values()} == {nowhere / folder}
    assert list(found) == list(PUBLISHED["mnist"].files)


@pytest.mark.parametrize("name", PUBLISHED)
def test_offline(name: str, nowhere: Path) -> None:
    """The error names every folder that was looked in, the files and their hashes, and nothing is made."""
    with pytest.raises(FileNotFoundError, match="fetching is switched off") as caught:
        load_images(name, nowhere / "root")
    said = str(caught.value)
    assert all(str(nowhere / folder / name) in said for folder in ("root", "data", "cache/psgd_lit"))
    assert all(file in said and sha256 in said for file, sha256 in PUBLISHED[name].files.items())
    assert len(said.splitlines()) == 1
    assert list(nowhere.iterdir()) == []


def test_a_part_is_not_enough(nowhere: Path) -> None:
    """A folder that lacks a file counts as one that has none."""
    put(nowhere / "data", "mnist")
    (nowhere / "data" / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError):
        find_files("mnist")


def test_damaged_files_are_not_opened(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another content is named, and neither read nor unpacked nor removed."""
    monkeypatch.setattr(tarfile, "open", lambda *args: pytest.fail("it was opened"))
    put(nowhere / "data", "cifar10", b"something else")
    with pytest.raises(ValueError, match=r"cifar-10-python.tar.gz is damaged, or another file.*remove it"):
        load_images("cifar10")
    assert (nowhere / "data" / "cifar10" / "cifar-10-python.tar.gz").read_bytes() == b"something else"


def test_fetching(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is asked of each mirror in turn, with its hash, and kept in the cache."""
    pooch = pytest.importorskip("pooch")
    asked = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> None:
        asked.append((url, known_hash))
        if url.startswith(PUBLISHED["cifar10"].mirrors[0]):
            raise ValueError("hash of downloaded file does not match")
        put(path.parent, "cifar10")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    monkeypatch.setattr(image_data, "check_file", lambda path, sha256: None)
    (path,) = find_files("cifar10", download=True).values()
    assert path.is_relative_to(nowhere / "cache" / "psgd_lit")
    ((file, sha256),) = PUBLISHED["cifar10"].files.items()
    assert asked == [(mirror + file, f"sha256:{sha256}") for mirror in PUBLISHED["cifar10"].mirrors]
    find_files("cifar10", download=True)
    assert len(asked) == 2


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which it is served on this machine."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("localhost", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://localhost:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_pooch_on_a_mirror(mirror: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pooch goes from a mirror with another file to one with the right one, and keeps no other."""
    pytest.importorskip("pooch")
    served, address = mirror
    for folder, content in (("bad", b"abd"), ("good", b"abc")):
        (served / folder).mkdir()
        (served / folder / "a.gz").write_bytes(content)
    files = {"a.gz": hashlib.sha256(b"abc").hexdigest()}
    cache = tmp_path / "cache" / "abc"
    for mirrors in (["bad/", "none/"], ["bad/", "good/"]):
        addresses = tuple(address + folder for folder in mirrors)
        monkeypatch.setitem(PUBLISHED, "abc", image_data.Published(files, addresses, {}))
        if "good/" not in mirrors:
            with pytest.raises(FileNotFoundError, match=r"no mirror has a\.gz .*bad/: .*none/: ") as caught:
                image_data.fetch("abc", cache)
            assert len(str(caught.value).splitlines()) == 1
            assert not list(cache.rglob("*.gz"))
        else:
            image_data.fetch("abc", cache)
            assert (cache / "a.gz").read_bytes() == b"abc"


@given(st.binary(max_size=200), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit(content: bytes, where: int, bit: int) -> None:
    """A file with the right hash passes, and fails after any bit is flipped."""
    content = content or b"0"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        check_file(path, sha256)
        damaged = bytearray(content)
        damaged[where % len(content)] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            check_file(path, sha256)


class Harmful:
    """Does something when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("thing", [Harmful(), print, torch.nn.Linear, type, Path("x")])
def test_pickles_run_nothing(thing: Any) -> None:
    """Whatever is no array of bytes is refused, by name, however deep it is hidden."""
    packed = pickle.dumps({"data": [thing]})
    with pytest.raises(pickle.UnpicklingError, match="has no place in a file of images"):
        image_data._Unpickler(io.BytesIO(packed)).load()


# What a step sees ------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 4),
    st.data(),
)
def test_place(count: int, colours: int, height: int, width: int, margin: int, data: st.DataObject) -> None:
    """A canvas holds the image at its place and zeros elsewhere, for all shapes."""
    side = max(height, width) + margin
    images = torch.randint(1, 256, (count, colours, height, width), generator=generator(), dtype=torch.uint8)
    tops = data.draw(st.lists(st.integers(0, side - height), min_size=count, max_size=count))
    lefts = data.draw(st.lists(st.integers(0, side - width), min_size=count, max_size=count))
    expected = torch.zeros(count, colours, side, side, dtype=torch.uint8)
    for k, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        expected[k, :, top : top + height, left : left + width] = images[k]
    where = [torch.tensor(x, dtype=torch.int64) for x in (tops, lefts)]
    assert torch.equal(place(images, *where, side), expected)


@given(
    st.integers(2, 7),
    st.integers(2, 7),
    st.floats(0.5, 1.5),
    st.floats(0.5, 1.5),
    st.floats(-0.3, 0.3),
)
def test_warp(height: int, width: int, down: float, right: float, shift: float) -> None:
    """Coordinates of pixels, as colours, come out as the affine map says, up to the border."""
    dtype = torch.float64
    rows, columns = torch.meshgrid(torch.arange(height, dtype=dtype), torch.arange(width, dtype=dtype), indexing="ij")
    images = torch.stack([rows, columns])[None]
    seen = warp(
        images,
        torch.tensor([[down, right]], dtype=dtype),
        torch.tensor([[shift, -shift]], dtype=dtype),
    )[0]
    middle = ((height - 1) / 2, (width - 1) / 2)
    for axis, (size, scale, step) in enumerate([(height, down, shift), (width, right, -shift)]):
        at = (rows, columns)[axis]
        expected = (middle[axis] + scale * (at - middle[axis]) + step * size).clamp(0, size - 1)
        assert torch.allclose(seen[axis], expected, atol=1e-9)


def test_random_warp_fills_its_range() -> None:
    """Scales and shifts go as far as they may, in both directions, and no further."""
    ramp = torch.linspace(-1, 1, 65, dtype=torch.float64).expand(4000, 1, 1, 65)
    views = random_warp(ramp, generator())[:, 0, 0, 31:34]
    scale, shift = (views[:, 2] - views[:, 0]) * 16, views[:, 1] / 2 * 64 / 65
    for values, centre in ((scale, 1.0), (shift, 0.0)):
        assert 0.249 < (values - centre).max() <= 0.25 + 1e-6
        assert -0.25 - 1e-6 <= (values - centre).min() < -0.249


@pytest.mark.parametrize("name", IMAGE_PROBLEMS)
def test_batches(name: str, small_problems: None) -> None:
    """A batch has no image twice, follows the generator, and is all there is where more is asked for."""
    problem = CATALOGUE[name]
    assert isinstance(problem, ImageProblem)
    source = generator()
    problem.sample(5, source)
    state = source.get_state()
    second = problem.sample(5, source)
    again = problem.sample(5, generator().set_state(state))
    assert torch.equal(second.inputs, again.inputs)
    assert torch.equal(second.target, again.target)
    everything = problem.sample(1000, generator())
    assert sorted(everything.target.tolist()) == sorted(SMALL[name].y_train.tolist())
    tests = [batch.target for batch in problem.tests(1000, generator())]
    assert sorted(torch.cat(tests).tolist()) == sorted(SMALL[name].y_test.tolist())
    assert -1 - 1e-6 <= everything.inputs.min() < everything.inputs.max() <= 1


def test_tests_are_not_shifted(small_problems: None) -> None:
    """An image that is tested sits in the middle, always."""
    x = SMALL["mnist_cnn"].x_test
    (batch,) = CATALOGUE["mnist_cnn"].tests(1000, generator(5))
    expected = {tuple(view.flatten().tolist()) for view in shifted_view(x, None)}
    assert {tuple(view.flatten().tolist()) for view in batch.inputs} == expected


# Runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [method for method in METHODS if method != "dense"])
@pytest.mark.parametrize("name", first(1, ["mnist_cnn", *(name for name in IMAGE_PROBLEMS if name != "mnist_cnn")]))
def test_resume_is_bit_equal(name: str, method: str, small_problems: None) -> None:
    """Packed and unpacked, a run on images goes on with the same bits, and its loss is a number."""
    run = Run(
        name,
        method,
        seed=3,
        steps=3,
        settings={"lr_preconditioner": 0.1} if method == "kron" else {},
    )
    whole, half, rest = Training(run), Training(run), Training(run)
    start = whole.params[0].detach().clone()
    half.step()
    unpack(rest, pack(half))
    for training, steps in ((whole, 3), (rest, 2)):
        for _ in range(steps):
            training.step()
    assert all(map(torch.equal, whole.params, rest.params))
    assert whole.curve == rest.curve
    assert whole.state == rest.state == "finished"
    assert not torch.equal(whole.params[0], start)


@pytest.mark.parametrize("name", IMAGE_PROBLEMS)
def test_settings_of_the_author(name: str) -> None:
    """Every method has a step size and a threshold; the dense form is too large and says so."""
    params = IMAGE_PROBLEMS[name].network.init(generator())
    for method in METHODS:
        if method == "dense":
            with pytest.raises(ValueError, match="dense"):
                make_optimizer(method, params, *step_size(name, method))
        else:
            make_optimizer(method, params, *step_size(name, method))
    assert step_size("mnist_cnn", "kron") == (0.02, 10.0)
    assert step_size("cifar_autoencoder", "sgd").lr == 0.2
    assert step_size("cifar_cnn", "scan") == (0.05, 10.0)


def words(store: Store, line: str) -> list[str]:
    """A command line with the folders of a store."""
    return [
        "--results",
        str(store.results),
        "--checkpoints",
        str(store.checkpoints),
        *line.split(),
    ]


def test_command_line(small_problems: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on images has no length in its name, its result or its tables, and tests on all that there are."""
    store = Store(tmp_path / "results", tmp_path / "checkpoints")
    line = "run mnist_cnn --method sgd --steps 2 --allow-dirty"
    assert main(words(store, line)) == 0
    (result,) = load_results(store.results)
    assert (result.run.name, result.test_samples) == ("mnist_cnn-sgd-s0", 40)
    text = (store.results / "mnist_cnn-sgd-s0.json").read_text(encoding="utf-8")
    assert '"length"' not in text
    assert result.to_json() == text
    assert main(words(store, line.replace("2", "3") + " --resume")) == 0
    capsys.readouterr()
    for command, row in (("compare mnist_cnn", "sgd - 1 0"), ("list", "mnist_cnn - 4 50000")):
        assert main(words(store, command)) == 0
        found = [" ".join(text.split()) for text in capsys.readouterr().out.splitlines()]
        assert any(text.startswith(row) for text in found)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run mnist_cnn --method kron", "the images 'mnist' are not in "),
        ("run cifar_autoencoder --method sgd", "the images 'cifar10' are not in "),
        ("tuned autoencoder --method sgd --allow-dirty", "the images 'cifar10' are not in "),
        ("tuned mnist --method ada --allow-dirty", "unknown method 'ada'"),
        (
            "tuned mnst --method kron --allow-dirty",
            "unknown comparison 'mnst'; there are mnist, ",
        ),
        ("run mnist_cnn --method kron --length 5", "mnist_cnn has no length, and 5 was given"),
    ],
)
def test_errors_of_users(line: str, says: str, nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is one line that says what to do, exit code 1, and no file."""
    store = Store(nowhere / "results", nowhere / "checkpoints")
    assert main(words(store, line)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert says in err
    assert len(err.splitlines()) == 1
    assert not store.results.exists()
    assert not store.checkpoints.exists()
