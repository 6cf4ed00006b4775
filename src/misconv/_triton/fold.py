"""A batch normalization folded into the filters before it, in training with its gradients back, as Triton kernels.

In training, with the moments of all windows (`windows`), a filter w has the mean m = wᵀx̄ (+ bias) and the variance
v = wᵀSw, and its normalized response is that of the filter s w and the bias β − m s, with s = γ / √(v + ε). The bias of
the convolution cancels. In evaluation m and v are given. Each program has one filter; numbers are few, so that all of
them are float64 until they are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fold_fixed_kernel", "fold_kernel", "unfold_kernel"]


@triton.jit
def _taps_of(KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr, first, BLOCK: tl.constexpr):
    """Channel, line and column of some taps, of which there are WIDE in a line, and whether the column counts."""
    t = first + tl.arange(0, BLOCK)
    line, x = t // WIDE, t % WIDE
    return line // KY, line % KY, x, x < KX


@triton.jit
def fold_fixed_kernel(
    weight, bias, mean, variance, scale, shift, filters, offsets,
    by_o, by_c, by_y, by_x, eps,
    CHANNELS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Filters (O, taps) and offsets (O,) that hold a normalization in evaluation, whose statistics are known.

    `weight` has the strides by_o to by_x; bias, scale (γ) and shift (β) may be None.
    """
    TAPS: tl.constexpr = CHANNELS * KY * WIDE
    o = tl.program_id(0)
    slope = 1.0 / tl.sqrt(tl.load(variance + o).to(tl.float64) + eps)
    if scale is not None:
        slope = slope * tl.load(scale + o).to(tl.float64)
    offset = -tl.load(mean + o).to(tl.float64)
    if bias is not None:
        offset += tl.load(bias + o).to(tl.float64)
    offset *= slope
    if shift is not None:
        offset += tl.load(shift + o).to(tl.float64)
    tl.store(offsets + o, offset.to(tl.float32))
    for first in range(0, TAPS, BLOCK):
        t = first + tl.arange(0, BLOCK)
        channel, y, x, counts = _taps_of(KY, KX, WIDE, first, BLOCK)
        places = o * by_o + channel * by_c + y * by_y + x * by_x
        w = tl.load(weight + places, mask=counts & (t < TAPS), other=0.0).to(tl.float64)
        tl.store(filters + o * TAPS + t, (w * slope).to(tl.float32), mask=t < TAPS)


@triton.jit
def fold_kernel(
    weight, bias, scale, shift, running_mean, running_var, tracked, matrix, taps, center, filters, offsets, kept,
    by_o, by_c, by_y, by_x, count, momentum, eps,
    CHANNELS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    CUMULATIVE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Filters (O, taps) and offsets (O,) that hold the normalization; running statistics follow.

    `weight` has the strides by_o to by_x; bias, scale (γ) and shift (β) may be None, and so may what is tracked.
    `kept` (O, taps + 2) is for the gradients: Sw, 1 / √(v + ε) and wᵀx̄. `matrix` has the moments around `center`.
    """
    TAPS: tl.constexpr = CHANNELS * KY * WIDE
    o, t = tl.program_id(0), tl.arange(0, BLOCK)
    channel, y, x, counts = _taps_of(KY, KX, WIDE, 0, BLOCK)
    counts = counts & (t < TAPS)
    weight += o * by_o
    w = tl.load(weight + channel * by_c + y * by_y + x * by_x, mask=counts, other=0.0).to(tl.float64)
    mean = tl.load(taps + t, mask=counts, other=0.0)
    noise = tl.load(taps + SIDE + t, mask=counts, other=0.0)
    apart = mean - tl.load(center + channel, mask=counts, other=0.0).to(tl.float64)
    product = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, TAPS, ROWS):
        channels, ys, xs, real = _taps_of(KY, KX, WIDE, first, ROWS)
        row = first + tl.arange(0, ROWS)
        real = real & (row < TAPS)
        left = tl.load(weight + channels * by_c + ys * by_y + xs * by_x, mask=real, other=0.0).to(tl.float64)
        places, mask = row[:, None] * SIDE + t[None, :], real[:, None] & counts[None, :]
        product += tl.sum(left[:, None] * tl.load(matrix + places, mask=mask, other=0.0), 0)
    product += noise * w - tl.sum(w * apart, 0) * apart
    variance = tl.sum(w * product, 0)
    variance = tl.where(variance < 0.0, 0.0, variance)  # a NaN stays
    middle = tl.sum(w * mean, 0)
    inverse = 1.0 / tl.sqrt(variance + eps)
    slope = inverse
    if scale is not None:
        slope = slope * tl.load(scale + o).to(tl.float64)
    offset = -middle * slope
    if shift is not None:
        offset += tl.load(shift + o).to(tl.float64)
    tl.store(filters + o * TAPS + t, (w * slope).to(tl.float32), mask=t < TAPS)
    tl.store(offsets + o, offset.to(tl.float32))
    kept += o * (TAPS + 2)
    tl.store(kept + t, product.to(tl.float32), mask=t < TAPS)
    tl.store(kept + TAPS, inverse.to(tl.float32))
    tl.store(kept + TAPS + 1, middle.to(tl.float32))
    if running_mean is not None:
        if bias is not None:
            middle += tl.load(bias + o).to(tl.float64)
        share = momentum
        if CUMULATIVE:
            share = 1.0 / tl.load(tracked).to(tl.float64)
        variance *= count / (count - 1.0)
        before = tl.load(running_mean + o).to(tl.float64)
        tl.store(
            running_mean + o, (before + share * (middle - before)).to(tl.float32).to(running_mean.dtype.element_ty)
        )
        before = tl.load(running_var + o).to(tl.float64)
        tl.store(
            running_var + o, (before + share * (variance - before)).to(tl.float32).to(running_var.dtype.element_ty)
        )


@triton.jit
def unfold_kernel(
    parameters, weight, scale, taps, kept, by_weight, by_bias, by_scale, by_shift,
    by_o, by_c, by_y, by_x, to_o, to_c, to_y, to_x, programs,
    CHANNELS: tl.constexpr, KY: tl.constexpr, KX: tl.constexpr, WIDE: tl.constexpr, OUT: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK_TAPS: tl.constexpr, PLACES: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """From the gradients of folded filters and offsets to those of weight, bias, γ and β; None is not asked for.

    `parameters` has the former in a row for each of the programs of `backward`. by_weight has the strides to_o to to_x.
    """
    TAPS: tl.constexpr = CHANNELS * KY * WIDE
    NUMBER: tl.constexpr = OUT * CHUNKS * PLACES
    o, t = tl.program_id(0), tl.arange(0, BLOCK)
    channel, y, x, counts = _taps_of(KY, KX, WIDE, 0, BLOCK)
    counts = counts & (t < TAPS)
    places = o * TAPS + t
    if TURNED:
        places = (t // CHUNK_TAPS * PLACES + t % CHUNK_TAPS) * OUT + o
    g, by_offset = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK_N,), tl.float64)
    for first in range(0, programs, BLOCK_N):
        program = first + tl.arange(0, BLOCK_N)
        own, real = program.to(tl.int64) * (NUMBER + OUT), program < programs
        found = tl.load(parameters + own[:, None] + places[None, :], mask=real[:, None] & counts[None, :], other=0.0)
        g += tl.sum(found.to(tl.float64), 0)
        by_offset += tl.load(parameters + own + (NUMBER + o), mask=real, other=0.0).to(tl.float64)
    by_offset = tl.sum(by_offset, 0)
    w = tl.load(weight + o * by_o + channel * by_c + y * by_y + x * by_x, mask=counts, other=0.0).to(tl.float64)
    mean = tl.load(taps + t, mask=counts, other=0.0)
    kept += o * (TAPS + 2)
    product = tl.load(kept + t, mask=counts, other=0.0).to(tl.float64)
    inverse, middle = tl.load(kept + TAPS).to(tl.float64), tl.load(kept + TAPS + 1).to(tl.float64)
    slope = inverse
    if scale is not None:
        slope = slope * tl.load(scale + o).to(tl.float64)
    by_slope = tl.sum(g * w, 0) - by_offset * middle
    if by_weight is not None:
        change = slope * (g - by_offset * mean - by_slope * inverse * inverse * product)
        places = by_weight + o * to_o + channel * to_c + y * to_y + x * to_x
        tl.store(places, change.to(tl.float32).to(by_weight.dtype.element_ty), mask=counts)
    if by_bias is not None:
        tl.store(by_bias + o, 0.0)
    if by_scale is not None:
        tl.store(by_scale + o, (by_slope * inverse).to(tl.float32).to(by_scale.dtype.element_ty))
    if by_shift is not None:
        tl.store(by_shift + o, by_offset.to(tl.float32).to(by_shift.dtype.element_ty))
