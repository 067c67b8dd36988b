"""Sphinx configuration of the site; `build.py` runs it once for each language."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
from han_lines import joined_pieces
from site_search import SearchChinese

project = "saccade"
author = "The saccade contributors"
project_copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["examples", "images"]
templates_path = ["templates"]
html_static_path = ["static"]
html_theme = "furo"
html_title = "saccade"
html_show_sphinx = False
html_copy_source = False
html_search_scorer = str(Path(__file__).parent / "search_scores.js")
locale_dirs = ["locale"]
html_css_files = ["site.css"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "languages.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {"top_of_page_buttons": []}
math_renderer = "mathml"
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # what notebooks show is kept in them, and a test says that it is current
nb_ipywidgets_js = {}
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
# A name in a docstring may be that of several attributes; then it leads to one of them.
suppress_warnings = ["myst.header", "misc.highlighting_failure", "ref.python"]


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def _join_lines(app: Any, document: nodes.document) -> None:
    """Remove the line breaks inside Chinese sentences, which browsers would show as spaces."""
    if not str(app.config.language).startswith("zh"):
        return
    for parent in {id(text.parent): text.parent for text in document.findall(nodes.Text)}.values():
        if isinstance(parent, nodes.literal | nodes.literal_block | nodes.math | nodes.math_block | nodes.raw):
            continue
        for place, piece in enumerate(joined_pieces([child.astext() for child in parent])):
            if isinstance(parent[place], nodes.Text):
                parent[place] = nodes.Text(piece)


def setup(app: Any) -> None:
    """Render mathematics as MathML, which browsers display natively; split and join Chinese text by its own rules."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.add_search_language(SearchChinese)
    app.connect("doctree-read", _join_lines)
