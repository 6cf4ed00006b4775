"""Write `speed.md` and draw `pictures/speed.png` from the records of `misconv bench`: `make docs` runs this.

    python tools/speed.py [--results results/bench] [--out docs]

Reads layer-cuda.json and layer-cpu.json, whichever are there, network-cuda.json, which is made with ``--only network``,
network-newer-cuda.json and network-again-cuda.json, whose rows were measured again, large-cuda.json, which is made with
``--only large --only norm --only nll`` and whose sections take the place of those of layer-cuda.json, and
kernels-cuda.json of `benchmarks/kernels.py`; measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from misconv.bench.checks import BOUNDS, MODES

ROOT = Path(__file__).parent.parent
RECORDS = {"cuda": "layer-cuda.json", "cpu": "layer-cpu.json"}
MORE = {
    "network": "network-cuda.json",
    "newer": "network-newer-cuda.json",
    "again": "network-again-cuda.json",
    "large": "large-cuda.json",
    "kernels": "kernels-cuda.json",
}
AGAIN = ("newer", "again")  # measurements of the same rows, in the order of time

# Colours that differ also for colour-blind eyes; the layer itself stands out, the others step back.
LINES = {
    "conv": ("conv + ReLU", "#4d4d4d", "o"),
    "misconv": ("MisConv", "#c2185b", "s"),
    "plain": ("MisConv in plain PyTorch", "#2b7bba", "^"),
}
PANELS = {
    "size": "image height = width, px",
    "batch": "images in the batch",
    "share": "missing pixels, %",
    "components": "components K",
    "rank": "rank L",
}
KINDS = {"forward": "forward", "weights": "forward + backward"}

Row = dict[str, Any]
Record = dict[str, Any]


# Reading -----------------------------------------------------------------------------------------------------------


def rows(record: Record, section: str, kind: str | None = None) -> list[Row]:
    """The rows of a section, of one kind where it is given."""
    return [r for r in record["sections"].get(section, []) if kind in (None, r["kind"])]


def layer(row: Row) -> str:
    """The convolution of a row in words: 64×3×224×224, 7×7/2→64."""
    s = row["setting"]
    stride = f"/{s['stride']}" if s["stride"] > 1 else ""
    image = f"{s['batch']}×{s['channels']}×{s['size']}×{s['size']}"
    return f"{image}, {s['kernel']}×{s['kernel']}{stride}→{s['filters']}"


def took(row: Row, name: str) -> str:
    """Median and quartiles, in microseconds or milliseconds."""
    if name not in row["times"]:
        return "–"
    t = row["times"][name]
    low, high = t["quartiles_us"]
    if t["median_us"] < 10_000:
        return f"{t['median_us']:.{0 if t['median_us'] >= 100 else 1}f} µs ({low:.0f}–{high:.0f})"
    return f"{t['median_us'] / 1e3:.1f} ms ({low / 1e3:.1f}–{high / 1e3:.1f})"


def ratio(row: Row, pair: str) -> str:
    """A ratio of medians, or a dash."""
    value = row["ratios"].get(pair)
    return "–" if value is None else f"{value:.2f}"


def span(values: Iterable[float | None]) -> str:
    """The range of some numbers, or a dash."""
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    low, high = f"{min(known):.2f}", f"{max(known):.2f}"
    return low if low == high else f"{low} – {high}"


def table(titles: Sequence[str], lines: Iterable[Sequence[str]], text: int = 1) -> str:
    """A table of GitHub's markdown; the first columns are text, the others are numbers."""
    rules = [":--"] * text + ["--:"] * (len(titles) - text)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, rules, *lines))


# The page ----------------------------------------------------------------------------------------------------------


def overview(record: Record) -> str:
    """The ratios to remember, by group of settings, with a quarter missing."""
    groups: dict[str, list[Row]] = {}
    for row in rows(record, "table10"):
        groups.setdefault("the paper's nine settings", []).append(row)
    for row in (*rows(record, "large"), *rows(record, "cpu")):
        if row["setting"]["share"] == 1 / 4:
            groups.setdefault(f"{layer(row)}, K = {row['setting']['components']}", []).append(row)

    def cell(chosen: list[Row], kind: str, pair: str, what: str = "ratios") -> str:
        return span(r.get(what, {}).get(pair) for r in chosen if r["kind"] == kind)

    columns: dict[str, tuple[str, str, str]] = {
        "forward": ("forward", "misconv/conv", "ratios"),
        "forward, CUDA graphs": ("forward", "misconv_graph/conv_graph", "ratios"),
        "forward + backward": ("weights", "misconv/conv", "ratios"),
        "… and the density": ("everything", "misconv/conv", "ratios"),
        "peak memory": ("weights", "misconv/conv", "memory_ratios"),
        "peak memory, … and the density": ("everything", "misconv/conv", "memory_ratios"),
        "plain PyTorch, forward": ("forward", "plain/conv", "ratios"),
        "plain PyTorch, forward + backward": ("weights", "plain/conv", "ratios"),
    }
    lines = [[group, *(cell(chosen, *column) for column in columns.values())] for group, chosen in groups.items()]
    kept = [i for i in range(len(columns) + 1) if any(line[i] != "–" for line in lines)]
    titles = ["times conv + ReLU", *columns]
    return table([titles[i] for i in kept], [[line[i] for i in kept] for line in lines])


def checks(record: Record) -> str:
    """The largest errors of the checks that came before the timing."""
    found = []
    for mode, bound in BOUNDS.items():
        chosen = [c for c in record["checks"] if c["mode"] == mode]
        if chosen:
            output = max(c["errors"]["output"] for c in chosen)
            gradient = max(e for c in chosen for name, e in c["errors"].items() if name != "output")
            plain = max(e for c in chosen for e in c["plain_errors"].values())
            cells = (f"{output:.1e}", f"{gradient:.1e}", f"{plain:.1e}", f"{bound:.0e}")
            found.append([MODES[mode], *cells, str(len(chosen))])
    titles = ["arithmetic", "output", "gradients", "plain path in the same arithmetic, either", "bound", "checks"]
    return table(titles, found)


def table10(record: Record) -> str:
    """The paper's Table 10, its numbers beside ours."""
    lines = []
    for row in rows(record, "table10", "forward"):
        paper = row["paper"]
        printed = (
            f"{1e6 * paper['conv_s']:.0f} ± {1e6 * paper['conv_sd_s']:.0f}",
            f"{1e6 * paper['misconv_s']:.0f} ± {1e6 * paper['misconv_sd_s']:.0f}",
            f"{paper['misconv_s'] / paper['conv_s']:.1f}",
        )
        eager = [took(row, "conv"), took(row, "misconv"), ratio(row, "misconv/conv"), took(row, "plain")]
        graph = [took(row, "conv_graph"), took(row, "misconv_graph"), ratio(row, "misconv_graph/conv_graph")]
        lines.append([layer(row), *printed, *eager, *(graph if "conv_graph" in row["times"] else [])])
    titles = ["setting", "paper: conv, µs", "paper: MisConv, µs", "ratio"]
    titles += ["conv + ReLU", "MisConv", "ratio", "plain PyTorch", "graph: conv + ReLU", "graph: MisConv", "ratio"]
    return table(titles[: len(lines[0])], lines)


def training(found: list[Row]) -> str:
    """Times and memory of forward and backward passes."""
    lines = []
    for row in found:
        s, memory = row["setting"], row.get("memory", {})
        peaks = [f"{memory[name]['added_mb']:.0f}" if name in memory else "–" for name in ("conv", "misconv", "plain")]
        lines.append(
            [
                f"{layer(row)}, K = {s['components']}",
                {"forward": "nothing", "weights": "weight, bias", "everything": "… and the density"}[row["kind"]],
                took(row, "conv"),
                took(row, "misconv"),
                took(row, "plain"),
                ratio(row, "misconv/conv"),
                ratio(row, "misconv/conv_image"),
                *(peaks if any(r.get("memory") for r in found) else []),
            ]
        )
    titles = ["setting", "gradient of", "conv + ReLU", "MisConv", "plain PyTorch", "ratio", "ratio to ∇image"]
    titles += ["MB: conv + ReLU", "MB: MisConv", "MB: plain PyTorch"]
    return table(titles[: len(lines[0])], lines, text=2)


def by_share(measured: list[Row], kinds: Sequence[str]) -> str:
    """Ratios to conv + ReLU: a line for every layer, K, L and kind, a column for every share."""
    missing = sorted({row["setting"]["share"] for row in measured})
    words = {"forward": "forward", "weights": "forward + backward", "everything": "… and the density"}
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in measured:
        s = row["setting"]
        if row["kind"] in kinds:
            key = (f"{layer(row)}, K = {s['components']}, L = {s['rank']}", words[row["kind"]])
            lines.setdefault(key, {})[s["share"]] = ratio(row, "misconv/conv")
            if "plain" in row["times"]:
                lines.setdefault((key[0], f"{key[1]}, plain PyTorch"), {})[s["share"]] = ratio(row, "plain/conv")
    titles = ["setting", "pass", *(f"{100 * share:g} %" for share in missing)]
    cells = [[*key, *(found.get(share, "–") for share in missing)] for key, found in lines.items()]
    return table(titles, cells, text=2)


def likelihood(record: Record) -> str:
    """Time and memory of `MFA.log_prob`."""
    lines = []
    for row in rows(record, "nll"):
        for name, title in (("misconv", "misconv"), ("plain", "plain PyTorch")):
            peak = row.get("memory", {}).get(name)
            lines.append([title, took(row, name), f"{peak['added_mb']:.0f}" if peak else "–"])
    return table(["path", "log_prob, forward + backward", "peak MB"], lines)


def circumstances(record: Record) -> str:
    """Where the numbers come from, in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items() if number)
    flags = ", ".join(f"{name} {'on' if value else 'off'}" for name, value in record["flags"].items())
    cuda = record["versions"]["cuda"]
    load = record["load_average"]
    busy = "" if cuda or load is None else f" Load average before the run: {load:.1f}."
    quick = " **A quick run on tiny settings: these numbers mean nothing.**" if record["settings"]["quick"] else ""
    threads = f"{record['threads']} CPU thread{'s' if record['threads'] > 1 else ''}"
    return (
        f"{record['device']}, {threads}; {versions}; commit {record['commit'] or 'unknown'}; "
        f"seed {record['settings']['seed']}{'; ' + flags if cuda else ''}.{busy}{quick}"
    )


# Networks ----------------------------------------------------------------------------------------------------------

MODELS = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "efficientnet_b0": "EfficientNet-B0",
    "convnext_tiny": "ConvNeXt-T",
    "regnet_y_400mf": "RegNet-Y-400MF",
}
NUMBERS = {"float32": "float32 (TF32)", "bfloat16": "bfloat16, channels_last"}
NETWORKS = """\
Images of 224×224 pixels, a quarter missing in one square, K = 1, L = 4; training is a whole step with SGD. *MFA given*:
the converted network is given the density of its images; *with density*: it is given the images, and a `UNetDMFA`
(`patch=4`) speaks first. Shares of the plain network's images per second. The density is not trained, so its memory is
that of evaluation. Where a network is small, an eager step is bound by the host, which has more to do for a converted
network; a CUDA graph leaves that out."""


def network_name(row: Row) -> str:
    """The network in the words of its authors."""
    return MODELS[row["setting"]["model"]]


def measured_models(record: Record) -> set[str]:
    """The networks that a record is about."""
    return {row["setting"]["model"] for row in rows(record, "network")}


def with_newer(record: Record, newer: Record | None) -> Record:
    """A record whose rows are replaced by newer ones of the same settings."""
    again = {json.dumps(row["setting"]): row for row in rows(newer or {"sections": {}}, "network")}
    merged = [again.get(json.dumps(row["setting"]), row) for row in rows(record, "network")]
    return {**record, "sections": {"network": merged}}


def about_newer(newer: Record) -> str:
    """What was measured again, and at which commit."""
    found = rows(newer, "network")
    names = list(dict.fromkeys(network_name(row) for row in found))
    return f"Measured again, {len(found)} rows of {' and '.join(names)}: {circumstances(newer)}"


def networks(record: Record) -> str:
    """A line for every network, task, type and batch; eager and as a CUDA graph beside each other."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows(record, "network"):
        s, given = row["setting"], row["ratios"]["network/given"]
        key = (network_name(row), s["task"], NUMBERS[s["mode"]], str(s["batch"]))
        line = lines.setdefault(key, ["–"] * 8)
        begin = 3 if s["graph"] else 0
        speed = 1e6 * s["batch"] / row["times"]["network"]["median_us"]
        line[begin : begin + 3] = [f"{speed:,.0f}", f"{given:.2f}", f"{row['ratios']['network/density']:.2f}"]
        if "memory_ratios" in row:
            line[6:] = [f"{row['memory_ratios'][pair]:.2f}" for pair in ("given/network", "density/network")]
    titles = ["network", "task", "numbers", "batch", "plain, images/s", "MFA given", "with density"]
    titles += ["graph: plain, images/s", "MFA given", "with density", "memory: MFA given", "with density"]
    return table(titles, [[*key, *line] for key, line in lines.items()], text=3)


def draw_networks(record: Record) -> Figure:
    """Shares of the plain network's speed as bars, of CUDA graphs where there are any; a panel for each task."""
    found = rows(record, "network")
    panels = list(dict.fromkeys((r["setting"]["task"], r["setting"]["mode"]) for r in found))
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4), layout="constrained", sharey=True, squeeze=False)
    for axis, (task, mode) in zip(axes[0], panels, strict=True):
        chosen: dict[str, Row] = {}
        for row in found:
            if (row["setting"]["task"], row["setting"]["mode"]) == (task, mode):
                chosen[f"{network_name(row)}, {row['setting']['batch']}"] = row  # a graph comes behind its eager row
        places = range(len(chosen))
        for shift, (pair, label, colour) in enumerate(
            (("network/given", "MFA given", "#c2185b"), ("network/density", "with density", "#2b7bba"))
        ):
            shares = [row["ratios"][pair] for row in chosen.values()]
            axis.bar([place + 0.4 * shift for place in places], shares, 0.38, label=label, color=colour)
        axis.axhline(1, color="#4d4d4d", linewidth=1)
        axis.set_xticks([place + 0.2 for place in places], chosen, fontsize=9, rotation=90)
        axis.set_title(f"{task}, {NUMBERS[mode].split(',')[0]}", fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("share of the plain network's speed")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, fontsize=12)
    return figure


def norms(record: Record) -> str:
    """Convolution, BatchNorm and ReLU in training."""
    lines = []
    for row in rows(record, "norm"):
        peak = f"{row['memory_ratios']['misconv/conv']:.2f}" if "memory_ratios" in row else "–"
        lines.append([layer(row), took(row, "conv"), took(row, "misconv"), ratio(row, "misconv/conv"), peak])
    return table(["setting", "conv + BatchNorm + ReLU", "MisConv", "ratio", "ratio of peak memory"], lines)


KERNELS = """\
Where the time goes beyond that of the plain network: one step, all of its kernels together and those that differ most,
as the GPU's profiler saw them. The first layer of a converted network is computed by kernels of ours, which take the
place of a convolution, its BatchNorm and its ReLU, forward and backward; all else is the same."""
OWN = {
    "window_moments_kernel": "statistics of the batch: second moments of all windows",
    "tap_sums_kernel": "statistics of the batch: sums over all images",
    "arrange_kernel": "pixels arranged, for their correlations and for windows without a missing one",
    "correlation_kernel": "statistics of the batch: correlations of pixels",
    "assemble_kernel": "statistics of the batch: second moments of all windows, from correlations",
    "fold_kernel": "BatchNorm folded into the filters",
    "fold_fixed_kernel": "a fixed BatchNorm folded into the filters",
    "gather_kernel": "statistics of the batch: second moments of all windows, added up",
    "unfold_kernel": "gradients through that folding",
    "forward_kernel": "expected activation",
    "backward_kernel": "gradients of the filters, where pixels are missing",
    "complete_kernel": "gradients of the filters, where none are",
    "find_touched_kernel": "which tiles of the response hold missing pixels",
    "order_kernel": "these tiles first",
    "largest_kernel": "the largest pixel of every image, for float16 operands",
    "balance_kernel": "filters as float16 operands: how uneven channels are",
    "halve_filters_kernel": "filters as float16 operands",
}


def kernels(row: Row) -> str:
    """The kernels of a step in which plain and converted network differ."""

    def spent(us: float, calls: float) -> str:
        return f"{us:,.0f} µs ({calls:g})" if calls else "–"

    lines = [["**all kernels**", f"{row['plain_us']:,.0f} µs", f"{row['given_us']:,.0f} µs"]]
    for each in row["kernels"]:
        plain, given = (spent(each[f"{which}_us"], each[f"{which}_calls"]) for which in ("plain", "given"))
        name = f"{OWN[each['kernel']]} (ours)" if each["kernel"] in OWN else f"`{each['kernel'][:70]}`"
        lines.append([name, plain, given])
    return table(["kernel", "plain (launches)", "converted, MFA given (launches)"], lines)


METHOD = """\
Measured by `misconv bench`. The fast path is first checked against the plain one in float64, on fresh random inputs,
with outputs poisoned by NaN; nothing is timed if that fails. Then all contenders of a row take turns in bursts of up to
50 calls, timed by the GPU's events (on a CPU by its clock), so that the cost of launching counts as it does for a user.
The numbers are the median of the bursts and, in brackets, their quartiles. Inputs are random, and up to eight sets of
them rotate.

- Forward passes run without gradients. Backward passes are given a fixed random gradient of the output and return the
  gradients of weight and bias or, *… and the density*, also of means, factors and noise (and the weights of several
  components).
- *conv + ReLU* sees complete images and, in backward passes, has the gradients of its weight and bias.
- *ratio*: MisConv / conv + ReLU; *to ∇image*: to conv + ReLU that also has the gradient of its images.
- *Plain PyTorch* is the same layer under `misconv.plain()`.
- *Peak memory* (MB: 10⁶ bytes) is what one call allocates on top of its inputs, its results included.
- One square of every image is missing, a quarter of its area, and L = 4, unless it says otherwise."""


RIGHT = """\
Largest ‖result − reference‖ / ‖reference‖ over all checks; the reference is the plain path in float64. Long float32
sums, such as the gradients of weight and bias, can lose more digits than the bound in torch itself: there the layer may
err twice as much as plain PyTorch does, and no more. With TF32 the yardstick is exact arithmetic on operands rounded to
TF32: where little is missing under a filter, the gradient of the noise is steep in the rounding of the mean, whoever
computes it."""


def page(records: dict[str, Record], picture: str | None, more: dict[str, Record]) -> str:
    """The document, from whatever was measured."""
    sources = [RECORDS[d] for d in records] + [MORE[name] for name in more]
    parts = [
        f"<!-- made by tools/speed.py from {' and '.join(sources)}; do not edit -->",
        "# How fast it is",
    ]
    add: Callable[..., None] = lambda *blocks: parts.extend(blocks)  # noqa: E731
    if "network" in more:
        add("## Networks", circumstances(more["network"]))
        add(*(about_newer(more[name]) for name in AGAIN if name in more), NETWORKS)
        add("![Shares of the plain network's speed](pictures/networks.png)")
        add("*As CUDA graphs; the number behind a network is its batch.*", networks(more["network"]))
        if missing := [title for name, title in MODELS.items() if name not in measured_models(more["network"])]:
            add(f"Not measured yet: {', '.join(missing)}.")
    if "large" in more:
        add(
            "### A first layer with BatchNorm in training",
            "Forward and backward, with the gradients of its parameters. " + circumstances(more["large"]),
            norms(more["large"]),
        )
    if "kernels" in more:
        record = more["kernels"]
        add("### Kernel by kernel", f"{KERNELS} {record['device']}, torch {record['versions']['torch']}; commit "
            f"{record['commit']}.")  # fmt: skip
        for row in record["rows"]:
            add(f"{row['setting']}:", kernels(row))
    for device, record in records.items():
        add(f"## {'On a GPU' if device == 'cuda' else 'On a CPU'}", circumstances(record))
        if device == "cuda" and "large" in more:
            add("Large images and the training of a density were measured again: " + circumstances(more["large"]))
        if any(rows(record, section) for section in ("table10", "large", "cpu")):
            add(
                "Time and memory as multiples of convolution + ReLU, a quarter missing (smallest to largest):",
                overview(record),
            )
        if rows(record, "growth") and picture:
            add(
                f"![Time against image size, batch, share of missing pixels, components and rank]({picture})",
                "One number varied at a time around 64×3×64×64, 3×3→32, K = 1, L = 4, a quarter missing.",
            )
        add("### Is it right?", RIGHT, checks(record))
        if rows(record, "table10"):
            add(
                "### The paper's settings",
                "Forward pass, as in Table 10 of Przewięźlikowski et al. (WACV 2022), whose numbers were measured on a "
                "GeForce GTX 1080 or RTX 2080: mean ± standard deviation of 5000 passes. *graph*: the layer inside a "
                "CUDA graph, which leaves the cost of launching out.",
                table10(record),
                "Forward and backward:",
                training([r for r in rows(record, "table10") if r["kind"] != "forward"]),
            )
        if rows(record, "large"):
            add("### Large images", training(rows(record, "large")))
        if rows(record, "shares"):
            add(
                "### By how much is missing",
                "MisConv / conv + ReLU:",
                by_share(rows(record, "shares"), ("forward", "weights", "everything")),
            )
        if rows(record, "cpu"):
            add(
                "### By how much is missing" if not rows(record, "shares") else "### The CPU's settings",
                "Times conv + ReLU:",
                by_share(rows(record, "cpu"), ("forward", "weights", "everything")),
                training([r for r in rows(record, "cpu") if r["setting"]["share"] == 1 / 4]),
            )
        if rows(record, "nll"):
            add(
                "### Training a density",
                f"`MFA.log_prob` of {layer(rows(record, 'nll')[0]).split(',')[0]} images, K = 1, L = 4.",
            )
            add(likelihood(record))
    skipped = sorted(
        {
            why
            for r in records.values()
            for s in r["sections"]
            for row in rows(r, s)
            for why in row.get("skipped", {}).values()
        }
    )
    if skipped:
        add(f"A dash for plain PyTorch: left out, it {'; '.join(skipped)}.")
    add("## Method", METHOD)
    return "\n\n".join(parts) + "\n"


# The picture -------------------------------------------------------------------------------------------------------


def draw(record: Record) -> Figure:
    """Two rows, forward and forward + backward; a panel for every number that is varied."""
    plt.rcParams.update({"font.size": 12, "axes.titlesize": 12.5, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(
        len(KINDS), len(PANELS), figsize=(13, 6), layout="constrained", sharey="row", sharex="col", squeeze=False
    )
    for line, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for axis, varied in zip(line, PANELS, strict=True):
            panel(axis, [r for r in rows(record, "growth", kind) if r["varied"] == varied], varied)
        line[0].set_ylabel(f"{title}\ntime of a call")
    for axis, label in zip(axes[-1], PANELS.values(), strict=True):
        axis.set_xlabel(label)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(LINES), frameon=False, fontsize=13)
    return figure


def panel(axis: Axes, found: list[Row], varied: str) -> None:
    """Time against one number: logarithmic where it is a size, linear where it is a share or starts at 0."""
    for name, (label, colour, marker) in LINES.items():
        timed = [(row["setting"][varied], row["times"][name]) for row in found if name in row["times"]]
        points = sorted(timed, key=lambda point: point[0])
        x = [value * (100 if varied == "share" else 1) for value, _ in points]
        y = [t["median_us"] / 1e3 for _, t in points]
        axis.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=2, label=label)
        # Quartiles, where they can be seen at all.
        low, high = ([t["quartiles_us"][i] / 1e3 for _, t in points] for i in (0, 1))
        axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axis.set_yscale("log")
    ticks = sorted({row["setting"][varied] for row in found})
    if varied == "share":
        axis.set_xticks([0, 25, 50, 75, 100])
    else:
        # A rank may be 0, which a logarithm does not know: straight up to 1, logarithmic from there.
        axis.set_xscale("symlog", linthresh=1, linscale=0.6, base=2) if 0 in ticks else axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g} ms" if ms >= 1 else f"{1e3 * ms:g} µs"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=11)
    axis.spines[["top", "right"]].set_visible(False)


# Writing -----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the records, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "bench")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args(arguments)
    found = {device: options.results / name for device, name in RECORDS.items()}
    records = {device: json.loads(path.read_text(encoding="utf-8")) for device, path in found.items() if path.exists()}
    if not records:
        raise SystemExit(f"no {' or '.join(RECORDS.values())} in {options.results}; run `misconv bench --out …` first")
    picture = None
    for record in records.values():
        if rows(record, "growth") and picture is None:  # the first that has curves; a GPU's, if there are both
            picture = "pictures/speed.png"
            (options.out / "pictures").mkdir(parents=True, exist_ok=True)
            figure = draw(record)
            figure.savefig(options.out / picture, dpi=150)  # sharp also on dense screens
            plt.close(figure)
    others = {name: options.results / file for name, file in MORE.items()}
    more = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in others.items() if path.exists()}
    if "large" in more and "cuda" in records:
        records["cuda"] = {**records["cuda"], "sections": {**records["cuda"]["sections"], **more["large"]["sections"]}}
    if "network" in more:
        for name in AGAIN:
            more["network"] = with_newer(more["network"], more.get(name))
        (options.out / "pictures").mkdir(parents=True, exist_ok=True)
        figure = draw_networks(more["network"])
        figure.savefig(options.out / "pictures" / "networks.png", dpi=150)
        plt.close(figure)
    (options.out / "speed.md").write_text(page(records, picture, more), encoding="utf-8")


if __name__ == "__main__":
    main()
