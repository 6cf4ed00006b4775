"""Values at places that were not observed are never read: whatever they hold changes no bit of anything.

The same for the factors and the noise that an MFA holds at observed pixels.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from misconv import MFA, SMFA, ConvDMFA, LinearDMFA, MisConv2d, PartialConv2d, impute, observe
from misconv._math.likelihood import NOISE_FLOOR
from misconv.functional import conv2d_moments, expected_activation, expected_conv2d, partial_conv2d
from misconv.predict import predictive
from tests.reference import random_mfa

SHAPE = (2, 3, 6, 6)
POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "large": 1e30, "noise": None}


def poisoned(x: Tensor, hidden: Tensor, poison: str) -> Tensor:
    value = POISON[poison]
    hidden = hidden.expand(x.shape)
    garbage = torch.randn_like(x) if value is None else torch.full_like(x, value)
    return torch.where(hidden, garbage, x).requires_grad_()


def masks() -> list[Tensor]:
    return [torch.rand(2, 1, 6, 6) < 0.5, torch.rand(2, 3, 6, 6) < 0.5, torch.zeros(2, 1, 6, 6, dtype=torch.bool)]


def of_images() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Everything that takes an image and what was observed of it."""
    p = random_mfa(2, 2, 2, SHAPE[1:])
    pinned = random_mfa(2, 2, 2, SHAPE[1:], torch.rand(2, 1, 6, 6) < 0.3)
    layer = MisConv2d(3, 4, 3, padding=1, norm=nn.BatchNorm2d(4))
    partial = PartialConv2d(3, 4, 3, padding=1)
    weight, grouped = torch.randn(4, 3, 3, 3), torch.randn(6, 1, 3, 3)
    return {
        "log_prob": lambda x, o: p.log_prob(x, o),
        "log_prob of a pinned MFA": lambda x, o: pinned.log_prob(x, o),
        "condition, mean": lambda x, o: p.condition(x, o).mean,
        "condition, variance": lambda x, o: p.condition(x, o).variance,
        "condition, weights": lambda x, o: p.condition(x, o).weights,
        "condition, again": lambda x, o: pinned.condition(x, o).condition(x, o).mean,
        "condition, log_prob": lambda x, o: p.condition(x, o).log_prob(torch.zeros(SHAPE)),
        "condition, sample": lambda x, o: p.condition(x, o).sample(3, generator=torch.Generator(x.device).manual_seed(1)),
        "fix, mean": lambda x, o: p.fix(x, o).mean,
        "fix, variance": lambda x, o: p.fix(x, o).variance + 0 * x.nan_to_num(0, 0, 0).sum(),
        "moments": lambda x, o: torch.stack(conv2d_moments(p.fix(x, o), weight)),
        "expected_conv2d": lambda x, o: expected_conv2d(p.condition(x, o), weight, activation="silu"),
        "expected_conv2d, quadrature": lambda x, o: expected_conv2d(p.fix(x, o), weight, activation="mish"),
        "expected_conv2d, reflected": lambda x, o: expected_conv2d(p.fix(x, o), weight, padding=1, padding_mode="reflect"),
        "MisConv2d": lambda x, o: layer(p.condition(x, o)),
        "partial_conv2d": lambda x, o: partial_conv2d(x, o, weight, padding=1),
        "partial_conv2d, groups": lambda x, o: partial_conv2d(x, o, grouped, groups=3),
        "PartialConv2d": lambda x, o: partial(x, o),
    }  # fmt: skip


@pytest.mark.parametrize("name", of_images())
def test_hidden_values_change_nothing(name: str) -> None:
    torch.manual_seed(1)
    function = of_images()[name]
    for observed in masks():
        clean = torch.randn(SHAPE).requires_grad_()
        expected = function(clean, observed)
        (slope,) = torch.autograd.grad(expected.square().sum(), clean)
        assert expected.isfinite().all()
        assert slope.isfinite().all()
        if name != "fix, variance":
            assert (slope == 0)[~observed.expand(SHAPE)].all()
        for poison in POISON:
            x = poisoned(clean.detach(), ~observed, poison)
            result = function(x, observed)
            assert torch.equal(result, expected), f"{poison} leaks into the result"
            assert torch.equal(torch.autograd.grad(result.square().sum(), x)[0], slope), (
                f"{poison} leaks into the gradient"
            )


def of_densities() -> dict[str, Callable[[MFA], Tensor]]:
    """Everything that takes an MFA, whose factors and noise at exact pixels may hold anything."""
    x, where, weight = torch.randn(SHAPE), torch.rand(2, 1, 6, 6) < 0.5, torch.randn(4, 3, 3, 3)
    layer = MisConv2d(3, 4, 3, padding=1, norm=nn.BatchNorm2d(4))
    return {
        "mean": lambda p: p.mean,
        "variance": lambda p: p.variance,
        "log_prob": lambda p: p.log_prob(x, where),
        "condition": lambda p: p.condition(x, where).mean + p.condition(x, where).variance,
        "condition, weights": lambda p: p.condition(x, where).weights,
        "condition, layer": lambda p: layer(p.condition(x, where)),
        "sample": lambda p: p.sample(3, generator=torch.Generator(x.device).manual_seed(1)),
        "moments": lambda p: torch.stack(conv2d_moments(p, weight)),
        "expected_conv2d": lambda p: expected_conv2d(p, weight, padding=1, padding_mode="reflect"),
        "expected_activation": lambda p: expected_activation("gelu", *conv2d_moments(p, weight)),
        "MisConv2d": layer,
    }


@pytest.mark.parametrize("name", of_densities())
def test_parameters_at_exact_pixels_change_nothing(name: str) -> None:
    torch.manual_seed(1)
    function = of_densities()[name]
    for observed in masks():
        base = random_mfa(2, 2, 2, SHAPE[1:], observed)

        def run(poison: str, p: MFA = base, observed: Tensor = observed) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            factors = poisoned(p.factors, observed[:, None, None], poison)
            noise = poisoned(p.noise, observed[:, None], poison)
            result = function(MFA(p.logits, p.means, factors, noise, observed, check=False))
            if not result.requires_grad:  # the mean needs neither
                return result, ()
            return result, torch.autograd.grad(result.square().sum(), (factors, noise), allow_unused=True)

        expected, slopes = run("noise")
        for poison in POISON:
            result, others = run(poison)
            assert torch.equal(result, expected), f"{poison} leaks into the result"
            for slope, other in zip(slopes, others, strict=True):
                assert (slope is None) == (other is None)
                if slope is not None and other is not None:
                    assert slope.isfinite().all()
                    assert torch.equal(slope, other), f"{poison} leaks into a gradient"


def test_observe_forgets_what_was_coded_as_missing() -> None:
    x = torch.randn(SHAPE)
    hidden = torch.rand(SHAPE) < 0.3
    first, observed = observe(x.masked_fill(hidden, math.nan))
    second, _ = observe(x.masked_fill(hidden, -9999), nodata=-9999)
    assert torch.equal(first, second)
    assert torch.equal(observed, ~hidden)


@pytest.mark.parametrize("call", [MFA.condition, MFA.fix, MFA.log_prob])
def test_nan_where_observed_is_refused(call: Callable[..., object], values_are_checked: None) -> None:
    with pytest.raises(ValueError, match="x must be finite wherever it is observed"):
        call(random_mfa(2, 1, 1, SHAPE[1:]), torch.full(SHAPE, math.nan), torch.ones(2, 1, 6, 6, dtype=torch.bool))


# Whatever learns from images, or answers for them -------------------------------------------------------------------


def states(*modules: nn.Module) -> list[Tensor]:
    return [value for module in modules for value in module.state_dict().values()]


def parts(p: MFA) -> list[Tensor]:
    return [p.logits, p.means, *p.pinned()[1:], p.mean, p.variance, p.weights]


def of_learners() -> dict[str, Callable[[Tensor, Tensor], list[Tensor]]]:
    """What is learned from images, and what densities and imputers say of them; everything a caller could look at."""
    fresh = torch.Generator(torch.get_default_device()).manual_seed(9)
    other, seen = torch.randn(12, *SHAPE[1:], generator=fresh), torch.rand(12, 1, 6, 6, generator=fresh) < 0.8
    fitted = SMFA(2, 2).fit(other, seen, iterations=3)
    networks: list[nn.Module] = [
        LinearDMFA(SHAPE[1:], 2, 2),
        ConvDMFA(3, 2, 2, widths=(6, 8), depths=(1, 1, 1), skips=True),
    ]

    def em(x: Tensor, o: Tensor, **options: int) -> list[Tensor]:
        density = SMFA(2, 1).fit(x, o, iterations=3, **options)
        return [*states(density), torch.tensor(density.history), *density.resumable().values()]

    def calibrated(x: Tensor, o: Tensor) -> list[Tensor]:
        network = ConvDMFA(3, widths=(4,), depths=(1,), rank=0)
        network.calibrate(x, o)
        return [network.center, network.scale]

    def answered(density: nn.Module, mode: bool, x: Tensor, o: Tensor) -> list[Tensor]:
        density = copy.deepcopy(density).train(mode)
        return [*parts(density(x, o)), *states(density)]

    cases: dict[str, Callable[[Tensor, Tensor], list[Tensor]]] = {
        "EM": em,
        "EM, minibatches": lambda x, o: em(x, o, minibatch=2),
        "EM, batches": lambda x, o: states(SMFA(2, 1).fit([(x[:4], o[:4]), (x[4:], o[4:])], iterations=2)),
        "calibrate": calibrated,
        "SMFA": lambda x, o: parts(fitted(x, o)),
        "Mean": lambda x, o: [*states(impute.Mean().fit(x, o)), impute.Mean().fit(other, seen)(x, o)],
        "KNN": lambda x, o: [*states(impute.KNN(2).fit(x, o)), impute.KNN(2).fit(other, seen)(x, o)],
        "zero": lambda x, o: [impute.zero(x, o)],
        "by_density": lambda x, o: [impute.by_density(fitted)(x, o)],
        "predictive": lambda x, o: list(
            vars(
                predictive(
                    lambda p: p.mean.flatten(1)[:, :3], fitted(x, o), 3, generator=torch.Generator().manual_seed(2)
                )
            ).values()
        ),
    }
    for network in networks:
        for mode in (True, False):
            cases[f"{type(network).__name__}, {mode}"] = partial(answered, network, mode)
    return cases


@pytest.mark.parametrize("name", of_learners())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hidden_values_are_neither_learned_nor_answered(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    function = of_learners()[name]
    clean = torch.randn(8, *SHAPE[1:], dtype=dtype)
    for planes in (1, 3):
        observed = torch.rand(8, planes, 6, 6) < 0.6
        observed[0] = True  # every pixel is seen once
        torch.manual_seed(2)
        expected = function(clean, observed)
        for poison in POISON:
            x = poisoned(clean, ~observed, poison).detach()
            torch.manual_seed(2)
            found = function(x, observed)
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), f"{poison} leaks"


@pytest.mark.parametrize("rank", [0, 2])
def test_kernels_read_nothing_hidden(rank: int) -> None:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") != "1":
        pytest.skip("without a GPU, Triton runs in its interpreter alone: TRITON_INTERPRET=1")
    kernels = pytest.importorskip("misconv._triton.score")
    p = random_mfa(2, 2, rank, SHAPE[1:], torch.rand(2, 1, 6, 6) < 0.3)
    for observed in masks():
        clean = torch.randn(SHAPE)
        expected = kernels.condition(*p._parameters(), clean, observed, p.observed, floor=NOISE_FLOOR)
        for poison in POISON:
            x = poisoned(clean, ~observed, poison).detach()
            found = kernels.condition(*p._parameters(), x, observed, p.observed, floor=NOISE_FLOOR)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"{poison} leaks"
