"""The engine under every training: epochs with Adam, the best parameters kept, checkpoints, many jobs side by side.

A `Job` says what is trained, on what, and how it is judged. On a GPU whose memory holds the data, one step of all jobs
is captured as a CUDA graph with a branch for each, and replayed: small networks wait for launches otherwise, and a
branch alone fills a fraction of the chip. Everywhere else jobs take turns, epoch by epoch.

All randomness of an epoch comes from the seed and the number of the epoch, and a checkpoint is written whole or not at
all, so that a run that was killed and called again ends with the same parameters as one that was not.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv import store
from misconv._session import Record, progress_bar, read

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Job", "Rate", "Record", "generator", "train"]

Rate = float | Callable[[int], float]

_log = logging.getLogger("misconv")

# Steps before a graph is captured: kernels compile, libraries choose algorithms, Adam makes its state.
_WARM_UP = 3


@dataclass
class Job:
    """One training.

    Args:
        module: is trained in place, and holds the best parameters in the end.
        loss: (model, indices of a batch) -> what is minimised, and the sums of `figures` numbers over the batch.
        figures: how many.
        summarise: from these sums over an epoch to what is recorded.
        evaluate: model -> a score, lower is better (-inf: take the last epoch), and what is recorded.
        size: how many images. batch_size: how many in a step.
        learning_rate: of Adam, a number or a function of the epoch, which counts from 0.
        factors: for parameters whose name begins so, a factor of the learning rate; 0 leaves them as they are.
        weight_decay: of AdamW.
        clip: the largest norm of a gradient.
        begin: called with the number of every epoch before it.
        resident: whether all that `loss` reads is on the device, so that its step can be captured.
        settings: what must agree for a checkpoint to be continued.
        name: what diverged, if it does.
        seconds: its share of the time that `train` took, which fills it in; also of the time before an interruption.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
    figures: int
    summarise: Callable[[list[float]], Record]
    evaluate: Callable[[nn.Module], tuple[float, Record]]
    size: int
    batch_size: int
    learning_rate: Rate
    seed: int = 0
    factors: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    clip: float | None = None
    begin: Callable[[int], None] | None = None
    resident: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = "training"
    seconds: float = 0.0


def train(
    jobs: Sequence[Job],
    fabric: Fabric,
    *,
    epochs: int,
    patience: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 0.0,
    progress: bool = True,
    title: str = "training",
    stays: bool = True,
) -> list[list[Record]]:
    """Train all jobs; leaves every module with its best parameters and in evaluation mode.

    Args:
        jobs: of one number of images and one batch size.
        patience: stop after so many epochs in which no job got better.
        checkpoint: a file to continue from if it exists, and to write after an epoch.
        checkpoint_seconds: the least time between two writes; with 0, the default, every epoch is written.
        progress, title, stays: of a bar.

    Returns:
        For every job a record per epoch.
    """
    if len({(job.size, job.batch_size) for job in jobs}) != 1:
        raise ValueError("jobs must have one number of images and one batch size to be trained side by side")
    start = time.monotonic()
    captured = all(job.resident for job in jobs) and _can_capture(fabric)
    running = [_Running(job, fabric, captured) for job in jobs]
    settings = {"jobs": [job.settings for job in jobs]} if len(jobs) > 1 else jobs[0].settings
    if checkpoint is not None and Path(checkpoint).exists():
        tensors, meta = read(checkpoint, settings)
        for number, run in enumerate(running):
            run.load(_under(f"{number}.", tensors), meta["jobs"][number])
        start -= meta["seconds"]
    done, written = len(running[0].history), time.monotonic()
    full = running[0].full
    graph: torch.cuda.CUDAGraph | None = None
    with progress_bar(progress and fabric.global_rank == 0, title, epochs, done, stays=stays) as advance:
        for epoch in range(done, epochs):
            if patience is not None and epoch > 0 and epoch - 1 - max(r.best_epoch for r in running) >= patience:
                break
            for run in running:
                run.begin(epoch)
            if captured and graph is None and full:
                graph = _capture(running)
                captured = graph is not None
            if graph is not None:
                with _seeded(jobs[0].seed, epoch, fabric.device):
                    for _ in range(full):
                        graph.replay()
            for run in running:
                with _seeded(run.job.seed, epoch, fabric.device, rest=graph is not None):
                    run.finish(skip=full if graph is not None else 0)
                run.judge(epoch)
            if checkpoint is not None and time.monotonic() - written >= checkpoint_seconds:
                if fabric.global_rank == 0:
                    tensors = {f"{n}.{key}": t for n, run in enumerate(running) for key, t in run.tensors().items()}
                    numbers = [run.numbers() for run in running]
                    spent = time.monotonic() - start
                    store.write(checkpoint, tensors, {"settings": settings, "jobs": numbers, "seconds": spent})
                written = time.monotonic()
            advance(running[0].history[-1])
    for run in running:
        run.job.module.load_state_dict(run.best)
        run.job.module.eval()
        run.job.seconds = (time.monotonic() - start) / len(jobs)
    return [run.history for run in running]


class _Running:
    """A job on its way."""

    def __init__(self, job: Job, fabric: Fabric, captured: bool) -> None:
        self.job, self.fabric = job, fabric
        job.module.to(fabric.device)
        rate = _rate(job.learning_rate, 0)
        # A captured step reads its learning rate from the device; so does Adam count its steps there.
        options: dict[str, Any] = {"fused": True, "capturable": True} if captured else {}
        kind = torch.optim.AdamW if job.weight_decay else torch.optim.Adam
        optimizer = kind(
            [{**group, "lr": torch.tensor(rate, device=fabric.device) if captured else rate} for group in _groups(job)],
            weight_decay=job.weight_decay, **options,
        )  # fmt: skip
        self.model, self.optimizer = fabric.setup(job.module, optimizer)
        self.history: list[Record] = []
        self.best_score, self.best_epoch = math.inf, -1
        self.best = copy.deepcopy(job.module.state_dict())
        self.full = _full(job.size, job.batch_size, fabric.world_size)
        self.order = torch.zeros(self.full, job.batch_size, dtype=torch.int64, device=fabric.device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=fabric.device)
        self.sums = torch.zeros(job.figures, dtype=torch.float64, device=fabric.device)
        self.batches: list[Tensor] = []

    def begin(self, epoch: int) -> None:
        """Shuffle, set the learning rate, let the job prepare itself."""
        shuffled = torch.randperm(self.job.size, generator=generator(self.job.seed, epoch), device="cpu")
        self.batches = list(_batches(shuffled, self.job.batch_size, self.fabric.world_size))
        if self.full:
            self.order.copy_(torch.stack(self.batches[: self.full]))
        if self.job.resident:  # then data are indexed on the device, and not before they are sent there
            self.batches = [*self.order, *(batch.to(self.fabric.device) for batch in self.batches[self.full :])]
        self.cursor.zero_()
        self.sums.zero_()
        for group in self.optimizer.param_groups:
            rate = _rate(self.job.learning_rate, epoch) * group["factor"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.job.begin is not None:
            self.job.begin(epoch)
        self.model.train()

    def next(self) -> Tensor:
        """The indices of the next full batch, looked up on the device."""
        indices = self.order.index_select(0, self.cursor).view(-1)
        self.cursor += 1
        return indices

    def step(self, indices: Tensor) -> None:
        """One step of Adam."""
        loss, figures = self.job.loss(self.model, indices)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        if self.job.clip is not None:
            # A look whether the norm is finite would make the GPU wait; `judge` looks once per epoch.
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.job.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.sums += figures.detach()

    def finish(self, skip: int) -> None:
        """The batches of the epoch that no graph has done."""
        for indices in self.batches[skip:]:
            self.step(indices)

    def judge(self, epoch: int) -> None:
        """Validate, and keep the parameters if they are the best so far."""
        total = self.fabric.all_reduce(self.sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        sums = total.tolist()
        if not all(math.isfinite(value) for value in sums):
            raise FloatingPointError(
                f"{self.job.name} diverged in epoch {epoch + 1}: its loss is not finite; a smaller learning_rate may "
                "help"
            )
        self.model.eval()
        with torch.no_grad():
            score, more = self.job.evaluate(self.model)
        self.history.append({"epoch": float(epoch), **self.job.summarise(sums), **more})
        if score < self.best_score or score == -math.inf:
            self.best_score, self.best_epoch = score, epoch
            self.best = copy.deepcopy(self.job.module.state_dict())

    # Saved and put back ----------------------------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Tensor]]:
        """Copies of all that a step changes in the module and its optimizer."""
        return [{k: v.clone() for k, v in part.items()} for part in (self._module(), self._optimizer())]

    def restore(self, copies: list[dict[str, Tensor]]) -> None:
        """Put copies back where they were taken, in place, and start the epoch again.

        An optimizer without state starts from zero.
        """
        with torch.no_grad():
            for part, saved in zip((self._module(), self._optimizer()), copies, strict=True):
                for name, value in part.items():
                    value.copy_(saved[name]) if name in saved else value.zero_()
        self.cursor.zero_()
        self.sums.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this job, besides `numbers`."""
        found = {f"model.{k}": v for k, v in self._module().items()}
        found |= {f"best.{k}": v for k, v in self.best.items()}
        return found | {f"optimizer.{k}": v for k, v in self._optimizer().items()}

    def numbers(self) -> dict[str, Any]:
        """The rest of it."""
        return {"history": self.history, "best_score": self.best_score, "best_epoch": self.best_epoch}

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        # Into copies of a state dict that knows its versions: without them BatchNorm takes it for one of long ago.
        now, best = self.job.module.state_dict(), copy.deepcopy(self.job.module.state_dict())
        now.update(_under("model.", tensors))
        self.job.module.load_state_dict(now)
        best.update({name: value.to(self.fabric.device) for name, value in _under("best.", tensors).items()})
        self.best = best
        state = self.optimizer.optimizer.state_dict()
        for key, value in _under("optimizer.", tensors).items():
            index, name = key.split(".", 1)
            state["state"].setdefault(int(index), {})[name] = value
        self.optimizer.optimizer.load_state_dict(state)
        # Files hold tensors row by row, but a fused Adam goes through memory as the parameters lie in it.
        for parameter, entry in self.optimizer.optimizer.state.items():
            for name, value in entry.items():
                if value.shape == parameter.shape:
                    entry[name] = torch.empty_like(parameter).copy_(value)
        self.history, self.best_score = numbers["history"], numbers["best_score"]
        self.best_epoch = numbers["best_epoch"]

    def _module(self) -> dict[str, Tensor]:
        return dict(self.job.module.state_dict())

    def _optimizer(self) -> dict[str, Tensor]:
        state = self.optimizer.optimizer.state_dict()["state"]
        return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


# CUDA graphs -------------------------------------------------------------------------------------------------------


def _can_capture(fabric: Fabric) -> bool:
    """One process on a GPU, and no loss scaling, which looks at values."""
    return (
        fabric.device.type == "cuda" and fabric.world_size == 1 and getattr(fabric._precision, "scaler", None) is None
    )


def _capture(running: Sequence[_Running]) -> torch.cuda.CUDAGraph | None:
    """One step of all jobs as a graph, a branch for each; None, and a line in the log, if it cannot be captured."""
    streams = [torch.cuda.Stream() for _ in running]
    copies = [run.snapshot() for run in running]
    seed = torch.cuda.get_rng_state()
    _branch(running, streams, _WARM_UP)
    torch.cuda.synchronize()
    for run, saved in zip(running, copies, strict=True):
        run.restore(saved)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _branch(running, streams, 1)
    except RuntimeError as error:
        _log.warning("the training step cannot be captured as a CUDA graph, and is launched anew each time: %s", error)
        torch.cuda.synchronize()
        return None
    finally:
        torch.cuda.set_rng_state(seed)
    return graph


def _branch(running: Sequence[_Running], streams: Sequence[torch.cuda.Stream], steps: int) -> None:
    """So many steps of every job, each on a stream of its own."""
    main = torch.cuda.current_stream()
    for run, stream in zip(running, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            for _ in range(min(steps, run.full)):
                run.step(run.next())
    for stream in streams:
        main.wait_stream(stream)


# Batches, rates, randomness ----------------------------------------------------------------------------------------


def generator(seed: int, purpose: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Randomness of one epoch, or of one purpose, that depends on nothing that happened before."""
    number = {"split": 1, "validation": 2}[purpose] if isinstance(purpose, str) else 1000 + purpose
    return torch.Generator(device).manual_seed(seed * 1_000_003 + number)


def _batches(indices: Tensor, batch_size: int, processes: int) -> Iterator[Tensor]:
    """Batches; a last one with fewer than two images a process joins the one before it, for BatchNorm's sake."""
    parts = list(indices.split(batch_size))
    if len(parts) > 1 and len(parts[-1]) < 2 * processes:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts


def _full(size: int, batch_size: int, processes: int) -> int:
    """How many of the batches have the full size; they come first."""
    return sum(len(part) == batch_size for part in _batches(torch.arange(size, device="cpu"), batch_size, processes))


def _rate(learning_rate: Rate, epoch: int) -> float:
    return float(learning_rate(epoch) if callable(learning_rate) else learning_rate)


def _groups(job: Job) -> list[dict[str, Any]]:
    """Parameters by the factor of their learning rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in job.module.named_parameters():
        factor = next((value for start, value in job.factors.items() if name.startswith(start)), 1.0)
        parameter.requires_grad_(parameter.requires_grad and factor != 0)
        if factor:
            groups.setdefault(factor, []).append(parameter)
    return [{"params": parameters, "factor": factor} for factor, parameters in groups.items()]


@contextmanager
def _seeded(seed: int, epoch: int, device: torch.device, *, rest: bool = False) -> Iterator[None]:
    """Global randomness (dropout) of an epoch, or of its last batch after a graph; put back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed * 1_000_003 + (250_000 if rest else 500_000) + epoch)
        yield


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
