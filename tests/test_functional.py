"""Moments and expectations of convolutions against the full covariance matrix, quadrature and Monte Carlo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from misconv import MFA, MisConv2d, plain
from misconv._conv import Convolution
from misconv._conv.border import border_noise
from misconv._math.expectations import expectation_of_spread
from misconv.functional import batch_norm_moments, conv2d_moments, expected_conv2d, partial_conv2d
from tests.reference import dense_moments, integrate, random_mfa, same, tolerance
from tests.strategies import Case, cases

# torch warns of the copy it makes for "same" padding with an even kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def close(actual: Tensor, expected: Tensor, kind: str = "exact") -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance(kind), atol=tolerance(kind))


@given(cases())
@settings(max_examples=150)
def test_moments_equal_the_dense_oracle(case: Case) -> None:
    mean, variance = conv2d_moments(case.p, **case.arguments())
    dense_mean, dense_variance = dense_moments(case.p, case.conv)
    close(mean, dense_mean)
    close(variance, dense_variance)


@given(cases(modes=("reflect", "replicate", "circular")))
@settings(max_examples=150)
def test_repeated_pixels_of_other_padding_modes_are_exact(case: Case) -> None:
    mean, variance = conv2d_moments(case.p, **case.arguments())
    dense_mean, dense_variance = dense_moments(case.p, case.conv)
    close(mean, dense_mean)
    close(variance, dense_variance)


def test_only_border_windows_are_computed_again() -> None:
    """6 of 224 rows and columns of a 7×7 convolution: nothing of the size of all windows times all pairs of taps."""
    noise, weight = torch.rand(1, 1, 2, 224, 224), torch.randn(3, 2, 7, 7)
    border = border_noise(noise, Convolution(weight, None, 1, 3, 1, 1, "reflect"))
    assert border is not None
    assert border.variance.shape == (1, 1, 3, 224**2 - 218**2)
    assert (
        border_noise(noise, Convolution(weight, None, 1, 3, 1, 1, "circular")) is None
    )  # it repeats nothing in so large an image
    assert border_noise(noise, Convolution(weight, None, 1, 0, 1, 1, "reflect")) is None


def test_weights_of_a_repeated_pixel_that_cancel_leave_their_sum() -> None:
    """(w_s + w_t)² by itself, not w_s² + w_t² + 2 w_s w_t."""
    noise = torch.ones(1, 1, 1, 1, 4, dtype=torch.float32)
    p = MFA(noise[..., 0, 0, 0], noise, noise[:, :, None][:, :, :0], noise)
    weight = torch.tensor([4096.0, -4095.0, 0.0], dtype=torch.float32).view(1, 1, 1, 3)
    variance = conv2d_moments(p, weight, padding=(0, 1), padding_mode="replicate")[1]
    assert variance[..., 0].item() == 1


@given(cases())
@settings(max_examples=40)
def test_expected_convolution_equals_quadrature(case: Case) -> None:
    mean, variance = dense_moments(case.p, case.conv)
    # Rounding may leave a variance of -1e-17 in the dense oracle.
    expected = integrate(torch.relu, mean, variance.clamp_min(0), kinks=(0,)).to(mean.dtype)
    expected = torch.einsum("bk,bkohw->bohw", case.p.weights, expected)
    close(expected_conv2d(case.p, **case.arguments()), expected, "closed")


def test_expected_convolution_equals_monte_carlo() -> None:
    observed = torch.rand(2, 1, 6, 6) < 0.5
    p, conv = random_mfa(2, 3, 2, (2, 6, 6), observed), nn.Conv2d(2, 4, 3, padding=1)
    exact = expected_conv2d(p, conv.weight, conv.bias, padding=1, activation="relu")
    count, total = 100_000, torch.zeros_like(exact)
    for _ in range(10):
        values = torch.relu(conv(p.sample(count // 10).flatten(0, 1))).view(-1, *exact.shape).detach()
        total = total + values.sum(0)
    # The standard error from the exact second moment, for a sample knows none of the events it has not met.
    m, v = conv2d_moments(p, conv.weight, conv.bias, padding=1)
    second = integrate(lambda x: x.relu().square(), m, v, kinks=(0,)).to(m.dtype)
    second = torch.einsum("bk,bkohw->bohw", p.weights, second)
    error = ((second - exact.square()).clamp_min(0) / count).sqrt()
    assert ((total / count - exact).abs() <= 5 * error + tolerance("closed")).all()


@given(cases(modes=("zeros", "reflect", "circular")))
@settings(max_examples=60)
def test_complete_images_pass_bit_for_bit(case: Case) -> None:
    """Also as a mixture of several components that agree on all pixels."""
    x = case.p.means[:, 0]
    observed = torch.ones_like(x[:, :1], dtype=torch.bool)
    for p in (MFA.point(x), case.p.fix(x, observed)):
        for activation, function in (("relu", torch.relu), ("gelu", F.gelu), ("silu", F.silu)):
            expected = function(case.conv(x))
            assert torch.equal(expected_conv2d(p, **case.arguments(), activation=activation), expected)


def test_windows_that_see_everything_are_untouched_by_holes_elsewhere() -> None:
    p = random_mfa(1, 2, 3, (1, 9, 9), torch.ones(1, 1, 9, 9, dtype=torch.bool).index_fill(3, torch.tensor([4]), False))
    conv = nn.Conv2d(1, 4, 3, bias=True)
    result = expected_conv2d(p, conv.weight, conv.bias)
    plain = torch.relu(conv(p.mean))
    untouched = [0, 1, 5, 6]  # output columns whose window misses column 4
    close(result[..., untouched], plain[..., untouched])
    assert (conv2d_moments(p, conv.weight)[1][..., untouched] == 0).all()
    assert ((result - plain).abs()[..., 2:5] > 1e-3).any(1).all()


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("components", [1, 2])
def test_gradients(mode: str, components: int) -> None:
    if torch.get_default_dtype() != torch.float64:
        pytest.skip("gradcheck needs float64")
    observed = torch.rand(2, 1, 4, 4) < 0.4
    p = random_mfa(2, components, 2, (2, 4, 4), observed)
    weight, bias = torch.randn(2, 2, 3, 3), torch.randn(2)

    def run(weight: Tensor, bias: Tensor, *parameters: Tensor) -> Tensor:
        q = MFA(*parameters, observed, check=False)
        return expected_conv2d(q, weight, bias, padding=1, padding_mode=mode)

    inputs = [t.clone().requires_grad_() for t in (weight, bias, p.logits, p.means, p.factors, p.noise)]
    # The gradient of reflection adds in any order on a GPU.
    assert torch.autograd.gradcheck(run, inputs, nondet_tol=1e-12)


@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize("context", [plain, contextlib.nullcontext])
def test_the_gradient_in_logits_keeps_its_digits_far_from_zero(context: Any) -> None:
    """It is a difference of components, which here is known exactly; of products with weights little would remain."""
    means = 10_000 + torch.randint(64, (2, 3, 1, 4, 4)) / 64  # float32 holds these and their differences
    upstream, gradients = torch.randn(2, 1, 4, 4, dtype=torch.float64), []
    for dtype in (torch.float64, torch.float32):
        logits = torch.arange(3.0, dtype=dtype).repeat(2, 1).requires_grad_()
        p = MFA(logits, means.to(dtype), torch.zeros(2, 3, 0, 1, 4, 4, dtype=dtype), torch.ones_like(means).to(dtype))
        with context():
            y = expected_conv2d(p, torch.ones(1, 1, 1, 1, dtype=dtype), activation="identity")
        gradients += torch.autograd.grad(y, logits, upstream.to(dtype))
    torch.testing.assert_close(gradients[1].double(), gradients[0], rtol=1e-5, atol=1e-5)


def test_gradient_reaches_the_weight_through_every_part() -> None:
    """Squared weights wrapped into a new Parameter would cut it."""
    p = random_mfa(1, 1, 0, (1, 5, 5))
    weight = torch.randn(2, 1, 3, 3, requires_grad=True)
    conv2d_moments(p, weight)[1].sum().backward()
    under_each_tap = F.unfold(p.noise[:, 0], 3).sum((0, 2)).view(1, 1, 3, 3)
    assert weight.grad is not None
    close(weight.grad, 2 * weight.detach() * under_each_tap)


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16])
def test_autocast(type_: torch.dtype) -> None:
    device = torch.get_default_device().type
    observed = torch.rand(2, 1, 8, 8) < 0.5
    p, conv = random_mfa(2, 2, 3, (3, 8, 8), observed).to(torch.float32), nn.Conv2d(3, 8, 3, dtype=torch.float32)
    with torch.no_grad():
        conv.weight.mul_(1e-2)  # squared, these leave the range of float16
    with torch.autocast(device, dtype=type_):
        inside = expected_conv2d(p, conv.weight, conv.bias)
        complete = expected_conv2d(MFA.point(p.mean), conv.weight, conv.bias)
        assert same(complete, torch.relu(conv(p.mean)))
        variance = conv2d_moments(p, conv.weight)[1]
    assert inside.dtype == type_
    assert variance.dtype == torch.float32
    torch.testing.assert_close(inside.float(), expected_conv2d(p, conv.weight, conv.bias), rtol=0.02, atol=2e-3)
    torch.testing.assert_close(variance, conv2d_moments(p, conv.weight)[1], rtol=0.03, atol=1e-8)
    with torch.autocast(device, dtype=type_):
        expected_conv2d(p, conv.weight, conv.bias).float().sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.isfinite().all()


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16])
def test_half_precision_everywhere(type_: torch.dtype) -> None:
    p, conv = random_mfa(2, 2, 3, (3, 8, 8)).to(torch.float32), nn.Conv2d(3, 8, 3, dtype=torch.float32)
    half = expected_conv2d(p.to(type_), conv.weight.to(type_), conv.bias.to(type_))
    assert half.dtype == type_
    torch.testing.assert_close(half.float(), expected_conv2d(p, conv.weight, conv.bias), rtol=0.05, atol=0.05)


def test_vmap_and_memory_format() -> None:
    p, weight = random_mfa(3, 2, 2, (2, 5, 5), torch.rand(3, 1, 5, 5) < 0.5), torch.randn(4, 2, 3, 3)
    close(torch.vmap(lambda p: expected_conv2d(p, weight))(p), expected_conv2d(p, weight))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    result = expected_conv2d(MFA.point(x), conv.weight, conv.bias)
    assert torch.equal(result, torch.relu(conv(x)))
    assert result.stride() == conv(x).stride()


# Units ------------------------------------------------------------------------------------------------------------


def scaled(p: MFA, scale: float) -> list[Tensor]:
    """Logits, means, factors and noise in other units, as float32 holds them; the noise as far as it can."""
    noise = (p.noise * scale**2).clamp(0, 1e37)
    return [t.to(torch.float32) for t in (p.logits, p.means * scale, p.factors * scale, noise)]


class Truth:
    """What a convolution must say of mean and deviation (B, K, O, H', W'), relative to `size`.

    Of the fused kernels of a GPU no more is asked than docs/maths.md says: they form variances in float32, which below
    σ = 1e-19 fade out, and the response counts as certain; beyond 1.8e19 it is not finite.
    """

    def __init__(self, activation: str, mean: Tensor, spread: Tensor, weights: Tensor, *, fused: bool) -> None:
        certain = (spread > 0) & (spread < 1.2e-19) & fused
        each = expectation_of_spread(activation, mean, spread.masked_fill(certain, 0))
        self.value = torch.einsum("bk,bkohw->bohw", weights, each)
        # Subnormal variances are lost one after the other, the last at 3e-23; E[ReLU(Z)] − ReLU(m) is 0.4 σ at most.
        self.slack = torch.einsum("bk,bkohw->bohw", weights, 0.4 * spread * (certain & (spread > 3e-23)))
        self.infinite = (spread > 1.9e19).any(1) & fused
        self.finite = (spread < 1.7e19).all(1) | (not fused)
        # With a gradient to compare: that of GELU holds the third power of the deviation.
        low = (mean.abs() < 1e12).all(1) & (spread < 1e12).all(1)
        self.whole = self.finite & ~certain.any(1) & (low | (activation != "gelu") | (not fused))

    def holds(self, y: Tensor, size: Tensor, bound: float) -> bool:
        error = (((y - self.value).abs() - self.slack) / size)[self.finite]
        return bool((error < bound).all() and not y[self.infinite].isfinite().any())


def fused(activation: str, mode: str = "zeros") -> bool:
    """Whether a kernel computes it, in float32."""
    known = activation in ("relu", "gelu", "leaky_relu") and mode == "zeros"
    return known and torch.get_default_device().type == "cuda"


@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "elu", "hardswish", "leaky_relu"])
@pytest.mark.parametrize("scale", [1e-20, 1e-17, 1e-15, 1e-7, 1.0, 1e7, 1e15, 1e20])
def test_images_in_any_unit_keep_the_digits_of_float32(scale: float, activation: str, mode: str) -> None:
    """Values and gradients of both paths, of weights of any size too, against float64 by the dense oracle."""
    observed = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    observed[:, :, 2:5, 3:6] = False
    parts, conv = scaled(random_mfa(2, 2, 2, (2, 9, 9), observed), scale), nn.Conv2d(2, 3, 3, 1, 1, padding_mode=mode)
    with torch.no_grad():
        conv.weight[0] *= 1e-6
        conv.weight[1] *= 1e3
        conv.bias.zero_()
    weight = conv.weight.detach().float()
    conv.weight.data.copy_(weight)
    exact = MFA(*(t.to(torch.float64) for t in parts), observed)
    mean, variance = dense_moments(exact, conv.double())
    spread = variance.clamp_min(0).sqrt()
    size = (mean.abs() + spread).amax((0, 1, 3, 4)).view(-1, 1, 1)
    everywhere = torch.randn(2, 3, 9, 9)

    def run(type_: torch.dtype, direction: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.to(type_).requires_grad_() for t in (*(t.clone() for t in parts), weight.clone())]
        p = MFA(*leaves[:4], observed)
        y = expected_conv2d(p, leaves[4], None, 1, 1, padding_mode=mode, activation=activation)
        (y / size.to(type_) * direction.to(type_)).sum().backward()
        # By a share of each parameter, which has no unit. An exact pixel stands in all components: the sum counts.
        shares = [t.grad * t.detach() for t in leaves[1:]]  # type: ignore[operator]
        shares[0] = torch.where(observed.unsqueeze(1), shares[0].sum(1, keepdim=True), shares[0])
        return y.detach(), *shares

    for context, kernel in ((plain, False), (contextlib.nullcontext, fused(activation, mode))):
        truth = Truth(activation, mean, spread, exact.weights, fused=kernel)
        direction = everywhere * truth.whole
        _, *references = run(torch.float64, direction)
        with context():
            y, *gradients = run(torch.float32, direction)
        # Noise of 1e-40 is subnormal: products of TF32 keep three bits of it, too few for a gradient.
        subnormal = kernel and scale == 1e-20
        assert truth.holds(y, size, 1e-3 if subnormal else 3e-6)
        if subnormal or truth.infinite.any():
            continue  # an infinite value has no gradient
        for ours, expected in zip(gradients, references, strict=True):
            assert (ours - expected).abs().max() < 1e-4 * expected.abs().max() + 1e-6


@pytest.mark.usefixtures("without_tf32")
def test_an_outlier_takes_nothing_from_the_rest_of_its_image() -> None:
    """One missing pixel varies by 1e20 and the others by 1; one image by 1e-15 and the next by 1e15."""
    observed = torch.rand(2, 1, 9, 9) < 0.5
    observed[:, :, :, 4] = False
    p, conv = random_mfa(2, 1, 2, (1, 9, 9), observed), nn.Conv2d(1, 3, 3)
    p.factors[0, :, :, :, 4, 4] *= 1e20
    p.means[0, :, :, 4, 4] *= 1e20
    for i, unit in ((0, 1.0), (1, 1e15)):
        for t in (p.means, p.factors):
            t[i] *= unit
        p.noise[i] *= unit**2
    parts = [t.float() for t in (p.logits, p.means, p.factors, p.noise)]
    exact = MFA(*(t.double() for t in parts), observed)
    mean, variance = dense_moments(exact, conv)
    truth = Truth("relu", mean, variance.sqrt(), exact.weights, fused=fused("relu"))
    y = expected_conv2d(MFA(*parts, observed), conv.weight.float(), conv.bias.float())
    assert truth.finite[1].all()
    assert truth.holds(y, (mean.abs() + variance.sqrt())[:, 0], 1e-5)


def test_variances_beyond_float32_are_infinite_or_zero_and_never_nan() -> None:
    p = random_mfa(1, 1, 1, (1, 5, 5))
    weight = torch.randn(2, 1, 3, 3, dtype=torch.float32)
    for scale, limit in ((1e25, torch.inf), (1e-30, 0.0)):
        parts = scaled(p, scale)
        parts[3] = torch.zeros_like(parts[3])
        mean, variance = conv2d_moments(MFA(*parts), weight)
        assert mean.isfinite().all()
        assert (variance == limit).all()


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("scale", [1e-10, 1e15, 1e18])
@pytest.mark.usefixtures("without_tf32")
def test_batch_statistics_in_any_unit(scale: float, components: int) -> None:
    observed = torch.rand(3, 1, 8, 8) < 0.6
    parts = scaled(random_mfa(3, components, 2, (2, 8, 8), observed), scale)
    norms = [nn.BatchNorm2d(4, dtype=type_) for type_ in (torch.float32, torch.float64)]
    layers = [MisConv2d(2, 4, 3, bias=False, norm=norm, activation="gelu").to(norm.weight.dtype) for norm in norms]
    layers[1].weight.data.copy_(layers[0].weight)
    ours, exact = (layer(MFA(*(t.to(layer.weight.dtype) for t in parts), observed)) for layer in layers)
    # Fused kernels fold the normalization into the weights, whose squares leave float32's normal numbers at 1e18.
    bound = 3e-5 if ours.is_cuda and scale == 1e18 else 3e-6
    assert (ours - exact).abs().max() < bound * exact.abs().max()
    for a, b in ((norms[0].running_var, norms[1].running_var), (norms[0].running_mean, norms[1].running_mean)):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5 * float(b.abs().max()))  # type: ignore[union-attr]


# Batch normalization ----------------------------------------------------------------------------------------------


def test_batch_statistics_equal_monte_carlo() -> None:
    observed = torch.rand(4, 1, 6, 6) < 0.5
    p, conv = random_mfa(4, 3, 2, (2, 6, 6), observed), nn.Conv2d(2, 3, 3)
    mean, variance = conv2d_moments(p, conv.weight, conv.bias)
    running_mean, running_var = torch.zeros(3), torch.ones(3)
    batch_norm_moments(mean, variance, p.weights, running_mean, running_var, training=True, momentum=1.0)
    responses = conv(p.sample(20_000).flatten(0, 1)).detach()  # (S·B, O, H', W')
    count = 4 * 4 * 4
    torch.testing.assert_close(running_mean, responses.mean((0, 2, 3)).to(running_mean), rtol=0.01, atol=0.01)
    unbiased = responses.var((0, 2, 3), correction=0) * count / (count - 1)
    torch.testing.assert_close(running_var, unbiased.to(running_var), rtol=0.01, atol=0.01)


def test_batch_norm_of_complete_images_is_that_of_torch() -> None:
    mean = torch.randn(4, 1, 3, 5, 5)
    weight, bias = torch.rand(3) + 0.5, torch.randn(3)
    ours, theirs = (torch.zeros(3), torch.ones(3)), (torch.zeros(3), torch.ones(3))
    m, v = batch_norm_moments(mean, torch.zeros_like(mean), torch.ones(4, 1), *ours, weight, bias, training=True)
    expected = F.batch_norm(mean[:, 0], *theirs, weight, bias, training=True)
    close(m[:, 0], expected)
    assert (v == 0).all()
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


def test_batch_norm_of_complete_images_has_the_bits_of_torch() -> None:
    """In training too, in any precision."""
    for type_ in (torch.float64, torch.float32):
        mean, weight, bias = (
            torch.randn(4, 1, 3, 5, 5, dtype=type_),
            torch.randn(3, dtype=type_),
            torch.randn(3, dtype=type_),
        )
        ones = torch.ones(4, 1, dtype=type_)
        m, _ = batch_norm_moments(mean, torch.zeros_like(mean), ones, None, None, weight, bias, training=True)
        plain = F.batch_norm(mean[:, 0], None, None, weight, bias, training=True)
        assert torch.equal(m[:, 0], plain)
        # Also as several components that agree.
        three, weights = torch.cat([mean] * 3, 1), torch.rand(4, 3, dtype=type_).softmax(1)
        m, _ = batch_norm_moments(three, torch.zeros_like(three), weights, None, None, weight, bias, training=True)
        assert torch.equal(m, plain.unsqueeze(1).expand_as(m))


def test_batch_norm_of_one_component_is_that_of_two_equal_ones() -> None:
    mean, variance = torch.randn(4, 1, 3, 5, 5), torch.rand(4, 1, 3, 5, 5)
    weight, bias = torch.randn(3), torch.randn(3)
    for parameters in ((None, None), (weight, None), (weight, bias)):
        once = batch_norm_moments(mean, variance, torch.ones(4, 1), None, None, *parameters, training=True)
        pair = (mean.expand(4, 2, 3, 5, 5), variance.expand(4, 2, 3, 5, 5))
        twice = batch_norm_moments(*pair, torch.full((4, 2), 0.5), None, None, *parameters, training=True)
        for a, b in zip(once, twice, strict=True):
            close(a[:, 0], b[:, 1])


@pytest.mark.parametrize("components", [1, 2])
def test_batch_norm_gradients(components: int) -> None:
    if torch.get_default_dtype() != torch.float64:
        pytest.skip("gradcheck needs float64")
    inputs = [
        torch.randn(2, components, 2, 3, 3),
        torch.rand(2, components, 2, 3, 3),
        torch.randn(2, components),
        torch.rand(2) + 0.5,
        torch.randn(2),
    ]
    for value in inputs:
        value.requires_grad_()

    def run(mean: Tensor, variance: Tensor, logits: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return batch_norm_moments(mean, variance, logits.softmax(1), None, None, weight, bias, training=True)

    assert torch.autograd.gradcheck(run, inputs)


def test_batch_norm_needs_more_than_one_value() -> None:
    one = torch.zeros(1, 2, 3, 1, 1)
    with pytest.raises(ValueError, match="training needs more than one value per channel"):
        batch_norm_moments(one, one, torch.ones(1, 2), None, None, training=True)


# Partial convolution ----------------------------------------------------------------------------------------------


def obvious_partial_convolution(x: Tensor, observed: Tensor, conv: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Window by window, output channel by output channel, in loops."""
    observed = observed.expand(x.shape)
    (ph, pw), (sh, sw), (dh, dw), (kh, kw) = conv.padding, conv.stride, conv.dilation, conv.kernel_size
    assert isinstance(ph, int)
    assert isinstance(pw, int)
    filled = F.pad(x.masked_fill(~observed, 0), (pw, pw, ph, ph))
    seen = F.pad(observed, (pw, pw, ph, ph))
    height = (filled.shape[2] - dh * (kh - 1) - 1) // sh + 1
    width = (filled.shape[3] - dw * (kw - 1) - 1) // sw + 1
    result, some = (
        torch.zeros(len(x), conv.out_channels, height, width),
        torch.zeros(len(x), conv.out_channels, height, width, dtype=torch.bool),
    )
    per_group_in, per_group_out = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    for b in range(len(x)):
        for o in range(conv.out_channels):
            channels = slice((o // per_group_out) * per_group_in, (o // per_group_out + 1) * per_group_in)
            for i in range(height):
                for j in range(width):
                    rows = slice(i * sh, i * sh + dh * (kh - 1) + 1, dh)
                    columns = slice(j * sw, j * sw + dw * (kw - 1) + 1, dw)
                    count = seen[b, channels, rows, columns].sum()
                    if count > 0:
                        total = (filled[b, channels, rows, columns] * conv.weight[o]).sum()
                        result[b, o, i, j] = total * (per_group_in * kh * kw) / count
                        result[b, o, i, j] += 0 if conv.bias is None else conv.bias[o]
                        some[b, o, i, j] = True
    return result, some


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_partial_convolution_equals_the_obvious_one(groups: int, per_channel: bool, bias: bool) -> None:
    x, observed = torch.randn(2, 4, 7, 6), torch.rand(2, 4 if per_channel else 1, 7, 6) < 0.25
    conv = nn.Conv2d(4, 6, (3, 2), (2, 1), (2, 1), (1, 2), groups, bias)
    arguments = (conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    result, some = partial_conv2d(x, observed, *arguments, return_observed=True)
    with torch.no_grad():
        expected, expected_some = obvious_partial_convolution(x, observed, conv)
    close(result, expected)
    assert torch.equal(some.expand(expected_some.shape), expected_some)
    assert some.shape[1] == (6 if per_channel and groups > 1 else 1)


def test_partial_convolution_of_a_complete_image_is_the_convolution() -> None:
    x, conv = torch.randn(2, 3, 6, 6), nn.Conv2d(3, 4, 3)
    close(partial_conv2d(x, torch.ones(2, 1, 6, 6, dtype=torch.bool), conv.weight, conv.bias), conv(x))


def test_partial_convolution_gradients() -> None:
    if torch.get_default_dtype() != torch.float64:
        pytest.skip("gradcheck needs float64")
    observed = torch.rand(1, 2, 4, 4) < 0.4
    inputs = [torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3), torch.randn(2)]
    for value in inputs:
        value.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w, b: partial_conv2d(x, observed, w, b, padding=1), inputs)


# Bad input --------------------------------------------------------------------------------------------------------


def test_bad_convolutions() -> None:
    p, weight = random_mfa(1, 1, 1, (3, 6, 6)), torch.randn(4, 3, 3, 3)
    with pytest.raises(TypeError, match=r"p must be a misconv.MFA .misconv.MFA.point.x. for complete images., got a"):
        expected_conv2d(torch.zeros(1, 3, 6, 6), weight)
    with pytest.raises(
        ValueError, match=r"weight must have C/groups = 3/1 input channels to fit images of 3 channels, got"
    ):
        expected_conv2d(p, weight[:, :2])
    with pytest.raises(TypeError, match="weight must be a floating-point tensor .O, C/groups, kh, kw., got a int64"):
        expected_conv2d(p, weight.long())
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\), one per output channel, got"):
        expected_conv2d(p, weight, torch.zeros(3))
    with pytest.raises(ValueError, match="weight must have the dtype of the images"):
        expected_conv2d(p, weight.to(torch.float16))
    with pytest.raises(ValueError, match="weight must be on the device of the images"):
        expected_conv2d(p, weight.to("meta"))
    with pytest.raises(ValueError, match="groups must be a positive divisor of the 4 output channels, got 3"):
        expected_conv2d(p, weight, groups=3)
    with pytest.raises(ValueError, match="padding must be a number, a pair, 'same' or 'valid', got 'full'"):
        expected_conv2d(p, weight, padding="full")
    with pytest.raises(ValueError, match="padding_mode must be zeros, reflect, replicate or circular, got 'mirror'"):
        expected_conv2d(p, weight, padding_mode="mirror")


@pytest.mark.parametrize("function", [conv2d_moments, expected_conv2d])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stride": 0}, ValueError, "stride must be an integer of at least 1 or a pair of them, got 0"),
        ({"stride": (1, 2, 3)}, ValueError, "stride must be an integer of at least 1 or a pair of them, got"),
        ({"stride": "2"}, ValueError, "stride must be an integer of at least 1 or a pair of them, got '2'"),
        ({"stride": 2, "padding": "same"}, ValueError, "padding must not be 'same' where stride is not 1, got stride 2"),
        ({"padding": -1}, ValueError, "padding must be an integer of at least 0 or a pair of them, got -1"),
        ({"padding": 1.5}, ValueError, "padding must be an integer of at least 0 or a pair of them, got 1.5"),
        ({"padding": 2**30}, ValueError, "padding must leave a response that fits into memory, got 1073741824"),
        ({"padding": 7, "padding_mode": "circular"}, ValueError, "padding must be at most 6 rows and 6 columns for padding_mode circular"),
        ({"padding": (0, 6), "padding_mode": "reflect"}, ValueError, "padding must be at most 5 rows and 5 columns for padding_mode reflect"),
        ({"padding_mode": None}, ValueError, "padding_mode must be zeros, reflect, replicate or circular, got None"),
        ({"dilation": 3}, ValueError, "weight must fit into the images of 6×6 pixels with padding 0, got windows of 3×3 pixels with dilation 3"),
        ({"dilation": None}, ValueError, "dilation must be an integer of at least 1 or a pair of them, got None"),
        ({"groups": 0}, ValueError, "groups must be an integer of at least 1, got 0"),
        ({"groups": True}, ValueError, "groups must be an integer of at least 1, got True"),
        ({"weight": torch.zeros(4, 3, 0, 3)}, ValueError, "weight must have no empty dimension, got a float.. tensor of shape"),
        ({"weight": np.zeros((4, 3, 3, 3))}, TypeError, r"weight must be a floating-point tensor .*, got a float64 numpy array of shape"),
        ({"weight": torch.zeros(4, 3, 3, 3).to_sparse()}, TypeError, "weight must be a dense tensor, got a sparse_coo float"),
        ({"bias": [0.0] * 4}, TypeError, r"bias must be a floating-point tensor \(4,\) or None, got"),
        ({"bias": torch.zeros(4).to_sparse()}, TypeError, "bias must be a dense tensor, got a sparse_coo float"),
        ({"bias": torch.zeros(4, device="meta")}, ValueError, "bias must be on the device of the images, .*, got a .* on meta"),
    ],
)  # fmt: skip
def test_every_bad_argument_is_named(
    function: Callable[..., object], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    p = random_mfa(1, 1, 1, (3, 6, 6))
    with pytest.raises(error, match=message) as caught:
        function(p, **{"weight": torch.randn(4, 3, 3, 3), **arguments})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mean": torch.zeros(2, 3, 4, 4)}, ValueError, r"mean must have shape \(B, K, O, H', W'\), got"),
        ({"variance": torch.zeros(2, 1, 3, 4, 5)}, ValueError, "variance must match mean, .*, got"),
        ({"variance": None}, TypeError, "variance must be a floating-point tensor, got None"),
        ({"weights": torch.ones(2)}, ValueError, r"weights must have shape \(B, K\) = \(2, 1\), got"),
        ({"running_mean": torch.zeros(4)}, ValueError, "running_mean must be a tensor of the 3 channels, got"),
        ({"weight": torch.zeros(3, dtype=torch.float16)}, ValueError, "weight must have the dtype of mean, .*, got a float16"),
        ({"bias": torch.zeros(3, device="meta")}, ValueError, "bias must be on the device of mean, .*, got a .* on meta"),
        ({"training": torch.ones(2)}, TypeError, "training must be True or False, got a"),
        ({"momentum": None}, ValueError, "momentum must be a number from 0 to 1, got None"),
        ({"eps": -1.0}, ValueError, "eps must be a finite number above 0, got -1.0"),
    ],
)  # fmt: skip
def test_bad_batch_statistics(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    moments = torch.zeros(2, 1, 3, 4, 4)
    good = {
        "mean": moments,
        "variance": moments,
        "weights": torch.ones(2, 1),
        "running_mean": None,
        "running_var": None,
    }
    with pytest.raises(error, match=message):
        batch_norm_moments(**{**good, "training": True, **arguments})


def test_numbers_of_numpy_are_numbers() -> None:
    p, weight = random_mfa(1, 1, 1, (2, 6, 6)), torch.randn(4, 1, 3, 3)
    arguments = {"stride": np.int64(2), "padding": [np.int32(1), 2], "dilation": np.int64(1), "groups": np.int64(2)}
    for mode in ("zeros", "reflect"):
        ours = expected_conv2d(p, weight, **arguments, padding_mode=mode)  # type: ignore[arg-type]
        assert torch.equal(ours, expected_conv2d(p, weight, None, 2, (1, 2), 1, 2, mode))


def test_bad_partial_convolutions(values_are_checked: None) -> None:
    x, weight = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    with pytest.raises(
        TypeError, match="x must be a floating-point image, got a uint8 tensor.*convert it, for example x.float"
    ):
        partial_conv2d(x.to(torch.uint8), seen, weight)
    with pytest.raises(ValueError, match=r"x must have shape \(B, C, H, W\) with no empty dimension, got"):
        partial_conv2d(x[:0], seen, weight)
    with pytest.raises(
        ValueError, match=r"observed must have shape \(1, 1, 6, 6\) or \(1, 3, 6, 6\) to fit the images, got"
    ):
        partial_conv2d(x, seen[..., :5], weight)
    with pytest.raises(ValueError, match="x must be finite wherever it is observed, got nan"):
        partial_conv2d(x * torch.nan, seen, weight)
    with pytest.raises(TypeError, match="return_observed must be True or False, got 1"):
        partial_conv2d(x, seen, weight, return_observed=1)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="weight must fit into the images of 6×6 pixels with padding 0, got windows of 3×3"
    ):
        partial_conv2d(x, seen, weight, dilation=4)
