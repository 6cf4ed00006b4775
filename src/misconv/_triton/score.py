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
from misconv._triton.replay import Replays

__all__ = ["condition", "log_prob", "log_probs"]

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
        self.sums = (self.batch, self.components, self.chunks, self.P**2 + self.P + 4)
        self.summary = summary_shape(shape)
        self._gradients: dict[tuple[Any, ...], Launch] = {}

    @cached_property
    def gram(self) -> Launch:
        grid = (self.batch * self.components, self.chunks, 1)
        return Launch(gram_kernel, self.device, grid, (*self._common, self.block))

    @cached_property
    def distance(self) -> dict[bool, Launch]:
        """Without pixels by themselves, and with them."""
        grid = (self.batch * self.components, self.chunks, 1)
        arguments = (*self._common, power(self.chunks), self.block, power(self.components))
        return {kind: Launch(distance_kernel, self.device, grid, (*arguments, kind)) for kind in (False, True)}

    @cached_property
    def mixture(self) -> dict[str, Launch]:
        """For the log density, for that of pixels by themselves too, and for the logits afterwards."""
        more = (self.type, power(self.components), self.P, power(self.chunks))
        arguments, kinds = (self.components, self.chunks, *more), ("joint", "both", "conditional")
        return {kind: Launch(mixture_kernel, self.device, (self.batch, 1, 1), arguments) for kind in kinds}

    @cached_property
    def condition(self) -> Launch:
        block = self._small_block
        grid = (self.batch * self.components, -(-self.size // block), 1)
        return Launch(condition_kernel, self.device, grid, (*self.sizes, self.type, self.rank, self.P, block))

    def gradient(self, strides: tuple[int | None, ...], needed: tuple[bool, ...]) -> Launch:
        """For upstream gradients with these strides, of what is needed; None where there is no such gradient."""
        found = self._gradients.get((strides, needed))
        if found is None:
            block = self._small_block
            steps = [stride or 0 for stride in strides]
            arguments = (*steps, *self.sizes, self.floor, self.type, self.rank, self.P, block, power(self.components))
            found = Launch(gradient_kernel, self.device, (self.batch, -(-self.size // block), 1), arguments)
            self._gradients[strides, needed] = found
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


def _score(tensors: Sequence[Any], floor: float, kind: str) -> tuple[list[Tensor], Tensor]:
    """The log densities (B,), one or two, or the logits afterwards (B, K); and the summary of the components.

    Args:
        kind: "joint"; "both", with that of pixels by themselves; "conditional", for the logits.
    """
    logits, *pixels = tensors
    plan, both = _plan_of(tensors, floor), kind == "both"
    sums = torch.empty(plan.sums, dtype=torch.float64, device=plan.device)
    summary = torch.empty(plan.summary, dtype=torch.float64, device=plan.device)
    shape = logits.shape if kind == "conditional" else logits.shape[:1]
    made = [torch.empty(shape, dtype=logits.dtype, device=plan.device) for _ in range(2 if both else 1)]
    plan.gram(*pixels, sums)
    plan.distance[both](logits, *pixels, sums, summary)
    places = (None, None, *made) if kind == "conditional" else (*made, None, None)
    plan.mixture[kind](logits, sums, summary, *places[:3])
    return made, summary


def _gradients(
    upstream: Sequence[Tensor | None],
    tensors: Sequence[Any],
    summary: Tensor,
    floor: float,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of logits, means, factors, noise and x; None where none is needed.

    Args:
        upstream: of the log density, and of that of pixels by themselves.
    """
    made = [torch.empty_like(t) if need else None for t, need in zip(tensors, needed, strict=False)]
    strides = tuple([None if t is None else t.stride(0) for t in upstream])
    _plan_of(tensors, floor).gradient(strides, needed)(*upstream, *tensors, summary, *made)
    return made


# What others call -------------------------------------------------------------------------------------------------


@lru_cache(1024)
def _replays_of(plan: _Plan, kind: str) -> Replays:
    """For one or both of the fused log densities."""

    def forward(*tensors: Any) -> list[Tensor]:
        made, summary = _score(tensors, plan.floor, kind)
        return [*made, summary]

    def backward(needed: tuple[bool, ...], grads: Any, inputs: Any, kept: Any) -> list[Tensor | None]:
        return [*_gradients((*grads, None)[:2], inputs, kept[0], plan.floor, needed[:5]), None, None]

    return Replays(forward, backward, plan.device, results=2 if kind == "both" else 1)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    *tensors, floor, both = arguments
    made, summary = _score(dense(*tensors), floor, "both" if both else "joint")
    return torch.stack(made) if both else made[0], summary


def _forward_shapes(logits: Tensor, means: Tensor, factors: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch = logits.shape[0]
    out = logits.new_empty((2, batch) if rest[-1] else (batch,))
    return out, factors.new_empty(summary_shape(factors.shape), dtype=torch.float64)


def _backward(upstream: Tensor, *arguments: Any) -> list[Tensor]:
    *tensors, summary, floor, needed = arguments
    rows = tuple(upstream) if upstream.dim() == 2 else (upstream, None)
    return [t for t in _gradients(rows, dense(*tensors), summary, floor, tuple(needed)) if t is not None]


def _backward_shapes(upstream: Tensor, *arguments: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(arguments, arguments[-1], strict=False) if need]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.floor, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:5]
    found = iter(_operator_gradients(upstream, *ctx.saved_tensors, ctx.floor, needed))
    return (*(next(found) if need else None for need in needed), None, None, None, None)


# What torch.compile writes into its graphs instead of the launches.
_TENSORS = "Tensor logits, Tensor means, Tensor factors, Tensor noise, Tensor x, Tensor? where, Tensor? observed"
_operator: Any = torch.library.custom_op(
    "misconv::mfa_log_prob",
    _forward,
    mutates_args=(),
    schema=f"({_TENSORS}, float floor, bool both) -> (Tensor, Tensor)",
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
    return cast(Tensor, _log_prob(tensors, floor, (plain,)))


def log_probs(
    *tensors: Tensor | None, floor: float, plain: tuple[Callable[..., Tensor], Callable[..., Tensor]]
) -> tuple[Tensor, Tensor]:
    """The log density (B,) of the pixels in `where`, and the sum (B,) of those of each by itself, in one pass.

    Arguments are those of `log_prob`; `plain` computes the one and the other.
    """
    joint, marginal = _log_prob(tensors, floor, plain)
    return joint, marginal


def _log_prob(tensors: Sequence[Tensor | None], floor: float, plain: tuple[Callable[..., Tensor], ...]) -> Any:
    """One log density, or two."""
    both = len(plain) > 1
    if torch.compiler.is_compiling():
        out = _operator(*tensors, floor, both)[0]
        return tuple(out) if both else out
    inputs = dense(*tensors)
    replays = _replays_of(_plan_of(inputs, floor), "both" if both else "joint")
    return replays(lambda *given: tuple([function(*given) for function in plain]), *inputs)


def condition(*tensors: Tensor | None, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, means and factors given the pixels in `where`, without gradients; arguments as for `log_prob`."""
    inputs = dense(*tensors)
    (logits,), summary = _score(inputs, floor, "conditional")
    _, means, factors, _, x, where, observed = inputs
    new_means, new_factors = torch.empty_like(means), torch.empty_like(factors)
    _plan_of(inputs, floor).condition(means, factors, x, where, observed, summary, new_means, new_factors)
    return logits, new_means, new_factors
