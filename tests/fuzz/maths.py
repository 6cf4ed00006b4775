"""Random stems, densities and imputers against dense float64 oracles, values and gradients.

Tolerances follow from the arithmetic alone: a few roundings of the type, times the magnitudes that were added up.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import misconv
from misconv import MFA, functional, impute
from misconv._checks import describe
from tests.fuzz import activations, oracles
from tests.fuzz.outcome import Choices, Outcome, expect, ok

ROUNDINGS = 40  # that may add up in one direction: sums over windows of up to 50 pixels, and a handful of operations
PLACES = 8  # of the result that are integrated numerically
DTYPES = {torch.float32: 0.6, torch.float64: 0.4}


def case(seed: int, device: str = "cpu") -> Outcome:
    """One random problem and its solution."""
    choices = Choices("maths", seed)
    kind = choices.weighted(_KINDS)
    return ok(f"{kind.__name__.strip('_')}{kind(choices, device) or ''}")


# Random problems -----------------------------------------------------------------------------------------------------


def random_observed(choices: Choices, shape: tuple[int, ...]) -> Tensor | None:
    """Nothing, everything, one region for all channels or one for each; None where no pixel is exact."""
    batch, channels, height, width = shape
    kind = choices.weighted({"shared": 4, "each": 3, "none": 1, "all": 1, "density": 1, "rows": 1})
    if kind == "density":
        return None
    planes = channels if kind == "each" else 1
    if kind in ("none", "all"):
        return torch.full((batch, planes, height, width), kind == "all")
    if kind == "rows":  # windows that touch nothing, beside those that do
        return (torch.arange(height) >= choices.randint(1, height)).view(1, 1, -1, 1).expand(batch, 1, height, width)
    return torch.rand(batch, planes, height, width) < choices.uniform(0.1, 0.95)


def random_mfa(choices: Choices, image: tuple[int, int, int], dtype: torch.dtype, *, scale: float, least: float) -> MFA:
    """Parameters of the size `scale`, noise from `least` times its square; garbage where pixels are exact."""
    batch, components, rank = choices.randint(1, 3), choices.pick([1, 1, 2, 3]), choices.pick([0, 1, 2, 4])
    means = scale * torch.randn(batch, components, *image, dtype=torch.float64)
    factors = scale * choices.power(-2, 0.5) * torch.randn(batch, components, rank, *image, dtype=torch.float64)
    spread = 10 ** torch.empty(means.shape, dtype=torch.float64).uniform_(0.5 * math.log10(least), 0.5)
    noise = (scale * spread).square()
    if least < 1e-9 and choices.chance(0.3):
        noise[torch.rand(noise.shape) < 0.5] = 0
    logits = choices.pick([1, 1, 5]) * torch.randn(batch, components, dtype=torch.float64)
    if components > 1 and choices.chance(0.1):
        logits[:, 0] = -torch.inf
    observed = random_observed(choices, (batch, *image))
    if observed is not None:
        means = torch.where(observed[:, None], means[:, :1], means)
        garbage = choices.pick([math.nan, math.inf, -1e30, 0.0, 3.0])
        noise = noise.masked_fill(observed[:, None], garbage)
        factors = factors.masked_fill(observed[:, None, None], garbage)
    parts = [layout(choices, t.to(dtype)) for t in (means, factors, noise)]
    return MFA(logits.to(dtype), *parts, observed)


def layout(choices: Choices, x: Tensor) -> Tensor:
    """The same numbers in another order in memory."""
    kind = choices.weighted({"contiguous": 6, "channels last": 1, "transposed": 1, "strided": 1})
    if kind == "channels last":
        return x.movedim(-3, -1).contiguous().movedim(-1, -3)
    if kind == "transposed":
        return x.mT.contiguous().mT
    if kind == "strided":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


def random_convolution(choices: Choices, scale: float) -> tuple[oracles.Convolution, tuple[int, int, int]]:
    """A convolution in float64 and the size of its images."""
    groups = choices.pick([1, 1, 1, 2, 3])
    channels = groups * choices.randint(1, max(1, 4 // groups))
    kernel = [choices.pick([1, 2, 3, 3, 3, 4, 5]) for _ in range(2)]
    dilation = choices.pick([1, 1, 1, 2, (1, 2), (2, 1)])
    reach = [
        d * (k - 1)
        for d, k in zip((dilation, dilation) if isinstance(dilation, int) else dilation, kernel, strict=True)
    ]
    mode = choices.pick(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"])
    padding = choices.pick([0, 1, 1, 2, (0, 1), (2, 1), "same", "valid"])
    stride = 1 if padding == "same" else choices.pick([1, 1, 2, 3, (2, 1), (1, 3)])
    most = 3 if padding != "same" else max(reach)  # reflection needs more pixels than it adds
    sides = [max(r + 1, choices.randint(3, 7), (most + 1) * (mode != "zeros")) for r in reach]
    size = choices.pick([1.0, 1.0, 0.2, choices.power(-3, 3)])
    weight = size * torch.randn(groups * choices.randint(1, 3), channels // groups, *kernel, dtype=torch.float64)
    if choices.chance(0.1):
        weight[torch.rand(weight.shape) < 0.5] = 0
    bias = size * choices.pick([scale, 1.0]) * torch.randn(len(weight), dtype=torch.float64)
    bias = bias if choices.chance(0.6) else None
    return oracles.Convolution(weight, bias, stride, padding, dilation, groups, mode), (channels, *sides)


def in_type(convolution: oracles.Convolution, dtype: torch.dtype) -> oracles.Convolution:
    """The same convolution with weights that the type can hold."""
    parts = vars(convolution) | {"weight": convolution.weight.to(dtype).double()}
    if convolution.bias is not None:
        parts["bias"] = convolution.bias.to(dtype).double()
    return oracles.Convolution(**parts)


# Layers --------------------------------------------------------------------------------------------------------------


def _layer(choices: Choices, device: str) -> str:
    """`expected_conv2d` or `MisConv2d`, with and without normalization."""
    dtype = choices.weighted(DTYPES)
    scale = choices.pick([1.0, 1.0, choices.power(-20, 15 if dtype == torch.float64 else 14)])
    convolution, image = random_convolution(choices, scale)
    convolution = in_type(convolution, dtype)
    p = random_mfa(choices, image, dtype, scale=scale, least=1e-10)
    known = activations.draw(choices, len(convolution.weight))
    values = convolution(torch.zeros(p.shape, dtype=torch.float64))[:, 0].numel()
    norm = _random_norm(choices, len(convolution.weight), scale, dtype, values)
    eps = torch.finfo(dtype).eps
    weight = layout(choices, convolution.weight.to(dtype)).to(device)
    with misconv.plain() if choices.chance(0.15) else nullcontext():
        actual, module = _run_layer(choices, p, convolution, weight, known, norm)
    parts = oracles.parameters(p)
    moments = oracles.moments(parts, convolution, image, ROUNDINGS * eps)
    label = f" {known.name.split('(')[0]}"
    if norm is not None:
        label += " train" if norm.training else " eval"
        moments = _normalize(norm, module.norm, moments, parts[0].softmax(1), eps)
    _check_expectation(choices, known, moments, parts[0].softmax(1), actual, eps)
    if norm is None and device == "cpu" and p.means.is_contiguous():
        _check_untouched(p, convolution, weight, known, actual)
    return label


def _random_norm(
    choices: Choices, channels: int, scale: float, dtype: torch.dtype, values: int
) -> nn.BatchNorm2d | None:
    if choices.chance(0.6):
        return None
    norm = nn.BatchNorm2d(
        channels, eps=choices.pick([1e-5, 1e-3]), momentum=choices.pick([0.1, None, 0.5]), affine=choices.chance(0.8),
        track_running_stats=choices.chance(0.9) or values == 1, dtype=dtype,
    )  # fmt: skip
    with torch.no_grad():
        if norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.copy_(scale * torch.randn(channels))
            norm.running_var.copy_(scale**2 * torch.rand(channels) + 1e-30)
        if norm.affine:
            norm.weight.copy_(torch.randn(channels))
            norm.bias.copy_(torch.randn(channels))
    return norm.train(choices.chance(0.5) and values > 1)  # torch and the library refuse the statistics of one value


def _run_layer(
    choices: Choices, p: MFA, convolution: oracles.Convolution, weight: Tensor, known: activations.Known,
    norm: nn.Module | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    device = weight.device
    bias = None if convolution.bias is None else convolution.bias.to(weight)
    given = known.given.to(device, weight.dtype) if isinstance(known.given, nn.Module) else known.given
    if norm is None and choices.chance(0.5):
        c = convolution
        arguments = (weight, bias, c.stride, c.padding, c.dilation, c.groups, c.mode)
        return functional.expected_conv2d(p.to(device), *arguments, activation=given), None
    conv = nn.Conv2d(
        convolution.weight.shape[1] * convolution.groups, len(weight), tuple(weight.shape[2:]), convolution.stride,
        convolution.padding, convolution.dilation, convolution.groups, bias is not None, convolution.mode,
    )  # fmt: skip
    conv.weight = nn.Parameter(weight)
    conv.bias = None if bias is None else nn.Parameter(bias)
    module = misconv.MisConv2d.from_conv(conv, norm=copy.deepcopy(norm), activation=given).to(device)
    return module(p.to(device)).detach(), module


def _normalize(
    before: nn.BatchNorm2d, after: nn.BatchNorm2d, moments: oracles.Moments, weights: Tensor, eps: float
) -> oracles.Moments:
    """Moments behind a batch normalization in float64, from the definition of its statistics."""
    share = weights[..., None, None, None]
    gain = before.weight.detach().double() if before.affine else torch.ones(1, dtype=torch.float64)
    offset = before.bias.detach().double() if before.affine else torch.zeros(1, dtype=torch.float64)
    over, wide = (0, 1, 3, 4), (-1, 1, 1)
    if before.training or before.running_mean is None:
        count = len(moments.mean) * math.prod(moments.mean.shape[-2:])
        centre = (share * moments.mean).sum(over) / count
        deviation = moments.mean - centre.view(wide)
        variance = (share * (moments.variance + deviation.square())).sum(over) / count
        roundings = ROUNDINGS * eps
        centre_error = moments.mean_error.amax(over) * roundings
        error = (share * (deviation.abs() * 2 * moments.mean_error + 2 * moments.spread * moments.spread_error)).sum(
            over
        )
        error = error / count * roundings + 2 * centre_error.square() + roundings * variance
        if before.training and before.track_running_stats:
            _check_running(
                before, after, centre, variance * count / (count - 1), centre_error, error * count / (count - 1), eps
            )
        error = error / roundings
    else:
        centre, variance = before.running_mean.double(), before.running_var.double()
        error, deviation = variance, moments.mean - centre.view(wide)
    scale = (gain / (variance + before.eps).sqrt()).view(wide)
    relative = (0.5 * error / (variance + before.eps) + 1).view(wide)
    mean = deviation * scale + offset.view(wide)
    size = scale.abs()
    magnitude = moments.mean_error + centre.abs().view(wide)
    if before.training or before.running_mean is None:
        magnitude = magnitude + moments.mean_error.amax(over).view(wide)
    return oracles.Moments(
        mean,
        moments.variance * scale.square(),
        size * (magnitude + deviation.abs() * relative) + offset.abs().view(wide),
        size * (moments.spread_error + moments.spread * relative),
    )


def _check_running(
    before: nn.BatchNorm2d, after: nn.BatchNorm2d, centre: Tensor, variance: Tensor, centre_error: Tensor,
    variance_error: Tensor, eps: float,
) -> None:  # fmt: skip
    momentum = 1.0 if before.momentum is None else before.momentum  # the first batch of a cumulative average
    pairs = (
        ("running_mean", before.running_mean, after.running_mean, centre, centre_error),
        ("running_var", before.running_var, after.running_var, variance, variance_error),
    )
    for name, old, new, value, error in pairs:
        expected = old.double() + momentum * (value - old.double())
        tolerance = error + ROUNDINGS * eps * (old.double().abs() + value.abs())
        close(name, new.detach().cpu().double(), expected, tolerance)


def _check_expectation(
    choices: Choices, known: activations.Known, moments: oracles.Moments, weights: Tensor, actual: Tensor, eps: float
) -> None:
    """Some places of the result, chosen at random, against numerical integration."""
    batch, components, *out = moments.mean.shape
    expect(tuple(actual.shape) == (batch, *out), f"the result has shape {tuple(actual.shape)}, not {(batch, *out)}")
    places = torch.randint(batch * math.prod(out), (PLACES,))
    b, o, h, w = torch.unravel_index(places, (batch, *out))
    chosen = [t[b, :, o, h, w] for t in (moments.mean, moments.spread, moments.mean_error, moments.spread_error)]
    mean, spread, mean_error, spread_error = (t.flatten() for t in chosen)  # (places · K,)
    expected, size = oracles.integrate(known, mean, spread, o.repeat_interleave(components))
    tiny = _underflow(eps, mean, spread)
    tolerance = known.steepest * (mean_error + spread_error) + size + known.scale
    tolerance = ROUNDINGS * eps * tolerance + known.error(spread) + known.steepest * tiny
    tolerance = tolerance + _oracle_error(known, mean, spread, actual)
    share = weights[b]  # (places, K)
    mixed, room = ((share * t.view(PLACES, components)).sum(1) for t in (expected, tolerance))
    close(f"E[{known.name} as {describe(known.given)}]", actual.detach().cpu().double()[b, o, h, w], mixed, room)


def _oracle_error(known: activations.Known, mean: Tensor, spread: Tensor, actual: Tensor) -> Tensor:
    """How far off numerical integration may be; and what torch's own constants in single precision do on a GPU."""
    relative = 1e-7 if known.single and actual.is_cuda else 2e-13
    return relative * (known.steepest * (mean.abs() + spread) + known.scale)


def _underflow(eps: float, mean: Tensor, spread: Tensor) -> Tensor:
    """What a variance, and a mean, that the type can only hold as a subnormal number may lose."""
    smallest = 1.4e-45 if eps > 1e-10 else 5e-324
    lost = ROUNDINGS * smallest
    return torch.minimum(torch.full_like(spread, math.sqrt(lost)), lost / spread.clamp_min(1e-300)) + lost


def _check_untouched(
    p: MFA, convolution: oracles.Convolution, weight: Tensor, known: activations.Known, actual: Tensor
) -> None:
    """Windows without a missing pixel have the bits of the plain convolution and activation."""
    if p.observed is None:
        return
    missing = (~p.observed).expand(p.shape).double()
    touched = convolution(missing, torch.ones_like(convolution.weight)) > 0.5
    bias = None if convolution.bias is None else convolution.bias.to(weight)
    plain = convolution(p.means[:, 0].contiguous(), weight, bias)
    module = nn.Identity() if known.name == "identity" else known.given
    if isinstance(module, str):
        module = getattr(F, module) if hasattr(F, module) else known.plain
    plain = module(plain).detach()
    same = (plain == actual.detach().cpu()) | touched
    what = (
        f"{known.name}, groups={convolution.groups}, observed of {p.observed.shape[1]} channels, K={p.logits.shape[1]}"
    )
    expect(same.all(), f"{int((~same).sum())} windows without a missing pixel differ from the plain {what}")


def close(what: str, actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """Every number within its own tolerance."""
    off = (actual - expected).abs()
    bad = ~(off <= tolerance)
    if bad.any():
        worst = (off / tolerance).nan_to_num(torch.inf).flatten().argmax()
        a, e, t = (x.expand(bad.shape).flatten()[worst].item() for x in (actual, expected, tolerance))
        expect(
            False,
            f"{what}: {a:.12g} where the oracle has {e:.12g}, tolerance {t:.1e} ({int(bad.sum())} of {bad.numel()})",
        )


# Moments, marginals, gradients ---------------------------------------------------------------------------------------


def _moments(choices: Choices, device: str) -> None:
    """`conv2d_moments`, and mean, variance and weights of the density itself."""
    dtype = choices.weighted(DTYPES)
    scale = choices.pick([1.0, choices.power(-15, 14)])
    convolution, image = random_convolution(choices, scale)
    convolution = in_type(convolution, dtype)
    p, eps = random_mfa(choices, image, dtype, scale=scale, least=1e-10), torch.finfo(dtype).eps
    c, bias = convolution, None if convolution.bias is None else convolution.bias.to(device, dtype)
    mean, variance = functional.conv2d_moments(
        p.to(device), c.weight.to(device, dtype), bias, c.stride, c.padding, c.dilation, c.groups, c.mode
    )
    parts = oracles.parameters(p)
    roundings = ROUNDINGS * eps
    exact = oracles.moments(parts, convolution, image, roundings)
    tiny = torch.finfo(dtype).tiny * 100
    close("the mean", mean.cpu().double(), exact.mean, roundings * exact.mean_error + tiny)
    room = 2 * exact.spread * exact.spread_error * roundings + (exact.spread_error * roundings).square()
    close("the variance", variance.cpu().double(), exact.variance, room + tiny)
    _check_marginals(p, parts, roundings, device)


def _check_marginals(p: MFA, parts: tuple[Tensor, ...], roundings: float, device: str) -> None:
    logits, means, factors, noise = parts
    weights = logits.softmax(1)
    share = weights.unsqueeze(2)
    mean = (share * means).sum(1)
    apart = means - mean.unsqueeze(1)
    variance = (share * (noise + factors.square().sum(2) + apart.square())).sum(1)
    size = (share * means.abs()).sum(1)
    apart_error = (share * (2 * apart.abs() * (size.unsqueeze(1) + means.abs()))).sum(1) + (roundings * size).square()
    there = p.to(device)
    tiny = torch.finfo(p.dtype).tiny * 100
    close(
        "the weights",
        there.weights.cpu().double(),
        weights,
        roundings * weights * (1 + logits.abs().nan_to_num(0, 0, 0)) + tiny,
    )
    close("p.mean", there.mean.cpu().double().flatten(1), mean, roundings * size + tiny)
    room = roundings * (variance + apart_error) + tiny
    close("p.variance", there.variance.cpu().double().flatten(1), variance, room)


def _gradients(choices: Choices, device: str) -> str:
    """Gradients of the layer in everything, against autograd through the oracle."""
    dtype = choices.weighted(DTYPES)
    convolution, image = random_convolution(choices, 1.0)
    convolution = in_type(convolution, dtype)
    p = random_mfa(choices, image, dtype, scale=1.0, least=1e-2)
    known = activations.draw(choices, len(convolution.weight))
    while not known.smooth:
        known = activations.draw(choices, len(convolution.weight))
    leaves = [p.logits, p.means, p.factors, p.noise, convolution.weight.to(dtype)]
    leaves = [t.detach().to(device).requires_grad_() for t in leaves]
    q = MFA(*leaves[:4], None if p.observed is None else p.observed.to(device))
    c, bias = convolution, None if convolution.bias is None else convolution.bias.to(device, dtype)
    given = known.given.to(device, dtype) if isinstance(known.given, nn.Module) else known.given
    actual = functional.expected_conv2d(
        q, leaves[4], bias, c.stride, c.padding, c.dilation, c.groups, c.mode, activation=given
    )
    places = torch.randint(actual.numel(), (PLACES,))
    b, o, h, w = torch.unravel_index(places, tuple(actual.shape))
    upstream = torch.randn(PLACES, dtype=torch.float64)
    value = (actual[b, o, h, w] * upstream.to(device, dtype)).sum()
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    parts = oracles.parameters(p)
    logits, means, factors, noise = parts
    twins = [t.clone().requires_grad_() for t in (logits, means, factors, noise, convolution.weight)]
    convolution.weight = twins[4]
    exact = oracles.moments(tuple(twins[:4]), convolution, image, 1.0)
    components = logits.shape[1]
    chosen = [t[b, :, o, h, w].flatten() for t in (exact.mean, exact.spread)]
    expected, _ = oracles.integrate(known, *chosen, o.repeat_interleave(components))
    mixed = (twins[0].softmax(1)[b] * expected.view(PLACES, components)).sum(1)
    wanted = torch.autograd.grad((mixed * upstream).sum(), twins, allow_unused=True)
    # The gradient in a logit is a difference of expectations, each of which is rounded where its mean is.
    size = (expected.detach().abs() + exact.mean_error[b, :, o, h, w].flatten()).view(PLACES, components)
    error = ROUNDINGS * torch.finfo(dtype).eps * float((size * upstream.abs()[:, None]).sum())
    _compare_gradients(known, p, found, wanted, leaves[4].detach(), exact.spread.detach(), error)
    return f" {known.name.split('(')[0]}"


def _compare_gradients(
    known: activations.Known, p: MFA, found: Any, wanted: Any, weight: Tensor, spread: Tensor, in_logits: float
) -> None:
    dtype = p.dtype
    approximate = float(known.error(spread).max()) * 100
    relative = (2e-3 if dtype == torch.float32 else 1e-7 if known.single else 1e-9) + approximate
    # The second derivative of an approximation to 1e-9 is good to 1e-6; it meets weights and factors twice.
    largest = float(weight.abs().max()) * (
        1 + float(p.factors.nan_to_num(0, 0, 0).abs().clamp_max(10).amax() if p.factors.numel() else 0)
    )
    second = 1e3 * approximate / 100 * (1 + largest) ** 2
    names = ("logits", "means", "factors", "noise", "weight")
    for name, got, want in zip(names, found, wanted, strict=True):
        if want is None:
            expect(got is None or not got.any(), f"a gradient in {name} where there is none")
            continue
        got = torch.zeros_like(want) if got is None else got.detach().cpu().double().reshape(want.shape)
        if p.observed is not None and name in ("factors", "noise"):
            known_pixels = p.observed.expand(p.shape).flatten(1)[:, None]
            known_pixels = known_pixels if name == "noise" else known_pixels[:, None]
            want = want.masked_fill(known_pixels, 0)
        if p.observed is not None and name == "means":  # one pixel, however many components repeat it
            got, want = _shared(p, got), _shared(p, want)
        room = relative * (float(want.abs().max()) if want.numel() else 0.0) + relative * 1e-3 * known.steepest + second
        room += in_logits if name == "logits" else 0.0
        close(
            f"the gradient in {name} ({known.name} as {describe(known.given)})", got, want, torch.full_like(want, room)
        )


def _shared(p: MFA, gradient: Tensor) -> Tensor:
    """Gradients in means (B, K, n), added up over components where the pixel is exact."""
    assert p.observed is not None
    exact = p.observed.expand(p.shape).flatten(1)[:, None]
    total = gradient.sum(1, keepdim=True)
    return torch.where(exact, total, gradient)


# Probability ---------------------------------------------------------------------------------------------------------


def _probability(choices: Choices, device: str) -> None:
    """`log_prob` and `condition` against dense Gaussians."""
    dtype = choices.weighted(DTYPES)
    scale = choices.pick([1.0, choices.power(-15 if dtype == torch.float32 else -20, 14)])
    image = (choices.randint(1, 3), choices.randint(1, 5), choices.randint(1, 5))
    p = random_mfa(choices, image, dtype, scale=scale, least=choices.power(-5, -1))
    x = (scale * choices.pick([1, 1, 5]) * torch.randn(p.shape, dtype=torch.float64)).to(dtype)
    where = random_observed(choices, tuple(p.shape))
    chosen = torch.ones(p.shape, dtype=torch.bool) if where is None else where
    x = x.masked_fill(~chosen.expand(p.shape), choices.pick([math.nan, math.inf, 1e30]))
    exact = oracles.condition(p, x, chosen, torch.finfo(dtype).eps)
    roundings = ROUNDINGS * torch.finfo(dtype).eps
    logits = p.logits.double().log_softmax(1)
    error = roundings * (exact.log_density_error + logits.abs().nan_to_num(0, 0, 0) + exact.log_density.abs())
    total = logits + exact.log_density
    there, image_there = p.to(device), layout(choices, x).to(device)
    where_there = None if where is None else where.to(device)
    log_prob = there.log_prob(image_there, where_there).cpu().double()
    alive = error.where(total > total.amax(1, keepdim=True) - 40, 0)
    close("log_prob", log_prob, total.logsumexp(1), alive.amax(1) + roundings)
    if where is None:
        return
    q = there.condition(image_there, where_there)
    weights = total.softmax(1)
    spread = (2 * error.amax(1, keepdim=True)).clamp_max(50)
    close("weights given the pixels", q.weights.cpu().double(), weights, weights * spread.expm1() + roundings)
    close(
        "means given the pixels", q.means.cpu().double().flatten(2), exact.means, roundings * exact.means_error + 1e-300
    )
    parts = oracles.parameters(q)
    variances = parts[3] + parts[2].square().sum(2)
    close("variances given the pixels", variances, exact.variances, roundings * exact.variances_error + 1e-300)
    seen = q.observed.cpu().expand(p.shape)
    expect((q.means.cpu()[:, 0] == x)[seen & chosen.expand(p.shape) & ~_was(p)].all(), "observed pixels changed")


def _was(p: MFA) -> Tensor:
    return torch.zeros(p.shape, dtype=torch.bool) if p.observed is None else p.observed.expand(p.shape)


def _sampling(choices: Choices, device: str) -> None:
    """Mean and variance of many samples; seven standard errors are passed by chance once in 10¹¹ pixels."""
    image = (1, choices.randint(1, 3), choices.randint(1, 3))
    p = random_mfa(choices, image, torch.float64, scale=choices.power(-3, 3), least=1e-3)
    count = 4000
    generator = torch.Generator(device).manual_seed(choices.randrange(2**40))
    drawn = p.to(device).sample(count, generator=generator).cpu()
    expect(tuple(drawn.shape) == (count, *p.shape), f"the samples have shape {tuple(drawn.shape)}")
    logits, means, factors, noise = oracles.parameters(p)
    share = logits.softmax(1).unsqueeze(2)
    mean = (share * means).sum(1).view(p.shape)
    variance = (
        (share * (noise + factors.square().sum(2) + (means - mean.flatten(1)[:, None]).square())).sum(1).view(p.shape)
    )
    standard = (variance / count).sqrt()
    close("the mean of samples", drawn.mean(0), mean, 7 * standard + 1e-9 * mean.abs())
    # The fourth moment of a mixture is at most that of its widest part; 60 is generous for these mixtures.
    close(
        "the variance of samples",
        drawn.var(0),
        variance,
        7 * variance * math.sqrt(60 / count) + 1e-9 * mean.square() + 1e-30,
    )


# Imputers ------------------------------------------------------------------------------------------------------------


def _imputers(choices: Choices, device: str) -> str:
    """Zero, mean and nearest neighbours against loops over pixels."""
    dtype = choices.weighted(DTYPES)
    shape = (choices.randint(2, 7), choices.randint(1, 3), choices.randint(1, 4), choices.randint(1, 4))
    scale = choices.pick([1.0, choices.power(-15, 14)])
    x = (scale * torch.randn(shape, dtype=torch.float64)).to(dtype)
    observed = torch.rand(shape[0], choices.pick([1, shape[1]]), *shape[2:]) < choices.uniform(0.3, 0.9)
    observed[0] = True
    seen = observed.expand(shape)
    dirty = x.masked_fill(~seen, choices.pick([math.nan, math.inf, 1e30])).to(device)
    kind = choices.pick(["zero", "mean", "knn"])
    if kind == "zero":
        actual, expected = impute.zero(dirty, observed.to(device)), torch.where(seen, x, 0).double()
    elif kind == "mean":
        actual = impute.Mean().fit(dirty, observed.to(device))(dirty, observed.to(device))
        expected = _filled_by_mean(x.double(), seen)
    else:
        k = choices.randint(1, 4)
        actual = impute.KNN(k).fit(dirty, observed.to(device))(dirty, observed.to(device))
        expected = _filled_by_neighbours(x.double(), seen, k)
    expect(actual.dtype == dtype and torch.equal(actual.cpu()[seen], x[seen]), f"{kind} changed observed pixels")
    room = ROUNDINGS * torch.finfo(dtype).eps * torch.where(seen, x.double(), 0).abs().max()
    close(kind, actual.cpu().double(), expected, room.expand(shape))
    return f" {kind}"


def _filled_by_mean(x: Tensor, seen: Tensor) -> Tensor:
    count, total = seen.sum(0), torch.where(seen, x, 0).sum(0)
    return torch.where(seen, x, total / count)  # the first image shows every pixel


def _filled_by_neighbours(x: Tensor, seen: Tensor, k: int) -> Tensor:
    filled = _filled_by_mean(x, seen)
    for i in range(len(x)):
        distances = []
        for j in range(len(x)):
            common = seen[i] & seen[j]
            both = int(common.sum())
            square = float((x[i] - x[j])[common].square().sum()) * common.numel() / both if both else math.inf
            distances.append((square, j))
        distances.sort()
        for place in (~seen[i]).nonzero().tolist():
            donors = [x[(j, *place)] for square, j in distances if square < math.inf and seen[(j, *place)]]
            if donors:
                filled[(i, *place)] = torch.stack(donors[:k]).mean()
    return filled


def _expected_activation(choices: Choices, device: str) -> str:
    """`expected_activation` for means and variances of every size, zero included."""
    dtype = choices.weighted(DTYPES)
    known = activations.draw(choices, 3)
    shape = (choices.randint(1, 3), 3, 1, 2)
    mean = torch.randn(shape, dtype=torch.float64) * choices.power(-20, 12)
    variance = (torch.randn(shape, dtype=torch.float64) * choices.power(-18, 12)).square()
    variance[torch.rand(shape) < 0.2] = 0
    mean, variance = mean.to(dtype), variance.to(dtype)
    given = known.given.to(device, dtype) if isinstance(known.given, nn.Module) else known.given
    actual = functional.expected_activation(given, mean.to(device), variance.to(device))
    mean, spread = mean.double(), variance.double().sqrt()
    channel = torch.arange(3).view(1, 3, 1, 1).expand(shape).flatten()
    expected, size = oracles.integrate(known, mean.flatten(), spread.flatten(), channel)
    eps = torch.finfo(dtype).eps
    room = known.steepest * (mean.abs() + spread).flatten() + size + known.scale
    room = (
        ROUNDINGS * eps * room
        + known.error(spread.flatten())
        + known.steepest * _underflow(eps, mean, spread).flatten()
        + _oracle_error(known, mean, spread, actual).flatten()
    )
    close(f"E[{known.name} as {describe(known.given)}]", actual.detach().cpu().double().flatten(), expected, room)
    return f" {known.name.split('(')[0]}"


_KINDS: dict[Callable[[Choices, str], str | None], float] = {
    _layer: 0.5,
    _probability: 0.2,
    _expected_activation: 0.1,
    _gradients: 0.08,
    _moments: 0.06,
    _imputers: 0.05,
    _sampling: 0.01,
}
