"""Convolution, batch normalization in training and activation by fused kernels, against the plain path in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import misconv
from misconv import MFA
from misconv._conv import (
    BatchNorm,
    Convolution,
    batch_norm_moments,
    fixed_batch_norm,
    incomplete_windows,
    mix_expectations,
)
from misconv._conv.dispatch import moments, plain_normalized, respond

pytest.importorskip("triton")

from misconv import _triton
from misconv._triton import normalized as _normalized
from misconv._triton.operator import find_plan
from tests.test_triton import BOUND, TF32_BOUND, error, layer, small_work, upstream  # noqa: F401  # one is a fixture

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"padding": 1}),
    ({"components": 3, "rank": 0, "has_bias": False}, {"stride": (1, 3)}),
    ({"channels": 3, "kernel": 7, "image": (8, 11), "components": 2, "out": 5}, {"stride": 2, "padding": 3}),
    ({"rank": 5, "seen": "each", "out": 20}, {"padding": 1, "dilation": (1, 2)}),
    ({"seen": "nothing", "kernel": 2, "rank": 8}, {}),
]


@pytest.fixture(autouse=True)
def _tf32(monkeypatch: pytest.MonkeyPatch, small_work: None) -> None:  # noqa: F811
    """The moments of windows serve where products may be rounded."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


class Problem:
    """A layer with its normalization, in some type; parameters learn and the density does not."""

    def __init__(self, start: list[Tensor | None], observed: Tensor | None, dtype: torch.dtype, **options: Any) -> None:
        logits, means, factors, noise, x, weight, bias = (None if t is None else t.to(dtype) for t in start)
        p = MFA(logits, means, factors, noise, check=False)  # type: ignore[arg-type]
        self.p = p if observed is None else p.fix(x, observed)  # type: ignore[arg-type]
        self.conv = Convolution(*(t if t is None else t.requires_grad_() for t in (weight, bias)), **options)  # type: ignore[arg-type, union-attr]
        out = self.conv.weight.shape[0]
        self.norm = nn.BatchNorm2d(out, momentum=0.3, eps=1e-3, dtype=dtype)
        with torch.no_grad():
            self.norm.weight.copy_(torch.linspace(0.5, 2, out))
            self.norm.bias.copy_(torch.linspace(-1, 2, out))

    @property
    def parameters(self) -> list[Tensor | None]:
        return [self.conv.weight, self.conv.bias, self.norm.weight, self.norm.bias]

    def fused(self, activation: str) -> Tensor:
        norm = BatchNorm.of(self.norm)
        plain = plain_normalized(self.conv, self.norm.eps, activation)
        y = _triton.normalized_response(self.p, self.conv, norm, activation, plain)
        assert y is not None
        return y

    def plain(self, activation: str) -> Tensor:
        with misconv.plain():
            options = BatchNorm.of(self.norm).options()
            moved = batch_norm_moments(*moments(self.p, self.conv), self.p.weights, training=True, **options)
            return mix_expectations(self.p, activation, *moved, incomplete_windows(self.p, self.conv))

    def learned(self, y: Tensor, like: torch.dtype = torch.float64) -> list[Tensor]:
        """The response, and gradients of all parameters that have one."""
        wanted = [t for t in self.parameters if t is not None and t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, wanted, upstream(y).to(like).to(y.dtype))]

    def tracked(self) -> list[Tensor]:
        return [t for t in (self.norm.running_mean, self.norm.running_var) if t is not None]


def assert_close(found: list[list[Tensor]], bound: float) -> None:
    """The response; then all others, where gradients of vectors add up those of all responses, with a sign each."""
    (y, *ours), (reference, *theirs) = found
    assert error(y, reference) < bound
    terms = float(upstream(reference).abs().sum((0, 2, 3)).norm())
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert error(one, other, terms if one.dim() == 1 else 0.0) < bound


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_values_gradients_and_running_statistics(shape: dict[str, Any], options: dict[str, Any]) -> None:
    start, observed = layer(**shape)
    ours, theirs = (Problem(start, observed, dtype, **options) for dtype in (torch.float32, torch.float64))
    steps = 1 if shape else 2  # running statistics move on from where they are
    found = []
    for _ in range(steps):
        found = [ours.learned(ours.fused("silu")), theirs.learned(theirs.plain("silu"))]
    assert_close(found, TF32_BOUND)
    for one, other in zip(ours.tracked(), theirs.tracked(), strict=True):
        assert error(one, other) < 1e-4  # 16 bits of products, of which the interpreter rounds the last one down
    assert int(ours.norm.num_batches_tracked) == int(theirs.norm.num_batches_tracked) == steps  # type: ignore[arg-type]
    if ours.conv.bias is not None:
        assert not found[0][2].any()  # the normalization takes every bias off again


@pytest.mark.parametrize(("kernel", "channels_last"), [(3, False), (7, True)])
def test_half_precision(kernel: int, channels_last: bool) -> None:
    """Numbers and gradients in their own types, weights and responses in their own layout."""
    start, observed = layer(channels=3, kernel=kernel, image=(8, 11), out=5, has_bias=False)
    start = [None if t is None else t.bfloat16().double() for t in start]
    options = {"stride": 2, "padding": kernel // 2}
    ours, theirs = (Problem(start, observed, dtype, **options) for dtype in (torch.bfloat16, torch.float64))
    if channels_last:
        weight = ours.conv.weight.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        ours.conv = ours.conv.replace(weight, None)
    with torch.no_grad():  # what half precision holds of it
        for a, b in zip(ours.norm.parameters(), theirs.norm.parameters(), strict=True):
            b.copy_(a)
    found = [ours.learned(ours.fused("silu"), torch.bfloat16), theirs.learned(theirs.plain("silu"), torch.bfloat16)]
    for t in found[0]:
        assert t.dtype == torch.bfloat16
    order = torch.channels_last if channels_last else torch.contiguous_format
    assert found[0][0].is_contiguous(memory_format=order)
    assert found[0][1].is_contiguous(memory_format=order)
    assert_close(found, 1e-2)
    for one, other in zip(ours.tracked(), theirs.tracked(), strict=True):
        assert error(one, other) < 1e-2


@pytest.mark.parametrize("change", ["plain", "frozen weight", "only bias", "no affine", "no statistics", "average"])
def test_kinds_of_normalization(change: str) -> None:
    start, observed = layer(components=2, channels=2, image=(5, 6))
    found, tracked = [], []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        problem = Problem(start, observed, dtype, padding=1)
        norm, out = problem.norm, problem.conv.weight.shape[0]
        if change in ("frozen weight", "only bias"):
            problem.conv.weight.requires_grad_(False)
        if change == "only bias":
            norm.weight.requires_grad_(False)
        if change == "no affine":
            problem.norm = nn.BatchNorm2d(out, affine=False, dtype=dtype)
        if change == "no statistics":
            problem.norm = nn.BatchNorm2d(out, track_running_stats=False, dtype=dtype)
        if change == "average":
            norm.momentum = None
        for _ in range(3):
            with torch.no_grad():
                problem.p.means.mul_(1.5)  # another batch
            y = problem.fused("gelu") if fused else problem.plain("gelu")
        found.append(problem.learned(y))
        tracked.append(problem.tracked())
    assert_close(found, TF32_BOUND)
    assert len(tracked[0]) == (0 if change == "no statistics" else 2)
    for one, other in zip(*tracked, strict=True):
        assert error(one, other) < 1e-4


def test_without_gradients_the_statistics_still_follow() -> None:
    start, observed = layer()
    ours, theirs = (Problem(start, observed, dtype) for dtype in (torch.float32, torch.float64))
    with torch.no_grad():
        y, expected = ours.fused("relu"), theirs.plain("relu")
    assert not y.requires_grad
    assert error(y, expected) < TF32_BOUND
    assert error(ours.norm.running_var, theirs.norm.running_var) < TF32_BOUND  # type: ignore[arg-type]


def test_who_has_saved_running_statistics_is_told_that_they_changed() -> None:
    start, observed = layer()
    problem = Problem(start, observed, torch.float32)
    x = torch.ones(3, dtype=torch.float32, requires_grad=True)
    y = x * problem.norm.running_mean  # type: ignore[operator]
    problem.fused("relu")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # type: ignore[no-untyped-call]


def test_second_derivatives() -> None:
    start, observed = layer(image=(5, 6), has_bias=False)
    found = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        problem = Problem(start, observed, dtype)
        y = problem.fused("silu") if fused else problem.plain("silu")
        wanted = [t for t in problem.parameters if t is not None]
        first = torch.autograd.grad(y, wanted, upstream(y).to(dtype), create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), wanted))  # type: ignore[arg-type]
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) < 1e-4


@pytest.mark.parametrize("reason", ["full precision", "learning", "groups", "one value", "vectors of another shape"])
def test_where_it_does_not_serve(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", reason != "full precision")
    groups = 2 if reason == "groups" else 1
    start, observed = layer(channels=2 * groups, out=2 * groups, groups=groups)
    problem = Problem(start, observed, torch.float32, groups=groups)
    if reason == "learning":
        problem.p.means.requires_grad_()
    if reason == "one value":
        problem.p = MFA(*(t[:1, ..., :3, :3] if t.dim() > 2 else t[:1] for t in problem.p._parameters()), check=False)
    if reason == "vectors of another shape":
        problem.norm.running_mean = torch.zeros(1)
    norm, plain = BatchNorm.of(problem.norm), plain_normalized(problem.conv, 1e-5, "relu")
    assert _triton.normalized_response(problem.p, problem.conv, norm, "relu", plain) is None
    assert int(problem.norm.num_batches_tracked) == 0  # type: ignore[arg-type]
    assert not problem.norm.running_mean.any()  # type: ignore[union-attr, operator]


# In evaluation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *CASES,
        ({"channels": 4, "out": 6, "groups": 2}, {"groups": 2}),
        ({"channels": 30, "kernel": 6, "image": (8, 9)}, {}),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_a_fixed_normalization(
    shape: dict[str, Any], options: dict[str, Any], half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    start, observed = layer(**shape)
    found = []
    for dtype in (torch.bfloat16 if half else torch.float32, torch.float64):
        problem = Problem([None if t is None else t.bfloat16() for t in start], observed, dtype, **options)
        conv, norm = problem.conv, problem.norm
        out = conv.weight.shape[0]
        mean, variance = (torch.linspace(low, 2, out).bfloat16().to(dtype) for low in (-1, 0.5))
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 2, out).bfloat16())
            norm.bias.copy_(torch.linspace(-1, 2, out).bfloat16())
            affine = fixed_batch_norm(mean, variance, norm.weight, norm.bias, 1e-3)
            if dtype == torch.float64:
                with misconv.plain():
                    found.append(respond(problem.p, conv, affine, "relu"))
                continue
            assert affine.statistics is not None
            for last in (False, True) if half else (False,):
                weight = conv.weight.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
                y = _triton.fixed_response(problem.p, conv.replace(weight, conv.bias), affine.statistics, "relu")
                assert y is not None
                found.append(y)
    *ours, theirs = found
    for y in ours:
        assert error(y, theirs) < (1e-2 if half else BOUND)


def test_a_fixed_normalization_whose_parameters_learn_is_left_to_torch() -> None:
    start, observed = layer()
    problem = Problem(start, observed, torch.float32)
    norm = problem.norm
    affine = fixed_batch_norm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
    assert affine.statistics is not None
    assert _triton.fixed_response(problem.p, problem.conv, affine.statistics, "relu") is None
    for t in (problem.conv.weight, problem.conv.bias, norm.weight):
        t.requires_grad_(False)  # type: ignore[union-attr]
    assert _triton.fixed_response(problem.p, problem.conv, affine.statistics, "relu") is None
    norm.bias.requires_grad_(False)
    assert _triton.fixed_response(problem.p, problem.conv, affine.statistics, "relu") is not None


# Folding alone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "half"), [(*CASES[0], False), (*CASES[1], True), (*CASES[2], False), (*CASES[2], True)]
)
def test_folding_and_its_gradients_are_exact(shape: dict[str, Any], options: dict[str, Any], half: bool) -> None:
    """Given the moments of windows, which products round to TF32, everything else has all digits of float32."""
    start, observed = layer(**shape)
    dtype = torch.bfloat16 if half else torch.float32
    problem = Problem(start, observed, dtype, **options)
    conv, norm = problem.conv, BatchNorm.of(problem.norm)
    plan = find_plan(problem.p, conv, True, ("relu", 0.0, 0.0))
    assert plan is not None
    density = (*problem.p._parameters(), problem.p.observed)
    with torch.no_grad():
        inputs = (*density, conv.weight, conv.bias, *norm[:5])
        _, found, folded, kept = _normalized._forward(plan, norm.momentum, norm.eps, *inputs)
    out, channels, rows, columns = conv.weight.shape
    wide = plan.kernel(plan.paired)[1]
    real = torch.arange(channels * rows * wide) % wide < columns
    taps = len(real)
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in problem.parameters]
    weight, _, scale, shift = leaves
    filters = weight.flatten(1)  # type: ignore[union-attr]
    mean, noise = found.taps[:, :taps][:, real]
    apart = mean - found.center.double().repeat_interleave(rows * columns)
    matrix = found.matrix[:taps, :taps][real][:, real] + noise.diag() - torch.outer(apart, apart)
    variance = ((filters @ matrix) * filters).sum(1)
    slope = scale / (variance + 1e-3).sqrt()  # type: ignore[operator]
    expected = filters * slope[:, None], shift - (filters @ mean) * slope  # type: ignore[operator]
    ours = folded[: out * taps].view(out, taps)
    assert error(ours[:, real], expected[0].detach()) < BOUND
    assert not ours[:, ~real].any()
    offsets = folded[-(-out * taps // 4) * 4 :][:out]
    assert error(offsets, expected[1].detach()) < BOUND

    grad = torch.randn(plan.shape, dtype=torch.float32).to(dtype)
    written_by = _normalized.backward_parameters
    rows_found: list[Any] = []
    response = torch.rand(plan.shape).to(dtype) if plan.reads_response else None
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(_normalized, "backward_parameters", lambda *a: rows_found.append(written_by(*a)) or rows_found[0])
        tensors = [*density, *problem.parameters]
        needed = tuple(t is not None for t in problem.parameters)
        made = _normalized._backward(plan, needed, grad, tensors, response, found.taps, folded, kept)
    ((written, _, layout),) = rows_found
    total = written.double().view(-1, layout.number + layout.out).sum(0)
    by_filters = total[: layout.number]
    if layout.turned:
        by_filters = by_filters.view(layout.chunks, layout.places, out)[:, : layout.chunk_taps].flatten(0, 1)[:taps].T
    total_of = by_filters.reshape(out, taps)[:, real], total[layout.number :]
    wanted = [t for t in leaves if t is not None]
    references = torch.autograd.grad(expected, wanted, total_of, materialize_grads=True)
    bound = torch.finfo(torch.bfloat16).eps if half else 3 * BOUND
    for actual, reference in zip([t for t in made if t is not None], references, strict=True):
        assert error(actual, reference) < bound


# In a network ------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A network that reads what it has normalized once, in training twice, or after one more step."""

    def __init__(self, readers: str) -> None:
        super().__init__()
        self.conv, self.norm, self.readers = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), readers

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        if self.readers == "one more step":
            y = y * 0.5
        first = torch.relu(y)
        return torch.cat([first, torch.relu(y)], 1) if self.readers == "two" and self.training else first


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("readers", ["one", "two", "one more step"])
def test_a_converted_network_normalizes_once(readers: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its normalization waits for the activation, and is what it would be otherwise; also where kernels serve both."""
    torch.manual_seed(0)
    network = Reader(readers).train()
    leaves, observed = layer(channels=3, components=2)
    logits, means, factors, noise, x, _, _ = leaves
    found = []
    for waits in (True, False):
        converted, served = misconv.convert(network).train(), []

        def by_kernels(p: MFA, conv: Convolution, norm: BatchNorm, activation: Any) -> Tensor | None:
            served.append(norm)  # noqa: B023  # it is called below, in this round
            plain = plain_normalized(conv, norm.eps, activation)
            return _triton.normalized_response(p, conv, norm, activation, plain)

        dtype = torch.float32 if waits else torch.float64
        converted.to(dtype)
        p = MFA(*(t.to(dtype) for t in (logits, means, factors, noise)), check=False)  # type: ignore[union-attr]
        if waits and fused:
            monkeypatch.setattr("misconv._convert.stem.normalized_response", by_kernels)
        y = converted(p.fix(x.to(dtype), observed))  # type: ignore[union-attr, arg-type]
        gradients = torch.autograd.grad(y, list(converted.network.parameters()), upstream(y).to(y.dtype))
        norm = converted.network.norm
        assert norm.num_batches_tracked == 1
        assert len(served) == (waits and fused and {"one": 1, "two": 2, "one more step": 0}[readers])
        monkeypatch.undo()
        found.append([y.detach(), norm.running_mean, norm.running_var, *gradients])
    kernels = fused or found[0][0].is_cuda  # a GPU has them anyway
    for actual, expected in zip(*found, strict=True):
        assert error(actual, expected.double()) < (20 * TF32_BOUND if kernels else 1e-5)
