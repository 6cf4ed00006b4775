"""How far a density can be believed on image files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from torch import Tensor, nn

from misconv import missing
from misconv._files import Crops, ImageFiles, shape_of
from misconv.assess import Assessment, assess
from misconv.images.outcome import Outcome, Say, count_bands

__all__ = ["assess_files"]

_SIDE = 256  # of what is assessed at once


def assess_files(
    images: ImageFiles, density: nn.Module, say: Say, *, limit: int | None, seed: int
) -> tuple[Assessment, Outcome]:
    """Hide some of what is seen in the files, and compare; files that cannot be read are left out and told.

    What is hidden is like what is missing. Where images have several sizes, squares are hidden.
    """
    outcome = Outcome()
    shape = missing.square if len({min(max(size[1:]), _SIDE) for size in _sizes(images)}) > 1 else None
    if shape is not None:
        say("the images have several sizes: squares are hidden of them, not regions like those that are missing")

    def readable() -> Iterator[Tensor]:
        for index, path in enumerate(images.paths):
            try:
                size = shape_of(images.files[index])
                wanted = getattr(density, "channels", size[0])
                if size[0] != wanted:
                    raise ValueError(f"has {count_bands(size[0])}, and the density knows images of {wanted}")
                side = min(max(size[1:]), _SIDE)
                for place in range(len(crops := Crops(images.only([index]), side, [size]))):
                    yield crops[place].unsqueeze(0)
            except (ValueError, OSError) as error:
                outcome.fail(path, error, say)
            else:
                outcome.done.append(str(path))

    return assess(density, readable(), shape=shape, limit=limit, seed=seed), outcome


def _sizes(images: ImageFiles) -> Iterator[tuple[int, int, int]]:
    """Of the files that can be read."""
    for file in images.files:
        with suppress(ValueError, OSError):
            yield shape_of(file)
