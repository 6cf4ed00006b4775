"""Random numbers for missing regions: where they are drawn, and how many pixels they hide."""

from __future__ import annotations

import torch
from torch import Tensor

from misconv._checks import check_fraction, check_size, describe, generator_device

__all__ = ["Draw", "between", "hidden_count", "lowest"]

_MOST_PIXELS = 2**34


class Draw:
    """Random numbers where the generator lives; results where they are wanted.

    So one CPU generator gives the same regions on every device.
    """

    def __init__(self, generator: torch.Generator | None, device: torch.device | str | None) -> None:
        wanted = torch.get_default_device() if device is None else _as_device(device)
        self.generator, self.device = generator, generator_device(generator, wanted)
        self.wanted = self.device if device is None else wanted

    def uniform(self, batch: int, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), (B, 1, H, W) with ones for what `shape` leaves out."""
        size = (batch, 1, *shape) if shape else (batch, 1, 1, 1)
        return torch.rand(size, generator=self.generator, device=self.device, dtype=torch.float64)

    def integers(self, batch: int, high: int) -> Tensor:
        """Uniform integers in [0, high), (B, 1, 1, 1)."""
        return torch.randint(high, (batch, 1, 1, 1), generator=self.generator, device=self.device)

    def grid(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Row numbers (1, 1, H, 1) and column numbers (1, 1, 1, W)."""
        rows = torch.arange(height, device=self.device).view(1, 1, height, 1)
        return rows, torch.arange(width, device=self.device).view(1, 1, 1, width)

    def finish(self, observed: Tensor) -> Tensor:
        """The result, where it is wanted."""
        return observed.contiguous().to(self.wanted)


def _as_device(device: object) -> torch.device:
    try:
        return torch.empty(0, device=device).device  # type: ignore[call-overload, no-any-return]  # refused below
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one that this machine has, got {describe(device)}") from error


def hidden_count(batch: int, height: int, width: int, fraction: float) -> int:
    """Check the arguments every generator shares; how many pixels of an image are to be hidden."""
    check_size("batch", batch)
    check_size("height", height)
    check_size("width", width)
    check_fraction(fraction)
    if batch * height * width > _MOST_PIXELS:
        raise ValueError(f"batch, height and width must make at most 2**34 pixels, got {batch}, {height} and {width}")
    pixels = height * width  # multiplied first: 0.7 * 19 * 15 is less than 0.7 * 15 * 19, and rounds otherwise
    return between(round(fraction * pixels), pixels)


def between(count: int, total: int) -> int:
    """At least one and, where there are several, never all of them."""
    return min(max(count, 1), max(total - 1, 1))


def lowest(score: Tensor, count: int) -> Tensor:
    """True at the `count` smallest scores of every image."""
    flat = score.flatten(1)
    places = flat.topk(count, dim=1, largest=False).indices
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, places, True).view(score.shape)
