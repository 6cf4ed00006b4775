"""Checks of the arguments of a convolution and of a batch normalization."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from misconv._checks import (
    check_dense,
    check_nonnegative,
    check_pair,
    check_positive,
    check_probability,
    check_size,
    describe,
)
from misconv._conv.convolution import Convolution
from misconv._math import Padding, Pair
from misconv.mfa import MFA

__all__ = [
    "check_batch_norm",
    "check_convolution",
    "check_flag",
    "check_geometry",
    "check_layer",
    "check_mfa",
    "check_placed",
    "check_weight",
    "check_windows",
]

_MODES = ("zeros", "reflect", "replicate", "circular")
_LARGEST = 2**36  # numbers in a tensor that any machine might hold


def check_mfa(p: MFA) -> None:
    """Random images, and no tensor in their place."""
    if not isinstance(p, MFA):
        raise TypeError(f"p must be a misconv.MFA (misconv.MFA.point(x) for complete images), got {describe(p)}")


def check_convolution(p: MFA, conv: Convolution) -> None:
    """A convolution of the right geometry that fits random images."""
    check_weight(conv, p.shape[-3], p.means)
    check_windows(conv, tuple(p.shape))


def check_geometry(stride: Pair, padding: Padding, dilation: Pair, groups: int, padding_mode: str) -> None:
    """What a convolution is, besides its weights."""
    if not isinstance(padding_mode, str) or padding_mode not in _MODES:
        raise ValueError(f"padding_mode must be zeros, reflect, replicate or circular, got {describe(padding_mode)}")
    steps = check_pair("stride", stride)
    check_pair("dilation", dilation)
    check_size("groups", groups)
    if not isinstance(padding, str):
        check_pair("padding", padding, least=0)
    elif padding not in ("same", "valid"):
        raise ValueError(f"padding must be a number, a pair, 'same' or 'valid', got {describe(padding)}")
    elif padding == "same" and steps != (1, 1):
        raise ValueError(f"padding must not be 'same' where stride is not 1, got stride {describe(stride)}")


def check_weight(conv: Convolution, channels: int, images: Tensor) -> None:
    """Filters that fit images with this number of channels, their type and their device."""
    weight, bias, groups = conv.weight, conv.bias, conv.groups
    if not isinstance(weight, Tensor) or weight.is_nested or weight.dim() != 4 or not weight.is_floating_point():
        raise TypeError(f"weight must be a floating-point tensor (O, C/groups, kh, kw), got {describe(weight)}")
    if 0 in weight.shape:
        raise ValueError(f"weight must have no empty dimension, got {describe(weight)}")
    if weight.shape[0] % groups:
        raise ValueError(
            f"groups must be a positive divisor of the {weight.shape[0]} output channels, got {describe(groups)}"
        )
    if weight.shape[1] * groups != channels:
        raise ValueError(
            f"weight must have C/groups = {channels}/{groups} input channels to fit images of {channels} channels, "
            f"got {describe(weight)}"
        )
    _check_bias(bias, weight)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            _check_like_images(name, value, images)


def _check_bias(bias: Tensor | None, weight: Tensor) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise TypeError(f"bias must be a floating-point tensor ({weight.shape[0]},) or None, got {describe(bias)}")
    check_dense("bias", bias)  # before its shape is asked for, which a nested tensor does not have
    if tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must have shape ({weight.shape[0]},), one per output channel, got {describe(bias)}")


def _check_like_images(name: str, value: Tensor, images: Tensor) -> None:
    check_dense(name, value)
    if value.device != images.device:
        raise ValueError(f"{name} must be on the device of the images, {images.device}, got {describe(value)}")
    if value.dtype != images.dtype and not torch.is_autocast_enabled(images.device.type):
        raise ValueError(f"{name} must have the dtype of the images, {images.dtype}, got {describe(value)}")


def check_windows(conv: Convolution, images: tuple[int, ...]) -> None:
    """A window fits into the padded images (…, C, H, W), and padding takes no more pixels than there are."""
    kernel, image, padding, mode = conv.kernel, images[-2:], conv.padding, conv.padding_mode
    size = conv.size(image)
    if min(size) < 1:
        raise ValueError(
            f"weight must fit into the images of {image[0]}×{image[1]} pixels with padding {padding!r}, "
            f"got windows of {kernel[0]}×{kernel[1]} pixels with dilation {conv.dilation!r}"
        )
    if math.prod(images[:-3]) * conv.weight.shape[0] * size[0] * size[1] > _LARGEST:
        raise ValueError(f"padding must leave a response that fits into memory, got {padding!r}: {size[0]}×{size[1]}")
    left, right, top, bottom = conv.margins
    spare = {"reflect": 1, "circular": 0}.get(mode)
    if spare is not None and (max(top, bottom) > image[0] - spare or max(left, right) > image[1] - spare):
        raise ValueError(
            f"padding must be at most {image[0] - spare} rows and {image[1] - spare} columns for padding_mode {mode} "
            f"of images of {image[0]}×{image[1]} pixels, got {padding!r}"
        )


def check_layer(
    in_channels: int,
    out_channels: int,
    kernel_size: Pair,
    stride: Pair,
    padding: Padding,
    dilation: Pair,
    groups: int,
    bias: bool,
    padding_mode: str,
    device: Any,
    dtype: Any,
) -> None:
    """The arguments of `torch.nn.Conv2d`."""
    check_size("in_channels", in_channels)
    check_size("out_channels", out_channels)
    window = check_pair("kernel_size", kernel_size)
    check_geometry(stride, padding, dilation, groups, padding_mode)
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            raise ValueError(f"groups must be a divisor of {name}, {channels}, got {describe(groups)}")
    if in_channels * out_channels * math.prod(window) > _LARGEST:
        raise ValueError(f"kernel_size must leave weights that fit into memory, got {describe(kernel_size)}")
    check_flag("bias", bias)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, got {describe(dtype)}")
    try:
        None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch.device or its name, got {describe(device)}") from None


def check_batch_norm(
    mean: Tensor,
    variance: Tensor,
    weights: Tensor,
    vectors: dict[str, Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
) -> None:
    """Moments of responses, the weights of their components, and numbers for each channel."""
    check_flag("training", training)
    for name, value in (("mean", mean), ("variance", variance), ("weights", weights)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {describe(value)}")
        check_dense(name, value)
    if mean.dim() != 5:
        raise ValueError(f"mean must have shape (B, K, O, H', W'), got {describe(mean)}")
    if variance.shape != mean.shape or variance.device != mean.device:
        raise ValueError(f"variance must match mean, {describe(mean)}, got {describe(variance)}")
    if weights.shape != mean.shape[:2] or weights.device != mean.device:
        raise ValueError(f"weights must have shape (B, K) = {tuple(mean.shape[:2])}, got {describe(weights)}")
    if variance.dtype != torch.promote_types(variance.dtype, mean.dtype):
        raise ValueError(f"variance must have the dtype of mean or a wider one, {mean.dtype}, got {describe(variance)}")
    for name, vector in vectors.items():
        if vector is None:
            continue
        if not isinstance(vector, Tensor) or vector.is_nested or vector.shape != mean.shape[2:3]:
            raise ValueError(f"{name} must be a tensor of the {mean.shape[2]} channels, got {describe(vector)}")
        check_placed(name, vector, "mean", mean)
    check_probability("momentum", momentum)
    (check_positive if training else check_nonnegative)("eps", eps)


def check_placed(name: str, vector: Tensor, other: str, like: Tensor) -> None:
    """Numbers of a normalization: on the device of what they normalize, of its type, or float32 for a shorter one."""
    check_dense(name, vector)
    if vector.device != like.device:
        raise ValueError(f"{name} must be on the device of {other}, {like.device}, got {describe(vector)}")
    if vector.dtype not in (like.dtype, torch.promote_types(like.dtype, torch.float32)):
        raise ValueError(f"{name} must have the dtype of {other}, {like.dtype}, got {describe(vector)}")


def check_flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {describe(value)}")
