"""The randomness of one job, apart from that of all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

__all__ = ["Dropout"]


class Dropout:
    """The randomness of one job: while it is installed, generators of its own stand in the place of torch's.

    So a job draws the same numbers alone and beside others. Where its step is captured in a CUDA graph the graph reads
    the generator's seed and offset at every replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.cpu = torch.Generator("cpu")
        self.cuda = torch.Generator(device) if device.type == "cuda" else None

    def seed(self, number: int) -> None:
        """Start again from a seed."""
        self.cpu.manual_seed(number % 2**63)
        if self.cuda is not None:
            self.cuda.manual_seed(number % 2**63)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Whatever torch draws in here comes from these generators; torch's own do not move."""
        cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self.cpu.get_state())
        try:
            with nullcontext() if self.cuda is None else _default_generator(self.cuda):
                yield
        finally:
            self.cpu.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(cpu)


@contextmanager
def _default_generator(own: torch.Generator) -> Iterator[None]:
    """Make a generator of a GPU the default one; also while a graph is captured, unlike setting its state."""
    default = torch.cuda.default_generators[own.device.index]
    usual = default.graphsafe_get_state()
    default.graphsafe_set_state(own)
    try:
        yield
    finally:
        default.graphsafe_set_state(usual)
