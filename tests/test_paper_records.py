"""Records that come back from a machine, and those that a folder of `misconv table` is given."""

from __future__ import annotations

import json
import runpy
import tarfile
from pathlib import Path
from typing import Any

import pytest

from misconv.paper.cache import Cache
from misconv.paper.scores import Record

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "paper"


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "records.py"))


def record(method: str, seed: int, density: str | None = None, kind: str = "recipe", **more: Any) -> Record:
    recipe = {"epochs": 40} if density is None else {"epochs": 40, "density": {"objective": density}}
    settings = {"dataset": "svhn", "method": method, "seed": seed, "recipe": recipe}
    where = {"dataset": "svhn", "title": "SVHN", "shape": "square", "device": "a device"}
    names = ("accuracy_incomplete", "accuracy_complete", "accuracy_validation", "nll", "ece", "abstention")
    numbers = dict.fromkeys(names, 0.5) | {"epoch": 1, "epochs": 40, "seconds": 1.0}
    return {"kind": kind, **where, "method": method, "seed": seed, **numbers, "settings": settings, **more}


def files(tool: dict[str, Any], folder: Path, old: list[Record], new: list[Record]) -> tuple[Path, Path]:
    results = folder / "results"
    results.mkdir()
    if old:
        tool["write"](results / "svhn-recipe.json", old)
    tool["write"](folder / "table-B-svhn.json", new)
    return results, folder / "table-B-svhn.json"


def test_a_new_record_replaces_that_of_its_row(tool: dict[str, Any], tmp_path: Path) -> None:
    old = [record("mask", seed) for seed in range(2)]
    new = [record("mask", 1, seconds=9.0), record("zero", 0)]
    results, table = files(tool, tmp_path, old, new)
    assert tool["merge"]([table], results) == ["svhn-recipe.json: 3 records"]
    assert tool["read"](results / "svhn-recipe.json") == [old[0], *new]
    assert tool["merge"]([table], results) == ["svhn-recipe.json: 3 records"]  # again, and nothing changes


@pytest.mark.parametrize("name", ["mnist-square", "svhn-square"])
def test_records_of_block_one_replace_only_themselves(tool: dict[str, Any], tmp_path: Path, name: str) -> None:
    """Trainings of densities, which stand in the same file, among them."""
    old = tool["read"](RESULTS / f"{name}.json")
    tool["write"](tmp_path / f"{name}.json", old)
    tool["write"](tmp_path / "new.json", old[:4])
    assert tool["merge"]([tmp_path / "new.json"], tmp_path) == [f"{name}.json: {len(old)} records"]
    assert tool["read"](tmp_path / f"{name}.json") == old


def test_records_that_do_not_know_their_commit_are_told(tool: dict[str, Any], tmp_path: Path) -> None:
    known, told = "a" * 40, "b" * 40
    new = [record("mask", 0, commit=known), record("mask", 1, commit=f"{known}+"), record("mask", 2, commit=None)]
    results, table = files(tool, tmp_path, [], new)
    tool["merge"]([table], results, told)
    assert [r["commit"] for r in tool["read"](results / "svhn-recipe.json")] == [known, told, told]
    with pytest.raises(SystemExit, match="--commit must be a whole commit, of 40 digits, got 'abc'"):
        tool["main"](["--results", str(results), "merge", str(table), "--commit", "abc"])


def test_rows_of_another_density_are_left_out(tool: dict[str, Any], tmp_path: Path) -> None:
    # MFA imputation of the old density beside MisConv of the new one would be compared with it.
    old = [record("mask", 0), record("mfa", 0, "old"), record("misconv", 0, "old")]
    results, table = files(tool, tmp_path, old, [record("misconv", 0, "new")])
    assert tool["merge"]([table], results) == ["svhn-recipe.json: 2 records, without mfa of another recipe"]
    assert tool["read"](results / "svhn-recipe.json") == [old[0], record("misconv", 0, "new")]


def test_rows_without_joint_fine_tuning_are_not_mixed_with_others(tool: dict[str, Any], tmp_path: Path) -> None:
    old, new = ([record("misconv", seed, "same") for seed in seeds] for seeds in ((0, 1), (0,)))
    new[0]["settings"]["recipe"]["tuned"] = 5
    results, table = files(tool, tmp_path, [record("mask", 0), *old], new)
    assert tool["merge"]([table], results) == ["svhn-recipe.json: 2 records, without misconv of another recipe"]
    assert tool["read"](results / "svhn-recipe.json") == [record("mask", 0), *new]


def test_records_without_a_density_leave_all_others(tool: dict[str, Any], tmp_path: Path) -> None:
    old = [record("mfa", 0, "old"), record("misconv", 0, "old")]
    results, table = files(tool, tmp_path, old, [record("zero", 0)])
    tool["merge"]([table], results)
    assert tool["read"](results / "svhn-recipe.json") == [*old, record("zero", 0)]


def test_rows_of_a_quick_run_are_not_mixed_with_others(tool: dict[str, Any], tmp_path: Path) -> None:
    quick = record("zero", 0)
    quick["settings"]["recipe"]["epochs"] = 1
    results, table = files(tool, tmp_path, [quick], [record("mask", 0)])
    assert tool["merge"]([table], results) == ["svhn-recipe.json: 1 records, without zero of another recipe"]


def test_new_rows_of_two_densities_are_refused(tool: dict[str, Any], tmp_path: Path) -> None:
    results, table = files(tool, tmp_path, [], [record("mfa", 0, "old"), record("misconv", 0, "new")])
    with pytest.raises(SystemExit, match=r"must have one density, got 2 of svhn \(recipe\)"):
        tool["merge"]([table], results)


def test_units_of_a_table_that_was_not_finished(tool: dict[str, Any], tmp_path: Path) -> None:
    unit = record("mask", 0)
    Cache(tmp_path / "cache").keep(unit["settings"], unit)
    found = list((tmp_path / "cache" / "records").glob("*.json"))
    assert tool["merge"](found, tmp_path) == ["svhn-recipe.json: 1 records"]
    assert tool["read"](tmp_path / "svhn-recipe.json") == [unit]


def test_ingredients_may_have_other_components_and_fine_tuning(tool: dict[str, Any], tmp_path: Path) -> None:
    new = [record("misconv", 0, "new", "ingredient", variant=variant) for variant in ("whole", "components")]
    for count, each in zip((1, 3), new, strict=True):
        each["settings"]["recipe"]["density"]["components"] = count
        each["settings"]["recipe"]["tuned"] = count
    results, table = files(tool, tmp_path, [], new)
    assert tool["merge"]([table], results) == ["svhn-ingredients.json: 2 records"]


def test_ingredients_of_another_recipe_are_left_out(tool: dict[str, Any], tmp_path: Path) -> None:
    # The table compares every variant with the whole recipe, seed by seed.
    old = [record("misconv", 0, "old", "ingredient", variant=variant) for variant in ("whole", "not-hidden")]
    new = [record("misconv", 0, "new", "ingredient", variant=variant) for variant in ("whole", "tuned")]
    results, table = files(tool, tmp_path, [], new)
    tool["write"](results / "svhn-ingredients.json", old)
    assert tool["merge"]([table], results) == ["svhn-ingredients.json: 2 records, without misconv of another recipe"]
    assert tool["read"](results / "svhn-ingredients.json") == new


def test_records_of_block_one_lie_by_what_is_missing(tool: dict[str, Any], tmp_path: Path) -> None:
    old = [record("zero", 0, kind="classification"), record("zero", 0, kind="classification", shape="noise")]
    results, table = files(tool, tmp_path, [], [record("acflow", 0, kind="classification")])
    qualities = [{**record("", 0, kind="density"), "density": density} for density in ("DMFA", "ACFlow")]
    tool["write"](results / "svhn-square.json", [old[0], qualities[0]])
    tool["write"](results / "svhn-noise.json", old[1:])
    tool["write"](tmp_path / "table-7.json", qualities[1:])
    assert tool["merge"]([table, tmp_path / "table-7.json"], results) == ["svhn-square.json: 4 records"]
    found = [each["method"] or each["density"] for each in tool["read"](results / "svhn-square.json")]
    assert found == ["zero", "DMFA", "acflow", "ACFlow"]
    assert tool["read"](results / "svhn-noise.json") == old[1:]


def test_what_is_no_file_of_records_is_refused(tool: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(SystemExit, match=r"other\.json must be a file of records"):
        tool["merge"]([tmp_path / "other.json"], tmp_path)
    tool["write"](tmp_path / "table-1.json", [record("zero", 0, kind="other")])
    with pytest.raises(SystemExit, match="must hold records of classification, density, fit, recipe, .* got 'other'"):
        tool["merge"]([tmp_path / "table-1.json"], tmp_path)


def test_a_seeded_folder_knows_what_is_there(tool: dict[str, Any], tmp_path: Path) -> None:
    known = [
        record("mask", 0),
        record("misconv", 0, "whole", "ingredient", variant="whole"),
        record("mfa", 0, "ours", "objective", objective="ours"),
    ]
    results, _ = files(tool, tmp_path, known, known)
    assert tool["seed"](tmp_path / "cache", results) == 2  # ingredients are often of another run
    tool["main"](["--results", str(results), "seed", str(tmp_path / "cache"), "--only", *tool["UNITS"]])
    cache = Cache(tmp_path / "cache")
    assert cache.get(known[0]["settings"], "recipe") == known[0]
    # Two runs by the same settings are not mixed: a table would compare rows of one with rows of the other.
    again = record("mask", 0, kind="ingredient", variant="whole", accuracy_incomplete=0.4)
    tool["write"](results / "svhn-ingredients.json", [again])
    with pytest.raises(SystemExit, match=r"svhn-ingredients.json and svhn-recipe.json hold different numbers of mask"):
        tool["seed"](tmp_path / "other", results, list(tool["UNITS"]))
    assert tool["seed"](tmp_path / "other", results, ["recipe"]) == 1
    assert Cache(tmp_path / "other").get(known[0]["settings"], "recipe") == known[0]
    # What a table shows under a name of its own stands there as what it is: a row of a recipe, or of Table 1.
    variant, objective = (cache.get(each["settings"]) for each in known[1:])
    assert variant == record("misconv", 0, "whole")
    assert objective == record("mfa", 0, "ours", "classification")


def test_what_is_published_is_not_trained_again(tool: dict[str, Any], tmp_path: Path) -> None:
    """A folder that is seeded with all of it knows every row by what it is asked for."""
    tool["main"](["--results", str(RESULTS), "seed", str(tmp_path)])
    cache = Cache(tmp_path)
    for name, kind in (("cifar10-recipe", "recipe"), ("cifar10-objectives", "classification")):
        for each in tool["read"](RESULTS / f"{name}.json"):
            assert cache.get(each["settings"], kind) is not None


def test_what_is_merged_is_read_by_the_page(tool: dict[str, Any], tmp_path: Path) -> None:
    results, table = files(tool, tmp_path, [], [record("mask", 0), record("misconv", 0, "new")])
    tool["main"](["--results", str(results), "merge", str(table)])
    read = runpy.run_path(str(ROOT / "tools" / "results.py"))["read"](results)
    assert [each["method"] for each in read["svhn-recipe.json"]] == ["mask", "misconv"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: str(path.name))
def test_written_as_the_others_are(tool: dict[str, Any], path: Path, tmp_path: Path) -> None:
    tool["write"](tmp_path / "again.json", tool["read"](path))
    assert (tmp_path / "again.json").read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")).keys() == {"records"}


def test_tables_run_at_once_until_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_tables = runpy.run_path(str(ROOT / "tools" / "run_tables.py"))
    calls = [
        "B --dataset digits --quick --seeds 1 --methods zero,mask",
        "X",
        "1 --dataset digits",
        "2 --dataset digits",
    ]
    codes = run_tables["run"](calls[:2], tmp_path, 300.0, 2)
    assert codes == [0, 2]
    assert "the table must be 1, 2, " in (tmp_path / "call-1.log").read_text(encoding="utf-8")
    stopped, never = run_tables["run"](calls[2:], tmp_path, 1.0, 1)
    assert stopped not in (0, None)
    assert never is None
    said = capsys.readouterr().out
    assert all(
        f"{call}: {what}" in said for call, what in zip(calls[1:], ("exit code 2", "stopped", "not begun"), strict=True)
    )
    run_tables["pack"](tmp_path, tmp_path / "pack" / "records.tar.gz")
    with tarfile.open(tmp_path / "pack" / "records.tar.gz") as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "home", filter="data")
    assert {"call-0.log", "call-1.log", "table-B-digits-zero-mask-quick.json"} <= set(names)
    assert not any("densities" in name or "networks" in name for name in names)
    units = sorted((tmp_path / "home" / "records").glob("*.json"))
    (tmp_path / "results").mkdir()
    merge = runpy.run_path(str(ROOT / "tools" / "records.py"))["merge"]
    assert merge(units, tmp_path / "results") == ["digits-recipe.json: 2 records"]


@pytest.mark.parametrize("option", [("--minutes", "0"), ("--minutes", "1", "--at-once", "0")])
def test_tables_need_time(option: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    run_tables = runpy.run_path(str(ROOT / "tools" / "run_tables.py"))
    with pytest.raises(SystemExit):
        run_tables["main"](["1", *option])
    assert "--minutes must be above 0 and --at-once at least 1" in capsys.readouterr().err
