from __future__ import annotations

from collections.abc import Callable

import torch

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
