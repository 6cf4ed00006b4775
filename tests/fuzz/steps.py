"""The steps of random networks: preprocessing, padding, convolutions, normalizations, arithmetic, activations.

Every step is a module with a `label`, written as people write it. Preprocessing may be in place, as they do it, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.outcome import Choices


class Step(nn.Module):
    """A function of the image and, perhaps, of constants `a` and `b`, one number for each channel."""

    a: Tensor
    b: Tensor

    def __init__(self, label: str, function: Callable[[Tensor, Tensor, Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.label, self.function = label, function
        self.register_buffer("a", torch.rand(channels, 1, 1) + 0.5)
        self.register_buffer("b", torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.a, self.b)


class Steps(nn.Sequential):
    """Several steps, one after the other."""

    @property
    def label(self) -> str:
        return " → ".join(str(step.label) for step in self) or "Identity"


# Preprocessing -------------------------------------------------------------------------------------------------------


def _tv_normalize(x: Tensor, a: Tensor, b: Tensor, inplace: bool = False) -> Tensor:
    from torchvision.transforms import functional as TF

    result: Tensor = TF.normalize(x, b.flatten().tolist(), a.flatten().tolist(), inplace=inplace)
    return result


def _out(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    torch.sub(x, b, out=x)
    return x


def _assign(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x[:, 0] = x[:, 0] * 0.5 - 0.25
    return x


def _assign_all(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for channel in range(x.shape[1]):
        x[:, channel] = (x[:, channel] - b[channel, 0, 0]) / a[channel, 0, 0]
    return x


def _assign_view(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x[:, -1].mul_(2).sub_(1)
    return x


def _data(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x.data.sub_(0.5)
    return x


def _google(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As GoogLeNet and Inception do it."""
    parts = [torch.unsqueeze(x[:, c], 1) * float(a[c]) + float(b[c]) for c in range(x.shape[1])]
    return torch.cat(parts, 1)


def _stacked(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([x[:, c] * a[c, 0, 0] - b[c, 0, 0] for c in range(x.shape[1])], 1)


def _clone_then_change(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    kept = x.clone()
    x.zero_()
    return kept


def _unused_copy(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x.clone().mul_(3)
    return x


AFFINE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "(x - b) / a": lambda x, a, b: (x - b) / a,
    "x.sub(b).div(a)": lambda x, a, b: x.sub(b).div(a),
    "x.sub_(b).div_(a)": lambda x, a, b: x.sub_(b).div_(a),
    "2x - 1": lambda x, a, b: 2 * x - 1,
    "x * 2 - 1": lambda x, a, b: x * 2 - 1,
    "x / 255": lambda x, a, b: x / 255,
    "x.div_(255)": lambda x, a, b: x.div_(255),
    "1 - x": lambda x, a, b: 1 - x,
    "-x": lambda x, a, b: -x,
    "x.mul_(2).add_(-1)": lambda x, a, b: x.mul_(2).add_(-1),
    "x.add(b, alpha=2)": lambda x, a, b: x.add(b, alpha=2),
    "torch.sub(x, b)": lambda x, a, b: torch.sub(x, b),
    "torch.sub(x, b, out=x)": _out,
    "b - x": lambda x, a, b: b - x,
    "x + x": lambda x, a, b: x + x,
    "torch.addcmul(b, x, a)": lambda x, a, b: torch.addcmul(b, x, a),
    "torch.lerp(x, b, 0.3)": lambda x, a, b: torch.lerp(x, b.expand_as(x), 0.3),
    "TF.normalize": _tv_normalize,
    "TF.normalize(inplace)": functools.partial(_tv_normalize, inplace=True),
    "x[:, 0] = …": _assign,
    "x[:, c] = … for all": _assign_all,
    "x[:, -1].mul_()": _assign_view,
    "x.data.sub_()": _data,
    "transform_input": _google,
    "torch.stack of channels": _stacked,
    "x[:, [2, 1, 0]]": lambda x, a, b: x[:, list(range(x.shape[1]))[::-1]],
    "x.flip(1)": lambda x, a, b: x.flip(1),
    "index_select": lambda x, a, b: x.index_select(1, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)),
    "x.float()": lambda x, a, b: x.to(a.dtype),
    "x.clone()": lambda x, a, b: x.clone(),
    "x.contiguous()": lambda x, a, b: x.contiguous(),
    "channels_last": lambda x, a, b: x.contiguous(memory_format=torch.channels_last),
    "x.detach()": lambda x, a, b: x.detach(),
    "x[:]": lambda x, a, b: x[:],
    "kept = x.clone(); x.zero_()": _clone_then_change,
    "x.clone().mul_(3)": _unused_copy,
    "x.view_as(x)": lambda x, a, b: x.view_as(x),
    "x + 0": lambda x, a, b: x + 0,
    "dropout(eval)": lambda x, a, b: F.dropout(x, 0.5, training=False),
    "nan_to_num": lambda x, a, b: x.nan_to_num(),
}
OTHER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x.clamp(0.2, 0.7)": lambda x, a, b: x.clamp(0.2, 0.7),
    "x.clamp_(0.2, 0.7)": lambda x, a, b: x.clamp_(0.2, 0.7),
    "x.abs()": lambda x, a, b: (x - 0.5).abs(),
    "x ** 2": lambda x, a, b: x**2,
    "x.pow_(2)": lambda x, a, b: x.pow_(2),
    "x * x": lambda x, a, b: x * x,
    "x.sqrt()": lambda x, a, b: (x.abs() + 1e-3).sqrt(),
    "standardized": lambda x, a, b: (x - x.mean()) / (x.std() + 1e-3),
    "centred": lambda x, a, b: x - x.mean((2, 3), keepdim=True),
    "round": lambda x, a, b: (x * 8).round() / 8,
    "where": lambda x, a, b: torch.where(x > 0.5, x, 0.1 * x),
    "roll": lambda x, a, b: x.roll(1, -1),
    "x.flip(-1)": lambda x, a, b: x.flip(-1),
    "avg_pool2d": lambda x, a, b: F.avg_pool2d(x, 3, 1, 1),
    "interpolate": lambda x, a, b: F.interpolate(x, scale_factor=2.0),
    "crop": lambda x, a, b: x[:, :, 1:, 1:],
    "x.mean(1)": lambda x, a, b: x.mean(1, keepdim=True).expand(x.shape),
    "transpose": lambda x, a, b: x.mT,
}


def preprocessing(choices: Choices, channels: int) -> tuple[nn.Module, int]:
    """Up to three steps, most of them affine for each channel; and the number of channels that come out."""
    chosen: list[nn.Module] = []
    for _ in range(choices.weighted({0: 4, 1: 4, 2: 2, 3: 1})):
        table = OTHER if choices.chance(0.1) else AFFINE
        name = choices.pick(list(table))
        chosen.append(Step(name, table[name], channels))
    if channels > 1 and choices.chance(0.08):
        wanted = choices.pick([[0, 1], [1, 0, 0], [2, 2, 1, 0], [1]])
        chosen.append(Step(f"x[:, {wanted}]", lambda x, a, b: x[:, wanted], channels))
        return Steps(*chosen), len(wanted)
    return Steps(*chosen), channels


# Padding -------------------------------------------------------------------------------------------------------------


def padding(choices: Choices) -> nn.Module:
    """Padding before the convolution, often none."""
    pads: dict[str, Callable[[], nn.Module]] = {
        "F.pad(1)": lambda: Step("F.pad(1)", lambda x, a, b: F.pad(x, (1, 1, 1, 1)), 1),
        "F.pad(0, 1, 0, 1)": lambda: Step("F.pad(0, 1, 0, 1)", lambda x, a, b: F.pad(x, (0, 1, 0, 1)), 1),
        "F.pad(value=1)": lambda: Step("F.pad(value=1)", lambda x, a, b: F.pad(x, (1, 1, 1, 1), value=1.0), 1),
        "F.pad(-1)": lambda: Step("F.pad(-1)", lambda x, a, b: F.pad(x, (-1, 0, 0, 0)), 1),
        "reflect": lambda: Step("F.pad(reflect)", lambda x, a, b: F.pad(x, (1, 1, 1, 1), mode="reflect"), 1),
        "two": lambda: Step("F.pad(F.pad)", lambda x, a, b: F.pad(F.pad(x, (1, 0, 1, 0)), (0, 1, 0, 1)), 1),
        "ZeroPad2d": lambda: nn.ZeroPad2d(1),
        "ReflectionPad2d": lambda: nn.ReflectionPad2d(choices.pick([1, (1, 2, 0, 1)])),
        "ReplicationPad2d": lambda: nn.ReplicationPad2d(1),
        "CircularPad2d": lambda: nn.CircularPad2d(1),
        "ConstantPad2d": lambda: nn.ConstantPad2d(1, 0.5),
    }
    return choices.pick(list(pads.values()))() if choices.chance(0.25) else nn.Identity()


# Convolutions --------------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """A convolution by `F.conv2d`, with its own weights."""

    label = "F.conv2d"

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outside, inside, 3, 3)), nn.Parameter(torch.randn(outside))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=1)


class Standardized(nn.Conv2d):
    """A convolution with a `forward` of its own, which standardizes the weights."""

    label = "Standardized"

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, weight, self.bias)


def convolution(choices: Choices, inside: int) -> tuple[nn.Module, int]:
    """The first convolution, and its number of output channels."""
    groups = choices.pick([1, 1, 1, inside])
    outside, kernel = groups * choices.randint(1, 3), choices.pick([1, 3, 3, 3, (3, 2), 5])
    conv = nn.Conv2d(
        inside, outside, kernel, stride=choices.pick([1, 1, 2]),
        padding=choices.pick([0, 1, 1, 2, (1, 0)]), dilation=1 if kernel == 5 else choices.pick([1, 1, 1, 2]), groups=groups,
        bias=choices.chance(0.6), padding_mode=choices.weighted({"zeros": 8, "reflect": 1, "replicate": 1, "circular": 1}),
    )  # fmt: skip
    kind = choices.weighted(
        {"": 12, "weight_norm": 1, "old weight_norm": 1, "spectral_norm": 1, "pruned": 1, "std": 1, "own": 1,
         "functional": 1, "hook": 1, "same": 1, "frozen": 1, "channels_last": 1, "scripted": 1, "sequential": 1}
    )  # fmt: skip
    made = _VARIANTS[kind](conv) if kind else conv
    if not hasattr(made, "label"):
        made.label = kind or "Conv2d"  # type: ignore[assignment]
    return made, outside


def _old_weight_norm(conv: nn.Conv2d) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(conv)  # type: ignore[no-any-return]


def _pruned(conv: nn.Conv2d) -> nn.Module:
    from torch.nn.utils import prune

    prune.random_unstructured(conv, "weight", amount=0.3)
    return conv


def _timm(conv: nn.Conv2d) -> nn.Module:
    from timm.layers import StdConv2d

    return StdConv2d(conv.in_channels, conv.out_channels, 3, padding=1, bias=True)  # type: ignore[no-any-return]


def _hooked(conv: nn.Conv2d) -> nn.Module:
    conv.register_forward_hook(_twice)
    return conv


def _twice(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return 2 * result


def _frozen(conv: nn.Conv2d) -> nn.Module:
    return conv.requires_grad_(False)


def _scripted(conv: nn.Conv2d) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Wrapped("torch.jit.script", torch.jit.script(conv))


class Wrapped(nn.Module):
    """A module behind a name of its own."""

    def __init__(self, label: str, module: nn.Module) -> None:
        super().__init__()
        self.label, self.module = label, module

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result


_VARIANTS: dict[str, Callable[[nn.Conv2d], nn.Module]] = {
    "weight_norm": lambda conv: nn.utils.parametrizations.weight_norm(conv),
    "old weight_norm": _old_weight_norm,
    "spectral_norm": lambda conv: nn.utils.parametrizations.spectral_norm(conv),
    "pruned": _pruned,
    "std": _timm,
    "own": lambda conv: Standardized(conv.in_channels, conv.out_channels, 3, padding=1),
    "functional": lambda conv: Functional(conv.in_channels, conv.out_channels),
    "hook": _hooked,
    "same": lambda conv: nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding="same"),
    "frozen": _frozen,
    "channels_last": lambda conv: conv.to(memory_format=torch.channels_last),
    "scripted": _scripted,
    "sequential": lambda conv: Wrapped("Sequential(Conv2d, Identity)", nn.Sequential(conv, nn.Identity())),
}


# Between convolution and activation ----------------------------------------------------------------------------------

ARITHMETIC: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "y * 0.5": lambda y, a, b: y * 0.5,
    "y + 1": lambda y, a, b: y + 1,
    "-y": lambda y, a, b: -y,
    "y / 2": lambda y, a, b: y / 2,
    "y - 0.1": lambda y, a, b: y - 0.1,
    "1 - y": lambda y, a, b: 1 - y,
    "y * a + b": lambda y, a, b: y * a + b,
    "a * y": lambda y, a, b: a * y,
    "y.mul_(0.5)": lambda y, a, b: y.mul_(0.5),
    "y += 0.1": lambda y, a, b: y.add_(0.1),
    "torch.mul(y, 2)": lambda y, a, b: torch.mul(y, 2),
    "torch.addcmul": lambda y, a, b: torch.addcmul(b, y, a),
    "y.clone()": lambda y, a, b: y.clone(),
    "y.contiguous()": lambda y, a, b: y.contiguous(),
    "y[:]": lambda y, a, b: y[:],
    "y[:, perm]": lambda y, a, b: y[:, list(range(y.shape[1]))[::-1]],
    "dropout(eval)": lambda y, a, b: F.dropout(y, 0.5, training=False),
}


def arithmetic(choices: Choices, channels: int, probability: float) -> nn.Module:
    """Arithmetic on the response, sometimes."""
    if not choices.chance(probability):
        return nn.Identity()
    name = choices.pick(list(ARITHMETIC))
    return Step(name, ARITHMETIC[name], channels)


def normalization(choices: Choices, channels: int) -> nn.Module:
    """A normalization with statistics and parameters that are not those of the beginning."""
    kind = choices.weighted(
        {"batch": 5, "none": 5, "sync": 1, "frozen": 1, "group": 0.5, "instance": 0.3, "cumulative": 0.5, "eval": 0.5}
    )
    if kind == "none":
        return nn.Identity()
    if kind == "group":
        return nn.GroupNorm(1, channels)
    if kind == "instance":
        return nn.InstanceNorm2d(channels)
    if kind == "frozen":
        from torchvision.ops import FrozenBatchNorm2d

        norm = FrozenBatchNorm2d(channels)
    else:
        made: dict[str, Callable[[int], nn.Module]] = {
            "sync": nn.SyncBatchNorm, "cumulative": functools.partial(nn.BatchNorm2d, momentum=None),
            "eval": FrozenMode, "batch": nn.BatchNorm2d,
        }  # fmt: skip
        norm = made[kind](channels)
    with torch.no_grad():
        norm.running_mean.copy_(torch.randn(channels) * 0.3)
        norm.running_var.copy_(torch.rand(channels) + 0.2)
        norm.weight.copy_(torch.randn(channels))
        norm.bias.copy_(torch.randn(channels) * 0.3)
    return norm


class FrozenMode(nn.BatchNorm2d):
    """A batch normalization that stays in evaluation, as detectors do it."""

    def train(self, mode: bool = True) -> FrozenMode:
        super().train(False)
        return self


# Activations ---------------------------------------------------------------------------------------------------------


class Activation(nn.Module):
    """A function as an activation."""

    def __init__(self, label: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.label, self.function = label, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.relu": F.relu,
    "F.relu(inplace)": functools.partial(F.relu, inplace=True),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "y.relu()": lambda y: y.relu(),
    "y.clamp(min=0)": lambda y: y.clamp(min=0),
    "F.leaky_relu(0.2)": lambda y: F.leaky_relu(y, 0.2),
    "F.leaky_relu(inplace)": lambda y: F.leaky_relu(y, negative_slope=0.1, inplace=True),
    "F.silu": F.silu,
    "F.gelu": F.gelu,
    "y.sigmoid()": lambda y: y.sigmoid(),
    "torch.tanh": torch.tanh,
    "y.tanh_()": lambda y: y.tanh_(),
    "F.elu": F.elu,
    "F.hardtanh(-0.5, 2)": lambda y: F.hardtanh(y, -0.5, 2.0),
    "F.hardswish": F.hardswish,
    "F.softplus": F.softplus,
    "y * sigmoid(y)": lambda y: y * torch.sigmoid(y),
    "max(y, 0)": lambda y: torch.maximum(y, torch.zeros_like(y)),
    "F.threshold": lambda y: F.threshold(y, 0.0, 0.0),
}


def activation(choices: Choices, channels: int) -> nn.Module:
    """A module or a function."""
    if choices.chance(0.4):
        name = choices.pick(list(FUNCTIONS))
        return Activation(name, FUNCTIONS[name])
    makers: list[Callable[[], nn.Module]] = [
        nn.ReLU, nn.ReLU, lambda: nn.ReLU(inplace=True), lambda: nn.LeakyReLU(0.1), nn.SiLU, nn.GELU, nn.Hardswish,
        nn.ELU, nn.Tanh, nn.Sigmoid, nn.ReLU6, lambda: nn.PReLU(choices.pick([1, channels])), nn.Softplus, nn.SELU,
        lambda: nn.Sequential(nn.Identity(), nn.ReLU()), nn.Identity,
    ]  # fmt: skip
    return choices.pick(makers)()
