"""Mean and variance of all responses of a batch, for batch normalization in training, without writing any of them.

The mean of the responses is the response to the mean of all windows, which is small. The variance is a quadratic form
in the filters, whose matrix is computed once (`windows`) where windows are small and the density needs no gradient.
Elsewhere it is the mean of E[(z − mean)²], with z² for an activation of the fused kernels; its gradients are theirs.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._triton.convolve import backward, squares
from misconv._triton.moments import window_moments
from misconv._triton.operator import SETTINGS, TENSORS, PlainPath, find_plan, pack, unpack
from misconv._triton.plan import Plan
from misconv._triton.replay import Replays

if TYPE_CHECKING:
    from misconv._conv import Convolution
    from misconv.mfa import MFA

__all__ = ["batch_statistics"]


def batch_statistics(p: MFA, conv: Convolution, plain_path: PlainPath) -> tuple[Tensor, Tensor] | None:
    """Mean and variance (O,) of the responses over images, places, components and all that missing pixels may be.

    Args:
        plain_path: (logits, means, factors, noise, observed, weight, bias) -> Σ E[z²] (O,) by the plain formulas, for
            derivatives of derivatives.

    Returns:
        In float32 and differentiable; None where the kernels cannot serve, and a line in the log.
    """
    plan = find_plan(p, conv, True, ("square", 0.0, 0.0))
    if plan is None:
        return None
    batch, _, rows, columns = plan.shape
    count = batch * rows * columns
    density = (p.logits, p.means, p.factors, p.noise)
    compiling = torch.compiler.is_compiling()
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in density)
    out = conv.weight.shape[0]
    filters = conv.weight.double().reshape(conv.groups, out // conv.groups, -1)
    by_windows = not learns and not compiling and plan.window_moments is not None
    if by_windows:
        window, moments = _moments_of_windows(plan, *density, p.observed)
    else:
        window = _sum_of_windows(_mean_of_all(p), conv) / count
    middle = torch.einsum("got,gt->go", filters, window.view(conv.groups, -1)).flatten().float()
    mean = middle if conv.bias is None else middle + conv.bias.float()
    if by_windows:
        return mean, ((filters[0] @ moments) * filters[0]).sum(1).float()
    tensors = (*density, p.observed, conv.weight.float(), -middle)
    if compiling:
        total = torch.ops.misconv.expected_squares(*tensors, *pack(plan.settings))
    else:
        total = _replays_of(plan)(plain_path, *tensors)
    return mean, total / count


def _moments_of_windows(plan: Plan, *tensors: Any) -> tuple[Tensor, Tensor]:
    """The mean of all windows (taps,) and their second moments around it (taps, taps), in float64."""
    found = window_moments(plan, *tensors)
    channels, rows, columns = plan.weight[1:]
    wide = plan.kernel(plan.paired)[1]  # of which the last one may be there only to make a pair
    taps = channels * rows * wide
    mean, noise = found.taps[:, :taps].reshape(2, -1, wide)[:, :, :columns].flatten(1)
    matrix = found.matrix[:taps, :taps].reshape(taps // wide, wide, -1, wide)[:, :columns, :, :columns]
    apart = mean - found.center.double().repeat_interleave(rows * columns)
    return mean, matrix.reshape(len(mean), len(mean)) - torch.outer(apart, apart) + noise.diag()


def _mean_of_all(p: MFA) -> Tensor:
    """The sum of all images' means (C, H, W), weighted over components."""
    # In float64, for a mean far from zero must not spoil the variance; half precision has fewer digits to lose.
    wide = torch.float64 if p.dtype == torch.float32 else torch.float32
    if p.means.shape[1] == 1:
        return p.means[:, 0].sum(0, dtype=wide).double()
    return torch.einsum("bk,bkchw->chw", p.weights.to(wide), p.means.to(wide)).double()


def _sum_of_windows(image: Tensor, conv: Convolution) -> Tensor:
    """The sum of all windows (C · kh · kw) of an image (C, H, W)."""
    padded = F.pad(image[None], conv.margins)
    return F.unfold(padded, conv.kernel, conv.dilations, 0, conv.strides).sum((0, 2))


@lru_cache(4096)
def _replays_of(plan: Plan) -> Replays:
    return Replays(lambda *tensors: (squares(plan, *tensors),), partial(_gradients, plan), plan.device)


def _gradients(plan: Plan, needed: tuple[bool, ...], grads: Any, inputs: Any, _: Any) -> tuple[Tensor | None, ...]:
    *density, weight, bias = backward(plan, (*needed[:4], *needed[5:]), _spread(grads[0], plan), *inputs)
    return (*density, None, weight, bias)


def _spread(grad: Tensor, plan: Plan) -> Tensor:
    """Every response has its share in the sum; nothing is written for it."""
    return grad.view(1, -1, 1, 1).expand(plan.shape)


# In compiled graphs ------------------------------------------------------------------------------------------------


@torch.library.custom_op("misconv::expected_squares", mutates_args=(), schema=f"({TENSORS}, {SETTINGS}) -> Tensor")
def _operator(*arguments: Any) -> Tensor:
    return squares(unpack(arguments[:7], *arguments[7:]), *arguments[:7])


@_operator.register_fake
def _(*arguments: Any) -> Tensor:
    weight: Tensor = arguments[5]
    return weight.new_empty(weight.shape[0], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needed = [*ctx.needs_input_grad[:4], *ctx.needs_input_grad[5:7]]
    means, weight, numbers = ctx.saved_tensors[1], ctx.saved_tensors[5], ctx.settings[0]
    spread = grad.view(1, -1, 1, 1).expand(means.shape[0], weight.shape[0], *numbers[6:])
    found = iter(torch.ops.misconv.expected_conv2d_backward(spread, *ctx.saved_tensors, *ctx.settings, needed))
    *density, by_weight, by_bias = [next(found) if asked else None for asked in needed]
    return (*density, None, by_weight, by_bias, *(None for _ in ctx.settings))


_operator.register_autograd(_differentiate, setup_context=_keep)
