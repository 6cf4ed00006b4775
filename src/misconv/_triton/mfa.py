"""Fused kernels for the probability of pixels under an MFA: two passes over the pixels, one more for gradients.

For component k of an image, over scored pixels alone, with δ = x − μ and d the noise:

1. `gram_kernel` sums AᵀD⁻¹A, AᵀD⁻¹δ and the number of pixels over one chunk of pixels;
2. `distance_kernel` adds the chunks, solves C = I + AᵀD⁻¹A = R Rᵀ for ŷ = C⁻¹AᵀD⁻¹δ, and sums (δ − Aŷ)²/d + log d;
3. `mixture_kernel` turns the sums of an image into log N_k, the log density, and weights before and after.

Where the density of each pixel by itself is asked for as well, the second kernel sums its logarithm, and the third one
adds the sums: a density is trained by both scores together. `gradient_kernel` has the gradients of one or both.

Every program of 2 solves the L×L system anew, which costs less than a launch. Sums and algebra are float64, because for
nearly collinear factors and little noise the pivots of C are differences of large numbers; and there are no atomic
operations, so that equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from misconv._triton.mfa_pieces import (
    is_scored,
    log_marginal,
    log_normal,
    marginal_variance,
    pixels_from,
    read,
    read_noise,
    read_rows,
    solve,
    times_rows,
    write_rows,
)

__all__ = ["condition_kernel", "distance_kernel", "gradient_kernel", "gram_kernel", "mixture_kernel"]

_jit: Callable[[Callable[..., Any]], Any] = triton.jit
# Places in the float64 summary of a component; behind them are ŷ (P), C⁻¹ (P, P) and R⁻¹ (P, P).
_REST, _POSTERIOR, _PRIOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CHANGE, _LATENT = tl.constexpr(3), tl.constexpr(4)  # the first: what the pixels by themselves make of a weight

# One parameter a line would be half of this file.
# fmt: off


@_jit
def gram_kernel(
    means, factors, noise, x, where, observed, sums, components, size, where_size, observed_size, chunks, steps,
    FLOOR: tl.constexpr, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums over one chunk of pixels: AᵀD⁻¹A (P, P), AᵀD⁻¹δ (P), n; and room for the distance and two more."""
    part, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    image = part // components
    rows, columns, one = tl.arange(0, P), tl.arange(0, P), tl.arange(0, 1)
    gram, moment = tl.zeros((P, P), tl.float64), tl.zeros((P,), tl.float64)
    count = tl.zeros((1,), tl.float64)
    for step in range(steps):
        pixels = pixels_from((chunk * steps + step) * BLOCK, BLOCK)
        scored = is_scored(where, observed, image, pixels, size, where_size, observed_size)
        count += tl.sum(scored.to(tl.float64), 0)
        if L > 0:
            loadings = read_rows(factors, part, pixels, scored, size, TYPE, L, P, BLOCK)
            value = read(x, image * size + pixels, scored, TYPE)
            mean = read(means, part * size + pixels, scored, TYPE)
            spread = tl.sum(loadings * loadings, 0)
            variance, _ = read_noise(noise, part * size + pixels, scored, value, mean, spread, FLOOR, TYPE)
            precision = 1.0 / variance
            moment += tl.sum(loadings * ((value - mean) * precision)[None, :], 1)
            for j in tl.static_range(L):
                # Read once more, from the cache: a row of a tensor in registers cannot be picked.
                row = read(factors, (part * L + j) * size + pixels, scored, TYPE) * precision
                gram += tl.where(columns[None, :] == j, tl.sum(loadings * row[None, :], 1)[:, None], 0.0)
    base = sums + (part * chunks + chunk) * (P * P + P + 4)
    tl.store(base + rows[:, None] * P + columns[None, :], gram)
    tl.store(base + P * P + rows, moment)
    tl.store(base + P * P + P + one, count)


@_jit
def _sum_marginals(
    logits, means, factors, noise, x, where, observed, sums, image, chunk, components, size, where_size,
    observed_size, chunks, steps, TYPE: tl.constexpr, L: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr
):
    """Over one chunk: the log densities of pixels by themselves, and how many of them are from each component."""
    total, index = tl.zeros((1,), tl.float64), tl.arange(0, PARTS)
    shares = tl.zeros((PARTS,), tl.float64)
    for step in range(steps):
        pixels = pixels_from((chunk * steps + step) * BLOCK, BLOCK)
        scored = is_scored(where, observed, image, pixels, size, where_size, observed_size)
        value = read(x, image * size + pixels, scored, TYPE)
        together = log_marginal(logits, means, factors, noise, image, components, pixels, scored, value, size, TYPE,
                                PARTS, L, BLOCK)
        total += tl.sum(tl.where(scored, together, 0.0), 0)
        if PARTS > 1:
            for k in range(components):
                each = log_normal(logits, means, factors, noise, image, k, components, pixels, scored, value, size,
                                  TYPE, PARTS, L, BLOCK)
                share = tl.sum(tl.where(scored, tl.exp(each - together), 0.0), 0)
                shares = tl.where(index == k, shares + share, shares)
    places = ((image * components + index) * chunks + chunk) * SLOTS + SLOTS - 2
    tl.store(sums + places, shares, mask=index < components)
    tl.store(sums + (image * components * chunks + chunk) * SLOTS + SLOTS - 1 + tl.arange(0, 1), total)


@_jit
def distance_kernel(
    logits, means, factors, noise, x, where, observed, sums, summary, components, size, where_size, observed_size,
    chunks, steps, FLOOR: tl.constexpr, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, MARGINAL: tl.constexpr
):
    """Σ (δ − Aŷ)²/d + log d over one chunk of pixels, whose squares cannot cancel; the first keeps ŷ, C⁻¹, R⁻¹.

    If MARGINAL, the first component also sums the log densities of the pixels by themselves, and for each component the
    probability that they are from it.
    """
    part, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    image = part // components
    latent, inverse, rest = solve(sums, part, chunks, L, P, Q)
    distance = tl.zeros((1,), tl.float64)
    for step in range(steps):
        pixels = pixels_from((chunk * steps + step) * BLOCK, BLOCK)
        scored = is_scored(where, observed, image, pixels, size, where_size, observed_size)
        value = read(x, image * size + pixels, scored, TYPE)
        mean = read(means, part * size + pixels, scored, TYPE)
        deviation, spread = value - mean, tl.zeros((BLOCK,), tl.float64)
        if L > 0:
            loadings = read_rows(factors, part, pixels, scored, size, TYPE, L, P, BLOCK)
            spread = tl.sum(loadings * loadings, 0)
            deviation -= tl.sum(loadings * latent[:, None], 0)
        variance, _ = read_noise(noise, part * size + pixels, scored, value, mean, spread, FLOOR, TYPE)
        # The quotient first: neither it nor what it is multiplied with overflows where their product does not.
        distance += tl.sum(deviation * (deviation / variance) + tl.log(variance), 0)
    SLOTS: tl.constexpr = P * P + P + 4
    tl.store(sums + (part * chunks + chunk) * SLOTS + SLOTS - 3 + tl.arange(0, 1), distance)
    if MARGINAL:  # noqa: SIM102  # known when it is compiled, unlike what follows
        if part % components == 0:
            _sum_marginals(logits, means, factors, noise, x, where, observed, sums, image, chunk, components, size,
                           where_size, observed_size, chunks, steps, TYPE, L, SLOTS, BLOCK, PARTS)
    if chunk == 0:
        rows, columns = tl.arange(0, P), tl.arange(0, P)
        base = summary + part * (4 + P + 2 * P * P)
        tl.store(base + _REST, rest)
        tl.store(base + _LATENT + rows, latent)
        places = base + _LATENT + P + rows[:, None] * P + columns[None, :]
        tl.store(places, tl.sum(inverse[:, :, None] * inverse[:, None, :], 0))  # C⁻¹ = R⁻ᵀ R⁻¹
        tl.store(places + P * P, inverse)


@_jit
def mixture_kernel(
    logits, sums, summary, log_density, marginal, new_logits, components, chunks, TYPE: tl.constexpr,
    PARTS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr
):
    """log Σ_k π_k N_k of an image and the logits afterwards; the summary keeps the weights before and after.

    Of pixels by themselves: the log density, and for the summary how many more are from a component than it expects.
    """
    SLOTS: tl.constexpr = P * P + P + 4
    image, k, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, Q)
    part, real = image * components + k, k < components
    base = summary + part * (4 + P + 2 * P * P)
    places = (part[:, None] * chunks + chunk[None, :]) * SLOTS + SLOTS - 3
    mask = real[:, None] & (chunk < chunks)[None, :]
    distance = tl.sum(tl.load(sums + places, mask=mask, other=0.0), 1)
    rest = tl.load(base + _REST, mask=real, other=0.0)
    prior = tl.load(logits + part, mask=real, other=float("-inf")).to(TYPE).to(tl.float64)
    prior -= tl.max(prior, 0)
    before = tl.log(tl.sum(tl.exp(prior), 0))
    joint = prior - 0.5 * (distance + rest)
    top = tl.max(joint, 0)
    total = top + tl.log(tl.sum(tl.exp(joint - top), 0))
    tl.store(base + _PRIOR, tl.exp(prior - before), mask=real)
    tl.store(base + _POSTERIOR, tl.exp(joint - total), mask=real)
    if log_density is not None:
        # This difference is exactly zero where no pixel is scored.
        tl.store(log_density + image, (total - before).to(TYPE))
    if marginal is not None:
        by_chunk = sums + (image * components * chunks + chunk) * SLOTS + SLOTS - 1
        tl.store(marginal + image, tl.sum(tl.load(by_chunk, mask=chunk < chunks, other=0.0), 0).to(TYPE))
        number = tl.sum(tl.load(sums + places - 1, mask=mask, other=0.0), 1)
        from_it = tl.sum(tl.load(sums + places + 1, mask=mask, other=0.0), 1)
        tl.store(base + _CHANGE, from_it - number * tl.exp(prior - before), mask=real)
    if new_logits is not None:
        tl.store(new_logits + part, (joint - total).to(TYPE), mask=real)


@_jit
def gradient_kernel(
    upstream, by_marginal, logits, means, factors, noise, x, where, observed, summary, logits_gradient, means_gradient,
    factors_gradient, noise_gradient, x_gradient, stride, marginal_stride, components, size, where_size, observed_size,
    FLOOR: tl.constexpr, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """Gradients of one block of pixels for all components of an image; None is not asked for, or not given.

    With α = D⁻¹(δ − Aŷ): ∂logN/∂μ = α, ∂logN/∂a = α ŷ − C⁻¹a/d, ∂logN/∂d = ½ (α² − 1/d + aᵀC⁻¹a/d²), each times the
    weight of the component afterwards. For a pixel by itself, with ε = δ/σ²: ∂/∂μ = ε, ∂/∂σ² = ½ (ε² − 1/σ²), each
    times the probability that it is from the component.
    """
    image, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pixels = pixels_from(block * BLOCK, BLOCK)
    inside = pixels < size
    scored = is_scored(where, observed, image, pixels, size, where_size, observed_size)
    value = read(x, image * size + pixels, scored, TYPE)
    scale, marginal_scale = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    together = tl.zeros((BLOCK,), tl.float64)
    if upstream is not None:
        scale = tl.load(upstream + image * stride).to(TYPE).to(tl.float64)
    if by_marginal is not None:
        marginal_scale = tl.load(by_marginal + image * marginal_stride).to(TYPE).to(tl.float64)
        if PARTS > 1:
            together = log_marginal(logits, means, factors, noise, image, components, pixels, scored, value, size,
                                    TYPE, PARTS, L, BLOCK)
    total, rows = tl.zeros((BLOCK,), tl.float64), tl.arange(0, P)
    for k in range(components):
        part = image * components + k
        base = summary + part * (4 + P + 2 * P * P)
        weight = scale * tl.load(base + _POSTERIOR)
        if logits_gradient is not None:
            change = weight - scale * tl.load(base + _PRIOR)
            if by_marginal is not None and PARTS > 1:
                change += marginal_scale * tl.load(base + _CHANGE)
            tl.store(logits_gradient + part, change.to(TYPE), mask=block == 0)
        mean = read(means, part * size + pixels, scored, TYPE)
        loadings, factor_variance = tl.zeros((P, BLOCK), tl.float64), tl.zeros((BLOCK,), tl.float64)
        by_mean, by_noise = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        by_factors = tl.zeros((P, BLOCK), tl.float64)
        if L > 0:
            loadings = read_rows(factors, part, pixels, scored, size, TYPE, L, P, BLOCK)
            factor_variance = tl.sum(loadings * loadings, 0)
        if upstream is not None:
            alpha = value - mean
            latent = tl.load(base + _LATENT + rows)
            if L > 0:
                alpha -= tl.sum(loadings * latent[:, None], 0)
            variance, free = read_noise(noise, part * size + pixels, scored, value, mean, factor_variance, FLOOR, TYPE)
            precision = 1.0 / variance
            alpha *= precision
            slope = alpha * alpha - precision
            if L > 0 and (factors_gradient is not None or noise_gradient is not None):
                spread = times_rows(base + _LATENT + P, factors, part, pixels, scored, size, TYPE, L, P, BLOCK)  # C⁻¹a
                slope += tl.sum(loadings * spread, 0) * precision * precision
                by_factors = weight * (alpha[None, :] * latent[:, None] - spread * precision[None, :])
            by_mean = weight * alpha
            by_noise = tl.where(free, 0.5 * weight * slope, 0.0)
        if by_marginal is not None:
            share = marginal_scale
            if PARTS > 1:
                each = log_normal(logits, means, factors, noise, image, k, components, pixels, scored, value, size,
                                  TYPE, PARTS, L, BLOCK)
                share = marginal_scale * tl.exp(each - together)
            given = tl.load(noise + part * size + pixels, mask=scored, other=1.0).to(TYPE).to(tl.float64)
            variance, free = marginal_variance(given, factor_variance, value, mean, TYPE)
            apart = (value - mean) / variance
            change = tl.where(free & scored, 0.5 * share * (apart * apart - 1.0 / variance), 0.0)
            by_mean += tl.where(scored, share * apart, 0.0)
            by_noise += change
            if L > 0:
                by_factors += 2.0 * change[None, :] * loadings
        if means_gradient is not None:
            tl.store(means_gradient + part * size + pixels, by_mean.to(TYPE), mask=inside)
        if factors_gradient is not None and L > 0:
            write_rows(factors_gradient, part, block, by_factors, size, TYPE, L, P, BLOCK)
        if noise_gradient is not None:
            tl.store(noise_gradient + part * size + pixels, by_noise.to(TYPE), mask=inside)
        total -= by_mean
    if x_gradient is not None:
        tl.store(x_gradient + image * size + pixels, total.to(TYPE), mask=inside)


@_jit
def condition_kernel(
    means, factors, x, where, observed, summary, new_means, new_factors, components, size, where_size, observed_size,
    TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):
    """Means μ + Aŷ, or x where it is known now, and factors A R⁻ᵀ, of one block of pixels."""
    part, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    image = part // components
    pixels = pixels_from(block * BLOCK, BLOCK)
    inside = pixels < size
    fresh = is_scored(where, observed, image, pixels, size, where_size, observed_size)
    moved = read(means, part * size + pixels, inside, TYPE)
    if L > 0:
        rows = tl.arange(0, P)
        free = is_scored(None, observed, image, pixels, size, where_size, observed_size)
        base = summary + part * (4 + P + 2 * P * P) + _LATENT
        loadings = read_rows(factors, part, pixels, free, size, TYPE, L, P, BLOCK)
        moved += tl.sum(loadings * tl.load(base + rows)[:, None], 0)
        narrowed = times_rows(base + P + P * P, factors, part, pixels, free, size, TYPE, L, P, BLOCK)
        write_rows(new_factors, part, block, narrowed, size, TYPE, L, P, BLOCK)
    moved = tl.where(fresh, read(x, image * size + pixels, fresh, TYPE), moved)
    tl.store(new_means + part * size + pixels, moved.to(TYPE), mask=inside)


# fmt: on
