"""Modules described in JSON, and built again from that without running anything a file says.

A description is {"class": name, "arguments": {…}}, or "children" instead of "arguments" for a container, or null
arguments for what cannot be built from a file. An argument is a JSON value, {"module": description} or
{"function": name}. Classes are looked up among the layers of `torch.nn` and of this package alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from misconv._checks import describe

__all__ = ["describe_module", "rebuild"]

# The classes of this package that a file may name, and the modules they live in.
_OURS = {
    "ConvDMFA": "density",
    "KNN": "impute",
    "LinearDMFA": "density",
    "Mean": "impute",
    "MisConv2d": "layers",
    "PartialConv2d": "layers",
    "SMFA": "density",
}
# The functions of torch that a file may name: pointwise ones, harmless to call.
_FUNCTIONS = ("abs", "arctan", "asinh", "atan", "cos", "erf", "exp", "expm1", "sin", "sinc", "sinh", "square")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_DEEPEST = 50


def describe_module(module: nn.Module) -> dict[str, Any]:
    """How to build a module like this one again, in words of JSON."""
    name = _class_name(type(module))
    if type(module) in _CONTAINERS:
        children = {key: describe_module(child) for key, child in module._modules.items() if child is not None}
        return {"class": name, "children": children}
    arguments = None
    if name is not None:
        with contextlib.suppress(AttributeError, TypeError):
            arguments = {key: _encode(value) for key, value in _arguments(module).items()}
    description = {"class": name or _full_name(type(module)), "arguments": arguments}
    # Better no description than a wrong one, of a layer that does not keep its arguments under their names.
    if arguments is not None and not _opaque(description) and not _describes(description, module):
        description["arguments"] = None
    return description


def _class_name(kind: type) -> str | None:
    """The name under which a file may name this class, if any."""
    ours = _OURS.get(kind.__name__)
    if ours and kind.__module__ == f"misconv.{ours}":
        return f"misconv.{kind.__name__}"
    if kind.__module__.startswith("torch.nn.modules.") and getattr(nn, kind.__name__, None) is kind:
        return f"torch.nn.{kind.__name__}"
    return None


def _full_name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _constructor(kind: type) -> dict[str, inspect.Parameter]:
    """The named arguments of a class, with those of the classes it hands ``*args, **kwargs`` on to."""
    named: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        found = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        rest = [p for p in found if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        named = {p.name: p for p in found if p not in rest} | named
        if not rest:
            break
    return named


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments that build such a module: its own word for it, or the attributes of the same names."""
    config = getattr(module, "config", None)
    if callable(config):
        return dict(config())
    values = {}
    for name, parameter in _constructor(type(module)).items():
        if name in ("device", "dtype") or (parameter.default is not parameter.empty and not hasattr(module, name)):
            continue
        value = getattr(module, name)
        # Layers take the question whether there is a bias, and keep the answer.
        values[name] = value is not None if name == "bias" and not isinstance(value, bool) else value
    return values


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_encode(v) for v in value]
    if isinstance(value, nn.Module):
        return {"module": describe_module(value)}
    for name in _FUNCTIONS:
        if value is getattr(torch, name):
            return {"function": name}
    if callable(value):
        return {"module": {"class": _full_name(value), "arguments": None}}
    raise TypeError(f"no JSON for {describe(value)}")


def _describes(description: dict[str, Any], module: nn.Module) -> bool:
    """Whether the description builds a module like this one, or like what it was before it was fitted."""
    try:
        built = _Builder(None).build(description)
    except ValueError:
        return False
    ours, theirs = built.state_dict(), module.state_dict()
    fits = all(t.shape == theirs[name].shape or not t.numel() for name, t in ours.items() if name in theirs)
    return repr(built) == repr(module) and ours.keys() == theirs.keys() and fits


def _opaque(value: Any, depth: int = 0) -> list[str]:
    """Names of the classes in a description that cannot be built from a file."""
    if depth > 4 * _DEEPEST:
        raise ValueError("its description is broken, it is nested too deeply")
    if isinstance(value, dict):
        if "class" in value and "children" not in value and value.get("arguments") is None:
            return [str(value["class"])[:100]]
        return [name for part in value.values() for name in _opaque(part, depth + 1)]
    return [name for part in value for name in _opaque(part, depth + 1)] if isinstance(value, list) else []


def rebuild(description: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """A new module as described, of no more numbers than the tensors hold."""
    unknown = _opaque(description)
    if unknown:
        raise ValueError(
            f"the file does not say how to build {', '.join(dict.fromkeys(unknown))}; build the model yourself and "
            "call misconv.load(path, into=model)"
        )
    return _Builder(sum(t.numel() for t in tensors.values())).build(description)


class _Builder:
    """Builds described modules of at most so many numbers, whatever the description says."""

    def __init__(self, numbers: int | None) -> None:
        self.left = numbers

    def build(self, description: Any) -> nn.Module:
        # On the CPU and without a trace in the random numbers of the caller.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return self._build(description, 0)

    def _build(self, description: Any, depth: int) -> nn.Module:
        if depth > _DEEPEST:
            raise ValueError("its description is broken, it is nested too deeply")
        if not isinstance(description, dict) or not isinstance(description.get("class"), str):
            raise ValueError(f"its description is broken, a module must have a class, got {str(description)[:100]}")
        kind = _find_class(description["class"])
        children, arguments = description.get("children"), description.get("arguments")
        if isinstance(children, dict) and kind in _CONTAINERS:
            parts = OrderedDict((key, self._build(child, depth + 1)) for key, child in children.items())
            return _construct(kind, list(parts.values()) if kind is nn.ModuleList else parts)
        if not isinstance(arguments, dict):
            raise ValueError(f"its description is broken, {description['class']} must have arguments")
        return self._build_layer(kind, arguments, depth)

    def _build_layer(self, kind: type[nn.Module], arguments: dict[str, Any], depth: int) -> nn.Module:
        allowed = _constructor(kind).keys()
        foreign = [name for name in arguments if name not in allowed - {"device", "dtype"}]
        if foreign:
            raise ValueError(f"its description is broken, {kind.__name__} has no argument {foreign[0]!r}")
        values = {name: self._decode(value, depth + 1) for name, value in arguments.items()}
        if self.left is not None:
            # First without memory: a small file must not ask for more than there is.
            self.left -= _numbers(kind, values, "device" in allowed)
            if self.left < 0:
                raise ValueError("its description is broken, it asks for more numbers than the file holds")
        return _construct(kind, **values)

    def _decode(self, value: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError("its description is broken, it is nested too deeply")
        if isinstance(value, list):
            return tuple(self._decode(v, depth + 1) for v in value)
        if not isinstance(value, dict):
            return value
        if value.keys() == {"module"}:
            return self._build(value["module"], depth + 1)
        if value.keys() == {"function"} and value["function"] in _FUNCTIONS:
            return getattr(torch, value["function"])
        raise ValueError(f"its description is broken, {str(value)[:100]} is no argument of a layer")


def _find_class(name: str) -> type[nn.Module]:
    """The class of an allowed name; nothing else is ever imported or called."""
    space, _, short = name.rpartition(".")
    kind: Any = None
    if space == "misconv" and short in _OURS:
        with contextlib.suppress(ImportError):
            kind = getattr(import_module(f"misconv.{_OURS[short]}"), short, None)
    elif space == "torch.nn":
        kind = getattr(nn, short, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or _class_name(kind) != name:
        raise ValueError(f"it names the class {name[:100]!r}, which is neither a layer of torch.nn nor of this misconv")
    return kind


def _numbers(kind: type[nn.Module], values: dict[str, Any], takes_device: bool) -> int:
    """How many numbers such a layer holds, besides those of the modules among its arguments."""
    plain = {name: value for name, value in values.items() if not isinstance(value, nn.Module)}
    if takes_device:  # a layer that tries its activation out can do so only if that is not without memory too
        return sum(t.numel() for t in _construct(kind, **plain, device="meta").state_dict().values())
    with torch.device("meta"):
        return sum(t.numel() for t in _construct(kind, **plain).state_dict().values())


def _construct(kind: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    try:
        return kind(*args, **kwargs)
    except Exception as error:  # whatever a layer makes of wrong arguments
        raise ValueError(f"its description is broken, {kind.__name__} refuses its arguments: {error}") from error
