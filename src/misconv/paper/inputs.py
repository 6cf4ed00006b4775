"""Incomplete images on a device, what a density says of them, and the forms in which networks take both.

All data live on one device: images as bytes, what a density says of them at missing pixels alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from misconv import impute
from misconv._train import as_floats
from misconv.mfa import MFA

__all__ = ["BYTE", "CachedMFA", "IncompleteImages", "Take", "filled", "point", "zeros_and_mask"]

Take = Callable[[Tensor], Any]  # indices (B,) -> what the network takes of these images
CHUNK = 128  # images that a density sees at a time
LEAST = 1e-7  # a component with less weight is lost in the rounding of float32
BYTE = 255  # what a byte is divided by, to be a number from 0 to 1
NEVER = -1e4  # the logarithm of a weight that is 0 in any arithmetic


class IncompleteImages:
    """Images of which a fixed region is missing; their hidden pixels are gone for good.

    Args:
        images: uint8 (N, C, H, W).
        observed: bool (N, 1, H, W) or (N, C, H, W).
        filler: what stands at missing pixels when images are asked for as numbers; nothing may depend on it.
    """

    def __init__(self, images: Tensor, observed: Tensor, filler: float = 0.0) -> None:
        self.observed = observed
        self.images = images.where(observed, 0)
        self.filler = filler

    @classmethod
    def complete(cls, images: Tensor) -> IncompleteImages:
        """Images of which nothing is missing."""
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=images.device)
        return cls(images, seen.expand(len(images), 1, *images.shape[2:]))

    def __len__(self) -> int:
        return len(self.images)

    def at(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Some of the images as numbers from 0 to 1, and what is observed of them."""
        x, observed = as_floats(self.images[indices], BYTE), self.observed[indices]
        return (x.where(observed, self.filler) if self.filler != 0 else x), observed  # erased pixels are 0 already


class CachedMFA:
    """What a density says of incomplete images, computed once and kept at their missing pixels alone.

    Of a mixture only components that matter are kept: given most of an image, hardly ever more than one.

    Args:
        density: (x, observed) -> MFA, or -> filled images, which are kept as points.
        data: the images; an image with fewer missing pixels than others is padded. chunk: how many at a time.

    Called with indices (B,), it returns the MFA of these images as `density` would, but for components whose weight is
    below `LEAST`.
    """

    @torch.no_grad()
    def __init__(
        self, density: Callable[[Tensor, Tensor], MFA | Tensor], data: IncompleteImages, chunk: int | None = None
    ) -> None:
        self.data = data
        missing = ~data.observed.flatten(1)  # (N, H·W)
        count = int(missing.sum(1).max())
        pixels = missing.shape[1]
        # Sorting puts the missing pixels first; places beyond an image's own point behind its last pixel.
        places = missing.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
        self.places = places.where(missing.gather(1, places), pixels)  # (N, M)
        parts, logs, counts = [], [], []
        for rows in torch.arange(len(data), device=missing.device).split(chunk or CHUNK):
            p = density(*data.at(rows))
            p = MFA.point(p) if isinstance(p, Tensor) else p
            values = torch.cat([p.means.unsqueeze(2), p.noise.unsqueeze(2), p.factors], 2)  # (B, K, 2 + L, C, H, W)
            log = p.logits.log_softmax(1)
            kept = log > math.log(LEAST)
            parts.append(_gather(values.flatten(4), self.places[rows])[kept])
            logs.append(log[kept])
            counts.append(kept.sum(1))
        self.values = torch.cat(parts)  # (all that is kept, 2 + L, C, M)
        each = torch.cat(counts).unsqueeze(1)
        if not bool(each.all()):  # the largest of K weights is at least 1 / K
            raise FloatingPointError(
                f"the density must weigh its components with numbers, got none for image {int(each.argmin())}"
            )
        slot = torch.arange(int(each.max()), device=each.device)
        # An image with fewer components than others has its last one again, with no weight.
        self.rows = each.cumsum(0) - each + slot.minimum(each - 1)  # (N, K)
        self.logits = torch.cat(logs)[self.rows].where(slot < each, NEVER)

    def __call__(self, indices: Tensor) -> MFA:
        """The MFA of some images, exact where they are observed."""
        x, observed = self.data.at(indices)
        values, places = self.values[self.rows[indices]], self.places[indices]
        pixels = x.shape[-2] * x.shape[-1]
        flat = values.new_zeros(*values.shape[:-1], pixels + 1)
        flat.scatter_(-1, places[:, None, None, None].expand(values.shape), values)
        full = torch.unflatten(flat[..., :pixels], -1, x.shape[-2:])  # (B, K, 2 + L, C, H, W)
        means = torch.where(observed.unsqueeze(1), x.unsqueeze(1), full[:, :, 0])
        return MFA(
            self.logits[indices], means, full[:, :, 2:].contiguous(), full[:, :, 1].contiguous(), observed, check=False
        )

    def filled(self, indices: Tensor) -> MFA:
        """`filled`, of these images."""
        return filled(self(indices))


def filled(p: MFA) -> MFA:
    """The mean of an MFA as if it were certain: imputation by the density."""
    return point(p.mean)


def point(x: Tensor) -> MFA:
    """`MFA.point`, whose constants are made once per shape: in a captured step each would be a launch."""
    logits, factors, noise, observed = _constants(tuple(x.shape), x.dtype, x.device)
    return MFA(logits, x.unsqueeze(1), factors, noise, observed, check=False)


@cache  # for good: a captured step keeps no hold of what it reads
def _constants(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    p = MFA.point(torch.zeros(shape, dtype=dtype, device=device))
    return p.logits, p.factors, p.noise, p.observed  # type: ignore[return-value]  # a point has observed pixels


def zeros_and_mask(x: Tensor, observed: Tensor) -> MFA:
    """Zeros where nothing is observed, and the mask as one more channel; all of it certain."""
    return point(torch.cat([impute.zero(x, observed), observed.to(x.dtype)], 1))


def _gather(flat: Tensor, places: Tensor) -> Tensor:
    """Values (B, K, F, C, H·W) at places (B, M), of which those behind the last pixel give anything."""
    index = places.clamp_max(flat.shape[-1] - 1)[:, None, None, None]
    return flat.gather(-1, index.expand(*flat.shape[:-1], -1))
