"""The sum of the expected squares of all responses of a channel, as a Triton kernel: the statistics of a batch.

It is the forward kernel with z² for an activation, and what comes out is added up instead of written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton.boxes import count_missing, starts_of
from misconv._triton.forward import mean_of, moments_of, share_of

__all__ = ["squares_kernel"]


@triton.jit
def squares_kernel(
    logits, means, factors, noise, observed, weight, bias, table, sums,
    batch, height, width, rows, columns, tiles_x, tiles,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr,
    WINDOW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    CHUNK: tl.constexpr, STACK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k (m_k² + v_k) over the tiles of one program, which come round-robin; `sums` has a row for each."""
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    part = tl.program_id(1)
    group, first = part // ((OUT + BLOCK_O - 1) // BLOCK_O), part % ((OUT + BLOCK_O - 1) // BLOCK_O) * BLOCK_O
    plane = height * width
    size = GROUPS * CHANNELS * plane
    weight += group * OUT * CHANNELS * WINDOW
    channels = first + tl.arange(0, BLOCK_O)
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + group * OUT + channels, mask=channels < OUT, other=0.0).to(tl.float32)
    pixel = tl.arange(0, BLOCK_P)
    starts = starts_of(TILE_X, SY, SX, BOX_X, BLOCK_P, PRECISION)
    total = tl.zeros((BLOCK_O,), tl.float32)
    for index in tl.range(tl.program_id(0), batch * tiles, tl.num_programs(0), num_stages=1, disable_licm=True):
        b, tile = index // tiles, index % tiles
        image = b.to(tl.int64) * K * size + group * CHANNELS * plane
        loadings = b.to(tl.int64) * (K * L) * size + group * CHANNELS * plane
        seen = observed
        if HAS_OBSERVED:
            if PER_CHANNEL:
                seen = observed + b.to(tl.int64) * size + group * CHANNELS * plane
            else:
                seen = observed + b.to(tl.int64) * plane
        y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
        top, left = y * SY - PY, x * SX - PX
        inside = ((y + pixel // TILE_X < rows) & (x + pixel % TILE_X < columns))[:, None]
        touched = count_missing(seen, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q, HAS_OBSERVED,
                                PER_CHANNEL)  # fmt: skip
        if touched > 0:
            for k in range(K):
                at, column = image + k * size, loadings + k * L * size
                m, v, _ = moments_of(means + at, factors + column, noise + at, seen, weight, table, starts, channels,
                                     top, left, height, width, size, L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X,
                                     HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                                     BLOCK_Q)  # fmt: skip
                m += offset[None, :]
                square = tl.sum(tl.where(inside, m * m + v, 0.0), 0)
                if K > 1:
                    square = square * share_of(logits + b * K, k, K, BLOCK_K)
                total += square
        else:
            m = mean_of(means + image, seen, weight, table, starts, channels, top, left, height, width, CHANNELS, OUT,
                        WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, BLOCK_P, BLOCK_O, BLOCK_T,
                        BLOCK_Q)  # fmt: skip
            m += offset[None, :]
            total += tl.sum(tl.where(inside, m * m, 0.0), 0)
    places = sums + tl.program_id(0).to(tl.int64) * (GROUPS * OUT) + group * OUT + channels
    tl.store(places, total, mask=channels < OUT)
