"""Augmentation of incomplete images, and of what a density says about them.

A density that no longer changes is asked once: of every training image it sees four versions, of which nothing, 1/16,
1/8 and 1/4 more is hidden, and what it says is kept; shifts and flips act on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from misconv import missing
from misconv._train import as_floats
from misconv.mfa import MFA
from misconv.paper.inputs import BYTE, CachedMFA, IncompleteImages

__all__ = ["EXTRA", "Augmented", "FreshlyHidden", "Versions"]

EXTRA = (1 / 16, 1 / 8, 1 / 4)  # how much more is hidden of every second image


class Augmented:
    """Incomplete images, of which more is hidden, shifted and flipped anew in every epoch.

    Args:
        versions: the images with nothing more hidden, then all of them again with more and more hidden.
        rows: which images of a version.
        hide: whether to use the versions with more hidden. shift: by at most this many pixels. flip: left and right.
        cached: whether to return the MFAs that `versions` has cached; otherwise images and their masks.
    """

    def __init__(
        self,
        versions: Versions,
        rows: Tensor,
        seed: int,
        *,
        hide: bool,
        shift: int,
        flip: bool,
        cached: bool,
    ) -> None:
        self.versions, self.rows, self.seed = versions, rows, seed
        self.hide, self.shift, self.flip, self.cached = hide, shift, flip, cached
        self.virtual = rows.clone()  # the version of each image in this epoch
        self.moves = torch.zeros(3, len(rows), dtype=torch.int64, device=rows.device)  # down, right, flipped
        self.sources = _Sources(shift, flip, versions.data.images.shape[2:], rows.device) if shift or flip else None
        if self.sources is not None:
            self.chosen = self.sources.number(*self.moves)  # the number of each move
            if cached:
                self.usual = self.sources.of_places(versions.usual)

    def begin(self, epoch: int) -> None:
        """Draw for one epoch, into the memory that a captured step reads."""
        device, size = self.rows.device, len(self.rows)
        generator = torch.Generator(device).manual_seed(self.seed * 1_000_003 + 700_000 + epoch)
        if self.hide:
            # Every second image as it is, the others in one of the versions of which more is hidden.
            draw = torch.randint(2 * len(EXTRA), (size,), generator=generator, device=device)
            version = torch.where(draw < len(EXTRA), 0, draw - len(EXTRA) + 1)
            self.virtual.copy_(self.rows + version * self.versions.size)
        if self.shift:
            self.moves[:2].random_(-self.shift, self.shift + 1, generator=generator)
        if self.flip:
            self.moves[2].random_(0, 2, generator=generator)
        if self.sources is not None:
            self.chosen.copy_(self.sources.number(*self.moves))

    def __call__(self, indices: Tensor) -> Any:
        """MFAs, or images and what is observed of them."""
        return self._taken(self.virtual[indices], indices)

    def with_less_hidden(self, indices: Tensor) -> Any:
        """The same, moved in the same way, with nothing more hidden than is missing."""
        return self._taken(self.rows[indices], indices)

    def _taken(self, virtual: Tensor, indices: Tensor) -> Any:
        if self.cached:
            return self._moved(self.versions.cached(virtual), indices)
        x, observed = self._images(virtual, indices)
        if self.sources is None:
            return x, observed
        source, inside = self.sources.at(self.chosen[indices])
        return _gathered(x, source), _gathered(observed, source) & inside

    def _images(self, virtual: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images, by their numbers among the versions and among the rows, and what is shown of them."""
        return self.versions.data.at(virtual)

    def _moved(self, p: MFA, indices: Tensor) -> MFA:
        """Shifted and flipped; of what comes in from beyond the border the usual mean and variance are known."""
        if self.sources is None:
            return p
        assert p.observed is not None
        chosen = self.chosen[indices]
        source, inside = self.sources.at(chosen)
        mean, variance = (usual[chosen] for usual in self.usual)
        outside = ~inside.unsqueeze(1)  # (B, 1, 1, H, W)
        return MFA(
            p.logits,
            torch.where(outside, mean, _gathered(p.means, source)),
            _gathered(p.factors, source).masked_fill(outside.unsqueeze(1), 0),
            torch.where(outside, variance, _gathered(p.noise, source)),
            _gathered(p.observed, source) & inside,
            check=False,
        )


class _Sources:
    """Where the pixels of a moved image come from, for every move that there is: a step only looks it up.

    Args:
        shift, flip: of `Augmented`. size: of the images.
    """

    def __init__(self, shift: int, flip: bool, size: torch.Size, device: torch.device) -> None:
        self.shift, (height, width) = shift, size
        steps = torch.arange(-shift, shift + 1, device=device)
        moves = torch.cartesian_prod(steps, steps, torch.arange(2 if flip else 1, device=device))
        down, right, flipped = moves.T.unsqueeze(-1)  # (M, 1) each
        rows = torch.arange(height, device=device) + down  # (M, H)
        columns = torch.arange(width, device=device)
        columns = torch.where(flipped > 0, width - 1 - columns, columns) + right  # (M, W)
        inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
        source = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
        self.source, self.inside = source.flatten(1), inside.unsqueeze(1)
        self.flips = 2 if flip else 1

    def number(self, down: Tensor, right: Tensor, flipped: Tensor) -> Tensor:
        """Which of all moves these are."""
        return ((down + self.shift) * (2 * self.shift + 1) + right + self.shift) * self.flips + flipped

    def of_places(self, values: Iterable[Tensor]) -> list[Tensor]:
        """Numbers (C, H·W) of every place, moved, (M, 1, C, H, W) each; those beyond the border are of the nearest."""
        shape = len(self.source), 1, -1, *self.inside.shape[2:]
        return [each[:, self.source].movedim(1, 0).reshape(shape) for each in values]

    def at(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Where each pixel comes from, (B, H·W), and whether that is inside, (B, 1, H, W)."""
        return self.source[numbers], self.inside[numbers]


class FreshlyHidden(Augmented):
    """The same, but regions like those that are missing are hidden of every second image, anew in every epoch."""

    def __init__(self, versions: Versions, rows: Tensor, seed: int, *, shift: int, flip: bool) -> None:
        super().__init__(versions, rows, seed, hide=False, shift=shift, flip=flip, cached=False)
        self.observed = versions.data.observed[rows]
        self.shape = missing.like(self.observed)
        self.shown = self.observed.clone()

    def begin(self, epoch: int) -> None:
        """Draw moves and regions for one epoch."""
        super().begin(epoch)
        generator = torch.Generator(self.rows.device).manual_seed(self.seed * 1_000_003 + 900_000 + epoch)
        less = missing.hide(self.observed, self.shape, generator=generator)
        whole = torch.rand(len(self.rows), 1, 1, 1, generator=generator, device=self.rows.device) < 0.5
        self.shown.copy_(torch.where(whole, self.observed, less))

    def _images(self, virtual: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.versions.data.at(virtual)[0], self.shown[indices]


class Versions:
    """All training images, then all of them again for each share in `EXTRA`, which is hidden in addition.

    Args:
        data: the images.
        density: its MFAs of all versions are in `cached`, beside what is `usual` at each place; None if nobody asks.
            An imputer may stand in its place.
        chunk: how many images it sees at a time.
    """

    def __init__(
        self,
        data: IncompleteImages,
        density: Callable[[Tensor, Tensor], MFA | Tensor] | None = None,
        chunk: int | None = None,
    ) -> None:
        self.size = len(data)
        generator = torch.Generator().manual_seed(4)
        more = [missing.hide(data.observed, fraction=fraction, generator=generator) for fraction in EXTRA]
        observed = torch.cat([data.observed, *more])
        images = data.images.repeat(len(EXTRA) + 1, 1, 1, 1)
        self.data = IncompleteImages(images, observed, data.filler)
        if density is not None:
            self.cached = CachedMFA(density, self.data, chunk)
            self.usual = _usual(data)


def _usual(data: IncompleteImages) -> tuple[Tensor, Tensor]:
    """Mean and variance of every pixel, (C, H·W) each, over the images that show it; of its channel, if none does."""
    values, seen = as_floats(data.images, BYTE).flatten(2), data.observed.flatten(2)
    count = seen.sum(0)  # (1, H·W)

    def average(of: Tensor) -> Tensor:
        total = (of * seen).sum(0)
        return torch.where(count > 0, total / count.clamp_min(1), total.sum(1, keepdim=True) / count.sum())

    mean = average(values)
    return mean, average((values - mean).square())


def _gathered(values: Tensor, source: Tensor) -> Tensor:
    """Pixels (B, …, H, W) from where `source` (B, H·W) says."""
    index = source.view(len(source), *(1,) * (values.dim() - 3), -1)
    flat = values.flatten(-2)
    return flat.gather(-1, index.expand(flat.shape)).view(values.shape)
