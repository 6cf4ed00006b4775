"""A job of training, and a job on its way: its steps with Adam, its best parameters, what a checkpoint holds of it.

All randomness of an epoch comes from the seed and the number of the epoch, so that a run that was killed and called
again ends with the same parameters as one that was not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv._checks import describe
from misconv._store import JsonObject
from misconv._train.loan import Loan
from misconv._train.processes import nothing_of
from misconv._train.session import EpochRecord

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Job", "Rate", "Running", "generator", "rate_of", "under"]

Rate = float | Callable[[int], float]

_LARGEST_RATE = 1e30  # Adam's steps, up to ten times as large, are numbers of float32 still


@dataclass
class Job:
    """One training.

    Args:
        module: is trained in place, and holds the best parameters in the end; comes back on the device, in the types
            and in the mode in which it came.
        loss: (model, indices of a batch) -> what is minimised, and the sums of `figures` numbers over the batch.
        figures: how many.
        summarise: from these sums over an epoch to what is recorded.
        evaluate: model -> a score, lower is better (-inf: take the last epoch), and what is recorded.
        size: how many images. batch_size: how many in a step.
        learning_rate: of Adam, a number or a function of the epoch, which counts from 0.
        learning_rate_scale: by the beginning of a parameter's name, what its learning rate is multiplied by; 0: frozen.
        weight_decay: of AdamW.
        clip: the largest norm of a gradient.
        prepare: called once with the module on the device, before anything else.
        begin: called with the number of every epoch before it.
        resident: whether all that `loss` reads is on the device, so that its step can be captured.
        settings: what must agree for a checkpoint to be continued, besides the module and how it is trained.
        data: a fingerprint of what is trained on, which is asked for only where it matters.
        synchronize: whether batch normalizations take their statistics over all processes.
        name: what diverged, if it does.
        seconds: its share of the time that `train` took, which fills it in; also of the time before an interruption.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]
    figures: int
    summarise: Callable[[list[float]], EpochRecord]
    evaluate: Callable[[nn.Module], tuple[float, EpochRecord]]
    size: int
    batch_size: int
    learning_rate: Rate
    seed: int = 0
    learning_rate_scale: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    clip: float | None = None
    prepare: Callable[[], None] | None = None
    begin: Callable[[int], None] | None = None
    resident: bool = False
    settings: JsonObject = field(default_factory=dict)
    data: Callable[[], str] | None = None
    synchronize: bool = False
    name: str = "training"
    seconds: float = 0.0


class Running:
    """A job on its way."""

    def __init__(self, job: Job, fabric: Fabric, captured: bool) -> None:
        self.job, self.fabric = job, fabric
        self.loan: Loan | None = None
        rate = rate_of(job.learning_rate, 0)
        # A captured step reads its learning rate from the device; so does Adam count its steps there.
        options: dict[str, Any] = {"fused": True, "capturable": True} if captured else {}
        kind = torch.optim.AdamW if job.weight_decay else torch.optim.Adam
        optimizer = kind(
            [{**group, "lr": torch.tensor(rate, device=fabric.device) if captured else rate} for group in _groups(job)],
            weight_decay=job.weight_decay, **options,
        )  # fmt: skip
        self.model, self.optimizer = fabric.setup(job.module, optimizer)
        self.parameters = [p for p in job.module.parameters() if p.requires_grad]
        self.history: list[EpochRecord] = []
        self.rates: list[float] = []
        self.best_score, self.best_epoch = math.inf, -1
        self.least = _least(job, fabric.world_size)
        self.full = _full(job.size, job.batch_size, self.least)
        self.order = torch.zeros(self.full, job.batch_size, dtype=torch.int64, device=fabric.device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=fabric.device)
        self.sums = torch.zeros(job.figures, dtype=torch.float64, device=fabric.device)
        self.batches: list[Tensor] = []
        self.dropout = Dropout(fabric.device)

    @property
    def done(self) -> int:
        """Epochs."""
        return len(self.history)

    def begin(self, epoch: int) -> None:
        """Shuffle, set the learning rate, let the job prepare itself."""
        shuffled = torch.randperm(self.job.size, generator=generator(self.job.seed, epoch), device="cpu")
        self.batches = list(_batches(shuffled, self.job.batch_size, self.least))
        if self.full:
            self.order.copy_(torch.stack(self.batches[: self.full]))
        if self.job.resident:  # then data are indexed on the device, and not before they are sent there
            self.batches = [*self.order, *(batch.to(self.fabric.device) for batch in self.batches[self.full :])]
        self.cursor.zero_()
        self.sums.zero_()
        self.rates[epoch:] = [rate_of(self.job.learning_rate, epoch)]
        for group in self.optimizer.param_groups:
            rate = self.rates[epoch] * group["scale"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.job.begin is not None:
            self.job.begin(epoch)
        self.model.train()
        self.seed(epoch)

    def seed(self, epoch: int) -> None:
        """Start the epoch's dropout."""
        self.dropout.seed(self.job.seed * 1_000_003 + 500_000 + epoch)

    def next(self) -> Tensor:
        """The indices of the next full batch, looked up on the device."""
        indices = self.order.index_select(0, self.cursor).view(-1)
        self.cursor += 1
        return indices

    def step(self, indices: Tensor) -> None:
        """One step of Adam."""
        loss, figures = self.job.loss(self.model, indices)
        self.optimizer.zero_grad()
        self.fabric.backward(loss if self.fabric.world_size == 1 else loss + nothing_of(self.parameters))
        for parameter in self.parameters:  # a batch may not need all of them, here as in one of several processes
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.job.clip is not None:
            # A look whether the norm is finite would make the GPU wait; `judge` looks once per epoch.
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.job.clip, error_if_nonfinite=False)
        self.optimizer.step()
        self.sums += figures.detach()

    def finish(self, skip: int) -> None:
        """The batches of the epoch that no graph has done."""
        with self.dropout.installed():
            for indices in self.batches[skip:]:
                self.step(indices)

    def judge(self, epoch: int) -> None:
        """Validate, and keep the parameters if they are the best so far."""
        total = self.fabric.all_reduce(self.sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        sums = total.tolist()
        self._check_finite("loss", epoch, *sums)
        self.model.eval()
        with torch.no_grad():
            score, more = self.job.evaluate(self.model)
        if self.fabric.world_size > 1:
            score = self.fabric.broadcast(score)  # all of them stop, or none
        self._check_finite("validation", epoch, 0.0 if score == -math.inf else score)
        self.history.append({"epoch": float(epoch), **self.job.summarise(sums), **more})
        if score < self.best_score or score == -math.inf:
            self.best_score, self.best_epoch = score, epoch
            assert self.loan is not None
            self.loan.result = copy.deepcopy(self.job.module.state_dict())

    def _check_finite(self, what: str, epoch: int, *values: float) -> None:
        if not all(math.isfinite(value) for value in values):
            raise FloatingPointError(
                f"{self.job.name} diverged in epoch {epoch + 1}: its {what} is not finite; a smaller learning_rate may "
                "help"
            )

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
        assert self.loan is not None
        assert self.loan.result is not None
        found = {f"model.{k}": v for k, v in self._module().items()}
        found |= {f"best.{k}": v for k, v in self.loan.result.items()}
        return found | {f"optimizer.{k}": v for k, v in self._optimizer().items()}

    def numbers(self) -> JsonObject:
        """The rest of it."""
        best = {"best_score": self.best_score, "best_epoch": self.best_epoch}
        return {"history": self.history, "rates": self.rates, **best}

    def load(self, tensors: dict[str, Tensor], numbers: JsonObject) -> None:
        """Go on from a checkpoint."""
        assert self.loan is not None
        # Into copies of a state dict that knows its versions: without them BatchNorm takes it for one of long ago.
        now, best = self.job.module.state_dict(), copy.deepcopy(self.job.module.state_dict())
        for state_dict, part in ((now, "model."), (best, "best.")):
            stored = under(part, tensors)
            _check_tensors(state_dict, stored)
            state_dict.update({name: value.to(self.fabric.device) for name, value in stored.items()})
        self.job.module.load_state_dict(now)
        self.loan.result = best
        state = self.optimizer.optimizer.state_dict()
        for key, value in under("optimizer.", tensors).items():
            index, name = key.split(".", 1)
            state["state"].setdefault(int(index), {})[name] = value
        _check_optimizer(state)
        self.optimizer.optimizer.load_state_dict(state)
        # Files hold tensors row by row, but a fused Adam goes through memory as the parameters lie in it.
        for parameter, entry in self.optimizer.optimizer.state.items():
            for name, value in entry.items():
                if value.shape == parameter.shape:
                    entry[name] = torch.empty_like(parameter).copy_(value)
        self.history, self.rates = numbers["history"], numbers["rates"]
        self.best_score, self.best_epoch = numbers["best_score"], numbers["best_epoch"]

    def _module(self) -> dict[str, Tensor]:
        return dict(self.job.module.state_dict())

    def _optimizer(self) -> dict[str, Tensor]:
        state = self.optimizer.optimizer.state_dict()["state"]
        return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


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


# Batches, rates, randomness ----------------------------------------------------------------------------------------


def generator(seed: int, purpose: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Randomness of one epoch, or of one purpose, that depends on nothing that happened before."""
    number = {"split": 1, "validation": 2}[purpose] if isinstance(purpose, str) else 1000 + purpose
    return torch.Generator(device).manual_seed((seed * 1_000_003 + number) % 2**63)


def _least(job: Job, processes: int) -> int:
    """The size of the smallest batch: two images, at least one for a process, and two where it normalizes its share."""
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in job.module.modules())
    return 2 * processes if norms and not job.synchronize else max(2, processes)


def _batches(indices: Tensor, batch_size: int, least: int) -> Iterator[Tensor]:
    """Batches; a last one of fewer images than the smallest may have joins the one before it."""
    parts = list(indices.split(batch_size))
    if len(parts) > 1 and len(parts[-1]) < least:
        parts[-2:] = [torch.cat(parts[-2:])]
    yield from parts


def _full(size: int, batch_size: int, least: int) -> int:
    """How many of the batches have the full size; they come first."""
    return sum(len(part) == batch_size for part in _batches(torch.arange(size, device="cpu"), batch_size, least))


def rate_of(learning_rate: Rate, epoch: int) -> float:
    """The learning rate of an epoch, checked."""
    try:
        rate = learning_rate(epoch) if callable(learning_rate) else learning_rate
    except TypeError as error:
        raise TypeError(
            f"learning_rate must be a number or a function of the epoch, got {describe(learning_rate)}: {error}"
        ) from error
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= rate <= _LARGEST_RATE:
        number = f"a number from 0 to {_LARGEST_RATE:g}"
        must = f"return {number} for epoch {epoch}" if callable(learning_rate) else f"be {number}, or a function"
        raise ValueError(f"learning_rate must {must}, got {describe(rate)}")
    return float(rate)


def _groups(job: Job) -> list[dict[str, Any]]:
    """Parameters by the scale of their learning rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in job.module.named_parameters():
        scale = next((value for start, value in job.learning_rate_scale.items() if name.startswith(start)), 1.0)
        parameter.requires_grad_(parameter.requires_grad and scale != 0)
        if scale:
            groups.setdefault(scale, []).append(parameter)
    return [{"params": parameters, "scale": scale} for scale, parameters in groups.items()]


def _check_tensors(own: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Every tensor of the module is there, in its shape and type, and nothing else is."""
    for name in sorted(own.keys() ^ stored.keys()):
        raise ValueError(f"{name} is {'missing' if name in own else 'of something else'}")
    for name, tensor in own.items():
        if (tensor.shape, tensor.dtype) != (stored[name].shape, stored[name].dtype):
            raise ValueError(f"{name} is {describe(stored[name])} and not {describe(tensor)}")


def _check_optimizer(state: dict[str, Any]) -> None:
    """Adam has all that it keeps of a parameter, for every one of them or, before its first step, for none."""
    expected = {index for group in state["param_groups"] for index in group["params"]} if state["state"] else set()
    for index in sorted(expected ^ state["state"].keys()):
        raise ValueError(f"optimizer.{index} is {'missing' if index in expected else 'of something else'}")
    for index, entry in state["state"].items():
        for name in sorted({"step", "exp_avg", "exp_avg_sq"} ^ entry.keys()):
            raise ValueError(f"optimizer.{index}.{name} is {'of something else' if name in entry else 'missing'}")


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose name begins so, by the rest of it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
