"""How good is a density? Hide some of what is seen, and compare what it says with what is there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv._assess import Reliability, Scores, batches, draw, hide_more
from misconv._checks import check_fraction, check_seed, check_size, describe
from misconv._modes import evaluating
from misconv.mfa import MFA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Assessment", "Reliability", "assess"]

_TOLERANCE = 0.1  # coverage off by more than this is not to be believed
_LEVEL = 0.02  # two errors that differ by no more than this share are level


@torch.no_grad()
def assess(
    density: Callable[[Tensor, Tensor], MFA],
    images: Any,
    observed: Tensor | None = None,
    *,
    shape: Callable[..., Tensor] | None = None,
    fraction: float = 1 / 4,
    batch_size: int = 64,
    limit: int | None = None,
    seed: int = 0,
) -> Assessment:
    """Measure how well a density knows missing pixels, from incomplete images alone.

    Some of what is seen is hidden, and what the density says of it is compared with what is there. Pixels that were
    missing from the start are never read. Take images that the density was not trained on. Modules are in evaluation
    mode meanwhile, and come back in the mode that they had; images go to the device and dtype of the density. An image
    of which nothing is hidden, or nothing would stay seen, is left out.

    Args:
        density: any module or function (x, observed) -> `MFA`.
        images: (N, C, H, W), with `observed` or with NaN for missing pixels; integers keep their values. Or a Dataset,
            a DataLoader or another iterable that gives single images or batches: x with NaN, (x, observed) or
            ``{"image": x, "observed": observed}``; labels are ignored.
        observed: bool (N, 1, H, W) or (N, C, H, W); None where NaN says it, or `images` is no tensor.
        shape: what is hidden: a generator of `misconv.missing`. By default regions like those that are missing
            (`misconv.missing.like` of the first 256 images or a few more), and squares where nothing is.
        fraction: of the image's area, for generators that follow it.
        batch_size: images that the density gets at once.
        limit: take at most this many images, the first ones.
        seed: of the regions.

    Example:
        >>> import misconv
        >>> generator = torch.manual_seed(0)
        >>> stripes = torch.tensor([1.0, -1.0]).repeat(4)  # of every image one number tells all pixels, nearly
        >>> images = torch.randn(200, 1, 1, 1) * stripes + 0.1 * torch.randn(200, 1, 8, 8)
        >>> seen = misconv.missing.square(200, 8, 8)
        >>> density = misconv.SMFA(components=1, rank=1).fit(images[:100], seen[:100])
        >>> report = assess(density, images[100:], seen[100:])
        >>> print(report.verdict())
        The mean beats push–pull fill (RMSE 0.1... against 1...), and the deviation of 0... can be believed...
    """
    if not callable(density):
        raise TypeError(f"density must be a module or function (x, observed) -> MFA, got {describe(density)}")
    check_fraction(fraction)
    seed, batch_size = check_seed("seed", seed), check_size("batch_size", batch_size)
    limit = None if limit is None else check_size("limit", limit)
    scores, place = Scores(), _placed_like(density)
    stream = batches(images, observed, batch_size, limit)
    with evaluating(density):
        for x, seen, less in hide_more(stream, shape, fraction, seed):
            x, seen, less = place(x), seen.to(place(x).device), less.to(place(x).device)
            scores.add(_ask(density, x.where(less, 0), less), x, seen, less)
    if scores.pixels == 0:
        raise ValueError("images must have seen pixels that can be hidden while others stay, got none")
    return Assessment(
        images=scores.images,
        pixels=scores.pixels,
        **scores.means(),
        calibration=scores.calibration(),
        by_share=scores.share_table(),
        by_distance=scores.distance_table(),
    )


@dataclass(frozen=True)
class Assessment:
    """What `assess` found, over all pixels that it hid; RMSE, deviation and CRPS are in the units of the images.

    `print` shows it as a table; `verdict`, `plot`, `to_dict` and `to_json` tell it otherwise.
    """

    images: int  # of which something was hidden
    pixels: int  # hidden, each channel counts
    rmse: float  # of the mean
    nearest_rmse: float  # of `misconv.impute.nearest`
    push_pull_rmse: float  # of `misconv.impute.push_pull`
    deviation: float  # the root of the mean variance that the density claims
    coverage_50: float  # the share of hidden pixels inside their central 50 % interval
    coverage_90: float
    nll: float  # −log density of all hidden pixels of an image together, per pixel
    marginal_nll: float  # −log density of each by itself
    crps: float  # E|X − y| − ½ E|X − X'|, the less the better; of a single value it is the absolute error
    calibration: tuple[tuple[float, float], ...]  # (nominal level, coverage), from 5 % to 95 %
    by_share: tuple[Reliability, ...]  # by the share of the image that was not shown
    by_distance: tuple[Reliability, ...]  # by the distance to the nearest pixel of the channel that was shown

    @property
    def believable(self) -> bool:
        """Whether the coverage of both intervals is within ten points of what they claim."""
        return max(abs(self.coverage_50 - 0.5), abs(self.coverage_90 - 0.9)) <= _TOLERANCE

    def verdict(self) -> str:
        """One sentence: whether the mean beats both simple fills, and whether the deviation can be believed."""
        best, fill = min((self.nearest_rmse, "nearest-pixel fill"), (self.push_pull_rmse, "push–pull fill"))
        good = self.rmse <= (1 + _LEVEL) * best
        words = "beats" if self.rmse < (1 - _LEVEL) * best else "is level with" if good else "does not beat"
        first = f"The mean {words} {fill}"
        figures = f"(RMSE {self.rmse:.3g} against {best:.3g})"
        link = "and" if good == self.believable else "but"
        answer = "can be believed" if self.believable else f"cannot be believed, it is too {self._fault()}"
        half, most = (f"{100 * share:.0f} %" for share in (self.coverage_50, self.coverage_90))
        return (
            f"{first} {figures}, {link} the deviation of {self.deviation:.3g} {answer}: {half} of hidden pixels lie "
            f"inside the 50 % interval and {most} inside the 90 % interval."
        )

    def _fault(self) -> str:
        """In which way the interval is wrong that is further from what it claims."""
        off = self.coverage_50 - 0.5, self.coverage_90 - 0.9
        if off[0] > 0 and (off[1] < 0 or self.deviation < self.rmse):  # most errors are small, and some are large
            return "wide for most pixels and too narrow for some"
        return "wide" if max(off, key=abs) > 0 else "narrow"

    def _counts(self) -> str:
        return f"{self.pixels:,} hidden pixels of {self.images:,} image{'s' if self.images > 1 else ''}"

    def __str__(self) -> str:
        figures = [
            ("RMSE of the mean", f"{self.rmse:.4g}"),
            ("RMSE of nearest-pixel fill", f"{self.nearest_rmse:.4g}"),
            ("RMSE of push–pull fill", f"{self.push_pull_rmse:.4g}"),
            ("deviation claimed", f"{self.deviation:.4g}"),
            ("claimed / real", f"{self.deviation / self.rmse:.2f}" if self.rmse else "inf"),
            ("inside 50 % / 90 %", f"{100 * self.coverage_50:.0f} / {100 * self.coverage_90:.0f} %"),
            ("NLL per pixel, joint / marginal", f"{self.nll:.3f} / {self.marginal_nll:.3f}"),
            ("CRPS", f"{self.crps:.4g}"),
        ]
        lines = [self._counts(), *(f"  {name:<33}{value}" for name, value in figures)]
        for title, rows in (("share not shown", self.by_share), ("nearest shown", self.by_distance)):
            lines += ["", *_table(title, rows)]
        return "\n".join([*lines, "", self.verdict()])

    def to_dict(self) -> dict[str, Any]:
        """All figures as numbers, lists and dictionaries."""
        tables = ("calibration", "by_share", "by_distance")
        found = asdict(self)
        return found | {name: [list(row) if name == "calibration" else row for row in found[name]] for name in tables}

    def to_json(self) -> str:
        """`to_dict` as JSON; a number that is not finite becomes null."""
        return json.dumps(_finite(self.to_dict()), indent=2, ensure_ascii=False, allow_nan=False)

    def plot(self) -> Figure:
        """A matplotlib figure: coverage by nominal level, and RMSE beside the deviation by distance.

        ``report.plot().savefig("density.png")`` writes it. Needs ``pip install 'misconv[figures]'``.
        """
        return draw(self.calibration, self.by_distance, self._counts())


# Inside ------------------------------------------------------------------------------------------------------------


def _placed_like(density: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """Takes images to the device and dtype of a density; those of a function without tensors stay as they are."""
    tensors = (*density.parameters(), *density.buffers()) if isinstance(density, nn.Module) else ()
    first = next((t for t in tensors if t.is_floating_point()), None)
    return lambda x: x if first is None else x.to(first.device, first.dtype)


def _ask(density: Callable[[Tensor, Tensor], MFA], x: Tensor, observed: Tensor) -> MFA:
    p = density(x, observed)
    if not isinstance(p, MFA) or p.shape != x.shape or p.device != x.device:
        raise TypeError(
            f"density must return a misconv.MFA of images {tuple(x.shape)} on {x.device}, got {describe(p)}"
        )
    return p


def _table(title: str, rows: tuple[Reliability, ...]) -> list[str]:
    lines = [f"{title:<16}{'pixels':>10}{'RMSE':>11}{'nearest':>11}{'deviation':>11}{'50 %':>7}{'90 %':>7}"]
    for row in rows:
        numbers = "".join(f"{value:>11.4g}" for value in (row.rmse, row.nearest_rmse, row.deviation))
        inside = "".join(f"{100 * value:>7.0f}" for value in (row.coverage_50, row.coverage_90))
        lines.append(f"{row.label:<16}{row.pixels:>10,}{numbers}{inside}")
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
