"""How long a training lasts: in epochs, steps or minutes; and the learning rate that follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from misconv._checks import check_positive, check_size

__all__ = ["Budget", "Place", "budget_of", "warm_up_cosine"]

_ROUNDS = 20  # evaluations and checkpoints of a training that is given in steps or minutes, at least
_FIRST_ROUND = 4  # steps after which a training that is given in minutes knows its pace
_WHOLE_EPOCH = 2**62


@dataclass
class Place:
    """Where a training is.

    Args:
        epoch: the pass over the images, which counts from 0. position: the steps of it that are done.
        taken: the steps of all epochs that are done.
    """

    epoch: int = 0
    position: int = 0
    taken: int = 0


@dataclass
class Budget:
    """How long a training lasts; one of the three is given.

    It is spent in rounds, and after each the training is judged and its checkpoint written. A round is an epoch, or a
    twentieth of the steps or of the time, whichever is shorter; but not fewer steps than `shortest`.
    """

    epochs: int | None = None
    steps: int | None = None
    minutes: float | None = None
    shortest: int = 1  # steps of a round, so that it is not judged for longer than it learns
    _pace: float = field(default=0.0, init=False)  # seconds of a step
    _round: int = field(default=0, init=False)  # steps
    _before: tuple[float, int] | None = field(default=None, init=False)  # seconds and steps when the round began

    def next_round(self, place: Place, seconds: float) -> int:
        """How many steps the next round may have, 0 if the training is over; it ends with the epoch in any case.

        Args:
            seconds: that the training has taken.
        """
        if self.epochs is not None:
            return _WHOLE_EPOCH if place.epoch < self.epochs else 0
        if self.steps is not None:
            return min(max(math.ceil(self.steps / _ROUNDS), self.shortest), self.steps - place.taken)
        return self._by_time(place.taken, seconds)

    def _by_time(self, taken: int, seconds: float) -> int:
        left = self._total - seconds
        if left <= 0 and taken > 0:  # one round there always is: a machine may need longer to begin
            return 0
        if self._before is not None and taken > self._before[1]:
            self._pace = (seconds - self._before[0]) / (taken - self._before[1])
        self._before = seconds, taken
        # The first steps are slow, so that the pace is not believed at once.
        most = 4 * self._round or _FIRST_ROUND
        usual = max(self._total / _ROUNDS, self.shortest * self._pace)
        wanted = min(usual, left) / self._pace if self._pace else most
        self._round = max(1, min(int(wanted), most))
        return self._round

    def share(self, place: Place, length: int | None) -> float:
        """How much of it is spent in the middle of the next step, 0 to 1.

        Args:
            length: about how many steps an epoch has, where that is known.
        """
        if self.epochs is not None:
            within = 0.5 if length is None else min((place.position + 0.5) / length, 1)
            return (place.epoch + within) / self.epochs
        if self.steps is not None:
            return (place.taken + 0.5) / self.steps
        seconds, taken = self._before or (0.0, 0)
        return min((seconds + (place.taken - taken + 0.5) * self._pace) / self._total, 1.0)

    @property
    def _total(self) -> float:
        assert self.minutes is not None
        return 60 * self.minutes

    @property
    def total(self) -> int:
        """Epochs, steps or seconds, for a progress bar."""
        return self.epochs or self.steps or max(round(self._total), 1)

    def spent(self, place: Place, seconds: float) -> int:
        """How many of `total`."""
        if self.minutes is not None:
            return min(int(seconds), self.total)
        return place.epoch if self.epochs is not None else place.taken

    def settings(self, scheduled: bool) -> dict[str, Any]:
        """What must agree for a checkpoint to be continued; more epochs may follow if no rate depends on them."""
        epochs = self.epochs if scheduled or self.epochs is None else "any"
        return {"epochs": epochs, "steps": self.steps, "minutes": self.minutes}


def budget_of(epochs: int | None, steps: int | None, minutes: float | None) -> Budget | None:
    """The budget that arguments ask for, None where they ask for none."""
    given = {name: v for name, v in (("epochs", epochs), ("steps", steps), ("minutes", minutes)) if v is not None}
    if len(given) > 1:
        raise ValueError(f"epochs, steps and minutes must not be given together, got {' and '.join(given)}")
    if epochs is not None:
        return Budget(epochs=check_size("epochs", epochs))
    if steps is not None:
        return Budget(steps=check_size("steps", steps))
    return None if minutes is None else Budget(minutes=check_positive("minutes", minutes))


def warm_up_cosine(peak: float, warm_up: float = 0.03) -> Callable[[float], float]:
    """A learning rate by the share of the training that is done: it grows to its peak, then falls along a cosine.

    Example:
        >>> rate = warm_up_cosine(1.0)
        >>> [round(rate(share), 2) for share in (0.0, 0.015, 0.03, 0.5, 1.0)]
        [0.1, 0.55, 1.0, 0.52, 0.0]
    """

    def rate(share: float) -> float:
        if share < warm_up:
            return peak * (0.1 + 0.9 * share / warm_up)
        return peak * (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up))) / 2

    return rate
