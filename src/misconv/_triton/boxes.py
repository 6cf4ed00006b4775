"""The boxes of an image under the tiles of a convolution, and their windows: what Triton kernels of one have in common.

The *box* lies under the windows of a tile of output pixels. It is read once and with every question answered there
(inside the image? missing?), and spread to the matrix of windows (pixels × taps) in shared memory, which is multiplied
by the weights (taps × channels).

Products take float32 operands, rounded to TF32 where the user allows it, and bfloat16 ones in a network of that type;
sums are float32. Spreading is what takes longest, so bfloat16 pixels are spread two at a time where windows begin at
even columns ("bf16x2"): boxes then hold words of two neighbours. In the place of TF32 numbers stand float16 ones there,
in units of each box and filter ("f16x2", see `halves`; only in the forward pass, where one chunk holds all channels
and factors come one at a time).
Everything here is made of operations that Triton's interpreter knows, so that the kernels are tested without a GPU.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from misconv._triton.halves import unit_of

__all__ = [
    "box_of",
    "count_missing",
    "packed",
    "product",
    "read",
    "read_factor",
    "read_in_units",
    "read_stack",
    "repeat_stack",
    "rounded",
    "squares_of",
    "stack_offsets",
    "starts_below",
    "starts_of",
    "sum_stack",
    "turned_windows",
    "weights_of",
    "windows_of",
]

# The interpreter would multiply the bits of bfloat16 numbers as integers.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def box_of(observed, chunk, top, left, height, width, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
           BOX_Y: tl.constexpr, BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_OBSERVED: tl.constexpr,
           PER_CHANNEL: tl.constexpr):  # fmt: skip
    """The box of CHUNK channels whose corner is (top, left).

    Returns:
        For each of its pixels the offset into the channels of the chunk, or −1 where it lies outside the image; and the
        same with −1 also where it was observed.
    """
    q = tl.arange(0, BLOCK_Q)
    channel, place = q // (BOX_Y * BOX_X), q % (BOX_Y * BOX_X)
    y, x = top + place // BOX_X, left + place % BOX_X
    inside = (channel < CHUNK) & (chunk * CHUNK + channel < CHANNELS)
    inside = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    flat = y * width + x
    offsets = tl.where(inside, channel * height * width + flat, -1)
    missing = offsets
    if HAS_OBSERVED:
        if PER_CHANNEL:
            seen = tl.load(observed + chunk * CHUNK * height * width + offsets, mask=inside, other=1)
        else:
            seen = tl.load(observed + flat, mask=inside, other=1)
        missing = tl.where(seen == 0, offsets, -1)
    return offsets, missing


@triton.jit
def count_missing(observed, top, left, height, width, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
                  BOX_Y: tl.constexpr, BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_OBSERVED: tl.constexpr,
                  PER_CHANNEL: tl.constexpr):  # fmt: skip
    """How many pixels of a box are missing; a few channels speak for all where `observed` is shared."""
    count = 1
    if HAS_OBSERVED:
        count = 0
        for chunk in range((CHANNELS + CHUNK - 1) // CHUNK if PER_CHANNEL else 1):
            _, missing = box_of(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                                HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
            count += tl.sum(tl.where(missing >= 0, 1, 0))
    return count


@triton.jit
def rounded(values, PRECISION: tl.constexpr):
    """What products take. To the nearest TF32 number, where that is asked for: the hardware would cut off the rest."""
    if PRECISION == "bf16" or PRECISION == "bf16x2":
        values = values.to(tl.bfloat16)
    elif PRECISION == "f16x2":
        values = values.to(tl.float16)
    elif PRECISION == "tf32":
        values = ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def squares_of(weights, PRECISION: tl.constexpr):
    """The squares of weights, as products take them."""
    wide = weights.to(tl.float32)
    return rounded(wide * wide, PRECISION)


@triton.jit
def product(left, right, total, PRECISION: tl.constexpr):
    """total + left · right in float32; total may be None. PRECISION is that of float32 operands."""
    if left.dtype == tl.bfloat16 or left.dtype == tl.float16:
        if _INTERPRETED:
            left, right = left.to(tl.float32), right.to(tl.float32)
        found = tl.dot(left, right, total)
    else:
        found = tl.dot(left, right, total, input_precision=PRECISION)
    return found


@triton.jit
def packed(box, PRECISION: tl.constexpr):
    """A box as windows are spread from it: pixels (n,), or words (n / 2,) of two neighbours each."""
    if PRECISION == "bf16x2" or PRECISION == "f16x2":
        bits = tl.reshape(box.to(tl.uint16, bitcast=True).to(tl.uint32), (box.shape[0] // 2, 2))
        first, second = tl.split(bits)
        box = first | (second << 16)
    return box


@triton.jit
def _unpacked(words, PRECISION: tl.constexpr):
    """The pixels (…, 2) of words of two."""
    TYPE: tl.constexpr = tl.float16 if PRECISION == "f16x2" else tl.bfloat16
    first, second = (words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16)
    return tl.join(first.to(TYPE, bitcast=True), second.to(TYPE, bitcast=True))


@triton.jit
def read(image, offsets, PRECISION: tl.constexpr):
    """What an image holds at these offsets, and 0 where they are negative; packed."""
    values = tl.load(image + offsets, mask=offsets >= 0, other=0.0).to(tl.float32)
    return packed(rounded(values, PRECISION), PRECISION)


@triton.jit
def read_in_units(image, offsets, balances, CHANNELS: tl.constexpr, AREA: tl.constexpr, SQUARED: tl.constexpr,
                  PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """The same in units, and the unit; that is 1 but for "f16x2".

    `balances` are those of `balance_kernel`, for float16 numbers; boxes have AREA pixels in each channel. SQUARED: the
    numbers are variances.
    """
    unit = 1.0
    if PRECISION == "f16x2":
        values = tl.load(image + offsets, mask=offsets >= 0, other=0.0).to(tl.float32)
        if tl.load(balances) > 0:
            channel = tl.arange(0, BLOCK_Q) // AREA
            balance = tl.load(balances + 1 + channel, mask=channel < CHANNELS, other=1.0)
            values = values * balance
            if SQUARED:
                values = values * balance
        unit = unit_of(values, 16384)
        box = packed(rounded(values / unit, PRECISION), PRECISION)
    else:
        box = read(image, offsets, PRECISION)
    return box, unit


@triton.jit
def _stacked(values, STACK: tl.constexpr):
    """A vector repeated for each factor of a stack, (n,) → (STACK · n,)."""
    if STACK == 1:
        return values
    return tl.reshape(tl.broadcast_to(values[None, :], (STACK, values.shape[0])), (STACK * values.shape[0],))


@triton.jit
def starts_of(TILE_X: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, BOX_X: tl.constexpr, BLOCK_P: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Where the windows of a tile begin in its box, (pixels,); in words if there are two pixels in each."""
    pixel = tl.arange(0, BLOCK_P)
    starts = pixel // TILE_X * (SY * BOX_X) + pixel % TILE_X * SX
    if PRECISION == "bf16x2" or PRECISION == "f16x2":
        starts = starts // 2
    return starts


@triton.jit
def starts_below(starts, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, PRECISION: tl.constexpr):
    """Where windows begin in the boxes of a stack, (STACK · pixels,)."""
    LENGTH: tl.constexpr = BLOCK_Q // 2 if PRECISION == "bf16x2" or PRECISION == "f16x2" else BLOCK_Q
    return _stacked(starts, STACK) + tl.arange(0, STACK * BLOCK_P) // BLOCK_P * LENGTH


@triton.jit
def read_stack(factors, number, missing, size, L: tl.constexpr, STACK: tl.constexpr, PRECISION: tl.constexpr,
               BLOCK_Q: tl.constexpr):  # fmt: skip
    """The boxes of factors number · STACK, … one behind the other, (STACK · BLOCK_Q,), and their offsets."""
    offsets = stack_offsets(number, missing, size, L, STACK, BLOCK_Q)
    return read(factors, offsets, PRECISION), offsets


@triton.jit
def stack_offsets(number, missing, size, L: tl.constexpr, STACK: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Where the factors number · STACK, … lie at missing pixels, one behind the other, (STACK · BLOCK_Q,)."""
    factor = number * STACK + tl.arange(0, STACK * BLOCK_Q) // BLOCK_Q
    offsets = _stacked(missing, STACK)
    return tl.where((offsets >= 0) & (factor < L), offsets + factor * size, -1)


@triton.jit
def read_factor(factors, number, missing, size, L: tl.constexpr):
    """One factor at missing pixels, in float32; zeros behind the last one.

    Who reads the next one before it works on this does not wait for memory.
    """
    return tl.load(factors + number * size + missing, mask=(missing >= 0) & (number < L), other=0.0).to(tl.float32)


@triton.jit
def windows_of(box, starts, table, block, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr):
    """A block of taps of the windows that begin at `starts` in a box, (windows, taps)."""
    PAIRED: tl.constexpr = PRECISION == "bf16x2" or PRECISION == "f16x2"
    COUNT: tl.constexpr = BLOCK_T // 2 if PAIRED else BLOCK_T
    taps = tl.load(table + block * COUNT + tl.arange(0, COUNT))
    index = tl.reshape(starts[:, None] + taps[None, :], (starts.shape[0] * COUNT,))
    windows = tl.reshape(tl.gather(box, index, 0), (starts.shape[0], COUNT))
    if PAIRED:
        windows = tl.reshape(_unpacked(windows, PRECISION), (starts.shape[0], BLOCK_T))
    return windows


@triton.jit
def turned_windows(box, starts, table, block, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr):
    """The same, (taps, windows)."""
    if PRECISION == "bf16x2":  # which tensor cores take either way
        windows = tl.trans(windows_of(box, starts, table, block, PRECISION, BLOCK_T))
    else:
        taps = tl.load(table + block * BLOCK_T + tl.arange(0, BLOCK_T))
        index = tl.reshape(taps[:, None] + starts[None, :], (BLOCK_T * starts.shape[0],))
        windows = tl.reshape(tl.gather(box, index, 0), (BLOCK_T, starts.shape[0]))
    return windows


@triton.jit
def weights_of(weight, chunk, block, channels, TAPS: tl.constexpr, CHUNK_TAPS: tl.constexpr, OUT: tl.constexpr,
               PRECISION: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """The weights of a block of taps of a chunk, (taps, channels), out of a matrix (OUT, TAPS)."""
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = (t < CHUNK_TAPS) & (chunk * CHUNK_TAPS + t < TAPS)
    inside = exists[:, None]
    if OUT % BLOCK_O != 0:
        inside = inside & (channels < OUT)[None, :]
    places = channels[None, :] * TAPS + (chunk * CHUNK_TAPS + t)[:, None]
    return rounded(tl.load(weight + places, mask=inside, other=0.0).to(tl.float32), PRECISION)


@triton.jit
def sum_stack(values, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """(STACK · pixels, channels) → (pixels, channels)."""
    if STACK == 1:
        return values
    return tl.sum(tl.reshape(values, (STACK, BLOCK_P, BLOCK_O)), 0)


@triton.jit
def repeat_stack(values, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """(pixels, channels) → (STACK · pixels, channels)."""
    if STACK == 1:
        return values
    return tl.reshape(tl.broadcast_to(values[None, :, :], (STACK, BLOCK_P, BLOCK_O)), (STACK * BLOCK_P, BLOCK_O))
