"""What surrounds a training: its device, and a bar that shows how far it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from misconv._checks import describe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = [
    "EpochRecord",
    "History",
    "check_fabric",
    "cpu_by_default",
    "one_device",
    "progress_bar",
    "started_processes",
]

EpochRecord = dict[str, float]


class History(list[EpochRecord]):
    """The records of a training; `kept` is the number of the one whose parameters the module holds in the end."""

    kept: int = -1


_NOT_SHOWN = {"epoch", "step", "nll", "mse"}


def cpu_by_default() -> AbstractContextManager[Any]:
    """Tensors without a device are on the CPU, whatever the caller's default is.

    Where it is the CPU already there is nothing to do: to ask for it would slow every call of torch.
    """
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def one_device(device: torch.device | str | None = None, precision: Any = None) -> Fabric:
    """One process on a device, "cuda", "cuda:1" or "cpu"; on a GPU if there is one and none is named."""
    fabric_class = _fabric_class()
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    devices = 1 if where.type == "cpu" or where.index is None else [where.index]
    with _quiet():
        # Not the environment of a cluster, were this process one of several there: it trains by itself.
        fabric: Fabric = fabric_class(
            accelerator=where.type, devices=devices, precision=precision, plugins=[LightningEnvironment()]
        )
        fabric.launch()
    return fabric


def started_processes(device: torch.device | str | None = None, precision: Any = None) -> Fabric:
    """The processes that `torchrun` has started, of which this is one; or this one alone.

    Args:
        device: "cuda" or "cpu"; of several processes each takes a GPU of its own.
    """
    world = int(os.environ.get("WORLD_SIZE", "1")) if torch.distributed.is_torchelastic_launched() else 1
    if world == 1:
        return one_device(device, precision)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    local, fabric_class = int(os.environ["LOCAL_WORLD_SIZE"]), _fabric_class()
    with _quiet():
        fabric: Fabric = fabric_class(
            accelerator=where.type, devices=local, num_nodes=world // local, strategy="ddp", precision=precision
        )
        fabric.launch()
    return fabric


def check_fabric(fabric: object) -> None:
    """A Fabric, and one whose processes know of each other."""
    if not isinstance(fabric, _fabric_class()):
        raise TypeError(f"fabric must be a lightning_fabric.Fabric or None, got {describe(fabric)}")
    if fabric.world_size > 1 and not fabric._launched:
        raise ValueError("fabric must be launched before it is used by several processes; call fabric.launch() first")


def _fabric_class() -> type[Fabric]:
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise ImportError("training needs Lightning Fabric: pip install 'misconv[train]'") from error
    return Fabric


@contextmanager
def _quiet() -> Iterator[None]:
    """Fabric gives advice about the precision of matrix products to whoever starts it; users did not start it."""
    from lightning_utilities.core import rank_zero

    # Lightning, where it is imported, has put its own logger into the first place.
    loggers: list[logging.Logger] = [rank_zero.log, logging.getLogger("lightning_fabric")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def progress_bar(
    show: bool, title: str, total: int, done: int, *, transient: bool = False
) -> Iterator[Callable[[EpochRecord, int], None]]:
    """A progress bar with the last figures beside it; yields what moves it on, to the number that are done."""
    if not show:
        yield lambda record, done: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("progress bars need rich: pip install 'misconv[train]', or pass progress=False") from error
    columns = (TextColumn("{task.description}"), BarColumn(8), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), transient=transient) as progress:
        task = progress.add_task(title, total=total, completed=done, figures="")

        def advance(record: EpochRecord, done: int) -> None:
            progress.update(task, completed=done, figures=_figures(record))

        yield advance


def _figures(record: EpochRecord) -> str:
    """What matters of a record, short enough for a terminal of 80 columns.

    Example:
        >>> _figures({"step": 7.0, "loss": 0.5, "validation_accuracy": 0.81})
        'loss 0.5  val accuracy 0.81'
    """
    if "validation_nearest_rmse" not in record:
        shown = {name.replace("validation_", "val "): v for name, v in record.items() if name not in _NOT_SHOWN}
        return "  ".join(f"{name} {value:.3g}" for name, value in shown.items())
    nll, rmse, nearest = (record[f"validation_{name}"] for name in ("nll", "rmse", "nearest_rmse"))
    half, most = (100 * record[f"validation_coverage_{level}"] for level in (50, 90))
    return f"rmse {rmse:.3g} (nearest {nearest:.3g}) nll {nll:.3g} in 50/90%: {half:.0f}/{most:.0f}"
