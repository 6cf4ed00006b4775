"""The kernels for large windows of packed images against the plain path in float64; without a GPU, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import misconv
from misconv import MFA, functional
from misconv._conv import Convolution
from misconv._conv.dispatch import plain_path, plain_squares

pytest.importorskip("triton")

from misconv import _triton
from misconv._triton.packed_plan import PackedPlan
from tests.test_triton import error, layer, upstream

BOUND = 5e-5  # numbers have 16 bits, and errors cancel


@pytest.fixture(autouse=True)
def _tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products may be rounded; else these kernels do not serve."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the packed kernels were asked for."""
    calls: list[str] = []
    for name in ("forward", "squares", "backward"):
        method = getattr(PackedPlan, name)

        def call(self: PackedPlan, *tensors: Any, name: str = name, method: Any = method) -> Any:
            calls.append(name)
            return method(self, *tensors)

        monkeypatch.setattr(PackedPlan, name, call)
    return calls


def run(leaves: list[Any], observed: Tensor | None, dtype: torch.dtype, fused: bool, **options: Any) -> list[Tensor]:
    """Response, and gradients of weight and bias."""
    logits, means, factors, noise, x, weight, bias = (None if t is None else t.to(dtype) for t in leaves)
    p = MFA(logits, means, factors, noise)  # type: ignore[arg-type]
    p = p if observed is None else p.fix(x, observed)  # type: ignore[arg-type]
    parameters = [t.requires_grad_() for t in (weight, bias) if t is not None]
    activation = options.pop("activation", "relu")
    if fused:
        geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
        conv = Convolution(weight, bias, *geometry.values())  # type: ignore[arg-type]
        y = _triton.respond(p, conv, None, activation, plain_path(conv, activation))
        assert y is not None
    else:
        with misconv.plain():
            y = functional.expected_conv2d(p, weight, bias, **options, activation=activation)  # type: ignore[arg-type]
    return [y.detach(), *torch.autograd.grad(y, parameters, upstream(y).to(y.dtype))]


def assert_close(leaves: list[Any], observed: Tensor | None, bound: float = BOUND, **options: Any) -> None:
    found = run(leaves, observed, torch.float32, True, **options)
    expected = run(leaves, observed, torch.float64, False, **options)
    # The gradient of a bias adds up the slopes of all windows, with a sign each; it is measured by these.
    terms = float(upstream(expected[0]).abs().sum((0, 2, 3)).norm())
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs, terms if theirs.dim() == 1 else 0.0) < bound


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"kernel": 7, "image": (13, 19)}, {"stride": 2, "padding": 3}),
        ({"kernel": 7, "image": (9, 8), "components": 2, "seen": "each"}, {"padding": 3}),
        ({"kernel": 5, "image": (12, 11), "rank": 0}, {"stride": (1, 3), "padding": (2, 0)}),
        ({"kernel": 5, "image": (12, 14), "out": 70, "has_bias": False}, {"padding": "same"}),
        ({"kernel": 5, "image": (12, 14), "rank": 3}, {"dilation": (2, 1), "padding": 1}),
        ({"kernel": 5, "image": (12, 14)}, {"dilation": (1, 2), "padding": 1}),
        ({"kernel": 7, "image": (9, 9), "channels": 1, "seen": "nothing"}, {"padding": 3}),
        ({"kernel": 5, "image": (9, 9), "channels": 4, "seen": "each"}, {"padding": 2}),
    ],
)
def test_values_and_gradients_are_those_of_the_plain_path(
    shape: dict[str, Any], options: dict[str, Any], used: list[str]
) -> None:
    leaves, observed = layer(**({"channels": 3} | shape))
    assert_close(leaves, observed, **options)
    assert used == ["forward", "backward"]


@pytest.mark.parametrize("activation", ["identity", "leaky_relu", "relu6", "gelu", "silu"])
def test_activations(activation: str, used: list[str]) -> None:
    leaves, observed = layer(channels=3, kernel=5, image=(8, 9), components=2)
    assert_close(leaves, observed, padding=2, activation=activation)
    assert used == ["forward", "backward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_result_and_nothing_else(dtype: torch.dtype, used: list[str]) -> None:
    leaves, observed = layer(channels=3, kernel=7, image=(10, 12), components=2)
    leaves = [None if t is None else t.to(dtype).double() for t in leaves]
    found = run(leaves, observed, dtype, True, padding=3)
    expected = run(leaves, observed, torch.float64, False, padding=3)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert error(ours, theirs) < torch.finfo(dtype).eps
    assert used == ["forward", "backward"]


@pytest.mark.parametrize("seen", ["shared", "each"])
def test_statistics_of_a_batch_and_their_gradients(seen: str, used: list[str]) -> None:
    leaves, observed = layer(channels=3, kernel=7, image=(12, 10), components=2, seen=seen)
    results = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        logits, means, factors, noise, x, weight, _ = (None if t is None else t.to(dtype) for t in leaves)
        weight = weight.requires_grad_()  # type: ignore[union-attr]
        p = MFA(logits, means, factors, noise).fix(x, observed)  # type: ignore[arg-type]
        conv = Convolution(weight, None, 2, 3)
        if fused:
            found = _triton.batch_statistics(p, conv, plain_squares(conv))
            assert found is not None
            mean, variance = found
        else:
            moments, variances = functional.conv2d_moments(p, weight, stride=2, padding=3)
            shares = p.weights[..., None, None, None]
            count = moments[:, 0, 0].numel()
            mean = (shares * moments).sum((0, 1, 3, 4)) / count
            centred = moments - mean.view(-1, 1, 1)
            variance = (shares * (centred.square() + variances)).sum((0, 1, 3, 4)) / count
        (gradient,) = torch.autograd.grad((mean + variance).sum(), weight)
        results.append([mean, variance, gradient])
    for ours, theirs in zip(*results, strict=True):
        assert error(ours.detach(), theirs.detach()) < BOUND
    assert used == ["squares", "backward"]


def test_gradients_of_the_density_come_from_the_other_kernels(used: list[str]) -> None:
    leaves, observed = layer(channels=3, kernel=5, image=(8, 9))
    logits, means, factors, noise, x, weight, bias = (None if t is None else t.float() for t in leaves)
    means = means.requires_grad_()  # type: ignore[union-attr]
    p = MFA(logits, means, factors, noise).fix(x, observed)  # type: ignore[arg-type]
    conv = Convolution(weight, bias, 1, 2)  # type: ignore[arg-type]
    y = _triton.respond(p, conv, None, "relu", plain_path(conv, "relu"))
    assert y is not None
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert means.grad is not None
    assert used == ["forward"]


def test_missing_values_are_never_read() -> None:
    leaves, observed = layer(channels=3, kernel=5, image=(8, 9))
    assert observed is not None
    seen = observed.unsqueeze(1).expand(leaves[1].shape)  # type: ignore[union-attr]
    expected = run(leaves, observed, torch.float32, True, padding=2)
    for poison in (torch.nan, torch.inf):
        leaves[3] = leaves[3].masked_fill(seen, poison)  # type: ignore[union-attr]
        leaves[2] = leaves[2].masked_fill(seen.unsqueeze(2), poison)  # type: ignore[union-attr]
        p = MFA(*(t.float() for t in leaves[:4]), observed, check=False)  # type: ignore[union-attr]
        p = MFA(
            p.logits, p.means.where(~seen, leaves[4].float().unsqueeze(1)), p.factors, p.noise, observed, check=False
        )  # type: ignore[union-attr]
        conv = Convolution(leaves[5].float(), leaves[6].float(), 1, 2)  # type: ignore[union-attr]
        found = _triton.respond(p, conv, None, "relu", plain_path(conv, "relu"))
        assert torch.equal(found, expected[0])  # type: ignore[arg-type]
