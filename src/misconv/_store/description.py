"""Modules described in JSON, in words that build the same module again.

A description is one of

- {"class": name, "arguments": {…}} for a layer of torch.nn or a class of this package,
- {"class": name, "children": {…}} for a container,
- {"registry": "torchvision" or "timm", "name": name, "arguments": {…}} for one of their networks,
- {"class": name, "arguments": null, "reason": text} for what cannot be built from a file.

An argument is a JSON value, {"module": description}, {"function": name} or {"stem": {…}}.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from misconv._checks import describe
from misconv._store.builder import CONTAINERS, CONVERTED, DEEPEST, FUNCTIONS, Builder, class_name, constructor
from misconv._store.compare import attribute_difference, difference
from misconv._store.format import JsonObject
from misconv._store.registries import describe_network

__all__ = ["describe_model", "rebuild"]

Description = JsonObject

# What every module has, or torch sets in passing, and what is stored otherwise or compared by itself.
_APART = {
    "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook",
}  # fmt: skip


def describe_model(model: nn.Module) -> Description:
    """How to build a model like this one again, if its tensors are not tied in a way that a file cannot say."""
    if _overlap([t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)]):
        return _opaque_description(_full_name(type(model)), "tensors in it share memory and are not the same")
    return describe_module(model)


def describe_module(module: nn.Module, depth: int = 0) -> Description:
    """How to build a module like this one again; better no description than a wrong one."""
    name = class_name(type(module))
    if name is None:
        package = type(module).__module__.split(".")[0]
        known = package in ("torchvision", "timm")
        reason = f"it is not in the list of {package}'s models, or was changed after it was built" if known else None
        return describe_network(module) or _opaque_description(_full_name(type(module)), reason)
    if depth > DEEPEST:
        return _opaque_description(name, f"it is nested more than {DEEPEST} deep")
    if type(module) in CONTAINERS:
        return _describe_container(module, name, depth)
    try:
        values = _arguments(module)
        arguments = {key: _encode(value, depth) for key, value in values.items()}
    except (AttributeError, TypeError):
        return _opaque_description(name, "it does not keep the arguments it was made of")
    description = {"class": name, "arguments": arguments}
    if name == CONVERTED:  # its parts have been compared when they were described
        reason = attribute_difference(type(module)(**values), module)
    else:
        reason = None if _opaque(description) else _difference(description, module)
    return description if reason is None else _opaque_description(name, reason)


def rebuild(description: Any, tensors: dict[str, Tensor]) -> nn.Module:
    """A new module as described, of not much more numbers than the tensors hold."""
    unknown = list(dict.fromkeys(_opaque(description)))
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ValueError(
            f"the file does not say how to build {', '.join(unknown[:5])}{more}; build the model yourself and "
            "call misconv.load(path, into=model)"
        )
    if _count(description) > 10_000 + 10 * len(tensors):
        raise ValueError("its description is broken, it has far more modules than the file has tensors")
    # A tensor may be shared by many layers, each of which is built before it is shared; but not by any number.
    held = sum(t.numel() for t in {id(t): t for t in tensors.values()}.values())
    named = sum(t.numel() for t in tensors.values())
    return Builder(min(named, 64 * held + 2**20), len(tensors) + 1000, list(tensors.values())).build(description)


def _opaque_description(name: str, reason: str | None = None) -> Description:
    return {"class": name, "arguments": None} | ({} if reason is None else {"reason": reason})


def _full_name(thing: Any) -> str:
    name = getattr(thing, "__name__", None)
    if name is not None and getattr(nn, name, None) is thing:
        return f"torch.nn.{name}"
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing).__name__)}"


def _describe_container(module: nn.Module, name: str, depth: int) -> Description:
    reason = attribute_difference(type(module)(), module)
    if module._parameters or module._buffers:
        reason = "it holds tensors of its own"
    if None in module._modules.values():
        reason = "one of its children is None"
    if isinstance(module, nn.ModuleList) and list(module._modules) != [str(n) for n in range(len(module))]:
        reason = "its children are not numbered"
    if reason is not None:
        return _opaque_description(name, reason)
    children = {key: describe_module(child, depth + 1) for key, child in module._modules.items() if child is not None}
    return {"class": name, "children": children}


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments that build such a module: its own word for it, or the attributes of the same names."""
    config = getattr(module, "config", None)
    if callable(config):
        return dict(config())
    values = {}
    for name, parameter in constructor(type(module)).items():
        if name in ("device", "dtype") or (parameter.default is not parameter.empty and not hasattr(module, name)):
            continue
        value = getattr(module, name)
        # Layers take the question whether there is a bias, and keep the answer.
        values[name] = value is not None if name == "bias" and not isinstance(value, bool) else value
    return values


def _encode(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_encode(v, depth) for v in value]
    if isinstance(value, nn.Module):
        return {"module": describe_module(value, depth + 1)}
    if dataclasses.is_dataclass(value):  # a stem
        return {"stem": {field.name: _encode(getattr(value, field.name), depth) for field in dataclasses.fields(value)}}
    for name in FUNCTIONS:
        if value is getattr(torch, name):
            return {"function": name}
    if callable(value):
        return {"module": _opaque_description(_full_name(value))}
    raise TypeError(f"no JSON for {describe(value)}")


def _overlap(tensors: list[Tensor]) -> bool:
    """Whether some of these see memory that others see too, such as a weight and its transpose."""
    same = {(t.data_ptr(), t.shape, t.stride(), t.dtype, isinstance(t, nn.Parameter)): t for t in tensors if t.numel()}
    ends: dict[tuple[Any, int], int] = {}
    for tensor in sorted(same.values(), key=Tensor.data_ptr):
        place = tensor.device, tensor.untyped_storage().data_ptr()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.data_ptr() < ends.get(place, 0):
            return True
        ends[place] = tensor.data_ptr() + (last + 1) * tensor.element_size()
    return False


def _opaque(value: Any, depth: int = 0) -> list[str]:
    """Names of the classes in a description that cannot be built from a file, with the reasons."""
    if depth > 4 * DEEPEST:
        raise ValueError("its description is broken, it is nested too deeply")
    if isinstance(value, dict):
        if isinstance(value.get("class"), str) and "children" not in value and value.get("arguments") is None:
            reason = f" ({value['reason'][:100]})" if isinstance(value.get("reason"), str) else ""
            return [value["class"][:100] + reason]
        return [name for part in value.values() for name in _opaque(part, depth + 1)]
    return [name for part in value for name in _opaque(part, depth + 1)] if isinstance(value, list) else []


def _count(value: Any) -> int:
    """How many modules are described; what is nested too deeply has been refused."""
    if isinstance(value, dict):
        return ("class" in value or "registry" in value) + sum(_count(part) for part in value.values())
    return sum(_count(part) for part in value) if isinstance(value, list) else 0


def _difference(description: Description, module: nn.Module) -> str | None:
    """In what the described module is not this one (or what this one was before it was fitted)."""
    # Without memory, except where there are values that no file holds.
    real = any(part._non_persistent_buffers_set for part in module.modules())
    try:
        built = Builder(None, None, meta=not real).build(description)
    except ValueError:
        return "the arguments it keeps are not those it was made of"
    return difference(built, module)
