"""What commands print as tables: the results of the demo, and the paper's tables."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from misconv.demo import Demo
    from misconv.paper import tables

__all__ = ["console_for", "demo_tables", "paper_tables"]


def console_for(width: int) -> Console:
    """The terminal; or a pipe or a file, which gets this width and no codes for colours."""
    terminal = sys.stdout.isatty()
    return Console(force_terminal=terminal, width=None if terminal else width, highlight=False, markup=False)


def demo_tables(result: Demo) -> Iterator[Table]:
    """Photographs, then the classifiers of digits, then the densities of digits."""
    yield _photographs(result)
    yield _methods(result)
    yield _densities(result)


def _methods(result: Demo) -> Table:
    methods = result.digits.methods
    title = "\nTest digits read correctly, %"
    table = Table("method", "what happens to missing pixels", title=title, box=box.SIMPLE_HEAD)
    table.add_column("mean" if len(methods[0].accuracy) == 1 else "mean ± sd", justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for m in methods:
        spread = f" ± {100 * m.deviation:.1f}" if len(m.accuracy) > 1 else ""
        table.add_row(m.name, m.what, f"{100 * m.mean:.1f}{spread}")
    return table


def _densities(result: Demo) -> Table:
    table = Table("density", title="Hidden pixels of digits predicted", box=box.SIMPLE_HEAD)
    for head in ("NLL per pixel", "RMSE", "inside 50 %", "inside 90 %", "seconds"):
        table.add_column(head, justify="right")
    for d in result.digits.densities:
        a = d.assessment
        inside = [f"{100 * share:.1f} %" for share in (a.coverage_50, a.coverage_90)]
        table.add_row(d.name, f"{a.nll:.3f}", f"{a.rmse:.3f}", *inside, f"{d.seconds:.1f}")
    return table


def _photographs(result: Demo) -> Table:
    title = "\nPhotographs: errors of hidden pixels, and bias of filter responses near them"
    table = Table("the hole is", "that is", title=title, box=box.SIMPLE_HEAD)
    for head in ("RMSE", "edge filters", "random filters"):
        table.add_column(head, justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for way in result.photographs.ways:
        biases = (f"{100 * way.bias[bank]:+.1f} %" for bank in ("edge", "random"))
        table.add_row(way.name, way.what, f"{way.rmse:.4f}", *biases)
    return table


def paper_tables(made: tables.Table, width: int) -> Iterator[Table]:
    """Words on the left, numbers on the right, the best of them in bold; several tables where one is too wide."""
    cells = list(zip(*made.plain().rows, strict=True))  # by column
    longest = [max(map(len, column), default=0) for column in cells]
    heads = [_wrap(head, room) for head, room in zip(made.columns, longest, strict=True)]
    needed = [3 + max(room, *map(len, head)) for head, room in zip(heads, longest, strict=True)]
    words = list(range(made.text))
    for part in _parts(made, needed, width):
        shown = Table(box=box.SIMPLE_HEAD)
        for n in (*words, *part):
            shown.add_column("\n".join(heads[n]), justify="left" if n in words else "right", overflow="fold")
        for row in made.rows:
            shown.add_row(*(_cell(row[n]) for n in (*words, *part)))
        yield shown


def _parts(made: tables.Table, needed: list[int], width: int) -> list[list[int]]:
    """Columns of numbers that fit beside those of words; what belongs to one data set stays together."""
    room = width - 1 - sum(needed[: made.text])
    parts: list[list[int]] = [[]]
    numbers = range(made.text, len(made.columns))
    for _, same in itertools.groupby(numbers, key=lambda n: re.split(r" \(|:", made.columns[n])[0]):
        block = list(same)
        if parts[-1] and sum(needed[n] for n in (*parts[-1], *block)) > room:
            parts.append([])
        parts[-1] += block
    return parts


def _wrap(head: str, width: int) -> list[str]:
    return textwrap.wrap(head, max(width, 1), break_long_words=False, break_on_hyphens=False)


def _cell(cell: str) -> Text:
    return Text(cell.replace("**", ""), style="bold" if cell.startswith("**") else "")
