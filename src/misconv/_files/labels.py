"""The class of every file: the folder that it is in, or a table of names and classes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from misconv._files.find import FoundFile

__all__ = ["labels_of", "read_labels"]

_FILE_HEADS = ("file", "filename", "file_name", "name", "path", "image", "id")
_CLASS_HEADS = ("label", "class", "target", "category")


def labels_of(files: Sequence[FoundFile], table: Path | None = None) -> list[str | None]:
    """The class of every file, None where there is none.

    Args:
        table: a CSV file, see `read_labels`; without one the class is the first folder below the one that was searched.
    """
    if table is None:
        return [file.name.parts[0] if len(file.name.parts) > 1 else None for file in files]
    known = read_labels(table)
    short = Counter(Path(name).name for name in known)
    by_name = {Path(name).name: label for name, label in known.items() if short[Path(name).name] == 1}
    stems = Counter(Path(name).stem for name in by_name)
    by_stem = {Path(name).stem: label for name, label in by_name.items() if stems[Path(name).stem] == 1}
    return [known.get(file.name.as_posix(), by_name.get(file.name.name, by_stem.get(file.name.stem))) for file in files]


def read_labels(path: Path) -> dict[str, str]:
    """Classes by the names of files, from a CSV file: in columns that say so in the first line, or in the first two.

    A name may be that of the file alone, with or without its suffix, or a path below the folder of the images.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        dialect = csv.Sniffer().sniff(text[:4096], ",;\t") if text.strip() else csv.excel
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} must be a text file of names and classes, got something else") from error
    except csv.Error:
        dialect = csv.excel
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), dialect) if row]
    if not rows or min(map(len, rows)) < 2:
        raise ValueError(f"{path.name} must have two columns in every line, a file's name and its class")
    heads = [cell.lower() for cell in rows[0]]
    at = next((heads.index(head) for head in _FILE_HEADS if head in heads), None)
    to = next((heads.index(head) for head in _CLASS_HEADS if head in heads), None)
    if to is not None:
        rows, at = rows[1:], 0 if at is None else at
    found: dict[str, str] = {}
    for row in rows:
        name, label = row[at or 0], row[1 if to is None else to]
        if not name or not label:
            raise ValueError(f"{path.name} must have a name and a class in every line, got {row[:2]}")
        if found.setdefault(Path(name).as_posix(), label) != label:
            raise ValueError(f"{path.name} must have one class for every file, got two for {name}")
    return found
