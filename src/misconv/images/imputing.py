"""Fill the holes of image files."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from misconv._files import (
    FoundFile,
    ImageFiles,
    StoredImage,
    fill_scene,
    is_raster,
    names_of,
    predict,
    predict_batch,
    shape_of,
    write_deviation,
    write_file,
)
from misconv._store import check_output_folder, read_json
from misconv.images.outcome import Outcome, Say, count_bands
from misconv.store import write_bytes

__all__ = ["ImputeSettings", "check_density", "impute_files", "keep_record", "prepare_folder"]

RECORD = "misconv-impute.json"
_DENSITY = ("density.safetensors", "density.checkpoint")  # of `misconv impute` without a density
_LARGE = 1024  # a TIFF with a longer side is read and written window by window
_SMALL = 256  # images with no longer side are filled several at a time …
_BATCH_NUMBERS = 2**18  # … of about this many numbers together
# Images may be in other units than those of the density where so much of what is seen lies outside of what was learned,
# or it spans so little of that.
_FOREIGN, _NARROW = 0.5, 0.02


@dataclass(frozen=True)
class ImputeSettings:
    """Where filled images go, and what else is written."""

    out: Path
    deviation: Path | None = None
    samples: int = 0
    seed: int = 0
    overwrite: bool = False
    rank: int = 0  # of several processes each fills its share of the files
    world_size: int = 1


def prepare_folder(name: str, folder: Path, overwrite: bool) -> None:
    """Make a folder, or take one that is empty or has what this command wrote before; asked before any work."""
    check_output_folder(name, folder)
    if folder.exists() and any(folder.iterdir()) and not overwrite and read_json(folder / RECORD) is None:
        raise FileExistsError(
            f"{name} must be new or empty, got {folder}, which has other files; --overwrite replaces files in it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RECORD).exists():
        keep_record(folder, Outcome())


def check_density(folder: Path, file: Path, overwrite: bool) -> str:
    """Refuse to go on in a folder whose images another density has filled; returns a mark of this one."""
    mark = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    known = (read_json(folder / RECORD) or {}).get("density")
    filled = any(path.name not in (RECORD, *_DENSITY) for path in folder.iterdir())
    if filled and known not in (None, mark) and not overwrite:
        raise FileExistsError(
            f"--out must be a folder of images that this density has filled, got {folder}, where it was another one; "
            "choose another folder, or --overwrite"
        )
    keep_record(folder, Outcome(), mark)
    return mark


def impute_files(
    images: ImageFiles, density: nn.Module, settings: ImputeSettings, say: Say, advance: Callable[[int], None]
) -> Outcome:
    """Fill every file into a prepared folder, under its own name; a file that fails is told, and the others go on.

    Files that are there already are kept, so that a call that was stopped continues; `advance` hears after each.
    """
    return _Imputing(images, density, settings, say).run(advance)


@dataclass(frozen=True)
class _Waiting:
    """A small image that is filled together with others."""

    image: StoredImage
    names: list[Path]  # of its files, in the folder of results


class _Imputing:
    """Files on their way: small images of one shape wait for each other, and are filled as a batch."""

    def __init__(self, images: ImageFiles, density: nn.Module, settings: ImputeSettings, say: Say) -> None:
        self.images, self.density, self.settings, self.say = images, density, settings, say
        self.outcome, self.waiting = Outcome(), list[_Waiting]()
        self.learned = _learned_range(density)
        self.least, self.most, self.outside, self.pixels = math.inf, -math.inf, 0, 0

    def run(self, advance: Callable[[int], None]) -> Outcome:
        names = _new_names(self.images.files)
        for index in range(self.settings.rank, len(self.images), self.settings.world_size):
            with self._told(self.images.path(index)):
                self._take(index, names(self.images.files[index]))
            advance(index + 1)
        self._fill_waiting()
        if self.pixels:
            self._tell_units()
        return self.outcome

    @contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, OSError) as error:
            self.outcome.fail(path, error, self.say)

    def _take(self, index: int, names: list[Path]) -> None:
        """Fill a file, or let it wait."""
        file = self.images.files[index]
        if (self.settings.out / names[0]).exists() and not self.settings.overwrite:
            self.outcome.kept.append(file.place)
            return
        shape = _check_bands(file, self.density)
        if is_raster(file) and max(shape[1:]) > _LARGE and self.images.masks is None:
            self._fill_scene(file, names)
            return
        image = self.images.stored(index)
        if not image.observed.any():
            raise ValueError(f"{file.name} has no pixel that was seen")
        self._count(image)
        if image.observed.all() and names == names_of(file):
            self._copy(file, image)
        elif max(image.shape[1:]) <= _SMALL:
            self._wait(_Waiting(image, names))
        else:
            self._write(_Waiting(image, names), *_predict(image, self.density))

    def _count(self, image: StoredImage) -> None:
        """Remember what is seen, for `_tell_units`."""
        seen, (low, high) = image.values[np.broadcast_to(image.observed, image.values.shape)], self.learned
        self.least, self.most = min(self.least, float(seen.min())), max(self.most, float(seen.max()))
        self.outside += int(((seen < low) | (seen > high)).sum())
        self.pixels += seen.size

    def _tell_units(self) -> None:
        """Tell if the images can hardly be like those that the density was learned from."""
        low, high = self.learned
        if self.outside > _FOREIGN * self.pixels or self.most - self.least < _NARROW * (high - low) < math.inf:
            self.say(
                f"the images have values from {self.least:.4g} to {self.most:.4g}, and the density was learned from "
                f"{low:.4g} to {high:.4g}: are they in the same units?"
            )

    def _fill_scene(self, file: FoundFile, names: list[Path]) -> None:
        if self.settings.samples:
            raise ValueError(f"{file.name} is too large for samples, which are drawn in one piece")
        targets = [_made(self.settings.out / name) for name in names]
        errors = None
        if self.settings.deviation is not None:
            errors = [_made(self.settings.deviation / name) for name in names]
        fill_scene(file, targets, self.density, errors, self.images.nodata)
        self.outcome.done.append(file.place)

    def _copy(self, file: FoundFile, image: StoredImage) -> None:
        self._write_deviation(_Waiting(image, names_of(file)), np.zeros(image.shape, np.float32))
        paths = [band.path for band in file.bands if band.path is not None] or [file.path]
        for path, name in reversed(list(zip(paths, names_of(file), strict=True))):
            write_bytes(_made(self.settings.out / name), path.read_bytes())
        self.outcome.complete.append(file.place)

    def _wait(self, new: _Waiting) -> None:
        full = len(self.waiting) * new.image.values.size >= _BATCH_NUMBERS
        if self.waiting and (full or self.waiting[0].image.shape != new.image.shape):
            self._fill_waiting()
        self.waiting.append(new)

    def _fill_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        if waiting:
            means, errors = predict_batch(self.density, np.stack([each.image.coded() for each in waiting]))
            for each, mean, error in zip(waiting, means, errors, strict=True):
                with self._told(each.image.path):
                    self._write(each, mean, error)

    def _write(self, filled: _Waiting, mean: np.ndarray, error: np.ndarray) -> None:
        """The image comes last: where it is there, all that belongs to it is there."""
        self._write_deviation(filled, error)
        if self.settings.samples:
            self._write_samples(filled)
        write_file(self.settings.out, filled.names, filled.image, filled.image.fill(mean))
        self.outcome.done.append(str(filled.image.path))

    def _write_deviation(self, filled: _Waiting, error: np.ndarray) -> None:
        if self.settings.deviation is None:
            return
        parts = filled.image.bands or (filled.image,)
        for name, part, values in zip(filled.names, parts, np.split(error, len(parts)), strict=True):
            write_deviation(self.settings.deviation, name, part.path, part.arrange(values))

    def _write_samples(self, filled: _Waiting) -> None:
        """Completed images, under the same name in folders sample-1, sample-2 …; they differ where nobody knows."""
        for number, sample in enumerate(_samples(filled.image, self.density, self.settings), 1):
            write_file(self.settings.out / f"sample-{number}", filled.names, filled.image, filled.image.fill(sample))


def _learned_range(density: nn.Module) -> tuple[float, float]:
    """Of the data that a density was learned from; all numbers where it has not been asked for."""
    low, high = (getattr(density, name, None) for name in ("low", "high"))
    if getattr(density, "bounds", None) != "data" or low is None or high is None:
        return -math.inf, math.inf
    return float(low.min()), float(high.max())


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _new_names(files: Sequence[FoundFile]) -> Callable[[FoundFile], list[Path]]:
    """Each file keeps its name, but a JPEG, which cannot be written without loss, becomes a PNG."""
    new: dict[Path, Path] = {}
    names = [name for file in files for name in names_of(file) if name.suffix.lower() in (".jpg", ".jpeg", ".png")]
    if any(name.suffix.lower() != ".png" for name in names):
        taken = set(names)
        for name in (name for name in names if name.suffix.lower() != ".png"):
            short = name.with_suffix(".png")
            new[name] = short if short not in taken else name.with_name(f"{name.name}.png")
            taken.add(new[name])
    return lambda file: [new.get(name, name) for name in names_of(file)]


def _check_bands(file: FoundFile, density: nn.Module) -> tuple[int, int, int]:
    shape, wanted = shape_of(file), getattr(density, "channels", None)
    if wanted is not None and shape[0] != wanted:
        raise ValueError(f"{file.name} has {count_bands(shape[0])}, and the density knows images of {wanted}")
    return shape


def _predict(image: StoredImage, density: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    coded = image.coded()
    mean, error = np.empty_like(coded), np.empty_like(coded)
    for part in predict(density, lambda window: coded[:, *window], image.shape):
        mean[:, *part.window], error[:, *part.window] = part.mean, part.deviation
    return mean, error


def _samples(image: StoredImage, density: nn.Module, settings: ImputeSettings) -> np.ndarray:
    """(N, C, H, W)."""
    place = next(density.parameters())
    coded = torch.from_numpy(image.coded()).to(place.device).unsqueeze(0)
    observed = ~coded.isnan()
    generator = torch.Generator(place.device).manual_seed(settings.seed)
    with torch.no_grad():
        drawn = density(coded.where(observed, 0), observed).sample(settings.samples, generator=generator)
    found: np.ndarray = drawn[:, 0].float().cpu().numpy()
    return found


def keep_record(folder: Path, outcome: Outcome, density: str | None = None) -> None:
    """Write down what became of the files, and by which density; a folder with such a record is one of ours."""
    text = json.dumps({"misconv": "impute", "density": density, **outcome.to_dict()}, indent=1)
    write_bytes(folder / RECORD, text.encode())
