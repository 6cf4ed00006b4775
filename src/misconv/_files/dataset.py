"""Image files as a Dataset: one NaN-coded tensor for each file, or for each crop of one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from misconv._files.bands import is_raster, open_file, read_file
from misconv._files.find import FoundFile, find_files
from misconv._files.image import Array, StoredImage, read_image

__all__ = ["Crops", "ImageFiles"]

_KEPT_BYTES = 2**27  # of images that squares are cut out of, in memory


class ImageFiles(Dataset[Any]):
    """Files as float32 images (C, H, W) in their own units, with NaN where they are missing.

    A file is read when it is asked for, so that there may be more of them than memory holds. Where files have labels,
    items are pairs of an image and the number of its class in `classes`.

    Args:
        files: as `find_files` gives them.
        nodata: a number that stands for "no reading", besides what the files say themselves.
        masks: a folder with a picture of the same name, of any kind, for each file; or one such picture for all.
        hole_is: what a hole is in these pictures, "white" or "black".
        transform: what is done to every image.
        labels: the class of every file.
    """

    def __init__(
        self,
        files: Sequence[FoundFile],
        nodata: float | None = None,
        masks: Path | None = None,
        hole_is: str = "white",
        transform: Callable[[Tensor], Any] | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        if hole_is not in ("white", "black"):
            raise ValueError(f'hole_is must be "white" or "black", got {hole_is!r}')
        self.files, self.nodata, self.hole_is = list(files), nodata, hole_is
        self.masks = None if masks is None else _Masks(masks)
        self.transform = transform
        self.classes = sorted(set(labels or ()))
        self.labels = None if labels is None else [self.classes.index(label) for label in labels]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        image = torch.from_numpy(self.stored(index).coded())
        found = image if self.transform is None else self.transform(image)
        return found if self.labels is None else (found, self.labels[index])

    def only(self, indices: Iterable[int]) -> ImageFiles:
        """The same with some of its files."""
        other, rows = copy.copy(self), list(indices)
        other.files = [self.files[row] for row in rows]
        other.labels = None if self.labels is None else [self.labels[row] for row in rows]
        return other

    @property
    def paths(self) -> list[Path]:
        """Where the images come from, in their order."""
        return [file.path for file in self.files]

    def path(self, index: int) -> Path:
        """Where an image comes from."""
        return self.files[index].path

    def stored(self, index: int) -> StoredImage:
        """The image as its file holds it."""
        file = self.files[index]
        image = read_file(file, self.nodata)
        if self.masks is None:
            return image
        return image.without(self.masks.holes(file, image.shape[1:], self.hole_is))


class _Masks:
    """Pictures of what is missing."""

    def __init__(self, source: Path) -> None:
        self.single = source if source.is_file() else None
        self.by_name = {} if self.single else {file.name.with_suffix(""): file.path for file in find_files(source)}

    def holes(self, file: FoundFile, size: tuple[int, ...], hole_is: str) -> Array:
        """Bool (H, W), True where a pixel is missing."""
        path = self.single or self.by_name.get(file.name.with_suffix(""))
        if path is None:
            raise ValueError(f"{file.name} has no mask: none is called {file.name.with_suffix('')}")
        mask = read_image(path)
        if mask.shape[1:] != tuple(size):
            raise ValueError(f"the mask of {file.name} must be {size[0]}×{size[1]} pixels, got {mask.shape[1:]}")
        lightest = np.iinfo(mask.values.dtype).max if mask.values.dtype.kind in "iu" else 1.0
        if mask.values.max() <= 1:  # 0 and 1 in bytes
            lightest = 1
        white: Array = np.asarray((mask.values.astype(np.float64) > lightest / 2).all(0))
        return white if hole_is == "white" else ~white


class Crops(Dataset[Tensor]):
    """Squares of all images, side by side: what a density learns from where images are large or of several sizes.

    Images that have been read stay in memory as far as there is room for them; TIFF files for which there is none are
    read window by window. An image that is smaller than a square is missing beyond its border.
    """

    def __init__(self, images: ImageFiles, side: int, shapes: Sequence[tuple[int, int, int]]) -> None:
        self.images, self.side = images, side
        self.places = [
            (index, y, x)
            for index, (_, height, width) in enumerate(shapes)
            for y in _starts(height, side)
            for x in _starts(width, side)
        ]
        self._kept = OrderedDict[int, Tensor]()  # the one that was used last is the last
        self._all_fit = sum(4 * bands * height * width for bands, height, width in shapes) <= _KEPT_BYTES

    def __len__(self) -> int:
        return len(self.places)

    def path(self, place: int) -> Path:
        """Where a square comes from."""
        return self.images.path(self.places[place][0])

    def __getitem__(self, place: int) -> Tensor:
        index, y, x = self.places[place]
        found = self._window(index, y, x)
        below, right = self.side - found.shape[-2], self.side - found.shape[-1]
        if not below and not right:
            return found
        return torch.nn.functional.pad(found, (0, right, 0, below), value=torch.nan)

    def _window(self, index: int, y: int, x: int) -> Tensor:
        rows, columns = slice(y, y + self.side), slice(x, x + self.side)
        file = self.images.files[index]
        if is_raster(file) and self.images.masks is None and not self._all_fit:
            with open_file(file, self.images.nodata) as opened:
                _, height, width = opened.shape
                window = slice(y, min(y + self.side, height)), slice(x, min(x + self.side, width))
                return torch.from_numpy(opened.read(window).coded())
        return self._image(index)[:, rows, columns].clone()

    def _image(self, index: int) -> Tensor:
        if index not in self._kept:
            image: Tensor = self.images[index]
            self._kept[index] = image
            while len(self._kept) > 1 and 4 * sum(kept.numel() for kept in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(index)
        return self._kept[index]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}


def _starts(length: int, side: int) -> list[int]:
    """Where squares begin that cover a length, with as little overlap as possible."""
    count = max(1, -(-length // side))
    return [round(number * max(length - side, 0) / max(count - 1, 1)) for number in range(count)]
