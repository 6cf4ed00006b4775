"""The paper's tables: printed numbers, ours beside them, what may be chance, and the page made from them."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from misconv.paper import printed, scores, tables
from misconv.paper.methods import BY_NAME, METHODS
from misconv.paper.rows import ROWS
from misconv.paper.scores import Margin, Record
from misconv.paper.tables import Table

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "results" / "bench" / "layer-cuda.json"
TRAINING = BENCH.with_name("training-cuda.json")

# Made up, for these tests alone: accuracies of three seeds.
ZERO, MASK, DMFA = (0.910, 0.912, 0.911), (0.920, 0.924, 0.919), (0.926, 0.928, 0.927)
GT = (0.990, 0.991, 0.989)


def run(method: str, seed: int, accuracy: float, **more: Any) -> Record:
    return {
        "kind": "classification",
        "dataset": "mnist",
        "title": "MNIST",
        "shape": "square",
        "method": method,
        "seed": seed,
        "accuracy_incomplete": accuracy,
        "accuracy_complete": accuracy if method == "gt" else accuracy + 0.05,
        "seconds": 30.0,
        "device": "a device",
        "versions": {"torch": "2.x", "triton": None},
        "commit": "c0ffee",
        **more,
    }


def runs(methods: dict[str, tuple[float, ...]], **more: Any) -> list[Record]:
    return [run(m, seed, a, **more) for m, values in methods.items() for seed, a in enumerate(values)]


def quality(name: str, nll: float, **more: Any) -> Record:
    measured = {"nll": nll, "mse": 5.5, "psnr": 28.0, "ssim": 0.9, "images": 26032, "seconds": 200.0}
    return {
        "kind": "density",
        "dataset": "svhn",
        "title": "SVHN",
        "shape": "square",
        "density": name,
        **measured,
        **more,
    }


MNIST = runs({"zero": ZERO, "mask": MASK, "misconv_dmfa": DMFA, "gt": GT})
INGREDIENTS = [
    {**record, "kind": "ingredient", "variant": variant, "accuracy_validation": 0.9, "epochs": 20}
    for variant, values in {"whole": DMFA, "tuned": (0.938, 0.939, 0.94)}.items()
    for record in runs({"misconv": values})
]


def cell(table: Table, row: str, column: str) -> str:
    return next(line for line in table.rows if line[0] == row)[table.columns.index(column)]


def in_shape(table: Table) -> None:
    assert all(len(row) == len(table.columns) for row in table.rows)
    lines = [line for line in table.markdown().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(table.rows)
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


# Printed -----------------------------------------------------------------------------------------------------------


def test_printed_numbers() -> None:
    assert printed.TABLE1["mnist"]["misconv_dmfa"] == 0.931
    assert printed.TABLE1["svhn"]["partial"] == 0.376
    assert printed.TABLE2["cifar10"]["acflow"] == 0.746
    assert printed.TABLE6["svhn"] == {"misconv_smfa": 0.554, "misconv_dmfa": 0.757}
    assert printed.TABLE7["svhn"]["DMFA"] == {"nll": -1584.08, "mse": 5.34, "psnr": 30.14, "ssim": 0.94}
    assert printed.TABLE8["cifar10"] == {"mfa": 0.716, "misconv_dmfa": 0.722}
    assert printed.TABLE9["mnist"]["trapezoid"]["partial"] == 0.674
    assert printed.TABLE9["mnist"]["square"]["gt"] == 0.992
    assert printed.incomplete("svhn") == printed.TABLE1["svhn"] | {"misconv_smfa": 0.554, "mfa": 0.720}
    assert printed.incomplete("digits") == {}


def test_printed_tables_agree_where_they_repeat_each_other() -> None:
    for dataset, numbers in printed.TABLE1.items():
        for other in (printed.TABLE6, printed.TABLE8):
            assert other[dataset]["misconv_dmfa"] == numbers["misconv_dmfa"]
        assert printed.TABLE2[dataset]["gt"] == numbers["gt"]
        assert numbers.keys() == printed.TABLE2[dataset].keys() <= BY_NAME.keys()


# Tables ------------------------------------------------------------------------------------------------------------


def test_mean_and_deviation_stand_beside_the_printed_number() -> None:
    table = tables.make(1, MNIST)
    in_shape(table)
    assert table.heading == "Table 1: Accuracy on incomplete test images"
    assert table.columns == ["method", "MNIST (paper)", "MNIST (here)"]
    assert [row[0].removesuffix(" *") for row in table.rows] == [method.title for method in METHODS]
    assert [row[0] for row in table.rows if row[0].endswith("*")] == ["ACFlow *", "GT *"]
    assert cell(table, "zero", "MNIST (paper)") == ".910"
    assert cell(table, "zero", "MNIST (here)") == ".911 ± .001"  # n − 1: the population's would be .0008
    assert cell(table, "MisConv (SMFA)", "MNIST (paper)") == ".922"
    assert cell(table, "k-NN", "MNIST (here)") == "–"
    assert cell(table, "ACFlow *", "MNIST (here)") == "not measured yet"
    assert table.notes[0] == (
        "Mean ± standard deviation over 3 seeds. * trained on complete images: of ACFlow the flow that fills in; GT is "
        "tested on them, too."
    )


def test_one_seed_has_no_deviation_and_no_test() -> None:
    table = tables.make(1, [r for r in MNIST if r["seed"] == 0])
    assert cell(table, "zero", "MNIST (here)") == ".910"
    assert table.notes[0].startswith("One seed.")
    assert "MNIST, MisConv (DMFA) against mask: +0.60 points (no test, fewer than two seeds in common)." in table.notes


def test_the_best_is_bold_among_those_without_a_star() -> None:
    table = tables.make(1, MNIST)
    bold = [row[0] for row in table.rows if "**" in row[2]]
    assert bold == ["MisConv (DMFA)"]
    assert cell(table, "MisConv (DMFA)", "MNIST (here)") == "**.927 ± .001**"
    assert cell(table.plain(), "MisConv (DMFA)", "MNIST (here)") == ".927 ± .001"
    alike = tables.make(1, runs({"zero": (0.9101,), "mask": (0.9099,), "mean": (0.9,)}))
    assert [row[0] for row in alike.rows if "**" in row[2]] == ["zero", "mask"]
    assert not any("**" in c for row in tables.make(1, runs({"zero": (1.0,)})).rows for c in row)


def test_table_2_shows_complete_images() -> None:
    table = tables.make(2, MNIST)
    assert cell(table, "zero", "MNIST (here)") == ".961 ± .001"
    assert cell(table, "zero", "MNIST (paper)") == ".984"
    assert cell(table, "MFA imputation", "MNIST (paper)") == "–"
    assert tables.make(1, runs({"gt": (1.0,)})).rows[-1] == ["GT *", ".990", "1.000"]


def test_titles_of_the_records_say_what_the_images_are() -> None:
    records = runs({"zero": ZERO}, dataset="cifar10", title="CIFAR-10 (JPEG)") + MNIST
    records += runs({"zero": ZERO[:2], "mask": MASK}, dataset="mine", title="a | b")
    table = tables.make(1, records)
    in_shape(table)
    assert table.columns[1:] == [
        "MNIST (paper)",
        "MNIST (here)",
        "CIFAR-10 (paper)",
        "CIFAR-10 (JPEG, here)",
        "a | b (here)",  # no printed numbers, so no column for them
    ]
    assert "over seeds (MNIST: 3; CIFAR-10 (JPEG): 3; a | b: 2 to 3)" in table.notes[0]
    assert tables.make(1, records, ["svhn"]).columns == ["method", "SVHN (paper)", "SVHN (here)"]
    assert "a \\| b (here)" in table.markdown()


def test_cifar10_is_compared_with_the_bound() -> None:
    records = runs({"misconv_dmfa": (0.7, 0.71), "gt": (0.8, 0.78)}, dataset="cifar10", title="CIFAR-10")
    assert "CIFAR-10, MisConv (DMFA): 0.892 × GT." in tables.make(1, records).notes
    assert not any("× GT" in note for note in tables.make(1, MNIST).notes)


@pytest.mark.parametrize("number", tables.NUMBERS[:-1])
def test_without_records_there_are_dashes(number: int) -> None:
    table = tables.make(number, [])
    in_shape(table)
    ours = [i for i, head in enumerate(table.columns) if head.endswith("here)")]
    assert {row[i] for row in table.rows for i in ours} <= {"–", "not measured yet"}
    assert any(row[i - 1] != "–" for row in table.rows for i in ours)


def test_two_methods_by_data_sets() -> None:
    records = MNIST + runs({"misconv_smfa": (0.925, 0.926, 0.923), "mfa": (0.93, 0.932, 0.931)})
    table = tables.make(6, records)
    in_shape(table)
    assert table.columns == ["data set", "SMFA (paper)", "SMFA (here)", "DMFA (paper)", "DMFA (here)"]
    assert table.rows == [["MNIST", ".922", ".925 ± .002", ".931", "**.927 ± .001**"]]
    table = tables.make(8, records)
    assert table.rows == [["MNIST", ".923", "**.931 ± .001**", ".931", ".927 ± .001"]]
    assert (
        "MNIST, MisConv (DMFA) against MFA imputation: −0.40 points (no test, the same for every seed)." in table.notes
    )


def test_quality_of_the_densities() -> None:
    records = [quality("DMFA", -1500.123), quality("SMFA", -900.5, mse=6.0)]
    table = tables.make(7, records)
    in_shape(table)
    assert table.text == 2
    assert [row[1] for row in table.rows] == ["SMFA", "DMFA"]
    assert table.rows[0][2:6] == ["−1127.71", "−900.50", "5.81", "6.00"]
    assert table.rows[1][2:6] == ["−1584.08", "**−1500.12**", "5.34", "**5.50**"]
    assert table.rows[0][-2:] == [".86", "**.900**"]
    assert "(SVHN: 26,032); the paper defines neither units nor averages" in table.notes[0]
    assert not any("complete images" in note for note in table.notes)
    table = tables.make(7, [*records, quality("ACFlow", -9000.0)])  # which has seen more, and is not in the paper
    assert table.rows[2][:4] == ["SVHN", "ACFlow *", "–", "−9000.00"]
    assert "**−1500.12**" in table.rows[1]
    assert table.notes[-1].startswith("* not in the paper's table; trained on complete images")
    own = tables.make(7, [quality("SMFA", -1, dataset="digits", title="digits")])
    assert own.columns == ["data set", "density", "NLL (here)", "MSE (here)", "PSNR (here)", "SSIM (here)"]


def test_shapes() -> None:
    records = MNIST + runs({"zero": ZERO, "misconv_dmfa": DMFA}, shape="noise")
    table = tables.make(9, records)
    in_shape(table)
    heads = [f"{shape} ({where})" for shape in ("square", "trapezoid", "noise") for where in ("paper", "here")]
    assert table.columns == ["method", *heads]
    assert cell(table, "zero", "noise (here)") == ".911 ± .001"
    assert cell(table, "zero", "trapezoid (here)") == "–"
    assert cell(table, "GT *", "noise (here)") == ".990 ± .001"  # sees no missing pixel, so one training serves all
    assert "MNIST, noise, MisConv (DMFA) against zero: +1.60 points (no test, the same for every seed)." in table.notes


def test_times() -> None:
    table = tables.make(10, [], benchmark=json.loads(BENCH.read_text(encoding="utf-8")))
    in_shape(table)
    assert len(table.rows) == 9
    assert table.rows[0][:4] == ["28×28, batch 16", "160 ± 60", "920 ± 300", "5.8"]
    for missing in (None, {"sections": {}}):
        with pytest.raises(
            ValueError, match="Table 10 needs what `misconv bench --only table10 --out FILE` writes on a GPU"
        ):
            tables.make(10, [], benchmark=missing)


def test_unknown_tables_are_refused() -> None:
    for number in (0, 3, 4, 5, 11):
        message = rf"table must be one of 1, 2, 6, 7, 8, 9, 10, got {number}; of 3, 4 and 5 it is make_generation"
        with pytest.raises(ValueError, match=message):
            tables.make(number, MNIST)


def test_records_that_contradict_each_other_are_refused() -> None:
    assert tables.make(1, MNIST + MNIST).rows == tables.make(1, MNIST).rows
    with pytest.raises(
        ValueError, match="records must agree, got accuracy_incomplete 0.91 and 0.5 for .*zero.*, seed 0"
    ):
        tables.make(1, [*MNIST, run("zero", 0, 0.5)])


# Chance ------------------------------------------------------------------------------------------------------------


def test_the_paired_test_is_that_of_scipy() -> None:
    dmfa = scores.best_margin(MNIST, "mnist")
    assert dmfa is not None
    assert (dmfa.method, dmfa.baseline, dmfa.seeds) == ("misconv_dmfa", "mask", 3)
    assert dmfa.points == pytest.approx(0.6)
    assert dmfa.p == pytest.approx(ttest_rel(DMFA, MASK).pvalue)
    note = f"MNIST, MisConv (DMFA) against mask: +0.60 points (p = {dmfa.p:.3f} over 3 seeds)."
    assert note in tables.make(1, MNIST).notes


def test_seeds_are_paired_whatever_their_order() -> None:
    records = [
        *runs({"mask": MASK}),
        run("mask", 9, 0.5),
        *reversed(runs({"misconv_dmfa": DMFA})),
        run("misconv_dmfa", 7, 1.0),
    ]
    margin = scores.best_margin(records, "mnist")
    assert margin is not None
    assert margin.seeds == 3
    assert margin.points == pytest.approx(0.6)
    assert margin.p == pytest.approx(ttest_rel(DMFA, MASK).pvalue)


def test_without_spread_there_is_no_test() -> None:
    ours = [(0.92, 0.93, 0.94), (0.91, 0.92, 0.93)]
    records = [runs({"zero": (0.91, 0.92, 0.93), "misconv_dmfa": values}) for values in ours]
    ahead, equal = (scores.best_margin(each, "mnist") for each in records)
    assert ahead is not None
    assert equal is not None
    assert (ahead.p, ahead.chance) == (None, "no test, the same for every seed")
    assert (equal.p, equal.difference) == (None, "+0.00")
    assert ahead.points == pytest.approx(1)


def test_too_few_seeds() -> None:
    assert scores.best_margin(MNIST, "svhn") is None
    assert scores.best_margin(runs({"zero": ZERO}), "mnist") is None
    apart = [run("zero", 0, 0.9), run("misconv_dmfa", 1, 0.92)]
    margin = scores.best_margin(apart, "mnist")
    assert margin is not None
    assert (margin.seeds, margin.p) == (0, None)
    assert str(margin) == "MisConv (DMFA) against zero: +2.00 points (no test, fewer than two seeds in common)"


def test_words_of_a_margin() -> None:
    assert (
        str(Margin("misconv_dmfa", "knn", -0.125, 3, 0.0004))
        == "MisConv (DMFA) against k-NN: −0.12 points (p < 0.001 over 3 seeds)"
    )
    assert Margin("misconv_dmfa", "knn", 1, 3, 0.0104).chance == "p = 0.010"


def test_a_missing_scipy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ImportError, match=r"the paired test needs scipy: pip install 'misconv\[demo\]'"):
        scores.best_margin(MNIST, "mnist")


# The page ----------------------------------------------------------------------------------------------------------


def write_page(folder: Path, *files: Any, benchmark: Path = BENCH) -> Path:
    (folder / "results").mkdir()
    for i, content in enumerate(files):
        (folder / "results" / f"{i}.json").write_text(json.dumps(content), encoding="utf-8")
    page = runpy.run_path(str(ROOT / "tools" / "results.py"))
    page["main"](["--results", str(folder / "results"), "--out", str(folder), "--benchmark", str(benchmark)])
    return folder / "results.md"


def test_the_page_is_made_from_the_records(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "masks.png").touch()
    svhn = runs({"mask": MASK, "misconv_dmfa": DMFA}, dataset="svhn", title="SVHN (re-cropped)")
    noise = runs({"zero": ZERO}, shape="noise")
    page = write_page(
        tmp_path, {"records": MNIST + noise, "more": 1}, svhn + INGREDIENTS, {"other": 2}, [quality("SMFA", -9.0)]
    )
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!-- made by tools/results.py from 0.json, 1.json, 3.json; do not edit -->\n")
    for number in (1, 2, 6, 7, 8, 9, 10):
        assert text.count(f"\n## Table {number}: ") == 1
    for part in (
        "Table C: What the ingredients of the recipe are worth",
        "What was decided",
        "Where it ran",
        "How to repeat it",
    ):
        assert f"\n## {part}\n" in text
    assert "misconv table 1 --dataset mnist --data mnist.npz --seeds 3\n" in text
    assert "- MNIST: a device; torch 2.x; commit c0ffee; seeds 0, 1, 2; 21 records." in text
    for line in (
        "| data set, what is missing | densities |",
        "| MNIST, square | – |",
        "| MNIST, noise | – | 90 s (3) |",
    ):
        assert line in text
    assert "- SVHN (re-cropped): the crops were made again" in text
    assert "pictures/masks.png" in text
    assert "first-layer.png" not in text
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1
    for name in ("results.png", "ingredients.png"):
        assert f"](pictures/{name})" in text
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")


def test_tables_without_records_are_left_out(tmp_path: Path) -> None:
    own = runs({"zero": (0.9,), "gt": (0.99,)}, dataset="digits", title="digits")
    text = write_page(tmp_path, own, benchmark=tmp_path / "none.json").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("## Table")] == [
        "## Table 1: Accuracy on incomplete test images",
        "## Table 2: Accuracy on complete test images",
        # Those of generation and of our own are announced.
        "## Table 3: Fréchet distance of samples",
        "## Table 4: SSIM of reconstructions",
        "## Table 5: PSNR of reconstructions",
        "## Table B: One recipe for all",
        "## Table C: What the ingredients of the recipe are worth",
        "## Table A: Networks trained on complete images meet incomplete ones",
        "## Table D: Why three methods collapse in the paper",
        "## Table E: Which trapezoids the paper may have had",
        "## Table F: The paper's densities, by its objective and by ours",
    ]
    assert text.count("Not measured yet: `misconv table ") == 10
    assert "misconv table 1 --dataset digits --seeds 1\n" in text
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["results.png"]


def test_densities_alone_make_a_page_without_plots(tmp_path: Path) -> None:
    text = write_page(tmp_path, [quality("SMFA", -9.0)], benchmark=tmp_path / "none.json").read_text(encoding="utf-8")
    assert "## Table 7: Quality of the densities" in text
    assert "## Table 1" not in text
    assert "png" not in text


def test_the_page_needs_records(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no records in .*; run `misconv table 1` first"):
        write_page(tmp_path, {"records": []})
    (tmp_path / "results" / "0.json").write_text("{")
    page = runpy.run_path(str(ROOT / "tools" / "results.py"))
    with pytest.raises(SystemExit, match="0.json is not JSON"):
        page["main"](["--results", str(tmp_path / "results"), "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


# What is published -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> list[Record]:
    files = sorted((ROOT / "results" / "paper").glob("*.json"))
    return [record for file in files for record in json.loads(file.read_text(encoding="utf-8"))["records"]]


def test_the_page_shows_what_is_published() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "results.py"))
    sources = page["read"](ROOT / "results" / "paper")
    names = (*page["FIGURES"], "results.png", "ingredients.png")
    pictures = {name: (ROOT / "docs" / "pictures" / name).exists() for name in (*names, "recipe.png", "shares.png")}
    assert all(pictures[name] for name in names)
    benchmark, timed = (json.loads(file.read_text(encoding="utf-8")) for file in (BENCH, TRAINING))
    text = page["page"](sources, benchmark, pictures, timed)
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == text


def test_published_runs_can_be_repeated(published: list[Record]) -> None:
    everywhere = {"dataset", "shape", "settings", "device", "versions", "commit"}
    trained = {"method", "seed", "accuracy_incomplete", "accuracy_complete", "accuracy_validation", "epoch"}
    for record in published:
        tested = record["kind"] in ("transfer", "share")  # networks that another record tells of
        wanted = everywhere | (trained if record["kind"] in ("classification", "ingredient", "recipe") else set())
        assert wanted | (set() if tested else {"seconds"}) <= record.keys()
        assert re.fullmatch("[0-9a-f]{40}", record["commit"])
        assert record["settings"]["seed"] == record.get("seed", 0)
        assert (record["settings"]["dataset"], record["settings"]["shape"]) == (record["dataset"], record["shape"])


@pytest.mark.parametrize(("dataset", "seeds"), [("mnist", 5), ("svhn", 3), ("cifar10", 3)])
def test_block_one_is_published_as_a_whole(published: list[Record], dataset: str, seeds: int) -> None:
    # That, and not who is first: a run is published however it came out, and a repeated one replaces it.
    mine = scores.of(published, kind="classification", dataset=dataset, shape="square")
    found = {method: scores.scores(mine, method=method) for method in BY_NAME if method != "acflow"}
    assert {len(by_seed) for by_seed in found.values()} == {seeds}


@pytest.mark.parametrize("dataset", ["mnist", "svhn", "cifar10"])
def test_block_two_is_published_as_a_whole(published: list[Record], dataset: str) -> None:
    mine = scores.of(published, kind="recipe", dataset=dataset)
    found = {row.name: scores.scores(mine, method=row.name) for row in ROWS if not row.extra}
    assert min(len(by_seed) for by_seed in found.values()) >= 5
