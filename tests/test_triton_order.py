"""Tiles of different cost: ordered first, and complete ones by kernels of their own for strided bfloat16."""

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
from tests.test_triton import assert_close, error, layer, logit_terms, respond, small_work, upstream  # noqa: F401  # one is a fixture

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
