"""Fused kernels around the convolutions of a density network that starts from a smooth fill, without gradients.

Alone the convolutions of such a network are cheap; what is around them, written as one operation after the other, goes
through the memory of the GPU dozens of times. Here it is

1. `pull_kernel`: one level of the push–pull pyramid (`misconv._math.push_pull`), the first one from the images;
2. `push_kernel` and, for the images, `push_images_kernel`: on the way back, what a level does not know from the next
   coarser one; `relax_kernel`: from the pixels around it;
3. `enter_kernel`: the finest level and what was seen, blocks of pixels as channels: what the network reads;
4. `join_kernel`: between two convolutions bias, sum and ReLU;
5. `output_kernel`: from what the network says to means, factors and noise, bounded (`misconv._density.bound`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "enter_kernel",
    "join_kernel",
    "output_kernel",
    "pull_kernel",
    "push_images_kernel",
    "push_kernel",
    "relax_kernel",
]

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


# One parameter a line would be half of this file.
# fmt: off


@_jit
def _share(tiles, BLOCK: tl.constexpr):
    """What this program does: which plane, and which BLOCK of its pixels."""
    program = tl.program_id(0)  # the only axis that can be long
    return (program // tiles).to(tl.int64), program % tiles * BLOCK + tl.arange(0, BLOCK)


@_jit
def _standardised(images, center, scale, channel, place, mask, farthest):
    """Pixels in the network's units; what is masked is never read."""
    c, s = tl.load(center + channel).to(tl.float32), tl.load(scale + channel).to(tl.float32)
    value = (tl.load(images + place, mask=mask, other=0.0).to(tl.float32) - c) / s
    return tl.where(mask, tl.minimum(tl.maximum(value, -farthest), farthest), 0.0)


@_jit
def _between(coarse, plane, row, column, inside, h, w):
    """A plane (h, w) of the next coarser level at pixels of the finer one, bilinearly, as F.interpolate does."""
    top, left = (row + 1) // 2, (column + 1) // 2  # the later one of the two coarse rows around this one
    above, below = tl.maximum(top - 1, 0), tl.minimum(top, h - 1)
    before, after = tl.maximum(left - 1, 0), tl.minimum(left, w - 1)
    down = tl.where(row % 2 == 0, 0.75, 0.25)
    right = tl.where(column % 2 == 0, 0.75, 0.25)
    start = coarse + plane * h * w
    upper = tl.load(start + above * w + before, mask=inside, other=0.0) * (1 - right)
    upper += tl.load(start + above * w + after, mask=inside, other=0.0) * right
    lower = tl.load(start + below * w + before, mask=inside, other=0.0) * (1 - right)
    lower += tl.load(start + below * w + after, mask=inside, other=0.0) * right
    return upper * (1 - down) + lower * down


@_jit
def pull_kernel(
    source, share, center, scale, value, weight, farthest,
    image_stride, channel_stride, row_stride, column_stride,
    seen_image, seen_channel, seen_row, seen_column,
    C, H, W, h, w, tiles,
    FINEST: tl.constexpr, BLOCK: tl.constexpr,
):
    """The weighted mean over 4×4 pixels of (H, W), 1 3 3 1 each way, for every pixel of (h, w), and its weight.

    `source` and `share` are values and weights, or images and what is seen of them if this is the finest level.
    """
    plane, place = _share(tiles, BLOCK)
    image, channel = plane // C, plane % C
    row, column, inside = place // w, place % w, place < h * w
    total, known = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(16):
        r, c = 2 * row + i // 4 - 1, 2 * column + i % 4 - 1
        there = inside & (r >= 0) & (r < H) & (c >= 0) & (c < W)
        share_place = image * seen_image + channel * seen_channel + r * seen_row + c * seen_column
        value_place = image * image_stride + channel * channel_stride + r * row_stride + c * column_stride
        part = (1 if i // 4 % 3 == 0 else 3) * (1 if i % 4 % 3 == 0 else 3) / 64
        if FINEST:
            seen = tl.load(share + share_place, mask=there, other=0) != 0
            number = _standardised(source, center, scale, channel, value_place, seen, farthest)
            here = seen.to(tl.float32) * part
        else:
            number = tl.load(source + value_place, mask=there, other=0.0)
            here = tl.load(share + share_place, mask=there, other=0.0) * part
        total += number * here
        known += here
    tl.store(value + plane * h * w + place, total / tl.maximum(known, 1e-12), mask=inside)
    tl.store(weight + plane * h * w + place, tl.minimum(4 * known, 1.0), mask=inside)


@_jit
def push_kernel(value, weight, coarse, filled, H, W, h, w, tiles, BLOCK: tl.constexpr):
    """Fill one level (H, W) from the next coarser one (h, w)."""
    plane, place = _share(tiles, BLOCK)
    inside = place < H * W
    share = tl.load(weight + plane * H * W + place, mask=inside, other=0.0)
    known = tl.load(value + plane * H * W + place, mask=inside, other=0.0)
    unknown = _between(coarse, plane, place // W, place % W, inside, h, w)
    tl.store(filled + plane * H * W + place, share * known + (1 - share) * unknown, mask=inside)


@_jit
def push_images_kernel(
    images, observed, center, scale, coarse, filled, farthest,
    image_stride, channel_stride, row_stride, column_stride,
    seen_image, seen_channel, seen_row, seen_column,
    C, H, W, h, w, tiles,
    BLOCK: tl.constexpr,
):
    """The same for the images themselves (H, W), whose pixels are known or not."""
    plane, place = _share(tiles, BLOCK)
    image, channel = plane // C, plane % C
    row, column, inside = place // W, place % W, place < H * W
    there = image * seen_image + channel * seen_channel + row * seen_row + column * seen_column
    seen = (tl.load(observed + there, mask=inside, other=0) != 0) & inside
    there = image * image_stride + channel * channel_stride + row * row_stride + column * column_stride
    known = _standardised(images, center, scale, channel, there, seen, farthest)
    unknown = _between(coarse, plane, row, column, inside & ~seen, h, w)
    tl.store(filled + plane * H * W + place, tl.where(seen, known, unknown), mask=inside)


@_jit
def relax_kernel(value, weight, before, after, H, W, tiles, BLOCK: tl.constexpr):
    """One sweep of Jacobi's method: what a level (H, W) does not know is the mean of the four pixels around it."""
    plane, place = _share(tiles, BLOCK)
    inside = place < H * W
    share = tl.load(weight + plane * H * W + place, mask=inside, other=0.0)
    known = tl.load(value + plane * H * W + place, mask=inside, other=0.0)
    around = _around(before + plane * H * W, place // W, place % W, inside, H, W)
    tl.store(after + plane * H * W + place, share * known + (1 - share) * around, mask=inside)


@_jit
def _around(plane, row, column, mask, H, W):
    """The mean of the four pixels next to one; past the border that one itself stands for them."""
    total = tl.load(plane + tl.maximum(row - 1, 0) * W + column, mask=mask, other=0.0)
    total += tl.load(plane + tl.minimum(row + 1, H - 1) * W + column, mask=mask, other=0.0)
    total += tl.load(plane + row * W + tl.maximum(column - 1, 0), mask=mask, other=0.0)
    total += tl.load(plane + row * W + tl.minimum(column + 1, W - 1), mask=mask, other=0.0)
    return total / 4


@_jit
def enter_kernel(
    observed, filled, inputs,
    seen_image, seen_channel, seen_row, seen_column,
    H, W, blocks, wide, tiles,
    C: tl.constexpr, PATCH: tl.constexpr, BLOCK: tl.constexpr,
):
    """Filled images, then what was seen, (B, blocks, 2 C PATCH²): a pixel of a block is a channel; 0 past the image.

    The last sweep over what is filled is made here.
    """
    image, entry = _share(tiles, BLOCK)
    inside = entry < blocks * 2 * C * PATCH * PATCH
    block, part = entry // (2 * C * PATCH * PATCH), entry % (2 * C * PATCH * PATCH)
    kind, pixel = part // (PATCH * PATCH), part % (PATCH * PATCH)
    row, column = block // wide * PATCH + pixel // PATCH, block % wide * PATCH + pixel % PATCH
    channel = kind % C
    there = inside & (row < H) & (column < W)
    place = image * seen_image + channel * seen_channel + row * seen_row + column * seen_column
    seen = tl.load(observed + place, mask=there, other=0) != 0
    is_value = there & (kind < C)
    plane = filled + (image * C + channel) * H * W
    known = tl.load(plane + row * W + column, mask=is_value & seen, other=0.0)
    unknown = _around(plane, row, column, is_value & ~seen, H, W)
    number = tl.where(kind < C, tl.where(seen, known, unknown), seen.to(tl.float32))
    place = image * blocks * 2 * C * PATCH * PATCH + entry
    tl.store(inputs + place, number.to(inputs.dtype.element_ty), mask=inside)


@_jit
def join_kernel(
    result, bias, skip, joined, active,
    H, W, h, w, tiles,
    C: tl.constexpr, SKIP: tl.constexpr, DOUBLED: tl.constexpr, BLOCK: tl.constexpr,
):
    """`joined` = the result of a convolution + bias + what skipped it, `active` = its ReLU; channels last, (H, W, C).

    If it is DOUBLED, every pixel of the result (h, w, C) becomes 2×2.
    """
    image, entry = _share(tiles, BLOCK)
    inside = entry < H * W * C
    channel, place = entry % C, image * H * W * C + entry
    source = place
    if DOUBLED:
        pixel = entry // C
        source = image * h * w * C + (pixel // W // 2 * w + pixel % W // 2) * C + channel
    value = tl.load(result + source, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SKIP:
        value += tl.load(skip + place, mask=inside, other=0.0).to(tl.float32)
    kind = joined.dtype.element_ty
    tl.store(joined + place, value.to(kind), mask=inside)
    tl.store(active + place, tl.where(value < 0, 0.0, value).to(kind), mask=inside)


@_jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@_jit
def _output(start, bias, number, stride, mask):
    """One of the numbers that the network says of a pixel."""
    value = tl.load(start + number * stride, mask=mask, other=0.0).to(tl.float32)
    return value + tl.load(bias + number, mask=mask, other=0.0).to(tl.float32)


@_jit
def output_kernel(
    images, observed, center, scale, low, high, filled, outputs, bias, means, factors, noise, least,
    image_stride, channel_stride, row_stride, column_stride,
    seen_image, seen_channel, seen_row, seen_column,
    out_image, out_channel, out_row, out_column,
    H, W, rows, tiles,
    K: tl.constexpr, L: tl.constexpr, C: tl.constexpr, PATCH: tl.constexpr, BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Means and noise (B, K, C, H, W) and factors (B, K, L, C, H, W) from the outputs of the network.

    These are means, noise and factors, of a component and a channel PATCH² each, for every block of pixels. A program
    has PATCH rows, so that it reads whole blocks. A seen pixel is exact, and nothing is read for it.
    """
    line, across = _share(tiles, BLOCK)
    part = line // rows
    image, k, channel = part // (K * C), part // C % K, part % C
    # One block after the other: its pixels are neighbours in the outputs.
    column, dy = across // (PATCH * PATCH) * PATCH + across % PATCH, across // PATCH % PATCH
    row = (line % rows).to(tl.int32) * PATCH + dy
    inside = (row < H) & (column < W)
    place = image * seen_image + channel * seen_channel + row * seen_row + column * seen_column
    seen = tl.load(observed + place, mask=inside, other=0) != 0
    hidden = inside & ~seen
    c, s = tl.load(center + channel).to(tl.float32), tl.load(scale + channel).to(tl.float32)

    pixel = dy * PATCH + column % PATCH
    start = outputs + image * out_image + row // PATCH * out_row + column // PATCH * out_column + pixel * out_channel
    bias += pixel
    SIZE: tl.constexpr = PATCH * PATCH
    change = _output(start, bias, (k * C + channel) * SIZE, out_channel, hidden)
    variance = tl.exp(tl.minimum(_output(start, bias, ((K + k) * C + channel) * SIZE, out_channel, hidden), 6.0))
    unknown = _around(filled + (image * C + channel) * H * W, row, column, hidden, H, W)
    mean = c + s * (unknown + change)
    floor, given = least, tl.full((BLOCK,), 1.0, tl.float32)
    if BOUNDED:
        lowest, highest = tl.load(low + channel).to(tl.float32), tl.load(high + channel).to(tl.float32)
        span = highest - lowest
        asked = variance
        for j in tl.static_range(L):
            number = (2 * K * C + (k * L + j) * C + channel) * SIZE
            asked += _square(_output(start, bias, number, out_channel, hidden))
        # As in misconv._density.bound, in the same order.
        share = (mean - lowest) / span
        share += (_softplus(-100.0 * share) - _softplus(100.0 * (share - 1))) / 100.0
        share = tl.minimum(tl.maximum(share, 1e-3), 1 - 1e-3)
        most = _square(span / s) * share * (1 - share)
        floor = tl.minimum(least, most / 2)
        given = (most - floor) / (most - floor + asked)
        mean = lowest + span * share
    place = image * image_stride + channel * channel_stride + row * row_stride + column * column_stride
    exact = tl.load(images + place, mask=inside & seen, other=0.0).to(tl.float32)
    kind = means.dtype.element_ty
    target = part * H * W + row * W + column
    tl.store(means + target, tl.where(seen, exact, mean).to(kind), mask=inside)
    tl.store(noise + target, tl.where(seen, 0.0, s * (s * (floor + variance * given))).to(kind), mask=inside)
    length = s * tl.sqrt(given)
    for j in tl.static_range(L):
        number = (2 * K * C + (k * L + j) * C + channel) * SIZE
        factor = _output(start, bias, number, out_channel, hidden) * length
        target = (((image * K + k) * L + j) * C + channel) * H * W + row * W + column
        tl.store(factors + target, tl.where(seen, 0.0, factor).to(kind), mask=inside)


@_jit
def _square(x):
    return x * x
