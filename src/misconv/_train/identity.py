"""What a training is, in words of JSON: its module, its data, its functions; and in what two trainings differ.

A checkpoint is continued only by the training that wrote it. Shapes of tensors alone do not tell a ReLU from a GELU, so
every part of a module is described by its class and its attributes, and a class that is neither of torch nor of this
package also by its code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from misconv._store import JsonObject
from misconv.mfa import MFA

__all__ = ["difference", "fingerprint", "identify", "identify_data", "identify_module"]

_KNOWN = ("torch", "misconv", "builtins")
_DEEPEST = 4
_CHUNK = 2**22  # numbers at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Modules and functions -----------------------------------------------------------------------------------------------


def identify_module(module: nn.Module) -> JsonObject:
    """The class and the arguments of every part of a module, and which parameters are frozen.

    Example:
        >>> found = identify_module(nn.Sequential(nn.Linear(2, 1), nn.LeakyReLU(0.2)))
        >>> found["1"]
        {'class': 'LeakyReLU', 'inplace': False, 'negative_slope': 0.2}
    """
    parts = {name: _part(part) for name, part in module.named_modules()}
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return parts.pop("") | parts | {"frozen": frozen}


def _part(part: nn.Module, depth: int = 0) -> JsonObject:
    found: JsonObject = {"class": type(part).__qualname__}
    code = _class_code(type(part))
    if code:
        found["code"] = code
    config = getattr(part, "config", None)
    # Its own word for it, but for a shape that fitting may have set.
    own = {k: v for k, v in config().items() if k != "shape"} if callable(config) and not code else _attributes(part)
    return found | {name: identify(own[name], depth) for name in sorted(own)}


def _attributes(part: nn.Module) -> JsonObject:
    internal = vars(nn.Module()).keys()
    found = {name: value for name, value in vars(part).items() if name not in internal}
    # What is private and holds tensors is a cache.
    return {k: v for k, v in found.items() if not (k.startswith("_") and isinstance(v, Tensor | np.ndarray | dict))}


def identify(value: Any, depth: int = 0) -> Any:
    """A value of Python in words of JSON; what is no plain value by the name of its class."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [identify(each, depth + 1) for each in value]
    if depth < _DEEPEST and isinstance(value, dict):
        return {str(name): identify(each, depth + 1) for name, each in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return fingerprint(torch.from_numpy(value.copy()))
    if isinstance(value, Tensor):
        return fingerprint(value)
    if isinstance(value, nn.Module):
        return _part(value, depth + 1) if depth < _DEEPEST else type(value).__qualname__  # it may know its parent
    if isinstance(value, torch.dtype | np.generic):
        return str(value)
    return _function(value, depth) if callable(value) else type(value).__qualname__


def _function(function: Any, depth: int = 0) -> Any:
    """A function by its name, its code, and all that it was given beforehand."""
    if isinstance(function, functools.partial) and depth < _DEEPEST:
        given = [*function.args, *sorted(function.keywords.items())]
        return [_function(function.func, depth + 1), *(identify(each, depth + 1) for each in given)]
    if not isinstance(function, FunctionType) or _is_known(function):
        return getattr(function, "__name__", type(function).__qualname__)
    name = function.__qualname__
    cells = [cell.cell_contents for cell in function.__closure__ or () if depth < _DEEPEST]
    return [name, _digest(function), *(identify(each, depth + 1) for each in cells)]


def _is_known(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").split(".")[0] in _KNOWN


def _class_code(kind: type) -> str | None:
    """A digest of the functions of a class and its bases, as far as they are somebody else's."""
    functions = [
        function
        for base in kind.__mro__
        if not _is_known(base)
        for _, function in sorted(vars(base).items())
        if isinstance(function, FunctionType)
    ]
    return _digest(*functions) if functions else None


def _digest(*functions: FunctionType) -> str:
    total = hashlib.sha256()
    for function in functions:
        for part in _words(function.__code__, function.__doc__):
            total.update(part)
    return total.hexdigest()[:12]


def _words(code: CodeType, documentation: str | None = None) -> Iterator[bytes]:
    """What code does: not its comments, its documentation or the place where it is written."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif constant is None or constant != documentation:
            yield repr(constant).encode()


# Data ----------------------------------------------------------------------------------------------------------------


def identify_data(inputs: Any) -> str:
    """A fingerprint of what may be read of some inputs: what lies under holes changes nothing of it.

    Args:
        inputs: an MFA, whose observed pixels are certain whatever factors and noise hold there; a pair (x, observed);
            other tensors; or a tuple of all these.
    """
    return fingerprint(*_visible(inputs))


def _visible(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, MFA):
        seen = None if inputs.observed is None else inputs.observed.unsqueeze(1)
        yield from (inputs.logits, inputs.means)
        yield inputs.factors if seen is None else inputs.factors.masked_fill(seen.unsqueeze(2), 0)
        yield inputs.noise if seen is None else inputs.noise.masked_fill(seen, 0)
        if inputs.observed is not None:
            yield inputs.observed
    elif isinstance(inputs, tuple | list):
        x, observed = (*inputs, None)[:2] if 0 < len(inputs) <= 2 else (None, None)
        if isinstance(x, Tensor) and isinstance(observed, Tensor) and _is_pair(x, observed):
            yield from (x.where(observed, 0), observed)
            return
        for each in inputs:
            yield from _visible(each)
    elif isinstance(inputs, Tensor):
        yield inputs


def _is_pair(x: Tensor, observed: Tensor) -> bool:
    same = x.dim() == 4 == observed.dim() and x.device == observed.device
    return same and observed.dtype == torch.bool and observed.shape in (x.shape, x[:, :1].shape)


def fingerprint(*tensors: Tensor) -> str:
    """A check sum of numbers, their places, shapes and types, computed where they are; all NaN are one.

    Example:
        >>> x = torch.arange(6.0)
        >>> fingerprint(x) == fingerprint(x.clone()) != fingerprint(x.flip(0))
        True
    """
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)} {_weighed(tensor.detach())}".encode())
    return total.hexdigest()[:16]


def _weighed(tensor: Tensor) -> int:
    """The sum of all numbers' bits, each times an odd number of its place, modulo 2**64."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).flatten()
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].contiguous()
        if part.is_floating_point():
            part = part.where(~part.isnan(), math.nan)
        bits = (part.byte() if part.dtype == torch.bool else part.view(_INTEGERS[part.element_size()])).long()
        place = torch.arange(start + 1, start + 1 + len(bits), device=bits.device)
        place = place * 0x2545F4914F6CDD1D  # products wrap around
        weight = (place ^ (place >> 29)) * 0x369DEA0F31A53F85 | 1
        total += int(((bits + 1) * weight).sum())
    return total % 2**64


# Differences ---------------------------------------------------------------------------------------------------------


def difference(found: Any, wanted: Any) -> str | None:
    """In what one description differs from another, in a clause; None where they are the same.

    Example:
        >>> difference({"seed": 0, "module": {"1": {"class": "ReLU"}}}, {"seed": 0, "module": {"1": {"class": "GELU"}}})
        "its module.1.class is 'ReLU' and not 'GELU'"
    """
    return _difference(found, json.loads(json.dumps(wanted)), "")


def _difference(found: Any, wanted: Any, path: str) -> str | None:
    if type(found) is not type(wanted) or not isinstance(found, dict | list):
        return None if found == wanted else f"its {path} is {_short(found)} and not {_short(wanted)}"
    if isinstance(found, list):
        if len(found) != len(wanted):
            return f"its {path} is of length {len(found)} and not {len(wanted)}"
        found, wanted = ({str(n): each for n, each in enumerate(listed)} for listed in (found, wanted))
    for name in dict.fromkeys([*wanted, *found]):
        where = f"{path}.{name}" if path else name
        if name not in found or name not in wanted:
            return f"it has no {where}" if name not in found else f"it has one more {where}"
        differs = _difference(found[name], wanted[name], where)
        if differs:
            return differs
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
