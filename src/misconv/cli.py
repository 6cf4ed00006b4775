"""The command `misconv`.

What a user can put right (a folder, a number, a missing extra) ends with one line on stderr and the exit code 2;
anything else is a mistake of ours and keeps its traceback. Heavy imports wait inside the commands.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    print(f"misconv: the command line needs {error.name}: pip install 'misconv[demo]'", file=sys.stderr)
    raise SystemExit(2) from error

if TYPE_CHECKING:
    from misconv.demo import Demo

__all__ = ["app", "main"]

# To see that everything works; the numbers mean little.
QUICK: dict[str, Any] = {"images": 460, "train": 300, "validation": 60, "dmfa_epochs": 6, "classifier_epochs": 3}
LARGEST_SEED = 2**31 - 1

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """The entry point of `misconv` and `python -m misconv`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a ± must not end the run where the output knows only ASCII
    app(prog_name="misconv")


def _version(asked: bool) -> None:
    if asked:
        from misconv import __version__

        typer.echo(f"misconv {__version__}")
        raise typer.Exit


@app.callback()
def misconv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Convolutional networks for images with missing pixels."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report; new or empty.")] = Path("misconv-demo"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    seeds: Annotated[int, typer.Option(help="Trainings of every method, to see how much they vary.")] = 3,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the report in a folder that has one.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few images and epochs, to try it out in seconds.")] = False,
) -> None:
    """Compare nine ways to classify digits with missing pixels, and write a report (a few minutes)."""
    if not 0 <= seed <= LARGEST_SEED:
        raise _stop(f"--seed must lie between 0 and {LARGEST_SEED}, got {seed}")
    if seeds < 1:
        raise _stop(f"--seeds must be at least 1, got {seeds}")
    with _interruptible("stopped before the report was written"):
        import torch

        from misconv import report
        from misconv.demo import run

        with _told(OSError):
            report.check_folder(out, overwrite=overwrite)
        # One thread, so that the sums, and with them the numbers, do not depend on how many cores there are.
        torch.set_num_threads(1)
        terminal = sys.stdout.isatty()
        console = Console(force_terminal=terminal, width=None if terminal else 110, highlight=False, markup=False)
        with _told(ImportError):
            settings = {**(QUICK if quick else {}), "seeds": seeds}
            result = run(seed=seed, settings=settings, progress=terminal, say=console.print)
        # The numbers come first: they are not lost if the report cannot be written.
        console.print(_methods(result), _densities(result), sep="\n")
        console.print(report.verdict(result), soft_wrap=not terminal)
        with _told(OSError):
            page = report.write_demo(result, out, overwrite=overwrite)
        console.print(f"Report: {page}", soft_wrap=True)


@app.command()
def bench(
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the numbers, as JSON.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="table10, large, shares, growth, nll or cpu; may be given several times.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny settings, to see that everything runs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the random inputs; new ones for every run if left out.")] = None,
) -> None:
    """Check the fast path against the plain one, then time both beside a convolution and ReLU (a few minutes)."""
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise _stop(f"--seed must lie between 0 and {LARGEST_SEED}, got {seed}")
    with _interruptible("stopped before the numbers were written"):
        from misconv import bench as benchmark

        try:
            where, sections = benchmark.choose(device, only or [], out)
        except ValueError as error:
            raise _stop(str(error)) from error
        try:
            keep = benchmark.keeper(out)
            record = benchmark.run(where, sections, quick=quick, seed=seed, say=typer.echo, keep=keep)
        except benchmark.WrongResultError as error:
            raise _stop(f"nothing was timed, the fast path is wrong: {error}", 1) from error
        if out is not None:
            with _told(OSError):
                benchmark.write(record, out)
            typer.echo(f"Numbers: {out}")


# Inside ------------------------------------------------------------------------------------------------------------


def _methods(result: Demo) -> Table:
    title = "\nTest digits read correctly, %"
    table = Table("method", "what happens to missing pixels", title=title, box=box.SIMPLE_HEAD)
    table.add_column("mean" if len(result.methods[0].accuracy) == 1 else "mean ± sd", justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for m in result.methods:
        spread = f" ± {100 * m.deviation:.1f}" if len(m.accuracy) > 1 else ""
        table.add_row(m.name, m.what, f"{100 * m.mean:.1f}{spread}")
    return table


def _densities(result: Demo) -> Table:
    levels = sorted(result.densities[0].coverage)
    table = Table("density", title="Hidden pixels predicted", box=box.SIMPLE_HEAD)
    for head in ("NLL per pixel", "RMSE", *(f"inside {100 * level:.0f} %" for level in levels), "seconds"):
        table.add_column(head, justify="right")
    for d in result.densities:
        inside = [f"{100 * d.coverage[level]:.1f} %" for level in levels]
        table.add_row(d.name, f"{d.nll:.3f}", f"{d.rmse:.3f}", *inside, f"{d.seconds:.1f}")
    return table


def _stop(message: str, code: int = 2) -> typer.Exit:
    """Say why on stderr; raise what this returns."""
    typer.echo(f"misconv: {message}", err=True)
    return typer.Exit(code)


@contextlib.contextmanager
def _told(kind: type[OSError] | type[ImportError]) -> Iterator[None]:
    """Errors of this kind are the user's to put right: their message, and no traceback."""
    try:
        yield
    except kind as error:
        if isinstance(error, ImportError) and "misconv[" not in str(error):
            raise  # not one of ours, which name the extra to install
        raise _stop(getattr(error, "strerror", None) or str(error)) from error


@contextlib.contextmanager
def _interruptible(message: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        raise _stop(message, 130) from error
