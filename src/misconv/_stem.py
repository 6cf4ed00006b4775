"""The stem of a network: its first convolution, the normalization and the activation that follow it.

A network is followed, not changed: while it runs on a stand-in for the image, every torch function that reads the
stand-in comes by here first. The convolution of the image is answered with moments instead of numbers, the
normalization with an affine map of them, the activation with its expectation; everything else is none of our business.
So it does not matter whether a `forward` calls modules or functions, and parameters stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from misconv._expectations import Activation
from misconv._padding import Padding, Pair, output_size
from misconv.functional import (
    Affine,
    batch_norm_moments,
    fixed_batch_norm,
    mix_expectations,
    padded,
    raw_moments,
    respond,
)
from misconv.mfa import MFA

__all__ = ["HARMLESS", "Follow", "State", "Stem", "harmless", "mark", "per_channel", "plain_name"]

# They change the object but no value (as long as type and device stay the same).
HARMLESS = {"clone", "contiguous", "float", "double", "to", "type", "type_as"}


@dataclass(frozen=True)
class Stem:
    """The parts of a stem by the names of their modules; None where there is none.

    `function` is the torch function that is the activation, `affine` whether arithmetic takes the place of a
    normalization (a frozen one), `named` whether the activation is a module that the user has named.
    """

    convolution: str
    norm: str | None = None
    activation: str | None = None
    function: str | None = None
    affine: bool = False
    named: bool = False

    def __str__(self) -> str:
        parts = (self.convolution, self.norm, self.activation)
        return " → ".join(part for part in parts if part is not None)


Convolution = tuple[MFA, Tensor, Tensor | None, Pair, Padding, Pair, int, str]

# Running -----------------------------------------------------------------------------------------------------------


class State:
    """How far a network has come through its stem with the images `p`.

    `plain` says that no parameter is of a class of its own, which might count on seeing the functions of torch.
    """

    def __init__(self, stem: Stem, p: MFA, image: Tensor, activation: Activation | None, plain: bool = False) -> None:
        self.stem, self.p, self.activation, self.plain = stem, p, activation, plain
        self.now: Tensor | None = image  # the tensor that stands for the moments on their way through the network
        self.convolution: Convolution | None = None  # images and arguments
        self.norm: Affine | None = None  # as long as it looks at no batch
        self.moments: tuple[Tensor, Tensor] | None = None  # where a normalization had to see them
        self.convolved = self.normalized = False
        self.margins: tuple[int, ...] | None = None
        self.margin_mode = "constant"
        self.rest: Any = None

    def let_go(self) -> None:
        """The stem is done: let the rest of the network run as if nobody followed it.

        Some layers of torch (attention) compute in another way, with other rounding, as long as anybody follows.
        """
        alone = torch._C._len_torch_function_stack() == 0  # here, inside an answer, `Follow` itself is off the stack
        if alone and not torch.compiler.is_compiling():
            self.rest = torch._C.DisableTorchFunction()
            self.rest.__enter__()

    def end(self) -> None:
        """Undo `let_go`."""
        if self.rest is not None:
            self.rest.__exit__(None, None, None)
            self.rest = None


class Follow(TorchFunctionMode):
    """While this is active, the tensor `state.now` is answered for by moments."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        state = self.state
        if state.now is None:
            return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if func is torch.broadcast_tensors and state.stem.named and state.convolved and args[-1] is state.now:
            result: Any = (_activate(state),)
        elif first is state.now:
            result = _answer(state, func, args, kwargs)
        else:
            return func(*args, **kwargs)
        if state.now is None and state.plain:
            state.let_go()
        return result


def _answer(state: State, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function returns when it is called with the stand-in."""
    stem, name = state.stem, plain_name(func)
    if not state.convolved:
        if func is F.conv2d:
            return _convolve(state, *args, **kwargs)
        result = func(*args, **kwargs)
        if func is F.pad:
            state.margins, state.margin_mode, state.now = *_padding(*args, **kwargs), result
        elif harmless(name, state.now, result):
            state.now = result
        return result
    if func is F.batch_norm and stem.norm is not None and not stem.affine and not state.normalized:
        return _normalize(state, *args, **kwargs)
    if stem.affine and name in ("mul", "add") and stem.norm is not None and per_channel(args, kwargs):
        state.norm = _arithmetic(state.norm, func, name == "mul", args[1])
        return _hand_on(state)
    if name == stem.function and not stem.named:
        return _activate(state)
    return func(*args, **kwargs)


def _convolve(
    state: State,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    p, mode = state.p, "zeros"
    if state.margins is not None and state.margin_mode == "constant":
        p = padded(p, state.margins)
    elif state.margins is not None:
        left, _, top, _ = state.margins
        padding, mode = (top, left), state.margin_mode
    state.convolution = (p, weight, bias, stride, padding, dilation, groups, mode)
    state.convolved = True
    last = state.stem.norm is None and state.stem.activation is None
    return _activate(state) if last else _hand_on(state)


def _arithmetic(before: Affine | None, func: Callable[..., Tensor], scales: bool, operand: Any) -> Affine:
    """One more multiplication or addition of a number per channel."""

    def apply(response: Tensor) -> Tensor:
        return func(response if before is None else before.apply(response), operand)

    def coefficients() -> tuple[Tensor, Tensor]:
        number = torch.as_tensor(operand).flatten()
        slope, offset = (torch.ones_like(number), torch.zeros_like(number)) if before is None else before.coefficients()
        return (slope * number, offset * number) if scales else (slope, offset + number)

    return Affine(apply, coefficients)


def _normalize(
    state: State,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    state.normalized = True
    if not training and running_mean is not None and running_var is not None:
        state.norm = fixed_batch_norm(running_mean, running_var, weight, bias, eps)
    else:
        assert state.convolution is not None
        state.moments = batch_norm_moments(
            *raw_moments(*state.convolution),
            state.p.weights,
            running_mean,
            running_var,
            weight,
            bias,
            training=training,
            momentum=momentum,
            eps=eps,
        )
    return _activate(state) if state.stem.activation is None else _hand_on(state)


def _hand_on(state: State) -> Tensor:
    """The next stand-in. It has the right shape and type; nobody reads its values, as `find` has made sure."""
    assert state.convolution is not None
    p, weight, _, stride, padding, dilation, _, _ = state.convolution
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    size = (len(p), weight.shape[0], *output_size(p.shape[-2:], weight.shape[-2:], stride, padding, dilation))
    # An activation that the user has named does compute something with it, perhaps in place.
    named = state.stem.named
    state.now = weight.new_zeros(size, dtype=dtype) if named else weight.new_empty((), dtype=dtype).expand(size)
    return state.now


def _activate(state: State) -> Tensor:
    state.now = None
    activation = "identity" if state.activation is None else state.activation
    if state.moments is not None:
        return mix_expectations(state.p, activation, *state.moments)
    assert state.convolution is not None
    return respond(*state.convolution, state.norm, activation)


def _padding(
    input: Tensor, pad: Any, mode: str = "constant", value: float | None = None
) -> tuple[tuple[int, ...], str]:
    return tuple(pad), mode


def per_channel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the second operand is a number, or one number for every channel (C, 1, 1)."""
    if len(args) != 2 or kwargs:
        return False
    other = args[1]
    if not isinstance(other, Tensor):
        return isinstance(other, int | float)
    return other.numel() == 1 or (other.dim() in (3, 4) and other.numel() == other.shape[-3] == args[0].shape[-3])


def plain_name(func: Callable[..., Any]) -> str:
    """In place or not, operator or not: `relu_` and `relu`, `__mul__` and `mul`."""
    name: str = getattr(func, "__name__", "")
    return name.strip("_")


def harmless(name: str, before: Any, after: Any) -> bool:
    """Whether a function has changed the object but no value."""
    same = isinstance(after, Tensor) and after.dtype == before.dtype and after.device == before.device
    return same and name in HARMLESS


# An activation that the user has named: whatever it computes, its result is replaced by its expectation. --------------


def _hand_over(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:
    # A function of torch that does nothing here, for all sizes are the same, but that `Follow` sees, compiled or not.
    answer: Tensor = torch.broadcast_tensors(result, args[0])[0]
    return answer


def mark(module: nn.Module) -> None:
    """Let `Follow` see the end of this activation."""
    module.register_forward_hook(_hand_over)
