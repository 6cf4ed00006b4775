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
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import misconv
from misconv import data, demo, missing
from misconv._store import places as _places
from misconv._train import cpu_by_default
from misconv.demo import digits, page_photographs, photographs, report
from misconv.demo.digits import Digits, DigitSettings, MethodResult
from misconv.demo.experiment import Demo
from misconv.demo.photographs import Photographs, PhotographSettings
from misconv.mfa import MFA
from misconv.paper import pictures as _pictures

TINY = demo.Settings(
    seeds=2,
    photographs=PhotographSettings(side=16, train=40, stride=90, steps=2, components=2, rank=1, batch_size=8),
    digits=DigitSettings(images=200, train=120, validation=30, dmfa_steps=6, classifier_epochs=1),
)
SECTIONS = [
    "What is behind the hole?",
    "Is it honest?",
    "What does a network see?",
    "When should one not answer?",
    "What could be there",
    "Which classifier is right most often?",
    "When not to use it",
    "How this was made",
]


@pytest.fixture(scope="module")
def result() -> Demo:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
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


def with_digits(result: Demo, **changes: Any) -> Demo:
    return dataclasses.replace(result, digits=dataclasses.replace(result.digits, **changes))


def page_of(result: Demo, folder: Path) -> Page:
    return Page(report.write_demo(result, folder, overwrite=True).read_text(encoding="utf-8"))


def test_the_page_has_every_section_way_method_and_density(result: Demo, tmp_path: Path) -> None:
    page = page_of(result, tmp_path)
    methods, ways = result.digits.methods, result.photographs.ways
    for text in [*SECTIONS, *(m.name for m in methods), *(m.what for m in methods), "upper bound"]:
        assert text in page.words
    assert all(d.name in page.words for d in result.digits.densities)
    for method in methods:
        assert f"{100 * method.mean:.1f} ± {100 * method.deviation:.1f}{100 * method.kept_mean:.1f}" in page.words
    assert all(text in page.words for way in ways for text in (way.name, way.what, f"{way.rmse:.4f}"))
    assert report.findings(result.photographs).replace(" %", "\xa0%") in page.words
    assert result.photographs.assessment.verdict().replace(" %", "\xa0%") in page.words
    assert report.verdict(result).replace(" %", "\xa0%").replace("k-NN", "k\u2011NN") in page.words
    command = re.search(r"misconv\.demo\.run\((.*)\)A?", page.words.split("Settings and versions")[0])
    assert command  # TINY is not what the command does
    assert eval(command[1], {"misconv": misconv}) == TINY


def test_the_page_tells_the_command_that_makes_it_again(result: Demo, tmp_path: Path) -> None:
    for option, settings in (("", demo.Settings()), ("--quick ", demo.QUICK)):
        usual = dataclasses.replace(result, settings=dataclasses.replace(settings, seed=7, seeds=2))
        assert f"misconv demo {option}--seed 7 --seeds 2" in page_of(usual, tmp_path).words


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
    assert len(charts) == len(result.digits.methods) + 3
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
    stored = facts["digits"]
    assert [m["name"] for m in stored["methods"]] == [m.name for m in result.digits.methods]
    for numbers, method in zip(stored["methods"], result.digits.methods, strict=True):
        assert (numbers["accuracy"], numbers["kept"]) == (method.accuracy, method.kept)
        assert len(numbers["accuracy"]) == len(numbers["kept"]) == TINY.seeds
        assert (numbers["mean"], numbers["deviation"]) == (method.mean, method.deviation)
    for numbers, density in zip(stored["densities"], result.digits.densities, strict=True):
        assert numbers["assessment"] == json.loads(density.assessment.to_json())
        assert numbers["seconds"] == density.seconds
    stored = facts["photographs"]
    assert stored["assessment"] == json.loads(result.photographs.assessment.to_json())
    assert [dataclasses.asdict(way) for way in result.photographs.ways] == stored["ways"]
    assert [dataclasses.asdict(fifth) for fifth in result.photographs.fifths] == stored["fifths"]
    assert {name: [list(p) for p in points] for name, points in result.photographs.kept.items()} == stored["kept"]
    assert (stored["tested"], stored["hidden"]) == (result.photographs.tested, result.photographs.hidden)
    assert facts["settings"]["seed"] == 0
    assert facts["settings"]["digits"]["train"] == TINY.digits.train
    assert sorted(facts["versions"]) == ["misconv", "numpy", "python", "torch"]
    assert facts["threads"] == torch.get_num_threads()
    assert {"device", "commit", "seconds"} <= set(facts)


def test_text_is_escaped_and_numbers_that_json_lacks_become_null(result: Demo, tmp_path: Path) -> None:
    methods = result.digits.methods
    odd = [dataclasses.replace(methods[0], name="<b>&\"'", what="<script>x</script>"), *methods[1:]]
    densities = [
        dataclasses.replace(d, assessment=dataclasses.replace(d.assessment, nll=math.inf), name="<i>")
        for d in result.digits.densities
    ]
    changed = with_digits(result, methods=odd, densities=densities)
    page = page_of(changed, tmp_path)
    assert "<b>&\"'" in page.words
    assert "<script>x</script>" in page.words
    assert not any(tag == "script" for tag, _ in page.tags)
    assert json.loads((tmp_path / "results.json").read_text())["digits"]["densities"][0]["assessment"]["nll"] is None


def test_one_seed_has_no_spread(result: Demo, tmp_path: Path) -> None:
    methods = [dataclasses.replace(m, accuracy=m.accuracy[:1]) for m in result.digits.methods]
    table = page_of(with_digits(result, methods=methods), tmp_path).words.split("correct,")[1]
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
    settings = dataclasses.replace(
        result.settings, digits=dataclasses.replace(result.settings.digits, images=1797, train=1200, validation=200)
    )
    methods = [
        MethodResult("k-NN", "", other),
        MethodResult("MisConv (DMFA)", "", ours),
        MethodResult("complete images", "", [0.99, 0.99]),
    ]
    assert expected in report.verdict(dataclasses.replace(with_digits(result, methods=methods), settings=settings))


@pytest.mark.parametrize(
    ("bias", "expected"), [(-0.12, "12 % too weakly"), (0.058, "6 % too strongly"), (-0.004, "without bias")]
)
def test_the_findings_name_the_side_of_a_bias(result: Demo, bias: float, expected: str) -> None:
    ways = [dataclasses.replace(way, bias={"edge": bias, "random": 9.0}) for way in result.photographs.ways]
    assert f"edge filters {expected}, and {expected}." in page_photographs.findings(
        dataclasses.replace(result.photographs, ways=ways)
    )


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


def run_digits_with(hidden_values: Tensor, settings: DigitSettings) -> Digits:
    """The digits with these values (N, 1, 8, 8) where nothing was observed."""
    complete, labels = (t[: settings.images] for t in data.digits())
    generator = torch.Generator("cpu").manual_seed(3)
    observed = missing.square(len(complete), 8, 8, fraction=1 / 4, generator=generator)
    x = torch.where(observed, complete, hidden_values)
    return digits.compare(x, observed, complete, labels, settings, seed=0, seeds=1, progress=False, say=silent)


def silent(line: str) -> None:
    """Says nothing."""


def numbers_of_digits(result: Digits) -> dict[str, Any]:
    """Everything that must not depend on hidden pixels."""
    pictures = {**result.imputed, "deviations": result.deviations, "samples": result.samples}
    return {
        "methods": {m.name: (m.accuracy, m.kept) for m in result.methods if m.name != "complete images"},
        "densities": [dataclasses.replace(d, seconds=0.0) for d in result.densities],
        "pictures": {name: values.tolist() for name, values in pictures.items()},
    }


def test_no_method_reads_a_hidden_pixel_of_a_digit() -> None:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        shape = (TINY.digits.images, 1, 8, 8)
        expected = numbers_of_digits(run_digits_with(torch.zeros(shape), TINY.digits))
        for poison in (torch.full(shape, math.nan), torch.full(shape, math.inf), 100 * torch.randn(shape)):
            found = numbers_of_digits(run_digits_with(poison, TINY.digits))
            for part, values in expected.items():
                assert found[part] == values, part


def run_photographs_with(hidden_values: Tensor) -> Photographs:
    """Random crops with these values (N, 3, 16, 16) where nothing was observed, half of them for the test."""
    truth = torch.rand(hidden_values.shape, generator=torch.Generator("cpu").manual_seed(4))
    generator = torch.Generator("cpu").manual_seed(3)
    observed = missing.free_form(len(truth), 16, 16, generator=generator)
    train, test = truth.where(observed, hidden_values).chunk(2)
    return photographs.compare(
        train, observed[: len(train)], test, observed[len(train) :], truth[len(train) :], TINY.photographs,
        seed=0, progress=False, say=silent,
    )  # fmt: skip


def test_no_way_reads_a_hidden_pixel_of_a_photograph() -> None:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        shape = (40, 3, 16, 16)
        expected = run_photographs_with(torch.zeros(shape))
        pictures = {"deviations": expected.deviations, "errors": expected.errors, **expected.filled}
        pictures |= {f"response {way}": r for way, r in expected.responses.items()}
        for poison in (torch.full(shape, math.nan), torch.full(shape, math.inf), 100 * torch.randn(shape)):
            found = run_photographs_with(poison)
            assert {**found.numbers(), "seconds": 0} == {**expected.numbers(), "seconds": 0}
            drawn = {"deviations": found.deviations, "errors": found.errors, **found.filled}
            drawn |= {f"response {way}": r for way, r in found.responses.items()}
            assert {name: r.tolist() for name, r in drawn.items()} == {name: r.tolist() for name, r in pictures.items()}


# What the figures mean ----------------------------------------------------------------------------------------------


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """Where the demo computes all of this."""
    with cpu_by_default():
        yield


@pytest.mark.usefixtures("on_the_cpu")
def test_crops_to_learn_from_and_test_crops_have_no_pixel_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """In photographs whose left halves are black and whose right halves are white."""
    torch.set_default_dtype(torch.float32)
    picture = torch.zeros(3, 40, 60)
    picture[..., 30:] = 1
    given = {}

    def compare(train: Tensor, observed: Tensor, x: Tensor, shown: Tensor, truth: Tensor, *_: Any, **__: Any) -> None:
        given.update(train=train, observed=observed, x=x, shown=shown, truth=truth)

    monkeypatch.setattr(photographs.data, "photographs", lambda: [picture, picture])
    monkeypatch.setattr(photographs, "compare", compare)
    settings = PhotographSettings(side=16, train=10, stride=7)
    photographs.learn_and_compare(settings, seed=0, progress=False, say=silent)
    assert given["train"].shape == (10, 3, 16, 16)
    assert given["truth"].shape == (2 * 4 * 3, 3, 16, 16)  # (40 − 16) / 7 + 1 rows, (30 − 16) / 7 + 1 columns
    assert (given["train"] == 0).all()
    assert (given["truth"] == 1).all()
    assert given["x"].isnan().equal(~given["shown"].expand(given["x"].shape))
    assert (~given["observed"]).float().mean() == (~given["shown"]).float().mean() == 0.25


@pytest.mark.usefixtures("on_the_cpu")
def test_the_order_of_pixels_goes_by_what_it_says() -> None:
    observed = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    observed[..., 1:4, 1:4] = False
    assert photographs.distance_to_seen(observed)[0, 0, 2].tolist() == [0, 1, 2, 1, 0]
    x = torch.zeros(1, 1, 30, 30)
    x[..., 20:, :] = torch.tensor([0.0, 1.0]).repeat(15)
    contrast = photographs.nearby_contrast(x.where(torch.ones_like(x) > 0, 0), torch.ones_like(x) > 0)[0, 0]
    assert contrast[5, 5] == 0
    assert contrast[29, 15] > 0.4
    unseen = photographs.nearby_contrast(x, torch.zeros_like(x) > 0)
    assert unseen.isinf().all()


@pytest.mark.usefixtures("on_the_cpu")
def test_filters_have_sum_zero() -> None:
    for weight in (photographs.edge_filters(), photographs.random_filters()):
        assert weight.shape[1:] == (3, 3, 3)
        assert weight.sum((1, 2, 3)).abs().max() < 1e-6


def test_a_perfect_density_has_no_bias_and_a_ranking_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of known deviation, told as it is: the mean fill underestimates responses, the expectation does not."""
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        generator = torch.Generator("cpu").manual_seed(0)
        deviation = torch.linspace(0.01, 0.2, 60).view(-1, 1, 1, 1)
        truth = 0.5 + deviation * torch.randn(60, 3, 16, 16, generator=generator)
        observed = missing.square(60, 16, 16, fraction=1 / 2, generator=generator)

    def perfect(x: Tensor, observed: Tensor) -> MFA:
        values = 3 * observed.sum((1, 2, 3), keepdim=True)
        noise = (x - 0.5).where(observed, 0).square().sum((1, 2, 3), keepdim=True) / values
        noise = noise.expand(x.shape).unsqueeze(1)  # (B, 1, 3, H, W)
        factors = noise.new_zeros(len(x), 1, 0, *x.shape[1:])
        return MFA(torch.zeros(len(x), 1), torch.full_like(noise, 0.5), factors, noise).fix(x, observed)

    monkeypatch.setattr(photographs, "_learn", lambda *_: perfect)
    with cpu_by_default():
        found = photographs.compare(
            truth, observed, truth, observed, truth, TINY.photographs, seed=0, progress=False, say=silent
        )
    assert found.way("mean").bias["random"] < -0.1
    assert abs(found.way("MisConv").bias["random"]) < 0.02
    assert abs(found.way("MisConv").bias["edge"]) < 0.02
    assert found.claimed / found.way("mean").rmse == pytest.approx(1, abs=0.03)
    for fifth in found.fifths:
        assert fifth.claimed / fifth.rmse == pytest.approx(1, abs=0.1)
    assert sum(fifth.share for fifth in found.fifths) == pytest.approx(1)
    for points in found.kept.values():
        assert points[-1] == (1, pytest.approx(found.way("mean").rmse))
    assert found.kept["what the density claims"][9][1] < 0.7 * found.kept["distance"][9][1]
