"""What surrounds a training: its device, and a bar that shows how far it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from misconv._checks import describe

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["EpochRecord", "check_fabric", "one_device", "progress_bar"]

EpochRecord = dict[str, float]

# A progress bar and its figures are to fit into 80 columns.
_NOT_SHOWN = {"epoch", "step", "nll", "mse", "validation_marginal_nll", "validation_coverage_50"}
_SHORT = {
    "validation_nearest_rmse": "nearest",
    "validation_coverage_90": "in 90%",
    "validation_": "val ",
    "accuracy": "acc",
}


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

    logger: logging.Logger = rank_zero.log  # Lightning, where it is imported, has put its own there
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


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
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), transient=transient) as progress:
        task = progress.add_task(title, total=total, completed=done, figures="")

        def advance(record: EpochRecord, done: int) -> None:
            figures = "  ".join(f"{name} {value:.3g}" for name, value in record.items() if name not in _NOT_SHOWN)
            for long, short in _SHORT.items():
                figures = figures.replace(long, short)
            progress.update(task, completed=done, figures=figures)

        yield advance
