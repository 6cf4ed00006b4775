"""The order in which programs take tiles whose cost differs, as Triton kernels.

A tile with missing pixels costs many times what a complete one does, and missing pixels lie together. A program that
has the most of such tiles takes a fifth to two fifths longer than the mean (squares of a quarter of 224×224 pixels,
strides of 1 to 2), and all wait for it. So tiles are ordered first, those with missing pixels before the others, and
then come round-robin: no program has more than one of either kind more than another. The order of equal tiles stays
what it was, so that equal inputs give gradients of filters with equal bits; a queue would not do that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from misconv._triton.boxes import count_missing
from misconv._triton.launch import Launch

__all__ = ["TileOrder", "find_touched_kernel", "order_kernel"]


class TileOrder(NamedTuple):
    """How tiles are ordered by what they cost."""

    find: Launch
    sort: Launch
    tiles: int  # of all images

    def launch(self, observed: Tensor) -> Tensor:
        """The order of the tiles, and behind it how many of them have missing pixels; (tiles + 1,)."""
        touched = torch.empty(self.tiles, dtype=torch.int8, device=observed.device)
        order = torch.empty(self.tiles + 1, dtype=torch.int32, device=observed.device)
        self.find(observed, touched)
        self.sort(touched, order)
        return order


@triton.jit
def find_touched_kernel(
    observed, touched, height, width, tiles_x, tiles,
    CHANNELS: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    PER_CHANNEL: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Whether a pixel under the windows of one tile is missing, in any group of channels."""
    index = tl.program_id(0)
    b, tile = (index // tiles).to(tl.int64), index % tiles
    seen = observed + b * (height * width * (CHANNELS if PER_CHANNEL else 1))
    top, left = tile // tiles_x * (TILE_Y * SY) - PY, tile % tiles_x * (TILE_X * SX) - PX
    count = count_missing(seen, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q, True, PER_CHANNEL)
    tl.store(touched + index, (count > 0).to(tl.int8))


@triton.jit
def order_kernel(touched, order, number, BLOCK: tl.constexpr):
    """The places of one block of tiles in the order of all; behind the last of them, how many tiles are touched."""
    start = tl.program_id(0) * BLOCK
    before, after = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for first in range(0, number, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        found = tl.load(touched + tile, mask=tile < number, other=0).to(tl.int32)
        before += tl.where(tile < start, found, 0)
        after += tl.where(tile < start, 0, found)
    earlier = tl.sum(before, 0)
    total = earlier + tl.sum(after, 0)
    tile = start + tl.arange(0, BLOCK)
    found = tl.load(touched + tile, mask=tile < number, other=0).to(tl.int32)
    rank = earlier + tl.cumsum(found, 0) - found  # of the tiles before it that are touched
    tl.store(order + tl.where(found > 0, rank, total + tile - rank), tile, mask=tile < number)
    if start == 0:
        tl.store(order + number, total)
