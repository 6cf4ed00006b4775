"""The picture of an assessment: can the intervals be believed, and the deviation at every distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from misconv._assess.scores import Reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

DARK, GREY, EDGE = "#182038", "#5b6274", "#c9cdd6"
BLUE, ORANGE, BAND = "#2563c9", "#d9730d", "#e9edf4"
TOLERANCE = 0.1  # coverage off by more is not to be believed, as `Assessment.verdict` has it


def draw(calibration: Sequence[tuple[float, float]], rows: Sequence[Reliability], title: str) -> Figure:
    """Coverage by nominal level, and beside it RMSE and deviation by distance.

    Args:
        calibration: for each nominal level from 0 to 1 the share of hidden pixels inside its interval.
        rows: the table by distance.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot draws with matplotlib: pip install 'misconv[figures]'") from error
    figure = Figure(figsize=(9.6, 4.5), dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    left, right = figure.subplots(1, 2)
    _draw_coverage(left, calibration)
    _draw_distances(right, rows)
    figure.supxlabel(title, fontsize=8.5, color=GREY, x=0.99, ha="right")
    return figure


def _draw_coverage(axes: Axes, calibration: Sequence[tuple[float, float]]) -> None:
    levels, found = ([0.0, *(100 * value for value in part), 100.0] for part in zip(*calibration, strict=True))
    width = 100 * TOLERANCE
    axes.fill_between(
        [0, 100], [-width, 100 - width], [width, 100 + width], color=BAND, lw=0, label=f"within {width:.0f} points"
    )
    axes.plot([0, 100], [0, 100], color=GREY, lw=1, ls=(0, (4, 3)), label="as claimed")
    axes.plot(levels, found, color=BLUE, lw=2, marker="o", ms=3.5, label="this density", clip_on=False, zorder=3)
    axes.set(xlim=(0, 100), ylim=(0, 100), aspect="equal", xticks=range(0, 101, 25), yticks=range(0, 101, 25))
    axes.text(4, 96, "too wide", color=GREY, fontsize=8.5, va="top")
    axes.text(96, 4, "too narrow", color=GREY, fontsize=8.5, ha="right")
    _dress(axes, "Do the intervals hold the truth?", "claimed: central interval, %", "hidden pixels inside it, %")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.08), frameon=False, fontsize=8.5, labelcolor=DARK)


def _draw_distances(axes: Axes, rows: Sequence[Reliability]) -> None:
    places = range(len(rows))
    axes.plot(
        places, [row.nearest_rmse for row in rows], color=GREY, lw=1.2, ls=(0, (4, 3)), label="RMSE, nearest pixel"
    )
    axes.plot(places, [row.rmse for row in rows], color=BLUE, lw=2, marker="o", ms=5, label="RMSE, mean")
    axes.plot(
        places, [row.deviation for row in rows], color=ORANGE, lw=2, marker="s", ms=4.5, label="deviation claimed"
    )
    axes.set_xticks(list(places), [f"{row.label}\n{_short(row.pixels)}" for row in rows], fontsize=8)
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.25)
    below = "distance to the nearest pixel shown (below: hidden pixels)"
    _dress(axes, "Is the deviation as large as the error?", below, "units of the data")
    axes.legend(loc="best", frameon=False, fontsize=8.5, labelcolor=DARK)


def _dress(axes: Axes, title: str, below: str, beside: str) -> None:
    axes.set_title(title, fontsize=11, color=DARK, loc="left")
    axes.set_xlabel(below, fontsize=9, color=GREY)
    axes.set_ylabel(beside, fontsize=9, color=GREY)
    axes.tick_params(colors=GREY, labelsize=8, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(EDGE)


def _short(count: int) -> str:
    """A count in few characters: 950, 9.5k, 95k, 9.5M.

    >>> [_short(count) for count in (950, 9500, 95000, 9500000)]
    ['950', '9.5k', '95k', '9.5M']
    """
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return str(count)
