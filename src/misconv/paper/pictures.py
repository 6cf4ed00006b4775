"""Small pictures of tensors: colours, the hatching of missing pixels, images of a few pixels as PNG."""

from __future__ import annotations

import base64
import io

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

__all__ = ["DIFFERENCE", "INK", "MISSING", "RESPONSE", "UNSURE", "hatching", "paint"]

Colours = list[tuple[int, int, int]]
INK: Colours = [(253, 252, 250), (24, 32, 56)]
UNSURE: Colours = [(13, 8, 40), (101, 21, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)]
RESPONSE: Colours = [(253, 252, 250), (140, 205, 198), (28, 124, 142), (16, 44, 84)]
DIFFERENCE: Colours = [(33, 86, 166), (150, 188, 226), (250, 249, 247), (240, 168, 140), (178, 40, 46)]
MISSING: Colours = [(250, 205, 235), (206, 24, 140)]  # ground and stripes
SCALE = 16  # a pixel of a digit is a square with this side in the picture


def paint(
    values: Tensor, colours: Colours, low: float, high: float, hidden: Tensor | None = None, *, gone: bool = False
) -> str:
    """An image (H, W) as a PNG; the hidden pixels framed, or striped where they are `gone`."""
    stops = torch.tensor(colours, dtype=torch.float32, device="cpu")  # (S, 3)
    share = ((values.detach().cpu().float() - low) / max(high - low, 1e-12)).nan_to_num(0).clamp(0, 1) * (
        len(stops) - 1
    )
    below = share.floor().clamp(max=len(stops) - 2).long()
    rest = (share - below).unsqueeze(-1)
    rgb = stops[below] * (1 - rest) + stops[below + 1] * rest  # (H, W, 3)
    rgb = rgb.repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1)
    if hidden is not None:
        inside = hidden.cpu().repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1)
        outside = F.pad((~inside).float()[None, None], (3, 3, 3, 3), value=1.0)
        frame = inside & (F.max_pool2d(outside, 7, stride=1)[0, 0] > 0)
        if gone:
            rgb = torch.where(inside[..., None], hatching(*inside.shape).float(), rgb)
        rgb = torch.where(frame[..., None], torch.tensor(MISSING[1], dtype=torch.float32, device="cpu"), rgb)
    file = io.BytesIO()
    Image.fromarray(rgb.round().to(torch.uint8).numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def hatching(height: int, width: int) -> Tensor:
    """How missing pixels look, (height, width, 3), from 0 to 255: diagonal stripes on a light ground."""
    ground, stripe = (torch.tensor(colour, dtype=torch.float64, device="cpu") for colour in MISSING)
    rows, columns = (torch.arange(n, device="cpu") for n in (height, width))
    striped = (rows[:, None] + columns) % 16 < 4
    return torch.where(striped.unsqueeze(-1), stripe, ground)
