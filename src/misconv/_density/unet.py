"""The density to use: a light U-Net that starts from a smooth fill of the holes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._backend import HAS_TRITON, is_eager, is_plain
from misconv._checks import check_size, describe
from misconv._density.bounds import Bounds
from misconv._density.network import FARTHEST, DensityNetwork, check_sizes
from misconv._math import full_precision, push_pull
from misconv.mfa import MFA

__all__ = ["UNetDMFA"]


class UNetDMFA(DensityNetwork):
    """A light density network for images of any size, which starts from a smooth fill of the holes.

    The holes are filled by averages of what is around them (`misconv.impute.push_pull`, made a little smoother).
    Blocks of `patch` × `patch` pixels become channels, a U-Net without normalization goes through them, and one 1×1
    convolution gives for every pixel what the mean adds to the fill, the noise and the factors. Before training the
    mean *is* the fill.

    Args:
        channels: C. components: K. rank: L.
        widths: channels of the U-Net at every size, each half of the one before.
        depths: how many convolutions at every size, on the way down and again on the way up.
        patch: the side of the blocks; 1 or 2 for details, 4 for speed.
        noise_floor: the least noise variance, as a share of the images' variance.
        bounds: where means lie, (lowest, highest); "data": the range that `calibrate` saw; None for no bounds.

    Example:
        >>> density = UNetDMFA(channels=3, components=2, rank=4)
        >>> density(torch.rand(2, 3, 30, 21), torch.rand(2, 1, 30, 21) > 0.25)
        MFA(2 images of 3×30×21, 2 components of rank 4)
    """

    def __init__(
        self,
        channels: int,
        components: int = 1,
        rank: int = 4,
        widths: tuple[int, ...] = (32, 48, 64, 96, 96),
        depths: tuple[int, ...] = (1, 1, 2, 2, 2),
        patch: int = 2,
        noise_floor: float = 1e-4,
        bounds: Bounds = "data",
    ) -> None:
        super().__init__(channels, components, rank, noise_floor, bounds)
        check_sizes("widths", widths)
        check_sizes("depths", depths)
        if len(depths) != len(widths):
            raise ValueError(f"depths must be one for each of the {len(widths)} widths, got {describe(depths)}")
        self.widths, self.depths = tuple(map(int, widths)), tuple(map(int, depths))
        self.patch = check_size("patch", patch)
        first, last = self.widths[0], self.widths[-1]
        self.enter = nn.Conv2d(2 * channels * patch**2, first, 3, padding=1)
        self.down = nn.ModuleList(_blocks(w, n) for w, n in zip(self.widths, self.depths, strict=True))
        pairs = list(zip(self.widths, self.widths[1:], strict=False))
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.grow = nn.ModuleList(nn.Conv2d(b, a, 1) for a, b in pairs)
        self.up = nn.ModuleList(_blocks(w, n) for w, n in zip(self.widths[:-1], self.depths[:-1], strict=True))
        self.head = nn.Conv2d(first, components * (2 + rank) * channels * patch**2, 1)
        # One component needs no weight. Features grow while they learn; weights that grew with them would leave all to
        # one component for good.
        self.logits = None
        if components > 1:
            self.logits = nn.Sequential(nn.LayerNorm(last, elementwise_affine=False), nn.Linear(last, components))
        self._initialize()

    def _initialize(self) -> None:
        """Start with the fill as mean, with components of different noise, and with short factors."""
        assert self.head.bias is not None
        with torch.no_grad():
            self.head.bias.zero_()
            for weight, size in zip(self._split(self.head.weight, 0), (0.0, 0.1, 0.3), strict=True):
                weight.mul_(size)
            # Pixels of a block vary together at first: a factor that tells them apart has to be learned.
            factors = torch.unflatten(self._split(self.head.weight, 0)[2], 0, (-1, self.patch**2))
            factors.copy_(factors[:, :1].clone().expand_as(factors))
            _, noise, _ = self._split(self.head.bias, 0)
            for number, bias in enumerate(noise.chunk(self.components)):
                bias.fill_(-2.0 - 1.5 * number)

    def _split(self, outputs: Tensor, dim: int) -> list[Tensor]:
        """Means, noise and factors among the outputs of the head."""
        size = outputs.shape[dim] // (2 + self.rank)
        return list(outputs.split([size, size, self.rank * size], dim))

    @property
    def is_untrained(self) -> bool:
        """Whether its mean is still the fill, and may become another."""
        return self.head.weight.requires_grad and not bool(self._split(self.head.weight, 0)[0].any())

    @torch.no_grad()
    def scale_deviations(self, ratio: Tensor) -> None:
        """Multiply the deviation that is claimed for every channel by a number (C,); bounds and floor stay."""
        assert self.head.bias is not None
        # (K, L or 1, C, patch²) each, for a weight and for a bias
        ratio = ratio.to(self.head.weight).view(1, 1, -1, 1)
        layout = (self.components, -1, self.channels, self.patch**2)
        _, noise, factor_bias = self._split(self.head.bias, 0)
        noise.view(layout).add_(2 * ratio.log())
        factor_bias.view(layout).mul_(ratio)
        self._split(self.head.weight, 0)[2].view(*layout, self.widths[0]).mul_(ratio.unsqueeze(-1))

    def config(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        sizes = {"widths": list(self.widths), "depths": list(self.depths), "patch": self.patch}
        return {"channels": self.channels, **sizes, **self._settings()}

    def forward(self, x: Any, observed: Any = None) -> MFA:
        """The MFA of every image given its observed pixels; without `observed` those that are not NaN.

        Images may have any form that `misconv.observe` takes; integers get the type of the parameters.
        """
        x, observed = self._arguments(x, observed)
        # A look at the values would make a GPU wait, and cannot be traced. What learns has a gradient for any batch.
        learns = torch.is_grad_enabled() and self.head.weight.requires_grad
        if x.device.type == "cpu" and not learns and is_eager(x, observed):
            incomplete = ~observed.flatten(1).all(1)
            if not incomplete.all():
                return self._some(x, observed, incomplete)
        return self._fused(x, observed) if self._has_kernels(x, observed) else self._all(x, observed)

    def _some(self, x: Tensor, observed: Tensor, incomplete: Tensor) -> MFA:
        """Complete images cost nothing: the network sees the others alone."""
        size = (self.components, *x.shape[1:])
        logits, noise = x.new_zeros(len(x), self.components), x.new_zeros(len(x), *size)
        factors = x.new_zeros(len(x), self.components, self.rank, *x.shape[1:])
        means = x.unsqueeze(1).expand(-1, self.components, -1, -1, -1)
        if incomplete.any():
            rows = incomplete.nonzero().flatten()
            p = self._all(x[rows], observed[rows])
            logits, means, factors, noise = (
                whole.index_copy(0, rows, part)
                for whole, part in zip(
                    (logits, means, factors, noise), (p.logits, p.means, p.factors, p.noise), strict=True
                )
            )
        return MFA(logits, means, factors, noise, observed, check=False)

    def forward_inside(self, x: Tensor, observed: Tensor, rows: slice, columns: slice) -> MFA:
        """The same as `forward`, of a part of the images alone: a margin needs less memory and time.

        Rows and columns begin at multiples of `patch`.
        """
        if any(part.start % self.patch for part in (rows, columns)):
            raise ValueError(f"rows and columns must begin at multiples of {self.patch}, got {rows} and {columns}")
        return self._all(*self._arguments(x, observed), (rows, columns))

    def _all(self, x: Tensor, observed: Tensor, part: tuple[slice, slice] | None = None) -> MFA:
        height, width = x.shape[2:]
        seen = observed.expand(x.shape)
        standardised = self._standardised(x, observed)
        wide = torch.promote_types(standardised.dtype, torch.float32)  # the weights of far pixels are small
        with full_precision(x.device):
            filled = push_pull(standardised.to(wide), seen, relaxed=True).to(standardised.dtype)
        inside = torch.cat([filled, seen.to(filled.dtype)], 1)
        inside = F.pad(inside, (0, -width % self.patch, 0, -height % self.patch))
        features, logits = self._through(F.pixel_unshuffle(inside, self.patch))
        if part is not None:
            x, observed, filled = (t[:, :, *part] for t in (x, observed, filled))
            features = features[:, :, *(slice(s.start // self.patch, -(-s.stop // self.patch)) for s in part)]
            height, width = x.shape[2:]
        outputs = F.pixel_shuffle(self.head(features), self.patch)[..., :height, :width]
        means, noise, factors = self._split(outputs, 1)
        means = filled.repeat(1, self.components, 1, 1) + means
        return self._output(x, observed, logits, means, factors, noise)

    def _has_kernels(self, x: Tensor, observed: Tensor) -> bool:
        """Whether fused kernels serve: on a GPU, in single or half precision, where nothing needs a gradient."""
        if x.device.type != "cuda" or not HAS_TRITON or is_plain() or not is_eager(x, observed):
            return False
        tensors = (x, *self.parameters())
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return False
        parts = (module for module in self.modules() if module is not self)
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):  # the kernels do not call these
            return False
        return torch.float64 not in (x.dtype, self.center.dtype) and x.numel() > 0 and max(x.shape[2:]) > 1

    def _fused(self, x: Tensor, observed: Tensor) -> MFA:
        """As `_all`, by kernels for all but the convolutions."""
        from misconv._triton import Frame, smooth_input, to_mixture  # takes its time to import, and may not be there

        frame = Frame(self.center, self.scale, self.low, self.high, self.noise_floor, FARTHEST)
        inside, filled = smooth_input(x, observed, frame, self.patch, self._type_inside(x.device))
        outputs, logits = self._through_joined(inside)
        assert self.head.bias is not None
        size = (self.components, self.rank, self.patch)
        means, factors, noise = to_mixture(x, observed, frame, filled, outputs, self.head.bias, *size)
        return MFA(logits.to(x.dtype), means, factors, noise, observed, check=False)

    def _type_inside(self, device: torch.device) -> torch.dtype:
        """What the convolutions read; under autocast the type that they would make of it."""
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.center.dtype

    def _through(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads of every block of pixels, and the logits of the components."""
        features = self.enter(inside)
        passed = []
        for level, block in enumerate(self.down):
            features = block(features)
            if level < len(self.shrink):
                passed.append(features)
                features = self.shrink[level](F.relu(features))
        bottom = features
        for level in reversed(range(len(self.up))):
            coarse = self.grow[level](F.relu(features))
            skip = passed[level]
            coarse = F.interpolate(coarse, scale_factor=2, mode="nearest")[..., : skip.shape[-2], : skip.shape[-1]]
            features = self.up[level](skip + coarse)
        return F.relu(features), self._weigh(F.relu(bottom).mean((2, 3)))

    def _through_joined(self, inside: Tensor) -> tuple[Tensor, Tensor]:
        """As `_through` and the head without its bias, with kernels that join all that is between two convolutions."""
        from misconv._triton import join

        def joined(conv: nn.Conv2d, skip: Tensor | None = None, *, doubled: bool = False) -> tuple[Tensor, Tensor]:
            assert conv.bias is not None
            return join(_without_bias(conv, active), conv.bias, skip, doubled=doubled)

        shrink, grow = _convolutions(self.shrink), _convolutions(self.grow)
        active = inside
        features, active = joined(self.enter)
        passed = []
        for level, blocks in enumerate(self.down):
            for conv in _convolutions(blocks):
                features, active = joined(conv, features)
            if level < len(shrink):
                passed.append(features)
                features, active = joined(shrink[level])
        logits = self._weigh(active.mean((2, 3)))
        for level in reversed(range(len(self.up))):
            features, active = joined(grow[level], passed[level], doubled=True)
            for conv in _convolutions(self.up[level]):
                features, active = joined(conv, features)
        return _without_bias(self.head, active), logits


def _convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]


def _without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding)


def _blocks(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(count)))


class Block(nn.Module):
    """A convolution whose result is added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width, H, W) both."""
        added: Tensor = self.conv(F.relu(x))
        return x + added
