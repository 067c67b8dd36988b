"""The HTML file of a page, with its code, style and data, and a security policy that blocks everything else."""

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

_BROWSER = files("saccade.viz.page").joinpath("browser")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)


def document(title: str, parts: Mapping[str, str]) -> str:
    """Return the complete HTML document of an attention page.

    Args:
        title: title of the browser window.
        parts: packed data by name, encoded in base64 so that it cannot contain markup.
    """
    script, look = code("file"), style()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(look)}'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    values = {
        "policy": policy,
        "title": html.escape(title),
        "style": look,
        "script": script,
        "parts": "\n".join(
            f'<script type="text/plain" data-part="{name}">{data}</script>' for name, data in parts.items()
        ),
    }
    page = _BROWSER.joinpath("page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], page)  # one pass: inserted text is not searched


@cache
def code(name: str) -> str:
    """Return a JavaScript module together with all modules that it imports, as one script for the HTML document."""
    done: dict[str, str] = {}

    def add(module: str) -> None:
        if module in done:
            return
        text = _BROWSER.joinpath(f"{module}.js").read_text("utf-8")
        done[module] = ""  # stops import cycles
        for needed in _IMPORT.findall(text):
            add(needed)
        del done[module]
        done[module] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(name)
    return "\n".join(done.values())


@cache
def style() -> str:
    """Return the style sheet of the attention page's HTML document."""
    return _BROWSER.joinpath("page.css").read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
