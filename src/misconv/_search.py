"""Finding the stem of a network: run it once on random images and see who reads what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from misconv._stem import HARMLESS, Stem, harmless, per_channel, plain_name

__all__ = ["Search", "find"]

# Pointwise functions of torch and the modules with the same arguments.
_POINTWISE: dict[str, type[nn.Module]] = {
    "celu": nn.CELU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "leaky_relu": nn.LeakyReLU,
    "logsigmoid": nn.LogSigmoid,
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
    "tanhshrink": nn.Tanhshrink,
}


@dataclass
class Read:
    """A function that has read a tensor on the way: the tensor's number, and what came of it."""

    source: int
    name: str
    kind: str
    where: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None = None

    def __str__(self) -> str:
        return f"{self.name}() in {self.where or 'forward'!r}"


class Search(TorchFunctionMode):
    """Records who reads the image and the responses of convolution and normalization."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.tracked: list[tuple[Tensor, int]] = [(image, 0)]
        self.count = 1
        self.reads: list[Read] = []
        self.inputs: dict[str, int | None] = {}
        self.where: list[str] = [""]
        self.convolutions: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            self.convolutions.append(self.where[-1])
        numbers = {self.number(leaf) for leaf in pytree.tree_leaves((args, kwargs))} - {None}
        if not numbers:
            return func(*args, **kwargs)
        name = plain_name(func)
        first = args[0] if args else kwargs.get("input")
        number = self.number(first)
        if number is not None and name in HARMLESS:
            result = func(*args, **kwargs)
            if harmless(name, first, result):
                self.tracked.append((result, number))
                return result
        # Functions that work in place would make the result the same object as what they read.
        copies = pytree.tree_map(lambda leaf: leaf.clone() if self.number(leaf) is not None else leaf, (args, kwargs))
        result = func(*copies[0], **copies[1])
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):  # not just a shape
            kind = "other" if number is None else _kind(func, name, args, kwargs)
            rest = (None, *args[1:])
            for source in numbers:
                assert source is not None
                read = Read(source, name, kind, self.where[-1], rest, kwargs)
                self.reads.append(read)
                if kind not in ("other", "activation"):
                    read.result, self.count = self.count, self.count + 1
                    self.tracked.append((result, read.result))
        return result

    def number(self, value: object) -> int | None:
        """The number of a tensor on the way, None for everything else."""
        return next((number for tensor, number in self.tracked if tensor is value), None)

    def watch(self, model: nn.Module) -> list[Any]:
        """Know at every moment which module is running; returns the handles that end it."""
        handles = []
        for name, module in model.named_modules():

            def enter(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                self.where.append(name)
                self.inputs[name] = self.number(args[0]) if args else None

            def leave(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
                self.where.pop()

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        return handles

    def returned(self, result: Any) -> None:
        """What the network returns is read too."""
        for leaf in pytree.tree_leaves(result):
            number = self.number(leaf)
            if number is not None:
                self.reads.append(Read(number, "return", "other", "", (), {}))

    def of(self, number: int) -> list[Read]:
        """Who read this tensor."""
        return [read for read in self.reads if read.source == number]


def _kind(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if func is F.conv2d:
        return "convolution"
    if func is F.pad and _known_padding(*args, **kwargs):
        return "padding"
    if func is F.batch_norm:
        return "norm"
    if name in ("mul", "add") and per_channel(args, kwargs):
        return "affine"
    return "activation" if name in _POINTWISE else "other"


def find(model: nn.Module, search: Search, names: tuple[str, ...]) -> tuple[Stem, nn.Module | None, list[str]]:
    """The stem in what `search` has seen, its activation where that is a function, and who else reads the image.

    `names` are the parts the user has named, if any.
    """
    start, others = _first_convolution(search)
    if names and start.where != names[0]:
        raise ValueError(f"stem must begin with the convolution that reads the image, {start.where!r}, got {names!r}")
    wanted = [name for name in names[1:] if name]
    named = next((name for name in wanted if not _is_norm(model.get_submodule(name))), None)
    current, norm, affine = start.result, None, False
    while True:
        assert current is not None
        if named is not None and search.inputs.get(named) == current:
            readers = [read for read in search.of(current) if not f"{read.where}.".startswith(f"{named}.")]
            _check_single(readers, start, 0)
            return Stem(start.where, norm, named, named=True, affine=affine), None, others
        readers = search.of(current)
        follow = [read for read in readers if read.kind in ("norm", "affine", "activation")]
        if names:
            follow = [read for read in follow if read.kind != "activation" and read.where in wanted]
        if not follow or (follow[0].kind == "norm" and norm is not None):
            break
        if follow[0].kind == "affine" and not _leads_on(search, follow[0]):
            break
        _check_single(readers, start, 1)
        read = follow[0]
        if read.kind == "activation":
            label, module = _activation(model, read)
            return Stem(start.where, norm, label, read.name, affine), module, others
        norm, affine, current = read.where, read.kind == "affine", read.result
    missing = [name for name in wanted if name != norm]
    if missing:
        raise ValueError(
            f"stem must name parts that follow each other, but {missing[0]!r} does not receive what "
            f"{norm or start.where!r} returns; got {names!r}"
        )
    return Stem(start.where, norm, None, None, affine), None, others


def _first_convolution(search: Search) -> tuple[Read, list[str]]:
    """The first convolution that receives the image itself; and what else reads the image."""
    ways, others = [0], []
    start: Read | None = None
    for read in search.reads:
        if read.source not in ways:
            continue
        if read.kind == "convolution" and start is None:
            start = read
        elif read.kind == "padding" and start is None and read.source == 0:
            assert read.result is not None
            ways.append(read.result)
        else:
            others.append(str(read))
    if start is not None:
        return start, others
    if not search.convolutions:
        raise ValueError(
            "model must hold a convolution that runs, but none was called as torch.nn.functional.conv2d; convert works "
            "on networks whose first layer is a torch.nn.Conv2d"
        )
    culprit = others[0] if others else "something that torch functions do not show"
    raise ValueError(
        f"model must hand the image itself to its first convolution, {search.convolutions[0]!r}, but {culprit} changes "
        "it before; do that to the images before they enter the network (normalise values, not holes) and convert the "
        "rest"
    )


def _check_single(readers: list[Read], start: Read, allowed: int) -> None:
    if len(readers) > allowed:
        who = ", ".join(str(read) for read in readers)
        raise ValueError(
            f"model must read what lies between the convolution {start.where!r} and its activation only once, but it "
            f"is read by {who}, and an expectation cannot stand for both; pass stem={start.where!r} to take the "
            "expected response of the convolution alone, which equals imputing the mean"
        )


def _leads_on(search: Search, read: Read) -> bool:
    """Whether arithmetic per channel is a frozen normalization: an activation comes out at the end of it."""
    assert read.result is not None
    after = search.of(read.result)
    return any(r.kind == "activation" or (r.kind == "affine" and _leads_on(search, r)) for r in after)


def _activation(model: nn.Module, read: Read) -> tuple[str, nn.Module | None]:
    """How to call the activation, and its module; None where the module of that name has its own parameters."""
    owner = model.get_submodule(read.where)
    if read.name == "prelu":
        if type(owner) is not nn.PReLU:
            raise ValueError(
                f"model must use a torch.nn.PReLU for the activation of its stem, got F.prelu() in {read.where!r}"
            )
        return read.where, None
    kwargs = {key: value for key, value in read.kwargs.items() if key not in ("input", "inplace")}
    module = _POINTWISE[read.name](*read.args[1:], **kwargs)
    if hasattr(module, "inplace"):
        module.__dict__["inplace"] = False
    leaf = not list(owner.children()) and not list(owner.parameters()) and read.where
    return (read.where if leaf else f"{read.name}() in {read.where or 'forward'}"), module


def _known_padding(input: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> bool:
    """Whether padding before the convolution can be followed: zeros, or what `nn.Conv2d` does by itself."""
    if len(pad) != 4 or min(pad) < 0 or value not in (None, 0):
        return False
    return mode == "constant" or (pad[0] == pad[1] and pad[2] == pad[3])


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or "BatchNorm" in type(module).__name__
