"""Processes for tests that need two of them, or one to kill.

They are forked from a server that has imported what takes seconds, and done nothing else: it has no threads, and no state
of other tests. Each run of pytest starts one server, with the first process that is asked for.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

__all__ = ["run", "run_two", "start"]

T = TypeVar("T")

_CONTEXT = multiprocessing.get_context("forkserver")
# What the modules of tests import, which a process reads for the function that it runs.
_CONTEXT.set_forkserver_preload(
    ["hypothesis", "lightning_fabric", "misconv.training", "pytest", "sklearn.datasets", "timm"]
)


def run(function: Callable[..., T], *arguments: object) -> T:
    """What a function returns in a process of its own; its error is raised here."""
    with ProcessPoolExecutor(1, mp_context=_CONTEXT) as pool:
        return pool.submit(function, *arguments).result()


def run_two(function: Callable[..., None], *arguments: object) -> None:
    """Call `function(rank, *arguments)` in two processes at once; an error in one is raised here."""
    torch.multiprocessing.start_processes(function, arguments, nprocs=2, start_method="forkserver")


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that calls a function of a module."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process
