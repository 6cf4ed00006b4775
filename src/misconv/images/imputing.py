"""Fill the holes of image files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from misconv._files import RASTER, FoundFile, ImageFiles, StoredImage, fill_scene, predict, read_shape, write_image
from misconv._store import check_output_folder, read_json
from misconv.images.outcome import Outcome, Say, count_bands
from misconv.store import write_bytes

__all__ = ["ImputeSettings", "impute_files", "keep_record", "prepare_folder"]

RECORD = "misconv-impute.json"
_LARGE = 1024  # a TIFF with a longer side is read and written window by window


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
    outcome = Outcome()
    names = _new_names(images.files)
    for index in range(settings.rank, len(images), settings.world_size):
        try:
            _impute(images, index, settings.out / names[index], density, settings, outcome)
        except (ValueError, TypeError, OSError) as error:
            outcome.fail(images.path(index), error, say)
        advance(index + 1)
    return outcome


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


def _impute(
    images: ImageFiles, index: int, target: Path, density: nn.Module, settings: ImputeSettings, outcome: Outcome
) -> None:
    file = images.files[index]
    if target.exists() and not settings.overwrite:
        outcome.kept.append(file.path)
        return
    _check_bands(file, density)
    target.parent.mkdir(parents=True, exist_ok=True)
    deviation = None
    if settings.deviation is not None:
        suffix = ".tif" if file.path.suffix.lower() in RASTER else ".npy"
        deviation = settings.deviation / target.relative_to(settings.out).with_suffix(suffix)
        deviation.parent.mkdir(parents=True, exist_ok=True)
    large = file.path.suffix.lower() in RASTER and max(read_shape(file.path)[1:]) > _LARGE and images.masks is None
    if large:
        if settings.samples:
            raise ValueError(f"{file.name} is too large for samples, which are drawn in one piece")
        fill_scene(file.path, target, density, deviation, images.nodata)
        outcome.done.append(file.path)
        return
    image = images.stored(index)
    if not image.observed.any():
        raise ValueError(f"{file.name} has no pixel that was seen")
    if image.observed.all() and target.suffix == file.path.suffix:
        shutil.copyfile(file.path, target)
        outcome.complete.append(file.path)
        return
    mean, error = _predict(image, density)
    write_image(target, image, image.fill(mean))
    if deviation is not None:
        _write_deviation(deviation, image, error)
    if settings.samples:
        _write_samples(target, image, density, settings)
    outcome.done.append(file.path)


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
    """Completed images, name-1, name-2 and so on, that differ where nobody knows."""
    place = next(density.parameters())
    coded = torch.from_numpy(image.coded()).to(place.device).unsqueeze(0)
    observed = ~coded.isnan()
    generator = torch.Generator(place.device).manual_seed(settings.seed)
    with torch.no_grad():
        drawn = density(coded.where(observed, 0), observed).sample(settings.samples, generator=generator)
    for number, sample in enumerate(drawn[:, 0].float().cpu().numpy(), 1):
        write_image(target.with_stem(f"{target.stem}-{number}"), image, image.fill(sample))


def keep_record(folder: Path, outcome: Outcome) -> None:
    """Write down what became of the files; a folder with such a record is one of ours."""
    text = json.dumps({"misconv": "impute", **outcome.to_dict()}, indent=1)
    write_bytes(folder / RECORD, text.encode())
