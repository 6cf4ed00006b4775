"""The protocol of the experiments, on a few digits: what is read, when, by whom, and what is kept of it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from misconv import MFA, SMFA, data, impute, missing, store
from misconv._store.provenance import commit
from misconv._train import images as _images
from misconv._train import jobs as _jobs
from misconv._train import running as _running
from misconv.data import ImageSet
from misconv.paper import cache as caches
from misconv.paper import classification, densities, methods
from misconv.paper.cache import FORMAT, Cache, as_json, key
from misconv.paper.classification import Experiment
from misconv.paper.classifiers import Trained
from misconv.paper.densities import DensitySettings
from misconv.paper.flows import FlowSettings
from misconv.paper.inputs import IncompleteImages, Take
from misconv.paper.methods import METHODS as ALL_METHODS
from misconv.paper.methods import Method, method_named
from misconv.paper.quality import quality
from misconv.paper.regions import one_of
from misconv.paper.scores import Record
from misconv.paper.settings import SHAPES, ClassifierSettings, Settings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

TRAIN, TEST = 120, 60
SETTINGS = Settings(
    dmfa=DensitySettings("LinearDMFA", rank=2, epochs=1, batch_size=48, learning_rates=(1e-3,)),
    smfa=DensitySettings("SMFA", components=2, rank=1, epochs=2),
    classifier=ClassifierSettings("small", epochs=1, batch_size=40, learning_rate=5e-3),
    acflow=FlowSettings(epochs=1, scales=2, width=2, blocks=1, batch_size=40),
)
METHODS = [method.name for method in ALL_METHODS]
DENSITIES = {"smfa": SETTINGS.smfa, "dmfa": SETTINGS.dmfa}
FIELDS = {
    "dataset", "shape", "method", "seed", "accuracy_incomplete", "accuracy_complete", "epoch", "seconds", "settings", "device",
    "versions", "commit",
}  # fmt: skip


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small, git asked once, and no waiting for the disk, which nobody pulls out."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(classification, "commit", asked_once)
    monkeypatch.setattr(store.os, "fsync", lambda number: None)


asked_once = cache(commit)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


class Crash(BaseException):
    """Like a Ctrl-C: nobody catches it."""


def cpu() -> Fabric:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    return fabric


digits = cache(data.load)


def tiny(**changes: Any) -> ImageSet:
    all_of_them = digits("digits")
    few = {"train": TRAIN, "train_labels": TRAIN, "test": TEST, "test_labels": TEST}
    parts = {name: getattr(all_of_them, name)[:count] for name, count in few.items()}
    return replace(all_of_them, **(parts | changes))


class Spied(Experiment):
    """Remembers the networks that came to the test, with their histories."""

    def __init__(self, folder: Path | str, images: ImageSet | None = None, shape: str = "square", **more: Any) -> None:
        settings = more.pop("settings", SETTINGS)
        super().__init__(images or tiny(), shape, Cache(folder), cpu(), settings=settings, progress=False, **more)
        self.networks: dict[tuple[str, str | None, int], nn.Module] = {}
        self.histories: list[list[dict[str, float]]] = []

    def test_once(self, trained: Trained, *takes: Take) -> Record:
        self.networks[trained.method.name, trained.variant, trained.seed] = trained.network
        self.histories.append(trained.history)
        return super().test_once(trained, *takes)


def given_to_jobs(monkeypatch: pytest.MonkeyPatch, place: Any) -> list[tuple[Any, Tensor, dict[str, Any]]]:
    """Collects what every classifier of a module is trained on: inputs, labels, and the other arguments."""
    given: list[tuple[Any, Tensor, dict[str, Any]]] = []
    make = place.classifier_job

    def spy(network: nn.Module, inputs: Any, labels: Tensor, *rest: Any, **more: Any) -> Any:
        given.append((inputs, labels, more))
        return make(network, inputs, labels, *rest, **more)

    monkeypatch.setattr(place, "classifier_job", spy)
    return given


def classifier(**changes: Any) -> Settings:
    return replace(SETTINGS, classifier=replace(SETTINGS.classifier, **changes))


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def garbage(images: Tensor, observed: Tensor, seed: int = 9) -> Tensor:
    """Images with random bytes where nothing is observed."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(256, images.shape, dtype=torch.uint8, generator=generator, device="cpu")
    return images.where(observed.cpu(), noise)


def essence(records: Sequence[Record]) -> list[Record]:
    """Without what depends on the clock, and on who was trained beside whom."""
    return [{name: r[name] for name in r if name not in ("seconds", "side_by_side")} for r in records]


# Hidden pixels reach no method but those with a star -----------------------------------------------------------------------------------


def everything(images: ImageSet, filler: float = 0.0) -> tuple[list[Record], Spied]:
    """An epoch of every method."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Spied(folder, images, filler=filler)
        records = experiment.run(METHODS, [0])
        for kind, chosen in DENSITIES.items():
            experiment.density(kind, chosen)
    return records, experiment


@cache
def clean() -> tuple[list[Record], Spied]:
    return everything(tiny())


@pytest.mark.parametrize("poison", ["nan", "bytes"])
def test_hidden_pixels_reach_no_method_but_those_with_a_star(poison: str) -> None:
    """Parameters are the same to the bit whatever lies under the missing regions, of training and of test images."""
    expected, original = clean()
    images = tiny()
    if poison == "nan":
        records, experiment = everything(images, math.nan)
    else:
        parts = {part: garbage(getattr(images, part), getattr(original, part).observed) for part in ("train", "test")}
        records, experiment = everything(replace(images, **parts))
    assert len(records) == len(METHODS) == len(experiment.networks)
    for name, network in experiment.networks.items():
        # Those with a star are the proof that a difference would be seen; a filler is not for those who see all.
        unchanged = poison == "nan" or not method_named(name[0]).sees_complete
        assert same(network, original.networks[name]) == unchanged, name
    for kind, chosen in DENSITIES.items():
        assert same(experiment.density(kind, chosen), original.density(kind, chosen))
    names = ["accuracy_incomplete", "accuracy_validation", "epoch"] + ["accuracy_complete"] * (poison == "nan")
    for record, other in zip(records, expected, strict=True):
        if poison == "nan" or not method_named(record["method"]).sees_complete:
            assert [record[name] for name in names] == [other[name] for name in names], record["method"]


def test_the_filler_does_not_reach_an_epoch_with_single_pixels_missing(tmp_path: Path) -> None:
    """Of which some have no seen neighbour."""
    runs = [Spied(tmp_path / str(filler), shape="noise", filler=filler) for filler in (0.0, math.nan)]
    first, second = (
        essence(experiment.run(["mask", "knn", "misconv_smfa", "misconv_dmfa"], [0])) for experiment in runs
    )
    assert first == second
    assert all(same(network, runs[1].networks[name]) for name, network in runs[0].networks.items())


# The test set ------------------------------------------------------------------------------------------------------


def test_training_never_sees_the_test_set() -> None:
    """With other test images and other labels the same networks come out."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(256, (TEST, 1, 8, 8), dtype=torch.uint8, generator=generator, device="cpu")
    labels = torch.randint(10, (TEST,), generator=generator, device="cpu")
    records, experiment = everything(tiny(test=images, test_labels=labels))
    for name, network in experiment.networks.items():
        assert same(network, clean()[1].networks[name]), name
    for record, other in zip(records, clean()[0], strict=True):
        assert (record["epoch"], record["accuracy_validation"]) == (other["epoch"], other["accuracy_validation"])


def test_test_images_are_read_once_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unit looks at every test image once as it is, and once complete; and nobody looks before."""
    events: list[str] = []

    class Watched(Spied):
        @cached_property
        def test(self) -> IncompleteImages:
            events.append("test")
            found = self.with_missing(self.data.test, 2)
            at = found.at
            found.at = lambda rows: events.append(f"at {len(rows)}") or at(rows)  # type: ignore[method-assign, func-returns-value]
            return found

        def whole(self, part: str) -> IncompleteImages:
            events.append(f"complete {part}")
            return super().whole(part)

    count, trained = classification.count_right, classification.train

    def spy_count(network: nn.Module, take: Any, labels: Tensor, *rest: Any) -> int:
        events.append(f"count {len(labels)}")
        return count(network, take, labels, *rest)

    def spy_train(*arguments: Any, **more: Any) -> Any:
        events.append("begin")
        found = trained(*arguments, **more)
        events.append("end")
        return found

    monkeypatch.setattr(classification, "count_right", spy_count)
    monkeypatch.setattr(classification, "train", spy_train)
    Watched(tmp_path, settings=classifier(epochs=2)).run(["zero"], [0, 1])
    unit = [f"count {TEST}", f"at {TEST}", f"count {TEST}"]
    assert events == ["begin", "end", "test", "complete test", *unit, "complete test", *unit]
    events.clear()
    Watched(tmp_path / "gt").run(["gt"], [0])
    unit = ["complete test", "complete test", f"count {TEST}", f"count {TEST}"]
    assert events == ["complete train", "begin", "end", *unit]
    events.clear()
    watched = Watched(tmp_path / "density")
    watched.run(["misconv_dmfa"], [0])
    assert "test" in events
    assert events.index("test") > len(events) - 1 - events[::-1].index("end")


def test_accuracies_are_what_a_loop_over_images_finds(tmp_path: Path) -> None:
    """Image by image, with nothing of the experiment but its networks, masks and density."""
    experiment, images = Spied(tmp_path, settings=classifier(epochs=5)), tiny()
    methods = ("zero", "mask", "partial", "misconv_dmfa", "gt")
    records = experiment.run(methods, [0])

    def given(method: str, number: int, hidden: bool) -> tuple[Any, ...]:
        seen = experiment.test.observed[number : number + 1] | (not hidden or method == "gt")
        x = images.test[number : number + 1].float() / 255
        if method == "partial":
            return x, seen
        if method == "misconv_dmfa":
            return (experiment.density("dmfa")(x, seen),)
        zeros = impute.zero(x, seen)
        return (MFA.point(torch.cat([zeros, seen.float()], 1) if method == "mask" else zeros),)

    for method, record in zip(methods, records, strict=True):
        network, found = experiment.networks[method, None, 0], []
        for hidden in (True, False):
            with torch.no_grad():
                answers = [int(network(*given(method, number, hidden)).argmax()) for number in range(TEST)]
            found.append(sum(a == int(b) for a, b in zip(answers, images.test_labels, strict=True)) / TEST)
        # One image may lie on the border between two classes, and fall to either side by rounding.
        assert [record["accuracy_incomplete"], record["accuracy_complete"]] == pytest.approx(found, abs=1 / TEST), (
            method
        )
        assert record["accuracy_complete"] > 0.3  # far from what chance would give
        if method != "gt":
            assert record["accuracy_incomplete"] < record["accuracy_complete"] - 2 / TEST


# The epoch ---------------------------------------------------------------------------------------------------------


def test_the_epoch_is_chosen_on_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last epochs ruin the network; what is tested is the network of the best one."""
    rates, make = [3e-3, 3e-3, 3e-3, 3.0, 3.0], classification.classifier_job
    monkeypatch.setattr(
        classification, "classifier_job", lambda *a, **more: make(*a, **{**more, "learning_rate": rates.__getitem__})
    )
    experiment = Spied(tmp_path / "a", settings=classifier(epochs=5, batch_size=12))
    records = experiment.run(["zero"], [0, 1])
    for record, history in zip(records, experiment.histories, strict=True):
        values = [entry["validation_accuracy"] for entry in history]
        assert record["epoch"] == 1 + values.index(max(values)) <= 3
        assert record["accuracy_validation"] == max(values) > values[-1] + 0.1
        assert record["epochs"] == 5
        method, seed = record["method"], record["seed"]
        stopped = Spied(tmp_path / f"{method} {seed}", settings=classifier(epochs=record["epoch"], batch_size=12))
        (twin,) = stopped.run([method], [seed])
        assert same(stopped.networks[method, None, seed], experiment.networks[method, None, seed])
        names = ("accuracy_incomplete", "accuracy_complete")
        assert [record[name] for name in names] == [twin[name] for name in names]


# Regions, split, seeds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "hidden"), [("square", 16), ("trapezoid", 32), ("noise", 48)])
def test_every_image_has_one_region_of_the_right_size(shape: str, hidden: int, tmp_path: Path) -> None:
    first, second = Spied(tmp_path, shape=shape), Spied(tmp_path, shape=shape)
    assert SHAPES[shape] * 64 == hidden
    for part in ("train", "test"):
        one, other = getattr(first, part), getattr(second, part)
        assert ((~one.observed).sum((1, 2, 3)) == hidden).all()
        assert torch.equal(one.observed, other.observed)
        images = getattr(first.data, part)
        assert torch.equal(one.images, images.masked_fill(~one.observed.cpu(), 0))
        assert len(one.observed.unique(dim=0)) > 10
    assert not torch.equal(first.train.observed[:TEST], first.test.observed)


def test_all_methods_and_seeds_have_the_same_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {"train": [], "test": []}

    def spied(name: str) -> Method:
        method = method_named(name)
        make = method.inputs
        assert make is not None

        def spy(images: IncompleteImages, fitted: Any) -> Take:
            seen["train" if len(images) == TRAIN else "test"].append(images.observed.clone())
            return make(images, fitted)

        return replace(method, inputs=spy)

    monkeypatch.setattr(classification, "method_named", spied)
    Spied(tmp_path / "a").run(["partial", "mfa"], [0])
    Spied(tmp_path / "b").run(["misconv_smfa", "zero"], [1, 2])
    for part in seen.values():
        assert len(part) >= 4
        assert all(torch.equal(observed, part[0]) for observed in part)


def test_training_and_validation_share_no_image(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    rows, held = experiment.split
    assert (len(rows), len(held)) == (108, 12)
    assert torch.cat([rows, held]).sort().values.tolist() == list(range(TRAIN))
    again = Spied(tmp_path, shape="noise").split
    assert torch.equal(rows, again[0])
    assert torch.equal(held, again[1])
    assert held.tolist() != list(range(12))  # files may be sorted


@pytest.mark.parametrize("method", ["zero", "gt"])
def test_what_is_trained_on_and_what_chooses(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GT sees complete images, all others what is left of them."""
    given = given_to_jobs(monkeypatch, classification)
    experiment = Spied(tmp_path)
    (record,) = experiment.run([method], [0])
    ((inputs, labels, more),) = given
    rows, held = experiment.split
    images = tiny()
    full = images.train.float() / 255
    expected = full if method == "gt" else full * experiment.train.observed
    assert torch.equal(inputs(torch.arange(108, device=rows.device)).mean, expected[rows])
    assert torch.equal(labels, images.train_labels[rows])
    assert torch.equal(more["validation_inputs"](torch.arange(12, device=held.device)).mean, expected[held])
    assert torch.equal(more["validation_labels"], images.train_labels[held])
    if method == "gt":
        assert record["accuracy_incomplete"] == record["accuracy_complete"]


def test_seeds_differ_and_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In first weights, and in the order of images and dropout, which come from the seed of the job."""
    seeds: list[int] = []
    original = classification.train

    def train(jobs: list[Any], *rest: Any, **more: Any) -> Any:
        seeds.extend(job.seed for job in jobs)
        return original(jobs, *rest, **more)

    monkeypatch.setattr(classification, "train", train)
    experiment = Spied(tmp_path / "a")
    first = experiment.run(["zero"], [0, 1])
    assert seeds == [0, 1]
    weights = [experiment.network(method_named("zero").first_layer, "small", seed) for seed in (0, 1, 1)]
    assert not same(weights[0], weights[1])
    assert same(weights[1], weights[2])
    alone = Spied(tmp_path / "b")
    (second,) = alone.run(["zero"], [1])
    networks = experiment.networks
    assert not same(networks["zero", None, 0], networks["zero", None, 1])
    assert same(networks["zero", None, 1], alone.networks["zero", None, 1])
    assert essence([second]) == essence(first[1:])


def test_the_order_of_the_work_is_of_no_account(tmp_path: Path) -> None:
    methods = ["misconv_dmfa", "misconv_smfa"]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = Spied(tmp_path / "a").run(methods, [0, 1])
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = Spied(tmp_path / "b").run(methods[::-1], [1, 0])

    def by_unit(records: list[Record]) -> dict[tuple[str, int], Record]:
        return {(record["method"], record["seed"]): record for record in essence(records)}

    assert by_unit(first) == by_unit(second)
    assert [(r["method"], r["seed"]) for r in first] == [(method, seed) for method in methods for seed in (0, 1)]


# Imputers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [5000, 50])
def test_imputers_are_fitted_to_training_images_alone(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k-NN to at most 5,000 of them; neither sees an image that chooses the epoch."""
    assert (methods.NEIGHBOURS, methods.DONORS) == (5, 5000)
    monkeypatch.setattr(methods, "DONORS", most)
    fitted: dict[str, tuple[Tensor, Tensor]] = {}
    for kind in (impute.Mean, impute.KNN):

        def spy(self: Any, x: Tensor, observed: Tensor, fit: Any = kind.fit) -> Any:
            fitted[type(self).__name__] = x, observed
            return fit(self, x, observed)

        monkeypatch.setattr(kind, "fit", spy)
    experiment = Spied(tmp_path)
    experiment.run(["mean", "knn"], [0])
    rows = experiment.split[0]
    for name, count in (("Mean", 108), ("KNN", min(most, 108))):
        x, observed = experiment.train.at(rows[:count])
        assert torch.equal(fitted[name][0], x)
        assert torch.equal(fitted[name][1], observed)
    assert experiment._imputers["knn"].k == 5


# What makes a unit what it is ------------------------------------------------------------------------------------------


def touched(images: Tensor) -> Tensor:
    changed = images.clone()
    changed[0] += 1
    return changed


def test_whatever_differs_makes_another_unit(tmp_path: Path) -> None:
    """One pixel, one label, one setting: nothing that was trained otherwise is taken for it."""
    images = tiny()
    data_changes = [{name: touched(getattr(images, name))} for name in ("train", "train_labels", "test", "test_labels")]
    experiments = [
        Spied(tmp_path), Spied(tmp_path, tiny(name="others")), Spied(tmp_path, shape="noise"),
        *(Spied(tmp_path, tiny(**change)) for change in data_changes),
        *(Spied(tmp_path, settings=classifier(**change)) for change in (
            {"kind": "large"}, {"epochs": 2}, {"batch_size": 25}, {"learning_rate": 2e-3},
        )),
    ]  # fmt: skip
    units = [e.unit(method, seed) for e in experiments for method in METHODS for seed in (0, 1)]
    densities = [e.density_settings(kind) for e in experiments[: 3 + len(data_changes)] for kind in ("smfa", "dmfa")]
    for kind, change in (
        ("smfa", {"components": 3}),
        ("smfa", {"rank": 2}),
        ("dmfa", {"rank": 3}),
        ("dmfa", {"clip": None}),
    ):
        changed = {kind: replace(SETTINGS.density(kind), **change)}  # type: ignore[arg-type]  # fields of different types
        other = Spied(tmp_path, settings=replace(SETTINGS, **changed))
        units += [other.unit(method.name, 0) for method in ALL_METHODS if method.density == kind]
        densities.append(other.density_settings(kind))
        # Who has no part in it stays as it was.
        assert other.unit("zero", 0) == experiments[0].unit("zero", 0)
    names = [key(settings) for settings in units + densities]
    assert len(set(names)) == len(names)
    assert key(Spied(tmp_path).unit("mfa", 1)) == key(experiments[0].unit("mfa", 1))


def test_an_unknown_shape_or_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shape must be one of square, trapezoid, noise, cut, got 'circle'"):
        Spied(tmp_path, shape="circle")
    with pytest.raises(ValueError, match="method must be one of zero, .*, got 'magic'"):
        Spied(tmp_path).run(["magic"], [0])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# Kept --------------------------------------------------------------------------------------------------------------


def test_records_carry_all_that_is_needed() -> None:
    records, experiment = clean()
    for record in records:
        assert record.keys() >= FIELDS
        assert json.loads(json.dumps(record, allow_nan=False)) == record
        assert (record["kind"], record["dataset"], record["title"], record["shape"]) == (
            "classification", "digits", "digits", "square",
        )  # fmt: skip
        assert record["seed"] == 0
        assert record["epoch"] == record["epochs"] == 1
        assert record["seconds"] > 0
        assert record["device"].startswith("cpu")
        assert record["versions"]["torch"] == torch.__version__
        assert record["commit"] == asked_once()
        for name in ("accuracy_incomplete", "accuracy_complete"):
            assert (record[name] * TEST) == pytest.approx(round(record[name] * TEST))
            assert 0 <= record[name] <= 1
    for method, record in zip(METHODS, records, strict=False):
        assert record["method"] == method
        assert record["settings"] == experiment.unit(method, 0)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = ["zero", "mfa", "misconv_smfa"]
    first = Spied(tmp_path)
    records, measured = first.run(methods, [0, 1]), first.quality("dmfa")
    before = files(tmp_path)
    assert not list((tmp_path / "running").iterdir())

    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError

    for name in ("train", "fit_density", "job_of", "classifier_job", "count_right"):
        monkeypatch.setattr(classification, name, never)
    second = Spied(tmp_path)
    assert second.run(methods, [0, 1]) == records
    assert second.quality("dmfa") == measured
    assert files(tmp_path) == before
    # More seeds, or another method: only what is not there.
    with pytest.raises(AssertionError):
        second.run(methods, [0, 1, 2])


def test_what_is_there_is_not_trained_again(tmp_path: Path) -> None:
    Spied(tmp_path).run(["zero"], [1])
    experiment = Spied(tmp_path)
    assert len(experiment.run(["zero", "mask"], [0, 1])) == 4
    assert set(experiment.networks) == {("zero", None, 0), ("mask", None, 0), ("mask", None, 1)}


def test_a_density_without_any_error_has_no_psnr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from misconv.paper import quality

    monkeypatch.setattr(quality, "quality", lambda *arguments: {"nll": -1.0, "psnr": math.inf})
    record = Spied(tmp_path).quality("smfa")
    assert (record["nll"], record["psnr"]) == (-1.0, None)
    assert Spied(tmp_path).quality("smfa") == record


# Killed ------------------------------------------------------------------------------------------------------------

KILLED = ["zero", "misconv_dmfa"]


@cache
def straight(epochs: int) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        return essence(Spied(folder, settings=classifier(epochs=epochs)).run(KILLED, [0, 1]))


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, number: int) -> Iterator[None]:
    """The call of that number, counted from 0, comes to nothing."""
    calls = iter(range(10**6))
    original = getattr(place, name)

    def dies(*arguments: Any, **more: Any) -> Any:
        if next(calls) == number:
            raise Crash
        return original(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, dies)
        yield


def units(folder: Path) -> set[str]:
    """Methods and seeds whose records are there."""
    found = [json.loads(path.read_text())["record"] for path in (folder / "records").iterdir()]
    return {f"{r['method']} {r['seed']}" for r in found if r["kind"] == "classification"}


EACH = [f"{method} {seed}" for method in KILLED for seed in (0, 1)]


@pytest.mark.parametrize("number", range(5))
def test_killed_between_records_it_trains_what_is_missing_and_ends_with_the_same_records(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds are trained side by side, but each is kept as soon as it is known, and is what it is without the others."""
    with dying(monkeypatch, Cache, "keep", number), pytest.raises(Crash):
        Spied(tmp_path).run(KILLED, [0, 1])
    kept = units(tmp_path)
    assert kept == set(EACH[: number - (number > 2)])  # the third record is of the density
    again = Spied(tmp_path)
    before = files(tmp_path / "records")
    assert essence(again.run(KILLED, [0, 1])) == straight(1)
    assert {f"{method} {seed}" for method, _, seed in again.networks} == set(EACH) - kept
    assert files(tmp_path / "records").items() >= before.items()  # what was there is as it was
    assert not list((tmp_path / "running").iterdir())


@pytest.mark.parametrize("number", range(8))
def test_killed_in_the_middle_of_the_tests_it_ends_with_the_same_records(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training of those that were not tested is not lost."""
    monkeypatch.setattr(classification, "CHECKPOINT_SECONDS", 0.0)  # a GPU would write none of so short a training
    with dying(monkeypatch, classification, "count_right", number), pytest.raises(Crash):
        Spied(tmp_path).run(KILLED, [0, 1])
    assert units(tmp_path) == set(EACH[:2] if number >= 4 else [])
    assert len(list((tmp_path / "running").iterdir())) == 1
    expected, again, judged = straight(1), Spied(tmp_path), 0
    judge = _running.Running.judge

    def spy(self: Any, epoch: int) -> None:
        nonlocal judged
        judged += self.job.settings["task"] == "classifier" and self.job.settings["method"] == KILLED[number // 4]
        judge(self, epoch)

    monkeypatch.setattr(_running.Running, "judge", spy)
    assert essence(again.run(KILLED, [0, 1])) == expected
    assert judged == 0
    assert not list((tmp_path / "running").iterdir())


def test_killed_again_and_again_at_every_file_it_ends_with_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first write, then at the second, and so on, each time in a folder that earlier kills have left."""
    write, kills = store.write_bytes, 0
    while True:
        with monkeypatch.context() as patch:
            calls = iter(range(10**6))

            def dies(path: Path, content: bytes, *, number: int = kills % 3, calls: Iterator[int] = calls) -> None:
                if next(calls) == number:
                    raise Crash
                write(path, content)

            patch.setattr(store, "write_bytes", dies)
            try:
                found = essence(Spied(tmp_path).run(KILLED, [0, 1]))
                break
            except Crash:
                kills += 1
    assert kills > 3
    assert found == straight(1)


@pytest.mark.parametrize("epoch", [1, 2])
def test_killed_in_any_epoch_it_ends_with_the_same_records(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = classification.train

    def train(jobs: list[Any], *rest: Any, **more: Any) -> Any:
        def begin(number: int) -> None:
            if number == epoch:
                raise Crash

        if jobs[0].settings["task"] == "classifier":
            jobs[-1].begin = begin
        return original(jobs, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(classification, "train", train)
        with pytest.raises(Crash):
            Spied(tmp_path, settings=classifier(epochs=3)).run(KILLED, [0, 1])
    assert len(list((tmp_path / "running").iterdir())) == 1
    assert essence(Spied(tmp_path, settings=classifier(epochs=3)).run(KILLED, [0, 1])) == straight(3)
    assert not list((tmp_path / "running").iterdir())


@pytest.mark.parametrize("kind", ["dmfa", "smfa"])
def test_killed_while_a_density_is_fitted_it_ends_with_the_same_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, **{kind: replace(SETTINGS.density(kind), epochs=3)})
    expected = Spied(tmp_path / "straight", settings=settings).density(kind)
    for number in range(3):
        folder = tmp_path / str(number)
        place, name = (SMFA, "iterate") if kind == "smfa" else (_images, "hide")
        # What the validation images show is drawn first, and then what is hidden in each epoch.
        with dying(monkeypatch, place, name, number + (kind == "dmfa")), pytest.raises(Crash):
            Spied(folder, settings=settings).density(kind)
        assert len(list((folder / "running").iterdir())) == (number > 0)
        again = Spied(folder, settings=settings)
        assert same(again.density(kind), expected)
        assert not list((folder / "running").iterdir())


def test_killed_between_a_density_and_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 7 is the same as without; the time of the fit stands in it."""
    expected = Spied(tmp_path / "straight").quality("dmfa")
    with dying(monkeypatch, Cache, "keep", 0), pytest.raises(Crash):
        Spied(tmp_path / "killed").quality("dmfa")
    found = Spied(tmp_path / "killed").quality("dmfa")
    assert found.keys() == expected.keys()
    assert essence([found]) == essence([expected])


def test_a_damaged_file_of_the_cache_is_refused_and_left_alone(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    experiment.density("dmfa")
    (path,) = (tmp_path / "densities").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    before = files(tmp_path)
    with pytest.raises(ValueError, match=f"cannot load .*{path.name}: the file is damaged or cut short"):
        Spied(tmp_path).run(["mfa"], [0])
    assert files(tmp_path) == before


def test_a_density_of_another_format_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a record; a checkpoint of it is passed over."""
    Spied(tmp_path).density("dmfa")
    before = files(tmp_path)
    place = Spied(tmp_path).cache.running({"seed": 0})
    monkeypatch.setattr(caches, "FORMAT", FORMAT + 1)
    with pytest.raises(ValueError, match=f"must have the format {FORMAT + 1} of this version, got {FORMAT}"):
        Spied(tmp_path).density("dmfa")
    assert files(tmp_path) == before
    assert Spied(tmp_path).cache.running({"seed": 0}) != place


# Densities ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [("smfa", "SMFA"), ("dmfa", "DMFA")])
def test_quality_of_a_density(kind: str, name: str, tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    record = experiment.quality(kind)
    expected = quality(experiment.density(kind), tiny().test, experiment.test.observed)
    assert {name: record[name] for name in expected} == expected
    assert record["images"] == TEST
    assert (record["kind"], record["density"], record["dataset"], record["shape"]) == (
        "density",
        name,
        "digits",
        "square",
    )
    assert record["seconds"] > 0
    assert record.keys() >= {"nll", "mse", "psnr", "ssim", "settings", "device", "versions", "commit"}
    assert record["settings"]["density"] == as_json(SETTINGS.density(kind))


def test_a_density_is_fitted_once_and_is_not_trained_further(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    density = experiment.density("dmfa")
    before = {name: value.clone() for name, value in density.state_dict().items()}
    experiment.run(["mfa", "misconv_dmfa"], [0, 1])
    assert experiment.density("dmfa") is density
    assert not density.training
    assert not any(parameter.requires_grad for parameter in density.parameters())
    assert all(torch.equal(value, before[name]) for name, value in density.state_dict().items())
    (path,) = (tmp_path / "densities").iterdir()
    assert same(store.load(path), density)


def test_a_density_by_settings_of_its_own_changes_nothing_of_the_experiment(tmp_path: Path) -> None:
    """Two recipes may want different ones of one name; each has its own, and the usual ones are as they were."""
    experiment = Spied(tmp_path)
    settings, before = experiment.settings, experiment.unit("misconv_dmfa", 0)
    chosen = [replace(SETTINGS.dmfa, rank=rank) for rank in (1, 3)]
    found = [experiment.density("unet", each) for each in chosen]
    assert [density.rank for density in found] == [1, 3]
    assert [experiment.density("unet", each) for each in chosen] == found
    assert (experiment.settings, experiment.unit("misconv_dmfa", 0)) == (settings, before)
    assert experiment.density("dmfa").rank == 2


def test_several_shapes_are_hidden_while_a_density_is_trained() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = partial(one_of, ((missing.square, None), (missing.trapezoid, None), (missing.noise, None)))
    observed = kinds(300, 8, 8, fraction=1 / 4, generator=generator)
    assert ((~observed).sum((1, 2, 3)) == 16).all()
    hidden = ~observed.squeeze(1)
    # A square fills the rectangle around it; a trapezoid reaches from edge to edge; noise does neither.
    tall, wide = (hidden.any(dim).sum(1) for dim in (2, 1))
    squares = int((tall * wide == 16).logical_and(tall == wide).sum())
    assert 70 < squares < 130
    rows = hidden.sum(2)
    slanted = ((rows > 0).all(1) & (hidden[:, :, 1:] != hidden[:, :, :-1]).sum(2).le(2).all(1)) | (
        (hidden.sum(1) > 0).all(1) & (hidden[:, 1:] != hidden[:, :-1]).sum(1).le(2).all(1)
    )
    assert 60 < int(slanted.sum()) < 140
    again = kinds(300, 8, 8, fraction=1 / 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(observed, again)


def test_a_cosine_schedule_and_learning_rates_that_change() -> None:
    schedule = _jobs.cosine_schedule(2e-3, 10)
    values = [schedule(epoch) for epoch in range(10)]
    assert values[0] == pytest.approx(2e-3)
    assert values[5] == pytest.approx(1e-3)
    assert all(a > b > 0 for a, b in pairwise(values))
    assert values[9] < 1e-4
    settings = DensitySettings("ConvDMFA", rank=1, epochs=10, learning_rates=(2e-3, 1e-4), mse_epochs=2)
    steps = densities.learning_rate_of(settings)
    assert [steps(epoch) for epoch in range(4)] == [2e-3, 2e-3, 1e-4, 1e-4]
    cosine = densities.learning_rate_of(replace(settings, cosine=True))
    assert [cosine(epoch) for epoch in range(10)] == values
