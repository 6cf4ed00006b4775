"""What the documents say is run: the README's examples, and the links between the documents."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    """As a newcomer runs them: in a fresh Python, with tensors on the CPU, whether or not there is a GPU beside it."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    code = "\n".join(textwrap.dedent(block) for _, block in blocks)
    check = "\nassert {t.device.type for t in (*density.buffers(), *net.parameters(), x, y, h, p.mean)} == {'cpu'}\n"
    done = run(code + check, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_the_example_of_own_images_runs(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "own-images.md").read_text(), re.DOTALL | re.MULTILINE
    )
    done = run(code.replace("import numpy", "import warnings; warnings.simplefilter('ignore', UserWarning)\nimport numpy", 1), tmp_path)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Warnings are errors, and nobody is greeted."""
    (folder / "script.py").write_text(code)
    command = [sys.executable, "-W", "error", str(folder / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=500)
    assert "Tensor Cores" not in done.stdout + done.stderr
    return done


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_examples_of_the_readme_run_on_a_gpu(tmp_path: Path) -> None:
    """The same words with the caller's tensors and modules there."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    code = "import torch\ntorch.set_default_device('cuda')\n" + "\n".join(textwrap.dedent(block) for _, block in blocks)
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), f"{path.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{path.name} links to {target}"
