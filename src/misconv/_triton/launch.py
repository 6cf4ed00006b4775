"""Launching kernels of Triton again and again.

A launch through Triton's front door takes longer than a small kernel runs: every time it looks at every argument to
find out for what it has to compile. What has been launched before is launched here by the back door.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch", "dense", "power"]


class Launch:
    """A kernel with its device, its grid and everything but its tensors, of which some may be None."""

    def __init__(
        self, kernel: Any, device: torch.device, grid: tuple[int, int, int], arguments: tuple[Any, ...], **options: Any
    ) -> None:
        self.kernel, self.device, self.grid, self.arguments = kernel, device, grid, arguments
        self.options = {"enable_fp_fusion": True} | options  # said outright, because the default changes
        self.again: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch it. All calls must have tensors of the same shapes and types, and None in the same places."""
        device = self.device
        if device.type == "cuda" and _devices() > 1 and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # launches go to the device that is current
                self(*tensors)
            return
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        # Triton compiles for pointers that are multiples of 16, as those of fresh tensors are.
        odd = 0
        for pointer in pointers:
            odd |= pointer or 0
        aligned = odd & 15 == 0
        if aligned and self.again is not None:
            self.again(*pointers, *self.arguments)  # numbers spare it a look at every tensor
            return
        compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        if aligned and compiled is not None:  # None in the interpreter
            self.again = compiled[self.grid]


@cache
def _devices() -> int:
    return torch.cuda.device_count()


def dense(*tensors: Tensor | None) -> list[Any]:
    """Tensors as kernels read them, one number after the other; None stays None."""
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


def power(number: int) -> int:
    """The next power of two; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
