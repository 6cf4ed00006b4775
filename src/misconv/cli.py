"""The command `misconv`.

What a user can correct (a folder, a number, a missing extra) ends with one line on stderr and the exit code 2;
anything else is a mistake of ours and keeps its traceback. Heavy imports wait inside the commands.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

try:
    import typer
    from rich.console import Console
except ImportError as error:
    print(f"misconv: the command line needs {error.name}: pip install 'misconv[demo]'", file=sys.stderr)
    raise SystemExit(2) from error

from misconv import cli_app, cli_classifier, cli_images
from misconv._terminal import EXIT_CODES, hold_interrupts, interruptible, note, print_json, refuse, report_errors
from misconv.cli_tables import console_for, demo_tables, paper_tables

if TYPE_CHECKING:
    from misconv.bench.command import Keeper
    from misconv.demo import Demo
    from misconv.paper.command import Plan
    from misconv.paper.scores import Record
    from misconv.paper.tables import Table

__all__ = ["app", "main"]

LARGEST_SEED = 2**31 - 1
ASCII = {"−": "-", "–": "-", "×": "x", "±": "+-", "µ": "u", "“": '"', "”": '"', "…": "...", "·": "*", "σ": "sd"}

# Of a disk that is full or broken, of a reader that is gone.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EBADF, errno.EFBIG, errno.EDQUOT)

_CODES = "\n".join(f"  {code:<5}{meaning}" for code, meaning in EXIT_CODES.items())
EPILOG = f"Example: misconv impute scans/ -o filled/\n\n\b\nExit codes:\n{_CODES}"  # \b: keep the lines as they are

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EPILOG)

Device = Annotated[str | None, typer.Option(metavar="cuda|cpu", help="By default cuda, where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and all else on stderr.")]
Seeds = Annotated[int, typer.Option(metavar="N", help="Trainings of every classifier, to see how much they vary.")]


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
    hold_interrupts()
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


app.command()(cli_images.fit)
app.command(short_help="Fill the holes of images, each file in its own format.")(cli_images.impute)
app.command(short_help="Tell how far a density can be believed.")(cli_images.assess)
app.command()(cli_classifier.train)
app.command(short_help="Tell how often a trained classifier is right.")(cli_classifier.evaluate)
app.command(short_help="Tell the class of images with holes, and how sure that is.")(cli_classifier.predict)
app.command(short_help="Serve a page that shows what becomes of holes.")(cli_app.app)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the report; new or empty.")] = Path("misconv-demo"),
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same numbers.")] = 0,
    seeds: Seeds = 3,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the report in a folder that has one.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few images and epochs, to try it out in seconds.")] = False,
    as_json: Json = False,
) -> None:
    """See it at work on photographs and digits, in a report.

    Looks behind the holes of photographs, and classifies digits with holes. Takes a few minutes on one core.

    Example: misconv demo --seeds 5 --out report
    """
    _check_seed(seed)
    if seeds < 1:
        raise refuse(f"--seeds must be at least 1, got {seeds}")
    with (
        interruptible("stopped before the report was written; nothing is kept, and the next call starts again"),
        report_errors(ImportError),
    ):
        import torch

        from misconv.demo import QUICK, Settings, report, run

        with report_errors(OSError):
            report.check_folder(out, overwrite=overwrite)
        # One thread, so that the sums, and with them the numbers, do not depend on how many cores there are.
        torch.set_num_threads(1)
        console = console_for(110)
        settings = replace(QUICK if quick else Settings(), seed=seed, seeds=seeds)
        say = note if as_json else console.print
        result = run(settings, progress=console.is_terminal and not as_json, say=say)
        # The numbers come first: they are not lost if the report cannot be written.
        if as_json:
            print_json({"report": str(out / report.PAGE), **report.numbers(result)})
        else:
            _show_demo(console, result)
        with report_errors(OSError):
            page = report.write_demo(result, out, overwrite=overwrite)
        if not as_json:
            console.print(f"Report: {page}", soft_wrap=True)


@app.command()
def bench(
    device: Device = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="For the numbers, as JSON.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION",
            help="table10, large, norm, shares, growth, nll, network or cpu; may be given several times.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny settings, to see that everything runs; the numbers mean nothing.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of the random inputs; by default new ones for every run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time the layer beside a convolution and ReLU.

    Checks first that the fast path computes what the plain one does. Takes a few minutes.

    Example: misconv bench --only table10 --out layer.json
    """
    _check_seed(seed)
    keep: Keeper | None = None
    with interruptible(lambda: "stopped before anything was timed" if keep is None else keep.stopped()):
        from misconv.bench import command as benchmark

        try:
            where, sections = benchmark.choose(device, only or [], out)
        except ValueError as error:
            raise refuse(str(error)) from error
        keep = benchmark.Keeper(out)
        try:
            record = benchmark.run(where, sections, quick=quick, seed=seed, say=_speaker(as_json), keep=keep)
        except benchmark.WrongResultError as error:
            raise refuse(f"nothing was timed, the fast path is wrong: {error}", 1) from error
        if as_json:
            print_json(record)
        if out is not None:
            with report_errors(OSError):
                benchmark.write(record, out)
            _speaker(as_json)(f"Numbers: {out}")


@app.command()
def table(
    number: Annotated[
        str,
        typer.Argument(
            metavar="NUMBER",
            help="1 to 10, figure-2 or figures. Tables of our own: A (no retraining), "
            "B (one recipe for all), C (its ingredients), D, E, F (the paper explained), figure-A (by share missing).",
        ),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="mnist, svhn, cifar10, digits (for a CPU), or any name with --data; may be given several times. "
            "By default those of the paper's table; for 3, 4, 5 and figure-2 it must be given.",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="An .npz with x_train, y_train, x_test and y_test for each --dataset, in their order. Images "
            "are bytes (N, H, W[, C]), 100 or more for training. The tables 3, 4, 5 and 7 and figure-2 need no labels.",
        ),
    ] = None,
    seeds: Seeds = 3,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For finished work, which no later call has to do again.")
    ] = Path("misconv-paper"),
    device: Device = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few images, few epochs and small networks, to see that everything runs.")
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of 3, 4, 5, A, B, C, figure-A: the rows to train, with commas between them, for example "
            "zero,misconv. A name that is none is answered with all that are.",
        ),
    ] = None,
    inception: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of 3, 4, 5, figure-2: weights of Inception for the FID, by torch-fidelity."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a table of the paper, or draw its figures.

    With numbers of our own, and images of a data set. What that needs is trained, and goes on where it was stopped.

    Example: misconv table 1 --dataset digits
    """
    stopped = "stopped; call it again to go on where it was"
    if number == "10":
        stopped = "stopped before the layer was timed; nothing is kept, and the next call starts again"
    with interruptible(stopped), report_errors(OSError), report_errors(ImportError):
        # Many small networks train side by side on a GPU, each on a stream: with as many queues as there are streams a
        # step is 8 % faster on an H200 (results/bench/training-cuda.json). It has to be said before CUDA begins.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        from misconv.bench.command import WrongResultError
        from misconv.paper import command

        try:
            plan = command.prepare(
                number, dataset or [], data or [], seeds=seeds, folder=out, device=device, quick=quick,
                methods=() if methods is None else [name.strip() for name in methods.split(",")], inception=inception,
            )  # fmt: skip
        except ValueError as error:
            raise refuse(str(error)) from error
        try:
            if number in command.PICTURES:
                _draw_figures(plan, as_json)
            else:
                _make_table(plan, as_json)
        except WrongResultError as error:
            raise refuse(f"nothing was timed, the fast path is wrong: {error}", 1) from error
        except FloatingPointError as error:
            raise refuse(str(error), 1) from error


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell versions, the device, the kernels and the extras.

    Says whether the fused kernels serve, and if not, why; and which extras are there.

    Example: misconv doctor --json
    """
    with interruptible("stopped"):
        from misconv import _doctor

        found = _doctor.examine()
    if as_json:
        print_json(found)
    else:
        typer.echo("\n".join(_doctor.lines(found)))
    if not _doctor.is_healthy(found):
        raise typer.Exit(1)


# Inside ------------------------------------------------------------------------------------------------------------


def _check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise refuse(f"--seed must lie between 0 and {LARGEST_SEED}, got {seed}")


def _speaker(as_json: bool) -> Callable[[str], None]:
    """Where lines on the way go: with --json stdout is for the result alone."""
    return note if as_json else typer.echo


def _show_demo(console: Console, result: Demo) -> None:
    from misconv.demo import report

    console.print(*demo_tables(result), sep="\n")
    for sentence in (report.findings(result.photographs), report.verdict(result)):
        console.print(sentence, soft_wrap=not console.is_terminal)


def _draw_figures(plan: Plan, as_json: bool) -> None:
    from misconv.paper import command

    shown = sys.stdout.isatty() and not as_json
    paths = [str(path) for path in command.draw(plan, progress=shown, say=_speaker(as_json))]
    if as_json:
        print_json({"figures": paths})
    else:
        typer.echo("\n".join(f"Figure: {path}" for path in paths))


def _make_table(plan: Plan, as_json: bool) -> None:
    from misconv.paper import command

    console = console_for(160)
    records = command.run(plan, progress=console.is_terminal and not as_json, say=_speaker(as_json))
    made = command.table(plan, records)
    # The numbers come first: they are not lost if the files cannot be written.
    if as_json:
        print_json(_table_content(plan, made, records))
    else:
        _show_table(console, made)
    path = command.write(plan, made, records)
    if not as_json:
        console.print(f"\nRecords: {path}", soft_wrap=True)
        if plan.table == command.FIGURE_A:
            console.print(f"Figure: {plan.file('.png')}", soft_wrap=True)


def _table_content(plan: Plan, made: Table, records: list[Record]) -> dict[str, object]:
    """The table as it is printed, and what it was made of."""
    return {
        "table": plan.table,
        "title": made.title,
        "quick": plan.quick,
        "columns": made.columns,
        "rows": made.plain().rows,
        "notes": made.notes,
        "file": str(plan.file(".json")),
        "records": records,
    }


def _show_table(console: Console, made: Table) -> None:
    wrap = not console.is_terminal
    console.print(f"\n{made.heading}", style="bold", soft_wrap=wrap)  # wider than some tables
    console.print(*paper_tables(made, console.width), sep="")
    for sentence in made.notes:
        console.print(sentence, soft_wrap=wrap)
