"""Table C: what the ingredients of the one recipe are worth, and what was tried as a further one.

All variants are compared with the recipe without joint fine-tuning, which is one of them. Of the additions it had the
highest accuracy on validation images, and so it is a part of the recipe of Table B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from misconv.paper.classification import Experiment
from misconv.paper.recipe import RecipeSettings, Runs
from misconv.paper.scores import Record

__all__ = ["VARIANTS", "WHOLE", "Variant", "known_variants", "run_variants", "variants_of"]

WHOLE = "whole"


@dataclass(frozen=True)
class Variant:
    """A variant of the recipe.

    Args:
        title: in the table. row: of the recipe, which is trained.
        changes: of the recipe; those of "density" are changes of its settings.
        tuned: whether it has the joint fine-tuning of the recipe.
    """

    title: str
    row: str = "misconv"
    changes: dict[str, Any] = field(default_factory=dict)
    tuned: bool = False


VARIANTS = {
    WHOLE: Variant("MisConv without joint fine-tuning"),
    "not-hidden": Variant("without hiding more", changes={"hide": False}),
    "not-moved": Variant("without shifts and flips", changes={"shift": 0, "flip": False}),
    "tuned": Variant("with joint fine-tuning", tuned=True),
    "components": Variant("with K = 3", changes={"density": {"components": 3}}),
    "deviation": Variant("with the deviation of the activation", changes={"deviation": True}),
    "draws": Variant("with factors drawn", "draws"),
    "teacher": Variant("with an averaged teacher that sees less hidden", changes={"teacher": 1.0}),
    "mfa": Variant("MFA imputation", "mfa"),
    "mfa-tuned": Variant("MFA imputation, with joint fine-tuning", "mfa", tuned=True),
    "mfa-components": Variant("MFA imputation, with K = 3", "mfa", {"density": {"components": 3}}),
}


def variants_of(recipe: RecipeSettings) -> list[str]:
    """Those that differ from each other: a recipe without shifts has no variant without them."""
    found: dict[tuple[str, RecipeSettings], str] = {}
    for name, variant in VARIANTS.items():
        found.setdefault((variant.row, _changed(recipe, variant)), name)
    return list(found.values())


def run_variants(
    experiment: Experiment, recipe: RecipeSettings, names: Sequence[str], seeds: Sequence[int]
) -> list[Record]:
    """The records of all variants with all seeds; those that are not there yet are trained.

    Variants of one recipe, as the whole and MFA imputation, are trained side by side.
    """
    groups: dict[RecipeSettings, list[str]] = {}
    for name in names:
        groups.setdefault(_changed(recipe, VARIANTS[name]), []).append(name)
    experiment.fit_densities([("unet", changed.density) for changed in _to_train(experiment, groups, seeds)])
    found: dict[str, list[Record]] = {}
    for changed, members in groups.items():
        rows = [VARIANTS[name].row for name in members]
        records = Runs(experiment, changed).run(rows, seeds)
        for name, row in zip(members, rows, strict=True):
            found[name] = [{**r, "kind": "ingredient", "variant": name} for r in records if r["method"] == row]
    return [record for name in names for record in found[name]]


def _to_train(
    experiment: Experiment, groups: dict[RecipeSettings, list[str]], seeds: Sequence[int]
) -> list[RecipeSettings]:
    """The recipes of which something is left to train."""
    return [
        changed
        for changed, members in groups.items()
        if len(Runs(experiment, changed).known([VARIANTS[name].row for name in members], seeds))
        < len(members) * len(seeds)
    ]


def known_variants(
    experiment: Experiment, recipe: RecipeSettings, names: Sequence[str], seeds: Sequence[int]
) -> list[Record]:
    """The records that are there."""
    found: list[Record] = []
    for name in names:
        records = Runs(experiment, _changed(recipe, VARIANTS[name])).known([VARIANTS[name].row], seeds)
        found += [{**record, "kind": "ingredient", "variant": name} for record in records]
    return found


def _changed(recipe: RecipeSettings, variant: Variant) -> RecipeSettings:
    density = replace(recipe.density, **variant.changes.get("density", {}))
    return replace(recipe, **{**variant.changes, "density": density, "tuned": recipe.tuned if variant.tuned else 0})
