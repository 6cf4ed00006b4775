"""Convolution, batch normalization and activation by fused kernels: planned, launched, in training differentiated.

Where the moments of windows say what the statistics of a batch are (`moments`), five launches make the response and two
its gradients (six and four, where windows are large, and two more for each further portion of the images). A small
network is bound by the host, for which every launch counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from misconv._backend import is_ordinary
from misconv._math import Activation
from misconv._triton.convolve import backward_parameters, is_channels_last, respond
from misconv._triton.fold import fold_fixed_kernel, fold_kernel, unfold_kernel
from misconv._triton.launch import Launch, dense, power
from misconv._triton.moments import NUMBERS, WindowMoments, Windows, window_moments, windows_of
from misconv._triton.operator import find_plan, kernel_of
from misconv._triton.plan import Layout, Plan
from misconv._triton.replay import Replays

if TYPE_CHECKING:
    from misconv._conv import BatchNorm, Convolution, Statistics
    from misconv.mfa import MFA

__all__ = ["fixed_response", "normalized_response"]

PlainPath = Callable[..., Tensor]


# How the work is divided -------------------------------------------------------------------------------------------


class _Folding:
    """Launches that fold a normalization into filters and back, for tensors of certain types and strides."""

    def __init__(self, plan: Plan, windows: Windows) -> None:
        self.plan, self.windows = plan, windows
        self.out, channels, *kernel = plan.weight
        self.shape = (channels, *kernel, windows.wide)
        self.block = power(windows.taps)
        self._fold: dict[Any, Launch] = {}
        self._unfold: dict[Any, Launch] = {}

    def fold(
        self, weight: Tensor, bias: Tensor | None, norm: Sequence[Tensor | None], momentum: float | None, eps: float
    ) -> Launch:
        """`norm`: γ, β, the running mean and variance, and the number of batches that were tracked."""
        key = (weight.stride(), tuple([None if t is None else t.dtype for t in (bias, *norm)]), momentum, eps)
        found = self._fold.get(key)
        if found is None:
            if len(self._fold) > 64:  # somebody changes the momentum in every step
                self._fold.clear()
            cumulative = momentum is None and norm[4] is not None
            numbers = (*weight.stride(), self.windows.count, momentum or 0.0, eps)
            constants = (*self.shape, self.windows.side, cumulative, self.block, NUMBERS // self.block)
            found = Launch(fold_kernel, self.plan.device, (self.out, 1, 1), (*numbers, *constants))
            self._fold[key] = found
        return found

    def unfold(self, programs: int, layout: Layout, weight: Tensor, scale: Tensor | None, made: Any) -> Launch:
        """For that number of rows in that layout; `made` are the gradients of weight, bias, γ and β, or None."""
        strides = weight.stride() if made[0] is None else made[0].stride()
        types = tuple([None if t is None else t.dtype for t in (scale, *made)])
        key = (programs, layout, weight.stride(), strides, types)
        found = self._unfold.get(key)
        if found is None:
            numbers = (*weight.stride(), *strides, programs)
            constants = (*self.shape, *layout, self.block, NUMBERS // self.block)
            found = Launch(unfold_kernel, self.plan.device, (self.out, 1, 1), (*numbers, *constants))
            self._unfold[key] = found
        return found


@lru_cache(1024)
def _folding_of(plan: Plan) -> _Folding:
    return _Folding(plan, windows_of(plan))


# Launched ----------------------------------------------------------------------------------------------------------


def normalized_response(
    p: MFA, conv: Convolution, norm: BatchNorm, activation: Activation, plain_path: PlainPath
) -> Tensor | None:
    """The expected activation (B, O, H', W') behind a batch normalization in training, whose statistics are updated.

    Args:
        plain_path: (logits, means, factors, noise, observed, weight, bias, γ, β) -> the same by the plain formulas, for
            derivatives of derivatives.

    Returns:
        None where these kernels cannot serve.
    """
    if torch.compiler.is_compiling():
        return None
    plan = find_plan(p, conv, True, kernel_of(activation))
    if plan is None or plan.window_moments is None or not _is_ready(norm, plan):
        return None
    density = (p.logits, p.means, p.factors, p.noise)
    if torch.is_grad_enabled() and any(t.requires_grad for t in density):
        return None
    if plan.shape[0] * plan.shape[2] * plan.shape[3] <= 1:
        return None  # the plain path says what is wrong
    inputs = (*density, p.observed, conv.weight, conv.bias, *norm[:5])
    result: Tensor = _replays_of(plan, norm.momentum, norm.eps)(lambda *tensors: plain_path(*tensors[:9]), *inputs)
    return result


@lru_cache(1024)
def _replays_of(plan: Plan, momentum: float | None, eps: float) -> Replays:
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        response, moments, folded, kept = _forward(plan, momentum, eps, *inputs)
        return response, response if plan.reads_response else None, moments.taps, folded, kept

    def backward(needed: tuple[bool, ...], grads: Any, inputs: Any, kept: Any) -> tuple[Tensor | None, ...]:
        return (*[None] * 5, *_backward(plan, needed[5:9], grads[0], inputs[:9], *kept), *[None] * 3)

    return Replays(forward, backward, plan.device, mutated=(9, 10, 11))


def _is_ready(norm: BatchNorm, plan: Plan) -> bool:
    """Whether the vectors of a normalization are what a kernel may read."""
    tracked = norm.batches_tracked
    return _are_vectors(norm[:4], plan) and (tracked is None or tracked.device == plan.device)


def _are_vectors(vectors: Sequence[Tensor | None], plan: Plan) -> bool:
    """Whether these have a number for each channel, where and as a kernel reads it."""
    shape, device = plan.weight[:1], plan.device
    for t in vectors:  # before every layer: a generator would take as long again
        if t is not None and (t.shape != shape or t.device != device or not t.is_contiguous()):
            return False
    return _are_ordinary(vectors)


def _are_ordinary(vectors: Sequence[Tensor | None]) -> bool:
    """Whether these have memory that a kernel may read."""
    return is_ordinary(*[t for t in vectors if t is not None])


def _forward(
    plan: Plan,
    momentum: float | None,
    eps: float,
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    observed: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *norm: Tensor | None,
) -> tuple[Tensor, WindowMoments, Tensor, Tensor]:
    """The response; and for the gradients the moments of windows, the folded filters, and what else was kept."""
    logits, means, factors, noise, observed = dense(logits, means, factors, noise, observed)
    moments = window_moments(plan, logits, means, factors, noise, observed, norm[4])
    folding = _folding_of(plan)
    out, taps = folding.out, folding.windows.taps
    # One buffer, whose parts begin at multiples of 16 bytes.
    sizes = [-(-number // 4) * 4 for number in (out * taps, out, out * (taps + 2))]
    folded, kept = torch.empty(sum(sizes), dtype=torch.float32, device=plan.device).split_with_sizes(
        (sizes[0] + sizes[1], sizes[2])
    )
    offsets = folded[sizes[0] :]
    launch = folding.fold(weight, bias, norm, momentum, eps)
    launch(weight, bias, *norm, moments.matrix, moments.taps, moments.center, folded, offsets, kept)
    tracked = [t for t in norm[2:] if t is not None]
    if tracked:
        torch.autograd.graph.increment_version(tracked)  # who has saved them for a backward pass must know
    density = (logits, means, factors, noise)
    response = respond(plan, density, observed, folded, offsets, is_channels_last(weight))
    return response, moments, folded, kept


def fixed_response(p: MFA, conv: Convolution, norm: Statistics, activation: Activation) -> Tensor | None:
    """The expected activation (B, O, H', W') behind a batch normalization in evaluation, in two launches.

    None where these kernels cannot serve: for gradients, torch's own functions fold the normalization.
    """
    if torch.compiler.is_compiling():
        return None
    vectors = norm[:4]
    inputs = (p.logits, p.means, p.factors, p.noise, p.observed, conv.weight, conv.bias, *vectors)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return None
    plan = find_plan(p, conv, True, kernel_of(activation))
    if plan is None:
        return None
    replays = _fixed_replays_of(plan, norm.eps)
    # What is replayed was recorded for vectors of this size, type and place, which are not looked at again.
    result = replays.replayed(_no_gradients, inputs) if _are_ordinary(vectors) else None
    if result is None and _are_vectors(vectors, plan):
        result = replays(_no_gradients, *inputs)
    made: Tensor | None = result
    return made


@lru_cache(1024)
def _fixed_replays_of(plan: Plan, eps: float) -> Replays:
    return Replays(lambda *inputs: (_fixed_forward(plan, eps, *inputs),), _no_gradients, plan.device)


def _no_gradients(*_: Any) -> Any:
    """Never asked for: `fixed_response` declines where something requires a gradient."""
    raise NotImplementedError("these kernels have no gradients")


def _fixed_forward(plan: Plan, eps: float, *inputs: Any) -> Tensor:
    """The response to filters that hold fixed statistics: mean, variance, γ and β, behind weight and bias."""
    logits, means, factors, noise, observed, weight, bias, *norm = inputs
    out, taps = plan.weight[0], plan.weight[1] * plan.weight[2] * plan.kernel(plan.paired)[1]
    start = -(-out * taps // 4) * 4  # a multiple of 16 bytes
    folded = torch.empty(start + out, dtype=torch.float32, device=plan.device)
    offsets = folded[start:]
    types = tuple([None if t is None else t.dtype for t in (bias, *norm)])
    launch = _fold_fixed(plan, weight.stride(), types, eps)
    launch(weight, bias, *norm, folded, offsets)
    density = (logits, means, factors, noise)
    return respond(plan, density, observed, folded, offsets, is_channels_last(weight))


@lru_cache(4096)
def _fold_fixed(plan: Plan, strides: tuple[int, ...], types: tuple[Any, ...], eps: float) -> Launch:
    """The launch for tensors of these strides and types."""
    out, channels, *kernel = plan.weight
    wide = plan.kernel(plan.paired)[1]
    block = min(power(channels * kernel[0] * wide), 1024)
    arguments = (*strides, eps, channels, *kernel, wide, block)
    return Launch(fold_fixed_kernel, plan.device, (out, 1, 1), arguments)


def _backward(
    plan: Plan,
    needed: tuple[bool, ...],
    grad: Tensor,
    tensors: Sequence[Any],
    response: Tensor | None,
    taps: Tensor,
    folded: Tensor,
    kept: Tensor,
) -> list[Tensor | None]:
    """Gradients of weight, bias, γ and β, as far as they are needed."""
    *density, observed, weight, _, scale, _ = tensors
    folding = _folding_of(plan)
    offsets = folded[-(-folding.out * folding.windows.taps // 4) * 4 :]
    parameters, programs, layout = backward_parameters(plan, grad, density, observed, folded, offsets, response)
    made = [torch.empty_like(t) if need else None for t, need in zip(tensors[5:], needed, strict=True)]
    launch = folding.unfold(programs, layout, weight, scale, made)
    launch(parameters, weight, scale, taps, kept, *made)
    return made
