"""The images that can be looked at: digits, crops of photographs, and images of one's own, at a working size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from misconv._files import StoredImage, read_image, read_shape
from misconv.app.models import held_out_digits, held_out_photographs

__all__ = ["SUFFIXES", "Picture", "Units", "digit", "photograph", "read_picture"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".npy")  # no .npz: it may unpack to any size
LONGEST_SIDE = 192  # of what is shown and computed on; a larger image is reduced
CROP = 96  # the side of a crop of a photograph
MOST_PIXELS = 40_000_000
MOST_NUMBERS = 160_000_000  # pixels times bands
MOST_BANDS = 64


@dataclass(frozen=True)
class Units:
    """Which numbers of a file are called 0 and 1 on the page."""

    low: float = 0.0
    high: float = 1.0

    @property
    def step(self) -> float:
        """One unit of the page, in those of the file."""
        return self.high - self.low


@dataclass(frozen=True)
class Picture:
    """An image at its working size: values (C, H, W), about 0 to 1, and where they are known, bool (C, H, W)."""

    title: str
    values: Tensor
    known: Tensor
    label: int | None = None  # the digit that it is, if it is one
    is_digit: bool = False
    file: Path | None = None  # of an image of one's own, in which all of its pixels are
    units: Units = Units()
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return int(self.values.shape[1]), int(self.values.shape[2])


def digit(number: int) -> Picture:
    """A digit that no model has seen; the numbers go round and round."""
    images, labels = held_out_digits()
    place = number % len(images)
    label = int(labels[place])
    return Picture(f"A handwritten {label}, 8 × 8 pixels", *_complete(images[place]), label=label, is_digit=True)


def photograph(number: int) -> Picture:
    """A square of the half of a photograph that no model has seen."""
    halves = held_out_photographs()
    half, turn = halves[number % len(halves)], number // len(halves)
    crops = half.unfold(1, CROP, CROP // 2).unfold(2, CROP, CROP // 2).flatten(1, 2).transpose(0, 1)  # (N, 3, H, W)
    order = crops.flatten(1).var(1).argsort(descending=True, stable=True)  # what has most to see comes first
    crop = crops[order[turn % len(crops)]]
    name = ("pagoda", "dahlia")[number % len(halves)]
    return Picture(f"A part of a photograph ({name}), {CROP} × {CROP} pixels", *_complete(crop))


def _complete(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.contiguous(), torch.ones_like(values, dtype=torch.bool)


# Images of one's own -------------------------------------------------------------------------------------------------


def read_picture(path: Path) -> Picture:
    """An image of one's own, reduced to the working size.

    Raises:
        ValueError: it cannot be read, is too large or holds something else; the message says so on one line.
    """
    _check(path)
    image = read_image(path)
    values, known = _reduce(image)
    if not known.any():
        raise ValueError(f"{path.name} has no pixel that was seen")
    units = _units(image, values, known)
    scaled = ((values - units.low) / units.step).where(known, 0)
    bands, height, width = image.shape
    title = f"{path.name}: {width} × {height} pixels, {_counted(bands)} of {image.values.dtype}"
    return Picture(
        title, scaled.float(), known, file=path, units=units, notes=tuple(_notes(image, values, units, known))
    )


def _check(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path.name} must end in one of {', '.join(SUFFIXES)}")
    bands, height, width = _array_shape(path) if path.suffix.lower() == ".npy" else read_shape(path)
    if height * width > MOST_PIXELS or bands * height * width > MOST_NUMBERS or bands > MOST_BANDS:
        raise ValueError(
            f"{path.name} must have at most {MOST_PIXELS // 10**6} million pixels, {MOST_BANDS} bands and "
            f"{MOST_NUMBERS // 10**6} million numbers, got {width} × {height} pixels of {_counted(bands)}"
        )


def _array_shape(path: Path) -> tuple[int, int, int]:
    """From the head of the file alone, and only if the file is as long as its head says."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        shape = found.shape
    except Exception as error:  # numpy has many for a damaged file
        raise ValueError(f"{path.name} is no array that can be read: {str(error).splitlines()[0][:200]}") from error
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"{path.name} must hold one image, (H, W), (C, H, W) or (H, W, C), got shape {shape}")
    first = len(shape) == 3 and shape[0] <= shape[-1]
    return (1, *shape) if len(shape) == 2 else shape if first else (shape[2], shape[0], shape[1])


def _reduce(image: StoredImage) -> tuple[Tensor, Tensor]:
    """Averages of the known pixels of each block, float64 (C, H, W), and blocks of which at least half is known."""
    _, height, width = image.shape
    share = min(1.0, LONGEST_SIDE / max(height, width))
    size = max(1, round(height * share)), max(1, round(width * share))
    found = [_reduce_band(*band, size) for band in zip(image.values, _seen(image), strict=True)]
    values, known = (torch.stack(parts) for parts in zip(*found, strict=True))
    if not bool(values.isfinite().all()):
        raise ValueError(f"{image.path.name} must hold numbers below 1e300")
    return values, known


def _seen(image: StoredImage) -> NDArray[Any]:
    return np.broadcast_to(image.observed, image.values.shape)


def _reduce_band(band: NDArray[Any], seen: NDArray[Any], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    values = torch.from_numpy(np.where(seen, band, 0).astype(np.float64))
    weight = torch.from_numpy(seen.astype(np.float32))
    if values.shape == size:
        return values, weight > 0
    total = F.adaptive_avg_pool2d(values[None], size)[0]
    part = F.adaptive_avg_pool2d(weight[None], size)[0].double()
    return torch.where(part > 0, total / part.clamp_min(1e-12), 0), part >= 0.5


def _units(image: StoredImage, values: Tensor, known: Tensor) -> Units:
    """Bytes go from 0 to 255, shares from 0 to 1; of anything else the page shows the range that it has."""
    kind = image.values.dtype
    if kind == np.uint8:
        return Units(0.0, 255.0)
    seen = values[known]
    low, high = float(seen.min()), float(seen.max())
    if kind.kind == "b" or (kind.kind == "f" and low >= 0 and high <= 1):
        return Units()
    ends = torch.tensor([0.005, 0.995], dtype=torch.float64)
    low, high = torch.quantile(seen.flatten()[:: max(1, seen.numel() // 1_000_000)], ends).tolist()
    return Units(low, high if high > low else low + max(1.0, abs(low)))


def _notes(image: StoredImage, values: Tensor, units: Units, known: Tensor) -> list[str]:
    bands, height, width = image.shape
    rows, columns = values.shape[1:]
    notes = []
    if (rows, columns) != (height, width):
        notes.append(
            f"It is shown and computed at {columns} × {rows} pixels. The download has all {width} × {height} of them."
        )
    if bands not in (1, 3):
        shown = "band 1 is shown" if bands == 2 else "bands 1, 2 and 3 are shown as red, green and blue"
        notes.append(f"It has {bands} bands: {shown}, and each is filled by itself.")
    if units != Units() and image.values.dtype != np.uint8:
        notes.append(f"0 on this page is {units.low:.6g} in the file, 1 is {units.high:.6g}.")
    if not bool(known.all()):
        notes.append("Some pixels are missing in the file itself. Nobody knows the truth there.")
    notes.append("The density has learned from two photographs. The less your image is like them, the less it knows.")
    return notes


def _counted(bands: int) -> str:
    return "1 band" if bands == 1 else f"{bands} bands"
