"""Batch normalization in training by fused kernels, against the plain formulas in float64; in Triton's interpreter too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import misconv
from misconv import MFA, MisConv2d, missing
from misconv._conv import Convolution, batch_norm_affine, batch_norm_moments, incomplete_windows, mix_expectations
from misconv._conv.dispatch import moments, plain_path, plain_squares, respond

pytest.importorskip("triton")

from misconv import _triton
from misconv._triton import plan as _plan
from misconv._triton import statistics as _statistics
from misconv._triton.operator import find_plan
from tests.test_triton import BOUND, TF32_BOUND, error, layer, small_work  # noqa: F401  # the last one is a fixture

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"padding": 1}),
    ({"components": 3, "rank": 0}, {}),
    ({"rank": 5, "components": 2, "has_bias": False}, {"stride": 2, "padding": (1, 0)}),
    ({"channels": 4, "out": 6, "groups": 2, "seen": "each"}, {"padding": "same", "groups": 2}),
    ({"kernel": 2, "seen": "nothing"}, {"dilation": (1, 2)}),
]


def leaves_of(leaves: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [None if t is None else t.to(dtype).detach().requires_grad_() for t in leaves]


def mfa_of(leaves: list[Any], observed: Tensor | None) -> MFA:
    logits, means, factors, noise, x, _, _ = leaves
    p = MFA(logits, means, factors, noise, check=False)
    return p if observed is None else p.fix(x, observed)


def convolution(leaves: list[Any], options: dict[str, Any]) -> Convolution:
    return Convolution(leaves[5], leaves[6], **options)


def statistics(p: MFA, conv: Convolution, fused: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance of all responses of each channel."""
    if fused:
        found = _triton.batch_statistics(p, conv, plain_squares(conv))
        assert found is not None
        return found
    with misconv.plain():
        mean, variance = moments(p, conv)
    shares = p.weights[..., None, None, None]
    number = mean[:, 0, 0].numel()
    center = (shares * mean).sum((0, 1, 3, 4)) / number
    spread = (mean - center.view(-1, 1, 1)).square() + variance
    return center, (shares * spread).sum((0, 1, 3, 4)) / number


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_mean_variance_and_their_gradients(shape: dict[str, Any], options: dict[str, Any]) -> None:
    start, observed = layer(**shape)
    generator = torch.Generator(torch.get_default_device()).manual_seed(2)
    found = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        leaves = leaves_of(start, dtype)
        center, total = statistics(mfa_of(leaves, observed), convolution(leaves, options), fused)
        upstream = torch.randn(2, len(center), generator=generator.manual_seed(2), dtype=torch.float64).to(dtype)
        wanted = [t for t in leaves if t is not None]
        gradients = torch.autograd.grad(
            (center * upstream[0] + total * upstream[1]).sum(), wanted, materialize_grads=True
        )
        found.append((center.detach(), total.detach(), *gradients))
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) < 2 * BOUND or theirs.norm() < 1e-9


def test_a_mean_far_from_zero_does_not_spoil_the_variance() -> None:
    start, observed = layer(seen="nothing")
    start[1] = start[1] + 1000.0  # type: ignore[operator]
    start[5] = start[5] - start[5].mean((1, 2, 3), keepdim=True)  # type: ignore[union-attr, operator]  # edges
    found = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        leaves = leaves_of(start, dtype)
        found.append(statistics(mfa_of(leaves, observed), convolution(leaves, {}), fused))
    assert error(found[0][1].detach(), found[1][1].detach()) < 2e-4  # float32 cannot hold more of the pixels


@pytest.mark.parametrize(("shape", "options"), CASES[:3])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_batch_normalization_and_all_gradients(shape: dict[str, Any], options: dict[str, Any], activation: str) -> None:
    """Statistics, normalization and activation as the layer composes them; running statistics too."""
    start, observed = layer(**shape)
    found = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        leaves = leaves_of(start, dtype)
        p, conv = mfa_of(leaves, observed), convolution(leaves, options)
        out = conv.weight.shape[0]
        slope, offset = (torch.linspace(low, 2, out, dtype=dtype).requires_grad_() for low in (0.5, -1))
        running = {"running_mean": torch.zeros(out, dtype=dtype), "running_var": torch.ones(out, dtype=dtype)}
        vectors = {**running, "weight": slope, "bias": offset, "momentum": 0.3, "eps": 1e-3}
        if fused:
            number = len(p) * conv.size(p.shape[-2:])[0] * conv.size(p.shape[-2:])[1]
            norm = batch_norm_affine(number, *statistics(p, conv, True), **vectors)  # type: ignore[arg-type]
            y = _triton.respond(p, conv, norm, activation, plain_path(conv, activation))
            assert y is not None
        else:
            with misconv.plain():
                moved = batch_norm_moments(*moments(p, conv), p.weights, training=True, **vectors)  # type: ignore[arg-type]
                y = mix_expectations(p, activation, *moved, incomplete_windows(p, conv))
        upstream = torch.randn(y.shape, generator=torch.Generator(y.device).manual_seed(1), dtype=torch.float64)
        wanted = [t for t in (*leaves, slope, offset) if t is not None]
        gradients = torch.autograd.grad(y, wanted, upstream.to(dtype), materialize_grads=True)
        found.append((y.detach(), *running.values(), *gradients))
    # The gradient of a bias before a batch normalization is 0, a difference of large numbers.
    sizes = [float(t.norm()) for t in found[1]]
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs, 0.01 * max(sizes)) < 10 * BOUND


def test_an_activation_without_kernel_goes_on_by_the_plain_path() -> None:
    """The statistics may come from a kernel where the activation has none."""
    start, observed = layer(components=2)
    found = []
    for known in (True, False):
        leaves = leaves_of(start, torch.float64)
        p, conv = mfa_of(leaves, observed), convolution(leaves, {"padding": 1})
        vectors = {"running_mean": None, "running_var": None, "weight": torch.tensor([0.5, 1.0, 2.0])}
        with misconv.plain():
            if known:
                norm = batch_norm_affine(2 * 7 * 9, *statistics(p, conv, False), **vectors)  # type: ignore[arg-type]
                y = respond(p, conv, norm, "mish")
            else:
                moved = batch_norm_moments(*moments(p, conv), p.weights, training=True, **vectors)  # type: ignore[arg-type]
                y = mix_expectations(p, "mish", *moved, incomplete_windows(p, conv))
        wanted = [t for t in leaves if t is not None]
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), wanted, materialize_grads=True)))
    largest = max(float(t.norm()) for t in found[1])  # of a bias the gradient is 0, but for rounding
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs, 1e-3 * largest) < 1e-9


def test_second_derivatives() -> None:
    start, observed = layer(image=(5, 6))
    found = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        leaves = leaves_of(start, dtype)
        weight = leaves[5]
        assert weight is not None
        _, total = statistics(mfa_of(leaves, observed), convolution(leaves, {}), fused)
        (first,) = torch.autograd.grad(total.square().sum(), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    assert error(*found) < 1e-4


# By the moments of windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"channels": 3, "kernel": 7, "image": (12, 17), "components": 2}, {"stride": 2, "padding": 3}),
        ({"channels": 3, "kernel": 5, "image": (9, 12), "seen": "each", "rank": 3}, {"padding": 2}),
        ({"components": 3, "rank": 0, "seen": "nothing"}, {"padding": 1, "dilation": (1, 2)}),
        ({"channels": 1, "has_bias": False}, {"stride": (1, 3)}),
    ],
)
@pytest.mark.parametrize("far", [0.0, 300.0])
def test_the_variance_is_a_quadratic_form_in_the_filters(
    shape: dict[str, Any], options: dict[str, Any], far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where products may be rounded and the density does not learn; also for images far from zero."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    used = []
    moments_of = _statistics.window_moments
    monkeypatch.setattr(_statistics, "window_moments", lambda *a: used.append(moments_of(*a)) or used[-1])
    start, observed = layer(**shape)
    start[1], start[4] = start[1] + far, start[4] + far  # type: ignore[operator]
    found = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        leaves = [None if t is None else t.to(dtype) for t in start]
        weight = leaves[5].requires_grad_()  # type: ignore[union-attr]
        center, total = statistics(mfa_of(leaves, observed), convolution(leaves, options), fused)
        gradients = [torch.autograd.grad(part.sum(), weight, retain_graph=True)[0] for part in (center, total)]
        found.append((center.detach(), total.detach(), *gradients))
    assert len(used) == 1
    assert used[0] is not None
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) < 1e-4  # 16 bits, of which the interpreter rounds the last one down


def moments_of_windows(p: MFA, conv: Convolution) -> tuple[Tensor, Tensor]:
    """Mean and covariance of all windows of a batch, over all that missing pixels may be, by cutting them out."""

    def cut(images: Tensor) -> Tensor:
        padded = F.pad(images, conv.margins)
        return F.unfold(padded, conv.kernel, conv.dilations, 0, conv.strides).mT.flatten(0, 1)

    hidden = torch.ones_like(p.mean) if p.observed is None else (~p.observed).to(p.dtype).expand_as(p.mean)
    mean, second = cut(p.mean), torch.zeros(())
    for k in range(p.means.shape[1]):
        share = cut(p.weights[:, k, None, None, None] * torch.ones_like(hidden)).amax(1, keepdim=True)
        parts = [cut(p.means[:, k]), *(cut(p.factors[:, k, j] * hidden) for j in range(p.factors.shape[2]))]
        second = second + sum((share * part).mT @ part for part in parts)
        second = second + (share * cut(p.noise[:, k] * hidden)).sum(0).diag()
    center = mean.mean(0)
    return center, second / len(mean) - torch.outer(center, center)


@pytest.mark.parametrize(
    ("shape", "options", "images"),
    [
        ({"channels": 3, "kernel": 7, "image": (9, 12)}, {"stride": 2, "padding": 3}, 2),
        ({"channels": 3, "kernel": 5, "image": (11, 11), "components": 2}, {"stride": 2, "padding": (0, 2)}, 1),
        (
            {"channels": 3, "kernel": 5, "image": (5, 13), "rank": 0, "components": 2},
            {"stride": (1, 3), "padding": 4},
            2,
        ),
        ({"channels": 3, "kernel": 5, "image": (11, 9), "seen": "each"}, {"stride": (3, 1)}, 2),
        ({"channels": 3, "kernel": 8, "image": (13, 14), "seen": "nothing"}, {"stride": 4, "padding": 2}, 1),
    ],
)
def test_correlations_are_the_second_moments_of_large_windows(
    shape: dict[str, Any], options: dict[str, Any], images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At all borders, for all strides, and whether one image or both are arranged at a time."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    start, observed = layer(**shape)
    leaves = [None if t is None else t.float() for t in start]
    p, conv = mfa_of(leaves, observed), convolution(leaves, options)
    plan = find_plan(p, conv, True, ("square", 0.0, 0.0))
    assert plan is not None
    if images == 1:
        plan = copy.copy(plan)
        vars(plan).pop("window_moments", None)
        monkeypatch.setattr(_plan, "_MOST_SPOTS", 1)
    work = plan.window_moments
    assert work is not None
    assert work.correlations is not None
    assert work.numbers[0] == images
    center, matrix = _statistics._moments_of_windows(plan, *p._parameters(), p.observed)
    wanted = moments_of_windows(mfa_of(start, observed), convolution(start, options))
    assert error(center, wanted[0]) < 1e-6
    assert error(matrix, wanted[1]) < 1e-4  # 16 bits, of which the interpreter rounds the last one down


@pytest.mark.parametrize("reason", ["full precision", "learning", "groups", "many taps"])
def test_where_the_moments_of_windows_do_not_serve(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", reason != "full precision")
    groups = 2 if reason == "groups" else 1
    start, observed = layer(channels=30 if reason == "many taps" else 2 * groups, out=2 * groups, groups=groups)
    leaves = [None if t is None else t.float() for t in start]
    if reason == "learning":
        leaves[1] = leaves[1].requires_grad_()  # type: ignore[union-attr]
    used = []
    squares_of = _statistics.squares
    monkeypatch.setattr(_statistics, "squares", lambda *a: used.append(1) or squares_of(*a))
    ours = statistics(mfa_of(leaves, observed), convolution(leaves, {"groups": groups}), True)
    theirs = statistics(mfa_of(start, observed), convolution(start, {"groups": groups}), False)
    assert used == [1]
    for a, b in zip(ours, theirs, strict=True):
        assert error(a.detach(), b) < TF32_BOUND


# On a GPU ----------------------------------------------------------------------------------------------------------


def trained(network: nn.Module, x: Any, steps: int = 2) -> list[Tensor]:
    """Output, gradients and buffers after some steps of training."""
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        y = network(x)
        y.float().square().mean().backward()
        optimizer.step()
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *(b for b in network.buffers() if b.is_floating_point())]


@needs_gpu
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast", "compiled"])
@pytest.mark.parametrize("components", [1, 3])
def test_the_layer_trains_by_kernels_as_by_the_plain_path(kind: str, components: int) -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    fresh = MisConv2d(3, 16, 3, stride=2, padding=1, norm=nn.BatchNorm2d(16), activation="relu").cuda()
    density = misconv.UNetDMFA(3, components=components).cuda().eval()
    x, observed = torch.rand(8, 3, 40, 40, device="cuda"), missing.square(8, 40, 40, device="cuda")
    with torch.no_grad():
        p = density(x, observed)
    if kind == "bfloat16":
        fresh, p = fresh.bfloat16().to(memory_format=torch.channels_last), p.to(torch.bfloat16)
    results = []
    for plain in (False, True):
        network = copy.deepcopy(fresh)
        run = torch.compile(network) if kind == "compiled" and not plain else network
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
            if plain:
                with misconv.plain():
                    results.append(trained(run, p))
            else:
                results.append(trained(run, p))
    largest = max(float(t.norm()) for t in results[1])
    for ours, theirs in zip(*results, strict=True):
        bound = TF32_BOUND if kind in ("float32", "compiled") else 0.03
        assert error(ours, theirs.double(), 0.05 * largest) < 5 * bound


@needs_gpu
def test_a_converted_network_trains_without_the_memory_of_the_plain_path() -> None:
    import torchvision

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    x = torch.rand(16, 3, 96, 96, device="cuda")
    x = x.masked_fill(~missing.square(16, 96, 96, device="cuda"), torch.nan)
    fresh = misconv.convert(torchvision.models.resnet18().cuda(), misconv.UNetDMFA(3).cuda())
    results, peaks = [], []
    for plain in (False, True):
        network = copy.deepcopy(fresh)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # of other tests too
        if plain:
            with misconv.plain():
                results.append(trained(network, x, steps=1))
        else:
            results.append(trained(network, x, steps=1))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert error(results[0][0], results[1][0].double()) < 0.02
    assert peaks[0] < 0.8 * peaks[1]


@needs_gpu
def test_a_step_can_be_captured_in_a_graph() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    network = MisConv2d(3, 8, 3, norm=nn.BatchNorm2d(8), activation="relu").cuda().train()
    with torch.no_grad():
        p = (
            misconv.UNetDMFA(3)
            .cuda()
            .eval()(torch.rand(4, 3, 24, 24, device="cuda"), missing.square(4, 24, 24, device="cuda"))
        )

    def step() -> Tensor:
        network.zero_grad(set_to_none=False)
        y: Tensor = network(p)
        y.square().mean().backward()  # type: ignore[no-untyped-call]
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    found, gradient = y.detach().clone(), network.weight.grad.clone()  # type: ignore[union-attr]
    del y  # torch warns where a graph of another stream is still there
    expected = step()
    assert error(found, expected.detach().double()) < 1e-5
    assert error(gradient, network.weight.grad.double()) < 1e-4  # type: ignore[union-attr]
