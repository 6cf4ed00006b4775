"""One image of a file: its numbers as they are stored, what was seen, and all that is needed to write it back.

Missing are pixels that are NaN, that hold the file's own "nodata" or the one that is given, that are wholly
transparent, or that the file's mask declares missing. Nothing is scaled: a byte stays between 0 and 255.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from misconv._files.find import ARRAYS, PILLOW, RASTER
from misconv._files.png import DeepPng, bands_of_deep, read_deep, with_chunks_of, write_deep
from misconv._store import write_bytes

__all__ = ["Array", "StoredImage", "holds", "read_image", "read_shape", "write_deviation", "write_image"]

Array: TypeAlias = NDArray[Any]
_MOST_BANDS = 64  # of an array; a longer axis is one of pixels


@dataclass(frozen=True)
class StoredImage:
    """An image as a file holds it.

    `values` are (C, H, W) in the file's own type, `observed` is bool (1, H, W) or (C, H, W).
    """

    path: Path
    values: Array
    observed: Array
    encode: Callable[[Array, Array], bytes]  # filled values and what is known of them now → the content of a file
    suffix: str  # of a file with that content
    bands: tuple[StoredImage, ...] = ()  # where each of them is a file of its own
    arrange: Callable[[Array], Array] = lambda values: values  # (C, H, W) → the axes of the file's array

    @property
    def shape(self) -> tuple[int, int, int]:
        """Bands, height and width."""
        bands, height, width = self.values.shape
        return bands, height, width

    @property
    def missing(self) -> float:
        """The share of its numbers that are missing."""
        return 1.0 - float(np.broadcast_to(self.observed, self.values.shape).mean())

    def coded(self) -> NDArray[np.float32]:
        """The image in float32, with NaN where it is missing."""
        coded = self.values.astype(np.float32)
        coded[~np.broadcast_to(self.observed, coded.shape)] = np.nan
        return coded

    def without(self, holes: Array) -> StoredImage:
        """The same with more of it missing: bool (H, W), True where a pixel is missing."""
        return replace(self, observed=self.observed & ~holes, bands=tuple(band.without(holes) for band in self.bands))

    def fill(self, prediction: Array) -> Array:
        """The file's own numbers where it was seen, elsewhere a prediction (C, H, W), rounded and kept in range."""
        kind = self.values.dtype
        if kind.kind in "iu":
            limits = np.iinfo(kind)
            prediction = np.clip(np.rint(prediction.astype(np.float64)), limits.min, limits.max)
        elif kind.kind == "b":
            prediction = prediction >= 0.5
        return np.where(self.observed, self.values, prediction.astype(kind))


def read_image(path: Path, nodata: float | None = None) -> StoredImage:
    """Read a PNG, JPEG, WebP, BMP, TIFF, GeoTIFF, .npy or .npz file.

    Args:
        nodata: a number that stands for "no reading", besides what the file says itself.

    Raises:
        ValueError: the file is none of these, is damaged, or holds something else; the message says so on one line.
    """
    suffix = path.suffix.lower()
    if suffix not in (*PILLOW, *RASTER, *ARRAYS):
        raise ValueError(f"{path.name} must end in one of {', '.join((*PILLOW, *RASTER, *ARRAYS))}")
    if not path.stat().st_size:
        raise ValueError(f"{path.name} is empty")
    image = (_read_pillow if suffix in PILLOW else _read_raster if suffix in RASTER else _read_array)(path)
    if image.values.dtype.kind not in "iufb" or image.values.dtype.itemsize > 8:
        raise ValueError(f"{path.name} must hold real numbers, got {image.values.dtype}")
    if 0 in image.shape:
        raise ValueError(f"{path.name} must hold pixels, got shape {image.shape}")
    seen = image.observed
    if image.values.dtype.kind == "f":
        seen = seen & ~np.isnan(image.values)
    if nodata is not None:
        seen = seen & ~holds(image.values, nodata)
    if image.values.dtype.kind == "f" and np.isinf(image.values[np.broadcast_to(seen, image.shape)]).any():
        raise ValueError(f"{path.name} has infinite pixels that are not declared missing")
    return replace(image, observed=seen)


def holds(values: Array, number: float) -> Array:
    """Where an array of any type holds a number, compared without rounding."""
    if values.dtype.kind in "iu":
        limits = np.iinfo(values.dtype)
        whole = np.isfinite(number) and number == int(number) and limits.min <= number <= limits.max
        return values == values.dtype.type(int(number)) if whole else np.zeros(values.shape, bool)
    if values.dtype.kind == "f":
        return np.isnan(values) if np.isnan(number) else values == values.dtype.type(number)
    return np.zeros(values.shape, bool)


def read_shape(path: Path) -> tuple[int, int, int]:
    """Bands, height and width; where that can be had without reading all of the file, it is."""
    suffix = path.suffix.lower()
    if suffix in RASTER:
        from misconv._files.scene import open_scene

        with open_scene(path) as scene:
            return scene.shape
    if suffix in PILLOW:
        with _opened(path) as opened:
            bands = {"P": 3, "LA": 1, "La": 1, "RGBA": 3, "RGBa": 3, "PA": 3, "CMYK": 3}
            count = bands_of_deep(path) or bands.get(opened.mode, len(opened.getbands()))
            return count, opened.height, opened.width
    return read_image(path).shape


def write_image(path: Path, image: StoredImage, filled: Array, known: Array | None = None) -> None:
    """Write an image as it was stored, with other numbers (C, H, W) of its type; whole or not at all.

    Args:
        known: bool (1, H, W) or (C, H, W), where the numbers are known now; by default everywhere.
    """
    known = np.ones((1, *image.shape[1:]), bool) if known is None else known
    write_bytes(path, image.encode(filled, known))


def write_deviation(folder: Path, name: Path, source: Path, values: Array) -> Path:
    """Write the standard deviation of an image, float32: a TIFF like its own file, or else an .npy.

    Args:
        values: (C, H, W), for an .npy in any order.
        name: of the image below the folder. source: the image's own file.
    """
    if source.suffix.lower() in RASTER:
        from misconv._files.scene import open_scene, write_scene

        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_scene(source) as scene:
            recipe = scene.recipe()
        with write_scene(path, recipe, complete=True, dtype="float32") as data:
            data.write(values)
        return path
    path = folder / name.with_suffix(".npy")
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=False)
    write_bytes(path, stream.getvalue())
    return path


# Pillow --------------------------------------------------------------------------------------------------------------

_MODES = {"P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB"}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A picture that Pillow has opened; a ValueError on one line where it cannot be read."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("PNG, JPEG and WebP files are read by Pillow: pip install 'misconv[files]'") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                yield opened
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ValueError(f"{path.name} claims more pixels than an image file should: {error}") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{path.name} is no image that can be read, or its suffix is wrong") from error
    except (OSError, SyntaxError, EOFError, ValueError) as error:
        known = str(error).startswith("holds ")
        raise ValueError(f"{path.name} {error}" if known else f"{path.name} is damaged: {error}") from error


def _read_pillow(path: Path) -> StoredImage:
    with _opened(path) as opened:
        frames = getattr(opened, "n_frames", 1)
        if frames > 1:
            raise ValueError(f"holds {frames} pictures, and one is expected")
        deep = bands_of_deep(path) is not None
        picture = opened if deep else opened.copy()
        info, format_ = dict(opened.info), str(opened.format)
    if deep:
        return _from_deep(path, read_deep(path))
    if picture.mode == "P" and "transparency" in info:
        picture = picture.convert("RGBA")
    mode = _MODES.get(picture.mode, picture.mode)
    picture = picture if picture.mode == mode else picture.convert(mode)
    pixels = np.asarray(picture)  # (H, W) or (H, W, C)
    full = pixels[..., None] if pixels.ndim == 2 else pixels
    values, alpha = full, None
    if mode in ("LA", "RGBA", "La", "RGBa"):
        values, alpha = full[..., :-1], full[..., -1]
    values = np.moveaxis(values, -1, 0)
    key = info.get("transparency")
    colour = (key,) if isinstance(key, int) else key if isinstance(key, tuple) else None
    if colour is not None and values.dtype.kind == "b":
        colour = (int(colour[0] > 0),)
    suffix = ".png" if format_ in ("JPEG", "MPO") else path.suffix  # no lossless way to write one

    def encode(filled: Array, known: Array) -> bytes:
        from PIL import Image

        out = np.moveaxis(_with_alpha(filled, alpha, known), 0, -1)
        made = Image.fromarray(np.ascontiguousarray(out[..., 0] if out.shape[-1] == 1 else out))
        stream, kind = io.BytesIO(), "PNG" if suffix == ".png" else format_
        made.save(stream, kind, **({} if format_ == "PNG" else _options(info, kind)))
        return with_chunks_of(path, stream.getvalue()) if format_ == "PNG" else stream.getvalue()

    return StoredImage(path, values, _visible(values, alpha, colour), encode, suffix)


def _from_deep(path: Path, found: DeepPng) -> StoredImage:
    def encode(filled: Array, known: Array) -> bytes:
        return with_chunks_of(path, write_deep(_with_alpha(filled, found.alpha, known)))

    observed = _visible(found.values, found.alpha, found.transparent)
    return StoredImage(path, found.values, observed, encode, path.suffix)


def _visible(values: Array, alpha: Array | None, colour: tuple[int, ...] | None) -> Array:
    """Where a picture (C, H, W) is not wholly transparent, by its alpha or by one colour that counts as transparent."""
    if alpha is not None:
        return np.asarray(alpha > 0)[None]
    if colour is not None:
        return np.asarray((values != np.asarray(colour)[:, None, None]).any(0))[None]
    return np.ones((1, *values.shape[1:]), bool)


def _with_alpha(filled: Array, alpha: Array | None, known: Array) -> Array:
    """What is known now is opaque, if it was not visible at all before."""
    if alpha is None:
        return filled
    shown = np.where(known.all(0) & (alpha == 0), np.iinfo(alpha.dtype).max, alpha)
    return np.concatenate([filled, shown[None].astype(alpha.dtype)])


def _options(info: dict[str, Any], kind: str) -> dict[str, Any]:
    """What Pillow is to write besides the pixels."""
    options: dict[str, Any] = {name: info[name] for name in ("icc_profile", "dpi", "exif") if name in info}
    if kind == "WEBP":
        options |= {"lossless": True, "exact": True}
    if kind == "WEBP" and "xmp" in info:
        options["xmp"] = info["xmp"]
    return options


# Rasters and arrays --------------------------------------------------------------------------------------------------


def _read_raster(path: Path) -> StoredImage:
    from misconv._files.scene import open_scene, write_scene_bytes

    with open_scene(path) as scene:
        (values, observed), alpha = scene.read(), scene.read_alpha()
        recipe = scene.recipe()

    def encode(filled: Array, known: Array) -> bytes:
        return write_scene_bytes(recipe, filled, known, alpha)

    return StoredImage(path, values, observed, encode, path.suffix)


def _read_array(path: Path) -> StoredImage:
    name = None
    try:
        found = np.load(path, allow_pickle=False)
        if path.suffix.lower() == ".npz":
            with found:
                names = list(found.files)
                name = "image" if "image" in names else names[0] if len(names) == 1 else None
                if name is None:
                    raise ValueError(f"{path.name} must hold one array, or one that is called image, got {names[:5]}")
                array, others = found[name], {key: found[key] for key in names if key != name}
        else:
            array, others = found, {}
    except ValueError as error:
        if "must hold one array" in str(error):
            raise
        raise ValueError(f"{path.name} is no array that can be read: {str(error).splitlines()[0]}") from error
    except Exception as error:  # zipfile, zlib and numpy each have their own for a damaged file
        raise ValueError(f"{path.name} is damaged: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path.name} holds something that is no array")
    first = _channels_first(path, array)

    def arrange(values: Array) -> Array:
        return values[0] if array.ndim == 2 else values if first else np.moveaxis(values, 0, -1)

    def encode(filled: Array, known: Array) -> bytes:
        out, stream = arrange(filled), io.BytesIO()
        if name is None:
            np.save(stream, out, allow_pickle=False)
        else:
            arrays: dict[str, Any] = {name: out, **others}
            np.savez(stream, **arrays)
        return stream.getvalue()

    values = array[None] if array.ndim == 2 else array if first else np.moveaxis(array, -1, 0)
    seen = np.ones((1, *values.shape[1:]), bool)
    return StoredImage(path, values, seen, encode, path.suffix, arrange=arrange)


def _channels_first(path: Path, array: Array) -> bool:
    if array.ndim not in (2, 3):
        raise ValueError(f"{path.name} must hold one image, (H, W), (C, H, W) or (H, W, C), got shape {array.shape}")
    if array.ndim == 2:
        return True
    if min(array.shape[0], array.shape[-1]) > _MOST_BANDS:
        raise ValueError(f"{path.name} must hold an image of at most {_MOST_BANDS} bands, got shape {array.shape}")
    return bool(array.shape[0] <= array.shape[-1])
