"""Where the path is chosen: fused kernels on a GPU, touched windows on a CPU, else the plain formulas.

`MisConv2d`, `misconv.functional` and converted networks all come here; arguments are checked here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from misconv._backend import HAS_TRITON, is_eager, is_plain
from misconv._conv import plain, touched
from misconv._conv.batch_norm import Affine, BatchNorm, batch_norm_moments
from misconv._conv.checks import check_convolution, check_geometry, check_mfa
from misconv._conv.convolution import Convolution
from misconv._math import Activation
from misconv.mfa import MFA

__all__ = [
    "batch_statistics",
    "moments",
    "normalized_response",
    "plain_normalized",
    "plain_path",
    "plain_squares",
    "respond",
    "why_no_replays",
]


def respond(p: MFA, conv: Convolution, norm: Affine | None, activation: Activation) -> Tensor:
    """The expected activation (B, O, H', W') of a convolution and a fixed normalization, by the fastest path there is.

    ``Σ_k π_k E[f(norm(N(m_k, σ_k²)))]``.
    """
    check_mfa(p)
    check_geometry(*conv.geometry)
    if p.means.is_cuda and HAS_TRITON and not is_plain():
        if norm is not None and norm.statistics is not None:
            from misconv._triton import fixed_response  # takes its time to import, and may not be there

            response = fixed_response(p, conv, norm.statistics, activation)
            if response is not None:
                return response
        from misconv._triton import respond as fused_response

        # The kernels look at shapes and types themselves: a check of every argument would cost more than a launch.
        fused = fused_response(p, conv, norm, activation, plain_path(conv, activation))
        if fused is not None:
            return fused
    check_convolution(p, conv)
    if p.means.device.type == "cpu" and not is_plain():
        tensors = (p.logits, p.means, p.factors, p.noise, p.observed, conv.weight, conv.bias)
        if is_eager(*(t for t in tensors if t is not None)):
            result = touched.respond(p, conv, norm, activation)
            if result is not None:
                return result
    return plain.expected_response(p, conv, norm, activation)


def why_no_replays() -> str | None:
    """Why launches of fused kernels are not replayed by C++; None where they are. Waits until it is compiled."""
    if not HAS_TRITON or not torch.cuda.is_available():
        return "there is no GPU that torch can use"
    from misconv._triton import why_no_replays as fused_reason

    return fused_reason()


def plain_path(conv: Convolution, activation: Activation) -> Callable[..., Tensor]:
    """(logits, means, factors, noise, observed, weight, bias) -> the response by the plain formulas.

    The kernels take their second derivatives from it; weight and bias then hold the normalization.
    """

    def respond(*tensors: Any) -> Tensor:
        p, filters = _unpacked(conv, *tensors)
        return plain.expected_response(p, filters, None, activation)

    return respond


def normalized_response(p: MFA, conv: Convolution, norm: BatchNorm, activation: Activation) -> Tensor | None:
    """The expected activation (B, O, H', W') behind a normalization by the statistics of a batch, by fused kernels.

    Running statistics are updated. None where the kernels cannot serve; nothing is updated then.
    """
    check_mfa(p)
    check_geometry(*conv.geometry)
    if not (p.means.is_cuda and HAS_TRITON) or is_plain():
        return None
    from misconv._triton import normalized_response as fused_response

    return fused_response(p, conv, norm, activation, plain_normalized(conv, norm.eps, activation))


def plain_normalized(conv: Convolution, eps: float, activation: Activation) -> Callable[..., Tensor]:
    """(logits, means, factors, noise, observed, weight, bias, γ, β) -> the response, by the plain formulas."""

    def respond(*tensors: Any) -> Tensor:
        p, filters = _unpacked(conv, *tensors[:7])
        scale, shift = (None if t is None else t.to(filters.weight.dtype) for t in tensors[7:])
        mean, variance = plain.moments(p, filters)
        moved = batch_norm_moments(mean, variance, p.weights, None, None, scale, shift, training=True, eps=eps)
        return plain.mix_expectations(p, activation, *moved, plain.incomplete_windows(p, filters))

    return respond


def batch_statistics(p: MFA, conv: Convolution) -> tuple[Tensor, Tensor] | None:
    """Mean and variance (O,) of all responses of a batch, where a fused kernel finds them without writing responses."""
    check_mfa(p)
    check_geometry(*conv.geometry)
    if not (p.means.is_cuda and HAS_TRITON) or is_plain():
        return None
    from misconv._triton import batch_statistics as fused_statistics

    return fused_statistics(p, conv, plain_squares(conv))


def plain_squares(conv: Convolution) -> Callable[..., Tensor]:
    """(logits, means, factors, noise, observed, weight, bias) -> Σ E[z²] of each channel, by the plain formulas."""

    def squares(*tensors: Any) -> Tensor:
        p, filters = _unpacked(conv, *tensors)
        mean, variance = plain.moments(p, filters)
        shares = p.weights[..., None, None, None]
        return (shares * (mean.square() + variance)).sum((0, 1, 3, 4))

    return squares


def _unpacked(conv: Convolution, *tensors: Any) -> tuple[MFA, Convolution]:
    """What the kernels were given; they take filters in float32 beside images in half precision."""
    *density, observed, weight, bias = tensors
    logits, means, factors, noise = (t.to(weight.dtype) for t in density)
    return MFA(logits, means, factors, noise, observed, check=False), conv.replace(weight, bias)


def moments(p: MFA, conv: Convolution) -> tuple[Tensor, Tensor]:
    """Mean and variance of every response, (B, K, O, H', W') each."""
    check_mfa(p)
    check_geometry(*conv.geometry)
    check_convolution(p, conv)
    return plain.moments(p, conv)
