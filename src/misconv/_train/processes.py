"""What several processes need to train as one: statistics of the whole batch, and a gradient for every parameter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["check_agreement", "gathered", "nothing_of", "on_first", "synchronized"]

T = TypeVar("T")

_log = logging.getLogger("misconv")

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def synchronized(module: nn.Module, processes: int) -> Iterator[None]:
    """Let the batch normalizations of a module take their statistics over all processes, for a while.

    As `nn.SyncBatchNorm` does on GPUs; here on any device. The modules stay the same objects.
    """
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    changed = [part for part in norms if type(part) in _PLAIN] if processes > 1 else []
    kinds = [type(part) for part in changed]
    others = {type(part).__name__ for part in norms if type(part) not in (*_PLAIN, nn.SyncBatchNorm)}
    if processes > 1 and others:
        _log.warning("%s takes its batch statistics in each process by itself", " and ".join(sorted(others)))
    try:
        for part in changed:
            part.__class__ = _OverProcesses
        yield
    finally:
        for part, kind in zip(changed, kinds, strict=True):
            part.__class__ = kind


class _OverProcesses(nn.modules.batchnorm._BatchNorm):
    """A batch normalization whose batch is that of all processes together."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, …), normalized over everything but the channels."""
        if not self.training and self.running_mean is not None:
            fixed: Tensor = super().forward(x)
            return fixed
        over = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_tensor([x.numel() / x.shape[1]])
        sums = _Sum.apply(torch.cat([wide.sum(over), count]))
        number = sums[-1].detach()
        mean = sums[:-1] / number
        apart = wide - mean.view(shape)
        variance = _Sum.apply(apart.square().sum(over)) / number
        if self.training and self.track_running_stats:
            self._track(mean.detach(), (variance * number / (number - 1).clamp_min(1)).detach())
        out: Tensor = apart * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if share is None else share
        assert self.running_mean is not None
        assert self.running_var is not None
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(now.to(running.dtype), share or 0.0)


class _Sum(torch.autograd.Function):
    """The sum over all processes; what each of them learns from it comes back to all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Sum.apply(gradient.contiguous())


def nothing_of(parameters: Iterable[Tensor]) -> Tensor:
    """Zero, as a function of all parameters.

    Added to a loss it gives each of them a gradient: one process may have images of which nothing is missing, and not
    need the density at all, while the others wait for its share.
    """
    parts = []
    for p in parameters:
        always = torch.ones((), dtype=torch.bool, device=p.device)
        parts.append(torch.where(always, p.new_zeros(()), p).sum().real.float())  # zero even where p is infinite
    return torch.stack(parts).sum()


def on_first(fabric: Fabric, work: Callable[[], T]) -> T:
    """What the first process finds, or the error that it ends with, in all of them: none waits for one that is gone."""
    found: Any = None
    if fabric.global_rank == 0:
        try:
            found = work()
        except (OSError, ValueError, TypeError) as error:
            if fabric.world_size == 1:
                raise
            found = error
    if fabric.world_size > 1:
        found = fabric.broadcast(found)
    if isinstance(found, Exception):
        raise found
    return found  # type: ignore[no-any-return]  # Fabric does not say that it returns what it was given


def gathered(fabric: Fabric, mine: T) -> list[T]:
    """What every process has, in all of them, in their order."""
    if fabric.world_size == 1:
        return [mine]
    found: list[Any] = [None] * fabric.world_size
    dist.all_gather_object(found, mine)
    return found


def check_agreement(fabric: Fabric, what: str) -> None:
    """All processes were called with the same; what is trained by halves would be neither."""
    if fabric.world_size == 1:
        return
    first = fabric.broadcast(what)
    different = torch.tensor(float(first != what), device=fabric.device)
    total = fabric.all_reduce(different, reduce_op="sum")
    assert isinstance(total, torch.Tensor)  # as it was given
    if float(total) > 0:
        raise ValueError(
            f"all {fabric.world_size} processes must be called with the same module, data and settings, got others in "
            f"{round(float(total))} of them"
        )
