"""The formulas of docs/maths.md in torch's own operations: moments of a convolution, and their expected activation.

This path serves everywhere. The others (`touched`, and the kernels of `misconv._triton`) compute the same faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._backend import is_eager
from misconv._conv.batch_norm import Affine, first_response
from misconv._conv.border import border_noise, replaced
from misconv._conv.convolution import Convolution
from misconv._math import Activation, deviation, expectation_of_spread, weighted_mean
from misconv.mfa import MFA

__all__ = ["expected_response", "incomplete_windows", "mix_expectations", "moments", "pad_images"]


def moments(p: MFA, conv: Convolution) -> tuple[Tensor, Tensor]:
    """Mean and variance of every response, (B, K, O, H', W') each.

    ``m = M μ + b`` and ``σ² = M² d + Σ_j (M a_j)²``. The mean is in the type that a plain convolution would return
    (autocast may say which). Variances that leave the range of float32 are float64 where values may be read.
    """
    mean, variance, unit = _scaled_moments(p, conv)
    if variance.dtype == torch.float32 and variance.device.type == "cpu" and is_eager(variance, unit):
        wide = torch.float64 if (unit != 1).any() else torch.float32
        variance, unit = variance.to(wide), unit.to(wide)
    return mean, variance * unit * unit


def expected_response(p: MFA, conv: Convolution, norm: Affine | None, activation: Activation) -> Tensor:
    """The expected activation (B, O, H', W') of a convolution and a fixed normalization."""
    mean, variance, unit = _scaled_moments(p, conv)
    spread = deviation(variance) * unit
    if norm is not None:
        mean = norm.apply(mean.flatten(0, -4)).view(mean.shape)  # of (B·K, O, H', W')
        spread = spread * norm.coefficients()[0].to(spread.dtype).abs().view(-1, 1, 1)
    return _mix(p, activation, mean, spread, incomplete_windows(p, conv))


def mix_expectations(
    p: MFA, activation: Activation, mean: Tensor, variance: Tensor, incomplete: Tensor | None = None
) -> Tensor:
    """Expected activations of the components (B, K, O, H', W'), averaged with the weights of `p`: (B, O, H', W').

    Args:
        incomplete: the result of `incomplete_windows`.
    """
    return _mix(p, activation, mean, deviation(variance), incomplete)


def incomplete_windows(p: MFA, conv: Convolution) -> Tensor | None:
    """Which windows (B, 1, H', W') touch a missing pixel; None where it makes no difference to any gradient."""
    learning = torch.is_grad_enabled() and (conv.weight.requires_grad or p.means.requires_grad)
    if p.logits.shape[-1] == 1 or not learning:
        return None
    missing = torch.ones_like(p.means[:, 0, :1]) if p.observed is None else (~p.observed).any(1, keepdim=True)
    missing = missing.to(torch.float32)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    with torch.no_grad(), torch.autocast(missing.device.type, enabled=False):
        ones = torch.ones(1, 1, *conv.kernel, dtype=missing.dtype, device=missing.device)
        return F.conv2d(F.pad(missing, conv.margins, mode), ones, None, conv.stride, 0, conv.dilation) > 0.5


def pad_images(p: MFA, margins: tuple[int, ...]) -> MFA:
    """Zeros around the images, which are certain; `margins` as `torch.nn.functional.pad` takes them."""
    height, width = p.shape[-2:]
    observed = p.observed
    if observed is None:
        observed = torch.zeros(len(p), 1, height, width, dtype=torch.bool, device=p.device)
    means, factors, noise = (
        torch.unflatten(F.pad(t.flatten(1, -3), margins), 1, t.shape[1:-2]) for t in (p.means, p.factors, p.noise)
    )
    return MFA(p.logits, means, factors, noise, F.pad(observed, margins, value=True), check=False)


def _mix(p: MFA, activation: Activation, mean: Tensor, spread: Tensor, incomplete: Tensor | None) -> Tensor:
    expected = expectation_of_spread(activation, mean, spread)
    first = mean.select(-4, 0)
    if p.logits.shape[-1] == 1:
        return expected.select(-4, 0)
    mixed = weighted_mean(p.weights[..., None, None, None], expected, -4).to(mean.dtype)
    # Where all components agree the weights must not even round.
    differ = ((spread > 0) | (mean != first.unsqueeze(-4))).any(-4)
    agreed = expectation_of_spread(activation, first_response(mean), torch.zeros_like(first))
    if incomplete is not None:
        # Where weights are zero components agree by chance, and the gradients are still those of all of them.
        gradient = torch.where(mixed.isfinite(), mixed, 0)
        agreed = torch.where(incomplete, agreed.detach() + (gradient - gradient.detach()), agreed)
    return torch.where(differ, mixed, agreed)


def _scaled_moments(p: MFA, conv: Convolution) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance (B, K, O, H', W'), the variance in units of the square of (B, K, O, 1, 1).

    The units are powers of two by which tiny and huge numbers are divided, so that no square leaves the range of
    float32; 1 for ordinary images and filters.
    """
    means, factors, noise = p.pinned()
    mean = _means(means, conv)
    compute = torch.promote_types(mean.dtype, torch.float32)
    largest = _largest(noise.to(compute), (-3, -2, -1)).sqrt()  # (B, K, 1, 1, 1)
    if factors.shape[-4] > 0:
        largest = torch.maximum(largest, _largest(factors.to(compute), (-4, -3, -2, -1)).squeeze(-4))
    of_images = _unit(largest, -30, 10 if mean.dtype == torch.float16 else 20)
    of_filters = _unit(_largest(conv.weight.to(compute), (1, 2, 3)), -15, 10)  # (O, 1, 1, 1)
    scaled = conv.replace((conv.weight.to(compute) / of_filters).to(conv.weight.dtype), None)
    with torch.autocast(p.device.type, enabled=False):
        variance = _noise_variance(noise.to(compute) / of_images / of_images, scaled)
    if factors.shape[-4] > 0:
        factors = (factors.to(compute) / of_images.unsqueeze(-4)).to(factors.dtype)
        variance = variance + scaled(factors).to(compute).square().sum(-4)
    # A fast convolution algorithm may leave -1e-20 where the truth is 0.
    return mean, variance.clamp_min(0), of_images * of_filters.squeeze(-1)


def _means(means: Tensor, conv: Convolution) -> Tensor:
    """``M μ + b`` of all components (B, K, O, H', W').

    The first component exactly as a plain convolution sees it, the others by their difference from it: that is zero
    at observed pixels, so that all components agree to the bit where a window misses nothing.
    """
    first = means.narrow(-4, 0, 1)
    mean = conv(first)
    if means.shape[-4] == 1:
        return mean
    others = conv.replace(conv.weight, None)(means.narrow(-4, 1, means.shape[-4] - 1) - first)
    # With channels last in memory where the convolution has them there: cat alone would lose the layout.
    place = -1 if mean.stride(-3) == 1 and mean.stride(-1) != 1 else -3
    parts = [part.movedim(-3, place) for part in (mean, mean + others)]
    return torch.cat(parts, -4).movedim(place, -3)


def _noise_variance(noise: Tensor, conv: Convolution) -> Tensor:
    """``M² d`` (B, K, O, H', W'), where padding repeats pixels with their weights added up before they are squared."""
    weight = conv.weight.to(noise.dtype)
    variance = conv.replace(weight.square(), conv.bias)(noise)
    if conv.padding_mode != "zeros":
        border = border_noise(noise, conv.replace(weight, conv.bias))
        if border is not None:
            variance = replaced(variance.flatten(-2), border.windows, border.variance).view_as(variance)
    return variance


def _largest(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    values = values.detach()
    return torch.maximum(values.amax(dims, keepdim=True), -values.amin(dims, keepdim=True))


def _unit(largest: Tensor, low: int, high: int) -> Tensor:
    """The power of two that brings the largest numbers between 2^low and 2^high; 1 where they are there already.

    So there is room above for sums, below for pixels of the same image that vary far less, and for gradients.
    """
    exponent = torch.where(largest > 0, largest, 1).clamp_min(2.0**-126).log2().floor()
    return torch.exp2(exponent - exponent.clamp(low, high))
