"""What can be taken home: the filled image in its own format and at its own size, and the standard deviation."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from misconv._files import StoredImage, Window, predict, read_image, write_deviation, write_image
from misconv.app.analysis import Analysis, density_for
from misconv.app.models import Models
from misconv.app.pictures import Picture
from misconv.store import write_bytes

__all__ = ["write_results"]

Floats = NDArray[np.float32]


def write_results(found: Analysis, hole: Tensor, models: Models, folder: Path) -> tuple[Path, Path]:
    """Write the filled image and the standard deviation into a folder; returns both paths.

    An image of one's own has its own format, size and units in both, and what was seen of it bit for bit. The
    deviation of a TIFF is a TIFF with the same georeference, any other one an .npy (C, H, W).
    """
    picture = found.picture
    if picture.file is None:
        return _write_sample(found, folder)
    stored = read_image(picture.file)
    image = stored.without(_at_size(hole, stored.shape))
    mean, deviation = _fill(image, picture, models)
    filled = folder / f"{picture.file.stem}-filled{image.suffix}"
    write_image(filled, image, image.fill(mean))
    name = Path(f"{picture.file.stem}-deviation{picture.file.suffix}")
    return filled, write_deviation(folder, name, picture.file, deviation)


def _at_size(hole: Tensor, shape: tuple[int, int, int]) -> NDArray[Any]:
    """The hole of the page over all pixels of the file, bool (H, W)."""
    rows, columns = (torch.arange(n) * part // n for n, part in zip(shape[1:], hole.shape, strict=True))
    found: NDArray[Any] = hole[rows][:, columns].numpy()
    return found


def _fill(image: StoredImage, picture: Picture, models: Models) -> tuple[Floats, Floats]:
    """Mean and deviation (C, H, W) in the units of the file, window by window."""
    density, units = density_for(picture, models), picture.units
    step = density.channels
    mean, deviation = np.zeros(image.shape, np.float32), np.zeros(image.shape, np.float32)
    seen = np.broadcast_to(image.observed, image.shape)
    for first in range(0, len(mean), step):
        bands = slice(first, first + step)
        scaled = ((image.values[bands].astype(np.float64) - units.low) / units.step).astype(np.float32)
        scaled[~seen[bands]] = np.nan
        for part in predict(density, _windows_of(scaled), (step, *image.shape[1:])):
            mean[bands, *part.window] = part.mean * units.step + units.low
            deviation[bands, *part.window] = part.deviation * units.step
    return mean, deviation


def _windows_of(values: Floats) -> Callable[[Window], Floats]:
    return lambda window: values[:, *window]


def _write_sample(found: Analysis, folder: Path) -> tuple[Path, Path]:
    """Of a digit or a photograph: PNG."""
    from PIL import Image

    name = "digit" if found.picture.is_digit else "photograph"
    pixels = (255 * found.fills["mean"].clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, "PNG")
    write_bytes(folder / f"{name}-filled.png", stream.getvalue())
    return folder / f"{name}-filled.png", write_deviation(
        folder, Path(f"{name}-deviation.png"), Path(f"{name}.png"), found.deviation.numpy()
    )
