"""Write `density.md` and its picture from the records of `benchmarks/density.py`: `make docs` runs this.

    python tools/calibration.py [--results results/density] [--out docs]

Measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parent.parent
COSTS = ("network-newer-cuda.json", "network-cuda.json")  # of `misconv bench --only network`: the first that is there
# In this order; others follow by name.
TITLES = {
    "mnist": "MNIST, 28 px", "svhn": "SVHN (re-cropped), 32 px", "svhn-square": "SVHN, squares learned",
    "cifar10": "CIFAR-10 (JPEG), 32 px", "cifar10-square": "CIFAR-10, squares learned", "celeba": "CelebA-10k, 64 px",
    "photos32": "Photographs, crops of 32 px", "photos64": "Photographs, crops of 64 px",
    "depth": "Synthetic depth maps, 96 px", "scene": "Synthetic scene of 6 bands, crops of 64 px",
}  # fmt: skip
SHAPES = {
    "square": "square", "trapezoid": "trapezoid", "noise": "noise", "stripes": "stripes", "free_form": "free form",
}  # fmt: skip
FILLS = {
    "nearest": "nearest pixel", "push_pull": "push–pull", "biharmonic": "biharmonic", "telea": "Telea",
    "navier_stokes": "Navier–Stokes",
}  # fmt: skip
COLOURS = {
    "square": "#c2185b",
    "trapezoid": "#2b7bba",
    "noise": "#2a9d5c",
    "stripes": "#d98324",
    "free_form": "#777777",
}

Record = dict[str, Any]
Row = dict[str, Any]

INTRODUCTION = """# Can the densities be believed?

<!-- Made by tools/calibration.py from results/density/*.json; `make docs` makes it again. -->

`UNetDMFA` was trained by the recipe of `fit_density` on incomplete images, and asked about pixels of test images that
it never saw. In training one region of every image was missing for good: a square, a trapezoid, noise or stripes,
whichever came up ("mixed"), or always the shape that is named. Squares, stripes and free forms cover a quarter of the
image, trapezoids half, noise three quarters. Free forms were never learned. Depth maps lack two fifths of their pixels,
scenes stripes or clouds of free form, which were learned there. For images of your own `misconv.assess` gives the
same figures.

- **RMSE** of the mean, and of the best fill that learns nothing: nearest pixel, push–pull, biharmonic (scikit-image),
  Telea and Navier–Stokes (OpenCV), which may be a different one for every line.
- **claimed / real**: the deviation that the density claims over its RMSE; 1 is right, above it is timid.
- **inside 50 / 90 %**: the share of hidden pixels in the central interval that should hold 50 and 90 % of them.
- **layer**: the error of the expected responses of 32 random 3×3 filters with ReLU, over that of the responses to the
  mean image; below 1 the expectation is worth something.
- **NLL**: −log density of all hidden pixels of an image together.

Below each table stands how its densities were trained. With one component the objective `"joint+marginal+error"` is
that of today, `"joint+marginal+moments"`, by [another name](maths.md#density-networks).

![Nominal against measured coverage for every data set and shape](pictures/reliability.png)

*Nominal against measured coverage of central intervals, with three components and rank 4 where that was trained. The
grey band is ten points wide each way.*

**Where it falls short.** Most pixels of a digit are exactly 0. An interval holds all of such a heap of equal values or
nothing of it, so that no continuous distribution has the right share of them inside. Depth maps are smooth but for a
few edges, and a pixel is either well known or hardly at all: too many lie inside every interval. Most errors on
photographs are small and some are large: one Gaussian has up to seventeen points too much inside its 50 % interval, and
with three components the left halves of two photographs teach a little more than the right halves bear out, with 85 to
91 % inside the 90 % interval. Where every hole is one or two pixels wide (noise, stripes) and the images are smooth, as
with SVHN, deviations are small beside the responses, and the expectation is worth little more than the mean.
"""


def main() -> None:
    """Read all records, write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "density")
    parser.add_argument("--bench", type=Path, default=ROOT / "results" / "bench")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in options.results.glob("*.json")}
    order = sorted(found, key=lambda name: ([*TITLES].index(name) if name in TITLES else len(TITLES), name))
    records = {name: found[name] for name in order}
    sections = [section(name, record) for name, record in records.items()]
    measured = [options.bench / name for name in COSTS if (options.bench / name).exists()]
    sections += [cost(json.loads(path.read_text(encoding="utf-8"))) for path in measured[:1]]
    (options.out / "density.md").write_text("\n".join([INTRODUCTION, *sections]), encoding="utf-8")
    mixed = {name: record for name, record in records.items() if any(r["learned"] == "mixed" for r in record["rows"])}
    draw(mixed, options.out / "pictures" / "reliability.png")


def section(name: str, record: Record) -> str:
    """One data set: a line for every shape and density, and how it was made."""
    lines = [
        f"## {TITLES.get(name, name)}\n",
        "| learned | tested | K, L | RMSE | best fill | claimed / real | inside 50 / 90 % | layer | NLL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [line(row, record["fills"]) for row in sorted(record["rows"], key=place)]
    beyond = max(row["out_of_bounds"] for row in record["rows"])
    rounding = 1e-7  # of float32, as a share of the range
    kept = f"By {beyond:.2g} of the range a mean or variance was beyond its bound (float32 rounds by 1.2e−07)."
    if beyond <= rounding:
        kept = "No mean or variance was beyond its bound" + (" by more than rounding." if beyond > 0 else ".")
    runs = {number: [row for row in record["rows"] if row["run"] == number] for number in range(len(record["runs"]))}
    made = [(how_made(record["runs"][number], rows), rows) for number, rows in runs.items() if rows]
    told = [text if len(made) == 1 else f"{densities(rows)}: {text}" for text, rows in made]
    return "\n".join([*lines, f"\n{kept} {' '.join(told)}\n"])


def how_made(run: Record, rows: list[Row]) -> str:
    """One call of `benchmarks/density.py`."""
    settings = run["settings"]
    seconds = sum({(row["learned"], row["components"], row["rank"]): row["seconds"] for row in rows}.values())
    return (
        f"`patch={settings['patch']}`{size(settings)}; "
        f'`objective="{settings["objective"]}"`; {rows[0]["steps"]:,.0f} steps of {settings["batch_size"]} images'
        f"{', mirrored and moved' if settings['augment'] else ''}; training {seconds:,.0f} s in all, side by side and "
        f"with others on {run['device']}; commit `{run['commit'][:7]}`, torch {run['versions']['torch']}."
    )


def densities(rows: list[Row]) -> str:
    """Those of some rows, by their components."""
    return "K = " + " and ".join(str(components) for components in sorted({row["components"] for row in rows}))


def size(settings: Record) -> str:
    """That of the network, where it is not the one by default."""
    named = [f"`{name}={tuple(settings[name])}`" for name in ("widths", "depths") if name in settings]
    by_default = ["`widths=(32, 48, 64, 96, 96)`", "`depths=(1, 1, 2, 2, 2)`"]
    return "" if named == by_default else "".join(f", {text}" for text in named)


def cost(record: Record) -> str:
    """What a density costs on one device, alone and before a network."""
    found = [row for row in record["sections"]["network"] if row["kind"] == "evaluation"]
    most = max(row["setting"]["batch"] for row in found)
    chosen = [row for row in found if row["setting"]["batch"] == most and row["setting"]["model"] == "resnet50"]
    setting, about = chosen[0]["setting"], chosen[0]["density"]
    lines = [
        f"## What it costs on {record['device']}\n",
        f"Images of {setting['size']}×{setting['size']}, {most} at a time, a square of a quarter missing; `UNetDMFA` "
        f"with K = {setting['components']}, L = {setting['rank']}, `patch={setting['patch']}`: "
        f"{about['parameters']:,} parameters, {about['gflop_per_image']:.2f} GFLOP per image. All networks are in "
        "[How fast it is](speed.md#networks).\n",
        "| numbers | | density alone, ms | its MFA, MB | ResNet-50, ms | with density, ms | share of its speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in chosen:
        times = {name: f"{row['times'][name]['median_us'] / 1e3:.1f}" for name in ("alone", "network", "density")}
        how = "CUDA graph" if row["setting"]["graph"] else "eager"
        lines.append(
            f"| {row['setting']['mode']} | {how} | {times['alone']} | {row['density']['out_mb']:,.0f} | "
            f"{times['network']} | {times['density']} | {row['ratios']['network/density']:.2f} |"
        )
    return "\n".join(lines) + f"\n\nCommit `{record['commit'][:7]}`, torch {record['versions']['torch']}.\n"


def place(row: Row) -> tuple[Any, ...]:
    """Where a row stands in its table."""
    return row["learned"], [*SHAPES].index(row["tested"]), row["components"], row["rank"]


def line(row: Row, fills: dict[str, dict[str, float]]) -> str:
    """One row of a table."""
    name, error = best_fill(row, fills[row["tested"]])
    learned = row["learned"] if row["learned"] == "mixed" else SHAPES[row["learned"]]
    inside = f"{100 * row['coverage_50']:.0f} / {100 * row['coverage_90']:.0f}"
    return (
        f"| {learned} | {SHAPES[row['tested']]} | {row['components']}, {row['rank']} | {row['rmse']:.4f} | "
        f"{error:.4f} {FILLS[name]} | {row['ratio']:.2f} | {inside} | {row['layer']:.3f} | {row['nll_image']:,.0f} |"
    ).replace("-", "−")


def best_fill(row: Row, fills: dict[str, float]) -> tuple[str, float]:
    """The fill with the least error; those tried on fewer images are scaled by push–pull, which has both."""
    scale = row["push_pull_rmse"] / fills["push_pull"]
    errors = {name: scale * error for name, error in fills.items()}
    errors |= {"nearest": row["nearest_rmse"], "push_pull": row["push_pull_rmse"]}
    best = min(errors, key=lambda name: errors[name])
    return best, errors[best]


def draw(records: dict[str, Record], path: Path) -> None:
    """Reliability of every data set."""
    columns = min(len(records), 4)
    rows = -(-len(records) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.1 * columns + 0.6, 3.1 * rows + 0.5), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(records) :]:
        axis.set_axis_off()
    for axis, (name, record) in zip(axes.flat, records.items(), strict=False):
        panel(axis, name, record)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3 if columns == 1 else len(labels), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def panel(axis: Axes, name: str, record: Record) -> None:
    """One data set: a line for every shape that was tested."""
    axis.plot([0, 100], [0, 100], color="#bbbbbb", linewidth=1)
    axis.fill_between([0, 100], [-10, 90], [10, 110], color="#f0f0f0", linewidth=0)
    likest = max(record["rows"], key=lambda row: (row["components"] == 3, row["rank"] == 4, row["learned"] == "mixed"))
    for row in record["rows"]:
        if all(row[key] == likest[key] for key in ("components", "rank", "learned")):
            level, share = zip(*row["calibration"], strict=True)
            colour, title = COLOURS[row["tested"]], SHAPES[row["tested"]]
            axis.plot([100 * v for v in level], [100 * v for v in share], color=colour, linewidth=1.6, label=title)
    axis.set(title=TITLES.get(name, name).replace("crops of ", ""), xlim=(0, 100), ylim=(0, 100), aspect="equal")
    axis.set(xlabel="nominal, %", ylabel="measured, %", xticks=[0, 50, 90], yticks=[0, 50, 90])


if __name__ == "__main__":
    main()
