"""The first and second moments of all windows of a batch, for mean and variance of responses to any filters, in Triton.

The variance of the responses w·x over all windows x, and over all that missing pixels may be, is wᵀSw with
S = E[(x − x̄)(x − x̄)ᵀ]. S knows nothing of the filters, so that neither the sum nor its gradient has to be computed for
each of them. Three kernels, where windows have no more taps than a block of 64 holds; the second moments of larger ones
come from `correlations`:

1. `tap_sums_kernel` sums means and noise over all images, and over the places that a tap passes, for a block of pixels;
2. `window_moments_kernel` sums (x − c)(x − c)ᵀ without the noise, with c near the mean of a channel so that no digits
   are lost. Boxes and windows are those of `boxes`;
3. `gather_kernel` adds up what the programs of both have found.

There are no atomic operations, so that equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton.boxes import box_of, count_missing, packed, product, rounded, starts_of, windows_of
from misconv._triton.forward import share_of

__all__ = [
    "BLOCK_T",
    "center_of",
    "gather_kernel",
    "tap_sums_kernel",
    "total_of",
    "window_moments_kernel",
]

BLOCK_T = tl.constexpr(64)  # taps


@triton.jit
def total_of(values, number, BLOCK: tl.constexpr):
    """The sum of some float64 numbers in memory."""
    total = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, number, BLOCK):
        place = first + tl.arange(0, BLOCK)
        total += tl.load(values + place, mask=place < number, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def center_of(sums, channel, WINDOW: tl.constexpr, batch, plane, blocks, BLOCK: tl.constexpr):
    """The mean of all pixels of a channel, from the sums of `tap_sums_kernel`."""
    found = total_of(sums + ((channel + 1) * (2 * WINDOW + 1) - 1) * blocks, blocks, BLOCK)
    return (found / batch / plane).to(tl.float32)  # one after the other: their product may be too large for an int32


@triton.jit
def tap_sums_kernel(
    logits, means, noise, observed, sums,
    batch, height, width, rows, columns, blocks,
    K: tl.constexpr, CHANNELS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, HAS_OBSERVED: tl.constexpr,
    PER_CHANNEL: tl.constexpr, IMAGES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over all images of one block of pixels of a channel, for each tap over the pixels that it passes.

    `sums` (channels, 2 · KY · KX + 1, blocks) has the means of all taps, their noise, and the means of all pixels.
    """
    block, channel = tl.program_id(0), tl.program_id(1)
    plane = height * width
    pixel, image = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, IMAGES)
    means_of, noise_of = tl.zeros((IMAGES, BLOCK), tl.float64), tl.zeros((IMAGES, BLOCK), tl.float64)
    for first in range(0, batch, IMAGES):
        b = (first + image).to(tl.int64)
        real = (b < batch)[:, None] & (pixel < plane)[None, :]
        missing = real
        if HAS_OBSERVED:
            row = b * CHANNELS + channel if PER_CHANNEL else b
            missing = real & (tl.load(observed + (row * plane)[:, None] + pixel[None, :], mask=real, other=1) == 0)
        for k in range(K):
            places = (((b * K + k) * CHANNELS + channel) * plane)[:, None] + pixel[None, :]
            m = tl.load(means + places, mask=real, other=0.0).to(tl.float64)
            v = tl.load(noise + places, mask=missing, other=0.0).to(tl.float64)
            if K > 1:
                index = tl.arange(0, BLOCK_K)
                inside = (b < batch)[:, None] & (index < K)[None, :]
                values = tl.load(logits + b[:, None] * K + index[None, :], mask=inside, other=float("-inf"))
                values = tl.where((b < batch)[:, None], values.to(tl.float64), 0.0)
                exponents = tl.exp(values - tl.max(values, 1)[:, None])
                share = tl.sum(tl.where((index == k)[None, :], exponents, 0.0), 1) / tl.sum(exponents, 1)
                m, v = m * share[:, None], v * share[:, None]
            means_of += m
            noise_of += v
    mean, variance = tl.sum(means_of, 0), tl.sum(noise_of, 0)
    # A tap passes a pixel if its window begins at a place of the response.
    tap = tl.arange(0, BLOCK_X)
    across = (pixel % width + PX)[:, None] - (tap * DX)[None, :]
    passed = (tap < KX)[None, :] & (pixel < plane)[:, None]
    passed = passed & (across >= 0) & (across % SX == 0) & (across // SX < columns)
    sums += channel.to(tl.int64) * ((2 * KY * KX + 1) * blocks) + block
    for line in range(KY):
        down = pixel // width + PY - line * DY
        taken = passed & ((down >= 0) & (down % SY == 0) & (down // SY < rows))[:, None]
        places = sums + (line * KX + tap) * blocks
        tl.store(places, tl.sum(tl.where(taken, mean[:, None], 0.0), 0), mask=tap < KX)
        tl.store(places + KY * KX * blocks, tl.sum(tl.where(taken, variance[:, None], 0.0), 0), mask=tap < KX)
    tl.store(sums + 2 * KY * KX * blocks, tl.sum(mean, 0))


@triton.jit
def _add_product(total, left, right, PRECISION: tl.constexpr):
    """total + leftᵀ right, of bfloat16 numbers; for TF32 in two parts, all but the product of what they leave."""
    first, second = left.to(tl.bfloat16), right.to(tl.bfloat16)
    total = product(tl.trans(first), second, total, "bf16")
    if PRECISION == "tf32":
        rest = (right - second.to(tl.float32)).to(tl.bfloat16)
        total = product(tl.trans(first), rest, total, "bf16")
        rest = (left - first.to(tl.float32)).to(tl.bfloat16)
        total = product(tl.trans(rest), second, total, "bf16")
    return total


@triton.jit
def _add(total, values, starts, table, inside, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """Add XᵀX, with X the windows of a box of these values, of which none is outside."""
    box = values
    if PRECISION != "tf32":
        box = packed(rounded(values, PRECISION), PRECISION)
    x = windows_of(box, starts, table, 0, PRECISION, BLOCK_T)
    if not EVEN:
        x = tl.where(inside, x, 0.0)
    return _add_product(total, x, x, PRECISION)


@triton.jit
def window_moments_kernel(
    logits, means, factors, observed, sums, table, products, center,
    batch, height, width, rows, columns, tiles_x, tiles, blocks,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, WINDOW: tl.constexpr, SY: tl.constexpr,
    SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr,
    BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k E[(x − c)(x − c)ᵀ], less the noise, over the tiles of one program, which come round-robin.

    c is the mean of all pixels of a channel, from `sums` of the kernel above; `center` receives it. `products` has for
    each program its sum. EVEN if tiles cover the responses and no more.
    """
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    plane = height * width
    size = CHANNELS * plane
    t = tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_Q) // (BOX_Y * BOX_X)
    c = tl.zeros((BLOCK_Q,), tl.float32)
    for number in range(CHANNELS):
        found = center_of(sums, number, WINDOW, batch, plane, blocks, BLOCK_N)
        c = tl.where(channel == number, found, c)
        if tl.program_id(0) == 0:
            tl.store(center + number, found)
    total = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    pixel = tl.arange(0, BLOCK_P)
    starts = starts_of(TILE_X, SY, SX, BOX_X, BLOCK_P, PRECISION)
    for index in tl.range(tl.program_id(0), batch * tiles, tl.num_programs(0), num_stages=1, disable_licm=True):
        b, tile = index // tiles, index % tiles
        image, loadings = b.to(tl.int64) * K * size, b.to(tl.int64) * (K * L) * size
        seen = observed
        if HAS_OBSERVED:
            seen = observed + b.to(tl.int64) * (size if PER_CHANNEL else plane)
        y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
        top, left = y * SY - PY, x * SX - PX
        inside = ((y + pixel // TILE_X < rows) & (x + pixel % TILE_X < columns))[:, None]
        touched = count_missing(seen, top, left, height, width, CHANNELS, CHANNELS, BOX_Y, BOX_X, BLOCK_Q,
                                HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        offsets, missing = box_of(seen, 0, top, left, height, width, CHANNELS, CHANNELS, BOX_Y, BOX_X, BLOCK_Q,
                                  HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        if touched > 0:
            for k in range(K):
                root = 1.0
                if K > 1:
                    root = tl.sqrt(share_of(logits + b * K, k, K, BLOCK_K))
                values = tl.load(means + image + k * size + offsets, mask=offsets >= 0, other=0.0).to(tl.float32)
                total = _add(total, (values - c) * root, starts, table, inside, EVEN, PRECISION)
                for j in range(L):
                    places = factors + loadings + (k * L + j) * size + missing
                    values = tl.load(places, mask=missing >= 0, other=0.0).to(tl.float32)
                    total = _add(total, values * root, starts, table, inside, EVEN, PRECISION)
        else:
            values = tl.load(means + image + offsets, mask=offsets >= 0, other=0.0).to(tl.float32)
            total = _add(total, values - c, starts, table, inside, EVEN, PRECISION)
    products += tl.program_id(0).to(tl.int64) * (BLOCK_T * BLOCK_T)
    tl.store(products + t[:, None] * BLOCK_T + t[None, :], total)


@triton.jit
def gather_kernel(
    products, sums, tracked, matrix, taps, programs, blocks, count,
    KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row of the second moments, over all programs, and the first moments of its tap.

    Where pixels come in pairs a line of a window has WIDE taps, of which KX count. `matrix` is square; `taps` has a row
    of means and a row of noise. `tracked` counts batches, for the kernel that comes next; it may be None.
    """
    row, column = tl.program_id(0), tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_T,), tl.float64)
    for first in range(0, programs, BLOCK_N):
        program = first + tl.arange(0, BLOCK_N)
        places = program.to(tl.int64)[:, None] * (BLOCK_T * BLOCK_T) + row * BLOCK_T + column[None, :]
        found = tl.load(products + places, mask=(program < programs)[:, None], other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    tl.store(matrix + row * BLOCK_T + column, total / count)
    line, tap = row // WIDE, row % WIDE
    if tap < KX:
        places = sums + ((line // KY) * (2 * KY * KX + 1) + line % KY * KX + tap).to(tl.int64) * blocks
        tl.store(taps + row, total_of(places, blocks, BLOCK_N) / count)
        tl.store(taps + BLOCK_T + row, total_of(places + KY * KX * blocks, blocks, BLOCK_N) / count)
    if tracked is not None:
        tl.store(tracked, tl.load(tracked, mask=row == 0, other=0) + 1, mask=row == 0)
