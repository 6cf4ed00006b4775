"""The second part of the demo: real digits, a quarter of each missing for good, nine ways to classify them.

Nothing here but the last row reads a hidden pixel: all methods get the incomplete images.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from misconv import data
from misconv._train import cosine_schedule, one_device
from misconv.assess import Assessment, assess
from misconv.density import SMFA, UNetDMFA
from misconv.mfa import MFA
from misconv.missing import observe, square
from misconv.paper import methods as paper
from misconv.paper.inputs import IncompleteImages
from misconv.paper.methods import METHODS, method_named
from misconv.training import fit_classifier, fit_density

__all__ = ["Density", "DigitSettings", "Digits", "MethodResult", "compare", "learn_and_compare"]

Say = Callable[[str], None]
# ACFlow is for the tables: it needs complete images, and a training longer than that of all the others.
SHOWN = tuple(method for method in METHODS if method.density != "acflow")


@dataclass(frozen=True)
class DigitSettings:
    """Of the part on digits."""

    images: int = 1797  # of which …
    train: int = 900
    validation: int = 150  # and the rest is for the test
    fraction: float = 1 / 4
    declined: float = 0.15  # share of the test digits that a classifier may decline
    smfa_components: int = 5
    smfa_rank: int = 4
    dmfa_components: int = 3
    dmfa_rank: int = 4
    dmfa_widths: tuple[int, ...] = (24, 48)
    dmfa_depths: tuple[int, ...] = (1, 2)
    dmfa_noise_floor: float = 1e-4
    dmfa_steps: int = 1200
    dmfa_batch_size: int = 32
    classifier_epochs: int = 15
    classifier_learning_rate: float = 3e-3  # falls to 0 along a cosine
    classifier_batch_size: int = 64

    @property
    def test(self) -> int:
        """How many digits are left for the test."""
        return self.images - self.train - self.validation


Inputs = MFA | Tensor | tuple[Tensor, ...]


@dataclass
class MethodResult:
    """One row of the table."""

    name: str
    what: str  # in words
    accuracy: list[float] = field(default_factory=list)  # one per seed, on incomplete test images
    kept: list[float] = field(default_factory=list)  # likewise, without the digits that it is least sure of

    @property
    def mean(self) -> float:
        """Over seeds."""
        return sum(self.accuracy) / len(self.accuracy)

    @property
    def kept_mean(self) -> float:
        """Over seeds."""
        return sum(self.kept) / len(self.kept)

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
    assessment: Assessment
    seconds: float  # to fit
    weights: list[float]  # mean probability of each component


@dataclass
class Digits:
    """Everything that the report shows of the digits."""

    methods: list[MethodResult]
    densities: list[Density]
    truth: Tensor  # some test images (N, 1, 8, 8)
    labels: Tensor  # (N,)
    observed: Tensor  # (N, 1, 8, 8)
    imputed: dict[str, Tensor]  # method -> filled images (N, 1, 8, 8)
    deviations: Tensor  # of every pixel under the density network (N, 1, 8, 8)
    samples: Tensor  # completions drawn from the density network (S, N, 1, 8, 8)

    def numbers(self) -> dict[str, object]:
        """All of it that is not a picture."""
        methods = [{**vars(m), "mean": m.mean, "deviation": m.deviation} for m in self.methods]
        densities = [{**vars(d), "assessment": d.assessment.to_dict()} for d in self.densities]
        return {"methods": methods, "densities": densities}


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


def learn_and_compare(settings: DigitSettings, *, seed: int, seeds: int, progress: bool, say: Say) -> Digits:
    """Shuffle the digits, hide a part of each, and see which classifier copes best."""
    complete, labels = data.digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(complete), generator=generator)[: settings.images]
    complete, labels = complete[order], labels[order]
    seen = square(len(complete), 8, 8, fraction=settings.fraction, generator=generator)
    # From here on the hidden pixels are gone; `complete` serves the last row and the pictures alone.
    x, observed = observe(complete.masked_fill(~seen, math.nan))
    return compare(x, observed, complete, labels, settings, seed=seed, seeds=seeds, progress=progress, say=say)


def compare(
    x: Tensor,
    observed: Tensor,
    complete: Tensor,
    labels: Tensor,
    settings: DigitSettings,
    *,
    seed: int,
    seeds: int,
    progress: bool,
    say: Say,
) -> Digits:
    """Fit the densities, train every method with every seed, and collect what the report shows."""
    train = slice(0, settings.train)
    validation = slice(settings.train, settings.train + settings.validation)
    known, test = slice(0, validation.stop), slice(validation.stop, None)

    say("Learning what digits look like, from incomplete digits")
    measured, fitted = [], {}
    for name, make in _densities(settings, seed).items():
        clock = time.perf_counter()
        density = make(x[known], observed[known], progress)
        seconds = time.perf_counter() - clock
        report = assess(density, x[test].where(observed[test], 0), observed[test], shape=square, seed=seed)
        fitted[name] = _mfa(density, x, observed)
        measured.append(Density(name, report, seconds, fitted[name][test].weights.mean(0).tolist()))
    smfa, dmfa = fitted["SMFA"], fitted["DMFA"]

    say("Filling in the missing pixels")
    inputs = _inputs(x, observed, complete, known, {"smfa": smfa, "dmfa": dmfa})
    filled = {method_named(name).title: _filled(inputs[name]) for name in ("mean", "knn")}
    filled |= {"SMFA": smfa.mean, "DMFA": dmfa.mean}

    methods: list[MethodResult] = []
    for each in SHOWN:
        method = MethodResult(each.long_title or each.title, each.description)
        say(f"Training the classifier: {method.name}")
        for number in range(seeds):
            network = _train(each, inputs[each.name], labels, train, validation, settings, seed + number, progress)
            all_of_them, kept = _accuracy(network, _take(inputs[each.name], test), labels[test], settings.declined)
            method.accuracy.append(all_of_them)
            method.kept.append(kept)
        methods.append(method)

    # The first test image of every digit.
    shown = torch.stack([(labels[test] == digit).nonzero()[0, 0] + test.start for digit in labels[test].unique()])
    return Digits(
        methods=methods,
        densities=measured,
        truth=complete[shown],
        labels=labels[shown],
        observed=observed[shown],
        imputed={name: values[shown] for name, values in filled.items()},
        deviations=dmfa[shown].variance.sqrt(),
        samples=dmfa[shown].sample(4, generator=torch.Generator().manual_seed(seed)),
    )


def _inputs(
    x: Tensor, observed: Tensor, complete: Tensor, known: slice, densities: dict[str, MFA]
) -> dict[str, Inputs]:
    """What every method gives its network of all images; imputers are fitted to the known ones."""
    data, whole, everything = IncompleteImages(x, observed), IncompleteImages.complete(complete), torch.arange(len(x))
    found = {}
    for method in SHOWN:
        fitted: Any = None
        if method.density is not None:
            fitted = densities[method.density].__getitem__
        elif method.fit_imputer is not None:
            fitted = method.fit_imputer(x[known], observed[known])
        assert method.inputs is not None
        found[method.name] = method.inputs(whole if method.takes_complete else data, fitted)(everything)
    return found


def _filled(inputs: Inputs) -> Tensor:
    assert isinstance(inputs, MFA)
    return inputs.mean


def _densities(settings: DigitSettings, seed: int) -> dict[str, Callable[[Tensor, Tensor, bool], nn.Module]]:
    """How each density is made from images and observed."""

    def independent(x: Tensor, observed: Tensor, progress: bool) -> nn.Module:
        return SMFA(components=1, rank=0).fit(x, observed, seed=seed)

    def smfa(x: Tensor, observed: Tensor, progress: bool) -> nn.Module:
        density = SMFA(settings.smfa_components, settings.smfa_rank)
        fit_density(density, x, observed, seed=seed, fabric=_fabric(), progress=progress)
        return density

    def dmfa(x: Tensor, observed: Tensor, progress: bool) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            density = UNetDMFA(
                1, settings.dmfa_components, settings.dmfa_rank, settings.dmfa_widths, settings.dmfa_depths,
                patch=1, noise_floor=settings.dmfa_noise_floor,
            )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is not good yet: the report tells how good it is
            fit_density(
                density, x, observed, steps=settings.dmfa_steps, batch_size=settings.dmfa_batch_size, seed=seed,
                shape=square, fabric=_fabric(), progress=progress,
            )  # fmt: skip
        return density.eval()

    return {"independent pixels": independent, "SMFA": smfa, "DMFA": dmfa}


def _mfa(density: nn.Module, x: Tensor, observed: Tensor) -> MFA:
    """What the density says of all images, computed once."""
    with torch.no_grad():
        p = density(x, observed)
    assert isinstance(p, MFA)
    return p


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
    settings: DigitSettings,
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


def _accuracy(network: nn.Module, inputs: Inputs, labels: Tensor, declined: float) -> tuple[float, float]:
    """Of all images, and of those that are left when it declines the ones with the least probable answers."""
    with torch.no_grad():
        logits = network(*inputs) if isinstance(inputs, tuple) else network(inputs)
    sure, answers = logits.softmax(1).max(1)
    right = (answers == labels).double()
    surest = sure.argsort(descending=True, stable=True)[: round(len(labels) * (1 - declined))]
    return float(right.mean()), float(right[surest].mean())
