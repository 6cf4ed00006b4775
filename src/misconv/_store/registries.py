"""Networks of torchvision and timm by their names in the registries of these packages.

A network is built without memory: every parameter goes to the meta device as soon as it is registered, and the
constructor is stopped when it registers parameters of other shapes than those it should have. So it costs little to
try the names that a network may have, or to refuse a file that names a network it does not hold.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from misconv._store.compare import difference
from misconv._store.format import JsonObject

__all__ = ["build_network", "describe_network", "set_channels"]

# The arguments that a file may give to a network of each package, and their types.
_ARGUMENTS: dict[str, dict[str, type]] = {
    # in_channels is none of torchvision's own: its networks take three channels, until `set_channels` changes them.
    "torchvision": {
        "num_classes": int, "aux_logits": bool, "transform_input": bool, "aux_loss": bool, "in_channels": int,
    },
    "timm": {"num_classes": int, "in_chans": int, "drop_rate": float},
}  # fmt: skip
_EXTRAS = {"torchvision": "vision", "timm": "timm"}
# Notes of a network about itself that change nothing it computes.
_NOTES = ("num_classes", "pretrained_cfg", "default_cfg", "_model_args")
# Some constructors make a classifier and throw it away: this number of parameters may be foreign.
_MOST_FOREIGN = 8


def describe_network(model: nn.Module) -> JsonObject | None:
    """The name and the arguments that build a network like this one; None if it is in no registry or was changed."""
    package = type(model).__module__.split(".")[0]
    candidates = {"torchvision": _torchvision_candidates, "timm": _timm_candidates}.get(package)
    if candidates is None:
        return None
    shapes = [tuple(p.shape) for _, p in model.named_parameters(remove_duplicate=False)]
    for name, arguments in candidates(model):
        with contextlib.suppress(Exception):  # whatever a constructor makes of arguments that are not its own
            built = _build(package, name, arguments, shapes, with_values=_has_hidden_values(model))
            if difference(built, model, _NOTES) is None:
                return {"registry": package, "name": name, "arguments": arguments}
    return None


def build_network(description: JsonObject, tensors: Iterable[Tensor], numbers: int) -> nn.Module:
    """The described network, made of parameters of the tensors' shapes and of at most N numbers.

    Its parameters have memory, and no particular values.
    """
    package, name, arguments = (description.get(key) for key in ("registry", "name", "arguments"))
    if not isinstance(package, str) or package not in _ARGUMENTS:
        raise ValueError(f"its description is broken, it names the registry {ascii(package)[:100]}")
    if not isinstance(name, str) or name not in _names(package):
        raise ValueError(f"it names the network {ascii(name)[:100]}, which is not in {package}'s list of models")
    _check_arguments(package, arguments, numbers)
    shapes = [tuple(t.shape) for t in tensors]
    try:
        network = _build(package, name, arguments, shapes)
        if sum(t.numel() for t in network.state_dict().values()) > numbers:
            raise _ForeignParameterError
        if _has_hidden_values(network):
            return _build(package, name, arguments, shapes, with_values=True)
    except _ForeignParameterError as error:
        raise ValueError(
            f"its description is broken, {package}'s {name} has more parameters, or others, than the file holds"
        ) from error
    except Exception as error:  # whatever a network makes of wrong arguments
        reason = (str(error).splitlines() or [""])[0][:200]
        raise ValueError(f"its description is broken, {package}'s {name} refuses its arguments: {reason}") from error
    network._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    return network


# Building ------------------------------------------------------------------------------------------------------------


class _ForeignParameterError(Exception):
    """A network under construction has parameters that it should not have."""


def _has_hidden_values(model: nn.Module) -> bool:
    """Whether there are values that no file holds; some constructors compute them only beside real parameters."""
    return any(part._non_persistent_buffers_set for part in model.modules())


def _build(
    package: str, name: str, arguments: Any, shapes: Iterable[tuple[int, ...]], *, with_values: bool = False
) -> nn.Module:
    watched = _watched(Counter(shapes), with_values)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), warnings.catch_warnings(), watched:
        warnings.simplefilter("ignore")  # of initial values, which nobody needs
        if package == "timm":
            network: nn.Module = _imported("timm").create_model(name, pretrained=False, **arguments)
        else:
            models = _imported("torchvision").models
            backbone = {"weights_backbone": None} if name in models.list_models(module=models.segmentation) else {}
            own = {key: value for key, value in arguments.items() if key != "in_channels"}
            network = models.get_model(name, weights=None, **backbone, **own)
            if "in_channels" in arguments:
                set_channels(network, arguments["in_channels"])
    return network


def set_channels(network: nn.Module, channels: int) -> None:
    """Let a network read images of another number of channels, by a new first convolution."""
    name, old = next((name, part) for name, part in network.named_modules() if isinstance(part, nn.Conv2d))
    if old.in_channels == channels:
        return
    if old.groups != 1:
        raise ValueError(f"its first convolution must read all channels together, got {old.groups} groups")
    same: dict[str, Any] = {key: getattr(old, key) for key in ("stride", "padding", "dilation", "padding_mode")}
    same |= {"bias": old.bias is not None, "device": old.weight.device, "dtype": old.weight.dtype}
    new = nn.Conv2d(channels, old.out_channels, cast(Any, old.kernel_size), **same)
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, new)


@contextlib.contextmanager
def _watched(allowed: Counter[tuple[int, ...]], with_values: bool) -> Iterator[None]:
    """Move every parameter that this thread registers to the meta device; stop at too many of other shapes."""
    thread, foreign = threading.get_ident(), 0

    def watch(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        nonlocal foreign
        if parameter is None or threading.get_ident() != thread:
            return None
        shape = tuple(parameter.shape)
        allowed[shape] -= 1
        foreign += allowed[shape] < 0
        if foreign > _MOST_FOREIGN:
            raise _ForeignParameterError
        return (
            parameter
            if with_values
            else nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        )

    handle = register_module_parameter_registration_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def _imported(package: str) -> Any:
    try:
        if package == "timm":
            import timm

            return timm
        import torchvision

        return torchvision
    except ImportError as error:
        raise ValueError(
            f"its network is one of {package}, which is not installed: pip install 'misconv[{_EXTRAS[package]}]'"
        ) from error


def _names(package: str) -> set[str]:
    """The networks that a file may name."""
    if package == "timm":
        return set(_imported("timm").list_models())
    models = _imported("torchvision").models
    return {*models.list_models(module=models), *models.list_models(module=models.segmentation)}


def _check_arguments(package: str, arguments: Any, numbers: int) -> None:
    """Only arguments of the list, of the right type and of a size that the file could hold."""
    if not isinstance(arguments, dict):
        raise ValueError("its description is broken, a network must have arguments")
    for name, value in arguments.items():
        kind: Any = _ARGUMENTS[package].get(name)
        if kind is None:
            raise ValueError(f"its description is broken, {ascii(name)[:100]} is no argument that a file may give")
        if type(value) is not kind or not 0 <= value <= max(numbers, 1) or not math.isfinite(value):
            raise ValueError(f"its description is broken, {name} must be a sensible {kind.__name__}")


# Candidates ----------------------------------------------------------------------------------------------------------


def _torchvision_candidates(model: nn.Module) -> Iterator[tuple[str, JsonObject]]:
    """The names whose builders say that they return this class, with the arguments that the network shows."""
    models = _imported("torchvision").models
    arguments: dict[str, Any] = {"num_classes": _outputs(model)}
    arguments |= {key: vars(model)[key] for key in ("aux_logits", "transform_input") if key in vars(model)}
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if first is not None and first.in_channels != 3:
        arguments["in_channels"] = first.in_channels
    if "aux_classifier" in model._modules:
        arguments["aux_loss"] = model._modules["aux_classifier"] is not None
    for name in sorted(_names("torchvision")):
        if inspect.signature(models.get_model_builder(name)).return_annotation is type(model):
            yield name, arguments


def _timm_candidates(model: nn.Module) -> Iterator[tuple[str, JsonObject]]:
    """The name that the network carries, with the arguments that it shows."""
    config: Any = getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if hasattr(config, "get") else None
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    if not isinstance(name, str) or name not in _names("timm") or first is None:
        return
    rate = getattr(model, "drop_rate", 0.0)
    common = {"in_chans": first.in_channels} | ({"drop_rate": float(rate)} if rate else {})
    for count in dict.fromkeys([getattr(model, "num_classes", None), _outputs(model)]):
        if isinstance(count, int):
            yield name, {"num_classes": count, **common}


def _outputs(model: nn.Module) -> int:
    """The number of classes: the outputs of the last layer."""
    found = 0
    for part in model.modules():
        if isinstance(part, nn.Linear):
            found = part.out_features
        elif isinstance(part, nn.Conv2d):
            found = part.out_channels
    return found
