"""The expected activation of a convolution as a Triton kernel, and the moments it shares with that of its gradients.

A program has a tile of output pixels and a block of output channels. It spreads the box of the image that lies under
the tile to the matrix of windows (see `boxes`) and multiplies by the weights. Where the box holds no missing pixel the
mean is all there is to compute; elsewhere noise and factors follow, read at missing pixels only, since observed ones
count as zero. Mean and variance stay in registers; the backward kernel computes them again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton.boxes import (
    box_of,
    count_missing,
    packed,
    product,
    read_factor,
    read_in_units,
    rounded,
    squares_of,
    stack_offsets,
    starts_below,
    starts_of,
    sum_stack,
    weights_of,
    windows_of,
)
from misconv._triton.expectations import activation, expected

__all__ = ["forward_kernel", "mean_of", "moments_of", "share_of", "stack_of"]


@triton.jit
def mean_of(means, observed, weight, table, starts, channels, top, left, height, width, CHANNELS: tl.constexpr,
            OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
            HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr,
            BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, balances=None):  # fmt: skip
    """The response (pixels, channels) to the mean of one component. WINDOW is the number of taps in one channel.

    `balances` are those of `balance_kernel`, for float16 numbers.
    """
    m, unit = tl.zeros((BLOCK_P, BLOCK_O), tl.float32), 1.0
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        offsets, _ = box_of(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q, False,
                            False)  # fmt: skip
        box, unit = read_in_units(means + chunk * CHUNK * height * width, offsets, balances, CHANNELS, BOX_Y * BOX_X,
                                  False, PRECISION, BLOCK_Q)  # fmt: skip
        for block in tl.range((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = weights_of(weight, chunk, block, channels, CHANNELS * WINDOW, CHUNK * WINDOW, OUT, PRECISION, BLOCK_O,
                           BLOCK_T)  # fmt: skip
            m = product(windows_of(box, starts, table, block, PRECISION, BLOCK_T), w, m, PRECISION)
    return m * unit


@triton.jit
def stack_of(factors, number, observed, weight, table, starts, channels, top, left, height, width, size,
             L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
             BOX_Y: tl.constexpr, BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
             PRECISION: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
             BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, balances=None):  # fmt: skip
    """The responses (STACK · pixels, channels) to one stack of the factors of a component."""
    r, unit = tl.zeros((STACK * BLOCK_P, BLOCK_O), tl.float32), 1.0
    below = starts_below(starts, STACK, BLOCK_P, BLOCK_Q, PRECISION)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        _, missing = box_of(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                            HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        offsets = stack_offsets(number, missing, size, L, STACK, BLOCK_Q)
        box, unit = read_in_units(factors + first, offsets, balances, CHANNELS, BOX_Y * BOX_X, False, PRECISION,
                                  BLOCK_Q)  # fmt: skip
        for block in tl.range((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = weights_of(weight, chunk, block, channels, CHANNELS * WINDOW, CHUNK * WINDOW, OUT, PRECISION, BLOCK_O,
                           BLOCK_T)  # fmt: skip
            r = product(windows_of(box, below, table, block, PRECISION, BLOCK_T), w, r, PRECISION)
    return r * unit


@triton.jit
def _add_factors(v, factors, observed, weight, table, starts, channels, top, left, height, width, size,
                 L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, BOX_Y: tl.constexpr,
                 BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
                 BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """A variance with the squared responses to all factors but the first, where one block holds all taps."""
    _, missing = box_of(observed, 0, top, left, height, width, CHANNELS, CHANNELS, BOX_Y, BOX_X, BLOCK_Q, HAS_OBSERVED,
                        PER_CHANNEL)  # fmt: skip
    w = weights_of(weight, 0, 0, channels, CHANNELS * WINDOW, CHANNELS * WINDOW, OUT, PRECISION, BLOCK_O, BLOCK_T)
    values = read_factor(factors, 1, missing, size, L)
    for number in range(1, L):
        box = packed(rounded(values, PRECISION), PRECISION)
        values = read_factor(factors, number + 1, missing, size, L)
        r = product(windows_of(box, starts, table, 0, PRECISION, BLOCK_T), w, None, PRECISION)
        v += r * r
    return v


@triton.jit
def moments_of(means, factors, noise, observed, weight, table, starts, channels, top, left, height, width, size,
               L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
               BOX_Y: tl.constexpr, BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
               PRECISION: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
               BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, balances=None):  # fmt: skip
    """Mean and variance (pixels, channels) under one component, and the responses to the first stack of factors."""
    m = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    v = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    r = tl.zeros((STACK * BLOCK_P, BLOCK_O), tl.float32)
    unit_m, unit_v, unit_r = 1.0, 1.0, 1.0
    below = starts_below(starts, STACK, BLOCK_P, BLOCK_Q, PRECISION)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        offsets, missing = box_of(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                                  HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        of_means, unit_m = read_in_units(means + first, offsets, balances, CHANNELS, BOX_Y * BOX_X, False, PRECISION,
                                         BLOCK_Q)  # fmt: skip
        of_noise, unit_v = read_in_units(noise + first, missing, balances, CHANNELS, BOX_Y * BOX_X, True, PRECISION,
                                         BLOCK_Q)  # fmt: skip
        of_factors = of_noise
        if L > 0:
            places = stack_offsets(0, missing, size, L, STACK, BLOCK_Q)
            of_factors, unit_r = read_in_units(factors + first, places, balances, CHANNELS, BOX_Y * BOX_X, False,
                                               PRECISION, BLOCK_Q)  # fmt: skip
        for block in tl.range((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = weights_of(weight, chunk, block, channels, CHANNELS * WINDOW, CHUNK * WINDOW, OUT, PRECISION, BLOCK_O,
                           BLOCK_T)  # fmt: skip
            m = product(windows_of(of_means, starts, table, block, PRECISION, BLOCK_T), w, m, PRECISION)
            square = squares_of(w, PRECISION)
            v = product(windows_of(of_noise, starts, table, block, PRECISION, BLOCK_T), square, v, PRECISION)
            if L > 0:
                r = product(windows_of(of_factors, below, table, block, PRECISION, BLOCK_T), w, r, PRECISION)
    m, r = m * unit_m, r * unit_r
    v = v * unit_v + sum_stack(r * r, STACK, BLOCK_P, BLOCK_O)
    if CHANNELS == CHUNK and CHANNELS * WINDOW <= BLOCK_T and STACK == 1 and PRECISION != "f16x2":
        v = _add_factors(v, factors, observed, weight, table, starts, channels, top, left, height, width, size, L,
                         CHANNELS, OUT, WINDOW, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, BLOCK_O, BLOCK_T,
                         BLOCK_Q)  # fmt: skip
    else:
        for number in range(1, (L + STACK - 1) // STACK):
            r2 = stack_of(factors, number, observed, weight, table, starts, channels, top, left, height, width, size,
                          L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK,
                          BLOCK_P, BLOCK_O, BLOCK_T, BLOCK_Q, balances)  # fmt: skip
            v += sum_stack(r2 * r2, STACK, BLOCK_P, BLOCK_O)
    return m, v, r


@triton.jit
def share_of(logits, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The probability of component k."""
    index = tl.arange(0, BLOCK_K)
    values = tl.load(logits + index, mask=index < K, other=float("-inf")).to(tl.float32)
    exponents = tl.exp(values - tl.max(values))
    return tl.sum(tl.where(index == k, exponents, 0.0)) / tl.sum(exponents)


@triton.jit
def forward_kernel(
    logits, means, factors, noise, observed, weight, bias, units, balances, table, out,
    height, width, rows, columns, tiles_x, tiles, out_b, out_o, out_y, out_x, low, high,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr,
    WINDOW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    CHUNK: tl.constexpr, STACK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k E[f(N(m_k, v_k))] for one tile of one image and one block of channels of one group.

    CHANNELS and OUT are those of a group, CHUNK of them are read at a time. `units` and `balances` are those of float16
    filters, or None.
    """
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    b, tile, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    group, first = part // ((OUT + BLOCK_O - 1) // BLOCK_O), part % ((OUT + BLOCK_O - 1) // BLOCK_O) * BLOCK_O
    plane = height * width
    size = GROUPS * CHANNELS * plane
    means += b.to(tl.int64) * K * size + group * CHANNELS * plane
    noise += b.to(tl.int64) * K * size + group * CHANNELS * plane
    factors += b.to(tl.int64) * (K * L) * size + group * CHANNELS * plane
    if HAS_OBSERVED:
        if PER_CHANNEL:
            observed += b.to(tl.int64) * size + group * CHANNELS * plane
        else:
            observed += b.to(tl.int64) * plane
    weight += group * OUT * CHANNELS * WINDOW
    channels = first + tl.arange(0, BLOCK_O)
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + group * OUT + channels, mask=channels < OUT, other=0.0).to(tl.float32)
    unit = tl.full((BLOCK_O,), 1.0, tl.float32)
    if units is not None:
        unit = tl.load(units + group * OUT + channels, mask=channels < OUT, other=0.0)

    y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
    top, left = y * SY - PY, x * SX - PX
    pixel = tl.arange(0, BLOCK_P)
    starts = starts_of(TILE_X, SY, SX, BOX_X, BLOCK_P, PRECISION)
    touched = count_missing(observed, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q, HAS_OBSERVED,
                            PER_CHANNEL)  # fmt: skip
    result = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    if touched > 0:
        for k in range(K):
            m, v, _ = moments_of(means + k * size, factors + k * L * size, noise + k * size, observed, weight, table,
                                 starts, channels, top, left, height, width, size, L, CHANNELS, OUT, WINDOW, CHUNK,
                                 BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                                 BLOCK_Q, balances)  # fmt: skip
            v = v * unit[None, :] * unit[None, :]  # one after the other: the square of a unit may be too small
            e = expected(m * unit[None, :] + offset[None, :], v, ACTIVATION, low, high)
            if K > 1:
                e = e * share_of(logits + b * K, k, K, BLOCK_K)
            result += e
    else:
        m = mean_of(means, observed, weight, table, starts, channels, top, left, height, width, CHANNELS, OUT, WINDOW,
                    CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, BLOCK_P, BLOCK_O, BLOCK_T,
                    BLOCK_Q, balances)  # fmt: skip
        result, _ = activation(m * unit[None, :] + offset[None, :], ACTIVATION, low, high)
    y, x = y + pixel // TILE_X, x + pixel % TILE_X
    places = (y * out_y + x * out_x)[:, None] + (group * OUT + channels)[None, :] * out_o
    inside = ((y < rows) & (x < columns))[:, None] & (channels < OUT)[None, :]
    tl.store(out + b.to(tl.int64) * out_b + places, result.to(out.dtype.element_ty), mask=inside)
