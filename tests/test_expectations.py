"""Expected activations against high-order quadrature, Monte Carlo and torch."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn

from misconv._math.expectations import _LOGISTIC, expectation_of_spread
from misconv.functional import expected_activation
from tests.reference import integrate, tolerance

# name: activation, places where it has a kink
CLOSED: dict[str, tuple[str | nn.Module, tuple[float, ...]]] = {
    "identity": ("identity", ()),
    "relu": ("relu", (0,)),
    "leaky_relu": (nn.LeakyReLU(0.2), (0,)),
    "prelu": (nn.PReLU(init=0.3), (0,)),
    "relu6": ("relu6", (0, 6)),
    "hardtanh": (nn.Hardtanh(-0.7, 2.5), (-0.7, 2.5)),
    "hardsigmoid": ("hardsigmoid", (-3, 3)),
    "hardswish": ("hardswish", (-3, 3)),
    "elu": (nn.ELU(1.3), (0,)),
    "celu": (nn.CELU(0.6), (0,)),
    "selu": ("selu", (0,)),
    "gelu": ("gelu", ()),
    # Accurate to 1e-9 at any variance, by writing the logistic function as a mixture of normal ones.
    "sigmoid": ("sigmoid", ()),
    "tanh": ("tanh", ()),
    "silu": ("silu", ()),
    "softplus": (nn.Softplus(beta=1.5), ()),
}
NUMERICAL: dict[str, str | Callable[[Tensor], Tensor]] = {
    "mish": "mish",
    "gelu_tanh": "gelu_tanh",
    "logsigmoid": F.logsigmoid,
    "softsign": lambda x: x / (1 + x.square()).sqrt(),
    "sine": torch.sin,
}
# The rule is exact to 1e-5 up to these deviations (docs/maths.md): the nearer to the real line a function's complex
# singularities lie, the sooner it ends.
LARGEST = {"mish": 3.0, "gelu_tanh": 3.0, "logsigmoid": 3.0, "softsign": 1.0, "sine": 10.0}


def plain(activation: str | nn.Module | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The activation itself, from torch."""
    special: dict[str, Callable[[Tensor], Tensor]] = {
        "identity": lambda x: x,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    if isinstance(activation, str):
        return special.get(activation) or getattr(F, activation)
    return activation.double() if isinstance(activation, nn.Module) else activation


def exact(name: str) -> Callable[[Tensor], Tensor]:
    """The same, but in float64 all the way: torch's GPU kernels of these two hold 1/6 in float32."""
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
        "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    }
    return formulas.get(name) or plain(CLOSED[name][0])


def grid(largest: float = 10.0) -> tuple[Tensor, Tensor]:
    """Means on both sides of everything, deviations from certain to far wider than any bend."""
    deviations = torch.tensor([0.0, 1e-6, 1e-3, 0.03, 0.3, 1.0, 3.0, 10.0, 30.0])
    deviations = deviations[deviations <= largest]
    means = torch.cat([torch.linspace(-12, 12, 49), torch.tensor([-200.0, -40.0, 40.0, 200.0])])
    m, s = torch.meshgrid(means, deviations, indexing="ij")
    return m.contiguous(), s.square().contiguous()


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_equal_quadrature(name: str) -> None:
    activation, kinks = CLOSED[name]
    m, v = grid(30.0)
    limit = tolerance("closed")
    expected = integrate(exact(name), m, v, kinks).to(m.dtype)
    expected = torch.where(v > 0, expected, plain(activation)(m).to(m.dtype))
    torch.testing.assert_close(expected_activation(activation, m, v), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", CLOSED)
@given(m=st.floats(-30, 30), s=st.floats(1e-4, 30))
def test_closed_forms_equal_quadrature_anywhere(name: str, m: float, s: float) -> None:
    activation, kinks = CLOSED[name]
    mean, variance = torch.tensor([m]), torch.tensor([s]).square()
    expected = integrate(exact(name), mean, variance, kinks).to(mean.dtype)
    limit = tolerance("closed")
    torch.testing.assert_close(expected_activation(activation, mean, variance), expected, rtol=limit, atol=limit)


# Parameters that nobody would choose, and places where these activations have a kink or a step.
ODD: dict[str, tuple[nn.Module, tuple[float, ...]]] = {
    "elu without slope": (nn.ELU(0.0), (0,)),
    "elu upside down": (nn.ELU(-2.0), (0,)),
    "celu, sharp": (nn.CELU(0.01), (0,)),
    "celu, blunt": (nn.CELU(30.0), (0,)),
    "leaky_relu, steep": (nn.LeakyReLU(1e6), (0,)),
    "leaky_relu, upside down": (nn.LeakyReLU(-3.0), (0,)),
    "rrelu": (nn.RReLU(0.1, 0.5).eval(), (0,)),
    "hardtanh, narrow": (nn.Hardtanh(0.5, 0.50001), (0.5, 0.50001)),
    "hardtanh, wide": (nn.Hardtanh(-1e6, 1e6), (-1e6, 1e6)),
    "hardtanh, one side": (nn.Hardtanh(2.0, 7.0), (2, 7)),
    "softplus, threshold 1": (nn.Softplus(1.0, 1.0), (1,)),
    "softplus, threshold 0": (nn.Softplus(2.0, 0.0), (0,)),
    "softplus, threshold -2": (nn.Softplus(1.0, -2.0), (-2,)),
    "softplus, turned": (nn.Softplus(-1.0, 3.0), (-3,)),
    "softplus, sharp": (nn.Softplus(100.0, 20.0), (0.2,)),
}
SCALES = (1e-20, 1e-7, 1e-3, 1.0, 30.0, 1e4, 1e8)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", [*CLOSED, *ODD])
def test_data_in_any_unit_have_the_same_digits(name: str, scale: float) -> None:
    """Errors relative to the expected size of the activation at this scale, in float32 and in float64."""
    activation, kinks = CLOSED[name] if name in CLOSED else ODD[name]
    ratios = torch.tensor([-40, -13, -6, -3, -1, -0.3, -0.01, 0, 0.01, 0.3, 1, 3, 6, 13, 40], dtype=torch.float64)
    spreads = torch.tensor([0.01, 0.3, 1, 3, 30], dtype=torch.float64)
    for type_, bound in ((torch.float64, 5e-8), (torch.float32, 3e-6)):
        m, s = (t.to(type_).contiguous() for t in torch.meshgrid(scale * ratios, scale * spreads, indexing="ij"))
        used = activation.to(type_) if isinstance(activation, nn.Module) else activation
        ours = expectation_of_spread(used, m, s).detach()
        m, s = m.double(), s.double()
        function = exact(name) if name in CLOSED else activation.double()
        expected = integrate(function, m, s.square(), kinks).detach()
        size = integrate(lambda x, f=function: f(x).abs(), m, s.square(), kinks).detach()
        error = (ours - expected).abs() / (size + 0.01 * size.median())
        assert error.max() < bound


@pytest.mark.parametrize("name", [*CLOSED, *ODD])
def test_gradients_in_any_unit(name: str) -> None:
    """In float32 those of float64, for spreads from 1e-30 to 1e30."""
    activation = CLOSED[name][0] if name in CLOSED else ODD[name][0]
    spreads = torch.tensor([1e-30, 1e-20, 1e-10, 1, 1e10, 1e20, 1e30])
    ratios = torch.tensor([-1e6, -50, -13, -5, -1, -1e-3, 0, 1e-3, 1, 5, 13, 50, 1e6])
    found = []
    for type_ in (torch.float32, torch.float64):
        s = spreads.to(torch.float32).to(type_).expand(len(ratios), -1).clone().requires_grad_()
        m = (ratios[:, None] * spreads).to(torch.float32).to(type_).requires_grad_()
        used = activation.to(type_) if isinstance(activation, nn.Module) else activation
        y = expectation_of_spread(used, m, s)
        found.append((y, *torch.autograd.grad(y.sum(), (m, s), materialize_grads=True)))
    largest = torch.finfo(torch.float32).max
    for ours, expected in zip(*(pair[1:] for pair in found), strict=True):
        assert ((ours - expected).abs() / (1 + expected.abs())).max() < 1e-4
    y, expected = found[0][0].detach().double(), found[1][0].detach()
    expected = torch.where(expected.abs() > largest, torch.inf * expected.sign(), expected)
    size = expected.abs().where(expected.isfinite(), 0).amax(0)  # at this spread
    assert ((y == expected) | ((y - expected).abs() <= 1e-4 * expected.abs() + 1e-6 * size)).all()


def test_softplus_is_that_of_torch_above_its_threshold() -> None:
    softplus = nn.Softplus(beta=2.0, threshold=1.0)
    m = torch.linspace(-3, 3, 61)
    assert torch.equal(expected_activation(softplus, m, torch.zeros_like(m)), softplus(m))
    narrow = expected_activation(softplus, m, torch.full_like(m, 1e-12))
    away = (m - 0.5).abs() > 0.01  # of the step
    torch.testing.assert_close(narrow[away], softplus(m)[away], rtol=1e-6, atol=1e-6)


def test_a_hooked_module_is_what_it_computes() -> None:
    module = nn.ReLU()
    module.register_forward_hook(lambda module, args, output: output.sin())
    m, v = torch.randn(5), torch.rand(5)
    expected = integrate(lambda x: x.relu().sin(), m, v, kinks=(0,)).to(m.dtype)
    torch.testing.assert_close(expected_activation(module, m, v), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", NUMERICAL)
def test_numerical_integrals(name: str) -> None:
    m, v = grid(LARGEST[name])
    expected = integrate(plain(NUMERICAL[name]), m, v).to(m.dtype)
    limit = tolerance("quadrature")
    torch.testing.assert_close(expected_activation(NUMERICAL[name], m, v), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", [*CLOSED, "mish"])
def test_monte_carlo(name: str) -> None:
    activation = CLOSED[name][0] if name in CLOSED else name
    m, v = torch.tensor([-2.0, -0.5, 0.0, 1.0, 4.0]), torch.tensor([0.5, 2.0, 4.0, 1.0, 9.0])
    count = 2_000_000
    drawn = m + v.sqrt() * torch.randn(count, 5)
    values = plain(activation)(drawn.view(count, 5, 1, 1)).view(count, 5).detach()
    deviation = (values.mean(0) - expected_activation(activation, m, v)).abs()
    assert (deviation <= 4.5 * values.std(0) / count**0.5 + 1e-12).all()


@pytest.mark.parametrize("name", [*CLOSED, *NUMERICAL])
def test_no_variance_is_the_activation_itself(name: str) -> None:
    activation = CLOSED[name][0] if name in CLOSED else NUMERICAL[name]
    m = torch.linspace(-8, 8, 101)
    assert torch.equal(expected_activation(activation, m, torch.zeros_like(m)), plain(activation)(m).to(m.dtype))


@pytest.mark.parametrize("name", [*CLOSED, "mish", "gelu_tanh"])
@pytest.mark.parametrize("type_", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_finite_at_the_extremes(name: str, type_: torch.dtype) -> None:
    activation = CLOSED[name][0] if name in CLOSED else NUMERICAL[name]
    deviations = torch.tensor([0.0, 1e-20, 1e-10, 1e-3, 1.0, 1e3], dtype=type_)
    ratios = torch.tensor([-1e6, -50.0, -13.0, -5.5, -1.0, 0.0, 1.0, 5.5, 13.0, 50.0, 1e6], dtype=type_)
    m = (ratios[:, None] * deviations).clone().requires_grad_()
    v = deviations.square().expand_as(m).clone().requires_grad_()
    result = expected_activation(activation, m, v)
    result.sum().backward()
    assert result.isfinite().all()
    assert m.grad is not None
    assert m.grad.isfinite().all()
    assert name == "identity" or v.grad is not None  # the identity does not look at the variance
    assert v.grad is None or v.grad.isfinite().all()


@pytest.mark.parametrize("name", CLOSED)
def test_gradients_are_expected_slopes(name: str) -> None:
    """∂/∂m E[f] = E[f′] and ∂/∂v E[f] = ½ E[f″]; checked by finite differences, twice."""
    if torch.get_default_dtype() != torch.float64:
        pytest.skip("gradcheck needs float64")
    activation = CLOSED[name][0]
    m = torch.tensor([-3.0, -1.0, -0.01, 0.0, 0.5, 2.0, 7.0], requires_grad=True)
    v = torch.tensor([0.5, 2.0, 0.01, 1.0, 3.0, 0.1, 4.0], requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, v: expected_activation(activation, m, v), (m, v))
    if name != "hardsigmoid":  # torch has no second derivative of its own hardsigmoid
        assert torch.autograd.gradgradcheck(lambda m, v: expected_activation(activation, m, v), (m, v))


def test_gradient_through_numerical_integration_and_parameters() -> None:
    if torch.get_default_dtype() != torch.float64:
        pytest.skip("gradcheck needs float64")
    m, v = torch.randn(1, 2, 3, 3, requires_grad=True), torch.rand(1, 2, 3, 3, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, v: expected_activation("mish", m, v), (m, v))
    slopes = nn.PReLU(2).double()
    assert torch.autograd.gradcheck(lambda m, v, _: expected_activation(slopes, m, v), (m, v, slopes.weight))


def test_tails_survive_in_single_precision() -> None:
    """1 + erf is exactly zero below z = -5 in float32; the expectation there is not."""
    m, v = torch.full((1,), -6.0, dtype=torch.float32), torch.ones(1, dtype=torch.float32)
    expected = expected_activation("relu", m.double(), v.double()).float()
    assert expected > 0
    torch.testing.assert_close(expected_activation("relu", m, v), expected, rtol=1e-4, atol=0)


def test_the_logistic_mixture_is_as_good_as_it_says() -> None:
    x = torch.linspace(-60, 60, 240_001, dtype=torch.float64)
    mixture = sum(w * torch.special.ndtr(steepness * x) for w, steepness in _LOGISTIC)
    error = (mixture - torch.sigmoid(x)).abs()
    assert (error * x.abs().clamp_min(1)).max() < 1.5e-10
    assert abs(sum(w for w, _ in _LOGISTIC) - 1) < 1e-15


@pytest.mark.parametrize("function", [F.relu, torch.relu, F.silu, F.gelu, torch.tanh, torch.sigmoid, F.hardswish])
def test_functions_of_torch_get_their_closed_form(function: Callable[[Tensor], Tensor]) -> None:
    m, v = torch.randn(50), 100 * torch.rand(50)
    name = function.__name__
    assert torch.equal(expected_activation(function, m, v), expected_activation(name, m, v))


def test_activations_that_work_in_place_leave_the_moments_alone() -> None:
    m, v = torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    for activation in (nn.ReLU(inplace=True), nn.Mish(inplace=True), torch.relu_):
        before = m.clone()
        expected_activation(activation, m, v)
        assert torch.equal(m, before)


def test_prelu_has_a_slope_per_channel() -> None:
    slopes = nn.PReLU(3)
    with torch.no_grad():
        slopes.weight.copy_(torch.tensor([0.1, 0.5, -0.2]))
    m, v = torch.randn(2, 2, 3, 4, 4), torch.rand(2, 2, 3, 4, 4)
    together = expected_activation(slopes, m, v)
    for channel in range(3):
        alone = expected_activation(nn.LeakyReLU(slopes.weight[channel].item()), m[:, :, channel], v[:, :, channel])
        torch.testing.assert_close(together[:, :, channel], alone, rtol=1e-6, atol=1e-6)


def test_bad_arguments(values_are_checked: None) -> None:
    m, v = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="activation must be one of celu, elu, .*, got 'rleu'"):
        expected_activation("rleu", m, v)
    with pytest.raises(TypeError, match="activation must be a name, an nn.Module or a function, got 3"):
        expected_activation(3, m, v)
    with pytest.raises(
        ValueError, match=r"activation must be a pointwise function that keeps the shape, but it turned \(2, 3\) into"
    ):
        expected_activation(lambda x: x.sum(), m, v)
    with pytest.raises(ValueError, match=r"variance must match mean, .*\(2, 3\).*, got .*\(3,\)"):
        expected_activation("relu", m, v[0])
    with pytest.raises(ValueError, match="variance must be finite and at least 0 everywhere, got -1.0"):
        expected_activation("relu", m, -v)
    with pytest.raises(ValueError, match="variance must be finite and at least 0 everywhere, got nan"):
        expected_activation("relu", m, v * torch.nan)
    with pytest.raises(ValueError, match="variance must be finite and at least 0 everywhere, got inf"):
        expected_activation("relu", m, v * torch.inf)
    with pytest.raises(ValueError, match=r"activation has a slope for each of 4 channels of .*, got .*\(2, 3\)"):
        expected_activation(nn.PReLU(4), m, v)
    with pytest.raises(TypeError, match="mean must be a floating-point tensor, got a int64 tensor"):
        expected_activation("relu", m.long(), v)
