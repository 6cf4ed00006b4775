"""Files with their classes: which they are, and images of one size for a network."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from misconv._files import ImageFiles, labels_of
from misconv.images.outcome import Outcome, Say

__all__ = ["ImagesOfOneSize", "LabelledImages", "choose_size", "label_files", "resize_to", "split_by_class"]

_LARGEST = 256  # the side of images of one size that are taken as they are
_USUAL = 224  # the side to which others are brought
_MEMORY = 2**29  # bytes of images that are kept once they were read


def label_files(images: ImageFiles, table: Path | None, outcome: Outcome, say: Say) -> dict[int, str]:
    """The class of every file that has one, by its number; the others are told."""
    labels = labels_of(images.files, table)
    if not any(labels):
        where = "in a folder for each class, or have --labels" if table is None else f"named in {table.name}"
        raise ValueError(f"IMAGES must be {where}, got {len(labels)} files that are not")
    for index in [index for index, label in enumerate(labels) if label is None]:
        where = "is in no folder of a class" if table is None else f"is not named in {table.name}"
        outcome.fail(images.path(index), where, say)
    return {index: label for index, label in enumerate(labels) if label is not None}


def choose_size(shapes: Iterable[tuple[int, int, int]], side: int | None) -> tuple[int, int]:
    """Height and width of the images that a network reads: their own where they have one and it is not large."""
    sizes = {(height, width) for _, height, width in shapes}
    if side is not None:
        return side, side
    if len(sizes) == 1:
        size = next(iter(sizes))
        if max(size) <= _LARGEST:
            return size
    return _USUAL, _USUAL


def resize_to(x: Tensor, size: tuple[int, int]) -> Tensor:
    """An image (C, H, W) with NaN where it is missing, brought to a size: its middle, at the scale that fills it."""
    if tuple(x.shape[-2:]) == size:
        return x
    try:
        from torchvision.transforms.v2 import functional as F
    except ImportError as error:
        raise ImportError(
            "images of several sizes are resized by torchvision: pip install 'misconv[vision]'"
        ) from error
    from misconv.transforms import Incomplete

    scale = max(wanted / have for wanted, have in zip(size, x.shape[-2:], strict=True))
    scaled = [max(wanted, round(scale * have)) for wanted, have in zip(size, x.shape[-2:], strict=True)]
    resized = F.center_crop(F.resize(Incomplete(x), scaled, antialias=True), list(size))
    result: Tensor = resized.as_subclass(Tensor)
    return result


class ImagesOfOneSize(Dataset[Tensor]):
    """Files as images (C, H, W) of one size. One that cannot be read is told once, and counts as all missing."""

    def __init__(self, images: ImageFiles, size: tuple[int, int], channels: int, outcome: Outcome, say: Say) -> None:
        self.images, self.size, self.channels, self.outcome, self.say = images, size, channels, outcome, say
        self._kept: dict[int, Tensor] = {}
        self._most = _MEMORY // (4 * channels * size[0] * size[1])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        if index in self._kept:
            return self._kept[index]
        try:
            x = self.images[index]
            if len(x) != self.channels:
                raise ValueError(f"{self.images.path(index).name} must have {self.channels} bands, got {len(x)}")
            found = resize_to(x, self.size)
        except (ValueError, OSError) as error:
            self.outcome.fail(self.images.path(index), error, self.say)
            found = torch.full((self.channels, *self.size), torch.nan)
        if len(self._kept) < self._most:
            self._kept[index] = found
        return found


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Some of these images, each with the number of its class."""

    def __init__(self, images: ImagesOfOneSize, labels: Sequence[int], rows: Sequence[int]) -> None:
        self.images, self.labels, self.rows = images, labels, list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.rows[index]
        return self.images[row], self.labels[row]

    @property
    def largest_class(self) -> float:
        """The share of the class that has the most images."""
        counts = Counter(self.labels[row] for row in self.rows)
        return max(counts.values()) / len(self.rows)


def split_by_class(labels: Sequence[int], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of images to learn from and to judge by: the same share of every class, and never all of one."""
    by_class: dict[int, list[int]] = defaultdict(list)
    for number, label in enumerate(labels):
        by_class[label].append(number)
    draw, held = random.Random(seed), []
    for label in sorted(by_class):
        numbers = by_class[label]
        held += draw.sample(numbers, min(round(share * len(numbers)), len(numbers) - 1))
    kept = set(range(len(labels))) - set(held)
    return sorted(kept), sorted(held)
