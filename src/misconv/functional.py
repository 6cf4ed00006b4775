"""The maths of the layers as functions: moments of a convolution, expected activations, partial convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._checks import check_dense, check_images, check_observed, check_seen_finite, describe, readable
from misconv._conv import (
    Convolution,
    batch_norm_moments,
    check_flag,
    check_geometry,
    check_weight,
    check_windows,
    moments,
    respond,
)
from misconv._math import Activation, Padding, Pair, expectation
from misconv.mfa import MFA

__all__ = ["batch_norm_moments", "conv2d_moments", "expected_activation", "expected_conv2d", "partial_conv2d"]


def conv2d_moments(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> tuple[Tensor, Tensor]:
    """The mean and variance of every response of a convolution to images that are random where they are missing.

    ``m = M μ + b`` and ``σ² = M² d + Σ_j (M a_j)²``, with M² the convolution with squared weights and no bias. Pixels
    outside the image are certain zeros; with another `padding_mode` one random pixel may stand in several places of a
    window, and its noise is then counted once with the sum of its weights.

    Args:
        p: the images, an MFA of B×C×H×W with K components.
        weight, bias, stride, padding, dilation, groups: as in `torch.nn.functional.conv2d`.
        padding_mode: as in `torch.nn.Conv2d`.

    Returns:
        Mean and variance, each (B, K, O, H', W'). A variance beyond the largest number of its type is infinite, one
        below the smallest is 0; `expected_conv2d` and `MisConv2d` never form it, and know no such limits.

    Example:
        >>> ones = torch.ones(1, 1, 1, 4, 4)
        >>> p = MFA(torch.zeros(1, 1), ones, torch.zeros(1, 1, 0, 1, 4, 4), ones)
        >>> m, v = conv2d_moments(p, torch.full((1, 1, 2, 2), 3.0))
        >>> m.unique().tolist(), v.unique().tolist()  # 4 pixels of mean 1 and variance 1, weight 3
        ([12.0], [36.0])
    """
    mean, variance = moments(p, Convolution(weight, bias, stride, padding, dilation, groups, padding_mode))
    compute = torch.promote_types(mean.dtype, torch.float32)
    return mean.to(compute), variance.to(compute)


def expected_activation(activation: Activation, mean: Tensor, variance: Tensor) -> Tensor:
    """E[f(Z)] for Z ~ N(mean, variance), place by place.

    Closed forms: identity, ReLU, LeakyReLU, PReLU, ReLU6, Hardtanh, Hardsigmoid, Hardswish, ELU, CELU, SELU, GELU;
    sigmoid, tanh, SiLU and Softplus to 1e-9 for any variance (in float64). Every other pointwise function is integrated
    numerically; the error grows with the variance (table in `docs/maths.md`). Where the variance is 0 the result is
    exactly f(mean).

    Args:
        activation: a name such as ``"relu"``, an `nn.Module` or a pointwise function.
        mean: any shape; (…, O, H, W) where the activation has parameters per channel.
        variance: of the same shape, not negative.

    Example:
        >>> expected_activation("relu", torch.tensor([0.0, 0.0, -3.0]), torch.tensor([0.0, 1.0, 4.0]))
        tensor([0.0000, 0.3989, 0.0586])
    """
    for name, value in (("mean", mean), ("variance", variance)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {describe(value)}")
        check_dense(name, value)
    if mean.shape != variance.shape or mean.device != variance.device or mean.dtype != variance.dtype:
        raise ValueError(f"variance must match mean, {describe(mean)}, got {describe(variance)}")
    if readable(variance):
        bad = variance[~((variance >= 0) & variance.isfinite())]
        if bad.numel():
            raise ValueError(f"variance must be finite and at least 0 everywhere, got {bad[0].item()}")
    return expectation(activation, mean, variance)


def expected_conv2d(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    *,
    activation: Activation = "relu",
) -> Tensor:
    """The expected activation of a convolution over everything the missing pixels may be.

    ``Σ_k π_k E[f(N(m_k, σ_k²))]`` with the moments of `conv2d_moments`. A window without a missing pixel gives what
    the plain convolution and activation give: on a CPU bit for bit, on a GPU, where a fused kernel computes it, up to
    rounding (`misconv.plain` has the bits there too).

    Returns:
        (B, O, H', W').

    Example:
        >>> x = torch.rand(2, 3, 8, 8)
        >>> weight = torch.randn(4, 3, 3, 3)
        >>> bool((expected_conv2d(MFA.point(x), weight) == torch.relu(torch.conv2d(x, weight))).all())
        True
    """
    conv = Convolution(weight, bias, stride, padding, dilation, groups, padding_mode)
    return respond(p, conv, None, activation)


def partial_conv2d(
    x: Tensor,
    observed: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    return_observed: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Partial convolution (Liu et al. 2018): missing pixels are left out and the rest is scaled up to make up for them.

    ``Wᵀ(x ⊙ o) · sum(1)/sum(o) + b`` where a window holds at least one observed pixel, and 0 where it holds none.
    `sum(1)` is the size of the whole window; as in the paper, pixels outside the image count as missing.

    Args:
        x: (B, C, H, W); values that are not observed are never read.
        observed: bool (B, 1, H, W) or (B, C, H, W).
        weight, bias, stride, padding, dilation, groups: as in `torch.nn.functional.conv2d`.
        return_observed: also return where the result rests on at least one observed pixel, bool (B, 1, H', W'), or
            (B, O, H', W') where groups see different pixels.

    Example:
        >>> x, weight = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
        >>> observed = torch.eye(3, dtype=torch.bool).view(1, 1, 3, 3)
        >>> partial_conv2d(x, observed, weight).item()  # three of nine pixels were seen, each counts three times
        9.0
    """
    check_images("x", x)
    check_flag("return_observed", return_observed)
    conv = Convolution(weight, bias, stride, padding, dilation, groups)
    check_geometry(*conv.geometry)
    check_weight(conv, x.shape[1], x)
    check_windows(conv, tuple(x.shape))
    observed = check_observed("observed", observed, x)
    check_seen_finite("x", x, observed)
    response = F.conv2d(x.where(observed, 0), weight, None, stride, padding, dilation, groups)

    # Seen pixels of every window, in float32 because half precision cannot count; once for all channels and groups
    # where they see the same.
    shared = observed.shape[1] == 1
    each = 1 if shared else groups
    ones = torch.ones(each, observed.shape[1] // each, *weight.shape[2:], dtype=torch.float32, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        seen = F.conv2d(observed.to(torch.float32), ones, None, stride, padding, dilation, each)
    some = seen > 0.5
    seen = seen.to(torch.promote_types(response.dtype, torch.float32)).clamp_min(1)
    ratio = torch.where(some, ones[0].numel() / seen, 0).to(response.dtype)
    if each > 1:
        ratio, some = (t.repeat_interleave(weight.shape[0] // groups, 1) for t in (ratio, some))
    result = response * ratio
    if bias is not None:
        result = result + bias.to(result.dtype).view(-1, 1, 1) * some
    return (result, some) if return_observed else result
