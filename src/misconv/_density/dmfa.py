"""Density networks, which predict the parameters of an MFA for every image anew."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._checks import as_batch, channels_last, check_images, describe
from misconv._density.bounds import Bounds
from misconv._density.network import (
    MOST_WEIGHTS,
    DensityNetwork,
    add_blocks,
    check_shape,
    check_sizes,
    head,
    initialize_components,
)
from misconv.mfa import MFA

__all__ = ["ConvDMFA", "LinearDMFA"]


class LinearDMFA(DensityNetwork):
    """The paper's density network for small images: convolutions, then one linear layer per parameter.

    Convolutions of 5×5 with 16, 32 and 64 channels and of 3×3 with 32, each with ReLU; the linear layers see all of
    their output, so the number of weights grows with the square of the number of pixels.

    Args:
        shape: (C, H, W) of the images, which is fixed.
        components: K. rank: L.
        noise_floor: the least noise variance, as a share of the images' variance.
        bounds: where means lie, (lowest, highest); "data": the range that `calibrate` saw; None for no bounds.

    Example:
        >>> density = LinearDMFA(shape=(1, 8, 8), rank=4)
        >>> density(torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8) > 0.25)
        MFA(2 images of 1×8×8, 1 component of rank 4)
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        components: int = 1,
        rank: int = 4,
        noise_floor: float = 1e-3,
        bounds: Bounds = "data",
    ) -> None:
        channels, height, width = self.shape = check_shape(shape)
        super().__init__(channels, components, rank, noise_floor, bounds)
        weights = 32 * height * width * components * (rank + 2) * channels * height * width
        if weights > MOST_WEIGHTS:
            raise ValueError(
                f"shape must be that of small images, got {self.shape}, for which the linear layers would have "
                "too many weights; use ConvDMFA"
            )
        self.features = nn.Sequential(
            nn.Conv2d(2 * channels, 16, 5, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(),
            nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        width_in, pixels = 32 * height * width, channels * height * width
        self.logits = nn.Linear(width_in, components) if components > 1 else None  # one needs no weight
        self.means = nn.Linear(width_in, components * pixels)
        self.factors = nn.Linear(width_in, components * rank * pixels) if rank else None
        self.noise = nn.Linear(width_in, components * pixels)
        initialize_components(self.means, self.noise)

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        return {"shape": list(self.shape), **self._settings()}

    def forward(self, x: Any, observed: Any = None) -> MFA:
        """The MFA of every image given its observed pixels; without `observed` those that are not NaN.

        Images may have any form that `misconv.observe` takes; integers get the type of the parameters.
        """
        x, observed = as_batch(x, observed, self.center)
        check_images("x", x)
        if tuple(x.shape[1:]) != self.shape:
            advice = channels_last(x, self.channels)
            raise ValueError(
                f"x must hold images of {self.shape}, as this density was made for, got {describe(x)}{advice}"
            )
        x, observed = self._arguments(x, observed)
        inside = self._input(x, observed)
        features = self.features(inside)

        def image(flat: Tensor) -> Tensor:
            return flat.view(len(flat), -1, *self.shape[1:])  # (B, K·C or K·L·C, H, W)

        factors = x.new_zeros(len(x), 0, *x.shape[2:]) if self.factors is None else image(self.factors(features))
        return self._output(
            x, observed, self._weigh(features), image(self.means(features)), factors, image(self.noise(features))
        )


class ConvDMFA(DensityNetwork):
    """The paper's fully convolutional density network, for images of any size.

    Blocks of convolution, ReLU and BatchNorm, by default [32]×2 down [64]×2 down [128]×4 up [64]×2 up [32]×2, and a
    head of two convolutions for each parameter.

    Args:
        channels: C. components: K. rank: L.
        widths: channels at full, half and quarter size (more for deeper networks).
        depths: how many blocks on the way down, at the bottom, and on the way up again.
        noise_floor: the least noise variance, as a share of the images' variance.
        skips: whether what was on the way down is given again on the way up (as in a U-Net); the paper has none.
        bounds: where means lie, (lowest, highest); "data": the range that `calibrate` saw; None for no bounds.

    Example:
        >>> density = ConvDMFA(channels=3, components=2, rank=4)
        >>> density(torch.rand(2, 3, 30, 21), torch.rand(2, 1, 30, 21) > 0.25)
        MFA(2 images of 3×30×21, 2 components of rank 4)
    """

    def __init__(
        self,
        channels: int,
        components: int = 1,
        rank: int = 4,
        widths: tuple[int, ...] = (32, 64, 128),
        depths: tuple[int, ...] = (2, 2, 4, 2, 2),
        noise_floor: float = 1e-3,
        skips: bool = False,
        bounds: Bounds = "data",
    ) -> None:
        super().__init__(channels, components, rank, noise_floor, bounds)
        if not isinstance(skips, bool):
            raise TypeError(f"skips must be True or False, got {describe(skips)}")
        check_sizes("widths", widths)
        check_sizes("depths", depths)
        if len(depths) != 2 * len(widths) - 1:
            raise ValueError(
                "depths must be positive, one for each of the widths on the way down, and again on the way up: "
                f"{2 * len(widths) - 1} for {len(widths)} widths, got {describe(depths)}"
            )
        self.widths, self.depths, self.skips = tuple(map(int, widths)), tuple(map(int, depths)), skips
        widths, depths = self.widths, self.depths
        layers: list[nn.Module] = []
        inside = 2 * channels
        for level, width in enumerate(widths):
            if level:
                layers.append(nn.Conv2d(inside, inside, 3, stride=2, padding=1))
            inside = add_blocks(layers, inside, width, depths[level])
        for step, width in enumerate(reversed(widths[:-1])):
            layers.append(nn.ConvTranspose2d(inside, inside, 3, stride=2, padding=1, output_padding=1))
            inside = add_blocks(layers, inside + skips * width, width, depths[len(widths) + step])
        self.features = nn.Sequential(*layers)
        self.means = head(inside, components * channels)
        self.factors = head(inside, components * rank * channels) if rank else None
        self.noise = head(inside, components * channels)
        self.logits = nn.Linear(inside, components) if components > 1 else None  # one needs no weight
        initialize_components(self.means[-1], self.noise[-1])

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        layers = {"widths": list(self.widths), "depths": list(self.depths)}
        return {"channels": self.channels, **layers, **self._settings(), "skips": self.skips}

    def forward(self, x: Any, observed: Any = None) -> MFA:
        """The MFA of every image given its observed pixels; without `observed` those that are not NaN.

        Images may have any form that `misconv.observe` takes; integers get the type of the parameters.
        """
        x, observed = self._arguments(x, observed)
        inside = self._input(x, observed)
        height, width = x.shape[2:]
        # Halved and doubled again, a side keeps its length if it is a multiple of this; what is added is missing.
        multiple = 2 ** (len(self.widths) - 1)
        if self.training and len(x) * -(-height // multiple) * -(-width // multiple) == 1:
            raise ValueError(
                "x must hold several images of this size in training mode, where BatchNorm measures their features; "
                f"got {describe(x)} (density.eval() takes a single one)"
            )
        features = self._through(F.pad(inside, (0, -width % multiple, 0, -height % multiple)))
        features = features[..., :height, :width]
        factors = x.new_zeros(len(x), 0, height, width) if self.factors is None else self.factors(features)
        logits = self._weigh(features.mean((2, 3)))
        return self._output(x, observed, logits, self.means(features), factors, self.noise(features))

    def _through(self, features: Tensor) -> Tensor:
        if not self.skips:
            out: Tensor = self.features(features)
            return out
        passed: list[Tensor] = []
        for layer in self.features:
            if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2):
                passed.append(features)
            features = layer(features)
            if isinstance(layer, nn.ConvTranspose2d):
                features = torch.cat([features, passed.pop()], 1)
        return features
