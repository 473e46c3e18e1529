"""Sphinx: the pages of docs/ as one site. ``python -m sphinx -W --keep-going -b html docs build/docs``

Pages are written for a checkout, where they are read as they are. This file turns their links into the site's.
"""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

from streamshard import StreamShard, __version__

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Files outside of docs/, and the pages that show them. The pages' own files have nothing to say.
OUTSIDE = {
    ROOT / "README.md": "index",
    ROOT / "CONTRIBUTING.md": "contributing",
    ROOT / "CHANGELOG.md": "changelog",
    ROOT / "benchmarks/README.md": "benchmarks",
}

project = "StreamShard"
author = "The StreamShard authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["examples/[!R]*"]
myst_heading_anchors = 3
highlight_language = "text"  # of blocks that do not say one: output

html_theme = "furo"
html_title = f"StreamShard {release}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_search_scorer = str(DOCS / "static/scorer.js")  # Sphinx opens it from the current directory

copybutton_selector = "div:not(.highlight-diff) > div.highlight pre"
copybutton_prompt_text = "$ "  # copied are commands, not their output
copybutton_copy_empty_lines = False
copybutton_line_continuation_character = "\\"

default_role = "py:obj"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88


def read_page(app: Any, docname: str, source: list[str]) -> None:
    """Put files from outside of docs/ before the text of their pages, and make links absolute: / is docs/."""
    origin = next((file for file, name in OUTSIDE.items() if name == docname), DOCS / f"{docname}.md")
    if origin in OUTSIDE:
        source[0] = f"{origin.read_text()}\n{source[0]}"
        app.env.note_dependency(str(origin))

    def link(match: re.Match[str]) -> str:
        label, path, anchor = match.groups("")
        target = (origin.parent / path).resolve()
        if target.is_dir():
            target = next(each / "README.md" for each in (target, *target.parents) if (each / "README.md").is_file())
        if target in OUTSIDE:
            target = DOCS / f"{OUTSIDE[target]}.md"
        if label.endswith(".md"):  # the site shows the page's title
            label = ""
        return f"[{label}](/{os.path.relpath(target, DOCS)}{anchor})"

    if docname.endswith("decisions/README"):  # whose list of links is for readers; this one is for the sidebar
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    source[0] = re.sub(r"\[([^][]+)\]\(([\w./-]+)(#[\w-]+)?\)", link, source[0])


def setup(app: object) -> None:
    """Sphinx calls this. It would show the signature of ``__new__``, which takes any arguments."""
    StreamShard.__new__.__signature__ = inspect.signature(StreamShard.__init__)
    app.connect("source-read", read_page)
