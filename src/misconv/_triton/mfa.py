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

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = ["condition_kernel", "distance_kernel", "gradient_kernel", "gram_kernel", "mixture_kernel"]

_jit: Callable[[Callable[..., Any]], Any] = triton.jit
_LOG_2_PI = tl.constexpr(math.log(2 * math.pi))
_ROUNDING, _LEAST = tl.constexpr(2.0**-52), tl.constexpr(2.0**-1022)  # of float64: its precision, its smallest number
# Places in the float64 summary of a component; behind them are ŷ (P), C⁻¹ (P, P) and R⁻¹ (P, P).
_REST, _POSTERIOR, _PRIOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_CHANGE, _LATENT = tl.constexpr(3), tl.constexpr(4)  # the first: what the pixels by themselves make of a weight
_LOWEST = tl.constexpr(-(2.0**1000))  # below every log density, and a number that can be subtracted


# Pieces of kernels ------------------------------------------------------------------------------------------------
# One parameter a line would be half of this file.
# fmt: off


@_jit
def _pixels(first, BLOCK: tl.constexpr):
    # Masks are data, so loads cannot be vectors: call the pixels single, and neighbours go to neighbouring threads.
    return tl.max_contiguous(first + tl.arange(0, BLOCK), 1)


@_jit
def _scored(where, observed, image, pixels, size, where_size, observed_size):
    """In `where` and not exact already; a mask shared by the channels is smaller than an image, and repeats."""
    inside = pixels < size
    scored = inside
    if where is not None:
        scored = scored & (tl.load(where + image * where_size + pixels % where_size, mask=inside, other=0) != 0)
    if observed is not None:
        exact = tl.load(observed + image * observed_size + pixels % observed_size, mask=inside, other=0)
        scored = scored & (exact == 0)
    return scored


@_jit
def _read(values, places, mask, TYPE: tl.constexpr):
    """Values in float64 where the mask holds, zero elsewhere; what is masked is never read."""
    return tl.load(values + places, mask=mask, other=0.0).to(TYPE).to(tl.float64)


@_jit
def _read_rows(
    factors, part, pixels, mask, size, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):
    """The factors (P, BLOCK) of some pixels, put together from rows so that each thread has whole columns."""
    rows = tl.arange(0, P)[:, None]
    loadings = tl.zeros((P, BLOCK), tl.float64)
    for j in tl.static_range(L):
        row = _read(factors, (part * L + j) * size + pixels, mask, TYPE)
        loadings = tl.where(rows == j, row[None, :], loadings)
    return loadings


@_jit
def _write_rows(
    factors, part, block, values, size, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):
    rows, pixels = tl.arange(0, P)[:, None], block * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(factors + (part * L + rows) * size + pixels, values.to(TYPE), mask=(rows < L) & (pixels < size))


@_jit
def _read_noise(noise, places, scored, value, mean, spread, FLOOR: tl.constexpr, TYPE: tl.constexpr):
    """Noise in float64, one where it is not scored, and where it has a gradient; as `_likelihood.score` has it.

    It is at least a share FLOOR of the factors' variance (`spread`) and the rounding of the values; NaN stays. FLOOR is
    a power of two, because some versions of Triton read a bare number as float32.
    """
    given = tl.load(noise + places, mask=scored, other=1.0).to(TYPE).to(tl.float64)
    rounding = tl.maximum(tl.abs(value), tl.abs(mean)) * _ROUNDING
    least = tl.maximum(spread * FLOOR + rounding * rounding, tl.full((1,), _LEAST, tl.float64))
    return tl.where(given <= least, least, given), scored & (given > least)


@_jit
def _times_rows(
    matrix, factors, part, pixels, mask, size, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr
):
    """A (P, P) matrix in memory times the factors of some pixels."""
    rows = tl.arange(0, P)
    product = tl.zeros((P, BLOCK), tl.float64)
    for j in tl.static_range(L):
        row = _read(factors, (part * L + j) * size + pixels, mask, TYPE)
        product += tl.load(matrix + rows * P + j)[:, None] * row[None, :]
    return product


@_jit
def _solve(sums, part, chunks, L: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """ŷ (P), R⁻¹ (P, P) and log det C + |ŷ|² + n log 2π, from the sums of all chunks.

    Elimination on (C | I): all pivots of C ⪰ I are at least 1, and one that rounding has pushed below is set to 1.
    """
    SLOTS: tl.constexpr = P * P + P + 4
    rows, columns, chunk = tl.arange(0, P), tl.arange(0, P), tl.arange(0, Q)
    starts, real = sums + (part * chunks + chunk) * SLOTS, chunk < chunks
    places = starts[:, None, None] + rows[None, :, None] * P + columns[None, None, :]
    matrix = tl.sum(tl.load(places, mask=real[:, None, None], other=0.0), 0)
    moment = tl.sum(tl.load(starts[:, None] + P * P + rows[None, :], mask=real[:, None], other=0.0), 0)
    count = tl.sum(tl.load(starts + P * P + P, mask=real, other=0.0), 0)

    inverse = tl.where(rows[:, None] == columns[None, :], 1.0, 0.0).to(tl.float64)
    matrix += inverse
    pivots = tl.full((P,), 1.0, tl.float64)
    for j in tl.static_range(L):
        matrix_row = tl.sum(tl.where(rows[:, None] == j, matrix, 0.0), 0)
        inverse_row = tl.sum(tl.where(rows[:, None] == j, inverse, 0.0), 0)
        matrix_column = tl.sum(tl.where(columns[None, :] == j, matrix, 0.0), 1)
        pivot = tl.sum(tl.where(columns == j, matrix_row, 0.0), 0)
        pivot = tl.where(pivot < 1.0, 1.0, pivot)
        share = tl.where(rows > j, matrix_column / pivot, 0.0)
        matrix -= share[:, None] * matrix_row[None, :]
        inverse -= share[:, None] * inverse_row[None, :]
        pivots = tl.where(rows == j, pivot, pivots)
    inverse = inverse / tl.sqrt(pivots)[:, None]
    whitened = tl.sum(inverse * moment[None, :], 1)
    latent = tl.sum(inverse * whitened[:, None], 0)
    rest = tl.sum(tl.log(pivots), 0) + tl.sum(latent * latent, 0) + count * _LOG_2_PI
    return latent, inverse, rest


@_jit
def _log_weight(logits, image, k, components, TYPE: tl.constexpr, PARTS: tl.constexpr):
    """log π_k."""
    index = tl.arange(0, PARTS)
    values = tl.load(logits + image * components + index, mask=index < components, other=float("-inf"))
    values = values.to(TYPE).to(tl.float64)
    values -= tl.max(values, 0)
    return tl.sum(tl.where(index == k, values, 0.0), 0) - tl.log(tl.sum(tl.exp(values), 0))


@_jit
def _marginal_variance(given, factor_variance, value, mean, TYPE: tl.constexpr):
    """The variance of pixels by themselves, and where it has a gradient; as `likelihood.marginal_log_prob` has it."""
    variance = given + factor_variance
    rounding, smallest = tl.full((1,), 2.0**-52, tl.float64), tl.full((1,), _LEAST, tl.float64)
    if TYPE == tl.float32:  # noqa: SIM300  # a type, and no number
        rounding, smallest = tl.full((1,), 2.0**-23, tl.float64), tl.full((1,), 2.0**-126, tl.float64)
    rounding = tl.maximum(tl.abs(value), tl.abs(mean)) * rounding
    least = tl.maximum(rounding * rounding, smallest)
    return tl.where(variance <= least, least, variance), variance > least


@_jit
def _log_normal(
    logits, means, factors, noise, image, k, components, pixels, scored, value, size, TYPE: tl.constexpr,
    PARTS: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr
):
    """log π_k N(x_i; μ_i, σ²_i) of some pixels by themselves."""
    part = image * components + k
    mean, spread = _read(means, part * size + pixels, scored, TYPE), tl.zeros((BLOCK,), tl.float64)
    for j in tl.static_range(L):
        row = _read(factors, (part * L + j) * size + pixels, scored, TYPE)
        spread += row * row
    given = tl.load(noise + part * size + pixels, mask=scored, other=1.0).to(TYPE).to(tl.float64)
    variance, _ = _marginal_variance(given, spread, value, mean, TYPE)
    deviation = value - mean
    each = -0.5 * (deviation * (deviation / variance) + tl.log(variance) + _LOG_2_PI)
    if PARTS > 1:
        each += _log_weight(logits, image, k, components, TYPE, PARTS)
    return each


@_jit
def _log_marginal(
    logits, means, factors, noise, image, components, pixels, scored, value, size, TYPE: tl.constexpr,
    PARTS: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr
):
    """log Σ_k π_k N(x_i; μ_i, σ²_i) of some pixels by themselves."""
    top, total = tl.full((BLOCK,), _LOWEST, tl.float64), tl.zeros((BLOCK,), tl.float64)
    for k in range(components):
        each = _log_normal(logits, means, factors, noise, image, k, components, pixels, scored, value, size, TYPE,
                           PARTS, L, BLOCK)
        highest = tl.maximum(top, each)
        total = total * tl.exp(top - highest) + tl.exp(each - highest)
        top = highest
    return top + tl.log(total)


# Kernels ----------------------------------------------------------------------------------------------------------


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
        pixels = _pixels((chunk * steps + step) * BLOCK, BLOCK)
        scored = _scored(where, observed, image, pixels, size, where_size, observed_size)
        count += tl.sum(scored.to(tl.float64), 0)
        if L > 0:
            loadings = _read_rows(factors, part, pixels, scored, size, TYPE, L, P, BLOCK)
            value = _read(x, image * size + pixels, scored, TYPE)
            mean = _read(means, part * size + pixels, scored, TYPE)
            spread = tl.sum(loadings * loadings, 0)
            variance, _ = _read_noise(noise, part * size + pixels, scored, value, mean, spread, FLOOR, TYPE)
            precision = 1.0 / variance
            moment += tl.sum(loadings * ((value - mean) * precision)[None, :], 1)
            for j in tl.static_range(L):
                # Read once more, from the cache: a row of a tensor in registers cannot be picked.
                row = _read(factors, (part * L + j) * size + pixels, scored, TYPE) * precision
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
        pixels = _pixels((chunk * steps + step) * BLOCK, BLOCK)
        scored = _scored(where, observed, image, pixels, size, where_size, observed_size)
        value = _read(x, image * size + pixels, scored, TYPE)
        together = _log_marginal(logits, means, factors, noise, image, components, pixels, scored, value, size, TYPE,
                                 PARTS, L, BLOCK)
        total += tl.sum(tl.where(scored, together, 0.0), 0)
        if PARTS > 1:
            for k in range(components):
                each = _log_normal(logits, means, factors, noise, image, k, components, pixels, scored, value, size,
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
    latent, inverse, rest = _solve(sums, part, chunks, L, P, Q)
    distance = tl.zeros((1,), tl.float64)
    for step in range(steps):
        pixels = _pixels((chunk * steps + step) * BLOCK, BLOCK)
        scored = _scored(where, observed, image, pixels, size, where_size, observed_size)
        value = _read(x, image * size + pixels, scored, TYPE)
        mean = _read(means, part * size + pixels, scored, TYPE)
        deviation, spread = value - mean, tl.zeros((BLOCK,), tl.float64)
        if L > 0:
            loadings = _read_rows(factors, part, pixels, scored, size, TYPE, L, P, BLOCK)
            spread = tl.sum(loadings * loadings, 0)
            deviation -= tl.sum(loadings * latent[:, None], 0)
        variance, _ = _read_noise(noise, part * size + pixels, scored, value, mean, spread, FLOOR, TYPE)
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
    pixels = _pixels(block * BLOCK, BLOCK)
    inside = pixels < size
    scored = _scored(where, observed, image, pixels, size, where_size, observed_size)
    value = _read(x, image * size + pixels, scored, TYPE)
    scale, marginal_scale = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    together = tl.zeros((BLOCK,), tl.float64)
    if upstream is not None:
        scale = tl.load(upstream + image * stride).to(TYPE).to(tl.float64)
    if by_marginal is not None:
        marginal_scale = tl.load(by_marginal + image * marginal_stride).to(TYPE).to(tl.float64)
        if PARTS > 1:
            together = _log_marginal(logits, means, factors, noise, image, components, pixels, scored, value, size,
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
        mean = _read(means, part * size + pixels, scored, TYPE)
        loadings, factor_variance = tl.zeros((P, BLOCK), tl.float64), tl.zeros((BLOCK,), tl.float64)
        by_mean, by_noise = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        by_factors = tl.zeros((P, BLOCK), tl.float64)
        if L > 0:
            loadings = _read_rows(factors, part, pixels, scored, size, TYPE, L, P, BLOCK)
            factor_variance = tl.sum(loadings * loadings, 0)
        if upstream is not None:
            alpha = value - mean
            latent = tl.load(base + _LATENT + rows)
            if L > 0:
                alpha -= tl.sum(loadings * latent[:, None], 0)
            variance, free = _read_noise(noise, part * size + pixels, scored, value, mean, factor_variance, FLOOR, TYPE)
            precision = 1.0 / variance
            alpha *= precision
            slope = alpha * alpha - precision
            if L > 0 and (factors_gradient is not None or noise_gradient is not None):
                spread = _times_rows(base + _LATENT + P, factors, part, pixels, scored, size, TYPE, L, P, BLOCK)  # C⁻¹a
                slope += tl.sum(loadings * spread, 0) * precision * precision
                by_factors = weight * (alpha[None, :] * latent[:, None] - spread * precision[None, :])
            by_mean = weight * alpha
            by_noise = tl.where(free, 0.5 * weight * slope, 0.0)
        if by_marginal is not None:
            share = marginal_scale
            if PARTS > 1:
                each = _log_normal(logits, means, factors, noise, image, k, components, pixels, scored, value, size,
                                   TYPE, PARTS, L, BLOCK)
                share = marginal_scale * tl.exp(each - together)
            given = tl.load(noise + part * size + pixels, mask=scored, other=1.0).to(TYPE).to(tl.float64)
            variance, free = _marginal_variance(given, factor_variance, value, mean, TYPE)
            apart = (value - mean) / variance
            change = tl.where(free & scored, 0.5 * share * (apart * apart - 1.0 / variance), 0.0)
            by_mean += tl.where(scored, share * apart, 0.0)
            by_noise += change
            if L > 0:
                by_factors += 2.0 * change[None, :] * loadings
        if means_gradient is not None:
            tl.store(means_gradient + part * size + pixels, by_mean.to(TYPE), mask=inside)
        if factors_gradient is not None and L > 0:
            _write_rows(factors_gradient, part, block, by_factors, size, TYPE, L, P, BLOCK)
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
    pixels = _pixels(block * BLOCK, BLOCK)
    inside = pixels < size
    fresh = _scored(where, observed, image, pixels, size, where_size, observed_size)
    moved = _read(means, part * size + pixels, inside, TYPE)
    if L > 0:
        rows = tl.arange(0, P)
        free = _scored(None, observed, image, pixels, size, where_size, observed_size)
        base = summary + part * (4 + P + 2 * P * P) + _LATENT
        loadings = _read_rows(factors, part, pixels, free, size, TYPE, L, P, BLOCK)
        moved += tl.sum(loadings * tl.load(base + rows)[:, None], 0)
        narrowed = _times_rows(base + P + P * P, factors, part, pixels, free, size, TYPE, L, P, BLOCK)
        _write_rows(new_factors, part, block, narrowed, size, TYPE, L, P, BLOCK)
    moved = tl.where(fresh, _read(x, image * size + pixels, fresh, TYPE), moved)
    tl.store(new_means + part * size + pixels, moved.to(TYPE), mask=inside)


# fmt: on
