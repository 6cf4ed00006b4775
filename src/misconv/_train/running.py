"""A job of training, and its state: its steps with Adam, its best parameters, what a checkpoint holds of it.

All randomness of an epoch comes from the seed and the number of the epoch, so that a run that was killed and called
again ends with the same parameters as one that was not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from misconv._checks import describe
from misconv._store import JsonObject
from misconv._train.batches import batches_of, generator, smallest_batch
from misconv._train.budget import Budget, Place
from misconv._train.dropout import Dropout
from misconv._train.loan import Loan
from misconv._train.processes import nothing_of
from misconv._train.session import EpochRecord

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Job", "Rate", "Running", "rate_of", "under"]

Rate = float | Callable[[int], float]

_LARGEST_RATE = 1e30  # Adam's steps, up to ten times as large, are numbers of float32 still


@dataclass
class Job:
    """One training.

    Args:
        module: is trained in place, and holds the best parameters in the end; comes back on the device, in the types
            and in the mode in which it came.
        loss: (model, batch) -> what is minimised, and the sums of `figures` numbers over the batch. A batch is the
            indices of its images, or what `stream` yields.
        figures: how many.
        summarise: from these sums over an epoch to what is recorded.
        evaluate: model -> a score, lower is better (-inf: take the last epoch), and what is recorded. Of equal scores,
            as accuracies on few images are, the last one's parameters are kept.
        tolerance: the standard error of that score. Where a `schedule` lets the learning rate fall, the last parameters
            are kept whose score is not worse than the best by more than that: by chance an earlier one may look better.
        size: how many images; of a stream 0 where that is not known. batch_size: how many in a step.
        learning_rate: of Adam, a number or a function of the epoch, which counts from 0.
        schedule: the learning rate by the share of the training that is done, in place of `learning_rate`.
        learning_rate_scale: by the beginning of a parameter's name, what its learning rate is multiplied by; 0: frozen.
        weight_decay: of AdamW. betas: of Adam.
        clip: the largest norm of a gradient.
        prepare: called once with the module on the device, before anything else.
        begin: called with the number of every epoch before it.
        stream: (epoch, skip) -> the batches of this epoch but for the first `skip` of them, where images are not all
            in memory. expected: about how many these are, where that is known.
        resident: whether all that `loss` reads is on the device, so that its step can be captured.
        settings: what must agree for a checkpoint to be continued, besides the module and how it is trained.
        data: a fingerprint of what is trained on, which is asked for only where it matters.
        synchronize: whether batch normalizations take their statistics over all processes.
        name: what diverged, if it does.
        seconds: its share of the time that `train` took, which fills it in; also of the time before an interruption.
        kept: the number of the record whose parameters the module holds in the end, which `train` fills in too.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    figures: int
    summarise: Callable[[list[float]], EpochRecord]
    evaluate: Callable[[nn.Module], tuple[float, EpochRecord]]
    size: int
    batch_size: int
    learning_rate: Rate
    tolerance: Callable[[], float] | None = None
    schedule: Callable[[float], float] | None = None
    seed: int = 0
    learning_rate_scale: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    prepare: Callable[[], None] | None = None
    begin: Callable[[int], None] | None = None
    stream: Callable[[int, int], Iterator[Any]] | None = None
    expected: int | None = None
    resident: bool = False
    settings: JsonObject = field(default_factory=dict)
    data: Callable[[], str] | None = None
    synchronize: bool = False
    name: str = "training"
    seconds: float = 0.0
    kept: int = -1


class Running:
    """A job and the state of its training."""

    def __init__(self, job: Job, fabric: Fabric, captured: bool) -> None:
        self.job, self.fabric = job, fabric
        self.loan: Loan | None = None
        self.budget = Budget(epochs=1)
        self.place = Place()
        self.history: list[EpochRecord] = []
        self.rates: list[float] = []
        self.least = smallest_batch(job.module, fabric.world_size, job.synchronize)
        self.length = _length(job, self.least)
        rate = self._rate()
        # A captured step reads its learning rate from the device, and Adam counts its steps there; a fused Adam takes
        # a rate of float32 alone, whatever torch's default is.
        options: dict[str, Any] = {"fused": True, "capturable": True} if captured else {}
        kind = torch.optim.AdamW if job.weight_decay else torch.optim.Adam
        held = torch.tensor(rate, dtype=torch.float32, device=fabric.device)
        optimizer = kind(
            [{**group, "lr": held.clone() if captured else rate} for group in _groups(job)],
            betas=job.betas, weight_decay=job.weight_decay, **options,
        )  # fmt: skip
        self.model, self.optimizer = fabric.setup(job.module, optimizer)
        self.parameters = [p for p in job.module.parameters() if p.requires_grad]
        self.best_score, self.best_epoch = math.inf, -1
        self.tolerance = 0.0  # of the best score
        self.epoch = self.full = self.most = 0  # of the round: its epoch, its batches of full size, the most steps
        rows = 0 if job.stream else _full(job.size, job.batch_size, self.least)
        self.order = torch.zeros(rows, job.batch_size if rows else 0, dtype=torch.int64, device=fabric.device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=fabric.device)
        self.sums = torch.zeros(job.figures, dtype=torch.float64, device=fabric.device)
        self.batches: list[Tensor] = []
        self.stream: Iterator[Any] | None = None
        self.dropout = Dropout(fabric.device)

    @property
    def done(self) -> int:
        """Rounds; where the training is given in epochs, a round is one of them."""
        return len(self.history)

    def begin(self, most: int) -> None:
        """Make the next round ready, which has at most this many steps, and ends with the epoch at the latest."""
        self.most = most
        self._begin_epoch()
        if self.job.stream is None:
            self._shuffle()
        self.cursor.zero_()
        self.sums.zero_()
        self.model.train()
        self.seed(self.done)

    def _begin_epoch(self) -> None:
        """Set the learning rate, let the job prepare itself."""
        self.epoch = self.place.epoch
        self.rates[self.done :] = [self._rate()]
        self._set_rate(self.rates[self.done])
        if self.job.begin is not None:
            self.job.begin(self.epoch)

    def _shuffle(self) -> None:
        shuffled = torch.randperm(self.job.size, generator=generator(self.job.seed, self.epoch), device="cpu")
        start = self.place.position
        self.batches = list(batches_of(shuffled, self.job.batch_size, self.least))[start : start + self.most]
        self.full = sum(len(batch) == self.job.batch_size for batch in self.batches)
        if self.full:
            self.order[: self.full].copy_(torch.stack(self.batches[: self.full]))
        if self.job.resident:  # then data are indexed on the device, and not before they are sent there
            rest = [batch.to(self.fabric.device) for batch in self.batches[self.full :]]
            self.batches = [*self.order[: self.full], *rest]

    def _rate(self) -> float:
        """The learning rate of the next step."""
        if self.job.schedule is not None:
            return self.job.schedule(self.budget.share(self.place, self.length or self.job.expected))
        return rate_of(self.job.learning_rate, self.place.epoch)

    def _set_rate(self, base: float) -> None:
        for group in self.optimizer.param_groups:
            rate = base * group["scale"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def tick(self) -> None:
        """Before every step: where the schedule is one by steps, set its learning rate; count the step."""
        if self.job.schedule is not None:
            self._set_rate(self._rate())
        self.place.position += 1
        self.place.taken += 1

    def seed(self, number: int) -> None:
        """Start the dropout of a round."""
        self.dropout.seed(self.job.seed * 1_000_003 + 500_000 + number)

    def next(self) -> Tensor:
        """The indices of the next full batch, looked up on the device."""
        indices = self.order.index_select(0, self.cursor).view(-1)
        self.cursor += 1
        return indices

    def step(self, batch: Any) -> None:
        """One step of Adam."""
        loss, figures = self.job.loss(self.model, batch)
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
        """The steps of the round that no graph has done."""
        with self.dropout.installed():
            for batch in self.batches[skip:] if self.job.stream is None else self._streamed():
                self.tick()
                self.step(batch)
        if self.place.position == self.length:
            self._next_epoch()

    def _streamed(self) -> Iterator[Any]:
        """The batches of the round; it takes those of the next epoch where the stream has just ended."""
        assert self.job.stream is not None
        taken = 0
        for _ in range(2):
            if self.stream is None:
                self.stream = self.job.stream(self.place.epoch, self.place.position)
            for batch in self.stream:
                yield batch
                taken += 1
                if taken == self.most:
                    return
            self._next_epoch()
            if taken:
                return
            self._begin_epoch()
        raise ValueError("images must yield at least one batch to learn from in every epoch, got none")

    def _next_epoch(self) -> None:
        self.place.epoch, self.place.position, self.stream = self.place.epoch + 1, 0, None

    def judge(self, number: int) -> None:
        """Validate, and keep the parameters if they are the best so far, or as good as these."""
        total = self.fabric.all_reduce(self.sums, reduce_op="sum")
        assert isinstance(total, Tensor)
        sums = total.tolist()
        self._check_finite("loss", *sums)
        self.model.eval()
        with torch.no_grad():
            score, more = self.job.evaluate(self.model)
        if self.fabric.world_size > 1:
            score = self.fabric.broadcast(score)  # all of them stop, or none
        self._check_finite("validation", 0.0 if score == -math.inf else score)
        where = {"epoch": float(self.epoch)}
        if self.budget.epochs is None:
            where["step"] = float(self.place.taken)
        self.history.append({**where, **self.job.summarise(sums), **more})
        better = score < self.best_score or score == -math.inf
        if better:
            self.best_score, self.best_epoch = score, number
            self.tolerance = self.job.tolerance() if self.job.tolerance and self.job.schedule else 0.0
        if score <= self.best_score + self.tolerance:
            self.job.kept = number
            assert self.loan is not None
            self.loan.result = copy.deepcopy(self.job.module.state_dict())

    def _check_finite(self, what: str, *values: float) -> None:
        if not all(math.isfinite(value) for value in values):
            raise FloatingPointError(
                f"{self.job.name} diverged in epoch {self.epoch + 1}: its {what} is not finite; a smaller "
                "learning_rate may help"
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
        best = {"best_score": self.best_score, "best_epoch": self.best_epoch, "tolerance": self.tolerance}
        best["kept"] = self.job.kept
        place = [self.place.epoch, self.place.position, self.place.taken]
        return {"history": self.history, "rates": self.rates, "place": place, **best}

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
        self.tolerance, self.job.kept = numbers["tolerance"], numbers["kept"]
        self.place, self.stream = Place(*numbers["place"]), None

    def _module(self) -> dict[str, Tensor]:
        return dict(self.job.module.state_dict())

    def _optimizer(self) -> dict[str, Tensor]:
        state = self.optimizer.optimizer.state_dict()["state"]
        return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


# Batches and rates ------------------------------------------------------------------------------------------------


def _full(size: int, batch_size: int, least: int) -> int:
    """How many of the batches have the full size; they come first."""
    return sum(len(part) == batch_size for part in batches_of(torch.arange(size, device="cpu"), batch_size, least))


def _length(job: Job, least: int) -> int | None:
    """Steps of an epoch, None where only the stream knows."""
    if job.size == 0:
        return None
    return len(list(batches_of(torch.arange(job.size, device="cpu"), job.batch_size, least)))


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
    """Parameters that are trained, by the scale of their learning rate."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in job.module.named_parameters():
        scale = next((value for start, value in job.learning_rate_scale.items() if name.startswith(start)), 1.0)
        parameter.requires_grad_(parameter.requires_grad and scale != 0)
        if parameter.requires_grad:
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
