"""Table C: what the ingredients of the one recipe are worth, and what might be added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from misconv.paper.classification import Experiment
from misconv.paper.recipe import RecipeSettings, Runs
from misconv.paper.scores import Record

__all__ = ["VARIANTS", "WHOLE", "run_variants"]

WHOLE = "MisConv by the recipe"
TUNED = 5  # epochs of joint fine-tuning
# The row of the recipe that is trained, and what is changed; "density": what is changed in its settings.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    WHOLE: ("misconv", {}),
    "without hiding more": ("misconv", {"hide": False}),
    "without shifts": ("misconv", {"shift": 0, "flip": False}),
    "with joint fine-tuning": ("misconv", {"tuned": TUNED}),
    "with K = 3": ("misconv", {"density": {"components": 3}}),
    "with the deviation of the activation": ("misconv", {"deviation": True}),
    "with factors drawn": ("draws", {}),
    "MFA imputation": ("mfa", {}),
    "MFA imputation, with joint fine-tuning": ("mfa", {"tuned": TUNED}),
    "MFA imputation, with K = 3": ("mfa", {"density": {"components": 3}}),
}


def run_variants(
    experiment: Experiment, recipe: RecipeSettings, names: Sequence[str], seeds: Sequence[int]
) -> list[Record]:
    """The records of all variants with all seeds; those that are not there yet are trained.

    Variants of one recipe, as the whole and MFA imputation, are trained side by side.
    """
    groups: dict[RecipeSettings, list[str]] = {}
    for name in names:
        groups.setdefault(_changed(recipe, VARIANTS[name][1]), []).append(name)
    found: dict[str, list[Record]] = {}
    for changed, members in groups.items():
        rows = [VARIANTS[name][0] for name in members]
        records = Runs(experiment, changed).run(rows, seeds)
        for name, row in zip(members, rows, strict=True):
            found[name] = [{**r, "kind": "ingredient", "variant": name} for r in records if r["method"] == row]
    return [record for name in names for record in found[name]]


def _changed(recipe: RecipeSettings, changes: dict[str, Any]) -> RecipeSettings:
    density = replace(recipe.density, **changes.get("density", {}))
    return replace(recipe, **{**changes, "density": density})
