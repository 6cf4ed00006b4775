"""Stop a command in the middle of its work, as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import misconv
from tests.processes import start_script

__all__ = ["interrupted"]


def interrupted(checkpoint: Path, result: Path, *arguments: str) -> str:
    """Interrupt `misconv` with these arguments once its checkpoint is there; what it said.

    A machine with other work may look too late, when the command has ended; then it is started once more.
    """
    said, command = result.with_name("said"), Path(misconv.__file__).with_name("__main__.py")
    for _ in range(5):
        process = start_script(said, command, *arguments)
        end = time.monotonic() + 300
        while not checkpoint.exists() and process.is_alive() and time.monotonic() < end:
            time.sleep(0.005)
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGINT)
        process.join(300)
        text = said.read_text(encoding="utf-8")
        if process.exitcode != 0:
            assert process.exitcode == 130, text
            return text
        result.unlink()
    raise AssertionError("the command ended five times before it was stopped")
