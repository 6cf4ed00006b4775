"""Density networks keep inside the data's range whatever they have learned, and `UNetDMFA` starts from a smooth fill."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import misconv
from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, UNetDMFA, data, missing
from misconv._math import push_pull
from tests.reference import random_mfa

SIDE = 12


def small(channels: int = 3, components: int = 1, rank: int = 2, **options: object) -> UNetDMFA:
    return UNetDMFA(channels, components, rank, widths=(8, 8, 8), depths=(1, 1, 1), **options)  # type: ignore[arg-type]


def networks(components: int, rank: int) -> dict[str, nn.Module]:
    return {
        "unet": small(3, components, rank),
        "conv": ConvDMFA(3, components, rank, widths=(8,), depths=(1,)).eval(),
        "linear": LinearDMFA((3, SIDE, SIDE), components, rank),
    }


def holes() -> dict[str, Tensor]:
    """All that a hole can be."""
    one = torch.zeros(2, 1, SIDE, SIDE, dtype=torch.bool)
    one[:, :, 3, 5] = True
    channels = torch.ones(2, 3, SIDE, SIDE, dtype=torch.bool)
    channels[:, 1] = False
    return {
        "all": torch.zeros(2, 1, SIDE, SIDE, dtype=torch.bool),
        "all but one pixel": one,
        "95 % noise": torch.rand(2, 1, SIDE, SIDE) < 0.05,
        "a large square": missing.square(2, SIDE, SIDE, fraction=0.8, device=torch.get_default_device()),
        "a channel": channels,
        "nothing": torch.ones(2, 1, SIDE, SIDE, dtype=torch.bool),
    }


def bounds_of(density: nn.Module) -> tuple[Tensor, Tensor]:
    assert isinstance(density.low, Tensor)
    assert isinstance(density.high, Tensor)
    return density.low, density.high


def check_bounded(p: MFA, low: Tensor, high: Tensor, text: str = "") -> None:
    """Every component, and the mixture, by the bound of Bhatia and Davis."""
    rounding = 1e-6 if p.dtype != torch.float64 else 1e-12
    within = p.noise + p.factors.square().sum(2)
    hidden = torch.ones(p.shape, dtype=torch.bool) if p.observed is None else ~p.observed.expand(p.shape)
    for mean, variance in [(p.mean, p.variance), *((p.means[:, k], within[:, k]) for k in range(p.means.shape[1]))]:
        assert mean.isfinite().all(), text
        assert variance.isfinite().all(), text
        span = (high - low) ** 2
        assert ((mean >= low - rounding) & (mean <= high + rounding))[hidden].all(), text
        assert (variance <= (mean - low) * (high - mean) + rounding * span)[hidden].all(), text
        assert (variance > 0)[hidden].all(), text


# Bounds ------------------------------------------------------------------------------------------------------------


def test_images_with_nan_need_no_observed() -> None:
    x, observed = torch.rand(3, 3, SIDE, SIDE), torch.rand(3, 1, SIDE, SIDE) < 0.6
    coded = x.masked_fill(~observed, torch.nan)
    mixture = SMFA(1, 1).fit(torch.rand(9, 3, SIDE, SIDE), torch.ones(9, 1, SIDE, SIDE, dtype=torch.bool), iterations=2)
    for name, density in [*networks(1, 2).items(), ("mixture", mixture)]:
        p, q = density(coded), density(x.where(observed, 0), observed)
        assert torch.equal(p.mean, q.mean), name
        assert torch.equal(p.variance, q.variance), name
        layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        network = misconv.convert(nn.Sequential(*layers), density)
        found = [
            misconv.predictive(network, images, 3, generator=torch.Generator(x.device).manual_seed(0))
            for images in (coded, q)
        ]
        assert torch.equal(found[0].probabilities, found[1].probabilities), name


def test_features_that_grow_leave_the_weights_of_components_alone() -> None:
    density = small(3, components=3)
    assert density.logits is not None
    features = torch.rand(5, 8)
    weights = density.logits(features).softmax(1)
    torch.testing.assert_close(density.logits(1000 * features).softmax(1), weights, rtol=1e-3, atol=1e-3)
    assert weights.std(0).max() > 1e-3  # they depend on the image


@pytest.mark.parametrize(("components", "rank"), [(1, 0), (1, 4), (3, 2)])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_no_weights_and_no_hole_lead_out_of_the_range(components: int, rank: int, size: float) -> None:
    x, seen = torch.rand(8, 3, SIDE, SIDE), torch.rand(8, 1, SIDE, SIDE) < 0.7
    for name, density in networks(components, rank).items():
        density.calibrate(x, seen)  # type: ignore[operator]
        with torch.no_grad():
            for parameter in density.parameters():
                parameter.copy_(size * torch.randn_like(parameter))
        for hole, observed in holes().items():
            p = density(x[:2].masked_fill(~observed, math.nan), observed)
            check_bounded(p, *bounds_of(density), text=f"{name}, {hole}")
            (p.mean + p.variance + p.factors.sum((1, 2)) + p.logits.sum()).sum().backward()
            for parameter in density.parameters():
                assert parameter.grad is None or parameter.grad.isfinite().all(), f"{name}, {hole}"


def test_the_range_is_that_of_what_was_seen_and_a_margin() -> None:
    x, observed = 10 + 5 * torch.rand(4, 2, 8, 8), torch.rand(4, 2, 8, 8) < 0.5
    x[:, 1] *= -3
    density = small(2)
    density.calibrate(x.masked_fill(~observed, math.nan), observed)
    low, high = bounds_of(density)
    for channel in range(2):
        seen = x[:, channel][observed[:, channel]]
        span = seen.max() - seen.min()
        assert float(low[channel]) == pytest.approx(float(seen.min() - 0.02 * span))
        assert float(high[channel]) == pytest.approx(float(seen.max() + 0.02 * span))


def test_bounds_that_are_given_stay() -> None:
    density = small(bounds=(0, 1))
    density.calibrate(5 * torch.rand(2, 3, 8, 8), torch.ones(2, 3, 8, 8, dtype=torch.bool))
    assert all((b == v).all() for b, v in zip(bounds_of(density), (0.0, 1.0), strict=True))
    assert density.config()["bounds"] == [0.0, 1.0]


def test_without_bounds_a_mean_may_go_anywhere() -> None:
    density = small(bounds=None)
    assert density.low is None
    with torch.no_grad():
        for parameter in density.parameters():
            parameter.copy_(10 * torch.randn_like(parameter))
    p = density(torch.rand(2, 3, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.bool))
    assert p.mean.abs().max() > 100


@pytest.mark.parametrize("bounds", ["range", (1, 0), (0, 0), (0, math.inf), (0, 1, 2), 3, (True, 2)])
def test_bad_bounds(bounds: object) -> None:
    for make in (lambda: small(bounds=bounds), lambda: SMFA(bounds=bounds)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r'bounds must be "data", None or two numbers \(lowest, highest\), got'):
            make()


def test_the_gradient_through_the_bounds() -> None:
    density = small(1, 2, 1).double()
    x, observed = torch.rand(1, 1, 4, 4, dtype=torch.float64), torch.rand(1, 1, 4, 4) < 0.5
    bias = torch.randn_like(density.head.bias.double(), requires_grad=True)  # type: ignore[union-attr]

    def moments(bias: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.func.functional_call(density, {"head.bias": bias}, (x, observed))
        return p.mean, p.variance

    assert torch.autograd.gradcheck(moments, (bias,))


# The U-Net ---------------------------------------------------------------------------------------------------------


def test_before_training_the_mean_is_the_smooth_fill() -> None:
    x, observed = torch.rand(4, 3, SIDE, SIDE), missing.square(4, SIDE, SIDE, device=torch.get_default_device())
    density = small(3, components=2)
    density.calibrate(x, observed)
    filled = push_pull(x, observed.expand(x.shape), relaxed=True)
    span = float((density.high - density.low).max())  # type: ignore[operator]
    assert (density(x, observed).mean - filled).abs().max() < 2e-3 * span  # means bend at the bounds


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (7, 5), (8, 8), (33, 64), (65, 31)])
@pytest.mark.parametrize("patch", [1, 2, 4])
def test_images_of_any_size(size: tuple[int, int], patch: int) -> None:
    density = small(patch=patch)
    p = density(torch.rand(2, 3, *size), torch.rand(2, 1, *size) < 0.5)
    assert p.shape == (2, 3, *size)
    assert p.mean.isfinite().all()


def test_a_single_size() -> None:
    density = UNetDMFA(1, widths=(4,), depths=(1,))
    assert density(torch.rand(2, 1, 6, 6), torch.rand(2, 1, 6, 6) < 0.5).shape == (2, 1, 6, 6)


@pytest.mark.parametrize(("patch", "width"), [(1, 199), (2, 398), (4, 796)])
def test_the_receptive_field(patch: int, width: int) -> None:
    """Of the network, without the fill, in pixels: more than the largest hole in images of twice its width."""
    density = UNetDMFA(1, rank=0, patch=patch)
    with torch.no_grad():
        for parameter in density.parameters():
            parameter.abs_().add_(1e-3)  # so that no path is cut by a ReLU
    x = torch.zeros(1, 2 * patch**2, 256, 256, requires_grad=True)
    features, _ = density._through(x)
    features[0, :, 128, 128].sum().backward()
    assert x.grad is not None
    seen = x.grad.abs().sum((0, 1)).nonzero()
    assert ((seen.max(0).values - seen.min(0).values + 1) * patch).tolist() == [width, width]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e20])
@pytest.mark.parametrize("per_channel", [False, True])
def test_hidden_values_change_no_bit(poison: float, per_channel: bool) -> None:
    density = small(3, 2)
    observed = torch.rand(3, 3 if per_channel else 1, 12, 12) < 0.5
    x = torch.rand(3, 3, 12, 12)
    values = []
    for given in (x, x.masked_fill(~observed, poison)):
        density.zero_grad()
        p = density(given, observed)
        (p.mean.sum() + p.variance.sum()).backward()
        values.append([*p._parameters(), *(q.grad for q in density.parameters() if q.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def test_complete_images_are_left_out_and_change_nothing() -> None:
    density, sizes = small(3, 2).requires_grad_(False), []
    density.enter.register_forward_hook(lambda *given: sizes.append(len(given[2])))
    x, observed = torch.rand(4, 3, 12, 12), torch.rand(4, 1, 12, 12) < 0.5
    alone = density(x[1::2], observed[1::2])
    observed[::2] = True
    p = density(x, observed)
    torch.testing.assert_close(p[[1, 3]].mean, alone.mean)
    torch.testing.assert_close(p[[1, 3]].variance, alone.variance)
    assert torch.equal(p[[0, 2]].mean, x[::2])
    assert (p[[0, 2]].variance == 0).all()
    everything = density(x, torch.ones_like(observed))
    assert torch.equal(everything.mean, x)
    if x.device.type == "cpu":
        assert sizes == [2, 2]
    # What learns has a gradient, if only zero.
    density.requires_grad_()(x, torch.ones_like(observed)).mean.sum().backward()
    assert density.enter.weight.grad is not None


def test_memory_format_and_types() -> None:
    x, observed = torch.rand(2, 3, 12, 12), torch.rand(2, 1, 12, 12) < 0.5
    density = small().float()
    expected = density(x.float(), observed)
    for given in (x.float().to(memory_format=torch.channels_last), x.double()):
        p = density.to(memory_format=torch.channels_last)(given, observed)
        assert p.dtype == given.dtype
        torch.testing.assert_close(p.mean.float(), expected.mean, rtol=1e-4, atol=1e-4)
    with torch.autocast(x.device.type, torch.bfloat16):
        p = density(x.float(), observed)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.mean, expected.mean, rtol=0.05, atol=0.05)
    torch.testing.assert_close(p.variance, expected.variance, rtol=0.1, atol=0.01)
    half = density.to(torch.bfloat16)(x.to(torch.bfloat16), observed)
    assert half.dtype == torch.bfloat16
    assert half.mean.isfinite().all()


def test_data_in_other_units() -> None:
    """A density of images in metres says the same as one of images in millimetres."""
    x, observed = torch.rand(4, 2, 12, 12), torch.rand(4, 1, 12, 12) < 0.5
    density = small(2, 2)
    density.calibrate(x, observed)
    first = density(x, observed)
    scale = torch.tensor([1e3, 1e-4]).view(2, 1, 1)
    density.calibrate(scale * x + 7 * scale, observed)
    second = density(scale * x + 7 * scale, observed)
    torch.testing.assert_close(second.mean, scale * first.mean + 7 * scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(second.variance, scale**2 * first.variance, rtol=1e-6, atol=0)


def test_compiled() -> None:
    density, observed = small(), torch.rand(2, 1, 12, 12) < 0.5
    x = torch.rand(2, 3, 12, 12)
    torch.compiler.reset()
    compiled = torch.compile(density, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, observed).mean, density(x, observed).mean)


@pytest.mark.parametrize("components", [1, 2])
def test_saved_and_loaded(components: int, tmp_path: Path) -> None:
    density = small(3, components, patch=1, bounds=(0, 2)).eval()
    density.calibrate(torch.rand(2, 3, 8, 8), torch.rand(2, 1, 8, 8) < 0.5)
    misconv.save(density, tmp_path / "density.safetensors")
    loaded = misconv.load(tmp_path / "density.safetensors").to(torch.get_default_device())
    x, observed = torch.rand(2, 3, 8, 8), torch.rand(2, 1, 8, 8) < 0.5
    assert isinstance(loaded, UNetDMFA)
    assert torch.equal(loaded(x, observed).mean, density(x, observed).mean)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNetDMFA(3, widths=(8, 8), depths=(1,)), "depths must be one for each of the 2 widths, got"),
        (lambda: UNetDMFA(3, widths=()), "widths must be a tuple of integers of at least 1, got"),
        (lambda: UNetDMFA(3, patch=0), "patch must be an integer of at least 1, got 0"),
        (lambda: UNetDMFA(0), "channels must be an integer of at least 1, got 0"),
        (lambda: SMFA(prior=-1), "prior must be a number of at least 0, got -1"),
    ],
)
def test_bad_arguments(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# The marginal score ------------------------------------------------------------------------------------------------


def test_the_marginal_likelihood_is_that_of_every_pixel_by_itself() -> None:
    observed = torch.rand(3, 2, 4, 5) < 0.3
    p, x = random_mfa(3, 2, 2, (2, 4, 5), observed), torch.randn(3, 2, 4, 5)
    where = torch.rand(3, 2, 4, 5) < 0.6
    deviations = (p.noise + p.factors.square().sum(2)).sqrt().movedim(1, -1)
    weights = Categorical(logits=p.logits[:, None, None, None].expand(deviations.shape))
    each = MixtureSameFamily(weights, Normal(p.means.movedim(1, -1), deviations)).log_prob(x)
    expected = each.where(where & ~observed, 0).sum((1, 2, 3))
    torch.testing.assert_close(p.marginal_log_prob(x, where), expected)
    # Of one pixel it is the joint one.
    one = torch.zeros_like(where)
    one[:, 0, 1, 2] = True
    torch.testing.assert_close(p.marginal_log_prob(x, one), p.log_prob(x, one))


def test_gradients_of_the_marginal_likelihood() -> None:
    p, x = random_mfa(2, 2, 1, (1, 2, 2)), torch.randn(2, 1, 2, 2)
    where = torch.tensor([[True, False], [True, True]]).expand(2, 1, 2, 2)
    leaves = [t.detach().double().requires_grad_() for t in (p.logits, p.means, p.factors, p.noise)]
    assert torch.autograd.gradcheck(lambda *t: MFA(*t, check=False).marginal_log_prob(x.double(), where), leaves)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e20])
def test_the_marginal_likelihood_reads_nothing_else(poison: float) -> None:
    observed, where = torch.rand(2, 1, 4, 4) < 0.3, torch.rand(2, 1, 4, 4) < 0.5
    p, x = random_mfa(2, 2, 2, (3, 4, 4), observed), torch.randn(2, 3, 4, 4)
    scored = (where & ~observed).unsqueeze(1)
    bad = [
        p.means.masked_fill(~scored, poison),
        p.factors.masked_fill(~scored.unsqueeze(2), poison),
        p.noise.masked_fill(~scored, poison),
    ]
    values = []
    for parts, given in (((p.means, p.factors, p.noise), x), (bad, x.masked_fill(~where, poison))):
        leaves = [t.clone().requires_grad_() for t in parts]
        result = MFA(p.logits, *leaves, observed, check=False).marginal_log_prob(given, where)
        result.sum().backward()
        values.append([result, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


# EM ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [12, 20, 60])
def test_a_mixture_of_few_images_stays_modest(images: int) -> None:
    """Without a prior it errs by more than the data vary, and claims a third of that or less."""
    x, _ = data.digits()
    x, test = x[:images], x[-300:]
    observed = missing.square(images, 8, 8, generator=torch.Generator().manual_seed(0), device=x.device)
    observed[0] = True
    shown = missing.square(300, 8, 8, generator=torch.Generator().manual_seed(1), device=x.device)
    density = SMFA(10, 6).fit(x, observed)
    p = density(test, shown)
    check_bounded(p, density.low, density.high)
    hidden = (~shown).expand(test.shape)
    error, claimed = (p.mean - test)[hidden].square().mean().sqrt(), p.variance[hidden].mean().sqrt()
    assert error < test.std()
    assert 0.5 * error < claimed < 2 * error


def test_the_prior_is_felt_less_with_every_image() -> None:
    """With many images it is the mixture of largest likelihood."""
    x = torch.randn(4000, 1, 2, 2) @ torch.randn(2, 2) + 3
    observed = torch.rand(4000, 1, 2, 2) < 0.7
    observed[:, :, 0, 0] = True
    without, with_prior = (SMFA(1, 1, prior=prior, bounds=None).fit(x, observed) for prior in (0, 1))
    covariances = [
        d.noise[0].flatten().diag() + d.factors[0].flatten(1).T @ d.factors[0].flatten(1) for d in (without, with_prior)
    ]
    torch.testing.assert_close(covariances[0], covariances[1], rtol=0.02, atol=0.02 * float(covariances[0].max()))
    torch.testing.assert_close(without.means, with_prior.means, rtol=0, atol=0.02)


@pytest.mark.parametrize("prior", [0.0, 0.5, 20.0])
def test_the_likelihood_with_its_prior_never_falls(prior: float) -> None:
    x, observed = torch.randn(40, 2, 3, 3), torch.rand(40, 2, 3, 3) < 0.7
    observed[0] = True
    density = SMFA(3, 2, prior=prior).fit(x, observed, iterations=25, tolerance=-1)
    gains = torch.tensor(density.history).diff()
    assert (gains >= -1e-9 * abs(density.history[-1])).all()


# Regions like the missing ones -------------------------------------------------------------------------------------


def drawn(observed: Tensor, count: int = 400) -> Tensor:
    side = observed.shape[-1]
    return ~missing.like(observed)(count, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [missing.square, missing.stripes, missing.trapezoid, missing.channels])
def test_regions_are_those_of_the_data(shape: Callable[..., Tensor]) -> None:
    observed = shape(60, 16, 16, generator=torch.Generator().manual_seed(0))
    known = {tuple(region.flatten().tolist()) for region in ~observed}
    regions = drawn(observed)
    assert regions.shape[1:] == observed.shape[1:]
    assert all(tuple(region.flatten().tolist()) in known for region in regions)
    assert len({tuple(region.flatten().tolist()) for region in regions}) > 2


def test_scattered_pixels_are_hidden_sparingly() -> None:
    observed = missing.noise(200, 16, 16, fraction=0.75, generator=torch.Generator().manual_seed(0))
    regions = drawn(observed)
    assert float(regions.double().mean()) == pytest.approx(0.3, abs=0.02)


def test_a_region_that_is_missing_in_all_images_is_moved() -> None:
    observed = torch.ones(50, 1, 16, 16, dtype=torch.bool)
    observed[:, :, 4:8, 4:8] = False
    regions = drawn(observed)
    assert (regions.sum((1, 2, 3)) == 16).all()
    assert regions.any(0).all()  # anywhere


def test_complete_images_hide_squares() -> None:
    assert missing.like(torch.ones(3, 1, 8, 8, dtype=torch.bool)) is missing.square
    observed = torch.ones(30, 1, 8, 8, dtype=torch.bool)
    observed[0, :, :4] = False
    assert (drawn(observed).sum((1, 2, 3)) > 0).all()  # those that are missing, not that most images are complete


def test_regions_have_the_size_of_the_data() -> None:
    generator = missing.like(missing.square(5, 8, 8))
    with pytest.raises(ValueError, match=r"regions must be drawn for images of \(8, 8\), as they were taken from, got"):
        generator(2, 16, 16)
    with pytest.raises(TypeError, match="observed must be a bool tensor"):
        missing.like(torch.rand(2, 1, 8, 8))


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_a_part_of_an_image_is_answered_as_in_the_whole(patch: int) -> None:
    density = misconv.UNetDMFA(2, 2, 2, (8, 8, 8), (1, 1, 1), patch=patch).eval()
    nn.init.normal_(density.head.weight, std=0.2)
    x, observed = torch.rand(2, 2, 45, 39), torch.rand(2, 1, 45, 39) < 0.5
    rows, columns = slice(8, 45), slice(4, 31)
    whole, part = density(x, observed), density.forward_inside(x, observed, rows, columns)
    for ours, theirs in ((part.means, whole.means), (part.factors, whole.factors), (part.noise, whole.noise)):
        torch.testing.assert_close(ours, theirs[..., rows, columns])
    torch.testing.assert_close(part.logits, whole.logits)
    if patch > 1:
        with pytest.raises(ValueError, match=f"rows and columns must begin at multiples of {patch}"):
            density.forward_inside(x, observed, slice(1, 9), columns)


def test_deviations_are_scaled_for_each_channel() -> None:
    density = misconv.UNetDMFA(2, 3, 2, (8, 8), (1, 1), bounds=None).eval()
    x, observed = torch.rand(3, 2, 16, 12), torch.rand(3, 1, 16, 12) < 0.5
    before = density(x, observed)
    density.scale_deviations(torch.tensor([2.0, 0.1]))
    after, floor = density(x, observed), density.noise_floor
    ratio = torch.tensor([2.0, 0.1]).view(2, 1, 1)
    torch.testing.assert_close(after.means, before.means)
    torch.testing.assert_close(after.factors, ratio * before.factors)
    torch.testing.assert_close(after.noise - floor, ratio**2 * (before.noise - floor))


def test_a_density_starts_with_the_deviation_of_its_fill() -> None:
    """Before it has learned anything else; a trained one is left as it is."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    levels, details = torch.randn(64, 2, 1, 1, generator=generator), torch.randn(64, 2, 32, 32, generator=generator)
    x = (levels + 0.05 * details) * torch.tensor([1.0, 100.0]).view(2, 1, 1)
    observed = misconv.missing.square(64, 32, 32, generator=generator)
    density = misconv.UNetDMFA(2, rank=2, widths=(8, 8), depths=(1, 1))
    misconv.fit_density(density, x, observed, steps=1, learning_rate=1e-9, progress=False)
    less = observed & misconv.missing.square(64, 32, 32, generator=generator)
    # Graphs of gradients that live on are in the way of a training on another stream of a GPU: here and below, none.
    with torch.no_grad():
        p, hidden = density.eval()(x, less), (observed & ~less).expand(x.shape)
    errors, claims = (t.where(hidden, 0).sum((0, 2, 3)) for t in ((p.mean - x).square(), p.variance))
    assert ((claims / errors > 0.8) & (claims / errors < 1.25)).all()
    state = {name: value.clone() for name, value in density.state_dict().items()}
    nn.init.constant_(density.head.weight, 0.01)
    changed = density.head.bias.detach().clone()
    misconv.fit_density(density, x, observed, steps=1, learning_rate=1e-9, progress=False)
    torch.testing.assert_close(density.head.bias, changed, rtol=0, atol=1e-6)
    assert torch.equal(state["scale"], density.scale)
