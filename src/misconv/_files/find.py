"""Which files are meant: a file, a folder, a pattern, or a list of these."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["SUFFIXES", "BandFile", "FoundFile", "find_files"]

PILLOW = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
RASTER = (".tif", ".tiff")
ARRAYS = (".npy", ".npz")
SUFFIXES = (*PILLOW, *RASTER, *ARRAYS)


class FoundFile(NamedTuple):
    """A file, and its name below the folder in which it was found, as texts: there may be very many of them.

    Where the bands of an image are files of their own, `bands` are these; `path` is the first of them that is there,
    `name` what their names have in common.
    """

    place: str
    text: str
    bands: tuple[BandFile, ...] = ()

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.place)

    @property
    def name(self) -> Path:
        """Its name below the folder."""
        return Path(self.text)


class BandFile(NamedTuple):
    """The file of one band, None where this image lacks it, and the name that it has or would have."""

    place: str | None
    text: str

    @property
    def path(self) -> Path | None:
        """Where it is."""
        return None if self.place is None else Path(self.place)

    @property
    def name(self) -> Path:
        """Its name below the folder."""
        return Path(self.text)


def find_files(sources: str | Path | Iterable[str | Path], bands: Sequence[str] = ()) -> list[FoundFile]:
    """All image files that the sources name, in the order of their names, each once.

    Folders are searched to the bottom for the suffixes of images; links to folders are not followed, so that a loop of
    them ends nowhere. A file that is named itself may have any suffix.

    Args:
        bands: words in the names of files, such as ("B02", "B03"), or of their folders: files whose names differ in
            that word alone are the bands of one image, in this order. Files without any of them are left out.
    """
    files = _all_files(sources)
    return group_bands(files, bands) if bands else files


def group_bands(files: Sequence[FoundFile], bands: Sequence[str]) -> list[FoundFile]:
    """Images whose bands are files of their own; a band that is not there is missing as a whole."""
    if len(set(bands)) != len(bands) or not all(bands):
        raise ValueError(f"bands must be different words, got {', '.join(map(repr, bands))}")
    groups: dict[tuple[str, str], dict[str, FoundFile]] = {}
    for file in files:
        for band in bands:
            found = re.search(rf"(?<![A-Za-z0-9]){re.escape(band)}(?![A-Za-z0-9])", file.text)
            if found is not None:
                groups.setdefault((file.text[: found.start()], file.text[found.end() :]), {})[band] = file
                break
    if not groups:
        raise ValueError(
            f"bands must be words in the names of files, got {', '.join(bands)}, and no file has one of them"
        )
    return [_group(before, after, parts, bands) for (before, after), parts in sorted(groups.items())]


def _group(before: str, after: str, parts: dict[str, FoundFile], bands: Sequence[str]) -> FoundFile:
    of_bands = tuple(BandFile(parts[band].place if band in parts else None, f"{before}{band}{after}") for band in bands)
    common = f"{before.rstrip('_-. /')}{after}" if before.rstrip("_-. /") else after.lstrip("_-. /")
    return FoundFile(next(iter(parts.values())).place, common, of_bands)


def _all_files(sources: str | Path | Iterable[str | Path]) -> list[FoundFile]:
    found: dict[str, FoundFile] = {}
    names: dict[str, str] = {}
    for source in [sources] if isinstance(sources, (str, os.PathLike)) else sources:
        for file in _of_source(source):
            found.setdefault(os.path.realpath(file.place), file)
    files = sorted(found.values(), key=lambda file: file.place)
    if not files:
        raise FileNotFoundError(f"IMAGES must name image files ({', '.join(SUFFIXES)}), got none")
    for file in files:
        other = names.setdefault(file.text, file.place)
        if other != file.place:
            raise ValueError(
                f"IMAGES must have names of their own, but {other} and {file.place} would both become {file.text}"
            )
    return files


def _of_source(source: str | Path) -> Iterator[FoundFile]:
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.is_dir():
        yield from _in_folder(path)
    elif path.exists():
        yield FoundFile(str(path), path.name)
    elif glob.has_magic(text):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise FileNotFoundError(f"IMAGES must name image files, got {text!r}, which matches none")
        for match in map(Path, matches):
            if match.is_dir():
                yield from _in_folder(match)
            elif match.suffix.lower() in SUFFIXES:
                yield FoundFile(str(match), match.name)
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
                yield FoundFile(str(path), path.relative_to(folder).as_posix())
