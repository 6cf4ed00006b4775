"""What padding does to randomness where it repeats pixels (reflect, replicate, circular)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._conv.convolution import Convolution
from misconv._torch import assume_constant

__all__ = ["Border", "border_noise", "replaced"]

_Axis = tuple[list[int], list[list[int]], list[list[list[bool]]]]


class Border(NamedTuple):
    """The windows in which padding repeats a pixel, and the variance of their noise."""

    windows: Tensor  # (N,), their places among the H'·W' of the response
    variance: Tensor  # (…, O, N)


def border_noise(noise: Tensor, conv: Convolution) -> Border | None:
    """What `M² d` gets wrong where padding repeats pixels: there a pixel counts with the square of its summed weights.

    A pixel that stands under the taps s and t adds d(w_s + w_t)², of which the convolution with squared weights
    counts d(w_s² + w_t²). Repeats are a matter of rows and of columns: in a row that repeats pixels, the weights of
    taps that read the same row are summed before they are squared; likewise in columns, and in both at corners.

    Args:
        noise: (…, C, H, W).
    """
    left, right, top, bottom = conv.margins
    strides, dilations, kernel, mode = conv.strides, conv.dilations, conv.kernel, conv.padding_mode
    size = conv.size(noise.shape[-2:])
    found = [
        _axis(*sizes, mode)
        for sizes in zip(noise.shape[-2:], kernel, size, strides, (top, left), dilations, strict=True)
    ]
    down, across = (_repeats(axis, k, noise.device) for axis, k in zip(found, kernel, strict=True))
    if len(down.windows) + len(across.windows) == 0:
        return None
    images = noise.reshape(-1, *noise.shape[-3:])
    filters = torch.unflatten(conv.weight, 0, (conv.groups, -1))  # (G, O/G, C/G, kh, kw)
    place = torch.arange(size[0] * size[1], device=noise.device).view(size)
    # Rows of windows that repeat pixels, corners included; and the rest of such columns.
    rows = _strips(_padded(images, (left, right, 0, 0), mode), filters, down, strides[1], dilations[1])
    if len(down.windows) > 0 and len(across.windows) > 0:
        rows = replaced(rows, across.windows, _corners(images, filters, down, across))
    columns = _strips(_padded(images, (0, 0, top, bottom), mode).mT, filters.mT, across, strides[0], dilations[0])
    others = [row for row in range(size[0]) if row not in found[0][0]]
    rest = torch.tensor(others, dtype=torch.long, device=noise.device)
    windows = torch.cat([place[down.windows].flatten(), place[rest][:, across.windows].T.flatten()])
    variance = torch.cat([rows.flatten(2), columns[..., rest].flatten(2)], -1)  # (N, O, windows)
    return Border(windows, variance.view(*noise.shape[:-3], conv.weight.shape[0], -1))


def replaced(values: Tensor, places: Tensor, others: Tensor) -> Tensor:
    """`values.index_copy(-1, places, others)`, whose gradient inductor of torch 2.8 cannot compile."""
    count = values.shape[-1]
    order = torch.arange(count, device=values.device)
    order = order.index_copy(0, places, torch.arange(count, count + len(places), device=values.device))
    return torch.cat([values, others], -1).index_select(-1, order)


class _Repeats(NamedTuple):
    """The R windows along one axis that read a pixel twice."""

    windows: Tensor  # (R,)
    pixels: Tensor  # (R, k), what they read, each once and the rest filled up with the first
    fold: Tensor  # (R, k, k), which taps read these pixels, bool; all False for what is filled up


def _repeats(axis: _Axis, kernel: int, device: torch.device) -> _Repeats:
    windows, pixels, folds = axis
    return _Repeats(
        torch.tensor(windows, dtype=torch.long, device=device),
        torch.tensor(pixels, dtype=torch.long, device=device).reshape(-1, kernel),
        torch.tensor(folds, dtype=torch.bool, device=device).reshape(-1, kernel, kernel),
    )


def _padded(images: Tensor, around: tuple[int, int, int, int], mode: str) -> Tensor:
    return F.pad(images, around, mode) if any(around) else images


def _strips(images: Tensor, filters: Tensor, repeats: _Repeats, stride: int, dilation: int) -> Tensor:
    """The noise (N, O, R, W') of R rows of windows; images (N, C, H, W), filters (G, O/G, C/G, kh, kw)."""
    folded = torch.einsum("rnk,goikl->rgoinl", repeats.fold.to(filters.dtype), filters)
    number, groups, out, channels, taps, kernel = folded.shape
    if number == 0:
        size = (images.shape[-1] - dilation * (kernel - 1) - 1) // stride + 1
        return images.new_zeros(len(images), groups * out, 0, size)
    read = torch.unflatten(images[:, :, repeats.pixels], 1, (groups, channels))  # (N, G, C/G, R, kh, W)
    read = read.permute(0, 3, 1, 2, 4, 5).reshape(len(images), -1, images.shape[-1])
    squares = folded.square().reshape(number * groups * out, channels * taps, kernel)
    response = F.conv1d(read, squares, None, stride, 0, dilation, number * groups)
    strips: Tensor = torch.unflatten(response, 1, (number, groups * out)).transpose(1, 2)
    return strips


def _corners(images: Tensor, filters: Tensor, down: _Repeats, across: _Repeats) -> Tensor:
    """The noise (N, O, R, Q) of windows that repeat pixels along both axes."""
    folds = (repeats.fold.to(filters.dtype) for repeats in (down, across))
    folded = torch.einsum("rnk,qml,goikl->rqgoinm", *folds, filters)
    read = images[:, :, down.pixels][..., across.pixels]
    read = torch.unflatten(read, 1, (filters.shape[0], -1))  # (N, G, C/G, R, kh, Q, kw)
    result: Tensor = torch.einsum("bgirnqm,rqgoinm->bgorq", read, folded.square()).flatten(1, 2)
    return result


@assume_constant
def _axis(*sizes: Any) -> _Axis:
    return _cached_axis(*sizes)  # torch.compile would trace through a cache


@lru_cache(256)
def _cached_axis(size: int, kernel: int, out: int, stride: int, before: int, dilation: int, mode: str) -> _Axis:
    """Which windows along one axis read a pixel twice; a matter of sizes alone, so plain numbers, kept."""
    windows: list[int] = []
    pixels: list[list[int]] = []
    folds: list[list[list[bool]]] = []
    for window in range(out):
        read = [_source(window * stride - before + tap * dilation, size, mode) for tap in range(kernel)]
        once = list(dict.fromkeys(read))
        if len(once) < kernel:
            filled = kernel - len(once)
            windows.append(window)
            pixels.append(once + once[:1] * filled)
            folds.append([[place == pixel for place in read] for pixel in once] + [[False] * kernel] * filled)
    return windows, pixels, folds


def _source(place: int, size: int, mode: str) -> int:
    """The pixel that padding puts at a place, which may be negative or beyond the size."""
    if mode == "circular":
        return place % size
    if mode == "replicate":
        return min(max(place, 0), size - 1)
    last = size - 1
    return last - abs(last - abs(place)) if last else 0
