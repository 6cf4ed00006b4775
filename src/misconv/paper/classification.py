"""Tables 1, 2, 6, 8 and 9: one classifier, many ways to treat missing pixels.

The protocol: every image has one missing region for its whole life, and what lies under it is erased before anything
else happens (only GT, and the flow of ACFlow, see complete images). A tenth of the training images, set aside, chooses
the epoch; test images are looked at once, by the chosen one. Seeds differ in the classifier's first weights, the order
of images and dropout; regions, split and densities are the same for all of them, so methods can be compared seed by
seed.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import missing, store
from misconv._store import commit, device_name, versions
from misconv._train import Job, as_floats, classifier_job, count_right, one_device, train
from misconv.data import ImageSet
from misconv.density import SMFA, ConvDMFA
from misconv.layers import MisConv2d
from misconv.paper.acflow import ACFlow
from misconv.paper.cache import Cache, as_json, key
from misconv.paper.classifiers import MethodInputs, Trained, side_by_side
from misconv.paper.densities import (
    TITLES,
    AnySettings,
    check_density,
    group_of,
    job_of,
    learns_from_complete,
    make_density,
)
from misconv.paper.inputs import BYTE, CachedMFA, IncompleteImages, Take
from misconv.paper.methods import Method, method_named
from misconv.paper.networks import Classifier
from misconv.paper.scores import Record
from misconv.paper.settings import FULL, REGIONS, SETTINGS, VALIDATION, Settings
from misconv.training import fit_density

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Experiment"]


Fit = tuple[str, AnySettings, dict[str, Any]]  # a density's name and settings, and those of its unit
# How many classifiers are trained side by side on a GPU, and how often their state is put on the disk.
SIDE_BY_SIDE, CHECKPOINT_SECONDS = 48, 60.0


class Experiment:
    """One data set with one kind of missing region: its densities and classifiers, each trained once and cached.

    Args:
        data: images and labels.
        shape: of the missing regions, one of `REGIONS`.
        cache: where finished units are kept.
        fabric: devices and precision; one process.
        settings: like those in `SETTINGS`, or None for the ones of this data set (of SVHN, if it is not there).
        progress: whether to show bars. say: called with a line at every stage.
        filler: what stands at missing pixels; nothing may depend on it.
    """

    def __init__(
        self,
        data: ImageSet,
        shape: str,
        cache: Cache,
        fabric: Fabric,
        *,
        settings: Settings | None = None,
        progress: bool = True,
        say: Callable[[str], None] = lambda line: None,
        filler: float = 0.0,
    ) -> None:
        if shape not in REGIONS:
            raise ValueError(f"shape must be one of {', '.join(REGIONS)}, got {shape!r}")
        self.data, self.shape, self.cache, self.fabric = data, shape, cache, fabric
        self.settings = settings or SETTINGS.get(data.name, SETTINGS["svhn"])
        self.progress, self.say, self.filler = progress, say, filler
        self.device = fabric.device
        # What is made once: densities and imputers that were fitted, what they say, and how images are given.
        self._densities: dict[str, nn.Module] = {}
        self._imputers: dict[str, Any] = {}
        self._cached: dict[tuple[str, str], CachedMFA] = {}
        self._complete: dict[str, IncompleteImages] = {}
        self._takes: dict[tuple[str, str], Take] = {}

    def by(self, settings: Settings) -> Experiment:
        """The same experiment with other settings."""
        more: dict[str, Any] = {"progress": self.progress, "say": self.say, "filler": self.filler}
        return Experiment(self.data, self.shape, self.cache, self.fabric, settings=settings, **more)

    def fabric_with(self, precision: str) -> Fabric:
        """For trainings on a GPU with less precision; a CPU has full precision."""
        if precision == FULL or self.device.type == "cpu":
            return self.fabric
        return one_device(self.device, precision)

    # Data ------------------------------------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What every unit of this experiment has in common."""
        parts = (self.data.train, self.data.train_labels, self.data.test, self.data.test_labels)
        check = 0
        for part in (each for each in parts if each is not None):
            check = zlib.crc32(part.numpy().tobytes(), check)
        return {"dataset": self.data.name, "crc32": check, "shape": self.shape, "fraction": REGIONS[self.shape]}

    @cached_property
    def train(self) -> IncompleteImages:
        """All training images; those of validation among them."""
        return self.with_missing(self.data.train, 1)

    @cached_property
    def test(self) -> IncompleteImages:
        """The test images."""
        return self.with_missing(self.data.test, 2)

    @cached_property
    def labels(self) -> tuple[Tensor, Tensor]:
        """Of training and test images, on the device."""
        train, test = self.data.labels
        return train.to(self.device), test.to(self.device)

    @cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """Indices of the images to train on, and of those that choose the epoch."""
        size = len(self.data.train)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(3), device="cpu").to(self.device)
        held = round(VALIDATION * size)
        return order[held:], order[:held]

    def with_missing(self, images: Tensor, seed: int, share: float | None = None) -> IncompleteImages:
        """Images with regions of this experiment's shape missing, and of its share, if no other is given."""
        generator = torch.Generator().manual_seed(seed)
        fraction = REGIONS[self.shape] if share is None else share
        draw = partial(missing.trapezoid, cut=True) if self.shape == "cut" else getattr(missing, self.shape)
        observed = draw(len(images), *images.shape[2:], fraction=fraction, generator=generator)
        return IncompleteImages(images.to(self.device), observed.to(self.device), self.filler)

    # Densities -------------------------------------------------------------------------------------------------------

    def density_settings(self, name: str, chosen: AnySettings | None = None) -> dict[str, Any]:
        """What makes a density what it is: "smfa", "dmfa", "acflow", or another name with settings chosen for it."""
        chosen = chosen or self.settings.density(name)
        # What learns from complete images serves all shapes.
        shapes = {"shape": "any", "fraction": None} if learns_from_complete(chosen) else {}
        return {**self.identity, **shapes, "density_kind": name, "density": as_json(chosen), "seed": 0}

    def density(self, name: str, chosen: AnySettings | None = None) -> nn.Module:
        """A density of this data set, trained the first time: on incomplete images, a flow on complete ones."""
        chosen = chosen or self.settings.density(name)
        settings = self.density_settings(name, chosen)
        if key(settings) not in self._densities:
            self.fit_densities([(name, chosen)])
            path = self.cache.density(settings)
            density = store.load(path).to(self.device)
            check_density(path, density, chosen, self.data.shape)
            if isinstance(density, ConvDMFA):
                density.to(memory_format=torch.channels_last)
            self._densities[key(settings)] = density.eval().requires_grad_(False)
        return self._densities[key(settings)]

    def fit_densities(self, wanted: Iterable[tuple[str, AnySettings]]) -> None:
        """Train densities, by their names and settings, that are not there yet; those that can be, side by side.

        A density alone leaves most of a GPU idle: its kernels are small, and wait for each other.
        """
        groups: dict[Any, dict[str, Fit]] = {}
        for name, chosen in wanted:
            settings = self.density_settings(name, chosen)
            # Its record is looked at, too, which is refused if another version wrote it.
            if self.cache.get(settings, "fit") is None or not self.cache.density(settings).exists():
                groups.setdefault(group_of(chosen), {})[key(settings)] = name, chosen, settings
        for fits in groups.values():
            self._fit(list(fits.values()))

    def _fit(self, fits: Sequence[Fit]) -> None:
        names, chosen, settings = zip(*fits, strict=True)
        titles = ", ".join(TITLES[name] for name in names)
        self.say(f"{self.data.title}, {self.shape}: learning what may be missing ({titles})")
        clock = time.perf_counter()
        densities = [make_density(each, self.data.shape) for each in chosen]
        checkpoint = self.cache.running(list(settings))
        if isinstance(densities[0], SMFA):
            # What is missing was erased, so that no method can read it; bytes have no NaN.
            x = as_floats(self.train.images, BYTE)
            histories = [
                fit_density(
                    densities[0], x, self.train.observed, epochs=chosen[0].epochs, checkpoint=checkpoint,
                    fabric=self.fabric, progress=self.progress,
                )
            ]  # fmt: skip
            seconds = time.perf_counter() - clock
        else:
            images = self.whole("train") if learns_from_complete(chosen[0]) else self.train
            jobs = [job_of(*each, images, self.fabric) for each in zip(densities, chosen, strict=True)]
            histories = train(
                jobs, self.fabric, epochs=chosen[0].epochs, checkpoint=checkpoint, checkpoint_seconds=self.pause,
                progress=self.progress, title=titles,
            )  # fmt: skip
            seconds = jobs[0].seconds  # each has the same share
        for density, each, history in zip(densities, settings, histories, strict=True):
            fitted = {**self.circumstances(), "shape": each["shape"], "seconds": seconds, "history": history}
            self.cache.keep(each, {"kind": "fit", **fitted, "side_by_side": len(fits)})
            # The density last: where there is one, there is its record.
            store.save(density.eval(), self.cache.density(each))
        checkpoint.unlink(missing_ok=True)

    def quality(self, name: str) -> Record:
        """A record of how well a density predicts the missing pixels of the test images (Table 7)."""
        settings = {**self.density_settings(name), **self.identity, "variant": "quality"}
        found = self.cache.get(settings, "density")
        if found is not None:
            return found
        from misconv.paper.quality import quality

        density = self.density(name)
        fitted = self.cache.get(self.density_settings(name), "fit")
        figures = quality(density, self.data.test.to(self.device), self.test.observed)
        # The PSNR of images that were all filled without any error is no number that JSON knows.
        measured = {each: value if math.isfinite(value) else None for each, value in figures.items()}
        seconds = {} if fitted is None else {"seconds": fitted["seconds"]}
        return self.cache.keep(
            settings, {"kind": "density", **self.circumstances(), "density": TITLES[name], **measured, **seconds}
        )

    # Classifiers -----------------------------------------------------------------------------------------------------

    def unit(self, name: str, seed: int) -> dict[str, Any]:
        """What makes a method with a seed what it is."""
        method = method_named(name)
        density = None if method.density is None else as_json(self.settings.density(method.density))
        return {
            **self.identity, **method.settings, "method": name, "seed": seed, "validation": VALIDATION,
            "classifier": as_json(self.settings.classifier), "density": density,
        }  # fmt: skip

    def run(self, methods: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The records of all methods with all seeds; those that are not there yet are trained."""
        return self.records(methods, seeds, self.unit, self._train)

    def is_done(self, methods: Sequence[str], seeds: Sequence[int]) -> bool:
        """Whether nothing of this is left to train."""
        return all(self.cache.get(self.unit(name, seed)) for name in methods for seed in seeds)

    def records(
        self,
        names: Sequence[str],
        seeds: Sequence[int],
        unit: Callable[[str, int], dict[str, Any]],
        train: Callable[[Sequence[tuple[str, int]]], None],
        kind: str = "classification",
    ) -> list[Record]:
        """Of all names with all seeds, each of which is a unit; those that are not there are trained side by side."""
        wanted = [(name, seed) for name in names for seed in seeds]
        todo = [each for each in wanted if self.cache.get(unit(*each), kind) is None]
        self.in_groups(todo, len(seeds), train)
        found = [self.cache.get(unit(*each), kind) for each in wanted]
        return [record for record in found if record is not None]

    def in_groups(
        self, todo: Sequence[tuple[str, int]], seeds: int, train: Callable[[Sequence[tuple[str, int]]], None]
    ) -> None:
        """Train as many of some units at a time as the device takes; a CPU all seeds of a method."""
        limit = SIDE_BY_SIDE if self.device.type == "cuda" else max(seeds, 1)
        for start in range(0, len(todo), limit):
            train(todo[start : start + limit])

    def inputs_of(self, name: str) -> MethodInputs:
        """What the classifier of a method is given."""
        method = method_named(name)
        return MethodInputs(
            method.first_layer,
            self.take(method, "train"),
            lambda: (self.take(method, "test"), method.complete(self.whole("test"))),
        )

    def _train(self, units: Sequence[tuple[str, int]]) -> None:
        titles = ", ".join(dict.fromkeys(method_named(name).title for name, _ in units))
        self.train_units(units, self.unit, self.inputs_of, titles)

    def train_units(
        self,
        units: Sequence[tuple[str, int]],
        unit: Callable[[str, int], dict[str, Any]],
        inputs_of: Callable[[str], MethodInputs],
        titles: str,
        variant: str | None = None,
    ) -> None:
        """Train some classifiers side by side, test them, and keep their records.

        Args:
            titles: what is said to be trained. variant: what is done otherwise than usual, if anything is.
        """
        inputs = {name: inputs_of(name) for name, _ in units}
        self.say(f"{self.data.title}, {self.shape}: training {titles}{side_by_side(len(units))}")
        jobs = [self._job(name, seed, unit(name, seed), inputs[name]) for name, seed in units]
        checkpoint = self.cache.running([job.settings for job in jobs])
        histories = train(
            jobs, self.fabric, epochs=self.settings.classifier.epochs, checkpoint=checkpoint,
            checkpoint_seconds=self.pause, progress=self.progress, title=f"{len(units)} classifiers", transient=True,
        )  # fmt: skip
        tested = []
        for (name, seed), job, history in zip(units, jobs, histories, strict=True):
            method = method_named(name)
            trained = Trained(unit(name, seed), method, seed, job.module, history, job.seconds, len(jobs), variant)
            tested.append((trained.settings, self.test_once(trained, *inputs[name].test())))
        self.keep(tested, [checkpoint])

    def keep(self, tested: Sequence[tuple[dict[str, Any], Record]], checkpoints: Sequence[Path]) -> None:
        """Write records by the settings of their units, one by one, and remove the checkpoints of their training.

        With the first record the checkpoints have no use: if this is interrupted, fewer units are missing than were
        trained together, and these are trained again.
        """
        for settings, record in tested:
            self.cache.keep(settings, record)
            for checkpoint in checkpoints:
                checkpoint.unlink(missing_ok=True)

    def _job(self, name: str, seed: int, settings: dict[str, Any], inputs: MethodInputs) -> Job:
        chosen, labels = self.settings.classifier, self.labels[0]
        rows, held = self.split
        return classifier_job(
            self.network(inputs.first_layer, chosen.kind, seed), _at(inputs.train, rows), labels[rows], self.fabric,
            validation_inputs=_at(inputs.train, held), validation_labels=labels[held], batch_size=chosen.batch_size,
            learning_rate=chosen.learning_rate, seed=seed, settings=settings,
            name=f"{method_named(name).title}, seed {seed},", count=False,
        )  # fmt: skip

    def test_once(self, trained: Trained, incomplete: Take, whole: Take) -> Record:
        """Look at the test images, once: as they are, and with nothing missing."""
        network = trained.network.eval()
        best = trained.history[trained.history.kept]
        truth = self.labels[1]
        first = getattr(network, "first", None)
        if trained.method.name == "misconv_dmfa" and isinstance(first, MisConv2d):  # for the figure of its responses
            store.save(first, self.cache.layer(trained.settings))
        with torch.no_grad():
            right = [count_right(network, take, truth, self.device, 1000) for take in (incomplete, whole)]
        return {
            "kind": "classification",
            **self.circumstances(),
            "method": trained.method.name,
            "seed": trained.seed,
            "accuracy_incomplete": right[0] / len(truth),
            "accuracy_complete": right[1] / len(truth),
            "accuracy_validation": best["validation_accuracy"],
            "epoch": int(best["epoch"]) + 1,
            "epochs": len(trained.history),
            "seconds": trained.seconds,
            "side_by_side": trained.side_by_side,
            **({} if trained.variant is None else {"variant": trained.variant}),
        }

    def take(self, method: Method, part: str) -> Take:
        """How a method gives training or test images to its network."""
        if (method.name, part) not in self._takes:
            data = self.whole(part) if method.takes_complete else self._part(part)
            if method.inputs is None:
                raise ValueError(f"method must be one that this experiment can train, got {method.name!r}")
            self._takes[method.name, part] = method.inputs(data, self._fitted(method, part))
        return self._takes[method.name, part]

    def _part(self, part: str) -> IncompleteImages:
        return self.train if part == "train" else self.test

    def _fitted(self, method: Method, part: str) -> Any:
        """The imputer of a method, fitted to incomplete training images, or what its density says of these images."""
        if method.density is not None:
            # Methods that use the same density share what it says.
            if (method.density, part) not in self._cached:
                density = self.density(method.density)
                says = density.impute if isinstance(density, ACFlow) else density
                self._cached[method.density, part] = CachedMFA(says, self._part(part))
            return self._cached[method.density, part]
        if method.fit_imputer is not None and method.name not in self._imputers:
            self._imputers[method.name] = method.fit_imputer(*self.train.at(self.split[0]))
        return self._imputers.get(method.name)

    def whole(self, part: str) -> IncompleteImages:
        """Training or test images with nothing missing, for GT and for Table 2."""
        if part not in self._complete:
            images = self.data.train if part == "train" else self.data.test
            self._complete[part] = IncompleteImages.complete(images.to(self.device))
        return self._complete[part]

    def network(self, first_layer: Callable[[int], nn.Module], kind: str, seed: int) -> nn.Module:
        """A classifier with the first weights of that seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = Classifier(first_layer(self.data.shape[0]), self.data.shape, self.data.classes, kind)
        return network.to(self.device)

    @property
    def pause(self) -> float:
        """A GPU ends an epoch in a second; a CPU takes long, and loses nothing by writing each."""
        return CHECKPOINT_SECONDS if self.device.type == "cuda" else 0.0

    def circumstances(self) -> dict[str, Any]:
        """Where and with what a record was made."""
        return {
            "dataset": self.data.name,
            "title": self.data.title,
            "shape": self.shape,
            "device": device_name(self.device),
            "versions": versions(self.device),
            "commit": commit(),
        }


def _at(take: Take, rows: Tensor) -> Take:
    return lambda indices: take(rows[indices])
