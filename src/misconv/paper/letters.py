"""What the tables of our own train and measure, by their letters; `misconv.paper.evidence` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from misconv.paper import generation, splitting
from misconv.paper.classification import Experiment
from misconv.paper.coding import MISCODED, run_coding
from misconv.paper.densities import DensitySettings
from misconv.paper.recipe import RecipeSettings, Runs, recipe_of
from misconv.paper.rows import ROWS
from misconv.paper.scores import Record
from misconv.paper.settings import AUTHORS, SHAPES
from misconv.paper.shares import SHOWN, run_shares
from misconv.paper.transfer import WAYS, known_transfer, run_transfer
from misconv.paper.variants import VARIANTS, known_variants, run_variants, variants_of

__all__ = ["check_methods", "quick_recipe", "run_letter", "shapes_of_table"]

OBJECTIVE = "joint+marginal+moments"  # ours, that of `misconv.fit_density`
BOTH = ("mfa", "misconv_dmfa")  # the methods with the paper's density
SLANTED = ("zero", "mask", "knn", "partial", "misconv_dmfa")  # those of which the paper prints trapezoids

_ROWS = tuple(row.name for row in ROWS if not row.extra)
# The rows that each table has if no others are asked for, and those that may be.
USUAL = {
    "A": tuple(way.name for way in WAYS),
    "B": _ROWS,
    "C": tuple(VARIANTS),
    "D": MISCODED,
    "E": SLANTED,
    "F": BOTH,
    "figure-A": SHOWN,
}
ALLOWED = {**USUAL, "figure-A": _ROWS, **dict.fromkeys(("3", "4", "5"), generation.ROWS)}


def check_methods(letter: str, methods: Sequence[str]) -> None:
    """Refuse rows that the table does not have; only those of a part can be asked for."""
    if not methods:
        return
    if letter not in ("3", "4", "5", "A", "B", "C", "figure-A"):
        raise ValueError(f"--methods is for the tables 3, 4, 5, A, B and C and for figure-A, got table {letter}")
    for name in methods:
        if name not in ALLOWED[letter]:
            raise ValueError(f"--methods must be some of {','.join(ALLOWED[letter])}, got {name!r}")


def shapes_of_table(number: str) -> tuple[str, ...]:
    """What is missing in the images of a table."""
    return {"9": tuple(SHAPES), "E": ("trapezoid", "cut")}.get(number, ("square",))


def run_letter(
    letter: str, experiment: Experiment, recipe: RecipeSettings | None, methods: Sequence[str], seeds: Sequence[int]
) -> list[Record]:
    """The records of one data set; what is not there yet is trained."""
    names = list(methods or USUAL[letter])
    runs = Runs(experiment, recipe)
    match letter:
        case "A":
            run_transfer(runs, names, seeds)
            return known_transfer(runs, seeds)  # with those of an earlier call, here as in the next two
        case "B":
            runs.run(_possible(experiment, names), seeds)
            return runs.known(_ROWS, seeds)
        case "C":
            possible = variants_of(runs.recipe)
            run_variants(experiment, runs.recipe, [name for name in names if name in possible], seeds)
            return known_variants(experiment, runs.recipe, possible, seeds)
        case "D":
            return run_coding(experiment, seeds)
        case "E":
            return [{**record, "kind": "slanted"} for record in experiment.run(names, seeds)]
        case "F":
            return _by_objective(experiment, seeds)
    return run_shares(runs, _possible(experiment, names), seeds)


def _by_objective(experiment: Experiment, seeds: Sequence[int]) -> list[Record]:
    """The paper's density, trained by the paper's objective and by ours; and by the authors' rates, where these differ.

    A quick run keeps its few epochs.
    """
    paper = experiment.settings
    densities = {"paper": paper.dmfa, "ours": replace(paper.dmfa, objective=OBJECTIVE)}
    if experiment.data.name in AUTHORS:
        densities["authors"] = replace(AUTHORS[experiment.data.name], epochs=paper.dmfa.epochs)

    def by(density: DensitySettings) -> Experiment:  # made anew, so that what one density says is not kept for all
        return experiment.by(replace(paper, dmfa=density))

    experiment.fit_densities([("dmfa", each) for each in densities.values() if not by(each).is_done(BOTH, seeds)])
    found: list[Record] = []
    for name, density in densities.items():
        records = by(density).run(BOTH, seeds)
        found += [{**record, "kind": "objective", "objective": name} for record in records]
    return found


def _possible(experiment: Experiment, names: Sequence[str]) -> list[str]:
    """Those whose packages are there."""
    if "splitting" in names and not splitting.is_there():
        experiment.say("U-Net, splitting losses: left out, needs deepinv: pip install 'misconv[alternatives]'")
        return [name for name in names if name != "splitting"]
    return list(names)


def quick_recipe(name: str, epochs: int) -> RecipeSettings:
    """The recipe of a data set with few epochs, one of them of joint fine-tuning, and small networks."""
    usual, small = recipe_of(name), recipe_of("digits")
    return replace(
        usual, epochs=epochs + 1, tuned=1, density=replace(small.density, epochs=epochs), supmiwae=small.supmiwae,
        splitting=replace(small.splitting, epochs=epochs),
    )  # fmt: skip
