"""Finding: one result of a step, written to a file as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Finding", "append", "read"]


class Finding(NamedTuple):
    """One result of a step.

    Attributes:
        name: the kernel, canary, model or case that was checked.
        text: the result, in a sentence or a few figures.
        ok: False for a failure, True for a check that passed, None for a measurement or something left out.
        figures: the numbers behind the text, in SI units.
        headline: whether the summary shows it even if nothing is wrong.
    """

    name: str
    text: str
    ok: bool | None = None
    figures: dict[str, Any] = {}
    headline: bool = False


def append(path: Path, finding: Finding) -> None:
    """Add one line to the file of a step; a line is written whole."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finding._asdict(), ensure_ascii=False, default=str) + "\n")


def read(path: Path) -> list[Finding]:
    """Return the findings in a file; a last line that was cut off is left out."""
    return list(_lines(path)) if path.exists() else []


def _lines(path: Path) -> Iterator[Finding]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield Finding(**json.loads(line))
        except (ValueError, TypeError):
            return
