"""GeoTIFF and other TIFF files, by rasterio: read and written window by window."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scene", "Window", "open_scene", "write_scene", "write_scene_bytes", "write_window"]

Array: TypeAlias = NDArray[Any]
Window: TypeAlias = tuple[slice, slice]

_LOSSY = ("jpeg", "webp", "jxl", "lerc", "lerc_deflate", "lerc_zstd")
_CACHE = 64  # MB of blocks that GDAL keeps; by default it takes a twentieth of the memory there is


def _rasterio() -> Any:
    try:
        import rasterio
    except ImportError as error:
        raise ImportError("TIFF and GeoTIFF files are read by rasterio: pip install 'misconv[files]'") from error
    return rasterio


@dataclass
class Scene:
    """An open raster: bands (C, H, W), in the file's own type."""

    path: Path
    dataset: Any

    @property
    def shape(self) -> tuple[int, int, int]:
        """Bands, without the alpha band, height and width."""
        return len(self._bands), self.dataset.height, self.dataset.width

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers."""
        kind: np.dtype[Any] = np.dtype(self.dataset.dtypes[0])
        return kind

    @property
    def _bands(self) -> list[int]:
        from rasterio.enums import ColorInterp

        kinds = self.dataset.colorinterp
        return [band for band, kind in zip(self.dataset.indexes, kinds, strict=True) if kind != ColorInterp.alpha]

    def read(self, window: Window | None = None) -> tuple[Array, Array]:
        """Values and what was seen, bool (C, H, W), of all or of a window: rows and columns."""
        bands = self._bands
        try:
            values = self.dataset.read(bands, window=window)
            masks = self.dataset.read_masks(bands, window=window)
        except _rasterio().errors.RasterioError as error:
            raise ValueError(f"{self.path.name} is damaged: {error}") from error
        observed = masks > 0
        if values.dtype.kind == "f":
            observed &= ~np.isnan(values)
        same = observed[:1] if (observed == observed[:1]).all() else observed
        return values, same

    def read_alpha(self, window: Window | None = None) -> Array | None:
        """How opaque pixels (H, W) are, where a band says so."""
        others = [band for band in self.dataset.indexes if band not in self._bands]
        alpha: Array | None = self.dataset.read(others[0], window=window) if others else None
        return alpha

    def recipe(self) -> dict[str, Any]:
        """All that makes another file like this one."""
        data = self.dataset
        return {
            "profile": dict(data.profile),
            "structure": data.tags(ns="IMAGE_STRUCTURE"),
            "tags": {space: data.tags(ns=space) for space in _namespaces(data)},
            "band_tags": {band: data.tags(band) for band in data.indexes},
            "gcps": data.gcps,
            "rpcs": data.rpcs,
            "descriptions": data.descriptions,
            "colorinterp": data.colorinterp,
            "scales": data.scales,
            "offsets": data.offsets,
            "units": data.units,
            "bands": self._bands,
            "masked": _has_own_mask(data),
        }


def _namespaces(data: Any) -> list[str | None]:
    """Kinds of tags that are stored, not made by GDAL of other things."""
    made = ("IMAGE_STRUCTURE", "DERIVED_SUBDATASETS", "RPC", "GEOLOCATION")
    return [None, "COLOR_PROFILE", *(space for space in data.tag_namespaces() if space not in made)]


def _has_own_mask(data: Any) -> bool:
    """Whether a mask is stored beside the bands, not derived from a nodata value or an alpha band."""
    from rasterio.enums import MaskFlags

    return all(set(flags) == {MaskFlags.per_dataset} for flags in data.mask_flag_enums)


@contextmanager
def open_scene(path: Path) -> Iterator[Scene]:
    """Open a TIFF; a ValueError on one line where it is none."""
    rasterio = _rasterio()
    with warnings.catch_warnings(), rasterio.Env(GDAL_CACHEMAX=_CACHE):
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        try:
            dataset = rasterio.open(path, driver="GTiff")
        except rasterio.errors.RasterioIOError as error:
            raise ValueError(f"{path.name} is no TIFF that can be read, or is damaged: {error}") from error
        with dataset:
            if len(set(dataset.dtypes)) > 1:
                raise ValueError(f"{path.name} must have bands of one type, got {', '.join(dataset.dtypes)}")
            if rasterio.enums.ColorInterp.palette in dataset.colorinterp:
                raise ValueError(f"{path.name} holds numbers of colours, which have no mean; save it as RGB first")
            if dataset.subdatasets:
                raise ValueError(f"{path.name} holds {len(dataset.subdatasets)} pictures, and one is expected")
            if dataset.tags(ns="IMAGE_STRUCTURE").get("SOURCE_COLOR_SPACE") == "CMYK":
                raise ValueError(f"{path.name} holds amounts of ink (CMYK); save it as RGB first")
            if np.dtype(dataset.dtypes[0]).kind == "c":
                raise ValueError(f"{path.name} must hold real numbers, got {dataset.dtypes[0]}")
            yield Scene(path, dataset)


@contextmanager
def write_scene(path: Path, recipe: dict[str, Any], *, complete: bool, dtype: Any = None) -> Iterator[Any]:
    """A file like the one of the recipe, to be written window by window; there under its name when it is whole.

    Args:
        complete: nothing is missing in it any more, so that it has neither nodata nor a mask.
        dtype: of its numbers, if another one than before; such a file has no nodata but NaN.
    """
    rasterio = _rasterio()
    profile = _profile(recipe, complete, dtype)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with warnings.catch_warnings(), rasterio.Env(GDAL_CACHEMAX=_CACHE):
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(temporary, "w", **profile) as data:
                _describe(data, recipe, complete, dtype)
                yield data
        temporary.replace(path)
    except rasterio.errors.RasterioError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _profile(recipe: dict[str, Any], complete: bool, dtype: Any) -> dict[str, Any]:
    profile = dict(recipe["profile"])
    profile |= {"driver": "GTiff", "bigtiff": "IF_SAFER"}
    if recipe["gcps"][0]:  # they are the place, and a TIFF has no other one beside them
        profile.pop("transform", None)
        profile.pop("crs", None)
    if "PREDICTOR" in recipe["structure"]:
        profile["predictor"] = recipe["structure"]["PREDICTOR"]
    profile["count"] = len(recipe["bands"]) if dtype is not None else profile["count"]
    if dtype is not None:
        profile["dtype"], profile["nodata"] = dtype, float("nan")
        profile.pop("predictor", None)
    if complete:
        profile["nodata"] = None
    if str(profile.get("compress", "")).lower() in _LOSSY:  # would change what was seen
        profile["compress"] = "deflate"
        profile.pop("photometric", None)
    tiled = profile.get("tiled")
    if not tiled:  # a strip is as wide as the image, and needs no size
        for name in ("blockxsize", "blockysize"):
            profile.pop(name, None)
    return profile


def _describe(data: Any, recipe: dict[str, Any], complete: bool, dtype: Any) -> None:
    points, system = recipe["gcps"]
    if points:
        data.gcps = (points, system)
    if recipe["rpcs"] is not None:
        data.rpcs = recipe["rpcs"]
    if dtype is not None:
        return
    for space, tags in recipe["tags"].items():
        if tags:
            data.update_tags(ns=space, **tags)
    for band, tags in recipe["band_tags"].items():
        kept = {key: value for key, value in tags.items() if not key.startswith("STATISTICS_")}  # of other numbers
        data.update_tags(band, **kept)
    data.descriptions = recipe["descriptions"]
    data.colorinterp = recipe["colorinterp"]
    data.scales, data.offsets, data.units = recipe["scales"], recipe["offsets"], recipe["units"]


def write_scene_bytes(recipe: dict[str, Any], filled: Array, known: Array, alpha: Array | None) -> bytes:
    """The content of a file with these numbers (C, H, W), which were as opaque as `alpha` says before."""
    from rasterio.io import MemoryFile

    complete = bool(known.all())
    rasterio = _rasterio()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        with MemoryFile() as memory:
            with memory.open(**_profile(recipe, complete, None)) as data:
                _describe(data, recipe, complete, None)
                write_window(data, recipe, filled, known, alpha, None)
            content: bytes = memory.read()
    return content


def write_window(
    data: Any, recipe: dict[str, Any], filled: Array, known: Array, alpha: Array | None, window: Window | None
) -> None:
    """Write bands, and beside them what says where they are known: what was not visible at all is opaque now."""
    bands = recipe["bands"]
    data.write(filled, indexes=bands, window=window)
    if alpha is not None:
        opaque = np.iinfo(alpha.dtype).max if alpha.dtype.kind in "iu" else 1
        shown = np.where(known.all(0) & (alpha == 0), opaque, alpha).astype(alpha.dtype)
        data.write(shown, indexes=next(band for band in data.indexes if band not in bands), window=window)
    if recipe["masked"] and not known.all():
        data.write_mask(known.all(0), window=window)
