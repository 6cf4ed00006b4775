"""Means inside the range of the data, and no more variance than a number in that range can have."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._checks import describe
from misconv.mfa import MFA

__all__ = ["Bounds", "bound", "check_bounds", "check_prior", "clip", "with_margin"]

# How far beyond the smallest and largest value seen a mean may lie, as a share of their distance.
_MARGIN = 0.02
# How sharply means bend where they come near a bound: by less than a thousandth of the range beyond the margin.
_SHARPNESS = 100.0

# (lowest, highest); "data" for those of the data; None for none.
Bounds = tuple[float, float] | str | None


def with_margin(low: Tensor, high: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds (C, 1, 1) a little beyond the lowest and the highest value (C,); by `scale` (C,) where they are equal."""
    margin = torch.where(high > low, _MARGIN * (high - low), scale)
    return (low - margin).view(-1, 1, 1), (high + margin).view(-1, 1, 1)


def bound(
    means: Tensor, factors: Tensor, noise: Tensor, floor: Tensor, low: Tensor, high: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means between low and high, and no pixel with more variance than that allows.

    A number between low and high whose mean is m has at most the variance (m − low)(high − m) (Bhatia–Davis), so a
    pixel gets B s/(B + s) of what the network asks for, s. If that holds for every component, it holds for the mixture:
    the bound is m² plus something linear in m.

    Args:
        means: (B, K, C, H, W). factors: (B, K, L, C, H, W). noise: (B, K, C, H, W), in units of scale².
        floor: the least noise, in the same units. low, high, scale: (C, 1, 1).

    Returns:
        Means, factors, noise and its floor.
    """
    span = high - low
    # At least a thousandth away from the bounds, where no variance would be left.
    share = _soft_clip((means - low) / span).clamp(1e-3, 1 - 1e-3)
    most = (span / scale).square() * share * (1 - share)  # in units of scale²
    floor = torch.minimum(floor, most / 2)
    room = most - floor
    asked = noise + (factors / scale).square().sum(2)
    given = room / (room + asked)
    return low + span * share, factors * given.sqrt().unsqueeze(2), noise * given, floor


def _soft_clip(x: Tensor) -> Tensor:
    """Into 0 to 1, the identity but for the ends."""
    return x + (F.softplus(-_SHARPNESS * x) - F.softplus(_SHARPNESS * (x - 1))) / _SHARPNESS


def clip(p: MFA, low: Tensor, high: Tensor) -> MFA:
    """Cut off what of an MFA lies beyond the bounds (C, 1, 1): means, and variances as in `bound`."""
    span = high - low
    share = ((p.means - low) / span).clamp(1e-3, 1 - 1e-3)
    # In units of the range, whose square may be more than the type can hold. Without variance it is infinite, and 1.
    kept = (share * (1 - share) / (p.noise / span / span + (p.factors / span).square().sum(2))).clamp_max(1)
    means = low + span * share
    if p.observed is not None:
        means = torch.where(p.observed.unsqueeze(1), p.means, means)
    return replace(p, means=means, factors=p.factors * kept.sqrt().unsqueeze(2), noise=p.noise * kept, check=False)


def check_bounds(bounds: Any) -> Bounds:
    """None, "data", or two numbers."""
    if bounds is None or (isinstance(bounds, str) and bounds == "data"):
        return bounds
    if isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(_is_number(bound) for bound in bounds):
        low, high = float(bounds[0]), float(bounds[1])
        if low < high:
            return low, high
    raise ValueError(f'bounds must be "data", None or two numbers (lowest, highest), got {describe(bounds)}')


def check_prior(prior: float) -> float:
    """The strength of a prior."""
    if not _is_number(prior) or prior < 0:
        raise ValueError(f"prior must be a number of at least 0, got {describe(prior)}")
    return float(prior)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
