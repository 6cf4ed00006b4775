"""Functions of tensors that launch kernels: differentiable, and replayed by C++ once they were recorded.

In Python the host needs longer for a small layer than the GPU does: it makes tensors, launches kernels, and keeps what
the gradients need. For tensors of the same sizes, strides and types all of that is the same every time. So it is
recorded (`trace`) and from then on done by `cpp/replay.cpp`, with the same bits. That is compiled by the machine's C++
compiler in the background, once; until then, and where it cannot be, Python goes on.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from misconv._compiler import Build, reason
from misconv._triton.launch import is_watched
from misconv._triton.trace import Recorder, UnknownStepError

__all__ = ["Replays", "replayer", "why_not"]

Tensors = Sequence[Tensor | None]
Plain = Callable[..., Any]

_SOURCE = Path(__file__).with_name("cpp") / "replay.cpp"
_WARM_UP = 2  # calls after which it pays to record
_MOST = 8  # records of one function
_DEVICES = ("cuda",)  # where there is something to replay
_logger = logging.getLogger("misconv")


class Replays:
    """A differentiable function of tensors, (*inputs) -> one result, or a tuple of them.

    Args:
        forward: (*inputs) -> the results, and behind them what the gradients need; some may be None.
        backward: (needed, gradients of the results, inputs, what they need) -> gradients of the inputs.
        device: of the tensors.
        results: how many there are.
        mutated: the places of inputs that are written.
    """

    def __init__(
        self,
        forward: Callable[..., Sequence[Tensor | None]],
        backward: Callable[[tuple[bool, ...], Tensors, Tensors, Tensors], Sequence[Tensor | None]],
        device: torch.device,
        results: int = 1,
        mutated: tuple[int, ...] = (),
    ) -> None:
        self.forward, self.backward, self.results, self.mutated = forward, backward, results, mutated
        self.device, self._calls, self._records = device, 0, 0
        self._replays: Any = None  # the records, which the compiled module holds …
        self._call: Any = None  # … and its function that replays one of them
        self._launches: list[Any] = []  # as long as they live, so do the functions of their kernels

    def __call__(self, plain: Plain, *inputs: Tensor | None) -> Any:
        """The result, or a tuple of several.

        Args:
            plain: (*inputs) -> the same by formulas of torch, for derivatives of derivatives.
        """
        result = self.replayed(plain, inputs)
        if result is not None:
            return result
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            return _Differentiable.apply(self, plain, *inputs)
        return self.returned(self.run(inputs))

    def replayed(self, plain: Plain, inputs: Tensors) -> Any:
        """The same for tensors of sizes, strides, types and devices that were recorded; None for others."""
        if self._replays is None or is_watched():
            return None
        return self._call(self._replays, partial(self.differentiate, plain), *inputs)

    def returned(self, made: Sequence[Tensor | None]) -> Any:
        """What the caller gets."""
        return made[0] if self.results == 1 else tuple(made[: self.results])

    def run(self, inputs: Tensors) -> Sequence[Tensor | None]:
        """All that the function makes; recorded, if that is worth it."""
        self._calls += 1
        worth = self._calls > _WARM_UP and self._records < _MOST and self.device.type in _DEVICES
        module = replayer() if worth else None
        if module is None:
            return self.forward(*inputs)
        if self._replays is None:
            self._call, self._replays = module.call, module.new_replays(self.results)
        self._records += 1
        return self._recorded(
            inputs,
            partial(self.forward, *inputs),
            lambda trace: module.add(self._replays, tuple(inputs), trace, self.mutated),
        )

    def differentiate(
        self, plain: Plain, entry: Any, needed: tuple[bool, ...], grads: Tensors, saved: Tensors
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, as far as they are needed.

        Args:
            entry: where they are recorded; None if they shall not be.
            saved: the inputs, but for those that are written; and behind them what the forward pass has kept.
        """
        inputs, kept = saved[: len(needed)], saved[len(needed) :]
        if torch.is_grad_enabled():  # derivatives of this derivative are left to the plain path
            return _plain_gradients(plain, needed, grads, inputs)
        if entry is None or self._records >= 4 * _MOST:
            return tuple(self.backward(needed, grads, inputs, kept))
        self._records += 1
        made = self._recorded(
            (*grads, *saved),
            partial(self.backward, needed, grads, inputs, kept),
            lambda trace: replayer().add_backward(entry, needed, tuple(grads), trace),
        )
        return tuple(made)

    def _recorded(
        self, inputs: Tensors, function: Callable[[], Sequence[Tensor | None]], keep: Callable[[Any], None]
    ) -> Sequence[Tensor | None]:
        """What a function returns, whose steps are kept if all of them are known."""
        with Recorder(inputs) as recorder:
            made = function()
        try:
            keep(recorder.trace(made))
            self._launches += recorder.launches
        except UnknownStepError as problem:
            _logger.debug("a call is not replayed: %s", problem)
        return made


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replays: Replays, plain: Plain, *inputs: Tensor | None) -> Any:
        ctx.replays, ctx.plain = replays, plain
        ctx.set_materialize_grads(False)
        made = replays.run(inputs)
        kept = [None if i in replays.mutated else t for i, t in enumerate(inputs)]
        ctx.save_for_backward(*kept, *made[replays.results :])
        return replays.returned(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.replays.differentiate(ctx.plain, None, ctx.needs_input_grad[2:], grads, ctx.saved_tensors)
        return (None, None, *found)


def _plain_gradients(
    plain: Plain, needed: tuple[bool, ...], grads: Tensors, inputs: Tensors
) -> tuple[Tensor | None, ...]:
    """The same gradients by torch's own differentiation, which can be differentiated again."""
    wanted = [t for t, asked in zip(inputs, needed, strict=True) if asked and t is not None]
    values = plain(*inputs)
    values = values if isinstance(values, tuple) else (values,)
    asked_for = [(y, g.to(y.dtype)) for y, g in zip(values, grads, strict=True) if g is not None]
    ys, directions = zip(*asked_for, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, directions, create_graph=True, allow_unused=True))
    return tuple([next(found) if asked and t is not None else None for t, asked in zip(inputs, needed, strict=True)])


# The compiled module -----------------------------------------------------------------------------------------------


class _Loading:
    """The module on its way: being compiled, loaded, or not to be had."""

    def __init__(self) -> None:
        self.module: Any = None
        self.problem: str | None = None
        self._lock = threading.Lock()  # gradients are computed by threads of their own
        root = Path(torch.__file__).parent
        includes = (root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        flags = ("-std=c++20", "-O1", "-fvisibility=hidden", abi, *(f"-I{path}" for path in includes))
        libraries = (f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10")
        try:
            self.build: Build | None = Build(_SOURCE, flags, libraries, (torch.__version__, sys.version))
        except OSError as problem:
            self.build, self.problem = None, f"the replay of launches {reason(problem)}"

    def load(self, wait: bool) -> Any:
        """The module, as soon as it is there."""
        with self._lock:
            if self.build is not None and (wait or self.build.is_done()):
                build, self.build = self.build, None
                try:
                    self.module = _imported(build.wait())
                except (OSError, ImportError, subprocess.SubprocessError) as problem:
                    self.problem = f"the replay of launches {reason(problem)}"
            return self.module


def _imported(path: Path) -> Any:
    """The module in a library."""
    spec = importlib.util.spec_from_file_location("misconv_replay", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_loading = cache(_Loading)


def replayer(*, wait: bool = False) -> Any:
    """The compiled module; None as long as it is not there, and where it cannot be compiled."""
    loading = _loading()
    return loading.module or loading.load(wait)


def why_not() -> str | None:
    """Why nothing is replayed; None where calls are."""
    replayer(wait=True)
    return _loading().problem
