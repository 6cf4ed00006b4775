"""Convolutions for images with missing pixels, as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from misconv._checks import describe
from misconv._expectations import Activation, activation_module
from misconv.functional import (
    Affine,
    batch_norm_moments,
    fixed_batch_norm,
    mix_expectations,
    partial_conv2d,
    raw_moments,
    respond,
)
from misconv.mfa import MFA

__all__ = ["MisConv2d", "PartialConv2d"]


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
        *args: Any,
        norm: nn.Module | None = None,
        activation: Activation = "relu",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _check_norm(norm, self.out_channels)
        function = activation_module(activation)
        _check_pointwise(function, self.out_channels)
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
        if not isinstance(conv, nn.Conv2d) or isinstance(conv, MisConv2d | PartialConv2d):
            raise TypeError(f"conv must be a torch.nn.Conv2d, got {describe(conv)}")
        if conv.transposed:
            raise TypeError(f"conv must not be transposed, got {describe(conv)}")
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            bias=False,
            padding_mode=conv.padding_mode,
            device="meta",  # its own weights are never made
            norm=norm,
            activation=activation,
        )
        layer.weight, layer.bias, layer.training = conv.weight, conv.bias, conv.training
        return layer

    # The arguments and parameters of a convolution, applied to something richer than a tensor.
    def forward(self, p: MFA) -> Tensor:  # type: ignore[override]  # an MFA, where Conv2d takes a tensor
        """(B, O, H', W'), the expected activation."""
        convolution = (self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.padding_mode)
        norm = self.norm
        if isinstance(norm, nn.BatchNorm2d) and (norm.training or norm.running_mean is None):
            mean, variance = _normalize(norm, p, *raw_moments(p, *convolution))
            return mix_expectations(p, self.activation, mean, variance)
        return respond(p, *convolution, None if norm is None else _fixed(norm), self.activation)

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.padding_mode != "zeros":
            raise ValueError(
                f"padding_mode must be zeros, for a partial convolution leaves out what lies outside the image, "
                f"got {self.padding_mode!r}"
            )

    # A convolution that needs a second argument.
    def forward(  # type: ignore[override]  # the mask as well
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


def _fixed(norm: Any) -> Affine:
    """A normalization that does not look at the batch."""
    if isinstance(norm, nn.BatchNorm2d):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        return fixed_batch_norm(norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)

    def coefficients() -> tuple[Tensor, Tensor]:
        slope = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        return slope, norm.bias - norm.running_mean * slope

    return Affine(norm, coefficients)


def _normalize(norm: nn.BatchNorm2d, p: MFA, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """What the normalization's own `forward` does with the statistics of a batch, for moments."""
    momentum = norm.momentum or 0.0
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    return batch_norm_moments(
        mean,
        variance,
        p.weights,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        training=norm.training,
        momentum=momentum,
        eps=norm.eps,
    )


def _check_norm(norm: nn.Module | None, channels: int) -> None:
    """A normalization whose effect on a random response is known exactly: an affine map per channel."""
    if norm is None:
        return
    # Frozen batch normalizations (torchvision and others) hold the same four vectors as buffers.
    frozen = all(isinstance(getattr(norm, n, None), Tensor) for n in ("weight", "bias", "running_mean", "running_var"))
    if type(norm) is not nn.BatchNorm2d and not (frozen and type(norm).__name__ == "FrozenBatchNorm2d"):
        raise TypeError(
            "norm must be nn.BatchNorm2d (or a FrozenBatchNorm2d) or None: the statistics of other normalizations are "
            f"random with the pixels of each image and have no closed form, got {describe(norm)}"
        )
    features = norm.num_features if isinstance(norm, nn.BatchNorm2d) else norm.get_buffer("weight").numel()
    if features != channels:
        raise ValueError(f"norm must normalize the {channels} output channels of the convolution, got {describe(norm)}")


def _check_pointwise(function: Callable[[Tensor], Tensor], channels: int) -> None:
    """Try the activation on two small images that differ in half of their places: the others must not notice."""
    state = [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []
    if isinstance(function, nn.PReLU) and function.weight.numel() not in (1, channels):
        raise ValueError(f"activation must have 1 or {channels} slopes, got {describe(function)}")
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
