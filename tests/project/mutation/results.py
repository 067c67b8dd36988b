"""The results of a run: counts by status, and survivors as changed lines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code


class Survivor(NamedTuple):
    """A mutant that no test noticed, or that no test reaches."""

    name: str
    file: str
    function: str
    before: str
    after: str


def counts(scratch: Path) -> Counter[str]:
    """Return the number of mutants by status."""
    return Counter(status_by_exit_code[code] for _, codes in _found(scratch) for code in codes.values())


def survivors(scratch: Path) -> Iterator[Survivor]:
    """Yield survivors in the order of files; the working directory must be the scratch copy."""
    for path, codes in _found(scratch):
        for name, code in codes.items():
            if status_by_exit_code[code] in ("survived", "no tests"):
                removed, added = [], []
                for line in get_diff_for_mutant(name, path=path).splitlines()[2:]:
                    if line[:1] in "+-":
                        (removed if line[0] == "-" else added).append(line[1:].strip())
                file = str(path).removeprefix("src/saccade/")
                yield Survivor(name, file, function_of(name), " ".join(removed), " ".join(added))


def function_of(name: str) -> str:
    """Return the function of a mutant: ``saccade.plan.key_ranges.xǁSpansǁat__mutmut_3`` is ``Spans.at``."""
    last = name.rpartition(".")[2].partition("__mutmut")[0]
    return last[2:].replace("ǁ", ".") if last.startswith("xǁ") else last.removeprefix("x_")


def _found(scratch: Path) -> Iterator[tuple[Path, dict[str, int | None]]]:
    for meta in sorted((scratch / "mutants" / "src").rglob("*.meta")):
        path = meta.relative_to(scratch / "mutants").with_suffix("")
        yield path, json.loads(meta.read_text())["exit_code_by_key"]
