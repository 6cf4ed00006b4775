from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchvision
from timm.layers import BatchNormAct2d, Conv2dSame, StdConv2d
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from misconv import MFA, MisConv2d, PartialConv2d
from misconv.functional import (
    batch_norm_moments,
    conv2d_moments,
    expected_activation,
    expected_conv2d,
    partial_conv2d,
)
from tests.processes import run_two
from tests.reference import integrate, random_mfa, same, tolerance

KINDS: list[tuple[str, nn.Module]] = [
    ("relu", nn.ReLU()),
    ("gelu", nn.GELU()),
    ("silu", nn.SiLU()),
    ("hardswish", nn.Hardswish()),
    ("mish", nn.Mish()),
    ("identity", nn.Identity()),
]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance("exact"), atol=tolerance("exact"))


def trained_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for value in (norm.weight, norm.bias, norm.running_mean):
            value.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm


def test_the_layer_is_the_function() -> None:
    observed = torch.rand(2, 4, 9, 9) < 0.5
    p = random_mfa(2, 2, 3, (4, 9, 9), observed)
    layer = MisConv2d(4, 6, (3, 2), stride=2, padding=(1, 0), dilation=2, groups=2, bias=False, activation="elu")
    expected = expected_conv2d(p, layer.weight, None, 2, (1, 0), 2, 2, activation=nn.ELU())
    assert torch.equal(layer(p), expected)


@pytest.mark.parametrize(("name", "activation"), KINDS)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("components", [1, 3])
def test_complete_images_pass_bit_for_bit(name: str, activation: nn.Module, with_norm: bool, components: int) -> None:
    norm = trained_norm(8).eval() if with_norm else None
    layer = MisConv2d(3, 8, 7, stride=2, padding=3, norm=norm, activation=name)
    x = torch.randn(3, 3, 19, 21)
    plain = nn.functional.conv2d(x, layer.weight, layer.bias, 2, 3)
    plain = activation(plain if norm is None else norm(plain))
    p = random_mfa(3, components, 2, (3, 19, 21)).fix(x, torch.ones(3, 1, 19, 21, dtype=torch.bool))
    assert torch.equal(layer(p), plain)
    assert torch.equal(layer(MFA.point(x)), plain)


@pytest.mark.usefixtures("without_tf32")
def test_torchvision_stem_with_its_own_modules() -> None:
    """ResNet's Conv→BN→ReLU(inplace), float32, evaluation and training."""
    model = torchvision.models.resnet18().float()
    twin = copy.deepcopy(model)
    layer = MisConv2d.from_conv(model.conv1, norm=model.bn1, activation=model.relu)
    x = torch.randn(4, 3, 64, 64, dtype=torch.float32)
    torch.testing.assert_close(layer(MFA.point(x)), twin.relu(twin.bn1(twin.conv1(x))), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.bn1.running_var, twin.bn1.running_var, rtol=1e-5, atol=1e-6)
    assert model.bn1.num_batches_tracked == twin.bn1.num_batches_tracked == 1
    model.load_state_dict(twin.state_dict())
    model.eval()
    twin.eval()
    layer.eval()
    assert same(layer(MFA.point(x)), twin.relu(twin.bn1(twin.conv1(x))))


def test_frozen_batch_norm_of_torchvision() -> None:
    norm = torchvision.ops.FrozenBatchNorm2d(5)
    norm.running_var.uniform_(0.5, 2)
    norm.weight.normal_()
    layer, x = MisConv2d(2, 5, 3, norm=norm), torch.randn(2, 2, 6, 6)
    plain = norm(nn.functional.conv2d(x, layer.weight, layer.bias)).relu()
    assert torch.equal(layer(MFA.point(x)), plain)
    p = random_mfa(2, 2, 2, (2, 6, 6))
    same = nn.BatchNorm2d(5).eval()
    same.load_state_dict(norm.state_dict(), strict=False)
    close(layer(p), MisConv2d.from_conv(as_conv(layer), norm=same)(p))


def as_conv(layer: nn.Conv2d) -> nn.Conv2d:
    conv = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size)
    conv.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    return conv


@pytest.mark.parametrize("training", [True, False])
def test_normalized_expectation_equals_monte_carlo(training: bool) -> None:
    observed = torch.rand(4, 1, 6, 6) < 0.5
    p, norm = random_mfa(4, 2, 2, (2, 6, 6), observed), trained_norm(3)
    layer = MisConv2d(2, 3, 3, norm=norm, activation="relu").train(training)
    twin = copy.deepcopy(norm)
    exact = layer(p).detach()
    count = 40_000
    with torch.no_grad():
        drawn = p.sample(count).flatten(0, 1)  # (S·B, C, H, W)
        values = torch.relu(twin(nn.functional.conv2d(drawn, layer.weight, layer.bias))).view(count, *exact.shape)
    # The standard error from the exact second moment, for a sample knows none of the events it has not met.
    twin = copy.deepcopy(norm).train(training)
    mean, variance = conv2d_moments(p, layer.weight.detach(), layer.bias)
    parameters = (twin.running_mean, twin.running_var, twin.weight, twin.bias)
    m, v = batch_norm_moments(mean, variance, p.weights, *parameters, training=training)
    second = integrate(lambda x: x.relu().square(), m, v, kinks=(0,)).to(m.dtype)
    second = torch.einsum("bk,bkohw->bohw", p.weights, second)
    error = ((second - exact.square()).clamp_min(0) / count).sqrt()
    # In training the statistics of the sampled batch are themselves uncertain, by a few parts in a thousand.
    slack = 0.01 if training else tolerance("closed")
    assert ((values.mean(0) - exact).abs() <= 5 * error + slack).all()


def test_running_statistics() -> None:
    p = random_mfa(3, 2, 2, (2, 5, 5))
    for momentum, tracked, counted in ((0.1, True, True), (None, True, True), (0.1, False, True), (0.1, True, False)):
        norm = nn.BatchNorm2d(4, momentum=momentum, track_running_stats=tracked)
        if not counted:
            norm.num_batches_tracked = None
        layer = MisConv2d(2, 4, 3, norm=norm)
        layer(p)
        first = None if norm.running_mean is None else norm.running_mean.clone()
        layer(p)
        if not tracked:
            assert norm.running_mean is None
            layer.eval()  # batch statistics, as nn.BatchNorm2d without running ones
            assert layer(p).isfinite().all()
            continue
        assert norm.num_batches_tracked == (2 if counted else None)
        assert first is not None
        assert norm.running_mean is not None
        factor = 1.0 if momentum is None else 1.9  # averaging the same batch changes nothing; two steps of a tenth
        close(norm.running_mean, factor * first)
        layer.eval()
        before = norm.running_mean.clone()
        layer(p)
        assert torch.equal(norm.running_mean, before)


def test_state_dict_names_and_gradients() -> None:
    layer = MisConv2d(3, 4, 3, norm=nn.BatchNorm2d(4), activation=nn.PReLU(4))
    names = set(layer.state_dict())
    assert {"weight", "bias", "norm.weight", "norm.running_var", "activation.weight"} <= names
    observed = torch.rand(2, 1, 6, 6) < 0.5
    p = random_mfa(2, 2, 2, (3, 6, 6), observed)
    for value in (p.logits, p.means, p.factors, p.noise):
        value.requires_grad_()
    layer(p).square().sum().backward()
    for value in (*layer.parameters(), p.logits, p.means, p.factors, p.noise):
        assert value.grad is not None
        assert value.grad.isfinite().all()
        assert value.grad.abs().sum() > 0


def test_from_conv_shares_parameters_and_copies_arguments() -> None:
    conv = nn.Conv2d(4, 6, 3, 2, 1, 2, 2, bias=False, padding_mode="reflect").eval()
    layer = MisConv2d.from_conv(conv, activation=torch.nn.functional.silu)
    assert layer.weight is conv.weight
    assert layer.bias is None
    assert not layer.training
    x = torch.randn(2, 4, 9, 9)
    assert torch.equal(layer(MFA.point(x)), nn.functional.silu(conv(x)))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(MFA.point(x)), layer(MFA.point(x)))
    assert "6, kernel_size=(3, 3)" in repr(layer)


@pytest.mark.parametrize(("mode", "backend"), [("zeros", "inductor"), ("reflect", "aot_eager")])
def test_compiled_layer_is_the_eager_one(backend: str, mode: str, compiler: None) -> None:
    observed = torch.rand(2, 1, 6, 6) < 0.5
    p = random_mfa(2, 2, 2, (2, 6, 6), observed)
    layer = MisConv2d(2, 3, 3, padding=1, padding_mode=mode, norm=trained_norm(3), activation="relu")
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for training in (True, False):
        layer.train(training)
        twin.train(training)
        close(compiled(p), twin(p))
        for value in (layer, twin):
            value.zero_grad()
        compiled(p).square().sum().backward()
        twin(p).square().sum().backward()
        close(layer.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("activation", ["silu", "elu", "hardswish", "mish", "gelu_tanh"])
def test_other_activations_compile(activation: str) -> None:
    """By themselves; the layer around them is the same for all, and compiles above."""
    mean, variance = torch.randn(2, 2, 3, 6, 6), torch.rand(2, 2, 3, 6, 6)
    torch.compiler.reset()
    compiled = torch.compile(expected_activation, fullgraph=True, backend="aot_eager")
    close(compiled(activation, mean, variance), expected_activation(activation, mean, variance))


def test_partial_layer_is_the_function() -> None:
    x, observed = torch.randn(2, 4, 7, 7), torch.rand(2, 1, 7, 7) < 0.5
    layer = PartialConv2d(4, 6, 3, stride=2, padding=1, groups=2)
    result, some = layer(x, observed, return_observed=True)
    expected = partial_conv2d(x, observed, layer.weight, layer.bias, 2, 1, 1, 2)
    assert torch.equal(result, expected)
    assert some.dtype == torch.bool
    assert torch.equal(layer(x, observed), result)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"activation": "rleu"}, ValueError, "activation must be one of .*, got 'rleu'"),
        ({"activation": nn.GLU(1)}, ValueError, "activation must be a pointwise function that keeps the shape, but it turned"),
        ({"activation": nn.Softmax(1)}, ValueError, "activation must be pointwise and deterministic, but its result at one place"),
        ({"activation": nn.Dropout(0.5)}, ValueError, "activation must be pointwise and deterministic"),
        ({"activation": nn.PReLU(3)}, ValueError, "activation must have 1 or 4 slopes, got PReLU"),
        ({"activation": 1.0}, TypeError, "activation must be a name, an nn.Module or a function, got 1.0"),
        ({"norm": nn.GroupNorm(2, 4)}, TypeError, "norm must be nn.BatchNorm2d, .*, got GroupNorm"),
        ({"norm": nn.InstanceNorm2d(4)}, TypeError, "norm must be nn.BatchNorm2d, .*, got InstanceNorm2d"),
        ({"norm": nn.BatchNorm2d(5)}, ValueError, "norm must normalize the 4 output channels of the convolution, got BatchNorm2d"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MisConv2d(3, 4, 3, **arguments)


@pytest.mark.parametrize("layer", [MisConv2d, PartialConv2d])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"in_channels": 0}, ValueError, "in_channels must be an integer of at least 1, got 0"),
        ({"out_channels": 2.0}, ValueError, "out_channels must be an integer of at least 1, got 2.0"),
        ({"kernel_size": (3, 0)}, ValueError, r"kernel_size must be an integer of at least 1 or a pair of them, got \(3, 0\)"),
        ({"kernel_size": 2**30}, ValueError, "kernel_size must leave weights that fit into memory, got"),
        ({"groups": 2}, ValueError, "groups must be a divisor of in_channels, 3, got 2"),
        ({"stride": 2, "padding": "same"}, ValueError, "padding must not be 'same' where stride is not 1"),
        ({"padding": "full"}, ValueError, "padding must be a number, a pair, 'same' or 'valid', got 'full'"),
        ({"padding_mode": "mirror"}, ValueError, "padding_mode must be zeros"),
        ({"bias": None}, TypeError, "bias must be True or False, got None"),
        ({"dtype": torch.int64}, TypeError, "dtype must be a floating-point torch.dtype, got torch.int64"),
        ({"device": "gpu"}, ValueError, "device must be a torch.device or its name, got 'gpu'"),
    ],
)  # fmt: skip
def test_bad_arguments_of_a_convolution(
    layer: type[nn.Module], arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        layer(**{"in_channels": 3, "out_channels": 4, "kernel_size": 3, **arguments})


def test_everything_is_on_one_device() -> None:
    p, layer = random_mfa(1, 1, 1, (3, 5, 5)), MisConv2d(3, 4, 3, norm=nn.BatchNorm2d(4), activation=nn.PReLU(4))
    with pytest.raises(ValueError, match="weight must be on the device of the images, .*, got a .* on meta"):
        copy.deepcopy(layer).to("meta")(p)
    for training in (True, False):
        other = copy.deepcopy(layer).train(training)
        other.norm.to("meta")
        with pytest.raises(ValueError, match="norm must be on the device of weight, .*, got a .* on meta"):
            other(p)
        other = copy.deepcopy(layer).train(training)
        other.activation.to("meta")
        with pytest.raises(ValueError, match="activation must be on the device of the responses, .*, got a .* on meta"):
            other(p)
    layer.norm.half()
    with pytest.raises(ValueError, match="norm must have the dtype of weight, .*, got a float16"):
        layer(p)


def test_bad_convolutions_and_inputs() -> None:
    with pytest.raises(TypeError, match="conv must be a torch.nn.Conv2d, got Linear"):
        MisConv2d.from_conv(nn.Linear(3, 4))
    with pytest.raises(TypeError, match="conv must be a torch.nn.Conv2d, got MisConv2d"):
        MisConv2d.from_conv(MisConv2d(3, 4, 3))
    with pytest.raises(ValueError, match="padding_mode must be zeros, for a partial convolution leaves out"):
        PartialConv2d(3, 4, 3, padding=1, padding_mode="reflect")
    with pytest.raises(TypeError, match="p must be a misconv.MFA"):
        MisConv2d(3, 4, 3)(torch.zeros(1, 3, 5, 5))
    with pytest.raises(ValueError, match="weight must have C/groups = 1/1 input channels to fit images of 1 channels"):
        MisConv2d(3, 4, 3)(random_mfa(1, 1, 1, (1, 5, 5)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("spread", [0.0, 1e-12, 1.0])
@pytest.mark.parametrize("level", [0.0, 50.0])
@pytest.mark.parametrize("activation", ["relu", "elu", "gelu", "silu", "hardswish", "mish"])
def test_gradients_are_finite_where_nothing_varies(
    activation: str, level: float, spread: float, autocast: bool
) -> None:
    """σ = 0 and d = 0 in missing pixels, responses fifty deviations from zero, in float32 and under autocast."""
    observed = torch.rand(2, 1, 6, 6) < 0.5
    p = random_mfa(2, 2, 2, (2, 6, 6), observed).to(torch.float32)
    means = torch.full_like(p.means, level)
    p = MFA(p.logits, means, spread * p.factors, spread**2 * p.noise, observed)
    for value in (p.logits, p.means, p.factors, p.noise):
        value.requires_grad_()
    layer = MisConv2d(2, 4, 3, padding=1, norm=nn.BatchNorm2d(4), activation=activation).float()
    with torch.autocast(p.device.type, dtype=torch.bfloat16, enabled=autocast):
        result = layer(p)
    result.float().square().sum().backward()
    assert result.isfinite().all()
    for value in (*layer.parameters(), p.logits, p.means, p.factors, p.noise):
        assert value.grad is not None
        assert value.grad.isfinite().all()


class Density(nn.Module):
    """The smallest density there is: every pixel has the same learned mean and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, observed: Tensor) -> MFA:
        means = self.mean.expand(x.shape).unsqueeze(1)
        factors, noise = x.new_zeros(len(x), 1, 0, *x.shape[1:]), self.noise.expand(x.shape).unsqueeze(1)
        return MFA(x.new_zeros(len(x), 1), means, factors, noise, check=False).fix(x, observed)


def test_an_mfa_goes_into_and_comes_out_of_distributed_data_parallel() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        density, layer = Density(), MisConv2d(2, 3, 3)
        twins = copy.deepcopy(density), copy.deepcopy(layer)
        x, observed = torch.randn(2, 2, 6, 6), torch.rand(2, 1, 6, 6) < 0.5
        # Looking for unused parameters makes it search the MFA for the graphs of its tensors.
        outer = nn.parallel.DistributedDataParallel(density, find_unused_parameters=True)
        inner = nn.parallel.DistributedDataParallel(layer)
        for first, second in ((outer, inner), twins):
            second(first(x, observed)).square().sum().backward()
        for module, twin in zip((density, layer), twins, strict=True):
            for value, other in zip(module.parameters(), twin.parameters(), strict=True):
                assert value.grad is not None
                close(value.grad, other.grad)
    finally:
        dist.destroy_process_group()


# Statistics over processes -----------------------------------------------------------------------------------------


def normalize_share(rank: int, folder: Path) -> None:
    """One process of a group: its share of the images goes through the layer; what comes of it is saved."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    images, state, momentum = torch.load(folder / "case.pt", map_location="cpu")
    layer = MisConv2d(2, 4, 3, norm=nn.SyncBatchNorm(4, momentum=momentum))
    layer.load_state_dict(state)
    share = slice(0, 2) if rank == 0 else slice(2, 5)
    parts = [t[share].clone().requires_grad_() for t in images[:4]]
    results = []
    for _ in range(2):
        result = layer(MFA(*parts, images[4][share]))
        results.append(result.detach())
    weights = images[5][share]
    (result * weights).sum().backward()
    layer.eval()
    results.append(layer(MFA(*parts, images[4][share])).detach())  # no process waits for another
    gradients = [t.grad for t in (*parts, *layer.parameters())]
    torch.save((results, gradients, layer.norm.state_dict()), folder / f"{rank}.pt")
    del result  # its graph knows the group, whose threads must not outlive Python
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize(("momentum", "components"), [(0.3, 1), (None, 2)])
def test_two_processes_normalize_as_one(tmp_path: Path, momentum: float | None, components: int) -> None:
    """Two and three images, against five in one process with an ordinary BatchNorm2d: values, gradients, statistics."""
    p = random_mfa(5, components, 2, (2, 6, 6), torch.rand(5, 1, 6, 6) < 0.5)
    norm = trained_norm(4)
    norm.momentum = momentum
    layer = MisConv2d(2, 4, 3, norm=norm)
    direction = torch.randn(5, 4, 4, 4)
    tensors = (p.logits, p.means, p.factors, p.noise, p.observed, direction)
    torch.save((tensors, layer.state_dict(), momentum), tmp_path / "case.pt")
    run_two(normalize_share, tmp_path)
    leaves = [t.requires_grad_() for t in (p.logits, p.means, p.factors, p.noise)]
    results = [layer(p) for _ in range(2)]
    (results[-1] * direction).sum().backward()
    layer.eval()
    results.append(layer(p))
    # The processes computed on the CPU.
    halves = [torch.load(tmp_path / f"{rank}.pt", map_location=torch.get_default_device()) for rank in (0, 1)]
    for whole, *parts in zip(results, *(half[0] for half in halves), strict=True):
        close(torch.cat(parts), whole.detach())
    for value, *parts in zip(leaves, *(half[1][:4] for half in halves), strict=True):
        close(torch.cat(parts), value.grad)
    for value, *parts in zip(layer.parameters(), *(half[1][4:] for half in halves), strict=True):
        close(sum(parts), value.grad)
    for half in halves:
        for name, value in norm.state_dict().items():
            close(half[2][name], value)


def test_without_a_group_statistics_over_processes_are_those_of_one() -> None:
    observed = torch.rand(4, 1, 6, 6) < 0.5
    p, layer = random_mfa(4, 2, 2, (2, 6, 6), observed), MisConv2d(2, 4, 3, norm=trained_norm(4))
    twin = MisConv2d(2, 4, 3, norm=nn.SyncBatchNorm(4))
    twin.load_state_dict(layer.state_dict())
    single = copy.deepcopy(twin)
    expected = layer(p)
    assert torch.equal(twin(p), expected)
    assert torch.equal(twin.norm.running_var, layer.norm.running_var)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert torch.equal(single(p), expected)
    finally:
        dist.destroy_process_group()
    x = torch.randn(2, 2, 6, 6)  # torch's own refuses the CPU in training, not in evaluation
    plain = torch.relu(twin.eval().norm(nn.functional.conv2d(x, twin.weight, twin.bias)))
    assert torch.equal(twin(MFA.point(x)), plain)


def test_statistics_that_are_not_tracked_stay() -> None:
    norm = trained_norm(4)
    norm.track_running_stats = False
    before = copy.deepcopy(norm.state_dict())
    p, layer = random_mfa(2, 1, 1, (2, 5, 5)), MisConv2d(2, 4, 3, norm=norm)
    layer(p)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


# Convolutions and normalizations of other classes ------------------------------------------------------------------


class Scaled(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


class Renamed(nn.Conv2d):
    """A subclass that computes what its parent does."""


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: 2 * output)
    return module


def with_own_forward(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("conv", "error", "message"),
    [
        (lambda: StdConv2d(3, 4, 3), TypeError, "conv must compute what nn.Conv2d does, and this StdConv2d has a forward of its own; misconv.convert follows"),
        (lambda: Conv2dSame(3, 4, 3), TypeError, "this Conv2dSame has a forward of its own"),
        (lambda: Scaled(3, 4, 3), TypeError, "this Scaled has a _conv_forward of its own"),
        (lambda: with_own_forward(nn.Conv2d(3, 4, 3)), TypeError, "this Conv2d has a forward of its own"),
        (lambda: with_hook(nn.Conv2d(3, 4, 3)), ValueError, "conv must have no hooks, for the layer never calls it, got the hooks with_hook.<locals>.<lambda>"),
        (lambda: nn.LazyConv2d(4, 3), ValueError, "conv must have its parameters, call it once before, got LazyConv2d"),
        (lambda: nn.ConvTranspose2d(3, 4, 3), TypeError, "conv must be a torch.nn.Conv2d, got ConvTranspose2d"),
    ],
)  # fmt: skip
def test_convolutions_that_compute_something_else(conv: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MisConv2d.from_conv(conv())  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda conv: parametrizations.weight_norm(parametrizations.weight_norm(conv), "bias", dim=None),
        lambda conv: prune.random_unstructured(conv, "weight", 0.5),
        lambda conv: prune.random_unstructured(prune.l1_unstructured(conv, "weight", 3), "weight", 0.5),
        lambda conv: prune.random_unstructured(conv, "bias", 2),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
    ],
)
def test_computed_weights_are_computed_and_learned(change: object, training: bool) -> None:
    conv = change(Renamed(3, 4, 3, padding=1)).train(training)  # type: ignore[operator]
    buffers = copy.deepcopy(dict(conv.named_buffers()))
    layer = MisConv2d.from_conv(conv, activation=nn.GELU())
    assert {id(t) for t in layer.parameters()} == {id(t) for t in conv.parameters()}
    assert list(layer.state_dict()) == list(conv.state_dict())
    x = torch.randn(2, 3, 7, 7)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    for _ in range(2):
        results = []
        for run in (lambda: layer(MFA.point(x)), lambda: nn.functional.gelu(conv(x))):
            conv.load_state_dict(conv.state_dict() | buffers)  # spectral norm takes a step at every call
            result = run()
            results.append((result, *torch.autograd.grad(result.square().sum(), list(conv.parameters()))))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        for value, gradient in zip(conv.parameters(), results[0][1:], strict=True):
            value.grad = gradient
        optimizer.step()


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


class FrozenBatchNorm2d(torchvision.ops.FrozenBatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class RenamedNorm(nn.BatchNorm2d):
    """A subclass that computes what its parent does."""


@pytest.mark.parametrize(
    ("norm", "error", "message"),
    [
        (lambda: OwnNorm(4), TypeError, "norm must compute what nn.BatchNorm2d does, and this OwnNorm has a forward of its own"),
        (lambda: BatchNormAct2d(4), TypeError, "norm must compute what nn.BatchNorm2d does, and this BatchNormAct2d has a forward"),
        (lambda: with_own_forward(nn.BatchNorm2d(4)), TypeError, "this BatchNorm2d has a forward of its own"),
        (lambda: with_hook(nn.BatchNorm2d(4)), ValueError, "norm must have no hooks, for the layer never calls it"),
        (lambda: nn.LazyBatchNorm2d(), ValueError, "norm must have its parameters, call it once before, got LazyBatchNorm2d"),
        (lambda: FrozenBatchNorm2d(4), TypeError, "norm must be .x - running_mean. .*, but it computes something else"),
        (lambda: nn.BatchNorm3d(4), TypeError, "norm must be nn.BatchNorm2d, nn.SyncBatchNorm, a FrozenBatchNorm2d or None"),
        (lambda: 3, TypeError, "norm must be nn.BatchNorm2d, .*, got 3"),
    ],
)  # fmt: skip
def test_normalizations_that_compute_something_else(norm: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MisConv2d(3, 4, 3, norm=norm())  # type: ignore[operator]


def test_subclasses_that_compute_the_same() -> None:
    conv, norm, x = Renamed(3, 4, 3), RenamedNorm(4).eval(), torch.randn(2, 3, 6, 6)
    assert torch.equal(MisConv2d.from_conv(conv, norm=norm)(MFA.point(x)), torch.relu(norm(conv(x))))


class TwoSlopes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * (0.1 if self.training else 0.3)


def test_activations_follow_the_mode_of_the_layer() -> None:
    p, layer = random_mfa(2, 1, 1, (2, 5, 5)), MisConv2d(2, 4, 3, activation=TwoSlopes())
    training = layer(p)
    close(3 * training, layer.eval()(p))
    assert not torch.equal(training, layer(p))


def test_random_activations_are_refused_in_the_mode_in_which_they_are_random() -> None:
    with pytest.raises(ValueError, match="activation must be pointwise and deterministic"):
        MisConv2d(2, 4, 3, activation=nn.Dropout(0.5).eval())  # it would be random as soon as the layer trains
    with pytest.raises(ValueError, match="activation must have no hooks"):
        MisConv2d(2, 4, 3, activation=with_hook(nn.ReLU()))
    p, layer = random_mfa(2, 1, 1, (2, 5, 5)), MisConv2d(2, 4, 3, activation=nn.RReLU(0.1, 0.3))
    with pytest.raises(ValueError, match="activation must be deterministic, and RReLU is random in training"):
        layer(p)
    slope = MisConv2d.from_conv(as_conv(layer), activation=nn.LeakyReLU(0.2))
    close(layer.eval()(p), slope(p))
