"""Expected activations and their derivatives inside Triton kernels.

With a = |m|/σ all closed forms need two smooth functions of a ≥ 0, both positive and decreasing: the tail
Φ(−a) = e^(−a²/2) h(a), and the excess E[ReLU(Z)] − ReLU(m) = σ e^(−a²/2) g(a) with g = 1/√(2π) − a h. Fitted as
polynomials in t = 1/(1 + c a) times t or t², with a relative error below 2e-8 and 9e-8 for all a; a test holds them
to the error of float32. Fitting g by itself avoids the cancellation of m Φ + σ φ.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activation", "expected", "slopes"]

# Variances are formed in float32: beyond its range they are 0, and count as certain, or infinite, and so is what they
# make of a ReLU. `misconv.plain` keeps units, and knows no such limits.
_TINY = tl.constexpr(1.1754943508222875e-38)
_HUGE = tl.constexpr(3e38)


@triton.jit
def _tail(a):
    """h(a), with Φ(−a) = e^(−a²/2) h(a) for a ≥ 0."""
    t = 1.0 / (1.0 + 0.25 * a)
    p = 0.020501299907568667
    p = p * t - 0.08396989525939003
    p = p * t + 0.10110902088611787
    p = p * t - 0.03696977802440303
    p = p * t + 0.06656627124998421
    p = p * t + 0.05809331380618633
    p = p * t + 0.08173635976098952
    p = p * t + 0.09346249033459374
    p = p * t + 0.09973527226506393
    p = p * t + 0.09973565396231346
    return p * t


@triton.jit
def _excess(a):
    """g(a), with E[ReLU(Z)] = ReLU(m) + σ e^(−a²/2) g(a) for a = |m|/σ."""
    t = 1.0 / (1.0 + 0.3 * a)
    p = -0.05802272966655407
    p = p * t + 0.28611339100587885
    p = p * t - 0.5142776780697381
    p = p * t + 0.36762957549869796
    p = p * t - 0.12094987971170354
    p = p * t + 0.13586395158265793
    p = p * t + 0.0959322708532173
    p = p * t + 0.09899540968318643
    p = p * t + 0.07175179025622637
    p = p * t + 0.03590621381225765
    return p * t * t


@triton.jit
def _relu(m, v):
    """E[ReLU(Z)] for Z ~ N(m, v)."""
    a = tl.minimum(tl.abs(m) * tl.rsqrt(tl.maximum(v, _TINY)), 100.0)
    return tl.maximum(m, 0.0) + tl.sqrt(v) * tl.exp(-0.5 * a * a) * _excess(a)


@triton.jit
def _relu_slopes(m, v):
    """The derivatives of E[ReLU(Z)] by m, Φ(m/σ), and by v, φ(m/σ)/2σ; a step and 0 where v = 0."""
    inverse = tl.rsqrt(tl.maximum(v, _TINY))
    a = tl.minimum(tl.abs(m) * inverse, 100.0)
    bell = tl.exp(-0.5 * a * a)
    tail = bell * _tail(a)
    by_m = tl.where(m > 0, 1.0 - tail, tail)
    step = tl.where(m > 0, 1.0, 0.0)
    return tl.where(v > 0, by_m, step), tl.where(v > 0, 0.19947114020071635 * bell * inverse, 0.0)


@triton.jit
def _above(m, v):
    """P(Z > 0) = Φ(m/σ)."""
    by_m, _ = _relu_slopes(m, v)
    return by_m


@triton.jit
def _step_times_x(m, v, steepness: tl.constexpr):
    """E[ZΦ(λZ)] and its derivatives by m and v."""
    s = steepness * tl.rsqrt(1.0 + steepness * steepness * v)
    r = m * s
    a = tl.abs(r)
    bell = tl.exp(-0.5 * a * a)
    tail = bell * _tail(a)
    step = tl.where(r > 0, 1.0 - tail, tail)
    bell = bell * 0.3989422804014327
    rest = 1.0 - v * s * s
    value = tl.where(v > _HUGE, float("inf"), m * step + v * s * bell)
    return value, step + m * s * bell * rest, bell * (s - 0.5 * s * s * s * (m * m * rest + v))


@triton.jit
def _add_step(so_far, m, v, share: tl.constexpr, steepness: tl.constexpr):
    value, by_m, by_v = so_far
    more, more_m, more_v = _step_times_x(m, v, steepness)
    return value + share * more, by_m + share * more_m, by_v + share * more_v


@triton.jit
def _silu(m, v):
    """E[SiLU(Z)] and its derivatives, the logistic function written as ten normal ones, enough for float32."""
    zero = tl.zeros_like(m)
    sums = (zero, zero, zero)
    sums = _add_step(sums, m, v, 9.995493506252932e-05, 0.20769341215506743)
    sums = _add_step(sums, m, v, 0.0034878531920353815, 0.25826607701493864)
    sums = _add_step(sums, m, v, 0.02893127261460244, 0.31776039280912505)
    sums = _add_step(sums, m, v, 0.10382359752947912, 0.39104555210511366)
    sums = _add_step(sums, m, v, 0.21122972099828216, 0.48262253603669175)
    sums = _add_step(sums, m, v, 0.27683423030898824, 0.5970170376584025)
    sums = _add_step(sums, m, v, 0.23457230716370883, 0.739080795113265)
    sums = _add_step(sums, m, v, 0.11465392845224401, 0.9154433048713759)
    sums = _add_step(sums, m, v, 0.02501701935464422, 1.1376316670979567)
    return _add_step(sums, m, v, 0.001350115450953097, 1.4342093854825033)


@triton.jit
def activation(m, ACTIVATION: tl.constexpr, low, high):
    """The activation itself, and its derivative."""
    if ACTIVATION == "relu":
        value, slope = tl.maximum(m, 0.0), tl.where(m > 0, 1.0, 0.0)
    elif ACTIVATION == "leaky_relu":
        value, slope = tl.where(m > 0, m, low * m), tl.where(m > 0, 1.0, low)
    elif ACTIVATION == "hardtanh":
        value, slope = tl.minimum(tl.maximum(m, low), high), tl.where((m > low) & (m < high), 1.0, 0.0)
    elif ACTIVATION == "gelu":
        value, slope, _ = _step_times_x(m, 0.0 * m, 1.0)
    elif ACTIVATION == "silu":
        e = tl.exp(-tl.abs(m))
        s = tl.where(m > 0, 1.0, e) / (1.0 + e)
        value, slope = m * s, s * (1.0 + m * (1.0 - s))
    elif ACTIVATION == "square":
        value, slope = m * m, 2.0 * m
    else:
        value, slope = m, tl.full(m.shape, 1.0, tl.float32)
    return value, slope


@triton.jit
def expected(m, v, ACTIVATION: tl.constexpr, low, high):
    """E[f(Z)] for Z ~ N(m, v)."""
    if ACTIVATION == "relu":
        value = _relu(m, v)
    elif ACTIVATION == "leaky_relu":
        value = low * m + (1.0 - low) * _relu(m, v)
    elif ACTIVATION == "hardtanh":
        value = low + (_relu(m - low, v) - _relu(m - high, v))
        # Of a wide Gaussian l + ∫ P(Z > t) dt by three points, without a difference of large numbers.
        width, d = high - low, m - 0.5 * (low + high)
        outer = _above(d - 0.3872983346207417 * width, v) + _above(d + 0.3872983346207417 * width, v)
        wide = low + width * (0.2777777777777778 * outer + 0.4444444444444444 * _above(d, v))
        value = tl.where(v > 16.0 * width * width, wide, value)
    elif ACTIVATION == "gelu":
        value, _, _ = _step_times_x(m, v, 1.0)
    elif ACTIVATION == "silu":
        value, _, _ = _silu(m, v)
    elif ACTIVATION == "square":
        value = m * m + v
    else:
        value = m
    return value


@triton.jit
def slopes(m, v, ACTIVATION: tl.constexpr, low, high):
    """The derivatives of E[f(Z)] by m and by v."""
    if ACTIVATION == "relu":
        by_m, by_v = _relu_slopes(m, v)
    elif ACTIVATION == "leaky_relu":
        by_m, by_v = _relu_slopes(m, v)
        by_m, by_v = low + (1.0 - low) * by_m, (1.0 - low) * by_v
    elif ACTIVATION == "hardtanh":
        by_m, by_v = _relu_slopes(m - low, v)
        minus_m, minus_v = _relu_slopes(m - high, v)
        by_m, by_v = by_m - minus_m, by_v - minus_v
    elif ACTIVATION == "gelu":
        _, by_m, by_v = _step_times_x(m, v, 1.0)
    elif ACTIVATION == "silu":
        _, by_m, by_v = _silu(m, v)
    elif ACTIVATION == "square":
        by_m, by_v = 2.0 * m, tl.full(m.shape, 1.0, tl.float32)
    else:
        by_m, by_v = tl.full(m.shape, 1.0, tl.float32), tl.zeros_like(m)
    return by_m, by_v
