"""The class `Progress`: the cells that a survey has measured so far, in a file, so that the survey can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.support.errors import value_error


class Progress:
    """The cells that a survey has measured so far, one line of JSON for each.

    Args:
        path: the file; it is read if it exists, and each new cell is appended.
        versions: versions of the packages that are measured.

    Attributes:
        done: the results by model and implementation.

    Raises:
        ValueError: the file holds cells of other versions.
    """

    def __init__(self, path: Path, versions: Mapping[str, str]):
        self.path, self.done = path, dict[tuple[str, str], Any]()
        if not path.exists():
            path.write_text(json.dumps(versions) + "\n", "utf-8")
        first, _, rest = path.read_text("utf-8").partition("\n")
        if json.loads(first) != versions:
            hint = f"delete {path}, or name other --results"
            raise value_error("versions", f"be those of the unfinished survey, {first}", dict(versions), hint=hint)
        for line in rest.splitlines(keepends=True):
            if line.endswith("\n"):  # the last line may have been cut off
                model, implementation, result = json.loads(line)
                self.done[model, implementation] = result
        whole = first + "\n" + rest[: rest.rfind("\n") + 1]
        path.write_text(whole, "utf-8")

    def add(self, model: str, implementation: str, result: Any) -> None:
        """Add the result of one cell, in memory and in the file."""
        self.done[model, implementation] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([model, implementation, result], ensure_ascii=False) + "\n")
