"""Filling holes from what is around them: a smooth pyramid, and the nearest pixel that was seen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SWEEPS", "nearest_fill", "nearest_seen", "push_pull"]

SWEEPS = 2, 1  # of Jacobi's method, where a fill is relaxed: at every level but the finest, and there


def push_pull(x: Tensor, observed: Tensor, *, relaxed: bool = False) -> Tensor:
    """Fill the holes of every channel smoothly: averages of seen pixels at every scale, the finest that there are.

    Down the pyramid ("pull") each level is the weighted mean of the seen pixels of the one below; up again ("push")
    what a level does not know comes from the coarser one. Where nothing of a channel was seen it is 0. Linear in the
    number of pixels, and differentiable in x.

    Args:
        x: (B, C, H, W), never read where it was not observed. observed: bool (B, C, H, W).
        relaxed: let every level come nearer to the solution of Laplace's equation (`SWEEPS`), as multigrid methods do.
            On photographs that lowers the error by 1 or 2 %.
    """
    weight = observed.to(x.dtype)
    value = x.where(observed, 0)
    levels = [(value, weight)]
    while max(value.shape[-2:]) > 1:
        odd = [side % 2 for side in (value.shape[-1], value.shape[-2])]
        value, weight = (F.pad(t, (0, odd[0], 0, odd[1])) for t in (value, weight))
        total, known = _halve(torch.cat([value * weight, weight], 1)).chunk(2, 1)
        value, weight = total / known.clamp_min(1e-12), (4 * known).clamp_max(1)
        levels.append((value, weight))
    filled, _ = levels.pop()
    while levels:
        value, weight = levels.pop()
        coarse = F.interpolate(filled, scale_factor=2, mode="bilinear", align_corners=False)
        coarse = coarse[..., : value.shape[-2], : value.shape[-1]]
        filled = weight * value + (1 - weight) * coarse
        sweeps = SWEEPS[0] if levels else SWEEPS[1]
        for _ in range(sweeps if relaxed else 0):
            filled = weight * value + (1 - weight) * _neighbours(filled)
    return x.where(observed, filled)


def _neighbours(x: Tensor) -> Tensor:
    """The mean of the four pixels next to each; past the border the pixel itself stands for them."""
    # Not by F.pad, whose gradient has no fixed order on a GPU.
    rows = torch.cat([x[..., :1, :], x[..., :-1, :]], -2) + torch.cat([x[..., 1:, :], x[..., -1:, :]], -2)
    columns = torch.cat([x[..., :1], x[..., :-1]], -1) + torch.cat([x[..., 1:], x[..., -1:]], -1)
    return (rows + columns) / 4


def _halve(x: Tensor) -> Tensor:
    """Every second pixel of the mean over 4×4, weighted 1 3 3 1 each way; outside the image there is nothing."""
    # 1 3 3 1, computed where it is used: a copy from the CPU could not be captured in a CUDA graph.
    row = 0.5 - (torch.arange(4, dtype=x.dtype, device=x.device) - 1.5).abs() / 4
    channels = x.shape[1]
    x = F.conv2d(x, row.view(1, 1, 1, 4).expand(channels, 1, 1, 4), stride=(1, 2), padding=(0, 1), groups=channels)
    return F.conv2d(x, row.view(1, 1, 4, 1).expand(channels, 1, 4, 1), stride=(2, 1), padding=(1, 0), groups=channels)


def nearest_fill(x: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Fill the holes of every channel with the nearest seen pixel; and the squared distance to it, as `nearest_seen`.

    Where nothing of a channel was seen it is 0. Differentiable in x.

    Args:
        x: (B, C, H, W), never read where it was not observed. observed: bool (B, 1, H, W) or (B, C, H, W).
    """
    squared, place = nearest_seen(observed)
    # Where nothing was seen the place lies outside the image, and any pixel will do: all of that channel are 0.
    place = place.clamp(0, x[0, 0].numel() - 1).expand(x.shape).flatten(2)
    filled = torch.where(observed, x, 0).flatten(2).gather(2, place).view(x.shape)
    return torch.where(observed, x, filled), squared


def nearest_seen(observed: Tensor) -> tuple[Tensor, Tensor]:
    """For every pixel the squared distance to the nearest one that was seen, and the place of that, row · W + column.

    Exact, by columns and then by rows; of several nearest ones any. Where nothing was seen the distance is infinite.

    Args:
        observed: bool (..., H, W).
    """
    height, width = observed.shape[-2:]
    rows = torch.arange(height, device=observed.device).view(-1, 1)
    far = 4 * (height + width)
    above = torch.where(observed, rows, -far).cummax(-2).values  # the last seen row up to this one
    below = torch.where(observed, rows, far).flip(-2).cummin(-2).values.flip(-2)
    nearest = torch.where(rows - above <= below - rows, above, below)  # (..., H, W), in its column
    vertical = (nearest - rows).square()
    columns = torch.arange(width, device=observed.device)
    across = (columns.view(-1, 1) - columns).square()  # (W, W'), from a column to another
    best, place = [], []
    for row in range(height):  # one at a time: all of them at once would take H·W² numbers
        distance, column = (vertical[..., row, :].unsqueeze(-2) + across).min(-1)  # (..., W)
        best.append(distance)
        place.append(nearest[..., row, :].gather(-1, column) * width + column)
    squared = torch.stack(best, -2).to(torch.float32)
    return squared.masked_fill(squared >= (height + width) ** 2, torch.inf), torch.stack(place, -2)
