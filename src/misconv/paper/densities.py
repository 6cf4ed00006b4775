"""Densities of the experiments by their settings: the networks, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import missing
from misconv._train import Job, cosine_schedule, density_job, warm_up_cosine
from misconv.density import SMFA, ConvDMFA, LinearDMFA, UNetDMFA
from misconv.paper.flows import FlowSettings, flow_job, make_flow
from misconv.paper.inputs import BYTE, IncompleteImages

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = [
    "ALL_SHAPES",
    "TITLES",
    "DensitySettings",
    "any_shape",
    "job_of",
    "learning_rate_of",
    "make_density",
    "region_of",
    "several",
]

# What may be missing where a network was trained on complete images, and how much of an image.
ALL_SHAPES = {"square": 1 / 4, "noise": 3 / 4, "trapezoid": 1 / 2, "stripes": 1 / 2, "channels": 1 / 3}

TITLES = {
    "smfa": "SMFA",
    "dmfa": "DMFA",
    "plus": "DMFA+",
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
        shapes: of the regions that are hidden, "square", "several", "all" or "like", like those that are missing.
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


def job_of(density: nn.Module, settings: DensitySettings | FlowSettings, data: IncompleteImages, fabric: Fabric) -> Job:
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
        return partial(any_shape, data.images.shape[1])
    return several if shapes == "several" else missing.square


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


def several(
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Regions of one shape or another, drawn for every image anew; for `misconv.missing.hide`."""
    drawn = [
        shape(batch, height, width, fraction=fraction, generator=generator, device=device)
        for shape in (missing.square, missing.trapezoid, missing.noise)
    ]
    return _one_of(drawn, generator, device)


def any_shape(
    colours: int,
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Regions of each of `ALL_SHAPES`, with the share that it has there; images of one channel lose no channel."""
    drawn = [
        region_of(shape, share, colours, (batch, height, width), generator=generator, device=device)
        for shape, share in ALL_SHAPES.items()
        if shape != "channels" or colours > 1
    ]
    return _one_of(drawn, generator, device)


def region_of(shape: str, share: float, colours: int, size: tuple[int, int, int], **options: Any) -> Tensor:
    """`observed` of images (batch, height, width) with missing regions of a shape."""
    more = {"channels": colours} if shape == "channels" else {}
    observed: Tensor = getattr(missing, shape)(*size, fraction=share, **more, **options)
    return observed


def _one_of(drawn: list[Tensor], generator: torch.Generator | None, device: torch.device | str | None) -> Tensor:
    where = device if generator is None else generator.device
    batch = len(drawn[0])
    turn = torch.randint(len(drawn), (batch, 1, 1, 1), generator=generator, device=where).to(drawn[0].device)
    chosen = drawn[0]
    for number, regions in enumerate(drawn[1:], 1):
        chosen = torch.where(turn == number, regions, chosen)
    return chosen


def learning_rate_of(settings: DensitySettings) -> Callable[[int], float]:
    """The learning rate of every epoch."""
    if settings.cosine:
        return cosine_schedule(settings.learning_rates[0], settings.epochs)
    return lambda epoch: settings.learning_rates[0 if epoch < settings.mse_epochs else -1]
