"""Padding: how much of it, and what it does to randomness where it repeats pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Padding", "Pair", "margins", "output_size", "pair", "repeated_noise"]

Pair = int | tuple[int, ...]
Padding = int | str | tuple[int, ...]


def repeated_noise(
    noise: Tensor, weight: Tensor, stride: Pair, padding: Padding, dilation: Pair, groups: int, mode: str
) -> Tensor:
    """What `M² d` lacks where padding repeats pixels: ``2 Σ_{s<t} w_s w_t d`` over taps s, t that read the same pixel.

    A pixel that stands under the taps s and t adds d(w_s + w_t)², of which the convolution with squared weights
    counts d(w_s² + w_t²).
    """
    *lead, channels, height, width = noise.shape
    out = weight.shape[0]
    repeats = _repeats(
        height,
        width,
        tuple(weight.shape[2:]),
        pair(stride),
        margins(weight.shape[2:], padding, dilation),
        pair(dilation),
        mode,
    )
    (rows, columns), windows, first, second, source, same = repeats
    result = noise.new_zeros(*lead, out, rows * columns)
    if windows.shape[0] > 0:
        windows, first, second, source, same = (t.to(noise.device) for t in (windows, first, second, source, same))
        flat = weight.flatten(2)  # (O, C/groups, T)
        products = 2 * flat[:, :, first] * flat[:, :, second]  # (O, C/groups, pairs)
        touched = noise.flatten(-2)[..., source] * same  # (…, C, pairs, windows)
        touched = touched.reshape(-1, channels * first.shape[0], windows.shape[0])
        extra = F.conv1d(touched, products.reshape(out, -1, 1), groups=groups)
        result = result.index_copy(-1, windows, extra.view(*lead, out, windows.shape[0]))
    return result.view(*lead, out, rows, columns)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch does not say
def _repeats(
    height: int,
    width: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    around: tuple[int, int, int, int],
    dilation: tuple[int, int],
    mode: str,
) -> tuple[tuple[int, int], Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which taps of which windows read the same pixel; a matter of sizes alone.

    Returns:
        The size of the output; the windows with a repeated pixel; the pairs of taps (first, second) that can meet; the
        pixel under the first of each pair in each window (pairs, windows), and whether the second reads the same one.
    """
    index = torch.arange(height * width, dtype=torch.float64).view(1, 1, height, width)
    padded = F.pad(index, around, mode)
    taps = F.unfold(padded, kernel, dilation, 0, stride)[0].long()  # (T, windows)
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    rows, columns = ((n - span - 1) // s + 1 for n, span, s in zip(padded.shape[2:], spans, stride, strict=True))
    first, second = torch.combinations(torch.arange(len(taps)), 2).unbind(1)
    same = taps[first] == taps[second]  # (pairs, windows)
    pairs, windows = same.any(1).nonzero().squeeze(1), same.any(0).nonzero().squeeze(1)
    first, second = first[pairs], second[pairs]
    return (rows, columns), windows, first, second, taps[first][:, windows], same[pairs][:, windows]


def output_size(
    image: tuple[int, ...], kernel: tuple[int, ...], stride: Pair, padding: Padding, dilation: Pair
) -> tuple[int, int]:
    """Height and width of the response of a convolution."""
    left, right, top, bottom = margins(kernel, padding, dilation)
    (sy, sx), (dy, dx) = pair(stride), pair(dilation)
    height, width = image[0] + top + bottom, image[1] + left + right
    return (height - dy * (kernel[0] - 1) - 1) // sy + 1, (width - dx * (kernel[1] - 1) - 1) // sx + 1


def margins(kernel: tuple[int, ...], padding: Padding, dilation: Pair) -> tuple[int, int, int, int]:
    """Padding as `F.pad` wants it: left, right, top, bottom."""
    if padding == "valid":
        return 0, 0, 0, 0
    if padding == "same":
        (dy, dx), (kh, kw) = pair(dilation), kernel
        across, down = dx * (kw - 1), dy * (kh - 1)
        return across // 2, across - across // 2, down // 2, down - down // 2
    assert not isinstance(padding, str)
    top, left = pair(padding)
    return left, left, top, top


def pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
