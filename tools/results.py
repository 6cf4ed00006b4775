"""Write `results.md` and draw its plots from the records of `misconv table`: `make docs` runs this.

    python tools/results.py [--results results/paper] [--out docs] [--benchmark FILE] [--training FILE]

The files are what `misconv bench` and `benchmarks/training.py` wrote on a GPU. Trains and measures nothing itself; a
table without records is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

sys.path.insert(0, str(Path(__file__).parent))  # also where this file is run by its path alone

import block_generation
import block_two

from misconv.paper import printed, scores, shares, tables
from misconv.paper.methods import BASELINES, BY_NAME, METHODS
from misconv.paper.rows import ROWS
from misconv.paper.scores import Record
from misconv.paper.settings import REGIONS
from misconv.paper.tables import Table
from misconv.paper.variants import VARIANTS, WHOLE

ROOT = Path(__file__).parent.parent

# Colours that differ also for colour-blind eyes: those of tools/speed.py.
GREY, PINK, BLUE = "#4d4d4d", "#c2185b", "#2b7bba"
PRINTED = "#111111"
ONE_ANSWER = 0.2  # the most frequent digit of SVHN is 19.6 % of its test images
NEAR = 0.3  # of the range of our numbers: the scale reaches out for a printed number so far away, and no farther
GUTTER = 0.2  # of the range, at the side where the others are written down

# What took the time: the column's title, and the methods in it.
CLASSES = {
    "baselines": tuple(method.name for method in BASELINES),
    "ACFlow": ("acflow",),
    "MisConv": ("misconv_smfa", "misconv_dmfa"),
    "GT": ("gt",),
}

WORDS: dict[int | str, str] = {
    1: "Every method is trained and tested on incomplete images: a square, a quarter of the area, is missing. Bold: "
    "the best of our numbers among the methods trained on incomplete images. *mean* is not in the paper.",
    2: "The same networks as in Table 1, tested on complete images.",
    6: "What the density is worth: the same classifier with a mixture of factor analyzers fitted to all images (SMFA), "
    "and with one that a network predicts for every image (DMFA).",
    7: "How well the densities predict what is hidden, on test images.",
    8: "What the expectation is worth: one side fills the mean of the density into the image, the other takes the "
    "expected activation of the first layer.",
    9: "Other missing regions. As in the paper, the DMFA learns by hiding more squares, whatever the shape. How the "
    "paper's trapezoids lie in an image is unknown to us; ours reach from edge to edge. So compare the methods there, "
    "not our numbers with the printed ones.",
    10: "Time of the first layer alone. [How fast it is](speed.md) tells of the backward pass, large images, "
    "CPUs and memory.",
}
PROTOCOL = """\
- Every image has one missing region for its whole life, in training as in testing. Its missing values are read by no
  method but GT and ACFlow, which are marked; in Table D also by PC coded −1, as in the authors' code. In Table A
  networks and density learn from complete images, which is its point. ACFlow learns from complete training images, as
  in the paper; its best guess is filled into incomplete ones, and the classifier is trained on these.
- A part of the training set is held out for validation, and chooses the epoch. Test images are read once, by the
  chosen epoch; only the columns *best test epoch* of Tables 3 to 5 look at them more often. Densities learn from all
  incomplete training images, those of validation too, and need no labels.
- Methods are compared seed by seed. The best baseline is chosen by the very numbers it is compared on, in its favour.
- The classifiers go two steps down, as in the authors' code, and have no activation between their linear layers, as the
  appendix names none there; the authors' code has a ReLU."""

SHARED = (
    "Seconds of the runs added up, and in brackets how many runs. Networks that were trained side by side share their "
    "time equally. In block two and in MNIST's square of block one several trainings at once shared the GPU, and in "
    "Tables 3 to 5 so did the tests of the library: alone they would be faster."
)

# Commits at which a side of a trapezoid could be bent.
BENT = ("e510ecca3b5311bcd05c9f41f819f36bebf3e2b2", "3dde6f312815fd754d04cd1a637870e20391ba90")

# By a word in a data set's title: how far its images are the original ones.
DATA = {
    "re-cropped": "the crops were made again from the pictures of full numbers. On 1,083 official crops 98.2 % of the "
    "pixel values are equal and none differs by more than 5 grey levels; labels and counts are official.",
    "JPEG": "the pixels went through JPEG once (median 30 dB against the true ones); order and labels are official.",
}

PICTURES = (
    "With the digits of scikit-learn, because this repository holds no images of the other data sets; "
    "`misconv table figures` draws the same with those of any."
)
FIGURES = {
    "masks.png": "Images with missing regions of the three shapes: square, trapezoid, noise.",
    "imputations.png": "What the densities say about missing pixels, and how sure they are.",
    "first-layer.png": "Responses of the first layer, with MFA imputation and with MisConv.",
    "generation.png": "Reconstructions of incomplete images by autoencoders and by flow matching, and samples of both.",
}


# Reading -----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> dict[str, list[Record]]:
    """The records of every JSON file that has some, by the file's name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SystemExit(f"{path} is not JSON: {error}") from error
        listed = content.get("records", []) if isinstance(content, dict) else content
        records = [r for r in listed if isinstance(r, dict) and "kind" in r]
        if records:
            found[path.name] = records
    return found


def datasets(records: Iterable[Record], *kinds: str) -> list[str]:
    """Names of the data sets with records, the paper's first."""
    names = dict.fromkeys(r["dataset"] for r in records if not kinds or r["kind"] in kinds)
    return sorted(names, key=lambda name: [*printed.TITLES, name].index(name))


# The page ----------------------------------------------------------------------------------------------------------


def made(records: Sequence[Record], benchmark: Mapping[str, Any] | None) -> list[Table]:
    """The paper's tables for which there is something."""
    other = any(r["kind"] == "classification" and r["shape"] != "square" for r in records)
    timed = benchmark is not None and benchmark["sections"].get("table10")
    left_out = {9: not other, 10: not timed}
    numbers = [n for n in tables.NUMBERS if not left_out.get(n)]
    return [table for n in numbers if filled(table := tables.make(n, records, benchmark=benchmark))]


def filled(table: Table) -> bool:
    """Whether any number of ours is in it."""
    ours = [i for i, head in enumerate(table.columns) if head.endswith("here)")]
    return any(row[i] not in ("–", tables.NOT_YET) for row in table.rows for i in ours)


def duration(seconds: float) -> str:
    """In the unit that reads best."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def times(records: Sequence[Record]) -> Table:
    """How long the runs took, by data set and kind of method."""
    # What it took to fit a density stands in the record of the fit, and again in that of its quality.
    fits = [r for r in records if r["kind"] == "fit"] or [r for r in records if r["kind"] == "density"]
    columns: dict[str, list[Record]] = {"densities": fits}
    for title, methods in CLASSES.items():
        columns[title] = [r for r in records if r["kind"] == "classification" and r["method"] in methods]
    columns["autoencoders"] = [r for r in records if r["kind"] == "wae"]
    columns["flow matching"] = [r for r in records if r["kind"] == "flow_matching"]
    columns["one recipe for all"] = [r for r in records if r["kind"] == "recipe"]
    columns["ingredients"] = [r for r in records if r["kind"] == "ingredient"]
    columns["Tables D to F"] = [r for r in records if r["kind"] in ("coding", "slanted", "objective")]
    columns["together"] = [r for found in columns.values() for r in found]
    columns = {title: [r for r in found if r.get("seconds")] for title, found in columns.items()}
    columns = {title: found for title, found in columns.items() if found}
    rows = []
    for name, shape in [(name, shape) for name in datasets(records) for shape in REGIONS]:
        taken = [[r["seconds"] for r in scores.of(found, dataset=name, shape=shape)] for found in columns.values()]
        cells = [f"{duration(sum(t))} ({len(t)})" if t else "–" for t in taken]
        if any(taken):
            rows.append([f"{scores.title_of(records, name)}, {shape}", *cells])
    return Table(None, "How long it took", ["data set, what is missing", *columns], rows)


STEPS = (
    "A step of training of one network, when several are trained side by side on a GPU, by `benchmarks/training.py`. "
    "Queues: how many streams the driver keeps apart (CUDA_DEVICE_MAX_CONNECTIONS); `misconv table` asks for 32."
)
NETWORKS = {
    "classifier": "classifier", "wae": "autoencoder", "flow matching": "flow matching", "acflow": "ACFlow",
    "dmfa": "DMFA of the paper", "unet": "UNetDMFA",
}  # fmt: skip


def steps(timed: Mapping[str, Any] | None) -> list[str]:
    """What a training step takes, network by network."""
    if timed is None:
        return []
    columns = ["network", "data set", "side by side", "batches", "precision", "queues", "step of one", "memory, all"]
    rows = []
    for row in timed["rows"]:
        searched, layout = ", searched" * row["search"], ", channels last" * row.get("last", False)
        rows.append([
            NETWORKS[row["network"]], printed.TITLES[row["dataset"]], str(row["count"]),
            f"{row['steps']}{searched}", row["precision"] + layout, row["connections"] or "8",
            f"{row['step_us']:,.0f} µs", f"{row['peak_gb']:.1f} GB",
        ])  # fmt: skip
    where = f"{timed['device']}; torch {timed['versions']['torch']}; commit {timed['commit']}."
    notes = [
        "Epochs have this number of batches, of noise; “searched”: cuDNN had tried its algorithms. They are short, so "
        f"what comes once in an epoch (regions, an order, the best parameters) weighs more than in a real one. {where}"
    ]
    return ["### What a step takes", STEPS, Table(None, "Steps", columns, rows, notes).markdown()]


def circumstances(records: Sequence[Record]) -> str:
    """Where the numbers come from: a line for every data set."""
    lines = []
    for name in datasets(records):
        mine = [r for r in records if r["dataset"] == name]
        devices = distinct(r.get("device") for r in mine)
        commits = distinct(r.get("commit") for r in mine)
        versions = distinct(", ".join(f"{k} {v}" for k, v in (r.get("versions") or {}).items() if v) for r in mine)
        seeds = ", ".join(map(str, sorted({r["seed"] for r in mine if r.get("seed") is not None})))
        title = scores.title_of(records, name)
        lines.append(
            f"- {title}: {devices}; {versions}; commit {commits}; seeds {seeds or 'none'}; {len(mine)} records."
        )
    return "\n".join(lines)


def distinct(values: Iterable[Any]) -> str:
    """All that occur, once each."""
    return " and ".join(dict.fromkeys(str(v) for v in values if v)) or "unknown"


def page(
    sources: Mapping[str, list[Record]],
    benchmark: Mapping[str, Any] | None,
    pictures: Mapping[str, bool],
    timed: Mapping[str, Any] | None = None,
) -> str:
    """The document, from whatever there is; `pictures` says which there are, `timed` is of `benchmarks/training.py`."""
    records = [record for found in sources.values() for record in found]
    parts = [
        f"<!-- made by tools/results.py from {', '.join(sources)}; do not edit -->",
        "# The paper's tables, and ours",
    ]
    parts += [
        "The numbers printed in Przewięźlikowski et al. (WACV 2022) and those of this library, side by side. "
        "[What was decided](#what-was-decided), [how long it took](#how-long-it-took) and "
        "[how to repeat it](#how-to-repeat-it) stand below."
    ]
    parts.append(block_two.BLOCK_ONE)
    there = made(records, benchmark)
    first = [table for table in there if table.number in (1, 2)]
    later = [table for table in there if table.number not in (1, 2, 10)]
    parts += [part for table in first for part in section(table, pictures)]
    parts += block_generation.sections(records)
    parts += [part for table in later for part in section(table, pictures)]
    parts += [part for table in there if table.number == 10 for part in section(table, pictures)]
    parts += block_two.sections(records, pictures)
    shown = [f"![{text}](pictures/{name})\n\n*{text}*" for name, text in FIGURES.items() if pictures.get(name)]
    parts += ["## Pictures", PICTURES, *shown] if shown else []
    decided = [PROTOCOL, earlier(), *bent(records), "- Whatever came out stands here."]
    parts += ["## What was decided", "\n".join(decided)]
    titles = [scores.title_of(records, name) for name in datasets(records)]
    notes = [f"- {title}: {note}" for title in titles for word, note in DATA.items() if word in title]
    parts += ["## The data", "\n".join(notes)] if notes else []
    spent = times(records)
    parts += ["## How long it took", SHARED, spent.markdown(), *steps(timed)]
    parts += ["## Where it ran", circumstances(records), repeat(records)]
    return "\n\n".join(parts) + "\n"


def earlier() -> str:
    """What the classifiers of an earlier commit did on SVHN."""
    runs = [r for found in read(ROOT / "results/paper/earlier").values() for r in found]
    dead = sum(max(r["accuracy_incomplete"], r["accuracy_complete"]) < ONE_ANSWER for r in runs)
    return (
        "- Before, the classifiers had one step down and that ReLU. On SVHN every image then got the same answer in "
        f"{dead} of {len(runs)} trainings, whatever the method; where we looked, all 20 units of the ReLU had died "
        "within 500 steps. Table D shows a likelier cause of the low numbers that the paper prints for some methods."
    )


def bent(records: Sequence[Record]) -> list[str]:
    """What the shape of trapezoids had to do with these runs."""
    if not any(r["shape"] == "trapezoid" and r.get("commit") in BENT for r in records):
        return []
    return [
        "- When these runs were made, a side of a trapezoid could be bent; by now it is straight. This concerns the "
        "trapezoids of Table 9."
    ]


def section(table: Table, pictures: Mapping[str, bool]) -> list[str]:
    """A table with its words, the first one with its plot."""
    is_drawn = table.number == 1 and pictures.get("results.png")
    drawn = ["![Accuracy by data set and method](pictures/results.png)"] if is_drawn else []
    return [f"## {table.heading}", WORDS[table.number or 0], *drawn, table.markdown()]


def seeds_of(records: Sequence[Record], dataset: str, kind: str) -> set[int]:
    """Of the runs with squares missing."""
    return {r["seed"] for r in scores.of(records, dataset=dataset, kind=kind, shape="square")}


def repeat(records: Sequence[Record]) -> str:
    """The section about running it again."""
    lines = []
    for name in datasets(records):
        number, seeds = 1, seeds_of(records, name, "classification")
        if not seeds:  # faces have no labels
            number, seeds = 3, seeds_of(records, name, "wae")
        file = "" if name == "digits" else f" --data {name}.npz"  # the digits come with scikit-learn
        lines.append(f"misconv table {number} --dataset {name}{file}" + (f" --seeds {len(seeds)}" if seeds else ""))
    return (
        "## How to repeat it\n\n```\n" + "\n".join(lines) + "\n```\n\n"
        "The other tables by their numbers or letters, and pictures like those above with images of the data set by "
        "the word `figures`. What is done is kept: a second call goes on where the first one stopped. "
        "The settings of every run stand in its record, in [results/paper](../results/paper)."
    )


# The plots ---------------------------------------------------------------------------------------------------------


def accuracy_plot(records: Sequence[Record]) -> Figure | None:
    """Accuracy on incomplete test images: a panel for every data set, a line for every method."""
    mine = [r for r in records if r["kind"] == "classification" and r["shape"] == "square"]
    names = datasets(mine)
    if not names:
        return None
    known = {r["method"] for r in mine} | {m for name in names for m in printed.incomplete(name)}
    shown = [method for method in METHODS if method.name in known]
    methods = [method.name for method in shown]
    figure, axes = panels(len(names), len(methods))
    best = {name: found for name in names if (found := scores.best_margin(mine, name))}
    ahead = dict(zip(best, scores.holm(list(best.values())), strict=True))
    for axis, name in zip(axes, names, strict=True):
        values = {m: accuracies(mine, name, m) for m in methods}
        paper = {m: 100 * v for m, v in printed.incomplete(name).items()}
        colours = {m.name: GREY if m.sees_complete else BLUE if m.is_baseline else PINK for m in shown}
        strips(axis, values, colours, paper, "{:.1f}")
        m = ahead.get(name)
        lines = [] if m is None else [f"{BY_NAME[m.method].title}: {m.difference} over {BY_NAME[m.baseline].title}"]
        lines += [] if m is None or m.p is None else [m.chance]
        head(axis, scores.title_of(mine, name), ", ".join(lines))
        axis.set_xlabel("incomplete test images classified correctly, %")
    axes[0].set_yticks(range(len(methods)), [method.starred for method in shown])
    legend(figure, any(printed.incomplete(name) for name in names), "* trained on complete images")
    return figure


def recipe_plot(records: Sequence[Record]) -> Figure | None:
    """Accuracy on incomplete test images by the one recipe: a panel for every data set, a line for every method."""
    mine = [r for r in records if r["kind"] == "recipe" and r["shape"] == "square"]
    names = datasets(mine)
    shown = [row for row in ROWS if not row.extra and scores.of(mine, method=row.name)]
    if not shown:
        return None
    figure, axes = panels(len(names), len(shown))
    for axis, name in zip(axes, names, strict=True):
        values = {row.name: accuracies(mine, name, row.name) for row in shown}
        colours = {row.name: GREY if row.complete else PINK if row.name == "misconv" else BLUE for row in shown}
        strips(axis, values, colours, {}, "{:.1f}")
        head(axis, scores.title_of(mine, name), "")
        axis.set_xlabel("incomplete test images classified correctly, %")
    axes[0].set_yticks(range(len(shown)), [row.starred for row in shown])
    legend(figure, False, "* trained and tested on complete images")
    return figure


def ingredients_plot(records: Sequence[Record]) -> Figure | None:
    """Difference to the recipe without fine-tuning, seed by seed: a panel for a data set, a line for a variant."""
    mine = [r for r in records if r["kind"] == "ingredient" and r["shape"] == "square"]
    others = [name for name in VARIANTS if name != WHOLE and scores.of(mine, variant=name)]
    found: dict[str, dict[str, list[float]]] = {}
    for dataset in datasets(mine):
        whole = scores.scores(mine, dataset=dataset, variant=WHOLE)
        for name in others:
            other = scores.scores(mine, dataset=dataset, variant=name)
            points = [100 * (other[seed] - whole[seed]) for seed in whole if seed in other]
            found.setdefault(dataset, {})[VARIANTS[name].title] = points
    found = {dataset: values for dataset, values in found.items() if any(values.values())}
    if not found:
        return None
    titles = [VARIANTS[name].title for name in others]
    figure, axes = panels(len(found), len(titles), sharex=True)
    for axis, (dataset, values) in zip(axes, found.items(), strict=True):
        axis.axvline(0, color=GREY, linewidth=1)
        strips(axis, values, dict.fromkeys(titles, PINK), {}, "{:+.2f}")
        head(axis, scores.title_of(mine, dataset), f"against {VARIANTS[WHOLE].title}")
        axis.set_xlabel("points, seed by seed")
    scale(axes[0], [0.0, *(v for values in found.values() for dots in values.values() for v in dots)], [])
    axes[0].set_yticks(range(len(titles)), titles)
    legend(figure, False, "")
    return figure


def accuracies(records: Sequence[Record], dataset: str, method: str) -> list[float]:
    """Of every seed, in per cent; GT is never tested on incomplete images."""
    key = "accuracy_complete" if method == "gt" else "accuracy_incomplete"
    return [100 * v for v in scores.scores(records, key, dataset=dataset, method=method).values()]


def panels(count: int, lines: int, sharex: bool = False) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side that share their lines, the first one on top."""
    size = (2.2 + 4.2 * count, 1.9 + 0.42 * lines)
    figure = plt.figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, count, sharex=sharex, sharey=True, squeeze=False)
    axes[0, 0].set_ylim(lines - 0.4, -0.6)
    return figure, list(axes[0])


def strips(
    axis: Axes,
    values: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    paper: Mapping[str, float],
    form: str,
) -> None:
    """A dot for every seed, a bar at the mean, its number at the right, and the paper's number as a hollow diamond."""
    low, high = scale(axis, [v for dots in values.values() for v in dots], list(paper.values()))
    for y, (name, dots) in enumerate(values.items()):
        # Seeds side by side: equal accuracies would hide each other.
        lift = [y + 0.3 * (i / (len(dots) - 1) - 0.5) if len(dots) > 1 else y for i in range(len(dots))]
        axis.scatter(dots, lift, s=24, color=colours[name], alpha=0.7, edgecolor="white", linewidth=0.6, zorder=4)
        if dots:
            axis.plot(fmean(dots), y, "|", color=colours[name], markersize=22, markeredgewidth=2.2, zorder=3)
        text = form.format(fmean(dots)).replace("-", "−") if dots else "–"
        axis.text(1.02, y, text, transform=axis.get_yaxis_transform(), va="center", fontsize=11, color=colours[name])
        if name in paper:
            diamond(axis, paper[name], y, low, high)
    axis.set_axisbelow(True)
    axis.grid(True, color="#e2e2e2", linewidth=0.8)
    axis.tick_params(length=0, labelsize=11)
    axis.spines[["top", "right", "left"]].set_visible(False)


def scale(axis: Axes, ours: Sequence[float], paper: Sequence[float]) -> tuple[float, float]:
    """Set the range of our numbers and of the printed ones nearby; returns it, without the gutters for the others."""
    ours = ours or paper or [0.0]
    width = max(max(ours) - min(ours), 0.5)
    near = [v for v in paper if min(ours) - NEAR * width <= v <= max(ours) + NEAR * width]
    low, high = min([*ours, *near]), max([*ours, *near])
    width = max(high - low, 0.5)
    left, right = (GUTTER if beyond else 0.08 for beyond in (any(v < low for v in paper), any(v > high for v in paper)))
    axis.set_xlim(low - left * width, high + right * width)
    axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    return low, high


def diamond(axis: Axes, value: float, y: float, low: float, high: float) -> None:
    """The paper's number; beyond the scale an arrow at the edge, with the number."""
    look: dict[str, Any] = {"markersize": 7, "fillstyle": "none", "markeredgewidth": 1.3, "color": PRINTED, "zorder": 5}
    if low <= value <= high:
        axis.plot(value, y, "D", **look)
        return
    left = value < low
    across = axis.get_yaxis_transform()
    axis.plot(0.02 if left else 0.98, y, "<" if left else ">", transform=across, **look)
    side: dict[str, Any] = {"x": 0.045, "ha": "left"} if left else {"x": 0.955, "ha": "right"}
    axis.text(**side, y=y, s=f"{value:.1f}", transform=across, va="center", fontsize=10, color=PRINTED)


def head(axis: Axes, title: str, line: str) -> None:
    """A title, and a smaller line below it."""
    axis.set_title(f"{title}\n" if line else title, loc="left", fontsize=14, fontweight="bold")
    axis.text(0, 1.02, line, transform=axis.transAxes, fontsize=10.5, color=GREY)


def legend(figure: Figure, any_printed: bool, star: str) -> None:
    """What dots, bars and diamonds are."""
    look: dict[str, Any] = {"linestyle": "none", "color": GREY}
    handles = [
        Line2D([], [], marker="o", markersize=5, alpha=0.6, label="one seed", **look),
        Line2D([], [], marker="|", markersize=14, markeredgewidth=2.6, label="mean (number at the right)", **look),
    ]
    if any_printed:
        more: dict[str, Any] = {"markersize": 7, "fillstyle": "none", "linestyle": "none", "color": PRINTED}
        handles.append(Line2D([], [], marker="D", **more, label="printed in the paper (◁ beyond the scale)"))
    handles += [Line2D([], [], linestyle="none", label=star)] if star else []
    columns = len(handles) if figure.get_figwidth() > 10 else 1
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=11)


# Writing -----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the records, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "paper")
    parser.add_argument("--benchmark", type=Path, default=ROOT / "results" / "bench" / "layer-cuda.json")
    parser.add_argument("--training", type=Path, default=ROOT / "results" / "bench" / "training-cuda.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)
    sources = read(options.results)
    if not sources:
        raise SystemExit(f"no records in {options.results}; run `misconv table 1` first")
    records = [record for found in sources.values() for record in found]
    benchmark, timed = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        for file in (options.benchmark, options.training)
    )
    folder = options.out / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "results.png": accuracy_plot(records),
        "ingredients.png": ingredients_plot(records),
        "recipe.png": recipe_plot(records),
    }
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=150)  # sharp also on dense screens
            plt.close(figure)
    pictures = {name: figure is not None for name, figure in drawn.items()}
    pictures |= {name: (folder / name).exists() for name in FIGURES}
    if scores.of(records, kind="share"):
        shares.draw_shares(records, folder / "shares.png")
        pictures["shares.png"] = True
    (options.out / "results.md").write_text(page(sources, benchmark, pictures, timed), encoding="utf-8")


if __name__ == "__main__":
    main()
