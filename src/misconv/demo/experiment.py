"""The newcomer's experiment, in two parts: photographs with holes, and handwritten digits with holes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from misconv._train import cpu_by_default
from misconv.demo import digits, photographs
from misconv.demo.digits import Digits, DigitSettings
from misconv.demo.photographs import Photographs, PhotographSettings

__all__ = ["QUICK", "Demo", "Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """Of the whole experiment."""

    seed: int = 0  # of crops, splits, missing regions, densities and classifiers
    seeds: int = 3  # trainings of every classifier
    photographs: PhotographSettings = field(default_factory=PhotographSettings)
    digits: DigitSettings = field(default_factory=DigitSettings)


QUICK = Settings(  # to try it out
    photographs=PhotographSettings(train=300, stride=60, steps=12),
    digits=DigitSettings(images=460, train=300, validation=60, dmfa_steps=60, classifier_epochs=2),
)


@dataclass
class Demo:
    """Everything the report shows."""

    settings: Settings
    photographs: Photographs
    digits: Digits
    seconds: float


def run(
    settings: Settings = Settings(),  # noqa: B008  # it is immutable
    *,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Demo:
    """The whole experiment, on the CPU; the same seed gives the same numbers.

    Args:
        settings: how many images, components, steps, …
        progress: whether to show progress bars.
        say: called with a line of text at every stage.
    """
    started = time.perf_counter()
    seed, seeds = settings.seed, settings.seeds
    with cpu_by_default():
        first = photographs.learn_and_compare(settings.photographs, seed=seed, progress=progress, say=say)
        second = digits.learn_and_compare(settings.digits, seed=seed, seeds=seeds, progress=progress, say=say)
    return Demo(settings, first, second, time.perf_counter() - started)
