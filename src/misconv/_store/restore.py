"""Tensors of a file into a module: all of them, or none and the module is what it was."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from misconv._store.files import shown

__all__ = ["is_channels_last", "load_tensors", "restore_channels_last", "tie_tensors", "unchanged_on_failure"]


def load_tensors(model: nn.Module, tensors: dict[str, Tensor], frozen: set[str], evaluating: set[str]) -> None:
    """Give a module the tensors, with the types they have in the file, and what is frozen and in evaluation mode.

    The parameters stay the same objects, on their device.
    """
    _check_match(model, tensors)
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        if tensor.dtype != tensors[name].dtype:
            tensor.grad = None  # of the other type
            tensor.data = tensor.data.to(tensors[name].dtype)
    state = OrderedDict(tensors)
    state._metadata = getattr(own, "_metadata", None)  # type: ignore[attr-defined]  # as in torch: versions of classes
    model.load_state_dict(state)
    after = model.state_dict()
    wrong = [name for name, tensor in tensors.items() if name not in after or not _same(after[name], tensor)]
    if wrong:
        raise ValueError(f"the model has not taken {_some(wrong)} as the file has it; nothing was loaded")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen and (parameter.is_floating_point() or parameter.is_complex()))
    for name, part in model.named_modules():
        part.training = name not in evaluating


@contextlib.contextmanager
def unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Put everything back if what is done to a module fails, its own `load_state_dict` and hooks included."""
    parts = [(part, {key: _copy(value) for key, value in vars(part).items()}) for part in model.modules()]
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    held = [t for t in tensors.values() if _has_values(t)]
    # The copies of what lies on a GPU need not lie there too.
    copies = [t.detach().clone() if t.device.type == "cpu" else t.detach().cpu() for t in held]
    saved = [(t, t.data, values, t.requires_grad, t.grad) for t, values in zip(held, copies, strict=True)]
    try:
        yield
    except BaseException:
        for part, attributes in parts:
            vars(part).clear()
            vars(part).update(attributes)
        with torch.no_grad():
            for tensor, data, values, needs_gradient, gradient in saved:
                if tensor.data_ptr() != data.data_ptr() or not _same(tensor, values):
                    # In the same memory, which others may look at.
                    tensor.data = data if _same(data, values) else data.copy_(values)
                if tensor.requires_grad != needs_gradient:
                    tensor.requires_grad_(needs_gradient)
                if tensor.grad is not gradient:
                    tensor.grad = gradient
        raise


def _copy(value: Any) -> Any:
    """What a module keeps in a dictionary, a list or a set may be changed in it."""
    return value.copy() if isinstance(value, dict | list | set) else value


def _has_values(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and not tensor.is_meta


def _check_match(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Every tensor of the model is in the file, in the same shape, and nothing else is."""
    own = model.state_dict(keep_vars=True)
    problems = [f"missing in the file: {shown(name)}" for name in own.keys() - tensors.keys()]
    problems += [f"unexpected in the file: {shown(name)}" for name in tensors.keys() - own.keys()]
    first: dict[int, str] = {}
    for name in sorted(own.keys() & tensors.keys()):
        problem = _mismatch(own[name], tensors[name])
        other = first.setdefault(id(own[name]), name)
        if problem is None and not _same(tensors[name], tensors[other]):
            problem = f"is the same as {shown(other)} in the model but not in the file"
        if problem is not None:
            problems.append(f"{shown(name)} {problem}")
    if problems:
        raise ValueError(f"the file does not fit the model ({_some(sorted(problems), '; ')}); nothing was loaded")


def _mismatch(mine: Any, theirs: Tensor) -> str | None:
    if not isinstance(mine, Tensor):
        return f"is no tensor in the model but of type {type(mine).__name__}"
    if not _has_values(mine):
        return "has no values in the model"
    if mine.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode in the model and cannot be changed"
    if mine.numel() and mine.shape != theirs.shape:  # what is empty gets its shape from the file
        return f"has shape {tuple(theirs.shape)} in the file and {tuple(mine.shape)} in the model"
    if _sort(mine) != _sort(theirs):
        return f"has type {theirs.dtype} in the file and {mine.dtype} in the model"
    return None


def _sort(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def _same(first: Tensor, second: Tensor) -> bool:
    """Bit for bit, so that NaN is itself, wherever they are."""
    if first is second:
        return True
    if not isinstance(first, Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    bits = [
        t.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
        for t in (first, second)
    ]
    return torch.equal(*bits)


def _some(names: list[str], separator: str = ", ") -> str:
    rest = f"{separator}and {len(names) - 6} more" if len(names) > 6 else ""
    return separator.join(names[:6]) + rest


def is_channels_last(tensor: Tensor) -> bool:
    """Whether an image-like tensor lies in memory pixel by pixel."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def restore_channels_last(model: nn.Module, names: set[str]) -> None:
    """Let tensors lie in memory pixel by pixel, as they did when they were saved."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in names and tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def tie_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Let what is one tensor in the file be one in the model."""
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        original = first.setdefault(id(tensor), name)
        (owner, leaf), (other, other_leaf) = _owner(model, name), _owner(model, original)
        shared = getattr(other, other_leaf)
        if isinstance(shared, nn.Parameter) != isinstance(getattr(owner, leaf), nn.Parameter):
            raise ValueError(f"its description is broken, {shown(name)} and {shown(original)} cannot be the same")
        setattr(owner, leaf, shared)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
