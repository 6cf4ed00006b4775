"""The classifiers of the paper's appendix; only the first layer knows of missing pixels.

Blocks are convolution, ReLU, BatchNorm; a step down is a convolution with stride 2. The appendix names one step down,
the authors' code takes two: the second is the last block here. Between the linear layers the appendix names nothing;
the authors' code has a ReLU there. With it, all 20 of its units die early in some trainings on SVHN (Adam at 1e-3), and
the network says the same of every image from then on; so there is none here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from misconv.functional import conv2d_moments
from misconv.layers import MisConv2d, PartialConv2d
from misconv.mfa import MFA

__all__ = [
    "Classifier",
    "DeviationReLU",
    "PartialReLU",
    "deviation_layer",
    "misconv_layer",
    "misconv_layer_with_mask",
    "partial_layer",
    "relu_moments",
]

WIDTH = 32  # of the first layer, in all networks


class Classifier(nn.Module):
    """A first layer with its ReLU, and the same rest for every method.

    Args:
        first: takes what a method gives, returns (B, 32, H, W).
        shape: (C, H, W) of the images.
        classes: how many.
        kind: "small", [32] down [64]×2 lin 20 lin, for MNIST and SVHN; or "large", [32, drop]×2 down [64, drop]×3
            lin 128 drop lin, for CIFAR-10. The last of the [64] has a stride of 2.
    """

    def __init__(self, first: nn.Module, shape: tuple[int, int, int], classes: int, kind: str) -> None:
        super().__init__()
        self.first = first
        _, height, width = shape
        features = 64 * -(-height // 4) * -(-width // 4)
        if kind == "small":
            self.rest = nn.Sequential(
                _norm(WIDTH), _down(WIDTH), *_block(WIDTH, 64), *_block(64, 64, stride=2),
                nn.Flatten(), nn.Linear(features, 20), nn.Linear(20, classes),
            )  # fmt: skip
        elif kind == "large":
            self.rest = nn.Sequential(
                _norm(WIDTH), nn.Dropout(0.3), *_block(WIDTH, WIDTH), nn.Dropout(0.3), _down(WIDTH),
                *_block(WIDTH, 64), nn.Dropout(0.3), *_block(64, 64), nn.Dropout(0.3),
                *_block(64, 64, stride=2), nn.Dropout(0.3),
                nn.Flatten(), nn.Linear(features, 128), nn.Dropout(0.3), nn.Linear(128, classes),
            )  # fmt: skip
            # Measured on an H200: a third faster so, where the smaller network is not.
            self.to(memory_format=torch.channels_last)
        else:
            raise ValueError(f"kind must be 'small' or 'large', got {kind!r}")

    def forward(self, *inputs: Any) -> Tensor:
        """Logits (B, classes)."""
        out: Tensor = self.rest(self.first(*inputs))
        return out


class PartialReLU(PartialConv2d):
    """Partial convolution with the ReLU that `MisConv2d` has inside."""

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:  # type: ignore[override]  # as in PartialConv2d
        """(B, O, H', W')."""
        return super().forward(x, observed).relu()  # type: ignore[union-attr]  # one result was asked for


def misconv_layer(channels: int, width: int = WIDTH) -> nn.Module:
    """3×3, as for every method: what methods differ in is what they are given."""
    return MisConv2d(channels, width, 3, padding=1, activation="relu")


def misconv_layer_with_mask(channels: int, width: int = WIDTH) -> nn.Module:
    """The same for images with the mask as one more channel."""
    return misconv_layer(channels + 1, width)


def partial_layer(channels: int, width: int = WIDTH) -> nn.Module:
    """Partial convolution of the same size."""
    return PartialReLU(channels, width, 3, padding=1)


def _block(inside: int, width: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inside, width, 3, stride, padding=1), nn.ReLU(), _norm(width)


def _norm(width: int) -> nn.Module:
    norm = nn.BatchNorm2d(width)
    norm.num_batches_tracked = None  # with a fixed momentum nobody reads it, and counting costs a launch
    return norm


def _down(width: int) -> nn.Module:
    return nn.Conv2d(width, width, 3, stride=2, padding=1)


class DeviationReLU(MisConv2d):
    """MisConv with ReLU, to which the standard deviation of the activation is added through a 1×1 convolution.

    That convolution starts at zero, so that at first the layer is `MisConv2d`.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, width, 3, padding=1, activation="relu")
        self.mix = nn.Conv2d(width, width, 1, bias=False)
        nn.init.zeros_(self.mix.weight)

    def forward(self, p: MFA) -> Tensor:  # type: ignore[override]  # as in MisConv2d
        """(B, O, H, W)."""
        mean, variance = conv2d_moments(p, self.weight, self.bias, padding=1)
        first, second = relu_moments(mean, variance)
        weights = p.weights.view(*p.weights.shape, 1, 1, 1)
        expected = (weights * first).sum(1)
        spread = ((weights * second).sum(1) - expected.square()).clamp_min(0)
        deviation = torch.where(spread > 1e-8, spread, 1).sqrt() * (spread > 1e-8)  # the root has no gradient at 0
        out: Tensor = expected + self.mix(deviation)
        return out


def relu_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E[ReLU(Z)] and E[ReLU(Z)²] of normal Z: m Φ + s φ and (m² + s²) Φ + m s φ, at m / s.

    Example:
        >>> [round(float(t), 4) for t in relu_moments(torch.zeros(1), torch.ones(1))]  # 1 / √2π, 1 / 2
        [0.3989, 0.5]
    """
    sure = variance <= 0
    deviation = torch.where(sure, 1, variance).sqrt()
    z = mean / deviation
    below = torch.special.erfc(-z / math.sqrt(2)) / 2
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    first = torch.where(sure, mean.relu(), mean * below + deviation * density)
    second = (mean.square() + deviation.square()) * below + mean * deviation * density
    return first, torch.where(sure, mean.relu().square(), second)


def deviation_layer(channels: int, width: int = WIDTH) -> nn.Module:
    """MisConv with the deviation of its activation as a further input."""
    return DeviationReLU(channels, width)
