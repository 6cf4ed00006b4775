"""Stop a command in the middle of its work, as Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["interrupted"]


def interrupted(command: Sequence[str], checkpoint: Path, result: Path, environment: Mapping[str, str]) -> str:
    """Interrupt a command once its checkpoint is there; what it said on stderr.

    A machine with other work may look too late, when the command has ended; then it is started once more.
    """
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment) as process:  # fmt: skip
            end = time.monotonic() + 300
            while not checkpoint.exists() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=300)
        if process.returncode != 0:
            assert process.returncode == 130, said
            return said
        result.unlink()
    raise AssertionError("the command ended five times before it was stopped")
