"""Activations with random parameters, and what is known of each: where it bends, how steep it is, how exact it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.outcome import Choices


def _exact(spread: Tensor) -> Tensor:
    return torch.zeros_like(spread)


def _quadrature(spread: Tensor) -> Tensor:
    """Twice the errors that docs/maths.md states for Mish and the tanh form of GELU, by standard deviation."""
    bounds = torch.full_like(spread, 2e-9) * spread.clamp_min(0.1)
    for least, bound in ((3.0, 2e-6), (5.0, 2e-3), (10.0, 8e-2)):
        bounds = torch.where(spread > least, bound, bounds)
    return torch.where(spread > 30, 0.02 * spread, bounds)


@dataclass
class Known:
    """An activation as the library takes it, the function in float64, and how it behaves."""

    name: str
    given: Any  # a name, a module or a function
    plain: Callable[[Tensor], Tensor]  # of values (P, K, nodes) in float64; `channel` says whose slope counts
    kinks: tuple[float, ...] = ()
    width: float = 1.0  # of the bend around 0
    steepest: float = 1.0
    scale: float = 0.0  # of its constants: rounding of the formula may be relative to this
    error: Callable[[Tensor], Tensor] = _exact
    smooth: bool = True  # whether it has no jump
    single: bool = False  # torch's own gradient of it has constants of single precision
    slopes: Tensor | None = field(default=None, repr=False)  # of a PReLU, one per channel


def draw(choices: Choices, channels: int) -> Known:
    """A random activation for `channels` channels."""
    return choices.weighted(_MAKERS)(choices, channels)


def _simple(name: str, **known: Any) -> Callable[[Choices, int], Known]:
    """An activation without parameters, given by name, as a module or as a function of torch."""
    module = {
        "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu6": nn.ReLU6,
        "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid, "selu": nn.SELU, "mish": nn.Mish,
        "identity": nn.Identity,
    }[name]  # fmt: skip

    def make(choices: Choices, channels: int) -> Known:
        given = choices.pick([name, module(), getattr(F, name, name)])
        if name == "relu" and choices.chance(0.3):
            given = choices.pick([nn.ReLU(inplace=True), torch.relu, torch.relu_])
        return Known(name, given, _PLAIN.get(name, module()), single=name in _PLAIN, **known)

    return make


# With gradients in double precision, which torch's own do not have.
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": lambda x: x * ((x + 3).clamp(0, 6) / 6),
}


def _leaky(choices: Choices, channels: int) -> Known:
    slope = choices.pick([0.01, 0.0, 1.0, choices.uniform(-2, 3), choices.power(-6, 2)])
    return Known(f"leaky_relu({slope:g})", nn.LeakyReLU(slope), nn.LeakyReLU(slope), steepest=max(1.0, abs(slope)))


def _prelu(choices: Choices, channels: int) -> Known:
    module = nn.PReLU(choices.pick([1, channels]))
    with torch.no_grad():
        module.weight.copy_(torch.randn(module.weight.shape))
    slopes = module.weight.detach().double().expand(channels)
    return Known("prelu", module, nn.Identity(), steepest=max(1.0, float(slopes.abs().max())), slopes=slopes)


def _hardtanh(choices: Choices, channels: int) -> Known:
    low = choices.uniform(-3, 1)
    high = low + choices.power(-3, 1)
    module = nn.Hardtanh(low, high)
    return Known(f"hardtanh({low:g}, {high:g})", module, module, (low, high), scale=abs(low) + abs(high))


def _elu(choices: Choices, channels: int) -> Known:
    alpha = choices.pick([1.0, choices.power(-2, 1), choices.uniform(0.1, 3)])
    module = nn.ELU(alpha)
    return Known(f"elu({alpha:g})", module, module, steepest=max(1.0, alpha), scale=alpha)


def _celu(choices: Choices, channels: int) -> Known:
    alpha = choices.pick([1.0, choices.power(-1, 1)])

    def plain(x: Tensor) -> Tensor:
        # Not `clamp_max(0)`, whose slope at 0 is 0 in some releases of torch; that of CELU is 1.
        below = torch.where(x > 0, 0, x)
        return torch.where(x > 0, x, alpha * torch.expm1(below / alpha))

    return Known(f"celu({alpha:g})", nn.CELU(alpha), plain, width=alpha, scale=alpha, single=True)


def _softplus(choices: Choices, channels: int) -> Known:
    beta = choices.pick([1.0, 1.0, choices.power(-1, 1)])
    threshold = choices.pick([20.0, 20.0, 20.0, 50.0, choices.uniform(1, 20)])
    module = nn.Softplus(beta, threshold)
    return Known(
        f"softplus({beta:g}, {threshold:g})", module, module, (threshold / beta,), width=1 / beta, scale=1 / beta,
        error=lambda s: torch.full_like(s, 1e-9 / beta), smooth=False,
    )  # fmt: skip


def _gelu_tanh(choices: Choices, channels: int) -> Known:
    module = nn.GELU(approximate="tanh")
    return Known("gelu_tanh", choices.pick(["gelu_tanh", module]), module, steepest=1.2, scale=1.0, error=_quadrature)


def _own(choices: Choices, channels: int) -> Known:
    return Known(
        "function", lambda x: F.mish(x), F.mish, steepest=1.2, scale=1.0, error=_quadrature
    )  # what the library has never seen


def _nine_digits(spread: Tensor) -> Tensor:
    return torch.full_like(spread, 1e-9)


_MAKERS: dict[Callable[[Choices, int], Known], float] = {
    _simple("relu"): 5,
    _simple("identity"): 1,
    _simple("relu6", kinks=(6.0,), scale=6.0): 1,
    _simple("hardsigmoid", kinks=(-3.0, 3.0), scale=1.0): 1,
    _simple("hardswish", kinks=(-3.0, 3.0), steepest=1.5, scale=3.0): 1,
    _simple("selu", steepest=1.8, scale=1.8): 1,
    _simple("gelu", steepest=1.2): 1.5,
    _simple("sigmoid", scale=1.0, error=_nine_digits): 1,
    _simple("tanh", scale=1.0, error=_nine_digits): 1,
    _simple("silu", steepest=1.2, scale=1.0, error=_nine_digits): 1.5,
    _simple("mish", steepest=1.2, scale=1.0, error=_quadrature): 0.7,
    _leaky: 1.5,
    _prelu: 1,
    _hardtanh: 1,
    _elu: 1,
    _celu: 1,
    _softplus: 1,
    _gelu_tanh: 0.5,
    _own: 0.4,
}
