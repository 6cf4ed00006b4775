"""Images whose bands are one file, or a file each: read as a whole or window by window, and written back likewise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from misconv._files.find import RASTER, FoundFile
from misconv._files.image import Array, StoredImage, holds, read_image, read_shape, write_image
from misconv._files.scene import Scene, Window, open_scene, write_scene, write_window

__all__ = ["OpenFile", "is_raster", "names_of", "open_file", "read_file", "shape_of", "write_file", "write_windows"]


def shape_of(file: FoundFile) -> tuple[int, int, int]:
    """Bands, height and width."""
    bands, height, width = read_shape(file.path)
    if file.bands and bands != 1:
        raise ValueError(f"{file.path.name} must have one band, as a file of a band, got {bands}")
    return len(file.bands) or bands, height, width


def names_of(file: FoundFile) -> list[Path]:
    """The names of all files of an image, also of bands that are not there."""
    return [band.name for band in file.bands] or [file.name]


def read_file(file: FoundFile, nodata: float | None = None) -> StoredImage:
    """An image with all its bands; one without a file is missing as a whole."""
    if not file.bands:
        return read_image(file.path, nodata)
    found = [None if band.path is None else read_image(band.path, nodata) for band in file.bands]
    first = next(image for image in found if image is not None)
    for image in found:
        if image is not None and (image.shape != first.shape or image.values.dtype != first.values.dtype):
            raise ValueError(
                f"{image.path.name} must have one band of the size and type of {first.path.name}, got "
                f"{image.shape} of {image.values.dtype} beside {first.shape} of {first.values.dtype}"
            )
    absent = replace(first, observed=np.zeros((1, *first.shape[1:]), bool))
    parts = tuple(absent if image is None else image for image in found)
    if len(first.values) != 1:
        raise ValueError(f"{first.path.name} must have one band, as a file of a band, got {len(first.values)}")
    values, observed = (np.concatenate([getattr(part, name) for part in parts]) for name in ("values", "observed"))
    return replace(first, values=values, observed=observed, bands=parts)


def write_file(folder: Path, names: list[Path], image: StoredImage, filled: Array) -> None:
    """Write an image into a folder under its names, with other numbers; the first file last."""
    parts = image.bands or (image,)
    for number in reversed(range(len(parts))):
        target = folder / names[number]
        target.parent.mkdir(parents=True, exist_ok=True)
        write_image(target, parts[number], filled[number : number + 1] if image.bands else filled)


class OpenFile:
    """An image of TIFF files that is read window by window."""

    def __init__(self, file: FoundFile, scenes: list[Scene | None], nodata: float | None) -> None:
        self.file, self.scenes, self.nodata = file, scenes, nodata
        first = next(scene for scene in scenes if scene is not None)
        for scene in scenes:
            if scene is not None and (scene.shape, scene.dtype) != (first.shape, first.dtype):
                raise ValueError(f"{scene.path.name} must have the bands, size and type of {first.path.name}")
        self.first = first
        bands, height, width = first.shape
        self.shape = (bands * len(scenes), height, width)

    def read(self, window: Window) -> StoredImage:
        """A part of it; it is no file, and is not encoded."""
        parts = [self._read(scene, window) for scene in self.scenes]
        values, observed = (np.concatenate(each) for each in zip(*parts, strict=True))
        return StoredImage(self.file.path, values, observed, _never, self.file.path.suffix)

    def _read(self, scene: Scene | None, window: Window) -> tuple[Array, Array]:
        values, observed = (scene or self.first).read(window)
        if self.nodata is not None:
            observed = observed & ~holds(values, self.nodata)
        observed = np.broadcast_to(observed, values.shape)
        return values, observed if scene is not None else np.zeros(values.shape, bool)

    def alphas(self, window: Window) -> list[Array | None]:
        """How opaque a part of every file is, where a band says so."""
        return [(scene or self.first).read_alpha(window) for scene in self.scenes]

    def recipes(self) -> list[dict[str, Any]]:
        """All that makes files like these, one for each."""
        return [(scene or self.first).recipe() for scene in self.scenes]


@contextmanager
def open_file(file: FoundFile, nodata: float | None = None) -> Iterator[OpenFile]:
    """An image of one TIFF file, or of one for each band."""
    paths = [band.path for band in file.bands] or [file.path]
    with ExitStack() as stack:
        yield OpenFile(
            file, [None if path is None else stack.enter_context(open_scene(path)) for path in paths], nodata
        )


def is_raster(file: FoundFile) -> bool:
    """Whether it can be read window by window."""
    paths = [band.path for band in file.bands if band.path is not None] or [file.path]
    return all(path.suffix.lower() in RASTER for path in paths)


@contextmanager
def write_windows(paths: list[Path], recipes: list[dict[str, Any]], dtype: Any = None) -> Iterator[Any]:
    """Files like those of the recipes, with nothing missing, to be written window by window; whole or not at all.

    Yields a function of numbers (C, H, W) of all files together, how opaque each of them was, and their window.
    """
    with ExitStack() as stack:
        # The first one is closed last: where it is there, the others are.
        files = [
            stack.enter_context(write_scene(path, recipe, complete=True, dtype=dtype))
            for path, recipe in zip(paths, recipes, strict=True)
        ]

        def write(values: Array, alphas: list[Array | None], window: Window) -> None:
            for file, recipe, part, alpha in zip(files, recipes, np.split(values, len(files)), alphas, strict=True):
                if dtype is not None:
                    file.write(part, window=window)
                else:
                    write_window(file, recipe, part, np.ones((1, *part.shape[1:]), bool), alpha, window)

        yield write


def _never(filled: Array, known: Array) -> bytes:
    raise AssertionError("a window of a scene is no file")
