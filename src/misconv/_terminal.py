"""What every command does at its end: say on stderr what a user can correct, and leave the terminal whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import typer

__all__ = ["interruptible", "note", "refuse", "report_errors"]


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


@contextlib.contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Ctrl-C, and the signal by which schedulers end a job, end with a message and a whole terminal."""
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
        raise refuse(message, code) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def note(text: str) -> None:
    """One line on stderr, beside the results."""
    typer.echo(f"misconv: {text}", err=True)
