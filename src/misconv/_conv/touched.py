"""The CPU's path: expectations only in windows that touch a missing pixel, plain numbers everywhere else.

Of a ReLU they are computed by compiled kernels, where `compiled` has them. Else the response is cut into tiles that fit
the touched windows of each image. The pixels under the tiles are laid side by side, factors, noise and the differences
between components as channels, and go through one grouped convolution; its rows at the touched windows become
expectations and take their places among the plain activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._conv import compiled
from misconv._conv.border import Border, border_noise
from misconv._conv.convolution import Convolution
from misconv._math import (
    Activation,
    ExpectedReLU,
    activation_module,
    apply_activation,
    expectation,
    weighted_mean,
)
from misconv.mfa import MFA

if TYPE_CHECKING:
    from misconv._conv.batch_norm import Affine

__all__ = ["respond"]

_FULL = 0.7  # of the windows in large tiles around all touched ones are touched: then tiles are large, else small
_LARGE, _SMALL = (16, 64), (4, 4)  # windows of a tile: large ones see more that is not touched, small ones overlap more
_CHUNK = 6 * 2**20  # bytes of responses computed at a time: they stay in a cache, and their memory is used again
_MORE = 4  # times as many where gradients keep everything anyway, and every chunk adds up a table
# Of all windows, without gradients and with them; beyond, the plain path is as fast.
_MOST = {False: 0.95, True: 0.8}


def respond(p: MFA, conv: Convolution, norm: Affine | None, activation: Activation) -> Tensor | None:
    """The expected activation (B, O, H', W') of `dispatch.respond`, or None where this path does not serve.

    ``f(norm(M μ_0 + b))`` in windows that miss nothing, bit for bit what a network computes for complete images, and
    ``Σ_k π_k E[f(N(m_k, σ_k²))]`` in the others.
    """
    if p.observed is None:
        return None
    missing = ~(p.observed.all(1) if p.observed.shape[1] > 1 else p.observed.squeeze(1))  # (B, H, W)
    parts = (p.logits, p.means, p.factors, p.noise, conv.weight, conv.bias)
    learning = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts)
    # Components share their observed pixels, and a gradient in these is split among them: then all are listed.
    split = learning and p.means.requires_grad and p.means.shape[1] > 1
    listed = torch.ones_like(missing) if split else missing
    function = activation_module(activation)
    tiles: _Tiles | None = None
    if missing.count_nonzero():  # several times as fast as any
        if not _is_single_or_double(p):
            return None
        if type(function) is nn.ReLU and conv.padding_mode == "zeros" and compiled.why_not() is None:
            return _by_kernels(p, conv, norm, missing)
        tiles = _cut_tiles(missing, listed, conv)
        if tiles.share > _MOST[learning]:
            return None

    response = _first_response(p, conv, norm)
    if tiles is None or len(tiles.number) == 0:
        return apply_activation(function, response)

    border: Border | None = None
    if conv.padding_mode != "zeros":
        border = border_noise(p.pinned()[2], conv)
    slope = None if norm is None else norm.coefficients()[0].to(response.dtype)
    table, bank = _table(p, listed), _bank(p, conv.weight)
    if not _in_range(p, table) or not _filters_in_range(conv.weight, slope):
        return None  # squares might leave the range of float32

    def moved(chunk: _Tiles) -> Tensor:
        return _convolved(table, chunk.number, bank, conv)

    at_once = _CHUNK // (math.prod(tiles.size) * bank.shape[0] * bank.element_size())
    if type(function) is nn.ReLU and tiles.inside and border is None and not (learning or response.requires_grad):
        # In place where nobody else can hold it: fresh memory costs more than the numbers in it.
        plain = response if norm is None else response.relu()
        _fill_tiles(p, tiles, moved, response, plain, slope, at_once)
        return plain.relu_() if norm is None else plain  # what came from tiles is not negative

    plain = apply_activation(function, response).permute(0, 2, 3, 1)  # (B, H', W', O)
    rows: list[Tensor] = []
    places: list[tuple[Tensor, ...]] = []
    for chunk in tiles.split((_MORE if learning else 1) * at_once):
        which, place = chunk.windows()
        mean = response.permute(0, 2, 3, 1)[place].unsqueeze(1)  # (N, 1, O), the mean of the first component
        repeated = None if border is None else _repeated(border, which, place, response.shape[2:])
        mean, variance = _moments(p, mean, moved(chunk), which, slope, repeated)
        expected, differ = _expected(p, function, mean, variance, place[0])
        # Other groups may miss nothing of a window: their bits are those of a plain activation, in its own place.
        agreed = plain[place]
        if learning and mean.shape[1] > 1:
            # Where weights are zero components agree by chance; the gradients are still those of all of them.
            gradient = torch.where(expected.isfinite(), expected, 0)
            agreed = agreed.detach() + (gradient - gradient.detach())
        rows.append(torch.where(differ, expected, agreed))
        places.append(place)
    windows = tuple(torch.cat(t) for t in zip(*places, strict=True))
    return plain.index_put(windows, torch.cat(rows)).permute(0, 3, 1, 2)


def _first_response(p: MFA, conv: Convolution, norm: Affine | None) -> Tensor:
    """``norm(M μ_0 + b)`` (B, O, H', W'), as a network computes it."""
    response = conv(p.means.narrow(1, 0, 1).reshape(-1, *p.shape[1:]))  # of (B, C, H, W)
    return response if norm is None else norm.apply(response)


def _by_kernels(p: MFA, conv: Convolution, norm: Affine | None, missing: Tensor) -> Tensor | None:
    """The response by compiled kernels; None where squares might leave the range of float32."""
    slope = None if norm is None else norm.coefficients()[0].to(p.dtype)
    if not _filters_in_range(conv.weight, slope):
        return None
    weight = conv.weight if slope is None else conv.weight * slope.view(-1, 1, 1, 1)
    folded = conv.replace(weight, None)
    return compiled.expected_relu(p, folded, missing, lambda: _first_response(p, conv, norm), in_place=norm is None)


def _is_single_or_double(p: MFA) -> bool:
    """Half precision has its own rounding, which is that of the plain path."""
    return p.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def _repeated(border: Border, which: Tensor, place: tuple[Tensor, ...], size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Those of some windows in which padding repeats a pixel, (M,), and the variance of their noise, (M, K, O)."""
    image, row, column = place
    number = torch.full((size[0] * size[1],), -1, dtype=torch.long, device=which.device)
    number[border.windows] = torch.arange(len(border.windows), device=which.device)
    number = number[row * size[1] + column]
    chosen = (number >= 0).nonzero().squeeze(1)
    return which[chosen], border.variance[image[chosen], :, :, number[chosen]]


def _fill_tiles(
    p: MFA,
    tiles: _Tiles,
    moved: Callable[[_Tiles], Tensor],
    response: Tensor,
    target: Tensor,
    slope: Tensor | None,
    at_once: int,
) -> None:
    """Write E[ReLU] of whole tiles of the mean response (B, O, H', W') into a target laid out alike; no gradients.

    Windows in them that miss nothing have no variance, and get the bits of a plain ReLU.
    """
    slope = None if slope is None else slope.unsqueeze(1)
    batch, _, row, column = response.stride()
    source, target = (_blocks_from(t, tiles.size) for t in (response, target))  # (places, O, th, tw)
    for chunk in tiles.split(at_once):
        place = chunk.corner[0] * batch + chunk.corner[1] * row + chunk.corner[2] * column  # (tiles,)
        first = source.index_select(0, place).flatten(2).unsqueeze(1)  # (tiles, 1, O, th·tw)
        sources = torch.unflatten(moved(chunk), 0, (len(place), -1)).permute(0, 2, 3, 1)  # (tiles, S, O, th·tw)
        mean, variance = _moments(p, first, sources, None, slope, None)
        # Laid out as the mean is: passes over two layouts at once are slow.
        variance = torch.empty_like(mean, memory_format=torch.contiguous_format).copy_(variance)
        expected, differ = _expected(p, nn.ReLU(), mean, variance.clamp_min_(0), chunk.corner[0])
        if mean.shape[1] > 1:
            expected = torch.where(differ, expected, mean.select(1, 0).relu())
        target.index_copy_(0, place, torch.unflatten(expected, 2, tiles.size))


def _blocks_from(response: Tensor, size: tuple[int, int]) -> Tensor:
    """The blocks of th×tw windows that begin at each place in the memory of (B, O, H', W'): (places, O, th, tw)."""
    batch, channel, row, column = response.stride()
    count, _, height, width = response.shape
    places = (count - 1) * batch + (height - size[0]) * row + (width - size[1]) * column + 1
    return response.as_strided((places, response.shape[1], *size), (1, channel, row, column))


# Which windows ---------------------------------------------------------------------------------------------------


class _Tiles(NamedTuple):
    """The tiles of the response that hold a touched window; each has th×tw windows, over h×w pixels."""

    number: Tensor  # (tiles, h, w), the number of the pixel in the table; 0 where it is known or outside
    touched: Tensor  # (tiles, th·tw), bool
    corner: tuple[Tensor, Tensor, Tensor]  # the image, row and column of the first window of each tile, (tiles,)
    size: tuple[int, int]  # th, tw
    inside: bool  # whether no tile hangs over the edge of the response
    share: float  # of all windows, touched

    def split(self, count: int) -> Iterator[_Tiles]:
        """So many tiles at a time, at most, and about the same number each time."""
        count = -(-len(self.number) // -(-len(self.number) // max(count, 1)))
        parts = (t.split(count) for t in (self.number, self.touched, *self.corner))
        for number, touched, *corner in zip(*parts, strict=True):
            yield self._replace(number=number, touched=touched, corner=tuple(corner))

    def windows(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The N touched windows: which of all they are, (N,), and the image, row and column of each."""
        index = self.touched.flatten().nonzero().squeeze(1)
        tile, within = index // self.touched.shape[1], index % self.touched.shape[1]
        image, row, column = (t.index_select(0, tile) for t in self.corner)
        return index, (image, row + within // self.size[1], column + within % self.size[1])


def _cut_tiles(missing: Tensor, listed: Tensor, conv: Convolution) -> _Tiles:
    """The touched tiles of the response to images whose pixels (B, H, W) are partly missing, with the listed ones.

    The tiles of an image begin where its touched windows do, and are as large as these allow.
    """
    kernel, stride, dilation, around, mode = conv.kernel, conv.strides, conv.dilations, conv.margins, conv.padding_mode
    size = conv.size(missing.shape[1:])
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]  # pixels under a window
    number = listed.flatten().cumsum(0, dtype=torch.int32).view(listed.shape).mul_(listed)  # (B, H, W), from 1
    seen = [(n - 1) * s + r for n, s, r in zip(size, stride, reach, strict=True)]  # pixels under all windows
    number = _padded(number, around, mode, seen)
    incomplete = number > 0 if listed is missing else _padded(missing.int(), around, mode, seen) > 0
    for axis in (0, 1):
        step, span = stride[axis], dilation[axis]
        shifted = [incomplete.narrow(1 + axis, k * span, (size[axis] - 1) * step + 1) for k in range(kernel[axis])]
        shifted = [t[:, ::step] if axis == 0 else t[:, :, ::step] for t in shifted]
        incomplete = shifted[0]
        for t in shifted[1:]:
            incomplete = incomplete | t  # (B, H', W') in the end
    incomplete = incomplete.contiguous()
    total = int(incomplete.count_nonzero())
    rows, columns = (incomplete.view(torch.uint8).amax(axis) for axis in (2, 1))  # (B, H'), (B, W')
    starts = [t.argmax(1) for t in (rows, columns)]
    spans = [t.shape[1] - t.flip(1).argmax(1) - start for t, start in zip((rows, columns), starts, strict=True)]
    spans = [span * rows.amax(1) for span in spans]  # (B,), the sides of the box around all touched windows
    longest = [max(int(span.max()), 1) for span in spans]
    tile = [-(-n // -(-n // most)) for n, most in zip(longest, _LARGE, strict=True)]
    held = [(span + t - 1) // t * t for span, t in zip(spans, tile, strict=True)]
    if total < _FULL * int((held[0] * held[1]).sum()):
        tile = list(_SMALL)
    counts = [-(-n // t) for n, t in zip(longest, tile, strict=True)]
    whole = [max(n, c * t) for n, c, t in zip(size, counts, tile, strict=True)]  # windows that tiles may hold
    inside = whole == list(size)
    if not inside:
        incomplete = F.pad(incomplete, (0, whole[1] - size[1], 0, whole[0] - size[0]))
        number = F.pad(number, (0, (whole[1] - size[1]) * stride[1], 0, (whole[0] - size[0]) * stride[0]))
    first = [  # (B, tiles of an image along this axis)
        start.clamp_max(n - c * t).unsqueeze(1) + torch.arange(c, device=number.device) * t
        for start, n, c, t in zip(starts, whole, counts, tile, strict=True)
    ]
    image = torch.arange(len(missing), device=number.device).view(-1, 1, 1).expand(-1, *counts).flatten()
    row, column = (t.expand(-1, *counts).flatten() for t in (first[0].unsqueeze(2), first[1].unsqueeze(1)))
    touched = _blocks(incomplete, image, row, column, tile).flatten(1)  # (tiles, th·tw)
    chosen = touched.any(1)
    if not chosen.all():
        touched, image, row, column = (t[chosen] for t in (touched, image, row, column))
    under = [(t - 1) * s + r for t, s, r in zip(tile, stride, reach, strict=True)]
    number = _blocks(number, image, row * stride[0], column * stride[1], under)
    share = total / (len(missing) * size[0] * size[1])
    return _Tiles(number, touched, (image, row, column), (tile[0], tile[1]), inside, share)


def _blocks(planes: Tensor, image: Tensor, row: Tensor, column: Tensor, size: list[int]) -> Tensor:
    """Blocks (N, h, w) of planes (B, H, W), from their first rows and columns (N,)."""
    planes = planes.contiguous()
    height, width = planes.shape[1:]
    down, across = (torch.arange(n, device=planes.device) for n in size)
    within = (down * width).unsqueeze(1) + across  # (h, w)
    index = ((image * height + row) * width + column).view(-1, 1, 1) + within
    return planes.flatten().index_select(0, index.flatten()).view(index.shape)


def _padded(pixels: Tensor, around: tuple[int, int, int, int], mode: str, seen: list[int]) -> Tensor:
    """Whole numbers (B, H, W) as the convolution sees them, cut to what its windows see."""
    if mode != "zeros":
        pixels = F.pad(pixels.double().unsqueeze(1), around, mode).squeeze(1).int()
        around = (0, 0, 0, 0)
    left, _, top, _ = around
    return F.pad(pixels, (left, seen[1] - pixels.shape[2] - left, top, seen[0] - pixels.shape[1] - top))


# What they hold --------------------------------------------------------------------------------------------------


def _table(p: MFA, listed: Tensor) -> Tensor:
    """The parameters of all listed pixels, (1 + pixels, S·C), the first row zeros for what is known.

    The S sources are the factors (K·L), the noise (K) and the differences of means from the first component (K - 1).
    """
    image, row, column = F.pad(listed.nonzero().t(), (1, 0))  # (1 + pixels,) each; any pixel stands in for the first
    parts = [p.factors[image, :, :, :, row, column].flatten(1, 2), p.noise[image, :, :, row, column]]
    assert p.observed is not None
    if p.observed.shape[1] > 1 or p.means.shape[1] > 1:
        known = p.observed[image, :, row, column].unsqueeze(1)  # (1 + pixels, 1, 1 or C)
        parts = [part.masked_fill(known, 0) for part in parts]  # (1 + pixels, K·L or K, C)
    if p.means.shape[1] > 1:
        means = p.means[image, :, :, row, column]  # (1 + pixels, K, C)
        parts.append(means[:, 1:] - means[:, :1])
    table = torch.cat(parts, 1).flatten(1)
    table[0] = 0
    return table


def _in_range(p: MFA, table: Tensor) -> bool:
    """Whether all squares of deviations of pixels stay in the range of float32."""
    if table.dtype != torch.float32:
        return True
    components, rank = p.factors.shape[1:3]
    values = table.detach().view(len(table), -1, p.shape[1])  # (1 + pixels, S, C)
    size = values[:, components * rank :][:, :components].amax(1).sqrt()
    if rank > 0:
        size = torch.maximum(size, values[:, : components * rank].abs().amax(1))
    return _zero_or_between(size, -45, 30)


def _filters_in_range(weight: Tensor, slope: Tensor | None) -> bool:
    """The same of weights and of the normalization."""
    if weight.dtype != torch.float32:
        return True
    if slope is not None and not _zero_or_between(slope.detach().abs(), -20, 20):
        return False
    return _zero_or_between(weight.detach().abs().amax((1, 2, 3)), -15, 15)


def _zero_or_between(values: Tensor, low: int, high: int) -> bool:
    return bool(((values == 0) | ((values >= 2.0**low) & (values <= 2.0**high))).all())


def _bank(p: MFA, weight: Tensor) -> Tensor:
    """The filters (S·O, C/groups, kh, kw) of the channels of the table: squared for the noise."""
    components, rank = p.factors.shape[1:3]
    as_it_is, squared = (w.unsqueeze(0) for w in (weight, weight.square()))
    bank = [as_it_is.expand(components * rank, -1, -1, -1, -1), squared.expand(components, -1, -1, -1, -1)]
    bank.append(as_it_is.expand(components - 1, -1, -1, -1, -1))
    return torch.cat(bank).flatten(0, 1).contiguous(memory_format=torch.channels_last)


def _convolved(table: Tensor, number: Tensor, bank: Tensor, conv: Convolution) -> Tensor:
    """The responses of all windows of some tiles in all sources of the table, (tiles·t·t, S, O)."""
    pixels = table.index_select(0, number.flatten()).view(*number.shape, -1)  # (tiles, h, w, S·C)
    out = conv.weight.shape[0]
    sources = bank.shape[0] // out
    response = F.conv2d(pixels.permute(0, 3, 1, 2), bank, None, conv.stride, 0, conv.dilation, sources * conv.groups)
    return response.permute(0, 2, 3, 1).reshape(-1, sources, out)


def _moments(
    p: MFA,
    first: Tensor,
    moved: Tensor,
    which: Tensor | None,
    slope: Tensor | None,
    repeated: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Mean and variance (N, K, O, …) in N windows or tiles, behind the normalization.

    Args:
        first: (N, 1, O, …), the mean of the first component.
        moved: (windows or tiles, S, O, …), what came out of the sources.
        which: (N,), which of these count; None for all.
        slope: of the normalization, to be broadcast against (O, …).
        repeated: windows (M,) in which padding repeats pixels, and the variance (M, K, O) of their noise.
    """
    components, rank = p.factors.shape[1:3]
    factors, variance, apart = moved.split([components * rank, components, components - 1], 1)
    if repeated is not None:
        variance = variance.index_copy(0, *repeated)
    if rank > 0:
        factors = torch.unflatten(factors, 1, (components, rank))  # (windows, K, L, O)
        if torch.is_grad_enabled() and moved.requires_grad:
            variance = variance + (factors * factors).sum(2)
        else:
            for factor in factors.unbind(2):
                variance.addcmul_(factor, factor)
    if which is not None:
        variance, apart = (t.index_select(0, which) for t in (variance, apart))  # (N, K or K - 1, O)
    mean = first
    if components > 1:
        mean = torch.cat([first, first + (apart if slope is None else apart * slope)], 1)
    variance = variance if slope is None else variance * slope.square()
    # A fast convolution algorithm may leave -1e-20 where the truth is 0.
    return mean, variance if which is None else variance.clamp_min(0)


def _expected(p: MFA, function: Any, mean: Tensor, variance: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
    """The expected activation (N, O, …) in windows of some images (N,), from their moments (N, K, O, …).

    And where it counts: where all components agree and nothing varies, the weights must not even round.
    """
    if type(function) is nn.ReLU:
        expected: Tensor = ExpectedReLU.apply(mean, variance)
    else:
        # Activations may have parameters for each channel of (…, O, H, W).
        expected = expectation(function, mean[..., None, None], variance[..., None, None])[..., 0, 0]
    if mean.shape[1] == 1:
        return expected.squeeze(1), variance.squeeze(1) > 0
    weights = p.weights[image].view(*expected.shape[:2], *[1] * (expected.dim() - 2))
    mixed = weighted_mean(weights, expected, 1)
    return mixed, ((variance > 0) | (mean != mean.narrow(1, 0, 1))).any(1)
