"""Processes for tests that need two of them, or one to kill.

They are forked from a server that has imported what takes seconds, and done nothing else: it has no threads, and no state
of other tests. Each run of pytest starts one server, with the first process that is asked for.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import LaunchConfig, elastic_launch

__all__ = ["run", "run_script", "run_two", "start", "start_script", "torchrun"]

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


def start_script(printed: Path, script: Path, *arguments: str, **environment: str) -> BaseProcess:
    """A process that runs a script; all that it prints, on either stream, goes into a file."""
    return start(_redirect_and_run, printed, script, arguments, environment)


def run_script(script: Path, *arguments: str, **environment: str) -> str:
    """All that a script prints; it must end without an error."""
    with tempfile.TemporaryDirectory() as folder:
        process = start_script(Path(folder) / "printed", script, *arguments, **environment)
        process.join(300)
        printed = (Path(folder) / "printed").read_text(encoding="utf-8")
    assert process.exitcode == 0, printed
    return printed


def torchrun(script: Path | str, *arguments: str) -> str:
    """What the first of two processes prints, started by the function behind `torchrun --standalone`."""
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="forkserver", run_id="tests", max_restarts=0,
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", logs_specs=DefaultLogsSpecs(folder, redirects=Std.ALL),
        )  # fmt: skip
        try:
            elastic_launch(config, _run)(script, arguments)
        except ChildFailedError as error:
            logs = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).rglob("stderr.log"))]
            raise AssertionError("\n".join(logs)) from error
        (printed,) = Path(folder).rglob("0/stdout.log")
        return printed.read_text(encoding="utf-8")


def _redirect_and_run(printed: Path, script: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    """Also what is printed past Python's own streams, or by a logger that has kept one of them."""
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)  # as in the process of the tests: another number has other last bits
    _run(script, arguments)


def _run(script: Path | str, arguments: tuple[str, ...]) -> None:
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
