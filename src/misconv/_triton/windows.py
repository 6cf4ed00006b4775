"""The second moments of all windows of a batch, for the variance of responses to any filters, as a Triton kernel.

The variance of the responses w·x over all windows x, and over all that missing pixels may be, is wᵀSw with
S = E[(x − x̄)(x − x̄)ᵀ]. S knows nothing of the filters, so that neither the sum nor its gradient has to be computed for
each of them. It serves where windows have no more taps than three blocks of 64 hold. Any number near the mean may be
taken off every pixel of a channel, which the caller sets right; and the noise of pixels, which only adds to the
diagonal of S, is left to the caller. Tiles, boxes and windows are those of `forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton.forward import box_of, count_missing, packed, product, rounded, share_of, starts_of, windows_of

__all__ = ["BLOCK_T", "window_moments_kernel"]

BLOCK_T = tl.constexpr(64)  # taps


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
def _windows(box, starts, table, block, inside, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """A block of taps of windows, of which none is outside."""
    x = windows_of(box, starts, table, block, PRECISION, BLOCK_T)
    if not EVEN:
        x = tl.where(inside, x, 0.0)
    return x


@triton.jit
def _add(s00, s01, s02, s11, s12, s22, values, starts, table, inside, EVEN: tl.constexpr, BLOCKS: tl.constexpr,
         PRECISION: tl.constexpr):  # fmt: skip
    """Add XᵀX, block by block, with X the windows of a box of these values."""
    box = values
    if PRECISION != "tf32":
        box = packed(rounded(values, PRECISION), PRECISION)
    x0 = _windows(box, starts, table, 0, inside, EVEN, PRECISION)
    s00 = _add_product(s00, x0, x0, PRECISION)
    if BLOCKS > 1:
        x1 = _windows(box, starts, table, 1, inside, EVEN, PRECISION)
        s01, s11 = _add_product(s01, x0, x1, PRECISION), _add_product(s11, x1, x1, PRECISION)
        if BLOCKS > 2:
            x2 = _windows(box, starts, table, 2, inside, EVEN, PRECISION)
            s02, s12 = _add_product(s02, x0, x2, PRECISION), _add_product(s12, x1, x2, PRECISION)
            s22 = _add_product(s22, x2, x2, PRECISION)
    return s00, s01, s02, s11, s12, s22


@triton.jit
def window_moments_kernel(
    logits, means, factors, observed, center, table, products,
    batch, height, width, rows, columns, tiles_x, tiles,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
    EVEN: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k E[(x − c)(x − c)ᵀ], less the noise, over the tiles of one program, which come round-robin.

    `center` has a number c for every channel. `products` has for each program the blocks 00, 01, 02, 11, 12 and 22 of
    the sum. EVEN if tiles cover the responses and no more.
    """
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    plane = height * width
    size = CHANNELS * plane
    t = tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_Q) // (BOX_Y * BOX_X)
    c = tl.load(center + channel, mask=channel < CHANNELS, other=0.0)
    s00 = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    s01, s02, s11, s12, s22 = s00, s00, s00, s00, s00
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
                s00, s01, s02, s11, s12, s22 = _add(s00, s01, s02, s11, s12, s22, (values - c) * root, starts, table,
                                                    inside, EVEN, BLOCKS, PRECISION)  # fmt: skip
                for j in range(L):
                    places = factors + loadings + (k * L + j) * size + missing
                    values = tl.load(places, mask=missing >= 0, other=0.0).to(tl.float32)
                    s00, s01, s02, s11, s12, s22 = _add(s00, s01, s02, s11, s12, s22, values * root, starts, table,
                                                        inside, EVEN, BLOCKS, PRECISION)  # fmt: skip
        else:
            values = tl.load(means + image + offsets, mask=offsets >= 0, other=0.0).to(tl.float32)
            s00, s01, s02, s11, s12, s22 = _add(s00, s01, s02, s11, s12, s22, values - c, starts, table, inside, EVEN,
                                                BLOCKS, PRECISION)  # fmt: skip
    places = t[:, None] * BLOCK_T + t[None, :]
    SIZE: tl.constexpr = BLOCK_T * BLOCK_T
    products += tl.program_id(0).to(tl.int64) * (6 * SIZE)
    tl.store(products + places, s00)
    tl.store(products + SIZE + places, s01)
    tl.store(products + 2 * SIZE + places, s02)
    tl.store(products + 3 * SIZE + places, s11)
    tl.store(products + 4 * SIZE + places, s12)
    tl.store(products + 5 * SIZE + places, s22)
