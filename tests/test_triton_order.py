"""Tiles of different cost: ordered first, and complete ones of strided layers by kernels of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import misconv
from misconv import MFA, functional
from misconv._conv import Convolution

pytest.importorskip("triton")

from misconv._triton import operator as _operator
from misconv._triton import plan as _plan
from misconv._triton.order import order_kernel
from tests.test_triton import BOUND, assert_close, error, layer, logit_terms, respond, small_work, upstream  # noqa: F401  # one is a fixture

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"channels": 3, "kernel": 7, "out": 5}, {"stride": 2, "padding": 3}),
    ({"channels": 3, "kernel": 6, "out": 70, "rank": 1, "seen": "each"}, {"stride": (3, 2), "padding": (1, 2)}),
    ({"channels": 2, "kernel": 8, "out": 3, "components": 3, "has_bias": False}, {"stride": 4, "padding": 4}),
]


@pytest.fixture(autouse=True)
def _few_tiles(monkeypatch: pytest.MonkeyPatch, small_work: None) -> None:  # noqa: F811
    """Few tiles are ordered here, and complete ones have the size that they have in use."""
    monkeypatch.setattr(_plan, "_MANY_TILES", 1)
    monkeypatch.setattr(_plan, "_ORDERED", 16)
    tiling = _plan._BACKWARD["paired", False]
    monkeypatch.setitem(_plan._BACKWARD, ("paired", False), tiling._replace(pixels=64))


@pytest.mark.parametrize("number", [1, 16, 45])
def test_the_order_is_stable(number: int) -> None:
    touched = torch.rand(number) < 0.4
    order = torch.empty(number + 1, dtype=torch.int32)
    order_kernel[(-(-number // 16),)](touched.to(torch.int8), order, number, 16)
    assert order[:-1].tolist() == (~touched).to(torch.int8).argsort(stable=True).tolist()
    assert int(order[-1]) == int(touched.sum())


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"components": 3, "image": (9, 21)}, {"padding": 1}),
        ({"channels": 4, "out": 6, "groups": 2, "seen": "each"}, {"groups": 2, "padding": 1}),
        ({"kernel": 7, "image": (11, 30), "rank": 4}, {"stride": 2, "padding": 3}),
    ],
)
def test_all_gradients_of_ordered_tiles(shape: dict[str, Any], options: dict[str, Any]) -> None:
    leaves, observed = layer(**shape)
    terms = logit_terms(leaves, observed, **options) if shape.get("components", 1) > 1 else 0.0
    assert_close(leaves, observed, terms=terms, **options)


def test_equal_inputs_give_equal_bits() -> None:
    leaves, observed = layer(image=(9, 21), components=2)
    found = []
    for _ in range(2):
        logits, means, factors, noise, x, weight, bias = (None if t is None else t.float() for t in leaves)
        p = MFA(logits, means, factors, noise, check=False).fix(x, observed)  # type: ignore[arg-type]
        parameters = [t.requires_grad_() for t in (weight, bias) if t is not None]
        y = respond(p, *parameters, 1, 1, 1, 1)
        assert y is not None
        found.append(torch.autograd.grad(y, parameters, upstream(y).float()))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def problem(start: list[Tensor | None], observed: Tensor | None, dtype: torch.dtype) -> tuple[MFA, list[Tensor]]:
    logits, means, factors, noise, x, weight, bias = (None if t is None else t.bfloat16().to(dtype) for t in start)
    p = MFA(logits, means, factors, noise, check=False)  # type: ignore[arg-type]
    assert x is not None
    return p.fix(x, observed), [t.requires_grad_() for t in (weight, bias) if t is not None]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_gradients_are_those_of_the_plain_path(
    shape: dict[str, Any], options: dict[str, Any], channels_last: bool
) -> None:
    image = (33, 42)  # tiles that end beyond the response, some complete and some not
    start, observed = layer(image=image, **shape)
    p, parameters = problem(start, observed, torch.bfloat16)
    if channels_last:
        parameters[0] = parameters[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
    weight, bias = (*parameters, None)[:2]
    y = respond(p, weight, bias, *geometry.values())
    assert y is not None
    plan = _operator.find_plan(p, Convolution(weight, bias, *geometry.values()), False, ("relu", 0.0, 0.0))
    assert plan is not None
    assert not plan._backward
    found = torch.autograd.grad(y, parameters, upstream(y).to(y.dtype))
    works = list(plan._backward.values())
    assert len(works) == 1
    assert works[0].complete is not None
    exact, wanted = problem(start, observed, torch.float64)
    with misconv.plain():
        reference = functional.expected_conv2d(exact, wanted[0], *wanted[1:], **options)
    expected = torch.autograd.grad(reference, wanted, upstream(y).to(y.dtype).double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert one.shape == other.shape
        terms = float(upstream(reference).abs().sum((0, 2, 3)).norm()) if one.dim() == 1 else 0.0
        assert error(one, other, terms) < 1e-2


def test_nothing_missing_and_everything_missing() -> None:
    """All tiles are complete, or none is."""
    start, _ = layer(channels=3, kernel=7, out=5, image=(9, 12))
    for seen in (True, False):
        observed = torch.full((2, 1, 9, 12), seen)
        p, parameters = problem(start, observed, torch.bfloat16)
        exact, wanted = problem(start, observed, torch.float64)
        y = respond(p, *parameters, 2, 3, 1, 1)
        assert y is not None
        with misconv.plain():
            reference = functional.expected_conv2d(exact, *wanted, stride=2, padding=3)
        g = upstream(reference).bfloat16()
        found, expected = (torch.autograd.grad(*pair) for pair in ((y, parameters, g), (reference, wanted, g.double())))
        assert error(found[0], expected[0]) < 1e-2


# TF32, with float16 operands ---------------------------------------------------------------------------------------


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def tf32_gradients(
    start: list[Tensor | None],
    observed: Tensor,
    grad: Tensor | None = None,
    *,
    is_apart: bool = True,
    of_pixels: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Gradients of weight and bias, and of means, factors and noise if these are asked for.

    Complete tiles have a kernel of their own, with float16 operands, if that is so in use; else that of all tiles.
    """
    geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
    logits, means, factors, noise, x, weight, bias = (None if t is None else t.float() for t in start)
    pixels = [means, factors, noise] if of_pixels else []
    wanted = [t.requires_grad_() for t in (weight, bias, *pixels) if t is not None]
    p = MFA(logits, means, factors, noise, check=False).fix(x, observed)  # type: ignore[arg-type]
    _operator._plan.cache_clear()
    _operator._cached_plan.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if not is_apart:
            patch.setattr(_plan.Plan, "_complete", lambda *_: None)
        y = respond(p, wanted[0], bias, *geometry.values())
        assert y is not None
        grad = upstream(y) if grad is None else grad
        found = list(torch.autograd.grad(y, wanted, grad.float()))
    plan = _operator.find_plan(p, Convolution(wanted[0], bias, *geometry.values()), False, ("relu", 0.0, 0.0))
    assert plan is not None
    kinds = [None if work.complete is None else work.complete.largest for work in plan._backward.values()]
    assert [kind is not None for kind in kinds] == [is_apart]
    return found


def assert_equal_up_to_order(start: list[Tensor | None], observed: Tensor, *arguments: Any, **options: Any) -> None:
    """Float16 operands have the digits of TF32 ones, so nothing differs but the order of float32 sums."""
    found, wanted = (tf32_gradients(start, observed, *arguments, **options, is_apart=apart) for apart in (True, False))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert error(one, other.double()) < BOUND


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("of_pixels", [False, True])
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_float16_operands_are_those_of_tf32(shape: dict[str, Any], options: dict[str, Any], of_pixels: bool) -> None:
    start, observed = layer(image=(17, 26), **shape)
    assert observed is not None
    assert_equal_up_to_order(start, observed, of_pixels=of_pixels, **options)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_units_of_images_do_not_matter(unit: float) -> None:
    """Beyond the range of float16; only one image of the batch is in these units."""
    start, observed = layer(kernel=7, image=(17, 26))
    assert observed is not None
    for place, power in ((1, 1), (2, 1), (3, 2), (4, 1)):
        values = start[place]
        assert values is not None
        start[place] = torch.stack([values[0] * unit**power, values[1]])
    assert_equal_up_to_order(start, observed, stride=2, padding=3)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("size", [1e-25, 1e9])
def test_gradients_may_be_of_any_size(size: float) -> None:
    """They grow a billion times from the first to the last row of tiles, and begin with zeros."""
    start, observed = layer(kernel=7, image=(41, 18))
    assert observed is not None
    rows = torch.logspace(-9, 0, 21, dtype=torch.float64) * size
    rows[:5] = 0
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    grad = torch.randn(2, 3, 21, 9, generator=generator, dtype=torch.float64) * rows[:, None]
    assert_equal_up_to_order(start, observed, grad, stride=2, padding=3)
    small = torch.where(torch.arange(21)[:, None] < 8, grad, 0.0)  # alone, so that nothing larger hides them
    assert_equal_up_to_order(start, observed, small, stride=2, padding=3)


@pytest.mark.usefixtures("tf32")
def test_a_channel_of_small_gradients_keeps_its_digits() -> None:
    """An optimizer that divides by their size would see what is lost."""
    start, observed = layer(kernel=7, image=(17, 26))
    assert observed is not None
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    grad = torch.randn(2, 3, 9, 13, generator=generator, dtype=torch.float64)
    grad[:, 1] *= 1e-10
    found, wanted = (
        tf32_gradients(start, observed, grad, is_apart=apart, stride=2, padding=3) for apart in (True, False)
    )
    assert error(found[0][1], wanted[0][1].double()) < BOUND


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"channels": 3, "kernel": 7, "image": (21, 30)}, {"stride": 2, "padding": 3, "dilation": (2, 1)}),
        ({"channels": 8, "image": (11, 16)}, {"padding": 2, "dilation": 2}),
    ],
)
def test_dilated_windows(
    shape: dict[str, Any], options: dict[str, Any], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    start, observed = layer(**shape)
    geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
    p, parameters = problem(start, observed, torch.bfloat16 if half else torch.float32)
    exact, wanted = problem(start, observed, torch.float64)
    y = respond(p, *parameters, *geometry.values())
    assert y is not None
    with misconv.plain():
        reference = functional.expected_conv2d(exact, *wanted, **options)
    g = upstream(reference).bfloat16()
    found, expected = (
        torch.autograd.grad(*pair) for pair in ((y, parameters, g.to(y.dtype)), (reference, wanted, g.double()))
    )
    assert error(found[0], expected[0]) < 1e-2


@pytest.mark.usefixtures("tf32")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by the interpreter
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_not_hidden(value: float) -> None:
    start, observed = layer(kernel=7, image=(17, 26))
    assert observed is not None
    grad = torch.ones(2, 3, 9, 13)
    grad[1, 2, 7, 11] = value
    start[6] = torch.full_like(start[6], 100.0)  # type: ignore[arg-type]  # so that a ReLU hides nothing
    weight, bias = tf32_gradients(start, observed, grad, stride=2, padding=3)
    assert not bool(weight[2].isfinite().any())
    assert not bool(bias[2].isfinite())
