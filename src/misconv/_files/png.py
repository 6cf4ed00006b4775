"""PNG files, where Pillow does not keep them as they are.

Pillow reads 16 bits as 8 where there are several bands, and drops some of what a file says of itself beside its
pixels. A PNG is a row of chunks: length, type, content, checksum.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["DeepPng", "bands_of_deep", "read_deep", "with_chunks_of", "write_deep"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Colours, gamma, size of a pixel, time, texts and what cameras say; not what depends on how pixels are stored.
_KEPT = (b"cHRM", b"cICP", b"eXIf", b"gAMA", b"iCCP", b"iTXt", b"pHYs", b"sRGB", b"tEXt", b"tIME", b"zTXt")
_BANDS = {2: 3, 4: 1, 6: 3}  # by the type of colours, without alpha
_HEAD = len(_SIGNATURE) + 25  # with the first chunk, which says size, depth and colours


class DeepPng(NamedTuple):
    """Numbers (C, H, W) of 16 bits, alpha (H, W) or None, and one colour (C,) that counts as transparent or None."""

    values: NDArray[np.uint16]
    alpha: NDArray[np.uint16] | None
    transparent: tuple[int, ...] | None


def bands_of_deep(path: Path) -> int | None:
    """How many bands beside alpha a PNG of 16 bits with several of them has; None if it is another file."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head.startswith(_SIGNATURE) or len(head) < _HEAD or head[24] != 16:
        return None
    return _BANDS.get(head[25])


def read_deep(path: Path) -> DeepPng:
    """Read a PNG of 16 bits with several bands; a ValueError on one line where it is damaged."""
    rasterio = _rasterio()
    bands = bands_of_deep(path)
    assert bands is not None
    with _quiet(rasterio):
        try:
            with rasterio.open(path, driver="PNG") as data:
                found = data.read()
        except rasterio.errors.RasterioError as error:
            raise ValueError(f"{path.name} is damaged: {error}") from error
    with path.open("rb") as file:
        key = next((content for kind, content in _chunks(file) if kind == b"tRNS"), None)
    transparent = None if key is None or len(key) != 2 * bands else struct.unpack(f">{bands}H", key)
    return DeepPng(found[:bands], found[bands] if len(found) > bands else None, transparent)


def write_deep(values: NDArray[np.uint16]) -> bytes:
    """The content of a PNG with numbers (C, H, W): two or four of these bands have alpha as their last."""
    from rasterio.io import MemoryFile

    bands, height, width = values.shape
    with _quiet(_rasterio()), MemoryFile() as memory:
        with memory.open(driver="PNG", width=width, height=height, count=bands, dtype="uint16") as data:
            data.write(values)
        content: bytes = memory.read()
    return content


def with_chunks_of(path: Path, content: bytes) -> bytes:
    """A PNG with all that another one says besides its pixels: colour profile, resolution, texts and so on."""
    with path.open("rb") as file:
        kept = [_packed(kind, part) for kind, part in _chunks(file) if kind in _KEPT]
    return b"".join((content[:_HEAD], *kept, content[_HEAD:]))


def _chunks(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """Types and contents, those of pixels without their content."""
    file.seek(len(_SIGNATURE))
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IDAT":
            file.seek(length, 1)
            yield kind, b""
        else:
            yield kind, file.read(length)
        file.seek(4, 1)


def _packed(kind: bytes, content: bytes) -> bytes:
    from zlib import crc32

    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc32(kind + content))


def _rasterio() -> Any:
    try:
        import rasterio
    except ImportError as error:
        raise ImportError("PNG files of 16 bits are read by rasterio: pip install 'misconv[files]'") from error
    return rasterio


def _quiet(rasterio: Any) -> warnings.catch_warnings[None]:
    return warnings.catch_warnings(action="ignore", category=rasterio.errors.NotGeoreferencedWarning)
