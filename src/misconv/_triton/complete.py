"""The gradients of filters by tiles whose windows are complete, as Triton kernels of their own.

Where a convolution has a stride, windows share whole blocks of stride × stride pixels. `arrange_kernel` writes the
pixels of each block, a *spot*, beside each other (space to depth). A window of 7×7 pixels with stride 2 is then 4×4
spots: four runs of memory, which tensor cores take as they lie, while `backward` has to spread windows in shared
memory. And with nothing to compute but a product of windows and gradients, their sum stays in registers over all tiles
of a program. For bfloat16 that takes a third of the time. Timed on an H200 and not faster: spots in forward passes, or
for tiles with missing pixels.

Where TF32 is allowed, operands are float16 numbers (see `halves`), since products of TF32 numbers want transposed
windows. The pixels of an image have one unit, by the largest of them (`largest_kernel`); the gradients of a channel
have one that suits the largest so far, with room for one that is 32 times larger.

`backward` leaves the filters' part of these tiles out; both write rows of the same layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from misconv._triton.boxes import product
from misconv._triton.halves import finite_size, power_below
from misconv._triton.launch import Launch

__all__ = ["PARTS", "CompleteTiles", "Spots", "arrange_kernel", "complete_kernel", "largest_kernel"]

PARTS = 16  # of an image, each with a largest pixel
_ALIGNED = 8  # spots begin where the widest loads of 16-bit numbers do
_MOST_TAPS = 256  # places of a window


class Spots(NamedTuple):
    """Windows cut into spots."""

    down: int  # spots of a window
    across: int
    spot: int  # places for the pixels of a spot
    line: int  # places for those of a line of a window, a power of two
    taps: int  # places of a window, likewise

    @classmethod
    def of(cls, channels: int, kernel: tuple[int, int], stride: tuple[int, int]) -> Spots | None:
        """None where windows have too many places for registers."""
        down, across = (-(-size // step) for size, step in zip(kernel, stride, strict=True))
        spot = -(-channels * stride[0] * stride[1] // _ALIGNED) * _ALIGNED
        line = max(16, triton.next_power_of_2(across * spot))
        taps = triton.next_power_of_2(down) * line
        return cls(down, across, spot, line, taps) if taps <= _MOST_TAPS else None

    def size(self, response: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of spots under the windows of a response."""
        return response[0] + self.down - 1, response[1] + self.across - 1


class CompleteTiles(NamedTuple):
    """How the gradients of parameters by complete tiles are computed."""

    largest: Launch | None  # where spots are float16 numbers; else they are bfloat16 ones
    arrange: Launch
    multiply: Launch
    spots: tuple[int, ...]  # (images, rows, columns, SPOT)
    programs: int  # that write a row each

    def launch(self, means: Tensor, order: Tensor, grad: Tensor, response: Tensor, rows: Tensor) -> None:
        """Write the gradients to rows."""
        dtype = torch.bfloat16 if self.largest is None else torch.float16
        spots = torch.empty(self.spots, dtype=dtype, device=means.device)
        largest = units = rows  # what is not there is not read, but a kernel wants a pointer
        if self.largest is not None:
            largest = torch.empty((self.spots[0], PARTS), dtype=torch.float32, device=means.device)
            units = torch.empty(self.spots[0], dtype=torch.float32, device=means.device)
            self.largest(means, largest)
        self.arrange(means, spots, largest, units)
        self.multiply(spots, units, order, grad, response, rows)


@triton.jit
def largest_kernel(means, largest, size, length, K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest absolute value in one of the PARTS of an image, `length` of the `size` pixels of its first component.

    `largest` is (images, PARTS).
    """
    b, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    found = tl.zeros((BLOCK,), tl.float32)
    end = tl.minimum((part + 1) * length, size)
    for first in range(part * length, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        values = tl.load(means + b * K * size + place, mask=place < end, other=0.0)
        found = tl.maximum(found, finite_size(values.to(tl.float32)))
    tl.store(largest + b * PARTS + part, tl.max(found, 0))


@triton.jit
def arrange_kernel(
    means, spots, largest, units, height, width, rows, columns, blocks,
    K: tl.constexpr, CHANNELS: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    SPOT: tl.constexpr, PARTS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The means of the first component, (images, rows, columns, SPOT), with zeros around the image.

    Where a window is complete all components hold the same pixels. A program has one of the blocks of an image; all are
    counted in one dimension, since batches and images may be larger than a second one of a grid (65,535). If the spots
    are float16 numbers, they are multiples of a 2¹⁴th of a unit, which `units` receives for each image.
    """
    b, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    place, f = block * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_F)
    y, x = place // columns, place % columns
    channel, line, column = f // (SY * SX), f // SX % SY, f % SX
    down, across = (y * SY - PY)[:, None] + line[None, :], (x * SX - PX)[:, None] + column[None, :]
    exists = place < rows * columns
    inside = exists[:, None] & (channel < CHANNELS)[None, :]
    inside = inside & (down >= 0) & (down < height) & (across >= 0) & (across < width)
    places = channel[None, :] * (height * width) + down * width + across
    values = tl.load(means + b * (K * CHANNELS * height * width) + places, mask=inside, other=0.0).to(tl.float32)
    if spots.dtype.element_ty == tl.float16:
        peak = tl.max(tl.load(largest + b * PARTS + tl.arange(0, PARTS)), 0)
        unit = power_below(peak)
        values = values / unit * 16384
        if block == 0:
            tl.store(units + b, unit)
    written = exists[:, None] & (f < SPOT)[None, :]
    spots += b * (rows * columns * SPOT) + place[:, None] * SPOT + f[None, :]
    tl.store(spots, values.to(spots.dtype.element_ty), mask=written)


@triton.jit
def complete_kernel(
    spots, units, order, grad, response, rows_of,
    batch, rows, columns, tiles_x, tiles, grad_b, grad_o, grad_y, grad_x, response_b, response_o, response_y,
    response_x,
    CHANNELS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr, OUT: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, SPOT: tl.constexpr,
    LINE: tl.constexpr, TAPS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK_TAPS: tl.constexpr, PLACES: tl.constexpr,
    TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Gradients of filters and biases behind a ReLU, for the complete tiles of one program, which come round-robin.

    `order` is that of `order_kernel`. `rows_of` has a row for every program, (taps, channels) as `backward` writes it
    where taps come in blocks, with biases behind.
    """
    HALF: tl.constexpr = spots.dtype.element_ty == tl.float16
    channels, pixel = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, TILE_Y * TILE_X)
    t = tl.arange(0, TAPS)
    pitch, size = (columns + ACROSS - 1) * SPOT, (rows + DOWN - 1) * (columns + ACROSS - 1)
    total, total_bias = tl.zeros((TAPS, BLOCK_O), tl.float32), tl.zeros((BLOCK_O,), tl.float32)
    number = batch * tiles
    # Of the gradients of each channel; a limit comes with the first that is not 0.
    scale, limit = tl.full((BLOCK_O,), 1.0, tl.float32), tl.zeros((BLOCK_O,), tl.float32)
    first = tl.load(order + number) + tl.program_id(0)
    for place in tl.range(first, number, tl.num_programs(0), num_stages=1):
        index = tl.load(order + place)
        b, tile = (index // tiles).to(tl.int64), index % tiles
        y, x = tile // tiles_x * TILE_Y + pixel // TILE_X, tile % tiles_x * TILE_X + pixel % TILE_X
        # Windows beyond the response are read as its last ones; they have no gradient.
        starts = tl.minimum(y, rows - 1) * pitch + tl.minimum(x, columns - 1) * SPOT
        places = spots + b * size * SPOT + (t // LINE * pitch + t % LINE)[:, None] + starts[None, :]
        real = (t // LINE < DOWN) & (t % LINE < ACROSS * SPOT)
        windows = tl.load(places, mask=real[:, None], other=0.0)  # (taps, windows)
        inside = ((y < rows) & (x < columns))[:, None] & (channels < OUT)[None, :]
        places = (y * grad_y + x * grad_x)[:, None] + channels[None, :] * grad_o
        g = tl.load(grad + b * grad_b + places, mask=inside, other=0.0).to(tl.float32)
        places = (y * response_y + x * response_x)[:, None] + channels[None, :] * response_o
        seen = tl.load(response + b * response_b + places, mask=inside, other=0.0)
        g = tl.where(seen > 0, g, 0.0)  # a ReLU tells its slope
        total_bias += tl.sum(g, 0)
        if HALF:
            g = g * tl.load(units + b)
            if tl.max((finite_size(g) > limit[None, :]).to(tl.int32)) > 0:
                largest = tl.max(finite_size(g), 0)
                base = power_below(largest)
                wanted = tl.where(largest > limit, 1024.0 / base, scale)
                limit = tl.where(largest > limit, 32.0 * base, limit)
                total *= (wanted / scale)[None, :]
                scale = wanted
            g = g * scale[None, :]
        total = product(windows, g.to(spots.dtype.element_ty), total, "tf32")
    if HALF:
        total = total / scale[None, :] / 16384
    own = rows_of + tl.program_id(0).to(tl.int64) * (OUT * (CHUNKS * PLACES + 1))
    f = t % LINE % SPOT
    channel, y, x = f // (SY * SX), t // LINE * SY + f // SX % SY, t % LINE // SPOT * SX + f % SX
    real = (channel < CHANNELS) & (y < KY) & (x < KX) & (t % LINE < ACROSS * SPOT)
    tap = (channel * KY + y) * WIDE + x
    places = own + (tap // CHUNK_TAPS * PLACES + tap % CHUNK_TAPS)[:, None] * OUT + channels[None, :]
    tl.store(places, total, mask=real[:, None] & (channels < OUT)[None, :])
    tl.store(own + OUT * CHUNKS * PLACES + channels, total_bias, mask=channels < OUT)
