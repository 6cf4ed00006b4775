"""The fused convolution: when it serves, and how it is differentiated.

In eager mode the kernels are launched directly; in a compiled graph they appear as the operators
``misconv::expected_conv2d`` and ``misconv::expected_conv2d_backward``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv._expectations import Activation
from misconv._padding import Padding, Pair, margins, output_size, pair
from misconv._path import by_itself, fall_back, plain
from misconv._triton_launch import Plan, Settings, backward, box_is_small, forward, is_channels_last
from misconv.mfa import MFA

if TYPE_CHECKING:
    from misconv._batch_norm import Affine

__all__ = ["expected_conv2d", "respond"]

_LARGEST_RANK = 16
_Shape = tuple[int, ...]


# Whether ---------------------------------------------------------------------------------------------------------


def respond(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    padding_mode: str,
    norm: Affine | None,
    activation: Activation,
) -> Tensor | None:
    """`functional.respond` by fused kernels; None where they cannot serve, and a word in the log."""
    compiling = torch.compiler.is_compiling()
    if compiling and torch.compiler.is_exporting():
        return None  # an exported network shall need nothing but the operators of torch
    parts = (p.means, weight) if bias is None else (p.means, weight, bias)
    if not all(isinstance(part, Tensor) for part in parts) or not (compiling or by_itself(*parts)):
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
        norm is not None,
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        tuple(stride) if isinstance(stride, list) else stride,
        tuple(padding) if isinstance(padding, list) else padding,
        tuple(dilation) if isinstance(dilation, list) else dilation,
        groups,
        padding_mode,
        _NAMED.get(activation) if type(activation) is str else _function(activation),
        *_precision(weight.dtype),
    )
    if not isinstance(plan, Plan):
        if plan is not None and not compiling:  # a word in the log cannot be traced
            fall_back(plan)
        return None
    if norm is not None:  # an affine map of the response is one of weights and bias
        slope, offset = norm.coefficients()
        weight = weight * slope.to(weight.dtype).view(-1, 1, 1, 1)
        offset = offset.to(weight.dtype)
        bias = offset.expand(weight.shape[0]) if bias is None else bias * slope.to(weight.dtype) + offset
    density = (p.logits, p.means, p.factors, p.noise)
    if torch.are_deterministic_algorithms_enabled() and any(t.requires_grad for t in density):
        if not compiling:
            fall_back("deterministic algorithms are asked for, and it adds up gradients of pixels in any order")
        return None
    if compiling:
        result: Tensor = torch.ops.misconv.expected_conv2d(*density, observed, weight, bias, *_packed(plan.settings))
        return result
    return expected_conv2d(plan, *density, observed, weight, bias)


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
    if factors[2] > _LARGEST_RANK:
        return f"the density has rank {factors[2]}, and the fused kernel goes up to {_LARGEST_RANK}"
    if function is None:
        return "the fused kernel knows the activations " + ", ".join(sorted(_NAMED))
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
_NAMED: dict[str, tuple[str, float, float]] = {
    "identity": ("identity", 0.0, 0.0),
    "relu": ("relu", 0.0, 0.0),
    "leaky_relu": ("leaky_relu", 0.01, 0.0),
    "relu6": ("hardtanh", 0.0, 6.0),
    "hardtanh": ("hardtanh", -1.0, 1.0),
    "gelu": ("gelu", 0.0, 0.0),
    "silu": ("silu", 0.0, 0.0),
}
_MODULES: dict[type[nn.Module], Callable[[Any], tuple[str, float, float] | None]] = {
    nn.Identity: lambda a: _NAMED["identity"],
    nn.ReLU: lambda a: _NAMED["relu"],
    nn.LeakyReLU: lambda a: ("leaky_relu", float(a.negative_slope), 0.0),
    nn.ReLU6: lambda a: _NAMED["relu6"],
    nn.Hardtanh: lambda a: ("hardtanh", float(a.min_val), float(a.max_val)),
    nn.GELU: lambda a: _NAMED["gelu"] if a.approximate == "none" else None,
    nn.SiLU: lambda a: _NAMED["silu"],
}
_FUNCTIONS = {torch.relu: "relu"} | {getattr(nn.functional, name): name for name in _NAMED if name != "identity"}


def _function(activation: Any) -> tuple[str, float, float] | None:
    known = _MODULES.get(type(activation))
    if known is not None:
        return known(activation)
    name = _FUNCTIONS.get(activation)
    return None if name is None else _NAMED[name]


def _precision(dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """The rounding of products, and the type of the result; TF32 holds every bit of the half precisions."""
    if torch.is_autocast_enabled("cuda"):
        return "tf32", torch.get_autocast_dtype("cuda")
    try:
        allowed = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # set apart for convolutions and others, and only the newer interface can say so
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]  # made at run time
    # Where TF32 alone is not allowed, three products of it carry all bits of float32, at a fraction of the time of
    # float32 arithmetic: the error stays that of float32 sums.
    return "tf32" if allowed or dtype != torch.float32 else "tf32x3", dtype


# Differentiated, and in compiled graphs ----------------------------------------------------------------------------


def expected_conv2d(
    plan: Plan,
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    observed: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The fused convolution, differentiable."""
    differentiable = torch.is_grad_enabled() and (
        weight.requires_grad
        or (bias is not None and bias.requires_grad)
        or means.requires_grad
        or factors.requires_grad
        or noise.requires_grad
        or logits.requires_grad
    )
    launch = _Expected.apply if differentiable else forward
    result: Tensor = launch(plan, logits, means, factors, noise, observed, weight, bias)
    return result


class _Expected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.plan, *tensors = arguments
        ctx.save_for_backward(*tensors)
        return forward(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = (*ctx.needs_input_grad[1:5], *ctx.needs_input_grad[6:8])
        # Derivatives of this derivative are left to the plain path.
        differentiate = _plain_backward if torch.is_grad_enabled() else backward
        *density, weight, bias = differentiate(ctx.plan, needed, grad, *ctx.saved_tensors)
        return (None, *density, None, weight, bias)


def _plain_backward(
    plan: Plan,
    needed: tuple[bool, ...],
    grad: Tensor,
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    observed: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> list[Tensor | None]:
    """The same gradients by torch's own differentiation, which can be differentiated again."""
    s = plan.settings
    from misconv.functional import expected_conv2d as formula
    from misconv.functional import padded

    activation: Activation = s.activation
    if s.activation == "leaky_relu":
        activation = nn.LeakyReLU(s.low)
    elif s.activation == "hardtanh":
        activation = nn.Hardtanh(s.low, s.high)
    below, right = (
        (n - 1) * step + d * (k - 1) + 1 - size - before
        for n, step, d, k, size, before in zip(
            s.size, s.stride, s.dilation, weight.shape[2:], means.shape[3:], s.corner, strict=True
        )
    )
    around = (s.corner[1], max(right, 0), s.corner[0], max(below, 0))
    tensors = (logits, means, factors, noise, weight, bias)
    wanted = [t for t, asked in zip(tensors, needed, strict=True) if asked and t is not None]
    with plain():
        p = MFA(logits, means, factors, noise, observed, check=False)
        y = formula(padded(p, around), weight, bias, s.stride, 0, s.dilation, s.groups, activation=activation)
        found = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), create_graph=True, allow_unused=True))
    return [next(found) if asked and t is not None else None for t, asked in zip(tensors, needed, strict=True)]


def _packed(s: Settings) -> tuple[Any, ...]:
    return [*s.stride, *s.corner, *s.dilation, *s.size], s.groups, s.activation, s.low, s.high, s.precision, s.dtype


def _unpacked(tensors: Any, numbers: list[int], *rest: Any) -> Plan:
    a, b, c, d, e, f, g, h = numbers
    _, means, factors, _, observed, weight, bias = tensors
    planes = None if observed is None else observed.shape[1]
    settings = Settings((a, b), (c, d), (e, f), (g, h), *rest)
    types = (means.dtype, weight.dtype, None if bias is None else bias.dtype)
    return _remembered(
        types, settings, means.shape, factors.shape[2], planes, weight.shape, bias is not None, means.device
    )


@lru_cache(4096)
def _remembered(types: Any, *arguments: Any) -> Plan:
    """A plan for these types: kernels that stay ready read nothing else."""
    return Plan(*arguments)


_TENSORS = "Tensor logits, Tensor means, Tensor factors, Tensor noise, Tensor? observed, Tensor weight, Tensor? bias"
_SETTINGS = "SymInt[] numbers, int groups, str activation, float low, float high, str precision, ScalarType dtype"


@torch.library.custom_op("misconv::expected_conv2d", mutates_args=(), schema=f"({_TENSORS}, {_SETTINGS}) -> Tensor")
def _operator(*arguments: Any) -> Tensor:
    return forward(_unpacked(arguments[:7], *arguments[7:]), *arguments[:7])


@_operator.register_fake
def _(*arguments: Any) -> Tensor:
    means, weight, numbers, dtype = arguments[1], arguments[5], arguments[7], arguments[-1]
    shape = (means.shape[0], weight.shape[0], *numbers[6:])
    order = torch.channels_last if is_channels_last(weight) else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=means.device, memory_format=order)


@torch.library.custom_op(
    "misconv::expected_conv2d_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_TENSORS}, {_SETTINGS}, bool[] needed) -> Tensor[]",
)
def _backward_operator(*arguments: Any) -> list[Tensor]:
    grad, *tensors = arguments[:8]
    found = backward(_unpacked(tensors, *arguments[8:-1]), tuple(arguments[-1]), grad, *tensors)
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
