"""Float16 operands in the place of TF32 ones: the same digits, in any units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from misconv import MFA
from misconv._conv import fixed_batch_norm

pytest.importorskip("triton")

from misconv import _triton
from misconv._triton import operator as _operator
from misconv._triton import plan as _plan
from misconv._triton.halves import balance_kernel, halve_filters_kernel
from tests.test_triton import error, layer, respond, small_work, upstream  # noqa: F401  # one is a fixture
from tests.test_triton_normalized import Problem

STRIDED = {"stride": 2, "padding": 3}
SAME = 1e-5  # float32 sums in another order; and what lies in the middle of two numbers is rounded to an even one


@pytest.fixture(autouse=True)
def _halves(monkeypatch: pytest.MonkeyPatch, small_work: None) -> None:  # noqa: F811
    """TF32 is allowed, and few tiles are many."""
    monkeypatch.setattr(_plan, "_MANY_TILES", 1)
    monkeypatch.setattr(_plan, "_ORDERED", 16)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def clear() -> None:
    _operator._plan.cache_clear()
    _operator._cached_plan.cache_clear()


def forward(start: list[Tensor | None], observed: Tensor | None, halved: bool, **options: Any) -> Tensor:
    """The response, with float16 operands or TF32 ones."""
    activation = options.pop("activation", "relu")
    geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
    logits, means, factors, noise, x, weight, bias = (None if t is None else t.float() for t in start)
    p = MFA(logits, means, factors, noise, check=False)  # type: ignore[arg-type]
    if observed is not None:
        pixels = torch.where(observed.unsqueeze(1), x.unsqueeze(1), means)  # type: ignore[union-attr, arg-type]
        p = MFA(logits, pixels, factors, noise, observed, check=False)  # type: ignore[arg-type]
    clear()
    with pytest.MonkeyPatch.context() as patch:
        if not halved:
            patch.setattr(_plan.Plan, "_halves_pay", lambda _: False)
        y = respond(p, weight, bias, *geometry.values(), activation=activation)  # type: ignore[arg-type]
    assert y is not None
    plans = _operator._plan.cache_info().currsize
    assert plans == 1
    return y


def assert_equal_up_to_order(start: list[Tensor | None], observed: Tensor | None, **options: Any) -> None:
    """Nothing differs but the order of float32 sums, and ties."""
    found, wanted = (forward(start, observed, halved, **options) for halved in (True, False))
    assert error(found, wanted.double()) < SAME
    assert bool(wanted.isfinite().all())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"kernel": 7, "out": 5, "components": 2, "rank": 3}, STRIDED),
        ({"kernel": 6, "out": 70, "rank": 0, "seen": "each"}, {"stride": (3, 2), "padding": (1, 2)}),
        ({"kernel": 5, "channels": 1, "seen": "nothing", "has_bias": False}, {"stride": 2, "activation": "gelu"}),
    ],
)
def test_float16_operands_are_those_of_tf32(shape: dict[str, Any], options: dict[str, Any]) -> None:
    start, observed = layer(image=(15, 20), **shape)
    assert_equal_up_to_order(start, observed, **options)


@pytest.mark.parametrize("unit", [1e-12, 3e4, 1e12])
def test_units_of_images_do_not_matter(unit: float) -> None:
    """One image of two is in other units, far beyond the range of float16."""
    start, observed = layer(kernel=7, image=(11, 16))
    for place, power in ((1, 1), (2, 1), (3, 2), (4, 1)):  # means, factors, noise and pixels
        values = start[place]
        assert values is not None
        start[place] = torch.stack([values[0] * unit**power, values[1]])
    start[6] = torch.zeros_like(start[6])  # type: ignore[arg-type]
    found, wanted = (forward(start, observed, halved, **STRIDED) for halved in (True, False))
    for one, other in zip(found, wanted, strict=True):  # each image by itself
        assert error(one, other.double()) < SAME
        assert float(other.norm()) > 0


@pytest.mark.parametrize("ratio", [1e-9, 1 / 12, 9.0, 1e5])
def test_channels_in_different_units_that_weights_make_up_for(ratio: float) -> None:
    """As of a network that has learned from them: what they give to mean and variance is of one size."""
    start, observed = layer(kernel=7, image=(11, 16))
    for place, power in ((1, 1), (2, 1), (3, 2), (4, 1), (5, -1)):  # means, factors, noise, pixels and filters
        values = start[place]
        assert values is not None
        moved = values.movedim(1 if place in (4, 5) else -3, 0).clone()
        moved[1] *= ratio**power
        start[place] = moved.movedim(0, 1 if place in (4, 5) else -3)
    assert_equal_up_to_order(start, observed, **STRIDED)
    exact = forward([None if t is None else t for t in start], observed, True, **STRIDED)
    unmoved, _ = layer(kernel=7, image=(11, 16))
    assert error(exact, forward(unmoved, observed, True, **STRIDED).double()) < 1e-3


def test_filters_of_different_size_keep_their_digits() -> None:
    start, observed = layer(kernel=7, out=4, image=(11, 16))
    sizes = torch.tensor([1e-18, 1e-6, 1.0, 1e9], dtype=torch.float64)
    start[5] = start[5] * sizes[:, None, None, None]  # type: ignore[operator]
    start[6] = start[6] * sizes  # type: ignore[operator]
    found, wanted = (forward(start, observed, halved, **STRIDED) for halved in (True, False))
    for o in range(4):
        assert error(found[:, o], wanted[:, o].double()) < SAME


def test_images_and_filters_may_be_float16_themselves() -> None:
    """Then rounding the result is the larger error; in the forward pass and in gradients."""
    start, observed = layer(kernel=7, image=(17, 26))
    results = []
    for halved in (True, False):
        clear()
        logits, means, factors, noise, x, weight, bias = (None if t is None else t.half() for t in start)
        p = MFA(logits, means, factors, noise, check=False).fix(x, observed)  # type: ignore[arg-type]
        parameters = [t.requires_grad_() for t in (weight, bias) if t is not None]
        with pytest.MonkeyPatch.context() as patch:
            if not halved:
                patch.setattr(_plan.Plan, "_halves_pay", lambda _: False)
                patch.setattr(_plan.Plan, "_complete", lambda *_: None)
            y = respond(p, *parameters, 2, 3, 1, 1)
            assert y is not None
            results.append([y.detach(), *torch.autograd.grad(y, parameters, upstream(y).half())])
    for one, other in zip(*results, strict=True):
        assert one.dtype == torch.float16
        assert error(one, other.double()) < torch.finfo(torch.float16).eps


@pytest.mark.parametrize("training", [False, True])
def test_a_normalization_is_folded_into_such_filters(training: bool) -> None:
    start, observed = layer(kernel=5, out=4, image=(9, 12))
    results: list[list[Tensor]] = []
    for halved in (True, False):
        clear()
        problem = Problem(start, observed, torch.float32, stride=2, padding=2)
        with torch.no_grad():
            problem.norm.weight.copy_(torch.tensor([1e-3, 1.0, 50.0, -2.0]))
            problem.norm.running_var.copy_(torch.tensor([1e-4, 1.0, 20.0, 3.0]))  # type: ignore[union-attr]
        with pytest.MonkeyPatch.context() as patch:
            if not halved:
                patch.setattr(_plan.Plan, "_halves_pay", lambda _: False)
            if training:
                results.append(problem.learned(problem.fused("relu")))
            else:
                norm = problem.norm
                vectors = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
                with torch.no_grad():
                    statistics = fixed_batch_norm(*vectors, norm.eps).statistics  # type: ignore[arg-type]
                    assert statistics is not None
                    y = _triton.fixed_response(problem.p, problem.conv, statistics, "relu")
                assert y is not None
                results.append([y])
    for one, other in zip(*results, strict=True):
        assert error(one, other.double(), 1.0) < SAME


@pytest.mark.parametrize("uneven", [1e6, 4.0, 1e-6])
def test_filters_are_written_in_units_of_their_own(uneven: float) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    weight = torch.randn(3, 2, 3, 5, generator=generator, dtype=torch.float32)
    weight[1] *= 1e-20
    weight[2] = 0
    weight[:, 1] *= uneven
    filters, units = torch.empty(3, 2, 3, 6, dtype=torch.float16), torch.empty(3, dtype=torch.float32)
    balances = torch.empty(3, dtype=torch.float32)
    balance_kernel[(1,)](weight, balances, 3, 30, 15, 2, 32)
    matters, balance = balances[0].item(), balances[1:]
    assert torch.equal(balance.log2(), weight.abs().amax((0, 2, 3)).log2().floor())
    assert matters == (uneven != 4)
    balance = balance if matters else torch.ones_like(balance)
    halve_filters_kernel[(3,)](weight, balances, filters, units, 30, 3, 5, 6, 64)
    assert bool((filters[..., 5] == 0).all())
    restored = filters[..., :5].double() * units.double()[:, None, None, None] * balance.double()[:, None, None]
    assert error(restored, weight.double()) < 2**-11
    assert error(restored[1], weight[1].double()) < 2**-11
    assert bool(((filters.abs().amax((1, 2, 3)) >= 64) == torch.tensor([True, True, False])).all())
    assert bool((filters.abs() < 128).all())
