"""Holes: drawn from a shape and a share, and as the page sends them."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import torch
from torch import Tensor

from misconv import missing

__all__ = ["SHAPES", "drawn_hole", "grown_holes", "pack_hole", "unpack_hole"]

SHAPES = {
    "square": missing.square,
    "trapezoid": missing.trapezoid,
    "noise": missing.noise,
    "free form": missing.free_form,
    "stripes": missing.stripes,
}


def drawn_hole(shape: str, share: float, size: tuple[int, int], seed: int) -> Tensor:
    """A hole of some shape over a share of the image, bool (H, W), True where a pixel is hidden."""
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got another text")
    height, width = size
    if share <= 0 or share >= 1:
        return torch.full(size, share >= 1, device="cpu")
    generator = torch.Generator("cpu").manual_seed(seed)
    observed = SHAPES[shape](1, height, width, fraction=share, generator=generator, device=torch.device("cpu"))
    return ~observed[0, 0]


def pack_hole(hole: Tensor) -> str:
    """The bits of a hole row by row, in base64, as the page holds them."""
    return base64.b64encode(np.packbits(hole.numpy().ravel(), bitorder="little").tobytes()).decode()


def unpack_hole(text: Any, size: tuple[int, int]) -> Tensor:
    """The hole that a page has sent; anything else than the bits of such an image is refused."""
    height, width = size
    wanted = -(-height * width // 8)
    try:
        if not isinstance(text, str) or len(text) > 4 * (wanted // 3 + 1):
            raise ValueError
        bits = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (ValueError, binascii.Error):
        bits = np.zeros(0, np.uint8)
    if len(bits) != wanted:
        raise ValueError(f"hole must be {wanted} bytes in base64, for {width} × {height} pixels, got something else")
    flat = np.unpackbits(bits, count=height * width, bitorder="little")
    return torch.from_numpy(flat.astype(bool)).view(height, width)


def grown_holes(hole: Tensor, steps: int) -> Tensor:
    """Holes from none to the whole image, each inside the next, bool (N, H, W); the given one is among them.

    It grows from its centre to its edge, and from there on over the rest of the image.
    """
    height, width = hole.shape
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([rows, columns], -1).float()  # (H, W, 2)
    whole = torch.tensor([height - 1, width - 1], dtype=torch.float32) / 2
    centre = places[hole].mean(0) if bool(hole.any()) else whole
    distance = (places - centre).square().sum(-1)
    order = (distance + (~hole) * (2 * height * height + 2 * width * width)).flatten().argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    counts = {round(len(order) * step / steps) for step in range(steps + 1)} | {int(hole.sum())}
    return torch.stack([rank.view(height, width) < count for count in sorted(counts)])
