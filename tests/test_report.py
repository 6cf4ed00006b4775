"""The report says what came out, needs nothing but itself, and appears whole or not at all."""

from __future__ import annotations

import base64
import dataclasses
import errno
import io
import json
import math
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from misconv import data, missing
from misconv._store import places as _places
from misconv.demo import experiment as demo
from misconv.demo import report
from misconv.demo.experiment import Demo, Density, MethodResult
from misconv.paper import pictures as _pictures

TINY = demo.Settings(images=200, train=120, validation=30, dmfa_epochs=2, classifier_epochs=1, seeds=2)
SECTIONS = [
    "What is missing",
    "What could be there",
    "Is it honest about what it does not know?",
    "What the first layer sees",
    "Which classifier is right most often?",
    "How this was made",
]


@pytest.fixture(scope="module")
def result() -> Demo:
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        return demo.run(TINY, progress=False)


class Page(HTMLParser):
    """The tags of a page with their attributes, its words, and whether every tag is closed."""

    VOID = ("meta", "img", "line", "circle", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data if "style" not in self.open else ""


def page_of(result: Demo, folder: Path) -> Page:
    return Page(report.write_demo(result, folder, overwrite=True).read_text(encoding="utf-8"))


def test_the_page_has_every_section_method_and_density(result: Demo, tmp_path: Path) -> None:
    page = page_of(result, tmp_path)
    for text in [*SECTIONS, *(m.name for m in result.methods), *(m.what for m in result.methods), "upper bound"]:
        assert text in page.words
    assert all(d.name in page.words for d in result.densities)
    for method in result.methods:
        assert f"{100 * method.mean:.1f} ± {100 * method.deviation:.1f}" in page.words
    assert report.verdict(result).replace(" %", "\xa0%").replace("k-NN", "k\u2011NN") in page.words
    assert (
        "misconv.demo.run(misconv.demo.Settings(seed=0, seeds=2, images=200" in page.words
    )  # TINY is not what the command does


def test_the_page_tells_the_command_that_makes_it_again(result: Demo, tmp_path: Path) -> None:
    usual = dataclasses.replace(result, settings=demo.Settings(seed=7, seeds=2))
    assert "misconv demo --seed 7 --seeds 2" in page_of(usual, tmp_path).words


def test_the_page_needs_nothing_else_and_describes_its_figures(result: Demo, tmp_path: Path) -> None:
    path = report.write_demo(result, tmp_path / "deep" / "down")
    assert path == tmp_path / "deep" / "down" / "index.html"
    assert sorted(p.name for p in path.parent.iterdir()) == ["index.html", "results.json"]
    assert path.stat().st_size < 2e6
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(|<script|<link", text)
    tags = Page(text).tags
    images = [attributes for tag, attributes in tags if tag == "img"]
    assert len(images) > 100
    for image in images:
        assert image["alt"]
        assert (image["src"] or "").startswith("data:image/png;base64,")
    charts = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(charts) == len(result.methods) + 2
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    assert not any("href" in attributes for _, attributes in tags)


def test_pictures_hold_the_colours_of_the_values() -> None:
    values, hidden = torch.tensor([[0.0, 1.0], [math.nan, 0.5]]), torch.tensor([[False, False], [True, False]])
    address = _pictures.paint(values, _pictures.INK, 0, 1)
    picture = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert picture.getpixel((0, 0)) == _pictures.INK[0]
    assert picture.getpixel((picture.width - 1, 0)) == _pictures.INK[1]
    assert _pictures.paint(values, _pictures.INK, 0, 1) != _pictures.paint(values, _pictures.INK, 0, 1, hidden)
    garbage = values.masked_fill(hidden, 7.0)
    striped = [_pictures.paint(v, _pictures.INK, 0, 1, hidden, gone=True) for v in (values, garbage)]
    assert striped[0] == striped[1]  # what is missing is not drawn


def test_results_hold_every_number(result: Demo, tmp_path: Path) -> None:
    report.write_demo(result, tmp_path)
    facts = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [m["name"] for m in facts["methods"]] == [m.name for m in result.methods]
    for stored, method in zip(facts["methods"], result.methods, strict=True):
        assert stored["accuracy"] == method.accuracy
        assert len(stored["accuracy"]) == TINY.seeds
        assert (stored["mean"], stored["deviation"]) == (method.mean, method.deviation)
    for stored, density in zip(facts["densities"], result.densities, strict=True):
        assert stored == {**vars(density), "coverage": {str(k): v for k, v in density.coverage.items()}}
    assert facts["settings"]["seed"] == 0
    assert facts["settings"]["train"] == TINY.train
    assert sorted(facts["versions"]) == ["misconv", "numpy", "python", "torch"]
    assert facts["threads"] == torch.get_num_threads()
    assert {"device", "commit", "seconds"} <= set(facts)


def test_text_is_escaped_and_numbers_that_json_lacks_become_null(result: Demo, tmp_path: Path) -> None:
    odd = [dataclasses.replace(result.methods[0], name="<b>&\"'", what="<script>x</script>"), *result.methods[1:]]
    densities = [dataclasses.replace(d, nll=math.inf, name="<i>") for d in result.densities]
    changed = dataclasses.replace(result, methods=odd, densities=densities)
    page = page_of(changed, tmp_path)
    assert "<b>&\"'" in page.words
    assert "<script>x</script>" in page.words
    assert not any(tag == "script" for tag, _ in page.tags)
    assert json.loads((tmp_path / "results.json").read_text())["densities"][0]["nll"] is None


def test_one_seed_has_no_spread(result: Demo, tmp_path: Path) -> None:
    methods = [dataclasses.replace(m, accuracy=m.accuracy[:1]) for m in result.methods]
    table = page_of(dataclasses.replace(result, methods=methods), tmp_path).words.split("correct,")[1]
    assert "±" not in table.split("Share of")[0]


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [
        ([0.95, 0.95], [0.80, 0.80], "95.0 % of the incomplete test digits correctly, 15.0 points more than the best other way, k-NN: more than the"),
        ([0.81, 0.81], [0.80, 0.80], "1.0 points more than the best other way, k-NN: too close to call"),
        ([0.80, 0.80], [0.81, 0.81], "1.0 points fewer than the best other way, k-NN: too close to call"),
        ([0.60, 0.60], [0.80, 0.80], "20.0 points fewer than the best other way, k-NN: more than the"),
        ([0.80, 0.80], [0.80, 0.80], "as many as the best other way, k-NN."),
        ([0.95], [0.80], "15.0 points more than the best other way, k-NN: one training of each cannot tell how much of that is chance."),
        ([0.99, 0.61], [0.60, 0.61], "19.5 points more than the best other way, k-NN: too close to call"),
    ],
)  # fmt: skip
def test_the_verdict_is_honest(result: Demo, ours: list[float], other: list[float], expected: str) -> None:
    settings = dataclasses.replace(result.settings, images=1797, train=1200, validation=200)
    methods = [
        MethodResult("k-NN", "", other),
        MethodResult("MisConv (DMFA)", "", ours),
        MethodResult("complete images", "", [0.99, 0.99]),
    ]
    assert expected in report.verdict(dataclasses.replace(result, settings=settings, methods=methods))


# Where it may go ----------------------------------------------------------------------------------------------------


def test_a_folder_with_files_is_refused_and_untouched(result: Demo, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"folder must be new or empty, got .* with files in it; choose another one, or"
    ):
        report.write_demo(result, tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("index.html", "mine")]


def test_overwrite_replaces_the_report_and_nothing_else(result: Demo, tmp_path: Path) -> None:
    report.write_demo(dataclasses.replace(result, seconds=1.0), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    report.write_demo(dataclasses.replace(result, seconds=2.0), tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "index.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["seconds"] == 2.0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("index.html", "<!doctype html><p>my home page</p>"), ("results.json", "mine"), ("results.json", '{"methods": []}'),
        ("results.json", "[" * 100_000), ("index.html", None), ("notes.txt", "mine"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", [False, True])
def test_overwrite_refuses_what_is_not_ours(
    result: Demo, tmp_path: Path, name: str, content: str | None, beside: bool
) -> None:
    """Files of the report's names that no demo has written, alone or beside one that it has; and folders without any."""
    if beside:
        report.write_demo(result, tmp_path)
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_text(content) if content else (tmp_path / name).mkdir()
    if beside and name == "notes.txt":
        report.write_demo(result, tmp_path, overwrite=True)
        return
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(
        FileExistsError,
        match="folder must (be new or written by this command|hold a report of misconv to be overwritten), got",
    ):
        report.write_demo(result, tmp_path, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_an_empty_folder_will_do(result: Demo, tmp_path: Path) -> None:
    assert report.write_demo(result, tmp_path).exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_in_place_of_the_folder_is_refused(result: Demo, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="folder must be a folder or a new name, got .*file, which is a file"):
        report.write_demo(result, tmp_path / "file", overwrite=overwrite)
    with pytest.raises(NotADirectoryError, match="folder must be below a folder, got .*below, but .*file is a file"):
        report.write_demo(result, tmp_path / "file" / "below", overwrite=overwrite)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_one_may_not_write_to_is_refused(result: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        assert dir == tmp_path
        raise PermissionError(errno.EACCES, "Permission denied")

    # Not by permissions: those do not hold for root, who runs many a test.
    monkeypatch.setattr(_places.tempfile, "TemporaryFile", refuse)
    with pytest.raises(PermissionError, match="a place you may write to, got .*new: Permission denied; choose another"):
        report.write_demo(result, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(result: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        OSError,
        match="folder must be in a place you may write to, got .*new: Read-only file system; choose another one",
    ):
        report.write_demo(result, tmp_path / "new")


@pytest.mark.parametrize("before", [None, f"the old page {report.EYEBROW}"])
def test_a_full_disk_leaves_no_half_page(
    result: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    page = tmp_path / "index.html"
    if before is not None:
        page.write_text(before)

    replace = os.replace

    def fill_up(temporary: Path, target: Path) -> None:
        if target == page:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(temporary, target)

    monkeypatch.setattr(os, "replace", fill_up)
    with pytest.raises(OSError, match="cannot write .*index.html: No space left on device"):
        report.write_demo(result, tmp_path, overwrite=True)
    assert (page.read_text() if page.exists() else None) == before
    assert not list(tmp_path.glob(".*"))


# What the experiment may see ----------------------------------------------------------------------------------------


def run_with(hidden_values: Tensor, settings: demo.Settings) -> Demo:
    """The experiment on images that hold these values (N, 1, 8, 8) where nothing was observed."""
    complete, labels = (t[: settings.images] for t in data.digits())
    generator = torch.Generator("cpu").manual_seed(3)
    observed = missing.square(len(complete), 8, 8, fraction=1 / 4, generator=generator)
    x = torch.where(observed, complete, hidden_values)
    return demo.compare(x, observed, complete, labels, settings, False, lambda line: None, time.perf_counter())


def numbers(result: Demo) -> dict[str, Any]:
    """Everything that must not depend on hidden pixels."""
    densities: list[Density] = [dataclasses.replace(d, seconds=0.0) for d in result.densities]
    pictures = {**result.imputed, **{f"σ {k}": v for k, v in result.deviations.items()}, "samples": result.samples}
    pictures |= {way: r for way, r in result.responses.items() if way != "nothing missing"}
    return {
        "methods": {m.name: m.accuracy for m in result.methods if m.name != "complete images"},
        "densities": densities,
        "pictures": {name: values.tolist() for name, values in pictures.items()},
    }


def test_no_method_reads_a_hidden_pixel() -> None:
    torch.set_default_dtype(torch.float32)
    settings = dataclasses.replace(TINY, seeds=1)
    with torch.device("cpu"):
        shape = (TINY.images, 1, 8, 8)
        expected = numbers(run_with(torch.zeros(shape), settings))
        for poison in (torch.full(shape, math.nan), torch.full(shape, math.inf), 100 * torch.randn(shape)):
            found = numbers(run_with(poison, settings))
            for part, values in expected.items():
                assert found[part] == values, part
