"""Whether the fast path is right, before anybody asks how fast it is.

Fresh random inputs; the same layer by the plain path in float64; the error is ‖result − reference‖ / ‖reference‖ of the
output and of every gradient, and a NaN never passes. Three things are no fault of the fast path:

- Where a hair's breadth decides whether a ReLU is open (nothing missing under the filter, a response within 1 % of its
  usual size around 0), rounding alone flips a gradient between 0 and 1; the gradient given from above is zero there.
- A float32 sum over a hundred thousand outputs (the gradients of weight and bias) can lose more digits than the bound
  in torch itself; there the fast path may err twice as much as the plain path does with the same arithmetic (both are
  noise of about one size), and no more. With TF32 "the plain path" is exact arithmetic on operands rounded to TF32:
  where little is missing under a filter, a gradient is steep in the mean's rounding, whoever computes it.
- The gradient of a component's logit is a sum of outputs that nearly cancel, to whatever remains by chance; its error
  is measured against the sum of their sizes.

An observed pixel stands in all components at once, so only the sum of its gradients over them has a meaning.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from misconv import functional
from misconv._backend import plain
from misconv.bench.layer import Inputs, Layer, Setting
from misconv.mfa import MFA

__all__ = ["BOUNDS", "CASES", "MODES", "WrongResultError", "check", "precision", "rehearse"]

# By the arithmetic of convolutions and matrix products: float32 as IEEE means it, and with TF32's ten bits of mantissa.
BOUNDS = {"ieee": 1e-6, "tf32": 1e-3}
MODES = {"ieee": "IEEE float32", "tf32": "TF32"}

_SMALL = Setting(8, 3, 64)
_LARGE = Setting(2, 3, 224, filters=64)
_WIDE = replace(_LARGE, kernel=7, stride=2, padding=3)
CASES = [
    Setting(16, 1, 28),
    _SMALL,
    replace(_SMALL, components=3, rank=8, per_channel=True),
    replace(_SMALL, components=3, share=0.0),
    replace(_SMALL, share=1.0),
    replace(_SMALL, rank=0),
    Setting(3, 2, 37, filters=20, components=2, rank=1, per_channel=True),  # nothing is a multiple of anything
    _LARGE,
    replace(_LARGE, components=3, rank=8),
    _WIDE,
    replace(_WIDE, components=3, rank=8, per_channel=True),
]


class WrongResultError(ArithmeticError):
    """The fast path computes something else than the plain one: there is nothing to time."""


def check(cases: list[Setting], generator: torch.Generator, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The errors of the layer and of `MFA.log_prob` for all cases; raises `WrongResultError` if one is too large."""
    rows = []
    for mode in MODES if generator.device.type == "cuda" else ("ieee",):
        for setting in cases:
            for what, evaluate in (("layer", _layer), ("log_prob", _log_prob)):
                with precision(tf32=mode == "tf32"):
                    found, ordinary = _compare(setting, generator, evaluate)
                _judge(f"{what}, {setting}, {MODES[mode]}", BOUNDS[mode], found, ordinary)
                worst = max(found, key=lambda name: found[name])
                say(f"check  {what}  {setting}  {MODES[mode]}: error at most {found[worst]:.1e} ({worst})")
                rows.append(
                    {"what": what, "mode": mode, "setting": str(setting), "errors": found, "plain_errors": ordinary}
                )
    return rows


def rehearse(setting: Setting, generator: torch.Generator, mode: str) -> None:
    """Run what is checked, without a judgement."""
    for evaluate in (_layer, _log_prob):
        with precision(tf32=mode == "tf32"):
            _compare(setting, generator, evaluate)


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Convolutions and matrix products with TF32, or without."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


# Inside ------------------------------------------------------------------------------------------------------------

_Evaluate = Callable[[Layer, Inputs, Tensor], dict[str, Tensor]]


def _judge(where: str, bound: float, errors: dict[str, float], ordinary: dict[str, float]) -> None:
    for name, error in errors.items():
        allowed = max(bound, 2 * ordinary[name])
        if not error <= allowed:
            raise WrongResultError(
                f"{name} of {where}: relative error {error:.2e}, allowed is {allowed:.1e} "
                f"(the plain path in this arithmetic: {ordinary[name]:.2e})"
            )


def _compare(
    setting: Setting, generator: torch.Generator, evaluate: _Evaluate
) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of the fast path, and of the plain path in the same arithmetic."""
    single = Layer(setting, generator, sets=1)
    double = Layer(setting, generator, sets=1)  # its values are replaced
    double.weight, double.bias = (t.detach().double().requires_grad_() for t in (single.weight, single.bias))
    exact = single.inputs[0].double().tracked()
    given = single.given * _away_from_the_kink(double, exact)
    with plain():
        reference = evaluate(double, exact, given.double())
        if evaluate is _layer and given.is_cuda and torch.backends.cudnn.allow_tf32:
            ordinary = evaluate(*_rounded(double, exact), given.double())
        else:
            ordinary = evaluate(single, single.tracked[0], given)
    _poison(reference)
    result = evaluate(single, single.tracked[0], given)
    sizes = {name: float(t.norm()) for name, t in reference.items()}
    if evaluate is _layer:
        sizes["logits"] = _size_of_logits(double, exact, given.double())
    errors, usual = (
        {name: _error(found[name], reference[name], sizes[name]) for name in reference} for found in (result, ordinary)
    )
    return errors, usual


def _layer(layer: Layer, inputs: Inputs, given: Tensor) -> dict[str, Tensor]:
    """The output and the gradients of everything, by name."""
    return _with_gradients(layer, inputs, layer.misconv(inputs), given, layer.leaves(inputs))


def _log_prob(layer: Layer, inputs: Inputs, given: Tensor) -> dict[str, Tensor]:
    """The log density of the seen pixels and the gradients of the density."""
    p = inputs.p
    score = MFA(p.logits, p.means, p.factors, p.noise, check=False).log_prob(inputs.x.detach(), p.observed)
    return _with_gradients(layer, inputs, score, given.flatten()[: len(score)], layer.leaves(inputs)[2:])


def _with_gradients(layer: Layer, inputs: Inputs, y: Tensor, given: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
    p = inputs.p
    known = {"weight": layer.weight, "bias": layer.bias}
    known |= {"means": p.means, "factors": p.factors, "noise": p.noise, "logits": p.logits}
    names = [next(name for name, tensor in known.items() if tensor is leaf) for leaf in leaves]
    gradients = torch.autograd.grad(y, leaves, given, allow_unused=True)
    found = {"output": y.detach()}
    for name, leaf, gradient in zip(names, leaves, gradients, strict=True):
        found[name] = torch.zeros_like(leaf) if gradient is None else gradient
    if "means" in found and p.observed is not None:
        means = found["means"]
        found["means"] = torch.where(p.observed.unsqueeze(1), means.sum(1, keepdim=True), means)
    return found


def _away_from_the_kink(layer: Layer, inputs: Inputs) -> Tensor:
    """1 where the derivative of the activation is smooth on the scale of rounding errors, else 0; (B, O, H', W')."""
    s = layer.setting
    with torch.no_grad():
        mean, variance = functional.conv2d_moments(inputs.p, layer.weight, layer.bias, s.stride, s.padding)
        margin = 0.01 * mean.square().mean().sqrt()
        return ((mean.abs() > margin) | (variance.sqrt() > margin)).all(1).to(torch.float32)


def _rounded(layer: Layer, inputs: Inputs) -> tuple[Layer, Inputs]:
    """The same layer and density in float64 with every operand of a product rounded to TF32, as leaves."""
    nearest = copy.copy(layer)
    nearest.weight = _to_tf32(layer.weight).requires_grad_()
    p = inputs.p.detach()
    p = MFA(p.logits, _to_tf32(p.means), _to_tf32(p.factors), _to_tf32(p.noise), observed=p.observed, check=False)
    return nearest, Inputs(inputs.x, p).tracked()


def _to_tf32(values: Tensor) -> Tensor:
    """Rounded to the nearest number with ten bits of mantissa."""
    mantissa, exponent = torch.frexp(values.detach())
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def _poison(like: dict[str, Tensor]) -> None:
    """Fill the memory that results will be put into with NaN, so that an element nobody writes shows."""
    blocks = [torch.full(t.shape, math.nan, device=t.device, dtype=torch.float32) for t in like.values()]
    blocks += [torch.full_like(block, math.nan) for block in blocks]
    del blocks


def _error(result: Tensor, reference: Tensor, size: float) -> float:
    """‖result − reference‖ / size; where the reference is zero throughout, ‖result‖."""
    difference = float((result.double() - reference).norm())
    return difference / size if size > 0 else difference


def _size_of_logits(layer: Layer, inputs: Inputs, given: Tensor) -> float:
    """π_k Σ |g| |E_k − E|, of which the gradient of logit k is the sum with signs."""
    s, p = layer.setting, inputs.p
    with torch.no_grad():
        moments = functional.conv2d_moments(p, layer.weight, layer.bias, s.stride, s.padding)
        expected = functional.expected_activation("relu", *moments)  # (B, K, O, H', W')
        shares = p.weights[..., None, None, None]
        apart = expected - (shares * expected).sum(1, keepdim=True)
        return float((shares * given.unsqueeze(1) * apart).abs().sum((2, 3, 4)).norm())
