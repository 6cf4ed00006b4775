"""What density networks share: the scale of the images, their input, the meaning of their outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from misconv import _em
from misconv._checks import check_images, check_observed, check_seen_finite, check_size, describe
from misconv.mfa import MFA

__all__ = ["Network", "check_floor", "check_rank", "part_components"]


class Network(nn.Module):
    """The frame of a density network.

    Inside, images have mean 0 and variance 1 (`calibrate` measures what they have outside), missing pixels are 0, and
    `observed` is given as further channels.
    """

    center: Tensor
    scale: Tensor
    logits: nn.Linear | None

    def __init__(self, channels: int, components: int, rank: int, noise_floor: float) -> None:
        super().__init__()
        check_size("channels", channels)
        check_size("components", components)
        check_rank(rank)
        check_floor(noise_floor)
        self.channels, self.components, self.rank, self.noise_floor = channels, components, rank, noise_floor
        self.register_buffer("center", torch.zeros(channels, 1, 1))
        self.register_buffer("scale", torch.ones(channels, 1, 1))

    def _settings(self) -> dict[str, Any]:
        return {"components": self.components, "rank": self.rank, "noise_floor": self.noise_floor}

    def calibrate(self, x: Tensor, observed: Tensor) -> None:
        """Measure mean and deviation of the seen pixels of every channel, so that images may have any range."""
        observed = check_observed("observed", observed, x)
        check_seen_finite("x", x, observed)
        seen = observed.expand(x.shape)
        count = seen.sum((0, 2, 3), dtype=torch.float64)
        total = x.where(seen, 0).sum((0, 2, 3), dtype=torch.float64)
        _em.add_over_processes(count, total)
        if not (count > 0).all():
            raise ValueError(f"observed must show every channel somewhere, got none of channel {int(count.argmin())}")
        center = (total / count).view(-1, 1, 1)
        squares = (x.double() - center).where(seen, 0).square().sum((0, 2, 3))
        _em.add_over_processes(squares)
        deviation = (squares / count).sqrt().view(-1, 1, 1)
        self.center.copy_(center)
        self.scale.copy_(deviation.where(deviation > 1e-12, 1))

    def _input(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The network's input (B, 2C, H, W), the images and `observed` as bool, after checks."""
        check_images("x", x)
        if x.shape[1] != self.channels:
            raise ValueError(f"x must have the {self.channels} channels of this density, got {describe(x)}")
        observed = check_observed("observed", observed, x)
        check_seen_finite("x", x, observed)
        x = x.to(torch.promote_types(x.dtype, self.center.dtype))  # mixed precision may have cut the images short
        inside = ((x - self.center) / self.scale).where(observed, 0)
        return torch.cat([inside, observed.expand(x.shape).to(x.dtype)], 1), x, observed

    def _weigh(self, features: Tensor) -> Tensor:
        """Logits (B, K) of the components."""
        if self.logits is None:
            return features.new_zeros(len(features), 1)
        logits: Tensor = self.logits(features)
        return logits

    def _output(
        self, x: Tensor, observed: Tensor, logits: Tensor, means: Tensor, factors: Tensor, noise: Tensor
    ) -> MFA:
        """From numbers of the network to an MFA in the units of the images.

        Heads give (B, K·C, H, W), factors (B, K·L·C, H, W); noise as the logarithm of what exceeds the least.
        """
        shape = (self.components, *x.shape[1:])
        means, factors, noise, logits = (t.to(x.dtype) for t in (means, factors, noise, logits))
        variance = self.noise_floor + torch.exp(noise.clamp(max=6.0))
        return MFA(
            logits=logits,
            means=self.center + self.scale * means.unflatten(1, shape[:2]),
            factors=self.scale * factors.unflatten(1, (self.components, self.rank, x.shape[1])),
            noise=self.scale.square() * variance.unflatten(1, shape[:2]),
            check=False,
        ).fix(x, observed)


def part_components(means: nn.Module, noise: nn.Module) -> None:
    """Start with components apart from each other and with noise below the variance of the images."""
    assert isinstance(means.bias, Tensor)
    assert isinstance(noise.bias, Tensor)
    with torch.no_grad():
        means.bias.normal_(std=0.1)
        noise.bias.fill_(-1.0)


def check_rank(rank: int) -> None:
    """An integer, 0 for none."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"rank must be an integer of at least 0, got {describe(rank)}")


def check_floor(noise_floor: float) -> None:
    """A share of the images' variance."""
    if isinstance(noise_floor, bool) or not isinstance(noise_floor, int | float) or not 0 < noise_floor < 1:
        raise ValueError(f"noise_floor must lie strictly between 0 and 1, got {describe(noise_floor)}")
