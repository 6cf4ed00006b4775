"""The work of the fused convolution, cut up; `convolve` has it done.

Small layers are bound by what the host does before a launch, so everything that follows from shapes and types is worked
out once and kept.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from misconv._triton.backward import backward_kernel
from misconv._triton.complete import PARTS, CompleteTiles, Spots, arrange_kernel, complete_kernel, largest_kernel
from misconv._triton.correlations import ROWS, Correlations, cut_jobs
from misconv._triton.forward import forward_kernel
from misconv._triton.halves import HalfFilters, balance_kernel, halve_filters_kernel
from misconv._triton.launch import Launch, power
from misconv._triton.order import TileOrder, find_touched_kernel, order_kernel
from misconv._triton.squares import squares_kernel
from misconv._triton.tiles import LARGEST_BOX, Settings, Tiling, box_size, tap_table, tile_shape
from misconv._triton.windows import BLOCK_T

__all__ = ["Layout", "Plan"]

_Shape = tuple[int, ...]


class Layout(NamedTuple):
    """Where the backward kernel writes the gradients of weights and biases: a row for each program, biases behind."""

    out: int  # channels
    chunks: int  # of taps
    chunk_taps: int
    places: int  # for the taps of a chunk
    turned: bool  # (taps, channels), and added to; else (channels, taps), and written

    @property
    def number(self) -> int:
        """Of places for weights."""
        return self.out * self.chunks * self.places

    def new_rows(self, programs: int, device: torch.device) -> Tensor:
        make = torch.zeros if self.turned else torch.empty
        return make((programs, self.number + self.out), dtype=torch.float32, device=device)


class WindowWork(NamedTuple):
    """How the second moments of windows are computed: numbers and constants of a kernel, and how it is launched."""

    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    table: Tensor  # of taps, or of jobs
    programs: int
    options: dict[str, int]  # of the compiler
    correlations: Correlations | None = None  # of large windows


class BackwardWork(NamedTuple):
    """How gradients are computed."""

    launch: Launch
    table: Tensor  # of taps
    programs: int  # that write a row each
    layout: Layout
    order: TileOrder | None  # if tiles do not come as they lie
    complete: CompleteTiles | None  # if the launch leaves the parameters' gradients by them out; their rows come last


# By windows: small ones, larger ones, and such as are spread in pairs of pixels; backward also by whether gradients of
# pixels are asked for.
_SMALL = 32  # taps
_FORWARD = {
    "small": Tiling(64, 32, 1, {"num_warps": 4, "maxnreg": 128}, 4),
    "large": Tiling(64, 32, 1, {"num_warps": 4}, 4),
    "paired": Tiling(64, 64, 1, {"num_warps": 4, "maxnreg": 168}, 3),
}
_BACKWARD = {
    ("small", False): Tiling(64, 32, 1, {"num_warps": 4}, 2),
    ("small", True): Tiling(64, 32, 1, {"num_warps": 4}, 2),
    ("large", False): Tiling(32, 64, 4, {"num_warps": 4}, 2),
    ("large", True): Tiling(32, 64, 4, {"num_warps": 4}, 2),
    ("paired", False): Tiling(64, 64, 4, {"num_warps": 4}, 2),
}
_COMPLETE = {"num_warps": 4}, 2  # options and programs: its tiles are those of `_BACKWARD`
_WINDOWS = Tiling(64, 64, 1, {"num_warps": 4}, 2)
_CORRELATIONS = Tiling(ROWS, 64, 1, {"num_warps": 4, "num_stages": 3}, 6)
_MOST_CHANNELS = 64  # of the output, likewise
_MOST_SPOTS = 160_000_000  # numbers that are arranged at a time
_ARRANGED = 64  # spots that a program arranges
_LOOKED_AT = 2048  # pixels that a program looks at, at a time, for the largest of them
_ORDERED = 1024  # tiles that a program orders
_MANY_TILES = 8192  # from which on it pays to order them


class Plan:
    """A convolution of images of one size, cut up; kernels that have been launched stay ready.

    `needed` of `backward` asks for gradients of the parameters, the logits, means, factors and noise.
    """

    def __init__(
        self,
        settings: Settings,
        means: _Shape,
        rank: int,
        planes: int | None,
        weight: _Shape,
        has_bias: bool,
        device: torch.device,
    ) -> None:
        self.settings, self.means, self.rank, self.planes = settings, means, rank, planes
        self.weight, self.has_bias, self.device = weight, has_bias, device
        self.shape = (means[0], weight[0], *settings.size)
        # Windows that begin at even columns can be spread two pixels at a time; rows of three would gain nothing by it.
        even = settings.stride[1] % 2 == 0 and settings.dilation[1] == 1 and weight[3] > 4
        self.paired = settings.precision == "bf16" and even
        self.halved = settings.precision == "tf32" and even and self._halves_pay()
        self._backward: dict[tuple[_Shape, _Shape | None, tuple[bool, ...]], BackwardWork] = {}

    @cached_property
    def forward(self) -> tuple[Launch, Tensor, _Shape]:
        _, out, rows, columns = self.shape
        return self._forward((out * rows * columns, rows * columns, columns, 1))

    @cached_property
    def forward_channels_last(self) -> tuple[Launch, Tensor, _Shape]:
        _, out, rows, columns = self.shape
        return self._forward((out * rows * columns, 1, columns * out, out))

    def kernel(self, paired: bool) -> tuple[int, int]:
        """Rows and columns of a window, of which the number is even if pixels come in pairs."""
        rows, columns = self.weight[2:]
        return rows, columns + (columns % 2 if paired else 0)

    @property
    def reads_response(self) -> bool:
        """Whether `backward` wants to see what `forward` returned.

        It tells where a ReLU lets a gradient through, and torch's own keeps it too; but small windows are sooner
        computed again than it is read.
        """
        return self.settings.activation == "relu" and self._windows(False) != "small"

    def _halves_pay(self) -> bool:
        """Whether the forward pass is better off with float16 numbers, in the place of TF32 ones and in pairs.

        Filters have to be made for it first. Units are those of one chunk of the channels, so that has to be all.
        """
        s, tiling = self.settings, _FORWARD["paired"]
        tile = tile_shape(tiling.pixels, self.kernel(True), s)
        rows, columns = box_size(tile, self.kernel(True), s)
        tiles = self.means[0] * -(-s.size[0] // tile[0]) * -(-s.size[1] // tile[1])
        return s.groups == 1 and self.weight[1] * rows * columns <= LARGEST_BOX and tiles >= _MANY_TILES

    @cached_property
    def halves(self) -> HalfFilters | None:
        """How filters become float16 numbers; None where the kernel takes them as they are."""
        if not self.halved:
            return None
        out, channels, rows, columns = self.weight
        taps, wide = channels * rows * columns, self.kernel(True)[1]
        block = power(taps)
        arguments: tuple[int, ...] = (out, taps, rows * columns, max(8192 // block, 1), block)
        balance = Launch(balance_kernel, self.device, (1, 1, 1), arguments)
        arguments = (taps, rows, columns, wide, power(channels * rows * wide))
        halve = Launch(halve_filters_kernel, self.device, (out, 1, 1), arguments)
        return HalfFilters(balance, halve, (out, channels, rows, wide))

    def _windows(self, paired: bool) -> str:
        """What kind of windows they are, for the choice of a tiling."""
        if paired:
            return "paired"
        return "small" if self.weight[1] * self.weight[2] * self.weight[3] <= _SMALL else "large"

    def _forward(self, strides: _Shape) -> tuple[Launch, Tensor, _Shape]:
        """The launch, its table of taps, and the strides of the output."""
        paired = self.paired or self.halved
        s, batch, tiling = self.settings, self.means[0], _FORWARD[self._windows(paired)]
        (across, tiles), parts, _, constants, table = self._tiles(tiling, paired)
        numbers = (*self.means[3:], *s.size, across, tiles, *strides, s.low, s.high)
        grid, arguments = (batch * tiles, parts, 1), (*numbers, *constants)
        launch = Launch(forward_kernel, self.device, grid, arguments, num_stages=1, **tiling.options)
        return launch, table, strides

    @cached_property
    def squares(self) -> tuple[Launch, Tensor, int]:
        """The launch, its table of taps, and the number of programs."""
        s, batch, tiling = self.settings, self.means[0], _FORWARD[self._windows(self.paired)]
        (across, tiles), parts, _, constants, table = self._tiles(tiling, self.paired)
        programs = self._programs(tiling.programs, batch * tiles, parts)
        arguments = (batch, *self.means[3:], *s.size, across, tiles, *constants)
        launch = Launch(squares_kernel, self.device, (programs, parts, 1), arguments, num_stages=1, **tiling.options)
        return launch, table, programs

    @cached_property
    def window_moments(self) -> WindowWork | None:
        """How the second moments of windows are computed; None where that is not the best way."""
        s, block = self.settings, BLOCK_T.value
        (batch, components, channels, *image), kernel = self.means, self.kernel(self.paired)
        taps = channels * kernel[0] * kernel[1]
        tile = tile_shape(_WINDOWS.pixels, kernel, s)
        box = box_size(tile, kernel, s)
        if s.groups > 1 or taps > 3 * block or s.precision not in ("tf32", "bf16"):
            return None
        if taps > block:
            return self._correlations()
        if channels * box[0] * box[1] > LARGEST_BOX:
            return None
        across, down = -(-s.size[1] // tile[1]), -(-s.size[0] // tile[0])
        programs = self._programs(_WINDOWS.programs, batch * across * down, 1)
        numbers = (batch, *image, *s.size, across, across * down)
        constants = (
            components, self.rank, channels, self.weight[2] * self.weight[3], *s.stride, *s.corner,
            self.planes is not None, self.planes is not None and self.planes > 1,
            "bf16x2" if self.paired else s.precision, s.size[0] % tile[0] == 0 and s.size[1] % tile[1] == 0, *tile,
            *box, power(channels * box[0] * box[1]), power(components),
        )  # fmt: skip
        table = tap_table(channels, kernel, s.dilation, box, block, self.paired, self.device)
        return WindowWork(numbers, constants, table, programs, _WINDOWS.options)

    def _correlations(self) -> WindowWork | None:
        """The second moments of large windows; None where they do not lie beside each other, or are too few."""
        s, (batch, components, channels, *_), kernel = self.settings, self.means, self.weight[2:]
        found = Correlations.of(channels, (kernel[0], kernel[1]), s.stride)
        if found is None or s.dilation != (1, 1) or s.size[0] < found.down or s.size[1] < found.across:
            return None
        rows, columns = found.size(s.size)
        parts = 1 if s.precision == "bf16" else 2
        numbers = parts * components * (1 + self.rank) * rows * columns * found.spot
        images = max(1, min(batch, _MOST_SPOTS // numbers))
        images = -(-batch // -(-batch // images))  # as many at a time every time
        jobs = cut_jobs(found, images, s.size, self._programs(_CORRELATIONS.programs, images * rows * columns, 1))
        table = torch.tensor(jobs, dtype=torch.int32, device=self.device)
        return WindowWork((images, rows, columns), (), table, len(jobs), _CORRELATIONS.options, found)

    def _programs(self, number: int, tiles: int, parts: int) -> int:
        """That number on each multiprocessor, as far as there is work for them."""
        cuda = self.device.type == "cuda"
        cores = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 2
        return max(1, min(tiles, number * cores // parts))

    def backward(self, strides: _Shape, response: _Shape | None, needed: tuple[bool, ...]) -> BackwardWork:
        """How the gradients that are needed are computed.

        Args:
            strides: of the gradient. response: strides of the response, if it is known.
        """
        key = (strides, response, needed)
        if key in self._backward:
            return self._backward[key]
        s, (batch, components, *_), of_pixels = self.settings, self.means, any(needed[2:])
        paired = self.paired and not of_pixels
        tiling = _BACKWARD[self._windows(paired), of_pixels]
        (across, tiles), parts, layout, constants, table = self._tiles(tiling, paired)
        programs = self._programs(tiling.programs, batch * tiles, parts)
        numbers = (batch, *self.means[3:], *s.size, across, tiles, *strides, *(response or strides), s.low, s.high)
        order, complete, rows = None, None, programs * components
        if self.planes is not None and batch * tiles >= _MANY_TILES:
            tile = tile_shape(tiling.pixels, self.kernel(paired), s)
            order = self._order(tile, paired)
            if needed[0] and response is not None:
                complete = self._complete(tile, paired, layout, (*strides, *response))
                rows += 0 if complete is None else complete.programs
        flags = (response is not None, order is not None, complete is not None)
        grid, arguments = (programs, parts, components), (*numbers, *constants, *needed, *flags)
        launch = Launch(backward_kernel, self.device, grid, arguments, num_stages=1, **tiling.options)
        self._backward[key] = BackwardWork(launch, table, rows, layout, order, complete)
        return self._backward[key]

    def _order(self, tile: tuple[int, int], paired: bool) -> TileOrder:
        """Launches that order tiles of this size; windows may be a column wider if pixels come in pairs."""
        s, (batch, _, channels, *image) = self.settings, self.means
        box = box_size(tile, self.kernel(paired), s)
        across, down = -(-s.size[1] // tile[1]), -(-s.size[0] // tile[0])
        number = batch * across * down
        each = self.planes is not None and self.planes > 1
        chunk = min(channels, max(1, LARGEST_BOX // (box[0] * box[1]))) if each else 1
        block = power(chunk * box[0] * box[1])
        arguments = (
            *image, across, across * down, channels, *s.stride, *s.corner, each, *tile, *box, chunk, block,
        )  # fmt: skip
        find = Launch(find_touched_kernel, self.device, (number, 1, 1), arguments)
        sort = Launch(order_kernel, self.device, (-(-number // _ORDERED), 1, 1), (number, _ORDERED))
        return TileOrder(find, sort, number)

    def _complete(self, tile: tuple[int, int], paired: bool, layout: Layout, strides: _Shape) -> CompleteTiles | None:
        """Launches for the parameters' gradients by complete tiles; None where they would not pay."""
        s, (batch, components, channels, *image), (out, _, *kernel) = self.settings, self.means, self.weight
        spots = Spots.of(channels, (kernel[0], kernel[1]), s.stride)
        # Spots lie beside each other, which those of a dilated window do not.
        if not layout.turned or s.groups > 1 or s.dilation != (1, 1) or s.precision not in ("tf32", "bf16"):
            return None
        if spots is None:
            return None
        rows, columns = spots.size(s.size)
        if rows * columns * spots.spot >= 2**31:
            return None
        blocks, size = -(-rows * columns // _ARRANGED), channels * image[0] * image[1]
        constants = (components, channels, *s.stride, *s.corner, spots.spot, PARTS, power(spots.spot), _ARRANGED)
        arguments: tuple[Any, ...] = (*image, rows, columns, blocks, *constants)
        arrange = Launch(arrange_kernel, self.device, (batch * blocks, 1, 1), arguments)
        largest = None
        if s.precision == "tf32":
            arguments = (size, -(-size // PARTS), components, PARTS, _LOOKED_AT)
            largest = Launch(largest_kernel, self.device, (batch * PARTS, 1, 1), arguments)
        # Full blocks of channels, for the reason that `_tiles` gives.
        across, down, parts = -(-s.size[1] // tile[1]), -(-s.size[0] // tile[0]), -(-out // _MOST_CHANNELS)
        options, number = _COMPLETE
        programs = self._programs(number, batch * across * down, parts)
        arguments = (
            batch, *s.size, across, across * down, *strides, channels, *self.kernel(False), self.kernel(paired)[1], out,
            *s.stride, *spots, layout.chunks, layout.chunk_taps, layout.places, *tile, _MOST_CHANNELS,
        )  # fmt: skip
        multiply = Launch(complete_kernel, self.device, (programs, parts, 1), arguments, num_stages=1, **options)
        return CompleteTiles(largest, arrange, multiply, (batch, rows, columns, spots.spot), programs)

    def _tiles(self, tiling: Tiling, paired: bool) -> tuple[tuple[int, int], int, Layout, Any, Tensor]:
        """Tiles across and in all; parts of the channels; the layout of gradients; constants of a kernel; its table."""
        s, kernel, channels = self.settings, self.kernel(paired), self.weight[1]
        out = self.weight[0] // s.groups
        tile = tile_shape(tiling.pixels, kernel, s)
        box = box_size(tile, kernel, s)
        chunk = min(channels, max(1, LARGEST_BOX // (box[0] * box[1])))
        taps = chunk * kernel[0] * kernel[1]
        block_t = min(max(power(taps), 16), tiling.taps)
        turned = channels > chunk or taps > block_t
        # Where bfloat16 windows come in several blocks and channels are few, Triton 3.6 multiplies what lies beyond its
        # shared memory (16 channels, seen by compute-sanitizer).
        wide = (s.precision == "bf16" or paired) and turned
        block_o = _MOST_CHANNELS if wide else min(max(power(out), 16), _MOST_CHANNELS)
        constants = (
            self.means[1],
            self.rank,
            channels,
            s.groups,
            out,
            kernel[0] * kernel[1],
            *s.stride,
            *s.corner,
            self.planes is not None,
            self.planes is not None and self.planes > 1,
            self.has_bias,
            s.activation,
            {"bf16": "bf16x2", "tf32": "f16x2"}[s.precision] if paired else s.precision,
            *tile,
            *box,
            chunk,
            min(power(self.rank), tiling.stack),
            block_o,
            block_t,
            power(chunk * box[0] * box[1]),
            power(self.means[1]),
        )
        places = -(-taps // block_t) * block_t
        table = tap_table(chunk, kernel, s.dilation, box, places, paired, self.device)
        layout = Layout(self.weight[0], -(-channels // chunk), taps, places if turned else taps, turned)
        across, down = -(-s.size[1] // tile[1]), -(-s.size[0] // tile[0])
        return (across, across * down), s.groups * -(-out // block_o), layout, constants, table
