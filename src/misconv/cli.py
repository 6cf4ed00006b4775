"""The command `misconv`.

What a user can correct (a folder, a number, a missing extra) ends with one line on stderr and the exit code 2;
anything else is a mistake of ours and keeps its traceback. Heavy imports wait inside the commands.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import itertools
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    print(f"misconv: the command line needs {error.name}: pip install 'misconv[demo]'", file=sys.stderr)
    raise SystemExit(2) from error

from misconv import cli_images
from misconv._terminal import interruptible, refuse, report_errors

if TYPE_CHECKING:
    from misconv.demo import Demo
    from misconv.paper import tables

__all__ = ["app", "main"]

LARGEST_SEED = 2**31 - 1
ASCII = {"−": "-", "–": "-", "×": "x", "±": "+-", "µ": "u", "“": '"', "”": '"', "…": "...", "·": "*", "σ": "sd"}

# Of a disk that is full or broken, of a reader that is gone.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EBADF, errno.EFBIG, errno.EDQUOT)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    """The entry point of `misconv` and `python -m misconv`."""
    # Where they are closed, Python has none at all.
    sys.stdout, sys.stderr = (stream or io.StringIO() for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A ± must not end the run where the output knows only ASCII; nor may a number lose its sign.
            codecs.register_error("misconv", _to_ascii)
            stream.reconfigure(errors="misconv")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody reads on: end there, as other commands do
    try:
        try:
            app(prog_name="misconv")
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _exit_after_error("stopped", 130)
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        _exit_after_error(f"the output cannot be written: {error.strerror}", 2)


def _exit_after_error(message: str, code: int) -> NoReturn:
    """One line, and no second attempt to write what is left of the output."""
    with contextlib.suppress(OSError):
        print(f"misconv: {message}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(code)


def _to_ascii(error: UnicodeError) -> tuple[str, int]:
    """What stands in ASCII for a character that cannot be written."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end


def _version(asked: bool) -> None:
    if asked:
        from misconv._version import __version__

        typer.echo(f"misconv {__version__}")
        raise typer.Exit


@app.callback()
def misconv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """Convolutional networks for images with missing pixels."""


for _command in (cli_images.fit, cli_images.impute, cli_images.assess):
    app.command()(_command)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report; new or empty.")] = Path("misconv-demo"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same numbers.")] = 0,
    seeds: Annotated[int, typer.Option(help="Trainings of every classifier, to see how much they vary.")] = 3,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the report in a folder that has one.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few images and epochs, to try it out in seconds.")] = False,
) -> None:
    """Look behind the holes of photographs and classify digits with holes, and write a report (a few minutes)."""
    if not 0 <= seed <= LARGEST_SEED:
        raise refuse(f"--seed must lie between 0 and {LARGEST_SEED}, got {seed}")
    if seeds < 1:
        raise refuse(f"--seeds must be at least 1, got {seeds}")
    with interruptible("stopped before the report was written"):
        import torch

        from misconv.demo import QUICK, Settings, report, run

        with report_errors(OSError):
            report.check_folder(out, overwrite=overwrite)
        # One thread, so that the sums, and with them the numbers, do not depend on how many cores there are.
        torch.set_num_threads(1)
        terminal = sys.stdout.isatty()
        console = Console(force_terminal=terminal, width=None if terminal else 110, highlight=False, markup=False)
        with report_errors(ImportError):
            settings = replace(QUICK if quick else Settings(), seed=seed, seeds=seeds)
            result = run(settings, progress=terminal, say=console.print)
        # The numbers come first: they are not lost if the report cannot be written.
        console.print(_photographs(result), _methods(result), _densities(result), sep="\n")
        for sentence in (report.findings(result.photographs), report.verdict(result)):
            console.print(sentence, soft_wrap=not terminal)
        with report_errors(OSError):
            page = report.write_demo(result, out, overwrite=overwrite)
        console.print(f"Report: {page}", soft_wrap=True)


@app.command()
def bench(
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the numbers, as JSON.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="table10, large, shares, growth, nll, network or cpu; may be given several times."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny settings, to see that everything runs.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of the random inputs; new ones for every run if left out.")] = None,
) -> None:
    """Check the fast path against the plain one, then time both beside a convolution and ReLU (a few minutes)."""
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise refuse(f"--seed must lie between 0 and {LARGEST_SEED}, got {seed}")
    with interruptible("stopped before the numbers were written"):
        from misconv.bench import command as benchmark

        try:
            where, sections = benchmark.choose(device, only or [], out)
        except ValueError as error:
            raise refuse(str(error)) from error
        try:
            keep = benchmark.keeper(out)
            record = benchmark.run(where, sections, quick=quick, seed=seed, say=typer.echo, keep=keep)
        except benchmark.WrongResultError as error:
            raise refuse(f"nothing was timed, the fast path is wrong: {error}", 1) from error
        if out is not None:
            with report_errors(OSError):
                benchmark.write(record, out)
            typer.echo(f"Numbers: {out}")


@app.command()
def table(
    number: Annotated[
        str, typer.Argument(metavar="NUMBER", help="1, 2, 6, 7, 8, 9, 10, ablation (of MisConv+) or figures.")
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="mnist, svhn, cifar10, digits (for a CPU), or any name with --data; may be given several times. "
            "By default those of the paper's table.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="An .npz with x_train, y_train, x_test and y_test for each --dataset, in their order."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of every classifier, to see how much they vary.")] = 3,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For finished work, which is not done again.")] = Path(
        "misconv-paper"
    ),
    device: Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few images and epochs, to see that everything runs.")] = False,
    plus: Annotated[bool, typer.Option(help="MisConv+, a recipe beyond the paper's, as one more row.")] = True,
) -> None:
    """Print a table of the paper with numbers of our own, or draw its figures with images of a data set.

    What that needs is trained, and goes on where it was stopped.
    """
    with (
        interruptible("stopped; call it again to go on where it was"),
        report_errors(OSError),
        report_errors(ImportError),
    ):
        from misconv.bench import command as benchmark
        from misconv.paper import command

        try:
            plan = command.prepare(
                number, dataset or [], data or [], seeds=seeds, folder=out, device=device, quick=quick, plus=plus
            )
        except ValueError as error:
            raise refuse(str(error)) from error
        terminal = sys.stdout.isatty()
        try:
            if number == command.FIGURES:
                for path in command.draw(plan, progress=terminal, say=typer.echo):
                    typer.echo(f"Figure: {path}")
                return
            records = command.run(plan, progress=terminal, say=typer.echo)
        except benchmark.WrongResultError as error:
            raise refuse(f"nothing was timed, the fast path is wrong: {error}", 1) from error
        except FloatingPointError as error:
            raise refuse(str(error), 1) from error
        made = command.table(plan, records)
        console = Console(force_terminal=terminal, width=None if terminal else 160, highlight=False, markup=False)
        console.print(f"\n{made.heading}", style="bold", soft_wrap=not terminal)  # wider than some tables
        console.print(*_paper(made, console.width), sep="")
        for note in made.notes:
            console.print(note, soft_wrap=not terminal)
        console.print(f"\nRecords: {command.write(plan, made, records)}", soft_wrap=True)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Tell versions, the device, whether the fused kernels serve and why not, and which extras are there."""
    from misconv import _doctor

    found = _doctor.examine()
    for line in [json.dumps(found, indent=1)] if as_json else _doctor.lines(found):
        typer.echo(line)
    if not _doctor.is_healthy(found):
        raise typer.Exit(1)


# Inside ------------------------------------------------------------------------------------------------------------


def _methods(result: Demo) -> Table:
    methods = result.digits.methods
    title = "\nTest digits read correctly, %"
    table = Table("method", "what happens to missing pixels", title=title, box=box.SIMPLE_HEAD)
    table.add_column("mean" if len(methods[0].accuracy) == 1 else "mean ± sd", justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for m in methods:
        spread = f" ± {100 * m.deviation:.1f}" if len(m.accuracy) > 1 else ""
        table.add_row(m.name, m.what, f"{100 * m.mean:.1f}{spread}")
    return table


def _densities(result: Demo) -> Table:
    table = Table("density", title="Hidden pixels of digits predicted", box=box.SIMPLE_HEAD)
    for head in ("NLL per pixel", "RMSE", "inside 50 %", "inside 90 %", "seconds"):
        table.add_column(head, justify="right")
    for d in result.digits.densities:
        a = d.assessment
        inside = [f"{100 * share:.1f} %" for share in (a.coverage_50, a.coverage_90)]
        table.add_row(d.name, f"{a.nll:.3f}", f"{a.rmse:.3f}", *inside, f"{d.seconds:.1f}")
    return table


def _photographs(result: Demo) -> Table:
    title = "\nPhotographs: errors of hidden pixels, and bias of filter responses near them"
    table = Table("the hole is", "that is", title=title, box=box.SIMPLE_HEAD)
    for head in ("RMSE", "edge filters", "random filters"):
        table.add_column(head, justify="right", no_wrap=True)
    table.columns[0].no_wrap = True
    for way in result.photographs.ways:
        biases = (f"{100 * way.bias[bank]:+.1f} %" for bank in ("edge", "random"))
        table.add_row(way.name, way.what, f"{way.rmse:.4f}", *biases)
    return table


def _paper(made: tables.Table, width: int) -> Iterator[Table]:
    """Words on the left, numbers on the right, the best of them in bold; several tables where one is too wide."""
    cells = list(zip(*made.plain().rows, strict=True))  # by column
    longest = [max(map(len, column), default=0) for column in cells]
    heads = [_wrap(head, room) for head, room in zip(made.columns, longest, strict=True)]
    needed = [3 + max(room, *map(len, head)) for head, room in zip(heads, longest, strict=True)]
    words = list(range(made.text))
    for part in _parts(made, needed, width):
        shown = Table(box=box.SIMPLE_HEAD)
        for n in (*words, *part):
            shown.add_column("\n".join(heads[n]), justify="left" if n in words else "right", overflow="fold")
        for row in made.rows:
            shown.add_row(*(_cell(row[n]) for n in (*words, *part)))
        yield shown


def _parts(made: tables.Table, needed: list[int], width: int) -> list[list[int]]:
    """Columns of numbers that fit beside those of words; what belongs to one data set stays together."""
    room = width - 1 - sum(needed[: made.text])
    parts: list[list[int]] = [[]]
    numbers = range(made.text, len(made.columns))
    for _, same in itertools.groupby(numbers, key=lambda n: re.split(r" \(|:", made.columns[n])[0]):
        block = list(same)
        if parts[-1] and sum(needed[n] for n in (*parts[-1], *block)) > room:
            parts.append([])
        parts[-1] += block
    return parts


def _wrap(head: str, width: int) -> list[str]:
    return textwrap.wrap(head, max(width, 1), break_long_words=False, break_on_hyphens=False)


def _cell(cell: str) -> Text:
    return Text(cell.replace("**", ""), style="bold" if cell.startswith("**") else "")
