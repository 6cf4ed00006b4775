from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, distributed, nn

import misconv
from misconv import MFA, ConvDMFA
from misconv.convert import Converted, convert
from misconv.functional import expected_activation
from tests.processes import run_two
from tests.reference import random_mfa, same

NAN = float("nan")


class Functional(nn.Module):
    """A small network whose stem is written with functions."""

    def __init__(self, activation: Callable[[Tensor], Tensor], norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.activation = activation
        self.head = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.activation(self.bn(self.conv(x)))).mean((2, 3))


class Forward(nn.Module):
    """A network with a forward of the test's own."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Swish(nn.Module):
    """An activation that torch has no single function for."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)


def sequence(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 4, 3), nn.Flatten())


def trained(model: nn.Module) -> nn.Module:
    """Batch normalizations that have seen something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                module.weight.normal_()
    return model


def incomplete(batch: int = 2, side: int = 16, channels: int = 3) -> tuple[Tensor, Tensor]:
    x, observed = torch.rand(batch, channels, side, side), torch.rand(batch, 1, side, side) < 0.6
    return x, observed


def small_density(channels: int = 3, components: int = 2) -> ConvDMFA:
    density = ConvDMFA(channels=channels, components=components, rank=2, widths=(4, 8), depths=(1, 1, 1))
    return density.eval()


def test_the_public_name() -> None:
    net = convert(Functional(F.relu), small_density())
    assert isinstance(net, Converted)
    assert repr(net).startswith("Converted(\n  stem: conv → bn → relu() in forward")


# Stems ---------------------------------------------------------------------------------------------------------------

STEMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "conv relu": (lambda: sequence(nn.ReLU(inplace=True)), "0 → 1"),
    "conv bn relu": (lambda: sequence(nn.BatchNorm2d(8), nn.ReLU()), "0 → 1 → 2"),
    "conv bn silu": (lambda: sequence(nn.BatchNorm2d(8), nn.SiLU(inplace=True)), "0 → 1 → 2"),
    "conv bn hardswish": (lambda: sequence(nn.BatchNorm2d(8), nn.Hardswish(inplace=True)), "0 → 1 → 2"),
    "conv identity bn gelu": (lambda: sequence(nn.Identity(), nn.BatchNorm2d(8), nn.GELU()), "0 → 2 → 3"),
    "conv leaky": (lambda: sequence(nn.LeakyReLU(0.3, inplace=True)), "0 → 1"),
    "conv prelu": (lambda: sequence(nn.PReLU(8)), "0 → 1"),
    "conv elu": (lambda: sequence(nn.ELU(0.7)), "0 → 1"),
    "conv relu6": (lambda: sequence(nn.ReLU6()), "0 → 1"),
    "conv softplus": (lambda: sequence(nn.Softplus(2.0)), "0 → 1"),
    "conv mish": (lambda: sequence(nn.Mish()), "0 → 1"),
    "conv frozen relu": (lambda: sequence(torchvision.ops.FrozenBatchNorm2d(8), nn.ReLU()), "0 → 1 → 2"),
    "F.relu": (lambda: Functional(F.relu), "conv → bn → relu() in forward"),
    "F.relu inplace": (lambda: Functional(lambda x: F.relu(x, inplace=True)), "conv → bn → relu() in forward"),
    "torch.relu": (lambda: Functional(torch.relu, norm=False), "conv → relu() in forward"),
    "x.relu": (lambda: Functional(lambda x: x.relu()), "conv → bn → relu() in forward"),
    "x.relu_": (lambda: Functional(lambda x: x.relu_()), "conv → bn → relu() in forward"),
    "F.silu": (lambda: Functional(F.silu), "conv → bn → silu() in forward"),
    "F.gelu tanh": (lambda: Functional(lambda x: F.gelu(x, approximate="tanh")), "conv → bn → gelu() in forward"),
    "F.leaky_relu": (lambda: Functional(lambda x: F.leaky_relu(x, 0.2)), "conv → bn → leaky_relu() in forward"),
    "F.elu": (lambda: Functional(lambda x: F.elu(x, alpha=0.5)), "conv → bn → elu() in forward"),
    "tanh": (lambda: Functional(torch.tanh), "conv → bn → tanh() in forward"),
    "reflect": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU()), "0 → 1"),
    "circular": (lambda: nn.Sequential(nn.Conv2d(3, 4, 5, padding=2, padding_mode="circular"), nn.ELU()), "0 → 1"),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3, dilation=2, bias=False), nn.ReLU()), "0 → 1"),
    "uneven zeros": (
        lambda: Forward(lambda m, x: m.conv(F.pad(x, (0, 1, 2, 1))).relu(), conv=nn.Conv2d(3, 4, 3, stride=2)),
        "conv → relu() in forward",
    ),
    "to and contiguous": (
        lambda: Forward(lambda m, x: m.conv(x.contiguous().to(x.dtype)).relu(), conv=nn.Conv2d(3, 4, 3)),
        "conv → relu() in forward",
    ),
    "dictionary": (
        lambda: Forward(lambda m, x: {"out": m.conv(x).relu(), "size": x.shape[-2:]}, conv=nn.Conv2d(3, 4, 3)),
        "conv → relu() in forward",
    ),
}


def output(result: Any) -> Tensor:
    chosen = result["out"] if isinstance(result, dict) else result
    assert isinstance(chosen, Tensor)
    return chosen


@pytest.mark.parametrize("name", STEMS)
def test_every_kind_of_stem(name: str) -> None:
    make, found = STEMS[name]
    model = trained(make()).eval()
    net = convert(model, small_density())
    assert str(net.stem) == found
    assert set(net.network.state_dict()) == set(model.state_dict())
    x, observed = incomplete()
    assert torch.equal(output(net(x)), output(model(x)))  # nothing missing
    assert torch.equal(output(net.network(x)), output(model(x)))
    net.train()
    x = x.masked_fill(~observed, NAN).requires_grad_()
    result = output(net(x))
    result.square().sum().backward()
    assert result.isfinite().all()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize("name", [name for name in STEMS if name != "dictionary"])
def test_the_stem_expects_what_monte_carlo_finds(name: str) -> None:
    """The mean over completions of everything up to the activation, by a hook on a network that ends there."""
    model = trained(STEMS[name][0]()).eval()
    seen: list[Tensor] = []
    net = convert(model)
    observed = torch.rand(1, 1, 8, 8) < 0.5
    p = random_mfa(1, 2, 2, (3, 8, 8), observed)
    # The next reader of the activation is a convolution, or nobody.
    head = next((m for m in list(net.network.modules())[2:] if isinstance(m, nn.Conv2d)), None)
    if head is not None:
        head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    count = 5_000
    with torch.no_grad():
        exact = net(p) if head is None else (net(p), seen.pop())[1]
        drawn = p.sample(count).flatten(0, 1)  # (S·B, C, H, W)
        values = net.network(drawn) if head is None else (net.network(drawn), seen.pop())[1]
    error = values.std(0) / count**0.5
    assert ((values.mean(0) - exact[0]).abs() <= 5 * error + 2e-3).all()


def test_a_custom_activation_is_named_by_the_user() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Swish(), nn.Conv2d(8, 2, 3)).eval()
    with pytest.warns(UserWarning, match="If an activation of your own follows, name the parts: stem=\\('0', "):
        convert(model)
    net = convert(model, stem=("0", "1", "2"))
    assert str(net.stem) == "0 → 1 → 2"
    assert set(net.network.state_dict()) == set(model.state_dict())
    with torch.no_grad():
        model[2].slope.fill_(1.0)
        net.network.load_state_dict(model.state_dict())
    p = random_mfa(2, 2, 2, (3, 8, 8))
    same = nn.Sequential(*model[:2], nn.SiLU(), *model[3:])
    torch.testing.assert_close(net(p), convert(same)(p), rtol=1e-4, atol=1e-4)
    moments = torch.randn(2, 8, 4, 4), torch.rand(2, 8, 4, 4)
    compiled = torch.compile(expected_activation, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(model[2], *moments), expected_activation(model[2], *moments))


def test_the_convolution_alone() -> None:
    """Named alone, it is replaced alone: the expected response, which is that of the mean image."""
    model = sequence(nn.BatchNorm2d(8), nn.ReLU()).eval()
    p = random_mfa(2, 2, 2, (3, 8, 8))
    net = convert(model, stem="0")
    assert str(net.stem) == "0"
    torch.testing.assert_close(net(p), model(p.mean))
    assert str(convert(model, stem=("0", "1")).stem) == "0 → 1"


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Flatten(2)],
        [nn.GroupNorm(2, 8), nn.ReLU()],
        [nn.MaxPool2d(2), nn.ReLU()],
        [nn.Dropout(0.5), nn.ReLU()],
        [],
    ],
)
def test_a_linear_stem_is_told_once(layers: list[nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), *layers).eval().to(torch.get_default_dtype())
    with pytest.warns(
        UserWarning, match="linear, and the expectation of a linear stem equals imputing the mean"
    ) as told:
        net = convert(model, small_density())
    assert len(told) == 1
    p = random_mfa(2, 2, 2, (3, 16, 16))
    torch.testing.assert_close(net(p), model(p.mean))
    assert net.train()(p).isfinite().all()


def test_other_readers_of_the_image_are_told() -> None:
    model = Forward(lambda m, x: m.conv(x).relu() + x, conv=nn.Conv2d(3, 3, 3, padding=1))
    with pytest.warns(UserWarning, match=r"also read by add\(\) in 'forward'"):
        net = convert(model, small_density())
    assert net(incomplete()[0]).shape == (2, 3, 16, 16)


# Torchvision ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize(
    ("name", "side", "stem"),
    [
        ("resnet18", 64, "conv1 → bn1 → relu"),
        ("mobilenet_v3_small", 64, "features.0.0 → features.0.1 → features.0.2"),
        ("efficientnet_b0", 64, "features.0.0 → features.0.1 → features.0.2"),
        ("squeezenet1_1", 64, "features.0 → features.1"),
        ("shufflenet_v2_x0_5", 64, "conv1.0 → conv1.1 → conv1.2"),
    ],
)
def test_torchvision(name: str, side: int, stem: str) -> None:
    model = torchvision.models.get_model(name, num_classes=10).float()
    before = copy.deepcopy(model.state_dict())
    net = convert(model, small_density().float())
    assert str(net.stem) == stem
    assert list(net.network.state_dict()) == list(model.state_dict())
    assert model.training
    assert net.training
    assert all(module.training for module in net.network.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(torch.equal(before[key], value) for key, value in net.network.state_dict().items())
    x = torch.rand(4, 3, side, side, dtype=torch.float32)
    if name not in ("mobilenet_v3_small", "squeezenet1_1"):  # those draw dropout masks
        torch.manual_seed(1)
        ours = net(x)
        torch.manual_seed(1)
        torch.testing.assert_close(ours, model(x), rtol=1e-4, atol=1e-5)
    net.eval()
    net.network.load_state_dict(model.state_dict())
    assert same(net(x), model.eval()(x))
    x[:, :, 10:30] = NAN
    assert net(x).isfinite().all()


def test_a_patch_embedding() -> None:
    model = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=3).eval()
    nn.init.normal_(model.heads.head.weight)
    with pytest.warns(UserWarning, match="linear"):
        net = convert(model, small_density())
    assert str(net.stem) == "conv_proj"
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(net(x), model(x))


def test_attention_takes_its_fast_path_as_before(request: pytest.FixtureRequest) -> None:
    """It rounds differently, and is left as soon as anybody watches the functions of torch, as a default device does."""
    model = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=3).eval().float()
    nn.init.normal_(model.heads.head.weight)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float32)
    request.getfixturevalue("without_default_device")  # from here on: the tensors above are where the others are
    net = convert(model, stem="conv_proj")
    # A fused kernel would round the first convolution in its own way; without it a GPU has the same bits too.
    with torch.no_grad(), contextlib.nullcontext() if x.device.type == "cpu" else misconv.plain():
        assert torch.equal(net(x), model(x))
    assert torch._C._len_torch_function_stack() == 0
    assert not torch.overrides.has_torch_function((x,))


# A module like any other ---------------------------------------------------------------------------------------------


@pytest.fixture
def net() -> Converted:
    return convert(trained(Functional(F.silu)), small_density()).eval()


def test_three_ways_to_call(net: Converted) -> None:
    x, observed = incomplete()
    assert net.density is not None
    coded = x.masked_fill(~observed, NAN)
    expected = net(net.density(x.where(observed, 0), observed))
    assert torch.equal(net(coded), expected)
    assert torch.equal(net(x, observed), expected)
    assert torch.equal(net(coded, observed), expected)


@pytest.mark.parametrize("hidden", [NAN, float("inf"), -1e30, 0.0])
def test_hidden_values_change_no_bit(net: Converted, hidden: float) -> None:
    x, observed = incomplete()
    observed = observed & (torch.rand(2, 3, 16, 16) < 0.8)  # another mask in every channel
    results, gradients = [], []
    for value in (x, torch.where(observed, x, hidden)):
        leaf = value.clone().requires_grad_()
        net.zero_grad()
        results.append(net(leaf, observed))
        results[-1].square().sum().backward()
        gradients.append([leaf.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    assert torch.equal(*results)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_all_and_nothing_missing_and_batches_of_one(net: Converted) -> None:
    x, _ = incomplete(3, 11)
    assert net(torch.full_like(x, NAN)).isfinite().all()
    assert torch.equal(net(x), net.network(x))
    for image in (x, x.masked_fill(torch.rand_like(x) < 0.5, NAN)):
        torch.testing.assert_close(net(image[:1]), net(image)[:1])


def test_without_a_density() -> None:
    model = Functional(F.relu).eval()
    net = convert(model)
    x, observed = incomplete()
    assert torch.equal(net(x), model(x))
    assert net(random_mfa(2, 2, 2, (3, 9, 9))).isfinite().all()
    with pytest.raises(ValueError, match="observed needs a density .* convert\\(model, density\\)"):
        net(x, observed)


def test_nan_without_a_density(values_are_checked: None) -> None:
    with pytest.raises(ValueError, match="x with missing pixels needs a density"):
        convert(Functional(F.relu))(torch.full((1, 3, 8, 8), NAN))


def test_copies_and_state(net: Converted) -> None:
    x, observed = incomplete()
    expected = net(x, observed)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x, observed), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(net(x, observed), expected)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(x, observed), expected)
    again = pickle.loads(pickle.dumps(convert(sequence(nn.ReLU()), small_density())))
    assert again(x, observed).isfinite().all()
    other = net.float()(x.float(), observed)
    torch.testing.assert_close(other.to(expected.dtype), expected, rtol=1e-3, atol=1e-3)


def test_training_reaches_the_density_through_mean_and_variance() -> None:
    net = convert(Functional(F.relu), small_density(), train_density=True)
    x, observed = incomplete()
    net(x, observed).square().sum().backward()
    assert net.density is not None
    for name, parameter in net.density.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
        if name.endswith("weight") and name.split(".")[0] in ("means", "factors", "noise"):
            assert parameter.grad.abs().max() > 0
    frozen = convert(Functional(F.relu), small_density().requires_grad_(False), train_density=True)
    frozen(x, observed).sum().backward()
    assert frozen.network.conv.weight.grad is not None


# The density is frozen ------------------------------------------------------------------------------------------------


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def unchanged(module: nn.Module, before: dict[str, Tensor]) -> list[bool]:
    after = module.state_dict()
    assert after.keys() == before.keys()
    return [torch.equal(after[name], value) for name, value in before.items()]


def fine_tune(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, observed = incomplete(6)
    for _ in range(3):
        net.train()
        optimizer.zero_grad()
        net(x, observed).square().mean().backward()
        optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
}


def normalized_density() -> nn.Module:
    density = small_density().train()
    assert any(isinstance(module, nn.BatchNorm2d) for module in density.modules())
    return density


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fine_tuning_all_parameters_leaves_the_density_as_it_was(optimizer: str) -> None:
    """Every tensor, bit for bit, batch statistics included; the rest learns."""
    density = normalized_density()
    net = convert(Functional(F.relu), density)
    before, rest = tensors(density), tensors(net.network)
    fine_tune(nn.Sequential(net)[0], OPTIMIZERS[optimizer](net.parameters()))
    assert net.density is not None
    assert all(unchanged(net.density, before))
    assert not any(unchanged(net.network, rest))
    assert net.training
    assert not any(module.training for module in net.density.modules())
    # The density that was passed is nobody's business.
    assert all(unchanged(density, before))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in density.parameters())
    assert all(module.training for module in density.modules())
    assert not any(parameter.requires_grad for parameter in net.density.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_density_is_trained_where_that_is_wanted(optimizer: str) -> None:
    density = normalized_density()
    net = convert(Functional(F.relu), density, train_density=True)
    assert net.density is density
    before = tensors(density)
    fine_tune(net, OPTIMIZERS[optimizer](net.parameters()))
    moved = [name for name, same in zip(before, unchanged(density, before), strict=True) if not same]
    assert any("running_mean" in name for name in moved)
    assert {name for name, _ in density.named_parameters()} <= set(moved)


def test_a_frozen_density_stays_frozen_wherever_the_network_goes(tmp_path: Path) -> None:
    """In copies, pickles, files, and as a part of something larger."""
    net = convert(sequence(nn.ReLU()), normalized_density())
    misconv.save(net, tmp_path / "net")
    x, observed = incomplete()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), misconv.load(tmp_path / "net")):
        nn.ModuleList([other]).train().to(x.device)
        assert other.network.training
        assert not any(module.training for module in other.density.modules())
        assert not any(parameter.requires_grad for parameter in other.density.parameters())
        assert torch.equal(other.eval()(x, observed), net.eval()(x, observed))
    misconv.save(convert(sequence(nn.ReLU()), normalized_density(), train_density=True), tmp_path / "trained")
    trained = misconv.load(tmp_path / "trained").train()
    assert all(module.training for module in trained.density.modules())
    assert all(parameter.requires_grad for parameter in trained.density.parameters())


def test_gradients_of_images_go_through_a_frozen_density() -> None:
    x, observed = incomplete()
    slopes = []
    for trained in (False, True):
        torch.manual_seed(5)
        net = convert(Functional(F.relu), small_density(), train_density=trained).eval()
        images = x.clone().requires_grad_()
        slopes.append(torch.autograd.grad(net(images, observed).square().sum(), images)[0])
    assert slopes[0].abs().max() > 0
    torch.testing.assert_close(slopes[0], slopes[1])


def test_a_density_that_cannot_be_copied_and_other_bad_arguments() -> None:
    density = small_density()
    density.lock = threading.Lock()  # type: ignore[assignment]  # which cannot be copied
    with pytest.raises(
        ValueError, match=r"density must be one that copy.deepcopy can copy, .* with train_density=True"
    ):
        convert(Functional(F.relu), density)
    assert convert(Functional(F.relu), density, train_density=True).density is density
    with pytest.raises(TypeError, match="train_density must be True or False, got 1"):
        convert(Functional(F.relu), small_density(), train_density=1)  # type: ignore[arg-type]


def test_batch_statistics_in_training() -> None:
    model = Functional(F.relu)
    net, x = convert(model), torch.rand(8, 3, 16, 16)
    torch.testing.assert_close(net(x), model(x), rtol=1e-5, atol=1e-5)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(net.network.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_the_users_randomness_is_left_alone() -> None:
    model, density = Functional(F.relu), small_density()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    convert(model, density)
    assert torch.equal(torch.rand(4), expected)


def test_hooks_of_the_user_stay() -> None:
    model, calls = Functional(F.relu), []
    model.conv.register_forward_hook(lambda *_: calls.append(1))
    net = convert(model)
    assert len(model.conv._forward_hooks) == len(net.network.conv._forward_hooks) == 1


@pytest.mark.parametrize("training", [False, True])
def test_compiled(net: Converted, training: bool) -> None:
    torch.compiler.reset()
    net.train(training)
    x, observed = incomplete()
    given = (x, observed) if training else (x.masked_fill(~observed, NAN),)
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), twin(*given))
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value)


@pytest.mark.parametrize("model", ["functional", "resnet18"])
def test_exported(model: str) -> None:
    network = Functional(F.silu) if model == "functional" else torchvision.models.resnet18(num_classes=3)
    net = convert(network, small_density()).eval()
    x, observed = incomplete(side=32)
    coded = x.masked_fill(~observed, NAN)
    program = torch.export.export(net, (coded,)).module()
    torch.testing.assert_close(program(coded), net(coded))
    program = torch.export.export(net, (x, observed)).module()
    torch.testing.assert_close(program(x, observed), net(x, observed))


def test_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net = convert(trained(Functional(F.silu)), small_density()).float().eval().cpu()
    x, observed = (t.cpu() for t in incomplete())
    coded = x.float().masked_fill(~observed, NAN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(net, (coded,), tmp_path / "net.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (result,) = session.run(None, {session.get_inputs()[0].name: coded.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), net(coded).cpu(), rtol=1e-4, atol=1e-5)


def gradients_of_half(rank: int, meeting: str, gradients: str) -> None:
    """One of two processes."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    net, (x, observed) = seeded()
    half = slice(2 * rank, 2 * rank + 2)
    wrapped = nn.parallel.DistributedDataParallel(net)  # must outlive the backward pass
    wrapped(x[half], observed[half]).square().mean().backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in net.named_parameters()}, gradients)
    del wrapped
    gc.collect()  # what still knows the group would keep its threads alive beyond the end of Python
    distributed.destroy_process_group()


def seeded() -> tuple[Converted, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return convert(trained(Functional(F.relu)), small_density()).eval(), incomplete(4)


def test_two_processes_have_the_gradients_of_one(tmp_path: Path, dtype: torch.dtype) -> None:
    if dtype != torch.float64 or torch.get_default_device().type != "cpu":
        pytest.skip("gloo, in double precision")
    meeting, gradients = str(tmp_path / "meeting"), str(tmp_path / "gradients.pt")
    run_two(gradients_of_half, meeting, gradients)
    net, (x, observed) = seeded()
    net(x, observed).square().mean().backward()
    found = torch.load(gradients)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_threads_do_not_meet(net: Converted) -> None:
    images = [x.masked_fill(~observed, NAN) for x, observed in (incomplete() for _ in range(8))]
    with torch.no_grad():
        expected = [net(x) for x in images]
    with ThreadPoolExecutor(4) as pool:
        assert all(
            torch.equal(a, b)
            for a, b in zip(pool.map(lambda x: torch.no_grad()(net)(x), images), expected, strict=True)
        )


def test_a_convolution_that_changes_its_weights() -> None:
    """What counts is what a layer calls, not its class: here weights are standardised on every call."""

    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, self.bias, self.stride)

    conv = Standardised(3, 4, 3, stride=2)
    net, p = convert(nn.Sequential(conv, nn.GELU())), random_mfa(2, 2, 2, (3, 8, 8))
    weight = conv.weight - conv.weight.mean((1, 2, 3), keepdim=True)
    wide = MFA(
        p.logits,
        *(F.pad(t.flatten(1, -3), (0, 1, 0, 1)).view(*t.shape[:-2], 9, 9) for t in (p.means, p.factors, p.noise)),
    )
    expected = misconv.functional.expected_conv2d(wide, weight, conv.bias, 2, activation="gelu")
    torch.testing.assert_close(net(p), expected)


def test_channels_last_and_autocast() -> None:
    model = trained(Functional(F.relu)).eval().float()
    net = convert(model, small_density().float()).eval()
    x, observed = incomplete()
    x = x.float()
    expected = net(x, observed)
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last), observed), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast(x.device.type, torch.bfloat16):
        half = net(x, observed)
        assert half.dtype == torch.bfloat16
        assert same(net(x), model(x))
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_converts_networks_in_half_precision(half: torch.dtype) -> None:
    """Their rounding is not taken for something that the network does to its images."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(3)  # of some, one of these: 1.3 % of the largest response, in bfloat16 on a CPU
    network = torchvision.models.resnet18().eval()
    convert(network.to(half).to(memory_format=torch.channels_last))


def test_arguments_of_the_network_are_passed_on() -> None:
    class Scaled(Functional):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    net, (x, observed) = convert(Scaled(F.relu), small_density()).eval(), incomplete()
    torch.testing.assert_close(net(x, observed, scale=2.0), 2 * net(x, observed))


def test_networks_of_one_image_size() -> None:
    images, observed = torch.rand(20, 1, 7, 9), torch.rand(20, 1, 7, 9) < 0.7
    density = misconv.SMFA(components=2, rank=1).fit(images, observed, iterations=2)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(140, 2))
    assert convert(model, density)(images, observed).shape == (20, 2)
    with pytest.raises(ValueError, match="say which: model.image_size = "):
        convert(model)
    model.image_size = (7, 9)
    assert convert(model)(images).shape == (20, 2)


# Refusals ------------------------------------------------------------------------------------------------------------

CONV = {"conv": nn.Conv2d(3, 4, 3, padding=1)}
REFUSED: list[tuple[nn.Module, str]] = [
    (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 3)),
        "model must hold a torch.nn.Conv2d, but there is none in Sequential",
    ),
    (Forward(lambda m, x: x.mean(), **CONV), "must hold a convolution that runs"),
    (
        Forward(lambda m, x: m.conv(x * x).relu(), **CONV),
        r"hand the image to its first convolution, 'conv', as it is or .* but mul\(\) in 'forward' changes it",
    ),
    (
        Forward(lambda m, x: m.conv(x.flip(2)).relu(), **CONV),
        r"flip\(\) in 'forward' changes it before; do that to the images",
    ),
    (
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.ReLU()),
        r"first convolution, '1', .* but batch_norm\(\) in '0'",
    ),
    (
        nn.Sequential(nn.Dropout(0.2), nn.Conv2d(3, 4, 3), nn.ReLU()),
        r"first convolution, '1', .* but dropout\(\) in '0'",
    ),
    (Forward(lambda m, x: (m.conv(x).relu(), m.conv(x).sum()), **CONV), "also read by"),
    (
        Forward(lambda m, x: (lambda y: y.relu() + y)(m.conv(x)), **CONV),
        r"only once, but it is read by relu\(\) in 'forward', add\(\) in 'forward'.*pass stem='conv'",
    ),
    (Forward(lambda m, x: (lambda y: y * y.sigmoid())(m.conv(x)), **CONV), "only once"),
    (Forward(lambda m, x: (lambda y: [y.relu(), y])(m.conv(x)), **CONV), "only once"),
    (Forward(lambda m, x: m.conv(x, 3), **CONV), "must take a batch of images .* as its only argument, but it failed"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED)
def test_refused(model: nn.Module, message: str) -> None:
    with pytest.raises((ValueError, UserWarning), match=message):
        convert(model.to(torch.get_default_dtype()))


@pytest.mark.parametrize(
    ("stem", "message"),
    [
        ("first", "'first' .*is none; they are listed by .* begin with '0', '1', '2'"),
        ("1", "stem must begin with a torch.nn.Conv2d, got '1', BatchNorm2d"),
        ("3", "stem must begin with the convolution that reads the image, '0'"),
        (("0", "2"), "'2' does not receive what '0' returns"),
        (("0", "1", "4"), "'4' does not receive what '1' returns"),
        ((), "stem must be the names"),
        (("0", "1", "2", "3"), "stem must be the names"),
    ],
)
def test_wrong_names(stem: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(sequence(nn.BatchNorm2d(8), nn.ReLU()), stem=stem)


def test_wrong_arguments(net: Converted) -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        convert("resnet18")  # type: ignore[arg-type]  # which is what it refuses
    with pytest.raises(TypeError, match="model is converted already"):
        convert(net)
    with pytest.raises(TypeError, match="density must be a module"):
        convert(Functional(F.relu), 3)  # type: ignore[arg-type]  # likewise
    x, observed = incomplete()
    with pytest.raises(TypeError, match="x must hold floating-point numbers or integers, got a bool tensor"):
        net(x > 0)
    with pytest.raises(
        ValueError, match="x must have the 3 channels that the network reads, got a .* \\(2, 1, 16, 16\\)"
    ):
        net(x[:, :1])
    with pytest.raises(ValueError, match="x must have the 3 channels"):
        net(MFA.point(x[:, :2]))
    with pytest.raises(ValueError, match="observed must have shape"):
        net(x, observed[:1])
    with pytest.raises(TypeError, match="observed must be None where x is an MFA"):
        net(MFA.point(x), observed)
    with pytest.raises(TypeError, match="density must return a misconv.MFA"):
        convert(
            Functional(F.relu),
            nn.Bilinear(1, 1, 1).requires_grad_(False).apply(lambda m: setattr(m, "forward", lambda x, o: x)),
        )(x)


def test_a_network_that_changed_is_noticed(net: Converted) -> None:
    net.network.bn = nn.Identity()
    net.network.activation = torch.tanh
    with pytest.raises(RuntimeError, match="did not run its stem conv → bn → silu"):
        net(incomplete()[0])


def test_saved_and_loaded_like_any_module(tmp_path: Path) -> None:
    """`misconv.save` stores a converted network, and `load` fills one converted alike."""

    def make() -> nn.Module:
        cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
        return misconv.convert(cnn, misconv.ConvDMFA(3, rank=1, widths=(4,), depths=(1,)))

    net, other = make().eval(), make()
    x = torch.rand(2, 3, 8, 8).masked_fill(torch.rand(2, 1, 8, 8) < 0.3, torch.nan)
    misconv.save(net, tmp_path / "net.safetensors")
    misconv.load(tmp_path / "net.safetensors", into=other)
    assert torch.equal(other(x), net(x))
    other.load_state_dict(net.state_dict())
