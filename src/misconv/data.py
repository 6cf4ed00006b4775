"""Images to work with: digits and photographs of scikit-learn, public data sets, and files of one's own."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from misconv._checks import describe
from misconv._files import FoundFile, ImageFiles, find_files, labels_of

__all__ = ["NAMES", "ImageFiles", "ImageSet", "digits", "images", "load", "photographs"]

Array: TypeAlias = NDArray[Any]

NAMES = ("digits", "mnist", "svhn", "cifar10")
"""The data sets that need no file."""

_TITLES = {"digits": "digits", "mnist": "MNIST", "svhn": "SVHN", "cifar10": "CIFAR-10"}
_CLASSES = {"mnist": "MNIST", "svhn": "SVHN", "cifar10": "CIFAR10"}  # as torchvision.datasets calls them
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_IMAGES, _LABELS = _ARRAYS[::2], _ARRAYS[1::2]
_MOST_CHANNELS = 16
_MOST_CLASSES = 2**16  # a larger label is no class but a number of something else


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of scikit-learn: images (N, 1, 8, 8) between 0 and 1, and labels (N,).

    Example:
        >>> images, labels = digits()
        >>> images.shape, labels.shape
        (torch.Size([1797, 1, 8, 8]), torch.Size([1797]))
    """
    values, labels = _sklearn_digits()
    return torch.as_tensor(values / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.as_tensor(labels)


def _sklearn_digits() -> tuple[Array, Array]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'misconv[demo]'") from error
    values, labels = load_digits(return_X_y=True)
    return values, labels


def photographs() -> list[Tensor]:
    """The two photographs of scikit-learn, a pagoda and a dahlia: images (3, 427, 640) between 0 and 1.

    Example:
        >>> [tuple(image.shape) for image in photographs()]
        [(3, 427, 640), (3, 427, 640)]
    """
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise ImportError("the photographs come with scikit-learn: pip install 'misconv[demo]'") from error
    found = load_sample_images().images  # (H, W, 3) each, uint8
    return [torch.as_tensor(image / 255, dtype=torch.float32).permute(2, 0, 1).contiguous() for image in found]


def images(
    sources: str | Path | Iterable[str | Path],
    *,
    nodata: float | None = None,
    masks: str | Path | None = None,
    hole_is: str = "white",
    bands: Sequence[str] = (),
    transform: Callable[[Any], Any] | None = None,
    labels: str | Path | None = None,
) -> ImageFiles:
    """Image files as a Dataset of float32 tensors (C, H, W) in their own units, NaN where they are missing.

    PNG, JPEG, WebP, BMP, TIFF, GeoTIFF, .npy and .npz; a byte stays between 0 and 255. Missing are pixels that are NaN
    or wholly transparent, that hold the file's own nodata value or `nodata`, that the mask of a GeoTIFF or a picture in
    `masks` declares missing. Files are read when they are asked for. `fit_density`, `assess` and a DataLoader take it.

    Args:
        sources: a file, a folder (searched to the bottom), a pattern such as ``"scans/*.png"``, or a list of these.
        nodata: a number that stands for "no reading", compared before anything else is done.
        masks: a folder with a picture of the same name for every file, or one picture for all of them.
        hole_is: what a hole is in `masks`, "white" or "black".
        bands: where each band is a file of its own, the words by which their names differ, such as ("B02", "B03"), in
            the order of the channels; a word may also be a folder. A band without a file is missing as a whole.
        transform: what is done to every image, for example by torchvision's v2; it is given a `transforms.Incomplete`.
        labels: "folders", if files of a class are in a folder of its name, or a CSV file of names and classes. Then
            items are pairs (image, number of the class), as `fit_classifier` takes them, and `classes` are the names.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> np.save(folder.name + "/depth.npy", np.array([[1.5, 0.0], [2.0, 2.5]]))
        >>> images(folder.name, nodata=0)[0]
        tensor([[[1.5000,    nan],
                 [2.0000, 2.5000]]])
        >>> folder.cleanup()
    """
    place = None if masks is None else _path("masks", masks)
    if isinstance(bands, str) or not all(isinstance(band, str) for band in bands):
        raise TypeError(f"bands must be a list of words, got {describe(bands)}")
    if transform is not None and not callable(transform):
        raise TypeError(f"transform must be a function of an image, got {describe(transform)}")
    files = find_files(sources, tuple(bands))
    classes = None if labels is None else _classes_of(files, labels)
    change = None if transform is None else _OnIncomplete(transform)
    return ImageFiles(files, nodata, place, hole_is, change, classes)


def _classes_of(files: list[FoundFile], labels: str | Path) -> list[str]:
    table = None if labels == "folders" else _path("labels", labels)
    found = labels_of(files, table)
    if None in found:
        where = "in a folder of its class" if table is None else f"named in {table.name}"
        raise ValueError(f"every file must be {where}, but {files[found.index(None)].text} is not")
    return [label for label in found if label is not None]


class _OnIncomplete:
    """A transform of torchvision that is given images it knows to be incomplete; workers must be able to copy it."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, image: Tensor) -> Any:
        from misconv.transforms import Incomplete

        changed = self.transform(Incomplete(image))
        return changed.as_subclass(Tensor) if isinstance(changed, Tensor) else changed


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A data set as bytes on the CPU, in a part for training and a part for the test.

    Images are uint8 (N, C, H, W), labels int64 (N,), or None of images without any. `name` is short, for files and
    options; `title` is what tables call the data set.

    Example:
        >>> images = load("digits")
        >>> images.name, images.shape, images.classes
        ('digits', (1, 8, 8), 10)
        >>> images.train.shape, images.test_labels.shape
        (torch.Size([1400, 1, 8, 8]), torch.Size([397]))
    """

    name: str
    title: str
    train: Tensor
    train_labels: Tensor | None
    test: Tensor
    test_labels: Tensor | None

    @property
    def labels(self) -> tuple[Tensor, Tensor]:
        """Of training and test images; a ValueError where there are none."""
        if self.train_labels is None or self.test_labels is None:
            raise ValueError(
                f"{self.name} must have labels, y_train and y_test, to train a classifier, got images alone"
            )
        return self.train_labels, self.test_labels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        _, channels, height, width = self.train.shape
        return channels, height, width

    @property
    def classes(self) -> int:
        """The number of classes: the largest label, and one for zero."""
        return int(max(labels.max() for labels in self.labels)) + 1


def load(
    name: str,
    file: str | Path | None = None,
    *,
    title: str | None = None,
    folder: str | Path | None = None,
    download: bool = True,
) -> ImageSet:
    """Load a data set: one of `NAMES`, or any other from a file.

    The digits ship with scikit-learn; 397 of them, always the same, are the test. MNIST, SVHN and CIFAR-10 come
    through torchvision, which downloads them once. A call that fails leaves nothing behind.

    Args:
        name: one of `NAMES`; with a file any name of letters, digits, "-" and "_".
        file: an .npz with the arrays ``x_train`` and ``x_test``, images uint8 (N, H, W) or (N, H, W, C) of up to 16
            channels, and ``y_train`` and ``y_test``, labels (N,) that count from 0, or no labels. It may hold a string
            ``title`` too.
        title: what tables call the data set. By default what the file says, else the usual title, else `name`.
        folder: where torchvision keeps its files, by default ``~/.cache/misconv``.
        download: whether torchvision may download what is not in the folder.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> x, y = np.zeros((6, 32, 32, 3), np.uint8), np.arange(6) % 2
        >>> np.savez(folder.name + "/photos.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
        >>> photos = load("photos", folder.name + "/photos.npz", title="Two kinds of photos")
        >>> photos.title, photos.shape, photos.classes
        ('Two kinds of photos', (3, 32, 32), 2)
        >>> folder.cleanup()
    """
    _check_name(name, known=file is None)
    if title is not None:
        _check_title("title", title)
    if not isinstance(download, bool):
        raise TypeError(f"download must be True or False, got {describe(download)}")
    usual = _TITLES.get(name, name)
    if file is not None:
        path = _path("file", file)
        arrays, written = _read_npz(path)
        return _image_set(name, title or written or usual, arrays, path.name)
    if name == "digits":
        return _image_set(name, title or usual, _split_digits(), usual)
    where = Path("~/.cache/misconv") if folder is None else _path("folder", folder)
    return _image_set(name, title or usual, _fetch(name, where.expanduser(), download), usual)


def _check_name(name: str, *, known: bool) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {describe(name)}")
    if known and name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, or come with a file, got {name!r}")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f'name must consist of letters, digits, "-" and "_", got {name!r}')


def _check_title(name: str, title: object) -> None:
    if not isinstance(title, str):
        raise TypeError(f"{name} must be a string, got {describe(title)}")
    if not title.strip():
        raise ValueError(f"{name} must not be empty, got {title!r}")
    if not title.isprintable():
        raise ValueError(f"{name} must be one line that can be printed, got {title!r}")


def _path(name: str, value: str | Path) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {describe(value)}")
    try:
        path = Path(value).expanduser()
        path.exists()  # a name may be too long, or nobody's home
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{name} must be a path that can be looked up, got {str(value)[:60]!r}: {reason}") from error
    return path


# Where arrays come from: images (N, H, W) or (N, H, W, C) and labels (N,), under the names of _ARRAYS -----------------


def _split_digits() -> dict[str, Array]:
    values, labels = _sklearn_digits()
    images = np.rint(values * 255 / 16).astype(np.uint8).reshape(-1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator("cpu").manual_seed(0), device="cpu").numpy()
    train, test = order[:-397], order[-397:]
    return {"x_train": images[train], "y_train": labels[train], "x_test": images[test], "y_test": labels[test]}


def _read_npz(path: Path) -> tuple[dict[str, Array], str | None]:
    """The arrays of a file, four or without labels two, and the title where it has one."""
    if not path.is_file():
        raise FileNotFoundError(f"file must be an .npz file, got {path}, and there is no such file")
    with path.open("rb") as stream:
        if not zipfile.is_zipfile(stream):
            raise ValueError(f"file must be an .npz as numpy.savez writes it, got {path}, which is none or is damaged")
        stream.seek(0)
        try:
            with np.load(stream, allow_pickle=False) as archive:
                found = {key: archive[key] for key in (*_ARRAYS, "title") if key in archive}
        except Exception as error:  # zipfile, zlib and numpy each have their own for a damaged file
            raise ValueError(f"file must be an .npz that can be read, got {path}: {error}") from error
    there = {key for key in _ARRAYS if isinstance(found.get(key), np.ndarray)}
    needed = _ARRAYS if there & set(_LABELS) else _IMAGES  # labels of both parts, or of none
    lost = [key for key in needed if key not in there]
    if lost:
        raise ValueError(
            "file must hold the images x_train and x_test, and where they have labels both y_train and y_test, "
            f"got {path} without {' and '.join(lost)}"
        )
    title = _written_title(path, found.pop("title", None))
    return found, title


def _written_title(path: Path, title: Array | None) -> str | None:
    if title is None:
        return None
    plain = title.item() if isinstance(title, np.ndarray) and title.ndim == 0 else title
    _check_title(f"title of {path.name}", plain)
    return str(plain)


def _fetch(name: str, folder: Path, download: bool) -> dict[str, Array]:
    """Read torchvision's files; where there are none, download them elsewhere first and keep them only when whole."""
    _check_installed(name)
    try:
        return _read_torchvision(name, folder, download=False)
    except Exception as error:  # of a file that is missing or damaged, and there are many ways to be damaged
        if not download:
            raise _not_found(f"no complete {_TITLES[name]} in {folder}, and it was not to be downloaded") from error
    _check_writable(folder)
    with tempfile.TemporaryDirectory() as fresh:
        try:
            arrays = _read_torchvision(name, Path(fresh), download=True)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise _not_found(
                f"no complete {_TITLES[name]} in {folder}, and it cannot be downloaded, for this machine seems to have "
                f"no network ({reason})"
            ) from error
        _keep(Path(fresh), folder)
    return arrays


def _keep(fresh: Path, folder: Path) -> None:
    """Copy the files alone, each there whole or not at all: a folder may be shared, and keeps its permissions."""
    for path in (path for path in fresh.rglob("*") if path.is_file()):
        target = folder / path.relative_to(fresh)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            shutil.copyfile(path, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def _not_found(what: str) -> FileNotFoundError:
    return FileNotFoundError(f"{what}; give it as a file, --data FILE, an .npz with the arrays {', '.join(_ARRAYS)}")


def _check_installed(name: str) -> None:
    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{_TITLES[name]} comes through torchvision: pip install 'misconv[vision]'") from error
    if name == "svhn" and find_spec("scipy") is None:
        raise ImportError("SVHN is read by SciPy, which comes with scikit-learn: pip install 'misconv[demo]'")


def _check_writable(folder: Path) -> None:
    """Asked before a long download, not after it."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise PermissionError(f"folder must be a directory that can be written to, got {folder}")


def _read_torchvision(name: str, folder: Path, *, download: bool) -> dict[str, Array]:
    from torchvision import datasets

    arrays = {}
    for part in ("train", "test"):
        which = {"split": part} if name == "svhn" else {"train": part == "train"}
        found = getattr(datasets, _CLASSES[name])(str(folder), **which, download=download)
        images, labels = np.asarray(found.data), np.asarray(found.labels if name == "svhn" else found.targets)
        arrays[f"x_{part}"] = images.transpose(0, 2, 3, 1) if name == "svhn" else images
        arrays[f"y_{part}"] = labels
    return arrays


# What becomes of them -------------------------------------------------------------------------------------------------


def _image_set(name: str, title: str, arrays: dict[str, Array], source: str) -> ImageSet:
    train, test = (_images(f"{key} of {source}", arrays[key]) for key in ("x_train", "x_test"))
    if train.shape[1:] != test.shape[1:]:
        shapes = f"{arrays['x_train'].shape} and {arrays['x_test'].shape}"
        raise ValueError(f"x_train and x_test of {source} must hold images of one shape, got shapes {shapes}")
    if "y_train" not in arrays:
        return ImageSet(name, title, train, None, test, None)
    known = _labels(f"y_train of {source}", arrays["y_train"], len(train))
    asked = _labels(f"y_test of {source}", arrays["y_test"], len(test))
    _check_classes(source, known, asked)
    return ImageSet(name, title, train, torch.from_numpy(known), test, torch.from_numpy(asked))


def _images(name: str, images: Array) -> Tensor:
    """Checked, channels first."""
    if images.dtype != np.uint8:
        raise TypeError(f"{name} must hold images as bytes, uint8 from 0 to 255, got {_describe(images)}")
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise ValueError(
            f"{name} must have shape (N, H, W) or (N, H, W, C) with no empty dimension, got {_describe(images)}"
        )
    # Squares of 4 to 16 pixels whose channels come first would be taken for strips of that many channels.
    _, rows, columns, last = images.shape if images.ndim == 4 else (0, 0, 0, 1)
    if last > _MOST_CHANNELS or (rows in (1, 3) and rows < columns == last):
        raise ValueError(
            f"{name} must have 1 to {_MOST_CHANNELS} channels, on its last axis: (N, H, W, C), got {_describe(images)}"
        )
    full = images if images.ndim == 4 else images[..., None]
    return torch.from_numpy(np.ascontiguousarray(full.transpose(0, 3, 1, 2)))


def _labels(name: str, labels: Array, count: int) -> Array:
    if labels.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold labels as integers, got {_describe(labels)}")
    if labels.shape != (count,):
        raise ValueError(f"{name} must hold one label for each image, shape ({count},), got {_describe(labels)}")
    if labels.min() < 0 or labels.max() >= _MOST_CLASSES:
        bad = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"{name} must hold labels from 0 to {_MOST_CLASSES - 1}, got {bad}")
    return np.ascontiguousarray(labels, dtype=np.int64)


def _check_classes(source: str, known: Array, asked: Array) -> None:
    if len(np.unique(known)) < 2:
        raise ValueError(f"y_train of {source} must hold at least two classes, got the label {known[0]} alone")
    strange = np.setdiff1d(asked, known)
    if len(strange):
        shown = ", ".join(map(str, strange[:5])) + (", …" if len(strange) > 5 else "")
        raise ValueError(f"y_test of {source} must hold only labels that occur in y_train, got also {shown}")


def _describe(array: Array) -> str:
    return f"a {array.dtype} array of shape {array.shape}"
