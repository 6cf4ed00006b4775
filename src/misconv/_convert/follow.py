"""Following a network through its stem: what a function of torch returns that reads a stand-in.

The image is answered for in `_follow_image`; here are its convolution, and what lies between it and the activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from misconv._convert import image as _image
from misconv._convert.follow_image import (
    answer_image,
    by_checkpoint,
    in_backward,
    operands_of,
    plain_name,
    unfollowed,
    works_in_place,
)
from misconv._convert.image import Image
from misconv._convert.stem import (
    ALIASES,
    POINTWISE,
    WITHOUT_NUMBERS,
    Response,
    batch_norm,
    build_activation,
    convolve,
    operate,
)
from misconv._convert.tracker import Done, Tracker, among, has_tensor, substituted
from misconv._math import ACTIVATIONS, Activation
from misconv._torch import first_of

__all__ = ["SyncBatchNorm", "answer", "end", "mark", "recorded", "stand_in"]


def answer(tracker: Tracker, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function returns that may read stand-ins."""
    done: list[tuple[Tensor, Tensor]] = []
    responses: list[tuple[Tensor, Response]] = []
    images: list[tuple[Tensor, Image]] = []
    for tensor, record in tracker.records_in(args, kwargs):
        if isinstance(record, Response):
            responses.append((tensor, record))
        elif isinstance(record, Done):
            done.append((tensor, record.result))
        elif record is not None and among(images, tensor) is None:
            images.append((tensor, record))
    if done:
        args, kwargs = substituted((args, kwargs), lambda tensor: _or_else(among(done, tensor), tensor))
        return func(*args, **kwargs)
    if images and not responses and func is F.conv2d:
        image = among(images, args[0] if args else kwargs.get("input"))
        if image is not None and not image.dropped:
            return _convolve(tracker, image, func, args, kwargs)
    for tensor, image in images:
        tracker.own(tensor, image)
    if responses:
        return _answer_response(tracker, *responses[0], func, args, kwargs)
    return answer_image(tracker, images, func, args, kwargs) if images else tracker.call(func, args, kwargs)


def _or_else(value: Tensor | None, default: Tensor) -> Tensor:
    return default if value is None else value


# Convolution ---------------------------------------------------------------------------------------------------------


def _convolve(tracker: Tracker, image: Image, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, weight, bias, *geometry = _conv_arguments(*args, **kwargs)
    tracker.calls += 1
    if tracker.stem is not None and not _is_stem(tracker, weight):
        return unfollowed(tracker, [(tensor, image)], func, args, kwargs, tracker.call(func, args, kwargs))
    pixels = image.pixels
    reason = pixels.spoiled
    if pixels.mode != "constant" and geometry[1] not in (0, (0, 0), [0, 0], (0,), "valid"):
        reason = f"padding with {pixels.mode} and then with zeros, by the convolution itself,"
    if reason is not None:
        if tracker.stem is not None:
            raise RuntimeError(f"the stem {tracker.stem} cannot be followed any more: {reason} changes the image")
        tracker.note(image, "conv2d", "spoiled", reason=reason)
        return tracker.call(func, args, kwargs)
    if image.recomputed and tracker.image_connected and tracker.has_gradients():
        raise RuntimeError(
            "an activation checkpoint with use_reentrant=True around the stem cannot be followed where the image is "
            "read elsewhere and has gradients, for they would be computed twice; pass use_reentrant=False"
        )

    def mean() -> Tensor:
        return tracker.p.mean.detach() if tracker.detaches else tracker.p.mean

    response = Response(tracker.call(convolve, (tracker.p, image, tensor, mean, weight, bias, *geometry), {}))
    if min(response.convolution.size) < 1:
        raise ValueError(
            f"x must be at least as large as the windows of the first convolution, {tuple(weight.shape[2:])} "
            f"with its padding and dilation, got images of {tuple(tracker.p.shape[-2:])}"
        )
    tracker.weight = weight
    tracker.note(image, "conv2d", "convolution", result=response)
    return _proceed(tracker, None, response, lambda: tracker.call(func, args, kwargs))


def _conv_arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...]:
    """The arguments of `torch.nn.functional.conv2d` in their order, however they were given, with its defaults."""
    return input, weight, bias, stride, padding, dilation, groups


def _is_stem(tracker: Tracker, weight: Tensor) -> bool:
    """Whether this is the convolution that was found, and not another one that reads the image."""
    assert tracker.stem is not None
    if tracker.stem.calls == 1 or tracker.calls == 1:
        return True
    if not in_backward():
        return False
    # Computed again for the backward pass, so the order does not tell.
    if not isinstance(weight, nn.Parameter):
        raise RuntimeError(
            "activation checkpointing around several convolutions of the image, with weights that are computed, cannot "
            "be followed; checkpoint what comes after the stem"
        )
    return weight is tracker.weight


# Between convolution and activation ----------------------------------------------------------------------------------


def _answer_response(
    tracker: Tracker, tensor: Tensor, response: Response, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    name = plain_name(func)
    first = args[0] if args else kwargs.get("input", kwargs.get("self"))
    response = recorded(tracker, tensor, response)
    if first is tensor:
        if name in POINTWISE and _is_activation(tracker, name):
            return _activate(tracker, tensor, response, func, args, kwargs)
        if func in (F.batch_norm, sync_batch_norm):
            step = _normalized(tracker, response, func, args, kwargs)
            tracker.note(response, name, "norm", result=step)
            return _proceed(tracker, None, step, lambda: tracker.call(func, args, kwargs))
        if name in ALIASES and (name != "detach" or by_checkpoint()):
            return _alias(tracker, tensor, response, func, args, kwargs)
    scaled = _scaled(tensor, response, func, args, kwargs) if name in _image.ARITHMETIC else None
    if scaled is not None:
        tracker.note(response, name, "affine", result=scaled)
        in_place = tensor if works_in_place(func, args, kwargs) else None
        return _proceed(tracker, in_place, scaled, lambda: tracker.call(func, args, kwargs))
    if _is_named_end(tracker, tensor, func, args):
        return (end(tracker, response, tracker.activation),)
    return _read(tracker, tensor, response, func, args, kwargs)


def recorded(tracker: Tracker, tensor: Tensor, response: Response) -> Response:
    """A response as its convolution was computed: with or without gradients."""
    convolution = response.convolution
    if convolution.with_gradients or not torch.is_grad_enabled():
        return response
    if not tracker.values(tensor).requires_grad:  # under torch.no_grad()
        return replace(response, convolution=convolution.detached())
    # In a reentrant checkpoint, which computes it again. Parameters and the MFA itself have their gradients anyway.
    leaves = [t for t in (convolution.conv.weight, convolution.conv.bias) if t is not None]
    if convolution.p is tracker.p and all(isinstance(leaf, nn.Parameter) for leaf in leaves):
        return response
    raise RuntimeError(
        "an activation checkpoint with use_reentrant=True that ends between the convolution and its activation cannot "
        "be followed here; let it hold both, or pass use_reentrant=False"
    )


def _normalized(tracker: Tracker, response: Response, func: Any, args: Any, kwargs: dict[str, Any]) -> Response:
    """The response after a normalization."""
    if "input" in kwargs:
        kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    stem = tracker.stem
    # Nobody else may want to see what lies between a normalization and its activation.
    delay = func is F.batch_norm and stem is not None and not stem.kept and tracker.table is None
    return batch_norm(response, *args[1:], **kwargs, delay=delay and tracker.outputs is None)


def _scaled(tensor: Tensor, response: Response, func: Any, args: Any, kwargs: dict[str, Any]) -> Response | None:
    """The response after arithmetic per channel; None where the function does more."""
    operands, rest = operands_of(args, kwargs)
    places = [place for place, operand in enumerate(operands) if operand is tensor]
    if len(places) == 1 and "out" not in rest:
        return operate(response, func, plain_name(func), operands, places[0], rest)
    return None


def _alias(tracker: Tracker, tensor: Tensor, response: Response, func: Any, args: Any, kwargs: Any) -> Any:
    """A copy of a response, perhaps in another type or layout."""
    name, layout = plain_name(func), _layout(func, args, kwargs)
    result = tracker.call(func, args, kwargs)
    if result is tensor and layout is None:
        return tensor
    if result.dtype == tensor.dtype and layout is None:
        return tracker.track_response(result, response)
    step = operate(response, func, name, list(args), 0, kwargs)
    assert step is not None
    step = replace(step, steps=response.steps)  # a cast is no step of its own
    if layout is not None:
        last = layout == torch.channels_last
        step = replace(step, convolution=replace(step.convolution, channels_last=last))
    tracker.note(response, name, "affine", result=step)
    return tracker.track_response(result, step)


def _layout(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.memory_format | None:
    """The layout that a copy is asked to have; None where it keeps its own."""
    default = torch.contiguous_format if plain_name(func) == "contiguous" else None
    asked = kwargs.get("memory_format", first_of((a for a in args[1:] if isinstance(a, torch.memory_format)), default))
    return None if asked == torch.preserve_format else asked


def _read(tracker: Tracker, tensor: Tensor, response: Response, func: Any, args: Any, kwargs: Any) -> Any:
    """A function that has no business with a response."""
    name, stem = plain_name(func), tracker.stem
    result = tracker.call(func, args, kwargs)
    if not has_tensor(result) or name == "requires_grad":
        return result
    tracker.note(response, name, "other")
    if stem is not None and not stem.kept and not stem.named:
        raise RuntimeError(
            f"the network did not run its stem {stem} as it did when it was converted: {name}() reads what lies "
            "between convolution and activation; convert it again in the form it has now"
        )
    return tracker.values(result) if result is tensor and not works_in_place(func, args, kwargs) else result


def _proceed(tracker: Tracker, in_place: Tensor | None, response: Response, native: Callable[[], Any]) -> Tensor:
    """The stand-in for the response, or the end of the stem where it has no activation."""
    stem = tracker.stem
    if stem is None:
        return tracker.track_response(native(), response)
    if stem.activation is None and response.steps == stem.steps:
        result = end(tracker, response, None)
        if in_place is not None:
            tracker.track(in_place, Done(result))
        return result
    if in_place is not None and not stem.kept:
        return tracker.track(in_place, response)
    value = response.expect("identity") if stem.kept else stand_in(tracker, response)
    if in_place is not None:
        tracker.call(Tensor.copy_, (in_place, value), {})
        return tracker.track(in_place, response)
    return tracker.track_response(value, response)


def stand_in(tracker: Tracker, response: Response) -> Tensor:
    """A tensor of the right shape and type, which nobody should read.

    Only an activation that the user has named does compute something with it, perhaps in place.
    """
    convolution, named = response.convolution, tracker.stem is not None and tracker.stem.named
    weight = convolution.conv.weight
    number, device = 0.0 if named else math.nan, weight.device
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if tracker.table is not None:
        value = torch.full((), number, dtype=dtype, device=device).expand(convolution.size)
    else:
        value = _repeated(convolution.size, number, dtype, device, torch.is_inference_mode_enabled())
        if torch.is_grad_enabled() and convolution.requires_grad:
            value = value.detach().requires_grad_()  # as the response would, which matters to activation checkpoints
    return value.clone() if named else value


@lru_cache(256)
def _repeated(size: tuple[int, ...], *number: Any) -> Tensor:
    return _number(*number).expand(size)


@cache
def _number(value: float, dtype: torch.dtype, device: torch.device, inference: bool) -> Tensor:
    """One number, made once for each mode: nobody writes into a stand-in."""
    return torch.full((), value, dtype=dtype, device=device)


# Activation ----------------------------------------------------------------------------------------------------------


def _is_activation(tracker: Tracker, name: str) -> bool:
    stem = tracker.stem
    return stem is None or (name == stem.function and not stem.named)


def _is_named_end(tracker: Tracker, tensor: Tensor, func: Any, args: Any) -> bool:
    """Whether this is the end of an activation that the user has named (see `mark`)."""
    named = tracker.stem is not None and tracker.stem.named
    return named and func is torch.broadcast_tensors and args[-1] is tensor


def _activate(tracker: Tracker, tensor: Tensor, response: Response, func: Any, args: Any, kwargs: Any) -> Any:
    name = plain_name(func)
    if tracker.stem is None:
        tracker.note(response, name, "activation", (args, kwargs))
        values = tracker.values(tracker.call(func, args, kwargs))
        if works_in_place(func, args, kwargs):
            tracker.track(tensor, Done(values))
        return values
    result = end(tracker, response, _called_activation(tracker, name, args, kwargs))
    if works_in_place(func, args, kwargs):
        tracker.track(tensor, Done(result))
    return result


def _called_activation(tracker: Tracker, name: str, args: Any, kwargs: dict[str, Any]) -> Activation:
    """The activation with the arguments of this call: they may depend on the mode that the network is in."""
    # The one found at conversion, where it is the same: while torch compiles, modules had better be old ones.
    known, alone = tracker.activation, len(args) == 1 and not set(kwargs) - {"inplace"}
    if known is not None and alone and name in WITHOUT_NUMBERS and type(known) is ACTIVATIONS[name]:
        return known  # without a module that is made to be compared
    called = build_activation(name, args, kwargs)
    if called is None:
        raise RuntimeError(f"the network calls {name}() as it did not when it was converted; convert it again")
    # (Compared without `repr` of a module, which torch 2.8 cannot compile.)
    if known is not None and type(known) is type(called) and known.extra_repr() == called.extra_repr():
        return known
    return called


def end(tracker: Tracker, response: Response, activation: Activation | None) -> Tensor:
    """What the stem returns."""
    result = response.expect("identity" if activation is None else activation)
    tracker.finished += 1
    if tracker.outputs is not None:
        tracker.outputs.append((response, result))
    return result


# An activation that the user has named: whatever it computes, its result is replaced by its expectation.


def _replace_result(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:
    # A function of torch that does nothing here, for all sizes are the same, but that is followed, compiled or not.
    expected: Tensor = torch.broadcast_tensors(result, args[0])[0]
    return expected


def mark(module: nn.Module) -> None:
    """Let the end of this activation be seen."""
    module.register_forward_hook(_replace_result)


# SyncBatchNorm -------------------------------------------------------------------------------------------------------


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm, which hides its work from torch functions where it takes statistics over processes."""

    def forward(self, input: Tensor) -> Tensor:
        """As in torch; statistics of a response are those of all completions, over all processes."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        group = self.process_group or (torch.distributed.group.WORLD if distributed else None)
        several = distributed and torch.distributed.get_world_size(group) > 1
        if not (several and self.training and has_torch_function_unary(input)):
            return super().forward(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else momentum
        statistics = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        result: Tensor = sync_batch_norm(
            input, *statistics, self.weight, self.bias, True, momentum, self.eps, process_group=group
        )
        return result


def sync_batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.batch_norm` with statistics over a `process_group`; only for tensors that are followed."""
    if not has_torch_function_unary(input):
        raise TypeError("input must be followed; torch.nn.SyncBatchNorm normalizes everything else")
    return handle_torch_function(sync_batch_norm, (input,), input, *args, **kwargs)
