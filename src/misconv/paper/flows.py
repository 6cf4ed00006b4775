"""The training of an ACFlow on complete images, by maximum likelihood of what a fresh region hides of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from misconv import missing
from misconv._train import EpochRecord, Holes, Job, TensorImages, cosine_schedule
from misconv.paper.acflow import ACFlow
from misconv.paper.inputs import BYTE
from misconv.paper.regions import one_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["FlowSettings", "flow_job", "make_flow", "regions"]

# What is hidden while it learns: the regions of the experiments, and fewer pixels, so that one flow serves them all.
regions = partial(
    one_of,
    ((missing.square, 1 / 4), (missing.trapezoid, 1 / 2), (missing.noise, 3 / 4), (missing.noise, 1 / 2)),
)
VALIDATION = 0.1


@dataclass(frozen=True)
class FlowSettings:
    """What makes an `ACFlow` what it is: its sizes, and its training by Adam with a cosine schedule."""

    epochs: int
    scales: int = 3
    width: int = 32
    blocks: int = 2
    batch_size: int = 128
    learning_rate: float = 1e-3
    clip: float = 1.0


def make_flow(settings: FlowSettings, shape: tuple[int, int, int]) -> ACFlow:
    """A flow by its settings, with the same first weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ACFlow(shape, settings.scales, settings.width, settings.blocks)


def flow_job(flow: nn.Module, settings: FlowSettings, images: Tensor, fabric: Fabric) -> Job:
    """The training of a flow on complete images, uint8 (N, C, H, W), for `misconv._train.train` in one process.

    Every image has another region hidden in every epoch. A byte k stands for all values from k - ½ to k + ½
    (dequantisation), one of which is drawn in every step. A tenth of the images, set aside, chooses the epoch.
    """
    return _FlowTraining(flow, settings, images, fabric).job()


class _FlowTraining:
    def __init__(self, flow: nn.Module, settings: FlowSettings, images: Tensor, fabric: Fabric) -> None:
        self.flow, self.settings, self.fabric = flow, settings, fabric
        complete = torch.ones_like(images[:, :1], dtype=torch.bool)
        self.source = TensorImages(
            images, complete, fabric, validation=VALIDATION, batch_size=settings.batch_size, seed=0, divisor=BYTE
        )
        self.holes = Holes(regions, 1 / 2, 0)  # each kind has a share of its own
        self.shown = self.holes.of_validation(self.source.held_observed())
        self.numbers = math.prod(self.source.image)

    def job(self) -> Job:
        """For `train`."""
        source, settings = self.source, self.settings
        return Job(
            self.flow, self.loss, 1, self.summarise, self.evaluate, source.size, source.batch_size,
            cosine_schedule(settings.learning_rate, settings.epochs), clip=settings.clip, begin=self.begin,
            resident=source.resident, data=source.identify, name="ACFlow",
            settings={"task": "flow", **source.settings, "regions": self.holes.identify(source.image)},
        )  # fmt: skip

    def begin(self, epoch: int) -> None:
        """Before an epoch."""
        self.source.begin(epoch, self.holes)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Nats per value of an image; their sum over the batch."""
        x, _, known = (t.to(self.fabric.device) for t in self.source.take(batch))
        x = x + (torch.rand_like(x) - 0.5) / BYTE
        nats = -model(x, known) / self.numbers
        return nats.mean(), nats.detach().sum().unsqueeze(0)

    def summarise(self, sums: list[float]) -> EpochRecord:
        """Nats per image, as Table 7 has them."""
        return {"nll": sums[0] * self.numbers / self.source.size}

    def evaluate(self, model: nn.Module) -> tuple[float, EpochRecord]:
        """The same of the images that were set aside, whose regions never change."""
        if not self.source.held_size:
            return -math.inf, {}
        total = torch.zeros((), dtype=torch.float64, device=self.fabric.device)
        for part in torch.arange(len(self.shown), device=self.shown.device).split(2 * self.source.batch_size):
            x, _ = self.source.take_held(part)
            total -= model(x.to(self.fabric.device), self.shown[part].to(self.fabric.device)).sum()
        nll = float(total) / len(self.shown)
        return nll, {"validation_nll": nll}
