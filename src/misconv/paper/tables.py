"""The paper's tables, with our numbers beside the printed ones.

Accuracies are means ± standard deviations over seeds, differences are paired by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from misconv.paper import printed
from misconv.paper.methods import BY_NAME, METHODS, OURS
from misconv.paper.printed import CLASSIFIED, TITLES
from misconv.paper.scores import (
    Margin,
    Record,
    Scores,
    best_margin,
    holm,
    how_tested,
    margin,
    of,
    of_method,
    scores,
    title_of,
)

__all__ = [
    "FROM",
    "NOTHING",
    "NOT_YET",
    "NUMBERS",
    "PRINTED",
    "STARS",
    "Table",
    "as_number",
    "cells_of",
    "compared",
    "datasets_of",
    "legend",
    "make",
    "over_seeds",
    "seed_count",
    "shown",
]

NUMBERS = (1, 2, 6, 7, 8, 9, 10)
SHAPES = ("square", "trapezoid", "noise")
FLOW = "ACFlow"  # among the densities
# A density's measures: title, decimals here, the better end. The paper prints two decimals.
MEASURES = {"nll": ("NLL", 2, min), "mse": ("MSE", 2, min), "psnr": ("PSNR", 2, max), "ssim": ("SSIM", 3, max)}

NOTHING, NOT_YET = "–", "not measured yet"
FROM, PRINTED = " (paper)", "printed in the paper"
STARS = "* trained on complete images: of ACFlow the flow that fills in; GT is tested on them, too."


@dataclass(frozen=True)
class Table:
    """A table in words: titles of columns, rows of cells, notes below.

    The best cells are bold as in markdown, `**.926**`; the first `text` columns are words, the others numbers.
    """

    number: int | str | None
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    text: int = 1

    @property
    def heading(self) -> str:
        """Number and title."""
        return self.title if self.number is None else f"Table {self.number}: {self.title}"

    def plain(self) -> Table:
        """The same without the marks of bold cells."""
        return replace(self, rows=[[cell.replace("**", "") for cell in row] for row in self.rows])

    def markdown(self) -> str:
        """The table and its notes in GitHub's markdown, without the heading."""
        rules = [":--"] * self.text + ["--:"] * (len(self.columns) - self.text)
        lines = [_line(self.columns), _line(rules), *(_line(row) for row in self.rows)]
        notes = ["- " + note.replace("*", "\\*") for note in self.notes]
        return "\n".join(lines) + ("\n\n" + "\n".join(notes) if notes else "")


def make(
    number: int,
    records: Sequence[Record],
    datasets: Sequence[str] | None = None,
    benchmark: Mapping[str, Any] | None = None,
) -> Table:
    """The paper's table of that number.

    Args:
        number: 1 and 2 (accuracy on incomplete and on complete images), 6 (SMFA and DMFA), 7 (quality of the
            densities), 8 (MFA imputation and MisConv), 9 (shapes of missing regions) or 10 (time).
        records: what the experiments wrote; those of other tables are passed over.
        datasets: names of the data sets to show; those with records if left out, the paper's if there are none.
        benchmark: what `misconv bench` wrote on a GPU, for Table 10.
    """
    match number:
        case 1 | 2:
            return _accuracy(number, records, datasets)
        case 6 | 8:
            return _two(number, records, datasets)
        case 7:
            return _quality(records, datasets)
        case 9:
            return _shapes(records, datasets)
        case 10:
            return _times(benchmark)
    there = ", ".join(str(n) for n in NUMBERS)
    raise ValueError(f"table must be one of {there}, got {number!r}; of 3, 4 and 5 it is make_generation")


# The tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Two columns: a data set with one shape of missing regions, printed and here."""

    title: str
    heads: tuple[str, str]
    dataset: str
    shape: str
    printed: Mapping[str, float]


def _accuracy(number: int, records: Sequence[Record], datasets: Sequence[str] | None) -> Table:
    mine = of(records, kind="classification", shape="square")
    images = "incomplete" if number == 1 else "complete"
    groups = []
    for dataset in datasets_of(mine, datasets):
        title = title_of(mine, dataset)
        numbers = printed.incomplete(dataset) if number == 1 else printed.TABLE2.get(dataset, {})
        heads = (TITLES.get(dataset, dataset) + FROM, _here(title))
        groups.append(_Group(title, heads, dataset, "square", numbers))
    notes = ["The paper prints MFA imputation in its Table 8 and MisConv (SMFA) in its Table 6."]
    told = notes if number == 1 and any(group.printed for group in groups) else []
    return _methods(number, f"Accuracy on {images} test images", mine, groups, f"accuracy_{images}", told)


def _shapes(records: Sequence[Record], datasets: Sequence[str] | None) -> Table:
    mine = of(records, kind="classification")
    other = [r["dataset"] for r in mine if r["shape"] in SHAPES[1:]]
    chosen = list(datasets or dict.fromkeys(other) or ["mnist"])
    groups = []
    for dataset in chosen:
        for shape in SHAPES:
            title = f"{title_of(mine, dataset)}, {shape}"
            head = shape if len(chosen) == 1 else title
            numbers = printed.TABLE9.get(dataset, {}).get(shape, {})
            groups.append(_Group(title, (head + FROM, _here(head)), dataset, shape, numbers))
    told = ["Missing: a square of 1/4 of the area, a trapezoid of 1/2, or 3/4 of the pixels, at random (noise)."]
    if "mnist" in chosen:
        told.append("For the square, the paper prints .925 (mask), .875 (k-NN) and .990 (GT) in its Table 1.")
    names = ", ".join(title_of(mine, dataset) for dataset in chosen)
    title = f"Accuracy by the shape of the missing region, {names}"
    return _methods(9, title, mine, groups, "accuracy_incomplete", told)


def _methods(
    number: int, title: str, records: Sequence[Record], groups: Sequence[_Group], key: str, told: Sequence[str]
) -> Table:
    """Methods by data sets or shapes, and below how far ours are ahead."""
    rows = {method.name: [method.starred] for method in METHODS}
    apart = [method.name for method in METHODS if method.sees_complete]
    ahead: list[tuple[str, Margin]] = []
    counts, shares = [], []
    for g in groups:
        found = {m: of_method(records, g.dataset, g.shape, m, key) for m in rows}
        counts.append((g.title, seed_count(found)))
        for method, cell in cells_of(found, apart=apart).items():
            follows = method == "acflow" and cell == NOTHING
            rows[method] += [as_number(g.printed.get(method)), NOT_YET if follows else cell]
        best = best_margin(records, g.dataset, g.shape, key)
        ahead += [] if best is None else [(g.title, best)]
        if number == 1 and g.dataset == "cifar10" and found["gt"] and found[OURS]:
            share = fmean(found[OURS].values()) / fmean(found["gt"].values())
            shares.append(f"{g.title}, {BY_NAME[OURS].title}: {share:.3f} × GT.")
    notes = [f"{over_seeds(counts)}. {STARS}", *told, *([legend(METHODS)] if number == 1 else [])]
    tested = how_tested([each for _, each in ahead])
    notes += [f"Compared with the baseline that has the best mean, seed by seed{f'; {tested}' * bool(tested)}."] * bool(
        ahead
    )
    notes += [*compared(ahead), *shares]
    columns = ["method", *(head for g in groups for head in g.heads)]
    return shown(Table(number, title, columns, list(rows.values()), notes))


def _two(number: int, records: Sequence[Record], datasets: Sequence[str] | None) -> Table:
    """Data sets by two methods."""
    mine = of(records, kind="classification", shape="square")
    numbers, names, what = (
        (printed.TABLE6, ("SMFA", "DMFA"), "Accuracy of MisConv with SMFA and with DMFA")
        if number == 6
        else (printed.TABLE8, ("MFA imputation", "MisConv"), "Accuracy with MFA imputation and with MisConv (DMFA)")
    )
    first, second = numbers["mnist"]
    rows, ahead, counts = [], [], []
    for dataset in datasets_of(mine, datasets):
        title, paper = title_of(mine, dataset), numbers.get(dataset, {})
        found = {m: of_method(mine, dataset, "square", m) for m in (first, second)}
        counts.append((title, seed_count(found)))
        rows.append([title, *(cell for m, ours in cells_of(found).items() for cell in (as_number(paper.get(m)), ours))])
        if all(found.values()):
            ahead.append((title, margin(second, found[second], first, found[first])))
    columns = ["data set", *(head for name in names for head in (name + FROM, _here(name)))]
    tested = how_tested([each for _, each in ahead])
    notes = [f"Accuracy on incomplete test images. {over_seeds(counts)}.{f' {tested}.' * bool(tested)}"]
    notes += compared(ahead)
    return shown(Table(number, what, columns, rows, notes))


def _quality(records: Sequence[Record], datasets: Sequence[str] | None) -> Table:
    mine = of(records, kind="density", shape="square")
    chosen = datasets_of(mine, datasets, ("svhn",))
    rows: list[list[str]] = []
    counts = []
    for dataset in chosen:
        title, numbers = title_of(mine, dataset), printed.TABLE7.get(dataset, {})
        names = [n for n in ("SMFA", "DMFA", FLOW) if n in numbers or of(mine, dataset=dataset, density=n)]
        block = {name: [title, f"{name} *" if name == FLOW else name] for name in names}
        for measure, (_, digits, better) in MEASURES.items():
            found = {name: scores(mine, measure, dataset=dataset, density=name) for name in names}
            for name, cell in cells_of(found, digits, better, apart=(FLOW,)).items():
                block[name] += [as_number(numbers.get(name, {}).get(measure), 2), cell]
        rows += block.values()
        images = {r["images"] for r in of(mine, dataset=dataset) if r.get("images")}
        counts += [f"{title}: {int(n):,}" for n in sorted(images)]
    over = f" ({'; '.join(counts)})" if counts else ""
    notes = [
        f"Each per image, then averaged over the test images{over}; the paper defines neither units nor averages.",
        "NLL of the hidden pixels in nats, values 0 to 1; MSE: sum of squared errors over them. Lower is better.",
        "PSNR (dB) and SSIM of the image filled with the most probable values. Higher is better. The mean PSNR is that "
        "of images with any error.",
    ]
    if of(mine, density=FLOW):
        notes.append("* not in the paper's table; trained on complete images, and filled with its best guess.")
    columns = [head for name, *_ in MEASURES.values() for head in (name + FROM, _here(name))]
    return shown(Table(7, "Quality of the densities", ["data set", "density", *columns], rows, notes, text=2))


def _times(benchmark: Mapping[str, Any] | None) -> Table:
    timed = [] if benchmark is None else benchmark["sections"].get("table10", [])
    forward = [row for row in timed if row["kind"] == "forward"]
    if benchmark is None or not forward:
        raise ValueError("Table 10 needs what `misconv bench --only table10 --out FILE` writes on a GPU")
    rows = []
    for row in forward:
        paper, times = row["paper"], (row["times"]["conv"], row["times"]["misconv"])
        before = [f"{1e6 * paper[k + '_s']:.0f} ± {1e6 * paper[k + '_sd_s']:.0f}" for k in ("conv", "misconv")]
        now = ["{:.1f} ({:.1f}–{:.1f})".format(t["median_us"], *t["quartiles_us"]) for t in times]
        ratios = f"{paper['misconv_s'] / paper['conv_s']:.1f}", f"{row['ratios']['misconv/conv']:.2f}"
        rows.append([f"{paper['size']}×{paper['size']}, batch {paper['batch']}", *before, ratios[0], *now, ratios[1]])
    names = ("convolution", "MisConv", "ratio")
    columns = ["images", *(f"{name}{FROM}" for name in names), *(f"{name} (here)" for name in names)]
    notes = [
        "Forward pass, µs. Paper: mean ± standard deviation of 5000 passes on a GeForce GTX 1080 or RTX 2080.",
        f"Here: median (quartiles) on {benchmark['device']}; the convolution has its ReLU, as MisConv has.",
    ]
    if benchmark["settings"]["quick"]:
        notes.append("A quick run on tiny settings: these times mean nothing.")
    return Table(10, "Time of the layer", columns, rows, notes)


# Records -----------------------------------------------------------------------------------------------------------


def datasets_of(records: Sequence[Record], asked: Sequence[str] | None, paper: Iterable[str] = CLASSIFIED) -> list[str]:
    """Those asked for, else those with records, the paper's first."""
    known = {r["dataset"]: None for r in records}
    return list(asked or sorted(known, key=lambda name: [*TITLES, name].index(name)) or paper)


# Words -------------------------------------------------------------------------------------------------------------


def as_number(value: float | None, digits: int = 3) -> str:
    """In the paper's tables and ours alike: .926, −1127.71."""
    return NOTHING if value is None else f"{value:.{digits}f}".removeprefix("0").replace("-", "−")


def cells_of(
    found: Mapping[str, Scores],
    digits: int = 3,
    better: Callable[[Iterable[float]], float] = max,
    apart: Sequence[str] = (),
) -> dict[str, str]:
    """Mean ± standard deviation of every row; the best in bold, also where several look alike."""
    means = {name: fmean(s.values()) for name, s in found.items() if s}
    rivals = [round(mean, digits) for name, mean in means.items() if name not in apart]
    best = better(rivals) if len(rivals) > 1 else None
    cells = {}
    for name, s in found.items():
        spread = f" ± {as_number(stdev(s.values()), digits)}" if len(s) > 1 else ""
        cell = as_number(means.get(name), digits) + spread
        bold = name in means and name not in apart and round(means[name], digits) == best
        cells[name] = f"**{cell}**" if bold else cell
    return cells


def legend(rows: Iterable[Any]) -> str:
    """What each row does; rows have a title and a description."""
    return f"What the rows do. {'; '.join(f'{row.title}: {row.description}' for row in rows)}."


def compared(ahead: Sequence[tuple[str, Margin]]) -> list[str]:
    """A line for every comparison, after what it is about; p corrected for all of them."""
    corrected = holm([each for _, each in ahead])
    return [f"{title}, {each}." for (title, _), each in zip(ahead, corrected, strict=True)]


def seed_count(found: Mapping[str, Scores]) -> str:
    """How many seeds the rows have."""
    counts = [len(s) for s in found.values() if s] or [0]
    return f"{min(counts)} to {max(counts)}" if max(counts) > min(counts) else str(min(counts))


def over_seeds(counts: Sequence[tuple[str, str]]) -> str:
    """Mean and spread, and over how many seeds."""
    seeds = f"{counts[0][1]} seed{'s' * (counts[0][1] != '1')}"
    if len({count for _, count in counts}) > 1:
        seeds = f"seeds ({'; '.join(f'{title}: {count}' for title, count in counts)})"
    return "One seed" if seeds == "1 seed" else f"Mean ± standard deviation over {seeds}"


def _here(title: str) -> str:
    return f"{title[:-1]}, here)" if title.endswith(")") else f"{title} (here)"


def shown(table: Table) -> Table:
    """Without columns of the paper that hold nothing: it has no numbers for other data sets."""
    columns = [(head, *cells) for head, *cells in zip(table.columns, *table.rows, strict=True)]
    kept = [c for c in columns if not c[0].endswith((FROM, PRINTED)) or set(c[1:]) - {NOTHING}]
    heads, *rows = map(list, zip(*kept, strict=True))
    return replace(table, columns=heads, rows=rows)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
