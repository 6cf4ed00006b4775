"""Links of the documents lead somewhere on the site, too.

The documents are read in two places: as files of the repository, and here. A link to a file of the root that is a page
of the site leads to that page; one to another file (a script, a record of results) lets the reader download it; one to
a folder is just its name. A page with the comment ``<!-- on the site: ../NAME.md -->`` shows that file of the root.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
# Files of the root, and the pages that show them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
ROOT_PAGE = re.compile(r"^<!-- on the site: \.\./(\S+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def adapt_links(text: str, source: Path, page: Path) -> str:
    """The text of a file as it has to be on a page, which may be another file in another folder."""

    def adapted(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        file = (source.parent / path).resolve()
        if file.parent == ROOT and file.name in PAGES:
            file = DOCS / PAGES[file.name]
        if file.is_dir():
            return label
        found = os.path.relpath(file, page.parent)
        return f"{mark}[{label}]({found}{'#' + anchor if anchor else ''})"

    return LINK.sub(adapted, text)


def on_source_read(app: Any, name: str, content: list[str]) -> None:
    """Change the text of a page before it is parsed."""
    page = DOCS / f"{name}.md"
    root_page = ROOT_PAGE.search(content[0])
    source = ROOT / root_page[1] if root_page else page
    if root_page:
        app.env.note_dependency(str(source))
    content[0] = adapt_links(source.read_text(encoding="utf-8") if root_page else content[0], source, page)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", on_source_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
