"""The second moments of large windows of a batch from the correlations of an image with itself, in Triton.

Of two taps the product of their pixels, summed over all windows, depends on little more than how far they are apart: a
window later both have moved on by the stride. So windows are not spread, as `windows` does with small ones. Instead

1. `arrange_kernel` writes the pixels in which a window begins and no other one does, stride by stride, beside each
   other: a *spot* of F numbers for every window, also for those that only reach into the response;
2. `correlation_kernel` multiplies TX neighbouring spots by those around them, from SIDE spots before to SIDE spots
   behind, and `dy` rows below, summed over rows and images; all of that is contiguous in memory;
3. `assemble_kernel` finds in these products the second moments of every pair of taps.

A pair of taps in the spots (i, j) and (i + dy, j + dx) of a window passes the places (i, j) + (windows of the
response), of which all but a few rows and columns at the borders are common to all pairs. Work is cut into *jobs*:
those common places, every other row by itself, and the columns left and right of the common ones, which are told apart
anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from misconv._triton.boxes import product
from misconv._triton.forward import share_of
from misconv._triton.windows import center_of, total_of

__all__ = ["ROWS", "Correlations", "arrange_kernel", "assemble_kernel", "correlation_kernel", "cut_jobs"]

ROWS = 32  # of spots at a time
_ALIGNED = 16  # spots begin where the widest loads do
_JOB = tl.constexpr(11)  # numbers that describe a job
_LARGEST = (64, 256)  # matrices


class Correlations(NamedTuple):
    """How windows are correlated: their size in spots, and the sizes of matrices."""

    down: int  # spots of a window
    across: int
    spot: int  # places for the pixels of a spot
    columns: int  # spots at a time, TX
    left: int  # places for their pixels
    right: int  # and for those around them

    @classmethod
    def of(cls, channels: int, kernel: tuple[int, int], stride: tuple[int, int]) -> Correlations | None:
        """None where matrices would be too large."""
        down, across = (-(-size // step) for size, step in zip(kernel, stride, strict=True))
        spot, beside, found = -(-channels * stride[0] * stride[1] // _ALIGNED) * _ALIGNED, across - 1, None
        for columns in range(1, max(1, _LARGEST[0] // spot) + 1):
            reach = (columns, columns + 2 * beside)
            left, right = (max(16, triton.next_power_of_2(number * spot)) for number in reach)
            # The smaller matrices are for a window, the better.
            if left <= _LARGEST[0] and right <= _LARGEST[1] and (found is None or (left + right) / columns < found[0]):
                found = (left + right) / columns, cls(down, across, spot, columns, left, right)
        return None if found is None else found[1]

    def size(self, response: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of spots, with those that are read beside them and count for nothing."""
        margin = 2 * (self.across - 1) + -(-max(self.left, self.right) // self.spot)
        return response[0] + self.down - 1, response[1] + self.across - 1 + margin


def cut_jobs(c: Correlations, batch: int, size: tuple[int, int], programs: int) -> list[list[int]]:
    """The jobs for responses of this size, which reach at least as far as a window.

    Of each: the first row and the number of rows; the first column, the end of columns, blocks of columns; the first
    of the blocks and the end of blocks, counted over columns and then over rows of all images; the least and the
    largest i that passes; whether columns lie left (0), are common (1) or lie right (2), and how far from the first
    one of these.
    """
    rows, columns = size
    beside = c.across - 1
    lines = [(row, 1, 0, row) for row in range(c.down - 1)]
    lines += [(c.down - 1, rows - c.down + 1, 0, c.down - 1)]
    lines += [(rows + row, 1, row + 1, c.down - 1) for row in range(c.down - 1)]
    places = [(beside, columns, 1, 0)]
    for start in range(0, beside, c.columns):
        end = min(start + c.columns, beside)
        places += [(start, end, 0, start), (columns + start, columns + end, 2, start)]
    common = -(-batch * (rows - c.down + 1) // ROWS) * -(-(columns - beside) // c.columns)
    share = -(-common // max(1, programs // c.down))
    jobs = []
    for first, number, least, largest in lines:
        for begin, end, kind, place in places:
            blocks = -(-(end - begin) // c.columns)
            items = -(-batch * number // ROWS) * blocks
            for start in range(0, items, share):
                stop = min(start + share, items)
                jobs.append([first, number, begin, end, blocks, start, stop, least, largest, kind, place])
    return jobs


@triton.jit
def _write(places, values, written, rest, PARTS: tl.constexpr):
    """Numbers in one bfloat16 or two."""
    first = values.to(tl.bfloat16)
    tl.store(places, first, mask=written)
    if PARTS == 2:
        tl.store(places + rest, (values - first.to(tl.float32)).to(tl.bfloat16), mask=written)


@triton.jit
def arrange_kernel(
    logits, means, factors, observed, sums, spots, touched, center,
    first, batch, total, height, width, rows, columns, blocks,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr, SY: tl.constexpr,
    SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
    PARTS: tl.constexpr, SIDE: tl.constexpr, SPOT: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """√π_k times the means of all components, around c, then their factors: (K · (1 + L), batch, rows, columns, SPOT).

    Of a `total` of images these begin with the `first` one. c is the mean of all pixels of a channel, from `sums` of
    `tap_sums_kernel`; `center` receives it. Padding is −c; what no window reaches is 0. `touched` (batch, rows,
    columns) tells whether a pixel of a spot is missing. With two PARTS, what bfloat16 leaves of the numbers follows in
    as many places.
    """
    b = tl.program_id(1)
    place, f = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_F)
    y, x = place // columns, place % columns - SIDE
    channel, line, column = f // (SY * SX), f // SX % SY, f % SX
    c = tl.zeros((BLOCK_F,), tl.float32)
    for number in range(CHANNELS):
        found = center_of(sums, number, WINDOW, total, height * width, blocks, BLOCK_N)
        c = tl.where(channel == number, found, c)
        if (tl.program_id(0) == 0) & (b == 0):
            tl.store(center + number, found)
    plane = height * width
    down, across = (y * SY - PY)[:, None] + line[None, :], (x * SX - PX)[:, None] + column[None, :]
    # Margins lie beyond all windows; what is read there is multiplied, but not looked at.
    reached = ((y < rows) & (x >= 0))[:, None] & (channel < CHANNELS)[None, :]
    inside = reached & (down >= 0) & (down < height) & (across >= 0) & (across < width)
    flat = down * width + across
    places = channel[None, :] * plane + flat
    image = (first + b).to(tl.int64)
    missing = inside
    if HAS_OBSERVED:
        seen = places if PER_CHANNEL else flat
        seen = tl.load(observed + image * (CHANNELS * plane if PER_CHANNEL else plane) + seen, mask=inside, other=1)
        missing = inside & (seen == 0)
    size = rows * columns
    tl.store(touched + b.to(tl.int64) * size + place, tl.max(missing.to(tl.int8), 1), mask=place < size)
    spots += (b.to(tl.int64) * size + place)[:, None] * SPOT + f[None, :]
    step = (b * 0 + batch).to(tl.int64) * size * SPOT  # a batch of 1 is no tensor
    rest, written = (K + K * L) * step, (place < size)[:, None] & (f < SPOT)[None, :]
    for k in range(K):
        root = 1.0
        if K > 1:
            root = tl.sqrt(share_of(logits + image * K, k, K, BLOCK_K))
        start = (image * K + k) * (CHANNELS * plane)
        values = tl.load(means + start + places, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(reached, (values - c[None, :]) * root, 0.0)
        _write(spots + k * step, values, written, rest, PARTS)
        for factor in range(L):
            start = ((image * K + k) * L + factor) * (CHANNELS * plane)
            values = tl.load(factors + start + places, mask=missing, other=0.0).to(tl.float32) * root
            _write(spots + (K + k * L + factor) * step, values, written, rest, PARTS)


@triton.jit
def _add(total, spots, start, below, x, end, real, rest, PARTS: tl.constexpr, TX: tl.constexpr, SIDE: tl.constexpr,
         SPOT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):  # fmt: skip
    """Add the products of TX spots, of which none lies behind the end, and of those around them.

    With two parts of every number, of which the second one is `rest` places farther: all but the product of these.
    """
    m, n = tl.arange(0, LEFT), tl.arange(0, RIGHT)
    counts = real[:, None] & ((m < TX * SPOT) & (x + m // SPOT < end))[None, :]
    around = (n < (TX + 2 * SIDE) * SPOT)[None, :]
    left, right = spots + start[:, None] + m[None, :], spots + below[:, None] + n[None, :]
    one, other = tl.trans(tl.load(left, mask=counts, other=0.0)), tl.load(right, mask=around, other=0.0)
    total = product(one, other, total, "bf16")
    if PARTS == 2:
        total = product(one, tl.load(right + rest, mask=around, other=0.0), total, "bf16")
        total = product(tl.trans(tl.load(left + rest, mask=counts, other=0.0)), other, total, "bf16")
    return total


@triton.jit
def correlation_kernel(
    spots, touched, jobs, products,
    images, more, rows, columns, step,
    K: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr, DOWN: tl.constexpr, TX: tl.constexpr,
    SIDE: tl.constexpr, SPOT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_X: tl.constexpr,
):  # fmt: skip
    """Products of spots and of those around them, `dy` rows below, summed over a job, added to what is there if `more`.

    `products` has a matrix (LEFT, RIGHT) for every job and every dy. There are `step` numbers between two components.
    """
    job, dy = tl.program_id(0), tl.program_id(1)
    jobs += job * _JOB
    first_row, height, first_column, end = tl.load(jobs), tl.load(jobs + 1), tl.load(jobs + 2), tl.load(jobs + 3)
    across, first, last = tl.load(jobs + 4), tl.load(jobs + 5), tl.load(jobs + 6)
    matrix = tl.arange(0, LEFT)[:, None] * RIGHT + tl.arange(0, RIGHT)[None, :]
    products += (job * DOWN + dy).to(tl.int64) * (LEFT * RIGHT)
    total = tl.zeros((LEFT, RIGHT), tl.float32)
    if more > 0:
        total = tl.load(products + matrix)
    line, step = columns * SPOT, step.to(tl.int64)
    rest = (K + K * L) * step
    for k in range(K):
        for item in range(first, last):
            row = item // across * BLOCK_R + tl.arange(0, BLOCK_R)
            x = first_column + item % across * TX
            b, y = row // height, first_row + row % height
            real = b < images
            start = k * step + (tl.minimum(b, images - 1).to(tl.int64) * rows) * line + x * SPOT
            total = _add(total, spots, start + y * line + SIDE * SPOT, start + tl.minimum(y + dy, rows - 1) * line, x,
                         end, real, rest, PARTS, TX, SIDE, SPOT, LEFT, RIGHT)  # fmt: skip
    if L > 0:
        for item in range(first, last):
            row = item // across * BLOCK_R + tl.arange(0, BLOCK_R)
            x = first_column + item % across * TX
            b, y = row // height, first_row + row % height
            real = b < images
            image = tl.minimum(b, images - 1).to(tl.int64) * rows
            window = tl.arange(0, BLOCK_X)
            places = (image + y)[:, None] * columns + (x + SIDE + window)[None, :]
            counts = real[:, None] & ((window < TX) & (x + window < end))[None, :]
            if tl.max(tl.max(tl.load(touched + places, mask=counts, other=0), 1), 0) > 0:
                start = image * line + x * SPOT
                for number in range(K, K * (1 + L)):
                    place = number * step + start
                    total = _add(total, spots, place + y * line + SIDE * SPOT,
                                 place + tl.minimum(y + dy, rows - 1) * line, x, end, real, rest, PARTS, TX, SIDE,
                                 SPOT, LEFT, RIGHT)  # fmt: skip
    tl.store(products + matrix, total)


@triton.jit
def assemble_kernel(
    products, jobs, sums, tracked, matrix, taps, number, blocks, count,
    TAPS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    DOWN: tl.constexpr, TX: tl.constexpr, SIDE: tl.constexpr, SPOT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row of the second moments, from its own tap on, its column, and the first moments of its tap.

    Where pixels come in pairs a line of a window has WIDE taps, of which KX count. `matrix` has rows of STRIDE numbers;
    `taps` has a row of means and a row of noise. `tracked` counts batches, for the kernel that comes next, or is None.
    """
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    if row % WIDE < KX:
        real = (column >= row) & (column < TAPS) & (column % WIDE < KX)
        y, x, y_2, x_2 = row // WIDE % KY, row % WIDE, column // WIDE % KY, column % WIDE
        f = (row // WIDE // KY * SY + y % SY) * SX + x % SX
        f_2 = (column // WIDE // KY * SY + y_2 % SY) * SX + x_2 % SX
        y, x, y_2, x_2 = y // SY, x // SX, y_2 // SY, x_2 // SX
        turned = y_2 < y  # the upper tap comes first
        i, dy = tl.where(turned, y_2, y), tl.where(turned, y - y_2, y_2 - y)
        j, dx = tl.where(turned, x_2, x), tl.where(turned, x - x_2, x_2 - x)
        place = (dy * LEFT + tl.where(turned, f_2, f)) * RIGHT + (SIDE + dx) * SPOT + tl.where(turned, f, f_2)
        total = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, number, BLOCK_J):
            job = first + tl.arange(0, BLOCK_J)
            exists, about = job < number, jobs + job * _JOB
            least, largest = tl.load(about + 7, mask=exists, other=1), tl.load(about + 8, mask=exists, other=0)
            kind, begin = tl.load(about + 9, mask=exists, other=1), tl.load(about + 10, mask=exists, other=0)
            passed = real[None, :] & (least[:, None] <= i[None, :]) & (i[None, :] <= largest[:, None])
            start = job.to(tl.int64)[:, None] * (DOWN * LEFT * RIGHT) + place[None, :]
            for window in range(TX):
                before = j[None, :] <= (begin + window)[:, None]
                here = passed & ((kind == 1)[:, None] | (before == (kind == 0)[:, None]))
                found = tl.load(products + start + window * (SPOT * RIGHT + SPOT), mask=here, other=0.0)
                total += tl.sum(found.to(tl.float64), 0)
        total /= count
        tl.store(matrix + row * STRIDE + column, total, mask=real)
        tl.store(matrix + column * STRIDE + row, total, mask=real)
        line, tap = row // WIDE, row % WIDE
        places = sums + ((line // KY) * (2 * KY * KX + 1) + line % KY * KX + tap).to(tl.int64) * blocks
        tl.store(taps + row, total_of(places, blocks, BLOCK_N) / count)
        tl.store(taps + STRIDE + row, total_of(places + KY * KX * blocks, blocks, BLOCK_N) / count)
    if tracked is not None:
        tl.store(tracked, tl.load(tracked, mask=row == 0, other=0) + 1, mask=row == 0)
