"""MisConv+: a recipe of our own beside the paper's settings, and what each of its ingredients is worth.

It learns from the same incomplete images, and its classifier is the paper's from the second layer on. New are:

- on MNIST, where the paper has a small density network, one with skip connections, trained on regions of several shapes
  with a falling learning rate; elsewhere the paper's, which has longer to learn and predicted better on SVHN;
- augmentation: more is hidden, and images are shifted (and flipped where that keeps their meaning); what a shift brings
  in from beyond the border is missing, with the usual mean and variance of the pixel at the border;
- a falling learning rate, larger batches and more epochs.

A variant leaves one of them out, or adds one more: the mask as a certain input channel of the first layer; weight decay
and smoothed labels; some last epochs in which the density learns, too, from the classifier's loss. The last two leave
MisConv itself out, by the same recipe: the mean of the density is filled in, or zeros, with the mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from misconv import impute
from misconv._train import classifier_job, falling, train
from misconv.mfa import MFA
from misconv.paper.augment import EXTRA, Augmented, Versions
from misconv.paper.classification import VALIDATION, Experiment
from misconv.paper.inputs import Remembered, Take, complete, filled, point, zeros_and_mask
from misconv.paper.networks import Classifier, first_layer
from misconv.paper.scores import Record

__all__ = ["PLUS", "VARIANTS", "Plus", "run_plus", "variants_of"]

_DENSITY = {
    "kind": "ConvDMFA", "rank": 4, "components": 1, "widths": [32, 64, 128], "depths": [2, 2, 4, 2, 2], "skips": True,
    "epochs": 12, "batch_size": 128, "rates": [2e-3], "falling": True, "mse_epochs": 2, "shapes": "several",
}  # fmt: skip
_RECIPE = {
    "batch_size": 128, "rate": 2e-3, "weight_decay": 0.0, "label_smoothing": 0.0, "mask": False, "hide": True,
    "density": _DENSITY, "tuned": 0, "tuned_rate": 2e-4, "density_rate": 0.1,
}  # fmt: skip
PLUS: dict[str, dict[str, Any]] = {
    "mnist": {**_RECIPE, "epochs": 30, "shift": 2, "flip": False},
    "svhn": {**_RECIPE, "epochs": 30, "shift": 3, "flip": False, "density": "paper"},
    "cifar10": {**_RECIPE, "epochs": 60, "shift": 4, "flip": True, "density": "paper"},
    "digits": {
        **_RECIPE, "epochs": 15, "shift": 0, "flip": False, "batch_size": 32,  # a pixel is an eighth of the image
        "density": {**_DENSITY, "widths": [16, 32], "depths": [1, 1, 1], "epochs": 10, "batch_size": 48},
    },
}  # fmt: skip
# What a variant changes in the recipe.
VARIANTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "without hiding more": {"hide": False},
    "without shifts": {"shift": 0, "flip": False},
    "with the paper's density": {"density": "paper"},
    "with the mask channel": {"mask": True},
    "with weight decay and smoothed labels": {"weight_decay": 1e-2, "label_smoothing": 0.1},
    "with joint fine-tuning": {"tuned": 5},
    "without MisConv: MFA imputation": {"filled": True, "mask": False},
    "without MisConv: zeros and mask": {"density": None, "mask": True},
}


class Plus(nn.Module):
    """A density and the classifier that follows it; incomplete images go in.

    Args:
        density: (x, observed) -> MFA, or None: zeros.
        classifier: takes an MFA.
        mask: whether the mask is one more channel of it.
    """

    def __init__(self, density: nn.Module | None, classifier: nn.Module, mask: bool) -> None:
        super().__init__()
        self.density, self.classifier, self.mask = density, classifier, mask

    def train(self, mode: bool = True) -> Plus:
        """The density keeps the statistics of its BatchNorms, whether its weights go on learning or not."""
        super().train(mode)
        if self.density is not None:
            self.density.eval()
        return self

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        """Logits."""
        if self.density is None:
            p = zeros_and_mask(x, observed) if self.mask else point(impute.zero(x, observed))
        else:
            p = self.density(x, observed)
            p = with_mask(p) if self.mask else p
        out: Tensor = self.classifier(p)
        return out


def with_mask(p: MFA) -> MFA:
    """The MFA of images with one more channel, the mask, which is certain."""
    batch, components, rank, channels, height, width = p.factors.shape
    assert p.observed is not None
    seen = p.observed
    mask = seen[:, :1].to(p.dtype)
    return MFA(
        p.logits,
        torch.cat([p.means, mask.unsqueeze(1).expand(batch, components, 1, height, width)], 2),
        torch.cat([p.factors, p.factors.new_zeros(batch, components, rank, 1, height, width)], 3),
        torch.cat([p.noise, p.noise.new_zeros(batch, components, 1, height, width)], 2),
        torch.cat([seen.expand(batch, channels, height, width), torch.ones_like(mask, dtype=torch.bool)], 1),
        check=False,
    )


def recipe(experiment: Experiment, variant: str) -> dict[str, Any]:
    """The settings of a variant on a data set."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    usual = PLUS.get(experiment.data.name, PLUS["svhn"])
    chosen = {**usual, **experiment.settings.get("recipe", {}), **VARIANTS[variant]}
    return {**chosen, "classifier": experiment.settings["classifier"]["kind"], "extra": list(EXTRA)}


def variants_of(experiment: Experiment) -> list[str]:
    """Those that differ from the whole recipe on this data set, and the whole."""
    whole = recipe(experiment, "everything")
    return [v for v in VARIANTS if v == "everything" or recipe(experiment, v) != whole]


def unit(experiment: Experiment, variant: str, seed: int) -> dict[str, Any]:
    """What makes a variant with a seed what it is."""
    settings = recipe(experiment, variant)
    if settings["density"] == "paper":
        settings["density"] = experiment.settings["dmfa"]
    return {
        **experiment.identity, "method": "misconv_plus", "variant": variant, "seed": seed, "validation": VALIDATION,
        "recipe": settings,
    }  # fmt: skip


def run_plus(experiment: Experiment, seeds: Sequence[int], variants: Sequence[str] = ("everything",)) -> list[Record]:
    """The records of all variants with all seeds; those that are not there yet are trained, side by side."""
    return experiment.records(variants, seeds, partial(unit, experiment), partial(_train, experiment))


def _train(experiment: Experiment, units: Sequence[tuple[str, int]]) -> None:
    recipes = [recipe(experiment, variant) for variant, _ in units]
    densities = [_density(experiment, chosen) for chosen in recipes]
    names = ", ".join(dict.fromkeys(variant for variant, _ in units))
    what = "MisConv+" if names == "everything" else f"MisConv+ ({names})"
    experiment.say(f"{experiment.data.title}, {experiment.shape}: training {what}; {len(units)} side by side")
    works = [
        _Work(variant, seed, chosen, density, _network(experiment, chosen, density, seed))
        for (variant, seed), chosen, density in zip(units, recipes, densities, strict=True)
    ]
    versions: dict[int, Versions] = {}
    checkpoints = [_stage(experiment, works, versions)]
    tuned = [work for work in works if work.chosen["tuned"]]
    if tuned:
        before = [(work.network, work.history) for work in tuned]
        for work in tuned:
            own = copy.deepcopy(work.density)
            assert own is not None
            work.network = Plus(own.requires_grad_(True), copy.deepcopy(work.network), work.chosen["mask"])
        checkpoints.append(_stage(experiment, tuned, versions, tuned=True))
        for work, (network, history) in zip(tuned, before, strict=True):
            # All epochs compete; where no later one is better, the network stays as it was before.
            if _best(history) >= _best(work.history):
                work.network = network
            later = [{**record, "epoch": record["epoch"] + len(history)} for record in work.history]
            work.history = history + later
    said: dict[int, Remembered] = {}
    for work in works:
        if work.density is not None and work.remembered and id(work.density) not in said:
            said[id(work.density)] = Remembered(work.density, experiment.test)
    tested = [
        experiment.test_once(
            unit(experiment, work.variant, work.seed), "misconv_plus", work.seed, work.network, work.history,
            work.seconds, len(units), _test_images(experiment, work, said.get(id(work.density))),
            extra={"variant": work.variant},
        )
        for work in works
    ]  # fmt: skip
    experiment.cache.keep_together(tested, checkpoints)


@dataclass
class _Work:
    """One variant with one seed, on its way."""

    variant: str
    seed: int
    chosen: dict[str, Any]
    density: nn.Module | None
    network: nn.Module
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def remembered(self) -> bool:
        """Whether the network takes what the density has said, and not images."""
        return not isinstance(self.network, Plus)

    def form(self, p: MFA) -> MFA:
        """What the network takes of an MFA."""
        if self.chosen.get("filled"):
            return filled(p)
        return with_mask(p) if self.chosen["mask"] else p


def _stage(
    experiment: Experiment, works: Sequence[_Work], versions: dict[int, Versions], *, tuned: bool = False
) -> Path:
    """Train the networks side by side, or tune them; returns where the checkpoint is, which nobody needs in the end."""
    rows, held = experiment.split
    labels = experiment.labels[0]
    length, rate = ("tuned", "tuned_rate") if tuned else ("epochs", "rate")
    (epochs,) = {work.chosen[length] for work in works}
    jobs = []
    for work in works:
        chosen = work.chosen
        key = id(work.density) if work.remembered else 0
        if key not in versions:
            versions[key] = Versions(experiment.train, work.density if work.remembered else None)
        augmented = Augmented(
            versions[key], rows, work.seed, hide=chosen["hide"], shift=chosen["shift"], flip=chosen["flip"],
            remembered=work.remembered, form=work.form,
        )  # fmt: skip
        as_they_are = Augmented(
            versions[key], held, work.seed, hide=False, shift=0, flip=False, remembered=work.remembered, form=work.form
        )
        jobs.append(
            classifier_job(
                work.network, augmented, labels[rows], experiment.fabric,
                validation_inputs=as_they_are, validation_labels=labels[held],
                batch_size=chosen["batch_size"], seed=work.seed, begin=augmented.begin,
                learning_rate=falling(chosen[rate], epochs), weight_decay=chosen["weight_decay"],
                label_smoothing=chosen["label_smoothing"], factors={"density.": chosen["density_rate"]},
                settings=unit(experiment, work.variant, work.seed) | {"stage": length},
                name=f"MisConv+ ({work.variant}), seed {work.seed},", count=False,
            )
        )  # fmt: skip
    checkpoint = experiment.cache.running([job.settings for job in jobs])
    histories = train(
        jobs, experiment.fabric, epochs=epochs, checkpoint=checkpoint, progress=experiment.progress,
        checkpoint_seconds=experiment.pause, title=f"{len(jobs)} × MisConv+", stays=False,
    )  # fmt: skip
    for work, job, history in zip(works, jobs, histories, strict=True):
        work.history = history
        work.seconds += job.seconds
    return checkpoint


def _density(experiment: Experiment, chosen: dict[str, Any]) -> nn.Module | None:
    if chosen["density"] is None:
        return None
    if chosen["density"] == "paper":
        return experiment.density("dmfa")
    experiment.offer("plus", chosen["density"])
    return experiment.density("plus")


def _network(experiment: Experiment, chosen: dict[str, Any], density: nn.Module | None, seed: int) -> nn.Module:
    """The classifier alone, which is given what the density says; or, without one, what fills in zeros before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = first_layer("mask" if chosen["mask"] else "misconv_dmfa", experiment.data.shape[0])
        classifier = Classifier(first, experiment.data.shape, experiment.data.classes, chosen["classifier"])
    network = Plus(None, classifier, chosen["mask"]) if density is None else classifier
    return network.to(experiment.device)


def _test_images(experiment: Experiment, work: _Work, said: Remembered | None) -> tuple[Take, Take]:
    """Incomplete and complete test images as a network takes them; `said` by its density."""
    if not work.remembered:
        return experiment.test.at, complete("partial", experiment.whole("test"))
    assert said is not None
    kept = said
    whole = complete("mask" if work.chosen["mask"] else "misconv_dmfa", experiment.whole("test"))
    return lambda indices: work.form(kept(indices)), whole


def _best(history: list[dict[str, float]]) -> float:
    return max(record["validation_accuracy"] for record in history)
