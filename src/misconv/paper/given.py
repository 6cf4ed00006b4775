"""What conditional models of images are given: images of their shape, on their device, with values from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from misconv._checks import check_images, check_observed, check_seen_finite, check_size, describe, readable

__all__ = ["check_given", "check_range", "check_shape"]


def check_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """(C, H, W) of the images, as integers of at least 1."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 3:
        raise ValueError(f"shape must be (C, H, W) of the images, got {describe(shape)}")
    channels, height, width = (check_size(f"shape[{n}]", size) for n, size in enumerate(shape))
    return channels, height, width


def check_given(x: Tensor, observed: Tensor, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """`observed` as bool, for images of this shape, which lie on the device of the flow."""
    check_images("x", x)
    if tuple(x.shape[1:]) != shape:
        channels, height, width = shape
        raise ValueError(f"x must have shape (B, {channels}, {height}, {width}), got {describe(x)}")
    if x.device != device:
        raise ValueError(f"x must be on the device of the flow, {device}, got {describe(x)}")
    return check_observed("observed", observed, x)


def check_range(x: Tensor, read: Tensor, beyond: float) -> None:
    """All values that are read lie between 0 and 1, or no farther beyond; on a CPU alone, where a look costs little."""
    check_seen_finite("x", x, read)
    if readable(x, read):
        odd = x[read.expand_as(x) & ((x < -beyond) | (x > 1 + beyond))]
        if odd.numel():
            raise ValueError(f"x must hold values from 0 to 1, got {odd[0].item():.6g}")
