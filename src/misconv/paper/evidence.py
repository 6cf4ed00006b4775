"""Tables of our own, which have letters: every claim against the strongest alternative.

Differences are paired by seed; their p is that of the two-sided paired t-test, corrected by Holm's method: in Tables B
and C for the comparisons of one measure on one data set, in the others for all comparisons of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from misconv.paper import printed
from misconv.paper.coding import MISCODED
from misconv.paper.measures import MEASURES
from misconv.paper.methods import BY_NAME
from misconv.paper.recipe import recipe_of
from misconv.paper.regions import ALL_SHAPES
from misconv.paper.rows import BY_ROW, ROWS
from misconv.paper.scores import Margin, Record, Scores, holm, how_tested, margin, of, scores, title_of
from misconv.paper.settings import AUTHORS
from misconv.paper.shares import SHARES, really_hidden
from misconv.paper.tables import (
    NOT_YET,
    NOTHING,
    PRINTED,
    Table,
    as_number,
    cells_of,
    compared,
    datasets_of,
    legend,
    over_seeds,
    seed_count,
    shown,
)
from misconv.paper.transfer import WAYS
from misconv.paper.variants import VARIANTS, WHOLE, variants_of

__all__ = [
    "LETTERS",
    "coding",
    "comparisons",
    "ingredients",
    "make_letter",
    "objectives",
    "recipe",
    "shares",
    "slanted",
    "transfer",
]

OURS = "misconv"
HOLM = "p of the two-sided paired t-test over seeds, corrected by Holm's method for the comparisons of a data set."
LETTERS = ("A", "B", "C", "D", "E", "F", "figure-A")


def make_letter(letter: str, records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """The table of that letter; "figure-A" is what the figure draws."""
    made = {"A": transfer, "B": recipe, "C": ingredients, "D": coding, "E": slanted, "F": objectives}
    return {**made, "figure-A": shares}[letter](records, datasets)


def comparisons(found: Mapping[str, Scores], ours: str, apart: Sequence[str] = ()) -> dict[str, Margin]:
    """How far `ours` is ahead of every other one, with p corrected by Holm's method."""
    if not found.get(ours):
        return {}
    others = [name for name, known in found.items() if name != ours and name not in apart and known]
    ahead = holm([margin(ours, found[ours], name, found[name]) for name in others])
    return dict(zip(others, ahead, strict=True))


def _points(ahead: Margin | None) -> str:
    if ahead is None:
        return NOTHING
    return ahead.difference + (f" ({ahead.chance})" if ahead.p is not None else "")


def _is_tested(rows: Sequence[Sequence[str]]) -> bool:
    """Whether any cell has a p, which takes several seeds."""
    return any("(p " in cell for row in rows for cell in row)


def _trained(records: Sequence[Record], datasets: Sequence[str]) -> list[str]:
    """How long the classifiers of each data set were trained, and how precisely, if the records tell.

    Fine-tuning may have come on top of the usual epochs, or may be the last of them. It is given up where no epoch of
    it was better.
    """
    told = []
    for dataset in datasets:
        here = [r for r in of(records, dataset=dataset) if "epochs" in r]
        recipes = [r.get("settings", {}).get("recipe", {}) for r in here]
        tuned = {(r["epochs"], recipe["tuned"]) for r, recipe in zip(here, recipes, strict=True) if recipe.get("tuned")}
        plain = {r["epochs"] for r, recipe in zip(here, recipes, strict=True) if not recipe.get("tuned")}
        precisions = {recipe.get("precision") for recipe in recipes} - {None}
        parts = [str(epochs) for epochs in sorted(plain)]
        parts += [f"{epochs} with joint fine-tuning in the last {last}" for epochs, last in sorted(tuned)]
        if parts:
            mixed = "".join(f" ({precision})" for precision in sorted(precisions))
            given_up = sum(
                bool(recipe.get("tuned")) and not r.get("joint") for r, recipe in zip(here, recipes, strict=True)
            )
            trainings = "one training" if given_up == 1 else f"{given_up} trainings"
            none_better = f"; in {trainings} no epoch of it was better, and the network is without it"
            told.append(f"{title_of(records, dataset)} {' or '.join(parts)}{mixed}{none_better * bool(given_up)}")
    return [f"Epochs of the classifiers: {'. '.join(told)}."] if told else []


def _densities(records: Sequence[Record], datasets: Sequence[str]) -> list[str]:
    """How large the density of each data set is, and what it was trained by, if the records tell."""
    told = []
    for dataset in datasets:
        settings = [r.get("settings", {}) for r in of(records, dataset=dataset)]
        named = [s.get("density") or s.get("recipe", {}).get("density") or {} for s in settings]
        known = [density for density in named if "widths" in density]
        found = {(*d["widths"], sum(d["depths"]), d["patch"], d["objective"]) for d in known}
        each = [
            f"{min(widths)} to {max(widths)} channels in {blocks} blocks, patch {patch}, {objective}"
            for *widths, blocks, patch, objective in sorted(found)
        ]
        if each:
            told.append(f"{title_of(records, dataset)} {' or '.join(each)}")
    return [f"Densities: {'; '.join(told)}."] if told else []


# A: no retraining ----------------------------------------------------------------------------------------------------


def transfer(records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """Table A."""
    mine = of(records, kind="transfer")
    titles = {way.name: way.title for way in WAYS}
    rows: list[list[str]] = []
    counts: list[tuple[str, str]] = []
    ahead: list[tuple[int, Margin]] = []  # the row, and how far it is ahead
    for dataset in datasets_of(mine, datasets):
        title = title_of(mine, dataset)
        for shape in ALL_SHAPES:
            here = of(mine, dataset=dataset, shape=shape)
            if not here:
                continue
            block = {name: [title, shape, titles[name]] for name in titles}
            for measure, (_, digits, better) in MEASURES.items():
                found = {name: scores(here, measure, method=name) for name in titles}
                for name, cell in cells_of(found, digits, better).items():
                    block[name].append(NOT_YET if cell == NOTHING else cell)
            found = {name: scores(here, "accuracy", method=name) for name in titles}
            counts.append((f"{title}, {shape}", seed_count(found)))
            for each in _against(found, ("misconv", "samples", "draws"), "mfa"):
                ahead.append((len(rows) + list(titles).index(each.method), each))
            rows += block.values()
    corrected = holm([each for _, each in ahead])
    points = dict(zip((row for row, _ in ahead), corrected, strict=True))
    for number, cells in enumerate(rows):
        cells.append(_points(points.get(number)))
    notes = [f"{over_seeds(counts)}. {_MEASURED}"] if counts else [NOT_YET]
    notes += _densities(mine, datasets_of(mine, datasets))
    if ahead:
        notes.append(
            f"Points over {titles['mfa']}: of accuracy."
            + (f" {HOLM.replace('the comparisons of a data set', 'all of them')}" if _is_tested(rows) else "")
        )
    columns = ["data set", "missing", "method", *(head for head, *_ in MEASURES.values())]
    columns.append(f"points over {titles['mfa']}")
    return Table("A", "Networks trained on complete images meet incomplete ones", columns, rows, notes, text=3)


_ABSTENTION = (
    "abstention: area under the risk–coverage curve, the share of errors among the most confident answers, averaged "
    "over how many of them are given."
)
_MEASURED = f"NLL in nats; ECE: expected calibration error; {_ABSTENTION} Lower is better in all three."


def _against(found: Mapping[str, Scores], ours: Sequence[str], other: str) -> list[Margin]:
    return [margin(name, found[name], other, found[other]) for name in ours if found[name] and found[other]]


# B: one recipe for all -----------------------------------------------------------------------------------------------


def recipe(records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """Table B."""
    mine = of(records, kind="recipe", shape="square")
    listed = [row for row in ROWS if not row.extra]
    apart, sets, ours = [row.name for row in listed if row.complete], datasets_of(mine, datasets), BY_ROW[OURS].title
    rows: list[list[str]] = []
    counts = []
    for dataset in sets:
        title, here = title_of(mine, dataset), of(mine, dataset=dataset)
        rows += [[title, *cells] for cells in _recipe_rows(here, apart)]
        counts.append((title, seed_count({row.name: scores(here, method=row.name) for row in listed})))
    notes = [f"{over_seeds(counts)}. {_MEASURED}"] if counts else [NOT_YET]
    notes += [*_trained(mine, sets), *_densities(mine, sets)]
    notes.append(
        f"Points of {ours}: how far its accuracy on incomplete images is ahead of the row. RMSE: of what is filled in "
        "at hidden pixels of test images, where that was recorded." + (f" {HOLM}" if _is_tested(rows) else "")
    )
    notes += [*_added(mine, sets, apart), legend(listed), "* trained and tested on complete images."]
    columns = ["data set", "method", "accuracy", f"points of {ours}", "NLL", f"NLL, {ours} minus row"]
    columns += [MEASURES[name][0] for name in ("ece", "abstention")] + ["on complete images", "RMSE"]
    return Table("B", "One recipe for all", columns, rows, notes, text=2)


def _recipe_rows(records: Sequence[Record], apart: Sequence[str]) -> list[list[str]]:
    """The rows of Table B for one data set."""
    rows = {row.name: [row.starred] for row in ROWS if not row.extra}

    def add(key: str, digits: int = 3) -> dict[str, Scores]:
        better = max if key.startswith("accuracy") else min
        found = {name: scores(records, key, method=name) for name in rows}
        hidden = {name: {} if name in apart and key != "accuracy_complete" else s for name, s in found.items()}
        for name, cell in cells_of(hidden, digits, better, apart=apart).items():
            rows[name].append(NOT_YET if cell == NOTHING and not found[name] else cell)
        return found

    ahead = comparisons(add("accuracy_incomplete"), OURS, apart)
    for name, cells in rows.items():
        cells.append(_points(ahead.get(name)))
    below = comparisons(add("nll"), OURS, apart)
    for name, cells in rows.items():
        cells.append(_nats(below.get(name)))
    for key in ("ece", "abstention", "accuracy_complete"):
        add(key)
    for name, cells in rows.items():
        errors = scores(
            records, "rmse", method=name
        ).values()  # one and the same but where it learns with the classifier
        cells.append(as_number(fmean(errors), 4) if errors else NOTHING)
    return list(rows.values())


def _nats(ahead: Margin | None) -> str:
    """A difference of NLL, where `_points` has one of accuracy."""
    if ahead is None:
        return NOTHING
    difference = f"{ahead.points / 100:+.3f}".replace("-", "−")
    return difference + (f" ({ahead.chance})" if ahead.p is not None else "")


def _added(records: Sequence[Record], datasets: Sequence[str], apart: Sequence[str]) -> list[str]:
    """What seeds say by themselves that were added in a later run.

    Seeds that are added after a result was seen make the p of all together too small.
    """
    told = []
    for dataset in datasets:
        mine = of(records, dataset=dataset)
        runs: dict[str, list[int]] = {}
        for record in of(mine, method=OURS):
            if commit := record.get("commit"):
                runs.setdefault(commit, []).append(record["seed"])
        first = max(runs.values(), key=lambda seeds: (len(seeds), -min(seeds)), default=[])
        for seeds in sorted(sorted(each) for each in runs.values() if each is not first):
            found = {row.name: scores([r for r in mine if r["seed"] in seeds], method=row.name) for row in ROWS}
            ahead = {name: each for name, each in comparisons(found, OURS, apart).items() if each.p is not None}
            each = [f"{BY_ROW[name].title} {one.difference} ({one.chance})" for name, one in ahead.items()]
            if each:
                told.append(f"{title_of(records, dataset)}, seeds {', '.join(map(str, seeds))}: {', '.join(each)}")
    words = (
        f"Some seeds were added in a later run. With these alone {BY_ROW[OURS].title} is ahead of the row, in points"
    )
    return [f"{words}, with p as above: {'; '.join(told)}."] if told else []


# C: ingredients ------------------------------------------------------------------------------------------------------


def ingredients(records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """Table C."""
    mine = of(records, kind="ingredient", shape="square")
    sets, rows, counts = datasets_of(mine, datasets), [], []
    for dataset in sets:
        title, here = title_of(mine, dataset), of(mine, dataset=dataset)
        found = {name: scores(here, variant=name) for name in variants_of(recipe_of(dataset))}
        counts.append((title, seed_count(found)))
        whole = found[WHOLE]
        known = [name for name in found if name != WHOLE and found[name] and whole]
        against = holm([margin(name, found[name], WHOLE, whole) for name in known])
        ahead = dict(zip(known, against, strict=True))
        for name, cell in cells_of(found).items():
            seen = scores(here, "accuracy_validation", variant=name).values()
            chosen = as_number(fmean(seen)) if seen else NOT_YET
            test = NOT_YET if cell == NOTHING else cell
            rows.append([title, VARIANTS[name].title, chosen, test, _points(ahead.get(name))])
    top = f"Accuracy on incomplete images. {over_seeds(counts)}." if counts else NOT_YET
    top += f" {HOLM}" if _is_tested(rows) else ""
    columns = ["data set", "variant", "validation", "test", f"points over {VARIANTS[WHOLE].title}"]
    notes = [top, *_trained(mine, sets), *_densities(mine, sets), *_of_other_runs(mine, sets)]
    return Table("C", "What the ingredients of the recipe are worth", columns, rows, notes, text=2)


def _of_other_runs(records: Sequence[Record], datasets: Sequence[str]) -> list[str]:
    """Variants that were not run with the whole recipe: their density was trained by the same settings, but anew."""
    told = []
    for dataset in datasets:
        here = of(records, dataset=dataset)
        together = {r.get("commit") for r in of(here, variant=WHOLE)}
        others = {r["variant"]: r for r in here if together and r.get("commit") not in together}
        titles = [VARIANTS[name].title for name in VARIANTS if name in others]
        if titles:
            told.append(f"{title_of(records, dataset)} {', '.join(titles)}")
    return [f"Of another run than the whole recipe, with a density trained anew: {'; '.join(told)}."] if told else []


# D: the paper explained ----------------------------------------------------------------------------------------------


def coding(records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """Table D."""
    mine = of(records, kind="coding", shape="square")
    rows, ahead, counts, distances = [], [], [], []
    for dataset in datasets_of(mine, datasets, ("svhn", "cifar10")):
        title, paper = title_of(mine, dataset), printed.incomplete(dataset)
        by_coding = {
            coded: {m: scores(mine, dataset=dataset, method=m, coding=c) for m in MISCODED}
            for c, coded in (("wrong", "coded −1"), ("right", "coded right"))
        }
        distances.append(_mean_distance(title, by_coding, paper))
        for method in MISCODED:
            found = {coded: by_method[method] for coded, by_method in by_coding.items()}
            cells = [NOT_YET if cell == NOTHING else cell.replace("**", "") for cell in cells_of(found).values()]
            rows.append([title, BY_NAME[method].title, as_number(paper.get(method)), *cells])
            place = f"{title}, {BY_NAME[method].title}"
            counts.append((place, seed_count(found)))
            if all(found.values()):
                (wrong, theirs), (right, ours) = found.items()
                ahead.append((place, margin(wrong, theirs, right, ours)))
    tested = how_tested([each for _, each in ahead])
    heads = ["data set", "method", PRINTED, "coded −1 in training, 0 in the test", "coded right"]
    top = f"Accuracy on incomplete test images. {over_seeds(counts)}.{f' {tested}.' * bool(tested)}"
    notes = [top, *filter(None, distances), *compared(ahead)]
    return shown(Table("D", "Why three methods collapse in the paper", heads, rows, notes, text=2))


def slanted(records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """Table E."""
    mine = of(records, kind="slanted")
    rows, counts, told = [], [], []
    for dataset in datasets_of(mine, datasets, ("mnist",)):
        title, paper = title_of(mine, dataset), printed.TABLE9.get(dataset, {}).get("trapezoid", {})
        known = dict.fromkeys(r["method"] for r in of(mine, dataset=dataset))
        by_shape = {
            shape: {name: scores(mine, dataset=dataset, method=name, shape=shape) for name in known}
            for shape in ("trapezoid", "cut")
        }
        counts += [(f"{title}, {shape}", seed_count(found)) for shape, found in by_shape.items()]
        cells = [cells_of(found) for found in by_shape.values()]
        for name in known:
            ours = [NOT_YET if each[name] == NOTHING else each[name] for each in cells]
            rows.append([title, BY_NAME[name].title, as_number(paper.get(name)), *ours])
        named = {"from edge to edge": by_shape["trapezoid"], "one side of a cut": by_shape["cut"]}
        told.append(_mean_distance(title, named, paper, without="partial"))  # which is far from the printed one in both
    heads = ["data set", "method", PRINTED, "from edge to edge, anywhere", "one side of a slanted cut"]
    top = f"Accuracy on incomplete test images. {over_seeds(counts)}." if counts else NOT_YET
    notes = [note for note in (top, *told) if note]
    return shown(Table("E", "Which trapezoids the paper may have had", heads, rows, notes, text=2))


def _mean_distance(
    title: str, ours: Mapping[str, Mapping[str, Scores]], paper: Mapping[str, float], without: str = ""
) -> str:
    """How far the accuracies of each kind of runs are from the printed ones, the mean over methods; "" if unknown."""
    parts = []
    for kind, found in ours.items():
        distances = [abs(fmean(s.values()) - paper[m]) for m, s in found.items() if s and m in paper and m != without]
        if distances:
            parts.append(f"{kind} {100 * fmean(distances):.1f}")
    mean = f"the mean without {BY_NAME[without].title}" if without else "the mean"
    return f"{title}: points between our numbers and the printed ones, {mean}: {', '.join(parts)}." if parts else ""


# F: the paper's densities by two objectives --------------------------------------------------------------------------


def objectives(records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """Table F."""
    mine = of(records, kind="objective", shape="square")
    names = {"mfa": "MFA imputation", "misconv_dmfa": "MisConv"}
    rows, ahead, counts = [], [], []
    for dataset in datasets_of(mine, datasets):
        title = title_of(mine, dataset)
        known = {"paper": "the paper's", "authors": "the paper's, by the authors' rates", "ours": "ours"}
        for objective, what in known.items():
            if objective == "authors" and dataset not in AUTHORS:
                continue
            found = {m: scores(mine, dataset=dataset, method=m, objective=objective) for m in names}
            if objective == "paper":  # these are the networks of Table 1, where that is there
                table_1 = of(records, kind="classification", shape="square")
                found = {m: scores(table_1, dataset=dataset, method=m) or found[m] for m in names}
            counts.append((f"{title}, {what}", seed_count(found)))
            rows.append([title, what, *(NOT_YET if cell == NOTHING else cell for cell in cells_of(found).values())])
            if all(found.values()):
                ahead.append((f"{title} ({what})", margin("misconv_dmfa", found["misconv_dmfa"], "mfa", found["mfa"])))
    tested = how_tested([each for _, each in ahead])
    notes = [f"Accuracy on incomplete test images. {over_seeds(counts)}.{f' {tested}.' * bool(tested)}"]
    notes += compared(ahead)
    heads = ["data set", "objective", *names.values()]
    return Table("F", "The paper's densities, by its objective and by ours", heads, rows, notes, text=2)


# Figure A: by how much is missing ------------------------------------------------------------------------------------


def shares(records: Sequence[Record], datasets: Sequence[str] | None = None) -> Table:
    """What Figure A draws."""
    mine = of(records, kind="share")
    rows, told = [], []
    for dataset in datasets_of(mine, datasets, ("svhn", "cifar10")):
        for name in dict.fromkeys(r["method"] for r in of(mine, dataset=dataset)):
            for measure in ("accuracy", "nll", "abstention"):
                found = [scores(mine, measure, dataset=dataset, method=name, share=share) for share in SHARES]
                cells = [as_number(fmean(s.values())) if s else NOT_YET for s in found]
                rows.append([title_of(mine, dataset), BY_ROW[name].starred, MEASURES[measure][0], *cells])
        hidden = [really_hidden(of(mine, dataset=dataset), share) for share in SHARES]
        if any(abs(real - share) > 0.005 for real, share in zip(hidden, SHARES, strict=True)):
            numbers = ", ".join(f"{100 * real:.0f}" for real in hidden)
            told.append(f"{title_of(mine, dataset)}: regions have whole pixels, and hide {numbers} %.")
    columns = ["data set", "method", "measure", *(f"{share:.0%}" for share in SHARES)]
    seeds = len({r["seed"] for r in mine})
    over = "One seed" if seeds == 1 else f"Means over {seeds} seeds"
    notes = [f"{over}. NLL in nats; {_ABSTENTION} Lower is better in both.", *told] if rows else [NOT_YET]
    notes.append("The networks are those of Table B, trained with a quarter of every image missing.")
    if any(BY_ROW[r["method"]].complete for r in mine):
        notes.append("* trained on complete images.")
    return Table(None, "Figure A: by how much is missing", columns, rows, notes, text=3)
