"""Run several calls of `misconv table` at once, until time is over; a later run goes on where this one stopped.

    python tools/run_tables.py --folder misconv-paper --minutes 9 --at-once 3 --pack records.tar.gz \\
        "B --dataset svhn --data svhn.npz --methods mfa,misconv --seeds 5" "3 --dataset celeba --data celeba.npz"

A GPU that is rented by the minute is to be full all the time, and what was finished is to be brought home. Calls share
the folder of finished work; one that needs what another is training trains it as well, so these are better named in
one call, or in two runs. When time is over, what still runs is stopped, as by Ctrl-C. `--pack` holds the records of all
units, which `tools/records.py merge` takes, and the output of every call.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

PAUSE = 0.2  # seconds between two looks
MERCY = 20.0  # seconds that a call has to end


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the calls, say what became of each, and pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="+", help="the arguments of `misconv table`, each in quotes")
    parser.add_argument("--folder", type=Path, default=Path("misconv-paper"), help="of finished work")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--pack", type=Path, help="a .tar.gz of records and output")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.at_once < 1:
        parser.error("--minutes must be above 0 and --at-once at least 1")
    run(options.calls, options.folder, 60 * options.minutes, options.at_once)
    if options.pack is not None:
        pack(options.folder, options.pack)


def run(calls: Sequence[str], folder: Path, seconds: float, at_once: int) -> list[int | None]:
    """Their exit codes, None of those that were never begun."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    codes: list[int | None] = [None] * len(calls)
    waiting, running = list(range(len(calls))), dict[int, subprocess.Popen[bytes]]()
    try:
        while (waiting or running) and time.monotonic() - start < seconds:
            while waiting and len(running) < at_once:
                number = waiting.pop(0)
                running[number] = begin(calls[number], folder, output_of(folder, number))
            time.sleep(PAUSE)
            for number in [n for n, each in running.items() if each.poll() is not None]:
                codes[number] = running.pop(number).returncode
                say(start, calls[number], f"exit code {codes[number]}")
    finally:
        for each in running.values():
            each.terminate()
        for number, each in running.items():
            codes[number] = ended(each)
            say(start, calls[number], "stopped")
    for number in waiting:
        say(start, calls[number], "not begun")
    return codes


def begin(call: str, folder: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start a call, whose output goes into a file."""
    command = [sys.executable, "-m", "misconv", "table", *shlex.split(call), "--out", str(folder)]
    with output.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip


def ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; one that does not end is killed."""
    try:
        return process.wait(MERCY)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def output_of(folder: Path, number: int) -> Path:
    """The file for what a call prints."""
    return folder / f"call-{number}.log"


def say(start: float, call: str, what: str) -> None:
    """A line on what became of a call."""
    print(f"{time.monotonic() - start:5.0f} s  misconv table {call}: {what}", flush=True)


def pack(folder: Path, path: Path) -> None:
    """All records and outputs of a folder, without its networks and densities."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted([*folder.glob("records/*.json"), *folder.glob("*.json"), *folder.glob("call-*.log")]):
            archive.add(file, file.relative_to(folder))


if __name__ == "__main__":
    main()
