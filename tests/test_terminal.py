"""The manners of all commands: their help, what they print for scripts, exit codes, completion, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from misconv import _terminal, cli
from misconv.bench.command import QUICK

ROOT = Path(__file__).parent.parent
COMMANDS: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]  # of a group


def misconv(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a new process, of one thread: other tests run beside it."""
    command = [sys.executable, "-W", "error", "-m", "misconv", *arguments]
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=240, env=known
    )


def help_of(*words: str) -> str:
    """As a terminal of 80 columns shows it: it leaves two of them free, which the runner does not do by itself."""
    shown = CliRunner().invoke(cli.app, [*words, "--help"], prog_name="misconv", terminal_width=78)
    assert shown.exit_code == 0
    return shown.stdout


# Help ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_and_has_an_example(name: str) -> None:
    text = help_of(name)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\[default:$", text, re.MULTILINE), "a default is torn from its name"
    (example,) = re.findall(r"^ +Example: misconv (.*(?:\n +\S.*)*)$", text, re.MULTILINE)
    words = example.split()
    assert words[0] == name
    for option in (word for word in words if word.startswith("-")):
        assert re.search(rf"^ +(-\w, )?{option} |^ +{option},", text, re.MULTILINE), option


def test_the_list_of_commands_is_whole() -> None:
    text = help_of()
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*[^.]\.$", text, re.MULTILINE), f"{name} needs a short_help"


def test_exit_codes_are_documented() -> None:
    text, readme = help_of(), (ROOT / "README.md").read_text(encoding="utf-8")
    for code, meaning in _terminal.EXIT_CODES.items():
        assert re.search(rf"^ +{code} +{re.escape(meaning)}$", text, re.MULTILINE)
        assert re.search(rf"Exit codes:[^.]*\b{code} ", readme)


# Completion ------------------------------------------------------------------------------------------------------------


def test_the_shell_completes_commands_and_options() -> None:
    """As bash asks, at every Tab: so torch must not be imported."""
    for line, word, found in (("misconv im", 1, ["impute"]), ("misconv table --da", 2, ["--dataset", "--data"])):
        asked = misconv(
            _MISCONV_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(word), PYTHONPROFILEIMPORTTIME="1"
        )
        assert (asked.returncode, asked.stdout.split()) == (0, found), asked.stderr
        assert not re.search(r"\| +(torch|numpy)$", asked.stderr, re.MULTILINE)


def test_the_script_for_completion() -> None:
    command = f"'{sys.executable}' -m misconv --show-completion; true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "_MISCONV_COMPLETE=complete_bash" in done.stdout
    assert re.search(r"^complete .* misconv$", done.stdout, re.MULTILINE)


# Pipes and terminals -----------------------------------------------------------------------------------------------------


def test_json_in_a_pipe(tmp_path: Path) -> None:
    """One document on stdout; all else on stderr, which says twice that the numbers of a quick run mean nothing."""
    out = tmp_path / "layer.json"
    done = misconv("bench", "--quick", "--only", "nll", "--device", "cpu", "--json", "--out", str(out), FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads(out.read_text(encoding="utf-8"))
    assert (record["quick"], record["warning"]) == (True, QUICK)
    first, *others, last, file = done.stderr.splitlines()
    assert first == last == f"misconv: {QUICK}"
    assert file == f"misconv: Numbers: {out}"
    assert len(others) > 3
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal of its own")
def test_ctrl_c_leaves_a_whole_terminal(tmp_path: Path) -> None:
    """In the middle of a progress bar, which hides the cursor."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "misconv", "demo", "--seeds", "1", "--out", str(tmp_path / "new")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown, end = b"", time.monotonic() + 400
    hide, show = b"\x1b[?25l", b"\x1b[?25h"
    while time.monotonic() < end and select.select([leader], [], [], 200)[0]:
        before = shown
        try:
            shown += os.read(leader, 65536)
        except OSError:  # nobody writes any more
            break
        if hide in shown and hide not in before:
            process.send_signal(signal.SIGINT)
    os.close(leader)
    assert process.wait(timeout=200) == 130, shown
    assert shown.rindex(show) > shown.rindex(hide)
    assert shown.endswith(
        b"misconv: stopped before the report was written; nothing is kept, and the next call starts again\r\n"
    )
    assert not (tmp_path / "new").exists()


def test_ctrl_c_waits_for_the_end_of_an_import(tmp_path: Path) -> None:
    """A package that takes an interruption for a missing part of itself would be half there, and fail later."""
    (tmp_path / "slow.py").write_text(
        "import signal\nnext_line = False\ntry:\n    signal.raise_signal(signal.SIGINT)\n    next_line = True\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    code = (
        "import time\nfrom misconv._terminal import hold_interrupts\nhold_interrupts()\n"
        "try:\n    import slow\n    for _ in range(600):\n        time.sleep(0.05)\nexcept KeyboardInterrupt:\n"
        "    print('stopped', slow.next_line)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.stdout, done.stderr) == ("stopped True\n", "")
