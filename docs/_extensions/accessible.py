"""What WCAG asks for and Sphinx leaves out.

Captions of the navigation say their level, what scrolls can be reached with the keyboard, and the parameters of a long
signature are no list of definitions without terms.
"""

from __future__ import annotations

import re
from typing import Any

# A list in a signature has nothing but definitions, one for each parameter.
SIGNATURE = re.compile(r"<dl>\s*((?:<dd>(?:(?!</?d[dlt]>).)*</dd>\s*)+)</dl>", re.DOTALL)


def accessible(text: str) -> str:
    """The same page for everyone."""
    text = text.replace('role="heading">', 'role="heading" aria-level="2">')
    text = text.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    text = text.replace("<pre>", '<pre tabindex="0">')
    return SIGNATURE.sub(lambda m: re.sub(r"<(/?)dd>", _line, m[1]), text)


def _line(tag: re.Match[str]) -> str:
    return "</div>" if tag[1] else '<div class="sig-line">'


def on_page(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Change what the theme will put together."""
    for name in ("body", "furo_navigation_tree"):
        if name in context:
            context[name] = accessible(context[name])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("html-page-context", on_page, priority=900)  # after the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
