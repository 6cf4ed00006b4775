"""Kernels for large windows of few channels: from images that are packed so that a window is read in long runs.

Windows of 7×7 pixels in three channels are the stem of most networks. Spread one number at a time they keep the GPU
busy with addresses; so the images are written once more, with channels last and zeros around them, and a row of a
window is then one run of numbers. Rows are padded to a power of two, and a window to another, TAPS.

Products are of bfloat16 numbers with float32 sums. A number of more bits is held as the sum of two, and the product of
the smaller parts is left out: 16 bits, more than TF32 has. Responses are (channels, pixels), so that gradients of them
can be multiplied with windows as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton.expectations import activation, expected, slopes
from misconv._triton.forward import count_missing, product, share_of, stacked

__all__ = [
    "pack_images_kernel",
    "pack_weights_kernel",
    "packed_backward_kernel",
    "packed_forward_kernel",
    "packed_squares_kernel",
]

# Packing ---------------------------------------------------------------------------------------------------------


@triton.jit
def _store_parts(high, low, places, values, mask, PARTS: tl.constexpr):
    """A number as one of bfloat16, or as the sum of two."""
    first = values.to(tl.bfloat16)
    tl.store(high + places, first, mask=mask)
    if PARTS == 2:
        tl.store(low + places, (values - first.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def pack_images_kernel(
    means, factors, noise, observed, high, low, height, width, packed_height, packed_width, tiles,
    L: tl.constexpr, CHANNELS: tl.constexpr, PADDED: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    K: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of every component mean, noise and factors, (B, K, 2 + L, rows, columns, PADDED); no doubt where it was seen."""
    plane, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    part, kind = plane // (2 + L), plane % (2 + L)  # of which image and component, and what of it
    entry = tile * BLOCK + tl.arange(0, BLOCK)
    size = packed_height * packed_width * PADDED
    channel, pixel = entry % PADDED, entry // PADDED
    y, x = pixel // packed_width - PY, pixel % packed_width - PX
    inside = (entry < size) & (channel < CHANNELS) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    place = channel * (height * width) + y * width + x
    image_size = CHANNELS * height * width
    if kind == 0:
        values = tl.load(means + part.to(tl.int64) * image_size + place, mask=inside, other=0.0).to(tl.float32)
    else:
        hidden = inside
        if HAS_OBSERVED:
            image = (part // K).to(tl.int64)
            if PER_CHANNEL:
                seen = tl.load(observed + image * image_size + place, mask=inside, other=1)
            else:
                seen = tl.load(observed + image * (height * width) + y * width + x, mask=inside, other=1)
            hidden = inside & (seen == 0)
        if kind == 1:
            values = tl.load(noise + part.to(tl.int64) * image_size + place, mask=hidden, other=0.0).to(tl.float32)
        else:
            loadings = factors + (part.to(tl.int64) * L + kind - 2) * image_size
            values = tl.load(loadings + place, mask=hidden, other=0.0).to(tl.float32)
    _store_parts(high, low, plane.to(tl.int64) * size + entry, values, entry < size, PARTS)


@triton.jit
def pack_weights_kernel(
    weight, packed, OUT: tl.constexpr, CHANNELS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
    PADDED: tl.constexpr, ROW: tl.constexpr, TAPS: tl.constexpr, OUT_PADDED: tl.constexpr,
):  # fmt: skip
    """Weights (OUT, C, KY, KX) and their squares, each as a sum of two numbers, (4, OUT_PADDED, TAPS)."""
    o, t = tl.program_id(0), tl.arange(0, TAPS)
    y, x, channel = t // ROW, t % ROW // PADDED, t % PADDED
    exists = (y < KY) & (x < KX) & (channel < CHANNELS) & (t + o * TAPS < OUT * TAPS)
    values = tl.load(weight + o * (CHANNELS * KY * KX) + (channel * KY + y) * KX + x, mask=exists, other=0.0)
    values = values.to(tl.float32)
    places = o * TAPS + t
    SIZE: tl.constexpr = OUT_PADDED * TAPS
    _store_parts(packed, packed + SIZE, places, values, t >= 0, 2)
    _store_parts(packed + 2 * SIZE, packed + 3 * SIZE, places, values * values, t >= 0, 2)


# Moments ---------------------------------------------------------------------------------------------------------


@triton.jit
def _taps(block, pitch, KY: tl.constexpr, KX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, PADDED: tl.constexpr,
          ROW: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Where a block of taps lies, from the begin of a window, and which there are; a row has `pitch` numbers."""
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = (t // ROW < KY) & (t % ROW < KX * PADDED)
    # Where DX is 1 this is t % ROW, which the compiler must see to read long runs.
    along = t % ROW if DX == 1 else t % ROW // PADDED * (DX * PADDED) + t % PADDED
    return t // ROW * (DY * pitch) + along, exists


@triton.jit
def _windows(images, starts, taps, exists):
    """(windows, taps) of a packed image."""
    return tl.load(images + starts[:, None] + taps[None, :], mask=exists[None, :], other=0.0)


@triton.jit
def _factors(images, number, starts, taps, exists, size, L: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr):
    """The windows of factors number · STACK, … one below the other, (STACK · pixels, taps)."""
    factor = number * STACK + tl.arange(0, STACK * BLOCK_P) // BLOCK_P
    places = (stacked(starts, STACK) + factor * size)[:, None] + taps[None, :]
    mask = exists[None, :]
    if L % STACK != 0:
        mask = mask & (factor < L)[:, None]
    return tl.load(images + places, mask=mask, other=0.0)


@triton.jit
def _filters(packed, which: tl.constexpr, channels, block, OUT_PADDED: tl.constexpr, TAPS: tl.constexpr,
             BLOCK_T: tl.constexpr):  # fmt: skip
    """A block of taps of the filters or their squares, (channels, taps)."""
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    return tl.load(packed + which * (OUT_PADDED * TAPS) + channels[:, None] * TAPS + t[None, :])


@triton.jit
def _respond(total, filters, windows):
    """total + the responses (channels, windows)."""
    return product(filters, tl.trans(windows), total, "bf16")


@triton.jit
def _sum_stack(values, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """(channels, STACK · pixels) → (channels, pixels)."""
    if STACK > 1:
        values = tl.sum(tl.reshape(values, (BLOCK_O, STACK, BLOCK_P)), 1)
    return values


@triton.jit
def _repeat_stack(values, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """(channels, pixels) → (channels, STACK · pixels)."""
    if STACK > 1:
        repeated = tl.broadcast_to(values[:, None, :], (BLOCK_O, STACK, BLOCK_P))
        values = tl.reshape(repeated, (BLOCK_O, STACK * BLOCK_P))
    return values


@triton.jit
def _mean(high, low, at, starts, pitch, packed, channels, total, KY: tl.constexpr, KX: tl.constexpr, DY: tl.constexpr,
          DX: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr, OUT_PADDED: tl.constexpr,
          TAPS: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """total + the responses (channels, pixels) to the packed image at `at`."""
    for block in tl.range(TAPS // BLOCK_T, num_stages=STAGES):
        taps, exists = _taps(block, pitch, KY, KX, DY, DX, PADDED, ROW, BLOCK_T)
        first = _filters(packed, 0, channels, block, OUT_PADDED, TAPS, BLOCK_T)
        windows = _windows(high + at, starts, taps, exists)
        total = _respond(total, first, windows)
        total = _respond(total, _filters(packed, 1, channels, block, OUT_PADDED, TAPS, BLOCK_T), windows)
        if PARTS == 2:
            total = _respond(total, first, _windows(low + at, starts, taps, exists))
    return total


@triton.jit
def _stack(high, low, at, number, size, starts, pitch, packed, channels, L: tl.constexpr, KY: tl.constexpr,
           KX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
           ROW: tl.constexpr, OUT_PADDED: tl.constexpr, TAPS: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr,
           BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """The responses (channels, STACK · pixels) to one stack of factors, which begin at `at`."""
    r = tl.zeros((BLOCK_O, STACK * BLOCK_P), tl.float32)
    for block in tl.range(TAPS // BLOCK_T, num_stages=STAGES):
        taps, exists = _taps(block, pitch, KY, KX, DY, DX, PADDED, ROW, BLOCK_T)
        first = _filters(packed, 0, channels, block, OUT_PADDED, TAPS, BLOCK_T)
        windows = _factors(high + at, number, starts, taps, exists, size, L, STACK, BLOCK_P)
        r = _respond(r, first, windows)
        r = _respond(r, _filters(packed, 1, channels, block, OUT_PADDED, TAPS, BLOCK_T), windows)
        if PARTS == 2:
            r = _respond(r, first, _factors(low + at, number, starts, taps, exists, size, L, STACK, BLOCK_P))
    return r


@triton.jit
def _moments(high, low, at, size, starts, pitch, packed, channels, L: tl.constexpr, KY: tl.constexpr,
             KX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
             ROW: tl.constexpr, OUT_PADDED: tl.constexpr, TAPS: tl.constexpr, STACK: tl.constexpr,
             BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Mean and variance (channels, pixels) under the component whose planes begin at `at`, and the first stack."""
    m = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
    v = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
    r = tl.zeros((BLOCK_O, STACK * BLOCK_P), tl.float32)
    for block in tl.range(TAPS // BLOCK_T, num_stages=STAGES):
        taps, exists = _taps(block, pitch, KY, KX, DY, DX, PADDED, ROW, BLOCK_T)
        first = _filters(packed, 0, channels, block, OUT_PADDED, TAPS, BLOCK_T)
        rest = _filters(packed, 1, channels, block, OUT_PADDED, TAPS, BLOCK_T)
        square = _filters(packed, 2, channels, block, OUT_PADDED, TAPS, BLOCK_T)
        windows = _windows(high + at, starts, taps, exists)
        m = _respond(m, first, windows)
        m = _respond(m, rest, windows)
        noise = _windows(high + at + size, starts, taps, exists)
        v = _respond(v, square, noise)
        v = _respond(v, _filters(packed, 3, channels, block, OUT_PADDED, TAPS, BLOCK_T), noise)
        if PARTS == 2:
            m = _respond(m, first, _windows(low + at, starts, taps, exists))
            v = _respond(v, square, _windows(low + at + size, starts, taps, exists))
        if L > 0:
            factors = _factors(high + at + 2 * size, 0, starts, taps, exists, size, L, STACK, BLOCK_P)
            r = _respond(r, first, factors)
            r = _respond(r, rest, factors)
            if PARTS == 2:
                factors = _factors(low + at + 2 * size, 0, starts, taps, exists, size, L, STACK, BLOCK_P)
                r = _respond(r, first, factors)
    v += _sum_stack(r * r, STACK, BLOCK_P, BLOCK_O)
    for number in range(1, (L + STACK - 1) // STACK):
        more = _stack(high, low, at + 2 * size, number, size, starts, pitch, packed, channels, L, KY, KX, DY, DX, PARTS,
                      PADDED, ROW, OUT_PADDED, TAPS, STACK, BLOCK_P, BLOCK_O, BLOCK_T, STAGES)  # fmt: skip
        v += _sum_stack(more * more, STACK, BLOCK_P, BLOCK_O)
    return m, v, r


@triton.jit
def _starts(y, x, pitch, SY: tl.constexpr, SX: tl.constexpr, PADDED: tl.constexpr, TILE_X: tl.constexpr,
            BLOCK_P: tl.constexpr):  # fmt: skip
    """Where the windows of a tile begin whose corner is (y, x)."""
    pixel = tl.arange(0, BLOCK_P)
    return (y + pixel // TILE_X) * (SY * pitch) + (x + pixel % TILE_X) * (SX * PADDED)


# Forward, statistics, backward -----------------------------------------------------------------------------------


@triton.jit
def packed_forward_kernel(
    logits, high, low, observed, packed, bias, out,
    height, width, rows, columns, tiles_x, tiles, packed_height, packed_width, out_b, out_o, out_y, out_x, least, most,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr, TAPS: tl.constexpr, OUT_PADDED: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr,
    BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, STACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k E[f(N(m_k, v_k))] for one tile of one image and one block of channels."""
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    channels = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    pitch, size = packed_width * PADDED, packed_height * packed_width * PADDED
    image = b.to(tl.int64) * (K * (2 + L)) * size
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channels, mask=channels < OUT, other=0.0).to(tl.float32)
    y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
    touched = _count(observed, b, y, x, height, width, CHANNELS, SY, SX, PY, PX, BOX_Y, BOX_X, BLOCK_Q, HAS_OBSERVED,
                     PER_CHANNEL)  # fmt: skip
    starts = _starts(y, x, pitch, SY, SX, PADDED, TILE_X, BLOCK_P)
    result = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
    if touched > 0:
        for k in range(K):
            m, v, _ = _moments(high, low, image + k * (2 + L) * size, size, starts, pitch, packed, channels, L, KY, KX,
                               DY, DX, PARTS, PADDED, ROW, OUT_PADDED, TAPS, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                               STAGES)  # fmt: skip
            e = expected(m + offset[:, None], v, ACTIVATION, least, most)
            if K > 1:
                e = e * share_of(logits + b * K, k, K, BLOCK_K)
            result += e
    else:
        m = _mean(high, low, image, starts, pitch, packed, channels, result, KY, KX, DY, DX, PARTS, PADDED, ROW,
                  OUT_PADDED, TAPS, BLOCK_T, STAGES)  # fmt: skip
        result, _ = activation(m + offset[:, None], ACTIVATION, least, most)
    pixel = tl.arange(0, BLOCK_P)
    y, x = y + pixel // TILE_X, x + pixel % TILE_X
    places = (y * out_y + x * out_x)[None, :] + channels[:, None] * out_o
    inside = ((y < rows) & (x < columns))[None, :] & (channels < OUT)[:, None]
    tl.store(out + b.to(tl.int64) * out_b + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _count(observed, b, y, x, height, width, CHANNELS: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
           PY: tl.constexpr, PX: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr,
           HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr):  # fmt: skip
    """How many pixels are missing under the windows of a tile."""
    seen = observed
    if HAS_OBSERVED:
        if PER_CHANNEL:
            seen = observed + b.to(tl.int64) * (CHANNELS * height * width)
        else:
            seen = observed + b.to(tl.int64) * (height * width)
    return count_missing(seen, y * SY - PY, x * SX - PX, height, width, CHANNELS, 1, BOX_Y, BOX_X, BLOCK_Q,
                         HAS_OBSERVED, PER_CHANNEL)  # fmt: skip


@triton.jit
def packed_squares_kernel(
    logits, high, low, observed, packed, bias, sums,
    batch, height, width, rows, columns, tiles_x, tiles, packed_height, packed_width,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr, TAPS: tl.constexpr, OUT_PADDED: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr,
    BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, STACK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k (m_k² + v_k) over the tiles of one program, which come round-robin; `sums` has a row for each."""
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    channels = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    pitch, size = packed_width * PADDED, packed_height * packed_width * PADDED
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channels, mask=channels < OUT, other=0.0).to(tl.float32)
    pixel = tl.arange(0, BLOCK_P)
    zero = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
    total = tl.zeros((BLOCK_O,), tl.float32)
    for index in tl.range(tl.program_id(0), batch * tiles, tl.num_programs(0), num_stages=1):
        b, tile = index // tiles, index % tiles
        y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
        image = b.to(tl.int64) * (K * (2 + L)) * size
        touched = _count(observed, b, y, x, height, width, CHANNELS, SY, SX, PY, PX, BOX_Y, BOX_X, BLOCK_Q,
                         HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        starts = _starts(y, x, pitch, SY, SX, PADDED, TILE_X, BLOCK_P)
        inside = ((y + pixel // TILE_X < rows) & (x + pixel % TILE_X < columns))[None, :]
        if touched > 0:
            for k in range(K):
                m, v, _ = _moments(high, low, image + k * (2 + L) * size, size, starts, pitch, packed, channels, L, KY,
                                   KX, DY, DX, PARTS, PADDED, ROW, OUT_PADDED, TAPS, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                                   STAGES)  # fmt: skip
                m += offset[:, None]
                square = tl.sum(tl.where(inside, m * m + v, 0.0), 1)
                if K > 1:
                    square = square * share_of(logits + b * K, k, K, BLOCK_K)
                total += square
        else:
            m = _mean(high, low, image, starts, pitch, packed, channels, zero, KY, KX, DY, DX, PARTS, PADDED, ROW,
                      OUT_PADDED, TAPS, BLOCK_T, STAGES)  # fmt: skip
            m += offset[:, None]
            total += tl.sum(tl.where(inside, m * m, 0.0), 1)
    tl.store(sums + tl.program_id(0).to(tl.int64) * OUT + channels, total, mask=channels < OUT)


@triton.jit
def _add_parts(total, g, windows, rest, PARTS: tl.constexpr):
    """total + g X (channels, taps), g (channels, pixels), X the sum of windows and, in two parts, rest."""
    first = g.to(tl.bfloat16)
    total = product(first, windows, total, "bf16")
    total = product((g - first.to(tl.float32)).to(tl.bfloat16), windows, total, "bf16")
    if PARTS == 2:
        total = product(first, rest, total, "bf16")
    return total


@triton.jit
def _add_windows(t0, t1, t2, t3, g, high, low, at, starts, pitch, KY: tl.constexpr, KX: tl.constexpr,
                 DY: tl.constexpr, DX: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr,
                 BLOCK_T: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """What the packed image at `at` gives to the gradient of all blocks of taps."""
    t0 = _add_block(t0, 0, g, high, low, at, starts, pitch, KY, KX, DY, DX, PARTS, PADDED, ROW, BLOCK_T)
    if BLOCKS > 1:
        t1 = _add_block(t1, 1, g, high, low, at, starts, pitch, KY, KX, DY, DX, PARTS, PADDED, ROW, BLOCK_T)
    if BLOCKS > 2:
        t2 = _add_block(t2, 2, g, high, low, at, starts, pitch, KY, KX, DY, DX, PARTS, PADDED, ROW, BLOCK_T)
        t3 = _add_block(t3, 3, g, high, low, at, starts, pitch, KY, KX, DY, DX, PARTS, PADDED, ROW, BLOCK_T)
    return t0, t1, t2, t3


@triton.jit
def _add_block(total, block, g, high, low, at, starts, pitch, KY: tl.constexpr, KX: tl.constexpr, DY: tl.constexpr,
               DX: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr,
               BLOCK_T: tl.constexpr):  # fmt: skip
    taps, exists = _taps(block, pitch, KY, KX, DY, DX, PADDED, ROW, BLOCK_T)
    windows = _windows(high + at, starts, taps, exists)
    rest = windows
    if PARTS == 2:
        rest = _windows(low + at, starts, taps, exists)
    return _add_parts(total, g, windows, rest, PARTS)


@triton.jit
def _add_factors(t0, t1, t2, t3, g, high, low, at, number, size, starts, pitch, L: tl.constexpr, KY: tl.constexpr,
                 KX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
                 ROW: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
                 BLOCKS: tl.constexpr):  # fmt: skip
    """The same for a stack of factors, which begin at `at`."""
    t0 = _add_stack(t0, 0, g, high, low, at, number, size, starts, pitch, L, KY, KX, DY, DX, PARTS, PADDED, ROW, STACK,
                    BLOCK_P, BLOCK_T)  # fmt: skip
    if BLOCKS > 1:
        t1 = _add_stack(t1, 1, g, high, low, at, number, size, starts, pitch, L, KY, KX, DY, DX, PARTS, PADDED, ROW,
                        STACK, BLOCK_P, BLOCK_T)  # fmt: skip
    if BLOCKS > 2:
        t2 = _add_stack(t2, 2, g, high, low, at, number, size, starts, pitch, L, KY, KX, DY, DX, PARTS, PADDED, ROW,
                        STACK, BLOCK_P, BLOCK_T)  # fmt: skip
        t3 = _add_stack(t3, 3, g, high, low, at, number, size, starts, pitch, L, KY, KX, DY, DX, PARTS, PADDED, ROW,
                        STACK, BLOCK_P, BLOCK_T)  # fmt: skip
    return t0, t1, t2, t3


@triton.jit
def _add_stack(total, block, g, high, low, at, number, size, starts, pitch, L: tl.constexpr, KY: tl.constexpr,
               KX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
               ROW: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    taps, exists = _taps(block, pitch, KY, KX, DY, DX, PADDED, ROW, BLOCK_T)
    windows = _factors(high + at, number, starts, taps, exists, size, L, STACK, BLOCK_P)
    rest = windows
    if PARTS == 2:
        rest = _factors(low + at, number, starts, taps, exists, size, L, STACK, BLOCK_P)
    return _add_parts(total, g, windows, rest, PARTS)


@triton.jit
def packed_backward_kernel(
    logits, high, low, observed, packed, bias, grad, by_parameters,
    batch, height, width, rows, columns, tiles_x, tiles, packed_height, packed_width, grad_b, grad_o, grad_y, grad_x,
    least, most,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr,
    SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, ROW: tl.constexpr, TAPS: tl.constexpr, OUT_PADDED: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr,
    BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, STACK: tl.constexpr, STAGES: tl.constexpr,
    OF_SQUARES: tl.constexpr,
):  # fmt: skip
    """Gradients of filters and biases, or of the squares of filters, which noise meets, for the tiles of one program.

    Both at once would need more registers than there are. Tiles come round-robin. For every program `by_parameters` has
    a row (OUT_PADDED, TAPS + 1), to be added up afterwards.
    """
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    channels = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    pitch, size = packed_width * PADDED, packed_height * packed_width * PADDED
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + channels, mask=channels < OUT, other=0.0).to(tl.float32)
    pixel = tl.arange(0, BLOCK_P)
    zero = tl.zeros((BLOCK_O, BLOCK_P), tl.float32)
    # One for each block of taps, of which there are one, two or four: a part of a tensor cannot be added to.
    BLOCKS: tl.constexpr = TAPS // BLOCK_T
    t0 = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    t1, t2, t3 = t0, t0, t0
    total_bias = tl.zeros((BLOCK_O,), tl.float32)
    for index in tl.range(tl.program_id(0), batch * tiles, tl.num_programs(0), num_stages=1):
        b, tile = index // tiles, index % tiles
        y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
        image = b.to(tl.int64) * (K * (2 + L)) * size
        touched = _count(observed, b, y, x, height, width, CHANNELS, SY, SX, PY, PX, BOX_Y, BOX_X, BLOCK_Q,
                         HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        starts = _starts(y, x, pitch, SY, SX, PADDED, TILE_X, BLOCK_P)
        y, x = y + pixel // TILE_X, x + pixel % TILE_X
        places = (y * grad_y + x * grad_x)[None, :] + channels[:, None] * grad_o
        inside = ((y < rows) & (x < columns))[None, :] & (channels < OUT)[:, None]
        if touched > 0:
            g = tl.load(grad + b.to(tl.int64) * grad_b + places, mask=inside, other=0.0).to(tl.float32)
            for k in range(K):
                at = image + k * (2 + L) * size
                m, v, r = _moments(high, low, at, size, starts, pitch, packed, channels, L, KY, KX, DY, DX, PARTS,
                                   PADDED, ROW, OUT_PADDED, TAPS, STACK, BLOCK_P, BLOCK_O, BLOCK_T, STAGES)  # fmt: skip
                by_m, by_v = slopes(m + offset[:, None], v, ACTIVATION, least, most)
                share = 1.0
                if K > 1:
                    share = share_of(logits + b * K, k, K, BLOCK_K)
                by_v = share * g * by_v
                if OF_SQUARES:
                    t0, t1, t2, t3 = _add_windows(t0, t1, t2, t3, by_v, high, low, at + size, starts, pitch, KY, KX, DY,
                                                  DX, PARTS, PADDED, ROW, BLOCK_T, BLOCKS)  # fmt: skip
                else:
                    by_m = share * g * by_m
                    total_bias += tl.sum(by_m, 1)
                    t0, t1, t2, t3 = _add_windows(t0, t1, t2, t3, by_m, high, low, at, starts, pitch, KY, KX, DY, DX,
                                                  PARTS, PADDED, ROW, BLOCK_T, BLOCKS)  # fmt: skip
                    for number in range((L + STACK - 1) // STACK):
                        if number > 0:
                            r = _stack(high, low, at + 2 * size, number, size, starts, pitch, packed, channels, L, KY,
                                       KX, DY, DX, PARTS, PADDED, ROW, OUT_PADDED, TAPS, STACK, BLOCK_P, BLOCK_O,
                                       BLOCK_T, STAGES)  # fmt: skip
                        of_stack = 2.0 * r * _repeat_stack(by_v, STACK, BLOCK_P, BLOCK_O)
                        t0, t1, t2, t3 = _add_factors(t0, t1, t2, t3, of_stack, high, low, at + 2 * size, number, size,
                                                      starts, pitch, L, KY, KX, DY, DX, PARTS, PADDED, ROW, STACK,
                                                      BLOCK_P, BLOCK_T, BLOCKS)  # fmt: skip
        elif not OF_SQUARES:
            g = tl.load(grad + b.to(tl.int64) * grad_b + places, mask=inside, other=0.0).to(tl.float32)
            m = _mean(high, low, image, starts, pitch, packed, channels, zero, KY, KX, DY, DX, PARTS, PADDED, ROW,
                      OUT_PADDED, TAPS, BLOCK_T, STAGES)  # fmt: skip
            _, slope = activation(m + offset[:, None], ACTIVATION, least, most)
            by_m = g * slope
            total_bias += tl.sum(by_m, 1)
            t0, t1, t2, t3 = _add_windows(t0, t1, t2, t3, by_m, high, low, image, starts, pitch, KY, KX, DY, DX, PARTS,
                                          PADDED, ROW, BLOCK_T, BLOCKS)  # fmt: skip
    own = by_parameters + (tl.program_id(0).to(tl.int64) * OUT_PADDED + channels) * (TAPS + 1)
    places = own[:, None] + tl.arange(0, BLOCK_T)[None, :]
    tl.store(places, t0)
    if BLOCKS > 1:
        tl.store(places + BLOCK_T, t1)
    if BLOCKS > 2:
        tl.store(places + 2 * BLOCK_T, t2)
        tl.store(places + 3 * BLOCK_T, t3)
    tl.store(own + TAPS, total_bias)
