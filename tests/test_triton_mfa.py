from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from misconv import MFA
from misconv import _backend as _path
from misconv._math import likelihood as _likelihood
from tests.reference import random_mfa, tolerance

pytest.importorskip("triton")
_triton_score = pytest.importorskip("misconv._triton.score")

FLOOR = _likelihood.NOISE_FLOOR
NAMES = ("logits", "means", "factors", "noise", "x")


@pytest.fixture(autouse=True)
def _kernels_run(request: pytest.FixtureRequest) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if not interpreted and request.config.getoption("--device") == "cpu":
        pytest.skip("without a GPU, Triton runs in its interpreter alone: TRITON_INTERPRET=1")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every MFA take the fused path, wherever it lives."""
    monkeypatch.setattr(MFA, "_fused", lambda self, x, gradients=True: True)


def problem(
    components: int, rank: int, image: tuple[int, int, int] = (2, 5, 7), seen: int = 1, exact: int | None = None
) -> list[Any]:
    """Logits, means, factors, noise, images and masks: `seen` and `exact` are how many channels a mask has."""
    p = random_mfa(2, components, rank, image)
    where = torch.rand(2, seen, *image[1:]) < 0.6
    observed = None if exact is None else torch.rand(2, exact, *image[1:]) < 0.3
    return [p.logits, p.means, p.factors, p.noise, torch.randn(p.shape), where, observed]


def ready(tensors: list[Any], type_: torch.dtype) -> list[Any]:
    """Fresh leaves of a type."""
    return [t.detach().clone().to(type_).requires_grad_() for t in tensors[:5]] + tensors[5:]


def log_prob(tensors: list[Any]) -> Tensor:
    value = _triton_score.log_prob(*tensors, floor=FLOOR, plain=_likelihood.log_prob)
    assert isinstance(value, Tensor)
    return value


def log_probs(tensors: list[Any]) -> tuple[Tensor, Tensor]:
    plain = (_likelihood.log_prob, _likelihood.marginal_log_prob)
    joint, marginal = _triton_score.log_probs(*tensors, floor=FLOOR, plain=plain)
    return joint, marginal


def gradients(value: Tensor, tensors: list[Any], upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, tensors[:5], upstream.to(value.dtype), materialize_grads=True))


def assert_same(tensors: list[Any], type_: torch.dtype, rate: float) -> None:
    """Values and gradients are those of the plain path in float64, from the same inputs."""
    single = [t.to(type_) for t in tensors[:5]] + tensors[5:]
    own, exact = ready(single, type_), ready(single, torch.float64)
    upstream = torch.randn(len(tensors[0]), dtype=torch.float64)
    value, expected = log_prob(own), _likelihood.log_prob(*exact)
    torch.testing.assert_close(value, expected.to(type_), rtol=rate, atol=rate)
    pairs = zip(NAMES, gradients(value, own, upstream), gradients(expected, exact, upstream), strict=True)
    for name, actual, wanted in pairs:
        torch.testing.assert_close(
            actual, wanted.to(type_), rtol=rate, atol=rate, msg=lambda m, name=name: f"{name}: {m}"
        )


# Values and gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("components", "rank", "seen", "exact"), [(1, 4, 1, None), (3, 0, 2, 1), (2, 1, 1, 2), (3, 7, 2, 2)]
)
def test_values_and_gradients_are_those_of_the_plain_path(
    components: int, rank: int, seen: int, exact: int | None, type_: torch.dtype
) -> None:
    assert_same(problem(components, rank, seen=seen, exact=exact), type_, tolerance("exact", type_))


@pytest.mark.parametrize("type_", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", ["both", "joint", "marginal"])
@pytest.mark.parametrize(
    ("components", "rank", "seen", "exact"), [(1, 4, 1, None), (3, 0, 2, 1), (2, 1, 1, 2), (3, 7, 2, 2), (1, 0, 1, 1)]
)
def test_both_scores_in_one_pass(
    components: int, rank: int, seen: int, exact: int | None, asked: str, type_: torch.dtype
) -> None:
    """The joint score and that of pixels by themselves, and gradients of one or both."""
    tensors = problem(components, rank, seen=seen, exact=exact)
    single = [t.to(type_) for t in tensors[:5]] + tensors[5:]
    own, wide = ready(single, type_), ready(single, torch.float64)
    rate = torch.finfo(type_).eps if type_ == torch.bfloat16 else tolerance("exact", type_)
    found, expected = log_probs(own), (_likelihood.log_prob(*wide), _likelihood.marginal_log_prob(*wide))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted.to(type_), rtol=rate, atol=rate)
    assert torch.equal(found[0], log_prob(own))
    upstream = torch.randn(2, 2, dtype=torch.float64).to(type_).double()
    chosen = {"both": [0, 1], "joint": [0], "marginal": [1]}[asked]
    made = []
    for scores, leaves in ((found, own), (expected, wide)):
        rows = [(scores[i] * upstream[i].to(scores[i].dtype)).sum() for i in chosen]
        made.append(torch.autograd.grad(rows, leaves[:5], materialize_grads=True))
    for name, actual, wanted in zip(NAMES, *made, strict=True):
        torch.testing.assert_close(
            actual, wanted.to(type_), rtol=rate, atol=rate, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_the_score_of_single_pixels_reads_no_others() -> None:
    tensors = problem(2, 3, exact=2)
    clean, poisoned = ready(tensors, torch.float64), ready(tensors, torch.float64)
    where, observed = tensors[5:]
    outside = ~(where & ~observed)  # (B, C, H, W)
    with torch.no_grad():
        for at, extra in ((1, 1), (2, 2), (3, 1), (4, 0)):
            chosen = outside.reshape(2, *([1] * extra), *outside.shape[1:]).expand_as(poisoned[at])
            poisoned[at][chosen] = torch.nan
    values = [log_probs(clean)[1], log_probs(poisoned)[1]]
    assert torch.equal(*values)
    found = [gradients(v, t, torch.ones(2)) for v, t in zip(values, (clean, poisoned), strict=True)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert not found[1][4][outside].any()
    tensors[5] = torch.zeros_like(where)
    assert log_probs(tensors)[1].tolist() == [0, 0]


def test_single_pixels_under_a_component_without_weight_and_far_from_all() -> None:
    """exp underflows far out, and a first component of weight zero has no finite logarithm to begin with."""
    tensors = problem(3, 2)
    tensors[0][:, 0] = -torch.inf
    tensors[4] = tensors[4] * 1e3
    torch.testing.assert_close(log_probs(tensors)[1], _likelihood.marginal_log_prob(*tensors), rtol=1e-12, atol=0)


def test_a_pixel_without_any_variance_has_that_of_its_rounding() -> None:
    for type_ in (torch.float32, torch.float64):
        tensors = [t.to(type_) for t in problem(2, 2)[:5]] + problem(2, 2)[5:]
        tensors[2][..., :2, :] = 0
        tensors[3][..., :2, :] = 0
        own, plain = ready(tensors, type_), ready(tensors, type_)
        value, expected = log_probs(own)[1], _likelihood.marginal_log_prob(*plain)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
        slope, reference = (gradients(v, t, torch.ones(2))[3] for v, t in ((value, own), (expected, plain)))
        assert not slope[..., :2, :].any()
        torch.testing.assert_close(slope[..., 2:, :], reference[..., 2:, :], rtol=1e-4, atol=1e-6)


def test_second_derivatives_of_both_scores() -> None:
    tensors = problem(2, 2)
    own, plain = ready(tensors, torch.float64), ready(tensors, torch.float64)
    made = []
    for scores, leaves in (
        (log_probs(own), own),
        ((_likelihood.log_prob(*plain), _likelihood.marginal_log_prob(*plain)), plain),
    ):
        first = torch.autograd.grad([s.sum() for s in scores], leaves[:5], create_graph=True)
        made.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves[:5]))  # type: ignore[arg-type]
    for actual, wanted in zip(*made, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_an_mfa_has_both_scores_of_its_kernels(fused: None) -> None:
    p = random_mfa(2, 2, 3, (2, 5, 7))
    x, where = torch.randn(p.shape), torch.rand(2, 1, 5, 7) < 0.6
    joint, marginal = p.log_probs(x, where)
    assert torch.equal(joint, p.log_prob(x, where))
    assert torch.equal(marginal, p.marginal_log_prob(x, where))
    tensors = (*p._parameters(), x, where, None)
    torch.testing.assert_close(marginal, _likelihood.marginal_log_prob(*tensors))


@pytest.mark.parametrize("type_", [torch.float16, torch.bfloat16])
def test_half_precision_is_exact_up_to_its_own_rounding(type_: torch.dtype) -> None:
    assert_same(problem(2, 3, exact=1), type_, torch.finfo(type_).eps)


@pytest.mark.parametrize("programs", [1, 1056])
@pytest.mark.parametrize("rank", [2, 9])
def test_images_are_divided_among_programs(rank: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_score, "_PROGRAMS", programs)
    _triton_score._plan.cache_clear()
    plan = _triton_score._Plan((2, 1, rank, 3, 19, 23), torch.float64, torch.device("cpu"), None, None, FLOOR)
    assert (plan.chunks > 1) == (programs > 1)
    assert (plan.steps > 1) == (programs == 1)
    assert_same(problem(1, rank, (3, 19, 23)), torch.float64, tolerance("exact", torch.float64))
    _triton_score._plan.cache_clear()


def test_what_is_not_scored_is_never_read() -> None:
    tensors = problem(2, 3, exact=2)
    clean, poisoned = ready(tensors, torch.float64), ready(tensors, torch.float64)
    where, observed = tensors[5:]
    outside = ~(where & ~observed)  # (B, C, H, W)
    with torch.no_grad():
        poisoned[1][outside.unsqueeze(1).expand_as(poisoned[1])] = torch.nan
        poisoned[2][outside[:, None, None].expand_as(poisoned[2])] = torch.inf
        poisoned[3][outside.unsqueeze(1).expand_as(poisoned[3])] = torch.nan
        poisoned[4][outside] = torch.nan
    values = [log_prob(clean), log_prob(poisoned)]
    assert torch.equal(*values)
    for a, b in zip(
        *(gradients(v, t, torch.ones(2)) for v, t in zip(values, (clean, poisoned), strict=True)), strict=True
    ):
        assert torch.equal(a, b)
    assert not gradients(log_prob(poisoned), poisoned, torch.ones(2))[4][outside].any()


def test_no_scored_pixel_has_probability_one() -> None:
    tensors = problem(3, 3)
    tensors[5] = torch.zeros_like(tensors[5])
    for _ in range(10):  # exactly, whatever the weights
        tensors[0] = torch.randn_like(tensors[0])
        assert log_prob(tensors).tolist() == [0, 0]


@pytest.mark.parametrize("rank", [0, 2])
def test_noise_below_the_floor_counts_as_the_floor_and_has_no_gradient(rank: int) -> None:
    """The floor is a share of what the factors of the pixel give it, and without factors the rounding of its value."""
    tensors = problem(1, rank)
    *_, x, where, _ = tensors
    least = FLOOR * tensors[2].square().sum(2) + (2.0**-52 * torch.maximum(x.abs().unsqueeze(1), tensors[1].abs())) ** 2
    tensors[3][..., 0, :] = 0
    tensors[3][..., 1, :] = least[..., 1, :] / 3
    # Where two ways of rounding an ill-conditioned matrix can be told apart, values alone are compared.
    torch.testing.assert_close(log_prob(tensors), _likelihood.log_prob(*tensors), rtol=1e-6, atol=0)
    tensors[3][..., 2, :] = least[..., 2, :] * (1 - 2.0**-50)  # a GPU may round that sum of squares another way
    tensors[3][..., 3:, :] = 1.1 * least[..., 3:, :]
    own = ready(tensors, torch.float64)
    slope = gradients(log_prob(own), own, torch.ones(2))[3]
    assert not slope[..., :3, :].any()
    assert (slope[..., 3:, :] != 0).equal(where.unsqueeze(1).expand_as(slope)[..., 3:, :])


@pytest.mark.parametrize("noise", [0.0, 1e-8])
def test_finite_with_no_noise_and_collinear_factors(noise: float) -> None:
    tensors = problem(1, 3)
    tensors[3] = torch.full_like(tensors[3], noise)
    tensors[2][:, :, 1] = tensors[2][:, :, 0] * (1 + 1e-6)
    own = ready(tensors, torch.float32)
    value = log_prob(own)
    assert value.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(value, own, torch.ones(2)))


def test_single_precision_keeps_its_digits_with_little_noise() -> None:
    """Nearly collinear factors over noise of 1e-4: C = I + AᵀD⁻¹A spans nine orders of magnitude."""
    p = random_mfa(2, 1, 4, (3, 8, 8)).to(torch.float64)
    p.noise = torch.full_like(p.noise, 1e-4)
    p.factors[:, :, 1:] = p.factors[:, :, :1] + 1e-3 * p.factors[:, :, 1:]
    p = p.to(torch.float32)
    tensors = [*p._parameters(), p.sample(1)[0], None, None]
    own, exact = ready(tensors, torch.float32), ready(tensors, torch.float64)
    value, expected = log_prob(own), _likelihood.log_prob(*exact)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    upstream = torch.ones(2)
    for actual, wanted in zip(gradients(value, own, upstream), gradients(expected, exact, upstream), strict=True):
        assert (actual.double() - wanted).norm() <= tolerance("exact", torch.float32) * wanted.norm()


def test_a_component_may_be_switched_off() -> None:
    tensors = problem(3, 2)
    tensors[0][:, 1] = -torch.inf
    own = ready(tensors, torch.float64)
    value = log_prob(own)
    torch.testing.assert_close(value, _likelihood.log_prob(*tensors))
    for slope in gradients(value, own, torch.ones(2))[:4]:
        assert slope.isfinite().all()
        assert not slope[:, 1].any()


def test_the_layout_of_memory_does_not_matter() -> None:
    tensors = problem(2, 3, exact=1)
    value = log_prob(tensors)
    odd = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in tensors[:5]]  # not aligned
    assert torch.equal(log_prob(odd + tensors[5:]), value)
    transposed = [t.mT.contiguous().mT for t in tensors[1:]]
    assert torch.equal(log_prob([tensors[0], *transposed]), value)
    own = ready(tensors, torch.float64)
    narrow, wide = (gradients(log_prob(own), own, u) for u in (torch.ones(2), torch.ones(1).expand(2)))
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def test_equal_inputs_give_equal_bits() -> None:
    tensors = problem(2, 4, (3, 20, 20))
    first, second = ready(tensors, torch.float32), ready(tensors, torch.float32)
    a, b = log_prob(first), log_prob(second)
    assert torch.equal(a, b)
    for one, other in zip(gradients(a, first, torch.ones(2)), gradients(b, second, torch.ones(2)), strict=True):
        assert torch.equal(one, other)


def test_gradients_are_made_for_those_who_need_them() -> None:
    tensors = problem(2, 3)
    assert not log_prob(tensors).requires_grad
    tensors[2].requires_grad_()
    with torch.no_grad():
        assert not log_prob(tensors).requires_grad
    log_prob(tensors).sum().backward()
    (wanted,) = torch.autograd.grad(_likelihood.log_prob(*tensors).sum(), tensors[2])
    torch.testing.assert_close(tensors[2].grad, wanted, rtol=tolerance("exact"), atol=tolerance("exact"))
    assert all(t.grad is None for t in (*tensors[:2], *tensors[3:5]))


def test_second_derivatives_are_those_of_the_plain_path() -> None:
    tensors = problem(2, 2, exact=1)
    direction = [torch.randn_like(t) for t in tensors[:5]]
    found = []
    for function in (log_prob, lambda t: _likelihood.log_prob(*t)):
        own = ready(tensors, torch.float64)
        first = torch.autograd.grad(function(own).square().sum(), own[:5], create_graph=True)
        along = sum((g * d).sum() for g, d in zip(first, direction, strict=True))
        assert isinstance(along, Tensor)
        found.append(torch.autograd.grad(along, own[:5]))
    for actual, wanted in zip(*found, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=tolerance("closed"), atol=tolerance("closed"))


# Conditioning and the way there -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("components", "rank", "seen", "exact"), [(1, 4, 1, None), (2, 3, 2, 1), (2, 0, 1, 2)])
def test_conditioning_is_that_of_the_plain_path(
    components: int, rank: int, seen: int, exact: int | None, request: pytest.FixtureRequest
) -> None:
    *parameters, x, where, observed = problem(components, rank, seen=seen, exact=exact)
    p = MFA(*parameters, observed, check=False)
    with _path.plain():
        plain = p.condition(x, where)
    request.getfixturevalue("fused")
    q = p.condition(x.masked_fill(~where, torch.nan), where.clone())
    for name in ("logits", "means", "factors", "noise"):
        actual, wanted = getattr(q, name), getattr(plain, name)
        torch.testing.assert_close(actual, wanted, rtol=tolerance("exact"), atol=tolerance("exact"))
    assert q.observed is not None
    assert torch.equal(q.observed, where if observed is None else where | observed)


def test_log_prob_takes_the_fused_path(fused: None) -> None:
    *parameters, x, where, observed = problem(2, 3, exact=1)
    p = MFA(*parameters, observed, check=False)
    for chosen in (None, where):
        wanted = _likelihood.log_prob(*parameters, x, chosen, observed)
        torch.testing.assert_close(p.log_prob(x, chosen), wanted, rtol=tolerance("exact"), atol=tolerance("exact"))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_a_compiled_graph_holds_the_operator(backend: str, fused: None, compiler: None) -> None:
    tensors = problem(2, 3, exact=1)
    graphs = []

    def remember(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph.code)
        compiled = torch._dynamo.lookup_backend(backend)(graph, inputs)
        assert callable(compiled)
        return compiled

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return MFA(*parameters, tensors[6], check=False).log_prob(x, tensors[5])

    own, plain = ready(tensors, torch.float64), ready(tensors, torch.float64)
    value = torch.compile(run, backend=remember, fullgraph=True)(own[4], *own[:4])
    wanted = _likelihood.log_prob(*plain)
    torch.testing.assert_close(value, wanted, rtol=tolerance("exact"), atol=tolerance("exact"))
    upstream = torch.randn(2)
    for a, b in zip(gradients(value, own, upstream), gradients(wanted, plain, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance("exact"), atol=tolerance("exact"))
    assert "misconv.mfa_log_prob" in graphs[0]


@pytest.mark.parametrize("both", [False, True])
def test_the_operator_is_well_behaved(both: bool) -> None:
    own = ready(problem(2, 3, exact=1), torch.float64)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.misconv.mfa_log_prob.default, (*own, FLOOR, both), test_utils=tests)


def test_both_scores_in_a_compiled_graph(fused: None) -> None:
    tensors = problem(2, 3, exact=1)
    made = []
    for compiled in (True, False):
        torch.compiler.reset()
        own = ready(tensors, torch.float64)
        scores = torch.compile(log_probs, backend="aot_eager", fullgraph=True) if compiled else log_probs
        joint, marginal = scores(own)
        made.append((joint, marginal, *gradients(joint + 2 * marginal, own, torch.ones(2))))
    for actual, wanted in zip(*made, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_the_plain_path_serves_where_kernels_do_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MFA, "device", property(lambda self: torch.device("cuda")))
    _path.warn_plain_path.cache_clear()
    p, x = random_mfa(2, 1, 2, (1, 3, 3)), torch.randn(2, 1, 3, 3)
    assert p._fused(x)
    assert not p[:0]._fused(x[:0])
    with _path.plain():
        assert not p._fused(x)
    with torch.autograd.forward_ad.dual_level():
        assert not p._fused(x)
    torch.vmap(lambda t: _refused(p, t))(x)
    torch.vmap(lambda t: _refused(p, t))(x.unsqueeze(0))
    x.requires_grad_()
    assert p._fused(x)
    assert not p._fused(x, gradients=False)
    with torch.no_grad():
        assert p._fused(x, gradients=False)
    with caplog.at_level(logging.WARNING, "misconv"):
        for _ in range(2):
            assert not random_mfa(2, 1, 17, (1, 3, 3))._fused(x)
    assert len(caplog.records) == 1


def _refused(p: MFA, x: Tensor) -> Tensor:
    assert not p._fused(x)
    return x
