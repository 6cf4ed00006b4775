"""Tables 1, 2, 6, 8 and 9: one classifier, many ways to treat missing pixels.

The protocol: every image has one missing region for its whole life, and what lies under it is erased before anything
else happens (only GT sees complete images). A tenth of the training images, set aside, chooses the epoch; test images
are looked at once, by the chosen one. Seeds differ in the classifier's first weights, the order of images and dropout;
regions, split and densities are the same for all of them, so methods can be compared seed by seed.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import impute, missing, store
from misconv._store import commit, device_name, versions
from misconv._train import Job, classifier_job, count_right, train
from misconv.data import ImageSet
from misconv.density import SMFA, ConvDMFA
from misconv.layers import MisConv2d
from misconv.paper.cache import Cache
from misconv.paper.densities import job_of, make_density
from misconv.paper.inputs import Incomplete, Remembered, Take, complete, of_method
from misconv.paper.networks import Classifier, first_layer
from misconv.paper.printed import METHODS as ROWS
from misconv.paper.scores import Record
from misconv.training import fit_density

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["METHODS", "SETTINGS", "SHAPES", "Experiment"]

# The paper's appendix A. Of the convolutional density the text says a learning rate of 4e-5, then 1e-5; the authors'
# code runs 4e-4, then 1e-4, and so do we. The paper says nothing of the size of SMFA; here it is that of their code.
_LINEAR = {
    "kind": "LinearDMFA", "rank": 4, "epochs": 20, "batch_size": 48, "rates": [4e-5], "mse_epochs": 0, "clip": None,
}  # fmt: skip
_CONVOLUTIONAL = {
    "kind": "ConvDMFA", "rank": 4, "epochs": 100, "batch_size": 64, "rates": [4e-4, 1e-4], "mse_epochs": 10,
}  # fmt: skip
_SMFA = {"kind": "SMFA", "components": 50, "rank": 6, "epochs": 30}
# Not in the paper: small enough for a few minutes on a CPU.
_SMALL = {
    "kind": "ConvDMFA", "rank": 4, "widths": [24, 48], "depths": [1, 2, 1], "epochs": 40, "batch_size": 48,
    "rates": [3e-3], "falling": True, "mse_epochs": 0,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": {
        "dmfa": _LINEAR,
        "smfa": _SMFA,
        "classifier": {"kind": "small", "epochs": 10, "batch_size": 24, "rate": 1e-3},
    },
    "svhn": {
        "dmfa": _CONVOLUTIONAL,
        "smfa": _SMFA,
        "classifier": {"kind": "small", "epochs": 25, "batch_size": 24, "rate": 1e-3},
    },
    "cifar10": {
        "dmfa": _CONVOLUTIONAL,
        "smfa": _SMFA,
        "classifier": {"kind": "large", "epochs": 35, "batch_size": 64, "rate": 1e-4},
    },
    "digits": {
        "dmfa": _SMALL,
        "smfa": {**_SMFA, "components": 8, "rank": 4},
        "classifier": {"kind": "small", "epochs": 12, "batch_size": 24, "rate": 1e-3},
    },
}
SHAPES = {"square": 1 / 4, "trapezoid": 1 / 2, "noise": 3 / 4}  # and how much of an image is missing
VALIDATION = 0.1
NEIGHBOURS, DONORS = 5, 5000  # of k-NN
METHODS = ("zero", "mask", "mean", "knn", "partial", "mfa", "misconv_smfa", "misconv_dmfa", "gt")
NAMES = {"smfa": "SMFA", "dmfa": "DMFA", "plus": "DMFA+"}
DENSITY_OF = {"mfa": "dmfa", "misconv_dmfa": "dmfa", "misconv_smfa": "smfa"}
# How many classifiers are trained in one CUDA graph, and how often their state is put on the disk.
SIDE_BY_SIDE, CHECKPOINT_SECONDS = 48, 60.0


class Experiment:
    """One data set with one kind of missing region: its densities and classifiers, each trained once and cached.

    Args:
        data: images and labels.
        shape: of the missing regions, one of `SHAPES`.
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
        settings: dict[str, Any] | None = None,
        progress: bool = True,
        say: Callable[[str], None] = lambda line: None,
        filler: float = 0.0,
    ) -> None:
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
        self.data, self.shape, self.cache, self.fabric = data, shape, cache, fabric
        self.settings = settings or SETTINGS.get(data.name, SETTINGS["svhn"])
        self.progress, self.say, self.filler = progress, say, filler
        self.device = fabric.device
        self._tools: dict[str, Any] = {}
        self._made: dict[str, dict[str, Any]] = {}  # the settings of densities among the tools
        self._takes: dict[tuple[str, str], Take] = {}

    # Data ------------------------------------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What every unit of this experiment has in common."""
        parts = (self.data.train, self.data.train_labels, self.data.test, self.data.test_labels)
        check = 0
        for part in parts:
            check = zlib.crc32(part.numpy().tobytes(), check)
        return {"dataset": self.data.name, "crc32": check, "shape": self.shape, "fraction": SHAPES[self.shape]}

    @cached_property
    def train(self) -> Incomplete:
        """All training images; those of validation among them."""
        return self._incomplete(self.data.train, 1)

    @cached_property
    def test(self) -> Incomplete:
        """The test images."""
        return self._incomplete(self.data.test, 2)

    @cached_property
    def labels(self) -> tuple[Tensor, Tensor]:
        """Of training and test images, on the device."""
        return self.data.train_labels.to(self.device), self.data.test_labels.to(self.device)

    @cached_property
    def split(self) -> tuple[Tensor, Tensor]:
        """Indices of the images to train on, and of those that choose the epoch."""
        size = len(self.data.train)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(3), device="cpu").to(self.device)
        held = round(VALIDATION * size)
        return order[held:], order[:held]

    def _incomplete(self, images: Tensor, seed: int) -> Incomplete:
        generator = torch.Generator().manual_seed(seed)
        observed = getattr(missing, self.shape)(
            len(images), *images.shape[2:], fraction=SHAPES[self.shape], generator=generator
        )
        return Incomplete(images.to(self.device), observed.to(self.device), self.filler)

    # Densities -------------------------------------------------------------------------------------------------------

    def density_settings(self, kind: str) -> dict[str, Any]:
        """What makes a density what it is; kind is "smfa", "dmfa", or one that was offered."""
        return {**self.identity, "density_kind": kind, "density": self.settings[kind], "seed": 0}

    def offer(self, kind: str, chosen: dict[str, Any]) -> None:
        """Let there be one more density, by its settings."""
        self.settings = {**self.settings, kind: chosen}

    def density(self, kind: str) -> nn.Module:
        """A density of this data set, trained on its incomplete training images the first time."""
        settings = self.density_settings(kind)
        if self._made.get(kind) != settings:
            path = self.cache.density(settings)
            # Its record is looked at, too, which is refused if another version wrote it.
            if self.cache.get(settings, "fit") is None or not path.exists():
                self._fit(kind, settings)
            density = store.load(path).to(self.device)
            self._check_density(path, density, settings["density"])
            if isinstance(density, ConvDMFA):
                density.to(memory_format=torch.channels_last)
            self._tools[kind], self._made[kind] = density.eval().requires_grad_(False), settings
        found = self._tools[kind]
        assert isinstance(found, nn.Module)
        return found

    def _check_density(self, path: Path, density: nn.Module, chosen: dict[str, Any]) -> None:
        """The file may be another's."""
        wanted = make_density(chosen, self.data.shape)
        found, asked = ({"shape": None, **getattr(d, "config", dict)()} for d in (density, wanted))
        if isinstance(wanted, SMFA):
            asked["shape"] = list(self.data.shape)
        if type(density) is not type(wanted) or found != asked:
            raise ValueError(f"cannot load {path}: it holds another density than its name stands for")

    def _fit(self, kind: str, settings: dict[str, Any]) -> None:
        self.say(f"{self.data.title}, {self.shape}: learning what may be missing ({NAMES[kind]})")
        clock, chosen = time.perf_counter(), settings["density"]
        density = make_density(chosen, self.data.shape)
        checkpoint = self.cache.running(settings)
        if isinstance(density, SMFA):
            # What is missing was erased, so that no method can read it; bytes have no NaN.
            history = fit_density(
                density, self.train.images, self.train.observed, epochs=chosen["epochs"], checkpoint=checkpoint,
                fabric=self.fabric, progress=self.progress,
            )  # fmt: skip
            seconds = time.perf_counter() - clock
        else:
            job = job_of(density, chosen, self.train, self.fabric)
            (history,) = train(
                [job], self.fabric, epochs=chosen["epochs"], checkpoint=checkpoint, checkpoint_seconds=self.pause,
                progress=self.progress, title=NAMES[kind],
            )  # fmt: skip
            seconds = job.seconds
        # The density last: where there is one, there is its record.
        self.cache.keep(settings, {"kind": "fit", **self._circumstances(), "seconds": seconds, "history": history})
        store.save(density.eval(), self.cache.density(settings))
        checkpoint.unlink(missing_ok=True)

    def quality(self, kind: str) -> Record:
        """A record of how well a density predicts the missing pixels of the test images (Table 7)."""
        settings = {**self.density_settings(kind), "variant": "quality"}
        found = self.cache.get(settings, "density")
        if found is not None:
            return found
        from misconv.paper.quality import quality

        density = self.density(kind)
        fitted = self.cache.get(self.density_settings(kind), "fit")
        figures = quality(density, self.data.test.to(self.device), self.test.observed)
        # The PSNR of images that were all filled without any error is no number that JSON knows.
        measured = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        seconds = {} if fitted is None else {"seconds": fitted["seconds"]}
        return self.cache.keep(
            settings, {"kind": "density", **self._circumstances(), "density": NAMES[kind], **measured, **seconds}
        )

    # Classifiers -----------------------------------------------------------------------------------------------------

    def unit(self, method: str, seed: int) -> dict[str, Any]:
        """What makes a method with a seed what it is."""
        kind = DENSITY_OF.get(method)
        more = {"neighbours": [NEIGHBOURS, DONORS]} if method == "knn" else {}
        return {
            **self.identity, **more, "method": method, "seed": seed, "validation": VALIDATION,
            "classifier": self.settings["classifier"], "density": self.settings[kind] if kind else None,
        }  # fmt: skip

    def run(self, methods: Sequence[str], seeds: Sequence[int]) -> list[Record]:
        """The records of all methods with all seeds; those that are not there yet are trained."""
        return self.records(methods, seeds, self.unit, self._train)

    def records(
        self,
        names: Sequence[str],
        seeds: Sequence[int],
        unit: Callable[[str, int], dict[str, Any]],
        train: Callable[[Sequence[tuple[str, int]]], None],
    ) -> list[Record]:
        """Of all names with all seeds, each of which is a unit; those that are not there are trained side by side."""
        wanted = [(name, seed) for name in names for seed in seeds]
        todo = [each for each in wanted if self.cache.get(unit(*each), "classification") is None]
        limit = SIDE_BY_SIDE if self.device.type == "cuda" else max(len(seeds), 1)
        for start in range(0, len(todo), limit):
            train(todo[start : start + limit])
        found = [self.cache.get(unit(*each), "classification") for each in wanted]
        return [record for record in found if record is not None]

    def _train(self, units: Sequence[tuple[str, int]]) -> None:
        """Train some classifiers side by side."""
        takes = {method: self.take(method, "train") for method in dict.fromkeys(method for method, _ in units)}
        names = ", ".join(ROWS[method] for method in takes)
        self.say(f"{self.data.title}, {self.shape}: training {names}; {len(units)} side by side")
        jobs = [self._job(method, seed, takes[method]) for method, seed in units]
        checkpoint = self.cache.running([job.settings for job in jobs])
        histories = train(
            jobs, self.fabric, epochs=self.settings["classifier"]["epochs"], checkpoint=checkpoint,
            checkpoint_seconds=self.pause, progress=self.progress, title=f"{len(units)} classifiers", stays=False,
        )  # fmt: skip
        tested = [
            self.test_once(self.unit(method, seed), method, seed, job.module, history, job.seconds, len(jobs))
            for (method, seed), job, history in zip(units, jobs, histories, strict=True)
        ]
        self.cache.keep_together(tested, [checkpoint])

    def _job(self, method: str, seed: int, take: Take) -> Job:
        chosen, labels = self.settings["classifier"], self.labels[0]
        rows, held = self.split
        return classifier_job(
            self._network(method, seed), _at(take, rows), labels[rows], self.fabric,
            validation_inputs=_at(take, held), validation_labels=labels[held], batch_size=chosen["batch_size"],
            learning_rate=chosen["rate"], seed=seed, settings=self.unit(method, seed),
            name=f"{ROWS[method]}, seed {seed},", count=False,
        )  # fmt: skip

    def test_once(
        self,
        settings: dict[str, Any],
        method: str,
        seed: int,
        network: nn.Module,
        history: list[dict[str, float]],
        seconds: float,
        side_by_side: int,
        takes: tuple[Take, Take] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Any], Record]:
        """Look at the test images, once; returns the settings of a unit and its record."""
        network.eval()
        incomplete, everything = takes or (self.take(method, "test"), complete(method, self.whole("test")))
        best = max(history, key=lambda record: record["validation_accuracy"])
        truth = self.labels[1]
        first = getattr(network, "first", None)
        if method == "misconv_dmfa" and isinstance(first, MisConv2d):  # for the figure of its responses
            store.save(first, self.cache.layer(settings))
        with torch.no_grad():
            right = [count_right(network, take, truth, self.device, 1000) for take in (incomplete, everything)]
        return settings, {
            "kind": "classification",
            **self._circumstances(),
            "method": method,
            "seed": seed,
            "accuracy_incomplete": right[0] / len(truth),
            "accuracy_complete": right[1] / len(truth),
            "accuracy_validation": best["validation_accuracy"],
            "epoch": int(best["epoch"]) + 1,
            "epochs": len(history),
            "seconds": seconds,
            "side_by_side": side_by_side,
            **(extra or {}),
        }

    def take(self, method: str, part: str) -> Take:
        """How a method gives training or test images to its network."""
        if method == "gt":
            return complete(method, self.whole(part))
        if (method, part) not in self._takes:
            data = self.train if part == "train" else self.test
            self._takes[method, part] = of_method(method, data, self._prepare(method, data))
        return self._takes[method, part]

    def _prepare(self, method: str, data: Incomplete) -> dict[str, Any]:
        """The tools of a method, fitted to incomplete training images."""
        rows = self.split[0]
        if method == "mean" and "mean" not in self._tools:
            self._tools["mean"] = impute.Mean().fit(*self.train.at(rows))
        if method == "knn" and "knn" not in self._tools:
            self._tools["knn"] = impute.KNN(NEIGHBOURS).fit(*self.train.at(rows[:DONORS]))
        kind = DENSITY_OF.get(method)
        if kind is not None:
            # Methods that use the same density share what it says.
            name = f"{kind} of {len(data)} {data is self.train}"
            if name not in self._tools:
                self._tools[name] = Remembered(self.density(kind), data)
            return {kind: self._tools[name]}
        return self._tools

    def whole(self, part: str) -> Tensor:
        """Training or test images with nothing missing, for GT and for Table 2."""
        name = f"complete {part}"
        if name not in self._tools:
            self._tools[name] = (self.data.train if part == "train" else self.data.test).to(self.device)
        found: Tensor = self._tools[name]
        return found

    def _network(self, method: str, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = first_layer(method, self.data.shape[0])
            network = Classifier(first, self.data.shape, self.data.classes, self.settings["classifier"]["kind"])
        return network.to(self.device)

    @property
    def pause(self) -> float:
        """A GPU ends an epoch in a second; a CPU takes long, and loses nothing by writing each."""
        return CHECKPOINT_SECONDS if self.device.type == "cuda" else 0.0

    def _circumstances(self) -> dict[str, Any]:
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
