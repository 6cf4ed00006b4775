"""The fused convolution: when it serves, and how it is differentiated.

In eager mode the kernels are launched directly; in a compiled graph they appear as the operators
``misconv::expected_conv2d`` and ``misconv::expected_conv2d_backward``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv._backend import LARGEST_RANK, is_eager, warn_plain_path
from misconv._math import (
    ACTIVATIONS,
    Activation,
    Padding,
    Pair,
    activation_module,
    margins,
    output_size,
    pair,
)
from misconv._triton.convolve import backward, forward, is_channels_last
from misconv._triton.plan import Plan
from misconv._triton.replay import Replays
from misconv._triton.tiles import Settings, box_is_small

if TYPE_CHECKING:
    from misconv._conv import Affine, Convolution
    from misconv.mfa import MFA

__all__ = [
    "SETTINGS",
    "TENSORS",
    "PlainPath",
    "expected_conv2d",
    "find_plan",
    "kernel_of",
    "pack",
    "respond",
    "unpack",
]

PlainPath = Callable[..., Tensor]
_Shape = tuple[int, ...]


# Whether ---------------------------------------------------------------------------------------------------------


def respond(
    p: MFA, conv: Convolution, norm: Affine | None, activation: Activation, plain_path: PlainPath
) -> Tensor | None:
    """The expected activation (B, O, H', W') by fused kernels; None where they cannot serve, and a line in the log.

    Args:
        plain_path: (logits, means, factors, noise, observed, weight, bias) -> the same by the plain formulas, where
            weight and bias hold the normalization; for derivatives of derivatives.
    """
    plan = find_plan(p, conv, norm is not None, kernel_of(activation))
    if plan is None:
        return None
    weight, bias = conv.weight, conv.bias
    if norm is not None:
        weight, bias = _with_norm(weight, bias, norm)
    density = (p.logits, p.means, p.factors, p.noise)
    if torch.compiler.is_compiling():
        packed = pack(plan.settings)
        result: Tensor = torch.ops.misconv.expected_conv2d(*density, p.observed, weight, bias, *packed)
        return result
    return expected_conv2d(plan, plain_path, *density, p.observed, weight, bias)


def find_plan(p: MFA, conv: Convolution, has_norm: bool, function: tuple[str, float, float] | None) -> Plan | None:
    """The plan for what is to be computed; None where the kernels cannot serve, and a line in the log."""
    weight, bias = conv.weight, conv.bias
    stride, padding, dilation, groups, padding_mode = conv.geometry
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        return None  # the plain path says what is wrong
    compiling = torch.compiler.is_compiling()
    if compiling and torch.compiler.is_exporting():
        return None  # an exported network shall need nothing but the operators of torch
    parts = (p.means, weight) if bias is None else (p.means, weight, bias)
    if not compiling and not is_eager(*parts):
        return None
    means, observed = p.means, p.observed
    dtype, device = means.dtype, means.device
    if p.factors.dtype != dtype or p.noise.dtype != dtype or p.logits.dtype != dtype:
        return None  # an MFA that nobody has checked, and a kernel would take every number for another
    # All that decides what is launched. This runs before every layer, and small layers are over in no time.
    plan = (_plan.__wrapped__ if compiling else _plan)(
        means.shape,
        p.factors.shape,
        None if observed is None else observed.shape,
        dtype,
        device,
        weight.shape,
        weight.dtype,
        weight.device,
        has_norm,
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        tuple(stride) if isinstance(stride, list) else stride,
        tuple(padding) if isinstance(padding, list) else padding,
        tuple(dilation) if isinstance(dilation, list) else dilation,
        groups,
        padding_mode,
        function,
        *_precision(weight.dtype),
    )
    if not isinstance(plan, Plan):
        if plan is not None and not compiling:  # logging cannot be traced
            warn_plain_path(plan)
        return None
    density = (p.logits, p.means, p.factors, p.noise)
    if torch.are_deterministic_algorithms_enabled() and any(t.requires_grad for t in density):
        if not compiling:
            warn_plain_path("deterministic algorithms are asked for, and it adds up gradients of pixels in any order")
        return None
    return plan


def _with_norm(weight: Tensor, bias: Tensor | None, norm: Affine) -> tuple[Tensor, Tensor]:
    """An affine map of the response is one of weights and bias; in float32, which the kernels take beside any type."""
    slope, offset = (t.float() for t in norm.coefficients())
    folded = weight.float() * slope.view(-1, 1, 1, 1)
    return folded, offset.expand(weight.shape[0]) if bias is None else bias.float() * slope + offset


@lru_cache(4096)
def _plan(
    means: _Shape,
    factors: _Shape,
    observed: _Shape | None,
    dtype: torch.dtype,
    device: torch.device,
    weight: _Shape,
    weight_dtype: torch.dtype,
    weight_device: torch.device,
    has_norm: bool,
    bias: tuple[_Shape, torch.dtype, torch.device] | None,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    padding_mode: str,
    function: tuple[str, float, float] | None,
    precision: str,
    result: torch.dtype,
) -> Plan | str | None:
    """The plan; the reason why a fused kernel cannot serve; or None where an argument is wrong.

    What is wrong with an argument is for the plain path to say.
    """
    fits = len(means) == 5 and len(weight) == 4 and 0 not in weight and type(groups) is int and groups > 0
    fits = fits and weight_dtype.is_floating_point and (bias is None or bias[1].is_floating_point)
    fits = fits and weight[1] * groups == means[2] and weight[0] % groups == 0
    fits = fits and device == weight_device and (bias is None or (bias[0] == weight[:1] and bias[2] == device))
    if not fits or (isinstance(padding, str) and padding not in ("same", "valid")):
        return None
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or weight_dtype == torch.float64:
        return f"the images are {dtype}, and the fused kernel knows float32, bfloat16 and float16"
    autocast = result != weight_dtype
    if not autocast and (dtype != weight_dtype or (bias is not None and bias[1] != dtype)):
        return None
    if padding_mode != "zeros":
        return f"padding_mode is {padding_mode!r}, and the fused kernel knows 'zeros'"
    if factors[2] > LARGEST_RANK:
        return f"the density has rank {factors[2]}, and the fused kernel goes up to {LARGEST_RANK}"
    if function is None:
        return "the fused kernel knows the activations " + ", ".join(sorted(kind.__name__ for kind in _KERNELS))
    if max(factors[1] * max(factors[2], 1), 1) * means[2] * means[3] * means[4] >= 2**31:
        return "a single image has more than two billion parameters"
    if torch.version.hip is not None or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)):
        return "the fused kernel was written for NVIDIA GPUs from compute capability 8.0 on"
    size = output_size(means[3:], weight[2:], stride, padding, dilation)
    if min(size) < 1:
        return None
    if weight[0] * size[0] * size[1] >= 2**31:
        return "a single response has more than two billion values"
    left, _, top, _ = margins(weight[2:], padding, dilation)
    settings = Settings(pair(stride), (top, left), pair(dilation), size, groups, *function, precision, result)
    if not box_is_small(weight[2:], settings):
        return f"windows of {weight[2]}×{weight[3]} pixels with these strides and dilations are too large"
    planes = None if observed is None else observed[1]
    return Plan(settings, means, factors[2], planes, weight, has_norm or bias is not None, device)


# Activations that the kernels know, with up to two numbers.
_KERNELS: dict[type[nn.Module], Callable[[Any], tuple[str, float, float] | None]] = {
    nn.Identity: lambda a: ("identity", 0.0, 0.0),
    nn.ReLU: lambda a: ("relu", 0.0, 0.0),
    nn.LeakyReLU: lambda a: ("leaky_relu", float(a.negative_slope), 0.0),
    nn.ReLU6: lambda a: ("hardtanh", 0.0, 6.0),
    nn.Hardtanh: lambda a: ("hardtanh", float(a.min_val), float(a.max_val)),
    nn.GELU: lambda a: ("gelu", 0.0, 0.0) if a.approximate == "none" else None,
    nn.SiLU: lambda a: ("silu", 0.0, 0.0),
}


def kernel_of(activation: Activation) -> tuple[str, float, float] | None:
    """What the kernels call an activation, and its numbers; None for one that they do not know."""
    return _kernel_of_name(activation) if type(activation) is str else _kernel_of(activation)


def _kernel_of(activation: Activation) -> tuple[str, float, float] | None:
    function = activation if isinstance(activation, nn.Module) else activation_module(activation)
    known = _KERNELS.get(type(function))  # type: ignore[arg-type]  # also of functions that are no modules
    return None if known is None else known(function)


@cache
def _kernel_of_name(name: str) -> tuple[str, float, float] | None:
    return _kernel_of(name) if name in ACTIVATIONS else None


def _precision(dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """The rounding of what products take, and the type of the result; TF32 holds every bit of float16."""
    if torch.is_autocast_enabled("cuda"):
        result = torch.get_autocast_dtype("cuda")
        return "bf16" if result == torch.bfloat16 else "tf32", result
    if dtype == torch.bfloat16:  # … but squares of weights may be too small for float16
        return "bf16", dtype
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set apart for convolutions and others, and only the newer interface can say so
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]  # made at run time
    # Where TF32 alone is not allowed, three products of it carry all bits of float32, at a fraction of the time of
    # float32 arithmetic: the error stays that of float32 sums.
    return "tf32" if allowed or dtype != torch.float32 else "tf32x3", dtype


# Differentiated, and in compiled graphs ----------------------------------------------------------------------------


def expected_conv2d(plan: Plan, plain_path: PlainPath, *tensors: Tensor | None) -> Tensor:
    """The fused convolution, differentiable, of logits, means, factors, noise, observed, weight and bias."""
    result: Tensor = _replays_of(plan)(plain_path, *tensors)
    return result


@lru_cache(4096)
def _replays_of(plan: Plan) -> Replays:
    return Replays(partial(_forward, plan), partial(_backward, plan), plan.device)


def _forward(plan: Plan, *tensors: Any) -> tuple[Tensor | None, ...]:
    response = forward(plan, *tensors)
    return response, response if plan.reads_response else None


def _backward(plan: Plan, needed: tuple[bool, ...], grads: Any, inputs: Any, kept: Any) -> tuple[Tensor | None, ...]:
    *density, weight, bias = backward(plan, (*needed[:4], *needed[5:]), grads[0], *inputs, response=kept[0])
    return (*density, None, weight, bias)


def pack(s: Settings) -> tuple[Any, ...]:
    """Settings as the arguments of an operator."""
    return [*s.stride, *s.corner, *s.dilation, *s.size], s.groups, s.activation, s.low, s.high, s.precision, s.dtype


def unpack(tensors: Any, numbers: list[int], *rest: Any) -> Plan:
    """The plan for the arguments of an operator."""
    a, b, c, d, e, f, g, h = numbers
    _, means, factors, _, observed, weight, bias = tensors
    planes = None if observed is None else observed.shape[1]
    settings = Settings((a, b), (c, d), (e, f), (g, h), *rest)
    types = (means.dtype, weight.dtype, None if bias is None else bias.dtype)
    return _cached_plan(
        types, settings, means.shape, factors.shape[2], planes, weight.shape, bias is not None, means.device
    )


@lru_cache(4096)
def _cached_plan(types: Any, *arguments: Any) -> Plan:
    """A plan for these types: kernels that stay ready read nothing else."""
    return Plan(*arguments)


TENSORS = "Tensor logits, Tensor means, Tensor factors, Tensor noise, Tensor? observed, Tensor weight, Tensor? bias"
SETTINGS = "SymInt[] numbers, int groups, str activation, float low, float high, str precision, ScalarType dtype"


@torch.library.custom_op("misconv::expected_conv2d", mutates_args=(), schema=f"({TENSORS}, {SETTINGS}) -> Tensor")
def _operator(*arguments: Any) -> Tensor:
    return forward(unpack(arguments[:7], *arguments[7:]), *arguments[:7])


@_operator.register_fake
def _(*arguments: Any) -> Tensor:
    means, weight, numbers, dtype = arguments[1], arguments[5], arguments[7], arguments[-1]
    shape = (means.shape[0], weight.shape[0], *numbers[6:])
    order = torch.channels_last if is_channels_last(weight) else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=means.device, memory_format=order)


@torch.library.custom_op(
    "misconv::expected_conv2d_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {TENSORS}, {SETTINGS}, bool[] needed) -> Tensor[]",
)
def _backward_operator(*arguments: Any) -> list[Tensor]:
    grad, *tensors = arguments[:8]
    found = backward(unpack(tensors, *arguments[8:-1]), tuple(arguments[-1]), grad, *tensors)
    return [t.clone() for t in found if t is not None]  # weight and bias share memory, which an operator must not


@_backward_operator.register_fake
def _(*arguments: Any) -> list[Tensor]:
    tensors = (*arguments[1:5], *arguments[6:8])
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t, asked in zip(tensors, arguments[-1], strict=True)
        if asked
    ]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needed = [*ctx.needs_input_grad[:4], *ctx.needs_input_grad[5:7]]
    found = iter(torch.ops.misconv.expected_conv2d_backward(grad, *ctx.saved_tensors, *ctx.settings, needed))
    *density, weight, bias = [next(found) if asked else None for asked in needed]
    return (*density, None, weight, bias, *(None for _ in ctx.settings))


_operator.register_autograd(_differentiate, setup_context=_keep)
