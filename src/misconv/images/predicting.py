"""What a trained classifier says of image files, and how often it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from misconv._files import ImageFiles
from misconv.convert import Converted
from misconv.images.labelled import label_files, resize_to
from misconv.images.outcome import Outcome, Say, count_bands
from misconv.predict import predictive
from misconv.store import load, read_notes

__all__ = ["Classifier", "FilePrediction", "evaluate_files", "load_classifier", "predict_files"]

_BATCH = 32

Gather: TypeAlias = Callable[[list["FilePrediction"]], list["FilePrediction"]]  # over all processes


@dataclass(frozen=True)
class Classifier:
    """A trained network and what it was trained for."""

    network: Converted
    classes: list[str]
    size: tuple[int, int]
    bands: int


@dataclass(frozen=True)
class FilePrediction:
    """What is said of one file.

    `probabilities` are those of the network, of all classes; `doubt_from_holes` is the part of the doubt about the
    likeliest class that would go away if nothing were missing, 0 to 1.
    """

    path: Path
    missing: float
    probabilities: list[float]
    doubt_from_holes: float

    def to_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        """As JSON knows it."""
        best = max(range(len(classes)), key=self.probabilities.__getitem__)
        return {
            "file": str(self.path),
            "class": classes[best],
            "probability": self.probabilities[best],
            "missing": self.missing,
            "doubt_from_holes": self.doubt_from_holes,
            "probabilities": dict(zip(classes, self.probabilities, strict=True)),
        }


def load_classifier(path: Path, device: torch.device | str) -> Classifier:
    """What `misconv train` has written."""
    network, notes = load(path), read_notes(path)
    classes, size, bands = notes.get("classes"), notes.get("size"), notes.get("bands")
    named = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    sized = isinstance(size, list) and len(size) == 2 and all(type(side) is int and side > 0 for side in size)
    if not isinstance(network, Converted) or not named or not sized or type(bands) is not int:
        raise ValueError(f"--model must be a file that misconv train has written, got {path}")
    height, width = cast(list[int], size)
    return Classifier(network.eval().to(device), cast(list[str], classes), (height, width), bands)


def predict_files(
    images: ImageFiles,
    classifier: Classifier,
    samples: int,
    seed: int,
    outcome: Outcome,
    say: Say,
    advance: Callable[[int], None],
) -> Iterator[FilePrediction]:
    """Class probabilities of every file that can be read; `advance` hears after every batch."""
    batch: list[tuple[Path, Tensor, float]] = []
    for index, path in enumerate(images.paths):
        try:
            batch.append((path, *_read(images, index, classifier)))
        except (ValueError, OSError) as error:
            outcome.fail(path, error, say)
        if len(batch) == _BATCH or (batch and index + 1 == len(images)):
            yield from _predict(batch, classifier, samples, seed)
            outcome.done += [str(done) for done, _, _ in batch]
            batch = []
        advance(index + 1)


def _read(images: ImageFiles, index: int, classifier: Classifier) -> tuple[Tensor, float]:
    """An image of the right size, and how much of it was missing before that."""
    x = images[index]
    if len(x) != classifier.bands:
        raise ValueError(f"has {count_bands(len(x))}, and the model knows images of {classifier.bands}")
    missing = float(x.isnan().double().mean())
    if missing == 1:
        raise ValueError("has no pixel that was seen")
    return resize_to(x, classifier.size), missing


def _predict(
    batch: list[tuple[Path, Tensor, float]], classifier: Classifier, samples: int, seed: int
) -> Iterator[FilePrediction]:
    network = classifier.network
    device = next(network.parameters()).device
    x = torch.stack([image for _, image, _ in batch]).to(device)
    with torch.inference_mode():
        p = network.to_mfa(x)
        probabilities = network(p).double().softmax(1).cpu()
        shares = torch.zeros_like(probabilities)
        if samples:
            draw = torch.Generator(device).manual_seed(seed)
            shares = predictive(network, p, samples, generator=draw).share.double().cpu()
    best = probabilities.argmax(1, keepdim=True)
    doubts = shares.gather(1, best).flatten().tolist()
    for (path, _, missing), row, doubt in zip(batch, probabilities.tolist(), doubts, strict=True):
        yield FilePrediction(path, missing, row, doubt)


def evaluate_files(
    images: ImageFiles,
    table: Path | None,
    classifier: Classifier,
    outcome: Outcome,
    say: Say,
    advance: Callable[[int], None],
    share: slice = slice(None),
    gather: Gather = lambda found: found,
) -> dict[str, Any]:
    """How often a classifier is right, how good its probabilities are, and which classes it takes for others."""
    labels = label_files(images, table, outcome, say)
    for index in [index for index, label in labels.items() if label not in classifier.classes]:
        outcome.fail(images.path(index), f"is of class {labels.pop(index)}, which the model does not know", say)
    truth = {images.path(index): classifier.classes.index(label) for index, label in labels.items()}
    mine = images.only(list(labels)[share])
    found = gather(list(predict_files(mine, classifier, 0, 0, outcome, say, advance)))
    if not found:
        raise ValueError(
            "IMAGES must have at least one file of a class that the model knows, got none that can be read"
        )
    probabilities = torch.tensor([each.probabilities for each in found], dtype=torch.float64)
    target = torch.tensor([truth[each.path] for each in found])
    return _figures(probabilities, target, classifier.classes, [each.missing for each in found])


def _figures(probabilities: Tensor, target: Tensor, classes: list[str], missing: list[float]) -> dict[str, Any]:
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error, multiclass_confusion_matrix
    except ImportError as error:
        raise ImportError("classifiers are measured by torchmetrics: pip install 'misconv[demo]'") from error
    count = len(classes)
    chosen = probabilities.argmax(1)
    likelihood = probabilities.gather(1, target[:, None]).clamp_min(1e-300).log()
    confusion = multiclass_confusion_matrix(chosen, target, count)
    calibration = multiclass_calibration_error(probabilities.float(), target, count, n_bins=15)
    return {
        "images": len(target),
        "accuracy": float((chosen == target).double().mean()),
        "largest_class": float(target.bincount(minlength=count).max()) / len(target),
        "nll": -float(likelihood.mean()),
        "calibration_error": float(calibration),
        "missing": sum(missing) / len(missing),
        "classes": classes,
        "confusion": confusion.tolist(),  # rows: the true class, columns: what it was taken for
    }
