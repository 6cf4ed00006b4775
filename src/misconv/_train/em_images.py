"""Incomplete images to fit a mixture to by EM: two tensors, or batches that are read anew in every iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from misconv._checks import describe
from misconv._train.identity import identify_data
from misconv._train.images import as_floats, check_incomplete
from misconv._train.streams import guarded, is_stream, length_of, read_batch

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["EMImages", "images_for_em"]


@dataclass
class EMImages:
    """What EM is given.

    Args:
        x: the images of this process, or what yields them in batches (x, observed). observed: None for batches.
        example: some images like them, on the device where EM runs.
        shape: of all images, as far as it is known. identity: a fingerprint of the images, or of the first ones.
    """

    x: Any
    observed: Tensor | None
    example: Tensor
    shape: list[int]
    identity: str


def images_for_em(images: Any, observed: Tensor | None, fabric: Fabric, batch_size: int, workers: int) -> EMImages:
    """The images of this process: in one piece each, so that all pieces together are the images in their order."""
    rank, world = fabric.global_rank, fabric.world_size
    if is_stream(images):
        batches = _Batches(images, fabric, batch_size, workers)
        first = next(iter(batches), None)
        if first is None:
            raise ValueError("images must yield at least one batch, got none")
        return EMImages(batches, None, first[0], list(first[0].shape[1:]), identify_data(first))
    images, observed = check_incomplete(images, observed)
    if len(images) < world:
        raise ValueError(f"images must be at least one for each of the {world} processes, got {describe(images)}")
    identity = identify_data((images, observed))
    x, seen = (t.tensor_split(world)[rank].to(fabric.device) for t in (as_floats(images), observed))
    return EMImages(x, seen, x, list(images.shape), identity)


class _Batches:
    """Batches (x, observed) of a Dataset or a loader; of several processes each has a share of every one."""

    def __init__(self, images: Any, fabric: Fabric, batch_size: int, workers: int) -> None:
        self.fabric, self.loader = fabric, images
        if isinstance(images, Dataset):
            count, least = length_of(images), fabric.world_size
            if count is not None and count < least:
                raise ValueError(f"images must be at least one for each of the {least} processes, got {count}")
            self.loader = DataLoader(images, batch_size=batch_size, num_workers=workers)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        share = slice(self.fabric.global_rank, None, self.fabric.world_size)
        for batch in guarded(self.loader):
            x, seen = (t[share].to(self.fabric.device) for t in read_batch(batch))
            if len(x):
                yield x, seen
