"""Launching kernels of Triton again and again.

A launch through Triton's front door takes longer than a small kernel runs: every time it looks at every argument to
find out for what it has to compile. What has been launched before is launched here by the back door: the launcher that
was compiled with the kernel, called as torch's own compiler calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from misconv._triton.trace import recorders

__all__ = ["Launch", "dense", "is_watched", "power"]


class Launch:
    """A kernel with its device, its grid and everything but its tensors, of which some may be None."""

    def __init__(
        self, kernel: Any, device: torch.device, grid: tuple[int, int, int], arguments: tuple[Any, ...], **options: Any
    ) -> None:
        self.kernel, self.device, self.grid, self.arguments = kernel, device, grid, arguments
        self.options = {"enable_fp_fusion": True} | options  # said outright, because the default changes
        self.switches = device.type == "cuda" and _devices() > 1  # it may have to make its device the current one
        self.again: Callable[..., None] | None = None
        self.compiled: tuple[Any, ...] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch it. All calls must have tensors of the same shapes and types, and None in the same places."""
        if self.switches and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):  # launches go to the device that is current
                self(*tensors)
            return
        recorder = recorders.get(get_ident()) if recorders else None
        if recorder is not None:
            recorder.launch(self, tensors)
        else:
            self.launch(tensors)

    def launch(self, tensors: Sequence[Tensor | None]) -> bool:
        """Launch it on the current device; returns whether all memory is aligned."""
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        # Triton compiles for pointers that are multiples of 16, as those of fresh tensors are.
        odd = 0
        for pointer in pointers:
            if pointer is not None:
                odd |= pointer
        aligned = odd & 15 == 0
        if aligned and self.again is not None:
            self.again(*pointers, *self.arguments)  # numbers spare it a look at every tensor
            return aligned
        compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        if aligned and compiled is not None:  # None in the interpreter
            self.again, self.compiled = _launcher(compiled, self.grid, self.device), _described(compiled)
        return aligned

    def describe(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...] | None:
        """How the driver launches it again, for aligned tensors like these; None where that is not known.

        The kernel's function, its threads, bytes of shared memory, and the types of its parameters.
        """
        return self.compiled


def _launcher(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """What launches a compiled kernel with pointers and numbers.

    Triton's own writes down every launch for hooks, and calls them, though nobody has set one: that takes most of its
    time. It is left to launches that somebody watches, a profiler for example.
    """
    watched: Callable[..., None] = compiled[grid]
    if device.type != "cuda":
        return watched
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, index = driver.active.get_current_stream, device.index

    def launch(*arguments: Any) -> None:
        if is_watched():
            watched(*arguments)
        else:
            run(*grid, stream_of(index), function, metadata, None, None, None, *arguments)

    return launch


def _described(compiled: Any) -> tuple[Any, ...] | None:
    """A kernel's function, threads, shared memory and types of parameters; None if its launch takes more than that."""
    metadata = getattr(compiled, "metadata", None)
    more = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "tensordesc_meta")
    if metadata is None or metadata.num_ctas != 1 or any(getattr(metadata, name, None) for name in more):
        return None
    types = tuple(compiled.src.signature.values())
    return compiled.function, metadata.num_warps * 32, metadata.shared, types


def is_watched() -> bool:
    """Whether somebody watches launches."""
    runtime = knobs.runtime
    return _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    """Hooks come in a chain, which may be empty; in older versions alone."""
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
