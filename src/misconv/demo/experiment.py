"""The newcomer's experiment: real digits, a quarter of each missing for good, nine ways to classify them.

Nothing here but the last row reads a hidden pixel: all methods get the incomplete images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from misconv import data
from misconv._train import cosine_schedule, one_device
from misconv.density import SMFA, ConvDMFA
from misconv.layers import MisConv2d
from misconv.mfa import MFA
from misconv.missing import hide, observe, square
from misconv.paper import methods as paper
from misconv.paper.inputs import IncompleteImages
from misconv.paper.methods import TRAINED, method_named
from misconv.training import fit_classifier, fit_density

__all__ = ["QUICK", "Demo", "Density", "MethodResult", "Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """Of the whole experiment."""

    seed: int = 0  # of the split, the missing regions, the densities and the classifiers
    seeds: int = 3  # trainings of every method
    images: int = 1797  # of which …
    train: int = 1200
    validation: int = 200  # and the rest is for the test
    fraction: float = 1 / 4
    smfa_components: int = 8
    smfa_rank: int = 4
    dmfa_components: int = 3
    dmfa_rank: int = 4
    dmfa_widths: tuple[int, ...] = (24, 48)
    dmfa_depths: tuple[int, ...] = (1, 2, 1)
    dmfa_epochs: int = 40
    dmfa_learning_rate: float = 3e-3
    dmfa_batch_size: int = 32
    classifier_epochs: int = 15
    classifier_learning_rate: float = 3e-3  # like the other one, it falls to 0 along a cosine
    classifier_batch_size: int = 64


QUICK = Settings(images=460, train=300, validation=60, dmfa_epochs=6, classifier_epochs=3)  # to try it out

Inputs = MFA | Tensor | tuple[Tensor, ...]


@dataclass
class MethodResult:
    """One row of the table."""

    name: str
    what: str  # in words
    accuracy: list[float] = field(default_factory=list)  # one per seed, on incomplete test images

    @property
    def mean(self) -> float:
        """Over seeds."""
        return sum(self.accuracy) / len(self.accuracy)

    @property
    def deviation(self) -> float:
        """Over seeds, with n − 1; 0 for a single one."""
        if len(self.accuracy) < 2:
            return 0.0
        return math.sqrt(sum((a - self.mean) ** 2 for a in self.accuracy) / (len(self.accuracy) - 1))


@dataclass
class Density:
    """How well a density predicts pixels that were hidden from it, on test images."""

    name: str
    nll: float  # per hidden pixel
    rmse: float
    coverage: dict[float, float]  # interval -> share of hidden pixels inside
    seconds: float  # to fit
    weights: list[float]  # mean probability of each component


@dataclass
class Demo:
    """Everything the report shows."""

    settings: Settings
    methods: list[MethodResult]
    densities: list[Density]
    seconds: float
    truth: Tensor  # some test images (N, 1, 8, 8)
    labels: Tensor  # (N,)
    observed: Tensor  # (N, 1, 8, 8)
    imputed: dict[str, Tensor]  # method -> filled images (N, 1, 8, 8)
    deviations: dict[str, Tensor]  # density -> standard deviation of every pixel (N, 1, 8, 8)
    samples: Tensor  # completions drawn from the density network (S, N, 1, 8, 8)
    responses: dict[str, Tensor]  # way -> responses of one trained first layer (N, O, 8, 8)


class DigitClassifier(nn.Module):
    """The same small CNN for every method; only the first layer knows of missing pixels."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.rest = nn.Sequential(
            nn.BatchNorm2d(16),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(32),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, *inputs: Any) -> Tensor:
        """Logits (B, 10)."""
        out: Tensor = self.rest(self.first(*inputs))
        return out


def run(
    settings: Settings = Settings(),  # noqa: B008  # it is immutable
    *,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Demo:
    """The whole experiment, on the CPU; the same seed gives the same numbers.

    Args:
        settings: how many images, components, epochs, …
        progress: whether to show progress bars.
        say: called with a line of text at every stage.
    """
    started = time.perf_counter()
    with torch.device("cpu"):  # whatever the caller's default is
        complete, labels = data.digits()
        generator = torch.Generator().manual_seed(settings.seed)
        order = torch.randperm(len(complete), generator=generator)[: settings.images]
        complete, labels = complete[order], labels[order]
        seen = square(len(complete), 8, 8, fraction=settings.fraction, generator=generator)
        # From here on the hidden pixels are gone; `complete` serves the last row and the pictures alone.
        incomplete, observed = observe(complete.masked_fill(~seen, math.nan))
        return compare(incomplete, observed, complete, labels, settings, progress, say, started)


def compare(
    x: Tensor,
    observed: Tensor,
    complete: Tensor,
    labels: Tensor,
    settings: Settings,
    progress: bool,
    say: Callable[[str], None],
    started: float,
) -> Demo:
    """Fit the densities, train every method with every seed, and collect what the report shows."""
    train = slice(0, settings.train)
    validation = slice(settings.train, settings.train + settings.validation)
    known, test = slice(0, validation.stop), slice(validation.stop, None)

    say("Learning what digits look like, from incomplete digits")
    densities: list[tuple[str, nn.Module, float]] = []
    for name, make in _densities(settings).items():
        clock = time.perf_counter()
        densities.append((name, make(x[known], observed[known], progress), time.perf_counter() - clock))
    measured = [_measure(name, d, seconds, x[test], observed[test], settings.seed) for name, d, seconds in densities]
    by_name = {name: density for name, density, _ in densities}
    smfa, dmfa = (_mfa(by_name[name], x, observed) for name in ("SMFA", "DMFA"))

    say("Filling in the missing pixels")
    inputs = _inputs(x, observed, complete, known, {"smfa": smfa, "dmfa": dmfa})
    filled = {method_named(name).title: _filled(inputs[name]) for name in ("zero", "mean", "knn")}
    filled["DMFA"] = dmfa.mean

    methods: list[MethodResult] = []
    first_layer: nn.Module | None = None
    for each in TRAINED:
        method = MethodResult(each.long_title or each.title, each.description)
        say(f"Training the classifier: {method.name}")
        for number in range(settings.seeds):
            network = _train(
                each, inputs[each.name], labels, train, validation, settings, settings.seed + number, progress
            )
            method.accuracy.append(_accuracy(network, _take(inputs[each.name], test), labels[test]))
        methods.append(method)
        if each.name == "misconv_dmfa":
            first_layer = network.first
    assert isinstance(first_layer, MisConv2d)

    # The first test image of every digit.
    shown = torch.stack([(labels[test] == digit).nonzero()[0, 0] + test.start for digit in labels[test].unique()])
    ways = {
        "set to 0": MFA.point(filled["zero"][shown]),
        "set to the mean": MFA.point(filled["DMFA"][shown]),
        "MisConv": dmfa[shown],
        "nothing missing": MFA.point(complete[shown]),
    }
    with torch.no_grad():
        return Demo(
            settings=settings,
            methods=methods,
            densities=measured,
            seconds=time.perf_counter() - started,
            truth=complete[shown],
            labels=labels[shown],
            observed=observed[shown],
            imputed={name: values[shown] for name, values in (filled | {"SMFA": smfa.mean}).items()},
            deviations={"SMFA": smfa[shown].variance.sqrt(), "DMFA": dmfa[shown].variance.sqrt()},
            samples=dmfa[shown].sample(4, generator=torch.Generator().manual_seed(settings.seed)),
            responses={name: first_layer(p) for name, p in ways.items()},
        )


def _inputs(
    x: Tensor, observed: Tensor, complete: Tensor, known: slice, densities: dict[str, MFA]
) -> dict[str, Inputs]:
    """What every method gives its network of all images; imputers are fitted to the known ones."""
    data, whole, everything = IncompleteImages(x, observed), IncompleteImages.complete(complete), torch.arange(len(x))
    found = {}
    for method in TRAINED:
        fitted: Any = None
        if method.density is not None:
            fitted = densities[method.density].__getitem__
        elif method.fit_imputer is not None:
            fitted = method.fit_imputer(x[known], observed[known])
        assert method.inputs is not None
        found[method.name] = method.inputs(whole if method.sees_complete else data, fitted)(everything)
    return found


def _filled(inputs: Inputs) -> Tensor:
    assert isinstance(inputs, MFA)
    return inputs.mean


def _densities(settings: Settings) -> dict[str, Callable[[Tensor, Tensor, bool], nn.Module]]:
    """How each density is made from images and observed."""
    seed = settings.seed

    def independent(x: Tensor, observed: Tensor, progress: bool) -> nn.Module:
        return SMFA(components=1, rank=0).fit(x, observed, seed=seed)

    def smfa(x: Tensor, observed: Tensor, progress: bool) -> nn.Module:
        density = SMFA(settings.smfa_components, settings.smfa_rank)
        fit_density(density, x, observed, seed=seed, fabric=_fabric(), progress=progress)
        return density

    def dmfa(x: Tensor, observed: Tensor, progress: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            density = ConvDMFA(
                1,
                components=settings.dmfa_components,
                rank=settings.dmfa_rank,
                widths=settings.dmfa_widths,
                depths=settings.dmfa_depths,
            )
        fit_density(
            density, x, observed, epochs=settings.dmfa_epochs, batch_size=settings.dmfa_batch_size, seed=seed,
            learning_rate=cosine_schedule(settings.dmfa_learning_rate, settings.dmfa_epochs), shape=square,
            fabric=_fabric(), progress=progress,
        )  # fmt: skip
        return density.eval()

    return {"independent pixels": independent, "SMFA": smfa, "DMFA": dmfa}


def _mfa(density: nn.Module, x: Tensor, observed: Tensor) -> MFA:
    """What the density says of all images, computed once."""
    with torch.no_grad():
        p = density(x, observed)
    assert isinstance(p, MFA)
    return p


def _measure(name: str, density: nn.Module, seconds: float, x: Tensor, observed: Tensor, seed: int) -> Density:
    """Hide another quarter of the test images and see how well it is predicted."""
    known = hide(observed, square, fraction=1 / 4, generator=torch.Generator().manual_seed(seed))
    target = observed & ~known
    p = _mfa(density, x, known)
    count = target.sum()
    return Density(
        name=name,
        nll=float(-p.log_prob(x, target).sum() / count),
        rmse=float(((p.mean - x).where(target, 0).square().sum() / count).sqrt()),
        coverage={level: coverage(p, x, target, level) for level in (0.5, 0.9)},
        seconds=seconds,
        weights=p.weights.mean(0).tolist(),
    )


def coverage(p: MFA, x: Tensor, where: Tensor, level: float) -> float:
    """The share of the pixels in `where` that lie inside the central interval of that probability."""
    deviation = (p.noise + p.factors.square().sum(2)).sqrt()  # (B, K, C, H, W)
    below = torch.special.ndtr((x.unsqueeze(1) - p.means) / deviation)
    quantile = (p.weights[..., None, None, None] * below).sum(1)
    inside = (quantile - 0.5).abs() <= level / 2
    return float((inside & where).sum() / where.sum())


def _fabric() -> Any:
    """The CPU, whatever else there is: digits are small, and the numbers are to be the same everywhere."""
    return one_device("cpu")


def _take(inputs: Inputs, part: slice) -> Inputs:
    return tuple(t[part] for t in inputs) if isinstance(inputs, tuple) else inputs[part]


def _train(
    method: paper.Method,
    inputs: Inputs,
    labels: Tensor,
    train: slice,
    validation: slice,
    settings: Settings,
    seed: int,
    progress: bool,
) -> DigitClassifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = DigitClassifier(method.first_layer(1, 16))
    fit_classifier(
        network, _take(inputs, train), labels[train],
        validation_inputs=_take(inputs, validation), validation_labels=labels[validation],
        epochs=settings.classifier_epochs, batch_size=settings.classifier_batch_size,
        learning_rate=cosine_schedule(settings.classifier_learning_rate, settings.classifier_epochs), seed=seed,
        fabric=_fabric(), progress=progress,
    )  # fmt: skip
    return network.eval()


def _accuracy(network: nn.Module, inputs: Inputs, labels: Tensor) -> float:
    with torch.no_grad():
        logits = network(*inputs) if isinstance(inputs, tuple) else network(inputs)
    return int((logits.argmax(1) == labels).sum()) / len(labels)
