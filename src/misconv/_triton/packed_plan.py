"""The fused convolution of packed images: when it serves, how it is cut up, and its launches."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from misconv._triton.launch import Launch, dense, power
from misconv._triton.packed import (
    pack_images_kernel,
    pack_weights_kernel,
    packed_backward_kernel,
    packed_forward_kernel,
    packed_squares_kernel,
)

if TYPE_CHECKING:
    from misconv._triton.plan import Settings

__all__ = ["PackedPlan"]

_MOST_CHANNELS, _MOST_TAPS = 4, 256  # of the image; of a window, padded
_BLOCK = 1024  # numbers that a program packs
_Shape = tuple[int, ...]


class _Tiling(NamedTuple):
    """How the work is cut into tiles."""

    rows: int  # of a tile of the output, a divisor of 16
    columns: int
    taps: int  # of a window at a time
    stack: int  # factors at a time
    warps: int
    stages: int  # how many blocks of taps are read ahead, and one
    programs: int  # on each multiprocessor, where a program has many tiles


_FORWARD = _Tiling(8, 8, 64, 1, 4, 1, 2)
_BACKWARD = _Tiling(4, 8, 64, 1, 4, 1, 2)


class PackedPlan:
    """A convolution of packed images of one size; kernels that have been launched stay ready."""

    def __init__(
        self,
        settings: Settings,
        means: _Shape,
        rank: int,
        planes: int | None,
        weight: _Shape,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.settings, self.means, self.rank, self.weight, self.device = settings, means, rank, weight, device
        out, channels, *kernel = weight
        padded = power(channels)
        row = power(kernel[1] * padded)
        block = min(max(power(out), 16), 64)
        self.parts = 1 if dtype == torch.bfloat16 else 2
        self.out_padded, self.taps = -(-out // block) * block, max(power(kernel[0] * row), 16)
        self.blocks = self.out_padded // block
        self.reach = [(k - 1) * d for k, d in zip(kernel, settings.dilation, strict=True)]
        # As many rows and columns as the windows of whole tiles lie over.
        self.size = [
            (-(-count // 16) * 16 - 1) * step + far + 1
            for count, step, far in zip(settings.size, settings.stride, self.reach, strict=True)
        ]
        self.observed = (planes is not None, planes is not None and planes > 1)
        self.padded, self.row = padded, row
        self.constants: tuple[Any, ...] = (
            means[1], rank, channels, out, *kernel, *settings.stride, *settings.corner, *settings.dilation,
            *self.observed, has_bias, settings.activation, self.parts, padded, row, self.taps, self.out_padded,
            block, power(means[1]),
        )  # fmt: skip
        self._forward: dict[_Shape, Launch] = {}
        self._backward: dict[_Shape, list[Launch]] = {}

    @staticmethod
    def serves(settings: Settings, weight: _Shape) -> bool:
        """Whether there are few channels and large windows, and products may be rounded."""
        _, channels, *kernel = weight
        row = power(kernel[1] * power(channels))
        few = settings.groups == 1 and channels <= _MOST_CHANNELS and power(kernel[0] * row) <= _MOST_TAPS
        return few and settings.precision in ("bf16", "tf32")

    def forward(self, out: Tensor, *tensors: Any) -> Tensor:
        """Write the expected activation to `out`.

        Args:
            tensors: here and below: logits, means, factors, noise, observed, weight, bias.
        """
        launch = self._forward.get(out.stride())
        if launch is None:
            _, tiles = self._tiles(_FORWARD)
            numbers = (*self._sizes(_FORWARD), *out.stride(), self.settings.low, self.settings.high)
            grid = (self.means[0] * tiles, self.blocks, 1)
            launch = self._forward[out.stride()] = self._launch(packed_forward_kernel, grid, numbers, _FORWARD)
        launch(*self._packed(*tensors), out)
        return out

    def squares(self, *tensors: Any) -> Tensor:
        """The sum of the expected squares of all responses of each channel, (O,), in float32."""
        launch, programs = self._squares
        sums = torch.empty((programs, self.weight[0]), dtype=torch.float32, device=self.device)
        launch(*self._packed(*tensors), sums)
        return sums.sum(0, dtype=torch.float64).float()

    def backward(self, grad: Tensor, *tensors: Any) -> tuple[Tensor, Tensor]:
        """Gradients of weights and biases, in float32."""
        programs = self._programs(_BACKWARD)
        launches = self._backward.get(grad.stride())
        if launches is None:
            numbers = (self.means[0], *self._sizes(_BACKWARD), *grad.stride(), self.settings.low, self.settings.high)
            grid = (programs, self.blocks, 1)
            launches = self._backward[grad.stride()] = [
                self._launch(packed_backward_kernel, grid, numbers, _BACKWARD, of_squares)
                for of_squares in (False, True)
            ]
        size = (2, programs, self.out_padded, self.taps + 1)
        sums = torch.empty(size, dtype=torch.float32, device=self.device)
        packed = self._packed(*tensors)
        for launch, part in zip(launches, sums, strict=True):
            launch(*packed, grad, part)
        out, channels, *kernel = self.weight
        of_filters, of_squares = sums.sum(1)
        filters = packed[4][:2].float().sum(0)
        taps = (of_filters[:, :-1] + 2 * filters * of_squares[:, :-1]).view(-1, self.taps // self.row, self.row)
        taps = taps[:out, : kernel[0], : kernel[1] * self.padded]
        return taps.reshape(out, *kernel, self.padded)[..., :channels].permute(0, 3, 1, 2), of_filters[:out, -1]

    def _packed(
        self,
        logits: Tensor,
        means: Tensor,
        factors: Tensor,
        noise: Tensor,
        observed: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> list[Tensor]:
        """What a kernel reads: the logits, packed images in one or two parts, observed, packed filters, the bias."""
        numbers = math.prod(self.means[:2]) * (2 + self.rank) * self.size[0] * self.size[1] * self.padded
        images = [torch.empty(numbers, dtype=torch.bfloat16, device=self.device) for _ in range(self.parts)]
        filters = torch.empty((4, self.out_padded, self.taps), dtype=torch.bfloat16, device=self.device)
        # What is not there is not read, but a kernel wants a pointer.
        seen, offset = means if observed is None else observed, weight if bias is None else bias
        pack_images, pack_weights = self._pack
        pack_images(*dense(means, factors, noise, seen), images[0], images[-1])
        pack_weights(*dense(weight), filters)
        return [*dense(logits), images[0], images[-1], *dense(seen), filters, *dense(offset)]

    @cached_property
    def _pack(self) -> tuple[Launch, Launch]:
        batch, components, channels, height, width = self.means
        tiles = -(-self.size[0] * self.size[1] * self.padded // _BLOCK)
        numbers = (height, width, *self.size, tiles)
        kinds = (self.rank, channels, self.padded, *self.settings.corner, components, *self.observed, self.parts)
        grid = (batch * components * (2 + self.rank) * tiles, 1, 1)
        images = Launch(pack_images_kernel, self.device, grid, (*numbers, *kinds, _BLOCK))
        out, _, *kernel = self.weight
        sizes = (out, channels, *kernel, self.padded, self.row, self.taps, self.out_padded)
        return images, Launch(pack_weights_kernel, self.device, (self.out_padded, 1, 1), sizes)

    @cached_property
    def _squares(self) -> tuple[Launch, int]:
        """The launch, and the number of programs."""
        programs, numbers = self._programs(_FORWARD), (self.means[0], *self._sizes(_FORWARD))
        return self._launch(packed_squares_kernel, (programs, self.blocks, 1), numbers, _FORWARD), programs

    def _launch(
        self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], tiling: _Tiling, *more: bool
    ) -> Launch:
        box = [
            (tile - 1) * step + far + 1
            for tile, step, far in zip(tiling[:2], self.settings.stride, self.reach, strict=True)
        ]
        taps, stack = min(tiling.taps, self.taps), min(tiling.stack, power(self.rank))
        kinds = (*self.constants, *tiling[:2], *box, power(box[0] * box[1]), taps, stack, tiling.stages, *more)
        return Launch(kernel, self.device, grid, (*numbers, *kinds), num_warps=tiling.warps, num_stages=1)

    def _tiles(self, tiling: _Tiling) -> tuple[int, int]:
        """Tiles across, and in all."""
        rows, columns = (-(-size // tile) for size, tile in zip(self.settings.size, tiling[:2], strict=True))
        return columns, rows * columns

    def _sizes(self, tiling: _Tiling) -> tuple[int, ...]:
        """Of images, output, tiles and packed images, as all kernels take them."""
        return (*self.means[3:], *self.settings.size, *self._tiles(tiling), *self.size)

    def _programs(self, tiling: _Tiling) -> int:
        """As many as run at a time, if there is work for them."""
        cuda = self.device.type == "cuda"
        cores = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 2
        return max(1, min(self.means[0] * self._tiles(tiling)[1], tiling.programs * cores // self.blocks))
