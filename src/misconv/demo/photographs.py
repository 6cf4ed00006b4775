"""The first part of the demo: photographs with holes, what a density says of them, and what filters make of it.

Crops of the left halves of two photographs teach the density, crops of the right halves are the test. A part of every
crop is missing for good; the truth behind it serves the errors and the pictures alone.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv import data, impute
from misconv._train import one_device
from misconv.assess import Assessment, assess
from misconv.density import UNetDMFA
from misconv.functional import expected_conv2d
from misconv.mfa import MFA
from misconv.missing import free_form, observe
from misconv.training import fit_density

__all__ = ["PhotographSettings", "Photographs", "Way", "compare", "learn_and_compare"]

Say = Callable[[str], None]

KERNEL = 3  # the side of all filters
NEARBY = 11  # the side of the window in which the contrast of seen pixels is measured
BANKS = {
    "edge": "8 edge filters (Sobel: 4 directions, both signs) on the brightness",
    "random": "32 random filters over the three colours, each with sum zero",
}


@dataclass(frozen=True)
class PhotographSettings:
    """Of the part on photographs."""

    side: int = 32  # of a crop, in pixels
    train: int = 2000  # crops, from random places in the left halves
    stride: int = 20  # of the grid of test crops in the right halves
    fraction: float = 1 / 4  # of each crop is missing, under strokes of a brush
    components: int = 3
    rank: int = 4
    noise_floor: float = 1e-4
    steps: int = 400
    batch_size: int = 32
    shown: int = 5  # crops in the pictures


@dataclass
class Way:
    """One way to treat a hole: errors of pixels, and of filter responses in windows that touch a hidden pixel."""

    name: str
    what: str
    rmse: float  # of hidden pixels; MisConv fills nothing in, so it has that of the mean
    error: dict[str, float] = field(default_factory=dict)  # bank -> RMSE, relative to the root mean square of the truth
    bias: dict[str, float] = field(default_factory=dict)  # bank -> mean response relative to the true one, minus 1
    closer: dict[str, float] = field(default_factory=dict)  # bank -> share of crops in which MisConv has the less error


@dataclass
class Fifth:
    """A fifth of the hidden pixels, by the deviation that the density claims."""

    claimed: float  # the root of the mean variance
    rmse: float
    share: float  # of the whole squared error


@dataclass
class Photographs:
    """Everything that the report shows of the photographs."""

    tested: int  # crops
    hidden: int  # hidden pixels in them, each channel counts
    touched: float  # share of the windows of a filter that hold a hidden pixel
    seconds: float  # to learn the density
    assessment: Assessment  # from the incomplete test crops alone
    claimed: float  # the root of the mean variance of the pixels that are really missing
    ways: list[Way]
    fifths: list[Fifth]  # surest first
    kept: dict[str, list[tuple[float, float]]]  # ranking -> (share of hidden pixels kept, their RMSE)
    truth: Tensor  # some crops (N, 3, H, W)
    observed: Tensor  # (N, 1, H, W)
    filled: dict[str, Tensor]  # way -> (N, 3, H, W)
    deviations: Tensor  # claimed, root mean square over colours (N, H, W)
    errors: Tensor  # real ones of the mean, likewise (N, H, W)
    responses: dict[str, Tensor]  # way -> responses of the first edge filter (N, H − 2, W − 2)

    def way(self, name: str) -> Way:
        """The one of that name."""
        return next(way for way in self.ways if way.name == name)

    def numbers(self) -> dict[str, object]:
        """All of it that is not a picture."""
        plain = {k: v for k, v in vars(self).items() if isinstance(v, int | float)}
        return plain | {
            "assessment": self.assessment.to_dict(),
            "ways": [vars(way) for way in self.ways],
            "fifths": [vars(fifth) for fifth in self.fifths],
            "kept": self.kept,
        }


def learn_and_compare(settings: PhotographSettings, *, seed: int, progress: bool, say: Say) -> Photographs:
    """Cut the photographs into crops, hide a part of each, and see what becomes of it."""
    generator = torch.Generator().manual_seed(seed)
    halves = [photograph.tensor_split(2, dim=2) for photograph in data.photographs()]
    train = _random_crops([left for left, _ in halves], settings.side, settings.train, generator)
    truth = torch.cat([_grid(right, settings.side, settings.stride) for _, right in halves])
    side, fraction = settings.side, settings.fraction
    seen, shown = (free_form(len(x), side, side, fraction=fraction, generator=generator) for x in (train, truth))
    # From here on the hidden pixels are gone; `truth` serves errors and pictures alone.
    train, observed = observe(train.masked_fill(~seen, math.nan))
    x = truth.masked_fill(~shown, math.nan)
    return compare(train, observed, x, shown, truth, settings, seed=seed, progress=progress, say=say)


def compare(
    train: Tensor,
    train_observed: Tensor,
    x: Tensor,
    observed: Tensor,
    truth: Tensor,
    settings: PhotographSettings,
    *,
    seed: int,
    progress: bool,
    say: Say,
) -> Photographs:
    """Teach the density with one set of incomplete crops, and measure with another."""
    say("Learning what photographs look like, from incomplete crops")
    clock = time.perf_counter()
    density = _learn(train, train_observed, settings, seed, progress)
    seconds = time.perf_counter() - clock
    say("Looking behind the holes of other crops")
    assessment = assess(density, x.where(observed, 0), observed, shape=free_form, fraction=settings.fraction, seed=seed)
    with torch.no_grad():
        return _measure(_mfa(density, x, observed), x, observed, truth, settings, seconds, assessment, seed)


def _learn(x: Tensor, observed: Tensor, settings: PhotographSettings, seed: int, progress: bool) -> UNetDMFA:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        density = UNetDMFA(
            x.shape[1], components=settings.components, rank=settings.rank, noise_floor=settings.noise_floor
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not good yet: the report tells how good it is
        fit_density(
            density, x, observed, steps=settings.steps, batch_size=settings.batch_size, augment=True, seed=seed,
            fabric=one_device("cpu"), progress=progress,
        )  # fmt: skip
    return density.eval()


def _mfa(density: UNetDMFA, x: Tensor, observed: Tensor) -> MFA:
    """What the density says of all crops; a part at a time, for its feature maps need memory."""
    parts = [density(*part) for part in zip(x.split(100), observed.split(100), strict=True)]
    logits, means, factors, noise = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("logits", "means", "factors", "noise")
    )
    return MFA(logits, means, factors, noise, observed)


# Figures -----------------------------------------------------------------------------------------------------------


def _measure(
    p: MFA,
    x: Tensor,
    observed: Tensor,
    truth: Tensor,
    settings: PhotographSettings,
    seconds: float,
    assessment: Assessment,
    seed: int,
) -> Photographs:
    """Compare all ways with the truth."""
    fills = {
        "zeros": impute.zero(x, observed),
        "average": x.where(observed, _average(x, observed)),
        "nearest": impute.nearest(x, observed),
        "push–pull": impute.push_pull(x, observed),
        "mean": p.mean,
    }
    variance, hidden = p.variance, (~observed).expand(truth.shape)
    squared = (p.mean - truth).square()
    rankings = {
        "what the density claims": variance,
        "contrast nearby": nearby_contrast(x, observed),
        "distance": distance_to_seen(observed).expand(truth.shape),
    }
    generator = torch.Generator().manual_seed(seed)
    orders = {name: _order(score[hidden], generator) for name, score in rankings.items()}
    touched = _touched(observed)
    shown = _examples(x, observed, settings.shown)
    return Photographs(
        tested=len(truth),
        hidden=int(hidden.sum()),
        touched=float(touched.float().mean()),
        seconds=seconds,
        assessment=assessment,
        claimed=float(variance[hidden].mean().sqrt()),
        ways=_ways(p, fills, truth, hidden, touched),
        fifths=_fifths(variance[hidden], squared[hidden], orders["what the density claims"]),
        kept={name: _kept(squared[hidden][order]) for name, order in orders.items()},
        truth=truth[shown],
        observed=observed[shown],
        filled={name: filled[shown] for name, filled in fills.items()},
        deviations=variance[shown].mean(1).sqrt(),
        errors=squared[shown].mean(1).sqrt(),
        responses={name: r[shown, 0] for name, r in _respond(p, fills | {"truth": truth}, edge_filters()).items()},
    )


def _ways(p: MFA, fills: dict[str, Tensor], truth: Tensor, hidden: Tensor, touched: Tensor) -> list[Way]:
    words = {
        "zeros": "0, which is black",
        "average": "the average colour of what is seen of the crop",
        "nearest": "the nearest pixel that was seen",
        "push–pull": "a smooth fill from all around",
        "mean": "the density's best guess",
        "MisConv": "the expected response under the density",
    }
    guesses = fills | {"MisConv": fills["mean"]}
    ways = {n: Way(n, what, _rms((guesses[n] - truth)[hidden])) for n, what in words.items()}
    for bank, weight in (("edge", edge_filters()), ("random", random_filters())):
        correct = torch.relu(F.conv2d(truth, weight))
        size, level = _rms(correct[touched.expand(correct.shape)]), _mean(correct, touched)
        responses = _respond(p, fills, weight)
        wrong = {n: ((r - correct).square() * touched).flatten(1).sum(1) for n, r in responses.items()}  # (B,) each
        for name, response in responses.items():
            ways[name].error[bank] = _rms((response - correct)[touched.expand(correct.shape)]) / size
            ways[name].bias[bank] = _mean(response, touched) / level - 1
            ways[name].closer[bank] = float((wrong["MisConv"] < wrong[name]).double().mean())
    return list(ways.values())


def _respond(p: MFA, fills: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Responses of a bank of filters with ReLU, without padding: (B, O, H − 2, W − 2)."""
    plain = {name: torch.relu(F.conv2d(filled, weight)) for name, filled in fills.items()}
    return plain | {"MisConv": expected_conv2d(p, weight, activation="relu")}


def edge_filters() -> Tensor:
    """Sobel filters of four directions and both signs on the brightness, (8, 3, 3, 3)."""
    across = torch.tensor([[-1.0, -2.0, -1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 1.0]])
    slanted = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    turned = [f for straight in (across, slanted) for f in (straight, straight.rot90())]
    return torch.stack([sign * f for f in turned for sign in (1, -1)]).unsqueeze(1).expand(-1, 3, -1, -1) / 24


def random_filters() -> Tensor:
    """(32, 3, 3, 3), each with sum zero and length one; always the same."""
    weight = torch.randn(32, 3, KERNEL, KERNEL, generator=torch.Generator().manual_seed(0))
    weight = weight - weight.mean((1, 2, 3), keepdim=True)
    return weight / weight.square().sum((1, 2, 3), keepdim=True).sqrt()


def _touched(observed: Tensor) -> Tensor:
    """Windows with a hidden pixel in them, (B, 1, H − 2, W − 2)."""
    return F.max_pool2d((~observed).float(), KERNEL, stride=1) > 0


def _fifths(variance: Tensor, squared: Tensor, order: Tensor) -> list[Fifth]:
    whole = squared.sum()
    return [
        Fifth(float(variance[i].mean().sqrt()), float(squared[i].mean().sqrt()), float(squared[i].sum() / whole))
        for i in order.tensor_split(5)
    ]


def _kept(squared: Tensor) -> list[tuple[float, float]]:
    """RMSE of the first 5 %, 10 %, … of the squared errors."""
    sums = squared.double().cumsum(0)
    counts = [max(round(len(squared) * part / 20), 1) for part in range(1, 21)]
    return [(part / 20, math.sqrt(float(sums[n - 1]) / n)) for part, n in enumerate(counts, 1)]


def _order(score: Tensor, generator: torch.Generator) -> Tensor:
    """Indices from the least score to the largest, equal ones in random order."""
    mixed = torch.randperm(len(score), generator=generator)
    return mixed[score[mixed].argsort(stable=True)]


def distance_to_seen(observed: Tensor) -> Tensor:
    """From each pixel to the nearest one that was seen, (B, 1, H, W): nearest-pixel fill of the coordinates."""
    height, width = observed.shape[2:]
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([rows, columns]).to(torch.get_default_dtype()).expand(len(observed), -1, -1, -1)
    return (impute.nearest(places, observed) - places).square().sum(1, keepdim=True).sqrt()


def nearby_contrast(x: Tensor, observed: Tensor) -> Tensor:
    """The standard deviation of the pixels seen around each one, by channel; infinite where there are none."""
    seen, known = observed.expand(x.shape).to(x.dtype), x.where(observed, 0)
    share, total, squares = (F.avg_pool2d(t, NEARBY, 1, NEARBY // 2) for t in (seen, known, known.square()))
    mean = total / share
    return (squares / share - mean.square()).clamp_min(0).sqrt().nan_to_num(math.inf)


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def _mean(responses: Tensor, where: Tensor) -> float:
    return float(responses[where.expand(responses.shape)].double().mean())


# Crops -------------------------------------------------------------------------------------------------------------


def _random_crops(images: list[Tensor], side: int, count: int, generator: torch.Generator) -> Tensor:
    """Squares from anywhere in some images (C, H, W), in turn: (count, C, side, side)."""
    found = []
    for number in range(count):
        image = images[number % len(images)]
        top, left = (int(torch.randint(n - side + 1, (), generator=generator)) for n in image.shape[1:])
        found.append(image[:, top : top + side, left : left + side])
    return torch.stack(found)


def _grid(image: Tensor, side: int, stride: int) -> Tensor:
    """All squares of a grid, (N, C, side, side)."""
    squares = image.unfold(1, side, stride).unfold(2, side, stride)  # (C, rows, columns, side, side)
    return squares.flatten(1, 2).transpose(0, 1).contiguous()


def _examples(x: Tensor, observed: Tensor, count: int) -> Tensor:
    """Crops at equal distances in the order of the contrast of their seen pixels, from the half that has more of it."""
    squared = (x - _average(x, observed)).square()
    contrast = _average(squared, observed).mean((1, 2, 3))
    places = (1 + (torch.arange(count) + 0.5) / count) / 2 * len(x)
    return contrast.argsort(stable=True)[places.long()]


def _average(x: Tensor, observed: Tensor) -> Tensor:
    """Of the seen pixels of each channel, (B, C, 1, 1)."""
    return x.where(observed, 0).sum((2, 3), keepdim=True) / observed.sum((2, 3), keepdim=True)
