"""mutmut as it is used here: ``python mutmut_here.py run`` in a scratch copy; see `run.py`."""

from __future__ import annotations

import itertools
import os
from typing import Any

import collected
import mutmut.__main__ as mutmut
import properties
import sample
import typed
import words


def _seldom(every: int = 200) -> None:
    """Count what has been done now and then: mutmut counts all mutants before each."""
    tell, calls = mutmut.print_stats, itertools.count()

    def told(found: Any, force_output: bool = False) -> None:
        if force_output or next(calls) % every == 0:
            tell(found, force_output=True)

    mutmut.print_stats = told


if __name__ == "__main__":
    _seldom()
    words.install()
    if os.environ.get("MUTATION_PROPERTIES"):
        properties.install()
    typed.install()
    sample.install(int(os.environ.get("MUTATION_SHARE", "100")))
    collected.install(float(os.environ.get("MUTATION_SECONDS", "10")))
    mutmut.cli()
