"""Figure A, by how much is missing: networks of the one recipe are tested with 0 to 90 % of every image missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from misconv.paper.inputs import CachedMFA, IncompleteImages
from misconv.paper.measures import MEASURES, log_probabilities, measures
from misconv.paper.recipe import Runs, average_more
from misconv.paper.rows import BY_ROW
from misconv.paper.scores import Record, of, scores, title_of

__all__ = ["SHARES", "SHOWN", "draw_shares", "really_hidden", "run_shares"]

SHARES = tuple(tenths / 10 for tenths in range(10))
SHOWN = ("hiding", "partial", "samples", "mfa", "misconv")  # five rows
PANELS = ("accuracy", "nll", "abstention")
# Colours that differ also for colour-blind eyes.
COLOURS = {"hiding": "#4d4d4d", "partial": "#2b7bba", "samples": "#e69f00", "mfa": "#009e73", "misconv": "#c2185b"}


def run_shares(runs: Runs, names: Sequence[str], seeds: Sequence[int]) -> list[Record]:
    """The records of all rows with all shares and seeds; what is not there yet is trained, and measured."""
    cache = runs.experiment.cache
    wanted = [(name, seed, share) for name in names for seed in seeds for share in SHARES]
    todo = [each for each in wanted if cache.get(_unit(runs, *each), "share") is None]
    if todo:
        _measure(runs, todo)
    found = [cache.get(_unit(runs, *each), "share") for each in wanted]
    return [record for record in found if record is not None]


def _unit(runs: Runs, name: str, seed: int, share: float) -> dict[str, Any]:
    return {**runs.unit(name, seed), "variant": f"share {share:g}", "share": share}


def _measure(runs: Runs, todo: Sequence[tuple[str, int, float]]) -> None:
    names, seeds = dict.fromkeys(name for name, *_ in todo), dict.fromkeys(seed for _, seed, _ in todo)
    experiment, works = runs.experiment, runs.networks(list(names), list(seeds))
    labels = experiment.labels[1]
    for share in dict.fromkeys(share for *_, share in todo):
        experiment.say(f"{experiment.data.title}, {experiment.shape}: {share:.0%} of every test image missing")
        data, said = _missing(runs, share), dict[str, CachedMFA]()
        hidden = 1 - float(data.observed.double().mean())  # a region has whole pixels
        for name, seed in ((name, seed) for name, seed, asked in todo if asked == share):
            work = works[name, seed]
            average_more(work.network)
            logs = log_probabilities(work.network, runs.given(work, data, said), len(labels), experiment.device)
            record = {"kind": "share", **experiment.circumstances(), "method": name, "seed": seed, "share": share}
            record["hidden"] = hidden
            experiment.cache.keep(_unit(runs, name, seed, share), {**record, **measures(logs, labels)})


def _missing(runs: Runs, share: float) -> IncompleteImages:
    """The test images with regions of the experiment's shape that cover this share."""
    experiment = runs.experiment
    if share == 0:
        return experiment.whole("test")
    return experiment.with_missing(experiment.data.test, 2, share)


def really_hidden(records: Sequence[Record], share: float) -> float:
    """What regions of whole pixels hide, where this share was asked for."""
    found = [r["hidden"] for r in of(records, share=share) if "hidden" in r]
    return float(found[0]) if found else share


def draw_shares(records: Sequence[Record], path: Path) -> Path:
    """A row of panels for every data set: each measure against the share, a line for every method, ± one deviation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mine = of(records, kind="share")
    names = list(dict.fromkeys(r["dataset"] for r in mine))
    figure = Figure(figsize=(13, 0.8 + 3.2 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(names), len(PANELS), squeeze=False)
    for line, dataset in zip(axes, names, strict=True):
        for axis, measure in zip(line, PANELS, strict=True):
            _panel(axis, of(mine, dataset=dataset), measure)
            axis.set_title(f"{title_of(mine, dataset)}: {MEASURES[measure][0]}", loc="left", fontsize=11)
    handles, titles = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def _panel(axis: Any, records: Sequence[Record], measure: str) -> None:
    for name in dict.fromkeys(r["method"] for r in records):
        found = [scores(records, measure, method=name, share=share) for share in SHARES]
        known = [
            (100 * really_hidden(records, share), torch.tensor(list(s.values())))
            for share, s in zip(SHARES, found, strict=True)
            if s
        ]
        means = [float(values.mean()) for _, values in known]
        spread = [float(values.std()) if len(values) > 1 else 0.0 for _, values in known]
        axis.errorbar(
            [share for share, _ in known], means, spread, label=BY_ROW[name].title, color=COLOURS.get(name),
            marker="o", markersize=3, linewidth=1.4, capsize=2,
        )  # fmt: skip
    axis.set_xlabel("missing, %")
    axis.grid(True, color="#e2e2e2", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
