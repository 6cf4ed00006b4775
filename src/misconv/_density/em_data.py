"""The images that EM is fitted to: read in batches, checked, measured, and put into units of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from misconv._checks import as_batch, check_images, check_observed, check_seen_finite, describe

__all__ = [
    "Batches",
    "Units",
    "add_over_processes",
    "check_representable",
    "extremes",
    "extremes_over_processes",
    "flatten",
    "measure",
    "pairs",
    "some",
    "unit_of",
]

Batches = Iterable[tuple[Tensor, Tensor]]
_CHUNK = 4096


@dataclass
class Units:
    """What EM's numbers are counted from and in: the mean of every pixel, and the deviation of its channel.

    So data in metres, in reflectances of 1e-4, or both in one image, are the same to it.
    """

    center: Tensor  # (n), float64
    scale: Tensor  # (n), float64
    variance: Tensor  # (n), float64, of every pixel, in these units
    low: Tensor  # (C), float64, the lowest value that was seen of a channel
    high: Tensor  # (C), float64, the highest
    seen: float  # pixels seen of an image, on average
    images: float  # how many

    def to(self, device: torch.device) -> Units:
        """The same on another device."""
        values: dict[str, Any] = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in vars(self).items()}
        return Units(**values)

    def apply(self, x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Images and observed as float64 (N, n): images in these units, zero where not observed."""
        flat, mask = flatten(x, observed)
        return (flat - self.center) / self.scale * mask, mask


def unit_of(deviation: Tensor, center: Tensor) -> Tensor:
    """The unit of every channel: its deviation, or, where it is constant, a thousandth of its value.

    A channel that is zero throughout takes the largest unit of the others, and 1 where there is none.
    """
    size = center.abs()
    unit = torch.where(deviation > 1e-12 * size, deviation, 2.0**-10 * size)  # what is below is rounding
    largest = unit.max()
    return torch.where(unit > 0, unit, torch.where(largest > 0, largest, 1))


def check_representable(scale: Tensor, noise_floor: float, dtype: torch.dtype) -> None:
    """Refuse units whose squares, which variances are counted in, the type of the parameters cannot hold."""
    kind = torch.finfo(torch.promote_types(dtype, torch.float32))
    low, high = float(scale.min()), float(scale.max())
    # Denormal numbers serve as long as they have a few digits.
    if not noise_floor * low**2 > 256 * kind.smallest_normal * kind.eps or not high**2 < kind.max:
        raise ValueError(
            f"x must have deviations whose squares {kind.dtype} can hold, got deviations from {low:.1e} to {high:.1e}; "
            "rescale the images, or use float64 for images and density"
        )


def pairs(
    x: Tensor | Batches,
    observed: Tensor | None,
    size: int | None = None,
    seed: int | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (x, observed), checked; of tensors in chunks, in random order where a seed is given."""
    if not isinstance(x, Tensor):
        _check_batches(x, observed)
        for batch in x:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise TypeError(f"x must yield pairs (x, observed), got {_kind(batch)}")
            some, seen = as_batch(*batch)
            check_images("x", some)
            yield some.to(device), _checked(some, seen).to(device)
        return
    x, observed = as_batch(x, observed)
    check_images("x", x)
    if observed is None:
        raise TypeError("observed must be a bool tensor beside images, got None")
    observed = _checked(x, observed)
    order = torch.arange(len(x), device=x.device)
    if seed is not None:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu").to(x.device)
    for part in order.split(min(size or _CHUNK, len(x))):
        yield x[part].to(device), observed[part].to(device)


def _check_batches(x: object, observed: object) -> None:
    if not isinstance(x, Iterable) or isinstance(x, (str, bytes, dict)) or hasattr(x, "__array__"):
        raise TypeError(f"x must be images (N, C, H, W), or yield batches (x, observed), got {_kind(x)}")
    if isinstance(x, Iterator):
        raise TypeError(f"x must yield its batches anew each time it is iterated, as a DataLoader does, got {_kind(x)}")
    if observed is not None:
        raise TypeError("observed must be None where x yields batches (x, observed)")


def _kind(value: object) -> str:
    return describe(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _checked(x: Tensor, observed: Any) -> Tensor:
    seen = check_observed("observed", observed, x)
    check_seen_finite("x", x, seen, check=True)  # on every device: EM waits for sums anyway
    return seen


def flatten(x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Images and observed as float64 (N, n), zero where not observed."""
    seen = observed.expand(x.shape)
    return x.where(seen, 0).double().flatten(1), seen.double().flatten(1)


def measure(
    x: Tensor | Batches, observed: Tensor | None, device: torch.device | None
) -> tuple[Units, int, int, Tensor]:
    """The units; how many images here, and in all processes; and an image like them."""
    sums, images, like = torch.zeros(()), 0, None
    low, high = torch.zeros(()), torch.zeros(())
    for chunk, seen in pairs(x, observed, device=device):
        if like is None:
            like = chunk[:1]
            sums = torch.zeros(2, like.numel(), dtype=torch.float64, device=like.device)
            low = sums.new_full((like.shape[1],), math.inf)
            high = -low
        if chunk.shape[1:] != like.shape[1:]:
            raise ValueError(f"x must hold images of one shape, {tuple(like.shape[1:])}, got {describe(chunk)}")
        flat, mask = flatten(chunk, seen)
        blank = (mask.sum(1) == 0).nonzero()
        if len(blank):
            number = images + int(blank[0])
            raise ValueError(f"observed must show at least one pixel of every image, got none of image {number}")
        sums += torch.stack([mask.sum(0), flat.sum(0)])
        lowest, highest = extremes(chunk, seen.expand(chunk.shape))
        low, high = torch.minimum(low, lowest), torch.maximum(high, highest)
        images += len(chunk)
    if like is None:
        raise ValueError("x must hold at least one image, got none")
    total = sums.new_tensor(float(images))
    add_over_processes(sums, total)
    _check_all_seen(sums[0], tuple(like.shape[1:]))
    center = sums[1] / sums[0]
    # A second pass: the difference of a mean square and a squared mean loses the digits of small deviations.
    squares = torch.zeros_like(center)
    for chunk, seen in pairs(x, observed, device=device):
        flat, mask = flatten(chunk, seen)
        squares += ((flat - center) * mask).square().sum(0)
    add_over_processes(squares)
    channels = like.shape[1]
    deviation = (squares / sums[0]).view(channels, -1).mean(1).sqrt()
    unit = unit_of(deviation, center.view(channels, -1).abs().amax(1))
    scale = unit.repeat_interleave(len(center) // channels)
    # With two images' worth of its channel's variance, for pixels that few images have seen.
    variance = (squares / scale.square() + 2) / (sums[0] + 2)
    low, high = extremes_over_processes(low, high)
    seen_pixels = float(sums[0].sum() / total)
    return Units(center, scale, variance, low, high, seen_pixels, float(total)), images, int(total), like


def _check_all_seen(count: Tensor, shape: tuple[int, ...]) -> None:
    never = (count == 0).nonzero()
    if len(never):
        place = tuple(int(i) for i in torch.unravel_index(never[0, 0], shape))
        raise ValueError(
            f"observed must show every pixel in at least one image, got {len(never)} that are never seen, the "
            f"first at (channel, row, column) {place}; crop them away, or use a density network"
        )


def some(
    batches: Iterator[tuple[Tensor, Tensor]], images: int, like: Tensor, limit: int, seed: int
) -> tuple[Tensor, Tensor]:
    """At most `limit` images drawn from all, and from all processes; every process gets the same ones."""
    counts = [images]
    rank = 0
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        sizes = torch.zeros(world, dtype=torch.float64, device=like.device)
        sizes[rank] = images
        add_over_processes(sizes)
        counts = [int(size) for size in sizes]
    total, before = sum(counts), sum(counts[:rank])
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(total, generator=generator, device="cpu")[:limit].sort().values
    rows = torch.zeros(2, len(chosen), like.numel(), dtype=torch.float64, device=like.device)
    position = before
    for flat, mask in batches:
        mine = ((chosen >= position) & (chosen < position + len(flat))).nonzero().flatten()
        take = (chosen[mine] - position).to(like.device)
        rows[0, mine.to(like.device)], rows[1, mine.to(like.device)] = flat[take], mask[take]
        position += len(flat)
    add_over_processes(rows)
    return rows[0], rows[1]


def add_over_processes(*tensors: Tensor) -> None:
    """Sum tensors in place over the processes of `torch.distributed`, where there are several."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in tensors:
            dense = tensor.contiguous()  # views of a larger product are not summed correctly in place
            dist.all_reduce(dense)
            tensor.copy_(dense)


def extremes(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value (C,) that was seen of every channel, in float64; infinite where none was."""
    low = x.masked_fill(~seen, math.inf).amin((0, 2, 3)).double()
    return low, x.masked_fill(~seen, -math.inf).amax((0, 2, 3)).double()


def extremes_over_processes(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest over the processes of `torch.distributed`, where there are several."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        both = torch.stack([-low, high])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        low, high = -both[0], both[1]
    return low, high
