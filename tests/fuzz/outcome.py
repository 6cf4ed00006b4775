"""What came of a case, and the random choices that make one."""

from __future__ import annotations

import random
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import misconv

SOURCE = str(Path(misconv.__file__).parent)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Outcome:
    """`status` is "ok", "refused" or "failed"; `what` names what was tried, the reason or the failure in one line."""

    status: str
    what: str


class FuzzFailure(AssertionError):
    """A promise that did not hold."""


def ok(what: str) -> Outcome:
    return Outcome("ok", what)


def refused(what: str) -> Outcome:
    return Outcome("refused", what)


def expect(true: object, message: str) -> None:
    """Fail the case unless this holds."""
    if not true:
        raise FuzzFailure(message)


def one_line(text: object, longest: int = 300) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def failure(error: BaseException) -> Outcome:
    """An unexpected error as an outcome: what it says, and the last line of the library it came through."""
    if isinstance(error, FuzzFailure):
        return Outcome("failed", one_line(error))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(SOURCE)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Outcome("failed", one_line(f"{type(error).__name__}: {error}{where}"))


class LateError(BaseException):
    """Nobody but the timer catches this."""


@contextmanager
def timer(seconds: int, what: str) -> Iterator[None]:
    """What does not come back in time is a failure."""

    def late(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    except LateError as error:
        raise FuzzFailure(f"{what}: more than {seconds} s") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Choices(random.Random):
    """The random choices of one case. `Random(text)` is the same on every machine and in every process."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(f"{kind} {seed}")
        torch.manual_seed(seed)

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def weighted(self, table: dict[Item, float]) -> Item:
        return self.choices(list(table), list(table.values()))[0]

    def pick(self, items: Sequence[Any]) -> Any:
        return self.choice(items)

    def power(self, low: float, high: float) -> float:
        """Ten to a power between `low` and `high`, uniform in the exponent."""
        return float(10 ** self.uniform(low, high))
