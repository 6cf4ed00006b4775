"""Compile what the benchmark will need, on all cores at once.

Triton compiles a kernel when it is first launched, one after the other: minutes for all settings together. It keeps
what it has compiled on disk, so processes that launch everything once leave nothing to compile.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from misconv.bench.checks import MODES, rehearse
from misconv.bench.layer import Kind, Layer, Setting

__all__ = ["Job", "checks", "compile_ahead", "launch"]

_MOST_PROCESSES = 16
_MEMORY = 8 * 10**9  # of the GPU, that each of them may need
_SEED = 1


@dataclass(frozen=True)
class Job:
    """A setting, to be launched for these kinds, or to be checked in this arithmetic."""

    setting: Setting
    kinds: tuple[Kind, ...] = ()
    mode: str | None = None


def compile_ahead(jobs: Sequence[Job], say: Callable[[str], None]) -> None:
    """Launch all jobs once, in as many processes as there are cores."""
    room = torch.cuda.get_device_properties().total_memory // _MEMORY
    processes = max(min((os.cpu_count() or 2) - 1, room, _MOST_PROCESSES, len(jobs)), 1)
    say(f"compiling for {len(jobs)} settings in {processes} processes")
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for job, problem in zip(jobs, pool.map(launch, jobs), strict=True):
            if problem:  # the run itself will meet it again, and stop there
                say(f"{job.setting}: {problem}")


def launch(job: Job, device: str = "cuda") -> str:
    """Launch a job; what went wrong, or nothing."""
    generator = torch.Generator(device).manual_seed(_SEED)
    try:
        if job.mode is not None:
            rehearse(job.setting, generator, job.mode)
        if job.kinds:
            layer = Layer(job.setting, generator, sets=1)
            for kind in job.kinds:
                contender = layer.contender("misconv", kind)
                with contender.around():
                    contender.run(0)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # whatever it is, this is only the rehearsal
        return f"{type(error).__name__}: {error}"
    return ""


def checks(cases: Sequence[Setting]) -> list[Job]:
    """The jobs of the correctness checks."""
    return [Job(case, mode=mode) for case in cases for mode in MODES]
