"""Small pictures of tensors: colours, the hatching of missing pixels, images of a few pixels as PNG."""

from __future__ import annotations

import base64
import io

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from PIL import Image
except ImportError as error:
    raise ImportError("pictures are made by Pillow: pip install 'misconv[files]'") from error

__all__ = ["DIFFERENCE", "INK", "MISSING", "RESPONSE", "UNSURE", "hatching", "paint", "paint_photograph"]

Colours = list[tuple[int, int, int]]
INK: Colours = [(253, 252, 250), (24, 32, 56)]
UNSURE: Colours = [(13, 8, 40), (101, 21, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)]
RESPONSE: Colours = [(253, 252, 250), (140, 205, 198), (28, 124, 142), (16, 44, 84)]
DIFFERENCE: Colours = [(33, 86, 166), (150, 188, 226), (250, 249, 247), (240, 168, 140), (178, 40, 46)]
MISSING: Colours = [(250, 205, 235), (206, 24, 140)]  # ground and stripes
SCALE = 16  # a pixel is a square with this side in the picture, unless told otherwise


def paint(
    values: Tensor,
    colours: Colours,
    low: float,
    high: float,
    hidden: Tensor | None = None,
    *,
    gone: bool = False,
    scale: int = SCALE,
) -> str:
    """An image (H, W) as a PNG; the hidden pixels framed, or striped where they are `gone`."""
    stops = torch.tensor(colours, dtype=torch.float32, device="cpu")  # (S, 3)
    share = ((values.detach().cpu().float() - low) / max(high - low, 1e-12)).nan_to_num(0).clamp(0, 1) * (
        len(stops) - 1
    )
    below = share.floor().clamp(max=len(stops) - 2).long()
    rest = (share - below).unsqueeze(-1)
    rgb = stops[below] * (1 - rest) + stops[below + 1] * rest  # (H, W, 3)
    return _png(rgb, hidden, gone, scale)


def paint_photograph(values: Tensor, hidden: Tensor | None = None, *, gone: bool = False, scale: int = 4) -> str:
    """An image (3, H, W), from 0 to 1, likewise."""
    rgb = 255 * values.detach().cpu().float().nan_to_num(0).clamp(0, 1).permute(1, 2, 0)
    return _png(rgb, hidden, gone, scale)


def _png(rgb: Tensor, hidden: Tensor | None, gone: bool, scale: int) -> str:
    rgb = rgb.repeat_interleave(scale, 0).repeat_interleave(scale, 1)
    if hidden is not None:
        inside = hidden.cpu().repeat_interleave(scale, 0).repeat_interleave(scale, 1)
        width = max(3 * scale // 16, 1)  # of the frame
        outside = F.pad((~inside).float()[None, None], (width,) * 4, value=1.0)
        frame = inside & (F.max_pool2d(outside, 2 * width + 1, stride=1)[0, 0] > 0)
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
