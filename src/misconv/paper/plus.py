"""MisConv+: a recipe of our own beside the paper's settings, and what each of its ingredients is worth.

It learns from the same incomplete images, and its classifier is the paper's from the second layer on. New are:

- on MNIST, where the paper has a small density network, one with skip connections, trained on regions of several shapes
  with a cosine schedule; elsewhere the paper's, which has longer to learn and predicted better on SVHN;
- augmentation: more is hidden, and images are shifted (and flipped where that keeps their meaning); what a shift brings
  in from beyond the border is missing, with the usual mean and variance of the pixel at the border;
- a cosine schedule of the learning rate, larger batches and more epochs.

A variant leaves one of them out, or adds one more: the mask as a certain input channel of the first layer; weight decay
and smoothed labels; some last epochs in which the density learns, too, from the classifier's loss. The last two leave
MisConv itself out, by the same recipe: the mean of the density is filled in, or zeros, with the mask.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from misconv import impute
from misconv._train import Job, classifier_job, cosine_schedule, train
from misconv.mfa import MFA
from misconv.paper.augment import EXTRA, Augmented, Versions
from misconv.paper.cache import as_json
from misconv.paper.classification import Experiment, Trained
from misconv.paper.densities import DensitySettings
from misconv.paper.inputs import CachedMFA, Take, filled, point, zeros_and_mask
from misconv.paper.methods import method_named
from misconv.paper.networks import misconv_layer, misconv_layer_with_mask
from misconv.paper.scores import Record
from misconv.paper.settings import VALIDATION

__all__ = ["PLUS", "VARIANTS", "Plus", "Recipe", "run_plus", "variants_of"]


@dataclass(frozen=True)
class Recipe:
    """How MisConv+ is trained.

    Args:
        density: its settings; "paper" for the DMFA of the paper's settings, None for zeros.
        hide, shift, flip: the augmentation, see `misconv.paper.augment.Augmented`.
        mask: whether the mask is one more channel of the first layer.
        filled: whether the mean of the density is filled in, instead of MisConv.
        epochs, batch_size, learning_rate, weight_decay, label_smoothing: of the classifier, with a cosine schedule.
        tuned: how many more epochs train the density as well. tuned_learning_rate: in these epochs.
        density_learning_rate_scale: what the density's learning rate is multiplied by in these epochs.
    """

    epochs: int
    shift: int
    flip: bool = False
    hide: bool = True
    density: DensitySettings | Literal["paper"] | None = "paper"
    mask: bool = False
    filled: bool = False
    batch_size: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    tuned: int = 0
    tuned_learning_rate: float = 2e-4
    density_learning_rate_scale: float = 0.1


_DENSITY = DensitySettings(
    "ConvDMFA", rank=4, skips=True, epochs=12, batch_size=128, learning_rates=(2e-3,), cosine=True, mse_epochs=2,
    shapes="several",
)  # fmt: skip
PLUS: dict[str, Recipe] = {
    "mnist": Recipe(epochs=30, shift=2, density=_DENSITY),
    "svhn": Recipe(epochs=30, shift=3),
    "cifar10": Recipe(epochs=60, shift=4, flip=True),
    "digits": Recipe(
        epochs=15, shift=0, batch_size=32,  # a pixel is an eighth of the image
        density=replace(_DENSITY, widths=(16, 32), depths=(1, 1, 1), epochs=10, batch_size=48),
    ),
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


# Variants and units --------------------------------------------------------------------------------------------------


def recipe_of(experiment: Experiment, variant: str, whole: Recipe | None = None) -> Recipe:
    """The recipe of a variant; `whole` is the one that it changes, by default that of the data set."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    return replace(whole or PLUS.get(experiment.data.name, PLUS["svhn"]), **VARIANTS[variant])


def variants_of(experiment: Experiment, whole: Recipe | None = None) -> list[str]:
    """Those that differ from the whole recipe on this data set, and the whole."""
    everything = recipe_of(experiment, "everything", whole)
    return [v for v in VARIANTS if v == "everything" or recipe_of(experiment, v, whole) != everything]


def unit(experiment: Experiment, whole: Recipe | None, variant: str, seed: int) -> dict[str, Any]:
    """What makes a variant with a seed what it is."""
    chosen = recipe_of(experiment, variant, whole)
    if chosen.density == "paper":
        chosen = replace(chosen, density=experiment.settings.dmfa)
    settings = as_json(chosen) | {"classifier": experiment.settings.classifier.kind, "extra": list(EXTRA)}
    return {
        **experiment.identity, "method": "misconv_plus", "variant": variant, "seed": seed, "validation": VALIDATION,
        "recipe": settings,
    }  # fmt: skip


def run_plus(
    experiment: Experiment,
    seeds: Sequence[int],
    variants: Sequence[str] = ("everything",),
    recipe: Recipe | None = None,
) -> list[Record]:
    """The records of all variants with all seeds; those that are not there yet are trained, side by side.

    Args:
        recipe: the whole one, by default that of the data set in `PLUS`.
    """
    return experiment.records(variants, seeds, partial(unit, experiment, recipe), partial(_train, experiment, recipe))


# Training ------------------------------------------------------------------------------------------------------------


@dataclass
class _Work:
    """One variant with one seed, on its way."""

    settings: dict[str, Any]  # of its unit
    recipe: Recipe
    density: nn.Module | None
    network: nn.Module
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def variant(self) -> str:
        """Its name."""
        return str(self.settings["variant"])

    @property
    def seed(self) -> int:
        """Of all that is random."""
        return int(self.settings["seed"])

    @property
    def takes_mfa(self) -> bool:
        """Whether the network takes what the density has said, and not images."""
        return not isinstance(self.network, Plus)

    def form(self, p: MFA) -> MFA:
        """What the network takes of an MFA."""
        if self.recipe.filled:
            return filled(p)
        return with_mask(p) if self.recipe.mask else p


def _train(experiment: Experiment, whole: Recipe | None, units: Sequence[tuple[str, int]]) -> None:
    works = [_work(experiment, recipe_of(experiment, v, whole), unit(experiment, whole, v, seed)) for v, seed in units]
    names = ", ".join(dict.fromkeys(work.variant for work in works))
    what = "MisConv+" if names == "everything" else f"MisConv+ ({names})"
    experiment.say(f"{experiment.data.title}, {experiment.shape}: training {what}; {len(works)} side by side")
    versions: dict[int, Versions] = {}
    checkpoints = [_stage(experiment, works, versions)]
    tuned = [work for work in works if work.recipe.tuned]
    if tuned:
        checkpoints.append(_tune(experiment, tuned, versions))
    cached: dict[int, CachedMFA] = {}
    for work in works:
        if work.density is not None and work.takes_mfa and id(work.density) not in cached:
            cached[id(work.density)] = CachedMFA(work.density, experiment.test)
    method, tested = method_named("misconv_plus"), []
    for work in works:
        trained = Trained(
            work.settings, method, work.seed, work.network, work.history, work.seconds, len(works), work.variant
        )
        takes = _test_images(experiment, work, cached.get(id(work.density)))
        tested.append((work.settings, experiment.test_once(trained, *takes)))
    experiment.keep(tested, checkpoints)


def _work(experiment: Experiment, recipe: Recipe, settings: dict[str, Any]) -> _Work:
    """A network that is given what the density says; or, without one, zeros are filled in before it."""
    density = _density(experiment, recipe)
    first = misconv_layer_with_mask if recipe.mask else misconv_layer
    network = experiment.network(first, experiment.settings.classifier.kind, settings["seed"])
    return _Work(settings, recipe, density, Plus(None, network, recipe.mask) if density is None else network)


def _density(experiment: Experiment, recipe: Recipe) -> nn.Module | None:
    if recipe.density is None:
        return None
    return experiment.density("dmfa") if recipe.density == "paper" else experiment.density("plus", recipe.density)


def _tune(experiment: Experiment, works: Sequence[_Work], versions: dict[int, Versions]) -> Path:
    """Train each network together with a copy of its density; returns where the checkpoint is."""
    before = [(work.network, work.history) for work in works]
    for work in works:
        own = copy.deepcopy(work.density)
        assert own is not None
        work.network = Plus(own.requires_grad_(True), copy.deepcopy(work.network), work.recipe.mask)
    checkpoint = _stage(experiment, works, versions, tuned=True)
    for work, (network, history) in zip(works, before, strict=True):
        # All epochs compete; where no later one is better, the network stays as it was before.
        if _best(history) >= _best(work.history):
            work.network = network
        later = [{**record, "epoch": record["epoch"] + len(history)} for record in work.history]
        work.history = history + later
    return checkpoint


def _stage(
    experiment: Experiment, works: Sequence[_Work], versions: dict[int, Versions], *, tuned: bool = False
) -> Path:
    """Train the networks side by side, or tune them; returns where the checkpoint is."""
    (epochs,) = {work.recipe.tuned if tuned else work.recipe.epochs for work in works}
    for work in works:
        if _source(work) not in versions:
            versions[_source(work)] = Versions(experiment.train, work.density if work.takes_mfa else None)
    jobs = [_job(experiment, work, versions[_source(work)], epochs, tuned) for work in works]
    checkpoint = experiment.cache.running([job.settings for job in jobs])
    histories = train(
        jobs, experiment.fabric, epochs=epochs, checkpoint=checkpoint, progress=experiment.progress,
        checkpoint_seconds=experiment.pause, title=f"{len(jobs)} × MisConv+", transient=True,
    )  # fmt: skip
    for work, job, history in zip(works, jobs, histories, strict=True):
        work.history = history
        work.seconds += job.seconds
    return checkpoint


def _source(work: _Work) -> int:
    """Networks of one number are given versions of the same: of what their density says, or of images."""
    return id(work.density) if work.takes_mfa else 0


def _job(experiment: Experiment, work: _Work, versions: Versions, epochs: int, tuned: bool) -> Job:
    recipe, (rows, held), labels = work.recipe, experiment.split, experiment.labels[0]
    options: dict[str, Any] = {"cached": work.takes_mfa, "form": work.form}
    augmented = Augmented(versions, rows, work.seed, hide=recipe.hide, shift=recipe.shift, flip=recipe.flip, **options)
    as_they_are = Augmented(versions, held, work.seed, hide=False, shift=0, flip=False, **options)
    rate = recipe.tuned_learning_rate if tuned else recipe.learning_rate
    return classifier_job(
        work.network, augmented, labels[rows], experiment.fabric,
        validation_inputs=as_they_are, validation_labels=labels[held],
        batch_size=recipe.batch_size, seed=work.seed, begin=augmented.begin,
        learning_rate=cosine_schedule(rate, epochs), weight_decay=recipe.weight_decay,
        label_smoothing=recipe.label_smoothing, learning_rate_scale={"density.": recipe.density_learning_rate_scale},
        settings=work.settings | {"stage": "tuned" if tuned else "epochs"},
        name=f"MisConv+ ({work.variant}), seed {work.seed},", count=False,
    )  # fmt: skip


def _test_images(experiment: Experiment, work: _Work, cached: CachedMFA | None) -> tuple[Take, Take]:
    """Incomplete and complete test images as a network takes them; `cached` is what its density says of them."""
    whole = experiment.whole("test")
    if not work.takes_mfa:
        return experiment.test.at, whole.at
    assert cached is not None
    said = cached
    like = method_named("mask" if work.recipe.mask else "misconv_dmfa")
    return lambda indices: work.form(said(indices)), like.complete(whole)


def _best(history: list[dict[str, float]]) -> float:
    return max(record["validation_accuracy"] for record in history)
