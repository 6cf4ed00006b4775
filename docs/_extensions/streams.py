"""What a cell prints is shown as it was printed.

Output of a program arrives in pieces of a hundred characters. myst-nb ends a line after each piece when it merges them;
here they are put together as they are, stderr (what a command says on its way) before stdout (its result).
"""

from __future__ import annotations

from typing import Any

from myst_nb.core import render


def merged(outputs: list[Any]) -> list[Any]:
    """Outputs of a cell with at most one of each stream, before all else."""
    texts: dict[str, Any] = {}
    others = []
    for output in outputs:
        if output["output_type"] != "stream":
            others.append(output)
        elif output["name"] in texts:
            texts[output["name"]]["text"] += output["text"]
        else:
            texts[output["name"]] = output
    return [texts[name] for name in ("stderr", "stdout") if name in texts] + others


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    render.coalesce_streams = merged
    return {"parallel_read_safe": True, "parallel_write_safe": True}
