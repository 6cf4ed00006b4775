"""A classifier of a table: what it is given, and what has come of its training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from misconv._train import History
from misconv.paper.inputs import Take
from misconv.paper.methods import Method

__all__ = ["MethodInputs", "Trained", "side_by_side"]


@dataclass(frozen=True)
class MethodInputs:
    """What the classifier of a method is given.

    Args:
        first_layer: makes the first layer for images of some channels.
        train: how it is given training images. test: the same of incomplete and of complete test images, made when it
            is called.
    """

    first_layer: Callable[[int], nn.Module]
    train: Take
    test: Callable[[], tuple[Take, Take]]


@dataclass
class Trained:
    """A classifier after its training and before its test.

    Args:
        settings: what makes its unit what it is.
        history: a record for each epoch, and which of them is that of the network.
        seconds: its share of the time.
        side_by_side: how many classifiers were trained at a time.
        variant: what was done otherwise than usual, if anything was.
    """

    settings: dict[str, Any]
    method: Method
    seed: int
    network: nn.Module
    history: History
    seconds: float
    side_by_side: int
    variant: str | None = None


def side_by_side(count: int) -> str:
    """What is said of some trainings, unless there is one alone."""
    return f"; {count} side by side" if count > 1 else ""
