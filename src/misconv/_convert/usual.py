"""The usual stem in few steps: a convolution of the image as it is, a batch normalization, an activation.

Small networks are bound by the host, and following a stem is most of what a converted network adds to it. Each step
here looks at the few things that make it usual, then does what `follow` would do. For everything else it returns None,
and `follow` answers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from misconv._conv import Convolution
from misconv._convert import follow
from misconv._convert.image import Image
from misconv._convert.stem import WITHOUT_NUMBERS, ConvolvedImage, Response, Stem, batch_norm, is_channels_last
from misconv._convert.tracker import FLAT, Done, Tracked, Tracker
from misconv._math import ACTIVATIONS, Padding, Pair, output_size

__all__ = ["answer"]

_PARAMETERS = {Tensor, nn.Parameter, type(None)}  # no stand-ins, and no subclasses that compute in their own way


def answer(tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function returns that may read stand-ins: `follow.answer`."""
    stem = tracker.stem
    if args and type(args[0]) is Tracked and stem is not None and stem.is_usual:  # never while torch compiles
        result: Tensor | None = None
        if func is F.batch_norm:
            result = _normalize(tracker, args[0], args, kwargs)
        elif func is F.conv2d:
            result = _convolve(tracker, args[0], args)
        elif getattr(func, "__name__", None) == stem.function:
            result = _activate(tracker, args[0], stem, args, kwargs)
        if result is not None:
            return result
    return follow.answer(tracker, func, args, kwargs)


def _convolve(tracker: Tracker, tensor: Tracked, args: tuple[Any, ...]) -> Tensor | None:
    """The stand-in for the response to the image as it entered the network."""
    image = tensor.record
    if len(args) != 7 or not isinstance(image, Image) or not image.fresh:
        return None
    _, weight, bias, stride, padding, dilation, groups = args
    p = tracker.p
    if type(weight) not in _PARAMETERS or type(bias) not in _PARAMETERS:
        return None
    if p.means.dtype != weight.dtype or not p.means.is_contiguous():
        return None
    try:
        layout = _layout(p.means.shape, p.means.stride(), weight.shape, weight.stride(), stride, padding, dilation)
    except TypeError:  # a list, which is not hashable
        return None
    if layout is None:
        return None
    tracker.calls += 1
    tracker.weight = weight
    conv = Convolution(weight, bias, stride, padding, dilation, groups)
    return _proceed(tracker, Response(ConvolvedImage(p, conv, layout[0], None, layout[1], torch.is_grad_enabled())))


@lru_cache(1024)
def _layout(
    means: tuple[int, ...],
    means_strides: tuple[int, ...],
    weight: tuple[int, ...],
    weight_strides: tuple[int, ...],
    stride: Pair,
    padding: Padding,
    dilation: Pair,
) -> tuple[tuple[int, ...], bool] | None:
    """The size of the response to contiguous images, and whether the network would have its channels last.

    None for several components, whose mean may have other strides than they have, and where windows do not fit.
    """
    if len(means) != 5 or means[1] != 1 or len(weight) != 4:
        return None
    size = (means[0], weight[0], *output_size(means[3:], weight[2:], stride, padding, dilation))
    # Also contiguous images may have their channels last, if there is only one.
    image, strides = (means[0], *means[2:]), (means_strides[0], *means_strides[2:])
    last = is_channels_last(image, strides) or is_channels_last(weight, weight_strides)
    return None if min(size) < 1 else (size, last)


def _normalize(tracker: Tracker, tensor: Tracked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The stand-in for a response behind a batch normalization."""
    response = tensor.record
    if not isinstance(response, Response) or not _is_alone(args, kwargs):
        return None
    response = follow.recorded(tracker, tensor, response)
    return _proceed(tracker, batch_norm(response, *args[1:], **kwargs, delay=tracker.outputs is None))


def _proceed(tracker: Tracker, response: Response) -> Tensor:
    return tracker.track_response(follow.stand_in(tracker, response), response)


def _activate(
    tracker: Tracker, tensor: Tracked, stem: Stem, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The end of the stem, at an activation without arguments."""
    response, name, activation = tensor.record, stem.function, tracker.activation
    if not isinstance(response, Response) or len(args) != 1 or (kwargs and list(kwargs) != ["inplace"]):
        return None
    if activation is None or name not in WITHOUT_NUMBERS or type(activation) is not ACTIVATIONS[name]:
        return None
    result = follow.end(tracker, follow.recorded(tracker, tensor, response), activation)
    if kwargs.get("inplace") is True:
        tensor.record = Done(result)
    return result


def _is_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether none but the first of the arguments can be a stand-in."""
    return FLAT.issuperset(map(type, args[1:])) and FLAT.issuperset(map(type, kwargs.values()))
