"""The second moments of all windows of a batch, for the variance of responses to any filters, as a Triton kernel.

The variance of the responses w·x over all windows x, and over all that missing pixels may be, is wᵀSw with
S = E[(x − x̄)(x − x̄)ᵀ]. S knows nothing of the filters, so that neither the sum nor its gradient has to be computed for
each of them. It serves where windows have no more taps than three blocks of 64 hold. The noise of pixels, which only
adds to the diagonal of S, is left to the caller. Tiles, boxes and windows are those of `forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton.forward import box_of, count_missing, product, read, share_of, windows_of

__all__ = ["BLOCK_T", "window_moments_kernel"]

BLOCK_T = tl.constexpr(64)  # taps


@triton.jit
def _add_product(total, left, right, PARTS: tl.constexpr):
    """total + leftᵀ right, of bfloat16 numbers; in two parts, all but the product of what they leave."""
    first, second = left.to(tl.bfloat16), right.to(tl.bfloat16)
    total = product(tl.trans(first), second, total, "bf16")
    if PARTS == 2:
        rest = (right - second.to(tl.float32)).to(tl.bfloat16)
        total = product(tl.trans(first), rest, total, "bf16")
        rest = (left - first.to(tl.float32)).to(tl.bfloat16)
        total = product(tl.trans(rest), second, total, "bf16")
    return total


@triton.jit
def _add(s00, s01, s02, s11, s12, s22, box, starts, table, c0, c1, c2, inside, root, BLOCKS: tl.constexpr,
         PARTS: tl.constexpr):  # fmt: skip
    """Add XᵀX, block by block, with X the windows of a box less c, times root; and no windows that are not inside."""
    x0 = tl.where(inside, (windows_of(box, starts, table, 0, BLOCK_T) - c0[None, :]) * root, 0.0)
    s00 = _add_product(s00, x0, x0, PARTS)
    if BLOCKS > 1:
        x1 = tl.where(inside, (windows_of(box, starts, table, 1, BLOCK_T) - c1[None, :]) * root, 0.0)
        s01, s11 = _add_product(s01, x0, x1, PARTS), _add_product(s11, x1, x1, PARTS)
        if BLOCKS > 2:
            x2 = tl.where(inside, (windows_of(box, starts, table, 2, BLOCK_T) - c2[None, :]) * root, 0.0)
            s02, s12 = _add_product(s02, x0, x2, PARTS), _add_product(s12, x1, x2, PARTS)
            s22 = _add_product(s22, x2, x2, PARTS)
    return s00, s01, s02, s11, s12, s22


@triton.jit
def window_moments_kernel(
    logits, means, factors, observed, center, table, products,
    batch, height, width, rows, columns, tiles_x, tiles,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr,
    PX: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PARTS: tl.constexpr,
    TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k E[(x − center)(x − center)ᵀ], less the noise, over the tiles of one program, which come round-robin.

    `products` has for each program the blocks 00, 01, 02, 11, 12 and 22 of the sum.
    """
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    plane = height * width
    size = CHANNELS * plane
    t = tl.arange(0, BLOCK_T)
    c0, c1, c2 = tl.load(center + t), tl.load(center + BLOCK_T + t), tl.load(center + 2 * BLOCK_T + t)
    none = tl.zeros((BLOCK_T,), tl.float32)
    s00 = tl.zeros((BLOCK_T, BLOCK_T), tl.float32)
    s01, s02, s11, s12, s22 = s00, s00, s00, s00, s00
    pixel = tl.arange(0, BLOCK_P)
    starts = pixel // TILE_X * (SY * BOX_X) + pixel % TILE_X * SX
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
                share = 1.0
                if K > 1:
                    share = share_of(logits + b * K, k, K, BLOCK_K)
                root = tl.sqrt(share + tl.zeros((1, 1), tl.float32))
                box = read(means + image + k * size, offsets, "ieee")
                s00, s01, s02, s11, s12, s22 = _add(s00, s01, s02, s11, s12, s22, box, starts, table, c0, c1, c2,
                                                    inside, root, BLOCKS, PARTS)  # fmt: skip
                for j in range(L):
                    box = read(factors + loadings + (k * L + j) * size, missing, "ieee")
                    s00, s01, s02, s11, s12, s22 = _add(s00, s01, s02, s11, s12, s22, box, starts, table, none, none,
                                                        none, inside, root, BLOCKS, PARTS)  # fmt: skip
        else:
            box, root = read(means + image, offsets, "ieee"), tl.full((1, 1), 1.0, tl.float32)
            s00, s01, s02, s11, s12, s22 = _add(s00, s01, s02, s11, s12, s22, box, starts, table, c0, c1, c2, inside,
                                                root, BLOCKS, PARTS)  # fmt: skip
    places = t[:, None] * BLOCK_T + t[None, :]
    SIZE: tl.constexpr = BLOCK_T * BLOCK_T
    products += tl.program_id(0).to(tl.int64) * (6 * SIZE)
    tl.store(products + places, s00)
    tl.store(products + SIZE + places, s01)
    tl.store(products + 2 * SIZE + places, s02)
    tl.store(products + 3 * SIZE + places, s11)
    tl.store(products + 4 * SIZE + places, s12)
    tl.store(products + 5 * SIZE + places, s22)
