"""Filling the missing pixels of images with one value each: the baselines, and the mean of a density.

Every imputer is called as ``(x, observed) -> filled``. Observed pixels come back bit for bit; values at unobserved
places are never read, neither of the images that are filled nor of those that were fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from misconv._checks import check_images, check_observed, check_seen_finite, check_size, describe
from misconv._files import FoundFile, fill_scene
from misconv._math import full_precision, nearest_fill
from misconv._math import push_pull as smooth_fill
from misconv.mfa import MFA

__all__ = ["KNN", "Mean", "by_density", "nearest", "push_pull", "scene", "zero"]

# Work arrays of `KNN` stay below about this, however many images are fitted or filled.
_WORK_BYTES = 256 * 2**20
# Pairs of a missing pixel and a possible donor that are looked at together: few enough to stay in a cache.
_PAIRS = 2**20
# Distances are compared without this number of their last bits, which are rounding.
_NOISY_BITS = 16


def zero(x: Tensor, observed: Tensor) -> Tensor:
    """Fill missing pixels with 0.

    Shape:
        (B, C, H, W), bool (B, 1, H, W) or (B, C, H, W) → (B, C, H, W).

    Example:
        >>> zero(torch.tensor([[[[2.0, float("nan")]]]]), torch.tensor([[[[True, False]]]]))
        tensor([[[[2., 0.]]]])
    """
    return torch.where(_check(x, observed), x, 0)


def nearest(x: Tensor, observed: Tensor) -> Tensor:
    """Fill each missing pixel with the nearest one of its image and channel that was seen, differentiably.

    ``filled[i] = x[argmin_{j seen} |i − j|]``, with the distance of pixel centres in the plane. Of equally near pixels
    one is taken, always the same. A channel of which nothing was seen becomes 0, as by `zero`.

    Shape:
        (B, C, H, W), bool (B, 1, H, W) or (B, C, H, W) → (B, C, H, W).

    Example:
        >>> x = torch.tensor([[[[2.0, float("nan"), float("nan"), float("nan"), 7.0]]]])
        >>> nearest(x, ~x.isnan())[..., [0, 1, 3, 4]]
        tensor([[[[2., 2., 7., 7.]]]])
    """
    observed = _check(x, observed)
    filled, _ = nearest_fill(x, observed)
    return filled


def push_pull(x: Tensor, observed: Tensor) -> Tensor:
    """Fill the holes of each channel smoothly from what is around them, with a push–pull pyramid, differentiably.

    Down the pyramid each level holds averages of the seen pixels of the level below, ``Σ w x / Σ w``; up again what a
    level does not know comes from the coarser one. All fills lie between the least and the largest seen pixel of the
    channel. A channel of which nothing was seen becomes 0, as by `zero`. Half precision is computed in float32.

    Shape:
        (B, C, H, W), bool (B, 1, H, W) or (B, C, H, W) → (B, C, H, W).

    Example:
        >>> x = torch.tensor([[[[2.0, float("nan"), float("nan"), 5.0]]]])
        >>> push_pull(x, ~x.isnan()).round(decimals=1)
        tensor([[[[2.0000, 3.1000, 3.9000, 5.0000]]]])
    """
    observed = _check(x, observed)
    kind = torch.promote_types(x.dtype, torch.float32)
    with full_precision(x.device):
        filled = smooth_fill(x.to(kind), observed.expand(x.shape))
    return torch.where(observed, x, filled.to(x.dtype))


class _Fitted(nn.Module):
    """A module whose buffers are empty until `fit`, or until they are loaded, gives them their shapes."""

    mean: Tensor  # (C, H, W), what a pixel is filled with for want of anything better

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.empty(0))

    def _device(self, x: Tensor) -> torch.device:
        return self.mean.device if self.mean.numel() else x.device

    def _check_fits(self, x: Tensor) -> None:
        if not self.mean.numel():
            raise RuntimeError(f"{type(self).__name__} must be fitted before use: call .fit(x, observed) first")
        if isinstance(x, Tensor) and (x.shape[1:] != self.mean.shape or x.device != self.mean.device):
            raise ValueError(
                f"x must have the shape (B, {', '.join(str(n) for n in self.mean.shape)}) and the device "
                f"{self.mean.device} of the fitted images, got {describe(x)}"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, buffer in self.named_buffers(recurse=False):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor):
                setattr(self, name, torch.empty_like(value, device=buffer.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Mean(_Fitted):
    """Fill missing pixels with the mean of that pixel over the fitted images that have it.

    A pixel that no fitted image has gets the mean of all values seen in its channel, or, where there are none, of all
    values seen.

    Shape:
        (B, C, H, W), bool (B, 1, H, W) or (B, C, H, W) → (B, C, H, W).

    Example:
        >>> x = torch.tensor([1.0, 3.0, 8.0]).view(3, 1, 1, 1)
        >>> observed = torch.tensor([True, True, False]).view(3, 1, 1, 1)
        >>> Mean().fit(x, observed)(x, observed).flatten()
        tensor([1., 3., 2.])
    """

    @torch.no_grad()
    def fit(self, x: Tensor, observed: Tensor) -> Self:
        """Learn the mean of every pixel; returns the module, which stays on its device if it was fitted before."""
        self.mean = _pixel_means(x, _check(x, observed)).to(self._device(x), x.dtype)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        """(B, C, H, W), the filled images."""
        observed = _check(x, observed)
        self._check_fits(x)
        return torch.where(observed, x, self.mean.to(x.dtype))


class KNN(_Fitted):
    """Fill each missing pixel with its mean over the k nearest fitted images that have it.

    The squared distance of two images with n pixels is ``n / |S| · Σ_S (x − y)²`` over the pixels S that both have.
    Images without a common pixel are no neighbours. Fewer than k neighbours with the pixel: the mean of those; none:
    the pixel is filled as by `Mean`. Of equally near images the first fitted one counts as nearer. Everything is
    computed in float64.

    Args:
        k: how many neighbours; may exceed the number of fitted images.

    Shape:
        (B, C, H, W), bool (B, 1, H, W) or (B, C, H, W) → (B, C, H, W).

    Example:
        >>> x = torch.tensor([[1.0, 5.0], [2.0, 7.0], [9.0, 0.0], [1.4, float("nan")]]).view(4, 1, 1, 2)
        >>> knn = KNN(k=2).fit(x, ~x.isnan())
        >>> knn(x[3:], ~x[3:].isnan())
        tensor([[[[1.4000, 6.0000]]]])
    """

    images: Tensor  # (N, C, H, W), 0 where not seen
    seen: Tensor  # bool (N, 1, H, W) or (N, C, H, W)

    def __init__(self, k: int = 5) -> None:
        super().__init__()
        check_size("k", k)
        self.k = k
        self.register_buffer("images", torch.empty(0))
        self.register_buffer("seen", torch.empty(0, dtype=torch.bool))

    @torch.no_grad()
    def fit(self, x: Tensor, observed: Tensor) -> Self:
        """Keep the images and their means; returns the module, which stays on its device if it was fitted before."""
        observed, device = _check(x, observed), self._device(x)
        self.mean = _pixel_means(x, observed).to(device, x.dtype)
        self.images, self.seen = torch.where(observed, x, 0).to(device), observed.to(device, copy=True)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        """(B, C, H, W), the filled images."""
        observed = _check(x, observed)
        self._check_fits(x)
        filled = torch.where(observed, x, self.mean.to(x.dtype))
        incomplete = (~observed).flatten(1).any(1).nonzero().squeeze(1)
        # Besides its share of the products an image needs four numbers per fitted image and a dozen per pixel.
        for rows in incomplete.split(_at_least_one(_WORK_BYTES / 2 / (32 * len(self.images) + 96 * self.mean.numel()))):
            seen = observed[rows]
            order = _order(*_distances(filled[rows], seen, self.images, self.seen, self.mean))
            donated, known = _donate(order, seen.expand(-1, len(self.mean), -1, -1), self.images, self.seen, self.k)
            filled[rows] = torch.where(known, donated.to(x.dtype), filled[rows])
        return filled

    def extra_repr(self) -> str:
        """The arguments."""
        return f"k={self.k}"


def by_density(density: Callable[[Tensor, Tensor], MFA]) -> nn.Module:
    """The imputer that fills missing pixels with their mean under a density, differentiably.

    Args:
        density: any module or function ``(x, observed) -> MFA``.

    Example:
        >>> def density(x, observed):
        ...     b, c, h, w = x.shape
        ...     means, noise = torch.full((b, 1, c, h, w), 0.5), torch.ones(b, 1, c, h, w)
        ...     return MFA(torch.zeros(b, 1), means, torch.zeros(b, 1, 0, c, h, w), noise).fix(x, observed)
        >>> by_density(density)(torch.tensor([[[[2.0, float("nan")]]]]), torch.tensor([[[[True, False]]]]))
        tensor([[[[2.0000, 0.5000]]]])
    """
    return _ByDensity(density)


def scene(
    path: str | Path,
    out: str | Path,
    density: Callable[[Tensor, Tensor], MFA],
    *,
    deviation: str | Path | None = None,
    nodata: float | None = None,
) -> float:
    """Fill a TIFF or GeoTIFF of any size: window by window, each with a margin as wide as the density sees.

    The new file has the type, bands, georeferencing, tags and compression of the old one; what was seen comes back bit
    for bit, and nothing in it is missing any more. It appears under its name when it is whole. There are no seams where
    the density has one component; the weights of several are those of a window.

    Args:
        path: the file. out: the file to write.
        density: a module (x, observed) -> `MFA` for as many channels as the file has bands, in the units of the file.
        deviation: a file for the standard deviation of what was filled in, float32, 0 where pixels were seen.
        nodata: a number that stands for "no reading", besides what the file says itself.

    Returns:
        The share of the file that was missing.
    """
    if not callable(density):
        raise TypeError(f"density must be a module or function (x, observed) -> MFA, got {describe(density)}")
    errors = None if deviation is None else Path(deviation)
    if Path(path).resolve() in [Path(p).resolve() for p in (out, errors) if p is not None]:
        raise ValueError("out must be another file than the one that is read, got the same")
    training = isinstance(density, nn.Module) and density.training
    try:
        if isinstance(density, nn.Module):
            density.eval()
        source = FoundFile(str(path), Path(path).name)
        return fill_scene(source, [Path(out)], density, None if errors is None else [errors], nodata)
    finally:
        if isinstance(density, nn.Module):
            density.train(training)


class _ByDensity(nn.Module):
    def __init__(self, density: Callable[[Tensor, Tensor], MFA]) -> None:
        super().__init__()
        if not callable(density):
            raise TypeError(f"density must be a module or function (x, observed) -> MFA, got {describe(density)}")
        self.density = density

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        observed = _check(x, observed)
        x = torch.where(observed, x, 0)  # so that even a careless density reads nothing hidden
        p = self.density(x, observed)
        if not isinstance(p, MFA):
            raise TypeError(f"density must return an MFA, got {describe(p)}")
        if p.shape != x.shape or p.device != x.device:
            raise ValueError(
                f"density must return an MFA of shape {tuple(x.shape)} on {x.device}, as x is, got one of shape "
                f"{tuple(p.shape)} on {p.device}"
            )
        return torch.where(observed, x, p.mean.to(x.dtype))


# Mean ----------------------------------------------------------------------------------------------------------------


def _check(x: Tensor, observed: Tensor) -> Tensor:
    check_images("x", x)
    observed = check_observed("observed", observed, x)
    check_seen_finite("x", x, observed)
    return observed


def _pixel_means(x: Tensor, observed: Tensor) -> Tensor:
    """(C, H, W) in float64, with a value for pixels and channels that were never seen."""
    if x.is_meta:
        raise ValueError(f"x must be on a device that holds values, got {describe(x)}")
    count = observed.expand(x.shape).sum(0)  # (C, H, W)
    total = torch.where(observed, x, 0).sum(0, dtype=torch.float64)
    if not count.any():
        raise ValueError("observed must be True for at least one pixel of the fitted images, got none")
    everything = total.sum() / count.sum()
    in_channel, total_in_channel = count.sum((1, 2), keepdim=True), total.sum((1, 2), keepdim=True)
    channel = torch.where(in_channel > 0, total_in_channel / in_channel, everything)
    return torch.where(count > 0, total / count, channel)


# Nearest neighbours --------------------------------------------------------------------------------------------------


def _distances(x: Tensor, seen: Tensor, images: Tensor, images_seen: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances (Q, N) in float64, infinite without a common pixel, and the energy (Q, 1) of the images.

    With both images zero where they are not seen, ``Σ_S (x − y)² = x²·seen_y + seen_x·y² − 2 x·y``. The differences
    of large numbers in it lose few digits because the mean image is subtracted first.
    """
    planes = max(seen.shape[1], images_seen.shape[1])
    x, x_square, x_seen = _prepare(x, seen, centre, planes)
    distances = []
    for rows in torch.arange(len(images), device=x.device).split(
        _at_least_one(_WORK_BYTES / 2 / (64 * centre.numel()))
    ):
        y, y_square, y_seen = _prepare(images[rows], images_seen[rows], centre, planes)
        square = x_square @ y_seen.T
        square.addmm_(x_seen, y_square.T).addmm_(x, y.T, alpha=-2)
        with torch.autocast(x.device.type, enabled=False):
            common = x_seen.float() @ y_seen.float().T  # whole numbers below 2²⁴, exact in float32
        square.mul_(x_seen.shape[1] / common)
        distances.append(square.masked_fill_(common == 0, torch.inf).clamp_min_(0))
    return torch.cat(distances, 1), x_square.sum(1, keepdim=True)


def _prepare(x: Tensor, seen: Tensor, centre: Tensor, planes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centred values (Q, C·H·W), their squares and what is seen of them, both (Q, planes·H·W); all zero where unseen.

    Channels that are seen together share a plane, which makes three of the four products that much smaller.
    """
    centred = torch.where(seen, x.double() - centre, 0)
    square = torch.unflatten(centred.square(), 1, (planes, -1)).sum(2)
    return centred.flatten(1), square.flatten(1), seen.expand(-1, planes, -1, -1).flatten(1).double()


def _order(distances: Tensor, energy: Tensor) -> Tensor:
    """Whole numbers (Q, N) that sort like the distances; their last bits hold the number of the fitted image.

    The bits of a non-negative float64 sort as an integer. Its last ones are rounding, different from one batch to the
    next, and give way to the image's number: so equally near images come in the order they were fitted in. Rounding
    is relative to the numbers that were subtracted, hence the energy that is added to all distances of an image.
    """
    bits = _index_bits(distances.shape[1])
    keys = (distances + energy).abs().view(torch.int64)
    keys = keys.add_(1 << (bits - 1)).bitwise_right_shift_(bits).bitwise_left_shift_(bits)
    return keys.bitwise_or_(torch.arange(distances.shape[1], device=keys.device))


def _index_bits(count: int) -> int:
    return max(_NOISY_BITS, count.bit_length())


def _donate(order: Tensor, seen: Tensor, images: Tensor, images_seen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The mean of the k nearest donors of every missing pixel (Q, C, H, W), and where there is at least one donor.

    Ever more of the nearest fitted images are asked, and only about the pixels that still have fewer than k donors.
    """
    infinity = torch.tensor(torch.inf, dtype=torch.float64).view(torch.int64).item()
    index = (1 << _index_bits(order.shape[1])) - 1
    count = torch.zeros(seen.flatten(1).shape, dtype=torch.int32, device=seen.device)  # (Q, n)
    total = torch.zeros_like(count, dtype=torch.float64)
    wanted = images_seen.sum(0).clamp_max(k).expand(seen.shape[1:]).flatten()  # (n,), all that can be had
    rows, pixels = (~seen.flatten(1) & (wanted > 0)).nonzero(as_tuple=True)  # (P,) each
    start, stop = 0, min(4 * k, order.shape[1])
    while len(rows) and start < stop:
        asking, place = rows.unique(return_inverse=True)
        nearest = order[asking].topk(stop, largest=False).values[:, start:]  # (asking, m)
        donors = torch.where(nearest < infinity, nearest & index, -1)
        pieces = (t.split(_at_least_one(_PAIRS / (stop - start))) for t in (place, rows, pixels))
        for piece, row, pixel in zip(*pieces, strict=True):
            _ask(donors[piece], row, pixel, images.flatten(1), images_seen.flatten(1), k, count, total)
        unfinished = count[rows, pixels] < wanted[pixels]
        rows, pixels = rows[unfinished], pixels[unfinished]
        start, stop = stop, min(2 * stop, order.shape[1])
    return (total / count.clamp_min(1)).view(seen.shape), (count > 0).view(seen.shape)


def _ask(
    donors: Tensor, row: Tensor, pixel: Tensor, images: Tensor, seen: Tensor, k: int, count: Tensor, total: Tensor
) -> None:
    """Add to `count` and `total` what the next donors (P, m), nearest first and -1 for none, have of (P,) pixels."""
    # One plane of `seen` may stand for all channels.
    has = seen[donors, pixel.unsqueeze(1) % seen.shape[1]] & (donors >= 0)
    before = count[row, pixel]
    chosen = has & (before.unsqueeze(1) + has.cumsum(1, dtype=torch.int32) <= k)
    values = images[donors, pixel.unsqueeze(1)].double()
    total[row, pixel] += torch.where(chosen, values, 0).sum(1)
    count[row, pixel] = before + chosen.sum(1, dtype=torch.int32)


def _at_least_one(size: float) -> int:
    return max(int(size), 1)
