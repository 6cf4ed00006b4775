"""What the documents say is run: their examples, their commands, their links, and the figures that they quote."""

from __future__ import annotations

import logging
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot
import pytest
import torch
from typer.main import get_command

import misconv
from misconv import cli
from misconv._train import cpu_by_default
from tests.pages import DOCS, PAGES, ROOT, anchors, blocks, commands, links, prose, script, section

COMMANDS: dict[str, Any] = get_command(cli.app).commands  # type: ignore[attr-defined]  # of a group
# A fresh Python runs the README; commands.md shows the help alone.
PROGRAMS = [path for path in PAGES if script(path) and path.name not in ("README.md", "commands.md")]
# Pages whose figures are links to where they were measured.
QUOTING = [ROOT / "README.md", DOCS / "when.md", DOCS / "choosing.md"]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Examples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROGRAMS, ids=named)
@pytest.mark.filterwarnings(
    "ignore::Warning:pytorch_lightning", "ignore:.*LeafSpec", "ignore:.*does not have many workers"
)
@pytest.mark.filterwarnings("ignore:.*module.s. in eval mode", "ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")  # rasterio multiplies by *
def test_the_python_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page are one script, in a folder of its own; whatever learns, learns hardly at all."""
    matplotlib.use("Agg")
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # of torchrun
    Path("script.py").write_text(shortened(script(path)))
    with cpu_by_default():
        runpy.run_path("script.py", run_name="page")  # processes that a page starts would run a `__main__` once more
    matplotlib.pyplot.close("all")
    logger.setLevel(level)  # which a page changes, for all tests after it


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    """As a newcomer runs them: in a fresh Python, with tensors on the CPU, whether or not there is a GPU beside it."""
    check = "\nassert {t.device.type for t in (*density.buffers(), *net.parameters(), x, y, h, p.mean)} == {'cpu'}\n"
    done = run(script(ROOT / "README.md") + check, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "Tensor Cores" not in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_examples_of_the_readme_run_on_a_gpu(tmp_path: Path) -> None:
    """The same words with the caller's tensors and modules there."""
    code = "import torch\ntorch.set_default_device('cuda')\n" + script(ROOT / "README.md")
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def shortened(code: str) -> str:
    """The same in seconds: two steps, one epoch, few images."""
    for name, number in (("STEPS", 2), ("EPOCHS", 1), ("IMAGES", 100)):
        code = re.sub(rf"^{name} = \d+", f"{name} = {number}", code, flags=re.MULTILINE)
        code = code.replace(f"\\n{name} = ", f"\\n{name} = {number} or ")  # in a file that the page writes
    return re.sub(r"(--budget\W+)\w+", r"\g<1>2steps", code)


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Warnings are errors, save that a density has learned too little here."""
    (folder / "script.py").write_text(code)
    command = [sys.executable, "-W", "error", "-W", "ignore:the density is not reliable yet:UserWarning", "script.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=500)


def test_a_block_that_is_not_run_says_so() -> None:
    """Every block is Python, a cell, a drawing, or lines for a shell; a `text` that could be run says why it is not."""
    known = ("python", "mermaid", "", "text", "{code-cell}", "{eval-rst}", "{toctree}")
    for path in PAGES:
        for kind, body in blocks(path):
            assert kind in known, f"{named(path)}: {kind}"
            if kind == "text" and re.search(r"^(misconv|torchrun|python) ", body, re.MULTILINE):
                assert "needs GPUs and was not run" in prose(path), named(path)


# Commands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=named)
def test_commands_are_as_the_command_line_takes_them(path: Path) -> None:
    """Parsed by the commands themselves: names, options and values, but for files that a reader has."""
    for name, *words in commands(path):
        assert name.startswith("-") or name in COMMANDS, f"{named(path)}: misconv {name}"
        if not name.startswith("-") and "--help" not in words:
            COMMANDS[name].make_context(name, list(words), resilient_parsing=False)


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_options_and_extras_in_the_text_exist(path: Path) -> None:
    options = {option for command in COMMANDS.values() for p in command.params for option in p.opts}
    for words in (span.split() for span in re.findall(r"`(misconv [a-z][^`]*)`", prose(path))):
        assert words[1] in COMMANDS, f"{named(path)}: {' '.join(words)}"
        assert {word for word in words if word.startswith("--")} <= {*options, "--help", "--install-completion"}, words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"pip install -e '\.\[([\w,]+)\]'", path.read_text()):
        assert set(names.split(",")) <= set(extras), f"{named(path)}: {names}"


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        COMMANDS["fit"].make_context("fit", ["scans/", "-o", "file", "--budgets", "2min"])


def test_every_command_is_on_its_page() -> None:
    assert set(COMMANDS) <= anchors(DOCS / "commands.md")


# Links and figures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for _, target in links(path):
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), f"{named(path)} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{named(path)} links to {target}"


@pytest.mark.parametrize("path", QUOTING, ids=named)
def test_figures_stand_where_their_links_lead(path: Path) -> None:
    """A figure that is measured anew must be quoted anew."""
    quoted = 0
    for text, target in links(path):
        file, _, anchor = target.partition("#")
        for figure in re.findall(r"(?<![\w-])\d[\d,]*\.?\d*(?![\w-])", text):
            assert figure in section(path.parent / file, anchor), f"{named(path)}: {figure} of {target}"
            quoted += 1
    assert quoted > 10


def test_ten_questions_are_answered_within_two_clicks() -> None:
    page = DOCS / "questions.md"
    questions = re.findall(r"^\d+\. .*?(?=^\d+\. |^\n)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(questions) == 10
    near = reached(DOCS / "index.md", clicks=2)
    assert page in reached(DOCS / "index.md", clicks=1)
    for question in questions:
        targets = re.findall(r"\]\(([^)\s#]+)", question)
        assert targets, question
        assert (page.parent / targets[0]).resolve() in near, question


def reached(start: Path, clicks: int) -> set[Path]:
    """Pages that some links lead to."""
    found, last = {start}, {start}
    for _ in range(clicks):
        last = {
            (page.parent / target.partition("#")[0]).resolve() for page in pages_of(last) for _, target in links(page)
        }
        found |= last
    return found


def pages_of(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.suffix == ".md"]


# The reference ------------------------------------------------------------------------------------------------------


def test_everything_public_is_in_the_reference() -> None:
    """Under the shortest name that leads to it."""
    text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"auto\w+:: ([\w.]+)$", text, re.MULTILINE))
    modules = [misconv, misconv.functional, misconv.impute, misconv.missing, misconv.density, misconv.layers]
    modules += [misconv.store, misconv.training, misconv.predict, misconv.data, misconv.transforms, misconv.sklearn]
    for module in modules:
        for name in module.__all__:
            found = getattr(module, name)
            home = "misconv" if getattr(misconv, name, None) is found else module.__name__
            assert f"{home}.{name}" in shown or name == "__version__" or isinstance(found, ModuleType), name
