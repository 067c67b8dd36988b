"""The page as one file: its code, its style and its data, and a policy that forbids everything else."""

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

__all__ = ["code", "document", "style"]

_BROWSER = files("saccade.viz.page").joinpath("browser")
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)


def document(title: str, parts: Mapping[str, str]) -> str:
    """The page.

    Args:
        title: of the window.
        parts: packed data, by name; base64, in which nothing can be markup.
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
    given = {
        "policy": policy,
        "title": html.escape(title),
        "style": look,
        "script": script,
        "parts": "\n".join(
            f'<script type="text/plain" data-part="{name}">{data}</script>' for name, data in parts.items()
        ),
    }
    page = _BROWSER.joinpath("page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: given[found[1]], page)  # at once: nothing is read that was put in


@cache
def code(name: str) -> str:
    """A module with all that it imports, as one module: every name at the top of a file is its own in all of them."""
    done: dict[str, str] = {}

    def add(own: str) -> None:
        if own in done:
            return
        text = _BROWSER.joinpath(f"{own}.js").read_text("utf-8")
        done[own] = ""  # a circle ends here
        for needed in _IMPORT.findall(text):
            add(needed)
        del done[own]
        done[own] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(name)
    return "\n".join(done.values())


@cache
def style() -> str:
    """How the page looks."""
    return _BROWSER.joinpath("page.css").read_text("utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
