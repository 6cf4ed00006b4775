"""Flowcharts of mermaid fences, drawn without a browser, a program or the internet.

GitHub draws such fences by itself. For the site their few forms are enough: nodes ``a["a label"]``, arrows
``a --> b --> c`` and ``a -->|"what"| b``, and one level of ``subgraph``. Drawings go from top to bottom, whatever the
fence says: so they fit on a telephone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from typing import Any

import networkx as nx
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

NODE = r'(\w+)(?:\["([^"]*)"\])?'
ARROW = re.compile(r'\s*-->\s*(?:\|"?([^"|]*)"?\|)?\s*')
EM, LINE, COLUMN, ROW = (
    6.6,
    17,
    18,
    40,
)  # width of a letter, height of a line, spaces between columns and rows, in pixels
Box = tuple[float, float, float, float]  # left, top, width, height


@dataclass
class Flowchart:
    """Nodes with their labels, arrows with theirs, and which nodes a frame goes around."""

    labels: dict[str, str] = field(default_factory=dict)
    arrows: dict[tuple[str, str], str] = field(default_factory=dict)
    frames: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Flowchart:
        """Read what stands in the fence; a line that is not understood is an error."""
        chart, frame = cls(), None
        for line in filter(None, map(str.strip, text.splitlines())):
            if line.startswith(("flowchart", "subgraph")):
                frame = line.removeprefix("subgraph ") if line.startswith("subgraph") else None
            elif line == "end":
                frame = None
            else:
                names = chart._read(line)
                if frame is not None:
                    chart.frames.setdefault(frame, set()).update(names)
        return chart

    def _read(self, line: str) -> list[str]:
        """The nodes of one line, which may be a chain of arrows."""
        parts = re.split(r"(\s*-->\s*(?:\|[^|]*\|)?\s*)", line)
        names = []
        for part in parts[::2]:
            found = re.fullmatch(NODE, part.strip())
            if found is None:
                raise ValueError(f'a flowchart must have nodes like a or a["label"], got {part!r}')
            names.append(found[1])
            if found[2] or found[1] not in self.labels:
                self.labels[found[1]] = found[2] or found[1]
        for before, arrow, after in zip(names, parts[1::2], names[1:], strict=False):
            label = ARROW.fullmatch(arrow)
            self.arrows[before, after] = (label and label[1]) or ""
        return names

    def layers(self) -> list[list[str]]:
        """Names in rows: as far down as the longest way to each, near to what leads to it."""
        graph = nx.DiGraph(list(self.arrows))
        rows: list[list[str]] = []
        places: dict[str, float] = {}
        for generation in nx.topological_generations(graph):
            before = {n: [places[m] for m in graph.predecessors(n)] for n in generation}
            row = sorted(generation, key=lambda n, before=before: sum(before[n]) / max(len(before[n]), 1))
            places |= {name: (number + 0.5) / len(row) for number, name in enumerate(row)}
            rows.append(row)
        return rows


def boxes_of(chart: Flowchart) -> tuple[dict[str, Box], float, float]:
    """Where every node is drawn, and the width and height of the whole."""
    lines = {name: label.split("<br>") for name, label in chart.labels.items()}
    wide = {name: EM * max(map(len, words)) + 24 for name, words in lines.items()}
    rows = chart.layers()
    widths = [sum(wide[name] for name in row) + COLUMN * (len(row) - 1) for row in rows]
    total = max(widths) + 28
    found, top = {}, 28.0 if chart.frames else 8.0
    for row, width in zip(rows, widths, strict=True):
        left, tall = (total - width) / 2, 16 + LINE * max(len(lines[name]) for name in row)
        for name in row:
            found[name] = left, top, wide[name], float(tall)
            left += wide[name] + COLUMN
        top += tall + ROW
    return found, total + _room_for_labels(chart), top - ROW + 14


def _room_for_labels(chart: Flowchart) -> float:
    """What stands on arrows stands to their right."""
    lengths = [len(line) for label in chart.arrows.values() for line in label.split("<br>")]
    return max(0.0, EM * max(lengths, default=0) - 60)


def draw(chart: Flowchart) -> str:
    """The chart as SVG in the colours of the page."""
    boxes, width, height = boxes_of(chart)
    body = [_frame(title, [boxes[n] for n in names]) for title, names in chart.frames.items()]
    body += [_arrow(boxes[a], boxes[b], label) for (a, b), label in chart.arrows.items()]
    body += [_node(box, chart.labels[name].split("<br>")) for name, box in boxes.items()]
    return (
        f'<div class="flowchart"><svg role="img" aria-label="{escape(_words(chart))}" width="{width:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" '
        f'markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
        f"{''.join(body)}</svg></div>"
    )


def _words(chart: Flowchart) -> str:
    """What a screen reader says."""
    plain = {name: label.replace("<br>", " ") for name, label in chart.labels.items()}
    return "; ".join(f"{plain[a]} → {plain[b]}" for a, b in chart.arrows)


def _node(box: Box, lines: list[str]) -> str:
    x, y, w, h = box
    first = y + h / 2 - LINE * (len(lines) - 1) / 2 + 4.5
    words = (
        f'<text x="{x + w / 2:.1f}" y="{first + LINE * n:.1f}">{escape(line)}</text>' for n, line in enumerate(lines)
    )
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="5"/>{"".join(words)}'


def _arrow(one: Box, other: Box, label: str) -> str:
    x, y = one[0] + one[2] / 2, one[1] + one[3]
    to_x, to_y = other[0] + other[2] / 2, other[1] - 2
    bend = (to_y - y) / 2
    words = label.split("<br>") if label else []
    first = (y + to_y) / 2 + 4 - LINE * (len(words) - 1) / 2
    texts = "".join(
        f'<text class="on-arrow" x="{(x + to_x) / 2 + 9:.1f}" y="{first + LINE * n:.1f}">{escape(line)}</text>'
        for n, line in enumerate(words)
    )
    path = f"M{x:.1f} {y:.1f}C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}"
    return f'<path class="arrow" d="{path}" marker-end="url(#head)"/>{texts}'


def _frame(title: str, boxes: list[Box]) -> str:
    x, y = min(b[0] for b in boxes) - 12, min(b[1] for b in boxes) - 10
    w, h = max(b[0] + b[2] for b in boxes) + 12 - x, max(b[1] + b[3] for b in boxes) + 10 - y
    return (
        f'<rect class="frame" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="8"/>'
        f'<text class="title" x="{x + 2:.1f}" y="{y - 5:.1f}">{escape(title)}</text>'
    )


class MermaidDirective(SphinxDirective):
    """A fence of mermaid."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The drawing."""
        return [nodes.raw("", draw(Flowchart.parse("\n".join(self.content))), format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("mermaid", MermaidDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
