"""Whether a module still is what its constructor makes, or was changed after it was built."""

from __future__ import annotations

import functools
from collections.abc import Collection
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["attribute_difference", "difference"]

# What every module has, or torch sets in passing, and what is stored otherwise or compared separately.
_NOT_COMPARED = {
    "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
}  # fmt: skip
_DEEPEST = 20


def difference(built: nn.Module, module: nn.Module, ignored: Collection[str] = ()) -> str | None:
    """How `module` differs from one that was just built, besides the values of its tensors; None if it does not.

    `ignored` are attributes of the outermost module that do not count.
    """
    mine, theirs = (dict(part.named_modules(remove_duplicate=False)) for part in (module, built))
    if [(name, type(part)) for name, part in mine.items()] != [(name, type(part)) for name, part in theirs.items()]:
        return "modules in it were changed after it was made"
    for name, part in mine.items():
        reason = attribute_difference(theirs[name], part, () if name else ignored)
        if reason is not None:
            return reason
    ours, state = built.state_dict(), module.state_dict()
    fits = ours.keys() == state.keys() and all(t.shape == state[n].shape or not t.numel() for n, t in ours.items())
    if not fits or repr(built) != repr(module):
        return "the arguments it keeps are not those it was made of"
    return None


def attribute_difference(built: nn.Module, module: nn.Module, ignored: Collection[str] = ()) -> str | None:
    """What was done to a module after it was built, besides to its parameters, buffers and children."""
    old, new = ({name: value for name, value in vars(part).items() if name not in ignored} for part in (built, module))
    for name, value in new.items():
        if "_hooks" in name and _count_foreign(value) != _count_foreign(old.get(name, ())):
            return "it has hooks"
    for name in old.keys() ^ new.keys():
        if not name.startswith("_"):  # what is private is a note of torch, or of ours while it learns
            return f"its attribute {name[:50]!r} was {'set' if name in new else 'removed'} after it was made"
    if not callable(getattr(module, "config", None)):  # those know their settings themselves
        for name in (old.keys() & new.keys()) - _NOT_COMPARED:
            if "_hooks" not in name and not _equal(old[name], new[name]):
                return f"its attribute {name[:50]!r} was changed after it was made"
    for name in built._non_persistent_buffers_set | module._non_persistent_buffers_set:
        if not _equal(built._buffers.get(name), module._buffers.get(name)):
            return f"its buffer {name[:50]!r} is not persistent and was changed after it was made"
    return None


def _count_foreign(hooks: Any) -> int:
    """How many hooks there are besides the one by which `misconv.convert` sees the end of a named activation."""
    functions = hooks.values() if isinstance(hooks, dict) else hooks
    return sum(not str(getattr(hook, "__module__", "")).startswith("misconv.") for hook in functions)


def _equal(first: Any, second: Any, depth: int = 0) -> bool:
    """Whether two attributes are equal; functions and plain objects by what they are made of."""
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        both = isinstance(first, Tensor) and isinstance(second, Tensor)
        return both and not first.is_meta and torch.equal(first.cpu(), second.detach().cpu())
    first, second = (tuple(v) if isinstance(v, list) else v for v in (first, second))
    try:
        if bool(first == second) or (first != first and second != second):  # NaN is itself here
            return True
    except Exception:  # whatever an object of the user does when it is compared
        return False
    one, two = _parts(first), _parts(second)
    if type(first) is not type(second) or one is None or two is None or depth > _DEEPEST:
        return False
    return one.keys() == two.keys() and all(_equal(one[key], two[key], depth + 1) for key in one)


def _parts(value: Any) -> dict[Any, Any] | None:
    """What a value consists of; None where it cannot be taken apart."""
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple):
        return dict(enumerate(value))
    if isinstance(value, functools.partial):
        return {"function": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return {"code": value.__code__, "cells": cells, "defaults": value.__defaults__}
    if isinstance(value, nn.Module):
        return {"repr": repr(value)}
    has_own_comparison = "__eq__" in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    return vars(value) if hasattr(value, "__dict__") and not has_own_comparison else None
