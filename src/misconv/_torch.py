"""What depends on the version of torch, in one place: its private functions, and what an old compiler cannot do.

torch may change what is private in any release; then this file has to change, and no other. It was tried with
torch 2.8, 2.11 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "assume_constant",
    "first_of",
    "in_forward_ad",
    "in_graph_task",
    "in_transform",
    "is_traced",
    "is_wrapped",
    "load_pickled",
    "pytree",
    "storage_of",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# Inside of it subclasses of Tensor are ordinary tensors. torch.compile knows it by this object, so it is not wrapped.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass


def assume_constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would load the compiler for the sake of this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by torch.compile
    return function


def is_traced() -> bool:
    """Whether `torch.jit.trace` records, directly or for an export to ONNX."""
    return torch._C._get_tracing_state() is not None


def in_transform() -> bool:
    """Whether this runs inside vmap, grad or another transform of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor stands for others, as it does inside such a transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_forward_ad() -> bool:
    """Whether derivatives are computed in forward mode."""
    return forward_ad._current_level >= 0


def in_graph_task() -> bool:
    """Whether this thread runs a backward pass, also in what an activation checkpoint computes again."""
    return torch._C._current_graph_task_id() != -1


def load_pickled(path: Path) -> Any:
    """What `torch.save` has written, without running code of it; refused where an old torch cannot promise that.

    Until 2.10 a prepared file could overwrite memory in spite of `weights_only` (CVE-2026-24747).
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        raise ValueError(
            f"{path.name} is a pickle, which torch {torch.__version__} cannot read safely (CVE-2026-24747): use torch "
            "2.10 or newer, or a safetensors file"
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, which those that share it have in common as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def first_of(items: Iterable[T], default: T | None = None) -> T | None:
    """The first of some items, as `next(iter(items), default)`, which torch 2.8 cannot compile."""
    for item in items:
        return item
    return default
