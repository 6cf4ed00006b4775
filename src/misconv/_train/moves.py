"""Data augmentation of incomplete images: mirrored, and shifted so that another part of each is seen."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_moves", "draw_moves"]

_FARTHEST = 1 / 8  # of the height and the width


def draw_moves(count: int, height: int, width: int, seed: int) -> Tensor:
    """For each image whether it is mirrored, and by how many pixels it is moved down and to the right: int64 (N, 3)."""
    own = torch.Generator("cpu").manual_seed(seed % 2**63)
    far = [round(_FARTHEST * side) for side in (height, width)]
    flips = torch.randint(2, (count,), generator=own, device="cpu")
    moved = [torch.randint(-most, most + 1, (count,), generator=own, device="cpu") for most in far]
    return torch.stack([flips, *moved], 1)


def apply_moves(moves: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Images or regions, (B, C, H, W) each, mirrored and moved; 0 or False where they have left.

    Example:
        >>> apply_moves(torch.tensor([[1, 0, 1]]), torch.tensor([[[[1.0, 2.0, 3.0]]]]))[0].tolist()
        [[[[0.0, 3.0, 2.0]]]]
    """
    height, width = tensors[0].shape[-2:]
    flip, down, across = moves.unsqueeze(2).unbind(1)  # (B, 1) each
    rows = torch.arange(height, device=moves.device) - down  # (B, H), where each row comes from
    columns = torch.arange(width, device=moves.device) - across  # (B, W)
    here = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)  # (B, H, W)
    columns = torch.where(flip > 0, width - 1 - columns, columns)
    place = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
    flat, here = place.flatten(1).unsqueeze(1), here.unsqueeze(1)
    found = (t.flatten(2).gather(2, flat.expand(-1, t.shape[1], -1)).view(t.shape) for t in tensors)
    return tuple(t.where(here, torch.zeros((), dtype=t.dtype, device=t.device)) for t in found)
