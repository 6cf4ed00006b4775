"""The command line: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import misconv
from misconv import _doctor, cli, data, demo
from misconv.demo import report

TINY = demo.Settings(
    photographs=demo.PhotographSettings(side=16, train=40, stride=90, steps=2, components=2, rank=1, batch_size=8),
    digits=demo.DigitSettings(images=200, train=120, validation=30, dmfa_steps=6, classifier_epochs=1),
)
METHODS = [
    "zero", "mask", "mean", "k-NN", "partial convolution", "MFA imputation", "MisConv (SMFA)", "MisConv (DMFA)",
    "complete images",
]  # fmt: skip
STOPPED = "misconv: stopped before the report was written; nothing is kept, and the next call starts again\n"


def test_doctor() -> None:
    told = call("doctor")
    assert told.exit_code == 0, told.output
    assert [line.split()[0] for line in told.output.splitlines()][:3] == ["misconv", "device", "kernels"]
    found = json.loads(call("doctor", "--json").stdout)
    assert found["versions"]["torch"] == str(torch.__version__)
    assert found["extras"]["train"] == found["extras"]["timm"] == "there"
    assert found["kernels"]["used"] == torch.cuda.is_available()


def test_doctor_says_when_kernels_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"used": True, "reason": None, "error": 0.5}
    monkeypatch.setattr(_doctor, "_kernels", lambda device: kernels)
    told = call("doctor")
    assert told.exit_code == 1
    assert "WRONG by 0.5: set MISCONV_PLAIN=1" in told.output


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments, prog_name="misconv")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--quick` as quick as it gets."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(demo, "QUICK", TINY)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals must come before the work."""

    def run(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the experiment was started")

    monkeypatch.setattr(demo, "run", run)


def refused(result: Result, message: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert re.fullmatch(rf"misconv: {message}\n", result.stderr), result.stderr


def test_demo_in_a_pipe(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    command = [sys.executable, "-W", "error", "-m", "misconv", "demo", "--quick", "--seeds", "1", "--out", str(out)]
    coloured = {**os.environ, "FORCE_COLOR": "1"}  # also where a user likes colours
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, env=coloured)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(p.name for p in out.iterdir()) == ["index.html", "results.json"]
    stages, table = done.stdout.split("Test digits read correctly, %")
    for method in METHODS:
        assert f"Training the classifier: {method}\n" in stages
        assert re.search(rf"^ *{re.escape(method)} .* [\d.]+ *$", table, re.MULTILINE), method
    for way in ("zeros", "nearest", "push–pull", "mean", "MisConv"):
        assert re.search(rf"^ *{way} .* [\d.]+( +[-+][\d.]+ %){{2}} *$", stages, re.MULTILINE), way
    for density in ("independent pixels", "SMFA", "DMFA"):
        assert re.search(rf"^ *{density}( +[-\d.]+){{2}}( +[\d.]+ %){{2}} +[\d.]+ *$", table, re.MULTILINE), density
    assert done.stdout.endswith(f"Report: {out / 'index.html'}\n")
    assert all(character.isprintable() or character == "\n" for character in done.stdout)


@pytest.mark.usefixtures("tiny")
def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    found = []
    for name, seed, device in (("a", "1", "cpu"), ("b", "1", "meta"), ("c", "2", "cpu")):
        with torch.device(device):  # the default device is of no account
            result = call("demo", "--quick", "--seeds", "1", "--seed", seed, "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        facts = json.loads((tmp_path / name / "results.json").read_text(encoding="utf-8"))
        assert facts["settings"]["seed"] == int(seed)
        parts = facts["digits"], facts["photographs"]
        for timed in (*parts[0]["densities"], parts[1]):
            del timed["seconds"]
        found.append((*parts, facts["verdict"], facts["findings"]))
    assert found[0] == found[1]
    assert found[0] != found[2]


@pytest.mark.usefixtures("idle")
def test_a_folder_with_files_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused(
        call("demo", "--out", str(tmp_path)), "folder must be new or empty, got .* with files in it; .*--overwrite.*"
    )
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("notes.txt", "mine")]


@pytest.mark.usefixtures("idle")
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(
        call("demo", "--out", str(tmp_path / "file")),
        "folder must be a folder or a new name, got .*file, which is a file",
    )
    refused(
        call("demo", "--out", str(tmp_path / "file" / "below")),
        "folder must be below a folder, got .*, but .*file is a file",
    )
    refused(call("demo", "--out", str(tmp_path / ("x" * 300) / "y")), "folder must be .*: File name too long.*")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", "-1", "--seed must lie between 0 and 2147483647, got -1"),
        ("--seed", "2147483648", "--seed must lie between 0 and 2147483647, got 2147483648"),
        ("--seeds", "0", "--seeds must be at least 1, got 0"),
        ("--seeds", "-3", "--seeds must be at least 1, got -3"),
    ],
)
def test_bad_numbers_are_refused(tmp_path: Path, option: str, value: str, message: str) -> None:
    refused(call("demo", option, value, "--out", str(tmp_path / "new")), message)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("idle")
def test_words_in_place_of_numbers_and_unknown_commands(tmp_path: Path) -> None:
    for arguments in (["demo", "--seed", "one"], ["demo", "--nonsense"], ["nonsense"]):
        result = call(*arguments)
        assert result.exit_code == 2
        assert arguments[-1].strip("-") in result.stderr or "--seed" in result.stderr
        assert "Traceback" not in result.output


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = call("demo", "--quick", "--out", str(tmp_path / "new"))
    refused(result, re.escape("the photographs come with scikit-learn: pip install 'misconv[demo]'"))
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("jinja2", "the report is made by Jinja2: pip install 'misconv[demo]'"),
        ("PIL", "pictures are made by Pillow: pip install 'misconv[files]'"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("misconv.demo.report", "misconv.paper.pictures"):  # to be imported again
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(demo, "report")
    refused(call("demo", "--out", str(tmp_path)), re.escape(message))


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_a_missing_command_line_is_named(name: str) -> None:
    # In a new process: here the modules are loaded already.
    code = f"import sys; sys.modules[{name!r}] = None; sys.argv = ['misconv', '--version']\nfrom misconv.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"misconv: the command line needs [\w.]+: pip install 'misconv\[demo\]'\n", done.stderr), (
        done.stderr
    )


def test_a_full_disk_costs_the_report_but_not_the_numbers(
    tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(path: Path, data: bytes) -> None:
        raise OSError(28, f"cannot write {path}: No space left on device")

    run, made = demo.run, []

    def run_once(*arguments: Any, **options: Any) -> demo.Demo:
        made.extend([] if made else [run(*arguments, **options)])
        return made[0]

    monkeypatch.setattr(demo, "run", run_once)
    monkeypatch.setattr(report, "write_bytes", fill_up)
    result = call("demo", "--quick", "--seeds", "1", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert re.fullmatch(r"misconv: cannot write .*: No space left on device\n", result.stderr)
    assert all(method in result.stdout for method in METHODS)
    assert list(tmp_path.iterdir()) == []
    result = call("demo", "--quick", "--seeds", "1", "--json", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert [method["name"] for method in json.loads(result.stdout)["digits"]["methods"]] == METHODS


@pytest.mark.usefixtures("tiny")
def test_the_numbers_as_json(tmp_path: Path) -> None:
    result = call("demo", "--quick", "--seeds", "1", "--json", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.pop("report") == str(tmp_path / "index.html")
    assert found == json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [density["name"] for density in found["digits"]["densities"]] == ["independent pixels", "SMFA", "DMFA"]
    assert "misconv: Training the classifier: zero\n" in result.stderr


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, OSError, ValueError])
def test_mistakes_of_ours_keep_their_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail() -> None:
        raise kind("a mistake")

    monkeypatch.setattr(data, "photographs", fail)
    result = call("demo", "--out", str(tmp_path / "new"))
    assert isinstance(result.exception, kind)


def test_ctrl_c_ends_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "photographs", interrupt)
    result = call("demo", "--out", str(tmp_path / "new"))
    assert result.exit_code == 130
    assert result.stderr == STOPPED
    assert not (tmp_path / "new").exists()


def test_a_scheduler_that_ends_the_job_gets_a_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(data, "photographs", lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = call("demo", "--out", str(tmp_path / "new"))
    assert result.exit_code == 143
    assert result.stderr == STOPPED
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_number_keeps_its_sign_where_only_ascii_can_be_written() -> None:
    code = "from misconv import cli; cli.app = lambda prog_name: print('−0.67 ± 1 “é”'); cli.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert done.stdout == b'-0.67 +- 1 "?"\n'


# Output that nobody reads, or that cannot be written -----------------------------------------------------------------


def shell(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line as a shell runs it; `misconv` is that of this interpreter."""
    text = f"misconv() {{ '{sys.executable}' -m misconv \"$@\"; }}; {command}"
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, timeout=240, **options)


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes end otherwise there")
@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("misconv --help | true", 0),
        ("misconv doctor | head -1", 1),
        ("misconv table --help | true", 0),
    ],
)
def test_a_reader_that_is_gone(command: str, lines: int) -> None:
    """Ends the command as it ends others, by a signal; without a word of Python's."""
    done = shell(f"{command}; echo ${{PIPESTATUS[0]}}")
    *shown, code = done.stdout.splitlines()
    assert len(shown) == lines
    assert int(code) in (0, 128 + signal.SIGPIPE)  # a short text may be written before the reader is gone
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_an_output_that_cannot_be_written() -> None:
    for command in ("--help", "--version", "demo --help"):
        done = shell(f"misconv {command} > /dev/full")
        assert (done.returncode, done.stderr) == (2, "misconv: the output cannot be written: No space left on device\n")


def test_an_output_that_is_closed(tmp_path: Path) -> None:
    for command in ("misconv --version >&-", "misconv --help >&- 2>&-"):
        done = shell(command)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = shell(f"misconv demo --out '{tmp_path}/new' --seeds 0 >&-")
    assert (done.returncode, done.stderr) == (2, "misconv: --seeds must be at least 1, got 0\n")


def test_a_place_is_tried_out_before_the_work(tmp_path: Path) -> None:
    """A full disk, as a process sees it that may not write another byte."""
    done = shell(f"ulimit -f 0; trap '' XFSZ; misconv demo --out '{tmp_path}/new'")
    assert done.returncode == 2
    assert re.fullmatch(
        r"misconv: folder must be in a place you may write to, got .*/new: File too large; choose another one\n",
        done.stderr,
    ), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("idle")
def test_overwrite_is_for_reports_alone(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>my page</p>")
    refused(
        call("demo", "--overwrite", "--out", str(tmp_path)),
        "folder must be new or written by this command, got .*index.html, which is another file; .*",
    )
    (tmp_path / "index.html").rename(tmp_path / "notes.html")
    refused(
        call("demo", "--overwrite", "--out", str(tmp_path)),
        "folder must hold a report of misconv to be overwritten, got .* with other files; .*",
    )
    assert (tmp_path / "notes.html").read_text() == "<p>my page</p>"


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["table", "--help"], ["fit", "--help"], ["demo", "--seeds", "0"]]
)
def test_help_and_refusals_import_no_torch(words: list[str]) -> None:
    """Torch takes seconds to import."""
    code = (
        f"import sys; sys.argv = ['misconv', *{words!r}]\nfrom misconv.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nprint({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_version_and_help() -> None:
    assert call("--version").stdout == f"misconv {misconv.__version__}\n"
    assert "demo" in call("--help").stdout
    for option in ("--out", "--seed", "--seeds", "--overwrite", "--quick"):
        assert option in call("demo", "--help").stdout
