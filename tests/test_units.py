"""Data may have any units: what is computed in metres, in nanometres or in both is the same but for the units.

Powers of two change no digit of a number, so that with them results are asked for bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, impute, plain
from misconv._math import likelihood as _likelihood
from tests.reference import covariance, dense_condition, dense_log_prob, random_mfa
from tests.strategies import mfas, observations

# Units as exponents of two: from 1e-18 to 1e15, and in float64 from 1e-100 to 1e100.
UNITS = {torch.float32: (-60, -23, 50), torch.float64: (-332, -60, 332)}
CASES = [(dtype, unit) for dtype, units in UNITS.items() for unit in units]


def in_units(p: MFA, unit: Tensor | float) -> MFA:
    """The same density of the same images in other units, (C, 1, 1) or one number."""
    return MFA(p.logits, p.means * unit, p.factors * unit, p.noise * unit * unit, p.observed)


def problem(dtype: torch.dtype, rank: int = 3, exact: bool = True) -> tuple[MFA, Tensor, Tensor]:
    observed = torch.rand(2, 1, 4, 5) < 0.3 if exact else None
    p = random_mfa(2, 3, rank, (2, 4, 5), observed).to(dtype)
    return p, torch.randn(p.shape, dtype=dtype), torch.rand(2, 2, 4, 5) < 0.5


def scored(p: MFA, where: Tensor) -> Tensor:
    seen = where if p.observed is None else where & ~p.observed
    return seen.expand(p.shape)


# Mixtures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "exponent"), CASES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_an_mfa_scales_with_its_units(dtype: torch.dtype, exponent: int, rank: int) -> None:
    p, x, where = problem(dtype, rank)
    unit = 2.0**exponent
    q = in_units(p, unit)
    shift = scored(p, where).sum((1, 2, 3)).double() * (exponent * math.log(2))
    # In float64, for log n of a large image has few digits left in float32.
    wide = (x.double() * unit, where)
    torch.testing.assert_close(
        q.to(torch.float64).log_prob(*wide), p.to(torch.float64).log_prob(x.double(), where) - shift, rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        q.log_prob(x * unit, where).double(), q.to(torch.float64).log_prob(*wide), rtol=1e-6, atol=0
    )
    given_x, scaled = p.condition(x, where), q.condition(x * unit, where)
    assert torch.equal(scaled.means, given_x.means * unit)
    assert torch.equal(scaled.factors, given_x.factors * unit)
    torch.testing.assert_close(scaled.weights, given_x.weights)
    assert torch.equal(q.mean, p.mean * unit)
    assert torch.equal(q.variance, p.variance * unit * unit)
    seeds = [torch.Generator(x.device).manual_seed(1) for _ in range(2)]
    assert torch.equal(q.sample(3, generator=seeds[0]), p.sample(3, generator=seeds[1]) * unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_channel_may_have_units_of_its_own(dtype: torch.dtype) -> None:
    """Metres beside reflectances: the second channel is 1e-13 of the first."""
    p, x, where = problem(dtype)
    unit = torch.tensor([2.0**10, 2.0**-33], dtype=dtype).view(2, 1, 1)
    q = in_units(p, unit)
    shift = (scored(p, where).sum((2, 3)) * unit.flatten().double().log()).sum(1)
    torch.testing.assert_close(
        q.to(torch.float64).log_prob((x * unit).double(), where),
        p.to(torch.float64).log_prob(x.double(), where) - shift,
        rtol=1e-12,
        atol=0,
    )
    assert torch.equal(q.condition(x * unit, where).means, p.condition(x, where).means * unit)


@given(st.data())
@settings(max_examples=60)
def test_small_units_against_dense_gaussians(data: st.DataObject) -> None:
    """Units in which every noise is below 1e-14, where it once counted as that."""
    p = data.draw(mfas()).to(torch.float64)
    p = in_units(MFA(p.logits, p.means, p.factors, p.noise), 1e-9)
    observed = data.draw(observations(*p.shape).filter(lambda o: o is not None))
    x = p.means[:, 0] + 1e-9 * torch.randn(p.shape, dtype=torch.float64)
    torch.testing.assert_close(p.log_prob(x, observed), dense_log_prob(p, x, observed), rtol=1e-9, atol=1e-9)
    weights, means, covariances = dense_condition(p, x, observed)
    q = p.condition(x, observed)
    q_means, q_covariances = covariance(q)
    torch.testing.assert_close(q.weights, weights, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q_means, means, rtol=1e-8, atol=1e-17)
    torch.testing.assert_close(q_covariances, covariances, rtol=1e-8, atol=1e-26)


@pytest.mark.parametrize("exponent", [-60, 0, 50])
@pytest.mark.parametrize("type_", [torch.float32, torch.float64])
def test_no_noise_at_all_in_any_units(type_: torch.dtype, exponent: int) -> None:
    """Two factors, three noiseless pixels: the fourth follows, and its variance is nearly zero."""
    factors = torch.randn(1, 1, 2, 1, 1, 4, dtype=type_)
    zeros = torch.zeros(1, 1, 1, 1, 4, dtype=type_)
    p = MFA(torch.zeros(1, 1, dtype=type_), zeros, factors, zeros)
    p, unit = in_units(p, 2.0**exponent), 2.0**exponent
    x = torch.einsum("l,lp->p", torch.randn(2, dtype=type_), p.factors.view(2, 4)).view(1, 1, 1, 4)
    q = p.condition(x, torch.tensor([True, True, True, False]).view(1, 1, 1, 4))
    torch.testing.assert_close(q.mean / unit, x / unit, rtol=1e-4, atol=1e-4)
    assert q.variance.max() / unit**2 < 1e-6


@pytest.mark.parametrize("certain", [1, 2])
@pytest.mark.parametrize("unit", [1e-9, 1.0])
def test_some_pixels_without_noise_beside_noisy_ones(certain: int, unit: float) -> None:
    """Against the limit: the certain pixels are constraints, and within them the noisy ones are a ridge regression."""
    factors, noise = torch.randn(3, 20, dtype=torch.float64), 0.1 + torch.rand(20, dtype=torch.float64)
    noise[:certain] = 0
    x = torch.randn(20, dtype=torch.float64)
    # All y with aᵀy = x at the certain pixels are y₀ + N z; the rest is ordinary in z.
    exact = factors[:, :certain]
    start = torch.linalg.pinv(exact.T) @ x[:certain]
    null = torch.linalg.svd(exact.T, full_matrices=True).Vh[certain:].T
    rest = factors[:, certain:].T / noise[certain:, None].sqrt()
    left = torch.cat([rest @ null, null])
    right = torch.cat([x[certain:] / noise[certain:].sqrt() - rest @ start, -start])
    y = start + null @ torch.linalg.lstsq(left, right.unsqueeze(1)).solution.squeeze(1)
    pixels, seen = torch.zeros(1, 1, 1, 1, 21, dtype=torch.float64), torch.ones(1, 1, 1, 21, dtype=torch.bool)
    seen[..., -1] = False
    last = torch.randn(3, 1, dtype=torch.float64)
    p = MFA(
        torch.zeros(1, 1, dtype=torch.float64),
        pixels,
        unit * torch.cat([factors, last], 1).view(1, 1, 3, 1, 1, 21),
        unit**2 * torch.cat([noise, noise[-1:]]).view(1, 1, 1, 1, 21),
    )
    # docs/maths.md: seven digits, of which fused kernels, without a look at what is left, have three to four.
    for context, bound in ((plain, 1e-6), (contextlib.nullcontext, 1e-6 if p.device.type == "cpu" else 1e-3)):
        with context():
            q = p.condition(unit * torch.cat([x, x[:1]]).view(1, 1, 1, 21), seen)
        torch.testing.assert_close(q.mean.flatten()[-1] / unit, y @ last.flatten(), rtol=bound, atol=bound)


@pytest.mark.parametrize("type_", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-60, 0, 40])
def test_a_certain_pixel_decides_between_components(type_: torch.dtype, exponent: int) -> None:
    """Neither noise nor factors: an observation far from one mean and at the other leaves no doubt, and no NaN."""
    unit = 2.0**exponent
    means = torch.tensor([0.3, 0.7], dtype=type_).view(1, 2, 1, 1, 1).expand(1, 2, 1, 1, 2) * unit
    p = MFA(torch.zeros(1, 2, dtype=type_), means, torch.zeros(1, 2, 0, 1, 1, 2, dtype=type_), torch.zeros_like(means))
    x = torch.full((1, 1, 1, 2), 0.7, dtype=type_) * unit
    q = p.condition(x.requires_grad_(), torch.tensor([True, False]).view(1, 1, 1, 2))
    assert q.weights.tolist() == [[0.0, 1.0]]
    assert p.log_prob(x).isfinite().all()
    zero = MFA(p.logits, means * 0, p.factors, p.noise)
    assert zero.log_prob(torch.zeros_like(x)).isfinite().all()


def test_outliers_give_no_nan() -> None:
    p = random_mfa(2, 3, 2, (1, 4, 4)).to(torch.float32)
    where = torch.rand(2, 1, 4, 4) < 0.7
    for outlier in (1e20, -1e20, 3e38):
        x = torch.randn(p.shape, dtype=torch.float32)
        x[0, 0, 0, 0], where[0, 0, 0, 0] = outlier, True
        x.requires_grad_()
        q = p.condition(x, where)
        for value in (p.log_prob(x, where), q.weights, q.mean, q.factors, p.fix(x, where).variance):
            assert not value.isnan().any()
        assert p.log_prob(x, where)[1].isfinite()
        (slope,) = torch.autograd.grad(q.mean.sum(), x)
        assert not slope.isnan().any()


def test_the_variance_of_a_far_component_cannot_overflow() -> None:
    means = torch.tensor([0.0, 1e25], dtype=torch.float32).view(1, 2, 1, 1, 1)
    p = MFA(
        torch.tensor([[0.0, -50.0]], dtype=torch.float32),
        means,
        torch.zeros(1, 2, 0, 1, 1, 1, dtype=torch.float32),
        torch.ones_like(means),
    )
    torch.testing.assert_close(p.variance.double().item(), math.exp(-50) * 1e50, rtol=1e-5, atol=0)


# Kernels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Any:
    import os

    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET", "0") != "1" and request.config.getoption("--device") == "cpu":
        pytest.skip("without a GPU, Triton runs in its interpreter alone: TRITON_INTERPRET=1")
    return pytest.importorskip("misconv._triton.score")


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(("dtype", "exponent"), CASES)
def test_the_kernels_do_the_same_in_any_units(dtype: torch.dtype, exponent: int, rank: int, kernels: Any) -> None:
    p, x, where = problem(dtype, rank)
    q, unit = in_units(p, 2.0**exponent), 2.0**exponent
    tensors = (*q._parameters(), x * unit, where, q.observed)
    certain = q.noise.index_fill(3, torch.tensor([0]), 0)  # a row that is held at the floor
    for noise, rate in ((q.noise, 1e-6), (certain, 1e-4)):  # with it C spans fourteen orders of magnitude
        inputs = (*tensors[:3], noise, *tensors[4:])
        value = kernels.log_prob(*inputs, floor=_likelihood.NOISE_FLOOR, plain=_likelihood.log_prob)
        torch.testing.assert_close(value, _likelihood.log_prob(*inputs), rtol=rate, atol=0)
    _, means, factors = kernels.condition(*tensors, floor=_likelihood.NOISE_FLOOR)
    _, unscaled, _ = kernels.condition(*p._parameters(), x, where, p.observed, floor=_likelihood.NOISE_FLOOR)
    assert torch.equal(means, unscaled * unit)
    plain = q.condition(x * unit, where)
    torch.testing.assert_close(means / unit, plain.means / unit)
    torch.testing.assert_close(factors / unit, plain.factors / unit)


# EM ----------------------------------------------------------------------------------------------------------------


def images(dtype: torch.dtype, count: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, dtype=dtype) @ torch.randn(3, 32, dtype=dtype) + 0.3 * torch.randn(count, 32, dtype=dtype)
    return x.view(count, 2, 4, 4) + 1, torch.rand(count, 1, 4, 4) < 0.8


def assert_scaled(fitted: SMFA, scaled: SMFA, unit: Tensor | float) -> None:
    assert torch.equal(scaled.logits, fitted.logits)
    assert torch.equal(scaled.means, fitted.means * unit)
    assert torch.equal(scaled.factors, fitted.factors * unit)
    torch.testing.assert_close(scaled.noise, fitted.noise * unit * unit, rtol=1e-2, atol=0)  # denormal numbers at 1e-18


@pytest.mark.parametrize(("dtype", "exponent"), CASES)
def test_em_scales_with_the_units(dtype: torch.dtype, exponent: int) -> None:
    x, observed = images(dtype)
    unit = 2.0**exponent
    fitted, scaled = (SMFA(2, 2).fit(y, observed, iterations=15) for y in (x, x * unit))
    assert_scaled(fitted, scaled, unit)
    assert len(scaled.history) == len(fitted.history)
    pixels = float(observed.expand(x.shape).sum()) / len(x)
    expected = [value - pixels * exponent * math.log(2) for value in fitted.history]
    assert scaled.history == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_em_takes_channels_in_different_units(dtype: torch.dtype) -> None:
    x, observed = images(dtype)
    unit = torch.tensor([2.0**10, 2.0**-13], dtype=dtype).view(2, 1, 1)
    fitted, scaled = (SMFA(2, 2).fit(y, observed, iterations=15) for y in (x, x * unit))
    assert_scaled(fitted, scaled, unit)
    holes = ~observed[:5].expand(5, 2, 4, 4)
    first, second = fitted(x[:5], observed[:5]), scaled(x[:5] * unit, observed[:5])
    torch.testing.assert_close((second.mean / unit)[holes], first.mean[holes], rtol=1e-5, atol=1e-5)


def test_em_sees_small_deviations_of_large_numbers() -> None:
    """A mean square less a squared mean has none of their digits."""
    x, observed = images(torch.float64)
    fitted, far = (SMFA(2, 2).fit(y, observed, iterations=15) for y in (x, 1e9 + x))
    torch.testing.assert_close(far.noise, fitted.noise, rtol=1e-4, atol=1e-6)
    assert far.history[-1] == pytest.approx(fitted.history[-1], rel=1e-4)


def test_units_whose_squares_have_no_place_are_refused() -> None:
    x, observed = images(torch.float32)
    for unit in (1e-30, 1e25):
        with pytest.raises(
            ValueError, match="x must have deviations whose squares float32 can hold, got deviations from"
        ):
            SMFA(2, 2).fit(x * unit, observed)
        with pytest.raises(
            ValueError, match="x must have deviations whose squares float32 can hold, got deviations from"
        ):
            ConvDMFA(2).float().calibrate(x * unit, observed)
    assert SMFA(2, 2).fit(x.double() * 1e-30, observed, iterations=3).noise.min() > 0


ODD: dict[str, Callable[[], tuple[Tensor, Tensor, int, int]]] = {
    "constant images": lambda: (torch.full((20, 1, 4, 4), 0.7), seen(20), 2, 2),
    "black images": lambda: (torch.zeros(20, 1, 4, 4), seen(20), 2, 2),
    "one image": lambda: (torch.rand(1, 1, 4, 4), seen(1), 1, 2),
    "the same image": lambda: (torch.rand(1, 1, 4, 4).expand(20, 1, 4, 4), seen(20), 3, 2),
    "one pixel of each": lambda: (torch.rand(64, 1, 4, 4), torch.eye(16).repeat(4, 1).view(64, 1, 4, 4) > 0, 2, 2),
    "a component for each": lambda: (torch.rand(5, 1, 4, 4), seen(5), 5, 3),
    "more factors than pixels": lambda: (torch.rand(30, 1, 2, 2), torch.ones(30, 1, 2, 2, dtype=torch.bool), 2, 9),
    "a dead channel": lambda: (torch.cat([torch.rand(30, 1, 4, 4), torch.zeros(30, 1, 4, 4)], 1), seen(30), 2, 2),
    "an outlier": lambda: (torch.rand(30, 1, 4, 4).index_fill(0, torch.tensor([3]), 1e18), seen(30), 3, 2),
}


def seen(count: int) -> Tensor:
    return torch.ones(count, 1, 4, 4, dtype=torch.bool)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("floor", [1e-3, 1e-14])
@pytest.mark.parametrize("minibatch", [None, 3])
def test_odd_data_give_a_density_all_the_same(name: str, floor: float, minibatch: int | None) -> None:
    x, observed, components, rank = ODD[name]()
    density = SMFA(components, rank).fit(
        x, observed, iterations=8, tolerance=-1, noise_floor=floor, minibatch=minibatch
    )
    assert all(math.isfinite(value) for value in density.history)
    for value in (density.logits, density.means, density.factors, density.noise):
        assert value.isfinite().all()
    assert (density.noise > 0).all()
    p = density(x[:2], observed[:2] & (torch.rand(len(x[:2]), 1, 1, 1) < 0.5))
    assert p.mean.isfinite().all()
    assert p.log_prob(x[:2]).isfinite().all()


def test_a_dead_channel_takes_the_units_of_the_others() -> None:
    x = torch.cat([torch.rand(30, 1, 4, 4), torch.zeros(30, 1, 4, 4)], 1)
    fitted, scaled = (SMFA(2, 2).fit(y, seen(30), iterations=5) for y in (x, x * 2.0**-20))
    assert_scaled(fitted, scaled, 2.0**-20)


# Networks and imputers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [2.0**-60, 2.0**-23, 2.0**50, (2.0**10, 2.0**-13)])
def test_networks_scale_with_the_units(unit: float | tuple[float, ...]) -> None:
    x, observed = torch.rand(20, 2, 7, 10, dtype=torch.float32), torch.rand(20, 1, 7, 10) < 0.6
    units = torch.tensor(unit, dtype=torch.float32).view(-1, 1, 1).expand(2, 1, 1)
    for density in (LinearDMFA((2, 7, 10), 2, 2), ConvDMFA(2, 2, 2, widths=(8, 12), depths=(1, 1, 1))):
        density = density.float().eval()
        twin = copy.deepcopy(density)
        density.calibrate(x, observed)
        twin.calibrate(x * units, observed)
        p, q = density(x, observed), twin(x * units, observed)
        torch.testing.assert_close(q.means / units, p.means)
        torch.testing.assert_close(q.factors / units, p.factors)
        torch.testing.assert_close(q.noise / units / units, p.noise)


@pytest.mark.parametrize("mode", [True, False])
def test_networks_survive_an_outlier(mode: bool) -> None:
    x, observed = torch.rand(4, 2, 7, 10, dtype=torch.float32), torch.ones(4, 1, 7, 10, dtype=torch.bool)
    for density in (LinearDMFA((2, 7, 10), 2, 2), ConvDMFA(2, 2, 2, widths=(8, 12), depths=(1, 1, 1))):
        density = density.float().train(mode)
        density.calibrate(x, observed)
        far = x.clone()
        far[0, 0, 0, 0] = 1e20
        p = density(far, observed)
        for value in (p.logits, p.means, p.factors, p.noise):
            assert value.isfinite().all()
        density.calibrate(far, observed)
        assert density(far, observed).variance.isfinite().all()


@pytest.mark.parametrize("exponent", [-60, 50])
def test_imputers_scale_with_the_units(exponent: int) -> None:
    x, observed = torch.randn(30, 2, 4, 4, dtype=torch.float32), torch.rand(30, 1, 4, 4) < 0.6
    unit = 2.0**exponent
    for make in (impute.Mean, impute.KNN):
        fitted, scaled = make().fit(x, observed), make().fit(x * unit, observed)
        assert torch.equal(scaled(x * unit, observed), fitted(x, observed) * unit)
