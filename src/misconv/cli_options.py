"""What the commands for a user's own images have in common: options, files, processes, and how they end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from misconv._terminal import interruptible, note, print_json, refuse, report_errors

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from misconv._train import History
    from misconv.data import ImageFiles
    from misconv.images import Outcome

__all__ = [
    "Bands",
    "Budget",
    "Device",
    "HoleIs",
    "Images",
    "Json",
    "Masks",
    "Nodata",
    "Precision",
    "Processes",
    "Workers",
    "check_new_file",
    "end",
    "open_images",
    "own_images",
    "quality",
    "started",
    "tell",
]

T = TypeVar("T")

Images = Annotated[
    list[str], typer.Argument(metavar="IMAGES", help="Files, folders or patterns: PNG, JPEG, WebP, TIFF, npy, npz.")
]
Nodata = Annotated[
    str | None, typer.Option(metavar="NUMBER", help='A value that means "no reading", besides what the files say.')
]
Masks = Annotated[
    Path | None, typer.Option(metavar="PATH", help="A folder of pictures of the holes, by name, or one for all.")
]
HoleIs = Annotated[str, typer.Option(metavar="white|black", help="What a hole is in --masks.")]
Bands = Annotated[
    str | None,
    typer.Option(metavar="A,B,…", help="Words by which names differ where every band is a file of its own."),
]
Budget = Annotated[str, typer.Option(metavar="TIME", help="How long to learn: 90s, 5min, 1h or 2000steps.")]
Device = Annotated[str | None, typer.Option(metavar="cuda|cpu", help="cuda or cpu; cuda where there is one.")]
Precision = Annotated[str, typer.Option(metavar="P", help="32-true, bf16-mixed or 16-mixed.")]
Workers = Annotated[int, typer.Option(metavar="N", help="Processes that read files.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@contextlib.contextmanager
def own_images(stopped: str) -> Iterator[None]:
    """What is wrong with images and places can be corrected by the user."""
    with interruptible(stopped), report_errors(OSError), report_errors(ImportError):
        try:
            yield
        except ValueError as error:
            raise refuse(str(error)) from error


@dataclass(frozen=True)
class Processes:
    """This process, and the others that torchrun may have started: the first one alone speaks and writes."""

    fabric: Fabric
    as_json: bool
    said: set[str] = field(default_factory=set)

    @property
    def first(self) -> bool:
        """Whether this is the one that speaks."""
        return bool(self.fabric.global_rank == 0)

    @property
    def terminal(self) -> bool:
        """Whether somebody looks on."""
        return self.first and sys.stdout.isatty() and not self.as_json

    @property
    def share(self) -> slice:
        """Of a list of files, those of this process."""
        return slice(self.fabric.global_rank, None, self.fabric.world_size)

    def say(self, text: str) -> None:
        """One line on stderr, and each once: a file that cannot be read is met when it is learned from and filled."""
        if self.first and text not in self.said:
            self.said.add(text)
            note(text)

    def on_first(self, work: Callable[[], T]) -> T:
        """What the first process finds, or the error it ends with, in all of them."""
        from misconv._train import on_first

        return on_first(self.fabric, work)

    def gather(self, mine: T) -> list[T]:
        """What every process has."""
        from misconv._train import gathered

        return gathered(self.fabric, mine)

    def join(self, outcome: Outcome) -> None:
        """Let an outcome be that of all processes."""
        rank = self.fabric.global_rank
        outcome.join([other for n, other in enumerate(self.gather(outcome)) if n != rank], self.say)

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar with the time that is left, where somebody looks on."""
        if not self.terminal:
            yield lambda done: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def started(device: str | None, precision: str = "32-true", *, as_json: bool) -> Iterator[Processes]:
    """The processes of this call, on a device each."""
    import torch

    from misconv._train import started_processes

    if device is not None and device.split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu, got {device!r}")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device must be cpu on this machine, where torch sees no GPU, got cuda")
    if precision not in ("32-true", "bf16-mixed", "16-mixed"):
        raise ValueError(f"--precision must be 32-true, bf16-mixed or 16-mixed, got {precision!r}")
    try:
        yield Processes(started_processes(device, precision), as_json)
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def open_images(
    images: list[str],
    nodata: str | None,
    masks: Path | None,
    hole_is: str,
    bands: str | None = None,
    say: Callable[[str], None] = note,
) -> ImageFiles:
    """The files that a call names; says so where holes and what is seen seem to be exchanged."""
    from misconv import data

    try:
        number = None if nodata is None else float(nodata)
    except ValueError:
        raise ValueError(f"--nodata must be a number, got {nodata!r}") from None
    words = [] if bands is None else [word.strip() for word in bands.split(",")]
    found = data.images(images, nodata=number, masks=masks, hole_is=hole_is, bands=words)
    if masks is not None:
        _check_polarity(found, hole_is, say)
    return found


def _check_polarity(images: ImageFiles, hole_is: str, say: Callable[[str], None]) -> None:
    """White holes are easily taken for black ones: whoever means them would hardly have most of every image missing."""
    shares = []
    for index in range(min(len(images), 8)):
        with contextlib.suppress(ValueError, OSError):  # told later, with all others
            shares.append(images.stored(index).missing)
    if shares and min(shares) > 0.75:
        other = "black" if hole_is == "white" else "white"
        say(
            f"by --masks at least {100 * min(shares):.0f} % of every image is missing; if a hole is {other} there, say "
            f"--hole-is {other}"
        )


def check_new_file(name: str, path: Path) -> None:
    """Asked before any work: a file can be written there. Its folder is made."""
    from misconv._store import check_output_folder

    if path.is_dir():
        raise IsADirectoryError(f"{name} must be a file, got the folder {path}")
    check_output_folder(name, path.absolute().parent)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)


def quality(history: History) -> str:
    """What is to be said of a density that was learned."""
    record, steps = history[history.kept], int(history[-1]["step"])
    learned = f"learned for {steps} step{'s' * (steps > 1)}"
    if "validation_rmse" not in record:
        return f"{learned}, from too few images to set some aside and measure"
    rmse, nearest = (f"{record[f'validation_{name}']:.4g}" for name in ("rmse", "nearest_rmse"))
    half, most = (f"{100 * record[f'validation_coverage_{level}']:.0f}" for level in (50, 90))
    return (
        f"{learned}; RMSE of hidden pixels {rmse}, of nearest-pixel fill {nearest}; "
        f"{half} % and {most} % of them inside the intervals of 50 % and 90 %"
    )


def tell(processes: Processes, record: dict[str, Any], lines: list[str]) -> None:
    """The result: lines to read, or one JSON document."""
    if not processes.first:
        return
    if processes.as_json:
        print_json(record)
        return
    for line in lines:
        typer.echo(line)


def end(processes: Processes, outcome: Outcome) -> None:
    """A file that failed makes the exit code 1."""
    if outcome.failed and processes.first:
        total = sum(map(len, (outcome.done, outcome.complete, outcome.kept, outcome.failed)))
        note(f"{len(outcome.failed)} of {total} files failed, see above")
        raise typer.Exit(1)
