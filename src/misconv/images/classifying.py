"""Train a classifier on labelled image files with holes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from misconv._files import ImageFiles
from misconv._train import Budget, labelled_job, train, warm_up_cosine
from misconv.convert import Converted, convert
from misconv.density import UNetDMFA
from misconv.images.backbone import Units, build_backbone, pretrained_units
from misconv.images.fitting import quiet_fit, readable_shapes, seeded
from misconv.images.labelled import ImagesOfOneSize, LabelledImages, choose_size, label_files, split_by_class
from misconv.images.outcome import Outcome, Say
from misconv.layers import Normalize
from misconv.store import load

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["TrainSettings", "Trained", "train_files"]

_DENSITY_SHARE = 1 / 3  # of the time, where a density is learned first
_RATE, _RATE_PRETRAINED = 1e-3, 3e-4  # of Adam at its peak
_WEIGHT_DECAY, _LABEL_SMOOTHING = 0.02, 0.05


@dataclass(frozen=True)
class TrainSettings:
    """How a classifier is learned."""

    budget: dict[str, Any]
    fabric: Fabric
    backbone: str = "resnet18"
    pretrained: Path | None = None
    density: Path | None = None
    side: int | None = None
    batch_size: int = 32
    validation: float = 0.15
    mirror: bool = False
    workers: int = 0
    seed: int = 0
    checkpoint: Path | None = None
    progress: bool = True


@dataclass(frozen=True)
class Trained:
    """What came out: a network in evaluation mode, what to keep with it, and how it learned."""

    network: Converted
    notes: dict[str, Any]
    history: list[dict[str, float]]
    outcome: Outcome


def train_files(images: ImageFiles, table: Path | None, settings: TrainSettings, say: Say) -> Trained:
    """Train a converted network on files; those that cannot be read, or have no class, are left out and told.

    Args:
        table: a CSV file of classes; None where files of a class are in a folder of its name.
    """
    outcome = Outcome()
    labels = label_files(images, table, outcome, say)
    shapes, bands = readable_shapes(images.only(labels), outcome, say)
    chosen = images.only(list(labels)).only(shapes)
    names = [list(labels.values())[row] for row in shapes]
    classes = sorted(set(names))
    if len(classes) < 2:
        raise ValueError(f"IMAGES must have files of at least two classes, got {_counted(len(classes), 'class')}")
    size = choose_size(shapes.values(), settings.side)
    examples = ImagesOfOneSize(chosen, size, bands, outcome, say)
    numbers = [classes.index(name) for name in names]
    rows, held = split_by_class(numbers, settings.validation, settings.seed)
    learned, judged = (LabelledImages(examples, numbers, part) for part in (rows, held))
    say(f"{_counted(len(learned), 'image')} of {len(classes)} classes to learn from, {len(judged)} to judge by")
    with seeded(settings.seed):
        backbone = build_backbone(settings.backbone, len(classes), bands, settings.pretrained)
    density, budget = _density(learned, bands, size, settings, say)
    network = _network(backbone, density, bands, _largest_of(chosen), settings)
    history, kept = _train(network, learned, judged, budget, settings)
    outcome.done = [file.place for file in chosen.files if file.place not in outcome.failed]
    notes = {
        "classes": classes, "size": list(size), "bands": bands, "backbone": settings.backbone, "images": len(learned),
        "validation_images": len(judged), "largest_class": (judged if held else learned).largest_class,
        "record": kept,
    }  # fmt: skip
    return Trained(network.eval(), notes, history, outcome)


class _Unlabelled(ImagesOfOneSize):
    """Of labelled images the images alone, for a density."""

    def __init__(self, labelled: LabelledImages) -> None:
        self.labelled = labelled

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, index: int) -> Tensor:
        return self.labelled[index][0]


def _density(
    images: LabelledImages, bands: int, size: tuple[int, int], settings: TrainSettings, say: Say
) -> tuple[nn.Module, dict[str, Any]]:
    """A density from a file, or one that is learned; and the budget that is left."""
    if settings.density is not None:
        return load(settings.density).eval(), settings.budget
    with seeded(settings.seed):
        density = UNetDMFA(bands, patch=1 if max(size) <= 64 else 2)
    budget = dict(settings.budget)
    if "minutes" in budget:
        total = budget["minutes"]
        budget["minutes"] = total * (1 - _DENSITY_SHARE)
        spent = {"minutes": total * _DENSITY_SHARE}
    else:
        spent = dict(budget)
    checkpoint = settings.checkpoint and settings.checkpoint.with_name(settings.checkpoint.name + "-density")
    quiet_fit(
        density, _Unlabelled(images), spent, bands, max(size), settings.fabric, say, seed=settings.seed,
        checkpoint=checkpoint, progress=settings.progress,
    )  # fmt: skip
    return density.eval(), budget


def _network(
    backbone: nn.Module, density: nn.Module, bands: int, largest: float | None, settings: TrainSettings
) -> Converted:
    """The converted network, which reads images in the units of the files."""
    if settings.pretrained is not None and bands == 3 and largest is not None:
        units = pretrained_units(backbone, largest)
    else:
        units = _measured(density, bands)
    return convert(nn.Sequential(Normalize(*units), backbone), density).train()


def _measured(density: nn.Module, bands: int) -> Units:
    """Mean and deviation of the images, as the density has measured them."""
    center, scale = getattr(density, "center", None), getattr(density, "scale", None)
    if not isinstance(center, Tensor) or not isinstance(scale, Tensor) or center.numel() != bands:
        raise ValueError(
            f"--density must be a density network for images of {bands} bands, got {type(density).__name__}"
        )
    return center.flatten().tolist(), scale.flatten().tolist()


def _largest_of(images: ImageFiles) -> float | None:
    """The lightest pixel of the type of the files, where they hold bytes or 16 bits."""
    kind = images.stored(0).values.dtype
    return {"uint8": 255.0, "uint16": 65535.0}.get(str(kind))


def _train(
    network: Converted, images: LabelledImages, judged: LabelledImages, budget: dict[str, Any], settings: TrainSettings
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The records of the training, and that of the parameters that were kept."""
    peak = _RATE if settings.pretrained is None else _RATE_PRETRAINED
    job = labelled_job(
        network, images, settings.fabric, validation=judged if len(judged) else None, batch_size=settings.batch_size,
        learning_rate=peak, schedule=warm_up_cosine(peak), seed=settings.seed, workers=settings.workers,
        augment="shift+mirror" if settings.mirror else "shift", label_smoothing=_LABEL_SMOOTHING, clip=1.0,
        weight_decay=_WEIGHT_DECAY,
    )  # fmt: skip
    (history,) = train(
        [job], settings.fabric, budget=Budget(**budget), checkpoint=settings.checkpoint, progress=settings.progress,
        title="classifier",
    )  # fmt: skip
    return history, history[history.kept]


def _counted(number: int, what: str) -> str:
    plural = {"class": "classes"}.get(what, f"{what}s")
    return f"{number} {what if number == 1 else plural}"
