"""Incomplete images to learn a density from, all of them in memory; and the regions that are hidden of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from misconv._checks import (
    INTEGERS,
    as_observed,
    check_images,
    check_observed,
    check_seen_finite,
    describe,
    read_images,
    warn_if_inverted,
)
from misconv._train.batches import generator
from misconv._train.identity import fingerprint, identify, identify_data
from misconv._train.moves import apply_moves, draw_moves
from misconv.missing import hide

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Holes", "TensorImages", "as_floats", "check_incomplete", "compact", "fits", "warn_if_inverted"]

_HOLES = 200_000  # the holes of an epoch are drawn apart from its order
_MOST_LOOKED_AT = 4096  # images


@dataclass
class Holes:
    """The regions that are hidden of what is seen; `shape` and `fraction` are those of `misconv.missing.hide`.

    With `augment` images are also mirrored and moved.
    """

    shape: Callable[..., Tensor]
    fraction: float
    seed: int
    augment: bool = False

    def of_epoch(self, observed: Tensor, epoch: int) -> Tensor:
        """What is shown of all images in an epoch."""
        return self._hide(observed, generator(self.seed, _HOLES + epoch, observed.device))

    def of_validation(self, observed: Tensor) -> Tensor:
        """What is shown of the images that were set aside, always."""
        return self._hide(observed, generator(self.seed, "validation", observed.device)) if len(observed) else observed

    def moves(self, size: tuple[int, ...], epoch: int, step: int = 0) -> Tensor | None:
        """How to move the images of an epoch, or of a batch of it, (batch, height, width)."""
        batch, height, width = size
        return draw_moves(batch, height, width, self._seed(epoch, step) + 1) if self.augment else None

    def _seed(self, epoch: int, step: int) -> int:
        return (self.seed * 1_000_003 + epoch) * 1_000_033 + step

    def of_batch(self, size: tuple[int, ...], epoch: int, step: int) -> Tensor:
        """Regions for one batch of a stream, (batch, height, width): bool (batch, 1 or C, height, width)."""
        own = torch.Generator("cpu").manual_seed(self._seed(epoch, step) % 2**63)
        batch, *image = size
        return self._hide(torch.ones(batch, 1, *image, dtype=torch.bool, device="cpu"), own)

    def _hide(self, observed: Tensor, own: torch.Generator) -> Tensor:
        return hide(observed, self.shape, fraction=self.fraction, generator=own)

    def identify(self, image: tuple[int, ...]) -> list[Any]:
        """Their function by its name, and by a few regions that it draws."""
        arguments = "(batch, height, width, *, fraction, generator, device)"
        like = f"{arguments} -> bool (B, 1 or C, H, W), as misconv.missing.square"
        if not callable(self.shape):
            raise TypeError(f"shape must be a function {like}, got {describe(self.shape)}")
        channels, *size = image
        own = generator(0, "split")
        try:
            drawn = self.shape(2, *size, fraction=self.fraction, generator=own, device=torch.device("cpu"))
        except TypeError as error:
            raise TypeError(f"shape must be a function {like}, got {describe(self.shape)}: {error}") from error
        shapes = [(2, planes, *size) for planes in (1, channels)]
        if not isinstance(drawn, Tensor) or drawn.dtype != torch.bool or tuple(drawn.shape) not in shapes:
            raise ValueError(f"shape must be a function {like}, got one that returns {describe(drawn)}")
        return [identify(self.shape), fingerprint(drawn)]


class TensorImages:
    """Images and what is observed of them as two tensors.

    Args:
        validation: the share of images that is set aside.
        divisor: what bytes are divided by, which stay bytes in memory.

    Attributes:
        size: how many images there are to learn from. held_size: how many are set aside.
        image: the shape of one, (C, H, W). steps: of an epoch.
    """

    def __init__(
        self,
        images: Tensor,
        observed: Tensor,
        fabric: Fabric,
        *,
        validation: float,
        batch_size: int,
        seed: int,
        divisor: float = 1.0,
    ) -> None:
        self.fabric, self.divisor = fabric, divisor
        self.held_size = round(validation * len(images))
        self.size = len(images) - self.held_size
        if self.size == 0:
            raise ValueError(f"images must hold more than the share set aside for validation, got {describe(images)}")
        order = torch.randperm(len(images), generator=generator(seed, "split"), device="cpu").to(images.device)
        self.held, self.rows = order.split([self.held_size, self.size])
        self.given = images, observed, self.rows
        self.image = tuple(images.shape[1:])
        self.batch_size = min(batch_size, self.size)
        self.steps: int | None = -(-self.size // self.batch_size)
        self.resident = fits(fabric, images, observed)
        if self.resident:
            self.held, self.rows = self.held.to(fabric.device), self.rows.to(fabric.device)
            images, observed = images.to(fabric.device), observed.to(fabric.device)
        self.images, self.observed = images, observed
        self.known = observed  # what is shown of each image in this epoch
        self.moves: Tensor | None = None  # and how it is moved

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of them in words."""
        bytes_ = {"divisor": self.divisor} if self.given[0].dtype == torch.uint8 else {}
        return {"images": list(self.given[0].shape), **bytes_}

    def identify(self) -> str:
        """A fingerprint of them."""
        return identify_data(self.given[:2])

    def sample(self) -> tuple[Tensor, Tensor]:
        """The images to measure mean, deviation and range of."""
        images, observed, rows = self.given
        return as_floats(images[rows], self.divisor), observed[rows]

    def some(self) -> tuple[Tensor, Tensor]:
        """Images to look at, and what is seen of them."""
        images, observed, _ = self.given
        return as_floats(images[:_MOST_LOOKED_AT], self.divisor), observed[:_MOST_LOOKED_AT]

    def regions(self) -> Tensor:
        """`observed` of many images, to see what regions are missing."""
        return self.observed

    def begin(self, epoch: int, holes: Holes) -> None:
        """Hide a region of every image."""
        known = holes.of_epoch(self.observed, epoch)
        if self.known is self.observed:
            self.known = known
        else:  # in place, where a captured step reads it
            self.known.copy_(known)
        moves = holes.moves((len(self.observed), *self.image[1:]), epoch)
        if self.moves is None or moves is None:
            self.moves = None if moves is None else moves.to(self.observed.device)
        else:
            self.moves.copy_(moves)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images of a batch, what is seen of them and what is shown; of several processes each takes its share."""
        mine = self.rows[indices[self.fabric.global_rank :: self.fabric.world_size]]
        x, seen, known = as_floats(self.images[mine], self.divisor), self.observed[mine], self.known[mine]
        if self.moves is None:
            return x, seen, known
        x, seen, known = apply_moves(self.moves[mine], x, seen, known)
        return x, seen, known

    def take_held(self, part: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Some of the images that were set aside."""
        rows = self.held[part]
        return as_floats(self.images[rows], self.divisor), self.observed[rows]

    def held_observed(self) -> Tensor:
        """What is seen of all of these."""
        return self.observed[self.held]


def fits(fabric: Fabric, *tensors: Tensor | None) -> bool:
    """Whether a GPU has room for the data, twice over."""
    if fabric.device.type != "cuda":
        return False
    needed = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor) and not t.is_cuda)
    return 2 * needed < torch.cuda.mem_get_info(fabric.device)[0]


def as_floats(images: Tensor, divisor: float = 1.0) -> Tensor:
    """Integers as floating-point numbers of the same value, or of that value divided by a number; others as they are.

    Example:
        >>> bytes_ = torch.tensor([0, 51, 255], dtype=torch.uint8)
        >>> as_floats(bytes_), as_floats(bytes_, 255)
        (tensor([  0.,  51., 255.]), tensor([0.0000, 0.2000, 1.0000]))
    """
    if images.dtype not in INTEGERS:
        return images
    floats = images.to(torch.get_default_dtype())
    # By a tensor on the device: with a number a GPU multiplies by 1/255, which has another last bit.
    return floats if divisor == 1 else floats / torch.full((), float(divisor), device=images.device)


def compact(images: Tensor) -> Tensor:
    """Integers in the form in which they are kept: bytes, which need little memory, or floating-point numbers."""
    return images if images.dtype == torch.uint8 else as_floats(images)


def check_incomplete(images: Any, observed: Any) -> tuple[Tensor, Tensor]:
    """Images, `compact`, and what is observed of them as bool; where nobody says it, all that is not NaN."""
    images, seen = read_images(images, "images")
    images = compact(images)
    if images.dtype != torch.uint8:
        check_images("images", images)
    elif images.dim() != 4 or 0 in images.shape:
        raise ValueError(f"images must have shape (N, C, H, W) with no empty dimension, got {describe(images)}")
    if observed is None:
        observed = ~images.isnan() if images.is_floating_point() else torch.ones_like(images[:, :1], dtype=torch.bool)
    observed = check_observed("observed", as_observed(observed, images), images, check=True)
    observed = observed if seen is None else observed & seen
    if images.is_floating_point():
        check_seen_finite("images", images, observed, check=True)
    return images.detach(), observed
