"""How the site is built: `make site`. Nothing is fetched from the internet, neither here nor by its pages."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

from misconv import __version__  # noqa: E402  # the path above is for the extensions below

logging.getLogger("traitlets").setLevel(logging.WARNING)  # not a line for every tutorial that is run

project = "misconv"
author = "The misconv authors"
copyright = author
release = version = __version__

extensions = [
    "myst_nb",  # Markdown, and tutorials that are run
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # docstrings with Args and Returns
    "sphinx_copybutton",
    "sphinx-mathjax-offline",  # MathJax and its fonts, served by the site itself
    "flowchart",  # drawings of GitHub's mermaid fences
    "accessible",  # what WCAG asks for and Sphinx leaves out
    "streams",  # output of cells, put together as it was printed
    "repository",  # links that leave docs/, and pages that are files of the root
]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_extensions"]
suppress_warnings = ["mystnb.unknown_mime_type"]

# Warnings are errors. Words in backquotes of a docstring are links where they name something public, else just code;
# types of torch live on a site of their own, which is not asked.
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]
default_role = "py:obj"
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE.parent / "build" / "site-cache")
nb_execution_in_temp = True
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "misconv"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1f5fa8",
        "color-brand-content": "#1f5fa8",
        "code-font-size": "78%",
    },
    "dark_css_variables": {"color-brand-primary": "#8ab8f0", "color-brand-content": "#8ab8f0"},
}
