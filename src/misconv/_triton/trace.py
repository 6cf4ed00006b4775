"""Recording what a function does with tensors: those that it makes, and the kernels that it launches.

For tensors of the same sizes, strides and types it does the same every time, so that the record can take its place; see
`cpp/replay.cpp`, which has it in C++.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from misconv._torch import TorchDispatchMode, storage_of

if TYPE_CHECKING:
    from misconv._triton.launch import Launch

__all__ = ["Recorder", "UnknownStepError", "recorders"]

# How numbers are laid out in the parameters of a kernel, by the names that Triton has for their types.
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_ZEROS = ("zeros", "zeros_like", "new_zeros")
_COPIES = ("_to_copy", "clone")
_Step = tuple[Any, ...]

recorders: dict[int, Recorder] = {}  # those at work, by their threads


class UnknownStepError(Exception):
    """A function did what cannot be recorded."""


class Recorder(TorchDispatchMode):
    """Writes down the steps of a function of some tensors.

    Everything it does runs as usual. `trace` raises an `UnknownStepError` if there was something among it that is
    neither a launch nor one of a few simple functions of torch.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.inputs = list(inputs)
        self.steps: list[_Step | _Launched] = []
        self.constants: list[Tensor] = []
        self.problem: str | None = None
        self._is_paused = False  # what happens inside a launch is its own business
        self._number = 0  # of slots for what is made
        self._slots: dict[int, tuple[Any, Tensor]] = {}  # by memory: of what is made, or a constant
        self._alive: list[Any] = []  # so that no memory is taken twice
        given = [t for t in inputs if t is not None]
        self._device = given[0].device
        if len({id(t) for t in given}) < len(given):  # next time they may be two, and who was meant is not known
            self._fail("a tensor is given twice")

    def __enter__(self) -> Recorder:
        recorders[threading.get_ident()] = self
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        del recorders[threading.get_ident()]
        super().__exit__(*problem)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        made = function(*arguments, **(options or {}))
        if self._is_paused:
            return made
        self._alive.append(made)
        name, several = function.overloadpacket.__name__, isinstance(made, (tuple, list))
        if function._schema.is_mutable:
            self._fail(f"{name} writes to a tensor")
        elif not all(isinstance(t, Tensor) and self._is_known(t) for t in (made if several else [made])):
            if isinstance(made, Tensor):
                self._record(name, arguments, made)
            else:
                self._fail(f"{name} returns something new")
        return made

    def _record(self, name: str, arguments: tuple[Any, ...], made: Tensor) -> None:
        """A tensor that was made."""
        is_sum = name == "sum" and len(arguments) == 2 and list(arguments[1]) == [0]
        is_sum = is_sum and made.shape == arguments[0].shape[1:]  # without `keepdim`
        if name not in (*_EMPTY, *_ZEROS, *_COPIES) and not is_sum:
            self._fail(f"{name} is not known")
            return
        if made.device != self._device:
            self._fail(f"{name} makes a tensor on another device")
            return
        source = self._view(arguments[0]) if is_sum or name in _COPIES else None
        slot = ("made", self._number)
        self._number += 1
        self._slots[storage_of(made)] = slot, made
        self.steps.append(("empty", slot, tuple(made.shape), made.stride(), made.dtype))
        if name in _ZEROS:
            self.steps.append(("zero", slot))
        elif source is not None:
            self.steps.append(("sum" if is_sum else "copy", slot, source))

    def launch(self, launch: Launch, tensors: Sequence[Tensor | None]) -> None:
        """Launch a kernel, and write it down."""
        self._is_paused = True
        try:
            aligned = launch.launch(tensors)
        finally:
            self._is_paused = False
        self._alive.append(tensors)
        if not aligned:
            self._fail("memory is not aligned")
        self.steps.append(_Launched(launch, tensors, [None if t is None else self._place(t) for t in tensors]))

    def _last_uses(self, returned: set[Any]) -> dict[int, list[Any]]:
        """By the place of a step, what was made and is read by none behind it, so that its memory serves others."""
        last: dict[Any, int] = {}
        for place, step in enumerate(self.steps):
            if isinstance(step, _Launched):
                used = [where[0] for where in step.places if where is not None]
            else:
                used = [step[1], *([step[2][0]] if step[0] in ("sum", "copy") else [])]
            last |= {slot: place for slot in used if slot[0] == "made" and slot not in returned}
        found: dict[int, list[Any]] = {}
        for slot, place in last.items():
            found.setdefault(place, []).append(slot)
        return found

    @property
    def launches(self) -> list[Launch]:
        """What was launched."""
        return [step.launch for step in self.steps if isinstance(step, _Launched)]

    def _fail(self, why: str) -> None:
        self.problem = self.problem or why

    def _is_known(self, t: Tensor) -> bool:
        """Whether it is a view of an input or of what was made."""
        memory = storage_of(t)
        return memory in self._slots or any(s is not None and storage_of(s) == memory for s in self.inputs)

    def _place(self, t: Tensor) -> tuple[Any, int]:
        """The slot of a tensor's memory, and where it begins in it, in numbers of its type."""
        for i, s in enumerate(self.inputs):
            if s is t:
                return ("input", i), 0
        shared = [i for i, s in enumerate(self.inputs) if s is not None and storage_of(s) == storage_of(t)]
        if len(shared) > 1:
            self._fail("inputs share their memory, and a view of it is taken")
        if shared:
            whole, slot = self.inputs[shared[0]], ("input", shared[0])
            assert whole is not None
        else:
            if storage_of(t) not in self._slots:
                self._slots[storage_of(t)] = ("constant", len(self.constants)), t
                self.constants.append(t)
            slot, whole = self._slots[storage_of(t)]
        if whole.dtype != t.dtype:
            self._fail("memory is taken for another type")
        return slot, int(t.storage_offset()) - int(whole.storage_offset())

    def _view(self, t: Tensor) -> tuple[Any, ...]:
        slot, offset = self._place(t)
        return slot, tuple(t.shape), t.stride(), offset

    def trace(self, outputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """(steps, outputs, constants, number of slots), as `make_trace` of `cpp/trace.h` reads them."""
        views = [None if t is None else self._view(t) for t in outputs]
        if any(v is not None and v[0][0] == "constant" for v in views):
            self._fail("what is returned was made by nobody")
        if self.problem is not None:
            raise UnknownStepError(self.problem)
        first = {"input": 0, "constant": len(self.inputs), "made": len(self.inputs) + len(self.constants)}

        def number(slot: tuple[str, int]) -> int:
            return first[slot[0]] + slot[1]

        def view(v: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return None if v is None else (number(v[0]), *v[1:])

        last = self._last_uses({v[0] for v in views if v is not None})
        steps: list[_Step] = []
        for place, step in enumerate(self.steps):
            if isinstance(step, _Launched):
                steps.append(step.packed(number))
            elif step[0] in ("sum", "copy"):
                steps.append((step[0], number(step[1]), view(step[2])))
            else:
                steps.append((step[0], number(step[1]), *step[2:]))
            steps += [("free", number(slot)) for slot in last.get(place, ())]
        return tuple(steps), tuple(map(view, views)), tuple(self.constants), first["made"] + self._number


class _Launched:
    """One launch: of what, with which tensors, and where these are."""

    def __init__(
        self, launch: Launch, tensors: Sequence[Tensor | None], places: Sequence[tuple[Any, int] | None]
    ) -> None:
        self.launch, self.tensors, self.places = launch, tensors, places

    def packed(self, number: Callable[[tuple[str, int]], int]) -> _Step:
        """As `make_step` of `cpp/trace.h` reads it."""
        described = self.launch.describe(self.tensors)
        if described is None:
            raise UnknownStepError("a kernel cannot be launched without Triton")
        function, threads, shared, types = described
        parameters: list[Any] = []
        for i, kind in enumerate(types):
            if kind == "constexpr":  # also None, and a 1: they are part of the kernel
                continue
            if kind.startswith("*"):
                place, t = self.places[i], self.tensors[i]
                assert place is not None
                assert t is not None
                parameters.append((number(place[0]), place[1] * t.element_size()))
            else:
                value = self.launch.arguments[i - len(self.tensors)]
                packed = struct.pack(f"={_FORMATS[kind]}", value)
                parameters.append(int.from_bytes(packed.ljust(8, b"\0"), "little"))
        parameters += [0] * 4  # scratch memory, which none of ours has; a kernel takes as many as it knows
        return ("launch", function, self.launch.grid, threads, shared, tuple(parameters))
