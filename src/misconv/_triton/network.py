"""What is around the convolutions of a density network that starts from a smooth fill: planned and launched."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from misconv._math import SWEEPS
from misconv._triton.launch import Launch, dense
from misconv._triton.unet import (
    enter_kernel,
    join_kernel,
    output_kernel,
    pull_kernel,
    push_images_kernel,
    push_kernel,
    relax_kernel,
)

__all__ = ["Frame", "join", "smooth_input", "to_mixture"]

_BLOCK = 512  # pixels of a program
assert SWEEPS[1] == 1  # made by the kernels that read the finest level


class Frame(NamedTuple):
    """In which units a network counts: (C,) or (C, 1, 1) each; without bounds low and high are None."""

    center: Tensor
    scale: Tensor
    low: Tensor | None
    high: Tensor | None
    floor: float  # the least noise, in units of scale²
    farthest: float  # standardised pixels beyond this are cut off at it


def smooth_input(x: Tensor, observed: Tensor, frame: Frame, patch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the network reads, (B, 2C patch², H/patch, W/patch) with channels last; and the fill before its last sweep.

    Args:
        x: (B, C, H, W), of which H or W is more than one. observed: bool (B, 1, H, W) or (B, C, H, W).
    """
    batch, channels, height, width = x.shape
    places = (*x.stride(), *_strides(observed, channels))
    units = dense(frame.center, frame.scale)
    levels: list[tuple[Tensor, Tensor]] = []
    source, share, size = x, observed, (height, width)
    while max(size) > 1:
        small = -(-size[0] // 2), -(-size[1] // 2)
        value, weight = (x.new_empty(batch, channels, *small, dtype=torch.float32) for _ in range(2))
        strides = (*source.stride(), *share.stride()) if levels else places
        sizes = (channels, *size, *small)
        tensors = (source, share, *units, value, weight)
        _launch(pull_kernel, tensors, batch * channels, small, (frame.farthest, *strides, *sizes), (not levels,))
        levels.append((value, weight))
        source, share, size = value, weight, small
    filled, _ = levels.pop()
    for value, weight in reversed(levels):
        coarse, here = filled, tuple(value.shape[2:])
        filled = torch.empty_like(value)
        _launch(push_kernel, (value, weight, coarse, filled), batch * channels, here, (*here, *coarse.shape[2:]))
        for _ in range(SWEEPS[0]):
            before, filled = filled, torch.empty_like(value)
            _launch(relax_kernel, (value, weight, before, filled), batch * channels, here, here)
    coarse, filled = filled, x.new_empty(x.shape, dtype=torch.float32)
    tensors = (x, observed, *units, coarse, filled)
    numbers = (frame.farthest, *places, channels, height, width, *coarse.shape[2:])
    _launch(push_images_kernel, tensors, batch * channels, (height, width), numbers)
    high, wide = -(-height // patch), -(-width // patch)
    inputs = torch.empty(
        (batch, 2 * channels * patch**2, high, wide), dtype=dtype, device=x.device, memory_format=torch.channels_last
    )
    numbers = (*places[4:], height, width, high * wide, wide)
    _launch(enter_kernel, (observed, filled, inputs), batch, inputs.shape[1:], numbers, (channels, patch))
    return inputs, filled


def join(result: Tensor, bias: Tensor, skip: Tensor | None = None, *, doubled: bool = False) -> tuple[Tensor, Tensor]:
    """The result of a convolution + bias + what skipped it; and its ReLU. Both with channels last.

    Args:
        doubled: the result has half the size of `skip`, rounded up.
    """
    batch, channels, h, w = result.shape
    result = result.contiguous(memory_format=torch.channels_last)
    high, wide = (h, w) if skip is None else skip.shape[2:]
    size = (batch, channels, high, wide)
    joined = torch.empty(size, dtype=result.dtype, device=result.device, memory_format=torch.channels_last)
    active = torch.empty_like(joined)
    tensors, kind = (result, *dense(bias), skip, joined, active), (channels, skip is not None, doubled)
    _launch(join_kernel, tensors, batch, (channels, high, wide), (high, wide, h, w), kind)
    return joined, active


def to_mixture(
    x: Tensor,
    observed: Tensor,
    frame: Frame,
    filled: Tensor,
    outputs: Tensor,
    bias: Tensor,
    components: int,
    rank: int,
    patch: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Means, factors and noise from what the network says of every block; seen pixels are exact.

    Args:
        x, observed, filled: as in `smooth_input`.
        outputs: (B, K (2 + L) C patch², H/patch, W/patch): means, noise and factors, to which the bias is still added.
    """
    batch, channels, height, width = x.shape
    means = x.new_empty(batch, components, channels, height, width)
    noise, factors = torch.empty_like(means), x.new_empty(batch, components, rank, channels, height, width)
    rows, wide = -(-height // patch), -(-width // patch)
    strides = (*x.stride(), *_strides(observed, channels), *outputs.stride())
    numbers = (frame.floor, *strides, height, width, rows)
    tensors = (x, observed, *dense(*frame[:4]), filled, outputs, *dense(bias), means, factors, noise)
    kind = (components, rank, channels, patch, frame.low is not None)
    _launch(output_kernel, tensors, batch * components * channels * rows, (wide, patch**2), numbers, kind)
    return means, factors, noise


def _strides(observed: Tensor, channels: int) -> tuple[int, ...]:
    return observed.expand(-1, channels, -1, -1).stride()


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    planes: int,
    size: tuple[int, ...],
    numbers: tuple[float, ...],
    constants: tuple[int, ...] = (),
) -> None:
    """For every plane as many programs as its size needs."""
    first = tensors[0]
    assert first is not None
    types = tuple(None if t is None else t.dtype for t in tensors)
    _planned(kernel, first.device, types, planes, size, numbers, constants)(*tensors)


@lru_cache(1024)
def _planned(
    kernel: Any,
    device: torch.device,
    types: tuple[torch.dtype | None, ...],  # a launch is for these
    planes: int,
    size: tuple[int, ...],
    numbers: tuple[float, ...],
    constants: tuple[int, ...],
) -> Launch:
    tiles = -(-math.prod(size) // _BLOCK)
    return Launch(kernel, device, (planes * tiles, 1, 1), (*numbers, tiles, *constants, _BLOCK))
