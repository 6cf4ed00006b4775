"""`misconv table`: what it prints and keeps, that it goes on where it was stopped, and how it says no."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from misconv import ConvDMFA, cli, data, store
from misconv._train import engine as _engine
from misconv.bench import command as bench
from misconv.cli_tables import paper_tables
from misconv.paper import classification, command, tables
from misconv.paper.cache import FORMAT
from misconv.paper.methods import METHODS, method_named
from misconv.paper.settings import SETTINGS, Settings

FIELDS = {
    "dataset", "shape", "method", "seed", "accuracy_incomplete", "accuracy_complete", "epoch", "seconds", "settings",
    "device", "versions", "commit",
}  # fmt: skip
HERE = [method.title for method in METHODS]


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True, scope="module")
def _two_epochs() -> Iterator[None]:
    """Of everything, so that a training can be stopped in its middle."""
    settings = SETTINGS["digits"]
    digits = Settings(*(replace(getattr(settings, f.name), epochs=2) for f in fields(settings)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SETTINGS, "digits", digits)
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of the digits."""
    images = data.load("digits")
    arrays = {"x_train": images.train[:120, 0], "y_train": images.train_labels[:120]}
    arrays |= {"x_test": images.test[:40, 0], "y_test": images.test_labels[:40]}
    path = tmp_path_factory.mktemp("data") / "few.npz"
    np.savez(path, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
    return path


def call(number: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["table", number, *map(str, arguments)], prog_name="misconv")


def digits(number: str, file: Path, out: Path, *more: str, seeds: int = 2) -> Result:
    return call(number, "--dataset", "digits", "--data", file, "--out", out, "--seeds", str(seeds), *more)


@pytest.fixture(scope="module")
def first(file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Table 1, made in one go, and its folder."""
    torch.set_default_dtype(torch.float32)
    out = tmp_path_factory.mktemp("paper") / "new" / "folder"
    result = digits("1", file, out)
    assert result.exit_code == 0, result.output
    return out, result


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something was trained")

    monkeypatch.setattr(classification, "train", fail)
    monkeypatch.setattr(classification, "fit_density", fail)


def shown(result: Result) -> str:
    """From the heading on."""
    return result.stdout[result.stdout.index("Table ") :].split("Records:")[0]


def read(path: Path) -> list[dict[str, Any]]:
    content: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return content["records"]


def numbers(records: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float, int]]:
    return {(r["method"], r["seed"]): (r["accuracy_incomplete"], r["accuracy_complete"], r["epoch"]) for r in records}


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# What it prints and keeps ------------------------------------------------------------------------------------------


def test_a_table_has_all_its_rows(first: tuple[Path, Result]) -> None:
    out, result = first
    assert result.stderr == ""
    # On a GPU all classifiers are branches of one graph; on a CPU the seeds of a method take turns.
    trained = ", ".join(HERE) + f"; {2 * len(HERE)}" if torch.cuda.is_available() else "zero; 2"
    assert f"digits, square: training {trained} side by side\n" in result.stdout
    assert "Table 1: Accuracy on incomplete test images" in result.stdout
    for name in HERE:
        star = r" \*" if name in ("ACFlow", "GT") else ""
        assert re.search(rf"^ *{re.escape(name)}{star} +1?\.\d+ ± \.\d+ *$", shown(result), re.MULTILINE), name
    assert "* trained on complete images: of ACFlow the flow that fills in" in " ".join(result.stdout.split())
    assert "Mean ± standard deviation over 2 seeds." in result.stdout
    assert "**" not in result.stdout
    assert result.stdout.endswith(f"\nRecords: {out / 'table-1-digits.json'}\n")
    assert all(character.isprintable() or character == "\n" for character in result.stdout)


def test_the_records_say_all_that_is_needed_to_repeat_them(first: tuple[Path, Result]) -> None:
    records = read(first[0] / "table-1-digits.json")
    assert len(records) == 2 * len(HERE)
    for record in records:
        assert record.keys() >= FIELDS
        assert (record["dataset"], record["shape"]) == ("digits", "square")
        assert record["settings"]["seed"] == record["seed"]
    markdown = (first[0] / "table-1-digits.md").read_text(encoding="utf-8")
    assert markdown.startswith("# Table 1: Accuracy on incomplete test images\n\n| method | digits (here) |\n")
    assert markdown.count("\n| ") == 2 + len(METHODS)
    assert list((first[0] / "running").iterdir()) == []


@pytest.mark.usefixtures("no_training")
def test_the_figures_need_no_more_than_table_1(file: Path, first: tuple[Path, Result]) -> None:
    names = ["masks", "imputations", "first-layer"]
    paths = [first[0] / "figures-digits" / f"{name}.png" for name in names]
    result = digits("figures", file, first[0])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"Figure: {path}" for path in paths]
    drawn = [path.read_bytes() for path in paths]
    assert all(content.startswith(b"\x89PNG") for content in drawn)
    assert len(set(drawn)) == 3
    assert json.loads(digits("figures", file, first[0], "--json").stdout) == {"figures": [str(path) for path in paths]}
    assert [path.read_bytes() for path in paths] == drawn


def test_figures_that_cannot_be_drawn(
    file: Path, first: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, label = np.zeros((120, 8, 8, 4), np.uint8), np.arange(120) % 2
    np.savez(tmp_path / "four.npz", x_train=array, y_train=label, x_test=array, y_test=label)
    out = tmp_path / "out"
    four = call("figures", "--dataset", "four", "--data", tmp_path / "four.npz", "--out", out)
    assert (four.exit_code, four.stderr) == (
        2, "misconv: four must have images of 1 or 3 channels to draw figures, got 4\n",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = digits("figures", file, out)
    assert (without.exit_code, without.stderr) == (
        2, "misconv: figures are drawn by matplotlib: pip install 'misconv[paper]'\n",
    )  # fmt: skip
    assert not out.exists()
    monkeypatch.undo()
    shutil.copytree(first[0], out)
    for layer in (out / "layers").iterdir():
        layer.unlink()
    lost = digits("figures", file, out)
    assert lost.exit_code == 2
    assert re.search(r"misconv: .*/layers/.* must be there, for its classifier was trained; use another", lost.stderr)


@pytest.mark.usefixtures("no_training")
def test_what_is_there_is_only_printed(file: Path, first: tuple[Path, Result]) -> None:
    out, result = first
    before = snapshot(out)
    again = digits("1", file, out)
    assert again.exit_code == 0, again.output
    assert again.stdout.strip().startswith("Table 1")
    assert shown(again) == shown(result)
    assert snapshot(out) == before
    for number, titles in {"2": HERE, "6": ["SMFA", "DMFA"], "8": ["MFA imputation", "MisConv"]}.items():
        other = digits(number, file, out)
        assert other.exit_code == 0, other.output
        assert other.stdout.strip().startswith(f"Table {number}: Accuracy")
        assert all(title in " ".join(other.stdout.split()) for title in titles)
        assert (out / f"table-{number}-digits.json").is_file()
    fewer = digits("2", file, out, seeds=1)
    assert "One seed." in fewer.stdout


@pytest.mark.usefixtures("no_training")
def test_a_table_as_json(file: Path, first: tuple[Path, Result]) -> None:
    result = digits("1", file, first[0], "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["table"], found["title"], found["quick"]) == ("1", "Accuracy on incomplete test images", False)
    assert found["columns"] == ["method", "digits (here)"]
    assert {row[0] for row in found["rows"]} >= set(HERE) - {"ACFlow", "GT"} | {"ACFlow *", "GT *"}
    assert all(cell in result.stdout for row in found["rows"] for cell in row if cell.isascii())
    assert "**" not in result.stdout
    assert found["records"] == read(Path(found["file"]))


def test_a_table_that_is_stopped_again_and_again_comes_out_the_same(
    file: Path, first: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each run is given twice as long, so that a group of jobs that goes on by whole epochs gets somewhere too.
    judge, calls, limit = _engine.Running.judge, 0, 8

    def stop(self: Any, epoch: int) -> None:
        nonlocal calls, limit
        calls += 1
        if calls == limit:
            calls, limit = 0, 2 * limit
            raise KeyboardInterrupt
        judge(self, epoch)

    monkeypatch.setattr(_engine.Running, "judge", stop)
    results = [digits("1", file, tmp_path)]
    while results[-1].exit_code == 130:
        assert results[-1].stderr == "misconv: stopped; call it again to go on where it was\n"
        assert "Table 1" not in results[-1].stdout
        assert not (tmp_path / "table-1-digits.json").exists()
        results.append(digits("1", file, tmp_path))
    assert results[-1].exit_code == 0, results[-1].output
    assert len(results) >= 3
    assert shown(results[-1]) == shown(first[1])
    assert numbers(read(tmp_path / "table-1-digits.json")) == numbers(read(first[0] / "table-1-digits.json"))


def test_shapes_share_the_classifiers_of_complete_images(
    file: Path, first: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "METHODS", tuple(map(method_named, ("acflow", "gt"))))
    result = digits("9", file, first[0], seeds=1)
    assert result.exit_code == 0, result.output
    assert "training GT" not in result.stdout
    assert "learning what may be missing" not in result.stdout  # one flow serves all shapes
    assert re.search(r"^ *GT \*( +1?\.\d+){3} *$", shown(result), re.MULTILINE)
    found = [(r["shape"], r["method"]) for r in read(first[0] / "table-9-digits.json")]
    assert found == [("square", "acflow"), ("square", "gt"), ("trapezoid", "acflow"), ("noise", "acflow")]


def test_the_quality_of_densities(file: Path, first: tuple[Path, Result]) -> None:
    result = digits("7", file, first[0])
    assert result.exit_code == 0, result.output
    for name in ("SMFA", "DMFA", r"ACFlow \*"):
        assert re.search(rf"^ *digits +{name}( +−?[\d.]+){{4}} *$", shown(result), re.MULTILINE)
    assert [r["kind"] for r in read(first[0] / "table-7-digits.json")] == ["density"] * 3


def test_several_data_sets_stand_side_by_side(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "svhn", SETTINGS["digits"])  # for other names, too
    result = call(
        "8", "--dataset", "digits", "--data", file, "--dataset", "mine", "--data", file, "--out", tmp_path,
        "--seeds", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert {r["dataset"] for r in read(tmp_path / "table-8-digits-mine.json")} == {"digits", "mine"}
    for name in ("digits", "mine"):
        assert re.search(rf"^ *{name}( +1?\.\d+){{2}} *$", shown(result), re.MULTILINE)


@pytest.mark.usefixtures("no_training")
def test_one_thread_makes_a_table_on_a_cpu(
    file: Path, first: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums depend on the number of threads. Where a GPU makes it, threads are left as they are."""
    seen: list[int] = []
    made = command._units

    def spy(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return made(*arguments)

    monkeypatch.setattr(command, "_units", spy)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert digits("1", file, first[0]).exit_code == 0
        assert (seen, torch.get_num_threads()) == ([2 if torch.cuda.is_available() else 1], 2)
    finally:
        torch.set_num_threads(before)


def test_in_a_pipe(file: Path, tmp_path: Path) -> None:
    """In a new process, with as few epochs as `--quick` takes."""
    options = ["--data", str(file), "--quick", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]
    line = [sys.executable, "-W", "error", "-m", "misconv", "table", "8", "--dataset", "digits", *options]
    coloured = {**os.environ, "FORCE_COLOR": "1"}  # also where a user likes colours
    done = subprocess.run(line, capture_output=True, text=True, encoding="utf-8", check=False, env=coloured)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert re.search(r"^ *digits +\.\d+ +\.\d+ *$", done.stdout, re.MULTILINE)
    assert "A quick run with few images, few epochs and small networks: these numbers mean nothing." in done.stdout
    records = read(tmp_path / "table-8-digits-quick.json")
    assert [(r["method"], r["epochs"]) for r in records] == [("mfa", 1), ("misconv_dmfa", 1)]


def test_the_time_of_the_layer_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("10", "--quick", "--device", "cpu", "--out", tmp_path)
    result = call(*options)
    assert result.exit_code == 0, result.output
    assert "Table 10: Time of the layer" in result.stdout
    assert "these times mean nothing" in result.stdout
    assert (tmp_path / "table-10-quick-bench.json").is_file()
    monkeypatch.setattr(bench, "run", None)
    assert shown(call(*options)) == shown(result)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    message = r".*table-10-quick-bench.json must have been measured on cuda, got cpu .*; use another --out"
    refused(call("10", "--quick", "--device", "cuda", "--out", tmp_path), message)
    (tmp_path / "table-10-quick-bench.json").write_text("{}")
    refused(call(*options), ".*must be a record of misconv bench, got something else; move it away")


def test_a_narrow_terminal_loses_nothing() -> None:
    heads = ["method", "MNIST (paper)", "MNIST (here)", "SVHN (paper)", "SVHN (re-cropped, here)"]
    rows = [["zero", ".910", "**.926 ± .001**", ".679", ".710 ± .002"], ["supMIWAE", "–", ".925 ± .003", "–", "–"]]
    made = tables.Table(1, "Accuracy", heads, rows)
    for width, parts in ((160, 1), (61, 1), (60, 2)):
        found = list(paper_tables(made, width))
        assert len(found) == parts
        console = Console(width=width, force_terminal=False)
        with console.capture() as printed:
            console.print(*found, sep="")
        text = " ".join(printed.get().split())
        assert all(cell.replace("**", "") in text for row in rows for cell in row)
        assert all(word in text for head in heads for word in head.split())
        assert "…" not in text


# How it says no ----------------------------------------------------------------------------------------------------


def refused(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert re.fullmatch(rf"misconv: {message}\n", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "the table must be 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, A, B, C, D, E, F, figure-A, figure-2 or figures, got 'one'"),
        (["3"], "--dataset must be given for 3, because celeba, one of the paper's, comes only with --data FILE; for example --dataset mnist"),
        (["1", "--dataset", "imagenet"], "--dataset must be one of digits, mnist, svhn, cifar10, or come with --data FILE, got 'imagenet'"),
        (["1", "--dataset", "digits", "--dataset", "digits"], "--dataset must name each data set once, got digits 2 times"),
        (["1", "--data", "a.npz"], "--data must be given once for each --dataset, got 1 file for mnist, svhn, cifar10"),
        (["1", "--dataset", "mine", "--data", "a.npz", "--data", "b.npz"], "--data must be given once for each --dataset, got 2 files for mine"),
        (["1", "--dataset", "a/b", "--data", "a.npz"], 'name must consist of letters, digits, "-" and "_", got \'a/b\''),
        (["1", "--dataset", "mine", "--data", "nowhere.npz"], "file must be an .npz file, got nowhere.npz, and there is no such file"),
        (["1", "--dataset", "digits", "--seeds", "0"], "--seeds must be between 1 and 1000, got 0"),
        (["1", "--dataset", "digits", "--seeds", str(10**11)], "--seeds must be between 1 and 1000, got 100000000000"),
        (["1", "--dataset", "digits", "--device", "tpu"], "--device must be cuda or cpu, got 'tpu'"),
        (["1", "--dataset", "digits", "--device", "cuda"], "--device cuda needs a GPU that torch can use, and there is none; --device cpu works anywhere"),
        (["10", "--dataset", "digits"], "table 10 times the layer, and takes no --dataset"),
        (["10", "--data", "a.npz"], "table 10 times the layer, and takes no --data"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_before_the_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(call(*arguments, "--out", tmp_path / "new"), message)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_train": None}, "file must hold the images .* labels both .*, got .*bad.npz without y_train"),
        ({"y_train": None, "y_test": None}, "mine must have labels, y_train and y_test, to train a classifier, got images alone"),
        ({"x_train": np.zeros((120, 8, 8))}, "x_train of bad.npz must hold images as bytes, .*, got a float64 array .*"),
        ({"x_test": np.zeros((40, 9, 9), np.uint8)}, "x_train and x_test of bad.npz must hold images of one shape, .*"),
        ({"y_test": np.zeros(39, int)}, "y_test of bad.npz must hold one label for each image, .*"),
        ({"x_train": np.zeros((2, 8, 8), np.uint8), "y_train": np.arange(2), "y_test": np.zeros(40, int)}, "mine must have at least 100 training images, got 2"),
        ({"x_train": np.zeros((120, 1, 9), np.uint8), "x_test": np.zeros((40, 1, 9), np.uint8)}, "mine must have images of at least 2×2 pixels, got 1×9"),
        ({"title": np.array("\x1b[31mred")}, "title .*must be one line that can be printed, got '.x1b.31mred'"),
    ],
)  # fmt: skip
def test_wrong_arrays_are_refused(change: dict[str, Any], message: str, file: Path, tmp_path: Path) -> None:
    with np.load(file) as archive:
        arrays = {name: array for name, array in {**archive, **change}.items() if array is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    refused(call("1", "--dataset", "mine", "--data", tmp_path / "bad.npz", "--out", tmp_path / "new"), message)
    assert not (tmp_path / "new").exists()


def test_images_too_small_for_ssim_are_refused_before_the_work(file: Path, tmp_path: Path) -> None:
    with np.load(file) as archive:
        arrays = {name: array[:, :5] if name.startswith("x") else array for name, array in archive.items()}
    np.savez(tmp_path / "low.npz", **arrays)
    asked = ("--dataset", "mine", "--data", tmp_path / "low.npz", "--out", tmp_path / "new")
    refused(call("7", *asked), "mine must have images of at least 6×6 pixels, got 5×8")
    assert not (tmp_path / "new").exists()


def test_the_home_of_nobody_is_refused(file: Path) -> None:
    refused(digits("1", file, Path("~nobody-of-that-name/x")), "--out must be a folder, got ~nobody-of-that-name/x: .*")


def test_a_folder_that_is_a_file_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    refused(digits("8", file, tmp_path / "taken"), "--out must be a folder, got .*taken, which is a file")
    refused(
        digits("8", file, tmp_path / "taken" / "below"),
        "--out must be below a folder, got .*taken/below, but .* is a file",
    )
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_place_is_tried_out_before_data_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda *arguments: pytest.fail("data were loaded"))
    (tmp_path / "taken").write_text("mine")
    refused(call("1", "--out", tmp_path / "taken" / "below"), "--out must be below a folder, got .*, but .* is a file")


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"{{}} must have the format {FORMAT} of this version, got {FORMAT + 1}; .*"),
        (b"{}", "{} must be a record of misconv, got something else; move it away"),
        (b'{"format": %d, "rec' % FORMAT, "{} must be a record of misconv, got something else; move it away"),
        (
            b'{"format": %d, "record": {"settings": {"seed": 7}}}' % FORMAT,
            "{} must hold the settings that its name stands for, got others; .*",
        ),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_used_is_refused_and_kept(
    content: bytes | None, message: str, file: Path, first: tuple[Path, Result]
) -> None:
    path = next((first[0] / "records").glob("digits-square-mfa-0-*"))
    good = path.read_bytes()
    bad = good.replace(b'"format": %d' % FORMAT, b'"format": %d' % (FORMAT + 1)) if content is None else content
    try:
        path.write_bytes(bad)
        refused(digits("8", file, first[0]), message.format(re.escape(str(path))))
        assert path.read_bytes() == bad
    finally:
        path.write_bytes(good)


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    "name", ["kind", "accuracy_incomplete", "accuracy_validation", "epoch", "title", "method", "seconds"]
)
@pytest.mark.parametrize("value", [None, "1.5", [], {}, True, 1e400, float("nan"), -0.5, "gone"])
def test_a_record_that_somebody_has_changed(name: str, value: Any, file: Path, first: tuple[Path, Result]) -> None:
    """A number that is none, a share of less than nothing, a text that is missing: one line, and the file stays."""
    if value == -0.5 and not name.startswith("accuracy"):
        pytest.skip("no share")
    if isinstance(value, str) and value != "gone" and name in ("title", "method"):
        pytest.skip("a text")
    path = next((first[0] / "records").glob("digits-square-mfa-0-*"))
    good = path.read_bytes()
    content = json.loads(good)
    content["record"][name] = value
    if value == "gone":
        del content["record"][name]
    try:
        path.write_text(json.dumps(content))
        refused(
            digits("8", file, first[0]),
            f"{re.escape(str(path))} must be a record of misconv, got something else; move it away",
        )
    finally:
        path.write_bytes(good)


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("other", ["conv", "smaller"])
def test_a_density_or_layer_of_another(other: str, file: Path, first: tuple[Path, Result], tmp_path: Path) -> None:
    """Files of misconv, but not those that their names stand for."""
    out = tmp_path / "paper"
    shutil.copytree(first[0], out)
    (out / "table-1-digits.json").unlink()
    (out / "table-1-digits.md").unlink()
    strange = torch.nn.Conv2d(1, 1, 3) if other == "conv" else ConvDMFA(1, rank=1, widths=(4,), depths=(1,))
    for path in (out / "densities").glob("digits-square-dmfa-*"):
        store.save(strange, path)
    for path in (out / "records").glob("*misconv_dmfa*"):
        path.unlink()
    refused(
        digits("8", file, out),
        "cannot load .*dmfa.*: it holds another density than its name stands for; move it away .*",
    )
    shutil.rmtree(out)
    shutil.copytree(first[0], out)
    for path in (out / "layers").iterdir():
        store.save(strange, path)
    refused(
        call("figures", "--dataset", "digits", "--data", file, "--out", out, "--seeds", "2"),
        "cannot load .*: it holds another layer than its name stands for; move it away to have it made again",
    )


@pytest.mark.parametrize("name", ["table-8-digits.md", "table-8-digits.json"])
def test_a_table_does_not_replace_the_files_of_others(name: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("my notes")
    refused(
        digits("8", file, tmp_path),
        f"--out must be new or written by this command, got .*{name}, which is another file; .*",
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "my notes")]


@pytest.mark.parametrize("part", ["densities", "running"])
def test_a_damaged_file_is_named_and_kept(
    part: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped right after the density, or in the middle of it; then the file is cut short."""

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owner = classification if part == "densities" else store
        patch.setattr(owner, "CachedMFA" if part == "densities" else "save", interrupt)
        patch.setattr(classification, "CHECKPOINT_SECONDS", 0.0)  # a GPU would write none of so short a training
        assert digits("8", file, tmp_path).exit_code == 130
    (path,) = (tmp_path / part).iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    result = digits("8", file, tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"misconv: cannot load {path}: the file is damaged or cut short; ")
    assert result.stderr.endswith("; move it away to have it made again\n")
    assert path.exists()


def test_a_full_disk_costs_the_files_but_not_the_numbers(
    file: Path, first: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(path: Path, content: bytes) -> None:
        raise OSError(28, f"cannot write {path}: No space left on device")

    monkeypatch.setattr(store, "write_bytes", fill_up)
    result = digits("1", file, first[0])
    assert result.exit_code == 2
    assert shown(result) == shown(first[1]).rstrip() + "\n"
    assert re.fullmatch(r"misconv: cannot write .*table-1-digits.md: No space left on device\n", result.stderr)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, ImportError, TypeError])
def test_mistakes_of_ours_keep_their_traceback(
    kind: type[Exception], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise kind("a mistake")

    monkeypatch.setattr(classification.Experiment, "run", fail)
    assert isinstance(digits("8", file, tmp_path).exception, kind)


def test_a_training_that_diverges_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS["digits"]
    hopeless = replace(settings, classifier=replace(settings.classifier, learning_rate=1e30))
    monkeypatch.setitem(SETTINGS, "digits", hopeless)
    result = digits("1", file, tmp_path / "out")
    assert result.exit_code == 1, result.exception
    message = "misconv: zero, seed 0, diverged in epoch 1: its loss is not finite; a smaller learning_rate may help"
    assert " ".join(result.stderr.split()) == message
    kept = [json.loads(path.read_text())["record"]["kind"] for path in (tmp_path / "out" / "records").iterdir()]
    assert set(kept) <= {"fit"}  # a GPU has all densities ready before it trains all classifiers


def test_a_missing_extra_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    refused(digits("8", file, tmp_path), re.escape("training needs Lightning Fabric: pip install 'misconv[train]'"))


def test_metrics_that_are_not_there_are_named_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda *arguments: pytest.fail("data were loaded"))
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    message = re.escape("PSNR and SSIM come from torchmetrics: pip install 'misconv[paper]'")
    refused(call("7", "--out", tmp_path), message)


def test_a_folder_that_may_not_be_written_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", deny)
    refused(
        digits("8", file, Path("/nowhere")),
        "--out must be in a place you may write to, got /nowhere: Permission denied; choose another one",
    )
