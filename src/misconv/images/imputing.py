"""Fill the holes of image files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from misconv._files import (
    RASTER,
    FoundFile,
    ImageFiles,
    StoredImage,
    fill_scene,
    predict,
    predict_batch,
    read_shape,
    write_image,
)
from misconv._store import check_output_folder, read_json
from misconv.images.outcome import Outcome, Say, count_bands
from misconv.store import write_bytes

__all__ = ["ImputeSettings", "impute_files", "keep_record", "prepare_folder"]

RECORD = "misconv-impute.json"
_LARGE = 1024  # a TIFF with a longer side is read and written window by window
_SMALL = 256  # images with no longer side are filled several at a time …
_BATCH_NUMBERS = 2**19  # … of about this many numbers together


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
    target: Path
    deviation: Path | None


class _Imputing:
    """Files on their way: small images of one shape wait for each other, and are filled as a batch."""

    def __init__(self, images: ImageFiles, density: nn.Module, settings: ImputeSettings, say: Say) -> None:
        self.images, self.density, self.settings, self.say = images, density, settings, say
        self.outcome, self.waiting = Outcome(), list[_Waiting]()

    def run(self, advance: Callable[[int], None]) -> Outcome:
        names = _new_names(self.images.files)
        for index in range(self.settings.rank, len(self.images), self.settings.world_size):
            with self._told(self.images.path(index)):
                self._take(index, self.settings.out / names[index])
            advance(index + 1)
        self._fill_waiting()
        return self.outcome

    @contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, OSError) as error:
            self.outcome.fail(path, error, self.say)

    def _take(self, index: int, target: Path) -> None:
        """Fill a file, or let it wait."""
        file = self.images.files[index]
        if target.exists() and not self.settings.overwrite:
            self.outcome.kept.append(file.path)
            return
        _check_bands(file, self.density)
        target.parent.mkdir(parents=True, exist_ok=True)
        deviation = self._deviation(file, target)
        if file.path.suffix.lower() in RASTER and max(read_shape(file.path)[1:]) > _LARGE and self.images.masks is None:
            if self.settings.samples:
                raise ValueError(f"{file.name} is too large for samples, which are drawn in one piece")
            fill_scene(file.path, target, self.density, deviation, self.images.nodata)
            self.outcome.done.append(file.path)
            return
        image = self.images.stored(index)
        if not image.observed.any():
            raise ValueError(f"{file.name} has no pixel that was seen")
        if image.observed.all() and target.suffix == file.path.suffix:
            self._copy(image, target, deviation)
        elif max(image.shape[1:]) <= _SMALL:
            self._wait(_Waiting(image, target, deviation))
        else:
            self._write(_Waiting(image, target, deviation), *_predict(image, self.density))

    def _deviation(self, file: FoundFile, target: Path) -> Path | None:
        if self.settings.deviation is None:
            return None
        suffix = ".tif" if file.path.suffix.lower() in RASTER else ".npy"
        path = self.settings.deviation / target.relative_to(self.settings.out).with_suffix(suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _copy(self, image: StoredImage, target: Path, deviation: Path | None) -> None:
        if deviation is not None:
            _write_deviation(deviation, image, np.zeros(image.shape, np.float32))
        write_bytes(target, image.path.read_bytes())
        self.outcome.complete.append(image.path)

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
        if filled.deviation is not None:
            _write_deviation(filled.deviation, filled.image, error)
        if self.settings.samples:
            _write_samples(filled.target, filled.image, self.density, self.settings)
        write_image(filled.target, filled.image, filled.image.fill(mean))
        self.outcome.done.append(filled.image.path)


def _new_names(files: Sequence[FoundFile]) -> list[Path]:
    """Each file keeps its name, but a JPEG, which cannot be written without loss, becomes a PNG."""
    taken = {file.name for file in files}
    names = []
    for name in (file.name for file in files):
        if name.suffix.lower() in (".jpg", ".jpeg"):
            short = name.with_suffix(".png")
            name = short if short not in taken else name.with_name(f"{name.name}.png")
            taken.add(name)
        names.append(name)
    return names


def _check_bands(file: FoundFile, density: nn.Module) -> None:
    bands, wanted = read_shape(file.path)[0], getattr(density, "channels", None)
    if wanted is not None and bands != wanted:
        raise ValueError(f"{file.name} has {count_bands(bands)}, and the density knows images of {wanted}")


def _predict(image: StoredImage, density: nn.Module) -> tuple[np.ndarray, np.ndarray]:
    coded = image.coded()
    mean, error = np.empty_like(coded), np.empty_like(coded)
    for part in predict(density, lambda window: coded[:, *window], image.shape):
        mean[:, *part.window], error[:, *part.window] = part.mean, part.deviation
    return mean, error


def _write_deviation(path: Path, image: StoredImage, error: np.ndarray) -> None:
    if path.suffix == ".npy":
        import io

        stream = io.BytesIO()
        np.save(stream, error, allow_pickle=False)
        write_bytes(path, stream.getvalue())
        return
    from misconv._files import open_scene, write_scene

    with open_scene(image.path) as scene:
        recipe = scene.recipe()
    with write_scene(path, recipe, complete=True, dtype="float32") as data:
        data.write(error)


def _write_samples(target: Path, image: StoredImage, density: nn.Module, settings: ImputeSettings) -> None:
    """Completed images, under the same name in folders sample-1, sample-2 and so on; they differ where nobody knows."""
    place = next(density.parameters())
    coded = torch.from_numpy(image.coded()).to(place.device).unsqueeze(0)
    observed = ~coded.isnan()
    generator = torch.Generator(place.device).manual_seed(settings.seed)
    with torch.no_grad():
        drawn = density(coded.where(observed, 0), observed).sample(settings.samples, generator=generator)
    for number, sample in enumerate(drawn[:, 0].float().cpu().numpy(), 1):
        path = settings.out / f"sample-{number}" / target.relative_to(settings.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_image(path, image, image.fill(sample))


def keep_record(folder: Path, outcome: Outcome) -> None:
    """Write down what became of the files; a folder with such a record is one of ours."""
    text = json.dumps({"misconv": "impute", **outcome.to_dict()}, indent=1)
    write_bytes(folder / RECORD, text.encode())
