"""What surrounds a training: its device, the file it goes on from, and a bar that shows how far it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from misconv import store

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Record", "check_place", "one_device", "progress_bar", "read"]

Record = dict[str, float]


def one_device(device: str | None = None) -> Fabric:
    """One process on a device, "cuda" or "cpu"; on a GPU if there is one and none is named."""
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise ImportError("training needs Lightning Fabric: pip install 'misconv[train]'") from error
    fabric = Fabric(accelerator=device or ("cuda" if torch.cuda.is_available() else "cpu"), devices=1)
    fabric.launch()
    return fabric


def check_place(checkpoint: str | Path | None) -> None:
    """Say now, and not after the first epoch, that a checkpoint cannot be written."""
    if checkpoint is None:
        return
    folder = Path(checkpoint).resolve().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint must be in a folder that exists, got {checkpoint}; create {folder} first")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"checkpoint must be in a folder you may write to, got {checkpoint}")


def read(checkpoint: str | Path, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint of the same training; anything else is refused and left as it is."""
    tensors, meta = store.read(checkpoint)
    found = meta.get("settings")
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint {checkpoint} must be one of a training, got another file of misconv")
    for name, value in settings.items():
        if found.get(name) != value:
            raise ValueError(
                f"checkpoint {checkpoint} must be of the same training, but its {name} is {found.get(name)!r} and not "
                f"{value!r}; give another file, or remove it to start anew"
            )
    return tensors, meta


@contextmanager
def progress_bar(
    show: bool, title: str, total: int, done: int, *, stays: bool = True
) -> Iterator[Callable[[Record], None]]:
    """A progress bar with the figures of the last epoch beside it; yields what moves it on."""
    if not show:
        yield lambda record: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("progress bars need rich: pip install 'misconv[train]', or pass progress=False") from error
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), transient=not stays) as progress:
        task = progress.add_task(title, total=total, completed=done, figures="")

        def advance(record: Record) -> None:
            figures = "  ".join(f"{name} {value:.3g}" for name, value in record.items() if name != "epoch")
            figures = figures.replace("validation_", "val ").replace("accuracy", "acc")  # to fit into 80 columns
            progress.update(task, advance=1, figures=figures)

        yield advance
