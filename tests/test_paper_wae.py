"""The Wasserstein autoencoders of the appendix: their sizes, their losses, and what they never read."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from misconv import SMFA, data, missing
from misconv._train import one_device, train
from misconv.mfa import MFA
from misconv.paper.inputs import CachedMFA, IncompleteImages
from misconv.paper.methods import method_named
from misconv.paper.wae import SETTINGS, WAE, WAESettings, adversarial_losses, reconstruction_loss, wae_job

SMALL = replace(SETTINGS["mnist"], width=6, hidden=8, latent=4, batch_size=32, learning_rate=3e-3, weight=0.1)
COUNT = 96
SHAPES = {"mnist": (1, 28, 28), "svhn": (3, 32, 32), "celeba": (3, 64, 64)}


def made(method: str = "zero", settings: WAESettings = SMALL, shape: tuple[int, int, int] = (1, 8, 8)) -> WAE:
    torch.manual_seed(0)
    return WAE(method_named(method).first_layer(shape[0]), shape, settings)


def count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "flat", "encoder", "decoder"),
    [("mnist", 3920, 0.21, 0.21), ("svhn", 12288, 1.4, 1.4), ("celeba", 8192, 14.7, 14.7)],
)
def test_sizes_are_those_of_the_paper(name: str, flat: int, encoder: float, decoder: float) -> None:
    wae = made(settings=SETTINGS[name], shape=SHAPES[name])
    digits = 2 if name == "mnist" else 1
    assert wae.decoder[0].out_features == flat  # type: ignore[index, union-attr]
    assert [round(count(part) / 1e6, digits) for part in (wae.encoder, wae.decoder)] == [encoder, decoder]


def test_the_loss_is_that_of_seen_values_alone() -> None:
    x, prediction = torch.rand(3, 2, 8, 8), torch.rand(3, 2, 8, 8).requires_grad_()
    observed = torch.rand(3, 1, 8, 8) > 0.5
    seen = observed.expand_as(x)
    found = reconstruction_loss(prediction, x.masked_fill(~seen, math.nan), observed)
    torch.testing.assert_close(found, (prediction - x)[seen].square().mean())
    found.backward()
    assert prediction.grad is not None
    assert not prediction.grad[~seen].any()
    assert prediction.grad.isfinite().all()


def test_the_loss_of_images_that_do_not_fit_is_refused() -> None:
    images, observed = torch.rand(3, 3, 4, 4), torch.rand(3, 1, 4, 4) > 0.5
    for x, seen, message in (
        (images, observed[:, 0], "observed must have shape"),
        (images[:1], observed[:1], r"x must have the shape of images, \(3, 3, 4, 4\), got"),
        (images, observed.half() + 0.5, "observed must be bool, or hold only 0"),
    ):
        with pytest.raises(ValueError, match=message):
            reconstruction_loss(images, x, seen)


def test_one_step_of_both_parts_has_the_gradients_of_two() -> None:
    """The discriminator's loss moves it alone, and the others' losses all but it."""
    wae, x = made(), torch.rand(6, 1, 8, 8)
    observed = torch.ones(6, 1, 8, 8, dtype=torch.bool)
    torch.manual_seed(1)
    images, *judged = wae(MFA.point(x))
    own, fooled = adversarial_losses(*judged)
    (reconstruction_loss(images, x, observed) + own + fooled).backward()
    found = {name: p.grad for name, p in wae.named_parameters()}

    torch.manual_seed(1)
    codes = wae.encode(MFA.point(x))
    prior = torch.randn_like(codes)
    says = [wae.discriminator(t).sigmoid() for t in (prior, codes)]
    first = -says[0].log().mean() - (1 - says[1]).log().mean()
    second = reconstruction_loss(wae.decode(codes), x, observed) - says[1].log().mean()
    for loss, chosen in ((first, True), (second, False)):
        names = [n for n, _ in wae.named_parameters() if n.startswith("discriminator") == chosen]
        parameters = dict(wae.named_parameters())
        for name, grad in zip(
            names, torch.autograd.grad(loss, [parameters[n] for n in names], retain_graph=True), strict=True
        ):
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-8)


@cache
def digits() -> tuple[Tensor, Tensor]:
    images = data.load("digits").train[:COUNT]
    return images, missing.square(COUNT, 8, 8, generator=torch.Generator().manual_seed(0))


def trained(method: str, incomplete: IncompleteImages, epochs: int = 1) -> tuple[WAE, list[dict[str, float]]]:
    torch.set_default_dtype(torch.float32)
    chosen = method_named(method)
    order = torch.arange(COUNT)
    fitted: Any = None if chosen.fit_imputer is None else chosen.fit_imputer(*incomplete.at(order))
    if chosen.density is not None:
        fitted = CachedMFA(SMFA(2, 1).fit(*incomplete.at(order), iterations=2), incomplete)
    assert chosen.inputs is not None
    wae, fabric = made(method).float(), one_device("cpu")
    take = chosen.inputs(incomplete, fitted)
    job = wae_job(wae, SMALL, take, incomplete, (order[16:], order[:16]), fabric)
    (history,) = train([job], fabric, epochs=epochs, progress=False)
    return wae, history


@pytest.mark.parametrize("method", ["mask", "knn", "partial", "misconv_smfa"])
def test_hidden_pixels_change_no_parameter(method: str) -> None:
    images, observed = digits()
    noise = torch.randint(256, images.shape, dtype=torch.uint8)
    clean, _ = trained(method, IncompleteImages(images, observed))
    for other in (
        IncompleteImages(images, observed, filler=math.nan),
        IncompleteImages(images.where(observed, noise), observed),
    ):
        spoilt, _ = trained(method, other)
        for name, value in clean.state_dict().items():
            assert torch.equal(value, spoilt.state_dict()[name]), name
    if method == "mask":  # a difference would be seen
        other_images, _ = trained(method, IncompleteImages(noise, observed))
        assert not torch.equal(other_images.state_dict()["decoder.0.weight"], clean.state_dict()["decoder.0.weight"])


def test_it_learns_to_reconstruct() -> None:
    images, observed = digits()
    wae, history = trained("mean", IncompleteImages(images, observed), epochs=10)
    assert history[-1]["validation_reconstruction"] < 0.75 * history[0]["validation_reconstruction"]
    drawn = wae.eval().decode(torch.randn(4, SMALL.latent))
    assert drawn.shape == (4, 1, 8, 8)
    assert 0 <= drawn.min() <= drawn.max() <= 1


def test_a_size_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiples of 4, got \(1, 8, 10\)"):
        made(shape=(1, 8, 10))
