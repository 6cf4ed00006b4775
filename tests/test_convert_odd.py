"""Networks that do something odd around their stem: right, or refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

import misconv
from misconv import MFA, ConvDMFA, MisConv2d
from misconv.convert import Converted, convert
from tests.processes import run_two
from tests.reference import random_mfa, same


class Net(nn.Module):
    """A network with a forward of the test's own."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.head = nn.Conv2d(4, 2, 3)
        self.scale = nn.Parameter(torch.tensor([0.5, -1.5, 2.0, 1.0]).view(4, 1, 1))
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = forward
        with torch.no_grad():
            self.bn.running_mean.normal_()
            self.bn.running_var.uniform_(0.5, 2)
            self.bn.weight.normal_()
            self.bn.bias.normal_()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def small_density() -> ConvDMFA:
    return ConvDMFA(channels=3, components=2, rank=2, widths=(4, 8), depths=(1, 1, 1)).eval()


def images() -> tuple[Tensor, Tensor]:
    return torch.rand(2, 3, 8, 8), torch.rand(2, 1, 8, 8) < 0.6


def points(batch: int = 2, components: int = 3) -> MFA:
    """A mixture of images that are known exactly: its expectation is a sum."""
    means = torch.rand(batch, components, 3, 8, 8)
    return MFA(
        torch.randn(batch, components), means, torch.zeros(batch, components, 0, 3, 8, 8), torch.zeros_like(means)
    )


def stem_output(net: Converted, p: MFA) -> Tensor:
    _, outputs = net.run_stem(p)
    return outputs[-1][1]


# Between convolution and activation: each with the activation of a complete image.
BETWEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "arithmetic after the norm": lambda m, x: (m.bn(m.conv(x)) * m.scale + 0.3).relu(),
    "arithmetic before the norm": lambda m, x: m.bn(m.conv(x) * 0.5 - 1).relu(),
    "around the norm": lambda m, x: F.silu(2 - m.bn(0.5 * m.conv(x)) / 3),
    "in place": lambda m, x: m.bn(m.conv(x)).mul_(m.scale).add_(0.3).relu_(),
    "in place, statements": lambda m, x: _in_place(m, x),
    "in-place activation, the old name": lambda m, x: _old_name(m, x),
    "no norm": lambda m, x: torch.tanh(m.scale * m.conv(x)),
    "negated": lambda m, x: F.gelu(-m.conv(x)),
    "two norms": lambda m, x: m.bn2(m.bn(m.conv(x))).relu(),
    "copies": lambda m, x: m.bn(m.conv(x).clone()).contiguous(memory_format=torch.channels_last).relu(),
    "cast": lambda m, x: m.bn(m.conv(x)).float().relu().to(x.dtype),
    "sub with alpha": lambda m, x: torch.sub(m.conv(x), m.scale, alpha=2).relu(),
    "functional prelu": lambda m, x: F.prelu(m.conv(x), m.slopes),
    "keyword": lambda m, x: F.relu(input=F.conv2d(input=x, weight=m.conv.weight, bias=m.conv.bias)),
}


def _in_place(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y *= 2
    y -= m.scale
    return y.relu()


def _old_name(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.conv(x))
    F.relu_(y)
    return y * 2 + y


def between(name: str) -> Net:
    net = Net(BETWEEN[name], bn2=nn.BatchNorm2d(4))
    net.bn2.running_mean.normal_()
    net.slopes = nn.Parameter(torch.rand(4))
    return net


@pytest.mark.parametrize("name", BETWEEN)
def test_between_convolution_and_activation(name: str) -> None:
    model = between(name).eval()
    net = convert(model)
    x, _ = images()
    assert same(net(x), model(x))
    p = points()
    values = model(p.means.flatten(0, 1).clone()).unflatten(0, (2, 3))
    expected = (p.weights.view(2, 3, 1, 1, 1) * values).sum(1)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "cast" else {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(net(p), expected, **tolerance)
    if name != "cast":
        torch.testing.assert_close(*against_monte_carlo(net, model), rtol=0.1, atol=0.05)


def against_monte_carlo(net: Converted, model: nn.Module) -> tuple[Tensor, Tensor]:
    p = random_mfa(1, 2, 2, (3, 8, 8), torch.rand(1, 1, 8, 8) < 0.5)
    with torch.no_grad():
        return net(p)[0], model(p.sample(5000).flatten(0, 1)).mean(0)


@pytest.mark.parametrize("name", BETWEEN)
def test_between_them_in_training(name: str) -> None:
    """Complete images: values, running statistics and gradients of the network itself."""
    model = between(name)
    net = convert(model)
    x = torch.rand(4, 3, 8, 8)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if name == "cast" else {"rtol": 1e-8, "atol": 1e-9}
    for run in (net, model):
        run(x).square().sum().backward()
    for (key, mine), (_, theirs) in zip(net.network.named_parameters(), model.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(net.network.state_dict()[key], value, **tolerance)


# Activation checkpoints ----------------------------------------------------------------------------------------------

CHECKPOINTED: dict[str, Callable[[Any, Tensor, bool], Tensor]] = {
    "the stem": lambda m, x, r: m.head(checkpoint(lambda x: m.act(m.bn(m.conv(x))), x, use_reentrant=r)),
    "its end": lambda m, x, r: m.head(checkpoint(lambda y: m.act(m.bn(y)), m.conv(x), use_reentrant=r)),
    "all": lambda m, x, r: checkpoint(lambda x: m.head(m.act(m.bn(m.conv(x)))), x, use_reentrant=r),
    "normalised": lambda m, x, r: m.head(checkpoint(lambda x: m.act(m.bn(m.conv(x * 2 - 1))), x, use_reentrant=r)),
    "the convolution": lambda m, x, r: m.head(m.act(m.bn(checkpoint(m.conv, x, use_reentrant=r)))),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("reentrant", "trained"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_activation_checkpoints(name: str, reentrant: bool, trained: bool, training: bool) -> None:
    """The gradients without a checkpoint, also those of the density.

    A reentrant checkpoint needs an input that requires a gradient, with any network of torch.
    """
    torch.manual_seed(3)
    density = small_density()
    gradients = []
    x, observed = images()
    model = Net(lambda m, x: CHECKPOINTED[name](m, x, reentrant)).train(training)
    twin = copy.deepcopy(model)
    twin.function = {
        "normalised": lambda m, x: m.head(m.act(m.bn(m.conv(x * 2 - 1)))),
    }.get(name, lambda m, x: m.head(m.act(m.bn(m.conv(x)))))
    for network in (model, twin):
        net = convert(network, copy.deepcopy(density), train_density=trained)
        net(x, observed).square().sum().backward()
        gradients.append({key: value.grad for key, value in net.named_parameters()})
    assert any(key.startswith("density") and value is not None for key, value in gradients[1].items()) == trained
    assert gradients[1]["network.conv.weight"] is not None
    for key, value in gradients[1].items():
        if value is None:
            assert gradients[0][key] is None
        else:
            assert gradients[0][key] is not None, key
            torch.testing.assert_close(gradients[0][key], value, rtol=1e-9, atol=1e-10, msg=key)


# What survives the stem ----------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("value",)


def _keeps(m: Any, x: Tensor) -> Tensor:
    m.__dict__["seen"] = m.conv(x)
    return m.head(m.act(m.seen))


def _keeps_in_slot(m: Any, x: Tensor) -> Tensor:
    holder = Slotted()
    holder.value = m.bn(m.conv(x))
    m.__dict__["holder"] = holder
    return m.head(m.act(holder.value))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", ["attribute", "slot", "hook"])
def test_kept_responses_are_told_and_hold_the_mean(way: str, training: bool) -> None:
    kept: list[Tensor] = []
    model = Net({"attribute": _keeps, "slot": _keeps_in_slot}.get(way, lambda m, x: m.head(m.act(m.bn(m.conv(x))))))
    if way == "hook":
        model.conv.register_forward_hook(lambda m, args, result: kept.append(result))
    with pytest.warns(UserWarning, match="keeps what lies between the convolution 'conv' and its activation"):
        net = convert(model.eval())
    net.train(training)
    p = points()
    net(p)
    network = net.network
    found = {"attribute": lambda: network.seen, "slot": lambda: network.holder.value, "hook": lambda: kept[-1]}[way]()
    plain = found.as_subclass(Tensor)
    expected = misconv.functional.expected_conv2d(
        p, network.conv.weight, network.conv.bias, padding=1, activation="identity"
    )
    if way == "slot" and not training:
        expected = network.bn(expected)
    if not (way == "slot" and training):
        torch.testing.assert_close(plain, expected)
    assert plain.isfinite().all()


def test_a_hook_that_comes_later_sees_the_mean() -> None:
    net = convert(Net(lambda m, x: m.head(m.act(m.bn(m.conv(x)))))).eval()
    kept: list[Tensor] = []
    net.network.conv.register_forward_hook(lambda m, args, result: kept.append(result.as_subclass(Tensor)))
    net.network.bn.register_forward_hook(lambda m, args, result: kept.append(result.as_subclass(Tensor)))
    p = points()
    net(p)
    mean = misconv.functional.expected_conv2d(
        p, net.network.conv.weight, net.network.conv.bias, padding=1, activation="identity"
    )
    torch.testing.assert_close(kept[0], mean)
    torch.testing.assert_close(
        kept[1],
        F.batch_norm(
            mean, net.network.bn.running_mean, net.network.bn.running_var, net.network.bn.weight, net.network.bn.bias
        ),
    )


def test_what_is_kept_later_is_nan_and_told() -> None:
    net = convert(Net(lambda m, x: m.head(m.act(m.conv(x))))).eval()
    net.network.function = _keeps
    with pytest.warns(UserWarning, match="which holds NaN"), torch.no_grad():
        net(points())
    assert net.network.seen.as_subclass(Tensor).isnan().all()


def test_what_is_read_later_is_refused() -> None:
    net = convert(Net(lambda m, x: m.head(m.act(m.conv(x))))).eval()
    net.network.function = lambda m, x: (lambda y: m.head(y.square() + m.act(y)))(m.conv(x))
    with pytest.raises(RuntimeError, match=r"square\(\) reads what lies between convolution and activation"):
        net(points())


# Aliases -------------------------------------------------------------------------------------------------------------


def test_the_expectation_goes_to_the_convolution_that_is_reported() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        k = x.clone()
        first = m.conv(k).relu()
        return first + m.second(x).relu()

    model = Net(forward, second=nn.Conv2d(3, 4, 3, padding=1)).eval()
    with pytest.warns(UserWarning, match=r"also read by conv2d\(\) in 'second'"):
        net = convert(model)
    assert net.stem.convolution == "conv"
    p = points()
    both = (
        misconv.functional.expected_conv2d(p, model.conv.weight, model.conv.bias, padding=1)
        + model.second(p.mean).relu()
    )
    torch.testing.assert_close(net(p), both)


def test_two_paddings() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        narrow, wide = F.pad(x, (1, 1, 1, 1)), F.pad(x, (2, 2, 2, 2))
        return m.conv(wide).relu().mean((2, 3)) + m.second(narrow).relu().mean((2, 3))

    model = Net(forward, second=nn.Conv2d(3, 4, 3)).eval()
    with pytest.warns(UserWarning, match="also read by conv2d"):
        net = convert(model)
    p = points()
    expected = misconv.functional.expected_conv2d(p, model.conv.weight, model.conv.bias, padding=3).mean((2, 3))
    torch.testing.assert_close(net(p), expected + model.second(F.pad(p.mean, (1, 1, 1, 1))).relu().mean((2, 3)))


def test_an_unused_copy_is_not_reported(recwarn: pytest.WarningsRecorder) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        _, _ = x.clone(), x * 2
        return m.head(m.act(m.conv(x)))

    convert(Net(forward).eval())
    assert not recwarn.list


# Weights that are computed, modules that are special -----------------------------------------------------------------


def _pruned(conv: nn.Conv2d) -> nn.Conv2d:
    torch.nn.utils.prune.random_unstructured(conv, "weight", amount=0.5)
    return conv


SPECIAL: dict[str, Callable[[nn.Conv2d], nn.Module]] = {
    "pruned": _pruned,
    "weight norm": lambda conv: torch.nn.utils.parametrizations.weight_norm(conv),
    "spectral norm": lambda conv: torch.nn.utils.parametrizations.spectral_norm(conv),
}


@pytest.mark.parametrize("name", [*SPECIAL, "old weight norm", "old spectral norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_computed_weights(name: str) -> None:
    model = Net(lambda m, x: m.head(m.act(m.bn(m.conv(x)))))
    if name.startswith("old"):
        (torch.nn.utils.weight_norm if "weight" in name else torch.nn.utils.spectral_norm)(model.conv)
    else:
        SPECIAL[name](model.conv)
    model.eval()
    model(torch.rand(1, 3, 8, 8))
    net = convert(model)
    x, _ = images()
    assert same(net(x), model(x))
    p = random_mfa(2, 2, 2, (3, 8, 8), torch.rand(2, 1, 8, 8) < 0.5)
    layer = MisConv2d(3, 4, 3, padding=1, norm=copy.deepcopy(model.bn)).eval()
    with torch.no_grad():
        layer.weight.copy_(model.conv.weight)
        layer.bias.copy_(model.conv.bias)
    torch.testing.assert_close(net(p), model.head(layer(p)))
    net(p).sum().backward()
    trained = [
        key
        for key, value in net.network.conv.named_parameters()
        if value.grad is not None and value.grad.abs().max() > 0
    ]
    assert len(trained) >= 2, trained


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_parts_behind_the_stem() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), torch.jit.script(nn.Sequential(nn.Conv2d(4, 2, 3), nn.ReLU()))
    ).eval()
    net = convert(model)
    x, _ = images()
    assert same(net(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_stems_are_refused() -> None:
    stem = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()))
    with pytest.raises(ValueError, match="scripted code in 'forward' changes it before"):
        convert(nn.Sequential(stem, nn.Conv2d(3, 2, 3)).eval())
    with pytest.raises(TypeError, match="scripted"):
        convert(stem)


def test_lazy_layers_are_named() -> None:
    with pytest.raises(ValueError, match="weight of the lazy layer '0' has no shape yet; call the model once"):
        convert(nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU()))
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU())
    model(torch.rand(1, 3, 8, 8))
    assert str(convert(model).stem) == "0 → 1"


def test_compiled_networks_are_named() -> None:
    with pytest.raises(TypeError, match="must not be compiled yet"):
        convert(torch.compile(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), backend="eager"))


def test_padding_before_a_padded_convolution_is_named() -> None:
    model = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    with pytest.raises(ValueError, match="'1'.*padding with reflect and then with zeros, by the convolution itself"):
        convert(model)
    assert str(convert(nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.ReLU())).stem) == "1 → 2"


# Modes ---------------------------------------------------------------------------------------------------------------


def test_a_slope_that_depends_on_the_mode() -> None:
    model = Net(lambda m, x: F.leaky_relu(m.conv(x), 0.1 if m.training else 0.4))
    net, p = convert(model), points()
    for training in (True, False):
        model.train(training)
        net.train(training)
        values = model(p.means.flatten(0, 1)).unflatten(0, (2, 3))
        torch.testing.assert_close(net(p), (p.weights.view(2, 3, 1, 1, 1) * values).sum(1))


@pytest.mark.usefixtures("without_default_device")
def test_modes_of_torch_functions_behind_the_stem() -> None:
    """A default device that the network sets for itself must be obeyed."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, torch.device]:
        y = m.act(m.conv(x))
        with torch.device("meta"):
            made = torch.zeros(1)
        return m.head(y), made.device

    net = convert(Net(forward).eval())
    assert net(images()[0])[1].type == "meta"


@pytest.mark.usefixtures("without_tf32")
def test_flex_attention_behind_the_stem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as module
    from torch.nn.attention.flex_attention import flex_attention

    if not hasattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"):
        pytest.skip("torch 2.8 cannot be told to leave it uncompiled")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # otherwise it wants to be compiled

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.act(m.conv(x)).flatten(2).transpose(1, 2).unsqueeze(1)  # (B, 1, n, 4)
        return flex_attention(tokens, tokens, tokens)

    model = Net(forward).eval()
    model.conv = nn.Conv2d(3, 16, 3)
    model, x = model.float(), torch.rand(1, 3, 8, 8, dtype=torch.float32)
    request.getfixturevalue("without_default_device")  # from here on: the tensors above are where the others are
    with torch.no_grad():
        net = convert(model)
        torch.testing.assert_close(net(x), model(x))


def test_inference_mode() -> None:
    model = Net(lambda m, x: m.head(m.act(m.bn(m.conv(x.sub_(0.5))))))
    density = small_density()
    with torch.inference_mode():
        net = convert(model, density).eval()
    x, observed = images()
    with torch.no_grad():
        expected = net(x, observed)
    with torch.inference_mode():
        assert same(net(x, observed), expected)


# Devices and types ---------------------------------------------------------------------------------------------------


def test_devices_are_named_in_one_sentence() -> None:
    net = convert(Net(lambda m, x: m.head(m.act(m.conv(x)))), small_density())
    x, observed = images()
    with pytest.raises(ValueError, match="must be on one device .* but x is on meta, .* the network on (cpu|cuda)"):
        net(x.to("meta"))
    with pytest.raises(ValueError, match="x is on (cpu|cuda:0), observed on meta"):
        net(x, observed.to("meta"))
    net.density.to("meta")
    with pytest.raises(ValueError, match="the density on meta"):
        net(x, observed)


def test_types_are_named() -> None:
    net = convert(Net(lambda m, x: m.head(m.act(m.conv(x))))).float()
    x = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="x must have the dtype of the network, .*float32, got torch.float64"):
        net(MFA.point(x))
    with pytest.raises(ValueError, match="x must have the dtype of the network, .*float16, got torch.float32"):
        net.half()(x)


# SyncBatchNorm -------------------------------------------------------------------------------------------------------


def synchronised() -> tuple[Net, MFA]:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.head(m.act(m.bn(m.conv(x)))))
    return model, random_mfa(5, 2, 2, (3, 8, 8), torch.rand(5, 1, 8, 8) < 0.5)


def one_process(rank: int, meeting: str, results: str) -> None:
    """One of two, with three and with two images."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model, p = synchronised()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(convert(model)) if rank < 2 else None
    part = p[:3] if rank == 0 else p[3:]
    result = net(part)
    result.square().sum().backward()
    gradients = {name: value.grad for name, value in net.named_parameters() if value.grad is not None}
    for value in gradients.values():
        distributed.all_reduce(value)
    torch.save((result.detach(), gradients, net.state_dict()), f"{results}.{rank}")
    distributed.destroy_process_group()


def test_sync_batch_norm_over_processes(tmp_path: Path, dtype: torch.dtype) -> None:
    if dtype != torch.float64 or torch.get_default_device().type != "cpu":
        pytest.skip("gloo, in double precision")
    meeting, results = str(tmp_path / "meeting"), str(tmp_path / "results")
    run_two(one_process, meeting, results)
    model, p = synchronised()
    net = convert(model)
    expected = net(p)
    expected.square().sum().backward()
    found = [torch.load(f"{results}.{rank}") for rank in range(2)]
    torch.testing.assert_close(torch.cat([part[0] for part in found]), expected)
    for name, parameter in net.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[0][1][name], parameter.grad, msg=name)
    for key, value in net.state_dict().items():
        torch.testing.assert_close(found[1][2][key], value, msg=key)


def test_sync_batch_norm_of_one_process() -> None:
    model = Net(lambda m, x: m.head(m.act(m.bn(m.conv(x)))))
    net, p = convert(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))), points(4)
    other = convert(model)
    if torch.get_default_device().type == "cpu":
        net.eval()
        other.eval()
    torch.testing.assert_close(net(p), other(p))
