"""The probability of pixels under factor analyzers, in plain PyTorch: Woodbury's identity, all of it L×L algebra."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from misconv._math.expectations import normal_cdf
from misconv._math.linalg import cholesky, triangular_inverse

__all__ = ["NOISE_FLOOR", "coverage_level", "full_precision", "log_prob", "marginal_log_prob", "score", "wide_type"]

# The least noise of a pixel as a share of the variance that its factors give it: a standard deviation of 2⁻²³, the
# rounding of float32. It keeps 1/d finite, and with float64 C = I + AᵀD⁻¹A still has correct digits.
NOISE_FLOOR = 2.0**-46


def score(means: Tensor, factors: Tensor, noise: Tensor, x: Tensor, scored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log density of x in `scored` under every component (B, K), R⁻¹ (B, K, L, L) and E[Y | x] (B, K, L).

    C = I + VVᵀ = R Rᵀ, with V the factors over √d. Everything is float64: squares of float32 cannot overflow there,
    and for nearly collinear factors and little noise the smallest pivots of C are differences of large numbers.

    Args:
        means, factors, noise: of an MFA, (B, K, C, H, W), (B, K, L, C, H, W) and (B, K, C, H, W).
        x: (B, C, H, W). scored: bool (B, 1, H, W) or (B, C, H, W); nothing is read where it is False.
    """
    wide = wide_type(x)
    scored = scored.expand(x.shape).unsqueeze(-4)  # (B, 1, C, H, W)

    def fill(values: Tensor, where: Tensor, other: int) -> Tensor:
        # Before arithmetic: what is not scored may be NaN, and NaN · 0 is NaN in values and gradients.
        return torch.where(where, values, other).to(wide).flatten(-3)

    value, mean = fill(x.unsqueeze(-4), scored, 0), fill(means, scored, 0)  # (B, 1, n), (B, K, n)
    factors = fill(factors, scored.unsqueeze(-4), 0)  # (B, K, L, n)
    noise = fill(noise, scored, 1)  # (B, K, n)
    floor = _floor(value.detach(), mean.detach(), factors.detach())
    noise = torch.where(noise <= floor, floor, noise)  # NaN stays
    with full_precision(x.device):
        scale = noise.rsqrt()
        whitened = (value - mean) * scale  # (B, K, n), w
        loadings = factors * scale.unsqueeze(-2)  # (B, K, L, n), V
        identity = torch.eye(factors.shape[-2], dtype=wide, device=x.device)
        root = cholesky(identity + loadings @ loadings.mT)  # (B, K, L, L), R
        root_inverse = triangular_inverse(root)
        latent = _solve(root_inverse, loadings @ whitened.unsqueeze(-1))  # (B, K, L, 1), ŷ = C⁻¹ V w
        # Once more for what is left: where some pixels have no noise and others much, C spans 14 orders of magnitude.
        left = loadings @ (whitened.unsqueeze(-1) - loadings.mT @ latent) - latent
        latent = (latent + _solve(root_inverse, left)).squeeze(-1)  # (B, K, L)
        # |w|² − (Vw)ᵀC⁻¹(Vw) as a sum of squares, which cannot cancel: |w − Vᵀŷ|² + |ŷ|².
        unexplained = whitened - (latent.unsqueeze(-2) @ loadings).squeeze(-2)
    distance = unexplained.square().sum(-1) + latent.square().sum(-1)
    log_det = noise.log().sum(-1) + 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    count = scored.flatten(-3).sum(-1).to(wide)  # (B, 1)
    return -0.5 * (distance + log_det + count * math.log(2 * math.pi)), root_inverse, latent


def _solve(root_inverse: Tensor, right: Tensor) -> Tensor:
    """C⁻¹ times columns, with C⁻¹ = R⁻ᵀ R⁻¹."""
    return root_inverse.mT @ (root_inverse @ right)


def _floor(value: Tensor, mean: Tensor, factors: Tensor) -> Tensor:
    """The least noise (B, K, n): a share of the factors' variance, and the rounding of the values themselves.

    Both go with the square of the units, pixel by pixel. The second is felt only where there is neither noise nor a
    factor; the smallest number is for a value and a mean that are zero too.
    """
    kind = torch.finfo(value.dtype)
    rounding = torch.maximum(value.abs(), mean.abs()) * kind.eps
    return (NOISE_FLOOR * factors.square().sum(-2) + rounding.square()).clamp_min(kind.tiny)


def log_prob(
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    x: Tensor,
    where: Tensor | None,
    observed: Tensor | None,
) -> Tensor:
    """The log density (B,) of the pixels that are in `where` and not `observed`; None is every pixel, and none."""
    where = torch.ones_like(x, dtype=torch.bool) if where is None else where
    likelihood, _, _ = score(means, factors, noise, x, where if observed is None else where & ~observed)
    logits = logits.to(likelihood.dtype)
    # This difference is exactly zero where no pixel is scored.
    return ((logits + likelihood).logsumexp(-1) - logits.logsumexp(-1)).to(x.dtype)


def marginal_log_prob(
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    x: Tensor,
    where: Tensor | None,
    observed: Tensor | None,
) -> Tensor:
    """The sum (B,) of the log densities of single pixels, those that are in `where` and not `observed`."""
    where = torch.ones_like(x, dtype=torch.bool) if where is None else where
    scored = (where if observed is None else where & ~observed).expand(x.shape).unsqueeze(-4)  # (B, 1, C, H, W)
    # Before arithmetic: what is not scored may be NaN, and NaN · 0 is NaN in values and gradients.
    own = torch.promote_types(x.dtype, torch.float32)
    value, means = (torch.where(scored, t, 0).to(own) for t in (x.unsqueeze(-4), means))
    factors = torch.where(scored.unsqueeze(-4), factors, 0).to(own)
    variance = torch.where(scored, noise, 1).to(own) + factors.square().sum(-4)  # (B, K, C, H, W)
    least = (torch.maximum(value.abs(), means.abs()) * torch.finfo(own).eps).square()
    variance = torch.maximum(variance, least.detach()).clamp_min(torch.finfo(own).tiny)
    each = -0.5 * ((value - means).square() / variance + variance.log() + math.log(2 * math.pi))
    weights = logits.to(own).log_softmax(-1)[..., None, None, None]
    pixels = (weights + each).logsumexp(-4).where(scored.squeeze(-4), 0)  # (B, C, H, W)
    return pixels.sum((-3, -2, -1)).to(x.dtype)


def coverage_level(weights: Tensor, means: Tensor, variances: Tensor, y: Tensor) -> Tensor:
    """The share of the smallest central interval that holds y, ``|2 F(y) − 1|`` with F the CDF of a Gaussian mixture.

    Args:
        weights, means, variances: (N, K, …), of the components. y: (N, …).
    """
    deviation = variances.clamp_min(torch.finfo(variances.dtype).tiny).sqrt()
    cdf = (weights * normal_cdf((y.unsqueeze(1) - means) / deviation)).sum(1)
    return (2 * cdf - 1).abs()


def wide_type(like: Tensor) -> torch.dtype:
    """The type for sums over pixels and L×L algebra: float64 wherever the device has it."""
    return torch.promote_types(like.dtype, torch.float32) if like.device.type == "mps" else torch.float64


def full_precision(device: torch.device) -> torch.autocast:
    """Matrix products as they are written, also inside somebody's autocast."""
    return torch.autocast(device.type, enabled=False)
