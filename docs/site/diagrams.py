"""Draw the diagrams of flow.md for the site, which has no program to draw them.

``python docs/site/diagrams.py mermaid.min.js``: the script is that of the npm package mermaid, version 11 (``npm pack
mermaid@11``). Needs playwright and Debian's chromium.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1]
SETTINGS = (
    "{startOnLoad: false, theme: 'neutral', htmlLabels: false, flowchart: {htmlLabels: false}, "
    "themeVariables: {fontFamily: 'sans-serif'}}"
)


def main(script: str) -> None:
    """Draw all diagrams, in both languages, into docs/images."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.set_content("<body></body>")
        page.add_script_tag(path=script)
        page.evaluate(f"mermaid.initialize({SETTINGS})")
        for language in ("en", "zh"):
            text = (DOCS / language / "flow.md").read_text(encoding="utf-8")
            for number, diagram in enumerate(re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL), 1):
                drawn = page.evaluate(
                    "async ([i, text]) => (await mermaid.render('flow' + i, text)).svg", [number, diagram]
                )
                file = DOCS / "images" / f"flow-{number}-{language}.svg"
                file.write_text(re.sub(r"\s+", " ", drawn) + "\n", encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
