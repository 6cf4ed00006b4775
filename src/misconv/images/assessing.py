"""How far a density can be believed on image files."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from misconv._files import Crops, ImageFiles, shape_of
from misconv.assess import Assessment, assess
from misconv.images.outcome import Outcome, Say, count_bands

__all__ = ["assess_files"]

_SIDE = 256  # of what is assessed at once


def assess_files(
    images: ImageFiles, density: nn.Module, say: Say, *, limit: int | None, seed: int
) -> tuple[Assessment, Outcome]:
    """Hide some of what is seen in the files, and compare; files that cannot be read are left out and told."""
    outcome = Outcome()

    def readable() -> Iterator[Tensor]:
        for index, path in enumerate(images.paths):
            try:
                shape = shape_of(images.files[index])
                wanted = getattr(density, "channels", shape[0])
                if shape[0] != wanted:
                    raise ValueError(f"has {count_bands(shape[0])}, and the density knows images of {wanted}")
                side = max(shape[1:])
                for place in range(len(crops := Crops(images.only([index]), min(side, _SIDE), [shape]))):
                    yield crops[place].unsqueeze(0)
            except (ValueError, OSError) as error:
                outcome.fail(path, error, say)
            else:
                outcome.done.append(str(path))

    return assess(density, readable(), limit=limit, seed=seed), outcome
