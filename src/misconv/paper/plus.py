"""MisConv+: a recipe of our own beside the paper's settings, and what each of its ingredients is worth.

It learns from the same incomplete images, and its classifier is the paper's from the second layer on. New are:

- a density with skip connections, trained on regions of several shapes with a falling learning rate;
- the mask as one more, certain, input channel of the first layer;
- augmentation: more is hidden, and images are shifted (and flipped where that keeps their meaning); what a shift brings
  in from beyond the border is simply missing;
- the density goes on learning, with the classifier's loss;
- a falling learning rate, weight decay, smoothed labels, larger batches and more epochs.

A variant leaves one of them out. The last variant leaves MisConv itself out: zeros and the mask, by the same recipe.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from misconv import impute, missing
from misconv.mfa import MFA
from misconv.paper.classification import VALIDATION, Experiment, Record, falling
from misconv.paper.inputs import Incomplete, Take
from misconv.paper.networks import Classifier, first_layer
from misconv.training import classifier_job, train

__all__ = ["PLUS", "VARIANTS", "Augmented", "Plus", "run_plus"]

_DENSITY = {
    "kind": "ConvDMFA", "rank": 4, "components": 1, "widths": [32, 64, 128], "depths": [2, 2, 4, 2, 2], "skips": True,
    "epochs": 30, "batch_size": 128, "rates": [2e-3], "falling": True, "mse_epochs": 2, "shapes": "several",
}  # fmt: skip
_RECIPE = {
    "batch_size": 128, "rate": 2e-3, "weight_decay": 1e-2, "label_smoothing": 0.1, "density_rate": 0.1,
    "density": _DENSITY,
}  # fmt: skip
PLUS: dict[str, dict[str, Any]] = {
    "mnist": {**_RECIPE, "epochs": 30, "shift": 2, "flip": False},
    "svhn": {**_RECIPE, "epochs": 30, "shift": 3, "flip": False},
    "cifar10": {**_RECIPE, "epochs": 60, "shift": 4, "flip": True},
    "digits": {
        **_RECIPE, "epochs": 15, "shift": 1, "flip": False, "batch_size": 32,
        "density": {**_DENSITY, "widths": [16, 32], "depths": [1, 1, 1], "epochs": 10, "batch_size": 48},
    },
}  # fmt: skip
# What a variant changes in the recipe.
VARIANTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "without the mask channel": {"mask": False},
    "without joint training": {"density_rate": 0.0},
    "without hiding more": {"hide": False},
    "without shifts": {"shift": 0, "flip": False},
    "with the paper's density": {"density": "paper"},
    "without weight decay and smoothing": {"weight_decay": 0.0, "label_smoothing": 0.0},
    "without MisConv (zeros and mask)": {"density": None},
}
EXTRA = (1 / 16, 1 / 8, 1 / 4)  # how much more is hidden, epoch by epoch in turn, of every second image


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
        p = MFA.point(impute.zero(x, observed)) if self.density is None else self.density(x, observed)
        out: Tensor = self.classifier(with_mask(p, observed) if self.mask else p)
        return out


def with_mask(p: MFA, observed: Tensor) -> MFA:
    """The MFA of images with one more channel, the mask, which is certain."""
    batch, components, rank, channels, height, width = p.factors.shape
    mask = observed[:, :1].to(p.dtype).expand(batch, 1, height, width)
    seen = torch.ones_like(mask, dtype=torch.bool) if p.observed is None else p.observed
    return MFA(
        p.logits,
        torch.cat([p.means, mask.unsqueeze(1).expand(batch, components, 1, height, width)], 2),
        torch.cat([p.factors, p.factors.new_zeros(batch, components, rank, 1, height, width)], 3),
        torch.cat([p.noise, p.noise.new_zeros(batch, components, 1, height, width)], 2),
        torch.cat([seen.expand(batch, channels, height, width), torch.ones_like(mask, dtype=torch.bool)], 1),
        check=False,
    )


class Augmented:
    """Incomplete images, of which more is hidden, shifted and flipped anew in every epoch.

    Args:
        data, rows: the images, and which of them.
        hide: whether more is hidden. shift: by at most so many pixels. flip: left and right.
    """

    def __init__(self, data: Incomplete, rows: Tensor, seed: int, *, hide: bool, shift: int, flip: bool) -> None:
        self.data, self.rows, self.seed = data, rows, seed
        self.hide, self.shift, self.flip = hide, shift, flip
        device, size = rows.device, len(rows)
        self.shown = torch.ones(size, *data.observed.shape[1:], dtype=torch.bool, device=device)
        self.moves = torch.zeros(3, size, dtype=torch.int64, device=device)  # down, right, flipped

    def begin(self, epoch: int) -> None:
        """Draw for one epoch, into the memory that a captured step reads."""
        generator = torch.Generator(self.rows.device).manual_seed(self.seed * 1_000_003 + 700_000 + epoch)
        size, _, height, width = self.shown.shape
        if self.hide:
            shown = missing.square(size, height, width, fraction=EXTRA[epoch % len(EXTRA)], generator=generator)
            spared = torch.rand(size, 1, 1, 1, generator=generator, device=self.rows.device) < 0.5
            self.shown.copy_(shown | spared)
        if self.shift:
            self.moves[:2].random_(-self.shift, self.shift + 1, generator=generator)
        if self.flip:
            self.moves[2].random_(0, 2, generator=generator)

    def __call__(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images and what is observed of them."""
        x, observed = self.data.at(self.rows[indices])
        observed = observed & self.shown[indices]
        if not self.shift and not self.flip:
            return x, observed
        height, width = x.shape[-2:]
        down, right, flipped = self.moves[:, indices].unsqueeze(-1)  # (B, 1) each
        rows = torch.arange(height, device=x.device) + down  # (B, H), where each pixel comes from
        columns = torch.arange(width, device=x.device)
        columns = torch.where(flipped > 0, width - 1 - columns, columns) + right  # (B, W)
        inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
        source = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
        source = source.flatten(1).unsqueeze(1)  # (B, 1, H·W)
        moved = x.flatten(2).gather(2, source.expand(-1, x.shape[1], -1)).view(x.shape)
        seen = observed.flatten(2).gather(2, source).view(observed.shape) & inside.unsqueeze(1)
        return moved, seen


def recipe(experiment: Experiment, variant: str) -> dict[str, Any]:
    """The settings of a variant on a data set."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    chosen = {"mask": True, "hide": True, **PLUS.get(experiment.data.name, PLUS["svhn"]), **VARIANTS[variant]}
    return {**chosen, "classifier": experiment.settings["classifier"]["kind"]}


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
    cache = experiment.cache
    wanted = [(variant, seed) for variant in variants for seed in seeds]
    todo = [u for u in wanted if cache.get(unit(experiment, *u)) is None]
    limit = 24 if experiment.device.type == "cuda" else len(seeds)
    for start in range(0, len(todo), limit):
        _train(experiment, todo[start : start + limit])
    records = [cache.get(unit(experiment, *u)) for u in wanted]
    return [record for record in records if record is not None]


def _train(experiment: Experiment, units: Sequence[tuple[str, int]]) -> None:
    rows, held = experiment.split
    labels = experiment.labels[0]
    networks = [_network(experiment, variant, seed) for variant, seed in units]
    experiment.say(f"{experiment.data.title}, {experiment.shape}: training MisConv+, {len(units)} side by side")
    clock, jobs, epochs = time.perf_counter(), [], 0
    for (variant, seed), network in zip(units, networks, strict=True):
        chosen = recipe(experiment, variant)
        epochs = chosen["epochs"]
        augmented = Augmented(
            experiment.train, rows, seed, hide=chosen["hide"], shift=chosen["shift"], flip=chosen["flip"]
        )
        jobs.append(
            classifier_job(
                network, augmented, labels[rows], experiment.fabric, validation_inputs=_plain(experiment.train, held),
                validation_labels=labels[held], batch_size=chosen["batch_size"], seed=seed, begin=augmented.begin,
                learning_rate=falling(chosen["rate"], epochs), weight_decay=chosen["weight_decay"],
                label_smoothing=chosen["label_smoothing"], factors={"density.": chosen["density_rate"]},
                settings=unit(experiment, variant, seed),
            )
        )  # fmt: skip
    checkpoint = experiment.cache.running([job.settings for job in jobs])
    histories = train(
        jobs, experiment.fabric, epochs=epochs, checkpoint=checkpoint, checkpoint_seconds=experiment.pause,
        progress=experiment.progress, title=f"{len(jobs)} × MisConv+", stays=False,
    )  # fmt: skip
    seconds = (time.perf_counter() - clock) / len(units)
    everything = torch.ones_like(experiment.test.observed)
    takes: tuple[Take, Take] = (
        experiment.test.at,
        Incomplete(experiment.data.test.to(experiment.device), everything).at,
    )
    for (variant, seed), job, history in zip(units, jobs, histories, strict=True):
        experiment.finish(
            unit(experiment, variant, seed), "misconv_plus", seed, job.module, history, seconds, len(units), takes,
            extra={"variant": variant},
        )  # fmt: skip
    checkpoint.unlink(missing_ok=True)


def _network(experiment: Experiment, variant: str, seed: int) -> Plus:
    chosen = recipe(experiment, variant)
    density = None
    if chosen["density"] is not None:
        if chosen["density"] != "paper":
            experiment.offer("plus", chosen["density"])
        density = copy.deepcopy(experiment.density("dmfa" if chosen["density"] == "paper" else "plus"))
        density.requires_grad_(True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = first_layer("mask" if chosen["mask"] else "misconv_dmfa", experiment.data.shape[0])
        shape, classes = experiment.data.shape, experiment.data.classes
        return Plus(density, Classifier(first, shape, classes, chosen["classifier"]), chosen["mask"])


def _plain(data: Incomplete, rows: Tensor) -> Take:
    return lambda indices: data.at(rows[indices])
