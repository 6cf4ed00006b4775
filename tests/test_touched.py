"""The CPU's path, which computes expectations in touched windows alone, against the plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from misconv import MFA, MisConv2d, missing
from misconv._backend import plain
from misconv._conv import Convolution, fixed_batch_norm, respond
from misconv._conv import compiled as _compiled
from misconv._conv import touched as _touched
from misconv._math import ExpectedReLU
from misconv.functional import expected_activation, expected_conv2d
from tests.reference import random_mfa, tolerance
from tests.strategies import Case, cases

pytestmark = [
    # torch warns of the copy it makes for "same" padding with an even kernel.
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="the path of the CPU"),
]

Served = list[bool]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """For every response, whether it came from touched windows."""
    answers: Served = []
    inner = _touched.respond

    def spy(*arguments: Any) -> Tensor | None:
        result = inner(*arguments)
        answers.append(result is not None)
        return result

    monkeypatch.setattr(_touched, "respond", spy)
    return answers


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(_compiled, "_library", lambda: "there is no compiler")


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance("exact"), atol=tolerance("exact"))


def compare(run: Callable[[], Tensor], *learned: Tensor) -> None:
    """Values and gradients of a computation against those of the plain path."""
    ours = run()
    with plain():
        theirs = run()
    close(ours, theirs)
    assert ours.stride() == theirs.stride()
    if not learned:
        return
    direction = torch.randn(ours.shape)
    pair = [torch.autograd.grad((y * direction).sum(), learned, materialize_grads=True) for y in (ours, theirs)]
    for a, b in zip(*pair, strict=True):
        close(a, b)


def learning(p: MFA) -> tuple[Tensor, ...]:
    """The parameters of an MFA, from now on with gradients."""
    return tuple(t.requires_grad_() for t in (p.logits, p.means, p.factors, p.noise))


def hole(batch: int, height: int, width: int, channels: int = 1) -> Tensor:
    """Images that miss some rows and columns in the middle of each channel, a little further on in the next."""
    observed = torch.ones(batch, channels, height, width, dtype=torch.bool)
    for channel in range(channels):
        start = height // 3 + channel
        observed[:, channel, start : start + height // 4, start : start + width // 4] = False
    return observed


def closed(observed: Tensor, conv: nn.Conv2d) -> Tensor:
    """Where the windows of a convolution without groups miss nothing, bool (B, 1, H', W')."""
    count = nn.functional.conv2d(
        (~observed).sum(1, keepdim=True).double(),
        torch.ones(1, 1, *conv.kernel_size, dtype=torch.float64),
        None,
        conv.stride,
        conv.padding,
        conv.dilation,
    )
    return count < 0.5


@given(cases(modes=("zeros", "zeros", "reflect", "replicate", "circular")))
@settings(max_examples=150)
def test_values_and_gradients_are_those_of_the_plain_path(case: Case) -> None:
    learned = (*learning(case.p), *case.conv.parameters())
    compare(lambda: expected_conv2d(case.p, **case.arguments()), *learned)  # type: ignore[arg-type]


@given(cases())
@settings(max_examples=60)
def test_values_and_gradients_without_a_compiler(case: Case) -> None:
    learned = (*learning(case.p), *case.conv.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compiled, "_library", lambda: "there is no compiler")
        compare(lambda: expected_conv2d(case.p, **case.arguments()), *learned)  # type: ignore[arg-type]
        with torch.no_grad():
            compare(lambda: expected_conv2d(case.p, **case.arguments()))  # type: ignore[arg-type]


@given(cases(modes=("zeros", "circular")))
@settings(max_examples=60)
def test_nothing_changes_where_nobody_learns(case: Case) -> None:
    """Without gradients numbers are computed in place."""
    with torch.no_grad():
        before = [t.clone() for t in (case.p.means, case.p.factors, case.p.noise)]
        compare(lambda: expected_conv2d(case.p, **case.arguments()))  # type: ignore[arg-type]
        for a, b in zip(before, (case.p.means, case.p.factors, case.p.noise), strict=True):
            assert torch.equal(a, b)


ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "identity": "identity",
    "gelu": "gelu",
    "softplus": "softplus",
    "relu in place": nn.ReLU(inplace=True),
    "prelu": nn.PReLU(6, init=0.3),
    "hardswish in place": nn.Hardswish(inplace=True),
    "a function": lambda x: torch.sin(x) * x,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("components", [1, 3])
def test_every_activation_behind_a_normalization(served: Served, name: str, components: int) -> None:
    p, conv = random_mfa(2, components, 2, (3, 12, 12), hole(2, 12, 12)), nn.Conv2d(3, 6, 3, padding=1)
    activation = ACTIVATIONS[name]
    activation = activation.to(p.dtype) if isinstance(activation, nn.Module) else activation
    scale, shift = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    norm = fixed_batch_norm(torch.randn(6), torch.rand(6) + 0.5, scale, shift, 1e-5)
    arguments = (Convolution.of(conv), norm, activation)
    parameters = tuple(activation.parameters()) if isinstance(activation, nn.Module) else ()
    compare(lambda: respond(p, *arguments), *learning(p), *conv.parameters(), scale, shift, *parameters)
    with torch.no_grad():
        compare(lambda: respond(p, *arguments))
    assert served == [True, True]


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("last", [False, True])
def test_closed_windows_have_the_bits_of_the_network(
    served: Served, components: int, channels: int, last: bool
) -> None:
    observed = hole(2, 32, 32, channels)
    p, layer = random_mfa(2, components, 2, (3, 32, 32), observed), MisConv2d(3, 5, 3, 2, 1, norm=nn.BatchNorm2d(5))
    layer = layer.to(memory_format=torch.channels_last) if last else layer
    layer.norm.running_mean.normal_()
    layer.eval()
    response = layer.norm(layer._conv_forward(p.means[:, 0].contiguous(), layer.weight, layer.bias))
    untouched = closed(observed, layer).expand(response.shape)
    assert 0 < untouched.sum() < untouched.numel()
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            result = layer(p)
        assert torch.equal(result[untouched], torch.relu(response)[untouched])
        assert (result != torch.relu(response)).any(1, keepdim=True)[~untouched[:, :1]].all()
        assert result.stride() == response.stride()
    assert served == [True, True]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "elu", "softplus", "mish"])
@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("type_", [torch.float64, torch.float32])
def test_groups_that_miss_nothing_have_the_bits_of_the_network(
    served: Served, activation: str, components: int, type_: torch.dtype
) -> None:
    """A depthwise convolution, of which one channel misses pixels and the others do not."""
    observed = torch.ones(2, 5, 19, 17, dtype=torch.bool)
    observed[:, 1, 3:9, 2:13] = False
    p, layer = random_mfa(2, components, 2, (5, 19, 17), observed), MisConv2d(5, 10, 3, groups=5, activation=activation)
    p, layer = p.to(type_), layer.to(type_)
    expected = layer.activation(layer._conv_forward(p.means[:, 0].contiguous(), layer.weight, layer.bias))
    complete = [0, 1, *range(4, 10)]
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            result = layer(p)
        with context, plain():
            same = layer(p)
        for y in (result, same):
            assert (y[:, complete].view(torch.uint8) == expected[:, complete].contiguous().view(torch.uint8)).all()
    assert served == [True, True]


@pytest.mark.parametrize(("scale", "serves"), [(1e-20, False), (1e-7, True), (1e7, True), (1e20, False)])
def test_numbers_whose_squares_leave_float32_are_left_to_the_plain_path(
    served: Served, scale: float, serves: bool
) -> None:
    p, conv = random_mfa(2, 1, 2, (3, 12, 12), hole(2, 12, 12)), nn.Conv2d(3, 4, 3, dtype=torch.float32)
    noise = (p.noise * scale**2).clamp_max(1e37)
    small = MFA(*(t.float() for t in (p.logits, p.means * scale, p.factors * scale, noise)), p.observed)
    expected_conv2d(small, conv.weight, conv.bias)
    with torch.no_grad():
        expected_conv2d(small, conv.weight, conv.bias)
    assert served == [serves, serves]


@pytest.mark.parametrize("type_", [torch.float64, torch.float32, torch.bfloat16])
def test_complete_images_cost_a_plain_convolution(
    served: Served, monkeypatch: pytest.MonkeyPatch, type_: torch.dtype
) -> None:
    monkeypatch.delattr(_touched, "_cut_tiles")  # not even the windows are looked for
    p, conv = random_mfa(2, 2, 3, (3, 9, 9)).to(type_), nn.Conv2d(3, 4, 3, dtype=type_)
    x = p.means[:, 0].contiguous()
    for complete in (MFA.point(x), p.fix(x, torch.ones(2, 1, 9, 9, dtype=torch.bool))):
        assert torch.equal(expected_conv2d(complete, conv.weight, conv.bias), torch.relu(conv(x)))
    assert served == [True, True]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("components", [1, 2])
def test_what_stands_at_observed_pixels_is_never_read(served: Served, channels: int, components: int) -> None:
    observed = hole(2, 10, 10, channels)
    clean, conv = random_mfa(2, components, 2, (3, 10, 10), observed), nn.Conv2d(3, 4, 3, padding=1)
    known = observed.unsqueeze(1).expand(clean.noise.shape)
    results = []
    for garbage in (0.0, torch.nan):
        factors = clean.factors.masked_fill(known.unsqueeze(2), garbage)
        p = MFA(clean.logits, clean.means, factors, clean.noise.masked_fill(known, garbage), observed)
        learned = (*learning(p), *conv.parameters())
        result = expected_conv2d(p, conv.weight, conv.bias, padding=1)
        results.append((result, *torch.autograd.grad(result.square().sum(), learned, materialize_grads=True)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    _, _, _, factors, noise, *_ = results[1]
    assert (noise[known] == 0).all()
    assert (factors[known.unsqueeze(2).expand(factors.shape)] == 0).all()
    assert served == [True, True]


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.usefixtures("no_kernels")
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, components: int, grad: bool) -> None:
    p, conv = random_mfa(3, components, 2, (2, 20, 20), hole(3, 20, 20)), nn.Conv2d(2, 3, 3)
    inner, calls = _touched._convolved, []

    def spy(*arguments: Any) -> Tensor:
        calls.append(len(arguments[1]))
        return inner(*arguments)

    monkeypatch.setattr(_touched, "_convolved", spy)
    learned = (*learning(p), *conv.parameters())
    results = []
    for limit in (_touched._CHUNK, 1):
        monkeypatch.setattr(_touched, "_CHUNK", limit)
        with torch.set_grad_enabled(grad):
            result = expected_conv2d(p, conv.weight, conv.bias)
        gradients = torch.autograd.grad(result.sum(), learned, materialize_grads=True) if grad else ()
        results.append((result, *gradients))
    tiles, *single = calls
    assert tiles >= 3
    assert single == [1] * tiles
    for a, b in zip(*results, strict=True):
        close(a, b)


@pytest.mark.parametrize("components", [1, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.usefixtures("no_kernels")
def test_holes_of_every_kind(served: Served, components: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that fit the hole, small ones for scattered holes, and ones that hang over the edge of the response."""
    monkeypatch.setattr(_touched, "_MOST", {False: 1.0, True: 1.0})
    conv = nn.Conv2d(2, 3, 3, padding=1)
    conv = conv.to(memory_format=torch.channels_last) if last else conv
    full = torch.ones(3, 1, 37, 41, dtype=torch.bool)
    square, scattered, columns = full.clone(), full.clone(), full.clone()
    square[0, :, 20:, :30] = square[2, :, 5:9, 35:] = False
    scattered[:2, :, ::12, ::12] = scattered[2, :, 36, 40] = False
    columns[:, :, :, 3:-3] = False
    for observed in (square, scattered, columns):
        p = random_mfa(3, components, 2, (2, 37, 41), observed)
        untouched = closed(observed, conv).expand(3, 3, 37, 41)
        network = torch.relu(conv(p.means[:, 0].contiguous()))
        with plain():
            expected = expected_conv2d(p, conv.weight, conv.bias, padding=1)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                result = expected_conv2d(p, conv.weight, conv.bias, padding=1)
            close(result, expected)
            assert torch.equal(result[untouched], network[untouched])
            assert result.stride() == network.stride()
    assert served == [True] * 6


def test_relu_in_single_precision() -> None:
    """Within 2e-7 of the larger of mean and spread, never below ReLU, and exact without a variance."""
    mean = torch.linspace(-20, 20, 400_001, dtype=torch.float32)
    for variance in (1e-12, 1.0, 1e12):
        m = mean * variance**0.5
        v = torch.full_like(m, variance)
        ours = ExpectedReLU.apply(m, v)
        exact = expected_activation("relu", m.double(), v.double())
        assert ((ours - exact).abs() / torch.maximum(m.abs(), v.sqrt())).max() < 2e-7
        assert (ours >= m.relu()).all()
    large = torch.tensor([-3e38, -1.0, 0.0, 1.0, 3e38], dtype=torch.float32)
    assert torch.equal(ExpectedReLU.apply(large, torch.zeros(5, dtype=torch.float32)), large.relu())


def test_windows_that_can_be_random_but_are_not() -> None:
    """A missing pixel without noise, or under a weight of zero."""
    p, conv = random_mfa(1, 1, 0, (2, 8, 8), hole(1, 8, 8)), nn.Conv2d(2, 3, 3)
    with torch.no_grad():
        conv.weight[0] = 0
        p.noise.zero_()
    expected = torch.relu(conv(p.means[:, 0]))
    result = expected_conv2d(p, conv.weight, conv.bias)
    close(result, expected)
    for a, b in zip(
        torch.autograd.grad(result.sum(), conv.parameters()),
        torch.autograd.grad(expected.sum(), conv.parameters()),
        strict=True,
    ):
        close(a, b)


@pytest.mark.parametrize("compiler", [True, False])
def test_second_derivatives(compiler: bool, request: pytest.FixtureRequest) -> None:
    if not compiler:
        request.getfixturevalue("no_kernels")
    if torch.get_default_dtype() != torch.float64:
        pytest.skip("gradcheck needs float64")
    observed = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    observed[..., 1, 1:3] = False
    p = random_mfa(1, 2, 1, (1, 4, 4), observed)
    weight, bias = torch.randn(1, 1, 2, 2), torch.randn(1)

    def run(weight: Tensor, bias: Tensor, *parameters: Tensor) -> Tensor:
        return expected_conv2d(MFA(*parameters, observed, check=False), weight, bias)

    inputs = [t.clone().requires_grad_() for t in (weight, bias, p.logits, p.means, p.factors, p.noise)]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


# Which path -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_kernels")
def test_it_serves_where_it_is_faster(served: Served) -> None:
    """Up to a share of touched windows, which is smaller where gradients are asked for."""
    conv = nn.Conv2d(3, 4, 3, padding=1)
    seen = torch.zeros(2, 1, 32, 32, dtype=torch.bool)
    above = seen.clone()
    above[:, :, :4] = True  # windows of 29 in 32 rows touch the rest
    for observed, serves in (
        (hole(2, 32, 32), (True, True)),
        (hole(2, 32, 32, channels=3), (True, True)),
        (missing.square(2, 32, 32, fraction=1 / 4), (True, True)),
        (above, (True, False)),
        (seen, (False, False)),
        (None, (False, False)),
    ):
        for grad, answer in zip((False, True), serves, strict=True):
            with torch.set_grad_enabled(grad):
                expected_conv2d(random_mfa(2, 1, 2, (3, 32, 32), observed), conv.weight, conv.bias, padding=1)
            assert served.pop() is answer


# torch scripts some of its forward derivatives.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # a FutureWarning in some releases of torch
def test_it_leaves_to_others_what_is_not_its_own(served: Served) -> None:
    """Tracing, transforms and forward derivatives must not depend on values; half precision rounds in its own way."""
    p, weight = random_mfa(2, 1, 2, (3, 12, 12), hole(2, 12, 12)), torch.randn(4, 3, 3, 3)
    expected = expected_conv2d(p, weight)
    assert served == [True]
    with plain():
        close(expected_conv2d(p, weight), expected)
    close(torch.vmap(lambda p: expected_conv2d(p, weight))(p), expected)
    torch.func.grad(lambda w: expected_conv2d(p, w).sum())(weight)
    with torch.autograd.forward_ad.dual_level():
        expected_conv2d(p, torch.autograd.forward_ad.make_dual(weight, weight))
    assert served == [True]
    with torch.autocast("cpu", torch.bfloat16):
        expected_conv2d(p.to(torch.float32), weight.float())
    expected_conv2d(p.to(torch.bfloat16), weight.bfloat16())
    assert served == [True, False, False]


def test_bad_convolutions_are_told_apart_as_everywhere(values_are_checked: None) -> None:
    p = random_mfa(1, 1, 1, (3, 6, 6), hole(1, 6, 6))
    with pytest.raises(ValueError, match="weight must have C/groups = 3/1 input channels"):
        expected_conv2d(p, torch.randn(4, 2, 3, 3))
    with pytest.raises(
        ValueError, match="weight must fit into the images of 6×6 pixels with padding 0, got windows of 7×7"
    ):
        expected_conv2d(p, torch.randn(4, 3, 7, 7))
    with pytest.raises(ValueError, match="activation must be one of"):
        expected_conv2d(p, torch.randn(4, 3, 3, 3), activation="rely")
