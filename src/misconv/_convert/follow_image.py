"""What functions of torch do to the image before its convolution: arithmetic, padding, choice of channels, in place.

Each function here answers for a function of torch: it calls it on the mean image, and gives the result a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from misconv._convert import image as _image
from misconv._convert.image import Image, Selection
from misconv._convert.stem import ALIASES, POINTWISE
from misconv._convert.tracker import Tracker, among, has_tensor, substituted
from misconv._torch import DisableTorchFunctionSubclass, in_graph_task

__all__ = ["answer_image", "by_checkpoint", "in_backward", "operands_of", "plain_name", "unfollowed", "works_in_place"]

# They may return the same values in the same memory; `get` is an attribute, such as `data`.
_VIEWS = {"get", "view", "reshape", "reshape_as", "expand", "expand_as", "getitem", "requires_grad", "alias", "squeeze"}
# Of their second argument they read shape, type and device alone.
_PROTOTYPES = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_LIKE = {"zeros_like", "ones_like", "empty_like", "full_like"}
_IN_PLACE_OPERATORS = {"setitem", "iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "imod", "ipow"}

Images = list[tuple[Tensor, Image]]  # each tensor once


def answer_image(tracker: Tracker, images: Images, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function returns that reads images, and no response."""
    name = plain_name(func)
    first = args[0] if args else kwargs.get("input")
    image = tracker.record(first)
    if func is F.pad and isinstance(image, Image):
        return _pad(tracker, image, func, args, kwargs)
    if name in _image.ARITHMETIC:
        return _arithmetic(tracker, images, func, args, kwargs)
    if name in ("setitem", "copy"):
        return _assign(tracker, images, func, args, kwargs)
    result = tracker.call(func, args, kwargs)
    made = _followed(tracker, images, func, args, kwargs, result)
    return unfollowed(tracker, images, func, args, kwargs, result) if made is None else made


def _followed(tracker: Tracker, images: Images, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """The result with its record where the function has only chosen, copied or looked; None where it did more."""
    name = plain_name(func)
    first = args[0] if args else kwargs.get("input")
    image = tracker.record(first)
    if (image is None and name in _PROTOTYPES) or name.startswith(("new_", "rand")):
        return result
    if name in _image.SELECTIONS:
        made = _select(tracker, images, func, args, kwargs, result)
        if made is not None:
            return made
    if isinstance(image, Image) and isinstance(first, Tensor) and isinstance(result, Tensor):
        if _is_alias(tracker, name, first, result):
            return _alias(tracker, first, image, name, result)
        if name in _LIKE:
            blank = image.copy()
            _image.assign(blank, None)
            return tracker.track(result, blank)
    return None


def unfollowed(tracker: Tracker, images: Images, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """The result of a function that is not followed: it has read the mean image, and may have changed it."""
    name, in_place = plain_name(func), works_in_place(func, args, kwargs)
    for tensor, image in images:
        if has_tensor(result) or in_place:
            tracker.note(image, name, "other", makes_image=_is_like_an_image(result))
        if (in_place and tensor is args[0]) or tensor is kwargs.get("out"):
            image.pixels.spoiled = f"{name}() in {tracker.where[-1] or 'forward'!r}"
    if in_place:
        return result
    if tracker.stem is not None and tracker.has_gradients() and has_tensor(result):
        connected = [(tensor, tracker.connected(tensor, image)) for tensor, image in images]

        def substitute(tensor: Tensor) -> Tensor:
            found = among(connected, tensor)
            return tensor if found is None else found

        args, kwargs = substituted((args, kwargs), substitute)
        return func(*args, **kwargs)
    # What may return its argument itself, such as dropout in evaluation, does not return the image.
    return tracker.values(result) if among(images, result) is not None else result


# Arithmetic and padding ----------------------------------------------------------------------------------------------


def _pad(tracker: Tracker, image: Image, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = tracker.call(func, args, kwargs)
    made = _image.pad(image, *_pad_arguments(*args, **kwargs))
    if isinstance(made, str):
        tracker.note(image, "pad", "other", reason=made, makes_image=True)
        return result
    tracker.note(image, "pad", "padding", result=made)
    return tracker.track(result, made)


def _pad_arguments(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> tuple[Any, str]:
    return tuple(pad), mode


def _arithmetic(tracker: Tracker, images: Images, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    operands, rest = operands_of(args, kwargs)
    out = rest.pop("out", None)
    made = _scaled(tracker, func, operands, rest)
    result = tracker.call(func, args, kwargs)
    target = tracker.record(out)
    if made is None or (out is not None and not (isinstance(target, Image) and _image.assign(target, made))):
        return unfollowed(tracker, images, func, args, kwargs, result)
    for _, image in images:
        tracker.note(image, plain_name(func), "affine", result=made)
    return result if out is not None else tracker.track(result, made)


def _scaled(tracker: Tracker, func: Any, operands: list[Any], rest: dict[str, Any]) -> Image | None:
    """The one image among the operands after an arithmetic function; None where it is not affine."""
    places = [place for place, operand in enumerate(operands) if tracker.record(operand) is not None]
    if len(places) != 1:
        return None
    (place,) = places
    image, in_place = tracker.record(operands[place]), works_in_place(func, operands, rest)
    slope = _image.affine_slope(plain_name(func), operands, place, rest)
    if slope is None or not isinstance(image, Image) or (in_place and place != 0):
        return None
    return _image.scale(image, operands, place, slope, in_place=in_place)


def _assign(tracker: Tracker, images: Images, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`x[…] = value` and `x.copy_(value)`."""
    name = plain_name(func)
    target, value = tracker.record(args[0]), tracker.record(args[-1])
    if not isinstance(target, Image):
        result = tracker.call(func, args, kwargs)
        for _, image in images:
            tracker.note(image, name, "other", makes_image=True)
        return result
    part: Image | None = target
    if name == "setitem":
        chosen = tracker.call(Tensor.__getitem__, args[:2], {})
        found = _selections(tracker, [(args[0], target)], Tensor.__getitem__, args[:2], {}, [chosen])
        part = None if found[0] is None else _image.select([target], found[0], view=True)
    if part is None or not _image.assign(part, value if isinstance(value, Image) else None):
        target.pixels.spoiled = f"{name}() in {tracker.where[-1] or 'forward'!r}"
        tracker.note(target, name, "other", makes_image=True)
    result = tracker.call(func, args, kwargs)
    return args[0] if name == "copy" else result


# Channels and copies -------------------------------------------------------------------------------------------------


def _selections(
    tracker: Tracker, images: Images, func: Any, args: Any, kwargs: Any, results: list[Tensor]
) -> Sequence[Selection | None]:
    """What a function does to channels: seen by calling it on numbers or, while torch compiles, remembered."""
    number = len(tracker.selections)
    found: tuple[Selection | None, ...] = (None,) * len(results)
    if tracker.table is not None and tracker.stem is not None:
        found = tracker.stem.selections[number] if number < len(tracker.stem.selections) else found
    else:

        def call(substitute: Callable[[Tensor], Tensor]) -> Any:
            changed, more = substituted((args, kwargs), substitute)
            return tracker.call(func, changed, more)

        if plain_name(func) != "flip" or _image.flips_channels(call):
            size = tracker.values(images[0][0]).shape[-2:]
            found = tuple(_image.find_selections(call, images, results, size))
    tracker.selections.append(found)
    return found


def _select(tracker: Tracker, images: Images, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    results = [result] if isinstance(result, Tensor) else list(result)
    found = _selections(tracker, images, func, args, kwargs, results)
    sources = [image for _, image in images]
    made: list[Tensor] = []
    for tensor, selection in zip(results, found, strict=True):
        if selection is None:
            return None
        distinct = len(set(selection[1])) == len(selection[1]) and None not in selection[1]
        view = len(images) == 1 and distinct and _shares(tracker, tensor, images[0][0])
        image = _image.select(sources, selection, view=view)
        if image is None:
            return None
        for source in sources:
            tracker.note(source, plain_name(func), "selection", result=image)
        made.append(tracker.track(tensor, image))
    return made[0] if isinstance(result, Tensor) else type(result)(made)


def _is_alias(tracker: Tracker, name: str, tensor: Tensor, result: Tensor) -> bool:
    if result.shape != tensor.shape or not result.is_floating_point():
        return False
    if name in ALIASES:
        return True
    return name in _VIEWS and _shares(tracker, result, tensor) and result.stride() == tensor.stride()


def _shares(tracker: Tracker, result: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    if tracker.table is not None:  # compiled tensors have no memory yet; a view is then taken for a copy
        return False
    with DisableTorchFunctionSubclass():
        return result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _alias(tracker: Tracker, tensor: Tensor, image: Image, name: str, result: Tensor) -> Tensor:
    if result is tensor:
        return tensor
    again = name == "detach" and by_checkpoint()
    detached = image.detached or (name == "detach" and not again)
    same = image if _shares(tracker, result, tensor) else image.copy()
    if result.dtype != tensor.dtype or (tracker.table is None and result.stride() != tensor.stride()):
        same.pixels.changed = True  # other rounding, or a layout in which a convolution may round differently
    return tracker.track(result, replace(same, detached=detached, recomputed=image.recomputed or again))


# Calls ---------------------------------------------------------------------------------------------------------------


def plain_name(func: Callable[..., Any]) -> str:
    """In place or not, operator or not: `relu_` and `relu`, `__mul__` and `mul`."""
    name: str = getattr(func, "__name__", "")
    return name.strip("_")


def works_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function changes its first argument."""
    name: str = getattr(func, "__name__", "")
    if name == "__set__":  # an attribute: `x.data = …`, but not `x.requires_grad = True`
        return isinstance(args[-1], Tensor)
    if name.endswith("__"):
        return name.strip("_") in _IN_PLACE_OPERATORS
    flag = name in POINTWISE and any(value is True for value in args[1:])  # F.relu(x, True)
    return name.endswith("_") or flag or kwargs.get("inplace") is True


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Operands by position, and the other arguments."""
    operands, rest = list(args), dict(kwargs)
    for name in ("input", "self", "other"):
        if name in rest:
            operands.append(rest.pop(name))
    return operands, rest


def in_backward() -> bool:
    """Whether this is computed again for a backward pass, by an activation checkpoint."""
    return not torch.compiler.is_compiling() and in_graph_task()


def by_checkpoint() -> bool:
    """Whether a tensor is detached by a reentrant checkpoint, which does so before it runs its function again."""
    return in_backward() and not torch.is_grad_enabled()


def _is_like_an_image(result: Any) -> bool:
    return isinstance(result, Tensor) and result.dim() == 4 and result.is_floating_point() and result[0, 0].numel() > 1
