"""What a density says of one image, in one piece or window by window."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from misconv._files.bands import open_file, write_windows
from misconv._files.find import FoundFile
from misconv._files.scene import Window

__all__ = ["LARGEST_PIECE", "Prediction", "fill_scene", "predict", "predict_batch", "reach_of"]

Floats: TypeAlias = NDArray[np.float32]
Density: TypeAlias = Callable[[Tensor, Tensor], Any]

LARGEST_PIECE = 1280  # the side of what is computed at once …
_NUMBERS = 6_300_000  # … or less, so that an image of many bands takes no more than about 2 GB
_GRID = 64  # windows begin at multiples of it, so that pyramids of halves are the same in all of them


class Prediction(NamedTuple):
    """Of a window: the mean and the standard deviation, (C, H, W); 0 where pixels were seen."""

    window: Window
    mean: Floats
    deviation: Floats


def reach_of(density: object) -> int:
    """How many pixels away a pixel may be that the density reads for another one; a bound, in multiples of 64."""
    patch, widths, depths = (getattr(density, name, None) for name in ("patch", "widths", "depths"))
    if patch is None or widths is None or depths is None:
        return 256
    steps = [2**level for level in range(len(widths))]
    convolutions = sum(step * depth for step, depth in zip(steps, depths, strict=True))
    back = sum(step * (depth + 1) for step, depth in zip(steps[:-1], depths[:-1], strict=True))
    pixels = patch * (2 + convolutions + back + sum(steps[:-1]))
    return int(-(-pixels // _GRID) * _GRID)


def predict(
    density: Density, read: Callable[[Window], Floats], shape: tuple[int, int, int], largest: int = LARGEST_PIECE
) -> Iterator[Prediction]:
    """Mean and deviation of an image, which is read window by window if it is large.

    Every window is computed with a margin as wide as the density sees, so that there are no seams.

    Args:
        read: (rows, columns) -> float32 (C, H, W), NaN where it is missing.
        shape: bands, height and width of the image.
        largest: the side of what is computed at once.
    """
    place = next((t for t in _tensors(density) if t.is_floating_point()), torch.zeros(()))
    reach = reach_of(density)
    bands, *size = shape
    side = min(largest, math.isqrt(_NUMBERS // bands))
    core = max(size) if max(size) <= side else max(_GRID, (side - 2 * reach) // _GRID * _GRID)
    for rows in _pieces(size[0], core, reach):
        for columns in _pieces(size[1], core, reach):
            (top, bottom, above, below), (left, right, before, behind) = rows, columns
            x = read((slice(above, below), slice(before, behind)))
            inside = slice(top - above, bottom - above), slice(left - before, right - before)
            window = slice(top, bottom), slice(left, right)
            yield Prediction(window, *_ask(density, x, inside, place.device))
            if core < max(size):
                _return_memory()


def predict_batch(density: Density, coded: Floats) -> tuple[Floats, Floats]:
    """Mean and deviation of images (B, C, H, W) with NaN where they are missing."""
    place = next((t for t in _tensors(density) if t.is_floating_point()), torch.zeros(()))
    x = torch.from_numpy(coded).to(place.device)
    observed = ~x.isnan()
    with torch.inference_mode():
        p = density(x.where(observed, 0), observed)
        mean, variance = (t.float().cpu().numpy() for t in (p.mean, p.variance))
    return mean, np.sqrt(np.maximum(variance, 0))


@cache
def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def _return_memory() -> None:
    """Give freed memory back to the system: glibc keeps what it may need again, and more with every size of window."""
    trim = _trim()
    if trim is not None:
        trim(0)


def _ask(density: Density, coded: Floats, inside: Window, device: torch.device) -> tuple[Floats, Floats]:
    """Mean and deviation of the inner part; nothing else of the density's answer outlives this call."""
    part = np.ascontiguousarray(coded[:, *inside])
    if not np.isnan(part).any():
        return part, np.zeros_like(part)
    x = torch.from_numpy(coded).to(device)
    observed = ~x.isnan()
    images = x.where(observed, 0).unsqueeze(0), observed.unsqueeze(0)
    with torch.inference_mode():
        if hasattr(density, "forward_inside"):
            p = density.forward_inside(*images, *inside)
            inside = slice(None), slice(None)
        else:
            p = density(*images)
        mean, variance = (t[0][:, *inside].float().cpu().contiguous().numpy() for t in (p.mean, p.variance))
    return mean, np.sqrt(np.maximum(variance, 0))


def _tensors(density: object) -> Iterator[Tensor]:
    if isinstance(density, nn.Module):
        yield from density.parameters()
        yield from density.buffers()


def _pieces(length: int, core: int, reach: int) -> Iterator[tuple[int, int, int, int]]:
    """Begin and end of pieces, and of what is read for them."""
    for begin in range(0, length, core):
        end = min(begin + core, length)
        yield begin, end, max(0, begin - reach), min(length, end + reach)


def fill_scene(
    file: FoundFile,
    outs: list[Path],
    density: Density,
    deviations: list[Path] | None = None,
    nodata: float | None = None,
    largest: int = LARGEST_PIECE,
    advance: Callable[[float], None] | None = None,
) -> float:
    """Fill TIFF files of any size into others; returns the share that was missing. `advance` hears how far it is."""
    with open_file(file, nodata) as source:
        bands, height, width = source.shape
        recipes, missing, done = source.recipes(), 0, 0
        with write_windows(outs, recipes) as write, _deviations(deviations, recipes) as write_error:
            for part in predict(density, lambda window: source.read(window).coded(), source.shape, largest):
                stored = source.read(part.window)
                missing += int((~stored.observed).sum())
                alphas = source.alphas(part.window)
                write(stored.fill(part.mean), alphas, part.window)
                write_error(part.deviation, alphas, part.window)
                done += stored.values[0].size
                if advance is not None:
                    advance(done / (height * width))
            if missing == bands * height * width:
                raise ValueError(f"{file.path.name} has no pixel that was seen")
    return missing / (bands * height * width)


@contextmanager
def _deviations(paths: list[Path] | None, recipes: list[dict[str, Any]]) -> Iterator[Any]:
    if paths is None:
        yield lambda values, alphas, window: None
        return
    with write_windows(paths, recipes, dtype="float32") as write:
        yield write
