"""MisConv+: the mask as a channel, and what each variant trains."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv import MFA, MisConv2d, impute
from misconv.functional import conv2d_moments
from misconv.paper import classification, plus
from misconv.paper.augment import Augmented
from misconv.paper.cache import key
from misconv.paper.inputs import filled
from misconv.paper.plus import VARIANTS, Plus, run_plus, with_mask
from tests.reference import random_mfa, tolerance
from tests.test_paper_augment import SHAPE, network, pixels
from tests.test_paper_classification import (
    FIELDS,
    PLUS_DENSITY,
    RECIPE,
    SETTINGS,
    TEST,
    Crash,
    Spied,
    classifier,
    dying,
    essence,
    files,
    given_to_jobs,
    quickly,
    same,
    tiny,
)


def variant(name: str, value: object = ...) -> str:
    """The variant that changes this ingredient (to that value)."""
    found = [v for v, change in VARIANTS.items() if name in change and value in (..., change[name])]
    assert found, name
    return found[-1]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


# The mask as a channel -------------------------------------------------------------------------------------------------


def test_the_mask_is_a_certain_channel() -> None:
    observed = torch.rand(3, 1, 6, 5) < 0.6
    p = random_mfa(3, 2, 2, SHAPE, observed)
    q = with_mask(p)
    assert q.shape == (3, SHAPE[0] + 1, 6, 5)
    mask = observed.to(p.dtype)
    assert torch.equal(q.mean[:, -1:], mask)
    assert torch.equal(q.means[:, :, -1], mask.expand(3, 2, 6, 5))
    assert not q.variance[:, -1].any()
    # All else is as it was.
    assert torch.equal(q.weights, p.weights)
    torch.testing.assert_close(q.mean[:, :-1], p.mean)
    torch.testing.assert_close(q.variance[:, :-1], p.variance)
    assert q.observed is not None
    assert torch.equal(q.observed[:, :-1], observed.expand(3, 2, 6, 5))
    assert q.observed[:, -1].all()
    drawn = q.sample(3)
    assert torch.equal(drawn[:, :, -1:], mask.expand(3, 3, 1, 6, 5))
    q = MFA(q.logits, q.means, q.factors, q.noise, q.observed, check=True)  # it is a sound one


def test_the_mask_moves_the_mean_of_a_response_and_not_its_variance() -> None:
    observed = torch.rand(3, 1, 6, 5) < 0.6
    p = random_mfa(3, 2, 2, SHAPE, observed)
    weight, bias = torch.randn(4, SHAPE[0] + 1, 3, 3), torch.randn(4)
    mean, variance = conv2d_moments(with_mask(p), weight, bias, padding=1)
    plain, spread = conv2d_moments(p, weight[:, :-1], bias, padding=1)
    moved = F.conv2d(observed.to(p.dtype), weight[:, -1:], padding=1).unsqueeze(1)
    close = {"rtol": tolerance("exact"), "atol": tolerance("exact")}
    torch.testing.assert_close(mean, plain + moved, **close)
    torch.testing.assert_close(variance, spread, **close)
    assert moved.abs().max() > 0.1
    assert spread.max() > 0.1


def test_where_nothing_is_missing_the_layer_is_a_convolution_of_images_and_ones() -> None:
    x = torch.rand(3, *SHAPE)
    layer = MisConv2d(SHAPE[0] + 1, 4, 3, padding=1)
    expected = F.conv2d(torch.cat([x, torch.ones(3, 1, 6, 5)], 1), layer.weight, layer.bias, padding=1).relu()
    torch.testing.assert_close(layer(with_mask(MFA.point(x))), expected)


# The network -------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """Remembers what it was given."""

    def forward(self, p: MFA) -> Tensor:
        self.given = p
        return p.mean.sum((2, 3))


@pytest.mark.parametrize("mask", [True, False])
def test_without_a_density_it_sees_zeros_and_the_mask(mask: bool) -> None:
    x, observed = pixels().at(torch.arange(3))
    model = Plus(None, Sum(), mask)
    out = model(x.masked_fill(~observed, torch.nan), observed)
    zeros = impute.zero(x, observed)
    expected = torch.cat([zeros, observed.to(x.dtype)], 1) if mask else zeros
    assert torch.equal(model.classifier.given.mean, expected)
    assert not model.classifier.given.variance.any()
    assert torch.equal(out, expected.sum((2, 3)))


@pytest.mark.parametrize("mask", [True, False])
def test_with_a_density_it_sees_what_that_says(mask: bool) -> None:
    x, observed = pixels().at(torch.arange(3))
    density = network()
    model = Plus(density, Sum(), mask)
    model(x, observed)
    p = density(x, observed)
    expected = with_mask(p) if mask else p
    torch.testing.assert_close(model.classifier.given.mean, expected.mean)
    torch.testing.assert_close(model.classifier.given.variance, expected.variance)


def test_the_density_stays_in_evaluation_mode() -> None:
    model = Plus(network(), nn.Sequential(nn.BatchNorm2d(2)), mask=False)
    assert model.train() is model
    assert model.training
    assert model.classifier.training
    assert not any(part.training for part in model.density.modules())
    nn.Sequential(model).train()  # also when it is a part of something
    assert not any(part.training for part in model.density.modules())


# Training ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def later_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned networks are the better ones, whatever a few images say."""
    rising = count()
    monkeypatch.setattr(plus, "_best", lambda history: next(rising))


@pytest.mark.usefixtures("small", "later_wins")
def test_all_variants_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Spied(tmp_path)
    records = run_plus(experiment, [0], tuple(VARIANTS))
    assert [record["variant"] for record in records] == list(VARIANTS)
    for record in records:
        assert record.keys() >= FIELDS | {"variant"}
        assert (record["method"], record["seed"], record["epoch"]) == ("misconv_plus", 0, 1)
        assert record["settings"] == plus.unit(experiment, None, record["variant"], 0)
    # Every ingredient makes a difference; otherwise its row would say nothing.
    networks = list(experiment.networks.values())
    assert len(networks) == len(VARIANTS)
    assert not any(same(a, b) for number, a in enumerate(networks) for b in networks[:number])
    assert not list((tmp_path / "running").iterdir())

    def never(*arguments: Any, **more: Any) -> Any:
        raise AssertionError

    before = files(tmp_path)
    for place in (plus, classification):
        monkeypatch.setattr(place, "train", never)
    assert run_plus(Spied(tmp_path), [0], tuple(VARIANTS)) == records
    assert files(tmp_path) == before


@pytest.mark.usefixtures("small")
def test_tuning_that_makes_nothing_better_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plus.PLUS, "digits", replace(RECIPE, epochs=2, tuned_learning_rate=0.0))
    monkeypatch.setitem(VARIANTS, "with joint fine-tuning", {"tuned": 3})
    experiment = Spied(tmp_path)
    whole, tuned = run_plus(experiment, [0], ["everything", variant("tuned")])
    assert (whole["epochs"], tuned["epochs"]) == (2, 5)
    assert [record["epoch"] for record in experiment.histories[1]] == [0, 1, 2, 3, 4]
    for name in ("epoch", "accuracy_validation", "accuracy_incomplete", "accuracy_complete"):
        assert tuned[name] == whole[name]
    first, second = experiment.networks.values()
    assert same(first, second)


@pytest.mark.usefixtures("small", "later_wins")
def test_joint_training_changes_a_copy_of_the_density(tmp_path: Path) -> None:
    """Its weights, not the statistics of its BatchNorms; what all variants share stays as it was."""
    experiment = Spied(tmp_path)
    joint = variant("tuned")
    run_plus(experiment, [0], ["everything"])
    shared = experiment.density("plus", PLUS_DENSITY)
    before = {name: value.clone() for name, value in shared.state_dict().items()}
    run_plus(experiment, [0, 1], [joint])
    assert experiment.density("plus", PLUS_DENSITY) is shared
    assert all(torch.equal(value, before[name]) for name, value in shared.state_dict().items())
    own = []
    for seed in (0, 1):
        model = experiment.networks["misconv_plus", joint, seed]
        assert isinstance(model, Plus)
        own.append(model.density.state_dict())
        kept = {name for name, value in own[-1].items() if torch.equal(value, before[name])}
        buffers = {name for name, _ in model.density.named_buffers()}
        assert {name for name in buffers if "running" in name} <= kept
        assert kept == buffers  # and nothing else
    assert any(not torch.equal(value, own[1][name]) for name, value in own[0].items())
    assert not isinstance(experiment.networks["misconv_plus", "everything", 0], Plus)
    (path,) = (tmp_path / "densities").iterdir()  # one, as it was fitted
    assert same(Spied(tmp_path).density("plus", PLUS_DENSITY), shared)
    assert path.exists()


@pytest.mark.usefixtures("small", "later_wins")
def test_the_rate_of_the_density_is_a_share_of_the_classifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's first step is as long as the learning rate, whatever the gradient."""
    rate, share = 1e-3, 0.01
    recipe = replace(RECIPE, tuned=1, tuned_learning_rate=rate, batch_size=108, density_learning_rate_scale=share)
    monkeypatch.setitem(plus.PLUS, "digits", recipe)
    experiment = Spied(tmp_path)
    run_plus(experiment, [0])
    model = experiment.networks["misconv_plus", "everything", 0]
    assert isinstance(model, Plus)
    before = experiment.density("plus", PLUS_DENSITY).state_dict()
    steps = [(value.detach() - before[name]).abs().max() for name, value in model.density.named_parameters()]
    assert float(torch.stack(steps).max()) == pytest.approx(rate * share, rel=0.01)


@pytest.mark.usefixtures("small")
def test_test_images_are_given_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither moved nor with more hidden, image by image; for a network that says something."""
    easy: dict[str, Any] = {"epochs": 10, "learning_rate": 5e-3, "flip": False, "shift": 0, "hide": False, "mask": True}
    monkeypatch.setitem(plus.PLUS, "digits", replace(RECIPE, **easy))
    experiment, images = Spied(tmp_path), tiny()
    names = ["everything", variant("density", None), variant("filled")]
    records = run_plus(experiment, [0], names)
    density = experiment.density("plus", PLUS_DENSITY)
    for name, record in zip(names, records, strict=True):
        model, found = experiment.networks["misconv_plus", name, 0], []
        for hidden in (True, False):
            right = 0
            for number in range(TEST):
                x = images.test[number : number + 1].float() / 255
                seen = experiment.test.observed[number : number + 1] | (not hidden)
                form = with_mask if name == "everything" else filled
                given = (x, seen) if isinstance(model, Plus) else (form(density(x, seen)),)
                with torch.no_grad():
                    right += int(model(*given).argmax()) == int(images.test_labels[number])
            found.append(right / TEST)
        assert [record["accuracy_incomplete"], record["accuracy_complete"]] == pytest.approx(found, abs=1 / TEST)
        assert record["accuracy_complete"] > 0.25


@pytest.mark.usefixtures("small")
def test_what_is_trained_on_and_what_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The split of all other methods; validation images are not augmented."""
    given = given_to_jobs(monkeypatch, plus)
    experiment = Spied(tmp_path)
    run_plus(experiment, [0, 1], ["everything", variant("density", None)])
    assert [(inputs.seed, more["seed"]) for inputs, _, more in given] == [(0, 0), (1, 1)] * 2
    rows, held = experiment.split
    images = tiny()
    for inputs, labels, more in given:
        assert torch.equal(inputs.rows, rows)
        assert torch.equal(labels, images.train_labels[rows])
        assert torch.equal(more["validation_labels"], images.train_labels[held])
        chosen = more["validation_inputs"](torch.arange(len(held), device=held.device))
        x, observed = experiment.train.at(held)
        if isinstance(chosen, MFA):
            assert chosen.observed is not None
            assert torch.equal(chosen.observed[:, :1], observed)
            assert torch.equal(chosen.mean[:, :1] * observed, x)
            torch.testing.assert_close(chosen.mean[:, :1], experiment.density("plus", PLUS_DENSITY)(x, observed).mean)
        else:
            assert torch.equal(chosen[0], x)
            assert torch.equal(chosen[1], observed)


# Units -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_whatever_differs_makes_another_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Spied(tmp_path)
    units = [plus.unit(experiment, None, name, seed) for name in VARIANTS for seed in (0, 1)]
    units.append(plus.unit(Spied(tmp_path, shape="noise"), None, "everything", 0))
    units.append(plus.unit(Spied(tmp_path, settings=classifier(kind="large")), None, "everything", 0))
    recipes = [replace(RECIPE, **{name: other(value)}) for name, value in vars(RECIPE).items() if name != "density"]
    recipes += [
        replace(RECIPE, density=replace(PLUS_DENSITY, **{name: other(value)}))
        for name, value in vars(PLUS_DENSITY).items()
    ]
    units += [plus.unit(experiment, recipe, "everything", 0) for recipe in recipes]
    names = [key(unit) for unit in units]
    assert len(set(names)) == len(names)
    monkeypatch.setitem(plus.PLUS, "digits", recipes[0])  # a recipe is that of the data set, or the one given
    assert plus.unit(experiment, None, "everything", 0) == units[-len(recipes)]
    assert plus.unit(experiment, RECIPE, "everything", 0) == units[0]
    # Where the paper's density is taken, it is that one's settings that count.
    paper = variant("density", "paper")
    others = Spied(tmp_path, settings=replace(SETTINGS, dmfa=replace(SETTINGS.dmfa, rank=3)))
    assert key(plus.unit(others, RECIPE, paper, 0)) not in names
    assert key(plus.unit(others, RECIPE, "everything", 0)) in names


def other(value: Any) -> Any:
    """Some value of the same kind."""
    if isinstance(value, tuple):
        return (*value, 1)
    if isinstance(value, bool):
        return not value
    return "other" if isinstance(value, str) or value is None else value + 1


@pytest.mark.usefixtures("small")
def test_the_experiment_is_left_as_it_was(tmp_path: Path) -> None:
    experiment = Spied(tmp_path)
    settings, before = experiment.settings, experiment.unit("misconv_dmfa", 0)
    run_plus(experiment, [0])
    assert experiment.settings is settings
    assert experiment.unit("misconv_dmfa", 0) == before


@pytest.mark.usefixtures("small")
def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="variant must be one of everything, .*, got 'more'"):
        run_plus(Spied(tmp_path), [0], ["more"])


@pytest.mark.parametrize(
    ("name", "same_as_the_whole"),
    [("mnist", ()), ("svhn", ("with the paper's density",)), ("cifar10", ("with the paper's density",))],
)
def test_a_variant_that_changes_nothing_is_left_out(
    name: str, same_as_the_whole: tuple[str, ...], tmp_path: Path
) -> None:
    experiment = Spied(tmp_path)
    experiment.data = replace(experiment.data, name=name)
    assert plus.variants_of(experiment) == [v for v in VARIANTS if v not in same_as_the_whole]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("call", [2, 9, 15])
def test_killed_in_any_epoch_it_ends_with_the_same_records(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two networks have three epochs each; two more have three, and then three of fine-tuning."""
    monkeypatch.setitem(plus.PLUS, "digits", replace(RECIPE, epochs=3))
    monkeypatch.setitem(VARIANTS, "with joint fine-tuning", {"tuned": 3})
    names = ["everything", variant("tuned")]
    straight = essence(run_plus(Spied(tmp_path / "straight"), [0, 1], names))
    with dying(monkeypatch, Augmented, "begin", call), pytest.raises(Crash):
        run_plus(Spied(tmp_path / "killed"), [0, 1], names)
    assert list((tmp_path / "killed" / "running").iterdir())
    assert essence(run_plus(Spied(tmp_path / "killed"), [0, 1], names)) == straight
    assert not list((tmp_path / "killed" / "running").iterdir())
