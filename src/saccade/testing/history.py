"""``python -m saccade.testing.history``: check kernels with past bugs and cheats, and print which law finds each.

A kernel that passed would be a gap in the laws.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from saccade.testing.cases import CASES
from saccade.testing.cheats import CHEATS
from saccade.testing.conformance import trials, try_law
from saccade.testing.laws import LAWS, SIZE_LAWS
from saccade.testing.past_bug import PastBug
from saccade.testing.past_bugs import PAST_BUGS
from saccade.testing.report import Result
from saccade.testing.subject import Subject


def find(bug: PastBug) -> Result | None:
    """Return the first broken law among those that must find a bug; None if all are kept."""
    subject = Subject(bug.make(), offers=(), gqa=True)
    chosen = [law for law in (*LAWS, *SIZE_LAWS) if law.name in bug.laws]
    results = (try_law(subject, *trial) for trial in trials(chosen, CASES, (torch.float32,)))
    return next((result for result in results if result.verdict == "broken"), None)


def table(bugs: Sequence[PastBug]) -> Iterator[str]:
    """Yield the lines of a table of bugs: where it was, the mistake, and the first law that finds it."""
    yield f"{'where':36}  {'found by':20}  mistake"
    for bug in bugs:
        found = find(bug)
        law = "NOT FOUND" if found is None else f"{found.law}"
        yield f"{bug.where:36}  {law:20}  {bug.mistake}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of past bugs and cheats; the exit status is 1 if the laws do not find one of them."""
    parser = argparse.ArgumentParser(prog="python -m saccade.testing.history", description=main.__doc__)
    parser.parse_args(arguments)
    lines = []
    for line in table((*PAST_BUGS, *CHEATS)):
        print(line, flush=True)
        lines.append(line)
    missed = sum("NOT FOUND" in line for line in lines)
    print(f"{len(PAST_BUGS)} past bugs and {len(CHEATS)} cheats, {missed} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
