"""The engine under every training: steps with Adam, the best parameters kept, checkpoints, many jobs side by side.

A `Job` says what is trained, on what, and how it is judged. On a GPU whose memory holds the data, one step of each job
is captured as a CUDA graph, and replayed on a stream of its own: small networks wait for launches otherwise, and one
alone fills a fraction of the chip. Everywhere else jobs take turns, epoch by epoch.

A round is an epoch or a part of one. All its randomness comes from the seed and its number, and a checkpoint is written
whole or not at all, so that a run that was killed and called again ends with the same parameters as one that was not.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from misconv._store import JsonObject
from misconv._train.budget import Budget
from misconv._train.checkpoint import Checkpoint
from misconv._train.dropout import Dropout
from misconv._train.identity import identify_module
from misconv._train.loan import borrowed
from misconv._train.processes import check_agreement, synchronized
from misconv._train.running import Job, Rate, Running, rate_of, under
from misconv._train.session import EpochRecord, History, progress_bar

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["EpochRecord", "History", "Job", "Rate", "train"]

_log = logging.getLogger("misconv")

# Steps before a graph is captured: kernels compile, libraries choose algorithms, Adam makes its state.
_WARM_UP = 3
_PAUSE = 20  # how much longer a training goes on than its last checkpoint took to write


def train(
    jobs: Sequence[Job],
    fabric: Fabric,
    *,
    epochs: int | None = None,
    budget: Budget | None = None,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 0.0,
    progress: bool = True,
    title: str = "training",
    transient: bool = False,
) -> list[History]:
    """Train all jobs; leaves every module with its best parameters, where and as it came.

    An error, or an interruption, leaves it with the best parameters so far, or as it came.

    Args:
        jobs: of one number of images and one batch size.
        epochs: how long; or a `budget`, which may also be one of steps or minutes.
        patience: stop after this many rounds in which no job got better. A round is an epoch or less, see `Budget`.
        checkpoint: a file to continue from if it exists, and to write after a round.
        checkpoint_seconds: the least time between two writes, more where to write takes long; with 0, the default,
            every round is written.
        progress, title, transient: of a bar; a transient one goes when it is done.

    Returns:
        For every job a record per round.
    """
    _check_sizes(jobs, fabric)
    budget = budget or Budget(epochs=epochs)
    start = time.monotonic()
    file = Checkpoint(checkpoint, fabric)
    settings = _settings(jobs, fabric, patience, budget) if checkpoint is not None or fabric.world_size > 1 else {}
    check_agreement(fabric, json.dumps([settings, budget.total]))
    found = file.read(settings)
    captured = all(job.resident for job in jobs) and _can_capture(fabric)
    with ExitStack() as stack:
        loans = [stack.enter_context(borrowed(job.module, fabric.device)) for job in jobs]
        for job in jobs:
            if job.synchronize:
                stack.enter_context(synchronized(job.module, fabric.world_size))
            if job.prepare is not None:
                job.prepare()
        running = [Running(job, fabric, captured) for job in jobs]
        for run, loan in zip(running, loans, strict=True):
            run.loan, run.budget = loan, budget
        if found is not None:
            start -= _resume(running, file, *found, budget)
        written, pause = time.monotonic(), checkpoint_seconds

        def spent() -> int:
            return budget.spent(running[0].place, time.monotonic() - start)

        bar = progress_bar(progress and fabric.global_rank == 0, title, budget.total, spent(), transient=transient)
        advance = stack.enter_context(bar)
        for record in _rounds(running, fabric, budget, start, patience, captured):
            if checkpoint is not None and (begun := time.monotonic()) - written >= pause:
                tensors = {f"{n}.{key}": t for n, run in enumerate(running) for key, t in run.tensors().items()}
                numbers = [run.numbers() for run in running]
                seconds = time.monotonic() - start
                file.write(tensors, {"settings": settings, "jobs": numbers, "seconds": seconds})
                written = time.monotonic()
                if checkpoint_seconds:
                    pause = max(checkpoint_seconds, _PAUSE * (written - begun))
            advance(record, spent())
    for job in jobs:
        job.seconds = (time.monotonic() - start) / len(jobs)
    return [_history(run) for run in running]


def _history(run: Running) -> History:
    history = History(run.history)
    history.kept = run.job.kept
    return history


def _rounds(
    running: Sequence[Running], fabric: Fabric, budget: Budget, start: float, patience: int | None, captured: bool
) -> Iterator[EpochRecord]:
    """Train round by round; yields what is recorded of the first job."""
    graphs, first = None, running[0]
    while steps := budget.next_round(first.place, _seconds(fabric, start)):
        number = first.done
        if patience is not None and number > 0 and number - 1 - max(r.best_epoch for r in running) >= patience:
            break
        for run in running:
            run.begin(steps)
        if captured and graphs is None and first.full:
            graphs = _capture(running, fabric.device)
            captured = graphs is not None
            for run in running:
                run.seed(number)  # of which capturing has used some
        if graphs is not None:
            _replay(graphs, first.full, fabric.device)
        for run in running:
            run.finish(skip=first.full if graphs is not None else 0)
            run.judge(number)
        yield first.history[-1]


def _seconds(fabric: Fabric, start: float) -> float:
    """Since the start; all processes have the time of the first one, so that they stop together."""
    seconds = time.monotonic() - start
    return seconds if fabric.world_size == 1 else float(fabric.broadcast(seconds))


def _check_sizes(jobs: Sequence[Job], fabric: Fabric) -> None:
    if len({(job.size, job.batch_size) for job in jobs}) != 1:
        raise ValueError("jobs must have one number of images and one batch size to be trained side by side")
    if 0 < min(jobs[0].size, jobs[0].batch_size) < fabric.world_size:
        raise ValueError(
            f"images and batch_size must be at least one for each of the {fabric.world_size} processes, got "
            f"{jobs[0].size} images and a batch_size of {jobs[0].batch_size}"
        )


def _settings(jobs: Sequence[Job], fabric: Fabric, patience: int | None, budget: Budget) -> JsonObject:
    """All that must agree for a checkpoint to be continued; rates of learning are compared epoch by epoch."""
    described = [
        job.settings
        | {
            "module": identify_module(job.module),
            "batch_size": job.batch_size,
            "weight_decay": job.weight_decay,
            "clip": job.clip,
            "betas": list(job.betas),
            "scheduled": job.schedule is not None,
            "learning_rate_scale": job.learning_rate_scale,
            "data": None if job.data is None else job.data(),
            "patience": patience,
            "precision": str(fabric._precision.precision),
        }
        | budget.settings(job.schedule is not None)
        for job in jobs
    ]
    return described[0] if len(described) == 1 else {"jobs": described}


def _resume(
    running: Sequence[Running], file: Checkpoint, tensors: dict[str, Tensor], meta: JsonObject, budget: Budget
) -> float:
    """Go on from a checkpoint of the same training; returns the seconds that it has taken."""
    jobs, seconds = meta.get("jobs"), meta.get("seconds")
    numbered = isinstance(jobs, list) and len(jobs) == len(running) and all(map(_is_numbers, jobs))
    if not numbered or not isinstance(seconds, int | float) or len({len(job["history"]) for job in jobs or []}) != 1:
        raise file.damaged("its numbers are not those of a training")
    assert isinstance(jobs, list)
    done = jobs[0]["place"][0]
    if budget.epochs is not None and done > budget.epochs:
        raise ValueError(f"epochs must be at least {done}, which checkpoint {file.path} has done, got {budget.epochs}")
    for number, run in enumerate(running):
        if run.job.schedule is None:
            _check_rates(run.job, file, jobs[number])
        try:
            run.load(under(f"{number}.", tensors), jobs[number])
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise file.damaged(f"its tensors do not fit the module: {str(error).splitlines()[0][:200]}") from error
    return float(seconds)


def _check_rates(job: Job, file: Checkpoint, numbers: JsonObject) -> None:
    """The learning rate of every round that is done is still the same."""
    for record, rate in zip(numbers["history"], numbers["rates"], strict=True):
        epoch = int(record.get("epoch", 0))
        asked = rate_of(job.learning_rate, epoch)
        if rate != asked:
            raise file.other(f"its learning_rate in epoch {epoch + 1} is {rate} and not {asked}")


def _is_numbers(job: Any) -> bool:
    """Whether this is what `Running.numbers` returns."""
    if not isinstance(job, dict) or not isinstance(job.get("history"), list) or not isinstance(job.get("rates"), list):
        return False
    records = all(
        isinstance(record, dict) and all(isinstance(value, int | float) for value in record.values())
        for record in job["history"]
    )
    rates = all(isinstance(rate, int | float) for rate in job["rates"]) and len(job["rates"]) == len(job["history"])
    best = all(isinstance(job.get(name), int | float) for name in ("best_score", "tolerance"))
    best = best and all(isinstance(job.get(name), int) for name in ("best_epoch", "kept"))
    place = job.get("place")
    placed = isinstance(place, list) and len(place) == 3 and all(isinstance(number, int) for number in place)
    return records and rates and best and placed and len(job["history"]) > 0


# CUDA graphs -------------------------------------------------------------------------------------------------------


def _can_capture(fabric: Fabric) -> bool:
    """One process on a GPU, and no loss scaling, which looks at values."""
    return (
        fabric.device.type == "cuda" and fabric.world_size == 1 and getattr(fabric._precision, "scaler", None) is None
    )


class _CapturedStep:
    """One step of a job as a CUDA graph, which a stream of its own replays."""

    def __init__(self, run: Running, stream: torch.cuda.Stream) -> None:
        self.run, self.stream, self.graph = run, stream, torch.cuda.CUDAGraph()
        assert run.dropout.cuda is not None
        self.graph.register_generator_state(run.dropout.cuda)
        with torch.cuda.graph(self.graph, stream=stream), run.dropout.installed():
            run.step(run.next())

    def replay(self) -> None:
        """The next step."""
        with torch.cuda.stream(self.stream):
            self.run.tick()
            self.graph.replay()


def _replay(captured: Sequence[_CapturedStep], steps: int, device: torch.device) -> None:
    """Some steps of all jobs; none of them waits for one on another stream."""
    main = torch.cuda.current_stream(device)
    for each in captured:
        each.stream.wait_stream(main)
    try:
        for _ in range(steps):
            for each in captured:
                each.replay()
    finally:
        # Also after an interruption, which puts the best parameters back on the main stream.
        for each in captured:
            main.wait_stream(each.stream)


def _capture(running: Sequence[Running], device: torch.device) -> list[_CapturedStep] | None:
    """One step of each job as a graph; None, and a line in the log, if it cannot be captured.

    One graph with a branch for each job would wait in every step for the slowest, and runs fewer branches at a time
    than there are streams. Torch has 32 streams: of more jobs some share one.
    """
    streams = [torch.cuda.Stream(device) for _ in running]
    copies = [run.snapshot() for run in running]
    try:
        _warm_up(running, streams, device)
    finally:
        # Also after an error, which frees what the streams are still reading: its memory would go to somebody else.
        torch.cuda.synchronize(device)
    for run, saved in zip(running, copies, strict=True):
        run.restore(saved)
    usual = torch.cuda.default_generators[device.index]
    state = usual.get_state()
    try:
        return [_CapturedStep(run, stream) for run, stream in zip(running, streams, strict=True)]
    except BaseException as error:
        # Every generator that took part still believes that it is being captured, and would refuse to draw.
        usual.graphsafe_set_state(torch.Generator(device))
        usual.set_state(state)
        for run in running:
            run.dropout = Dropout(device)
        # Where a capture ends by an error, torch raises one of its own.
        if isinstance(error.__context__, KeyboardInterrupt | SystemExit):
            raise error.__context__ from None
        if not isinstance(error, Exception):
            raise
        # Only its words: the error itself holds on to the graph of gradients, which belongs to another stream.
        reason = str(error.__context__ or error)
        _log.warning("the training step cannot be captured as a CUDA graph, and is launched anew each time: %s", reason)
        torch.cuda.synchronize(device)
        for run, saved in zip(running, copies, strict=True):
            run.restore(saved)
        return None


def _warm_up(running: Sequence[Running], streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
    """Some steps of every job, on the stream that will replay them; one job after the other, for they share caches."""
    main = torch.cuda.current_stream(device)
    for run, stream in zip(running, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream), run.dropout.installed():
            for _ in range(min(_WARM_UP, run.full)):
                run.step(run.next())
        main.wait_stream(stream)
