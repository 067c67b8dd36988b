"""Mutants that may survive, in lists: a reason, and under it what it holds for.

    == speed: a union is computed once more
    plan/key_ranges.py Bounds.both
    - both_exact = self.is_exact and other.is_exact
    + both_exact = None

A line ``file function`` alone holds for all of the function, whose mutants are then not run; ``*`` stands for any name.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

_LISTS = Path(__file__).parent / "accepted"


class Accepted(NamedTuple):
    """One entry; without lines it stands for a whole function."""

    reason: str
    file: str
    function: str
    before: str | None = None
    after: str | None = None


def accepted() -> list[Accepted]:
    """Return all entries of all lists."""
    found: list[Accepted] = []
    for path in sorted(_LISTS.glob("*.txt")):
        reason = name = before = ""
        for line in path.read_text().splitlines():
            sign, _, text = line.partition(" ")
            if sign == "==":
                reason = text
            elif sign == "-":
                before = text
            elif sign == "+":
                if found[-1].file + " " + found[-1].function == name and found[-1].before is None:
                    found.pop()  # lines follow: not the whole function
                found.append(Accepted(reason, *name.split(" "), before, text))
            elif line.strip():
                name = line.strip()
                found.append(Accepted(reason, *name.split(" ")))
    return found


def is_whole(entries: list[Accepted], file: str, function: str) -> bool:
    """Return whether a function is accepted whole, so that its mutants need not be run."""
    return any(
        entry.before is None and fnmatchcase(file, entry.file) and fnmatchcase(function, entry.function)
        for entry in entries
    )
