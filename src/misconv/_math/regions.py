"""Regions to hide that are like those which are missing in some data."""

from __future__ import annotations

import torch
from torch import Tensor

from misconv._math.draw import Draw

__all__ = ["Like"]

_MOST_BYTES = 2**26  # of the regions that are kept
_SCATTERED = 0.3  # neighbours that are missing together less often than this (a correlation) are single pixels
_SHARE = 0.3  # of scattered pixels at most this share is hidden, so that as much is seen as in the data, nearly


class Like:
    """Draws regions from those that are missing in some images, with their arguments those of `misconv.missing.square`.

    Args:
        observed: bool (N, 1, H, W) or (N, C, H, W), of the data.
    """

    def __init__(self, observed: Tensor) -> None:
        incomplete = observed[~observed.flatten(1).all(1)]
        # Spread over all of them, where they are too many.
        step = -(-incomplete.numel() // _MOST_BYTES) or 1
        self.observed = incomplete[::step].contiguous()
        missing = ~self.observed
        share = missing.double().mean()
        self.thin = float((_SHARE / share).clamp(max=1)) if _correlation(missing) < _SCATTERED else 1.0
        # Where the same pixels are missing in all images, these regions, moved about, hide something that was seen.
        other = missing.roll(1, 0) & self.observed
        self.move = bool(other.double().mean() < share * (1 - share) / 4)

    def __call__(
        self,
        batch: int,
        height: int,
        width: int,
        *,
        fraction: float | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """`observed` (batch, 1 or C, H, W); how much is hidden follows the data, whatever `fraction` says."""
        if (height, width) != tuple(self.observed.shape[-2:]):
            raise ValueError(
                f"regions must be drawn for images of {tuple(self.observed.shape[-2:])}, as they were taken from, got "
                f"{(height, width)}"
            )
        draw = Draw(generator, device)
        rows = draw.integers(batch, len(self.observed)).flatten()
        regions = self.observed[rows.to(self.observed.device)].to(draw.device)
        if self.move:
            down, across = draw.integers(batch, height).view(-1, 1), draw.integers(batch, width).view(-1, 1)
            y = (torch.arange(height, device=draw.device) + down) % height  # (B, H)
            x = (torch.arange(width, device=draw.device) + across) % width  # (B, W)
            flat = (y.unsqueeze(2) * width + x.unsqueeze(1)).flatten(1).unsqueeze(1)  # (B, 1, H·W)
            regions = regions.flatten(2).gather(2, flat.expand(-1, regions.shape[1], -1)).view(regions.shape)
        if self.thin < 1:
            regions = regions | (draw.uniform(batch, height, width) >= self.thin)
        return draw.finish(regions)


def _correlation(missing: Tensor) -> float:
    """Of neighbours: how much more often they are missing together than single pixels would be, 0 to 1."""
    share = missing.double().mean()
    spread = share * (1 - share)
    found = [0.0]
    for dim in (-1, -2):
        size = missing.shape[dim] - 1
        if size > 0 and spread > 0:
            both = (missing.narrow(dim, 0, size) & missing.narrow(dim, 1, size)).double().mean()
            found.append(float((both - share**2) / spread))
    return max(found)
