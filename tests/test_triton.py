"""The fused convolution against the plain formulas in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import misconv
from misconv import MFA, functional
from misconv._backend import warn_plain_path
from misconv._conv import Affine, Convolution, fixed_batch_norm
from misconv._conv.dispatch import plain_path
from misconv._math.expectations import expectation

pytest.importorskip("triton")

import triton
import triton.language as tl

from misconv._triton import operator as _triton
from misconv._triton import plan as _triton_launch
from misconv._triton import tiles as _triton_tiles
from misconv._triton.expectations import activation as plain_activation
from misconv._triton.expectations import expected, slopes

# Relative error of norms against float64: what float32 sums allow.
BOUND = 1e-6
TF32_BOUND = 1e-3  # and what ten bits of mantissa allow


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TF32, and small tiles, so that small images have several: the interpreter takes its time."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for tilings in (_triton_launch._FORWARD, _triton_launch._BACKWARD):
        for key, tiling in tilings.items():
            monkeypatch.setitem(tilings, key, tiling._replace(pixels=16))
    _triton._plan.cache_clear()
    _triton._cached_plan.cache_clear()


def layer(
    channels: int = 2,
    image: tuple[int, int] = (7, 9),
    out: int = 3,
    kernel: int = 3,
    components: int = 1,
    rank: int = 2,
    groups: int = 1,
    seen: str = "shared",
    has_bias: bool = True,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Leaves (logits, means, factors, noise, x, weight, bias) in float64 and what is observed."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shape = (2, components, channels, *image)
    leaves: list[Tensor | None] = [
        randn(2, components),
        randn(*shape),
        0.3 * randn(2, components, rank, channels, *image),
        0.1 + 0.1 * randn(*shape).square(),
        randn(2, channels, *image),
        0.3 * randn(out, channels // groups, kernel, kernel),
        randn(out) if has_bias else None,
    ]
    observed = None
    if seen != "nothing":
        rows = torch.ones(2, 1 if seen == "shared" else channels, *image, dtype=torch.bool)
        rows[:, :, 2:4, 3:6] = False  # so that some windows touch it and others do not
        if seen == "each":
            rows[:, 0] = True
        observed = rows
    return leaves, observed


def respond(
    p: MFA,
    weight: Tensor,
    bias: Tensor | None = None,
    *geometry: Any,
    norm: Affine | None = None,
    activation: Any = "relu",
) -> Tensor | None:
    """The fused convolution, or None; `geometry` is stride, padding, dilation, groups, padding_mode."""
    conv = Convolution(weight, bias, *geometry)
    return _triton.respond(p, conv, norm, activation, plain_path(conv, activation))


def run(
    leaves: list[Tensor | None], observed: Tensor | None, dtype: torch.dtype, fused: bool, like: torch.dtype = torch.float64,
    **options: Any,
) -> Any:  # fmt: skip
    """Response and gradients of all leaves, for an upstream gradient that the type `like` holds."""
    fresh = [None if t is None else t.to(dtype).detach().requires_grad_() for t in leaves]
    logits, means, factors, noise, x, weight, bias = fresh
    assert logits is not None
    assert means is not None
    assert factors is not None
    assert noise is not None
    assert x is not None
    assert weight is not None
    p = MFA(logits, means, factors, noise, check=False)  # it may hold poison
    p = p if observed is None else p.fix(x, observed)
    activation = options.pop("activation", "relu")
    if fused:
        geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
        y = respond(p, weight, bias, *geometry.values(), activation=activation)
        assert y is not None
    else:
        with misconv.plain():
            y = functional.expected_conv2d(p, weight, bias, **options, activation=activation)
    wanted = [t for t in fresh if t is not None]
    return y.detach(), torch.autograd.grad(y, wanted, upstream(y).to(like).to(y.dtype), materialize_grads=True)


def upstream(y: Tensor) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(1)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64, device=y.device)


def error(actual: Tensor, reference: Tensor, size: float = 0.0) -> float:
    """Relative to the reference, or to a size that is larger."""
    return float((actual.double() - reference).norm()) / (max(size, float(reference.norm())) or 1.0)


def assert_close(
    leaves: list[Tensor | None], observed: Tensor | None, bound: float = BOUND, terms: float = 0.0, **options: Any
) -> None:
    """`terms` is the size of what the gradient of the logits adds up, where more cancels than the bound allows.

    That of the bias adds up the slopes of all windows, with a sign each; it is measured by these as well.
    """
    y, gradients = run(leaves, observed, torch.float32, True, **options)
    reference, references = run(leaves, observed, torch.float64, False, **options)
    assert error(y, reference) < bound
    assert error(gradients[0], references[0], terms) < bound
    of_bias = float(upstream(reference).abs().sum((0, 2, 3)).norm()) if terms else 0.0
    for gradient, expected_gradient in zip(gradients[1:], references[1:], strict=True):
        assert error(gradient, expected_gradient, of_bias if gradient.dim() == 1 else 0.0) < bound


def logit_terms(leaves: list[Tensor | None], observed: Tensor | None, **options: Any) -> float:
    """|π_k Σ |g (E_k − Ē)||: the gradient of logit k is the same sum without the inner bars."""
    logits, means, factors, noise, x, weight, bias = leaves
    assert logits is not None
    p = MFA(logits, means, factors, noise).fix(x, observed)  # type: ignore[arg-type]
    each = [
        functional.expected_conv2d(
            MFA(p.logits[:, k:][:, :1], *(t[:, k:][:, :1] for t in (p.means, p.factors, p.noise)), observed),
            weight, bias, **options,
        )
        for k in range(logits.shape[1])
    ]  # fmt: skip
    mean = functional.expected_conv2d(p, weight, bias, **options)  # type: ignore[arg-type]
    sums = torch.stack([(upstream(mean) * (y - mean)).abs().sum((1, 2, 3)) for y in each], 1)
    return float((p.weights * sums).norm())


# Values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"padding": 1}),
        ({"components": 3}, {}),
        ({"rank": 0}, {"padding": 1}),
        ({"rank": 7, "components": 2}, {"padding": 1}),
        ({"kernel": 5, "image": (9, 12)}, {"stride": 2, "padding": 2}),
        ({"kernel": 2}, {"stride": (1, 3), "padding": (1, 0), "dilation": (2, 3)}),
        ({"kernel": 4}, {"padding": "same"}),
        ({"channels": 4, "out": 6, "groups": 2}, {"groups": 2, "padding": 1}),
        ({"channels": 3, "out": 3, "groups": 3, "seen": "each"}, {"groups": 3, "padding": 1}),
        ({"seen": "each", "components": 2}, {"padding": 1}),
        ({"seen": "nothing", "components": 2}, {"padding": 1}),
        ({"has_bias": False, "out": 20}, {"padding": 1}),
    ],
)
def test_values_and_gradients_are_those_of_the_plain_path(shape: dict[str, Any], options: dict[str, Any]) -> None:
    leaves, observed = layer(**shape)
    assert_close(leaves, observed, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"channels": 1, "kernel": 7, "components": 2, "rank": 1}, {"stride": 2, "padding": 3}),
        ({"kernel": 6, "image": (7, 10), "seen": "each", "rank": 5}, {"stride": (1, 2)}),
        ({"out": 4, "groups": 2, "kernel": 5, "rank": 0}, {"stride": 2, "padding": 2, "groups": 2}),
        ({"channels": 3, "out": 20, "kernel": 5, "rank": 4}, {"stride": 2, "padding": 2}),
    ],
)
def test_pixels_spread_in_pairs_change_nothing(
    shape: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bfloat16 pixels in a word: the same numbers are multiplied, in the same order, and a zero is added."""
    start, observed = layer(**shape)
    logits, means, factors, noise, x, weight, bias = (t if t is None else t.bfloat16() for t in start)
    p = MFA(logits, means, factors, noise, check=False).fix(x, observed)  # type: ignore[arg-type]
    weight = weight.requires_grad_()  # type: ignore[union-attr]
    geometry = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | options
    found, made = [], _triton_launch.Plan.__init__
    for paired in (True, False):

        def make(plan: Any, *arguments: Any, paired: bool = paired) -> None:
            made(plan, *arguments)
            assert plan.paired
            plan.paired = paired

        monkeypatch.setattr(_triton_launch.Plan, "__init__", make)
        _triton._plan.cache_clear()
        y = respond(p, weight, bias, *geometry.values())
        assert y is not None
        found.append((y.detach(), *torch.autograd.grad(y, weight, upstream(y).to(y.dtype))))
    with misconv.plain():
        exact = p.to(torch.float64)
        wide = weight.detach().double().requires_grad_()
        y = functional.expected_conv2d(exact, wide, None if bias is None else bias.double(), **options)
        truth = (y.detach(), *torch.autograd.grad(y, wide, upstream(y).bfloat16().double()))
    for ours, theirs, exactly in zip(*found, truth, strict=True):
        assert ours.shape == theirs.shape
        assert error(ours, exactly) < 1e-2
        assert error(ours, theirs.double()) < 1e-6 or ours.is_cuda  # which adds up in another order


@pytest.mark.parametrize("seen", ["shared", "each"])
def test_many_channels_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    for module in (_triton_launch, _triton_tiles):
        monkeypatch.setattr(module, "LARGEST_BOX", 100)
    leaves, observed = layer(channels=5, components=2, seen=seen)
    assert_close(leaves, observed, padding=1)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"channels": 32, "kernel": 2}, {}),
        ({"channels": 1, "kernel": 16, "image": (32, 32)}, {"stride": 16}),
    ],
)
def test_taps_that_fill_several_blocks_to_the_last_place(
    shape: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of their weights are added up, so they must begin at zero, whatever fresh memory holds."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(3))
    leaves, observed = layer(**shape)
    assert observed is not None
    observed[:, :, ::2] = False  # of few hidden pixels the deviation is small, and a rounded mean weighs much beside it
    assert_close(leaves, observed, **options)


@pytest.mark.parametrize(
    "activation",
    ["identity", "relu6", "hardtanh", "gelu", "silu", nn.LeakyReLU(0.2), nn.Hardtanh(-0.5, 0.3), torch.relu],
)
def test_activations_and_their_gradients(activation: Any) -> None:
    leaves, observed = layer(components=2)
    assert_close(leaves, observed, padding=1, activation=activation)


def test_tf32_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten bits of mantissa, with a smooth activation: at the kink of ReLU rounding decides between two gradients."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    leaves, observed = layer(components=2)
    # The gradient of a logit is a sum of differences of responses, and rounding does not cancel where these do.
    terms = logit_terms(leaves, observed, padding=1, activation="gelu")
    assert_close(leaves, observed, TF32_BOUND, terms, padding=1, activation="gelu")
    with pytest.raises(AssertionError):  # TF32 is what was used
        assert_close(leaves, observed, 1e-5, padding=1, activation="gelu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_the_result_and_nothing_else(dtype: torch.dtype) -> None:
    leaves, observed = layer(components=2)
    leaves = [None if t is None else t.to(dtype).double() for t in leaves]
    y, gradients = run(leaves, observed, dtype, True, dtype, padding=1)
    reference, references = run(leaves, observed, torch.float64, False, dtype, padding=1)
    assert y.dtype == dtype
    for actual, expected_value in zip((y, *gradients), (reference, *references), strict=True):
        assert actual.dtype == dtype
        assert error(actual, expected_value) < torch.finfo(dtype).eps


@triton.jit
def _tabulate(mean, variance, out, low, high, NAME: tl.constexpr, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    m, v = tl.load(mean + place), tl.load(variance + place)
    by_m, by_v = slopes(m, v, NAME, low, high)
    value, slope = plain_activation(m, NAME, low, high)
    tl.store(out + place, expected(m, v, NAME, low, high))
    tl.store(out + SIZE + place, by_m)
    tl.store(out + 2 * SIZE + place, by_v)
    tl.store(out + 3 * SIZE + place, value)
    tl.store(out + 4 * SIZE + place, slope)


@pytest.mark.parametrize("name", ["identity", "relu", "leaky_relu", "relu6", "hardtanh", "gelu", "silu"])
def test_expectations_are_exact_at_all_scales(name: str) -> None:
    """Within the rounding of float32 relative to the spread, from certainty to a spread of a thousand."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    size = 4096
    spread = torch.logspace(-6, 3, size, dtype=torch.float64)
    spread[::8] = 0
    mean = 4 * torch.randn(size, generator=generator, dtype=torch.float64) * (spread + 0.1)
    m, v = mean.float(), spread.square().float()
    out = torch.full((5, size), torch.nan, dtype=torch.float32)
    word, low, high = _triton._kernel_of_name(name)  # type: ignore[misc]  # the kernels know it
    _tabulate[(1,)](m, v, out, low, high, word, size)
    m64, v64 = m.double().requires_grad_(), v.double().requires_grad_()
    value = expectation(name, m64, v64)
    by_m, by_v = torch.autograd.grad(value.sum(), (m64, v64), materialize_grads=True)
    unit = v64.detach().sqrt() + m64.detach().abs() + 1
    assert ((out[0] - value.detach()).abs() / unit).max() < 1e-6
    assert (out[1] - by_m).abs().max() < 2e-6
    wrong = (out[2] - by_v).abs()[v > 0]
    if name in ("identity", "gelu", "silu"):
        assert wrong.max() < 2e-6
    else:  # φ(m/s)/2s: a rounding of m is so many s
        assert (wrong * (v64.detach() / unit)[v > 0]).max() < 1e-7
    certain = expectation(name, m64, torch.zeros_like(v64))
    assert ((out[3] - certain.detach()).abs() / unit).max() < 1e-6
    assert (out[4] - torch.autograd.grad(certain.sum(), m64)[0]).abs().max() < 2e-6


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "relu6", "hardtanh", "gelu", "silu"])
def test_expectations_at_the_ends_of_float32(name: str) -> None:
    """Down to the smallest variance and up to the largest; beyond it infinite where the truth is large, never NaN."""
    size = 256
    spread = torch.logspace(-18.9, 18.2, size, dtype=torch.float64)
    mean = spread * torch.linspace(-3, 3, size, dtype=torch.float64)
    m, v = mean.float(), spread.square().float()
    v[-1] = torch.inf
    m[-1] = 0
    out = torch.full((5, size), torch.nan, dtype=torch.float32)
    word, low, high = _triton._kernel_of_name(name)  # type: ignore[misc]  # the kernels know it
    _tabulate[(1,)](m, v, out, low, high, word, size)
    value = expectation(name, m.double(), v.double())
    bounded = name in ("relu6", "hardtanh")
    unit = torch.full_like(value, 1.0) if bounded else v.double().sqrt() + m.double().abs()
    assert ((out[0] - value).abs() / unit)[:-1].max() < (5e-6 if bounded else 1e-6)
    if bounded:
        assert abs(out[0, -1].item() - (low + high) / 2) < 1e-6
    else:
        assert out[0, -1] == torch.inf


# What is never read, and what is always written -------------------------------------------------------------------


def test_observed_factors_and_noise_are_never_read() -> None:
    leaves, observed = layer(components=2)
    assert observed is not None
    logits, means, factors, noise, x, weight, bias = leaves
    assert factors is not None
    assert noise is not None
    clean = run(leaves, observed, torch.float32, True, padding=1)
    hidden = [factors.masked_fill(observed[:, None, None], torch.nan), noise.masked_fill(observed[:, None], torch.nan)]
    poisoned = run([logits, means, *hidden, x, weight, bias], observed, torch.float32, True, padding=1)
    assert torch.equal(clean[0], poisoned[0])
    for first, second in zip(clean[1], poisoned[1], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)  # the order of sums may differ


def test_every_element_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Any) -> Any:
        return lambda *sizes, **kwargs: make(*sizes, **kwargs).fill_(torch.nan)

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(_triton_launch.torch, name, poisoned(getattr(torch, name)))
    leaves, observed = layer(out=20, kernel=5, image=(9, 12))
    assert_close(leaves, observed, padding=2)


def test_the_response_lies_in_memory_as_the_weights_do() -> None:
    leaves, observed = layer(channels=2, out=4)
    p = MFA(*(t.float() for t in leaves[:4] if t is not None)).fix(leaves[4].float(), observed)  # type: ignore[union-attr, arg-type]
    weight = leaves[5].float()  # type: ignore[union-attr]
    plain = respond(p, weight, None, 1, 1)
    last = respond(p, weight.to(memory_format=torch.channels_last), None, 1, 1)
    assert plain is not None
    assert last is not None
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)


# Around it --------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_left_to_the_plain_path() -> None:
    """Which says what is wrong with them."""
    p = MFA(*(t.float() for t in layer()[0][:4] if t is not None))
    weight = torch.ones(3, 2, 3, 3, dtype=torch.float32)
    bad: list[tuple[Any, Any]] = [
        (weight.tolist(), None),
        (weight.int(), None),
        (weight[:, :, :0], None),
        (weight, [0.0] * 3),
        (weight, torch.zeros(3, dtype=torch.int64)),
    ]
    assert respond(p, weight, weight[:, 0, 0, 0]) is not None
    for enabled in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled and torch.cuda.is_available()):
            for wrong, bias in bad:
                assert respond(p, wrong, bias) is None


def test_second_derivatives_are_those_of_the_plain_path() -> None:
    leaves, observed = layer()
    results = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        fresh = [t.to(dtype).detach().requires_grad_() for t in leaves if t is not None]
        logits, means, factors, noise, x, weight, bias = fresh
        p = MFA(logits, means, factors, noise).fix(x, observed)  # type: ignore[arg-type]
        if fused:
            y = respond(p, weight, bias, 2, "valid", activation="gelu")
            assert y is not None
        else:
            y = functional.expected_conv2d(p, weight, bias, 2, "valid", activation="gelu")
        (first,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [weight, factors, noise]))
    for actual, reference in zip(*results, strict=True):
        assert error(actual, reference) < 10 * BOUND  # twice differentiated in float32


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_fixed_normalization_is_part_of_the_weights(has_bias: bool) -> None:
    leaves, observed = layer(has_bias=has_bias)
    norm = nn.BatchNorm2d(3).double().eval()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.nn.init.uniform_(norm.running_mean)
    torch.nn.init.uniform_(norm.running_var, 0.5, 2)
    torch.nn.init.uniform_(norm.weight)
    logits, means, factors, noise, x, weight, bias = leaves
    p = MFA(logits, means, factors, noise).fix(x, observed)  # type: ignore[arg-type]
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=has_bias).double()
    conv.weight = nn.Parameter(weight)  # type: ignore[arg-type]
    conv.bias = None if bias is None else nn.Parameter(bias)
    with misconv.plain():
        reference = misconv.MisConv2d.from_conv(conv, norm, "relu")(p)
    norm = norm.float()
    fixed = fixed_batch_norm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
    y = respond(
        p.to(torch.float32),
        weight.float(),  # type: ignore[union-attr]
        None if bias is None else bias.float(),
        1,
        1,
        norm=fixed,
    )
    assert y is not None
    assert error(y.detach(), reference.detach()) < BOUND


def test_as_an_operator_in_a_compiled_graph() -> None:
    """Compiled whole, with gradients, and by torch's own checks of what an operator promises."""
    leaves, observed = layer(components=2)
    packed = ([1, 1, 1, 1, 1, 1, 7, 9], 1, "relu", 0.0, 0.0, "tf32x3", torch.float32)

    def loss(logits: Tensor, means: Tensor, factors: Tensor, noise: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = torch.ops.misconv.expected_conv2d(logits, means, factors, noise, observed, weight, bias, *packed)
        return y.square().sum()

    logits, means, factors, noise, x, weight, bias = (t.float() for t in leaves if t is not None)
    means = MFA(logits, means, factors, noise).fix(x, observed).means  # type: ignore[arg-type]
    fresh = [t.detach().clone().requires_grad_() for t in (logits, means, factors, noise, weight, bias)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(*fresh), fresh)
    doubles = [t.detach().double().requires_grad_() for t in fresh]
    with misconv.plain():
        p = MFA(*doubles[:4], observed)
        reference = functional.expected_conv2d(p, doubles[4], doubles[5], padding=1).square().sum()
    references = list(torch.autograd.grad(reference, doubles))
    seen = observed.unsqueeze(1)  # type: ignore[union-attr]
    for index, (gradient, expected_gradient) in enumerate(zip(actual, references, strict=True)):
        if index == 1:  # an exact pixel stands in all components; only their sum has a meaning
            pair = [torch.where(seen, t.sum(1, keepdim=True), t) for t in (gradient, expected_gradient)]
            gradient, expected_gradient = pair
        assert error(gradient, expected_gradient) < BOUND
    with torch.no_grad():
        last = fresh[4].to(memory_format=torch.channels_last)
        turned = torch.ops.misconv.expected_conv2d(*fresh[:4], observed, last, fresh[5], *packed)
    assert turned.is_contiguous(memory_format=torch.channels_last)
    halves = [t.bfloat16() for t in (*fresh[:4], fresh[4], fresh[5])]
    plans = [_triton.unpack((*kind[:4], observed, *kind[4:]), *packed[:-1], torch.bfloat16) for kind in (fresh, halves)]
    assert plans[0] is not plans[1]  # a kernel that stays ready reads one type
    torch.library.opcheck(
        torch.ops.misconv.expected_conv2d.default,
        (*fresh[:4], observed, last.requires_grad_(), fresh[5], *packed),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("float64", {"dtype": torch.float64}),
        ("padding_mode", {"mode": "reflect"}),
        ("rank 17", {"rank": 17}),
        ("activations", {"activation": "tanh"}),
        ("too large", {"stride": 90, "kernel": 95, "image": (200, 200)}),
    ],
)
def test_it_says_once_where_it_does_not_serve(
    caplog: pytest.LogCaptureFixture, reason: str, changes: dict[str, Any]
) -> None:
    warn_plain_path.cache_clear()
    dtype, kernel = changes.get("dtype", torch.float32), changes.get("kernel", 3)
    leaves, _ = layer(image=changes.get("image", (7, 9)), kernel=kernel, rank=changes.get("rank", 1), seen="nothing")
    p = MFA(*(t.to(dtype) for t in leaves[:4] if t is not None))
    weight = leaves[5].to(dtype)  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING, "misconv"):
        for _ in range(2):
            y = respond(
                p, weight, None, changes.get("stride", 1), 0, 1, 1, changes.get("mode", "zeros"),
                activation=changes.get("activation", "relu"),
            )  # fmt: skip
            assert y is None
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_it_steps_aside_where_sums_must_have_an_order(caplog: pytest.LogCaptureFixture) -> None:
    leaves, _ = layer(seen="nothing")
    p, weight = MFA(*(t.float() for t in leaves[:4] if t is not None)), torch.randn(3, 2, 3, 3, dtype=torch.float32)
    warn_plain_path.cache_clear()
    torch.use_deterministic_algorithms(True)
    try:
        weight.requires_grad_()
        assert respond(p, weight) is not None
        p.means.requires_grad_()
        assert respond(p, weight) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in caplog.text


def test_wrong_arguments_are_left_to_the_plain_path_to_explain() -> None:
    leaves, _ = layer(seen="nothing")
    p = MFA(*(t.float() for t in leaves[:4] if t is not None))
    assert respond(p, torch.randn(3, 5, 3, 3)) is None
    assert respond(p, torch.randn(3, 2, 9, 9)) is None
    mixed = MFA(p.logits, p.means, p.factors.double(), p.noise, check=False)
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float32)
    assert respond(p, weight) is not None
    assert respond(mixed, weight) is None
    assert respond(p, weight, [0.0, 0.0, 0.0]) is None  # type: ignore[arg-type]


def test_the_plain_path_can_be_forced() -> None:
    assert not misconv._backend.is_plain()
    with misconv.plain(), misconv.plain():
        assert misconv._backend.is_plain()
    assert not misconv._backend.is_plain()
    code = """
import importlib, os
from misconv import _backend
for value in ("1", "0", ""):
    os.environ["MISCONV_PLAIN"] = value
    print(importlib.reload(_backend).is_plain())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


_COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from misconv._triton import plan as launch
from misconv._triton.moments import Windows

POINTERS = {"observed": "*i1", "table": "*i32", "jobs": "*i32", "touched": "*i8", "order": "*i32", "spots": "*bf16"}
POINTERS["tracked"] = "*i64"
launch._MANY_TILES = 1  # tiles of different cost are ordered first
POINTERS |= {name: "*fp64" for name in ("sums", "matrix", "taps")}

def plans():
    for kernel, stride, out, groups in ((7, 2, 64, 1), (3, 1, 32, 1)):
        precision = "tf32" if kernel == 7 else "tf32x3"
        settings = launch.Settings((stride,) * 2, (1, 1), (1, 1), (16, 16), groups, "relu", 0.0, 0.0, precision, torch.float32)
        yield launch.Plan(settings, (2, 2, 3, 32, 32), 5, 1, (out, 3 // groups, kernel, kernel), True, torch.device("cpu"))

launches = []
for plan in plans():
    launches += [(90, plan.forward[0])]
    launches += [(80, plan.backward((16384, 256, 16, 1), None, (True, *[every] * 4)).launch) for every in (True, False)]
    launches += [(90, each) for each in plan.backward((16384, 256, 16, 1), None, (True, *[False] * 4)).order[:2]]
    if plan.window_moments is not None:
        correlate = Windows(plan).correlate
        launches += [(90, each) for each in (correlate.arrange[0], correlate.multiply[0], correlate.assemble[True])]
settings = plan.settings._replace(stride=(2, 2), precision="bf16", dtype=torch.bfloat16)
plan = launch.Plan(settings, (2, 2, 3, 32, 32), 5, 1, (64, 3, 7, 7), True, torch.device("cpu"))
work = plan.backward((16384, 256, 16, 1), (16384, 256, 16, 1), (True, *[False] * 4))
launches += [(90, work.launch), (90, work.complete.arrange), (90, work.complete.multiply)]
for capability, each in launches:
    names = each.kernel.arg_names
    values = dict(zip(reversed(names), reversed(each.arguments)))
    kinds = {float: "fp32", int: "i32"}
    signature, constants = {}, {}
    for place, (name, parameter) in enumerate(zip(names, each.kernel.params)):
        if parameter.is_constexpr:
            signature[name], constants[(place,)] = "constexpr", values[name]
        elif name in values:
            signature[name] = kinds[type(values[name])]
        else:
            signature[name] = POINTERS.get(name, "*fp32")
    source = ASTSource(fn=each.kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=each.options)
    print(len(compiled.asm["cubin"]))
"""


def test_the_kernels_compile_without_a_gpu() -> None:
    """Down to machine code, for an A100 and an H100."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(int(size) > 1000 for size in done.stdout.split())
