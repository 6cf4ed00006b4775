"""How well an MFA predicts pixels that were hidden: sums over some images, from which figures are made."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from misconv._math import coverage_level, nearest_fill
from misconv._train.session import EpochRecord
from misconv.mfa import MFA

__all__ = [
    "OBJECTIVES",
    "doubts",
    "figures",
    "fit_sums",
    "nearest_error",
    "ratio_and_error",
    "ratio_sums",
    "validation_sums",
]

# What a density learns from: the likelihood of all that was hidden of an image, the paper's; that of each pixel by
# itself, without which factors are far too long; mean and variance, which likelihoods of a mixture leave to chance, and
# the squared error of the mean, for likelihoods care least about pixels that are far off (docs/maths.md). The first is
# the default.
OBJECTIVES = ("joint+marginal+moments", "joint+marginal", "joint", "marginal")

# What the squared error counts for beside the likelihoods. With less the mean learns more slowly, with more the
# likelihoods do.
_ERROR_WEIGHT = 4.0
_MOST_OFF = 0.1  # how far coverages may be off before a user is told
_FEW_STEPS = 300  # with fewer than these a training has hardly begun


def fit_sums(p: MFA, x: Tensor, target: Tensor, objective: str) -> Tensor:
    """Sums over some images of what is minimised, −log p and squared error of `target`; and how many pixels it has."""
    errors = (p.mean - x).where(target, 0)
    # In float64: a sum over many pixels.
    if "marginal" in objective:
        nll, marginal = (-score.sum(dtype=torch.float64) for score in p.log_probs(x, target))
        total = nll + marginal if "joint" in objective else marginal
    else:
        total = nll = -p.log_prob(x, target).sum(dtype=torch.float64)
    if "moments" in objective:
        total = total + _moments_sum(p, x, errors, target)
    return torch.stack([total, nll, errors.square().sum().double(), target.sum().double()])


def _moments_sum(p: MFA, x: Tensor, errors: Tensor, target: Tensor) -> Tensor:
    """What the mean and the variance of pixels are scored by, whatever the mixture that has them."""
    # As in a likelihood no value is surer than its own rounding: a user's density may claim no variance at all.
    kind = torch.finfo(errors.dtype)
    least = (kind.eps * x.where(target, 0)).square().clamp_min(kind.tiny)
    variance = torch.maximum(p.variance, least)
    claimed = variance.detach().where(target, 0).sum((2, 3), keepdim=True)
    count = target.sum((2, 3), keepdim=True)  # one for each channel of an image, (B, C, 1, 1)
    unit = (claimed / count.clamp_min(1)).where(count > 0, 1).sqrt()
    total = _ERROR_WEIGHT * (errors / unit).square().sum(dtype=torch.float64)
    if p.means.shape[1] > 1:  # of one component it is the marginal likelihood
        deviation = variance.where(target, 1).sqrt()
        total = total + (deviation.log() + (errors / deviation).square() / 2).sum(dtype=torch.float64)
    return total


def validation_sums(p: MFA, x: Tensor, target: Tensor, objective: str) -> Tensor:
    """Sums over some images, for `ratio_and_error` and `figures`.

    The four `ratio_sums` of the likelihoods that are minimised; −log p, jointly and pixel by pixel; squared error;
    pixels inside 50 % and 90 % intervals; and how many pixels there are.
    """
    joint, marginal = p.log_probs(x, target)  # (B,)
    parts = {"joint": -joint.double(), "marginal": -marginal.double()}
    minimised = torch.stack([value for name, value in parts.items() if name in objective]).sum(0)
    error = (p.mean - x).where(target, 0).square().sum(dtype=torch.float64)
    level = _level(p, x)
    inside = [((level <= share) & target).sum().double() for share in (0.5, 0.9)]
    sums = torch.stack([*(value.sum() for value in parts.values()), error, *inside, target.sum().double()])
    return torch.cat([ratio_sums(minimised, target.sum((1, 2, 3))), sums])


def ratio_sums(totals: Tensor, counts: Tensor) -> Tensor:
    """What `ratio_and_error` needs of numbers (B,) and how many pixels each is a sum of (B,)."""
    counts = counts.double()
    return torch.stack([totals.sum(), totals.square().sum(), (totals * counts).sum(), counts.square().sum()])


def ratio_and_error(sums: list[float], pixels: float) -> tuple[float, float]:
    """The mean over pixels, and its standard error, where images are independent and their pixels are not."""
    total, squares, products, of_counts = sums
    mean = total / max(pixels, 1)
    spread = squares - 2 * mean * products + mean**2 * of_counts
    return mean, math.sqrt(max(spread, 0.0)) / max(pixels, 1)


def _level(p: MFA, x: Tensor) -> Tensor:
    """The share of the smallest central interval that holds each pixel, (B, C, H, W)."""
    means, factors, noise, value = (t.float() for t in (p.means, p.factors, p.noise, x))
    weights = p.weights.float()[:, :, None, None, None]
    return coverage_level(weights, means, noise + factors.square().sum(2), value)


def nearest_error(x: Tensor, shown: Tensor, target: Tensor) -> Tensor:
    """The sum of squared errors of `target` where every pixel is filled with the nearest one that is shown.

    Where nothing of a channel is shown, it is filled with the mean of that channel in the other images.
    """
    shown = shown.expand(x.shape)
    filled, distance = nearest_fill(x, shown)
    mean = x.where(shown, 0).sum((0, 2, 3)) / shown.sum((0, 2, 3)).clamp_min(1)  # (C,)
    filled = torch.where(distance.isfinite(), filled, mean.view(-1, 1, 1))
    return (filled - x).where(target, 0).square().sum(dtype=torch.float64)


def figures(sums: list[float], nearest: float) -> EpochRecord:
    """What is recorded of validation: from the sums of `validation_sums`, and that of `nearest_error`."""
    joint, marginal, error, half, most, pixels = sums
    pixels = max(pixels, 1)
    found = {
        "nll": joint / pixels,
        "marginal_nll": marginal / pixels,
        "rmse": math.sqrt(error / pixels),
        "nearest_rmse": math.sqrt(nearest / pixels),
        "coverage_50": half / pixels,
        "coverage_90": most / pixels,
    }
    return {f"validation_{name}": value for name, value in found.items()}


def doubts(record: EpochRecord, steps: float = math.inf) -> str | None:
    """Why the density that a record is of should not be relied on, in one sentence; None where there is no reason.

    Args:
        steps: of the training, where it was given in steps or minutes.
    """
    rmse, nearest, half, most = (
        record[f"validation_{name}"] for name in ("rmse", "nearest_rmse", "coverage_50", "coverage_90")
    )
    off = half - 0.5, most - 0.9
    if rmse <= nearest and max(map(abs, off)) <= _MOST_OFF:
        return None
    advice = "more steps, more images or another network may help"
    if steps < _FEW_STEPS:
        advice = f"it has learned for {steps:.0f} step{'s' * (steps > 1)}, and more of them may help"
    elif rmse <= nearest and off[0] > _MOST_OFF >= abs(off[1]):
        advice = "most of its errors are small and some are large, which more components fit better"
    return (
        f"the density is not reliable yet: on validation images its mean has an RMSE of {rmse:.3g}, nearest-pixel fill "
        f"one of {nearest:.3g}, and {half:.0%} and {most:.0%} of hidden pixels lie inside its 50% and 90% intervals; "
        f"{advice}"
    )
