"""The file that a training goes on from: tried out before the work, read by the same training alone, written whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from misconv import store
from misconv._checks import describe
from misconv._store import JsonObject, check_writable
from misconv._train.identity import difference
from misconv._train.processes import on_first

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Checkpoint", "check_place"]

_ANEW = "give another file, or remove it to start anew"


class Checkpoint:
    """A checkpoint in a file, or none at all where the path is None.

    The first process reads and writes it; the others get what it has read, for they may be on machines without it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, fabric: Fabric) -> None:
        self.path, self.fabric = None if path is None else Path(path), fabric
        self._written: tuple[int, int] | None = None

    def read(self, settings: JsonObject) -> tuple[dict[str, Tensor], JsonObject] | None:
        """Tensors and numbers of the same training, None where there is no file; any other file is refused."""
        path = self.path
        return None if path is None else on_first(self.fabric, lambda: self._read(path, settings))

    def _read(self, path: Path, settings: JsonObject) -> tuple[dict[str, Tensor], JsonObject] | None:
        if not path.exists():
            return None
        tensors, meta = store.read(path)
        if not isinstance(meta.get("settings"), dict) or not isinstance(meta.get("tensors"), dict):
            raise ValueError(f"checkpoint {path} must be one of a training, got another file of misconv")
        differs = difference(meta["settings"], settings)
        if differs:
            raise self.other(differs)
        lost = difference(_kinds(tensors), meta["tensors"])
        if lost:
            raise self.damaged(lost.replace("its ", "its tensor ", 1))
        self._written = self._signature()
        return tensors, meta

    def write(self, tensors: dict[str, Tensor], meta: JsonObject) -> None:
        """Replace the file, unless somebody else has done so since this training read or wrote it."""
        if self.path is not None:
            on_first(self.fabric, lambda: self._write(tensors, meta))

    def _write(self, tensors: dict[str, Tensor], meta: JsonObject) -> None:
        assert self.path is not None
        now = self._signature()
        if now is not None and now != self._written:
            raise FileExistsError(
                f"checkpoint {self.path} must belong to one training, but another one has written it meanwhile; wait "
                "until that one is done, or give each its own place"
            )
        store.write(self.path, tensors, {**meta, "tensors": _kinds(tensors)})
        self._written = self._signature()

    def other(self, differs: str) -> ValueError:
        """What to raise where the file is of another training."""
        return ValueError(f"checkpoint {self.path} must be of the same training, but {differs}; {_ANEW}")

    def damaged(self, how: str) -> ValueError:
        """What to raise where the file is one of this training, but not whole."""
        return ValueError(f"checkpoint {self.path} must be whole, but {how}; {_ANEW}")

    def _signature(self) -> tuple[int, int] | None:
        assert self.path is not None
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def _kinds(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Types and shapes by name."""
    return {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in sorted(tensors.items())}


def check_place(checkpoint: str | os.PathLike[str] | None) -> None:
    """Say now, and not after the first epoch, that a checkpoint cannot be written."""
    if checkpoint is None:
        return
    if not isinstance(checkpoint, str | os.PathLike) or isinstance(os.fspath(checkpoint), bytes):
        raise TypeError(f"checkpoint must be a path or None, got {describe(checkpoint)}")
    if not os.fspath(checkpoint) or "\0" in os.fspath(checkpoint):
        raise ValueError(f"checkpoint must be the name of a file, got {describe(checkpoint)}")
    path = Path(os.path.realpath(checkpoint))
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"checkpoint must be in a folder that exists, got {checkpoint}; create {path.parent} first"
        )
    try:
        if path.exists() and not path.is_file():
            raise IsADirectoryError(f"checkpoint must be a file, got {checkpoint}, which is a folder or a device")
        check_writable(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        reason = f"checkpoint must be in a folder you may write to, got {checkpoint}: {error.strerror}"
        raise type(error)(reason) from error
