"""What became of many files, and how long a training may take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Outcome", "Say", "count_bands", "parse_budget"]

Say: TypeAlias = Callable[[str], None]

_UNITS = {"s": 1 / 60, "sec": 1 / 60, "min": 1.0, "m": 1.0, "h": 60.0}


@dataclass
class Outcome:
    """Files that were done, that needed nothing, and that failed with a reason."""

    done: list[str] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)  # had no hole
    kept: list[str] = field(default_factory=list)  # were there already
    failed: dict[str, str] = field(default_factory=dict)

    def fail(self, path: Path | str, reason: object, say: Say) -> None:
        """Remember a file that failed, and tell of it at once; the first time."""
        place = str(path)
        if place in self.failed:
            return
        self.failed[place] = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
        say(f"{place}: {self.failed[place]}")

    def join(self, others: Iterable[Outcome], say: Say) -> None:
        """Add what became of files in other processes; those that failed there are told here."""
        for other in others:
            for path, reason in other.failed.items():
                self.fail(path, reason, say)
            for name in ("done", "complete", "kept"):
                mine = getattr(self, name)
                known = set(mine)
                mine += [path for path in getattr(other, name) if path not in known]
        self.done = [path for path in self.done if path not in self.failed]

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {name: getattr(self, name) for name in ("done", "complete", "kept", "failed")}


def count_bands(number: int) -> str:
    """In words."""
    return f"{number} band" if number == 1 else f"{number} bands"


def parse_budget(text: str) -> dict[str, Any]:
    """Time or steps, as `fit_density` takes them: "5min", "90s", "1h", "2000steps"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h|steps)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(
            f"--budget must be a time or a number of steps, such as 90s, 5min, 1h or 2000steps, got {text!r}"
        )
    if found[2] == "steps":
        return {"steps": int(float(found[1]))}
    return {"minutes": float(found[1]) * _UNITS[found[2]]}
