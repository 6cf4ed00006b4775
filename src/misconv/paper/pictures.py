"""Small pictures inside an HTML page: images of a few pixels as PNG, colour bars, tables of pictures."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

__all__ = ["DIFFERENCE", "INK", "RESPONSE", "UNSURE", "bar", "grid", "image", "paint"]

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
        ground, stripe = (torch.tensor(colour, dtype=torch.float32, device="cpu") for colour in MISSING)
        if gone:
            rows, columns = (torch.arange(n, device="cpu") for n in inside.shape)
            striped = (rows[:, None] + columns) % 16 < 4
            rgb = torch.where(inside[..., None], torch.where(striped[..., None], stripe, ground), rgb)
        rgb = torch.where(frame[..., None], stripe, rgb)
    file = io.BytesIO()
    Image.fromarray(rgb.round().to(torch.uint8).numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image(alt: str, *args: Any, **options: Any) -> str:
    """An `img` element with `paint`'s picture in it."""
    return f'<img src="{paint(*args, **options)}" alt="{escape(alt)}" width="128" height="128">'


def bar(colours: Colours, low: str, high: str) -> str:
    """A colour bar between two words."""
    stops = ", ".join(f"rgb{c}" for c in colours)
    ramp = f'<i style="background:linear-gradient(90deg,{stops})"></i>'
    return f'<span class="bar">{escape(low)} {ramp} {escape(high)}</span>'


def grid(heads: list[str], rows: list[tuple[str, list[str]]], caption: str, kind: str = "") -> str:
    """A table of pictures, with words as its row and column heads."""
    top = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{head}</th>{"".join(f"<td>{c}</td>" for c in cells)}</tr>' for head, cells in rows
    )
    return (
        f'<figure class="card"><div class="scroll"><table class="pictures {kind}"><thead><tr><td></td>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div><figcaption>{caption}</figcaption></figure>"
    )
