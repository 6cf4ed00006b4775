"""The moments of all windows of a batch by fused kernels: planned and launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from misconv._triton.correlations import ROWS, Correlations, arrange_kernel, assemble_kernel, correlation_kernel
from misconv._triton.launch import Launch, dense, power
from misconv._triton.plan import Plan
from misconv._triton.windows import BLOCK_T, gather_kernel, tap_sums_kernel, window_moments_kernel

__all__ = ["NUMBERS", "WindowMoments", "Windows", "window_moments", "windows_of"]

_IMAGES, _PIXELS = 8, 128  # that a program reads at a time, for the sums over images
_SPOTS = 64  # likewise, where they are arranged
NUMBERS = 4096  # of a matrix, likewise


class WindowMoments(NamedTuple):
    """The moments of all windows of a batch; where pixels come in pairs with taps that count for nothing."""

    taps: Tensor  # (2, side), float64: the mean of every tap, and the mean of its noise
    center: Tensor  # (C,), float32
    matrix: Tensor  # (side, side), float64: the mean of (x − center)(x − center)ᵀ, without noise


class Windows:
    """Launches for the moments of windows, and the sizes of what they write."""

    def __init__(self, plan: Plan) -> None:
        s, (batch, components, channels, *image) = plan.settings, plan.means
        assert plan.window_moments is not None
        numbers, constants, self.table, self.programs, options, correlations = plan.window_moments
        device, kernel, block = plan.device, plan.weight[2:], BLOCK_T.value
        self.wide, self.taps = plan.kernel(plan.paired)[1], channels * kernel[0] * plan.kernel(plan.paired)[1]
        self.side, self.count = -(-self.taps // block) * block, batch * s.size[0] * s.size[1]
        self.blocks = -(-image[0] * image[1] // _PIXELS)
        self.numbers = channels * (2 * kernel[0] * kernel[1] + 1) * self.blocks
        masks = plan.planes is not None, plan.planes is not None and plan.planes > 1
        more = (*s.stride, *s.corner, *s.dilation, *masks, _IMAGES, _PIXELS, power(kernel[1]), power(components))
        arguments: tuple[Any, ...] = (batch, *image, *s.size, self.blocks, components, channels, *kernel, *more)
        self.sum_taps = Launch(tap_sums_kernel, device, (self.blocks, channels, 1), arguments)
        sums = (self.programs, self.blocks, self.count)
        if correlations is not None:
            self.correlate: _Correlating | None = _Correlating(plan, correlations, self, sums)
            return
        self.correlate = None
        arguments = (*numbers, self.blocks, *constants, _PIXELS)
        self.multiply = Launch(window_moments_kernel, device, (self.programs, 1, 1), arguments, num_stages=1, **options)
        arguments = (*sums, *kernel, self.wide, NUMBERS // block)
        self.gather = {tracks: Launch(gather_kernel, device, (self.taps, 1, 1), arguments) for tracks in (False, True)}

    def __call__(self, tensors: Sequence[Tensor], sums: Tensor, tracked: Tensor | None, *moments: Tensor) -> None:
        """Write the moments (matrix, taps, center) of images (logits, means, factors, observed) with these sums."""
        matrix, taps, center = moments
        block, device = BLOCK_T.value, matrix.device
        if self.correlate is not None:
            self.correlate(tensors, sums, tracked, *moments)
            return
        products = torch.empty((self.programs, block, block), dtype=torch.float32, device=device)
        self.multiply(*tensors, sums, self.table, products, center)
        self.gather[tracked is not None](products, sums, tracked, matrix, taps)


class _Correlating:
    """Launches for the second moments of large windows, some images at a time."""

    def __init__(self, plan: Plan, c: Correlations, windows: Windows, sums: tuple[int, ...]) -> None:
        s, (batch, components, channels, *image), kernel = plan.settings, plan.means, plan.weight[2:]
        assert plan.window_moments is not None
        (images, rows, columns), _, self.jobs, jobs, options, _ = plan.window_moments
        planes, beside = components * (1 + plan.rank), c.across - 1
        parts = 1 if s.precision == "bf16" else 2  # of a number, each of bfloat16
        self.spots, self.touched = (parts, planes, images, rows, columns, c.spot), (images, rows, columns)
        self.products = (jobs, c.down, c.left, c.right)
        masks = plan.planes is not None, plan.planes is not None and plan.planes > 1
        window = kernel[0] * kernel[1]
        constants = (components, plan.rank, channels, window, *s.stride, *s.corner, *masks, parts, beside, c.spot)
        blocks = -(-rows * columns // _SPOTS)
        self.arrange, self.multiply = [], []
        for first in range(0, batch, images):
            some = min(images, batch - first)
            arguments: tuple[Any, ...] = (
                first, images, batch, *image, rows, columns, windows.blocks, *constants,
                power(c.spot), _SPOTS, power(components), _PIXELS,
            )  # fmt: skip
            self.arrange.append(Launch(arrange_kernel, plan.device, (blocks, some, 1), arguments))
            arguments = (
                some, int(first > 0), rows, columns, images * rows * columns * c.spot, components, plan.rank,
                parts, c.down, c.columns, beside, c.spot, c.left, c.right, ROWS, power(c.columns),
            )  # fmt: skip
            self.multiply.append(Launch(correlation_kernel, plan.device, (jobs, c.down, 1), arguments, **options))
        places = power(windows.taps)
        arguments = (
            *sums, windows.taps, *kernel, windows.wide, *s.stride, c.down, c.columns, beside, c.spot, c.left, c.right,
            windows.side, places, max(1, NUMBERS // places), _PIXELS,
        )  # fmt: skip
        grid = (windows.taps, 1, 1)
        self.assemble = {tracks: Launch(assemble_kernel, plan.device, grid, arguments) for tracks in (False, True)}

    def __call__(self, tensors: Sequence[Tensor], sums: Tensor, tracked: Tensor | None, *moments: Tensor) -> None:
        matrix, taps, center = moments
        device = matrix.device
        spots = torch.empty(self.spots, dtype=torch.bfloat16, device=device)
        touched = torch.empty(self.touched, dtype=torch.int8, device=device)
        products = torch.empty(self.products, dtype=torch.float32, device=device)
        for arrange, multiply in zip(self.arrange, self.multiply, strict=True):
            arrange(*tensors, sums, spots, touched, center)
            multiply(spots, touched, self.jobs, products)
        self.assemble[tracked is not None](products, self.jobs, sums, tracked, matrix, taps)


@lru_cache(1024)
def windows_of(plan: Plan) -> Windows:
    return Windows(plan)


def window_moments(
    plan: Plan,
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    observed: Tensor | None,
    tracked: Tensor | None = None,
) -> WindowMoments:
    """The moments of all windows of a batch, for a plan that says how."""
    w, device, float64 = windows_of(plan), plan.device, torch.float64
    side = w.side
    buffer = torch.empty(side * (side + 2) + w.numbers, dtype=float64, device=device)
    matrix, taps, sums = buffer.split_with_sizes((side * side, 2 * side, w.numbers))
    center = torch.empty(plan.means[2], dtype=torch.float32, device=device)
    logits, means, factors, noise, seen = dense(logits, means, factors, noise, means if observed is None else observed)
    w.sum_taps(logits, means, noise, seen, sums)
    w((logits, means, factors, seen), sums, tracked, matrix, taps, center)
    return WindowMoments(taps.view(2, side), center, matrix.view(side, side))
