"""Tables 3, 4 and 5 in words: the models of `misconv.paper.generation`, beside the printed numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from misconv.paper import printed
from misconv.paper.generation import FLOW, ROWS, row_named
from misconv.paper.printed import TITLES
from misconv.paper.scores import Margin, Record, holm, how_tested, margin, of, scores, title_of
from misconv.paper.tables import FROM, STARS, Table, as_number, cells_of, datasets_of, over_seeds, seed_count, shown

__all__ = ["KINDS", "NUMBERS", "PAPERS", "make_generation"]

NUMBERS = (3, 4, 5)
KINDS = ("wae", "flow_matching")  # of the records
PAPERS = ("mnist", "svhn", "celeba")  # its data sets
PAIRS = (("misconv_dmfa", "mfa"), ("misconv_unet", "mfa_unet"))  # of one density each


@dataclass(frozen=True)
class _Measure:
    """What a table shows: its title, the number of a record, decimals, the better end, and what each column is."""

    title: str
    key: str
    digits: int
    better: Callable[..., float]
    printed: dict[str, dict[str, float]]
    columns: dict[str, str]


_CHOSEN, _BEST, _HIDDEN = "here", "best test epoch, here", "hidden pixels, here"
_MEASURES = {
    3: _Measure("Fréchet distance of samples", "frechet", 2, min, printed.TABLE3, {"": _CHOSEN, "_best": _BEST}),
    4: _Measure(
        "SSIM of reconstructions", "ssim", 3, max, printed.TABLE4,
        {"": _CHOSEN, "_best": _BEST, "_authors": f"7×7, {_CHOSEN}", "_authors_best": f"7×7, {_BEST}"},
    ),
    5: _Measure(
        "PSNR of reconstructions", "psnr", 2, max, printed.TABLE5,
        {"": _CHOSEN, "_best": _BEST, "_hidden": _HIDDEN},
    ),
}  # fmt: skip
_TOLD = {
    4: "SSIM with a Gaussian window and a range of 1; “7×7” is the authors' variant, with a uniform window of 7×7 "
    "pixels and a range of 2, of which the printed numbers are.",
    5: "In decibels, the mean over images, but for those without any error; of hidden pixels, that of their mean "
    "squared error over all images.",
}
_UNET = (
    "UNetDMFA: not in the paper; the density of `misconv.fit_density`, learned from the same incomplete images, in "
    "place of the paper's."
)
_FLOW = (
    "† no autoencoder, and not in the paper: a flow from noise to images, trained on the same incomplete images. The "
    "error at seen pixels that were hidden from it chooses the epoch."
)
_DRAWN = " Its samples are drawn once, by the chosen epoch, with nothing seen."
_COMPLETED = (
    " Its reconstruction is the mean of what the incomplete image may be, whose seen pixels are exact. No autoencoder "
    "has that, so it is compared with the others at hidden pixels alone, in Table 5."
)


def make_generation(number: int, records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """The table of that number.

    Args:
        number: 3 (Fréchet distance), 4 (SSIM) or 5 (PSNR).
        records: what the experiments wrote; those of other tables are passed over.
        datasets: names of the data sets to show; those with records if left out, the paper's if there are none.
    """
    measure, mine = _MEASURES[number], [record for kind in KINDS for record in of(records, kind=kind)]
    rows = {name: [f"{FLOW.title} †" if name == FLOW.name else row_named(name).starred] for name in ROWS}
    columns, counts, ahead = ["method"], [], []
    for dataset in datasets_of(mine, datasets, PAPERS):
        title, paper = title_of(mine, dataset), measure.printed.get(dataset, {})
        columns.append(TITLES.get(dataset, dataset) + FROM)
        for name, row in rows.items():
            row.append(as_number(paper.get(name), measure.digits))
        for key, head in measure.columns.items():
            found = {name: scores(mine, measure.key + key, dataset=dataset, method=name) for name in rows}
            if key == "_hidden" and not any(found.values()):
                continue
            columns.append(_headed(title, head))
            for name, cell in cells_of(found, measure.digits, measure.better, _apart(number, key)).items():
                rows[name].append(cell)
            if not key:
                counts.append((title, seed_count(found)))
                for ours, baseline in PAIRS:
                    if found[ours] and found[baseline]:
                        ahead.append((title, margin(ours, found[ours], baseline, found[baseline])))
    notes = [
        f"{over_seeds(counts)}. {STARS}",
        _epochs(mine),
        *_told(number, mine),
        _UNET,
        _FLOW + (_DRAWN if number == 3 else _COMPLETED),
    ]
    notes += _compared(ahead, measure)
    return shown(Table(number, measure.title, columns, list(rows.values()), notes))


def _epochs(records: Sequence[Record]) -> str:
    """How they were chosen."""
    every = {
        title_of(records, r["dataset"]): r.get("settings", {}).get("wae", {}).get("measured", 1)
        for r in of(records, kind="wae")
    }
    seldom = ", ".join(f"on {title} one in {epochs} was measured" for title, epochs in every.items() if epochs > 1)
    return (
        "The error at seen pixels of validation images chooses the epoch; beside it the best epoch of each number by "
        f"itself, chosen on test images, as in the paper{f' ({seldom})' if seldom else ''}."
    )


def _apart(number: int, key: str) -> list[str]:
    """The rows of a column that the others are not compared with."""
    completed = [FLOW.name] if number != 3 and key != "_hidden" else []
    return [*(name for name in ROWS if row_named(name).sees_complete), *completed]


def _told(number: int, records: Sequence[Record]) -> list[str]:
    """What was measured."""
    if number in _TOLD:
        return [_TOLD[number]]
    rulers = dict.fromkeys((title_of(records, r["dataset"]), str(r["features"])) for r in records)
    return [f"{title}: the distance is one in {features}." for title, features in rulers] + [
        "Only numbers in the same features can be compared; the printed ones are in others."
    ] * bool(rulers)


def _compared(ahead: Sequence[tuple[str, Margin]], measure: _Measure) -> list[str]:
    """MisConv and MFA imputation, seed by seed."""
    if not ahead:
        return []
    lines = []
    for (title, _), each in zip(ahead, holm([each for _, each in ahead]), strict=True):
        difference = f"{each.points / 100:+.{measure.digits}f}".replace("-", "−")
        over = f" over {each.seeds} seeds" if each.p is not None else ""
        ours, baseline = row_named(each.method).title, row_named(each.baseline).title
        lines.append(f"{title}, {ours} minus {baseline}: {difference} ({each.chance}{over}).")
    better = "Lower" if measure.better is min else "Higher"
    tested = how_tested([each for _, each in ahead])
    return [f"{better} is better. Compared with MFA imputation seed by seed{f'; {tested}' * bool(tested)}.", *lines]


def _headed(title: str, head: str) -> str:
    return f"{title[:-1]}, {head})" if title.endswith(")") else f"{title} ({head})"
