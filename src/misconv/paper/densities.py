"""Densities of the experiments by their settings: the networks, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import missing
from misconv._train import Job, density_job, falling
from misconv.density import SMFA, ConvDMFA, LinearDMFA
from misconv.paper.inputs import Incomplete

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["job_of", "make_density", "rates", "several"]


def job_of(density: nn.Module, chosen: dict[str, Any], data: Incomplete, fabric: Fabric) -> Job:
    """The training of a density network on incomplete images, for `misconv._train.engine.train`."""
    return density_job(
        density, data.images, data.observed, fabric, batch_size=chosen["batch_size"], learning_rate=rates(chosen),
        mse_epochs=chosen["mse_epochs"], clip=chosen.get("clip", 5.0),
        shape=several if chosen.get("shapes") == "several" else missing.square,
    )  # fmt: skip


def make_density(chosen: dict[str, Any], shape: tuple[int, int, int]) -> nn.Module:
    """A density by its settings, with the same first weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if chosen["kind"] == "SMFA":
            return SMFA(chosen["components"], chosen["rank"])
        if chosen["kind"] == "LinearDMFA":
            return LinearDMFA(shape, rank=chosen["rank"])
        options = {name: chosen[name] for name in ("components", "widths", "depths", "skips") if name in chosen}
        network = ConvDMFA(shape[0], rank=chosen["rank"], **options)
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
    where = device if generator is None else generator.device
    turn = torch.randint(len(drawn), (batch, 1, 1, 1), generator=generator, device=where).to(drawn[0].device)
    return torch.where(turn == 0, drawn[0], torch.where(turn == 1, drawn[1], drawn[2]))


def rates(chosen: dict[str, Any]) -> Callable[[int], float]:
    """The first learning rate while the squared error is added, the last one after; or a falling one."""
    if chosen.get("falling"):
        return falling(chosen["rates"][0], chosen["epochs"])
    return lambda epoch: float(chosen["rates"][0] if epoch < chosen["mse_epochs"] else chosen["rates"][-1])
