"""Modules built from descriptions that may be wrong or hostile, without running anything a file says.

Classes are looked up in a list. Work and memory are bounded by what the file holds: a layer is made without memory
first, and is stopped as soon as it asks for more parameters or numbers than there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_parameter_registration_hook

from misconv._store.format import JsonObject
from misconv._store.registries import build_network

__all__ = ["CONTAINERS", "CONVERTED", "DEEPEST", "FUNCTIONS", "Builder", "class_name", "constructor"]

# A file may name the public modules of these files of ours.
_OUR_MODULES = ("convert", "density", "impute", "layers", "paper.acflow", "paper.flow_matching")
# And the layers that are defined in these files of torch.nn.modules: each makes a handful of tensors, whatever its
# arguments. Recurrent layers and transformers, in other files, make as many as one number says.
_TORCH_MODULES = (
    "activation", "batchnorm", "channelshuffle", "conv", "distance", "dropout", "flatten", "fold", "instancenorm",
    "linear", "normalization", "padding", "pixelshuffle", "pooling", "sparse", "upsampling",
)  # fmt: skip
# The functions of torch that a file may name: pointwise ones, harmless to call.
FUNCTIONS = ("abs", "arctan", "asinh", "atan", "cos", "erf", "exp", "expm1", "sin", "sinc", "sinh", "square")
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CONVERTED = "misconv.Converted"
DEEPEST = 50
T = TypeVar("T")
_CONSTRUCTORS: dict[type, dict[str, inspect.Parameter]] = {}


def class_name(kind: type) -> str | None:
    """The name under which a file may name this class, if any."""
    package, _, file = kind.__module__.partition(".")
    if package == "misconv" and file in _OUR_MODULES and kind.__name__ in sys.modules[kind.__module__].__all__:
        return f"misconv.{kind.__name__}"
    if kind in CONTAINERS or (_is_layer(kind) and getattr(nn, kind.__name__, None) is kind):
        return f"torch.nn.{kind.__name__}"
    return None


def _is_layer(kind: type) -> bool:
    package, _, file = kind.__module__.rpartition(".")
    is_unfit = issubclass(kind, LazyModuleMixin | nn.MultiheadAttention)
    return package == "torch.nn.modules" and file in _TORCH_MODULES and not is_unfit


def constructor(kind: type) -> dict[str, inspect.Parameter]:
    """The named arguments of a class, with those of the classes it hands ``*args, **kwargs`` on to."""
    if kind in _CONSTRUCTORS:
        return _CONSTRUCTORS[kind]
    named: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        found = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        rest = [p for p in found if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        named = {p.name: p for p in found if p not in rest} | named
        if not rest:
            break
    if class_name(kind) is not None:  # a list that does not grow
        _CONSTRUCTORS[kind] = named
    return named


class Builder:
    """Builds described modules of at most N numbers and M parameters (None: any), whatever the description says.

    `tensors` are those that networks of registries may consist of. `meta` builds the outermost layer without memory.
    """

    def __init__(
        self, numbers: int | None, parameters: int | None, tensors: Sequence[Tensor] = (), *, meta: bool = False
    ) -> None:
        self.numbers, self.parameters, self.tensors, self.meta = numbers, parameters, tensors, meta

    def build(self, description: Any) -> nn.Module:
        """The module; a ValueError says what is wrong with the description."""
        # On the CPU and without a trace in the random numbers of the caller.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return self._build(description, 0)

    def _build(self, description: Any, depth: int) -> nn.Module:
        if depth > DEEPEST:
            raise ValueError("its description is broken, it is nested too deeply")
        if isinstance(description, dict) and "registry" in description:
            return self._build_network(description)
        if not isinstance(description, dict) or not isinstance(description.get("class"), str):
            raise ValueError(f"its description is broken, a module must have a class, got {type(description).__name__}")
        kind = _find_class(description["class"])
        children, arguments = description.get("children"), description.get("arguments")
        if isinstance(children, dict) and kind in CONTAINERS:
            parts = OrderedDict((key, self._build(child, depth + 1)) for key, child in children.items())
            return _construct(kind, list(parts.values()) if kind is nn.ModuleList else parts)
        if not isinstance(arguments, dict):
            raise ValueError(f"its description is broken, {description['class']} must have arguments")
        return self._build_layer(kind, arguments, depth)

    def _build_network(self, description: JsonObject) -> nn.Module:
        network = build_network(description, self.tensors, self.numbers or 0)
        self.numbers = (self.numbers or 0) - sum(t.numel() for t in network.state_dict().values())
        return network

    def _build_layer(self, kind: type[nn.Module], arguments: dict[str, Any], depth: int) -> nn.Module:
        allowed = constructor(kind).keys()
        foreign = [name for name in arguments if name not in allowed - {"device", "dtype"}]
        if foreign:
            raise ValueError(f"its description is broken, {kind.__name__} has no argument {ascii(foreign[0])[:100]}")
        values = {name: self._decode(value, depth + 1) for name, value in arguments.items()}
        if class_name(kind) == CONVERTED:
            return _construct_converted(kind, values)
        self._check_trial(kind, values)
        if self.meta and depth == 0:
            return _without_memory(kind, values, "device" in allowed)
        if self.numbers is not None and self.parameters is not None:
            # First without memory: a small file must not ask for more than there is.
            with _at_most(self.parameters, self.numbers):
                plain = {name: value for name, value in values.items() if not isinstance(value, nn.Module)}
                made = _without_memory(kind, plain, "device" in allowed)
            self.parameters -= sum(1 for _ in made.parameters())
            self.numbers -= sum(t.numel() for t in made.state_dict().values())
            if self.numbers < 0:
                raise _too_much("numbers")
        return _construct(kind, **values)

    def _check_trial(self, kind: type[nn.Module], values: dict[str, Any]) -> None:
        """A MisConv2d tries its activation on an image of its channels: a real activation, and not too many of them."""
        activation, channels = values.get("activation"), values.get("out_channels")
        if class_name(kind) != "misconv.MisConv2d":
            return
        if isinstance(activation, nn.Module) and not _is_activation(activation):
            raise ValueError(
                "its description is broken, the activation of MisConv2d must be one of torch.nn, got "
                f"{type(activation).__name__}"
            )
        if self.numbers is not None and isinstance(channels, int) and channels > self.numbers:
            raise _too_much("numbers")

    def _decode(self, value: Any, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError("its description is broken, it is nested too deeply")
        if isinstance(value, list):
            return tuple(self._decode(v, depth + 1) for v in value)
        if not isinstance(value, dict):
            return value
        if value.keys() == {"module"}:
            return self._build(value["module"], depth + 1)
        if value.keys() == {"function"} and value["function"] in FUNCTIONS:
            return getattr(torch, value["function"])
        if value.keys() == {"stem"} and isinstance(value["stem"], dict):
            return _decode_stem({name: self._decode(v, depth + 1) for name, v in value["stem"].items()})
        raise ValueError("its description is broken, an object is no argument of a layer")


def _is_activation(module: nn.Module) -> bool:
    return type(module) is nn.Identity or type(module).__module__ == "torch.nn.modules.activation"


def _find_class(name: str) -> type[nn.Module]:
    """The class of an allowed name; nothing else is ever imported or called."""
    space, _, short = name.rpartition(".")
    kind: Any = None
    if space == "misconv":
        for file in _OUR_MODULES:
            module = import_module(f"misconv.{file}")
            kind = getattr(module, short) if short in module.__all__ else kind
    elif space == "torch.nn" and short.isidentifier() and not short.startswith("_"):
        kind = getattr(nn, short, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or class_name(kind) != name:
        raise ValueError(
            f"it names the class {ascii(name)[:100]}, which is neither a layer of torch.nn that a file may name nor of "
            "this misconv"
        )
    return kind


def _decode_stem(fields: dict[str, Any]) -> Any:
    """The stem of a converted network: names and numbers, which are looked up when the network runs."""
    from misconv._convert import Stem

    if not fields.keys() <= {field.name for field in dataclasses.fields(Stem)}:
        raise ValueError("its description is broken, a stem has no such part")
    if not all(value is None or isinstance(value, bool | int | str | tuple) for value in fields.values()):
        raise ValueError("its description is broken, a stem consists of names and numbers")
    return _construct(Stem, **fields)


def _construct_converted(kind: type[nn.Module], values: dict[str, Any]) -> nn.Module:
    """A converted network as `misconv.convert` returns it; the network is not run."""
    from misconv._convert import Stem, mark

    network, stem = values.get("network"), values.get("stem")
    modules = dict(network.named_modules()) if isinstance(network, nn.Module) else {}
    parts = [values.get("density"), values.get("activation")]
    if (
        not isinstance(stem, Stem)
        or not isinstance(modules.get(stem.convolution), nn.Conv2d)
        or not all(isinstance(part, nn.Module | None) for part in parts)
    ):
        raise ValueError("its description is broken, the stem is not in the network")
    converted = _construct(kind, **values)
    if stem.named:
        if stem.activation is None or stem.activation not in modules:
            raise ValueError("its description is broken, the activation is not in the network")
        mark(modules[stem.activation])
    return converted


def _too_much(what: str) -> ValueError:
    return ValueError(f"its description is broken, it asks for more {what} than the file holds")


@contextlib.contextmanager
def _at_most(parameters: int, numbers: int) -> Iterator[None]:
    """Stop a constructor of this thread as soon as it has made more parameters, or in them more numbers, than these."""
    thread = threading.get_ident()
    made = [0, 0]

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or threading.get_ident() != thread:
            return
        made[0] += 1
        made[1] += parameter.numel()
        if made[0] > parameters or made[1] > numbers:
            raise _too_much("parameters" if made[0] > parameters else "numbers")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _without_memory(kind: type[nn.Module], values: dict[str, Any], takes_device: bool) -> nn.Module:
    if takes_device:  # a layer that tries its activation out can do so only if that is not without memory too
        return _construct(kind, **values, device="meta")
    with torch.device("meta"):
        return _construct(kind, **values)


def _construct(kind: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return kind(*args, **kwargs)
    except Exception as error:  # whatever a layer makes of wrong arguments
        reason = (str(error).splitlines() or [""])[0][:200]
        if reason.startswith("its description is broken"):
            raise
        raise ValueError(
            f"its description is broken, {getattr(kind, '__name__', '')} refuses its arguments: {reason}"
        ) from error
