"""Sizes of convolutions: how much padding, and how many windows."""

from __future__ import annotations

__all__ = ["Padding", "Pair", "margins", "output_size", "pair"]

Pair = int | tuple[int, ...]
Padding = int | str | tuple[int, ...]


def pair(value: Pair) -> tuple[int, int]:
    """A number for both axes, or a number for each."""
    rows, columns = value if isinstance(value, (tuple, list)) else (value, value)
    return int(rows), int(columns)  # torch 2.8 knows no integers of numpy


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


def output_size(
    image: tuple[int, ...], kernel: tuple[int, ...], stride: Pair, padding: Padding, dilation: Pair
) -> tuple[int, int]:
    """Height and width of the response of a convolution."""
    left, right, top, bottom = margins(kernel, padding, dilation)
    (sy, sx), (dy, dx) = pair(stride), pair(dilation)
    height, width = image[0] + top + bottom, image[1] + left + right
    return (height - dy * (kernel[0] - 1) - 1) // sy + 1, (width - dx * (kernel[1] - 1) - 1) // sx + 1
