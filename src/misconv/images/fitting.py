"""Learn a density from incomplete image files."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from misconv._files import Crops, ImageFiles, shape_of
from misconv._train import History
from misconv.density import SMFA, ConvDMFA, LinearDMFA, UNetDMFA
from misconv.images.outcome import Outcome, Say, count_bands
from misconv.store import load
from misconv.training import fit_density

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["FitSettings", "fit_files", "load_density", "quiet_fit", "readable_shapes", "seeded"]

_CROP = 128  # the side of what is learned from, of images that are larger …
_SMALL_CROP, _SMALL_HOLE = 64, 8  # … and where all holes are small: no square of this side is missing as a whole
_SMALLEST = 16
_DETAILED = 64  # images with no longer side are seen pixel by pixel, larger ones in blocks of 2×2
_LOOKED_AT = 24  # squares, to see how large holes are
_NUMBERS = {"cuda": 1_500_000, "cpu": 400_000}  # in a batch: a training needs less than 2 GB; a CPU makes more steps
_FEW = 1000  # crops, of which mirrored and moved ones are made too


@dataclass(frozen=True)
class FitSettings:
    """How a density is learned."""

    budget: dict[str, Any]
    fabric: Fabric
    components: int = 1
    rank: int = 4
    seed: int = 0
    workers: int = 0
    checkpoint: Path | None = None
    progress: bool = True


def load_density(path: Path, device: torch.device | str) -> nn.Module:
    """What `misconv fit` has written, or another density of this library."""
    density = load(path)
    if not isinstance(density, (SMFA, ConvDMFA, LinearDMFA, UNetDMFA)):
        raise ValueError(f"--density must be a file that misconv fit has written, got {path}")
    return density.eval().to(device)


def fit_files(images: ImageFiles, settings: FitSettings, say: Say) -> tuple[UNetDMFA, History, Outcome]:
    """Learn a `UNetDMFA` from files; those that cannot be read, or have other bands than most, are left out and told.

    Returns:
        The density in evaluation mode, the records of its training, and what became of the files.
    """
    outcome = Outcome()
    shapes, bands = readable_shapes(images, outcome, say)
    chosen = images.only(shapes)
    examples, side = _examples(chosen, list(shapes.values()))
    largest = max(max(size) for _, *size in shapes.values())
    dataset = _Readable(examples, (bands, *_size(examples, side, shapes)), outcome, say)
    with seeded(settings.seed):
        density = UNetDMFA(bands, settings.components, settings.rank, patch=1 if largest <= _DETAILED else 2)
    count = len(dataset)
    what = f"squares of {side} px" if isinstance(examples, Crops) else "images"
    say(f"learning from {count} {what}" if count > 1 else "learning from one image")
    history = quiet_fit(
        density, dataset, settings.budget, bands, side, settings.fabric, say, seed=settings.seed,
        workers=settings.workers, checkpoint=settings.checkpoint, progress=settings.progress,
    )  # fmt: skip
    outcome.done = [file.place for file in chosen.files if file.place not in outcome.failed]
    if not outcome.done:
        raise ValueError("IMAGES must have at least one file that can be read, got none")
    return density.eval(), history, outcome


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What a new module draws depends on the seed alone; torch's own generator stays where it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def quiet_fit(
    density: UNetDMFA,
    dataset: Dataset[Tensor],
    budget: dict[str, Any],
    bands: int,
    side: int,
    fabric: Fabric,
    say: Say,
    **options: Any,
) -> History:
    """`fit_density` with batches that fit into memory; what it warns of is said in the end."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = fit_density(
            density, dataset, **budget, augment=len(cast(Sized, dataset)) < _FEW, fabric=fabric, **options,
            batch_size=max(4, min(64, _NUMBERS.get(fabric.device.type, _NUMBERS["cpu"]) // (bands * side**2))),
        )  # fmt: skip
    for warning in said:
        if issubclass(warning.category, UserWarning):
            say(str(warning.message))
    return history


def readable_shapes(images: ImageFiles, outcome: Outcome, say: Say) -> tuple[dict[int, tuple[int, int, int]], int]:
    """Shapes of the files that can be read, by their numbers, and their number of bands; the others are told."""
    shapes = _shapes(images, outcome, say)
    if not shapes:
        raise ValueError("IMAGES must have at least one file that can be read, got none")
    return shapes, _common_bands(images, shapes, outcome, say)


class _Readable(Dataset[Tensor]):
    """Images of which none stops the training: one that cannot be read is told once, and counts as all missing."""

    def __init__(self, examples: ImageFiles | Crops, shape: tuple[int, ...], outcome: Outcome, say: Say) -> None:
        self.examples, self.shape, self.outcome, self.say = examples, shape, outcome, say

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Tensor:
        try:
            return self.examples[index]
        except (ValueError, OSError) as error:
            self.outcome.fail(self.examples.path(index), error, self.say)
            return torch.full(self.shape, torch.nan)


def _size(examples: ImageFiles | Crops, side: int, shapes: dict[int, tuple[int, int, int]]) -> tuple[int, int]:
    return (side, side) if isinstance(examples, Crops) else next(iter(shapes.values()))[1:]


def _shapes(images: ImageFiles, outcome: Outcome, say: Say) -> dict[int, tuple[int, int, int]]:
    shapes = {}
    for index, file in enumerate(images.files):
        try:
            shapes[index] = shape_of(file)
        except (ValueError, OSError) as error:
            outcome.fail(file.place, error, say)
    return shapes


def _common_bands(images: ImageFiles, shapes: dict[int, tuple[int, int, int]], outcome: Outcome, say: Say) -> int:
    """The number of bands that most files have; the others leave."""
    bands = Counter(shape[0] for shape in shapes.values()).most_common(1)[0][0]
    for index in [index for index, shape in shapes.items() if shape[0] != bands]:
        found = shapes.pop(index)[0]
        outcome.fail(images.path(index), f"has {count_bands(found)}, and most files have {bands}", say)
    return bands


def _examples(images: ImageFiles, shapes: list[tuple[int, int, int]]) -> tuple[ImageFiles | Crops, int]:
    """Whole images if they are small and of one size, else squares of them; and the side."""
    sides = {side for _, *size in shapes for side in size}
    if len({shape[1:] for shape in shapes}) == 1 and max(sides) <= _CROP:
        return images, max(sides)
    side = _side_for_holes(Crops(images, _CROP, shapes))
    while side > max(_SMALLEST, min(sides)):
        side //= 2
    return Crops(images, side, shapes), side


def _side_for_holes(crops: Crops) -> int:
    """Smaller squares where all holes are small: a step is cheaper, and there are more of them."""
    step = -(-len(crops) // _LOOKED_AT)
    for place in range(0, len(crops), step):
        with suppress(ValueError, OSError):  # told when it is learned from
            seen = ~crops[place].isnan()
            if seen.any() and not F.max_pool2d(seen.float(), _SMALL_HOLE, ceil_mode=True).all():
                return _CROP
    return _SMALL_CROP
