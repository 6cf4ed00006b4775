"""Numbers of the experiments by seed, and how far one method is ahead of another.

Experiments write *records*: plain dicts, one for each data set, shape, method and seed (or density). Differences are
paired by seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from misconv.paper.methods import BASELINES, BY_NAME, OURS
from misconv.paper.printed import TITLES

__all__ = [
    "Margin",
    "Record",
    "Scores",
    "best_margin",
    "holm",
    "how_tested",
    "margin",
    "of",
    "of_method",
    "scores",
    "title_of",
]

Record = dict[str, Any]
Scores = dict[Any, float]  # by seed


def of(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """The records that are as wanted."""
    return [r for r in records if all(r.get(name) == value for name, value in wanted.items())]


def scores(records: Iterable[Record], key: str = "accuracy_incomplete", **wanted: Any) -> Scores:
    """One number of all records that are as wanted, by seed; records of one seed must agree."""
    found: Scores = {}
    for record in of(records, **wanted):
        value, seed = record.get(key), record.get("seed")
        if value is not None and found.setdefault(seed, value) != value:
            what = ", ".join(map(str, wanted.values()))
            raise ValueError(f"records must agree, got {key} {found[seed]} and {value} for {what}, seed {seed}")
    return found


def of_method(
    records: Sequence[Record], dataset: str, shape: str, method: str, key: str = "accuracy_incomplete"
) -> Scores:
    """One number of a method, by seed."""
    wanted = {"kind": "classification", "dataset": dataset, "method": method}
    if method == "gt":  # never sees a missing pixel, whatever the shape
        key, shape = "accuracy_complete", shape if of(records, shape=shape, **wanted) else "square"
    return scores(records, key, shape=shape, **wanted)


def title_of(records: Iterable[Record], dataset: str) -> str:
    """What the records call a data set; the paper's name, or its own, if they do not say."""
    given = [r["title"] for r in of(records, dataset=dataset) if r.get("title")]
    return str(given[0]) if given else TITLES.get(dataset, dataset)


# Comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Margin:
    """How far one method is ahead of another, over the seeds that both have.

    `p` is that of the two-sided paired t-test; None where it cannot be had: fewer than two seeds, or no spread.
    """

    method: str
    baseline: str
    points: float
    seeds: int
    p: float | None

    @property
    def chance(self) -> str:
        """What the test says, in a few words."""
        if self.seeds < 2:
            return "no test, fewer than two seeds in common"
        if self.p is None:
            return "no test, the same for every seed"
        return "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"

    @property
    def difference(self) -> str:
        """The points with their sign."""
        return f"{self.points:+.2f}".replace("-", "−")

    def __str__(self) -> str:
        method, baseline = (BY_NAME[name].title if name in BY_NAME else name for name in (self.method, self.baseline))
        over = f" over {self.seeds} seeds" if self.p is not None else ""
        return f"{method} against {baseline}: {self.difference} points ({self.chance}{over})"


def best_margin(
    records: Sequence[Record], dataset: str, shape: str = "square", key: str = "accuracy_incomplete"
) -> Margin | None:
    """MisConv (DMFA) against the baseline with the best mean; None where one side has no records."""
    found = {m: of_method(records, dataset, shape, m, key) for m in (*(each.name for each in BASELINES), OURS)}
    ours = found.pop(OURS)
    known = {m: s for m, s in found.items() if s}
    if not known or not ours:
        return None
    best = max(known, key=lambda m: fmean(known[m].values()))
    return margin(OURS, ours, best, known[best])


def margin(method: str, ours: Scores, baseline: str, others: Scores) -> Margin:
    """Over the seeds that both have."""
    both = [seed for seed in ours if seed in others]
    pairs = [(ours[seed], others[seed]) for seed in both]
    apart = fmean(a - b for a, b in pairs) if pairs else fmean(ours.values()) - fmean(others.values())
    return Margin(method, baseline, 100 * apart, len(both), _chance(pairs))


def holm(found: Sequence[Margin]) -> list[Margin]:
    """The same with p corrected for as many comparisons by Holm's method; one without a p keeps none.

    Example:
        >>> found = [Margin("a", "b", 1.0, 5, p) for p in (0.01, 0.04, 0.03)]
        >>> [round(each.p, 3) for each in holm(found)]
        [0.03, 0.06, 0.06]
    """
    known = sorted((each.p, n) for n, each in enumerate(found) if each.p is not None)
    corrected, largest = {}, 0.0
    for rank, (p, n) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[n] = largest
    return [replace(each, p=corrected.get(n)) for n, each in enumerate(found)]


def how_tested(found: Sequence[Margin]) -> str:
    """What p is in a list of comparisons, and for how many it was corrected; "" where none has any."""
    count = sum(each.p is not None for each in found)
    corrected = f", corrected by Holm's method for {count} comparisons" if count > 1 else ""
    return f"p of the two-sided paired t-test{corrected}" if count else ""


def _chance(pairs: Sequence[tuple[float, float]]) -> float | None:
    # Without any spread, but for rounding, t is infinite or 0/0: scipy would warn, and its p would mean nothing.
    if len(pairs) < 2 or stdev(a - b for a, b in pairs) < 1e-9:
        return None
    try:
        from scipy.stats import ttest_rel
    except ImportError as error:
        raise ImportError("the paired test needs scipy: pip install 'misconv[demo]'") from error
    return float(ttest_rel(*zip(*pairs, strict=True)).pvalue)
