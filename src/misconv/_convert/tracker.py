"""Records of what a tensor stands for, which travel with the tensor through the functions of torch.

Eagerly, a tensor with a record is a `Tracked`, a subclass of Tensor whose functions come by a `Tracker`. Nothing else
is watched, so the rest of the network runs as if nobody followed it; and what an activation checkpoint computes again
in the backward pass is followed again. While torch compiles or transforms, where subclasses are not welcome, a mode
watches all functions, and the records are in a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from misconv._backend import is_eager
from misconv._convert import image as _image
from misconv._convert.image import Image
from misconv._convert.stem import Response, Stem
from misconv._torch import DisableTorchFunctionSubclass, first_of, pytree
from misconv.mfa import MFA

__all__ = ["FLAT", "Done", "Read", "Record", "Tracked", "Tracker", "among", "has_tensor", "substituted"]


@dataclass(eq=False)
class Done:
    """What has become of a response whose activation was computed in place: wherever it is read, read the result."""

    result: Tensor


Record = Image | Response | Done


@dataclass(eq=False)
class Read:
    """A function that has read a tensor with a record, for the search of the stem."""

    source: Record
    name: str
    kind: str
    where: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    result: Record | None = None
    reason: str = ""
    makes_image: bool = False  # whether it returns something like an image

    def __str__(self) -> str:
        called = f"{self.name}()" if self.name else "scripted code"
        return f"{called} in {self.where or 'forward'!r}"


_NOTHING = nullcontext()


class Tracked(Tensor):
    """A tensor that stands for something else: its record says for what."""

    tracker: Tracker
    record: Record | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None  # who it is as a rule
        if type(first) is not Tracked or first.record is None:
            first = first_of(_tracked_in(args, kwargs))
        if first is not None:
            return first.tracker.answer(first.tracker, func, args, kwargs)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def dim(self) -> int:
        """Asked for by every normalization, so without the long way through all functions."""
        with DisableTorchFunctionSubclass():
            return super().dim()


class _Watch(TorchFunctionMode):
    """While this is active, the functions of torch come by a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.tracker.answer(self.tracker, func, args, kwargs or {})


class Tracker:
    """One run of a network on the images `p`, along a stem; without one, a search for it that writes a `log`.

    In a search the stand-ins hold the values of the network itself, and every convolution of the image is followed.
    Otherwise a response in the stem holds NaN, or its mean where the network keeps it. ``answer(tracker, func, args,
    kwargs)`` is what a function returns that may read stand-ins.
    """

    def __init__(
        self, answer: Callable[..., Any], p: MFA, stem: Stem | None = None, activation: nn.Module | None = None
    ) -> None:
        self.answer, self.p, self.stem, self.activation = answer, p, stem, activation
        self.log: list[Read] = []
        self.where: list[str] = [""]
        self.selections: list[tuple[_image.Selection | None, ...]] = []
        self.image_connected = False  # whether gradients of the image come from elsewhere too
        self.finished = 0  # how often the stem came to its end
        self.outputs: list[tuple[Response, Tensor]] | None = None  # of the stem, where somebody wants them
        self.stand_ins: list[weakref.ref[Tensor]] = []
        self.calls = 0  # convolutions of the image
        self.weight: Tensor | None = None  # of the one in the stem
        self.table: list[tuple[Tensor, Record]] | None = None if is_eager(p.means, p.logits) else []

    def start(self) -> Tensor:
        """The stand-in for the image: its mean."""
        means = self.p.means
        if self._may_borrow(means):
            # No view of the MFA, so that what is computed in place can never become a part of its graph, nor count as a
            # change of it: `detach` would share its version, by which gradients see that a tensor has changed.
            return self.track(means.data.select(1, 0), _image.source_image(means.shape[2], borrowed=True))
        mean = self.p.mean
        if self.detaches and mean.requires_grad:
            # The stem takes its gradients from the MFA; what else reads the image is connected when it does. An
            # activation checkpoint would otherwise go through the density twice.
            mean = mean.detach().requires_grad_().clone()
        return self.track(mean, _image.source_image(mean.shape[1]))

    def _may_borrow(self, means: Tensor) -> bool:
        """Whether the stand-in for the image may lie in the memory of the MFA, until somebody needs a copy (`own`).

        Nobody does in most networks, which hand the image to their convolution alone. A copy would be of the same
        layout, and of the same kind: one of an inference tensor may be none.
        """
        if not self.detaches or means.shape[1] > 1 or not means.is_contiguous() or self.has_gradients():
            return False
        return means.is_inference() == torch.is_inference_mode_enabled()

    @property
    def detaches(self) -> bool:
        """Whether the stand-in for the image has no gradients of its own; a graph that is compiled keeps them."""
        return self.table is None

    def following(self) -> AbstractContextManager[Any]:
        """What must be active while the network runs."""
        return _NOTHING if self.table is None else _Watch(self)

    def finish(self, result: Any) -> Any:
        """What the network returns, without records."""
        if self.table is None and type(result) is Tensor:
            return result

        def plain(leaf: Any) -> Any:
            record = self.record(leaf)
            if isinstance(record, Done):
                return record.result
            return self.connected(leaf, record) if isinstance(record, Image) else leaf

        return pytree.tree_map(plain, result)

    def keeps_response(self) -> bool:
        """Whether somebody still holds a stand-in for a response."""
        for reference in self.stand_ins:
            tensor = reference()
            if tensor is not None and isinstance(self.record(tensor), Response):
                return True
        return False

    # Tensors and records ---------------------------------------------------------------------------------------------

    def track(self, tensor: Tensor, record: Record) -> Tensor:
        """Give a tensor a record."""
        if self.table is not None:
            self.table[:] = [entry for entry in self.table if entry[0] is not tensor]
            self.table.append((tensor, record))
            return tensor
        tracked = tensor if type(tensor) is Tracked else tensor.as_subclass(Tracked)
        tracked.tracker, tracked.record = self, record
        return tracked

    def track_response(self, tensor: Tensor, response: Response) -> Tensor:
        """Give a tensor the record of a response, and see later whether somebody has kept it."""
        if self.table is not None:
            return self.track(tensor, response)
        tracked = tensor if type(tensor) is Tracked else tensor.as_subclass(Tracked)
        tracked.tracker, tracked.record = self, response
        self.stand_ins.append(weakref.ref(tracked))
        return tracked

    def record(self, tensor: object) -> Record | None:
        """What a tensor stands for; None where it stands for itself."""
        if self.table is not None:
            return first_of(record for known, record in self.table if known is tensor)
        return tensor.record if type(tensor) is Tracked else None

    def records_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, Record | None]]:
        """The tensors among the arguments of a function that may stand for something, and what they stand for."""
        if self.table is None:
            return [(tensor, tensor.record) for tensor in _tracked_in(args, kwargs)]
        return [(tensor, self.record(tensor)) for tensor in _tensors_in((args, kwargs))]

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The function itself."""
        if self.table is not None:
            return func(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor as it stands for itself."""
        if type(tensor) is not Tracked:
            return tensor
        with DisableTorchFunctionSubclass():
            return tensor.as_subclass(Tensor)

    def own(self, tensor: Tensor, image: Image) -> None:
        """Give an image memory of its own, before somebody writes there or makes a view of it."""
        image.fresh = False
        if image.borrowed:
            image.borrowed = False
            with DisableTorchFunctionSubclass(), torch.inference_mode(tensor.is_inference()):
                tensor.data = tensor.clone()

    def connected(self, tensor: Tensor, image: Image) -> Tensor:
        """The mean image, or what has become of it, with its gradients."""
        self.own(tensor, image)
        values = self.values(tensor)
        if image.detached or not self.detaches or not self.has_gradients():
            return values
        if image.pixels.spoiled is not None:
            raise RuntimeError(
                f"gradients of the image cannot be followed through {image.pixels.spoiled}, which changes it in place; "
                "change a copy"
            )
        self.image_connected = True
        return _image.connected_mean(image, values, self.p.mean)

    def has_gradients(self) -> bool:
        """Whether the mean image has gradients."""
        return torch.is_grad_enabled() and (self.p.means.requires_grad or self.p.logits.requires_grad)

    def note(
        self,
        source: Record,
        name: str,
        kind: str,
        call: tuple[Any, dict[str, Any]] = ((), {}),
        result: Record | None = None,
        reason: str = "",
        makes_image: bool = False,
    ) -> None:
        """Write down, in a search, who has read a record; `call` holds the arguments where they matter."""
        if self.stem is None:
            # Without the tensor itself: whether the network keeps it shall be seen.
            args, kwargs = call
            more = {key: value for key, value in kwargs.items() if self.record(value) is None}
            where = self.where[-1]
            self.log.append(Read(source, name, kind, where, (None, *args[1:]), more, result, reason, makes_image))


# Tensors by identity; not a dictionary of id(), which cannot be compiled.


def among(pairs: Sequence[tuple[Tensor, Any]], tensor: object) -> Any:
    """What belongs to this very tensor; None where it is not among them."""
    for known, value in pairs:
        if known is tensor:
            return value
    return None


# Nested arguments ----------------------------------------------------------------------------------------------------

_NESTED = (tuple, list, dict)
FLAT = {int, float, bool, type(None), Tensor, nn.Parameter}  # most arguments, which hold no others


def _tracked_in(args: Iterable[Any], kwargs: dict[Any, Any]) -> list[Tracked]:
    """The tensors with a record among nested arguments."""
    found: list[Tracked] = []
    for item in (*args, *kwargs.values()) if kwargs else args:
        kind = type(item)
        if kind in FLAT or (kind is tuple and FLAT.issuperset(map(type, item))):  # a number, a parameter, a stride …
            continue
        if kind is Tracked:
            if item.record is not None:
                found.append(item)
        elif isinstance(item, _NESTED):
            found += _tracked_in((), item) if isinstance(item, dict) else _tracked_in(item, {})
    return found


def _tensors_in(value: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> list[Tensor]:
    """All tensors among nested arguments. It runs before every function, so it makes few lists."""
    found: list[Tensor] = []
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _NESTED) and item:
            found += _tensors_in(item)
    return found


def substituted(value: Any, substitute: Callable[[Tensor], Any]) -> Any:
    """Nested arguments with other tensors in them."""
    if isinstance(value, Tensor):
        return substitute(value)
    if isinstance(value, list):
        return [substituted(item, substitute) for item in value]
    if isinstance(value, tuple):
        return tuple(substituted(item, substitute) for item in value)
    if isinstance(value, dict):
        return {key: substituted(item, substitute) for key, item in value.items()}
    return value


def has_tensor(result: Any) -> bool:
    """Whether a function has returned a tensor, and not just a shape."""
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))
