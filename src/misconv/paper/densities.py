"""Densities of the experiments by their settings: the networks, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import missing
from misconv._train import Job, cosine_schedule, density_job, warm_up_cosine
from misconv.density import SMFA, ConvDMFA, LinearDMFA, UNetDMFA
from misconv.paper.flows import FlowSettings, flow_job, make_flow
from misconv.paper.inputs import BYTE, IncompleteImages
from misconv.paper.regions import all_shapes

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = [
    "TITLES",
    "AnySettings",
    "DensitySettings",
    "check_density",
    "group_of",
    "job_of",
    "learning_rate_of",
    "learns_from_complete",
    "make_density",
]

TITLES = {
    "smfa": "SMFA",
    "dmfa": "DMFA",
    "acflow": "ACFlow",
    "unet": "UNetDMFA",
}  # of the densities of an experiment, by their names


@dataclass(frozen=True)
class DensitySettings:
    """What makes a density what it is.

    Args:
        kind: "SMFA", "LinearDMFA", "ConvDMFA" or "UNetDMFA".
        rank, components, widths, depths, skips: of the model; an SMFA and a LinearDMFA have no use for the last three,
            a UNetDMFA for the last one. patch: of a UNetDMFA.
        epochs: passes over the images, for an SMFA the largest number of EM iterations.
        complete: whether it learns from complete images, and serves all shapes.

    The others are of the training of a network:
        learning_rates: the first while the squared error is added, the last one after that. A UNetDMFA has the peak of
            the schedule of `misconv.fit_density`, and the rest of its recipe.
        cosine: whether the first learning rate falls along a cosine instead.
        objective: of `misconv.fit_density`; the paper's is "joint".
        mse_epochs: how many first epochs add the squared error.
        clip: the largest norm of a gradient.
        shapes: of the regions that are hidden, "square", "all" or "like", like those that are missing.
    """

    kind: str
    rank: int
    epochs: int
    components: int = 1
    widths: tuple[int, ...] = (32, 64, 128)
    depths: tuple[int, ...] = (2, 2, 4, 2, 2)
    skips: bool = False
    batch_size: int = 64
    learning_rates: tuple[float, ...] = (1e-3,)
    cosine: bool = False
    objective: str = "joint"
    mse_epochs: int = 0
    clip: float | None = 5.0
    shapes: str = "square"
    patch: int = 2
    complete: bool = False


AnySettings = DensitySettings | FlowSettings


def learns_from_complete(settings: AnySettings) -> bool:
    """Whether it is given complete images, and serves all shapes."""
    return isinstance(settings, FlowSettings) or settings.complete


def group_of(settings: AnySettings) -> tuple[Any, ...]:
    """Densities of one group can be trained side by side: they have the same images, batches and epochs.

    EM has no batches, so that each SMFA is a group of its own.
    """
    alone = settings if isinstance(settings, DensitySettings) and settings.kind == "SMFA" else None
    return settings.batch_size, settings.epochs, learns_from_complete(settings), alone


def check_density(path: Path, density: nn.Module, settings: AnySettings, shape: tuple[int, int, int]) -> None:
    """The file of a density may hold another's."""
    wanted = make_density(settings, shape)
    found, asked = ({"shape": None, **getattr(d, "config", dict)()} for d in (density, wanted))
    if isinstance(wanted, SMFA):
        asked["shape"] = list(shape)
    if type(density) is not type(wanted) or found != asked:
        raise ValueError(f"cannot load {path}: it holds another density than its name stands for")


def job_of(density: nn.Module, settings: AnySettings, data: IncompleteImages, fabric: Fabric) -> Job:
    """The training of a density on incomplete images, of a flow on complete ones, for `misconv._train.train`."""
    if isinstance(settings, FlowSettings):
        return flow_job(density, settings, data.images, fabric)
    more: dict[str, Any] = {}
    if settings.kind == "UNetDMFA":
        more = {"schedule": warm_up_cosine(settings.learning_rates[0]), "betas": (0.9, 0.99)}
    return density_job(
        density, data.images, data.observed, fabric, batch_size=settings.batch_size,
        learning_rate=learning_rate_of(settings), objective=settings.objective, mse_epochs=settings.mse_epochs,
        clip=settings.clip, shape=_regions(settings.shapes, data), divisor=BYTE, **more,
    )  # fmt: skip


def _regions(shapes: str, data: IncompleteImages) -> Callable[..., Tensor]:
    """What is hidden of images, by the name that settings have for it."""
    if shapes == "like":
        return missing.like(data.observed)
    if shapes == "all":
        return all_shapes(data.images.shape[1])
    return missing.square


def make_density(settings: DensitySettings | FlowSettings, shape: tuple[int, int, int]) -> nn.Module:
    """A density by its settings, with the same first weights every time."""
    if isinstance(settings, FlowSettings):
        return make_flow(settings, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if settings.kind == "SMFA":
            return SMFA(settings.components, settings.rank, prior=0.0, bounds=None)
        if settings.kind == "LinearDMFA":
            return LinearDMFA(shape, settings.components, settings.rank, bounds=None)
        if settings.kind == "UNetDMFA":
            sizes = (settings.widths, settings.depths, settings.patch)
            return UNetDMFA(shape[0], settings.components, settings.rank, *sizes)
        network = ConvDMFA(
            shape[0],
            settings.components,
            settings.rank,
            settings.widths,
            settings.depths,
            skips=settings.skips,
            bounds=None,
        )
        return network.to(memory_format=torch.channels_last)


def learning_rate_of(settings: DensitySettings) -> Callable[[int], float]:
    """The learning rate of every epoch."""
    if settings.cosine:
        return cosine_schedule(settings.learning_rates[0], settings.epochs)
    return lambda epoch: settings.learning_rates[0 if epoch < settings.mse_epochs else -1]
