from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.distributions import Categorical, LowRankMultivariateNormal, MixtureSameFamily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from misconv import MFA
from tests.reference import covariance, dense_condition, dense_log_prob, random_mfa, tolerance
from tests.strategies import mfas, observations


def close(actual: Tensor, expected: Tensor, kind: str = "exact") -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance(kind), atol=tolerance(kind))


# Probability ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("components", [1, 2])
def test_the_mean_is_a_tensor_of_its_own(components: int) -> None:
    """Whoever changes it does not change the density; with one component, too, which is its mean."""
    observed = torch.rand(2, 1, 4, 4) < 0.5
    p = random_mfa(2, components, 1, (2, 4, 4), observed)
    before = p.means.clone()
    p.mean.zero_()
    assert torch.equal(p.means, before)
    if components == 1:
        assert torch.equal(p.mean, p.means[:, 0])


@given(mfas())
@settings(max_examples=60)
def test_mean_and_variance_equal_the_dense_mixture(p: MFA) -> None:
    means, covariances = covariance(p)
    mean = torch.einsum("bk,bkn->bn", p.weights, means)
    second = torch.diagonal(covariances, dim1=2, dim2=3) + means.square()
    variance = torch.einsum("bk,bkn->bn", p.weights, second) - mean.square()
    close(p.mean.flatten(1), mean)
    close(p.variance.flatten(1), variance)
    assert (p.variance >= 0).all()


@given(st.data())
@settings(max_examples=60)
def test_log_prob_of_some_pixels_equals_the_dense_marginal(data: st.DataObject) -> None:
    p = data.draw(mfas())
    where = data.draw(observations(*p.shape).filter(lambda o: o is not None))
    x = p.sample(1)[0] + 0.3 * torch.randn(p.shape)
    close(p.log_prob(x, where), dense_log_prob(p, x, where))


@pytest.mark.parametrize("rank", [1, 4])
def test_log_prob_equals_the_mixture_of_torch(rank: int) -> None:
    p = random_mfa(3, 3, rank, (2, 4, 5))
    x = torch.randn(p.shape)
    parts = LowRankMultivariateNormal(p.means.flatten(2), p.factors.flatten(3).mT, p.noise.flatten(2))
    mixture = MixtureSameFamily(Categorical(logits=p.logits), parts)
    close(p.log_prob(x), mixture.log_prob(x.flatten(1)))


@given(st.data())
@settings(max_examples=60)
def test_condition_equals_dense_conditioning(data: st.DataObject) -> None:
    p = data.draw(mfas())
    p = MFA(p.logits, p.means, p.factors, p.noise)  # nothing exact yet
    observed = data.draw(observations(*p.shape).filter(lambda o: o is not None))
    x = torch.randn(p.shape)
    weights, means, covariances = dense_condition(p, x, observed)
    q = p.condition(x.masked_fill(~observed, torch.nan), observed)
    q_means, q_covariances = covariance(q)
    close(q.weights, weights)
    close(q_means, means)
    close(q_covariances, covariances)
    assert torch.equal(q.mean[observed.expand(p.shape)], x[observed.expand(p.shape)])


@given(st.data())
@settings(max_examples=60)
def test_chain_rule(data: st.DataObject) -> None:
    p = data.draw(mfas())
    first = data.draw(observations(*p.shape).filter(lambda o: o is not None))
    second = data.draw(observations(*p.shape).filter(lambda o: o is not None))
    x = torch.randn(p.shape)
    close(p.log_prob(x, first | second), p.log_prob(x, first) + p.condition(x, first).log_prob(x, second))


def test_conditioning_in_two_steps_is_conditioning_at_once() -> None:
    p, x = random_mfa(2, 3, 2, (2, 4, 4)), torch.randn(2, 2, 4, 4)
    first, second = torch.rand(2, 1, 4, 4) < 0.3, torch.rand(2, 2, 4, 4) < 0.3
    twice, once = p.condition(x, first).condition(x, second), p.condition(x, first | second)
    close(twice.weights, once.weights)
    for a, b in zip(covariance(twice), covariance(once), strict=True):
        close(a, b)


def test_samples_have_the_stated_moments_and_keep_exact_pixels() -> None:
    observed = torch.rand(2, 1, 4, 4) < 0.4
    p = random_mfa(2, 3, 2, (2, 4, 4), observed)
    count = 200_000
    drawn = p.sample(count)
    assert drawn.shape == (count, 2, 2, 4, 4)
    error = (drawn.mean(0) - p.mean).abs() / (p.variance / count).sqrt().clamp_min(1e-12)
    assert error[~observed.expand(p.shape)].max() < 5
    fourth = (drawn - p.mean).pow(4).mean(0)
    error = (drawn.var(0) - p.variance).abs() / ((fourth - p.variance**2) / count).sqrt().clamp_min(1e-12)
    assert error[~observed.expand(p.shape)].max() < 5
    assert (drawn == drawn[:1])[:, observed.expand(p.shape)].all()
    # Pixels move together as the covariance says.
    means, covariances = covariance(p)
    between = means - p.mean.flatten(1).unsqueeze(1)
    total = torch.einsum("bk,bknm->bnm", p.weights, covariances + between.unsqueeze(-1) * between.unsqueeze(-2))
    flat = (drawn - p.mean).flatten(2)
    torch.testing.assert_close(torch.einsum("sbn,sbm->bnm", flat, flat) / count, total, rtol=0.05, atol=0.12)


def test_samples_are_reproducible_and_differentiable() -> None:
    p = random_mfa(2, 2, 2, (1, 3, 3))
    device = torch.get_default_device()
    a, b = (p.sample(3, generator=torch.Generator(device).manual_seed(7)) for _ in range(2))
    assert torch.equal(a, b)
    for value in (p.means, p.factors, p.noise):
        value.requires_grad_()
    p.sample(3).square().sum().backward()
    for value in (p.means, p.factors, p.noise):
        assert value.grad is not None
        assert value.grad.isfinite().all()


def test_fix_pins_and_changes_nothing_else() -> None:
    p, x = random_mfa(2, 2, 3, (2, 4, 4)), torch.randn(2, 2, 4, 4)
    observed = torch.rand(2, 1, 4, 4) < 0.5
    q = p.fix(x.masked_fill(~observed, torch.nan), observed)
    seen = observed.expand(p.shape)
    assert torch.equal(q.mean[seen], x[seen])
    assert (q.variance[seen] == 0).all()
    assert torch.equal(q.logits, p.logits)
    assert torch.equal(q.variance[~seen], p.variance[~seen])


def test_point() -> None:
    x = torch.randn(2, 3, 4, 5)
    p = MFA.point(x)
    assert torch.equal(p.mean, x)
    assert (p.variance == 0).all()
    assert torch.equal(p.sample(2), x.expand(2, *x.shape))
    assert (p.log_prob(x) == 0).all()  # no pixel is left to chance


def test_exact_pixels_carry_no_density() -> None:
    p = random_mfa(2, 2, 2, (1, 4, 4), torch.rand(2, 1, 4, 4) < 0.5)
    assert p.observed is not None
    x = torch.randn(p.shape)
    close(p.log_prob(x), p.log_prob(x, ~p.observed))
    for seed in range(10):
        p = random_mfa(2, 3, 2, (1, 4, 4), p.observed, seed=seed)
        assert (p.log_prob(x, p.observed) == 0).all()


# Numbers ----------------------------------------------------------------------------------------------------------


def test_gradients_of_log_prob_and_condition() -> None:
    if torch.get_default_dtype() != torch.float64:
        pytest.skip("gradcheck needs float64")
    observed = torch.rand(2, 1, 2, 3) < 0.5
    where = torch.rand(2, 2, 2, 3) < 0.6
    p, x = random_mfa(2, 2, 2, (2, 2, 3), observed), torch.randn(2, 2, 2, 3)

    def log_prob(x: Tensor, *parameters: Tensor) -> Tensor:
        return MFA(*parameters, observed, check=False).log_prob(x, where)

    def condition(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        q = MFA(*parameters, observed, check=False).condition(x, where)
        return q.logits, q.mean, q.variance

    inputs = [t.detach().clone().requires_grad_() for t in (x, p.logits, p.means, p.factors, p.noise)]
    assert torch.autograd.gradcheck(log_prob, inputs)
    assert torch.autograd.gradgradcheck(log_prob, inputs)
    assert torch.autograd.gradcheck(condition, inputs)


@pytest.mark.parametrize("type_", [torch.float64, torch.float32])
@pytest.mark.parametrize("noise", [0.0, 1e-30, 1e-8])
def test_finite_with_no_noise(type_: torch.dtype, noise: float) -> None:
    p = random_mfa(2, 2, 3, (1, 4, 4)).to(type_)
    p.noise = torch.full_like(p.noise, noise)
    p.factors[:, :, 1] = p.factors[:, :, 0] * (1 + 1e-6)  # collinear but for rounding
    x = torch.randn(p.shape, dtype=type_, requires_grad=True)
    for value in (p.logits, p.means, p.factors, p.noise):
        value.requires_grad_()
    q = p.condition(x, torch.rand(2, 1, 4, 4) < 0.5)
    total = p.log_prob(x).sum() + q.mean.sum() + q.variance.sum() + q.logits.sum()
    total.backward()
    assert total.isfinite()
    for value in (x, p.logits, p.means, p.factors, p.noise):
        assert value.grad is not None
        assert value.grad.isfinite().all()


def test_noise_free_observations_pin_the_latent_variables() -> None:
    """Two factors, three noiseless pixels: the fourth follows exactly."""
    factors = torch.randn(1, 1, 2, 1, 1, 4)
    p = MFA(torch.zeros(1, 1), torch.zeros(1, 1, 1, 1, 4), factors, torch.zeros(1, 1, 1, 1, 4))
    x = torch.einsum("l,lp->p", torch.randn(2), factors.view(2, 4)).view(1, 1, 1, 4)
    q = p.condition(x, torch.tensor([True, True, True, False]).view(1, 1, 1, 4))
    torch.testing.assert_close(q.mean, x, rtol=1e-4, atol=1e-4)
    assert q.variance.max() < 1e-6


def test_single_precision_keeps_its_digits_with_little_noise() -> None:
    """Nearly collinear factors over noise of 1e-4: C = I + AᵀD⁻¹A spans nine orders of magnitude."""
    p = random_mfa(2, 1, 4, (3, 32, 32)).to(torch.float64)
    p.noise = torch.full_like(p.noise, 1e-4)
    p.factors[:, :, 1:] = p.factors[:, :, :1] + 1e-3 * p.factors[:, :, 1:]
    p = p.to(torch.float32)
    x = p.sample(1)[0]
    single, double = p.log_prob(x), p.to(torch.float64).log_prob(x.double())
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)


def test_autocast_does_not_blunt_probabilities() -> None:
    p, device = random_mfa(2, 2, 3, (1, 8, 8)).to(torch.float32), torch.get_default_device().type
    x, observed = torch.randn(p.shape, dtype=torch.float32), torch.rand(2, 1, 8, 8) < 0.5
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = (p.log_prob(x), p.condition(x, observed).mean, p.mean, p.variance)
    outside = (p.log_prob(x), p.condition(x, observed).mean, p.mean, p.variance)
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("type_", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(type_: torch.dtype) -> None:
    p = random_mfa(2, 2, 3, (1, 8, 8)).to(torch.float32)
    x, observed = torch.randn(p.shape, dtype=torch.float32), torch.rand(2, 1, 8, 8) < 0.5
    half = p.to(type_)
    torch.testing.assert_close(half.log_prob(x.to(type_)).float(), p.log_prob(x), rtol=0.05, atol=1.0)
    torch.testing.assert_close(
        half.condition(x.to(type_), observed).mean.float(), p.condition(x, observed).mean, rtol=0.1, atol=0.1
    )


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Callable[..., object], types: object, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


def test_large_images_need_nothing_quadratic() -> None:
    image, rank = (3, 256, 256), 4
    pixels = math.prod(image)
    p = random_mfa(1, 1, rank, image).to(torch.float32)
    x, observed = torch.randn(p.shape, dtype=torch.float32), torch.rand(1, 1, 256, 256) < 0.5
    with Largest() as largest:
        q = p.condition(x, observed)
        assert q.log_prob(x, ~observed).isfinite().all()
    assert largest.numel <= rank * pixels


# Trees, batches, devices ------------------------------------------------------------------------------------------


def test_is_a_pytree() -> None:
    p = random_mfa(2, 2, 2, (1, 3, 3), torch.rand(2, 1, 3, 3) < 0.5)
    leaves, spec = pytree.tree_flatten(p)
    assert len(leaves) == 5
    q = pytree.tree_unflatten(leaves, spec)
    assert isinstance(q, MFA)
    assert q.means is p.means
    doubled = pytree.tree_map(lambda t: t if t.dtype == torch.bool else 2 * t, {"a": [p]})
    assert torch.equal(doubled["a"][0].means, 2 * p.means)
    without = pytree.tree_map_only(Tensor, torch.clone, MFA(p.logits, p.means, p.factors, p.noise))
    assert without.observed is None


def test_vmap_over_images_and_over_stacks() -> None:
    p, x = random_mfa(3, 2, 2, (2, 3, 3), torch.rand(3, 1, 3, 3) < 0.5), torch.randn(3, 2, 3, 3)
    observed = torch.rand(3, 1, 3, 3) < 0.5
    one_by_one = torch.vmap(lambda p, x, o: (p.log_prob(x, o), p.condition(x, o).mean, p.variance))(p, x, observed)
    at_once = (p.log_prob(x, observed), p.condition(x, observed).mean, p.variance)
    for a, b in zip(one_by_one, at_once, strict=True):
        close(a, b)
    stacked = pytree.tree_map(lambda t: torch.stack([t, t]), p)
    close(torch.vmap(lambda q: q.mean)(stacked)[1], p.mean)


def test_index_cast_and_copy() -> None:
    p = random_mfa(4, 2, 2, (1, 3, 3), torch.rand(4, 1, 3, 3) < 0.5)
    assert len(p) == 4
    assert p[1].shape == (1, 1, 3, 3)
    assert torch.equal(p[-1].means, p.means[3:])
    assert torch.equal(p[1:3].mean, p.mean[1:3])
    assert torch.equal(p[[0, 2]].mean, p.mean[[0, 2]])
    assert torch.equal(p[torch.tensor([3, 1])].mean, p.mean[[3, 1]])
    keep = torch.tensor([True, False, True, False])
    assert torch.equal(p[keep].mean, p.mean[keep])
    with pytest.raises(IndexError, match="index must be one of 4 images, got 4"):
        p[4]
    assert [len(q) for q in p] == [1, 1, 1, 1]
    half = p.to(torch.float16)
    assert half.dtype == torch.float16
    assert half.observed is not None
    assert half.observed.dtype == torch.bool
    twin = copy.deepcopy(p)
    assert torch.equal(twin.means, p.means)
    p.means.requires_grad_()
    assert not p.detach().means.requires_grad
    assert repr(p) == "MFA(4 images of 1×3×3, 2 components of rank 2)"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_log_prob_and_condition_are_the_eager_ones(backend: str, compiler: None) -> None:
    p, x = random_mfa(2, 2, 3, (2, 4, 4), torch.rand(2, 1, 4, 4) < 0.3), torch.randn(2, 2, 4, 4)
    where = torch.rand(2, 1, 4, 4) < 0.5

    def run(p: MFA, x: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor, MFA]:
        q = p.condition(x, where)
        return p.log_prob(x, where), q.mean, p.variance, q

    compiled = torch.compile(run, fullgraph=True, backend=backend)(p, x, where)
    for a, b in zip(pytree.tree_leaves(compiled), pytree.tree_leaves(run(p, x, where)), strict=True):
        if a.dtype == torch.bool:
            assert torch.equal(a, b)
        else:
            close(a, b)


# Bad input --------------------------------------------------------------------------------------------------------


SINGLE = torch.float32  # the parameters below are made before the default type is set


def good() -> dict[str, Tensor]:
    return {
        "logits": torch.zeros(2, 3, dtype=SINGLE),
        "means": torch.zeros(2, 3, 1, 4, 4, dtype=SINGLE),
        "factors": torch.zeros(2, 3, 2, 1, 4, 4, dtype=SINGLE),
        "noise": torch.ones(2, 3, 1, 4, 4, dtype=SINGLE),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(2)}, ValueError, r"logits must have shape \(B, K\), got a \w+ tensor of shape \(2,\)"),
        ({"logits": torch.zeros(2, 4)}, ValueError, r"logits must have shape \(2, 3\) to fit means, got .*\(2, 4\)"),
        ({"means": torch.zeros(2, 1, 4, 4)}, ValueError, r"means must have shape \(B, K, C, H, W\), got"),
        ({"means": [1.0]}, TypeError, r"means must be a floating-point tensor \(B, K, C, H, W\), got \[1.0\] \(list\)"),
        ({"means": torch.zeros(2, 3, 1, 4, 4, dtype=torch.long)}, TypeError, "means must be a floating-point tensor"),
        ({"factors": torch.zeros(2, 3, 2, 1, 4, 5)}, ValueError, r"factors must have shape \(2, 3, 2, 1, 4, 4\) to fit"),
        ({"noise": torch.ones(2, 3, 1, 4, 5)}, ValueError, r"noise must have shape \(2, 3, 1, 4, 4\) to fit means, got"),
        ({"noise": torch.ones(2, 3, 1, 4, 4, dtype=torch.float16)}, ValueError, "noise must have the type .* of means"),
        ({"noise": torch.full((2, 3, 1, 4, 4), -0.5)}, ValueError, r"noise must be finite variances of at least 0, got -0.5 at \(0, 0, 0, 0, 0\)"),
        ({"noise": torch.full((2, 3, 1, 4, 4), math.nan)}, ValueError, "noise must be finite variances of at least 0, got nan"),
        ({"noise": torch.full((2, 3, 1, 4, 4), math.inf)}, ValueError, "noise must be finite variances of at least 0, got inf"),
        ({"means": torch.full((2, 3, 1, 4, 4), math.inf)}, ValueError, "means must be finite, got inf at"),
        ({"factors": torch.full((2, 3, 2, 1, 4, 4), math.nan)}, ValueError, "factors must be finite, got nan at"),
        ({"logits": torch.full((2, 3), math.nan)}, ValueError, "logits must be finite"),
        ({"logits": torch.full((2, 3), -math.inf)}, ValueError, "logits must be finite .or -inf for some components., got -inf"),
        ({"observed": torch.ones(2, 1, 4, 5, dtype=torch.bool)}, ValueError, r"observed must have shape \(2, 1, 4, 4\) to fit"),
        ({"observed": torch.full((2, 1, 4, 4), 0.5)}, ValueError, r"observed must be bool, or hold only 0 .missing. and 1 .observed., got the value 0.5"),
        ({"observed": "yes"}, TypeError, "observed must be a bool tensor"),
        ({"observed": torch.ones(2, 1, 4, 4, dtype=torch.complex64)}, TypeError, "observed must be a bool tensor"),
    ],
)  # fmt: skip
def test_bad_parameters(
    change: dict[str, Tensor], error: type[Exception], message: str, values_are_checked: None
) -> None:
    with pytest.raises(error, match=message):
        MFA(**{**good(), **change})


def test_components_must_agree_where_observed(values_are_checked: None) -> None:
    observed = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="means must be the same in all components where observed"):
        MFA(**{**good(), "means": torch.randn(2, 3, 1, 4, 4, dtype=SINGLE)}, observed=observed)


@pytest.mark.parametrize(("batch", "components"), [(0, 1), (1, 0)])
def test_empty_batches_and_mixtures(batch: int, components: int) -> None:
    means = torch.zeros(batch, components, 1, 2, 2)
    with pytest.raises(ValueError, match="means must hold at least one image, component, channel and pixel, got"):
        MFA(torch.zeros(batch, components), means, torch.zeros(batch, components, 0, 1, 2, 2), means)


def test_numbers_0_and_1_are_taken_for_observed() -> None:
    p = MFA(**good(), observed=torch.ones(2, 1, 4, 4))
    assert p.observed is not None
    assert p.observed.dtype == torch.bool
    assert p.observed.all()


def test_bad_images(values_are_checked: None) -> None:
    p = MFA(**good())
    x, seen = torch.zeros(2, 1, 4, 4, dtype=SINGLE), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(
        ValueError, match=r"x must have the shape \(2, 1, 4, 4\), dtype .* and device .* of the MFA, got"
    ):
        p.log_prob(x[:1])
    with pytest.raises(ValueError, match="x must have the shape"):
        p.condition(x.to(torch.float16), seen)
    with pytest.raises(TypeError, match="x must be a floating-point image, got a uint8 tensor"):
        p.fix(x.to(torch.uint8), seen)
    with pytest.raises(ValueError, match=r"where must have shape \(2, 1, 4, 4\) to fit the images, got"):
        p.log_prob(x, seen[:, :, :2])
    x[1, 0, 2, 3] = math.inf
    for call in (p.condition, p.fix, p.log_prob):
        with pytest.raises(
            ValueError, match=r"x must be finite wherever it is observed, got inf at \(1, 0, 2, 3\) and 1 such"
        ):
            call(x, seen)
    with pytest.raises(ValueError, match="x must be finite wherever it is observed"):
        MFA.point(x)
    with pytest.raises(ValueError, match="count must be an integer of at least 1, got 0"):
        p.sample(0)


def test_devices_must_agree() -> None:
    away = torch.zeros(2, 3, dtype=SINGLE, device="meta")
    with pytest.raises(ValueError, match="logits must have the type .* and device .* of means, got .* on meta"):
        MFA(**{**good(), "logits": away})
    with pytest.raises(ValueError, match="observed must be on the device of the images"):
        MFA(**good(), observed=torch.ones(2, 1, 4, 4, dtype=torch.bool, device="meta"))


def test_values_are_not_looked_at_when_told_so() -> None:
    negative = {**good(), "noise": torch.full((2, 3, 1, 4, 4), -1.0, dtype=SINGLE)}
    MFA(**negative, check=False)
    with pytest.raises(ValueError, match="noise"):
        MFA(**negative, check=True)


# Some of the images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (1, [1]),
        (-1, [3]),
        (np.int64(2), [2]),
        (np.uint8(3), [3]),
        (torch.tensor(1), [1]),
        (torch.tensor(-2), [2]),
        (torch.tensor(3, dtype=torch.uint8), [3]),
        (torch.tensor([3, 1], dtype=torch.uint8), [3, 1]),
        (slice(None), [0, 1, 2, 3]),
        (slice(1, None, 2), [1, 3]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(-1, -3, -1), [3, 2]),
        (slice(2, 2), []),
        (slice(7, 9), []),
        ([], []),
        ([0, -1], [0, 3]),
        (range(1, 3), [1, 2]),
        ([True, False, False, True], [0, 3]),
        (np.array([2, 0]), [2, 0]),
        (np.array([False, True, False, False]), [1]),
        (torch.tensor([], dtype=torch.long), []),
        (torch.tensor([False] * 4), []),
    ],
)
def test_any_index_keeps_the_batch(index: Any, rows: list[int]) -> None:
    p = random_mfa(4, 2, 2, (1, 3, 3), torch.rand(4, 1, 3, 3) < 0.5)
    q = p[index]
    assert len(q) == len(rows)
    for name in ("logits", "means", "factors", "noise", "observed"):
        assert torch.equal(getattr(q, name), getattr(p, name)[torch.tensor(rows, dtype=torch.long)])
    assert q.mean.shape == (len(rows), 1, 3, 3)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "index must be one of 4 images, got 4"),
        (-5, IndexError, "index must be one of 4 images, got -5"),
        (torch.tensor(9, device="cpu"), IndexError, "index must be one of 4 images, got 9"),
        ([0, 4], IndexError, "index must be one of 4 images, got 4"),
        (True, TypeError, "index must be an integer, a slice, or a list or tensor of integers or of 4 bools, got True"),
        (torch.tensor(True, device="cpu"), TypeError, "index must be an integer"),
        (1.0, TypeError, "index must be an integer, .* got 1.0"),
        (None, TypeError, "index must be an integer, .* got None"),
        (..., TypeError, "index must be an integer"),
        ("0", TypeError, "index must be an integer"),
        ((0, 1), TypeError, "index must be an integer"),
        ([[0, 1]], TypeError, "index must be an integer"),
        ([0.5], TypeError, "index must be an integer"),
        ([True, False], TypeError, "of 4 bools, got"),
        (torch.ones(4), TypeError, "index must be an integer"),
        (torch.ones(2, 2, dtype=torch.long), TypeError, "index must be an integer"),
        (slice(0, 1.5), TypeError, "index must be a slice of integers, got"),
        (slice(None, None, 0), ValueError, "index must be a slice of integers, got"),
    ],
)
def test_bad_indices(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        random_mfa(4, 2, 2, (1, 3, 3))[index]


# Other calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [MFA.condition, MFA.fix])
def test_what_was_observed_must_be_said(call: Callable[..., object]) -> None:
    """None would mean that nothing is exact in `MFA(…, observed=None)`, and every pixel in `log_prob`."""
    p = random_mfa(2, 1, 1, (1, 3, 3))
    with pytest.raises(
        TypeError, match=r"observed must be a bool tensor, .* got None; for complete images it is torch.ones_like"
    ):
        call(p, torch.randn(p.shape), None)


def test_bad_calls() -> None:
    p = random_mfa(2, 1, 1, (1, 3, 3))
    x = torch.randn(p.shape)
    for given_to in ("nowhere", "cuda:99", 3.5, torch.int32, torch.float8_e4m3fn, [1]):
        with pytest.raises(ValueError, match="to must be given") as error:
            p.to(given_to)
        assert len(str(error.value).splitlines()) == 1
    with pytest.raises(TypeError, match="check must be True, False or None, got 'yes'"):
        MFA(p.logits, p.means, p.factors, p.noise, check="yes")
    with pytest.raises(TypeError, match="generator must be a torch.Generator or None, got 3"):
        p.sample(1, generator=3)
    with pytest.raises(ValueError, match="count must be at most .* for this MFA, got"):
        p.sample(10**12)
    with pytest.raises(TypeError, match="x must be a dense tensor"):
        p.log_prob(x.to_sparse())
    for call in (p.log_prob, p.condition, p.fix):
        with pytest.raises(ValueError, match="x must have the shape .* and device .* of the MFA, got .* on meta"):
            call(x.to("meta"), torch.ones(2, 1, 3, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match="must be on the device of the images, .*, got .* on meta"):
            call(x, torch.ones(2, 1, 3, 3, dtype=torch.bool, device="meta"))
        with pytest.raises(
            ValueError, match="x must have the shape .*, dtype .* and device .* of the MFA, got a float16"
        ):
            call(x.half(), torch.ones(2, 1, 3, 3, dtype=torch.bool))


def test_one_generator_serves_every_device() -> None:
    p = random_mfa(2, 2, 2, (1, 3, 3))
    here, there = (q.sample(3, generator=torch.Generator("cpu").manual_seed(1)) for q in (p, p.to("cpu")))
    assert here.device == p.device
    torch.testing.assert_close(here.cpu(), there)


@pytest.mark.parametrize("type_", [torch.float16, torch.bfloat16])
def test_half_precision_samples_and_moments(type_: torch.dtype) -> None:
    p = random_mfa(2, 2, 2, (1, 3, 3), torch.rand(2, 1, 3, 3) < 0.5)
    half = p.to(type_)
    drawn = half.sample(4000)
    assert drawn.dtype == type_
    torch.testing.assert_close(half.variance.to(p.dtype), p.variance, rtol=0.02, atol=0.02)
    torch.testing.assert_close(drawn.to(p.dtype).mean(0), p.mean, rtol=0.2, atol=0.2)
