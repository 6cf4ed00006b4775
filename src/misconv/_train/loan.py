"""A module on loan: trained on another device, in another mode and precision, and given back as it came."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from misconv._checks import describe

__all__ = ["Loan", "borrowed", "check_trainable", "gpu_of"]


class Loan:
    """A module while something else happens to it.

    `result` is the state dict that it will hold when it is given back: at first what it came with, so that an error
    leaves no trace. Devices, dtypes, training modes, `requires_grad` and gradients of all parts are noted, and
    parameters stay the same objects.
    """

    def __init__(self, module: nn.Module, home: torch.device | None = None) -> None:
        self.module, self.home = module, home
        self.modes = [(part, part.training) for part in module.modules()]
        self.parameters = [(p, p.device, p.dtype, p.requires_grad, p.grad) for p in module.parameters()]
        self.buffers = [
            (part, name, buffer.device, buffer.dtype)
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        came = copy.deepcopy(module.state_dict())
        self.result: dict[str, Any] | None = came
        self.frozen = [(p, came[name]) for name, p in module.named_parameters() if not p.requires_grad and name in came]
        for parameter in module.parameters():
            parameter.grad = None  # those of a training would stay behind on its device

    def give_back(self) -> None:
        """Put everything back, the values too where there is a `result`."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self._return()
        if self.result is not None:  # after the types: what it came with is not to be rounded
            self.module.load_state_dict(self.result)
        for parameter, value in self.frozen:  # less precision has rounded these, too
            parameter.data.copy_(value)

    def _return(self) -> None:
        devices = {entry[1] for entry in self.parameters} | {entry[2] for entry in self.buffers}
        home = self.home if not devices else devices.pop() if len(devices) == 1 else None
        if home is not None:
            self.module.to(home)  # with whatever the module itself does when it is moved
        for parameter, device, dtype, requires_grad, gradient in self.parameters:
            if parameter.device != device or parameter.dtype != dtype:
                parameter.data = parameter.data.to(device, dtype)
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for part, name, device, dtype in self.buffers:
            buffer = part._buffers.get(name)
            if buffer is not None:
                part._buffers[name] = buffer.to(device, dtype)
        for part, training in self.modes:
            part.training = training


@contextmanager
def borrowed(module: nn.Module, device: torch.device, home: torch.device | None = None) -> Iterator[Loan]:
    """Have a module on a device for a while; it is given back however that ends.

    Args:
        device: where it is wanted.
        home: where a module goes that came without any tensor.

    Example:
        >>> layer = nn.Linear(2, 1).eval()
        >>> with borrowed(layer, torch.device("cpu")):
        ...     _ = layer.double().train().requires_grad_(False)
        >>> layer.weight.dtype, layer.training, layer.weight.requires_grad
        (torch.float32, False, True)
    """
    loan = Loan(module, home)
    try:
        module.to(device)
        yield loan
    finally:
        loan.give_back()


def check_trainable(name: str, module: nn.Module) -> None:
    """A module with something to learn, all of it in memory and in a type that Adam's small steps do not vanish in."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {describe(module)}")
    for part, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise ValueError(f"{name} must have values in memory, but its {part} has none; call it once, or load it")
    learning = {part: p for part, p in module.named_parameters() if p.requires_grad}
    if not learning:
        raise ValueError(f"{name} must have a parameter that requires a gradient, got {type(module).__name__}, none")
    for part, p in learning.items():
        if p.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
            kind = str(p.dtype).removeprefix("torch.")
            raise TypeError(
                f"{name} must hold float32 or float64 to be trained, but its {part} is {kind}; call {name}.float(), "
                "and choose a Fabric(precision=…) to compute with less"
            )


def gpu_of(module: nn.Module, *tensors: Tensor | None) -> torch.device | None:
    """The GPU that a module, or else one of some tensors, is on; None where all are elsewhere."""
    found = (t.device for t in (*module.parameters(), *module.buffers(), *tensors) if t is not None)
    return next((device for device in found if device.type == "cuda"), None)
