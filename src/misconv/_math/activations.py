"""Activations: their names, the modules they stand for, and how they are applied to any number of dimensions.

`misconv._math.expectations` holds their expectations, `misconv._triton.expectations` those of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._checks import describe

__all__ = ["ACTIVATIONS", "Activation", "activation_module", "apply_activation", "per_channel"]

Activation = str | nn.Module | Callable[[Tensor], Tensor]

# Pointwise functions of torch by name, and the modules with the same arguments.
ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {
    "celu": nn.CELU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "identity": nn.Identity,
    "leaky_relu": nn.LeakyReLU,
    "logsigmoid": nn.LogSigmoid,
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
    "tanhshrink": nn.Tanhshrink,
}
# They work in place only where their flag says so; of other modules nobody knows.
_MODULES = (*(made for made in ACTIVATIONS.values() if isinstance(made, type)), nn.RReLU)

# The functions of torch with these names, in place or not, wherever torch keeps them.
_FUNCTIONS: dict[object, str] = {
    function: name
    for name in ACTIVATIONS
    for place in (F, torch, torch.special, Tensor)
    for function in (getattr(place, name, None), getattr(place, f"{name}_", None))
    if callable(function)
}


def activation_module(activation: Activation) -> nn.Module | Callable[[Tensor], Tensor]:
    """The torch module that a name or a function of torch stands for; modules and other callables as they are."""
    if isinstance(activation, nn.Module):
        return activation
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(sorted(ACTIVATIONS))}, got {describe(activation)}")
        return ACTIVATIONS[activation]()
    if not callable(activation):
        raise TypeError(f"activation must be a name, an nn.Module or a function, got {describe(activation)}")
    name = _FUNCTIONS.get(activation)
    return activation if name is None or name == "prelu" else ACTIVATIONS[name]()


def apply_activation(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f(x) for a function that may work in place, expects (B, O, H, W), or is not pointwise after all."""
    if type(function) is nn.PReLU:
        return _prelu(x, per_channel(function.weight))  # torch would take the components for channels
    if type(function) not in _MODULES or getattr(function, "inplace", False):
        x = x.clone()
    flat = x.flatten(0, -4) if x.dim() > 4 else x  # (B·K, O, H, W)
    result = function(flat)
    if not isinstance(result, Tensor) or result.shape != flat.shape:
        raise ValueError(
            "activation must be a pointwise function that keeps the shape, but it turned "
            f"{tuple(flat.shape)} into {describe(result)}"
        )
    return result.view(x.shape)


def per_channel(weight: Tensor) -> Tensor:
    """The slope of PReLU, one or one per channel, against (…, O, H, W)."""
    return weight.view(-1, 1, 1) if weight.numel() > 1 else weight


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, slope * x)
