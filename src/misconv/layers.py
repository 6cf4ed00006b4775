"""Convolutions for images with missing pixels, as modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from misconv._checks import check_positive, describe
from misconv._conv import (
    Affine,
    BatchNorm,
    Convolution,
    Statistics,
    batch_norm_affine,
    batch_norm_moments,
    batch_statistics,
    check_layer,
    check_placed,
    fixed_batch_norm,
    incomplete_windows,
    mix_expectations,
    moments,
    normalized_response,
    respond,
    sync_group,
)
from misconv._math import Activation, Padding, Pair, activation_module
from misconv.functional import partial_conv2d
from misconv.mfa import MFA

__all__ = ["MisConv2d", "Normalize", "PartialConv2d"]

_BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
# They compute a weight from other tensors before every call, of whatever module it is.
_WEIGHT_HOOKS = (prune.BasePruningMethod, SpectralNorm, WeightNorm)


class MisConv2d(nn.Conv2d):
    """Convolution, normalization and activation of images with missing pixels: the expectation over all completions.

    ``Σ_k π_k E[f(norm(N(m_k, σ_k²)))]``, in closed form (see `misconv.functional`). For complete images it is the
    convolution, normalization and activation themselves: on a CPU bit for bit, on a GPU, where a fused kernel computes
    them, up to rounding.

    Args:
        in_channels, out_channels, kernel_size, …: all arguments of `torch.nn.Conv2d`.
        norm: a batch normalization between convolution and activation, or None. Its statistics in training are those
            of all completions.
        activation: a name such as ``"relu"``, an `nn.Module` or a pointwise function.

    Shape:
        an `MFA` of (B, C, H, W) images → (B, O, H', W').

    Example:
        >>> layer = MisConv2d(3, 32, 3, padding=1, activation="relu")
        >>> layer(MFA.point(torch.rand(8, 3, 64, 64))).shape
        torch.Size([8, 32, 64, 64])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Padding = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        norm: nn.Module | None = None,
        activation: Activation = "relu",
    ) -> None:
        window = (kernel_size, stride, padding, dilation)
        arguments: tuple[Any, ...] = (in_channels, out_channels, *window, groups, bias, padding_mode, device, dtype)
        check_layer(*arguments)
        super().__init__(*arguments)
        _check_norm(norm, self.out_channels)
        function = activation_module(activation)
        _check_activation(function, self.out_channels)
        self.norm = norm
        self.activation = function

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, norm: nn.Module | None = None, activation: Activation = "relu") -> MisConv2d:
        """The layer that takes the place of a convolution and of the normalization and activation that follow it.

        It shares their parameters and buffers; copy the modules first to keep them apart.

        Example:
            >>> conv, norm = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8)
            >>> layer = MisConv2d.from_conv(conv, norm=norm, activation=nn.SiLU())
            >>> layer.weight is conv.weight
            True
        """
        if not isinstance(conv, nn.Conv2d) or isinstance(conv, (MisConv2d, PartialConv2d)):
            raise TypeError(f"conv must be a torch.nn.Conv2d, got {describe(conv)}")
        _check_materialized("conv", conv)
        _check_own_computation("conv", conv, nn.Conv2d, ("forward", "_conv_forward"))
        _check_hooks("conv", conv)
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            device="meta",  # its own weights are never made
            norm=norm,
            activation=activation,
        )
        layer.training = conv.training
        _share_weights(conv, layer)
        return layer

    def __getattr__(self, name: str) -> Any:
        """A weight that `from_conv` has found parametrized is computed from its parameters at every look."""
        modules = self.__dict__.get("_modules", {})
        if name in modules:  # the normalization or the activation, before every call
            return modules[name]
        parametrizations = modules.get("parametrizations")
        if parametrizations is not None and name in parametrizations:
            return parametrizations[name]()
        return super().__getattr__(name)

    # The arguments and parameters of a convolution, applied to something richer than a tensor.
    def forward(self, p: MFA) -> Tensor:  # type: ignore[override]  # an MFA, where Conv2d takes a tensor
        """(B, O, H', W'), the expected activation."""
        conv, norm = Convolution.of(self), self.norm
        if isinstance(norm, nn.Module) and norm.running_mean is not None:
            check_placed("norm", norm.running_mean, "weight", conv.weight)  # type: ignore[arg-type]  # a tensor
        if isinstance(norm, _BATCH_NORMS) and (norm.training or norm.running_mean is None):
            return self._normalized(p, conv, norm)
        return respond(p, conv, None if norm is None else _fixed(norm), self.activation)

    def _normalized(self, p: MFA, conv: Convolution, norm: nn.Module) -> Tensor:
        """The expected activation behind a normalization by the statistics of this batch."""
        group, batch_norm = sync_group(norm), BatchNorm.of(norm)
        if group is None:
            response = normalized_response(p, conv, batch_norm, self.activation)
            if response is not None:
                return response
        options = {**batch_norm.options(), "process_group": group}
        statistics = batch_statistics(p, conv)
        if statistics is not None:
            number = len(p) * math.prod(conv.size(p.shape[-2:]))
            return respond(p, conv, batch_norm_affine(number, *statistics, **options), self.activation)
        moved = batch_norm_moments(*moments(p, conv), p.weights, training=norm.training, **options)
        return mix_expectations(p, self.activation, *moved, incomplete_windows(p, conv))

    def extra_repr(self) -> str:
        """The arguments of the convolution, and the activation where it is a plain function."""
        name = "" if isinstance(self.activation, nn.Module) else f", activation={self.activation!r}"
        return f"{super().extra_repr()}{name}"


class PartialConv2d(nn.Conv2d):
    """Partial convolution (Liu et al. 2018) with the arguments of `torch.nn.Conv2d`.

    See `misconv.functional.partial_conv2d`.

    Example:
        >>> layer = PartialConv2d(3, 8, 3, padding=1)
        >>> x, observed = torch.rand(2, 3, 16, 16), torch.rand(2, 1, 16, 16) > 0.5
        >>> y, seen = layer(x, observed, return_observed=True)
        >>> y.shape, seen.shape
        (torch.Size([2, 8, 16, 16]), torch.Size([2, 1, 16, 16]))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Padding = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        window = (kernel_size, stride, padding, dilation)
        arguments: tuple[Any, ...] = (in_channels, out_channels, *window, groups, bias, padding_mode, device, dtype)
        check_layer(*arguments)
        if padding_mode != "zeros":
            raise ValueError(
                f"padding_mode must be zeros, for a partial convolution leaves out what lies outside the image, "
                f"got {padding_mode!r}"
            )
        super().__init__(*arguments)

    # A convolution that needs a second argument.
    def forward(  # type: ignore[override]  # `observed` as well
        self, x: Tensor, observed: Tensor, *, return_observed: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(B, O, H', W'), and on request where it rests on at least one observed pixel."""
        return partial_conv2d(
            x,
            observed,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            return_observed=return_observed,
        )


def _share_weights(conv: nn.Conv2d, layer: nn.Conv2d) -> None:
    """Give a layer the weight and bias of a convolution, and whatever they are computed from."""
    del layer.weight, layer.bias
    if parametrize.is_parametrized(conv):
        layer.parametrizations = conv.parametrizations
    # Pruning and the older weight and spectral norms keep other tensors, and compute the weight before every call.
    for name, value in conv._parameters.items():
        layer.register_parameter(name, value)
    for name, buffer in conv._buffers.items():
        layer.register_buffer(name, buffer, persistent=name not in conv._non_persistent_buffers_set)
    for name in ("weight", "bias"):
        if name not in conv._parameters and not parametrize.is_parametrized(conv, name):
            setattr(layer, name, getattr(conv, name))
    for hook in conv._forward_pre_hooks.values():
        layer.register_forward_pre_hook(hook)


def _fixed(norm: Any) -> Affine:
    """A normalization that does not look at the batch."""
    if isinstance(norm, _BATCH_NORMS):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return fixed_batch_norm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)

    def coefficients() -> tuple[Tensor, Tensor]:
        slope = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        return slope, norm.bias - norm.running_mean * slope

    statistics = Statistics(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    return Affine(norm, coefficients, statistics)


def _check_norm(norm: Any, channels: int) -> None:
    """A normalization whose effect on a random response is known exactly: an affine map per channel."""
    if norm is None:
        return
    _check_materialized("norm", norm)
    # Frozen batch normalizations (torchvision and others) hold the same four vectors as buffers.
    frozen = type(norm).__name__ == "FrozenBatchNorm2d" and all(
        isinstance(getattr(norm, n, None), Tensor) for n in ("weight", "bias", "running_mean", "running_var")
    )
    if not isinstance(norm, _BATCH_NORMS) and not frozen:
        raise TypeError(
            "norm must be nn.BatchNorm2d, nn.SyncBatchNorm, a FrozenBatchNorm2d or None: the statistics of other "
            f"normalizations are random with the pixels of each image and have no closed form, got {describe(norm)}"
        )
    if not frozen:
        _check_own_computation("norm", norm, next(c for c in _BATCH_NORMS if isinstance(norm, c)), ("forward",))
    _check_hooks("norm", norm)
    features = norm.weight.numel() if frozen else norm.num_features
    if features != channels:
        raise ValueError(f"norm must normalize the {channels} output channels of the convolution, got {describe(norm)}")
    if frozen:
        _check_affine(norm, channels)


def _check_affine(norm: Any, channels: int) -> None:
    """Try a frozen normalization on two numbers per channel."""
    with torch.no_grad():
        x = torch.linspace(-1, 1, 2 * channels).view(2, channels, 1, 1).to(norm.weight)
        slope, offset = (t.view(-1, 1, 1) for t in _fixed(norm).coefficients())
        agrees = torch.allclose(norm(x), slope * x + offset, rtol=1e-3, atol=1e-5)
    if not agrees:
        raise TypeError(
            "norm must be (x - running_mean) / sqrt(running_var + eps) * weight + bias, but it computes something "
            f"else: {describe(norm)}"
        )


def _check_materialized(name: str, module: Any) -> None:
    lazy = isinstance(module, LazyModuleMixin)
    if lazy and any(torch.nn.parameter.is_lazy(t) for t in (*module.parameters(), *module.buffers())):
        raise ValueError(f"{name} must have its parameters, call it once before, got {describe(module)}")


def _check_own_computation(name: str, module: nn.Module, base: type[nn.Module], methods: tuple[str, ...]) -> None:
    """A module that computes what `base` does, not a subclass with other methods."""
    for method in methods:
        own = method in module.__dict__ or getattr(type(module), method) is not getattr(base, method)
        if own:
            raise TypeError(
                f"{name} must compute what nn.{base.__name__} does, and this {type(module).__name__} has a {method} of "
                "its own; misconv.convert follows the forward of a whole network, whatever it does to its weights"
            )


def _check_hooks(name: str, module: nn.Module) -> None:
    """No hooks: they would wait for a call that never comes."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [hook for kind in kinds for hook in getattr(module, kind).values() if not isinstance(hook, _WEIGHT_HOOKS)]
    if found:
        names = ", ".join(sorted({getattr(hook, "__qualname__", type(hook).__name__) for hook in found}))
        raise ValueError(f"{name} must have no hooks, for the layer never calls it, got the hooks {names}")


def _check_activation(function: Callable[[Tensor], Tensor], channels: int) -> None:
    """A pointwise and deterministic function, in training and in evaluation."""
    if not isinstance(function, nn.Module):
        return _check_pointwise(function, channels)
    _check_hooks("activation", function)
    if isinstance(function, nn.PReLU) and function.weight.numel() not in (1, channels):
        raise ValueError(f"activation must have 1 or {channels} slopes, got {describe(function)}")
    if type(function) is nn.RReLU:
        return None  # in evaluation it is a LeakyReLU; in training the expectation says that it cannot be
    modes = {module: module.training for module in function.modules()}
    try:
        for training in (True, False):
            _check_pointwise(function.train(training), channels)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return None


def _check_pointwise(function: Callable[[Tensor], Tensor], channels: int) -> None:
    """Try the activation on two small images that differ in half of their places: the others must not notice."""
    state = [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []
    with torch.no_grad():
        first = torch.linspace(-2, 2, 4 * channels).view(1, channels, 2, 2)
        first = first.to(state[0]) if state else first
        changed = torch.arange(channels).view(-1, 1, 1) + torch.arange(2).view(-1, 1) + torch.arange(2)
        changed = (changed % 2 == 0).to(first.device)  # a chequerboard, so that no row or channel is all changed
        results = [function(t) for t in (first.clone(), first + changed)]
    for result in results:
        if not isinstance(result, Tensor) or result.shape != first.shape:
            raise ValueError(
                "activation must be a pointwise function that keeps the shape, but it turned "
                f"{tuple(first.shape)} into {describe(result)}"
            )
    if not torch.equal(*(result[0, ~changed] for result in results)):
        raise ValueError(
            "activation must be pointwise and deterministic, but its result at one place depends on another "
            f"or on chance: {describe(function)}"
        )


class Normalize(nn.Module):
    """``(x − mean) / std`` for every channel: lets a network read images in the units in which they are stored.

    Before a network it does what `torchvision.transforms.v2.Normalize` does before the network is called. The density
    of a converted network then speaks of the images as they are, and `misconv.convert` follows the images through it.

    Args:
        mean, std: one number per channel each.

    Shape:
        (B, C, H, W) → (B, C, H, W).

    Example:
        >>> Normalize(mean=(127.5,), std=(63.75,))(torch.tensor([[[[0.0, 255.0]]]]))
        tensor([[[[-2.,  2.]]]])
        >>> network = nn.Sequential(Normalize((127.5,) * 3, (64.0,) * 3), nn.Conv2d(3, 8, 3), nn.ReLU())
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            if not isinstance(value, (tuple, list)) or not all(isinstance(each, Real) for each in value):
                raise TypeError(f"{name} must be a list of numbers, one per channel, got {describe(value)}")
        if not mean or len(mean) != len(std) or not all(map(math.isfinite, mean)):
            raise ValueError(
                f"mean and std must have one finite number per channel, got {describe(mean)} and {describe(std)}"
            )
        for deviation in std:
            check_positive("std", deviation)
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.register_buffer("shift", torch.tensor(self.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(self.std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W), with mean 0 and deviation 1 where the images have `mean` and `std`."""
        return (x - self.shift) / self.scale

    def extra_repr(self) -> str:
        """The arguments."""
        return f"mean={self.mean}, std={self.std}"
