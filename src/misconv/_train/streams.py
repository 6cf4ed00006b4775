"""Incomplete images to learn a density from that come batch by batch, and are never all in memory.

A `Dataset` is read in an order of our own, so that its images can be told apart by their numbers: some are set aside
for validation, an epoch can be entered in its middle, and each of several processes reads its share alone. A
`DataLoader` is taken as it is. Its first images are set aside, and left out wherever they come again, in whatever order
it yields them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from misconv._checks import IMAGE_FORMS, describe, unpack_images
from misconv._train.batches import batches_of, generator
from misconv._train.identity import fingerprint
from misconv._train.images import Holes, as_floats, check_incomplete
from misconv._train.moves import apply_moves
from misconv._train.session import cpu_by_default

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = [
    "DatasetImages",
    "LoaderImages",
    "StreamedImages",
    "guarded",
    "is_stream",
    "length_of",
    "read_batch",
    "stream_of",
]

MOST_HELD, HELD_BYTES = 2000, 2**25  # images that are set aside for validation, and stay in memory
MOST_SAMPLED, SAMPLED_BYTES = 4096, 3 * 2**24  # images that are measured before the training

Triple = tuple[Tensor, Tensor, Tensor]


def _most(images: Tensor, number: int, size: int) -> int:
    """How many images like these, at most a number and at most so many bytes; at least two."""
    return min(number, max(size // (images[0].numel() * images.element_size()), 2))


def is_stream(images: object) -> bool:
    """Whether these are images that come batch by batch."""
    if isinstance(images, DataLoader | Dataset):
        return True
    array = isinstance(images, Tensor | str | bytes | dict | Iterator) or hasattr(images, "__array__")
    return isinstance(images, Iterable) and not array


class _Kept:
    """The few images of a stream that are in memory.

    Args:
        held: those that were set aside for validation, and what is seen of them.
        sampled: those that are measured before the training.
    """

    resident = False

    def __init__(self, held: tuple[Tensor, Tensor], sampled: tuple[Tensor, Tensor]) -> None:
        self.held, self.held_size = held, len(held[0])
        self.sampled: tuple[Tensor, Tensor] | None = sampled
        self.fingerprint = fingerprint(*held, *sampled)

    def identify(self) -> str:
        """A fingerprint of the images that were looked at."""
        return self.fingerprint

    def sample(self) -> tuple[Tensor, Tensor]:
        """The images to measure mean, deviation and range of; after that they are forgotten."""
        found, self.sampled = self.some(), None
        return found

    def some(self) -> tuple[Tensor, Tensor]:
        """Images to look at, and what is seen of them."""
        assert self.sampled is not None
        return self.sampled

    def regions(self) -> Tensor:
        """`observed` of many images, to see what regions are missing."""
        return self.some()[1]

    def begin(self, epoch: int, holes: Holes) -> None:
        """Nothing to do: regions are drawn batch by batch."""

    def take(self, batch: Triple) -> Triple:
        """A batch of `stream` as it is."""
        return batch

    def take_held(self, part: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Some of the images that were set aside."""
        return self.held[0][part], self.held[1][part]

    def held_observed(self) -> Tensor:
        """What is seen of all of these."""
        return self.held[1]


class DatasetImages(_Kept):
    """A map-style Dataset; the attributes are those of `TensorImages`."""

    def __init__(
        self,
        dataset: Dataset[Any],
        fabric: Fabric,
        *,
        validation: float,
        batch_size: int,
        seed: int,
        workers: int,
        least: int,
    ) -> None:
        self.dataset, self.fabric, self.seed, self.workers, self.least = dataset, fabric, seed, workers, least
        count = length_of(dataset)
        if not count:
            raise ValueError(f"images must be a Dataset with a length of at least 1, got {type(dataset).__name__}")
        order = torch.randperm(count, generator=generator(seed, "split"), device="cpu")
        first, _ = self._load(order[:1])
        self.image = tuple(first.shape[1:])
        held_size = min(round(validation * count), _most(first, MOST_HELD, HELD_BYTES))
        self.size = count - held_size
        if self.size == 0:
            raise ValueError(f"images must hold more than the share set aside for validation, got {count} of them")
        self.batch_size = min(batch_size, self.size)
        self.steps: int | None = -(-self.size // self.batch_size)
        held, self.rows = order.split([held_size, self.size])
        nothing = first[:0], first[:0] > 0
        sampled = self.rows[: _most(first, MOST_SAMPLED, SAMPLED_BYTES)]
        super().__init__(self._load(held) if held_size else nothing, self._load(sampled))

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of them in words."""
        return {"images": [self.size + self.held_size, *self.image]}

    def stream(self, epoch: int, skip: int, holes: Holes) -> Iterator[Triple]:
        """The batches of an epoch but for the first ones; this process's share of each."""
        rank, world = self.fabric.global_rank, self.fabric.world_size
        shuffled = self.rows[torch.randperm(self.size, generator=generator(self.seed, epoch), device="cpu")]
        parts = list(batches_of(shuffled, self.batch_size, self.least))[skip:]
        mine = (part[rank::world].tolist() for part in parts)
        read = self._read(mine, generator(self.seed, epoch))
        for step, (part, (x, seen)) in enumerate(zip(parts, read, strict=True), skip):
            size = (len(part), *self.image[1:])
            yield _hidden(x, seen, holes, size, epoch, step, slice(rank, None, world))

    def _read(self, indices: Iterable[list[int]], own: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        # A generator of its own: workers are seeded by it, and torch's stays where it is.
        loader = DataLoader(self.dataset, batch_sampler=indices, num_workers=self.workers, generator=own)
        for batch in guarded(loader):
            x, seen = read_batch(batch)
            _check_image(x, getattr(self, "image", None))
            yield x, seen

    def _load(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Images by their numbers, in memory."""
        parts = (part.tolist() for part in rows.split(64))
        return _together(list(self._read(parts, generator(self.seed, "split"))))


class LoaderImages(_Kept):
    """A DataLoader, or another iterable of batches; the attributes are those of `TensorImages`.

    How many images there are is not known (`size` is 0): they may be dropped or drawn with replacement.
    """

    size = 0

    def __init__(self, loader: Iterable[Any], fabric: Fabric, *, validation: float, batch_size: int, seed: int) -> None:
        self.loader, self.fabric, self.seed = loader, fabric, seed
        self.steps = length_of(loader)
        x, seen = self._first_images()
        self.image = tuple(x.shape[1:])
        total = len(x) if self.steps is None else max(self.steps * self.most_in_batch, len(x))
        held_size = min(round(validation * total), _most(x, MOST_HELD, HELD_BYTES), len(x) // 2)
        self.batch_size = min(batch_size, len(x))
        self.weights = torch.randint(2**62, (2, x[0].numel()), generator=generator(0, "split"), device="cpu") * 2 + 1
        super().__init__((x[:held_size], seen[:held_size]), (x[held_size:], seen[held_size:]))
        self.known = self._digests(*self.held)

    @property
    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of them in words."""
        return {"images": list(self.image), "batches": self.steps}

    def stream(self, epoch: int, skip: int, holes: Holes) -> Iterator[Triple]:
        """The batches of an epoch but for the first ones, without the images that were set aside.

        Every process reads all of a batch, and takes its share.
        """
        rank, world = self.fabric.global_rank, self.fabric.world_size
        with self._seeded(epoch):
            others = self._others()
            # A loader draws its order when its first batch is asked for. Batches that are skipped are not kept.
            begun = deque(islice(others, max(skip, 1)), maxlen=1)
        for step, (x, seen) in enumerate(chain(begun if skip == 0 else (), others), skip):
            share = slice(rank, None, world)
            if rank < len(x):
                size = (len(x), *self.image[1:])
                yield _hidden(x[share], seen[share], holes, size, epoch, step, share)
            else:  # it takes part all the same, with an image of which nothing is hidden
                yield x[:1], seen[:1], seen[:1]

    def _seeded(self, epoch: int) -> Any:
        """While this is entered, what torch draws depends on the epoch alone."""
        return _Seeded(generator(self.seed, epoch).initial_seed())

    def _others(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images that were not set aside."""
        for x, seen in self._read():
            rest = ~torch.isin(self._digests(x, seen), self.known)
            if rest.all():
                yield x, seen
            elif rest.any():
                yield x[rest], seen[rest]

    def _read(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in guarded(self.loader):
            x, seen = read_batch(batch)
            _check_image(x, getattr(self, "image", None))
            yield x, seen

    def _first_images(self) -> tuple[Tensor, Tensor]:
        found: list[tuple[Tensor, Tensor]] = []
        count, most = 0, 1
        with self._seeded(0):
            for x, seen in self._read():
                self.image = tuple(x.shape[1:])
                most = _most(x, MOST_SAMPLED, SAMPLED_BYTES)
                found.append((x, seen))
                count += len(x)
                if count >= most:
                    break
        if not found:
            raise ValueError("images must yield at least one batch, got none")
        self.most_in_batch = max(len(x) for x, _ in found)
        x, seen = _together(found)
        return x[:most], seen[:most]

    def _digests(self, x: Tensor, seen: Tensor) -> Tensor:
        """A number for every image, (B,), by which it is known again."""
        weights = self.weights.to(x.device)
        bits = x.double().flatten(1).view(torch.int64) * weights[0]  # products wrap around
        marks = seen.expand(x.shape).flatten(1) * weights[1]
        return (bits + marks).sum(1)


StreamedImages = DatasetImages | LoaderImages


class _Seeded:
    """While this is entered, torch's own generator starts from a seed; after that it is where it was."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.before = torch.get_rng_state()
        torch.default_generator.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        torch.set_rng_state(self.before)


def _hidden(
    x: Tensor, seen: Tensor, holes: Holes, size: tuple[int, ...], epoch: int, step: int, share: slice
) -> Triple:
    """A process's share of a batch, with what is shown of it; `size` is (batch, height, width) of the whole batch."""
    moves = holes.moves(size, epoch, step)
    if moves is not None:
        x, seen = apply_moves(moves[share].to(x.device), x, seen)
    return x, seen, seen & holes.of_batch(size, epoch, step)[share].to(seen.device)


def stream_of(
    images: Any, fabric: Fabric, *, validation: float, batch_size: int, seed: int, workers: int, least: int
) -> StreamedImages:
    """The images of a Dataset or a loader."""
    options: dict[str, Any] = {"validation": validation, "batch_size": batch_size, "seed": seed}
    if isinstance(images, IterableDataset):
        images = DataLoader(images, batch_size=batch_size, num_workers=workers)
    if isinstance(images, Dataset):
        return DatasetImages(images, fabric, workers=workers, least=least, **options)
    return LoaderImages(images, fabric, **options)


def read_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Images, 0 where they were not seen, and what was seen of them, from what a loader yields.

    Example:
        >>> x, observed = read_batch([torch.tensor([[[[0.5, torch.nan]]]]), torch.tensor([7])])  # images and labels
        >>> x.tolist(), observed.tolist()
        ([[[[0.5, 0.0]]]], [[[[True, False]]]])
    """
    x, observed = unpack_images(batch)
    if not isinstance(x, Tensor):
        raise TypeError(f"images must yield {IMAGE_FORMS}, as tensors, got {describe(x)}")
    x, observed = check_incomplete(x, observed)
    return as_floats(x).where(observed, 0), observed


def _check_image(x: Tensor, image: tuple[int, ...] | None) -> None:
    if image is not None and tuple(x.shape[1:]) != image:
        raise ValueError(f"images must yield images of one shape, {image} as at first, got {describe(x)}")


def guarded(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches; where they cannot be read, a message that says so."""
    try:
        yield from _on_cpu(batches)
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [""])[-1][:200]
        if "exited unexpectedly" in str(error) or "killed by signal" in str(error):
            raise RuntimeError(
                f"images must be readable by its workers, but a worker process of the DataLoader has died: {reason}"
            ) from error
        if "equal size" in str(error):
            raise ValueError(f"images must yield images of one shape, but a batch has several: {reason}") from error
        raise
    except TypeError as error:
        if "default_collate" not in str(error):
            raise
        reason = str(error).strip().splitlines()[-1][:200]
        raise TypeError(f"images must yield {IMAGE_FORMS}, as tensors or arrays: {reason}") from error


def _on_cpu(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches that are read with the CPU as default device: where it is another, a DataLoader cannot draw its seed."""
    end = object()
    with cpu_by_default():
        iterator = iter(batches)
    while True:
        with cpu_by_default():
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch


def _together(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len({seen.shape[1] for _, seen in parts}) > 1:  # some batches say it for every channel
        parts = [(x, seen.expand(x.shape)) for x, seen in parts]
    return torch.cat([x for x, _ in parts]), torch.cat([seen for _, seen in parts])


def length_of(sized: Any) -> int | None:
    """How many items it says that it has; None where it does not, as a stream whose end is not known."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # by these Python and torch say that there is no length
        return None
