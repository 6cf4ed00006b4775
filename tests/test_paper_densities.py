"""Densities of one experiment that are trained side by side are those that are trained alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from misconv._train import images as _images
from misconv.paper import classification, letters
from misconv.paper.cache import Cache
from misconv.paper.densities import AnySettings, group_of
from misconv.paper.recipe import RECIPES
from misconv.paper.settings import SETTINGS as USUAL
from misconv.paper.variants import run_variants
from tests.test_paper_classification import SETTINGS, Crash, Spied, dying, quickly, same
from tests.test_paper_recipe import SMALL

PAPER = replace(SETTINGS.dmfa, epochs=3)
OURS = replace(PAPER, objective=letters.OBJECTIVE)
WIDER = replace(PAPER, rank=1)
SLOWER = replace(PAPER, batch_size=PAPER.batch_size // 2)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)
    monkeypatch.setitem(RECIPES, "digits", replace(SMALL, tuned=0))


def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects how many densities every training has."""
    found: list[int] = []
    usual = classification.train

    def spy(jobs: Any, *rest: Any, **more: Any) -> Any:
        found.append(len(jobs))
        return usual(jobs, *rest, **more)

    monkeypatch.setattr(classification, "train", spy)
    return found


def named(*settings: AnySettings) -> list[tuple[str, AnySettings]]:
    return [("dmfa", each) for each in settings]


def test_side_by_side_they_are_what_they_are_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, together = sizes(monkeypatch), Spied(tmp_path / "together")
    together.fit_densities([*named(PAPER, OURS, SLOWER, WIDER, PAPER), ("smfa", SETTINGS.smfa)])
    assert trained == [3, 1]  # the one with other batches alone; EM is no such training
    for number, chosen in enumerate((PAPER, OURS, SLOWER, WIDER)):
        alone = Spied(tmp_path / str(number)).density("dmfa", chosen)
        assert same(together.density("dmfa", chosen), alone)
        record = Cache(tmp_path / "together").get(together.density_settings("dmfa", chosen), "fit")
        assert record is not None
        assert record["side_by_side"] == (1 if chosen is SLOWER else 3)
    assert same(together.density("smfa"), Spied(tmp_path / "smfa").density("smfa"))
    assert trained == [3, 1, 1, 1, 1, 1]  # of those that are together, none a second time
    assert not list((tmp_path / "together" / "running").iterdir())


def test_killed_in_any_epoch_they_end_as_they_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Spied(tmp_path / "straight")
    expected.fit_densities(named(PAPER, OURS))
    # Each draws what its validation images show; then what is hidden in an epoch is drawn, for one after the other.
    for number in range(2, 8):
        folder = tmp_path / str(number)
        with dying(monkeypatch, _images, "hide", number), pytest.raises(Crash):
            Spied(folder).fit_densities(named(PAPER, OURS))
        assert not list((folder / "densities").iterdir())
        again = Spied(folder)
        again.fit_densities(named(PAPER, OURS))
        for chosen in (PAPER, OURS):
            assert same(again.density("dmfa", chosen), expected.density("dmfa", chosen))
        assert not list((folder / "running").iterdir())


@pytest.mark.parametrize("number", range(2))
def test_killed_between_their_records_the_other_is_trained(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Spied(tmp_path / "straight")
    expected.fit_densities(named(PAPER, OURS))
    with dying(monkeypatch, Cache, "keep", number), pytest.raises(Crash):
        Spied(tmp_path / "killed").fit_densities(named(PAPER, OURS))
    trained, again = sizes(monkeypatch), Spied(tmp_path / "killed")
    again.fit_densities(named(PAPER, OURS))
    assert trained == [2 - number]
    assert all(same(again.density("dmfa", each), expected.density("dmfa", each)) for each in (PAPER, OURS))


def test_of_what_is_done_no_density_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The densities of a rented machine are gone; its records are not."""

    def both() -> list[Any]:
        experiment = Spied(tmp_path)
        variants = run_variants(experiment, RECIPES["digits"], ["whole", "components"], [0])
        return [letters.run_letter("F", experiment, None, [], [0]), variants]

    trained = sizes(monkeypatch)
    found = both()
    assert trained[:2] == [2, 2]  # one and three components, then two objectives; classifiers follow
    shutil.rmtree(tmp_path / "densities")
    del trained[:]
    assert both() == found
    assert not trained


def test_densities_of_other_images_or_epochs_are_of_other_groups() -> None:
    different = (
        PAPER, replace(PAPER, epochs=4), SLOWER, replace(PAPER, complete=True), SETTINGS.smfa,
        replace(SETTINGS.smfa, components=3),
    )  # fmt: skip
    assert len({group_of(each) for each in different}) == len(different)
    assert group_of(PAPER) == group_of(OURS) == group_of(WIDER)
    assert group_of(USUAL["svhn"].acflow) == group_of(replace(USUAL["svhn"].acflow, width=8))
