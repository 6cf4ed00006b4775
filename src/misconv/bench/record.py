"""Where the numbers of a benchmark go: into one JSON file, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from misconv._store import JsonObject, check_output_folder, check_replaceable, read_json
from misconv.store import write_bytes

__all__ = ["Keeper", "check_out", "write"]


def check_out(out: Path) -> None:
    """Whether the numbers can be written, and replace nothing but such numbers: asked before minutes of work."""
    try:
        if out.is_dir():
            raise ValueError(f"--out must name a file, got the folder {out}")
        for path in (out, _partial(out)):
            record = read_json(path)
            check_replaceable("--out", path, isinstance(record, dict) and "benchmark" in record)
        check_output_folder("--out", out.parent)
    except OSError as error:
        raise ValueError(str(error)) from error


def write(record: JsonObject, out: Path) -> None:
    """The record as JSON, whole or not at all; what was kept on the way is no longer needed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out, (_json(record, 3) + "\n").encode())
    if out != _partial(out):
        _partial(out).unlink(missing_ok=True)


@dataclass
class Keeper:
    """What `run` wants as `keep`: the finished sections go into a file beside `out`, which stays as it was."""

    out: Path | None
    sections: list[str] = field(default_factory=list)

    def __call__(self, record: JsonObject) -> None:
        """Keep the sections of this record."""
        self.sections = list(record["sections"])
        if self.out is not None:
            write(record, _partial(self.out))

    def stopped(self) -> str:
        """What is left of a run that was stopped, and how to go on."""
        if not self.sections:
            return "stopped before the first section was finished; nothing is kept"
        names = ", ".join(self.sections)
        if self.out is None:
            return f"stopped; nothing is kept of {names}: name a file with --out to keep finished sections"
        return (
            f"stopped; finished sections ({names}) are in {_partial(self.out)}; time the others with --only and "
            "another --out"
        )


def _partial(out: Path) -> Path:
    return out.with_name(f"{out.stem.removesuffix('.partial')}.partial.json")


def _json(value: Any, depth: int, indent: str = "") -> str:
    """JSON with one line for every row, so that it is small and two records can be compared."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _json(v, 0) for v in value) + f"\n{indent}]"
    lines = (f"{inner}{json.dumps(k, ensure_ascii=False)}: {_json(v, depth - 1, inner)}" for k, v in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
