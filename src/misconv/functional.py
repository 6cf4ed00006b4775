"""The maths of the layers as functions: moments of a convolution, expected activations, partial convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._backend import HAS_TRITON, by_itself, is_plain
from misconv._checks import check_dense, check_images, check_observed, check_seen_finite, describe, readable
from misconv._conv import Affine as Affine
from misconv._conv import (
    batch_norm_moments,
    check_convolution,
    check_flag,
    check_geometry,
    check_weight,
    check_windows,
    first_response,
)
from misconv._conv import fixed_batch_norm as fixed_batch_norm
from misconv._conv import sync_group as sync_group
from misconv._conv import touched as _touched
from misconv._math import (
    Activation,
    Padding,
    Pair,
    border_noise,
    deviation,
    expectation,
    expectation_of_spread,
    margins,
    weighted_mean,
)
from misconv.mfa import MFA

__all__ = ["batch_norm_moments", "conv2d_moments", "expected_activation", "expected_conv2d", "partial_conv2d"]

PaddingMode = str


def conv2d_moments(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    padding_mode: PaddingMode = "zeros",
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
    mean, variance = raw_moments(p, weight, bias, stride, padding, dilation, groups, padding_mode)
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
    padding_mode: PaddingMode = "zeros",
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
    return respond(p, weight, bias, stride, padding, dilation, groups, padding_mode, None, activation)


def respond(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    padding_mode: PaddingMode,
    norm: Affine | None,
    activation: Activation,
) -> Tensor:
    """The expected activation (B, O, H', W') of a convolution and a fixed normalization, by the fastest path there is.

    On a GPU that is a fused kernel; on a CPU the expectation is computed only in windows that touch a missing pixel.
    """
    check_geometry(stride, padding, dilation, groups, padding_mode)
    if isinstance(p, MFA) and not is_plain():
        arguments = (p, weight, bias, stride, padding, dilation, groups, padding_mode, norm, activation)
        fast: Tensor | None = None
        if p.means.is_cuda and HAS_TRITON:
            from misconv import _triton  # Triton takes its time to import, and may not be there

            fast = _triton.respond(*arguments)
        elif p.means.device.type == "cpu":
            parts = (p.logits, p.means, p.factors, p.noise, p.observed, weight, bias)
            if by_itself(*(part for part in parts if part is not None)):
                check_convolution(p, weight, bias, stride, padding, dilation, groups, padding_mode)
                fast = _touched.respond(*arguments)
        if fast is not None:
            return fast
    mean, variance, unit = _scaled_moments(p, weight, bias, stride, padding, dilation, groups, padding_mode)
    spread = deviation(variance) * unit
    if norm is not None:
        mean = norm.apply(mean.flatten(0, -4)).view(mean.shape)  # of (B·K, O, H', W')
        spread = spread * norm.coefficients()[0].to(spread.dtype).abs().view(-1, 1, 1)
    return _mix(p, activation, mean, spread, incomplete_windows(p, weight, stride, padding, dilation, padding_mode))


def mix_expectations(
    p: MFA, activation: Activation, mean: Tensor, variance: Tensor, incomplete: Tensor | None = None
) -> Tensor:
    """Expected activations of the components (B, K, O, H', W'), averaged with the weights of `p`: (B, O, H', W').

    Args:
        incomplete: what `incomplete_windows` says.
    """
    return _mix(p, activation, mean, deviation(variance), incomplete)


def incomplete_windows(
    p: MFA, weight: Tensor, stride: Pair, padding: Padding, dilation: Pair, padding_mode: PaddingMode
) -> Tensor | None:
    """Which windows (B, 1, H', W') touch a missing pixel; None where it makes no difference to any gradient."""
    if p.logits.shape[-1] == 1 or not torch.is_grad_enabled() or not (weight.requires_grad or p.means.requires_grad):
        return None
    missing = torch.ones_like(p.means[:, 0, :1]) if p.observed is None else (~p.observed).any(1, keepdim=True)
    missing = missing.to(torch.float32)
    around = margins(tuple(weight.shape[2:]), padding, dilation)
    mode = "constant" if padding_mode == "zeros" else padding_mode
    with torch.no_grad(), torch.autocast(missing.device.type, enabled=False):
        ones = torch.ones(1, 1, *weight.shape[2:], dtype=missing.dtype, device=missing.device)
        return F.conv2d(F.pad(missing, around, mode), ones, None, stride, 0, dilation) > 0.5


def _mix(p: MFA, activation: Activation, mean: Tensor, spread: Tensor, incomplete: Tensor | None) -> Tensor:
    expected = expectation_of_spread(activation, mean, spread)
    first = mean.select(-4, 0)
    if p.logits.shape[-1] == 1:
        return expected.select(-4, 0)
    mixed = weighted_mean(p.weights[..., None, None, None], expected, -4).to(mean.dtype)
    # Where all components agree the weights must not even round.
    open_ = ((spread > 0) | (mean != first.unsqueeze(-4))).any(-4)
    agreed = expectation_of_spread(activation, first_response(mean), torch.zeros_like(first))
    if incomplete is not None:
        # Where weights are zero components agree by chance, and the gradients are those of all of them all the same.
        gradient = torch.where(mixed.isfinite(), mixed, 0)
        agreed = torch.where(incomplete, agreed.detach() + (gradient - gradient.detach()), agreed)
    return torch.where(open_, mixed, agreed)


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
    check_geometry(stride, padding, dilation, groups, "zeros")
    check_weight(weight, bias, x.shape[1], groups, x)
    check_windows(tuple(x.shape), weight, stride, padding, dilation, "zeros")
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


# Inside ----------------------------------------------------------------------------------------------------------


def padded(p: MFA, around: tuple[int, ...]) -> MFA:
    """Zeros around the images, which are certain; `margins` as `torch.nn.functional.pad` wants them."""
    height, width = p.shape[-2:]
    observed = p.observed
    if observed is None:
        observed = torch.zeros(len(p), 1, height, width, dtype=torch.bool, device=p.device)
    means, factors, noise = (
        torch.unflatten(F.pad(t.flatten(1, -3), around), 1, t.shape[1:-2]) for t in (p.means, p.factors, p.noise)
    )
    return MFA(p.logits, means, factors, noise, F.pad(observed, around, value=True), check=False)


def raw_moments(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    padding_mode: PaddingMode,
) -> tuple[Tensor, Tensor]:
    """`conv2d_moments`, with the mean in the type a plain convolution would return (autocast may say which).

    Variances that leave the range of float32 are float64 where values may be looked at.
    """
    mean, variance, unit = _scaled_moments(p, weight, bias, stride, padding, dilation, groups, padding_mode)
    if variance.dtype == torch.float32 and variance.device.type == "cpu" and by_itself(variance, unit):
        wide = torch.float64 if (unit != 1).any() else torch.float32
        variance, unit = variance.to(wide), unit.to(wide)
    return mean, variance * unit * unit


def _scaled_moments(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    padding_mode: PaddingMode,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance (B, K, O, H', W'), the variance in units of the square of (B, K, O, 1, 1).

    The units are powers of two by which tiny and huge numbers are divided, so that no square leaves the range of
    float32; 1 for ordinary images and filters.
    """
    check_convolution(p, weight, bias, stride, padding, dilation, groups, padding_mode)

    def convolve(images: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Any leading dimensions, (…, C, H, W) → (…, O, H', W')."""
        flat = images.reshape(-1, *images.shape[-3:])
        if padding_mode == "zeros":
            flat = F.conv2d(flat, weight, bias, stride, padding, dilation, groups)
        else:
            flat = F.pad(flat, margins(weight.shape[2:], padding, dilation), padding_mode)
            flat = F.conv2d(flat, weight, bias, stride, 0, dilation, groups)
        return flat.reshape(*images.shape[:-3], *flat.shape[-3:])

    means, factors, noise = p.pinned()
    # The first component exactly as a plain convolution sees it, the others by their difference from it: that is zero
    # at observed pixels, so that all components agree to the bit where a window misses nothing.
    mean = convolve(means.narrow(-4, 0, 1), weight, bias)
    if means.shape[-4] > 1:
        others = convolve(means.narrow(-4, 1, means.shape[-4] - 1) - means.narrow(-4, 0, 1), weight)
        # With channels last in memory where the convolution has them there: cat alone would lose the layout.
        place = -1 if mean.stride(-3) == 1 and mean.stride(-1) != 1 else -3
        parts = [part.movedim(-3, place) for part in (mean, mean + others)]
        mean = torch.cat(parts, -4).movedim(place, -3)  # (B, K, O, H', W')

    compute = torch.promote_types(mean.dtype, torch.float32)
    largest = _largest(noise.to(compute), (-3, -2, -1)).sqrt()  # (B, K, 1, 1, 1)
    if factors.shape[-4] > 0:
        largest = torch.maximum(largest, _largest(factors.to(compute), (-4, -3, -2, -1)).squeeze(-4))
    of_images = _unit(largest, -30, 10 if mean.dtype == torch.float16 else 20)
    of_filters = _unit(_largest(weight.to(compute), (1, 2, 3)), -15, 10)  # (O, 1, 1, 1)
    weight = (weight.to(compute) / of_filters).to(weight.dtype)
    noise = noise.to(compute) / of_images / of_images
    with torch.autocast(p.device.type, enabled=False):
        variance = convolve(noise, weight.to(compute).square())
        if padding_mode != "zeros":
            border = border_noise(noise, weight.to(compute), stride, padding, dilation, groups, padding_mode)
            if border is not None:
                variance = variance.flatten(-2).index_copy(-1, border.windows, border.variance).view_as(variance)
    if factors.shape[-4] > 0:
        factors = (factors.to(compute) / of_images.unsqueeze(-4)).to(factors.dtype)
        variance = variance + convolve(factors, weight).to(compute).square().sum(-4)
    # A fast convolution algorithm may leave -1e-20 where the truth is 0.
    return mean, variance.clamp_min(0), of_images * of_filters.squeeze(-1)


def _largest(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    values = values.detach()
    return torch.maximum(values.amax(dims, keepdim=True), -values.amin(dims, keepdim=True))


def _unit(largest: Tensor, low: int, high: int) -> Tensor:
    """The power of two that brings the largest numbers between 2^low and 2^high; 1 where they are there already.

    So there is room above for sums, below for pixels of the same image that vary far less, and for gradients.
    """
    exponent = torch.where(largest > 0, largest, 1).clamp_min(2.0**-126).log2().floor()
    return torch.exp2(exponent - exponent.clamp(low, high))
