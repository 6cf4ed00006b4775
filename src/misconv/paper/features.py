"""The ruler of Table 3: the Fréchet distance between features of images, those of a network of our own or Inception's.

A network of our own is trained once for each data set, on complete training images: it is no method but a measure, the
same for all of them. It learns the labels, or of images without any, how they were turned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from misconv import store
from misconv._torch import load_pickled
from misconv._train import Job, as_floats, classifier_job, cosine_schedule, train
from misconv.data import ImageSet
from misconv.paper.cache import as_json
from misconv.paper.classification import Experiment
from misconv.paper.inputs import BYTE

__all__ = ["FEATURES", "FeatureNetwork", "FeatureSettings", "Ruler", "check_ruler", "inception_file"]

TURNS = 4  # quarters of a turn, which a network without labels tells apart
CHUNK = 1000  # images at a time
INCEPTION = "weights-inception-2015-12-05-6726825d.pth"  # as torch-fidelity calls its download
INCEPTION_FEATURES = 2048
# Layers that the weights of Inception have, in the names of torch-fidelity.
INCEPTION_LAYERS = {"Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3), "fc.weight": (1008, INCEPTION_FEATURES)}


@dataclass(frozen=True)
class FeatureSettings:
    """A `FeatureNetwork` and its training by Adam with a cosine schedule."""

    epochs: int = 5
    width: int = 32
    batch_size: int = 128
    learning_rate: float = 1e-3


FEATURES: dict[str, FeatureSettings] = {
    "mnist": FeatureSettings(),
    "svhn": FeatureSettings(epochs=10),
    "celeba": FeatureSettings(epochs=10),
    "digits": FeatureSettings(epochs=15, width=8, batch_size=32, learning_rate=3e-3),
}


class FeatureNetwork(nn.Module):
    """Features (B, F) of complete images from 0 to 1, of any size.

    Args:
        channels: of the images. width: a quarter of the number of features.

    Example:
        >>> FeatureNetwork(1, 8)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 32])
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.num_features = 4 * width  # torchmetrics asks by this name
        self.layers = nn.Sequential(
            *_block(channels, width), *_block(width, 2 * width, 2), *_block(2 * width, 2 * width),
            *_block(2 * width, 4 * width, 2), *_block(4 * width, 4 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.BatchNorm1d(4 * width, affine=False),  # so that no data set has features on a scale of its own
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """Of each image the mean of its last responses; over training images each has mean 0 and variance 1."""
        out: Tensor = self.layers(images)
        return out


def _block(inside: int, width: int, stride: int = 1) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inside, width, 3, stride, padding=1), nn.BatchNorm2d(width), nn.ReLU()


class Ruler:
    """The Fréchet distance of images from the test images of an experiment, by torchmetrics.

    Args:
        experiment: whose complete images are the measure, and where a network is kept that was trained.
        settings: of a network of our own, by default those of the data set.
        inception: the weights of Inception, in its place.
    """

    def __init__(
        self, experiment: Experiment, settings: FeatureSettings | None = None, inception: Path | None = None
    ) -> None:
        self.experiment, self.inception = experiment, inception
        self.settings = settings or FEATURES.get(experiment.data.name, FEATURES["svhn"])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What makes this ruler what it is."""
        if self.inception is not None:
            return {"inception": crc32(self.inception.read_bytes())}
        return {"network": as_json(self.settings), "task": self._task}

    @property
    def _task(self) -> str:
        return "turns" if self.experiment.data.train_labels is None else "labels"

    @property
    def title(self) -> str:
        """What a table calls the features."""
        if self.inception is not None:
            return f"the {INCEPTION_FEATURES} features of Inception v3"
        learned = {"labels": "the labels of", "turns": "telling how images were turned, of"}[self._task]
        return f"{4 * self.settings.width} features of a network trained on {learned} {self.experiment.data.title}"

    @property
    def is_quick(self) -> bool:
        """Whether it can measure every epoch: Inception takes longer than the training."""
        return self.inception is None

    @cached_property
    def _metric(self) -> Any:
        from torchmetrics.image.fid import FrechetInceptionDistance

        feature: Any = self.network() if self.inception is None else INCEPTION_FEATURES
        weights = None if self.inception is None else str(self.inception)
        metric = FrechetInceptionDistance(
            feature, reset_real_features=False, normalize=True, feature_extractor_weights_path=weights
        )
        metric = metric.to(self.experiment.device)
        with torch.no_grad():
            for part in self.experiment.data.test.split(CHUNK):
                metric.update(as_floats(part.to(self.experiment.device), BYTE), real=True)
        return metric

    def prepare(self) -> None:
        """Train its network and look at the test images, once; before other trainings, in which it measures."""
        self._metric  # noqa: B018  # made when it is first asked for

    def distance(self, images: Tensor) -> float:
        """Of images (N, C, H, W) from 0 to 1; NaN of any that are not finite, as those of a training that diverged."""
        if not bool(images.isfinite().all()):
            return math.nan  # LAPACK may end the process for eigenvalues of NaN
        metric = self._metric.to(images.device)
        metric.reset()
        with torch.no_grad():
            for part in images.split(CHUNK):
                metric.update(part, real=False)
        return float(metric.cpu().compute())  # not every build of torch finds eigenvalues on a GPU

    # The network -----------------------------------------------------------------------------------------------------

    def network(self) -> FeatureNetwork:
        """The network of this data set, trained the first time."""
        experiment = self.experiment
        anywhere = {"shape": "any", "fraction": None}
        settings = {**experiment.identity, **anywhere, "density_kind": "features", **self.identity}
        path = experiment.cache.network(settings)
        network = FeatureNetwork(experiment.data.shape[0], self.settings.width)
        if experiment.cache.get(settings, "fit") is None or not path.exists():
            self._fit(settings, path)
        store.load(path, into=network)
        return network.to(experiment.device).eval().requires_grad_(False)

    def _classifier(self) -> nn.Sequential:
        """The network and its last layer, which has no further use."""
        data, width = self.experiment.data, self.settings.width
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            classes = TURNS if data.train_labels is None else data.classes
            network = FeatureNetwork(data.shape[0], width)
            return nn.Sequential(network, nn.Linear(network.num_features, classes)).to(self.experiment.device)

    def _fit(self, settings: dict[str, Any], path: Path) -> None:
        experiment = self.experiment
        job = self._job(self._classifier(), settings)
        experiment.say(f"{experiment.data.title}: learning {self.title}")
        checkpoint = experiment.cache.running(settings)
        (history,) = train(
            [job], experiment.fabric, epochs=self.settings.epochs, checkpoint=checkpoint,
            checkpoint_seconds=experiment.pause, progress=experiment.progress, title="features", transient=True,
        )  # fmt: skip
        fitted = {**experiment.circumstances(), "shape": "any", "seconds": job.seconds, "history": history}
        experiment.cache.keep(settings, {"kind": "fit", **fitted})
        assert isinstance(job.module, nn.Sequential)
        store.save(job.module[0], path)
        checkpoint.unlink(missing_ok=True)

    def _job(self, classifier: nn.Module, settings: dict[str, Any]) -> Job:
        chosen, experiment = self.settings, self.experiment
        images = experiment.whole("train").images
        rows, held = experiment.split
        if experiment.data.train_labels is None:
            turns = torch.arange(TURNS, device=rows.device)
            parts = [(each.repeat_interleave(TURNS), turns.repeat(len(each))) for each in (rows, held)]
            takes = [_turned(images, *part) for part in parts]
            labels = [part[1] for part in parts]
        else:
            takes = [_complete(images, each) for each in (rows, held)]
            labels = [experiment.labels[0][each] for each in (rows, held)]
        return classifier_job(
            classifier, takes[0], labels[0], experiment.fabric, validation_inputs=takes[1],
            validation_labels=labels[1], batch_size=chosen.batch_size, settings=settings, name="the feature network",
            learning_rate=cosine_schedule(chosen.learning_rate, chosen.epochs), count=False,
        )  # fmt: skip


def _complete(images: Tensor, rows: Tensor) -> Any:
    return lambda indices: as_floats(images[rows[indices]], BYTE)


def _turned(images: Tensor, rows: Tensor, turns: Tensor) -> Any:
    """Images by their rows, each turned by some quarters."""

    def take(indices: Tensor) -> Tensor:
        x = as_floats(images[rows[indices]], BYTE)
        every = torch.stack([x.rot90(turn, (2, 3)) for turn in range(TURNS)])  # (TURNS, B, C, H, W)
        return every[turns[indices], torch.arange(len(x), device=x.device)]

    return take


# What cannot be measured ---------------------------------------------------------------------------------------------


def inception_file(file: str | Path | None, images: ImageSet) -> Path | None:
    """The weights of Inception, where they were given or are where torchmetrics looks, and can be used."""
    if file is not None:
        try:
            return Path(file).expanduser()
        except RuntimeError as error:  # nobody has that name
            raise ValueError(f"--inception must be a file, got {file}: {error}") from error
    usual = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION
    return usual if usual.is_file() and images.shape[0] == 3 and find_spec("torch_fidelity") else None


def check_ruler(images: ImageSet, file: str | Path | None) -> None:
    """Say before any training that the Fréchet distance of these images cannot be had."""
    weights = inception_file(file, images)
    if weights is not None:
        _check_inception(images, weights)
        return
    height, width = images.shape[1:]
    if images.train_labels is None and height != width:
        raise ValueError(
            f"{images.name} must have labels, or square images, which a network can learn to turn, for the features of "
            f"the Fréchet distance, got no labels and {height}×{width} pixels; or give --inception FILE"
        )


def _check_inception(images: ImageSet, file: Path) -> None:
    if images.shape[0] != 3:
        raise ValueError(
            f"--inception is for images of 3 channels, got {images.name} with {images.shape[0]}; without it a network "
            "trained on the data set measures"
        )
    if not _is_file(file):
        raise ValueError(f"--inception must be a file, got {file}, and there is no such file")
    try:
        weights = load_pickled(file)
    except Exception as error:  # pickle, zipfile and torch each have their own
        reason = f": {error}" if "CVE" in str(error) else ""
        raise ValueError(f"--inception must be weights that torch can load, got {file}{reason}") from error
    named = weights.items() if isinstance(weights, dict) else ()
    shapes = {name: tuple(t.shape) for name, t in named if isinstance(t, Tensor) and t.is_floating_point()}
    if any(shapes.get(name) != shape for name, shape in INCEPTION_LAYERS.items()):
        raise ValueError(f"--inception must be the weights of Inception v3 for the FID, {INCEPTION}, got {file}")
    if find_spec("torch_fidelity") is None:
        raise ImportError("Inception comes with torch-fidelity: pip install 'misconv[inception]'")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # of a name that is too long
        return False
