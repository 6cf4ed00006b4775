"""Launching kernels of Triton again and again.

A launch through Triton's front door takes longer than a small kernel runs: every time it looks at every argument to
find out for what it has to compile. What has been launched before is launched here by the back door: the launcher that
was compiled with the kernel, called as torch's own compiler calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

__all__ = ["Launch", "dense", "power"]


class Launch:
    """A kernel with its device, its grid and everything but its tensors, of which some may be None."""

    def __init__(
        self, kernel: Any, device: torch.device, grid: tuple[int, int, int], arguments: tuple[Any, ...], **options: Any
    ) -> None:
        self.kernel, self.device, self.grid, self.arguments = kernel, device, grid, arguments
        self.options = {"enable_fp_fusion": True} | options  # said outright, because the default changes
        self.switches = device.type == "cuda" and _devices() > 1  # it may have to make its device the current one
        self.again: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch it. All calls must have tensors of the same shapes and types, and None in the same places."""
        if self.switches and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # launches go to the device that is current
                self(*tensors)
            return
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        # Triton compiles for pointers that are multiples of 16, as those of fresh tensors are.
        odd = 0
        for pointer in pointers:
            if pointer is not None:
                odd |= pointer
        aligned = odd & 15 == 0
        if aligned and self.again is not None:
            self.again(*pointers, *self.arguments)  # numbers spare it a look at every tensor
            return
        compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        if aligned and compiled is not None:  # None in the interpreter
            self.again = _launcher(compiled, self.grid, self.device)


def _launcher(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """What launches a compiled kernel with pointers and numbers.

    Triton's own writes down every launch for hooks, and calls them, though nobody has set one: that takes most of its
    time. It is left to launches that somebody watches, a profiler for example.
    """
    watched: Callable[..., None] = compiled[grid]
    if device.type != "cuda":
        return watched
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, index, runtime = driver.active.get_current_stream, device.index, knobs.runtime

    def launch(*arguments: Any) -> None:
        if _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook):
            watched(*arguments)
        else:
            run(*grid, stream_of(index), function, metadata, None, None, None, *arguments)

    return launch


def _is_set(hook: Any) -> bool:
    """Whether somebody watches launches: hooks come in a chain, which may be empty; in older versions alone."""
    return bool(getattr(hook, "calls", hook))


@cache
def _devices() -> int:
    return torch.cuda.device_count()


def dense(*tensors: Tensor | None) -> list[Any]:
    """Tensors as kernels read them, one number after the other; None stays None."""
    return [t if t is None or t.is_contiguous() else t.contiguous() for t in tensors]


def power(number: int) -> int:
    """The next power of two; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
