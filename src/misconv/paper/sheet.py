"""A sheet of paper for figures: places for panels in rows and columns, and for words."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Sheet", "figure_class", "scale", "sheet_for"]

DPI = 150
# Lengths are in pixels at this resolution: panels are whole numbers of them, so that no picture is resampled.
PANEL, GAP, BREAK, MARGIN = 176, 8, 26, 24
TITLE, TEXT = 11.5, 9.5  # in points
DARK, EDGE = "#182038", "#c9cdd6"


@dataclass
class Sheet:
    """A figure with places for panels in rows and columns; lengths in pixels, from the top left."""

    figure: Figure
    width: int
    height: int
    left: int
    tops: list[int]
    panel_width: int
    panel_height: int
    columns: int

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes at a place of the sheet."""
        bottom = self.height - top - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(place)

    def across(self, column: int) -> int:
        """Where a column begins."""
        return self.left + column * (self.panel_width + GAP)

    def panel(self, row: int, column: int) -> Axes:
        """The axes of one picture."""
        axes = self.axes(self.across(column), self.tops[row], self.panel_width, self.panel_height)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=EDGE, linewidth=0.5)
        return axes

    def beside(self, first: int, last: int) -> Axes:
        """A narrow place to the right of some rows."""
        low = self.tops[last] + self.panel_height
        return self.axes(self.across(self.columns) + GAP, self.tops[first], 14, low - self.tops[first])

    def under(self, column: int, top: int) -> Axes:
        """A narrow place below a column, a little shorter, to keep the numbers of two neighbours apart."""
        low = self.tops[-1] + self.panel_height
        return self.axes(self.across(column) + GAP, low + top, self.panel_width - 2 * GAP, 14)

    def write(self, x: float, y: float, text: str, **options: Any) -> None:
        """Text at a place of the sheet."""
        options = {"fontsize": TEXT, "color": DARK, **options}
        self.figure.text(x / self.width, 1 - y / self.height, text, **options)


def sheet_for(
    title: str,
    labels: Sequence[str],
    columns: int,
    images: Tensor,
    *,
    heads: Sequence[str] = (),
    breaks: Collection[int] = (),
    right: int = 0,
    below: int = 0,
) -> Sheet:
    """A sheet that is large enough for its words: a label for each row, a head for each column."""
    Figure = figure_class()
    height, width = (scale(images) * n for n in images.shape[-2:])
    left = MARGIN + max(_text_width(label, TEXT) for label in labels) + 2 * GAP
    across = left + columns * (width + GAP) - GAP + right + MARGIN
    lines = _wrap(title, across - 2 * MARGIN)
    top = MARGIN + 30 * len(lines) + (6 * GAP if heads else 2 * GAP)
    tops = [top + row * (height + GAP) + sum(BREAK - GAP for b in breaks if b <= row) for row in range(len(labels))]
    down = tops[-1] + height + below + MARGIN
    figure = Figure(figsize=(across / DPI, down / DPI), dpi=DPI, facecolor="white")
    sheet = Sheet(figure, across, down, left, tops, width, height, columns)
    sheet.write(MARGIN, MARGIN, "\n".join(lines), fontsize=TITLE, va="top", weight="bold")
    for label, y in zip(labels, tops, strict=True):
        sheet.write(left - 2 * GAP, y + height / 2, label, ha="right", va="center", linespacing=1.35)
    for column, head in enumerate(heads):
        sheet.write(sheet.across(column) + width / 2, tops[0] - GAP, head, ha="center", va="bottom")
    return sheet


def scale(images: Tensor) -> int:
    """How many pixels of the sheet a pixel of an image is wide."""
    return max(1, round(PANEL / max(images.shape[-2:])))


def _text_width(text: str, size: float, weight: str = "normal") -> int:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font, measure = FontProperties(size=size, weight=weight), text_to_path.get_text_width_height_descent
    points = max(float(measure(line, font, False)[0]) for line in text.split("\n"))
    return math.ceil(points * DPI / 72)


def _wrap(title: str, width: int) -> list[str]:
    """Lines of whole words that fit into a width."""
    lines = [""]
    for word in title.split():
        longer = f"{lines[-1]} {word}".strip()
        if _text_width(longer, TITLE, "bold") <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line for line in lines if line]


def figure_class() -> type[Figure]:
    """Matplotlib's."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures are drawn by matplotlib: pip install 'misconv[paper]'") from error
    return Figure
