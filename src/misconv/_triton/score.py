"""The probability of pixels under an MFA by fused kernels: planned, launched, differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from misconv._triton.launch import Launch, dense, power
from misconv._triton.mfa import condition_kernel, distance_kernel, gradient_kernel, gram_kernel, mixture_kernel

__all__ = ["condition", "log_prob"]

_PROGRAMS = 1056  # eight for each multiprocessor of the largest GPUs: these are busy, and solving anew is still cheap
_NUMBERS = 4096  # how many loadings a program holds at a time
_Shape = tuple[int, ...]


class _Plan:
    """How the work is divided; P, Q and R are powers of two that hold the factors, chunks and components."""

    def __init__(
        self,
        shape: _Shape,
        dtype: torch.dtype,
        device: torch.device,
        where: _Shape | None,
        observed: _Shape | None,
        floor: float,
    ) -> None:
        self.batch, self.components, self.rank, channels, height, width = shape
        self.device, self.floor = device, floor
        self.P, parts, self.size = power(self.rank), self.batch * self.components, channels * height * width
        self.block = min(_NUMBERS // self.P, 1024)
        blocks = -(-self.size // self.block)
        # Not more chunks than a program can add at once.
        chunks = min(blocks, -(-_PROGRAMS // parts), _NUMBERS // self.P**2, 32)
        self.steps = -(-blocks // chunks)
        self.chunks = -(-blocks // self.steps)
        # Components, pixels, and how many pixels the masks have (one without a mask).
        masks = (1 if mask is None else mask[1] * height * width for mask in (where, observed))
        self.sizes = (self.components, self.size, *masks)
        self.type = tl.float64 if dtype == torch.float64 else tl.float32
        self.sums = (self.batch, self.components, self.chunks, self.P**2 + self.P + 2)
        self.summary = summary_shape(shape)
        self._gradients: dict[tuple[Any, ...], Launch] = {}

    @cached_property
    def gram(self) -> Launch:
        grid = (self.batch * self.components, self.chunks, 1)
        return Launch(gram_kernel, self.device, grid, (*self._common, self.block))

    @cached_property
    def distance(self) -> Launch:
        grid = (self.batch * self.components, self.chunks, 1)
        return Launch(distance_kernel, self.device, grid, (*self._common, power(self.chunks), self.block))

    @cached_property
    def mixture(self) -> dict[bool, Launch]:
        """For the log density, and for the logits afterwards."""
        more = (self.type, power(self.components), self.P, power(self.chunks))
        arguments = (self.components, self.chunks, *more)
        return {kind: Launch(mixture_kernel, self.device, (self.batch, 1, 1), arguments) for kind in (False, True)}

    @cached_property
    def condition(self) -> Launch:
        block = self._small_block
        grid = (self.batch * self.components, -(-self.size // block), 1)
        return Launch(condition_kernel, self.device, grid, (*self.sizes, self.type, self.rank, self.P, block))

    def gradient(self, stride: int, needed: tuple[bool, ...]) -> Launch:
        """For an upstream gradient with this stride, of what is needed."""
        found = self._gradients.get((stride, needed))
        if found is None:
            block = self._small_block
            arguments = (stride, *self.sizes, self.floor, self.type, self.rank, self.P, block)
            found = Launch(gradient_kernel, self.device, (self.batch, -(-self.size // block), 1), arguments)
            self._gradients[stride, needed] = found
        return found

    @property
    def _common(self) -> tuple[Any, ...]:
        return (*self.sizes, self.chunks, self.steps, self.floor, self.type, self.rank, self.P)

    @property
    def _small_block(self) -> int:
        return _NUMBERS // max(self.P, 4) // 2


_plan = lru_cache(1024)(_Plan)


def _plan_of(tensors: Sequence[Any], floor: float) -> _Plan:
    _, _, factors, _, _, where, observed = tensors
    where, observed = None if where is None else where.shape, None if observed is None else observed.shape
    return _plan(factors.shape, factors.dtype, factors.device, where, observed, floor)


def summary_shape(factors: _Shape) -> _Shape:
    """What the kernels remember of each component, for factors of this shape."""
    P = power(factors[2])
    return (*factors[:2], 4 + P + 2 * P * P)


def _score(tensors: Sequence[Any], floor: float, conditional: bool = False) -> tuple[Tensor, Tensor]:
    """The log densities (B,) or, if conditional, the logits afterwards (B, K); and the summary of the components."""
    logits, *pixels = tensors
    plan = _plan_of(tensors, floor)
    sums = torch.empty(plan.sums, dtype=torch.float64, device=plan.device)
    summary = torch.empty(plan.summary, dtype=torch.float64, device=plan.device)
    out = torch.empty(logits.shape if conditional else logits.shape[:1], dtype=logits.dtype, device=plan.device)
    plan.gram(*pixels, sums)
    plan.distance(*pixels, sums, summary)
    plan.mixture[conditional](logits, sums, summary, *((None, out) if conditional else (out, None)))
    return out, summary


def _gradients(
    upstream: Tensor, tensors: Sequence[Any], summary: Tensor, floor: float, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients of logits, means, factors, noise and x; None where none is needed."""
    made = [torch.empty_like(t) if need else None for t, need in zip(tensors, needed, strict=False)]
    launch = _plan_of(tensors, floor).gradient(upstream.stride(0), needed)
    launch(upstream, *tensors[1:], summary, *made)
    return made


# What others call -------------------------------------------------------------------------------------------------


class _LogProb(torch.autograd.Function):
    """The fused log density; second derivatives go through the plain formulas."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, ctx.floor, ctx.plain = arguments
        out, summary = _score(tensors, ctx.floor)
        ctx.save_for_backward(*tensors, summary)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, summary = ctx.saved_tensors
        needed = ctx.needs_input_grad[:5]
        if not torch.is_grad_enabled():
            made = _gradients(upstream[0], tensors, summary, ctx.floor, needed)
            return (*made, None, None, None, None)
        wanted = [t for t, need in zip(tensors, needed, strict=False) if need]
        found = iter(torch.autograd.grad(ctx.plain(*tensors), wanted, upstream[0], create_graph=True))
        return (*(next(found) if need else None for need in needed), None, None, None, None)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, floor = arguments
    return _score(dense(*tensors), floor)


def _forward_shapes(logits: Tensor, means: Tensor, factors: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[0]), factors.new_empty(summary_shape(factors.shape), dtype=torch.float64)


def _backward(upstream: Tensor, *arguments: Any) -> list[Tensor]:
    *tensors, summary, floor, needed = arguments
    return [t for t in _gradients(upstream, dense(*tensors), summary, floor, tuple(needed)) if t is not None]


def _backward_shapes(upstream: Tensor, *arguments: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(arguments, arguments[-1], strict=False) if need]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.floor = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:5]
    found = iter(_operator_gradients(upstream, *ctx.saved_tensors, ctx.floor, needed))
    return (*(next(found) if need else None for need in needed), None, None, None)


# What torch.compile writes into its graphs instead of the launches.
_TENSORS = "Tensor logits, Tensor means, Tensor factors, Tensor noise, Tensor x, Tensor? where, Tensor? observed"
_operator: Any = torch.library.custom_op(
    "misconv::mfa_log_prob", _forward, mutates_args=(), schema=f"({_TENSORS}, float floor) -> (Tensor, Tensor)"
)
_operator_gradients: Any = torch.library.custom_op(
    "misconv::mfa_log_prob_gradients",
    _backward,
    mutates_args=(),
    schema=f"(Tensor upstream, {_TENSORS}, Tensor summary, float floor, bool[] needed) -> Tensor[]",
)
_operator.register_fake(_forward_shapes)
_operator.register_autograd(_differentiate, setup_context=_keep)
_operator_gradients.register_fake(_backward_shapes)


def log_prob(*tensors: Tensor | None, floor: float, plain: Callable[..., Tensor]) -> Tensor:
    """The log density (B,) of the pixels in `where`.

    Args:
        tensors: logits, means, factors, noise, x, where, observed; the last two may be None.
        floor: the least noise, as a share of the factors' variance; a power of two.
        plain: computes the same from the same tensors, for second derivatives.
    """
    if torch.compiler.is_compiling():
        return cast(Tensor, _operator(*tensors, floor)[0])
    inputs = dense(*tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return cast(Tensor, _LogProb.apply(*inputs, floor, plain))
    return _score(inputs, floor)[0]


def condition(*tensors: Tensor | None, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, means and factors given the pixels in `where`, without gradients; arguments as for `log_prob`."""
    inputs = dense(*tensors)
    logits, summary = _score(inputs, floor, conditional=True)
    _, means, factors, _, x, where, observed = inputs
    new_means, new_factors = torch.empty_like(means), torch.empty_like(factors)
    _plan_of(inputs, floor).condition(means, factors, x, where, observed, summary, new_means, new_factors)
    return logits, new_means, new_factors
