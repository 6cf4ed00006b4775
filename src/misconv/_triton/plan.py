"""The work of the fused convolution, cut up; `convolve` has it done.

Small layers are bound by what the host does before a launch, so everything that follows from shapes and types is worked
out once and kept.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from misconv._triton.backward import backward_kernel
from misconv._triton.complete import Spots, arrange_kernel, complete_kernel
from misconv._triton.correlations import ROWS, Correlations, cut_jobs
from misconv._triton.forward import forward_kernel
from misconv._triton.launch import Launch, power
from misconv._triton.order import find_touched_kernel, order_kernel
from misconv._triton.squares import squares_kernel
from misconv._triton.windows import BLOCK_T

__all__ = ["Layout", "Plan", "Settings", "box_is_small"]

_Shape = tuple[int, ...]


class Settings(NamedTuple):
    """What a fused convolution is, besides its tensors; hashable."""

    stride: tuple[int, int]
    corner: tuple[int, int]  # rows above and columns left of the image
    dilation: tuple[int, int]
    size: tuple[int, int]  # of the output
    groups: int
    activation: str
    low: float
    high: float
    precision: str  # of what products take, as `rounded` names it
    dtype: torch.dtype  # of the output


class _Tiling(NamedTuple):
    """How the work is cut into tiles: the best of a few that were timed on an H200."""

    pixels: int  # of a tile of the output
    taps: int  # of a window at a time
    stack: int  # factors at a time
    options: dict[str, int]  # of the compiler
    programs: int = 0  # on each multiprocessor, where a program has many tiles


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


class CompleteTiles(NamedTuple):
    """How gradients by complete tiles are computed by themselves."""

    arrange: Launch
    multiply: Launch
    spots: _Shape  # of pixels that are arranged
    programs: int  # that write a row each


class TileOrder(NamedTuple):
    """How tiles are ordered by what they cost."""

    find: Launch
    sort: Launch
    tiles: int  # of all images


class BackwardWork(NamedTuple):
    """How gradients are computed."""

    launch: Launch
    table: Tensor  # of taps
    programs: int  # that write a row each
    layout: Layout
    order: TileOrder | None  # if tiles do not come as they lie
    complete: CompleteTiles | None  # if the launch leaves them out; their rows come last


# By windows: small ones, larger ones, and such as are spread in pairs of pixels; backward also by whether gradients of
# pixels are asked for.
_SMALL = 32  # taps
_FORWARD = {
    "small": _Tiling(64, 32, 1, {"num_warps": 4, "maxnreg": 128}, 4),
    "large": _Tiling(64, 32, 1, {"num_warps": 4}, 4),
    "paired": _Tiling(64, 64, 1, {"num_warps": 4, "maxnreg": 168}, 3),
}
_BACKWARD = {
    ("small", False): _Tiling(64, 32, 1, {"num_warps": 4}, 2),
    ("small", True): _Tiling(64, 32, 1, {"num_warps": 4}, 2),
    ("large", False): _Tiling(32, 64, 4, {"num_warps": 4}, 2),
    ("large", True): _Tiling(32, 64, 4, {"num_warps": 4}, 2),
    ("paired", False): _Tiling(64, 64, 4, {"num_warps": 4}, 2),
}
_COMPLETE = {"num_warps": 4}, 2  # options and programs: its tiles are those of "paired"
_WINDOWS = _Tiling(64, 64, 1, {"num_warps": 4}, 2)
_CORRELATIONS = _Tiling(ROWS, 64, 1, {"num_warps": 4, "num_stages": 3}, 6)
_MOST_CHANNELS = 64  # of the output, likewise
_LARGEST_BOX = 2048  # pixels that are read at a time, in as many channels as fit
_LARGEST_PLANE = 8192  # … but at least in one
_MOST_SPOTS = 160_000_000  # numbers that are arranged at a time
_ARRANGED = 64  # spots that a program arranges
_ORDERED = 1024  # tiles that a program orders
_MANY_TILES = 8192  # from which on it pays to order them


# Shapes of work --------------------------------------------------------------------------------------------------


def _box(tile: tuple[int, int], kernel: _Shape, s: Settings) -> tuple[int, int]:
    """Rows and columns of the image under the windows of a tile."""
    rows, columns = (
        (t - 1) * step + (k - 1) * d + 1 for t, step, k, d in zip(tile, s.stride, kernel, s.dilation, strict=True)
    )
    return rows, columns


def _tile(pixels: int, kernel: _Shape, s: Settings) -> tuple[int, int]:
    """Rows and columns of a tile: as few tiles as possible, then the smallest box; fewer pixels if it is too large."""
    shapes = [(pixels // columns, columns) for columns in (16, 32, 8, 64, 4) if columns <= pixels]
    sizes = {shape: _box(shape, kernel, s) for shape in shapes}
    small = [shape for shape in shapes if sizes[shape][0] * sizes[shape][1] <= _LARGEST_BOX]
    if not small and pixels > 16:
        return _tile(pixels // 2, kernel, s)
    return min(
        small or shapes,
        key=lambda shape: (
            -(-s.size[0] // shape[0]) * -(-s.size[1] // shape[1]),
            power(sizes[shape][0] * sizes[shape][1]),
        ),
    )


def box_is_small(kernel: _Shape, s: Settings) -> bool:
    """Whether the windows of even the smallest tile fit into a box."""
    rows, columns = _box(_tile(16, kernel, s), kernel, s)
    return rows * columns <= _LARGEST_PLANE


@lru_cache(256)
def _table(
    channels: int, kernel: _Shape, dilation: _Shape, box: _Shape, length: int, paired: bool, device: torch.device
) -> Tensor:
    """Where the taps of a window lie in a box, counted from the begin of the window; pairs of them in words."""
    places = [
        (channel * box[0] + y * dilation[0]) * box[1] + x * dilation[1]
        for channel in range(channels)
        for y in range(kernel[0])
        for x in range(kernel[1])
    ]
    places += [0] * (length - len(places))
    return torch.tensor([place // 2 for place in places[::2]] if paired else places, dtype=torch.int32, device=device)


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

    def _windows(self, paired: bool) -> str:
        """What kind of windows they are, for the choice of a tiling."""
        if paired:
            return "paired"
        return "small" if self.weight[1] * self.weight[2] * self.weight[3] <= _SMALL else "large"

    def _forward(self, strides: _Shape) -> tuple[Launch, Tensor, _Shape]:
        """The launch, its table of taps, and the strides of the output."""
        s, batch, tiling = self.settings, self.means[0], _FORWARD[self._windows(self.paired)]
        (across, tiles), parts, _, constants, table = self._tiles(tiling, self.paired)
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
        tile = _tile(_WINDOWS.pixels, kernel, s)
        box = _box(tile, kernel, s)
        if s.groups > 1 or taps > 3 * block or s.precision not in ("tf32", "bf16"):
            return None
        if taps > block:
            return self._correlations()
        if channels * box[0] * box[1] > _LARGEST_BOX:
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
        table = _table(channels, kernel, s.dilation, box, block, self.paired, self.device)
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
            tile = _tile(tiling.pixels, self.kernel(paired), s)
            order = self._order(tile, paired)
            if paired and response is not None:
                complete = self._complete(tile, layout, (*strides, *response))
                rows += 0 if complete is None else complete.programs
        flags = (response is not None, order is not None, complete is not None)
        grid, arguments = (programs, parts, components), (*numbers, *constants, *needed, *flags)
        launch = Launch(backward_kernel, self.device, grid, arguments, num_stages=1, **tiling.options)
        self._backward[key] = BackwardWork(launch, table, rows, layout, order, complete)
        return self._backward[key]

    def _order(self, tile: tuple[int, int], paired: bool) -> TileOrder:
        """Launches that order tiles of this size; windows may be a column wider if pixels come in pairs."""
        s, (batch, _, channels, *image) = self.settings, self.means
        box = _box(tile, self.kernel(paired), s)
        across, down = -(-s.size[1] // tile[1]), -(-s.size[0] // tile[0])
        number = batch * across * down
        each = self.planes is not None and self.planes > 1
        chunk = min(channels, max(1, _LARGEST_BOX // (box[0] * box[1]))) if each else 1
        block = power(chunk * box[0] * box[1])
        arguments = (
            *image, across, across * down, channels, *s.stride, *s.corner, each, *tile, *box, chunk, block,
        )  # fmt: skip
        find = Launch(find_touched_kernel, self.device, (number, 1, 1), arguments)
        sort = Launch(order_kernel, self.device, (-(-number // _ORDERED), 1, 1), (number, _ORDERED))
        return TileOrder(find, sort, number)

    def _complete(self, tile: tuple[int, int], layout: Layout, strides: _Shape) -> CompleteTiles | None:
        """Launches for complete tiles; None where they would not pay."""
        s, (batch, components, channels, *image), (out, _, *kernel) = self.settings, self.means, self.weight
        spots = Spots.of(channels, (kernel[0], kernel[1]), s.stride)
        if not layout.turned or s.groups > 1 or spots is None:
            return None
        rows, columns = spots.size(s.size)
        if rows * columns * spots.spot >= 2**31:
            return None
        blocks = -(-rows * columns // _ARRANGED)
        constants = (components, channels, *s.stride, *s.corner, spots.spot, power(spots.spot), _ARRANGED)
        arguments: tuple[Any, ...] = (*image, rows, columns, blocks, *constants)
        arrange = Launch(arrange_kernel, self.device, (batch * blocks, 1, 1), arguments)
        # Full blocks of channels, for the reason that `_tiles` gives.
        across, down, parts = -(-s.size[1] // tile[1]), -(-s.size[0] // tile[0]), -(-out // _MOST_CHANNELS)
        options, number = _COMPLETE
        programs = self._programs(number, batch * across * down, parts)
        arguments = (
            batch, *s.size, across, across * down, *strides, channels, *self.kernel(False), self.kernel(True)[1], out,
            *s.stride, *spots, layout.chunks, layout.chunk_taps, layout.places, *tile, _MOST_CHANNELS,
        )  # fmt: skip
        multiply = Launch(complete_kernel, self.device, (programs, parts, 1), arguments, num_stages=1, **options)
        shape = (batch, rows, columns, spots.spot)
        return CompleteTiles(arrange, multiply, shape, programs)

    def _tiles(self, tiling: _Tiling, paired: bool) -> tuple[tuple[int, int], int, Layout, Any, Tensor]:
        """Tiles across and in all; parts of the channels; the layout of gradients; constants of a kernel; its table."""
        s, kernel, channels = self.settings, self.kernel(paired), self.weight[1]
        out = self.weight[0] // s.groups
        tile = _tile(tiling.pixels, kernel, s)
        box = _box(tile, kernel, s)
        chunk = min(channels, max(1, _LARGEST_BOX // (box[0] * box[1])))
        taps = chunk * kernel[0] * kernel[1]
        block_t = min(max(power(taps), 16), tiling.taps)
        turned = channels > chunk or taps > block_t
        # Where bfloat16 windows come in several blocks and channels are few, Triton 3.6 multiplies what lies beyond its
        # shared memory (16 channels, seen by compute-sanitizer).
        wide = s.precision == "bf16" and turned
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
            "bf16x2" if paired else s.precision,
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
        table = _table(chunk, kernel, s.dilation, box, places, paired, self.device)
        layout = Layout(self.weight[0], -(-channels // chunk), taps, places if turned else taps, turned)
        across, down = -(-s.size[1] // tile[1]), -(-s.size[0] // tile[0])
        return (across, across * down), s.groups * -(-out // block_o), layout, constants, table
