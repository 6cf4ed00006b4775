"""The training of a classifier on a Dataset of labelled images, which are read batch by batch.

Images are read in an order of our own, so that an epoch can be entered in its middle, and each of several processes
reads its share alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from misconv._checks import check_size, describe
from misconv._torch import pytree
from misconv._train.batches import batches_of, generator, smallest_batch
from misconv._train.identity import fingerprint
from misconv._train.images import as_floats
from misconv._train.jobs import call_model
from misconv._train.moves import apply_moves, draw_moves
from misconv._train.running import Job, Rate
from misconv._train.session import EpochRecord
from misconv._train.streams import guarded, length_of

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["AUGMENTATIONS", "labelled_job"]

AUGMENTATIONS = (None, "shift", "shift+mirror")
_LOOKED_AT = 16  # images by which a data set is known again

Batch = tuple[Any, Tensor, int]  # what the network takes on the device, labels on the CPU, a number


def labelled_job(
    network: nn.Module,
    images: Dataset[Any],
    fabric: Fabric,
    *,
    validation: Dataset[Any] | None,
    batch_size: int,
    learning_rate: Rate,
    seed: int,
    workers: int,
    augment: str | None,
    label_smoothing: float = 0.0,
    **options: Any,
) -> Job:
    """The training of a classifier on pairs (x, label), for `train`; the options are those of a `Job`."""
    if augment not in AUGMENTATIONS:
        raise ValueError(f"augment must be one of {', '.join(map(repr, AUGMENTATIONS))}, got {describe(augment)}")
    reader = _Reader("inputs", images, fabric, seed, workers)
    held = None if validation is None else _Reader("validation_inputs", validation, fabric, seed, workers)
    batch_size = min(check_size("batch_size", batch_size), reader.size)
    least = smallest_batch(network, fabric.world_size, synchronize=False)

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        x, labels, together = batch
        output, labels = _logits(model, x, labels)
        total = F.cross_entropy(output, labels, reduction="sum", label_smoothing=label_smoothing)
        figures = [total.detach(), (output.argmax(1) == labels).sum(), total.new_tensor(len(labels))]
        return total * fabric.world_size / together, torch.stack([each.double() for each in figures])

    def summarise(sums: list[float]) -> EpochRecord:
        return {"loss": sums[0] / max(sums[2], 1), "accuracy": sums[1] / max(sums[2], 1)}

    def evaluate(model: nn.Module) -> tuple[float, EpochRecord]:
        if held is None:
            return -math.inf, {}
        sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)
        for x, given, counts in held.parts(2 * batch_size):
            output, labels = _logits(model, x, given)
            nll = F.cross_entropy(output, labels, reduction="sum")
            found = [nll, (output.argmax(1) == labels).sum(), nll.new_tensor(len(labels))]
            sums += counts * torch.stack([each.double() for each in found])
        total = fabric.all_reduce(sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        nll_sum, right, count = total.tolist()
        record = {"validation_nll": nll_sum / count, "validation_accuracy": right / count}
        # The accuracy on a few images is coarse, so the likelihood counts, too: a nat as much as a tenth of a point.
        return -record["validation_accuracy"] + 1e-3 * min(record["validation_nll"], 100.0), record

    settings = {"task": "classifier", "seed": seed, "images": reader.size, "augment": augment}
    settings |= {"label_smoothing": label_smoothing, "held": 0 if held is None else held.size}
    return Job(
        network, loss, 3, summarise, evaluate, reader.size, batch_size, learning_rate, seed=seed,
        stream=lambda epoch, skip: reader.epoch(epoch, skip, batch_size, least, augment),
        expected=math.ceil(reader.size / batch_size), settings=settings,
        data=lambda: fingerprint(*(t for each in (reader, held) if each is not None for t in each.some())), **options,
    )  # fmt: skip


class _Reader:
    """A Dataset of pairs (x, label), read in batches, of which each process gets its share."""

    def __init__(self, name: str, dataset: Dataset[Any], fabric: Fabric, seed: int, workers: int) -> None:
        self.name, self.dataset, self.fabric, self.seed, self.workers = name, dataset, fabric, seed, workers
        size = length_of(dataset)
        if not size:
            raise ValueError(f"{name} must be a Dataset with a length of at least 1, got {type(dataset).__name__}")
        self.size = size

    def epoch(self, epoch: int, skip: int, batch_size: int, least: int, augment: str | None) -> Iterator[Batch]:
        """The batches of an epoch in their order, but for the first ones."""
        shuffled = torch.randperm(self.size, generator=generator(self.seed, epoch), device="cpu")
        parts = list(batches_of(shuffled, batch_size, least))[skip:]
        mine = (part[self.fabric.global_rank :: self.fabric.world_size].tolist() for part in parts)
        for step, (part, (x, labels)) in enumerate(zip(parts, self._pairs(mine, epoch), strict=True), skip):
            moved = x if augment is None else self._move(x, epoch, step, mirror=augment == "shift+mirror")
            yield moved, labels, len(part)

    def parts(self, batch_size: int) -> Iterator[Batch]:
        """All of it in its own order, with 1, or with 0 where a process takes part with an image of another one.

        Processes call the model together, or not at all.
        """
        rank, world = self.fabric.global_rank, self.fabric.world_size
        parts = list(torch.arange(self.size, device="cpu").split(batch_size))
        mine = [part[rank::world] if rank < len(part) else part[:1] for part in parts]
        for part, (x, labels) in zip(parts, self._pairs((own.tolist() for own in mine), 0), strict=True):
            yield x, labels, int(rank < len(part))

    def some(self) -> list[Tensor]:
        """A few images and labels, by which the data are known again."""
        order = torch.randperm(self.size, generator=generator(self.seed, "split"), device="cpu")
        batches = self._pairs([order[:_LOOKED_AT].tolist()], 0)
        return [leaf for batch in batches for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]

    def _pairs(self, indices: Iterable[list[int]], epoch: int) -> Iterator[tuple[Any, Tensor]]:
        own = generator(self.seed, epoch)  # workers are seeded by it, and torch's stays where it is
        loader = DataLoader(self.dataset, batch_sampler=indices, num_workers=self.workers, generator=own)
        for item in guarded(loader):
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise TypeError(f"{self.name} must yield pairs (x, label), got {describe(item)}")
            x, labels = item
            if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
                raise TypeError(f"{self.name} must yield labels that are integers, got {describe(labels)}")
            there = pytree.tree_map(lambda t: as_floats(t.to(self.fabric.device)) if isinstance(t, Tensor) else t, x)
            yield (tuple(there) if isinstance(there, list) else there), labels.long()

    def _move(self, x: Any, epoch: int, step: int, *, mirror: bool) -> Any:
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise TypeError(f"{self.name} must yield images (C, H, W) where augment is given, got {describe(x)}")
        rank, (height, width) = self.fabric.global_rank, x.shape[-2:]
        moves = draw_moves(len(x), height, width, ((self.seed * 100_003 + epoch) * 100_003 + step) * 1009 + rank)
        moves[:, 0] *= mirror
        # What comes in from outside of the image is missing.
        seen, values = apply_moves(moves.to(x.device), ~x.isnan(), x)
        return values.masked_fill(~seen, torch.nan)


def _logits(model: nn.Module, x: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the labels beside them; before that labels are on the CPU, where they can be looked at."""
    output = call_model("network", model, x)
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != len(labels):
        raise ValueError(f"network must return logits (B, classes), with B = {len(labels)}, got {describe(output)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= output.shape[1]:
        raise ValueError(
            f"labels must be classes from 0 to {output.shape[1] - 1}, which the network tells apart, got "
            f"{low if low < 0 else high}"
        )
    return output, labels.to(output.device)
