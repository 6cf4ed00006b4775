"""What each method gives its network, against the density or the imputer it stands for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from misconv import MFA, SMFA, ConvDMFA, MisConv2d, impute
from misconv.functional import partial_conv2d
from misconv.paper import inputs
from misconv.paper.acflow import ACFlow
from misconv.paper.inputs import CachedMFA, IncompleteImages, Take
from misconv.paper.methods import METHODS as ALL
from misconv.paper.methods import METHODS as ALL_METHODS
from misconv.paper.methods import OURS, method_named
from misconv.paper.networks import Classifier, misconv_layer
from tests.reference import tolerance

SHAPE = (2, 9, 7)
METHODS = tuple(method.name for method in ALL_METHODS if not method.takes_complete)
ROWS = torch.tensor([6, 0, 3, 3, 1, 9], device="cpu")  # where tables are made, whatever the default


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ten images are cached in several pieces, the last of them smaller."""
    monkeypatch.setattr(inputs, "CHUNK", 4)


def pixels(count: int = 10) -> tuple[Tensor, Tensor]:
    """Images that miss different numbers of pixels: the first none, the second all, the third all but one."""
    torch.manual_seed(0)
    images = torch.randint(256, (count, *SHAPE), dtype=torch.uint8)
    observed = torch.rand(count, 1, *SHAPE[1:]) < torch.linspace(0.2, 0.9, count).view(-1, 1, 1, 1)
    observed[0], observed[1], observed[2] = True, False, False
    observed[2, 0, 4, 5] = True
    return images, observed


def incomplete(filler: float = 0.0) -> IncompleteImages:
    return IncompleteImages(*pixels(), filler)


def network() -> ConvDMFA:
    torch.manual_seed(1)
    density = ConvDMFA(SHAPE[0], components=2, rank=3, widths=(8, 8), depths=(1, 1, 1))
    density.calibrate(torch.rand(4, *SHAPE), torch.ones(4, 1, *SHAPE[1:], dtype=torch.bool))
    density(*incomplete().at(torch.arange(10)))  # its BatchNorms have statistics of their own
    return density.eval().requires_grad_(False)


def flow() -> ACFlow:
    torch.manual_seed(2)
    made = ACFlow(SHAPE, scales=2, width=4, blocks=1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


def tools(data: IncompleteImages) -> dict[str, Any]:
    """All that methods ask for, fitted to these images."""
    everything = data.at(torch.arange(len(data)))
    smfa = SMFA(2, 1).fit(*data.at(torch.arange(2, len(data))), iterations=3)  # EM learns nothing of a blank image
    return {
        "mean": impute.Mean().fit(*everything),
        "knn": impute.KNN(3).fit(*everything),
        "smfa": CachedMFA(smfa, data),
        "dmfa": CachedMFA(network(), data),
        "acflow": CachedMFA(flow().impute, data),
    }


def of_method(name: str, data: IncompleteImages, fitted: dict[str, Any]) -> Take:
    """How a method gives these images to its network."""
    method = method_named(name)
    assert method.inputs is not None
    return method.inputs(data, fitted.get(method.density or name))


def complete(name: str, images: Tensor) -> Take:
    return method_named(name).complete(IncompleteImages.complete(images))


def first_layer(name: str, channels: int) -> Any:
    return method_named(name).first_layer(channels)


def leaves(batch: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def is_point(p: MFA, x: Tensor) -> None:
    assert torch.equal(p.mean, x)
    assert not p.variance.any()
    assert p.observed is not None
    assert p.observed.all()


# IncompleteImages --------------------------------------------------------------------------------------------------


def test_hidden_pixels_are_gone_for_good() -> None:
    images, observed = pixels()
    hidden = ~observed.expand_as(images)
    data = IncompleteImages(images, observed)
    assert images[hidden].any()  # what was given is left as it is
    assert not data.images[hidden].any()
    assert torch.equal(data.images[~hidden], images[~hidden])
    x, seen = data.at(ROWS)
    assert torch.equal(seen, observed[ROWS])
    torch.testing.assert_close(x, (images[ROWS].to(x.dtype) / 255).masked_fill(hidden[ROWS], 0))
    x, _ = IncompleteImages(images, observed, math.nan).at(ROWS)
    assert torch.equal(x.isnan(), hidden[ROWS])


# CachedMFA ---------------------------------------------------------------------------------------------------------


def test_a_cached_mfa_is_what_the_density_says() -> None:
    data, density = incomplete(), network()
    expected, found = density(*data.at(ROWS)), CachedMFA(density, data)(ROWS)
    missing = ~data.observed[ROWS].unsqueeze(1)  # (B, 1, 1, H, W)
    close = {"rtol": tolerance("exact"), "atol": tolerance("exact")}
    torch.testing.assert_close(found.logits, expected.logits.log_softmax(1), **close)
    torch.testing.assert_close(found.means, expected.means, **close)
    torch.testing.assert_close(found.noise * missing, expected.noise * missing, **close)
    wide = missing.unsqueeze(1)
    torch.testing.assert_close(found.factors * wide, expected.factors * wide, **close)
    assert found.observed is not None
    assert torch.equal(found.observed, data.observed[ROWS])
    torch.testing.assert_close(found.variance, expected.variance, **close)
    # The comparison compares something: components differ, and so do images.
    assert (expected.means[:, 0] - expected.means[:, 1]).abs().max() > 0.01
    assert (expected.factors * wide)[0].abs().max() > 0.001


def test_the_layer_responds_to_it_as_to_the_density() -> None:
    data, density = incomplete(), network()
    layer = MisConv2d(SHAPE[0], 5, 3, padding=1)
    expected, found = layer(density(*data.at(ROWS))), layer(CachedMFA(density, data)(ROWS))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    filled = layer(MFA.point(density(*data.at(ROWS)).mean))
    assert (filled - expected).abs().max() > 1e-3  # uncertainty counts


def test_filled_is_the_mean_of_the_density() -> None:
    data, density = incomplete(), network()
    found = CachedMFA(density, data).filled(ROWS)
    expected = impute.by_density(density)(*data.at(ROWS))
    torch.testing.assert_close(found.mean, expected, rtol=1e-6, atol=1e-6)
    is_point(found, found.mean)
    seen = data.observed[ROWS].expand_as(expected)
    assert torch.equal(found.mean[seen], data.at(ROWS)[0][seen])


def test_only_missing_pixels_are_kept() -> None:
    images, observed = pixels()
    observed[1], observed[2] = True, True
    most = int((~observed).sum((1, 2, 3)).max())
    cached = CachedMFA(network(), IncompleteImages(images, observed))
    assert most < SHAPE[1] * SHAPE[2]
    assert cached.values.shape == (10 * 2, 2 + 3, SHAPE[0], most)


@pytest.mark.parametrize("weights", [(0.0, -40.0, 3.0), (-40.0, -50.0, 0.0), (1.0, 0.0, -1.0)])
def test_components_without_weight_are_left_out(weights: tuple[float, float, float]) -> None:
    """Of every second image; of the others all three count. What the layer says does not change by one float32."""

    def density(x: Tensor, observed: Tensor) -> MFA:
        generator = torch.Generator(x.device).manual_seed(int(x.sum() * 1000))
        batch, (channels, height, width) = len(x), SHAPE
        logits = torch.zeros(batch, 3)
        logits[::2] = torch.tensor(weights)
        means = torch.rand(batch, 3, channels, height, width, generator=generator)
        factors = torch.rand(batch, 3, 2, channels, height, width, generator=generator)
        return MFA(logits, means, factors, torch.full_like(means, 0.01)).fix(x, observed)

    data = incomplete()
    cached = CachedMFA(density, data)
    kept = sum(weight > max(weights) - 16 for weight in weights)
    assert len(cached.values) == 5 * kept + 5 * 3  # pieces of 4, 4 and 2 images
    layer = MisConv2d(SHAPE[0], 5, 3, padding=1)
    for rows in torch.arange(10).split(4):  # those that the density was asked for
        found, expected = cached(rows), density(*data.at(rows))
        torch.testing.assert_close(layer(found), layer(expected), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-6, atol=1e-6)
        assert bool((found.logits.softmax(1).count_nonzero(1)[::2] == kept).all())


def test_a_density_that_is_not_a_number_says_so() -> None:
    """And is not given the component of another image."""

    def density(x: Tensor, observed: Tensor) -> MFA:
        p = MFA.point(x)
        return MFA(p.logits + float("nan"), p.means, p.factors, p.noise, check=False)

    message = "the density must weigh its components with numbers, got none for image 0"
    with pytest.raises(FloatingPointError, match=message):
        CachedMFA(density, incomplete())


def test_all_images_with_one_component() -> None:
    """Then there is no second one, not even without weight."""
    data = incomplete()

    def density(x: Tensor, observed: Tensor) -> MFA:
        means = torch.rand(len(x), 4, *SHAPE)
        logits = torch.tensor([0.0, -30, -30, -30]).expand(len(x), 4)
        return MFA(logits, means, means.new_zeros(len(x), 4, 0, *SHAPE), means).fix(x, observed)

    assert CachedMFA(density, data)(ROWS).logits.shape == (len(ROWS), 1)


def test_images_of_which_nothing_is_missing() -> None:
    images, observed = pixels()
    data = IncompleteImages(images, torch.ones_like(observed))
    cached = CachedMFA(network(), data)
    x, _ = data.at(ROWS)
    for p in (cached(ROWS), cached.filled(ROWS)):
        is_point(p, x)
    layer = MisConv2d(SHAPE[0], 5, 3, padding=1)
    torch.testing.assert_close(layer(cached(ROWS)), layer(MFA.point(x)))


def test_filled_images_are_kept_as_points() -> None:
    data = incomplete()
    knn = impute.KNN(3).fit(*data.at(torch.arange(10)))
    found = CachedMFA(knn, data)(ROWS)
    torch.testing.assert_close(found.mean, knn(*data.at(ROWS)))
    assert not found.variance.any()


# Methods -----------------------------------------------------------------------------------------------------------


def filled_by(method: str, data: IncompleteImages, fitted: dict[str, Any]) -> Tensor:
    """The images as `misconv.impute` fills them."""
    x, observed = data.at(ROWS)
    if method in ("mean", "knn"):
        found: Tensor = fitted[method](x, observed)
        return found
    if method == "mfa":
        by_density: Tensor = impute.by_density(network())(x, observed)
        return by_density
    return impute.zero(x, observed)


@pytest.mark.parametrize("method", ["zero", "mean", "knn", "mfa"])
def test_imputing_methods_give_filled_images_as_points(method: str) -> None:
    data = incomplete()
    fitted = tools(data)
    expected, found = filled_by(method, data, fitted), of_method(method, data, fitted)(ROWS)
    torch.testing.assert_close(found.mean, expected, rtol=1e-6, atol=1e-6)
    assert not found.variance.any()
    layer = first_layer(method, SHAPE[0])
    by_hand = F.conv2d(expected, layer.weight, layer.bias, padding=1).relu()
    torch.testing.assert_close(layer(found), by_hand, rtol=1e-5, atol=1e-6)


def test_the_mask_is_one_more_channel() -> None:
    data = incomplete()
    x, observed = data.at(ROWS)
    found = of_method("mask", data, {})(ROWS)
    is_point(found, torch.cat([impute.zero(x, observed), observed.to(x.dtype)], 1))
    layer = first_layer("mask", SHAPE[0])
    by_hand = F.conv2d(found.mean, layer.weight, layer.bias, padding=1).relu()
    torch.testing.assert_close(layer(found), by_hand, rtol=1e-5, atol=1e-6)


def test_partial_convolution_gets_images_and_mask() -> None:
    data = incomplete()
    x, observed = of_method("partial", data, {})(ROWS)
    assert same((x, observed), data.at(ROWS))
    layer = first_layer("partial", SHAPE[0])
    by_hand = partial_conv2d(x, observed, layer.weight, layer.bias, padding=1).relu()
    torch.testing.assert_close(layer(x, observed), by_hand)
    assert (by_hand == 0).any()  # or the ReLU could be left out


def test_misconv_gives_the_density_itself() -> None:
    data = incomplete()
    fitted = tools(data)
    assert of_method("misconv_dmfa", data, fitted) is fitted["dmfa"]
    assert of_method("misconv_smfa", data, fitted) is fitted["smfa"]
    assert fitted["smfa"](ROWS).variance.any()


def test_a_density_gets_no_gradient_by_the_way() -> None:
    density = network().requires_grad_()
    assert density(*incomplete().at(ROWS)).means.requires_grad
    assert not CachedMFA(density, incomplete())(ROWS).means.requires_grad


def test_methods_have_names_of_their_own_and_all_that_they_need() -> None:
    """One list, in the paper's order."""
    assert [method.name for method in ALL] == [
        "zero", "mask", "mean", "knn", "partial", "acflow", "mfa", "misconv_smfa", "misconv_dmfa", "gt",
    ]  # fmt: skip
    assert METHODS == ("zero", "mask", "mean", "knn", "partial", "acflow", "mfa", "misconv_smfa", "misconv_dmfa")
    for each in ("title", "description"):
        assert len({getattr(method, each) for method in ALL}) == len(ALL)
    assert [method.name for method in ALL if method.sees_complete] == ["acflow", "gt"]
    assert [method.name for method in ALL if method.takes_complete] == ["gt"]
    assert {method.name: method.density for method in ALL if method.density} == {
        "acflow": "acflow", "mfa": "dmfa", "misconv_smfa": "smfa", "misconv_dmfa": "dmfa",
    }  # fmt: skip
    # Nobody is compared with itself, nor with somebody who has seen more.
    assert not any(method.is_baseline and (method.name == OURS or method.sees_complete) for method in ALL)


@pytest.mark.parametrize("name", ["GT", "magic", ""])
def test_an_unknown_method_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"method must be one of zero, mask, .*, gt, got {name!r}"):
        method_named(name)


# Nothing depends on what is hidden -------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", ["nan", "large", "bytes"])
@pytest.mark.parametrize("method", METHODS)
def test_hidden_pixels_never_matter(method: str, poison: str) -> None:
    """Neither to what is fitted, nor to the batch, nor to the network's response: the same bits."""
    images, observed = pixels()
    filler = {"nan": math.nan, "large": 1e30, "bytes": 0.0}[poison]
    garbage = torch.randint(256, images.shape, dtype=torch.uint8)
    other = IncompleteImages(images.where(observed, garbage) if poison == "bytes" else images, observed, filler)
    clean = IncompleteImages(images, observed)
    batches = [of_method(method, data, tools(data))(ROWS) for data in (clean, other)]
    layer = first_layer(method, SHAPE[0])
    responses = [layer(*batch) if method == "partial" else layer(batch) for batch in batches]
    assert torch.equal(*responses)
    if method != "partial":  # its first layer alone reads the mask, and may be given anything
        assert same(*batches)


# Complete images, and networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*METHODS, "gt"])
def test_complete_images(method: str) -> None:
    images, _ = pixels()
    found = complete(method, images)(ROWS)
    # On the CPU, which divides where a GPU multiplies by the reciprocal.
    x = (images[ROWS].cpu().to(torch.get_default_dtype()) / 255).to(images.device)
    ones = torch.ones_like(x[:, :1])
    if method == "partial":
        assert same(found, (x, ones.bool()))
    else:
        is_point(found, torch.cat([x, ones], 1) if method == "mask" else x)


@pytest.mark.parametrize("method", METHODS)
def test_a_network_takes_complete_images_as_incomplete_ones_without_a_hole(method: str) -> None:
    images, observed = pixels()
    fitted = tools(IncompleteImages(images, observed))
    whole = IncompleteImages(images, torch.ones_like(observed))
    fitted["smfa"] = fitted["dmfa"] = CachedMFA(network(), whole)
    fitted["acflow"] = CachedMFA(flow().impute, whole)
    layer = first_layer(method, SHAPE[0])
    responses = []
    for take in (complete(method, images), of_method(method, whole, fitted)):
        batch = take(ROWS)
        responses.append(layer(*batch) if method == "partial" else layer(batch))
    torch.testing.assert_close(*responses, rtol=1e-6, atol=1e-6)


def test_batches_of_points_do_not_share_their_images() -> None:
    """Their constants are shared; what is in them is not."""
    data = incomplete()
    take = of_method("zero", data, {})
    first = take(ROWS)
    kept = first.mean.clone()
    second = take(ROWS.flip(0))
    assert torch.equal(first.mean, kept)
    assert torch.equal(second.mean, kept.flip(0))


@pytest.mark.parametrize(
    ("kind", "shape", "parameters"),
    [
        # first layer, its norm, down, two blocks, linear layers; counted by hand
        ("small", (1, 28, 28), 320 + 64 + 9248 + (18496 + 128) + (36928 + 128) + (64 * 7 * 7 * 20 + 20) + 210),
        ("small", (3, 9, 7), 896 + 64 + 9248 + (18496 + 128) + (36928 + 128) + (64 * 3 * 2 * 20 + 20) + 210),
        (
            "large", (3, 32, 32),
            896 + 64 + (9248 + 64) + 9248 + (18496 + 128) + 2 * (36928 + 128) + (64 * 8 * 8 * 128 + 128) + 1290,
        ),
    ],
)  # fmt: skip
def test_the_networks_of_the_appendix(kind: str, shape: tuple[int, int, int], parameters: int) -> None:
    methods = {
        method: Classifier(first_layer(method, shape[0]), shape, 10, kind).eval()
        for method in ("gt", "mask", "partial")
    }
    assert sum(p.numel() for p in methods["gt"].parameters()) == parameters
    x, observed = torch.rand(2, *shape), torch.rand(2, 1, *shape[1:]) < 0.5
    rest = {name: value.shape for name, value in methods["gt"].rest.state_dict().items()}
    for method, classifier in methods.items():
        assert {name: value.shape for name, value in classifier.rest.state_dict().items()} == rest
        given = IncompleteImages((255 * x).byte(), observed)
        batch = (
            complete("gt", given.images)(torch.arange(2))
            if method == "gt"
            else of_method(method, given, {})(torch.arange(2))
        )
        assert (classifier(*batch) if method == "partial" else classifier(batch)).shape == (2, 10)
    with pytest.raises(ValueError, match="kind must be 'small' or 'large', got 'huge'"):
        Classifier(misconv_layer(1), shape, 10, "huge")


def test_a_batch_norm_without_a_counter_learns_its_statistics_all_the_same() -> None:
    classifier = Classifier(misconv_layer(1), (1, 8, 8), 10, "small").train()
    x = torch.rand(16, 1, 8, 8)
    classifier(MFA.point(x))
    with torch.no_grad():
        response = classifier.first(MFA.point(x))
    torch.testing.assert_close(classifier.rest[0].running_mean, 0.1 * response.mean((0, 2, 3)))
