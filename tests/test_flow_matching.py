"""Flow matching: what it draws and guesses, whatever is hidden; and its training on incomplete images alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import misconv
from misconv import data, missing
from misconv._train import one_device, train
from misconv.paper import matching
from misconv.paper.flow_matching import FlowMatching
from misconv.paper.inputs import IncompleteImages
from misconv.paper.matching import MatchingSettings, draw_times, make_matching, matching_job, matching_loss
from tests.test_acflow import MASKS, SHAPE, masked

SMALL = MatchingSettings(epochs=4, scales=2, width=8, steps=4, batch_size=32, learning_rate=3e-3)


def random_flow(shape: tuple[int, int, int] = SHAPE, std: float = 0.1, **sizes: Any) -> FlowMatching:
    """With weights of its own: a new one predicts nothing."""
    flow = FlowMatching(shape, **{"scales": 2, "width": 6, "steps": 3} | sizes)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += std * torch.randn_like(parameter)
    return flow


# Seen and hidden -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -1e30])
def test_seen_pixels_stay_and_hidden_ones_are_never_read(kind: str, poison: float) -> None:
    flow, x, observed = random_flow(), torch.rand(3, *SHAPE), masked(kind)
    seen = observed.expand_as(x)
    spoilt = x.masked_fill(~seen, poison)
    clean = flow.impute(x, observed), flow.sample(x, observed, 2, generator=torch.Generator().manual_seed(1))
    again = flow.impute(spoilt, observed), flow.sample(spoilt, observed, 2, generator=torch.Generator().manual_seed(1))
    for first, second in zip(clean, again, strict=True):
        assert torch.equal(first, second)
        assert first.min() >= 0
        assert first.max() <= 1
        assert torch.equal(first.where(seen, 0), x.where(seen, 0).expand_as(first))
    assert clean[1].shape == (2, *x.shape)
    assert torch.equal(clean[1][0], clean[1][1]) == (kind == "none")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_of_another_type(dtype: torch.dtype) -> None:
    flow, observed = random_flow().float(), masked("pixels")
    x = torch.rand(3, *SHAPE).to(dtype)
    drawn = flow.sample(x, observed)[0]
    assert drawn.dtype == dtype
    assert torch.equal(drawn.where(observed, 0), x.where(observed, 0))
    torch.testing.assert_close(flow.impute(x, observed).float(), flow.impute(x.float(), observed), rtol=0, atol=5e-3)


def test_times_have_the_digits_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch's default type is: with fewer, a time near 1 would be that of pixels that are shown."""
    torch.set_default_dtype(torch.bfloat16)
    flow, times = random_flow(steps=100).double(), []
    monkeypatch.setattr(flow.network, "forward", lambda u, t: times.append(t) or torch.zeros_like(u))
    x, observed = torch.rand(1, *SHAPE).double(), torch.zeros(1, 1, *SHAPE[1:], dtype=torch.bool)
    flow.sample(x, observed)
    found = [float(each.amax()) for each in times]
    assert found == sorted(found)
    assert len(set(found)) == 100
    assert found[-1] == 1 - 1e-4


def test_an_image_does_not_depend_on_its_company() -> None:
    flow, x, observed = random_flow(), torch.rand(3, *SHAPE), masked("pixels")
    alone = torch.cat([flow.impute(x[n : n + 1], observed[n : n + 1]) for n in range(3)])
    torch.testing.assert_close(flow.impute(x, observed), alone)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    flow, x, observed = random_flow(steps=2), torch.rand(3, *SHAPE), masked("pixels")
    misconv.save(flow, tmp_path / "flow.safetensors")
    again = misconv.load(tmp_path / "flow.safetensors").to(x.device)
    assert isinstance(again, FlowMatching)
    assert again.config() == flow.config()
    assert torch.equal(again.impute(x, observed), flow.impute(x, observed))
    assert misconv.paper.flow_matching.FlowMatching is FlowMatching


# The path from noise to images ---------------------------------------------------------------------------------------


class _Exact(nn.Module):
    """The best network for two pixels (a, b) that are normal, from −1 to 1, with any correlation.

    With pixels of times τ, covariance S and T = diag(τ): u = T z + (1 − T) ε is normal, and so is z given u.
    """

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        super().__init__()
        self.mean, self.covariance = mean, covariance

    def forward(self, u: Tensor, times: Tensor) -> Tensor:
        flat, time = u.flatten(1), times.flatten(1)
        scaled = time.diag_embed()  # (B, 2, 2)
        noise = ((1 - time).square() * (time > 0)).diag_embed()  # at time 0 there is 0, and no noise
        spread = scaled @ self.covariance @ scaled + noise
        gain = self.covariance @ scaled @ torch.linalg.pinv(spread, hermitian=True)
        best = self.mean + (gain @ (flat - time * self.mean).unsqueeze(2)).squeeze(2)
        return ((best - flat) / (1 - time).clamp_min(1e-12)).view_as(u)


MEAN, COVARIANCE = torch.tensor([0.1, -0.2]), 0.04 * torch.tensor([[1.0, 0.8], [0.8, 1.5]])


def exact(steps: int) -> FlowMatching:
    flow = FlowMatching((1, 1, 2), scales=1, width=1, steps=steps).double()
    flow.network = _Exact(MEAN.double(), COVARIANCE.double())  # type: ignore[assignment]
    flow.register_parameter("_type", nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    return flow


def test_an_exact_network_draws_the_right_distribution() -> None:
    """Of two pixels, none or one of them seen: mean, spread and correlation, within four standard errors and more."""
    many, flow = 20_000, exact(steps=30)
    x = torch.full((many, 1, 1, 2), 0.6, dtype=torch.float64)
    observed = torch.zeros(many, 1, 1, 2, dtype=torch.bool)
    both = 2 * flow.sample(x, observed, generator=torch.Generator().manual_seed(0))[0].view(many, 2) - 1
    error = 4 / math.sqrt(many)
    deviation = COVARIANCE.diag().sqrt().double()
    assert ((both.mean(0) - MEAN).abs() < error * deviation).all()
    assert ((both.std(0) / deviation - 1).abs() < error).all()
    assert torch.corrcoef(both.T)[0, 1].item() == pytest.approx(0.8 / math.sqrt(1.5), abs=0.01)
    observed[..., 0] = True
    drawn = 2 * flow.sample(x, observed, generator=torch.Generator().manual_seed(0))[0].view(many, 2) - 1
    mean = -0.2 + 0.8 * (0.2 - 0.1)  # b given a = 2 · 0.6 − 1
    spread = math.sqrt(0.04 * (1.5 - 0.8**2))
    assert drawn[:, 1].mean().item() == pytest.approx(mean, abs=error * spread)
    assert drawn[:, 1].std().item() == pytest.approx(spread, rel=error)
    assert flow.impute(x, observed)[0, 0, 0, 1].item() == pytest.approx((mean + 1) / 2, abs=1e-9)


def test_more_steps_come_nearer_to_the_exact_distribution() -> None:
    """From noise z the flow of one normal pixel is mean + deviation · z, so that the error of steps is seen by itself.

    Heun's method has an error of second order: with twice the steps it is at most a third.
    """
    x, seen = torch.zeros(1, 1, 1, 2, dtype=torch.float64), torch.tensor([[[[True, False]]]])
    noise = torch.randn(1, 1, 1, 2, dtype=torch.float64)
    spread, mean = math.sqrt(0.04 * (1.5 - 0.8**2)), -0.2 + 0.8 * (0 - 0.1)
    wanted = mean + spread * noise[..., 1].item()
    errors = [abs(exact(steps)._integrate(noise, x, seen)[..., 1].item() - wanted) for steps in (10, 20, 40)]
    assert errors[2] < errors[1] / 3 < errors[0] / 9
    assert errors[2] < 0.01 * spread


# The loss ------------------------------------------------------------------------------------------------------------


def test_the_exact_network_has_the_least_loss_although_pixels_are_missing() -> None:
    """Of two normal pixels one is missing in half of the images, and yet no change of the network makes it better."""
    many = 20_000
    root = torch.linalg.cholesky(COVARIANCE.double())
    x = (torch.randn(many, 2, dtype=torch.float64) @ root.T + MEAN + 1).view(many, 1, 1, 2) / 2
    seen = torch.ones(many, 1, 1, 2, dtype=torch.bool)
    seen[: many // 4, ..., 0] = False
    seen[many // 4 : many // 2, ..., 1] = False
    times = draw_times(seen, seen & (torch.rand(seen.shape) > 0.5))

    def loss(mean: float = 0.0, scale: float = 1.0) -> float:
        other = _Exact(MEAN.double() + mean, COVARIANCE.double() * scale)
        torch.manual_seed(5)  # the same noise
        return float(matching_loss(other, x, seen, times))

    for change in ({"mean": 0.05}, {"mean": -0.05}, {"scale": 1.5}, {"scale": 0.6}):
        assert loss(**change) > loss() + 1e-3


def test_times_are_those_of_the_tasks() -> None:
    many = 6000
    seen = missing.square(many, 8, 8)
    shown = missing.hide(seen)
    times = draw_times(seen, shown)
    assert times.shape == seen.shape
    assert not times[~seen].any()
    is_unshown = (times != 1).all(3).all(2).all(1)
    assert is_unshown.double().mean().item() == pytest.approx(matching.UNSHOWN, abs=0.03)
    assert ((times == 1) == shown & ~is_unshown.view(-1, 1, 1, 1)).all()
    noised = seen & (times < 1)
    time = times.masked_fill(~noised, 0).amax((1, 2, 3))
    assert torch.equal(times[noised], time.view(-1, 1, 1, 1).expand_as(times)[noised]), "one time for an image"
    some = noised.any(3).any(2).any(1)
    assert (time[some] == 0).double().mean().item() == pytest.approx(matching.STILL, abs=0.03)
    assert time[some & (time > 0)].mean().item() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_missing_pixel_is_not_in_the_loss(poison: float) -> None:
    flow, x, seen = random_flow(), torch.rand(3, *SHAPE), masked("pixels")
    times = draw_times(seen, missing.hide(seen))
    found = []
    for images in (x, x.masked_fill(~seen, poison)):
        flow.zero_grad()
        torch.manual_seed(1)
        loss = matching_loss(flow, images, seen, times)
        loss.backward()
        gradients = [parameter.grad for parameter in flow.parameters() if parameter.grad is not None]
        found.append([loss.detach(), *(gradient.clone() for gradient in gradients)])
    assert len(found[0]) == len(list(flow.parameters())) + 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# Training ------------------------------------------------------------------------------------------------------------


def digits(filler: float = 0.0, noisy: bool = False) -> IncompleteImages:
    images = data.load("digits").train[:200]
    observed = missing.square(200, 8, 8, generator=torch.Generator().manual_seed(0))
    if noisy:
        images = images.where(observed, torch.randint(256, images.shape, dtype=torch.uint8))
    return IncompleteImages(images, observed, filler)


def trained(images: IncompleteImages, epochs: int = 2, **options: Any) -> tuple[FlowMatching, list[dict[str, float]]]:
    torch.set_default_dtype(torch.float32)
    flow = make_matching(SMALL, (1, 8, 8), 0)
    job = matching_job(flow, SMALL, images, (torch.arange(40, 200), torch.arange(40)))
    (history,) = train([job], one_device("cpu"), epochs=epochs, progress=False, **options)
    return flow, history


def same(first: FlowMatching, second: FlowMatching) -> bool:
    return all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


@pytest.mark.usefixtures("without_default_device")
def test_hidden_pixels_change_no_parameter() -> None:
    clean, _ = trained(digits())
    assert not same(clean, make_matching(SMALL, (1, 8, 8), 0))
    assert same(clean, trained(digits(filler=math.nan))[0])
    assert same(clean, trained(digits(noisy=True))[0])


@pytest.mark.usefixtures("without_default_device")
def test_it_learns_from_digits_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    flow, history = trained(digits(), 4)
    assert history[-1]["validation_loss"] < history[0]["validation_loss"]
    assert history[-1]["loss"] < history[0]["loss"]
    trained(digits(), 2, checkpoint=tmp_path / "run")
    again, _ = trained(digits(), 4, checkpoint=tmp_path / "run")
    assert same(flow, again)


LEVEL, SPREAD, NOISE = 0.5, 0.1, 0.05


def levelled(count: int, *, complete: bool) -> IncompleteImages:
    """Images of one grey level each, which is normal, with noise at every pixel."""
    level = LEVEL + SPREAD * torch.randn(count, 1, 1, 1)
    values = (level + NOISE * torch.randn(count, 1, 4, 4)).clamp(0, 1)
    observed = torch.ones(count, 1, 4, 4, dtype=torch.bool) if complete else missing.square(count, 4, 4)
    return IncompleteImages((255 * values).round().byte(), observed)


@pytest.mark.usefixtures("without_default_device")
@pytest.mark.parametrize("complete", [True, False])
def test_it_learns_a_distribution_and_its_conditionals(complete: bool) -> None:
    """Of grey levels. What is allowed for is what it has not learned; the error of Monte Carlo is below 0.004."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(3)
    count, many = 2000, 1000
    settings = MatchingSettings(epochs=12, scales=1, width=16, steps=10, batch_size=50, learning_rate=4e-3)
    flow = make_matching(settings, (1, 4, 4), 0)
    job = matching_job(flow, settings, levelled(count, complete=complete), (torch.arange(count), torch.arange(0)))
    train([job], one_device("cpu"), epochs=settings.epochs, progress=False)
    nothing = torch.zeros(many, 1, 4, 4, dtype=torch.bool)
    drawn = flow.sample(torch.zeros(many, 1, 4, 4), nothing, generator=torch.Generator().manual_seed(0))[0]
    assert drawn.mean().item() == pytest.approx(LEVEL, abs=0.02)
    assert drawn.std((1, 2, 3)).mean().item() == pytest.approx(NOISE, rel=0.2)
    wanted = math.sqrt(SPREAD**2 + NOISE**2 / 16)
    spread = drawn.mean((1, 2, 3)).std().item()
    # No incomplete image shows all of its pixels: there the network extrapolates, and levels scatter too much.
    assert spread == pytest.approx(wanted, rel=0.15 if complete else 0.4)
    # Twelve pixels around 0.65 tell the level up to NOISE / √12; the prior draws it a little to 0.5.
    observed = missing.square(1, 4, 4, generator=torch.Generator().manual_seed(2)).expand(many, -1, -1, -1)
    noise = NOISE * torch.randn(many, 1, 4, 4)
    noise -= noise.where(observed, 0).sum((1, 2, 3), keepdim=True) / 12
    given = 0.65 + noise
    precision = SPREAD**-2 + 12 * NOISE**-2
    mean, deviation = (LEVEL * SPREAD**-2 + 12 * 0.65 * NOISE**-2) / precision, math.sqrt(NOISE**2 + 1 / precision)
    rest = flow.sample(given, observed, generator=torch.Generator().manual_seed(0))[0][~observed]
    assert rest.mean().item() == pytest.approx(mean, abs=0.02)
    assert rest.std().item() == pytest.approx(deviation, rel=0.2)
    guess = flow.impute(given, observed)[~observed]
    assert guess.mean().item() == pytest.approx(mean, abs=0.02)
    assert guess.std() < deviation / 2, "a mean, and no sample"


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (28, 28)}, r"shape must be \(C, H, W\) of the images, got \(28, 28\)"),
        ({"shape": (1, 0, 28)}, r"shape\[1\] must be an integer of at least 1, got 0"),
        ({"scales": 0}, "scales must be an integer of at least 1, got 0"),
        ({"width": 1.5}, "width must be an integer of at least 1, got 1.5"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowMatching(**arguments)


@pytest.mark.usefixtures("values_are_checked")
def test_bad_images() -> None:
    flow, x, observed = random_flow(), torch.rand(3, *SHAPE), masked("pixels")
    with pytest.raises(ValueError, match=r"x must have shape \(B, 2, 5, 6\), got a .* tensor of shape \(3, 1, 5, 6\)"):
        flow.impute(x[:, :1], observed)
    with pytest.raises(ValueError, match=r"observed must have shape \(3, 1, 5, 6\) or \(3, 2, 5, 6\)"):
        flow.sample(x, observed[:2])
    with pytest.raises(TypeError, match="observed must be a bool tensor, True where the pixel was seen, got None"):
        flow.impute(x, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must hold values from 0 to 1, got 255"):
        flow.impute(255 * torch.ones_like(x), observed)
    with pytest.raises(ValueError, match="x must be finite wherever it is observed, got nan"):
        flow.sample(torch.full_like(x, math.nan), observed)
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got 0"):
        flow.sample(x, observed, 0)
