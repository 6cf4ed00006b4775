"""One recipe for all: rows differ by how missing pixels are treated, and by nothing else.

The recipe: images are shifted (and flipped where that keeps their meaning), more is hidden of every second one, the
learning rate falls along a cosine. `UNetDMFA`, trained as `misconv.fit_density` trains it, is the density of MFA
imputation, MisConv and sampled completions; in their last epochs it learns with the classifier (joint fine-tuning). All
rows have the same number of epochs. The classifier is the paper's from its second layer on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import store
from misconv._train import Job, classifier_job, cosine_schedule, train
from misconv.mfa import MFA
from misconv.paper import splitting
from misconv.paper.augment import EXTRA, Augmented, FreshlyHidden, Versions
from misconv.paper.cache import as_json
from misconv.paper.classification import Experiment
from misconv.paper.classifiers import side_by_side
from misconv.paper.completions import SAMPLES, Sampled
from misconv.paper.densities import DensitySettings, make_density
from misconv.paper.inputs import CachedMFA, IncompleteImages, Take, point
from misconv.paper.measures import log_probabilities, measures
from misconv.paper.methods import method_named
from misconv.paper.networks import deviation_layer
from misconv.paper.rows import Row, row_named
from misconv.paper.scores import Record
from misconv.paper.settings import FULL, MIXED, SETTINGS, UNET, VALIDATION
from misconv.paper.splitting import SplittingSettings
from misconv.paper.supmiwae import SupMIWAE, SupMIWAESettings
from misconv.paper.teacher import Taught, teaching_loss

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["RECIPES", "Joint", "RecipeSettings", "Runs", "Work", "recipe_of"]

CHUNK = 1024  # images that a density sees at a time
JUDGED = 4  # completions of every validation image
TUNED_SEED = 1_000_000  # added to that of a row for the order of images in joint fine-tuning
SUPMIWAE, SPLITTING = SupMIWAESettings(), SplittingSettings()


@dataclass(frozen=True)
class RecipeSettings:
    """The recipe.

    Args:
        epochs, batch_size, learning_rate: of the classifier, with a cosine schedule until fine-tuning begins.
        precision: of the classifier's training on a GPU, in Fabric's words; tests and CPUs have full precision.
        shift, flip, hide: the augmentation, see `misconv.paper.augment.Augmented`.
        density: of all rows that have one.
        tuned: how many of the epochs, the last ones, train the density as well, where a row has one.
        tuned_learning_rate: in these epochs, with a cosine schedule of their own.
        density_learning_rate_scale: what the density's learning rate is multiplied by in these epochs.
        deviation: whether the first layer of MisConv has the deviation of its activation as a further input.
        teacher: what the answers of an averaged teacher count for in the loss of MisConv; 0 if there is none.
        supmiwae, splitting: of the rows of these names.
    """

    epochs: int
    shift: int
    density: DensitySettings
    flip: bool = False
    hide: bool = True
    batch_size: int = 128
    learning_rate: float = 2e-3
    precision: str = FULL
    tuned: int = 0
    tuned_learning_rate: float = 2e-4
    density_learning_rate_scale: float = 0.1
    deviation: bool = False
    teacher: float = 0.0
    supmiwae: SupMIWAESettings = SUPMIWAE
    splitting: SplittingSettings = SPLITTING


RECIPES: dict[str, RecipeSettings] = {
    "mnist": RecipeSettings(epochs=15, shift=2, density=UNET, tuned=5),
    "svhn": RecipeSettings(epochs=25, shift=3, density=UNET, precision=MIXED, tuned=5),
    "cifar10": RecipeSettings(epochs=40, shift=4, flip=True, density=UNET, precision=MIXED, tuned=5),
    # A pixel of these is an eighth of the image, and so are shifts.
    "digits": RecipeSettings(
        epochs=15, shift=0, batch_size=32, tuned=3,
        density=SETTINGS["digits"].unet,
        supmiwae=SupMIWAESettings(width=16, steps=2, latent=16),
        splitting=SplittingSettings(widths=(16, 32), batch_size=32),
    ),
}  # fmt: skip


def recipe_of(dataset: str) -> RecipeSettings:
    """The recipe of a data set; one without its own has that of SVHN."""
    return RECIPES.get(dataset, RECIPES["svhn"])


class Joint(nn.Module):
    """A density and the network that follows it, which learn together; incomplete images go in.

    Args:
        density: (x, observed) -> MFA. network: takes what `form` makes of that.
    """

    def __init__(self, density: nn.Module, network: nn.Module, form: Callable[[MFA], MFA]) -> None:
        super().__init__()
        self.density, self.network, self.form = density, network, form

    def forward(self, x: Tensor, observed: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.network(self.form(self.density(x, observed)))
        return out


@dataclass
class Work:
    """A row with a seed: its network, and the records of its training, of which `kept` is that of the network."""

    row: Row
    seed: int
    settings: dict[str, Any]  # of its unit
    network: nn.Module
    history: list[dict[str, float]] = field(default_factory=list)
    kept: int = -1
    seconds: float = 0.0

    @property
    def source(self) -> str:
        """What the network is given: images, once a density is part of it."""
        return "images" if isinstance(self.network, Joint) else self.row.source


class Runs:
    """The rows of one experiment by one recipe: trained once, kept, and loaded again.

    Args:
        experiment: data, missing regions, and where finished work is kept.
        recipe: by default that of the data set.
    """

    def __init__(self, experiment: Experiment, recipe: RecipeSettings | None = None) -> None:
        self.experiment = experiment
        self.recipe = recipe or recipe_of(experiment.data.name)
        if not 0 <= self.recipe.tuned < self.recipe.epochs:
            raise ValueError(f"tuned must be fewer than all {self.recipe.epochs} epochs, got {self.recipe.tuned}")
        if self.recipe.teacher and self.recipe.tuned:
            raise ValueError("a teacher must be without joint fine-tuning, which would train one without the other")
        on_cpu = experiment.device.type == "cpu"
        self.precision = FULL if on_cpu else self.recipe.precision
        self._fills: dict[str, Callable[[Tensor, Tensor], Any]] = {}
        self._versions: dict[tuple[str, bool], Versions] = {}
        self._errors: dict[str, float] = {}

    # Units -----------------------------------------------------------------------------------------------------------

    def unit(self, name: str, seed: int) -> dict[str, Any]:
        """What makes a row with a seed what it is; settings of other rows do not."""
        row, recipe = row_named(name), as_json(self.recipe)
        needed = {
            "density": row.source == "density", "tuned": row.source == "density",
            "tuned_learning_rate": self._is_tuned(row), "density_learning_rate_scale": self._is_tuned(row),
            "precision": self.precision != FULL, "deviation": name == "misconv", "teacher": name == "misconv",
            "hide": not row.complete, "supmiwae": row.marginal, "splitting": row.source == "splitting",
        }  # fmt: skip
        known = {key: value for key, value in recipe.items() if needed.get(key, True)}
        known |= {"classifier": self.experiment.settings.classifier.kind, "extra": list(EXTRA), "samples": SAMPLES}
        if row.source == "knn":
            known |= method_named("knn").settings
        common = {"method": name, "seed": seed, "validation": VALIDATION, "recipe": known}
        # A network that sees complete images alone is the same for all shapes; but it is tested on some.
        return {**self.experiment.identity, **common}

    def run(self, names: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The records of all rows with all seeds; those that are not there yet are trained, side by side."""
        return self.experiment.records(names, seeds, self.unit, self._train, "recipe")

    def known(self, names: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The records that are there."""
        found = (self.experiment.cache.get(self.unit(name, seed), "recipe") for name in names for seed in seeds)
        return [record for record in found if record is not None]

    def networks(self, names: Sequence[str], seeds: Sequence[int]) -> dict[tuple[str, int], Work]:
        """The trained networks of all rows with all seeds; those whose file is not there are trained again.

        Their records are then those of the new networks: on a GPU no two trainings end with the same bits.
        """
        self.run(names, seeds)
        wanted = [(name, seed) for name in names for seed in seeds]
        lost = [each for each in wanted if not self.experiment.cache.network(self.unit(*each)).exists()]
        if lost:
            self.experiment.say(f"{len(lost)} networks are not in the folder: they are trained and measured again")
            self.experiment.in_groups(lost, len(seeds), self._train)
        return {each: self._load(*each) for each in wanted}

    def _load(self, name: str, seed: int) -> Work:
        work = self._work(name, seed)
        if self._is_tuned(work.row) and bool((self.experiment.cache.get(work.settings) or {}).get("joint")):
            # All of its values come from the file.
            work.network = self._joint(work, make_density(self.recipe.density, self.experiment.data.shape))
        store.load(self.experiment.cache.network(work.settings), into=work.network)
        work.network.to(self.experiment.device).eval()
        return work

    # What networks are given -----------------------------------------------------------------------------------------

    def given(self, work: Work, data: IncompleteImages, said: dict[str, CachedMFA]) -> Take:
        """How a network is given some images; `said` keeps what sources say of them, for other networks."""
        if work.source == "images":
            return data.at if isinstance(work.network, Joint) else _formed(work.row, data.at)
        if bool(data.observed.all()):
            return _formed(work.row, lambda rows: point(data.at(rows)[0]))
        if work.source not in said:
            said[work.source] = CachedMFA(self.fill(work.source), data, CHUNK)
        return _formed(work.row, said[work.source])

    def fill(self, source: str) -> Callable[[Tensor, Tensor], Any]:
        """What fills missing pixels in, or says what they may be, learned from incomplete training images."""
        if source not in self._fills:
            if source == "density":
                self._fills[source] = self.experiment.density("unet", self.recipe.density)
            elif source == "splitting":
                self._fills[source] = splitting.inpainter(self.experiment, self.recipe.splitting)
            else:
                fit = method_named(source).fit_imputer
                assert fit is not None
                self._fills[source] = fit(*self.experiment.train.at(self.experiment.split[0]))
        return self._fills[source]

    def versions(self, source: str, complete: bool) -> Versions:
        """The training images with more and more hidden, and what the source says of them."""
        if (source, complete) not in self._versions:
            data = self.experiment.whole("train") if complete else self.experiment.train
            self._versions[source, complete] = Versions(data, None if source == "images" else self.fill(source), CHUNK)
        return self._versions[source, complete]

    # Training --------------------------------------------------------------------------------------------------------

    @cached_property
    def fabric(self) -> Fabric:
        """Where and how precisely classifiers are trained; densities have full precision."""
        return self.experiment.fabric_with(self.precision)

    def _is_tuned(self, row: Row) -> bool:
        return bool(self.recipe.tuned) and row.source == "density"

    def _is_taught(self, row: Row) -> bool:
        return bool(self.recipe.teacher) and row.name == "misconv"

    def _work(self, name: str, seed: int) -> Work:
        row, experiment = row_named(name), self.experiment
        first = deviation_layer if self.recipe.deviation and name == "misconv" else row.first_layer
        network = experiment.network(first, experiment.settings.classifier.kind, seed)
        if self.precision != FULL:  # by a third faster on an H200, also where the network is small
            network = network.to(memory_format=torch.channels_last)
        if self._is_taught(row):
            network = Taught(network)
        if row.draw is not None:
            network = Sampled(network, row.draw, JUDGED)
        if row.marginal:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network = SupMIWAE(network, experiment.data.shape, self.recipe.supmiwae, JUDGED).to(experiment.device)
        return Work(row, seed, self.unit(name, seed), network)

    def _joint(self, work: Work, density: nn.Module) -> Joint:
        return Joint(copy.deepcopy(density).requires_grad_(True), copy.deepcopy(work.network), work.row.form)

    def _train(self, units: Sequence[tuple[str, int]]) -> None:
        experiment, works = self.experiment, [self._work(*each) for each in units]
        titles = ", ".join(dict.fromkeys(work.row.title for work in works))
        experiment.say(f"{experiment.data.title}, {experiment.shape}: training {titles}{side_by_side(len(works))}")
        tuned = [work for work in works if self._is_tuned(work.row)]
        others = [work for work in works if not self._is_tuned(work.row)]
        checkpoints = [self._stage(others, self.recipe.epochs)] if others else []
        if tuned:
            checkpoints += [self._stage(tuned, self.recipe.epochs - self.recipe.tuned), self._tune(tuned)]
        tested = []
        said: dict[str, CachedMFA] = {}
        for work in works:
            takes = self.given(work, experiment.test, said), self.given(work, experiment.whole("test"), {})
            record = self._record(work, len(works), *takes)
            if isinstance(work.network, Joint):  # its density is its own
                record["rmse"] = self._rmse(CachedMFA(work.network.density, experiment.test, CHUNK))
            elif work.source in said:
                if work.source not in self._errors:
                    self._errors[work.source] = self._rmse(said[work.source])
                record["rmse"] = self._errors[work.source]
            store.save(work.network, experiment.cache.network(work.settings))
            tested.append((work.settings, record))
        experiment.keep(tested, checkpoints)

    @torch.no_grad()
    def _rmse(self, said: CachedMFA) -> float:
        """Of the mean of the hidden pixels of the test images."""
        truth, hidden = self.experiment.whole("test"), ~self.experiment.test.observed
        total = count = 0.0
        for rows in torch.arange(len(truth), device=hidden.device).split(CHUNK):
            error = (said(rows).mean - truth.at(rows)[0]).masked_fill(~hidden[rows], 0).double()
            total, count = total + float(error.square().sum()), count + error.shape[1] * float(hidden[rows].sum())
        return math.sqrt(total / count)

    def _tune(self, works: Sequence[Work]) -> Path:
        """Train each network together with a copy of its density; returns where the checkpoint is."""
        before = [(work.network, work.history, work.kept) for work in works]
        density = self.experiment.density("unet", self.recipe.density)
        for work in works:
            work.network = self._joint(work, density)
        checkpoint = self._stage(works, self.recipe.tuned, tuned=True)
        for work, (network, history, kept) in zip(works, before, strict=True):
            # All epochs compete; where no later one is better, the network stays as it was before.
            if _is_better(work.history[work.kept], history[kept]):
                work.kept += len(history)
            else:
                work.network, work.kept = network, kept
            later = [{**record, "epoch": record["epoch"] + len(history)} for record in work.history]
            work.history = history + later
        return checkpoint

    def _stage(self, works: Sequence[Work], epochs: int, *, tuned: bool = False) -> Path:
        """Train the networks side by side; returns where the checkpoint is."""
        jobs = [self._job(work, epochs, tuned) for work in works]
        checkpoint = self.experiment.cache.running([job.settings for job in jobs])
        histories = train(
            jobs, self.fabric, epochs=epochs, checkpoint=checkpoint, progress=self.experiment.progress,
            checkpoint_seconds=self.experiment.pause, title=f"{len(jobs)} classifiers", transient=True,
        )  # fmt: skip
        for work, job, history in zip(works, jobs, histories, strict=True):
            work.history, work.kept = list(history), history.kept
            work.seconds += job.seconds
        return checkpoint

    def _job(self, work: Work, epochs: int, tuned: bool) -> Job:
        recipe, (rows, held), labels = self.recipe, self.experiment.split, self.experiment.labels[0]
        augmented, as_they_are = self._augmented(work, rows), self._as_they_are(work, held)
        formed: Callable[[Take], Take] = (lambda take: take) if tuned else (lambda take: _formed(work.row, take))
        rate = recipe.supmiwae.learning_rate if work.row.marginal else recipe.learning_rate
        rate = recipe.tuned_learning_rate if tuned else rate
        # Joint fine-tuning goes on with other orders and moves of the images than those of the first epochs.
        done, order = len(work.history), work.seed + (TUNED_SEED if tuned else 0)
        job = classifier_job(
            work.network, formed(augmented), labels[rows], self.fabric,
            validation_inputs=formed(as_they_are), validation_labels=labels[held], batch_size=recipe.batch_size,
            seed=order, begin=lambda epoch: augmented.begin(done + epoch), learning_rate=cosine_schedule(rate, epochs),
            learning_rate_scale={"density.": recipe.density_learning_rate_scale} if tuned else None,
            settings=work.settings | {"stage": "tuned" if tuned else "epochs"},
            name=f"{work.row.title}, seed {work.seed},", count=False,
        )  # fmt: skip
        if work.row.marginal:
            return replace(job, loss=_bound(augmented, labels[rows]))
        if self._is_taught(work.row):
            takes = augmented, augmented.with_less_hidden
            return replace(job, loss=teaching_loss(formed, *takes, labels[rows], recipe.teacher))
        return job

    def _augmented(self, work: Work, rows: Tensor) -> Augmented:
        recipe, row = self.recipe, work.row
        versions = self.versions(work.source, row.complete)
        moves: dict[str, Any] = {"shift": recipe.shift, "flip": recipe.flip}
        if row.fresh:
            return FreshlyHidden(versions, rows, work.seed, **moves)
        hide = recipe.hide and not row.complete
        return Augmented(versions, rows, work.seed, hide=hide, cached=work.source != "images", **moves)

    def _as_they_are(self, work: Work, rows: Tensor) -> Augmented:
        versions, cached = self.versions(work.source, work.row.complete), work.source != "images"
        return Augmented(versions, rows, work.seed, hide=False, shift=0, flip=False, cached=cached)

    def _record(self, work: Work, side_by_side: int, incomplete: Take, whole: Take) -> Record:
        """Look at the test images, once: as they are, and with nothing missing."""
        experiment, best = self.experiment, work.history[work.kept]
        truth = experiment.labels[1]
        average_more(work.network)
        found = [
            measures(log_probabilities(work.network, take, len(truth), experiment.device), truth)
            for take in (incomplete, whole)
        ]
        return {
            "kind": "recipe", **experiment.circumstances(), "method": work.row.name, "seed": work.seed,
            "accuracy_incomplete": found[0].pop("accuracy"), "accuracy_complete": found[1]["accuracy"], **found[0],
            "accuracy_validation": best["validation_accuracy"], "epoch": int(best["epoch"]) + 1,
            "epochs": len(work.history), "seconds": work.seconds, "side_by_side": side_by_side,
            "joint": isinstance(work.network, Joint),
        }  # fmt: skip


def average_more(network: nn.Module) -> None:
    """From now on take as many completions of every image as for a test."""
    for part in network.modules():
        if isinstance(part, Sampled | SupMIWAE):
            part.samples = SAMPLES


def _formed(row: Row, take: Take) -> Take:
    def formed(rows: Tensor) -> Any:
        given = take(rows)
        return row.form(*given) if isinstance(given, tuple) else row.form(given)

    return formed


def _bound(take: Take, labels: Tensor) -> Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]:
    """The loss of supMIWAE."""

    def loss(model: nn.Module, indices: Tensor) -> tuple[Tensor, Tensor]:
        x, observed = take(indices)
        total = -model(x, observed, labels[indices]).sum()
        return total / len(indices), total.detach().unsqueeze(0)

    return loss


def _is_better(later: dict[str, float], earlier: dict[str, float]) -> bool:
    return later["validation_accuracy"] > earlier["validation_accuracy"]
