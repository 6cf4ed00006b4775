"""What density networks share: the scale of the images, their input, the meaning of their outputs."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from misconv._checks import (
    as_batch,
    channels_last,
    check_images,
    check_observed,
    check_seen_finite,
    check_size,
    describe,
    split_nan,
)
from misconv._density.bounds import Bounds, bound, check_bounds, with_margin
from misconv._density.em_data import (
    add_over_processes,
    check_representable,
    extremes,
    extremes_over_processes,
    unit_of,
)
from misconv.mfa import MFA

__all__ = [
    "FARTHEST",
    "MOST_WEIGHTS",
    "DensityNetwork",
    "add_blocks",
    "check_devices",
    "check_floor",
    "check_rank",
    "check_shape",
    "check_sizes",
    "head",
    "initialize_components",
    "result_type",
]

MOST_WEIGHTS = 2**34  # of a layer, or parameters of an SMFA: 64 GiB in float32
# Standardised pixels beyond this are cut off at it: an outlier of 1e20 would overflow the squares of BatchNorm.
FARTHEST = 1e4
_AT_A_TIME = 64  # images, where they are measured


class DensityNetwork(nn.Module):
    """The frame of a density network.

    Inside, images have mean 0 and variance 1 (`calibrate` measures what they have outside), missing pixels are 0, and
    `observed` is given as further channels.
    """

    center: Tensor
    scale: Tensor
    low: Tensor | None
    high: Tensor | None
    logits: nn.Module | None

    def __init__(self, channels: int, components: int, rank: int, noise_floor: float, bounds: Bounds) -> None:
        super().__init__()
        check_size("channels", channels)
        check_size("components", components)
        check_rank(rank)
        check_floor(noise_floor)
        if 9 * 128 * components * max(rank, 1) * channels > MOST_WEIGHTS:
            raise ValueError(
                "channels, components and rank must make a layer of ordinary size, got "
                f"{describe(channels)} channels, {describe(components)} components and rank {describe(rank)}"
            )
        self.channels, self.components, self.rank = int(channels), int(components), int(rank)
        self.noise_floor = float(noise_floor)
        self.register_buffer("center", torch.zeros(channels, 1, 1))
        self.register_buffer("scale", torch.ones(channels, 1, 1))
        self.bounds = check_bounds(bounds)
        # Until `calibrate` has seen data, they are taken for standardised ones.
        low, high = self.bounds if isinstance(self.bounds, tuple) else (-4.0, 4.0)
        self.register_buffer("low", None if bounds is None else torch.full((channels, 1, 1), low))
        self.register_buffer("high", None if bounds is None else torch.full((channels, 1, 1), high))

    def _settings(self) -> dict[str, Any]:
        bounds = list(self.bounds) if isinstance(self.bounds, tuple) else self.bounds
        return {"components": self.components, "rank": self.rank, "noise_floor": self.noise_floor, "bounds": bounds}

    @torch.no_grad()
    def calibrate(self, x: Tensor, observed: Tensor) -> None:
        """Measure mean, deviation and range of the seen pixels of every channel, so that images may have any."""
        observed = self._check(x, observed)
        seen = observed.expand(x.shape)
        # Some images at a time: copies of all of them in float64 would need more memory than the training.
        parts = list(zip(x.split(_AT_A_TIME), seen.split(_AT_A_TIME), strict=True))
        count = seen.sum((0, 2, 3), dtype=torch.float64)
        total = _added(some.where(known, 0).sum((0, 2, 3), dtype=torch.float64) for some, known in parts)
        add_over_processes(count, total)
        if not (count > 0).all():
            raise ValueError(f"observed must show every channel somewhere, got none of channel {int(count.argmin())}")
        center = total / count
        squares = _added(
            (some.double() - center.view(-1, 1, 1)).where(known, 0).square().sum((0, 2, 3)) for some, known in parts
        )
        add_over_processes(squares)
        scale = unit_of((squares / count).sqrt(), center)
        check_representable(scale, self.noise_floor, self.scale.dtype)
        self.center.copy_(center.view(-1, 1, 1))
        self.scale.copy_(scale.view(-1, 1, 1))
        if self.bounds == "data" and self.low is not None and self.high is not None:
            lowest, highest = zip(*(extremes(some, known) for some, known in parts), strict=True)
            found = torch.stack(lowest).amin(0), torch.stack(highest).amax(0)
            low, high = with_margin(*extremes_over_processes(*found), scale)
            self.low.copy_(low)
            self.high.copy_(high)

    def _check(self, x: Tensor, observed: Tensor) -> Tensor:
        """Check images and what is seen of them; `observed` as bool."""
        check_images("x", x)
        if x.shape[1] != self.channels:
            advice = channels_last(x, self.channels)
            raise ValueError(f"x must have the {self.channels} channels of this density, got {describe(x)}{advice}")
        observed = check_observed("observed", observed, x)
        check_seen_finite("x", x, observed)
        return observed

    def _arguments(self, x: Any, observed: Any) -> tuple[Tensor, Tensor]:
        """Images in any form in the type of the result, and `observed` as bool; without it NaN says what is missing."""
        x, observed = as_batch(x, observed, self.center)
        check_images("x", x)
        x, observed = split_nan(x, observed)
        check_devices(x, observed, self.center.device)
        observed = self._check(x, observed)
        return x.to(result_type(x.dtype, self.center.dtype)), observed

    def _standardised(self, x: Tensor, observed: Tensor) -> Tensor:
        """Images in the network's units and type, 0 where they are missing."""
        inside = ((x - self.center) / self.scale).where(observed, 0)
        return inside.clamp(-FARTHEST, FARTHEST).to(self.center.dtype)

    def _input(self, x: Tensor, observed: Tensor) -> Tensor:
        """The network's input (B, 2C, H, W)."""
        inside = self._standardised(x, observed)
        return torch.cat([inside, observed.expand(x.shape).to(inside.dtype)], 1)

    def _weigh(self, features: Tensor) -> Tensor:
        """Logits (B, K) of the components."""
        if self.logits is None:
            return features.new_zeros(len(features), 1)
        logits: Tensor = self.logits(features)
        return logits

    def _output(
        self,
        x: Tensor,
        observed: Tensor,
        logits: Tensor,
        means: Tensor,
        factors: Tensor,
        noise: Tensor,
    ) -> MFA:
        """From numbers of the network to an MFA in the units of the images.

        Heads give (B, K·C, H, W), factors (B, K·L·C, H, W); noise as the logarithm of what exceeds the least.
        """
        shape = (self.components, *x.shape[1:])
        # In float32 at least: half precision cannot tell a mean from a bound that is near.
        wide = torch.promote_types(x.dtype, torch.float32)
        means, factors, noise = (t.to(wide) for t in (means, factors, noise))
        center, scale = self.center.to(wide), self.scale.to(wide)
        means = center + scale * torch.unflatten(means, 1, shape[:2])
        factors = scale * torch.unflatten(factors, 1, (self.components, self.rank, x.shape[1]))
        noise = torch.unflatten(torch.exp(noise.clamp(max=6.0)), 1, shape[:2])
        floor = torch.full_like(scale, self.noise_floor)
        if self.low is not None and self.high is not None:
            low, high = self.low.to(wide), self.high.to(wide)
            means, factors, noise, floor = bound(means, factors, noise, floor, low, high, scale)
        # The square of a scale may overflow.
        noise = scale * (scale * (floor + noise))
        logits, means, factors, noise = (t.to(x.dtype) for t in (logits, means, factors, noise))
        return MFA(logits, means, factors, noise, check=False).fix(x, observed)


def _added(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def initialize_components(means: nn.Module, noise: nn.Module) -> None:
    """Start with components apart from each other and with noise below the variance of the images."""
    assert isinstance(means.bias, Tensor)
    assert isinstance(noise.bias, Tensor)
    with torch.no_grad():
        means.bias.normal_(std=0.1)
        noise.bias.fill_(-1.0)


def add_blocks(layers: list[nn.Module], inside: int, width: int, count: int) -> int:
    """Append convolutions, each with ReLU and BatchNorm; how many channels come out."""
    for _ in range(count):
        layers += [nn.Conv2d(inside, width, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(width)]
        inside = width
    return inside


def head(inside: int, out: int) -> nn.Sequential:
    """Two convolutions for one parameter."""
    return nn.Sequential(
        nn.Conv2d(inside, 16, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(16), nn.Conv2d(16, out, 3, padding=1)
    )


def _is_integer(value: object) -> bool:
    """Of Python or numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_rank(rank: int) -> None:
    """An integer, 0 for none."""
    if not _is_integer(rank) or rank < 0:
        raise ValueError(f"rank must be an integer of at least 0, got {describe(rank)}")


def check_floor(noise_floor: float) -> None:
    """A share of the images' variance."""
    if isinstance(noise_floor, bool) or not isinstance(noise_floor, (int, float)) or not 0 < noise_floor < 1:
        raise ValueError(f"noise_floor must lie strictly between 0 and 1, got {describe(noise_floor)}")


def check_sizes(name: str, values: Any) -> None:
    """Several counts, each an integer of at least one."""
    right = isinstance(values, (tuple, list)) and len(values) > 0
    if not right or not all(_is_integer(v) and v > 0 for v in values):
        raise ValueError(f"{name} must be a tuple of integers of at least 1, got {describe(values)}")


def check_shape(shape: Any) -> tuple[int, int, int]:
    """(C, H, W) of images."""
    if not isinstance(shape, (tuple, list)) or len(shape) != 3:
        raise ValueError(f"shape must be (channels, height, width), got {describe(shape)}")
    for name, value in zip(("channels", "height", "width"), shape, strict=True):
        check_size(name, value)
    channels, height, width = (int(value) for value in shape)
    return channels, height, width


def check_devices(x: Tensor, observed: Tensor, device: torch.device) -> None:
    """Images and what is seen of them are where the density is."""
    if isinstance(observed, Tensor) and not x.device == observed.device == device:
        raise ValueError(
            f"x, observed and the density must be on one device, got x on {x.device}, observed on {observed.device} "
            f"and the density on {device}"
        )


def result_type(images: torch.dtype, own: torch.dtype) -> torch.dtype:
    """The type of a density's MFA: that of the images, or, for images in half precision, of the density if wider."""
    return torch.promote_types(images, own) if images.itemsize < 4 else images
