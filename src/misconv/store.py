"""Models in one file: safetensors for the numbers, JSON for what they belong to; never a pickle.

Nothing in a file is executed. It names layers of `torch.nn`, classes of this package, and networks of torchvision and
timm, which are looked up in lists. A file appears under its name whole or not at all, and a checksum covers all of it.
"""

from __future__ import annotations

import contextlib
import os

from torch import Tensor, nn

from misconv._checks import describe
from misconv._store import (
    AnyPath,
    JsonObject,
    check_path,
    check_storable,
    describe_model,
    is_channels_last,
    load_tensors,
    open_regular,
    pack,
    rebuild,
    restore_channels_last,
    shown,
    tie_tensors,
    unchanged_on_failure,
    unpack,
    write_bytes,
    write_parts,
)

__all__ = ["load", "read", "read_notes", "save", "write", "write_bytes"]


def save(model: nn.Module, path: AnyPath, *, notes: JsonObject | None = None) -> None:
    """Save a model: its tensors, how to build it again, what is frozen and what is in evaluation mode.

    Layers of `torch.nn`, everything of this package (converted networks too) and the networks of torchvision and timm
    are described in the file, by their arguments or their names, as long as they are what these build: one with hooks,
    another `forward` or other attributes is not. A model with such a part, or with other classes in it, is saved too,
    but to load it you must build it yourself: ``load(path, into=model)``. Hooks, gradients, buffers that are not
    persistent and what training needs to continue (that is what checkpoints are for) are not saved. An existing file is
    replaced at the last moment, or stays as it was if anything fails.

    Args:
        notes: anything else to keep with the model that JSON can say, such as the names of classes; see `read_notes`.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
        >>> save(model, folder.name + "/model.safetensors")
        >>> load(folder.name + "/model.safetensors")
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
        )
        >>> folder.cleanup()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    check_path(path)
    try:
        state = model.state_dict(keep_vars=True)
        for name, tensor in state.items():
            check_storable(name, tensor)
        content = {
            "model": describe_model(model),
            "evaluating": [name for name, part in model.named_modules(remove_duplicate=False) if not part.training],
            "frozen": [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad],
            "channels_last": [name for name, tensor in state.items() if is_channels_last(tensor)],
        }
        if notes is not None:
            content["notes"] = notes
    except RecursionError as error:
        raise ValueError(
            f"model must be a tree of modules, got a {type(model).__name__} that is nested too deeply or holds itself"
        ) from error
    write(path, dict(state), content)


def load(path: AnyPath, into: nn.Module | None = None) -> nn.Module:
    """Load a model that `save` has written, on the CPU; or load its tensors into a model of the same architecture.

    With `into` the model keeps its device, and nothing of it is changed if anything fails. Types of tensors, frozen
    parameters, and training or evaluation mode are restored in both cases; without `into`, shared parameters are shared
    again and channels_last ones lie so again. See `save` for an example.
    """
    if into is not None and not isinstance(into, nn.Module):
        raise TypeError(f"into must be a torch.nn.Module or None, got {describe(into)}")
    tensors, content = read(path)
    if "model" not in content:
        raise ValueError(
            f"cannot load {shown(path)}: it holds no model but something else that misconv has stored; see "
            "misconv.store.read"
        )
    try:
        frozen, evaluating = _names(content, "frozen"), _names(content, "evaluating")
        model = rebuild(content["model"], tensors) if into is None else into
        with unchanged_on_failure(model) if model is into else contextlib.nullcontext():
            load_tensors(model, tensors, frozen, evaluating)
        if into is None:
            restore_channels_last(model, _names(content, "channels_last"))
            tie_tensors(model, tensors)
    except Exception as error:  # a model of the user may raise anything while it is loaded
        said = " ".join(str(error).split())  # in one line
        reason = said if type(error) is ValueError else f"the model refuses it, {type(error).__name__}: {said[:300]}"
        raise ValueError(f"cannot load {shown(path)}: {reason}") from error
    return model


def read_notes(path: AnyPath) -> JsonObject:
    """The notes that were saved with a model; {} where there are none."""
    notes = read(path)[1].get("notes", {})
    if not isinstance(notes, dict):
        raise ValueError(f"cannot load {shown(path)}: its description is broken, notes must be an object")
    return notes


def _names(content: JsonObject, key: str) -> set[str]:
    names = content.get(key, [] if key == "channels_last" else None)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"its description is broken, {key} must be a list of names, got {type(names).__name__}")
    return set(names)


def write(path: AnyPath, tensors: dict[str, Tensor], metadata: JsonObject) -> None:
    """Write tensors and anything that JSON can say into one file, atomically.

    Tensors that are one and the same under several names are stored once, and `read` gives them back as one.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.TemporaryDirectory()
        >>> write(folder.name + "/state", {"weight": torch.ones(2)}, {"epoch": 3})
        >>> read(folder.name + "/state")
        ({'weight': tensor([1., 1.])}, {'epoch': 3})
        >>> folder.cleanup()
    """
    check_path(path)
    for name, value in (("tensors", tensors), ("metadata", metadata)):
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be a dict, got {describe(value)}")
    write_parts(path, pack(tensors, metadata))


def read(path: AnyPath) -> tuple[dict[str, Tensor], JsonObject]:
    """Tensors, on the CPU, and metadata of a file that `write` has written."""
    with open_regular(path) as file:
        return unpack(file, os.fsdecode(path))
