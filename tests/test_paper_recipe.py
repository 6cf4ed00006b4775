"""One recipe for all, what is made of its networks, and the tables of our own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from misconv import data, impute, missing
from misconv.paper import classification, coding, command, evidence, letters, printed, recipe, splitting
from misconv.paper.augment import Augmented, FreshlyHidden, Versions
from misconv.paper.cache import Cache
from misconv.paper.inputs import zeros_and_mask
from misconv.paper.recipe import RECIPES, Joint, Runs, Work
from misconv.paper.regions import ALL_SHAPES, all_shapes
from misconv.paper.rows import ROWS, row_named
from misconv.paper.scores import Record
from misconv.paper.settings import AUTHORS
from misconv.paper.shares import SHARES, run_shares
from misconv.paper.supmiwae import SupMIWAE, SupMIWAESettings, log_weights
from misconv.paper.teacher import DECAY, Taught
from misconv.paper.transfer import WAYS, run_transfer
from misconv.paper.variants import VARIANTS, run_variants, variants_of
from tests.test_paper_classification import Crash, Spied, dying, essence, given_to_jobs, quickly, same, tiny

NAMES = [row.name for row in ROWS]
SMALL = replace(
    RECIPES["digits"], epochs=2, shift=1, flip=True, batch_size=54, tuned=1,
    density=replace(RECIPES["digits"].density, rank=1, widths=(4, 4), depths=(1, 1), epochs=1),
    supmiwae=SupMIWAESettings(width=4, steps=2, latent=3, samples=2),
    splitting=splitting.SplittingSettings(widths=(4, 8), epochs=1, batch_size=54),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)
    monkeypatch.setitem(RECIPES, "digits", SMALL)
    monkeypatch.setattr(recipe, "SAMPLES", 2)


def colourful() -> data.ImageSet:
    """Digits of three channels, the second and the third paler."""
    images = tiny()
    train, test = (torch.cat([x, x // 2, x // 3], 1) for x in (images.train, images.test))
    return replace(images, train=train, test=test)


# Rows ------------------------------------------------------------------------------------------------------------------


def test_all_rows_are_trained_and_read_no_hidden_pixel(tmp_path: Path) -> None:
    names = NAMES if splitting.is_there() else [name for name in NAMES if name != "splitting"]
    records = Runs(Spied(tmp_path / "a")).run(names, [0])
    assert [record["method"] for record in records] == names
    for record in records:
        assert 0 < record["accuracy_incomplete"] <= 1
        assert math.isfinite(record["nll"])
        assert record["epochs"] == 2
    assert not list((tmp_path / "a" / "running").iterdir())
    errors = {record["method"]: record.get("rmse") for record in records}
    filled = {r["method"] for r in records if row_named(r["method"]).source != "images" and not r["joint"]}
    assert {name for name, error in errors.items() if error is not None} == filled
    experiment = Spied(tmp_path / "a")
    x, observed = experiment.test.at(torch.arange(len(experiment.test)))
    known = impute.Mean().fit(*experiment.train.at(experiment.split[0]))(x, observed)
    apart = (known - experiment.whole("test").at(torch.arange(len(x)))[0])[~observed.expand_as(x)]
    assert errors["mean"] == pytest.approx(float(apart.square().mean().sqrt()), rel=1e-5)
    poisoned = Runs(Spied(tmp_path / "b", filler=math.nan)).run(names, [0])
    assert essence(poisoned) == essence(records)


@pytest.mark.parametrize("call", [9, 11, 15])
def test_killed_in_any_epoch_it_ends_with_the_same_records(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second epoch of sampled completions, in their fine-tuning, and in the second epoch of supMIWAE."""
    names, settings = ["hiding", "samples", "supmiwae"], replace(SMALL, epochs=3)
    straight = essence(Runs(Spied(tmp_path / "straight"), settings).run(names, [0, 1]))
    with dying(monkeypatch, Augmented, "begin", call), pytest.raises(Crash):
        Runs(Spied(tmp_path / "killed"), settings).run(names, [0, 1])
    assert list((tmp_path / "killed" / "running").iterdir())
    assert essence(Runs(Spied(tmp_path / "killed"), settings).run(names, [0, 1])) == straight


def test_only_what_a_row_uses_makes_it_another_unit(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)

    def changed(**more: Any) -> set[str]:
        before, after = Runs(experiment, SMALL), Runs(experiment, replace(SMALL, **more))
        return {name for name in NAMES if before.unit(name, 0) != after.unit(name, 0)}

    dense = {"samples", "mfa", "misconv", "draws"}
    assert changed(density=replace(SMALL.density, rank=2)) == dense
    assert changed(tuned=0) == changed(tuned_learning_rate=1.0) == dense
    assert changed(deviation=True) == {"misconv"}
    assert changed(supmiwae=SupMIWAESettings()) == {"supmiwae"}
    assert changed(splitting=splitting.SplittingSettings()) == {"splitting"}
    assert changed(hide=False) == set(NAMES) - {"gt"}
    assert changed(epochs=9) == changed(shift=0) == set(NAMES)


def test_networks_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that learned together with its density; one whose file is gone is trained again."""
    monkeypatch.setattr(recipe, "_is_better", lambda later, earlier: True)
    runs = Runs(Spied(tmp_path))
    (record,) = runs.run(["mfa"], [0])
    assert record["joint"]
    work = Runs(Spied(tmp_path)).networks(["mfa"], [0])["mfa", 0]
    assert isinstance(work.network, Joint)
    # What is filled in is what the density of this row says, which has learned with the classifier.
    truth, test = runs.experiment.whole("test").images, runs.experiment.test
    with torch.no_grad():
        mean = work.network.density(*test.at(torch.arange(len(test)))).mean
    hidden = ~test.observed
    error = (mean - truth.float() / 255)[hidden.expand_as(mean)].double().square().mean().sqrt()
    assert record["rmse"] == pytest.approx(float(error), rel=1e-5)
    logs = recipe.log_probabilities(work.network, runs.given(work, runs.experiment.test, {}), 60, torch.device("cpu"))
    right = (logs.argmax(1) == runs.experiment.labels[1]).double().mean()
    assert float(right) == pytest.approx(record["accuracy_incomplete"])
    runs.experiment.cache.network(work.settings).unlink()
    again = Runs(Spied(tmp_path)).networks(["mfa"], [0])["mfa", 0]
    assert all(
        torch.equal(a, b)
        for a, b in zip(work.network.state_dict().values(), again.network.state_dict().values(), strict=True)
    )


def test_regions_are_hidden_anew_in_every_epoch(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    rows = torch.arange(40)
    fresh = FreshlyHidden(Versions(experiment.train), rows, 0, shift=0, flip=False)
    shown = []
    for epoch in (0, 1, 0):
        fresh.begin(epoch)
        x, observed = fresh(rows)
        assert not (observed & ~experiment.train.observed[rows]).any()
        assert torch.equal(x, experiment.train.at(rows)[0])
        shown.append(observed)
    assert torch.equal(shown[0], shown[2])
    assert not torch.equal(shown[0], shown[1])
    untouched = (shown[0] == experiment.train.observed[rows]).flatten(1).all(1).sum()
    assert 8 < int(untouched) < 32


# supMIWAE ----------------------------------------------------------------------------------------------------------------


class Bright(nn.Module):
    """Three classes by the brightness of an image."""

    def forward(self, p: Any) -> torch.Tensor:
        return p.mean.mean((1, 2, 3)).unsqueeze(1) * torch.tensor([1.0, 2.0, -1.0])


def test_importance_weights_and_the_bound() -> None:
    torch.manual_seed(0)
    model = SupMIWAE(Bright(), (2, 6, 5), SupMIWAESettings(width=4, steps=2, latent=3, samples=4), samples=5).eval()
    x, observed, labels = torch.rand(3, 2, 6, 5), torch.rand(3, 1, 6, 5) < 0.6, torch.tensor([0, 2, 1])
    poisoned = x.masked_fill(~observed, math.nan)
    mean, deviation = model.encode(poisoned, observed)
    z = mean + deviation * torch.randn(4, 3, 3)
    pixels, spread = model.decode(z)
    assert pixels.shape == spread.shape == (4, 3, 2, 6, 5)
    found = log_weights(poisoned, observed, (pixels, spread), z, (mean, deviation))
    normal = torch.distributions.Normal
    for s in range(4):
        for b in range(3):
            seen = observed[b].expand(2, 6, 5)
            expected = normal(pixels[s, b][seen], spread[s, b][seen]).log_prob(x[b][seen]).sum()
            expected += normal(0.0, 1.0).log_prob(z[s, b]).sum() - normal(mean[b], deviation[b]).log_prob(z[s, b]).sum()
            torch.testing.assert_close(found[s, b], expected, rtol=1e-4, atol=1e-3)
    torch.manual_seed(1)
    bound = model(poisoned, observed, labels)
    torch.manual_seed(1)
    images, logs = model.complete(poisoned, observed, 4)
    terms = [logs[s] + Bright()(recipe.point(images[s])).log_softmax(1)[torch.arange(3), labels] for s in range(4)]
    torch.testing.assert_close(bound, torch.stack(terms).double().exp().mean(0).log().float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(images[0].where(observed, 0), x.where(observed, 0))
    answer = model(poisoned, observed)
    torch.testing.assert_close(answer.exp().sum(1), torch.ones(3))
    assert torch.equal(answer, model(poisoned, observed))


# No retraining, shares, codings, variants -----------------------------------------------------------------------------------


def test_networks_of_complete_images_meet_all_shapes(tmp_path: Path) -> None:
    names = [way.name for way in WAYS]
    records = run_transfer(Runs(Spied(tmp_path / "a")), names, [0])
    assert {record["shape"] for record in records} == set(ALL_SHAPES) - {"channels"}
    assert len(records) == 4 * len(names)
    assert {record["method"] for record in records} == set(names)
    poisoned = run_transfer(Runs(Spied(tmp_path / "b", filler=math.nan)), names, [0])
    assert essence(poisoned) == essence(records)
    assert run_transfer(Runs(Spied(tmp_path / "a")), ["zero"], [0]) == [r for r in records if r["method"] == "zero"]


def test_images_of_several_channels_lose_some_too(tmp_path: Path) -> None:
    runs = Runs(Spied(tmp_path, colourful()), replace(SMALL, epochs=1, tuned=0))
    records = run_transfer(runs, ["zero", "mean", "knn", "misconv"], [0])
    assert {record["shape"] for record in records} == set(ALL_SHAPES)
    drawn = all_shapes(3)(64, 8, 8, fraction=0.5, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (64, 3, 8, 8)
    assert 5 < int((drawn[:, :1] != drawn).flatten(1).any(1).sum()) < 30  # of which channels are missing


def test_a_network_is_asked_as_it_would_be_by_hand(tmp_path: Path) -> None:
    runs = Runs(Spied(tmp_path))
    (record,) = [r for r in run_transfer(runs, ["zero"], [0]) if r["shape"] == "noise"]
    network = runs.networks(["gt"], [0])["gt", 0].network
    observed = missing.noise(60, 8, 8, fraction=3 / 4, generator=torch.Generator().manual_seed(2))
    x = runs.experiment.data.test.float() / 255
    right = network(recipe.point(impute.zero(x, observed))).argmax(1) == runs.experiment.data.test_labels
    assert record["accuracy"] == pytest.approx(float(right.double().mean()))


def test_networks_meet_every_share(tmp_path: Path) -> None:
    runs = Runs(Spied(tmp_path))
    records = run_shares(runs, ["partial", "mean"], [0])
    assert [record["share"] for record in records] == [*SHARES, *SHARES]
    for row in runs.run(["partial", "mean"], [0]):
        (whole,) = [r for r in records if r["method"] == row["method"] and r["share"] == 0]
        assert whole["accuracy"] == row["accuracy_complete"]
    # Squares of an image of 8×8 have whole pixels.
    hidden = [record["hidden"] for record in records[: len(SHARES)]]
    assert hidden == [pytest.approx(side**2 / 64) for side in (0, 2, 4, 4, 5, 6, 6, 7, 7, 7)]
    notes = evidence.make_letter("figure-A", records).notes
    assert "digits: regions have whole pixels, and hide 0, 6, 25, 25, 39, 56, 56, 77, 77, 77 %." in notes


@pytest.mark.parametrize(("measure", "kind"), [(run_shares, "share"), (run_transfer, "transfer")])
def test_only_what_is_missing_is_measured_again(
    measure: Callable[..., list[Record]], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(Spied(tmp_path))
    names = ["mean", "mask"] if kind == "share" else ["mean", "zero"]
    records = measure(runs, names, [0, 1])
    lost = records[3]
    runs.experiment.cache._record(lost["settings"]).unlink()
    kept: list[tuple[str, int]] = []
    keep = Cache.keep

    def spied(self: Cache, settings: dict[str, Any], record: Record) -> Record:
        kept.append((record["method"], record["seed"]))
        return keep(self, settings, record)

    monkeypatch.setattr(Cache, "keep", spied)
    assert essence(measure(Runs(Spied(tmp_path)), names, [0, 1])) == essence(records)
    assert kept == [(lost["method"], lost["seed"])]


def test_coded_otherwise_in_training_than_in_the_test(tmp_path: Path) -> None:
    records = coding.run_coding(Spied(tmp_path), [0])
    assert [(r["method"], r["coding"]) for r in records] == [
        (m, c) for c in ("right", "wrong") for m in coding.MISCODED
    ]
    assert {r["kind"] for r in records} == {"coding"}
    x, seen = torch.rand(1, 1, 5, 5), torch.ones(1, 1, 5, 5)
    seen[..., 2, 2] = 0
    layer = coding.SignedPartial(1, 2, 3, padding=1)
    inside = layer(x, seen)[..., 2, 2]  # eight pixels of nine are seen
    response = (x * seen)[0, 0, 1:4, 1:4].mul(layer.weight[:, 0]).sum((1, 2)) * 9 / 8 + layer.bias
    torch.testing.assert_close(inside[0], response.relu())
    signed = layer(x, 2 * seen - 1)[..., 2, 2]
    response = (x * (2 * seen - 1))[0, 0, 1:4, 1:4].mul(layer.weight[:, 0]).sum((1, 2)) * 9 / 7 + layer.bias
    torch.testing.assert_close(signed[0], response.relu())


def test_trapezoids_of_both_kinds_stand_side_by_side(tmp_path: Path) -> None:
    found = [letters.run_letter("E", Spied(tmp_path, shape=s), None, [], [0]) for s in letters.shapes_of_table("E")]
    records = [record for each in found for record in each]
    assert {(r["shape"], r["kind"]) for r in records} == {("trapezoid", "slanted"), ("cut", "slanted")}
    table = evidence.make_letter("E", records)
    assert [row[1] for row in table.rows] == ["zero", "mask", "k-NN", "PC", "MisConv (DMFA)"]
    assert all("–" not in row[3:] for row in table.rows)


def test_the_papers_density_is_trained_by_both_objectives(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    records = letters.run_letter("F", experiment, None, [], [0])
    found = {(r["method"], r["objective"]): r["settings"]["density"]["objective"] for r in records}
    assert found == {
        (m, o): objective
        for m in ("mfa", "misconv_dmfa")
        for o, objective in (("paper", "joint"), ("ours", "joint+marginal+moments"))
    }
    table = evidence.make_letter("F", records)
    assert [row[1] for row in table.rows] == ["the paper's", "ours"]
    assert experiment.settings.dmfa.objective == "joint"


def test_the_authors_rates_are_a_line_of_their_own_where_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Spied(tmp_path)
    other = replace(experiment.settings.dmfa, batch_size=30, learning_rates=(1e-5,))
    monkeypatch.setitem(AUTHORS, "digits", other)
    records = letters.run_letter("F", experiment, None, [], [0])
    chosen = {r["objective"]: r["settings"]["density"] for r in records}
    assert [chosen[name]["learning_rates"] == [1e-5] for name in ("paper", "authors", "ours")] == [False, True, False]
    assert chosen["authors"]["batch_size"] == 30
    assert chosen["authors"]["epochs"] == chosen["paper"]["epochs"]
    names = [row[1] for row in evidence.make_letter("F", records).rows]
    assert names == ["the paper's", "the paper's, by the authors' rates", "ours"]


def test_variants_share_what_is_the_same(tmp_path: Path) -> None:
    names = ["whole", "components", "deviation"]
    experiment, whole = Spied(tmp_path), replace(SMALL, epochs=1, tuned=0)
    records = run_variants(experiment, whole, names, [0])
    assert [record["variant"] for record in records] == names
    (own,) = Runs(experiment, whole).run(["misconv"], [0])
    assert {**own, "kind": "ingredient", "variant": names[0]} == records[0]
    assert {variant.row for variant in VARIANTS.values()} == {"misconv", "mfa", "draws"}
    # Some of a part, then others: all that are known are shown; one that is the whole by another name is not trained.
    assert "not-moved" not in variants_of(replace(whole, shift=0, flip=False))
    assert "not-moved" in variants_of(whole)
    assert not {"tuned", "mfa-tuned"} & set(variants_of(whole))
    assert variants_of(SMALL) == list(VARIANTS)
    shown = letters.run_letter("C", experiment, whole, ["mfa"], [0])
    assert [record["variant"] for record in shown] == ["whole", "components", "deviation", "mfa"]


def test_fine_tuning_has_the_last_of_the_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages, stage = [], Runs._stage

    def counted(self: Runs, works: Sequence[Work], epochs: int, **options: Any) -> Path:
        stages.append(([(work.row.name, work.seed) for work in works], epochs, bool(options)))
        return stage(self, works, epochs, **options)

    monkeypatch.setattr(Runs, "_stage", counted)
    runs = Runs(Spied(tmp_path), replace(SMALL, epochs=3))
    monkeypatch.setattr(classification, "SIDE_BY_SIDE", 4)
    runs._train([("misconv", 0), ("mask", 0), ("mfa", 1)])
    dense = [("misconv", 0), ("mfa", 1)]
    assert stages == [([("mask", 0)], 3, False), (dense, 2, False), (dense, 1, True)]
    records = [runs.experiment.cache.get(runs.unit(*each)) for each in (("misconv", 0), ("mask", 0), ("mfa", 1))]
    assert [record["epochs"] for record in records if record] == [3, 3, 3]
    for tuned in (-1, 3):
        with pytest.raises(ValueError, match=f"tuned must be fewer than all 3 epochs, got {tuned}"):
            Runs(Spied(tmp_path), replace(SMALL, epochs=3, tuned=tuned))


@pytest.fixture
def _later_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned networks are the better ones, whatever a few images say."""
    monkeypatch.setattr(recipe, "_is_better", lambda later, earlier: True)


@pytest.mark.usefixtures("_later_wins")
def test_fine_tuning_changes_a_copy_of_the_density_by_its_own_rate(tmp_path: Path) -> None:
    """Adam's first step is as long as the learning rate, whatever the gradient."""
    rate, share = 1e-3, 0.01
    one_step = {"tuned_learning_rate": rate, "density_learning_rate_scale": share, "batch_size": 108}
    runs = Runs(Spied(tmp_path), replace(SMALL, epochs=2, **one_step))
    works = runs.networks(["misconv", "mfa"], [0, 1]).values()
    shared = runs.experiment.density("unet", SMALL.density)
    before = dict(shared.state_dict())
    assert same(Spied(tmp_path).density("unet", SMALL.density), shared)  # as it was fitted
    tuned = []
    for work in works:
        assert isinstance(work.network, Joint)
        found = dict(work.network.density.named_parameters())
        tuned.append(torch.cat([(value - before[name]).detach().flatten() for name, value in found.items()]))
        assert float(tuned[-1].abs().max()) == pytest.approx(rate * share, rel=0.01)
    assert not any(torch.equal(a, b) for number, a in enumerate(tuned) for b in tuned[:number])


def test_fine_tuning_that_makes_nothing_better_is_given_up(tmp_path: Path) -> None:
    settings = [replace(SMALL, epochs=2 + tuned, tuned=tuned, tuned_learning_rate=0.0) for tuned in (0, 3)]
    whole, tuned = (Runs(Spied(tmp_path), each) for each in settings)
    (plain,), (other,) = (runs.run(["misconv"], [0]) for runs in (whole, tuned))
    assert (plain["epochs"], other["epochs"], other["joint"]) == (2, 5, False)
    for name in ("epoch", "accuracy_validation", "accuracy_incomplete", "nll"):
        assert other[name] == plain[name]
    networks = [work.network for runs in (whole, tuned) for work in runs.networks(["misconv"], [0]).values()]
    assert same(*networks)


def test_only_training_images_are_moved_and_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The split of all other methods; images that choose the epoch and those of the test are given as they are."""
    given = given_to_jobs(monkeypatch, recipe)
    runs = Runs(Spied(tmp_path), replace(SMALL, tuned=0))
    records = runs.run(["mask", "misconv"], [0, 1])
    experiment, (rows, held) = runs.experiment, runs.experiment.split
    assert [more["seed"] for *_, more in given] == [0, 1, 0, 1]
    density = experiment.density("unet", SMALL.density)
    x, observed = experiment.train.at(held)
    for number, (inputs, labels, more) in enumerate(given):
        assert torch.equal(labels, experiment.labels[0][rows])
        assert torch.equal(more["validation_labels"], experiment.labels[0][held])
        chosen = more["validation_inputs"](torch.arange(len(held)))
        wanted = zeros_and_mask(x, observed) if number < 2 else density(x, observed)
        torch.testing.assert_close((chosen.mean, chosen.variance), (wanted.mean, wanted.variance))
        usual = experiment.train.at(rows[:20])[1]
        assert not torch.equal(inputs(torch.arange(20)).mean[:, :1] != 0, usual)  # moved, and more of some is hidden
    x, observed = experiment.test.at(torch.arange(len(experiment.test)))
    for record, work in zip(records, runs.networks(["mask", "misconv"], [0, 1]).values(), strict=True):
        p = zeros_and_mask(x, observed) if record["method"] == "mask" else density(x, observed)
        right = work.network(p).argmax(1) == experiment.labels[1]
        assert float(right.double().mean()) == pytest.approx(record["accuracy_incomplete"], abs=1.01 / len(x))


def test_ways_of_an_earlier_call_are_shown_too(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    letters.run_letter("A", experiment, None, ["zero"], [0])
    shown = letters.run_letter("A", experiment, None, ["mean"], [0])
    assert {record["method"] for record in shown} == {"zero", "mean"}


def test_a_teacher_is_an_average_and_sees_less_hidden(tmp_path: Path) -> None:
    torch.manual_seed(0)
    taught = Taught(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)))
    assert all(p.requires_grad and name.startswith("student") for name, p in taught.named_parameters())
    assert {*taught.teacher.state_dict()} == {*taught.student.state_dict()}
    more, less = torch.randn(2, 5, 3)
    before = taught.teacher[0].weight.clone()
    with torch.no_grad():
        taught.student[0].weight.add_(1.0)
    said, answers = taught.train()(more, less)
    assert torch.allclose(taught.teacher[0].weight, before + 0.9, atol=1e-6)  # hardly anything of the first weights
    taught.steps.fill_(1e6)
    with torch.no_grad():
        taught.student[0].weight.add_(1.0)
    said, answers = taught(more, less)
    assert torch.allclose(taught.teacher[0].weight, before + 0.9 + 1.1 * (1 - DECAY), atol=1e-5)
    statistics = taught.student[1].running_mean  # of two batches, the first of which the teacher has had a share of
    assert not torch.equal(statistics, taught.teacher[1].running_mean)
    assert torch.equal(taught.teacher[1].weight, taught.student[1].weight)  # which nothing has changed
    assert torch.equal(answers, taught.teacher(less))  # no dropout, no statistics of the batch
    assert said.requires_grad
    assert not answers.requires_grad
    assert torch.equal(taught.eval()(more), taught.teacher(more))

    experiment = Spied(tmp_path)
    versions = Versions(experiment.train)
    augmented = Augmented(versions, experiment.split[0], 0, hide=True, shift=1, flip=True, cached=False)
    augmented.begin(0)
    rows = torch.arange(40)
    (x, observed), (y, shown) = augmented(rows), augmented.with_less_hidden(rows)
    assert (observed <= shown).all()
    assert observed.sum() < shown.sum()
    assert torch.equal(x.where(observed, 0), y.where(observed, 0))  # moved in the same way


def test_a_taught_network_learns_and_reads_no_hidden_pixel(tmp_path: Path) -> None:
    taught = replace(SMALL, tuned=0, teacher=1.0)
    records = Runs(Spied(tmp_path / "a"), taught).run(["misconv"], [0])
    poisoned = Runs(Spied(tmp_path / "b", filler=math.nan), taught).run(["misconv"], [0])
    assert essence(poisoned) == essence(records)
    plain = Runs(Spied(tmp_path / "a"), replace(SMALL, tuned=0)).run(["misconv"], [0])
    assert essence(plain) != essence(records)
    (work,) = Runs(Spied(tmp_path / "a"), taught).networks(["misconv"], [0]).values()
    assert isinstance(work.network, Taught)
    # What is tested is the average of the best epoch, not the weights that it began with.
    runs = Runs(Spied(tmp_path / "a"), taught)
    held = runs.experiment.split[1]
    take, labels = runs.given(work, runs.experiment.train, {}), runs.experiment.labels[0][held]
    right = (work.network(take(held)).argmax(1) == labels).double().mean()
    assert float(right) == pytest.approx(records[0]["accuracy_validation"])
    began = Runs(Spied(tmp_path / "c"), taught).experiment.network(row_named("misconv").first_layer, "small", 0)
    for name, value in began.state_dict().items():
        if value.is_floating_point():
            assert not torch.equal(value, work.network.teacher.state_dict()[name]), name
    with pytest.raises(ValueError, match="a teacher must be without joint fine-tuning"):
        Runs(Spied(tmp_path), replace(SMALL, tuned=1, teacher=1.0))


# Tables --------------------------------------------------------------------------------------------------------------------


def recorded(kind: str, **more: Any) -> list[Record]:
    shape = {"title": "SVHN (re-cropped)", "dataset": "svhn", "shape": "square", "kind": kind}
    return [
        {**shape, "seed": seed, **{k: v + seed / 100 if isinstance(v, float) else v for k, v in more.items()}}
        for seed in range(3)
    ]


def test_table_b_says_how_far_misconv_is_ahead_and_what_is_not_measured() -> None:
    figures = {"accuracy_complete": 0.9, "nll": 0.5, "ece": 0.1, "abstention": 0.1}
    records = recorded("recipe", method="misconv", accuracy_incomplete=0.8, **figures)
    records += recorded("recipe", method="gt", accuracy_incomplete=0.1, **figures)
    for name, apart in (("mfa", (0.02, 0.03, 0.04)), ("zero", (0.2, 0.21, 0.25))):
        below = recorded("recipe", method=name, accuracy_incomplete=0.8, **figures)
        records += [
            {**r, "accuracy_incomplete": r["accuracy_incomplete"] - a, "nll": r["nll"] + a}
            for r, a in zip(below, apart, strict=True)
        ]
    table = evidence.make_letter("B", records)
    cells = {row[1]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert {row["data set"] for row in cells.values()} == {"SVHN (re-cropped)"}
    assert cells["MFA imputation"]["points of MisConv"] == "+3.00 (p = 0.035)"
    assert cells["zero"]["points of MisConv"].startswith("+22.00 (p = 0.010")  # twice that of one comparison
    assert cells["k-NN"]["accuracy"] == "not measured yet"
    assert (cells["GT *"]["accuracy"], cells["GT *"]["on complete images"]) == ("–", ".910 ± .010")
    assert cells["MisConv"]["accuracy"] == "**.810 ± .010**"
    assert cells["MFA imputation"]["NLL, MisConv minus row"] == "−0.030 (p = 0.035)", "by the same numbers"
    assert cells["zero"]["NLL, MisConv minus row"].startswith("−0.220 (p = 0.010")
    assert cells["GT *"]["NLL, MisConv minus row"] == "–"
    assert cells["MisConv"]["points of MisConv"] == "–"
    assert any("Holm" in note for note in table.notes)
    assert not any("another run" in note for note in table.notes)


def test_table_a_says_how_far_methods_are_ahead_of_imputation() -> None:
    records: list[Record] = []
    for name, apart in (("mfa", (0.0, 0.0, 0.0)), ("samples", (0.02, 0.03, 0.04)), ("zero", (-0.2, -0.2, -0.1))):
        for seed, lead in enumerate(apart):
            row = recorded("transfer", method=name, accuracy=0.8, nll=0.5, ece=0.1, abstention=0.1)[0]
            records.append({**row, "seed": seed, "accuracy": 0.8 + lead})
    table = evidence.make_letter("A", records)
    points = {row[2]: row[-1] for row in table.rows}
    assert points["samples averaged"] == "+3.00 (p = 0.035)"
    assert points["zero"] == points["MFA imputation"] == points["MisConv"] == "–"
    assert any("Holm" in note for note in table.notes)
    assert not any("Holm" in note for note in evidence.make_letter("A", [r for r in records if r["seed"] == 0]).notes)


def test_table_b_tells_what_added_seeds_say_by_themselves() -> None:
    figures = {"accuracy_complete": 0.9, "nll": 0.5, "ece": 0.1, "abstention": 0.1}
    records: list[Record] = []
    for commit, seeds, apart in (("a" * 40, (0, 1, 2), (0.0, 0.01, -0.01)), ("b" * 40, (3, 4, 5), (0.02, 0.03, 0.04))):
        for seed, margin in zip(seeds, apart, strict=True):
            for name, lead in (("misconv", margin), ("mfa", 0.0)):
                row = {"method": name, "accuracy_incomplete": 0.8 + lead, "commit": commit, **figures}
                records.append({**recorded("recipe", **row)[0], "seed": seed, "accuracy_incomplete": 0.8 + lead})
    (note,) = (note for note in evidence.make_letter("B", records).notes if "added in a later run" in note)
    assert note.endswith("SVHN (re-cropped), seeds 3, 4, 5: MFA imputation +3.00 (p = 0.035).")
    for record in records:  # a single seed that was trained again says nothing, nor does one of a run that is not known
        record["commit"] = {0: "c" * 40, 1: None}.get(record["seed"], "b" * 40)
    assert not any("added in a later run" in note for note in evidence.make_letter("B", records).notes)


def test_variants_of_another_run_than_the_whole_are_named() -> None:
    about = {"method": "misconv", "accuracy_incomplete": 0.8, "accuracy_validation": 0.8, "epochs": 20}
    runs = {"whole": "a", "tuned": "a", "components": "b"}
    records = [r for v, c in runs.items() for r in recorded("ingredient", **about, variant=v, commit=c * 40)]
    (note,) = (note for note in evidence.make_letter("C", records).notes if "another run" in note)
    assert note.endswith("trained anew: SVHN (re-cropped) with K = 3.")
    together = [r for r in records if r["variant"] != "components"]
    assert not any("another run" in note for note in evidence.make_letter("C", together).notes)


def test_how_far_each_coding_is_from_the_papers_numbers() -> None:
    printed_here = printed.incomplete("svhn")
    records = [
        {**recorded("coding", method=m, coding=c)[0], "accuracy_incomplete": printed_here[m] + apart}
        for c, by_method in (("wrong", (0.01, -0.02, 0.03)), ("right", (0.2, 0.2, 0.2)))
        for m, apart in zip(coding.MISCODED, by_method, strict=True)
    ]
    (note,) = (note for note in evidence.make_letter("D", records).notes if "points between" in note)
    assert note.endswith("the printed ones, the mean: coded −1 2.0, coded right 20.0.")


@pytest.mark.parametrize(("letter", "kind"), [("A", "transfer"), ("B", "recipe"), ("C", "ingredient")])
def test_tables_say_what_densities_they_have(letter: str, kind: str) -> None:
    density = {"widths": [8, 16], "depths": [1, 2], "patch": 2, "objective": "joint"}
    densities = [{**density, "patch": patch} for patch in (2, 1)]
    settings = [{"density": each} if letter == "A" else {"recipe": {"density": each}} for each in densities]
    about = {"method": "misconv", "accuracy_incomplete": 0.8, "epochs": 20}
    about |= {"variant": "whole", "accuracy_validation": 0.8} if letter == "C" else {}
    records = [r for s in settings for r in recorded(kind, **about, settings=s)]
    notes = evidence.make_letter(letter, records).notes
    each = "8 to 16 channels in 3 blocks, patch {}, joint"
    assert f"Densities: SVHN (re-cropped) {each.format(1)} or {each.format(2)}." in notes


@pytest.mark.parametrize("letter", evidence.LETTERS)
def test_without_records_a_table_says_so(letter: str) -> None:
    table = evidence.make_letter(letter, [])
    assert "not measured yet" in table.markdown() or not table.rows


def test_methods_of_a_part_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.data, "load", lambda name, file: tiny())
    plan = command.prepare("B", ["digits"], seeds=1, folder=tmp_path, device="cpu", methods=["zero"])
    records = command.run(plan)
    assert {record["method"] for record in records} == {"zero"}
    path = command.write(plan, command.table(plan, records), records)
    assert path.name == "table-B-digits-zero.json"
    more = replace(plan, methods=("mask",))
    assert [record["method"] for record in command.run(more)] == ["zero", "mask"]  # merged with the first
    figure = command.prepare("figure-A", ["digits"], seeds=1, folder=tmp_path, device="cpu", methods=["zero"])
    command.write(figure, command.table(figure, found := command.run(figure)), found)
    assert (tmp_path / "figure-A-digits-zero.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "figure-A-digits-zero.json").read_text())["records"]) == len(SHARES)
    for number, methods, text in (
        ("B", ["nothing"], "--methods must be some of zero,.*, got 'nothing'"),
        ("1", ["zero"], "--methods is for the tables 3, 4, 5, A, B and C and for figure-A, got table 1"),
    ):
        with pytest.raises(ValueError, match=text):
            command.prepare(number, ["digits"], folder=tmp_path, methods=methods)


def test_without_deepinv_its_row_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(splitting, "is_there", lambda: False)
    experiment = Spied(tmp_path, say=said.append)
    assert letters.run_letter("B", experiment, None, ["splitting"], [0]) == []
    assert said == ["U-Net, splitting losses: left out, needs deepinv: pip install 'misconv[alternatives]'"]
