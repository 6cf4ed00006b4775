"""Where results go: a place is tried out before the work, and a file that is not ours is never replaced."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["check_output_folder", "check_replaceable", "check_writable", "read_json"]


def check_writable(folder: Path, size: int = 2**20) -> None:
    """Write something into a folder that vanishes again; an OSError says why that cannot be done.

    Permissions alone do not tell: a disk may be full, or mounted for reading only.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(size))
        file.flush()
        os.fsync(file.fileno())


def check_output_folder(name: str, folder: Path) -> None:
    """Whether files can go into a folder, which is made later if need be; nothing stays of the attempt."""
    try:
        place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        if not place.is_dir():
            raise NotADirectoryError(f"{name} must be below a folder, got {folder}, but {place} is a file")
        check_writable(place)
        if place != folder and place != folder.absolute():
            first = place / folder.absolute().relative_to(place).parts[0]  # a name may be too long, or not allowed
            first.mkdir()
            first.rmdir()
    except ValueError as error:  # a zero byte in the name
        raise OSError(f"{name} must be the name of a folder, got {folder!s:.100}: {error}") from error
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(
            f"{name} must be in a place you may write to, got {folder}: {error.strerror}; choose another one"
        ) from error


def check_replaceable(name: str, path: Path, ours: bool) -> None:
    """A file that would be replaced is one that this command has written."""
    if (path.exists() or path.is_symlink()) and not ours:
        raise FileExistsError(
            f"{name} must be new or written by this command, got {path}, which is another file; choose another one"
        )


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where it is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
