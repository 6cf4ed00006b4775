"""Classifiers of torchvision and timm, for any number of bands, with weights from a file."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from misconv._store import set_channels
from misconv._torch import load_pickled

__all__ = ["Units", "build_backbone", "pretrained_units"]

Units = tuple[list[float], list[float]]  # mean and deviation of every band

# What the public weights of torchvision were trained on, pixels from 0 to 1.
_IMAGENET: Units = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_LEAST_SHARE = 0.8  # of the tensors of a network that its weights must hold


def build_backbone(name: str, classes: int, channels: int, weights: Path | None = None) -> nn.Module:
    """A network by its name in torchvision's or timm's list, with new random numbers or with weights from a file.

    Of the weights all is taken but the last layer, which tells other classes apart; the first convolution is averaged
    where it reads another number of channels.
    """
    try:
        network = _build(name, classes, channels)
    except (RuntimeError, StopIteration, TypeError) as error:  # of a network that takes other arguments
        raise ValueError(f"--backbone must be a network for images of {channels} bands, got {name}: {error}") from error
    if weights is not None:
        _load_weights(network, name, weights)
    return network


def pretrained_units(network: nn.Module, largest: float) -> Units:
    """Mean and deviation of the images that public weights expect, where the lightest pixel is `largest`."""
    config: Any = getattr(network, "pretrained_cfg", None)
    mean, std = (config.get("mean"), config.get("std")) if hasattr(config, "get") else _IMAGENET
    return [largest * value for value in mean], [largest * value for value in std]


def _build(name: str, classes: int, channels: int) -> nn.Module:
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError("networks come from torchvision: pip install 'misconv[vision]'") from error
    if name in models.list_models(module=models):
        network: nn.Module = models.get_model(name, weights=None, num_classes=classes)
        set_channels(network, channels)
        return network
    more = ", which timm may know: pip install 'misconv[timm]'"
    with contextlib.suppress(ImportError):
        import timm

        more = ""
        if timm.is_model(name):
            made: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels)
            return made
    raise ValueError(f"--backbone must be the name of a network of torchvision or timm, got {name!r}{more}")


def _load_weights(network: nn.Module, name: str, path: Path) -> None:
    found, wanted = _read_weights(path), network.state_dict()
    first = next((f"{key}.weight" for key, part in network.named_modules() if isinstance(part, nn.Conv2d)), None)
    for prefix in _prefixes(found, next(iter(wanted))):
        mine = {key: found[prefix + key] for key in wanted if prefix + key in found}
        if first in mine:
            mine[first] = _for_channels(mine[first], wanted[first].shape[1])
        fitting = {key: value for key, value in mine.items() if value.shape == wanted[key].shape}
        if len(fitting) >= _LEAST_SHARE * len(wanted):
            network.load_state_dict(fitting, strict=False)
            return
    raise ValueError(f"--pretrained must hold the weights of {name}, got {path}, whose tensors are others")


def _for_channels(weight: Tensor, channels: int) -> Tensor:
    """The weights (O, C, h, w) of a convolution of other channels: their mean, so that a response keeps its size."""
    if weight.dim() != 4 or weight.shape[1] == channels:
        return weight
    return weight.mean(1, keepdim=True).expand(-1, channels, -1, -1) * (weight.shape[1] / channels)


def _prefixes(found: Mapping[str, Tensor], first: str) -> list[str]:
    """What may stand before the names of a network in a file, as of one that was wrapped or converted."""
    return [key.removesuffix(first) for key in found if key.endswith(first)]


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or of one that torch saved; nothing in it is executed."""
    if not path.is_file():
        raise FileNotFoundError(f"--pretrained must be a file, got {path}, and there is no such file")
    if path.suffix == ".safetensors":
        import safetensors.torch

        try:
            return safetensors.torch.load_file(path)
        except Exception as error:  # of a file that is no such file, in many ways
            raise ValueError(
                f"--pretrained must be a safetensors file, got {path}, which is none or is damaged"
            ) from error
    try:
        content = load_pickled(path)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = f": {error}" if "CVE" in str(error) else ""
        raise ValueError(f"--pretrained must be weights that torch.save has written, got {path}{reason}") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = (
        {key: value for key, value in content.items() if isinstance(value, Tensor)}
        if isinstance(content, Mapping)
        else {}
    )
    if not tensors:
        raise ValueError(f"--pretrained must hold tensors by name, got {path}, which holds none")
    return tensors
