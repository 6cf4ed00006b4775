"""Charts of curves, in units of an SVG picture; the template draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Curve", "curve_chart"]

LEFT, RIGHT, TOP, BOTTOM = 62, 322, 16, 206  # of the plot, in a picture of 340 × 250

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One curve, its name, and the class that gives its colour."""

    name: str
    kind: str
    points: list[Point]


def curve_chart(
    label: str,
    titles: tuple[str, str],
    ticks: tuple[dict[float, str], dict[float, str]],
    curves: list[Curve],
    *,
    diagonal: bool = False,
) -> dict[str, Any]:
    """What the template draws: axes from 0 to their last tick, and curves with a mark at every point.

    Args:
        label: the chart in words.
        titles: of the horizontal and the vertical axis.
        ticks: of both, value -> name.
        curves: what is drawn.
        diagonal: whether to draw where both axes agree.
    """
    ends = max(ticks[0]), max(ticks[1])

    def at(point: Point) -> Point:
        x, y = (value / end for value, end in zip(point, ends, strict=True))
        return round(LEFT + (RIGHT - LEFT) * x, 1), round(BOTTOM - (BOTTOM - TOP) * y, 1)

    drawn = []
    for curve in curves:
        marks = [at(point) for point in curve.points]
        path = "M" + "L".join(f"{x} {y}" for x, y in marks)
        drawn.append({"name": curve.name, "kind": curve.kind, "path": path, "marks": marks})
    return {
        "label": label,
        "titles": titles,
        "columns": [{"x": at((value, 0))[0], "name": name} for value, name in ticks[0].items()],
        "rows": [{"y": at((0, value))[1], "name": name} for value, name in ticks[1].items()],
        "curves": drawn,
        "diagonal": f"M{LEFT} {BOTTOM}L{RIGHT} {TOP}" if diagonal else "",
    }
