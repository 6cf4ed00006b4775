"""The pages of README and docs as what they ask a reader to do: scripts of Python, and lines for a shell."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]

# A fence, which may be indented as part of a list; the language is a word, or a directive such as {code-cell}.
_FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
# A title in a page's own text; a comment in a block of code looks the same.
_TITLE = re.compile(r"^#+ (.*)$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """What stands between two fences, and which language they name."""

    kind: str
    body: str


def blocks(path: Path) -> list[Block]:
    """All fenced blocks of a page."""
    return [Block(m["kind"].strip(), textwrap.dedent(m["body"])) for m in _FENCE.finditer(path.read_text())]


def script(path: Path) -> str:
    """The Python of a page as one script: its cells where it is a notebook, else its blocks."""
    code = [_cell(body) if kind.startswith("{") else body for kind, body in blocks(path) if _is_python(kind)]
    return "\n".join(code)


def _is_python(kind: str) -> bool:
    return kind == "python" or kind.startswith("{code-cell}")


def _cell(body: str) -> str:
    """A cell without its options, and with the magics of IPython as the calls that they are."""
    body = re.sub(r"\A(:.*\n)+\n?", "", body)
    file = re.match(r"%%writefile (\S+)\n", body)
    if file:
        return f"import pathlib; pathlib.Path({file[1]!r}).write_text({body[file.end() :]!r})\n"
    if body.startswith("%%bash\n"):
        return "\n".join(map(_call, body.splitlines()[1:])) + "\n"
    return body


def _call(line: str) -> str:
    """A line for a shell as Python: without the time to import torch, where it is our own command or two processes."""
    if _words(line) and line.startswith("misconv"):
        return f"from misconv import cli; assert not cli.app({_words(line)!r}, standalone_mode=False)"
    two = re.fullmatch(r"OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 (\S+) 2>/dev/null", line)
    if two:
        return f"from tests.processes import torchrun; print(torchrun({two[1]!r}))"
    return f"import subprocess; subprocess.run({line!r}, shell=True, check=True)"


def commands(path: Path) -> list[list[str]]:
    """Every call of `misconv` that a page shows, as its words."""
    found = []
    for kind, body in blocks(path):
        text = body.replace("\\\n", " ")
        if _is_python(kind):
            lines = text.splitlines() if "%%bash\n" in text else []
        elif kind in ("", "sh", "console"):
            lines = text.splitlines()
        else:
            continue
        found += [words for words in map(_words, lines) if words]
    return found


def _words(line: str) -> list[str]:
    """The words behind `misconv`, or behind `-m misconv` of Python or torchrun, if it is such a line."""
    call = re.match(r"(?:[A-Z]+=\d+ )?(?:misconv|(?:python|torchrun) .*-m misconv)\s+(.*)", line.strip())
    return shlex.split(call[1], comments=True) if call else []


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """What a link to a page can name behind #, by the rule of GitHub."""
    return set(map(slug, _TITLE.findall(prose(path))))


def slug(title: str) -> str:
    """The anchor of a title, by the rule of GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def section(path: Path, anchor: str) -> str:
    """What stands under a title, down to the next one of its rank; the whole page without an anchor."""
    text = path.read_text()
    titles = [m for m in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE) if slug(m[2]) == anchor]
    if not anchor:
        return text
    end = re.compile(rf"^#{{1,{len(titles[0][1])}}} ", re.MULTILINE).search(text, titles[0].end())
    return text[titles[0].start() : end.start() if end else None]


def links(path: Path) -> list[tuple[str, str]]:
    """Texts and targets of the links of a page to other files here."""
    return [(text, target) for text, target in _LINK.findall(prose(path)) if "://" not in target]
