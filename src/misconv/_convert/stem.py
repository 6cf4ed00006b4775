"""The stem of a network: its first convolution, and the normalization, arithmetic and activation that follow it.

A network is followed, not changed. It runs on a stand-in for the image, and every torch function that reads a stand-in
comes by here first. Arithmetic on the image is followed channel by channel (`_image`). The convolution of the image is
answered with moments instead of numbers, a normalization with an affine map of them, the activation with its
expectation; everything else is none of our business. So it does not matter whether a `forward` calls modules or
functions, and parameters stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._conv import (
    Affine,
    BatchNorm,
    Convolution,
    batch_norm_affine,
    batch_norm_moments,
    batch_statistics,
    fixed_batch_norm,
    incomplete_windows,
    mix_expectations,
    moments,
    normalized,
    normalized_response,
    pad_images,
    respond,
)
from misconv._convert import image as _image
from misconv._convert.image import Image, Selection
from misconv._math import ACTIVATIONS, Activation
from misconv.mfa import MFA

__all__ = [
    "ALIASES",
    "POINTWISE",
    "WITHOUT_NUMBERS",
    "ConvolvedImage",
    "Response",
    "Stem",
    "batch_norm",
    "build_activation",
    "convolve",
    "is_channels_last",
    "operate",
]

# They return the same values in another object, perhaps in another type or layout.
ALIASES = {"clone", "contiguous", "float", "double", "half", "bfloat16", "to", "type", "type_as", "detach", "view_as"}

# Pointwise functions that torch has by these names.
POINTWISE = ACTIVATIONS.keys() - {"gelu_tanh", "identity"}

# Of these the modules have no arguments, but for one that says whether they work in place.
WITHOUT_NUMBERS = {"hardsigmoid", "hardswish", "mish", "relu", "relu6", "selu", "sigmoid", "silu", "tanh"}


@dataclass(frozen=True)
class Stem:
    """The parts of a stem by the names of their modules; None where there is none.

    `function` is the torch function that is the activation, `named` whether the activation is a module that the user
    has named. `steps` counts normalizations and arithmetic between convolution and activation, `calls` the
    convolutions that read the image, `kept` says that the network keeps what lies between convolution and activation,
    `selections` what it does to the channels of the image, in order.
    """

    convolution: str
    norm: str | None = None
    activation: str | None = None
    function: str | None = None
    named: bool = False
    steps: int = 0
    calls: int = 1
    kept: bool = False
    selections: tuple[tuple[Selection | None, ...], ...] = ()

    @cached_property
    def is_usual(self) -> bool:
        """Whether it is one convolution and an activation of torch, and nobody keeps what lies between them."""
        return self.calls == 1 and self.function is not None and not self.named and not self.kept

    def __str__(self) -> str:
        parts = (self.convolution, self.norm, self.activation)
        return " → ".join(part for part in parts if part is not None)


# Convolution ---------------------------------------------------------------------------------------------------------


# Not frozen, as all of these are made in every run of a network: that would take twice as long.
@dataclass(eq=False)
class ConvolvedImage:
    """A convolution of random images.

    Where channels repeat the same pixel, `distinct` holds the MFA of the distinct channels and the convolution that
    reads them: the variance is theirs.
    """

    p: MFA
    conv: Convolution
    size: tuple[int, ...]  # of the response, (B, O, H', W')
    distinct: tuple[MFA, Convolution] | None = None
    channels_last: bool = False  # the layout in which the network would have its response
    with_gradients: bool = True  # whether it was computed where gradients are recorded

    @property
    def requires_grad(self) -> bool:
        """Whether a response of the network itself would require gradients, where they are recorded."""
        bias = self.conv.bias
        return self.conv.weight.requires_grad or self.p.means.requires_grad or (bias is not None and bias.requires_grad)

    def detached(self) -> ConvolvedImage:
        """The same without gradients."""
        distinct = None if self.distinct is None else (self.distinct[0].detach(), _detached(self.distinct[1]))
        return replace(self, p=self.p.detach(), conv=_detached(self.conv), distinct=distinct, with_gradients=True)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the response, (B, K, O, H', W') each."""
        mean, variance = moments(self.p, self.conv)
        return mean, variance if self.distinct is None else moments(*self.distinct)[1]


def _detached(conv: Convolution) -> Convolution:
    bias = None if conv.bias is None else conv.bias.detach()
    return conv.replace(conv.weight.detach(), bias)


def convolve(
    p: MFA,
    image: Image,
    values: Tensor,
    mean: Callable[[], Tensor],
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> ConvolvedImage:
    """The convolution of an image that was made of `p`; further arguments as in `torch.nn.functional.conv2d`."""
    device = values.device.type
    if values.dtype != weight.dtype and not torch.is_autocast_enabled(device):
        raise ValueError(
            f"x must have the dtype of the network, whose first convolution has weights of {weight.dtype}, "
            f"got {values.dtype}"
        )
    p = p if p.device == values.device else p.to(values.device)
    made = _image.random_image(p, image, values, mean)
    mode, distinct = "zeros", None
    if not image.untouched:
        margins = image.pixels.margins
        if image.pixels.mode != "constant":
            padding, mode = (margins[2], margins[0]), image.pixels.mode
        sources = [source for source in image.sources if source != _image.CERTAIN]
        if len(set(sources)) < len(sources):
            around = p if mode != "zeros" or not any(margins) else pad_images(p, margins)
            summed = _summed_weights(image, weight, groups, p.shape[1]).to(around.dtype)
            distinct = around, Convolution(summed, None, stride, padding, dilation, 1, mode)
    last = is_channels_last(values.shape, values.stride()) or is_channels_last(weight.shape, weight.stride())
    conv = Convolution(weight, bias, stride, padding, dilation, groups, mode)
    batch, *_, height, width = made.means.shape
    size = (batch, weight.shape[0], *conv.size((height, width)))
    return ConvolvedImage(made, conv, size, distinct, last, torch.is_grad_enabled())


def is_channels_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether torch takes the strides of (N, C, H, W) for channels_last, as it does also where C, H or W is 1."""
    least = 0
    for axis in (1, 3, 2, 0):
        stride, size = strides[axis], shape[axis]
        if size == 0 or stride == 0 or stride < least or (axis == 0 and least == strides[1]):
            return False
        least = stride * size
    return True


def _summed_weights(image: Image, weight: Tensor, groups: int, channels: int) -> Tensor:
    """The weights (O, C, kh, kw) with which the pixels of the MFA are read: those of its repetitions, added up."""
    out, each = weight.shape[0] // groups, weight.shape[1]
    slopes = _image.slope_tensor(image, weight)
    columns: list[Tensor] = [weight.new_zeros(weight.shape[0], *weight.shape[2:])] * channels
    for place, source in enumerate(image.sources):
        if source == _image.CERTAIN:
            continue
        group = place // each
        rows = slice(group * out, (group + 1) * out)  # the outputs that read this channel
        column = weight[rows, place - group * each] * slopes[place].unsqueeze(-1)
        columns[source] = columns[source] + F.pad(column, (0, 0, 0, 0, rows.start, weight.shape[0] - rows.stop))
    return torch.stack(columns, 1)


# Between convolution and activation ----------------------------------------------------------------------------------


@dataclass(eq=False)
class DelayedBatchNorm:
    """A normalization by the statistics of a batch that waits for its activation: one kernel computes both."""

    norm: BatchNorm
    counted: bool = False  # whether the running statistics have seen the batch

    def now(self) -> BatchNorm:
        """However often it is computed, its running statistics follow it once."""
        return self.norm._replace(running_mean=None, running_var=None) if self.counted else self.norm


@dataclass(eq=False)  # not frozen either
class Response:
    """The response of a convolution on its way to the activation: convolved, then an affine map for each channel."""

    convolution: ConvolvedImage
    norm: Affine | None = None  # as long as it looks at no batch
    moments: tuple[Tensor, Tensor] | None = None  # where a normalization had to see them; `norm` is in them
    delayed: DelayedBatchNorm | None = None  # then neither of both is there
    steps: int = 0

    def settled(self) -> Response:
        """The same with nothing delayed."""
        if self.delayed is None:
            return self
        settled = _normalize(replace(self, delayed=None), self.delayed.now())
        self.delayed.counted = True
        return settled

    def now(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, (B, K, O, H', W') each."""
        if self.delayed is not None:
            return self.settled().now()
        if self.moments is not None:
            return self.moments
        moments = self.convolution.moments()
        return moments if self.norm is None else normalized(self.norm, *moments)

    def then(self, step: Affine) -> Response:
        """After one more affine map."""
        if self.delayed is not None:
            return self.settled().then(step)
        if self.moments is not None:
            return replace(self, moments=normalized(step, *self.moments), steps=self.steps + 1)
        norm = step if self.norm is None else _composed(self.norm, step)
        return Response(self.convolution, norm, steps=self.steps + 1)

    def expect(self, activation: Activation) -> Tensor:
        """The expected activation (B, O, H', W')."""
        p, conv = self.convolution.p, self.convolution.conv
        if self.delayed is not None:
            fused = normalized_response(p, conv, self.delayed.now(), activation)
            if fused is None:
                return self.settled().expect(activation)
            result, self.delayed.counted = fused, True
        elif self.moments is None and self.convolution.distinct is None:
            result = respond(p, conv, self.norm, activation)
        else:
            result = mix_expectations(p, activation, *self.now(), incomplete_windows(p, conv))
        # The rest of the network rounds differently in another layout.
        return result.contiguous(memory_format=torch.channels_last) if self.convolution.channels_last else result


def _composed(first: Affine, second: Affine) -> Affine:
    def coefficients() -> tuple[Tensor, Tensor]:
        (slope, offset), (factor, shift) = first.coefficients(), second.coefficients()
        return slope * factor, offset * factor + shift

    return Affine(lambda response: second.apply(first.apply(response)), coefficients)


def batch_norm(
    response: Response,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    delay: bool = False,
    process_group: Any = None,
) -> Response:
    """`torch.nn.functional.batch_norm` of a response, perhaps over the processes of a group.

    Args:
        delay: whether it may wait for what comes next, which is an activation as a rule.
    """
    if not training and running_mean is not None and running_var is not None:
        return response.then(fixed_batch_norm(running_mean, running_var, weight, bias, eps))
    response, steps = response.settled(), response.steps + 1
    norm = BatchNorm(weight, bias, running_mean, running_var, None, momentum, eps)
    simple = response.norm is None and response.moments is None and response.convolution.distinct is None
    if delay and simple and training:
        return Response(response.convolution, delayed=DelayedBatchNorm(norm), steps=steps)
    return _normalize(replace(response, steps=steps), norm, process_group)


def _normalize(response: Response, norm: BatchNorm, process_group: Any = None) -> Response:
    """After a normalization by the statistics of the batch, which is no step here."""
    options = {**norm.options(), "process_group": process_group}
    found = _fused_statistics(response)
    if found is not None:
        return replace(response.then(batch_norm_affine(*found, **options)), steps=response.steps)
    shares = response.convolution.p.weights
    moments = batch_norm_moments(*response.now(), shares, training=True, **options)
    return replace(response, moments=moments, norm=None)


def _fused_statistics(response: Response) -> tuple[int, Tensor, Tensor] | None:
    """How many responses a channel has, and their mean and variance (O,), where a kernel finds these by itself."""
    convolution = response.convolution
    if response.moments is not None or convolution.distinct is not None:
        return None
    found = batch_statistics(convolution.p, convolution.conv)
    if found is None:
        return None
    center, total = found
    if response.norm is not None:
        slope, offset = response.norm.coefficients()
        center, total = center * slope + offset, total * slope.square()
    batch, _, rows, columns = convolution.size
    return batch * rows * columns, center, total


def operate(
    response: Response, func: Callable[..., Any], name: str, operands: list[Any], place: int, kwargs: dict[str, Any]
) -> Response | None:
    """A cast, or arithmetic with numbers or with a number for every channel; None where it is something else."""
    slope = 1.0 if name in ALIASES else _image.affine_slope(name, operands, place, kwargs)
    out = response.convolution.conv.weight.shape[0]
    before, after = operands[:place], operands[place + 1 :]
    others = [] if name in ALIASES else [*before, *after]
    if slope is None or any(len(_image.channel_numbers(other, out) or ()) != out for other in others):
        return None

    def apply(tensor: Tensor) -> Tensor:
        arguments = [*before, tensor.clone(), *after]  # it may work in place
        result: Tensor = func(*arguments, **kwargs)
        return result

    def coefficients() -> tuple[Tensor, Tensor]:
        like = response.convolution.conv.weight
        offset = apply(torch.zeros(1, out, 1, 1, dtype=like.dtype, device=like.device)).flatten()
        factor = slope.reshape(-1) if isinstance(slope, Tensor) else torch.full((1,), slope).to(offset)
        return factor.expand(out), offset

    return response.then(Affine(apply, coefficients))


# Activation ----------------------------------------------------------------------------------------------------------


def build_activation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """The module that does what this call of a pointwise function does; None where there is none."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("input", "inplace")}
    args = args[1:]
    if name == "prelu":
        return _prelu(*args, **kwargs)
    try:
        module = ACTIVATIONS[name](*args, **kwargs)
    except TypeError:  # an argument that the module does not have, such as `out`
        return None
    if hasattr(module, "inplace"):
        module.__dict__["inplace"] = False
    return module


def _prelu(weight: Tensor) -> nn.Module:
    """A PReLU whose slopes are the tensor of the call, whatever that was computed from."""
    module = nn.PReLU(weight.numel(), device="meta")
    del module.weight
    module.__dict__["weight"] = weight
    return module
