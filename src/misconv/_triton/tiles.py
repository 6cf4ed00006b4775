"""Tiles of the output, the boxes of the image under their windows, and where taps lie in these."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from misconv._triton.launch import power

__all__ = ["LARGEST_BOX", "Settings", "Tiling", "box_is_small", "box_size", "tap_table", "tile_shape"]

LARGEST_BOX = 2048  # pixels that are read at a time, in as many channels as fit
_LARGEST_PLANE = 8192  # … but at least in one

_Shape = tuple[int, ...]


class Settings(NamedTuple):
    """What a fused convolution is, besides its tensors; hashable."""

    stride: tuple[int, int]
    corner: tuple[int, int]  # rows above and columns left of the image
    dilation: tuple[int, int]
    size: tuple[int, int]  # of the output
    groups: int
    activation: str
    low: float
    high: float
    precision: str  # of what products take, as `rounded` names it
    dtype: torch.dtype  # of the output


class Tiling(NamedTuple):
    """How the work is cut into tiles: the best of a few that were timed on an H200."""

    pixels: int  # of a tile of the output
    taps: int  # of a window at a time
    stack: int  # factors at a time
    options: dict[str, int]  # of the compiler
    programs: int = 0  # on each multiprocessor, where a program has many tiles


def box_size(tile: tuple[int, int], kernel: _Shape, s: Settings) -> tuple[int, int]:
    """Rows and columns of the image under the windows of a tile."""
    rows, columns = (
        (t - 1) * step + (k - 1) * d + 1 for t, step, k, d in zip(tile, s.stride, kernel, s.dilation, strict=True)
    )
    return rows, columns


def tile_shape(pixels: int, kernel: _Shape, s: Settings) -> tuple[int, int]:
    """Rows and columns of a tile: as few tiles as possible, then the smallest box; fewer pixels if it is too large."""
    shapes = [(pixels // columns, columns) for columns in (16, 32, 8, 64, 4) if columns <= pixels]
    sizes = {shape: box_size(shape, kernel, s) for shape in shapes}
    small = [shape for shape in shapes if sizes[shape][0] * sizes[shape][1] <= LARGEST_BOX]
    if not small and pixels > 16:
        return tile_shape(pixels // 2, kernel, s)
    return min(
        small or shapes,
        key=lambda shape: (
            -(-s.size[0] // shape[0]) * -(-s.size[1] // shape[1]),
            power(sizes[shape][0] * sizes[shape][1]),
        ),
    )


def box_is_small(kernel: _Shape, s: Settings) -> bool:
    """Whether the windows of even the smallest tile fit into a box."""
    rows, columns = box_size(tile_shape(16, kernel, s), kernel, s)
    return rows * columns <= _LARGEST_PLANE


@lru_cache(256)
def tap_table(
    channels: int, kernel: _Shape, dilation: _Shape, box: _Shape, length: int, paired: bool, device: torch.device
) -> Tensor:
    """Where the taps of a window lie in a box, counted from the begin of the window; pairs of them in words."""
    places = [
        (channel * box[0] + y * dilation[0]) * box[1] + x * dilation[1]
        for channel in range(channels)
        for y in range(kernel[0])
        for x in range(kernel[1])
    ]
    places += [0] * (length - len(places))
    return torch.tensor([place // 2 for place in places[::2]] if paired else places, dtype=torch.int32, device=device)
