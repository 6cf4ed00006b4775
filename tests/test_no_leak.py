"""Values at places that were not observed are never read: whatever they hold changes no bit of anything.

The same for the factors and the noise that an MFA holds at observed pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from misconv import MFA, MisConv2d, PartialConv2d, observe
from misconv.functional import conv2d_moments, expected_activation, expected_conv2d, partial_conv2d
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
