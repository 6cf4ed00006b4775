"""What is computed for an image and a hole: fills, deviation, samples, responses of filters, classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv import impute
from misconv.app.holes import grown_holes
from misconv.app.models import Models
from misconv.app.pictures import Picture
from misconv.density import UNetDMFA
from misconv.functional import expected_conv2d
from misconv.mfa import MFA
from misconv.predict import predictive

__all__ = ["FILTERS", "Analysis", "Classes", "Growth", "Responses", "analyse"]

SAMPLES = 3  # completions that are shown
COMPLETIONS = 32  # over which class probabilities are averaged
STEPS = 8  # in which a hole grows from nothing to the whole image
KERNEL = 3
FILTERS = {
    "top edge": [[-1.0, -2.0, -1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 1.0]],
    "left edge": [[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]],
    "bright spot": [[-1.0, -1.0, -1.0], [-1.0, 8.0, -1.0], [-1.0, -1.0, -1.0]],
}
_WEIGHTS = (8.0, 8.0, 16.0)  # by which they are divided, to give responses of a like size


@dataclass(frozen=True)
class Responses:
    """Of the fixed filters with ReLU: way -> (3, H − 2, W − 2), and the RMSE of each way where it can be known."""

    maps: dict[str, Tensor]
    errors: dict[str, float]


@dataclass(frozen=True)
class Growth:
    """Classes while the hole grows, step by step: share hidden, probabilities (N, 10), share of doubt (N,)."""

    hidden: list[float]
    probabilities: Tensor
    doubt: Tensor  # about the answer at each step, the part that the hole causes
    here: int  # the step that is the hole of the page


@dataclass(frozen=True)
class Classes:
    """What the classifier says: way to treat the hole -> probabilities (10,)."""

    ways: dict[str, Tensor]
    growth: Growth


@dataclass(frozen=True)
class Analysis:
    """Everything the page shows of an image and a hole, in units of 0 to 1."""

    picture: Picture
    observed: Tensor  # bool (C, H, W)
    fills: dict[str, Tensor]  # method -> (C, H, W)
    errors: dict[str, float]  # method -> RMSE of hidden pixels whose truth is known
    deviation: Tensor  # (C, H, W), 0 where pixels were seen
    claimed: float | None  # the error that the density expects at these pixels
    samples: Tensor  # (S, C, H, W)
    responses: Responses | None
    classes: Classes | None

    @property
    def hidden(self) -> int:
        """How many pixels are hidden in at least one band."""
        return int((~self.observed).any(0).sum())


@torch.no_grad()
def analyse(picture: Picture, hole: Tensor, models: Models, seed: int = 0) -> Analysis:
    """Hide pixels of an image, bool (H, W), and look at what the library makes of the rest."""
    observed = picture.known & ~hole
    x = picture.values.where(observed, 0)
    p = described(picture, x, observed, models)
    shape = x.shape
    fills = {
        "zeros": impute.zero(x[None], observed[None])[0],
        "nearest": impute.nearest(x[None], observed[None])[0],
        "push–pull": impute.push_pull(x[None], observed[None])[0],
        "mean": p.mean.reshape(shape),
    }
    deviation = p.variance.clamp_min(0).sqrt().reshape(shape)
    generator = torch.Generator(x.device).manual_seed(seed)
    samples = p.sample(SAMPLES, generator=generator).reshape(SAMPLES, *shape)
    judged = picture.known & ~observed  # hidden by the hole alone: the truth is there to compare with
    found = bool(judged.any())
    return Analysis(
        picture=picture,
        observed=observed,
        fills=fills,
        errors={name: _rms((fill - picture.values)[judged]) for name, fill in fills.items()} if found else {},
        deviation=deviation,
        claimed=_rms(deviation[judged]) if found else None,
        samples=samples,
        responses=_responses(picture, observed, fills, p) if min(picture.size) >= KERNEL else None,
        classes=_classes(picture, observed, hole, fills, p, models) if picture.is_digit else None,
    )


def density_for(picture: Picture, models: Models) -> UNetDMFA:
    """Digits and photographs have their own; of other images each band is an image by itself."""
    if picture.is_digit:
        return models.digits
    return models.photographs if len(picture.values) == 3 else models.band


def described(picture: Picture, x: Tensor, observed: Tensor, models: Models) -> MFA:
    """What the density says: one image, or one for every band."""
    density = density_for(picture, models)
    channels = density.channels
    p: MFA = density(x.view(-1, channels, *picture.size), observed.view(-1, channels, *picture.size))
    return p


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


# Responses of filters ------------------------------------------------------------------------------------------------


def filters(channels: int) -> Tensor:
    """The fixed filters on the brightness, (3, channels, 3, 3)."""
    scaled = [torch.tensor(f) / w for f, w in zip(FILTERS.values(), _WEIGHTS, strict=True)]
    return (torch.stack(scaled).float().unsqueeze(1) / channels).expand(-1, channels, -1, -1)


def _responses(picture: Picture, observed: Tensor, fills: dict[str, Tensor], p: MFA) -> Responses:
    """Of three bands the filters read the brightness, of any other number the first band."""
    channels = 3 if len(picture.values) == 3 else 1
    weight, first = filters(channels), slice(0, channels)
    truth = picture.values.where(picture.known, fills["mean"])  # the best there is where nobody knows
    plain = {"zeros": fills["zeros"], "mean": fills["mean"], "truth": truth}
    maps = {name: torch.relu(F.conv2d(image[None, first], weight))[0] for name, image in plain.items()}
    maps["MisConv"] = expected_conv2d(p[:1], weight, activation="relu")[0]
    touched = _any_in_window(~observed[first]) & ~_any_in_window(~picture.known[first])
    errors = {}
    if bool(touched.any()):
        errors = {
            name: _rms((maps[name] - maps["truth"])[:, touched]) for name in ("zeros", "mean", "MisConv")
        }  # of windows with a hidden pixel whose truth is known
    return Responses({name: maps[name] for name in ("zeros", "mean", "MisConv", "truth")}, errors)


def _any_in_window(where: Tensor) -> Tensor:
    """(C, H, W) -> (H − 2, W − 2)."""
    return F.max_pool2d(where.any(0)[None].float(), KERNEL, stride=1)[0] > 0


# Classes -------------------------------------------------------------------------------------------------------------


def _classes(
    picture: Picture, observed: Tensor, hole: Tensor, fills: dict[str, Tensor], p: MFA, models: Models
) -> Classes:
    images = {"zeros": fills["zeros"], "mean": fills["mean"], "truth": picture.values}
    inputs = {name: MFA.point(image[None]) for name, image in images.items()} | {"MisConv": p}
    ways = {name: models.classifier(inputs[name]).softmax(1)[0] for name in ("zeros", "mean", "MisConv", "truth")}
    return Classes(ways, _growth(picture, hole, models))


def _growth(picture: Picture, hole: Tensor, models: Models) -> Growth:
    holes = grown_holes(hole, STEPS)
    observed = ~holes.unsqueeze(1)  # (N, 1, H, W)
    p = models.digits(picture.values.expand(len(holes), -1, -1, -1).where(observed, 0), observed)
    probabilities = models.classifier(p).softmax(1)
    generator = torch.Generator(p.device).manual_seed(0)
    share = predictive(models.classifier, p, COMPLETIONS, generator=generator).share
    counts = holes.flatten(1).sum(1)
    return Growth(
        hidden=(counts / hole.numel()).tolist(),
        probabilities=probabilities,
        doubt=share.gather(1, probabilities.argmax(1, keepdim=True))[:, 0],
        here=int((counts == hole.sum()).nonzero()[0, 0]),
    )
