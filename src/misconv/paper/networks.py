"""The classifiers of the paper's appendix; only the first layer knows of missing pixels.

Blocks are convolution, ReLU, BatchNorm; a step down is a convolution with stride 2. The appendix names one step down,
the authors' code takes two: the second is the last block here. Between the linear layers the appendix names nothing;
the authors' code has a ReLU there. With it, all 20 of its units die early in some trainings on SVHN (Adam at 1e-3), and
the network says the same of every image from then on; so there is none here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from misconv.layers import MisConv2d, PartialConv2d

__all__ = ["Classifier", "PartialReLU", "misconv_layer", "misconv_layer_with_mask", "partial_layer"]

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
