"""Which pixels were seen: reading holes from data, and making holes for experiments.

`observed` is a bool tensor, **True where the pixel was seen**, of shape (B, 1, H, W) or (B, C, H, W).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from misconv._checks import as_batch, check_images, check_seen_finite, check_size, describe
from misconv._math import Draw, Like, between, hidden_count, lowest

__all__ = ["channels", "free_form", "hide", "like", "noise", "observe", "square", "stripes", "trapezoid"]


def observe(x: Any, nodata: float | None = None) -> tuple[Tensor, Tensor]:
    """Split coded images into finite values and the pixels that were seen.

    NaN always means missing; so does every value equal to `nodata`, where one is given, what a masked array of numpy
    masks, and what is wholly transparent in a PIL image. Missing pixels come back as zero. This is the door through
    which data enters, so values are checked here on every device: a pixel that is infinite yet not declared missing is
    an error.

    Args:
        x: images (B, C, H, W), a tensor or a numpy array of any real type. (C, H, W) and (H, W) are one image and come
            back as a batch of one; so does a PIL image, and a list of PIL images of one size is a batch. Integers come
            back in torch's default type with the values that they had: a byte stays between 0 and 255.
        nodata: the number that stands for "no reading", for example -9999 or ``float("-inf")``.

    Returns:
        The images with missing pixels set to 0, and `observed`, both (B, C, H, W).

    Example:
        >>> x = torch.tensor([[[[0.5, float("nan")], [-9999.0, 2.0]]]])
        >>> x, observed = observe(x, nodata=-9999)
        >>> observed.tolist()
        [[[[True, False], [False, True]]]]
        >>> x.tolist()
        [[[[0.5, 0.0], [0.0, 2.0]]]]
    """
    x, seen = as_batch(x, nodata=_check_nodata(nodata))
    check_images("x", x)
    seen = ~x.isnan() if seen is None else seen
    check_seen_finite("x", x, seen, check=x.device.type != "meta")
    return x.where(seen, 0), seen


def _check_nodata(nodata: float | None) -> float | None:
    if nodata is None:
        return None
    if isinstance(nodata, (bool, np.bool_)) or not isinstance(nodata, Real):
        raise TypeError(f"nodata must be a number or None, got {describe(nodata)}")
    try:
        float(nodata)
    except OverflowError:  # an integer of more than 308 digits
        raise ValueError("nodata must be a number that a float can hold, got a larger one") from None
    return nodata


def square(
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float = 1 / 4,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Hide one square per image, its place drawn uniformly.

    The square is the one whose area comes nearest to ``fraction * height * width``: exact where that is a square
    number (1/4 of 28×28 is 14×14), otherwise off by at most half the difference to the next square number. In an image
    too flat for such a square, the whole short side is hidden over the nearest length of the long one. Never is all
    of an image hidden that has more than one pixel.

    Returns:
        `observed` (B, 1, H, W), False inside the square.

    Example:
        >>> observed = square(8, 64, 64, fraction=1 / 4, generator=torch.Generator().manual_seed(0))
        >>> (~observed).sum((1, 2, 3)).tolist()
        [1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024]
    """
    hidden = hidden_count(batch, height, width, fraction)
    # The nearest square number: s² or (s + 1)², whichever is closer.
    side = math.isqrt(hidden)
    side += hidden - side**2 > (side + 1) ** 2 - hidden
    side -= side**2 == height * width > 1  # something stays to be seen
    small, large = min(height, width), max(height, width)
    short, long = (side, side) if side <= small else (small, between(round(hidden / small), large))
    tall, wide = (long, short) if height > width else (short, long)
    draw = Draw(generator, device)
    top = draw.integers(batch, height - tall + 1)
    left = draw.integers(batch, width - wide + 1)
    rows, columns = draw.grid(height, width)
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    return draw.finish(~inside)


def trapezoid(
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float = 1 / 2,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    cut: bool = False,
) -> Tensor:
    """Hide one trapezoid per image that spans it from edge to opposite edge, with random slopes and place.

    Exactly ``round(fraction * (height * width))`` pixels of every image are hidden. The two parallel sides lie on the
    top and bottom edges or, for every second image on average, on the left and right ones. With `cut`, all that lies on
    one side of a slanted cut is hidden, a random one of the four sides: for half of the area a cut through the centre.

    Returns:
        `observed` (B, 1, H, W), False inside the trapezoid.

    Example:
        >>> observed = trapezoid(4, 28, 28, fraction=1 / 2, generator=torch.Generator().manual_seed(0))
        >>> (~observed).sum((1, 2, 3)).tolist()
        [392, 392, 392, 392]
    """
    hidden = hidden_count(batch, height, width, fraction)
    draw = Draw(generator, device)
    if cut:
        return draw.finish(~lowest(_slanted(draw, batch, height, width), hidden))
    upright = _trapezoid_rows(draw, batch, height, width, hidden)
    lying = _trapezoid_rows(draw, batch, width, height, hidden).transpose(-1, -2)
    inside = torch.where(draw.uniform(batch) < 0.5, upright, lying)
    return draw.finish(~inside)


def _slanted(draw: Draw, batch: int, height: int, width: int) -> Tensor:
    """How far every pixel lies from one of the four edges, on a slant of up to 1 : 2, (B, 1, H, W)."""
    rows, columns = draw.grid(height, width)
    down, right = (2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1  # -1 … 1
    slope, side = draw.uniform(batch) - 0.5, draw.integers(batch, 4)
    away, along = torch.where(side < 2, down, right), torch.where(side < 2, right, down)
    return torch.where(side % 2 == 0, away, -away) + slope * along


def _trapezoid_rows(draw: Draw, batch: int, rows: int, columns: int, hidden: int) -> Tensor:
    """True inside a trapezoid of exactly `hidden` pixels with its parallel sides on the first and the last row."""
    share = hidden / (rows * columns)
    steepest = max(min(share - 1 / columns, 1 - share), 0)  # a pixel is hidden in every row, if there are enough
    slope = (2 * draw.uniform(batch) - 1) * steepest
    steps = torch.arange(rows, device=draw.device, dtype=torch.float64).view(1, 1, rows, 1)
    along = (2 * steps + 1) / rows - 1  # -1 … 1, symmetric, so that the slope changes no area
    # Two straight sides, each between its ends on the first and the last row.
    first = draw.uniform(batch) * columns * (1 - share + slope)
    last = draw.uniform(batch) * columns * (1 - share - slope)
    left = first + (last - first) * (along + 1) / 2
    right = left + columns * (share + slope * along)
    start, end = _whole(left, right, hidden)
    places = torch.arange(columns, device=draw.device, dtype=torch.float64).view(1, 1, 1, columns)
    return (places >= start) & (places < end)


def _whole(left: Tensor, right: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Where rows (B, 1, H, 1) start and end in whole pixels, `hidden` of them together, no farther off than one."""
    start, end = left.round(), right.round()
    lost = torch.stack([start - left, right - end])  # by rounding, at either side
    short = hidden - (end - start).sum(2, keepdim=True)
    more = short.sign()
    # In as many rows as needed, those that lost the most (or gained, where too much is hidden), one side moves. It
    # lost something itself, so it neither leaves the image nor meets the other side.
    rank = torch.argsort(lost.sum(0) * more, dim=2, descending=True, stable=True).argsort(2)
    move = torch.where(rank < short.abs(), more, 0)
    at_left = lost[0] * more > lost[1] * more
    return torch.where(at_left, start - move, start), torch.where(at_left, end, end + move)


def noise(
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float = 3 / 4,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Hide single pixels at random places, exactly ``round(fraction * (height * width))`` of every image.

    Returns:
        `observed` (B, 1, H, W).

    Example:
        >>> observed = noise(2, 28, 28, fraction=3 / 4, generator=torch.Generator().manual_seed(0))
        >>> (~observed).sum((1, 2, 3)).tolist()
        [588, 588]
    """
    hidden = hidden_count(batch, height, width, fraction)
    draw = Draw(generator, device)
    return draw.finish(~lowest(draw.uniform(batch, height, width), hidden))


def free_form(
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float = 1 / 4,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    strokes: int = 2,
    turns: int = 5,
) -> Tensor:
    """Hide what lies under strokes of a brush: scratches, hair, cracks, writing.

    Every stroke is a random line of `turns` straight pieces. The brush is as wide as it must be to hide exactly
    ``round(fraction * (height * width))`` pixels of every image.

    Returns:
        `observed` (B, 1, H, W).

    Example:
        >>> observed = free_form(2, 64, 48, fraction=1 / 4, generator=torch.Generator().manual_seed(0))
        >>> (~observed).sum((1, 2, 3)).tolist()
        [768, 768]
    """
    hidden = hidden_count(batch, height, width, fraction)
    check_size("strokes", strokes)
    check_size("turns", turns)
    if strokes * turns > 10_000:
        raise ValueError(f"strokes and turns must make at most 10,000 pieces, got {strokes} strokes of {turns} turns")
    draw = Draw(generator, device)
    rows, columns = draw.grid(height, width)
    distance = torch.full((batch, 1, height, width), math.inf, device=draw.device, dtype=torch.float64)
    reach = 0.4 * math.hypot(height, width)
    for _ in range(strokes):
        y, x = height * draw.uniform(batch), width * draw.uniform(batch)
        angle = 2 * math.pi * draw.uniform(batch)
        for _ in range(turns):
            angle = angle + (draw.uniform(batch) - 0.5) * math.pi
            length = reach * (0.2 + 0.8 * draw.uniform(batch))
            dy, dx = length * angle.sin(), length * angle.cos()
            # The nearest point of the piece from (y, x) to (y + dy, x + dx).
            t = (((rows - y) * dy + (columns - x) * dx) / length**2).clamp(0, 1)
            distance = distance.minimum((rows - y - t * dy) ** 2 + (columns - x - t * dx) ** 2)
            # A stroke that leaves the image comes back at the edge.
            y, x = (y + dy).clamp(0, height), (x + dx).clamp(0, width)
    return draw.finish(~lowest(distance, hidden))


def stripes(
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float = 1 / 4,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    bands: int = 4,
) -> Tensor:
    """Hide whole rows in evenly spaced bands, as a line scanner or a scan with missing slices does.

    Exactly ``round(fraction * height)`` rows are hidden, at least one and never all of several, so the fraction is
    exact where it is a whole number of rows. The bands are shifted at random. For columns, transpose the result of
    ``stripes(batch, width, height)``.

    Returns:
        `observed` (B, 1, H, W).

    Example:
        >>> observed = stripes(1, 8, 3, fraction=1 / 4, bands=2, generator=torch.Generator().manual_seed(0))
        >>> observed[0, 0, :, 0].int().tolist()
        [0, 1, 1, 1, 0, 1, 1, 1]
    """
    hidden_count(batch, height, width, fraction)
    check_size("bands", bands)
    hidden = between(round(fraction * height), height)
    bands = min(bands, hidden)
    draw = Draw(generator, device)
    # Bresenham's rule, twice: `hidden` rows shared out over the bands, the bands spread over the image.
    ends = torch.arange(bands + 1, device=draw.device)
    starts, counts = ends[:-1] * height // bands, (ends * hidden // bands).diff()
    row = torch.arange(height, device=draw.device)
    band = torch.searchsorted(starts, row, right=True) - 1
    pattern = row - starts[band] < counts[band]
    shift = draw.integers(batch, height).view(batch, 1)
    shifted = pattern[(row + shift) % height]  # (B, H)
    return draw.finish(~shifted.view(batch, 1, height, 1).expand(batch, 1, height, width))


def channels(
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float = 1 / 3,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    channels: int = 3,
) -> Tensor:
    """Hide whole channels: a missing spectral band, a modality that was not recorded.

    Exactly ``round(fraction * channels)`` channels of every image are hidden, at least one and never all of several,
    so the fraction is exact where it is a whole number of channels.

    Returns:
        `observed` (B, channels, H, W).

    Example:
        >>> observed = channels(2, 4, 4, channels=4, fraction=1 / 2, generator=torch.Generator().manual_seed(0))
        >>> observed[:, :, 0, 0].int().tolist()
        [[1, 0, 0, 1], [1, 1, 0, 0]]
    """
    hidden_count(batch, height, width, fraction)
    check_size("channels", channels)
    draw = Draw(generator, device)
    hidden = between(round(fraction * channels), channels)
    gone = lowest(draw.uniform(batch, 1, channels), hidden).view(batch, channels, 1, 1)
    return draw.finish(~gone.expand(batch, channels, height, width))


def like(observed: Tensor) -> Callable[..., Tensor]:
    """Regions like those that are missing: a generator for `hide` that draws them from the data.

    Squares where squares are missing, stripes where stripes are, channels where channels are. Where the same pixels
    are missing in all images the regions are moved about; of single pixels that are scattered over an image fewer are
    taken, so that nearly as much stays seen as in the data. Where nothing is missing, it is `square`.

    Args:
        observed: bool (N, 1, H, W) or (N, C, H, W), of the data.

    Returns:
        A function with the arguments of `square`, for images of this size; it does not follow `fraction`.

    Example:
        >>> observed = channels(100, 8, 8, channels=3, generator=torch.Generator().manual_seed(0))
        >>> drawn = like(observed)(20, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> torch.equal(drawn, drawn[:, :, :1, :1].expand(drawn.shape))  # whole channels
        True
    """
    if not _is_region(observed) or observed.dim() != 4 or 0 in observed.shape:
        raise TypeError(f"observed must be a bool tensor (N, 1 or C, H, W), got {describe(observed)}")
    return square if bool(observed.all()) else Like(observed)


def hide(
    observed: Tensor,
    shape: Callable[..., Tensor] = square,
    *,
    fraction: float = 1 / 4,
    generator: torch.Generator | None = None,
    **options: int,
) -> Tensor:
    """Hide more of what is seen: ``observed`` and not under a freshly drawn region.

    The region covers `fraction` of the whole image, wherever it falls, so a part of it may have been missing already.

    Args:
        observed: bool (B, 1, H, W) or (B, C, H, W).
        shape: a generator of this module, or any function with the same arguments.
        fraction: of the image's area, strictly between 0 and 1.
        generator: source of randomness; may live on another device than `observed`.
        options: further arguments of `shape`, for example ``strokes=3``.

    Example:
        >>> seen = torch.ones(2, 1, 28, 28, dtype=torch.bool)
        >>> less = hide(seen, square, fraction=1 / 4, generator=torch.Generator().manual_seed(0))
        >>> (seen & ~less).sum().item()
        392
    """
    if not _is_region(observed) or observed.dim() != 4:
        raise TypeError(f"observed must be a bool tensor (B, 1 or C, H, W), got {describe(observed)}")
    if 0 in observed.shape:
        raise ValueError(f"observed must have no empty dimension, got {describe(observed)}")
    if not callable(shape):
        raise TypeError(f"shape must be a generator such as misconv.missing.square, got {describe(shape)}")
    batch, planes, height, width = observed.shape
    still = shape(batch, height, width, fraction=fraction, generator=generator, device=observed.device, **options)
    allowed = ((batch, 1, height, width), (batch, planes, height, width))
    right = _is_region(still) and still.device == observed.device
    if not right or (planes > 1 and still.shape not in allowed) or still.shape[::2] != (batch, height):
        raise ValueError(f"shape must draw bool regions {allowed[0]} or {allowed[1]}, got {describe(still)}")
    return observed & still


def _is_region(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.layout == torch.strided
