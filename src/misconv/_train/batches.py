"""Which images make a batch, and random numbers that depend on a seed and a purpose alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["batches_of", "generator", "smallest_batch"]


def generator(seed: int, purpose: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Randomness of one epoch, or of one purpose, that depends on nothing that happened before."""
    number = {"split": 1, "validation": 2}[purpose] if isinstance(purpose, str) else 1000 + purpose
    return torch.Generator(device).manual_seed((seed * 1_000_003 + number) % 2**63)


def smallest_batch(module: nn.Module, processes: int, synchronize: bool) -> int:
    """The size of the smallest batch: two images, at least one for a process, and two where it normalizes its share."""
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    return 2 * processes if norms and not synchronize else max(2, processes)


def batches_of(indices: Tensor, batch_size: int, least: int) -> Iterator[Tensor]:
    """Batches; a last one of fewer images than the smallest may have joins the one before it."""
    parts = list(indices.split(batch_size))
    if len(parts) > 1 and len(parts[-1]) < least:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts
