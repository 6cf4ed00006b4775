"""Models in one file: safetensors for the numbers, JSON for what they belong to; never a pickle.

Nothing in a file is executed. It names classes, and those are looked up among the layers of `torch.nn` and of this
package alone. A file appears under its name whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import zipfile
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from misconv._checks import describe
from misconv._description import describe_module, rebuild

__all__ = ["load", "read", "save", "write", "write_bytes"]

AnyPath: TypeAlias = str | os.PathLike[str]

_FORMAT = 1


def save(model: nn.Module, path: AnyPath) -> None:
    """Save a model: its tensors, how to build it again, what is frozen and what is in evaluation mode.

    Layers of `torch.nn` and of this package are described in the file. A model with other classes in it is saved
    too, but to load it you must build it yourself: ``load(path, into=model)``. Hooks are not saved. An existing file is
    replaced at the last moment, or stays as it was if anything fails.

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
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        _check_storable(name, tensor)
    content = {
        "model": describe_module(model),
        "evaluating": [name for name, part in model.named_modules(remove_duplicate=False) if not part.training],
        "frozen": [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad],
    }
    write(path, state, content)


def load(path: AnyPath, into: nn.Module | None = None) -> nn.Module:
    """Load a model that `save` has written, on the CPU; or load its tensors into a model of the same architecture.

    With `into` the model keeps its device, and nothing of it is changed if the file does not fit. Types of tensors,
    frozen parameters, and training or evaluation mode are restored in both cases; shared parameters are shared again.
    See `save` for an example.
    """
    if into is not None and not isinstance(into, nn.Module):
        raise TypeError(f"into must be a torch.nn.Module or None, got {describe(into)}")
    tensors, content = read(path)
    if "model" not in content:
        raise ValueError(f"{path} holds no model but something else that misconv has stored; see misconv.store.read")
    try:
        model = rebuild(content["model"], tensors) if into is None else into
        _check_match(model, tensors)
        frozen, evaluating = _names(content, "frozen"), _names(content, "evaluating")
        _fill(model, tensors)
        if into is None:
            _share(model, tensors)
    except ValueError as error:
        raise ValueError(f"cannot load {path}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen and (parameter.is_floating_point() or parameter.is_complex()))
    for name, part in model.named_modules():
        part.training = name not in evaluating
    return model


# Files ---------------------------------------------------------------------------------------------------------------


def write(path: AnyPath, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write tensors and anything that JSON can say into one file, atomically.

    Tensors that are one and the same under several names are stored once, and `read` gives them back as one.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> write(folder.name + "/state", {"weight": torch.ones(2)}, {"epoch": 3})
        >>> read(folder.name + "/state")
        ({'weight': tensor([1., 1.])}, {'epoch': 3})
        >>> folder.cleanup()
    """
    from safetensors.torch import save as serialize

    import misconv

    unique, aliases = _deduplicate(tensors)
    header = {"format": _FORMAT, "misconv": misconv.__version__, "aliases": aliases, "content": metadata}
    try:
        text = json.dumps(header)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must hold only what JSON can say, got {type(metadata).__name__}: {error}") from error
    try:
        data = serialize(unique, {"misconv": text})
    except Exception as error:
        raise ValueError(f"cannot write {path}: safetensors cannot store these tensors ({error})") from error
    write_bytes(path, data)


def read(path: AnyPath) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, on the CPU, and metadata of a file that `write` has written."""
    from safetensors import SafetensorError, safe_open

    start = _first_bytes(path)
    try:
        with safe_open(os.fspath(path), "pt", device="cpu") as file:
            text = (file.metadata() or {}).get("misconv")
            header = _parse(path, text)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except SafetensorError as error:
        raise ValueError(f"cannot load {path}: {_what_it_is(path, start)} ({error})") from error
    aliases = header["aliases"]
    if not all(isinstance(name, str) and name in tensors for name in aliases.values()) or aliases.keys() & tensors:
        raise ValueError(f"cannot load {path}: its description is broken, the aliases do not fit the tensors")
    return tensors | {name: tensors[original] for name, original in aliases.items()}, header["content"]


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Write a file atomically: whatever happens, there is the old file or the new one, never a part of it."""
    target = Path(os.path.realpath(path))  # a link stays, and what it points to is replaced
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {target.parent}; create it first")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file")
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        _write_through(temporary, data)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(error.errno, f"cannot write {path}: {reason}; what was there is untouched") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    _sync_folder(target.parent)


def _write_through(path: Path, data: bytes) -> None:
    """Write a new file, with the permissions of any new file, down to the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Let the new name reach the disk too, where the system can do that for a folder."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _deduplicate(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors on the CPU that share no memory, and the other names of those that were there more than once."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
        kind = isinstance(tensor, nn.Parameter), tensor.dtype, tensor.device
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), kind) if tensor.numel() else name
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
            continue
        plain = tensor.detach().cpu().contiguous()
        pointer = plain.untyped_storage().data_ptr()
        unique[name] = plain.clone() if pointer in storages else plain  # two views of one memory become two tensors
        storages.add(pointer)
    return unique, aliases


def _check_storable(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor to be stored, got {describe(tensor)}")
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name} has no shape yet; call the model once before it is saved")
    if tensor.is_meta or tensor.layout != torch.strided:
        raise ValueError(
            f"{name} must be an ordinary tensor with values in memory to be stored, got {describe(tensor)} "
            f"of layout {str(tensor.layout).removeprefix('torch.')}"
        )


def _first_bytes(path: AnyPath) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"cannot load {path}: there is no such file; check the name") from error
    except OSError as error:
        raise OSError(error.errno, f"cannot load {path}: {error.strerror or error}") from error


def _what_it_is(path: AnyPath, start: bytes) -> str:
    """What to say of a file that is no sound safetensors file."""
    pickled = start[:1] == b"\x80" and start[1:2] <= b"\x05"
    if zipfile.is_zipfile(path):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            pickled = any(name.endswith(".pkl") for name in archive.namelist())
    if pickled:
        return (
            "this is a pickle, as torch.save writes it, and misconv never loads pickles, which can run any code; "
            "load it with torch.load(..., weights_only=True) and store the model with misconv.save"
        )
    if start[8:9] == b"{":
        return "the file is damaged or cut short; copy it again from where it came, or save the model again"
    return "this is not a file of misconv; give one that misconv.save has written"


def _parse(path: AnyPath, text: str | None) -> dict[str, Any]:
    """The checked header of a file."""
    if text is None:
        raise ValueError(
            f"cannot load {path}: this safetensors file was not written by misconv; "
            "load its tensors with safetensors.torch.load_file and give them to model.load_state_dict"
        )
    header: dict[str, Any]
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot load {path}: its description is broken, {type(error).__name__}: {error}") from error
    number = header.get("format") if isinstance(header, dict) else None
    if type(number) is int and number > _FORMAT:
        raise ValueError(
            f"cannot load {path}: it has format {number}, written by misconv {header.get('misconv')}, "
            f"and this misconv reads formats up to {_FORMAT}; install a newer misconv"
        )
    if type(number) is not int or number < 1:
        raise ValueError(f"cannot load {path}: its description is broken, the format must be a number from 1 on")
    if not all(isinstance(header.get(part), dict) for part in ("aliases", "content")):
        raise ValueError(f"cannot load {path}: its description is broken, the aliases or the content are missing")
    return header


# Tensors into modules ------------------------------------------------------------------------------------------------


def _names(content: dict[str, Any], key: str) -> set[str]:
    names = content.get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"its description is broken, {key} must be a list of names, got {str(names)[:100]}")
    return set(names)


def _check_match(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Every tensor of the model is in the file, in the same shape, and nothing else is."""
    own = model.state_dict(keep_vars=True)
    problems = [f"missing in the file: {name}" for name in own.keys() - tensors.keys()]
    problems += [f"unexpected in the file: {name}" for name in tensors.keys() - own.keys()]
    first: dict[int, str] = {}
    for name in sorted(own.keys() & tensors.keys()):
        mine, theirs, other = own[name], tensors[name], first.setdefault(id(own[name]), name)
        if nn.parameter.is_lazy(mine) or mine.is_meta:
            problems.append(f"without values in the model: {name}")
        elif mine.numel() and mine.shape != theirs.shape:  # what is empty gets its shape from the file
            problems.append(f"{name} has shape {tuple(theirs.shape)} in the file and {tuple(mine.shape)} in the model")
        elif _sort(mine) != _sort(theirs):
            problems.append(f"{name} has type {theirs.dtype} in the file and {mine.dtype} in the model")
        elif theirs is not tensors[other] and not torch.equal(theirs, tensors[other]):
            problems.append(f"{name} is the same as {other} in the model but not in the file")
    if problems:
        raise ValueError(f"the file does not fit the model ({'; '.join(sorted(problems))}); nothing was loaded")


def _sort(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def _fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors in, with the types they have in the file; the parameters stay the same objects."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.dtype != tensors[name].dtype:
            tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors)


def _share(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Let what is one tensor in the file be one in the model."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        original = first.setdefault(id(tensor), name)
        (owner, leaf), (other, other_leaf) = _owner(model, name), _owner(model, original)
        shared = getattr(other, other_leaf)
        if isinstance(shared, nn.Parameter) != isinstance(getattr(owner, leaf), nn.Parameter):
            raise ValueError(f"its description is broken, {name} and {original} cannot be the same")
        setattr(owner, leaf, shared)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
