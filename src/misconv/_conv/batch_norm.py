"""Batch normalization of random responses: fixed statistics, those of a batch, those of a batch over processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._backend import is_eager
from misconv._conv.checks import check_batch_norm

__all__ = [
    "Affine",
    "BatchNorm",
    "Statistics",
    "batch_norm_affine",
    "batch_norm_moments",
    "first_response",
    "fixed_batch_norm",
    "normalized",
    "sync_group",
]

_OVER = (0, 1, 3, 4)  # all dimensions of (B, K, O, H', W') but the channels


class BatchNorm(NamedTuple):
    """A normalization by the statistics of a batch: its vectors (O,), of which any may be None, and its numbers."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None  # both, or neither
    running_var: Tensor | None
    batches_tracked: Tensor | None  # their number, which goes up by one
    momentum: float | None  # None for the mean over all batches that were tracked
    eps: float

    @classmethod
    def of(cls, norm: Any) -> BatchNorm:
        """What a module of torch normalizes with in the mode it is in."""
        tracks = norm.training and norm.track_running_stats
        both = tracks and norm.running_mean is not None and norm.running_var is not None
        mean, variance = (norm.running_mean, norm.running_var) if both else (None, None)
        batches = norm.num_batches_tracked if tracks else None
        return cls(norm.weight, norm.bias, mean, variance, batches, norm.momentum, norm.eps)

    def options(self) -> dict[str, Any]:
        """The arguments of `torch.nn.functional.batch_norm`, for one more batch, which is counted."""
        momentum = self.momentum or 0.0
        if self.batches_tracked is not None:
            self.batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.batches_tracked)
        vectors = {"running_mean": self.running_mean, "running_var": self.running_var, "weight": self.weight}
        return {**vectors, "bias": self.bias, "momentum": momentum, "eps": self.eps}


class Statistics(NamedTuple):
    """What a normalization in evaluation is: vectors (O,), of which weight and bias may be None, and a number."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Affine(NamedTuple):
    """A normalization whose statistics stand still: one affine map for each channel."""

    apply: Callable[[Tensor], Tensor]  # to responses (N, O, H', W'), with the rounding of the network itself
    coefficients: Callable[[], tuple[Tensor, Tensor]]  # slope and offset, (O,) each
    statistics: Statistics | None = None  # None where they are not fixed numbers but those of a batch


def fixed_batch_norm(
    running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Affine:
    """`torch.nn.functional.batch_norm` in evaluation."""

    def coefficients() -> tuple[Tensor, Tensor]:
        slope = torch.rsqrt(running_var + eps) * (1 if weight is None else weight)
        return slope, (0 if bias is None else bias) - running_mean * slope

    return Affine(
        lambda x: F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps),
        coefficients,
        Statistics(running_mean, running_var, weight, bias, eps),
    )


def normalized(norm: Affine, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The moments (B, K, O, H', W') behind a fixed normalization."""
    slope, _ = norm.coefficients()
    mean = norm.apply(mean.flatten(0, -4)).view(mean.shape)  # of (B·K, O, H', W')
    return mean, variance * slope.to(variance.dtype).square().view(-1, 1, 1)


def batch_norm_moments(
    mean: Tensor,
    variance: Tensor,
    weights: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Batch normalization of random responses, as moments: the arguments of `torch.nn.functional.batch_norm`.

    In evaluation an affine map of mean and variance. In training the statistics of the batch are those of everything
    the images may be: the mean of the means, and by the law of total variance the mean of the variances plus the
    variance of the means, all weighted over components. Running statistics are updated in place.

    Args:
        mean, variance: (B, K, O, H', W').
        weights: (B, K), the probabilities of the components.
        process_group: of `torch.distributed`; the batch is then the images of all its processes, which may hold
            different numbers of them, as in `torch.nn.SyncBatchNorm`. None means this process alone.

    Example:
        >>> mean, variance = torch.randn(4, 2, 8, 5, 5), torch.rand(4, 2, 8, 5, 5)
        >>> m, v = batch_norm_moments(mean, variance, torch.full((4, 2), 0.5), None, None, training=True)
        >>> total = (0.5 * (v + m.square())).sum(1).mean((0, 2, 3))  # E[y²] of each of the 8 channels
        >>> torch.allclose(total, torch.ones(8), atol=1e-3)
        True
    """
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    check_batch_norm(mean, variance, weights, vectors, training, momentum, eps)
    momentum, eps = float(momentum), float(eps)
    if not training and running_mean is not None and running_var is not None:
        return normalized(fixed_batch_norm(running_mean, running_var, weight, bias, eps), mean, variance)
    batch = _statistics(mean, variance, weights)
    center, total = _tracked(
        batch.number, batch.center, batch.total, running_mean, running_var, momentum, process_group
    )
    scale = (torch.rsqrt(total + eps) * (1 if weight is None else weight)).view(-1, 1, 1)
    offset = center.new_zeros(()) if bias is None else bias.view(-1, 1, 1)
    if process_group is not None:
        normed = (mean - center.view(-1, 1, 1)) * scale + offset
    else:
        # As a difference from what torch itself makes of the first component: where all components agree and nothing
        # varies, the difference is exactly zero and the result has torch's bits.
        ratio = torch.sqrt((batch.between + eps) / (total + eps)).view(-1, 1, 1)
        plain = F.batch_norm(first_response(mean), None, None, weight, bias, True, 0.0, eps).unsqueeze(1)
        normed = plain + (plain - offset) * (ratio - 1) + batch.apart * scale
    return normed.to(mean.dtype), variance * scale.square()


def batch_norm_affine(
    number: int,
    center: Tensor,
    total: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    process_group: Any = None,
) -> Affine:
    """Batch normalization in training where the statistics of the batch are known: an affine map for each channel.

    Args:
        number: of responses of a channel.
        center, total: (O,), their mean and variance, as in `batch_norm_moments`. So are the other arguments.
    """
    center, total = _tracked(number, center, total, running_mean, running_var, momentum, process_group)
    slope = torch.rsqrt(total + eps) * (1 if weight is None else weight)
    offset = (0 if bias is None else bias) - center * slope

    def apply(response: Tensor) -> Tensor:
        return (response * slope.view(-1, 1, 1) + offset.view(-1, 1, 1)).to(response.dtype)

    return Affine(apply, lambda: (slope, offset))


def _tracked(
    number: int,
    center: Tensor,
    total: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    process_group: Any,
) -> tuple[Tensor, Tensor]:
    """Mean and variance of a batch, over all processes if there are several; running statistics follow them."""
    count = float(number)
    if process_group is not None:
        count, center, total = _over_processes(process_group, number, center, total)
    if count <= 1:
        raise ValueError(
            "training needs more than one value per channel to normalize over, got one image with a response of 1×1"
        )
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(center.to(running_mean.dtype), momentum)
            running_var.lerp_((total * (count / (count - 1))).to(running_var.dtype), momentum)
    return center, total


def first_response(mean: Tensor) -> Tensor:
    """The first component (B, O, H', W') of means (B, K, O, H', W'), laid out as a plain convolution would have it.

    In another layout torch rounds some functions differently.
    """
    first = mean.select(-4, 0)
    if mean.shape[-4] == 1:
        return first
    last = first.stride(-3) == 1 and first.stride(-1) != 1
    return first.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


class _Batch(NamedTuple):
    """The statistics of a batch, (O,) each, and how far the components are from the first."""

    number: int  # of values per channel
    center: Tensor
    total: Tensor  # variance, over places and over everything the images may be
    between: Tensor  # variance of the means of the first component over places
    apart: Tensor  # (B, K, O, H', W'), so that mean − center = (first − mean of first) + apart


def _statistics(mean: Tensor, variance: Tensor, weights: Tensor) -> _Batch:
    wide = mean.to(variance.dtype)
    if wide.dtype == torch.float32 and wide.device.type == "cpu" and is_eager(wide) and wide.numel():
        largest = torch.maximum(wide.detach().amax(), -wide.detach().amin())
        wide = wide.double() if largest > 1e17 else wide  # squares would leave the range of float32
    count = mean.shape[0] * mean.shape[-2] * mean.shape[-1]
    held = max(count, 1)  # one of several processes may be without images
    share = weights.to(wide.dtype)[..., None, None, None]  # (B, K, 1, 1, 1)
    first = wide.narrow(1, 0, 1)
    start = first.sum(_OVER) / held
    deviation = first - start.view(-1, 1, 1)
    shift = (share * (wide - first)).sum(_OVER) / held
    apart = wide - first - shift.view(-1, 1, 1)
    between = deviation.square().sum(_OVER) / held
    total = between + (share * (variance + apart * (apart + 2 * deviation))).sum(_OVER) / held
    return _Batch(count, start + shift, total.clamp_min(0), between, apart)


# Over processes ----------------------------------------------------------------------------------------------------


def sync_group(norm: nn.Module) -> Any:
    """The processes over which a normalization takes its statistics in the mode it is in; None for this one alone.

    As `torch.nn.SyncBatchNorm` decides it: in training, where a process group exists and holds more than one process.
    """
    if not isinstance(norm, nn.SyncBatchNorm) or not norm.training:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _over_processes(group: Any, held: int, center: Tensor, total: Tensor) -> tuple[float, Tensor, Tensor]:
    """Number of values, mean and variance of the union of all batches, from those of each."""
    wide, channels = torch.float64, len(center)
    own = torch.cat([center.to(wide), total.to(wide), center.new_full((1,), held, dtype=wide)])
    rows = own.new_zeros(dist.get_world_size(group), 2 * channels + 1)
    rows = rows.index_copy(0, torch.tensor([dist.get_rank(group)], device=own.device), own.unsqueeze(0))
    centers, totals, counts = _Sum.apply(group, rows).split([channels, channels, 1], 1)  # (processes, O), …, 1
    number = float(counts.detach().sum())
    if number == 0:
        return number, center, total
    share = counts.detach() / number
    middle = (share * centers).sum(0)
    spread = (share * (totals + (centers - middle).square())).sum(0)
    return number, middle.to(center.dtype), spread.to(total.dtype)


class _Sum(torch.autograd.Function):
    """The sum over all processes of a group; what each of them learns from it comes back to all."""

    @staticmethod
    def forward(ctx: Any, group: Any, values: Tensor) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _Sum.apply(ctx.group, gradient)
