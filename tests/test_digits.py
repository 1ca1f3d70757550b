"""The digits that the package brings: the right ones, whole, and readable wherever the package is installed."""

import gzip
import os
import struct
import zipfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest
import torch

from psgd_lit.experiments.digits import load_digits, read_idx

FOLDER = files("psgd_lit.experiments").joinpath("mnist_mini")
NAMES = {
    "train-images-idx3-ubyte.gz": (2000, 28, 28),
    "train-labels-idx1-ubyte.gz": (2000,),
    "t10k-images-idx3-ubyte.gz": (500, 28, 28),
    "t10k-labels-idx1-ubyte.gz": (500,),
}
HEADER = bytes([0, 0, 8, 2]) + struct.pack(">2I", 2, 3)
ENTRIES = bytes(range(250, 256))


def data_folder(part: str) -> Path:
    """The folder of verified data, or a skip that names what is absent."""
    root = os.environ.get("PSGD_LIT_DATA")
    folder = Path(root or "", part)
    if not root or not folder.exists():
        pytest.skip(f"no {part}: PSGD_LIT_DATA is {root!r}")
    return folder


# The right digits ------------------------------------------------------------------------------------------------


def test_pixels_and_labels_are_those_of_the_verified_subset() -> None:
    """Every pixel and label is that of the subset that was checked against MNIST's published files."""
    with np.load(data_folder("mini/mnist_mini.npz")) as verified:
        for name, key in zip(NAMES, ("x_train", "y_train", "x_test", "y_test"), strict=True):
            assert np.array_equal(read_idx(FOLDER / name).numpy(), verified[key]), name


@pytest.mark.parametrize(("part", "count"), [("train", 200), ("t10k", 50)])
def test_subset_is_the_first_images_of_each_digit(part: str, count: int) -> None:
    """The notice says which images these are; MNIST's own files, read by the same reader, agree."""
    mnist = data_folder("mnist")
    images, labels = (read_idx(mnist / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    chosen = torch.cat([(labels == digit).nonzero().flatten()[:count] for digit in range(10)]).sort().values
    assert torch.equal(read_idx(FOLDER / f"{part}-images-idx3-ubyte.gz"), images[chosen])
    assert torch.equal(read_idx(FOLDER / f"{part}-labels-idx1-ubyte.gz"), labels[chosen])


def test_digits() -> None:
    """Shapes, dtypes, range and balance are as documented."""
    digits = load_digits()
    assert [tuple(t.shape) for t in digits] == [
        (2000, 1, 28, 28),
        (2000,),
        (500, 1, 28, 28),
        (500,),
    ]
    assert [t.dtype for t in digits] == [torch.float32, torch.int64] * 2
    for x, y, count in (
        (digits.x_train, digits.y_train, 200),
        (digits.x_test, digits.y_test, 50),
    ):
        assert x.min() == -1
        assert x.max() == 1
        assert y.bincount().tolist() == [count] * 10


def test_no_test_image_is_a_training_image() -> None:
    """The two parts share no image, and none is twice in one."""
    digits = load_digits()
    rows = torch.cat([digits.x_train, digits.x_test]).flatten(1)
    assert len(rows.unique(dim=0)) == 2500


def test_dtype_and_device() -> None:
    """Both are kept, and labels stay integers."""
    digits = load_digits(dtype=torch.float64, device="meta")
    assert {t.device.type for t in digits} == {"meta"}
    assert [t.dtype for t in digits] == [torch.float64, torch.int64] * 2
    exact = load_digits(dtype=torch.float64).x_test
    assert torch.equal(
        ((exact + 1) * 127.5).round().byte()[:, 0],
        read_idx(FOLDER / "t10k-images-idx3-ubyte.gz"),
    )


# Shipped ---------------------------------------------------------------------------------------------------------


def test_folder_holds_the_files_and_their_notice() -> None:
    """Nothing else is shipped, and the notice names the holders, the licence and each file."""
    found = {item.name for item in FOLDER.iterdir()}
    assert found == {*NAMES, "NOTICE"}
    notice = (FOLDER / "NOTICE").read_text(encoding="utf-8")
    for words in ("Yann LeCun and Corinna Cortes", "CC BY-SA 3.0", *NAMES):
        assert words in notice


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_reproducible(name: str) -> None:
    """The archives carry no time and no file name, so the same pixels give the same bytes."""
    data = (FOLDER / name).read_bytes()
    assert data[3] == 0, "flags"
    assert data[4:8] == bytes(4), "time"
    assert tuple(read_idx(FOLDER / name).shape) == NAMES[name]


def test_reads_from_an_archive(tmp_path: Path) -> None:
    """A package that is imported from a zip file has resources without paths; they are read too."""
    archive = tmp_path / "package.zip"
    with as_file(FOLDER) as folder, zipfile.ZipFile(archive, "w") as target:
        for name in NAMES:
            target.write(folder / name, name)
    for name in NAMES:
        assert torch.equal(read_idx(zipfile.Path(archive, name)), read_idx(FOLDER / name))


# Damaged ---------------------------------------------------------------------------------------------------------


def write(folder: Path, data: bytes, pack: Callable[[bytes], bytes] = gzip.compress) -> Path:
    """Write a file of these bytes, compressed."""
    path = folder / "example.gz"
    path.write_bytes(pack(data))
    return path


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (6,), (1, 2, 3), (1, 1, 2, 3)])
def test_reads_every_dimension(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Any number of dimensions is read, those of size zero too."""
    entries = ENTRIES[: int(np.prod(shape))]
    path = write(
        tmp_path,
        bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + entries,
    )
    found = read_idx(path)
    assert found.shape == shape
    assert found.dtype == torch.uint8
    assert bytes(found.flatten().tolist()) == entries


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "000008"),
        (HEADER[:3], "000008"),
        (b"\1" + HEADER[1:] + ENTRIES, "000008"),
        (HEADER[:2] + b"\x0d" + HEADER[3:] + ENTRIES, "000008"),
        (HEADER[:-1], "declares 2 dimensions"),
        (HEADER + ENTRIES[:-1], r"shape \(2, 3\).* 5 bytes"),
        (HEADER + ENTRIES + b"\0", r"shape \(2, 3\).* 7 bytes"),
    ],
)
def test_damaged_content_is_refused(data: bytes, complaint: str, tmp_path: Path) -> None:
    """A wrong start, a missing dimension and a wrong number of entries are named, with the file."""
    with pytest.raises(ValueError, match=rf"example\.gz.*{complaint}"):
        read_idx(write(tmp_path, data))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[:-9],
        lambda packed: packed[:12] + b"\xff" * 4 + packed[16:],
        lambda packed: b"text",
        lambda packed: packed[:-8] + bytes(8),
    ],
    ids=["cut", "overwritten", "not gzip", "checksum"],
)
def test_damaged_archive_is_refused(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """An archive that is cut, overwritten, none at all or of another checksum is refused, with the file's name."""
    with pytest.raises(ValueError, match=r"example\.gz is not a complete gzip file"):
        read_idx(write(tmp_path, HEADER + ENTRIES, lambda data: spoil(gzip.compress(data, mtime=0))))


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A file that isn't there is no damaged file."""
    with pytest.raises(FileNotFoundError, match=r"gone\.gz"):
        read_idx(tmp_path / "gone.gz")
