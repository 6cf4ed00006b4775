"""How every command talks: results on stdout, all else on stderr; and how it ends, with a whole terminal."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import typer

__all__ = ["EXIT_CODES", "hold_interrupts", "interruptible", "note", "print_json", "refuse", "report_errors"]

EXIT_CODES = {
    0: "done",
    1: "it ran, but something failed: a file, a check",
    2: "the call must be corrected: an option, a missing file or extra",
    130: "stopped by Ctrl-C",
    143: "stopped by SIGTERM, as schedulers do",
}


def refuse(message: str, code: int = 2) -> typer.Exit:
    """Say why on stderr; raise what this returns."""
    typer.echo(f"misconv: {message}", err=True)
    return typer.Exit(code)


@contextlib.contextmanager
def report_errors(kind: type[OSError] | type[ImportError]) -> Iterator[None]:
    """Errors of this kind can be corrected by the user: print their message, and no traceback."""
    try:
        yield
    except kind as error:
        if isinstance(error, ImportError) and "misconv[" not in str(error):
            raise  # not one of ours, which name the extra to install
        raise refuse(_error_text(error)) from error


def _error_text(error: OSError | ImportError) -> str:
    """The system's own errors say which file only if they are asked."""
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


def hold_interrupts() -> None:
    """From now on Ctrl-C waits for the end of an import.

    One that is interrupted leaves half of a package behind, or takes the interruption for a package that is missing;
    what comes of it fails later, in other words.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _is_importing(frame):
            raise KeyboardInterrupt
        again = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))
        again.daemon = True
        again.start()

    in_main = threading.current_thread() is threading.main_thread()
    # A shell may have had it ignored, and it stays so.
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def interruptible(message: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C, and the signal by which schedulers end a job, end with a message and a whole terminal.

    Args:
        message: what is kept and how to go on, or a function that says it at the end.
    """
    code = 130

    def terminated(*_: object) -> None:
        nonlocal code
        code = 128 + signal.SIGTERM
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()  # no other may say what a signal does
    before = signal.signal(signal.SIGTERM, terminated) if in_main else None
    try:
        yield
    except KeyboardInterrupt as error:
        _show_cursor()
        raise refuse(message if isinstance(message, str) else message(), code) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _show_cursor() -> None:
    """A progress bar that is stopped in the moment in which it appears does not show the cursor again by itself."""
    from rich.console import Console

    Console().show_cursor()  # writes nothing where there is no terminal


def note(text: str) -> None:
    """One line on stderr, beside the results."""
    typer.echo(f"misconv: {text}", err=True)


def print_json(content: Any) -> None:
    """The result on stdout, where a script reads it. In ASCII, for some outputs take nothing else."""
    typer.echo(json.dumps(content, indent=1))
