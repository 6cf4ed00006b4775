"""Pieces of the kernels for the probability of pixels under an MFA: reads, the solver, log densities of one pixel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

__all__ = [
    "is_scored",
    "log_marginal",
    "log_normal",
    "marginal_variance",
    "pixels_from",
    "read",
    "read_noise",
    "read_rows",
    "solve",
    "times_rows",
    "write_rows",
]

_jit: Callable[[Callable[..., Any]], Any] = triton.jit
_LOG_2_PI = tl.constexpr(math.log(2 * math.pi))
_ROUNDING, _LEAST = tl.constexpr(2.0**-52), tl.constexpr(2.0**-1022)  # of float64: its precision, its smallest number
_LOWEST = tl.constexpr(-(2.0**1000))  # below every log density, and a number that can be subtracted

# One parameter a line would be half of this file.
# fmt: off


@_jit
def pixels_from(first, BLOCK: tl.constexpr):
    # Masks are data, so loads cannot be vectors: call the pixels single, and neighbours go to neighbouring threads.
    return tl.max_contiguous(first + tl.arange(0, BLOCK), 1)


@_jit
def is_scored(where, observed, image, pixels, size, where_size, observed_size):
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
def read(values, places, mask, TYPE: tl.constexpr):
    """Values in float64 where the mask holds, zero elsewhere; what is masked is never read."""
    return tl.load(values + places, mask=mask, other=0.0).to(TYPE).to(tl.float64)


@_jit
def read_rows(
    factors, part, pixels, mask, size, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):
    """The factors (P, BLOCK) of some pixels, put together from rows so that each thread has whole columns."""
    rows = tl.arange(0, P)[:, None]
    loadings = tl.zeros((P, BLOCK), tl.float64)
    for j in tl.static_range(L):
        row = read(factors, (part * L + j) * size + pixels, mask, TYPE)
        loadings = tl.where(rows == j, row[None, :], loadings)
    return loadings


@_jit
def write_rows(
    factors, part, block, values, size, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):
    rows, pixels = tl.arange(0, P)[:, None], block * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(factors + (part * L + rows) * size + pixels, values.to(TYPE), mask=(rows < L) & (pixels < size))


@_jit
def read_noise(noise, places, scored, value, mean, spread, FLOOR: tl.constexpr, TYPE: tl.constexpr):
    """Noise in float64, one where it is not scored, and where it has a gradient; as `_likelihood.score` has it.

    It is at least a share FLOOR of the factors' variance (`spread`) and the rounding of the values; NaN stays. FLOOR is
    a power of two, because some versions of Triton read a bare number as float32.
    """
    given = tl.load(noise + places, mask=scored, other=1.0).to(TYPE).to(tl.float64)
    rounding = tl.maximum(tl.abs(value), tl.abs(mean)) * _ROUNDING
    least = tl.maximum(spread * FLOOR + rounding * rounding, tl.full((1,), _LEAST, tl.float64))
    return tl.where(given <= least, least, given), scored & (given > least)


@_jit
def times_rows(
    matrix, factors, part, pixels, mask, size, TYPE: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr
):
    """A (P, P) matrix in memory times the factors of some pixels."""
    rows = tl.arange(0, P)
    product = tl.zeros((P, BLOCK), tl.float64)
    for j in tl.static_range(L):
        row = read(factors, (part * L + j) * size + pixels, mask, TYPE)
        product += tl.load(matrix + rows * P + j)[:, None] * row[None, :]
    return product


@_jit
def solve(sums, part, chunks, L: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
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
def log_weight(logits, image, k, components, TYPE: tl.constexpr, PARTS: tl.constexpr):
    """log π_k."""
    index = tl.arange(0, PARTS)
    values = tl.load(logits + image * components + index, mask=index < components, other=float("-inf"))
    values = values.to(TYPE).to(tl.float64)
    values -= tl.max(values, 0)
    return tl.sum(tl.where(index == k, values, 0.0), 0) - tl.log(tl.sum(tl.exp(values), 0))


@_jit
def marginal_variance(given, factor_variance, value, mean, TYPE: tl.constexpr):
    """The variance of pixels by themselves, and where it has a gradient; as `likelihood.marginal_log_prob` has it."""
    variance = given + factor_variance
    rounding, smallest = tl.full((1,), 2.0**-52, tl.float64), tl.full((1,), _LEAST, tl.float64)
    if TYPE == tl.float32:  # noqa: SIM300  # a type, and no number
        rounding, smallest = tl.full((1,), 2.0**-23, tl.float64), tl.full((1,), 2.0**-126, tl.float64)
    rounding = tl.maximum(tl.abs(value), tl.abs(mean)) * rounding
    least = tl.maximum(rounding * rounding, smallest)
    return tl.where(variance <= least, least, variance), variance > least


@_jit
def log_normal(
    logits, means, factors, noise, image, k, components, pixels, scored, value, size, TYPE: tl.constexpr,
    PARTS: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr
):
    """log π_k N(x_i; μ_i, σ²_i) of some pixels by themselves."""
    part = image * components + k
    mean, spread = read(means, part * size + pixels, scored, TYPE), tl.zeros((BLOCK,), tl.float64)
    for j in tl.static_range(L):
        row = read(factors, (part * L + j) * size + pixels, scored, TYPE)
        spread += row * row
    given = tl.load(noise + part * size + pixels, mask=scored, other=1.0).to(TYPE).to(tl.float64)
    variance, _ = marginal_variance(given, spread, value, mean, TYPE)
    deviation = value - mean
    each = -0.5 * (deviation * (deviation / variance) + tl.log(variance) + _LOG_2_PI)
    if PARTS > 1:
        each += log_weight(logits, image, k, components, TYPE, PARTS)
    return each


@_jit
def log_marginal(
    logits, means, factors, noise, image, components, pixels, scored, value, size, TYPE: tl.constexpr,
    PARTS: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr
):
    """log Σ_k π_k N(x_i; μ_i, σ²_i) of some pixels by themselves."""
    top, total = tl.full((BLOCK,), _LOWEST, tl.float64), tl.zeros((BLOCK,), tl.float64)
    for k in range(components):
        each = log_normal(logits, means, factors, noise, image, k, components, pixels, scored, value, size, TYPE,
                          PARTS, L, BLOCK)
        highest = tl.maximum(top, each)
        total = total * tl.exp(top - highest) + tl.exp(each - highest)
        top = highest
    return top + tl.log(total)
# fmt: on
