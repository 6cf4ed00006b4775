"""Which files are meant: a file, a folder, a pattern, or a list of these."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["SUFFIXES", "FoundFile", "find_files"]

PILLOW = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
RASTER = (".tif", ".tiff")
ARRAYS = (".npy", ".npz")
SUFFIXES = (*PILLOW, *RASTER, *ARRAYS)


class FoundFile(NamedTuple):
    """A file, and its name below the folder in which it was found."""

    path: Path
    name: Path


def find_files(sources: str | Path | Iterable[str | Path]) -> list[FoundFile]:
    """All image files that the sources name, in the order of their names, each once.

    Folders are searched to the bottom for the suffixes of images; links to folders are not followed, so that a loop of
    them ends nowhere. A file that is named itself may have any suffix.
    """
    found: dict[str, FoundFile] = {}
    names: dict[Path, Path] = {}
    for source in [sources] if isinstance(sources, (str, os.PathLike)) else sources:
        for file in _of_source(source):
            found.setdefault(os.path.realpath(file.path), file)
    files = sorted(found.values(), key=lambda file: str(file.path))
    if not files:
        raise FileNotFoundError(f"IMAGES must name image files ({', '.join(SUFFIXES)}), got none")
    for file in files:
        other = names.setdefault(file.name, file.path)
        if other != file.path:
            raise ValueError(
                f"IMAGES must have names of their own, but {other} and {file.path} would both become {file.name}"
            )
    return files


def _of_source(source: str | Path) -> Iterator[FoundFile]:
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.is_dir():
        yield from _in_folder(path)
    elif path.exists():
        yield FoundFile(path, Path(path.name))
    elif glob.has_magic(text):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise FileNotFoundError(f"IMAGES must name image files, got {text!r}, which matches none")
        for match in map(Path, matches):
            if match.is_dir():
                yield from _in_folder(match)
            elif match.suffix.lower() in SUFFIXES:
                yield FoundFile(match, Path(match.name))
    else:
        raise FileNotFoundError(f"IMAGES must name files, folders or patterns, got {text}, and there is no such file")


def _in_folder(folder: Path) -> Iterator[FoundFile]:
    def refuse(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(place) / name
            if not name.startswith(".") and path.suffix.lower() in SUFFIXES and path.is_file():
                yield FoundFile(path, path.relative_to(folder))
