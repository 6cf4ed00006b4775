"""The figures of a density against loops of numpy, and what the density gets to see."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from misconv import MFA, SMFA, ConvDMFA
from misconv.paper.acflow import ACFlow
from misconv.paper.quality import most_probable, quality
from tests.reference import random_mfa, tolerance

Array = np.ndarray[Any, np.dtype[np.float64]]
NAMES = {"nll", "mse", "mse_per_pixel", "psnr", "ssim", "exact", "images"}


class Prior(nn.Module):
    """One random mixture for all images, conditioned on what is seen of each; remembers what it was given."""

    def __init__(self, shape: tuple[int, int, int], components: int = 2) -> None:
        super().__init__()
        p = random_mfa(1, components, 2, shape, seed=3, scale=0.3)
        # Alike, so that no component rules the others out.
        self.prior = MFA(0.1 * p.logits, 0.5 + 0.05 * p.means, p.factors, 0.3 + 0.05 * p.noise)
        self.got: list[Tensor] = []
        self.modes: list[bool] = []

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        self.got.append(x.clone())
        self.modes.append(self.training)
        return self.prior[[0] * len(x)].condition(x, observed)


def constant(value: float) -> Callable[[Tensor, Tensor], MFA]:
    """Every hidden pixel has this mean and unit variance."""

    def density(x: Tensor, observed: Tensor) -> MFA:
        means = torch.full_like(x, value).unsqueeze(1)
        nothing = means.unsqueeze(2)[:, :, :0]
        return MFA(x.new_zeros(len(x), 1), means, nothing, torch.ones_like(means)).fix(x, observed)

    return density


def some(count: int = 5, shape: tuple[int, int, int] = (2, 8, 7)) -> tuple[Tensor, Tensor]:
    return torch.rand(count, *shape), torch.rand(count, 1, *shape[1:]) < 0.7


# By hand -----------------------------------------------------------------------------------------------------------


def log_normal(x: Array, mean: Array, covariance: Array) -> float:
    rest = x - mean
    distance = rest @ np.linalg.solve(covariance, rest)
    return float(-0.5 * (distance + np.linalg.slogdet(covariance)[1] + len(x) * math.log(2 * math.pi)))


def by_hand(prior: MFA, image: Array, seen: Array) -> tuple[float, Array]:
    """−log p(hidden | seen) = log p(seen) − log p(all), and the image filled by its likeliest component."""
    x, seen = image.ravel(), seen.ravel()
    together, before, guesses = [], [], []
    logits = prior.logits[0].double().cpu().numpy()
    for k in range(len(logits)):
        mean = prior.means[0, k].double().cpu().numpy().ravel()
        factors = prior.factors[0, k].double().cpu().numpy().reshape(-1, len(mean))
        covariance = np.diag(prior.noise[0, k].double().cpu().numpy().ravel()) + factors.T @ factors
        weight = logits[k] - np.logaddexp.reduce(logits)
        together.append(weight + log_normal(x, mean, covariance))
        before.append(weight + log_normal(x[seen], mean[seen], covariance[np.ix_(seen, seen)]))
        filled = x.copy()
        pull = np.linalg.solve(covariance[np.ix_(seen, seen)], x[seen] - mean[seen])
        filled[~seen] = mean[~seen] + covariance[np.ix_(~seen, seen)] @ pull
        guesses.append(filled.reshape(image.shape))
    nll = np.logaddexp.reduce(before) - np.logaddexp.reduce(together)
    return float(nll), guesses[int(np.argmax(before))]


def psnr(a: Array, b: Array) -> float:
    return 10 * math.log10(1 / float(((a - b) ** 2).mean()))


def ssim(a: Array, b: Array) -> float:
    """Wang et al. (2004), window by window, the images reflected at their edges."""
    steps = np.arange(-5, 6)
    line = np.exp(-(steps**2) / (2 * 1.5**2))
    window = np.outer(line, line) / line.sum() ** 2
    values = []
    for one, other in zip(a, b, strict=True):  # channels
        one, other = np.pad(one, 5, mode="reflect"), np.pad(other, 5, mode="reflect")
        for i in range(a.shape[1]):
            for j in range(a.shape[2]):
                u, v = one[i : i + 11, j : j + 11], other[i : i + 11, j : j + 11]
                mu, mv = (window * u).sum(), (window * v).sum()
                vu, vv = (window * (u - mu) ** 2).sum(), (window * (v - mv) ** 2).sum()
                both = (window * (u - mu) * (v - mv)).sum()
                top, bottom = (2 * mu * mv + 1e-4) * (2 * both + 9e-4), (mu**2 + mv**2 + 1e-4) * (vu + vv + 9e-4)
                values.append(top / bottom)
    return float(np.mean(values))


@pytest.mark.parametrize("components", [1, 2])
def test_against_loops(components: int) -> None:
    images, observed = some()
    density = Prior((2, 8, 7), components)
    wanted: dict[str, list[float]] = {name: [] for name in ("nll", "mse", "psnr", "ssim")}
    for image, seen in zip(images, observed.expand_as(images), strict=True):
        truth = image.double().cpu().numpy()
        nll, filled = by_hand(density.prior, truth, seen.cpu().numpy())
        wanted["nll"].append(nll)
        wanted["mse"].append(float(((filled - truth) ** 2).sum()))
        wanted["psnr"].append(psnr(filled.clip(0, 1), truth))
        wanted["ssim"].append(ssim(filled.clip(0, 1), truth))
    found = quality(density, images, observed, batch_size=2)
    assert set(found) == NAMES
    for name, values in wanted.items():
        assert found[name] == pytest.approx(np.mean(values), rel=100 * tolerance("exact")), name
    assert found["mse_per_pixel"] == pytest.approx(found["mse"] * 5 / int((~observed).sum() * 2))
    assert (found["images"], found["exact"]) == (5, 0)


def test_the_batch_size_changes_nothing() -> None:
    images, observed = some()
    one, all_at_once = (quality(Prior((2, 8, 7)), images, observed, batch_size=size) for size in (1, 99))
    assert one == pytest.approx(all_at_once, rel=tolerance("exact"))


def test_the_default_device_is_of_no_account() -> None:
    images, observed = some()
    found = quality(constant(0.5), images, observed)
    with torch.device("meta"):
        assert quality(constant(0.5), images, observed) == found


def test_the_most_probable_image_is_the_mean_of_the_heaviest_component() -> None:
    p = random_mfa(4, 3, 1, (1, 6, 6))
    chosen = p.weights.argmax(1).tolist()
    torch.testing.assert_close(most_probable(p), torch.stack([p.means[i, k] for i, k in enumerate(chosen)]))


def test_a_simple_case() -> None:
    """Half of a white image is hidden and guessed to be grey."""
    images, observed = torch.ones(3, 1, 8, 8), torch.zeros(3, 1, 8, 8, dtype=torch.bool)
    observed[..., :4, :] = True
    found = quality(constant(0.5), images, observed)
    assert found["nll"] == pytest.approx(32 * 0.5 * (math.log(2 * math.pi) + 0.25), rel=1e-6)
    assert found["mse"] == pytest.approx(8)
    assert found["mse_per_pixel"] == pytest.approx(0.25)
    assert found["psnr"] == pytest.approx(10 * math.log10(8), rel=1e-6)


def test_the_error_is_not_clamped_but_the_picture_is() -> None:
    """A guess above white shows as white."""
    images, observed = torch.ones(2, 1, 8, 8), torch.rand(2, 1, 8, 8) < 0.5
    found = quality(constant(3.0), images, observed)
    assert found["mse_per_pixel"] == pytest.approx(4)
    assert found["ssim"] == pytest.approx(1)
    assert (found["psnr"], found["exact"]) == (math.inf, 2)


def test_images_without_error_do_not_make_the_mean_infinite() -> None:
    images, observed = torch.zeros(4, 1, 8, 8), torch.ones(4, 1, 8, 8, dtype=torch.bool)
    observed[2:, :, :2] = False
    images[2] = 0.5
    found = quality(constant(0.5), images, observed)
    assert found["exact"] == 3  # two that miss nothing, one that is guessed
    assert found["psnr"] == pytest.approx(10 * math.log10(16))
    assert found["mse"] == pytest.approx(1)  # a quarter at each of 16 pixels of one image in four
    assert found["mse_per_pixel"] == pytest.approx(1 / 8)


def test_a_density_that_says_nan_fills_no_image_exactly() -> None:
    flow = ACFlow((2, 8, 7), scales=2, width=4, blocks=1)
    for parameter in flow.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    found = quality(flow, *some())
    assert found["exact"] == 0
    assert math.isnan(found["psnr"])


def test_uint8_is_a_share_of_255() -> None:
    images, observed = torch.randint(0, 256, (3, 2, 8, 7), dtype=torch.uint8), some(3)[1]
    as_numbers = quality(Prior((2, 8, 7)), images.to(torch.get_default_dtype()) / 255, observed)
    assert quality(Prior((2, 8, 7)), images, observed) == as_numbers


# What the density sees ---------------------------------------------------------------------------------------------


def test_the_density_never_sees_what_is_hidden() -> None:
    images, observed = some()
    other = torch.where(observed, images, 1 - images)
    seen = []
    for x in (images, other):
        density = Prior((2, 8, 7))
        quality(density, x, observed)
        seen.append(torch.cat(density.got))
    assert (seen[0].masked_select(~observed.expand_as(images)) == 0).all()
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e20])
@pytest.mark.parametrize("kind", ["SMFA", "DMFA"])
def test_poison_in_the_hidden_pixels_changes_nothing(kind: str, poison: float) -> None:
    images, observed = some(20, (1, 8, 8))
    if kind == "SMFA":
        density: nn.Module = SMFA(components=2, rank=1).fit(images, observed, iterations=3)
    else:
        density = ConvDMFA(1, components=2, rank=2, widths=(4, 8), depths=(1, 1, 1))

    def poisoned(x: Tensor, observed: Tensor) -> MFA:
        p = density(x.masked_fill(~observed, poison), observed)
        assert isinstance(p, MFA)
        return p

    density.eval()
    assert quality(poisoned, images, observed) == quality(density, images, observed)


def test_eval_mode_and_no_gradients_and_all_as_it_was() -> None:
    density = ConvDMFA(1, rank=1, widths=(4, 8), depths=(1, 1, 1))
    parts = list(density.modules())
    parts[-1].eval()
    modes, state = [part.training for part in parts], {k: v.clone() for k, v in density.state_dict().items()}
    images, observed = some(4, (1, 8, 8))
    quality(density, images, observed)
    assert [part.training for part in parts] == modes
    assert len(set(modes)) == 2
    for name, value in density.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    prior = Prior((1, 8, 8)).train()
    quality(prior, images, observed)
    assert prior.modes == [False]
    assert prior.training


def test_the_mode_is_put_back_after_an_error() -> None:
    prior = Prior((1, 9, 9)).train()
    with pytest.raises(ValueError, match="x must have the shape"):
        quality(prior, *some(2, (1, 8, 8)))
    assert prior.training


# Bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(2, 8, 8), r"images must have shape \(B, C, H, W\)"),
        (torch.zeros(2, 8, 8, dtype=torch.uint8), r"images must have shape \(N, C, H, W\)"),
        (torch.zeros(0, 1, 8, 8, dtype=torch.uint8), r"images must have shape \(N, C, H, W\)"),
        (torch.rand(2, 1, 8, 8) + 1, "images must be complete, with values between 0 and 1, got 1.* to"),
        (torch.full((2, 1, 8, 8), math.nan), "images must be complete, with values between 0 and 1, got nan to nan"),
        (torch.rand(2, 1, 5, 8), "images must have at least 6×6 pixels for SSIM"),
    ],
)
def test_bad_images(images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quality(constant(0.5), images, torch.zeros(2, 1, 8, 8, dtype=torch.bool))


def test_bad_arguments() -> None:
    images, observed = some(2, (1, 8, 8))
    with pytest.raises(TypeError, match="images must be a floating-point image, got"):
        quality(constant(0.5), images.long(), observed)
    with pytest.raises(ValueError, match=r"observed must have shape \(2, 1, 8, 8\) to fit the images, got"):
        quality(constant(0.5), images, observed[:, :, 1:])
    with pytest.raises(ValueError, match="observed must hide at least one pixel"):
        quality(constant(0.5), images, torch.ones_like(observed))
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        quality(constant(0.5), images, observed, batch_size=0)


def test_answers_that_cannot_be_scored() -> None:
    images, observed = some(2, (1, 8, 8))
    answers: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "density must return a misconv.MFA, got", lambda x, observed: x),
        (ValueError, "density must return an MFA of the images' shape", lambda x, observed: MFA.point(x[:1])),
        (ValueError, "holds the observed pixels, and no others, as exact", lambda x, observed: MFA.point(x)),
        (ValueError, "holds the observed pixels, and no others", lambda x, o: random_mfa(2, 1, 1, (1, 8, 8))),
    ]
    for kind, message, density in answers:
        with pytest.raises(kind, match=message):
            quality(density, images, observed)


def test_without_torchmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    with pytest.raises(ImportError, match=r"PSNR and SSIM come from torchmetrics: pip install 'misconv\[paper\]'"):
        quality(constant(0.5), *some(2, (1, 8, 8)))
