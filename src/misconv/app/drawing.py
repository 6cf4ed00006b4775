"""Tensors as small PNG files inside the page, and curves as SVG."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import torch
from torch import Tensor

from misconv.paper.pictures import INK, MISSING, RESPONSE, UNSURE

try:
    from PIL import Image
except ImportError as error:
    raise ImportError("pictures are made by Pillow: pip install 'misconv[app]'") from error

__all__ = ["INK", "MISSING", "RESPONSE", "UNSURE", "Curve", "gradient", "map_image", "photo_image", "svg_curves"]

Colours = list[tuple[int, int, int]]

LEFT, RIGHT, TOP, BOTTOM = 46, 452, 12, 178  # of the plot, in a picture of 470 × 220


def photo_image(values: Tensor, hidden: Tensor | None = None) -> str:
    """An image (C, H, W), 0 to 1, as the page shows it: one band in ink on paper or grey, three as colours.

    Args:
        hidden: bool (H, W), pixels that are painted as missing.
    """
    shown = values[:3] if len(values) >= 3 else values[:1].expand(3, -1, -1)
    rgb = 255 * shown.detach().float().nan_to_num(0).clamp(0, 1).permute(1, 2, 0)
    return _png(rgb, hidden)


def map_image(values: Tensor, colours: Colours, high: float, hidden: Tensor | None = None) -> str:
    """Numbers (H, W) from 0 to `high` in colours."""
    stops = torch.tensor(colours, dtype=torch.float32)  # (S, 3)
    share = (values.detach().float() / high).nan_to_num(0).clamp(0, 1) * (len(stops) - 1)
    below = share.floor().clamp(max=len(stops) - 2).long()
    rest = (share - below).unsqueeze(-1)
    return _png(stops[below] * (1 - rest) + stops[below + 1] * rest, hidden)


def _png(rgb: Tensor, hidden: Tensor | None) -> str:
    """(H, W, 3), 0 to 255."""
    if hidden is not None:
        rgb = torch.where(hidden.unsqueeze(-1), torch.tensor(MISSING[1], dtype=torch.float32), rgb)
    file = io.BytesIO()
    Image.fromarray(rgb.round().to(torch.uint8).numpy()).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def gradient(colours: Colours) -> str:
    """The colours of a map as a CSS background, for its legend."""
    return f"linear-gradient(to right, {', '.join(f'rgb{colour}' for colour in colours)})"


@dataclass(frozen=True)
class Curve:
    """One curve, its name, and the class that gives its colour."""

    name: str
    kind: str
    points: list[tuple[float, float]]  # both from 0 to 1


def svg_curves(curves: list[Curve]) -> list[dict[str, object]]:
    """Curves in units of the SVG picture that the template draws."""

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return round(LEFT + (RIGHT - LEFT) * point[0], 1), round(BOTTOM - (BOTTOM - TOP) * point[1], 1)

    return [
        {
            "name": curve.name,
            "kind": curve.kind,
            "marks": [at(point) for point in curve.points],
            "path": "M" + "L".join(f"{x} {y}" for x, y in map(at, curve.points)),
        }
        for curve in curves
    ]
