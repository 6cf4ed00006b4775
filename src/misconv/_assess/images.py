"""Incomplete images in every form in which callers hold them, in batches; and more of them hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from misconv._checks import (
    IMAGE_FORMS,
    as_batch,
    as_observed,
    check_dense,
    check_images,
    check_observed,
    check_seen_finite,
    describe,
    unpack_images,
    warn_if_inverted,
)
from misconv.missing import hide, like

__all__ = ["batches", "hide_more"]

# From so many images the regions are taken, before the first batch is assessed; and whether `observed` is inverted.
_LOOK_AHEAD = 256

Batch = tuple[Tensor, Tensor]  # x, 0 where not observed, and observed


def batches(images: Any, observed: Any, batch_size: int, limit: int | None) -> Iterator[Batch]:
    """Batches (x, observed) of images of one size, at most `limit` images in all; the arguments of `assess`."""
    rows = islice(_rows(images, observed, batch_size), limit)
    for _, group in groupby(rows, key=lambda row: [(t.shape, t.dtype, t.device) for t in row]):
        while chunk := list(islice(group, batch_size)):
            x, seen = zip(*chunk, strict=True)
            yield torch.cat(x), torch.cat(seen)


def hide_more(
    stream: Iterator[Batch], shape: Callable[..., Tensor] | None, fraction: float, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches with what stays observed as a third, without images of which nothing is hidden, or nothing would stay."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ahead, count = [], 0
    for batch in stream:
        ahead.append(batch)
        count += len(batch[0])
        if count >= _LOOK_AHEAD:
            break
    warn_if_inverted(*ahead, stacklevel=4)  # whoever called assess, through a decorator
    shape = _regions(ahead) if shape is None else shape
    for x, observed in chain(ahead, stream):
        less = hide(observed, shape, fraction=fraction, generator=generator)
        rows = (less.flatten(1).any(1) & (observed & ~less).flatten(1).any(1)).nonzero().squeeze(1)
        if len(rows):
            yield x[rows], observed[rows], less[rows]


def _regions(ahead: list[Batch]) -> Callable[..., Tensor]:
    """Regions like those that are missing in the first images."""
    sizes = {tuple(x.shape[2:]) for x, _ in ahead}
    if len(sizes) > 1:
        raise ValueError(
            f"images must have one size where shape is None, for regions are then drawn like those that are missing; "
            f"got {' and '.join(str(size) for size in sorted(sizes))}: pass shape=misconv.missing.square, for example"
        )
    planes = {observed.shape[1] for _, observed in ahead}
    found = [observed if len(planes) == 1 else observed.expand(x.shape) for x, observed in ahead]
    if not found:
        raise ValueError("images must hold at least one image, got none")
    return like(torch.cat(found))


def _rows(images: Any, observed: Any, batch_size: int) -> Iterator[Batch]:
    """One image at a time, (1, C, H, W) and its `observed`."""
    for item in _items(images, observed, batch_size):
        x, seen = _read(item)
        yield from zip(x.split(1), seen.split(1), strict=True)


def _items(images: Any, observed: Any, batch_size: int) -> Iterable[Any]:
    if isinstance(images, Tensor):
        check_dense("images", images)
    if isinstance(images, (Tensor, np.ndarray)):
        if images.ndim != 4 or 0 in images.shape:
            raise ValueError(f"images must have shape (N, C, H, W) with no empty dimension, got {describe(images)}")
        return _pieces(images, observed, batch_size)
    if observed is not None:
        raise TypeError(
            "observed must be None where images is not one tensor; let it give (x, observed) or "
            '{"image": x, "observed": observed}'
        )
    if isinstance(images, Dataset) and not isinstance(images, IterableDataset) and hasattr(images, "__len__"):
        return (images[number] for number in range(len(images)))
    if not isinstance(images, Iterable):
        raise TypeError(
            "images must be a tensor (N, C, H, W), or a Dataset, DataLoader or iterable of x with NaN, (x, observed) "
            f'or {{"image": x, "observed": observed}}, got {describe(images)}'
        )
    return images


def _pieces(images: Tensor | np.ndarray[Any, Any], observed: Any, size: int) -> Iterator[Any]:
    """Parts of a tensor and its `observed`, so that not all of it is converted at once."""
    if observed is not None and isinstance(images, Tensor):
        observed = check_observed("observed", as_observed(observed, images), images, check=True)
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        yield images[part], None if observed is None else observed[part]


def _read(item: Any) -> Batch:
    """One item of a data set or a loader as a batch; a single image becomes a batch of one."""
    x, observed = unpack_images(item)
    if not isinstance(x, (Tensor, np.ndarray)):
        raise TypeError(f"images must yield {IMAGE_FORMS}, as tensors or arrays, got {describe(x)}")
    x, observed = as_batch(x, observed, name="images")
    check_images("images", x)
    seen = ~x.isnan() if observed is None else check_observed("observed", observed, x, check=True)
    check_seen_finite("images", x, seen, check=True)
    return x.detach().where(seen, 0), seen
