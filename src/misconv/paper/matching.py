"""The training of a `FlowMatching` on incomplete images: of what is seen more is hidden, and predicted.

`misconv.paper.flow_matching` says why this is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from misconv import missing
from misconv._train import EpochRecord, Holes, Job, cosine_schedule
from misconv.paper.cache import as_json
from misconv.paper.flow_matching import FlowMatching
from misconv.paper.inputs import IncompleteImages
from misconv.paper.settings import FULL, MIXED

__all__ = ["SETTINGS", "MatchingSettings", "draw_times", "make_matching", "matching_job", "matching_loss"]

# Shares of the tasks. A few others were tried on the digits, whose test images so had a part in the choice.
UNSHOWN = 1 / 3  # how often nothing is shown; then there are several times as many pixels that count
STILL = 1 / 4  # how often t = 0, which is the task of `impute`
MEASURE = 7  # the seed of the noise in validation


@dataclass(frozen=True)
class MatchingSettings:
    """What makes a `FlowMatching` what it is: its sizes, and its training by Adam with a cosine schedule.

    `precision` is that of the training on a GPU, in Fabric's words; a CPU has full precision.
    """

    epochs: int
    scales: int = 3
    width: int = 48
    steps: int = 20
    batch_size: int = 128
    learning_rate: float = 1e-3
    clip: float = 1.0
    precision: str = FULL


# Small: a few minutes each on a GPU, and less than one on a CPU for the digits.
SETTINGS = {
    "mnist": MatchingSettings(epochs=40),
    "svhn": MatchingSettings(epochs=30, precision=MIXED),
    "celeba": MatchingSettings(epochs=100, scales=4, width=32, batch_size=64, precision=MIXED),
    "digits": MatchingSettings(epochs=40, scales=2, width=24, batch_size=64, learning_rate=3e-3),
}


def make_matching(settings: MatchingSettings, shape: tuple[int, int, int], seed: int) -> FlowMatching:
    """A model by its settings, with the same first weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FlowMatching(shape, settings.scales, settings.width, settings.steps)


def draw_times(seen: Tensor, shown: Tensor) -> Tensor:
    """Times (B, 1 or C, H, W) of the pixels of incomplete images, 0 where nothing is seen; by torch's generator.

    Args:
        seen: what is seen of the images. shown: a part of it, which the network is given unless all is hidden from it.
    """
    chance = torch.rand(3, len(seen), 1, 1, 1, device=seen.device)
    time = chance[0].masked_fill(chance[1] < STILL, 0)
    given = shown & (chance[2] >= UNSHOWN)
    return torch.where(seen & ~given, time, given.to(time.dtype))


def matching_loss(model: Callable[[Tensor, Tensor], Tensor], x: Tensor, seen: Tensor, times: Tensor) -> Tensor:
    """Mean squared error of the velocity, and of the prediction at time 0, over seen values that are not shown.

    Args:
        model: (u, times) -> (f − u) / (1 − τ), as `FlowMatching`.
        x: images from 0 to 1, of which values that are not seen are not read. times: 0 at all of these.
    """
    x = (2 * x - 1).masked_fill(~seen, 0)
    times = times.to(x.dtype).expand_as(x)
    noise = torch.randn_like(x).masked_fill(times == 0, 0)
    told = model((1 - times) * noise + times * x, times)
    counted = seen & (times < 1)
    error = (told - (x - noise)).masked_fill(~counted, 0)
    return error.square().sum() / counted.expand_as(x).sum().clamp_min(1)


def matching_job(
    flow: FlowMatching,
    settings: MatchingSettings,
    data: IncompleteImages,
    rows: tuple[Tensor, Tensor],
    *,
    test: Callable[[FlowMatching], EpochRecord] = lambda flow: {},
    seed: int = 0,
    identity: dict[str, Any] | None = None,
) -> Job:
    """The training of such a model on incomplete images, for `misconv._train.train` in one process.

    In every epoch a region like those that are missing is hidden from each image.

    Args:
        rows: indices of the images to learn from, and of those that choose the epoch.
        test: measures the model after every epoch; what it returns is recorded, and chooses nothing.
        identity: what else must agree for a checkpoint to be continued.
    """
    learned, held = rows
    holes = Holes(missing.like(data.observed), 1 / 4, seed)
    shown = data.observed.clone()

    def begin(epoch: int) -> None:
        shown.copy_(holes.of_epoch(data.observed, epoch))  # in place, where a captured step reads it

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        chosen = learned[batch.to(learned.device)]
        x, seen = data.at(chosen)
        error = matching_loss(model, x, seen, draw_times(seen, shown[chosen]))
        return error, error.detach().double().view(1) * len(batch)

    def evaluate(model: nn.Module) -> tuple[float, EpochRecord]:
        measured = test(flow)
        if len(held) == 0:
            return -math.inf, measured
        total = 0.0
        with torch.random.fork_rng(devices=[data.images.device] if data.images.is_cuda else []):
            torch.manual_seed(MEASURE)  # the same noise and regions every time
            still = holes.of_validation(data.observed[held])
            for part, known in zip(held.split(settings.batch_size), still.split(settings.batch_size), strict=True):
                x, seen = data.at(part)
                total += float(matching_loss(model, x, seen, draw_times(seen, known))) * len(part)
        return total / len(held), {"validation_loss": total / len(held), **measured}

    known = {"task": "flow matching", "flow_matching": as_json(settings), **(identity or {})}
    return Job(
        flow, loss, 1, lambda sums: {"loss": sums[0] / len(learned)}, evaluate, len(learned), settings.batch_size,
        cosine_schedule(settings.learning_rate, settings.epochs), seed=seed, clip=settings.clip, begin=begin,
        resident=data.images.is_cuda, settings=known, name="flow matching",
    )  # fmt: skip
