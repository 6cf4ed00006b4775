"""Bad command lines: they end with the exit code 2 and one line about the option, without a traceback."""

from __future__ import annotations

import contextlib
import tempfile

from tests.fuzz.outcome import Choices, Outcome, expect, one_line, refused, timer

# Options of every command, and values that none of them takes.
BAD: dict[str, dict[str, list[str]]] = {
    "demo": {"--seed": ["-1", "a", "1.5", "99999999999999999999", ""], "--seeds": ["0", "-3", "x"], "--out": ["/dev/null", "/proc/x"]},
    "bench": {"--device": ["tpu", "cuda:99", "", "meta"], "--only": ["nothing", ""], "--seed": ["-1", "a", str(2**70)],
              "--out": ["/dev/null/numbers.json", "/"]},
    "table": {"--seeds": ["0", "-1", "b"], "--dataset": ["nothing", "", "../x"], "--device": ["tpu", "cuda:99"],
              "--data": ["/nowhere.npz", "/dev/null"], "--out": ["/dev/null", "/proc/x"]},
}  # fmt: skip
SECONDS = 10  # an option that is refused takes no longer
ARGUMENTS = {"demo": [[]], "bench": [[]], "table": [["1"], ["3"], ["x"], [""], ["10"], ["figures"], []]}


def case(choices: Choices) -> Outcome:
    """One command with one bad option; of tables also with numbers that are none."""
    from typer.testing import CliRunner

    from misconv.cli import app

    command = choices.pick(list(BAD))
    option = choices.pick(list(BAD[command]))
    words = [command, *choices.pick(ARGUMENTS[command]), option, choices.pick(BAD[command][option])]
    if choices.chance(0.1):
        words = [choices.pick(["", "nothing", "--nothing", "demo extra", "Demo"])]
    label = f"misconv {' '.join(repr(word) for word in words)}"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), timer(SECONDS, label):
        result = CliRunner().invoke(app, words)
    error = result.exception
    expect(error is None or isinstance(error, SystemExit), f"{label}: {type(error).__name__}: {one_line(error, 120)}")
    expect(result.exit_code == 2, f"{label}: exit code {result.exit_code}")
    expect("Traceback" not in result.output, f"{label}: a traceback")
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    expect(1 <= len(lines) <= 8, f"{label}: {len(lines)} lines on stderr")
    return refused("command line")
