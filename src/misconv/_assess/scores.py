"""Scores of single pixels under Gaussian mixtures, summed by how much is missing and how far what was seen is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from misconv._math import coverage_level, nearest_fill, normal_pdf, push_pull, wide_type
from misconv.mfa import MFA

__all__ = ["LEVELS", "Reliability", "Scores", "crps"]

# Nominal shares of central intervals.
LEVELS = tuple(level / 100 for level in range(5, 100, 5))
# Upper ends of the rows of both tables; the last row of distances is for channels of which nothing was seen.
_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
_DISTANCES = (1.0, 2.0, 4.0, 8.0, 16.0, math.inf)
# What is summed over pixels, and then a column for each level.
_PIXELS, _ERROR, _NEAREST, _PUSH_PULL, _VARIANCE, _CRPS = range(6)
_WORK = 2**20  # numbers of a chunk of pixels, so that K² of them do not fill the memory


@dataclass(frozen=True)
class Reliability:
    """A row of a table: the hidden pixels whose quantity lies above `low` and up to `high`, and their scores.

    `high` is None where there is no end, and so is `low` in a channel of which nothing was shown: it is infinitely
    far away.
    """

    label: str
    low: float | None
    high: float | None
    pixels: int
    rmse: float
    nearest_rmse: float
    deviation: float
    coverage_50: float
    coverage_90: float


def crps(weights: Tensor, means: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """The continuous ranked probability score ``E|X − y| − ½ E|X − X'|`` (P,) of Gaussian mixtures, in closed form.

    Args:
        weights, means, variances: (P, K). y: (P,).
    """
    to_truth = (weights * _expected_distance(means - y.unsqueeze(1), variances)).sum(1)
    apart = _expected_distance(means.unsqueeze(2) - means.unsqueeze(1), variances.unsqueeze(2) + variances.unsqueeze(1))
    pairs = weights.unsqueeze(2) * weights.unsqueeze(1)  # (P, K, K)
    return to_truth - 0.5 * (pairs * apart).sum((1, 2))


def _expected_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """E|Z| of normal Z: ``2σφ(μ/σ) + μ(2Φ(μ/σ) − 1)``, and |μ| where σ is 0."""
    deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    z = mean / deviation
    return 2 * deviation * normal_pdf(z) + mean * torch.erf(z * math.sqrt(0.5))


class Scores:
    """Sums over hidden pixels, batch by batch."""

    def __init__(self) -> None:
        columns = 6 + len(LEVELS)
        self.by_share = torch.zeros(len(_SHARES), columns, dtype=torch.float64, device="cpu")
        self.by_distance = torch.zeros(len(_DISTANCES) + 1, columns, dtype=torch.float64, device="cpu")
        self.nll = self.marginal_nll = 0.0
        self.images = 0

    def add(self, p: MFA, x: Tensor, observed: Tensor, less: Tensor) -> None:
        """Score what `less` hides of a batch x (B, C, H, W), of which p is the density given `less`."""
        hidden = (observed & ~less).expand(x.shape)
        p = p.to(torch.promote_types(p.dtype, torch.float32))
        truth = x.to(p.dtype)
        joint, marginal = p.log_probs(truth, hidden)
        self.nll -= float(joint.sum(dtype=torch.float64))
        self.marginal_nll -= float(marginal.sum(dtype=torch.float64))
        self.images += int(hidden.flatten(1).any(1).sum())

        wide = wide_type(x)
        means, factors, noise = p.pinned()
        variances = noise + factors.square().sum(2)  # (B, K, C, H, W)
        shown = x.to(torch.promote_types(x.dtype, torch.float32)).where(less, 0)
        nearest, squared = nearest_fill(shown, less)
        fills = nearest, push_pull(shown, less.expand(x.shape))
        share = 1 - less.expand(x.shape).flatten(1).to(wide).mean(1)  # (B,)
        places = hidden.nonzero(as_tuple=True)  # (P,) each
        size = max(_WORK // means.shape[1] ** 2, 1)
        for b, c, i, j in zip(*(place.split(size) for place in places), strict=True):
            mixture = p.weights[b], means[b, :, c, i, j], variances[b, :, c, i, j]  # (P, K) each
            weights, mean, variance = (t.to(wide) for t in mixture)
            columns = _columns(weights, mean, variance, *(t[b, c, i, j].to(wide) for t in (x, *fills)))
            _add(self.by_share, _bins(share[b], _SHARES), columns)
            distance = squared.expand(x.shape)[b, c, i, j].to(wide).sqrt()
            _add(self.by_distance, _bins(distance, _DISTANCES) + distance.isinf(), columns)

    @property
    def pixels(self) -> int:
        """How many hidden pixels there were."""
        return int(self.by_share[:, _PIXELS].sum())

    def means(self) -> dict[str, float]:
        """Figures over all hidden pixels."""
        total = self.by_distance.sum(0)
        push_pull_rmse = math.sqrt(float(total[_PUSH_PULL]) / float(total[_PIXELS]))
        likelihoods = {"nll": self.nll / self.pixels, "marginal_nll": self.marginal_nll / self.pixels}
        figures = _figures(total) | {"crps": float(total[_CRPS] / total[_PIXELS]), "push_pull_rmse": push_pull_rmse}
        return figures | likelihoods

    def calibration(self) -> tuple[tuple[float, float], ...]:
        """For each level the share of hidden pixels inside the central interval of that level."""
        total = self.by_distance.sum(0)
        return tuple(zip(LEVELS, (total[6:] / total[_PIXELS]).tolist(), strict=True))

    def share_table(self) -> tuple[Reliability, ...]:
        """Rows by the share of the image that the density was not shown."""
        labels = _labels(_SHARES, lambda low, high: f"{100 * low:.0f}–{100 * high:.0f} %")
        return _table(self.by_share, labels, _SHARES)

    def distance_table(self) -> tuple[Reliability, ...]:
        """Rows by the distance to the nearest pixel of the channel that the density was shown."""
        labels = _labels(_DISTANCES, _distance_label)
        return _table(self.by_distance, [*labels, "unseen channel"], (*_DISTANCES, math.inf))


def _columns(weights: Tensor, means: Tensor, variances: Tensor, y: Tensor, near: Tensor, smooth: Tensor) -> Tensor:
    """What is summed, (P, 6 + levels)."""
    mean = (weights * means).sum(1)
    variance = (weights * (variances + (means - mean.unsqueeze(1)).square())).sum(1)
    errors = ((guess - y).square() for guess in (mean, near, smooth))
    level = coverage_level(weights, means, variances, y)
    inside = level.unsqueeze(1) <= torch.tensor(LEVELS, dtype=y.dtype, device=y.device)
    single = [torch.ones_like(y), *errors, variance, crps(weights, means, variances, y)]
    return torch.cat([torch.stack(single, 1), inside.to(y.dtype)], 1)


def _bins(values: Tensor, ends: tuple[float, ...]) -> Tensor:
    # A share of 1/4 that was computed may be a little more than 1/4.
    return torch.bucketize(values - 1e-6, torch.tensor(ends, dtype=values.dtype, device=values.device))


def _add(sums: Tensor, rows: Tensor, columns: Tensor) -> None:
    # A product, which a GPU computes in the same order every time; `index_add` is not.
    member = rows == torch.arange(len(sums), device=rows.device).unsqueeze(1)  # (rows, P)
    sums += (member.to(columns.dtype) @ columns).to(sums)


def _figures(total: Tensor) -> dict[str, float]:
    """Figures of one row of sums."""
    mean = (total / total[_PIXELS]).tolist()
    names = {"rmse": _ERROR, "nearest_rmse": _NEAREST, "deviation": _VARIANCE}
    coverage = {f"coverage_{level}": mean[6 + LEVELS.index(level / 100)] for level in (50, 90)}
    return {name: math.sqrt(mean[column]) for name, column in names.items()} | coverage


def _labels(ends: tuple[float, ...], label: Callable[[float, float], str]) -> list[str]:
    return [label(low, high) for low, high in zip((0.0, *ends[:-1]), ends, strict=True)]


def _distance_label(low: float, high: float) -> str:
    return f"above {low:.0f} px" if math.isinf(high) else f"{low:.0f}–{high:.0f} px" if low else f"up to {high:.0f} px"


def _table(sums: Tensor, labels: list[str], ends: tuple[float, ...]) -> tuple[Reliability, ...]:
    rows = []
    for label, low, high, total in zip(labels, (0.0, *ends[:-1]), ends, sums, strict=True):
        if total[_PIXELS] > 0:
            least, most = (None if math.isinf(end) else end for end in (low, high))
            rows.append(Reliability(label, least, most, int(total[_PIXELS]), **_figures(total)))
    return tuple(rows)
