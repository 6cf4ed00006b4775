from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import datasets

from misconv import data

RANDOM = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def arrays(**changes: Any) -> dict[str, Any]:
    """Six small pictures in colour of two classes, and four to test; an array changed to None is left out."""
    all_of_them = {
        "x_train": pixels(6, 5, 7, 3),
        "y_train": np.array([0, 1, 1, 0, 1, 0]),
        "x_test": pixels(4, 5, 7, 3),
        "y_test": np.array([1, 0, 0, 1]),
    }
    return {key: value for key, value in (all_of_them | changes).items() if value is not None}


def write(folder: Path, **changes: Any) -> Path:
    np.savez(folder / "mine.npz", **arrays(**changes))
    return folder / "mine.npz"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def as_tensor(images: np.ndarray) -> Tensor:
    """Channels last to channels first, on the CPU."""
    return torch.from_numpy(images if images.ndim == 4 else images[..., None]).permute(0, 3, 1, 2)


def check_form(images: data.ImageSet) -> None:
    for x, y in zip((images.train, images.test), images.labels, strict=True):
        assert x.dtype == torch.uint8
        assert x.is_contiguous()
        assert x.shape == (len(y), *images.shape)
        assert y.dtype == torch.int64
        assert y.is_contiguous()
        assert x.device == y.device == torch.device("cpu")


# Digits ---------------------------------------------------------------------------------------------------------------


def test_digits() -> None:
    images = data.load("digits")
    check_form(images)
    assert (images.name, images.title, images.shape, images.classes) == ("digits", "digits", (1, 8, 8), 10)
    assert (len(images.train), len(images.test)) == (1400, 397)
    assert (images.train.min(), images.train.max()) == (0, 255)
    assert len(images.train.unique()) == 17


def test_digits_are_those_of_scikit_learn() -> None:
    images = data.load("digits")
    values, labels = (t.cpu() for t in data.digits())
    every = torch.cat([images.train, images.test]).double() / 255
    assert torch.equal(torch.cat([images.train_labels, images.test_labels]).bincount(), labels.bincount())
    # Each of them is there once: after rounding back to the 17 levels, rows agree as a collection.
    rows, expected = ((x * 16).round().flatten(1).tolist() for x in (every, values.double()))
    assert sorted(rows) == sorted(expected)


def test_the_test_digits_are_always_the_same() -> None:
    images = data.load("digits")
    torch.manual_seed(5)
    again = data.load("digits")
    assert torch.equal(images.test, again.test)
    assert torch.equal(images.train, again.train)
    # Figures of one machine can be compared with those of another only while this stays as it is.
    assert images.test_labels[:10].tolist() == [0, 6, 0, 3, 4, 0, 6, 0, 3, 5]


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"the digits come with scikit-learn: pip install 'misconv\[demo\]'"):
        data.load("digits")


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("image", [(5, 7), (5, 7, 1), (5, 7, 3), (1, 1, 16)])
def test_a_file_comes_back(tmp_path: Path, image: tuple[int, ...], compressed: bool) -> None:
    given = arrays(x_train=pixels(6, *image), x_test=pixels(4, *image))
    (np.savez_compressed if compressed else np.savez)(tmp_path / "mine.npz", **given)
    images = data.load("mine", tmp_path / "mine.npz")
    check_form(images)
    assert (images.name, images.title, images.classes) == ("mine", "mine", 2)
    assert images.shape == (image[2] if len(image) == 3 else 1, *image[:2])
    assert torch.equal(images.train, as_tensor(given["x_train"]))
    assert torch.equal(images.test, as_tensor(given["x_test"]))
    assert images.train_labels.tolist() == given["y_train"].tolist()
    assert images.test_labels.tolist() == given["y_test"].tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64", ">i4"])
def test_labels_of_any_integer_type(tmp_path: Path, dtype: str) -> None:
    file = write(tmp_path, y_train=np.array([0, 1, 7, 0, 1, 0], dtype), y_test=np.array([0, 1, 1, 0], dtype))
    images = data.load("mine", str(file))
    check_form(images)
    assert images.train_labels.tolist() == [0, 1, 7, 0, 1, 0]
    assert images.classes == 8


def test_grey_images_with_and_without_a_channel_axis_go_together(tmp_path: Path) -> None:
    assert data.load("mine", write(tmp_path, x_train=pixels(6, 5, 7), x_test=pixels(4, 5, 7, 1))).shape == (1, 5, 7)


def test_order_of_memory_does_not_matter(tmp_path: Path) -> None:
    x = pixels(6, 5, 7, 3)
    images = data.load("mine", write(tmp_path, x_train=np.asfortranarray(x)))
    check_form(images)
    assert torch.equal(images.train, as_tensor(x))


def test_who_says_the_title(tmp_path: Path) -> None:
    file = write(tmp_path)
    assert data.load("mnist", file).title == "MNIST"
    assert data.load("my-own_2", file).title == "my-own_2"
    assert data.load("mnist", file, title="Mine").title == "Mine"
    assert data.load("digits", title="Ziffern").title == "Ziffern"
    file = write(tmp_path, title=np.array("House numbers"))
    assert data.load("svhn", file).title == "House numbers"
    assert data.load("svhn", file, title="Mine").title == "Mine"
    with pytest.raises(ValueError, match="title must be one line that can be printed, got 'a.nb'"):
        data.load("svhn", file, title="a\nb")


def test_images_without_labels(tmp_path: Path) -> None:
    images = data.load("faces", write(tmp_path, y_train=None, y_test=None))
    assert (images.train.shape, images.test.shape) == ((6, 3, 5, 7), (4, 3, 5, 7))
    assert images.train_labels is None
    assert images.test_labels is None
    message = "faces must have labels, y_train and y_test, to train a classifier, got images alone"
    with pytest.raises(ValueError, match=message):
        images.labels  # noqa: B018  # asking is enough
    with pytest.raises(ValueError, match=message):
        images.classes  # noqa: B018


def test_a_file_of_another_name_will_do(tmp_path: Path) -> None:
    assert data.load("mine", write(tmp_path).rename(tmp_path / "mine")).classes == 2


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write(tmp_path)
    assert data.load("mine", "~/mine.npz").classes == 2


BAD_ARRAYS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "labels of one part": (
        {"y_test": None},
        ValueError,
        r"file must hold the images x_train and x_test, and where they have labels both y_train and y_test, got .*mine.npz without y_test$",
    ),
    "no test": ({"x_test": None}, ValueError, r"got .*mine.npz without x_test$"),
    "floats": (
        {"x_train": np.zeros((6, 5, 7, 3), np.float32)},
        TypeError,
        r"x_train of mine.npz must hold images as bytes, uint8 from 0 to 255, got a float32 array of shape \(6, 5, 7, 3\)",
    ),
    "wide integers": (
        {"x_test": np.zeros((4, 5, 7, 3), int)},
        TypeError,
        r"x_test of .* as bytes, .* got a int64 array",
    ),
    "flat images": (
        {"x_train": pixels(6, 35)},
        ValueError,
        r"x_train of mine.npz must have shape \(N, H, W\) or \(N, H, W, C\) with no empty dimension, got a uint8 array of shape \(6, 35\)",
    ),
    "films": (
        {"x_test": pixels(4, 2, 5, 7, 3)},
        ValueError,
        r"x_test of mine.npz must have shape .* \(4, 2, 5, 7, 3\)",
    ),
    "nothing to train on": (
        {"x_train": pixels(0, 5, 7, 3), "y_train": np.zeros(0, int)},
        ValueError,
        r"x_train of .* no empty dimension, got a uint8 array of shape \(0, 5, 7, 3\)",
    ),
    "nothing to test": (
        {"x_test": pixels(0, 5, 7, 3), "y_test": np.zeros(0, int)},
        ValueError,
        r"x_test of .* no empty dimension, .* \(0, 5, 7, 3\)",
    ),
    "no channels": ({"x_train": pixels(6, 5, 7, 0)}, ValueError, r"no empty dimension, .* \(6, 5, 7, 0\)"),
    "channels first": (
        {"x_train": pixels(6, 3, 32, 32)},
        ValueError,
        r"x_train of mine.npz must have 1 to 16 channels, on its last axis: \(N, H, W, C\), got a uint8 array of shape \(6, 3, 32, 32\)",
    ),
    "channels of small squares first": (
        {"x_train": pixels(6, 1, 8, 8)},
        ValueError,
        r"x_train of mine.npz must have 1 to 16 channels, on its last axis: .* of shape \(6, 1, 8, 8\)",
    ),
    "two shapes": (
        {"x_test": pixels(4, 7, 5, 3)},
        ValueError,
        r"x_train and x_test of mine.npz must hold images of one shape, got shapes \(6, 5, 7, 3\) and \(4, 7, 5, 3\)",
    ),
    "grey and colour": (
        {"x_test": pixels(4, 5, 7)},
        ValueError,
        r"of one shape, got shapes \(6, 5, 7, 3\) and \(4, 5, 7\)",
    ),
    "labels of a fraction": (
        {"y_train": np.zeros(6)},
        TypeError,
        r"y_train of mine.npz must hold labels as integers, got a float64 array of shape \(6,\)",
    ),
    "labels in words": (
        {"y_test": np.array(["cat"] * 4)},
        TypeError,
        r"y_test of mine.npz must hold labels as integers",
    ),
    "truths": (
        {"y_train": np.zeros(6, bool)},
        TypeError,
        r"y_train of mine.npz must hold labels as integers, got a bool",
    ),
    "too few labels": (
        {"y_train": np.arange(5)},
        ValueError,
        r"y_train of mine.npz must hold one label for each image, shape \(6,\), got a int64 array of shape \(5,\)",
    ),
    "labels in a column": (
        {"y_test": np.zeros((4, 1), int)},
        ValueError,
        r"y_test of .* shape \(4,\), got .* \(4, 1\)",
    ),
    "negative": (
        {"y_train": np.array([0, 1, -1, 0, 1, 0])},
        ValueError,
        r"y_train of mine.npz must hold labels from 0 to 65535, got -1$",
    ),
    "too large": (
        {"y_test": np.array([0, 1, 2**63, 0], "uint64")},
        ValueError,
        r"y_test of .* got 9223372036854775808$",
    ),
    "unseen labels": (
        {"y_test": np.array([0, 5, 3, 3])},
        ValueError,
        r"y_test of mine.npz must hold only labels that occur in y_train, got also 3, 5$",
    ),
    "one class": (
        {"y_train": np.full(6, 4), "y_test": np.full(4, 4)},
        ValueError,
        r"y_train of mine.npz must hold at least two classes, got the label 4 alone",
    ),
    "two titles": (
        {"title": np.array(["a", "b"])},
        TypeError,
        r"title of mine.npz must be a string, got a <U1 numpy array of shape \(2,\)",
    ),
    "no title": ({"title": np.array(" ")}, ValueError, r"title of mine.npz must not be empty, got ' '"),
    "a pickle": (
        {"y_train": np.array([0, 1, 1, 0, 1, None])},
        ValueError,
        r"file must be an .npz that can be read, got .*mine.npz: Object arrays cannot be loaded when allow_pickle=False",
    ),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(tmp_path: Path, case: str) -> None:
    changes, kind, message = BAD_ARRAYS[case]
    file = write(tmp_path, **changes)
    before = content(tmp_path)
    with pytest.raises(kind, match=message):
        data.load("mine", file)
    assert content(tmp_path) == before


def test_many_unseen_labels_are_not_all_told(tmp_path: Path) -> None:
    file = write(tmp_path, x_test=pixels(9, 5, 7, 3), y_test=np.arange(9))
    with pytest.raises(ValueError, match="got also 2, 3, 4, 5, 6, …$"):
        data.load("mine", file)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"file must be an .npz file, got .*away.npz, and there is no such file"
    ):
        data.load("mine", tmp_path / "away.npz")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        data.load("mine", tmp_path)
    np.save(tmp_path / "one.npy", pixels(6, 5, 7))
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.npz").write_text("PK, but only in words")
    for name in ("one.npy", "empty.npz", "text.npz"):
        with pytest.raises(
            ValueError, match=rf"file must be an .npz as numpy.savez writes it, got .*{name}, which is none"
        ):
            data.load("mine", tmp_path / name)


def test_damaged_files(tmp_path: Path) -> None:
    file = write(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"file must be an .npz .*mine.npz, which is none or is damaged"):
        data.load("mine", file)
    # One byte of a picture is another one: the sum that the archive keeps of it tells.
    start = whole.index(b"NUMPY") + 200
    file.write_bytes(whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :])
    with pytest.raises(ValueError, match=r"file must be an .npz that can be read, got .*mine.npz: Bad CRC-32"):
        data.load("mine", file)


def test_archives_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "other.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x_train", b"not an array")
    with pytest.raises(ValueError, match="without x_train and x_test"):
        data.load("mine", file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00 but no more")
    with pytest.raises(ValueError, match=r"file must be an .npz that can be read, got .*other.npz"):
        data.load("mine", file)


def test_bad_names_and_options(tmp_path: Path) -> None:
    file = write(tmp_path)
    with pytest.raises(
        ValueError, match="name must be one of digits, mnist, svhn, cifar10, or come with a file, got 'fashion'"
    ):
        data.load("fashion")
    with pytest.raises(TypeError, match=r"name must be a string, got 3 \(int\)"):
        data.load(3)
    for name in ("", "a/b", "two words", "..", "mine\n"):
        with pytest.raises(ValueError, match='name must consist of letters, digits, "-" and "_", got '):
            data.load(name, file)
    with pytest.raises(TypeError, match=r"file must be a path, got 3 \(int\)"):
        data.load("mine", 3)
    with pytest.raises(TypeError, match=r"folder must be a path, got 3 \(int\)"):
        data.load("mnist", folder=3)
    with pytest.raises(TypeError, match=r"title must be a string, got 3 \(int\)"):
        data.load("mine", file, title=3)
    with pytest.raises(ValueError, match="title must not be empty, got ''"):
        data.load("mine", file, title="")


# torchvision, without a network ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)


def write_mnist(folder: Path) -> dict[str, np.ndarray]:
    """A few pictures in the format of MNIST, where torchvision looks for them."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    given = {"train": pixels(6, 28, 28), "t10k": pixels(4, 28, 28)}
    for part, images in given.items():
        head = struct.pack(">4i", 0x803, *images.shape)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = np.arange(len(images), dtype=np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, len(labels)) + labels.tobytes())
    return given


@pytest.mark.parametrize("download", [False, True])
def test_mnist(tmp_path: Path, download: bool) -> None:
    given = write_mnist(tmp_path)
    before = content(tmp_path)
    images = data.load("mnist", folder=tmp_path, download=download)
    check_form(images)
    assert (images.name, images.title, images.shape, images.classes) == ("mnist", "MNIST", (1, 28, 28), 6)
    assert torch.equal(images.train, as_tensor(given["train"]))
    assert torch.equal(images.test, as_tensor(given["t10k"]))
    assert images.test_labels.tolist() == [0, 1, 2, 3]
    assert content(tmp_path) == before


class Internet:
    """Stands for a class of torchvision.datasets: `download` puts a file into the folder, the rest needs it there."""

    def __init__(self, name: str) -> None:
        self.svhn = name == "SVHN"
        self.parts = {"train": pixels(6, 32, 32, 3), "test": pixels(4, 32, 32, 3)}
        self.downloads = 0

    def __call__(
        self, root: str, *, train: bool | None = None, split: str | None = None, download: bool = False
    ) -> SimpleNamespace:
        part = split if self.svhn else ("train" if train else "test")
        assert part is not None
        file = Path(root) / "files" / part
        if download and not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.touch()
            self.downloads += 1
        if not file.exists():
            raise RuntimeError("Dataset not found or corrupted. You can use download=True to download it")
        images = self.parts[part]
        labels = np.arange(len(images)) % 3
        if self.svhn:
            return SimpleNamespace(data=images.transpose(0, 3, 1, 2), labels=labels)
        return SimpleNamespace(data=images, targets=labels.tolist())


@pytest.mark.parametrize(("name", "kind", "title"), [("svhn", "SVHN", "SVHN"), ("cifar10", "CIFAR10", "CIFAR-10")])
def test_what_is_downloaded_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, title: str
) -> None:
    internet = Internet(kind)
    monkeypatch.setattr(datasets, kind, internet)
    for _ in range(2):
        images = data.load(name, folder=tmp_path / "new" / "folder")
        check_form(images)
        assert (images.name, images.title, images.shape, images.classes) == (name, title, (3, 32, 32), 3)
        assert torch.equal(images.train, as_tensor(internet.parts["train"]))
        assert torch.equal(images.test, as_tensor(internet.parts["test"]))
    assert internet.downloads == 2  # a file for each part, once
    assert set(content(tmp_path)) == {"new/folder/files/train", "new/folder/files/test"}


def test_a_shared_folder_stays_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "CIFAR10", Internet("CIFAR10"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine").write_text("kept")
    for folder in (tmp_path, tmp_path / "files"):
        folder.chmod(0o775)
    data.load("cifar10", folder=tmp_path)
    assert [folder.stat().st_mode & 0o777 for folder in (tmp_path, tmp_path / "files")] == [0o775, 0o775]
    assert content(tmp_path) == {"files/mine": b"kept", "files/train": b"", "files/test": b""}


def test_a_full_disk_leaves_no_half_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(source: Path, target: Path) -> None:
        target.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(datasets, "CIFAR10", Internet("CIFAR10"))
    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(OSError, match="No space left on device"):
        data.load("cifar10", folder=tmp_path)
    assert content(tmp_path) == {}


def test_the_usual_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_mnist(tmp_path / ".cache" / "misconv")
    assert data.load("mnist", download=False).title == "MNIST"


@pytest.mark.parametrize(("name", "title"), [("mnist", "MNIST"), ("svhn", "SVHN"), ("cifar10", "CIFAR-10")])
def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, title: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError) as caught:
        data.load(name, folder=tmp_path / "new")
    assert str(caught.value) == (
        f"no complete {title} in {tmp_path / 'new'}, and it cannot be downloaded, for this machine seems to have no "
        "network (<urlopen error Name or service not known>); give it as a file, --data FILE, an .npz with the arrays "
        "x_train, y_train, x_test, y_test"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("a\nb"), OSError("b"), EOFError("b"), ValueError("b")])
def test_whatever_stops_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(root: str, *, train: bool, download: bool) -> None:
        (Path(root) / "half").touch() if download else None
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(datasets, "CIFAR10", fail)
    with pytest.raises(FileNotFoundError, match=r"seems to have no network \(b\); give it as a file, --data FILE"):
        data.load("cifar10", folder=tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_nothing_is_downloaded_unasked(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError,
        match="no complete MNIST in .*new, and it was not to be downloaded; give it as a file, --data FILE, an .npz with",
    ):
        data.load("mnist", folder=tmp_path / "new", download=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rest", [0, 3, 10, 500])
def test_a_damaged_download(tmp_path: Path, rest: int) -> None:
    write_mnist(tmp_path)
    file = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:rest])
    before = content(tmp_path)
    for download, reason in ((False, "was not to be downloaded"), (True, "cannot be downloaded")):
        with pytest.raises(FileNotFoundError, match=f"no complete MNIST in .*, and it {reason}"):
            data.load("mnist", folder=tmp_path, download=download)
    assert content(tmp_path) == before


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    internet = Internet("CIFAR10")
    monkeypatch.setattr(datasets, "CIFAR10", internet)
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="folder must be a directory that can be written to, got .*file"):
        data.load("cifar10", folder=tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="folder must be a directory that can be written to, got .*new"):
        data.load("cifar10", folder=tmp_path / "new")
    assert internet.downloads == 0


def test_without_torchvision_or_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setattr(data, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"SVHN is read by SciPy, .*: pip install 'misconv\[demo\]'"):
            data.load("svhn", folder=tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    for name, title in (("mnist", "MNIST"), ("svhn", "SVHN"), ("cifar10", "CIFAR-10")):
        with pytest.raises(ImportError, match=rf"{title} comes through torchvision: pip install 'misconv\[vision\]'"):
            data.load(name, folder=tmp_path)
    assert data.load("mine", write(tmp_path)).classes == 2  # a file needs none of them


@pytest.mark.parametrize("name", ["file", "folder"])
@pytest.mark.parametrize("value", [pytest.param("x" * 5000, id="long"), "~nobody-of-this-name/x"])
def test_a_path_that_cannot_be_looked_up(name: str, value: str) -> None:
    arguments: dict[str, Any] = {"name": "mnist", name: value}
    with pytest.raises(ValueError, match=f"{name} must be a path that can be looked up, got") as caught:
        data.load(**arguments, download=False)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [None, 0, "yes", torch.ones(2)])
def test_download_is_yes_or_no(value: Any) -> None:
    with pytest.raises(TypeError, match="download must be True or False, got"):
        data.load("digits", download=value)
