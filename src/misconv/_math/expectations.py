"""E[f(Z)] for a Gaussian Z and a pointwise activation f.

Every closed form is built from three integrals over a half line, E[ReLU(Z)], E[ReLU(Z)²] and E[e^Z; Z < 0]; those of
the logistic family from the logistic function written as a mixture of normal ones. Anything else is integrated
numerically. Derivations and error tables are in `docs/maths.md`.

All closed forms take the mean `m` and the standard deviation `s > 0`. They hold z = m/s back from the places where it
would overflow *before* it is formed, because a zero times an infinity in a gradient is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from misconv._checks import describe
from misconv._math.activations import Activation, activation_module, apply_activation, per_channel
from misconv._torch import in_transform

__all__ = ["deviation", "expectation", "expectation_of_spread", "normal_cdf", "normal_pdf", "weighted_mean", "z_limit"]

Closed = Callable[[Tensor, Tensor], Tensor]

# Half lines ------------------------------------------------------------------------------------------------------


def z_limit(z: Tensor) -> float:
    """The |z| beyond which the normal density is below the smallest normal number of the type."""
    return 37.0 if z.dtype == torch.float64 else 13.0


def normal_cdf(z: Tensor) -> Tensor:
    # Not (1 + erf)/2, which is exactly 0 below z = -5 in float32.
    return 0.5 * torch.erfc(z * -math.sqrt(0.5))


def normal_pdf(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) * (1 / math.sqrt(2 * math.pi))


def _positive(m: Tensor, s: Tensor) -> Tensor:
    """P(Z > 0) = Φ(m/s)."""
    certain = m.abs() >= z_limit(m) * s
    return torch.where(certain, (m > 0).to(m.dtype), normal_cdf(torch.where(certain, 0, m) / s))


def _relu(m: Tensor, s: Tensor) -> Tensor:
    """E[ReLU(Z)] = mΦ(m/s) + sφ(m/s)."""
    certain = m.abs() >= z_limit(m) * s
    safe = torch.where(certain, 0, m)
    z = safe / s
    return torch.where(certain, F.relu(m), safe * normal_cdf(z) + s * normal_pdf(z))


def _relu_squared(m: Tensor, s: Tensor) -> Tensor:
    """E[ReLU(Z)²] = (m² + s²)Φ(m/s) + msφ(m/s)."""
    certain = m.abs() >= z_limit(m) * s
    safe = torch.where(certain, 0, m)
    z = safe / s
    between = (safe * safe + s * s) * normal_cdf(z) + safe * s * normal_pdf(z)
    return torch.where(certain, torch.where(m > 0, m * m + s * s, 0), between)


def _exp_below(m: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """E[e^Z; Z < 0] = e^(m + s²/2) Φ(−z − s), which is e^(−z²/2) erfcx((z + s)/√2) / 2 and cannot overflow so.

    `z` is m/s, cut where the normal density is zero. A negative `s` stands for e^(−Z).
    """
    w = z + s
    right = w >= 0
    above = torch.exp(-0.5 * z * z) * torch.special.erfcx(torch.where(right, w, 0) * math.sqrt(0.5))
    growth = torch.exp(torch.where(right, 0, m + 0.5 * s * s))
    return 0.5 * torch.where(right, above, growth * torch.erfc(torch.where(right, 0, w) * math.sqrt(0.5)))


def _cut_ratio(m: Tensor, s: Tensor, limit: float) -> Tensor:
    """m/s, cut at a limit before it could overflow."""
    certain = m.abs() >= limit * s
    return torch.where(certain, m.sign() * limit, torch.where(certain, 0, m) / s)


# Gauss–Legendre on (0, 1), for integrals over a bend that is narrow compared with the Gaussian: sums without
# cancellation, exact to rounding as long as an interval is no wider than about two standard deviations.
_GAUSS = tuple(
    (0.5 + sign * place / 2, share / 2)
    for place, share in (
        (0.1834346424956498, 0.362683783378362),
        (0.525532409916329, 0.31370664587788727),
        (0.7966664774136267, 0.22238103445337448),
        (0.9602898564975363, 0.10122853629037626),
    )
    for sign in (-1, 1)
)


def _average(term: Callable[[float], Tensor]) -> Tensor:
    """The average of a function over (0, 1)."""
    return torch.stack([share * term(place) for place, share in _GAUSS]).sum(0)


# Piecewise linear, quadratic and exponential ---------------------------------------------------------------------


def _leaky_relu(m: Tensor, s: Tensor, slope: float | Tensor) -> Tensor:
    return _relu(m, s) - slope * _relu(-m, s)


def _hardtanh(m: Tensor, s: Tensor, low: float, high: float) -> Tensor:
    # Three forms of the same clipping; each is exact where the others would cancel.
    below, above = _relu(low - m, s), _relu(m - high, s)
    result = m + below - above
    result = torch.where(m < low, low + (_relu(m - low, s) - above), result)
    result = torch.where(m > high, high - (_relu(high - m, s) - below), result)
    if not math.isfinite(high - low):
        return result
    # l + ∫ P(Z > t) dt from l to h, where that is a short way for the Gaussian.
    inside = low + (high - low) * _average(lambda t: _positive(m - (low + t * (high - low)), s))
    return torch.where(s > high - low, inside, result)


def _hardswish(m: Tensor, s: Tensor) -> Tensor:
    """x(x + 3)/6 between −3 and 3, else ReLU."""
    n = torch.where(m > 0, -m, m)  # not -|m|, whose slope at 0 would be taken for 0
    wide = s > 2
    limit = torch.where(wide, 2, s)
    # f(x) = x + f(−x), so only the side where f is small has to be integrated …
    outside = (_relu_squared(n + 3, limit) - _relu_squared(n - 3, limit)) / 6
    outside = torch.where(m > 0, m, 0) + outside - 0.5 * (_relu(n + 3, limit) + _relu(n - 3, limit))
    # … between −3 and 3 it is a parabola, and too much of it beyond …
    near = torch.where(n < -3, 0, m)
    inside = (near * near + limit * limit) / 6 + near / 2
    for beyond in (near - 3, -near - 3):
        inside = inside - (_relu_squared(beyond, limit) / 6 + _relu(beyond, limit) / 2)
    # … and for a wide Gaussian it is a ReLU less a bump of x(3 − x)/6 on both sides of 0.
    broad = torch.where(wide, s, 2)
    bump = _average(lambda t: t * (1 - t) * (normal_pdf((3 * t - m) / broad) + normal_pdf((3 * t + m) / broad)))
    blurred = _relu(m, broad) - 4.5 * bump / broad
    return torch.where(wide, blurred, torch.where(n < -3, outside, inside))


def _elu(m: Tensor, s: Tensor, alpha: float, width: float = 1.0) -> Tensor:
    """x for x > 0, else α(e^(x/width) − 1)."""
    z = _cut_ratio(m, s, z_limit(m))
    x, y = (m / width).clamp(-1e9, 1e9), (s / width).clamp(-1e9, 1e9)
    far = _exp_below(x, y, z) - normal_cdf(-z)
    # Near 0, where e^x − 1 is about x: e^(x + y²/2) Φ(−z − y) − Φ(−z) as two small numbers of the same sign.
    x, y = x.clamp(-1, 1), y.clamp(-1, 1)
    near = torch.expm1(x + 0.5 * y * y) * normal_cdf(-z - y) - y * _average(lambda t: normal_pdf(z + t * y))
    small = (m.abs() < abs(width)) & (s < abs(width))
    return _relu(m, s) + alpha * torch.where(small, near, far)


def _gelu(m: Tensor, s: Tensor) -> Tensor:
    """E[ZΦ(Z)] = mΦ(r) + s²/√(1 + s²) φ(r), r = m/√(1 + s²)."""
    return _smooth_step_times_x(m, s, 1.0)


def _smooth_step_times_x(m: Tensor, s: Tensor, steepness: float) -> Tensor:
    """E[ZΦ(λZ)]."""
    blur = _blur(s, steepness)
    r = steepness * (m / blur)
    return m * normal_cdf(r) + s * (steepness * (s / blur)) * normal_pdf(r)


def _blur(s: Tensor, steepness: float) -> Tensor:
    """√(1 + λ²s²), by which the steepness of a normal step falls; no square that could overflow."""
    return _hypot(1.0, steepness * s)


def _hypot(a: float, s: Tensor) -> Tensor:
    """√(a² + s²); ONNX does not know torch.hypot."""
    above = s > a
    larger, smaller = torch.where(above, s, a), torch.where(above, a, s)
    return larger * (1 + (smaller / larger).square()).sqrt()


# The logistic family ---------------------------------------------------------------------------------------------

# The logistic function is a scale mixture of normal ones (Stefanski 1991); eleven of them, Σ w_i Φ(λ_i x), come within
# 1.5e-10 of it, and x times it within 1.5e-10 of SiLU, for every x. Each term has a closed expectation, so the error
# does not grow with the variance. The numbers are a minimax fit; a test holds them to that bound.
_LOGISTIC = (
    (3.0808281871712664e-05, 0.19731121393965226),
    (0.0014789330535576405, 0.24354317834946257),
    (0.015219245942046117, 0.2967611809927196),
    (0.06491574282318825, 0.36095137019916623),
    (0.15426158239152996, 0.43968470692087774),
    (0.2391766641807557, 0.5366150782678619),
    (0.25566880541792963, 0.6554518986583229),
    (0.18087314261905704, 0.8005747832511212),
    (0.07418268033589553, 0.9783570715161489),
    (0.013579635741847874, 1.2000997267085194),
    (0.0006127592123205298, 1.494036913341904),
)


def _sigmoid(m: Tensor, s: Tensor) -> Tensor:
    return _mix(lambda steepness: normal_cdf(steepness * (m / _blur(s, steepness))))


def _tanh(m: Tensor, s: Tensor) -> Tensor:
    # 2·sigmoid(2x) − 1, written as an odd function; erf is 2Φ − 1.
    return _mix(lambda steepness: torch.erf(math.sqrt(2) * steepness * (m / _blur(s, 2 * steepness))))


def _silu(m: Tensor, s: Tensor) -> Tensor:
    return _mix(lambda steepness: _smooth_step_times_x(m, s, steepness))


def _softplus(m: Tensor, s: Tensor, beta: float, threshold: float) -> Tensor:
    """log(1 + e^(βx))/β, and torch's x itself where βx is above the threshold."""
    m, s = beta * m, abs(beta) * s
    # Φ(λx) integrated is ReLU blurred by a Gaussian of width 1/λ, and Gaussian blurs add.
    total = _mix(lambda steepness: _relu(m, _hypot(1 / steepness, s)))
    if threshold >= 18:  # log(1 + e^(−x)) is e^(−x) beyond, to float64's last bit
        low = threshold - m
        beyond = _exp_below(low.clamp(-1e9, 1e9), s.clamp_max(1e9), _cut_ratio(low, s, z_limit(m)))
        total = total - math.exp(-threshold) * beyond
    else:
        at, end = (_cut_ratio(place - m, s, 8.5) for place in (threshold, max(threshold, 0.0) + 36))
        total = total - _softplus_between(m, s, at, end)
        # Mostly beyond: from the other side, so that no large numbers cancel.
        narrow = torch.where(s < 1, s, 1)
        beyond = m + _softplus_between(m, narrow, torch.full_like(m, -8.5), at)
        total = torch.where((m > threshold) & (s < 1), beyond, total)
    return total / beta


def _softplus_between(m: Tensor, s: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """E[log(1 + e^(−Z)); first < (Z − m)/s < last]."""
    panels, length = 12, (last - first) / 12

    def term(t: float) -> Tensor:
        z = [first + (panel + t) * length for panel in range(panels)]
        return torch.stack([F.softplus(-(m + s * at)) * normal_pdf(at) for at in z]).sum(0)

    return _average(term) * length


def _mix(term: Callable[[float], Tensor]) -> Tensor:
    weight, steepness = _LOGISTIC[0]
    total = weight * term(steepness)
    for weight, steepness in _LOGISTIC[1:]:
        total = total + weight * term(steepness)
    return total


# Any other function ----------------------------------------------------------------------------------------------

# The trapezoid rule over ±6.5 standard deviations. For a function analytic within a of the real line its error falls
# like exp(−2πa/(s·step)), Gauss–Hermite's with as many nodes only like exp(−c·a√nodes/s): see docs/maths.md.
_REACH, _NODES = 6.5, 65


def _quadrature(function: Callable[[Tensor], Tensor], m: Tensor, s: Tensor) -> Tensor:
    places = [_REACH * (2 * i / (_NODES - 1) - 1) for i in range(_NODES)]
    densities = [math.exp(-0.5 * z * z) for z in places]
    # Recompute in the backward pass instead of storing every node; transforms of torch.func do not know of it.
    store = torch.compiler.is_compiling() or in_transform()
    total = torch.zeros_like(m)
    for z, density in zip(places, densities, strict=True):
        node = partial(_shifted, function, z)
        value = node(m, s) if store else checkpoint(node, m, s, use_reentrant=False, preserve_rng_state=False)
        total = total + (density / math.fsum(densities)) * value
    return total


def _shifted(function: Callable[[Tensor], Tensor], z: float, m: Tensor, s: Tensor) -> Tensor:
    return function(m + z * s)


# Which is which --------------------------------------------------------------------------------------------------


def _check_slopes(weight: Tensor, mean: Tensor) -> None:
    count = weight.numel()
    if count > 1 and (mean.dim() < 3 or mean.shape[-3] != count):
        raise ValueError(
            f"activation has a slope for each of {count} channels of (…, {count}, H, W), got {describe(mean)}"
        )
    if weight.device != mean.device:
        raise ValueError(f"activation must be on the device of the responses, {mean.device}, got {describe(weight)}")


def _rrelu(a: Any) -> Closed:
    if a.training:
        raise ValueError("activation must be deterministic, and RReLU is random in training; use nn.LeakyReLU instead")
    return partial(_leaky_relu, slope=(a.lower + a.upper) / 2)


def _is_changed(function: nn.Module) -> bool:
    """Whether a module has hooks or a `forward` of its own: then it may compute something else than its class."""
    hooked = function._forward_hooks or function._forward_pre_hooks or "forward" in function.__dict__
    return bool(hooked)


# Exact types, because a subclass may compute something else.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # as in torch
_CLOSED: dict[type[nn.Module], Callable[[Any], Closed]] = {
    nn.Identity: lambda a: lambda m, s: m,
    nn.ReLU: lambda a: _relu,
    nn.LeakyReLU: lambda a: partial(_leaky_relu, slope=a.negative_slope),
    nn.RReLU: _rrelu,
    nn.PReLU: lambda a: partial(_leaky_relu, slope=per_channel(a.weight)),
    nn.ReLU6: lambda a: partial(_hardtanh, low=0.0, high=6.0),
    nn.Hardtanh: lambda a: partial(_hardtanh, low=a.min_val, high=a.max_val),
    nn.Hardsigmoid: lambda a: lambda m, s: _hardtanh(m + 3, s, 0.0, 6.0) / 6,
    nn.Hardswish: lambda a: _hardswish,
    nn.ELU: lambda a: partial(_elu, alpha=a.alpha),
    nn.CELU: lambda a: partial(_elu, alpha=a.alpha, width=a.alpha),
    nn.SELU: lambda a: lambda m, s: _SELU_SCALE * _elu(m, s, _SELU_ALPHA),
    nn.GELU: lambda a: _gelu if a.approximate == "none" else partial(_quadrature, a),
    nn.Sigmoid: lambda a: _sigmoid,
    nn.Tanh: lambda a: _tanh,
    nn.SiLU: lambda a: _silu,
    nn.Softplus: lambda a: partial(_softplus, beta=float(a.beta), threshold=float(a.threshold)),
}


def expectation(activation: Activation, mean: Tensor, variance: Tensor) -> Tensor:
    """E[f(N(mean, variance))] for (…, O, H, W) or any smaller shape; exactly f(mean) where the variance is 0."""
    return expectation_of_spread(activation, mean, deviation(variance))


def weighted_mean(weights: Tensor, values: Tensor, axis: int) -> Tensor:
    """Σ_k w_k v_k for weights that add up to one, as differences from the first value.

    Its gradient in the weights is a difference of values, which then are small and keep their digits.
    """
    first = values.detach().narrow(axis, 0, 1)
    first = torch.where(first.isfinite(), first, 0)  # the difference of two infinities is none
    return first.squeeze(axis) + (weights * (values - first)).sum(axis)


def deviation(variance: Tensor) -> Tensor:
    """√v in float32 at least, with gradient 0, not infinity, at v = 0."""
    variance = variance.to(torch.promote_types(variance.dtype, torch.float32))
    random = variance > 0
    return torch.where(random, torch.where(random, variance, 1).sqrt(), 0)


def expectation_of_spread(activation: Activation, mean: Tensor, spread: Tensor) -> Tensor:
    """The same with the standard deviation, which has twice the range of a variance."""
    function = activation_module(activation)
    if type(function) is nn.PReLU:
        _check_slopes(function.weight, mean)
    plain = partial(apply_activation, function)
    compute = torch.promote_types(mean.dtype, torch.float32)
    random = spread > 0
    known = _CLOSED.get(type(function)) if isinstance(function, nn.Module) and not _is_changed(function) else None
    closed = partial(_quadrature, plain) if known is None else known(function)
    expected = closed(mean.to(compute), torch.where(random, spread, 1).to(compute))
    return torch.where(random, expected.to(mean.dtype), plain(mean))
