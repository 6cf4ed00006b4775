from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from misconv._triton import launch as module
from misconv._triton.launch import Launch


class Kernel:
    """Stands for a kernel of Triton: writes down how it was launched, and compiles to something that does the same."""

    def __init__(self, log: list[tuple[object, ...]], name: str = "first") -> None:
        self.log, self.name = log, name

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Kernel]:
        def launch(*arguments: object, **options: object) -> Kernel:
            self.log.append((self.name, grid, *arguments))
            return Kernel(self.log, "again")

        return launch


def test_a_known_kernel_is_launched_by_the_back_door_unless_memory_is_not_aligned() -> None:
    log: list[tuple[object, ...]] = []
    launch = Launch(Kernel(log), torch.device("cpu"), (2, 3, 1), (7, "constant"))
    whole = torch.zeros(64)
    odd = whole[1:]
    for x in (odd, whole, whole, odd, whole):
        launch(x, None)
    assert [entry[0] for entry in log] == ["first", "first", "again", "first", "again"]
    assert log[2] == ("again", (2, 3, 1), whole.data_ptr(), None, 7, "constant")
    assert log[3][2] is odd


class Compiled:
    """Stands for a compiled kernel on a GPU: writes down who has launched it, and with what."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, log: list[tuple[object, ...]]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.log.append(("watched", grid, *arguments))

    def run(self, *arguments: object) -> None:
        self.log.append(("direct", *arguments))


def test_on_a_gpu_a_known_kernel_is_launched_without_hooks_unless_somebody_has_set_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[object, ...]] = []

    def first(grid: object) -> Callable[..., Compiled]:
        return lambda *arguments, **options: Compiled(log)

    chain = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=chain, launch_exit_hook=None)
    streams = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(module, "knobs", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=streams))
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: first(grid)})()
    launch = Launch(kernel, torch.device("cuda", 0), (2, 3, 1), (7,))
    x = torch.zeros(64)
    launch(x, None)
    launch(x, None)
    chain.calls.append(print)  # as a profiler does
    launch(x, None)
    direct = ("direct", 2, 3, 1, "stream of 0", "function", "metadata", None, None, None, x.data_ptr(), None, 7)
    assert log == [direct, ("watched", (2, 3, 1), x.data_ptr(), None, 7)]
