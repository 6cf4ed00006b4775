"""Missing regions of several kinds, of which every image has one: what densities and flows hide while they learn.

All of these functions are as `misconv.missing.hide` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from misconv import missing

__all__ = ["ALL_SHAPES", "all_shapes", "one_of", "region_named"]

# What may be missing where a network was trained on complete images, and how much of an image.
ALL_SHAPES = {"square": 1 / 4, "noise": 3 / 4, "trapezoid": 1 / 2, "stripes": 1 / 2, "channels": 1 / 3}


def one_of(
    kinds: Sequence[tuple[Callable[..., Tensor], float | None]],
    batch: int,
    height: int,
    width: int,
    *,
    fraction: float,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Regions of one kind or another, drawn for every image anew.

    Args:
        kinds: functions of `misconv.missing`, each with the share that it hides, or None for `fraction`.
    """
    drawn = [
        draw(batch, height, width, fraction=fraction if share is None else share, generator=generator, device=device)
        for draw, share in kinds
    ]
    where = device if generator is None else generator.device
    turn = torch.randint(len(drawn), (batch, 1, 1, 1), generator=generator, device=where).to(drawn[0].device)
    chosen = drawn[0]
    for number, regions in enumerate(drawn[1:], 1):
        chosen = torch.where(turn == number, regions, chosen)  # some have planes for every channel, others one
    return chosen


def all_shapes(channels: int) -> Callable[..., Tensor]:
    """Regions of each of `ALL_SHAPES`, with the share that it has there; images of one channel lose no channel."""
    named = {shape: share for shape, share in ALL_SHAPES.items() if shape != "channels" or channels > 1}
    return partial(one_of, tuple((region_named(shape, channels), share) for shape, share in named.items()))


def region_named(shape: str, channels: int) -> Callable[..., Tensor]:
    """The function of `misconv.missing` of that name, for images with this number of channels."""
    draw: Callable[..., Tensor] = getattr(missing, shape)
    return partial(draw, channels=channels) if shape == "channels" else draw
