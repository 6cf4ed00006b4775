"""Finished work by its settings: a table that was interrupted goes on, and one that is complete only prints.

A unit (a density, or a method with a seed) is what its settings say, whichever units were trained beside it; their hash
names its files. So nothing is ever overwritten by something else, and units are kept one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from misconv import store
from misconv._store import JsonObject

__all__ = ["FORMAT", "Cache", "as_json", "key"]

# Of the files, and of what settings mean: a change of either must not be taken for the old.
FORMAT = 4
LEFT_BEHIND = 3600.0  # seconds after which nobody writes a file any more

# What a record of each kind has: texts, and numbers.
_WHAT = ("dataset", "title", "shape", "device")
_GENERATION = (
    (*_WHAT, "method", "features"),
    ("seed", "frechet", "ssim", "ssim_best", "ssim_authors", "ssim_authors_best", "psnr", "psnr_best", "psnr_hidden",
     "psnr_hidden_best", "epoch", "epochs", "seconds"),
)  # fmt: skip
NEEDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "classification": (
        (*_WHAT, "method"),
        ("seed", "accuracy_incomplete", "accuracy_complete", "accuracy_validation", "epoch", "epochs", "seconds"),
    ),
    "recipe": (
        (*_WHAT, "method"),
        (
            "seed", "accuracy_incomplete", "accuracy_complete", "accuracy_validation", "nll", "ece", "abstention",
            "epoch", "epochs", "seconds",
        ),
    ),
    "transfer": ((*_WHAT, "method"), ("seed", "accuracy", "nll", "ece", "abstention")),
    "share": ((*_WHAT, "method"), ("seed", "share", "accuracy", "nll", "ece", "abstention")),
    "wae": _GENERATION,
    "flow_matching": _GENERATION,
    "density": ((*_WHAT, "density"), ("nll", "mse", "mse_per_pixel", "ssim", "exact", "images")),
    "fit": (_WHAT, ("seconds",)),
}  # fmt: skip

MAYBE = ("frechet_best",)  # a number, or None where it is not measured
SAME = ("dataset", "method", "seed")  # in a record and in its settings

Settings = JsonObject


def key(settings: Settings | list[Settings]) -> str:
    """A name for settings: the same for the same ones, another for others.

    Example:
        >>> key({"seed": 0, "method": "zero"}) == key({"method": "zero", "seed": 0}) != key({"seed": 1})
        True
    """
    text = json.dumps(settings, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_json(settings: Any) -> Settings:
    """The fields of a dataclass as a JSON file gives them back: tuples are lists there."""
    found: Settings = json.loads(json.dumps(asdict(settings), allow_nan=False))
    return found


class Cache:
    """A folder with records (JSON), densities, classifiers or first layers, and checkpoints of what is under way."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        for place in (
            self.folder,
            *(self.folder / name for name in ("records", "densities", "layers", "networks", "running")),
        ):
            try:
                place.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                text = f"{self.folder} must be a folder for results, but {place} is a file"
                raise NotADirectoryError(text) from error
            except PermissionError as error:
                raise PermissionError(f"{self.folder} must be a folder you may write to, got {place}") from error
            if not os.access(place, os.W_OK):
                raise PermissionError(f"{self.folder} must be a folder you may write to, got {place}")
            for path in place.glob(".*.tmp"):  # of a process that was killed while it wrote
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    if time.time() - path.stat().st_mtime > LEFT_BEHIND:
                        path.unlink()

    def get(self, settings: Settings, kind: str | None = None) -> JsonObject | None:
        """The record of a finished unit, or None; with a `kind`, one that has all numbers of that kind."""
        path = self._record(settings)
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found, record = content["format"], content["record"]
            name = key(record["settings"]) if found == FORMAT else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} must be a record of misconv, got something else; move it away") from error
        if found != FORMAT:
            raise ValueError(
                f"{path} must have the format {FORMAT} of this version, got {found}; use the version of misconv that "
                "wrote it, or another folder"
            )
        if name != key(settings):
            raise ValueError(f"{path} must hold the settings that its name stands for, got others; move it away")
        if kind is not None and not _is_of_kind(record, kind):
            raise ValueError(f"{path} must be a record of misconv, got something else; move it away")
        return dict(record)

    def keep(self, settings: Settings, record: JsonObject) -> JsonObject:
        """Write the record of a unit, whole or not at all; returns it."""
        record = {**record, "settings": settings}
        _write(self._record(settings), {"format": FORMAT, "record": record})
        return record

    def density(self, settings: Settings) -> Path:
        """Where a density is kept."""
        return self.folder / "densities" / f"{_slug(settings)}-{key(settings)}.safetensors"

    def layer(self, settings: Settings) -> Path:
        """Where the first layer of a classifier is kept."""
        return self.folder / "layers" / f"{_slug(settings)}-{key(settings)}.safetensors"

    def network(self, settings: Settings) -> Path:
        """Where a classifier is kept."""
        return self.folder / "networks" / f"{_slug(settings)}-{key(settings)}.safetensors"

    def running(self, settings: Settings | list[Settings]) -> Path:
        """Where a training that is under way leaves its checkpoint; one of another format is not taken for it."""
        return self.folder / "running" / f"{key(settings)}-{FORMAT}.safetensors"

    def _record(self, settings: Settings) -> Path:
        return self.folder / "records" / f"{_slug(settings)}-{key(settings)}.json"


def _is_of_kind(record: JsonObject, kind: str) -> bool:
    """Whether it has the texts and numbers that tables read; somebody may have changed them by hand."""
    texts, numbers = NEEDED[kind]
    if record.get("kind") != kind or not all(isinstance(record.get(name), str) for name in texts):
        return False
    settings = record["settings"]
    if any(name in record and name in settings and record[name] != settings[name] for name in SAME):
        return False
    known = [record.get(name) for name in numbers]
    known += [record[name] for name in MAYBE if record.get(name) is not None]
    if kind == "density":  # one that is infinite, which JSON does not know, is left out
        known = [number for number in known if number is not None]
    shares = [record[name] for name in numbers if name.startswith("accuracy") and name in record]
    return all(map(_is_number, known)) and all(0 <= share <= 1 for share in shares)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _write(path: Path, content: JsonObject) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    store.write_bytes(path, text.encode())


def _slug(settings: Settings) -> str:
    """For people who look into the folder."""
    parts = (settings.get(name) for name in ("dataset", "shape", "density_kind", "method", "variant", "seed"))
    return "-".join(str(part).replace(" ", "_").replace("/", "_") for part in parts if part is not None)
