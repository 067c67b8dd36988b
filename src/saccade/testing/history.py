"""``python -m saccade.testing.history``: check kernels with past bugs and cheats, and print which law detects each.

A wrong kernel that passes reveals a gap in the laws. ``--mutants 200`` checks kernels with mistakes drawn from a seed,
and ``--right --seeds 20`` checks correct kernels, which must not break any law.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from saccade.testing.cheats import CHEATS
from saccade.testing.check_laws import false_alarms, find_bug, find_mutant
from saccade.testing.past_bug import PastBug
from saccade.testing.past_bugs import PAST_BUGS
from saccade.testing.right_kernels import RIGHT_KERNELS
from saccade.testing.seeded_mutants import Mutant, mutants


def table(bugs: Sequence[PastBug]) -> Iterator[str]:
    """Yield lines of a table that lists each bug's report, the first law that detects the bug, and the mistake."""
    yield f"{'where':42}  {'found by':20}  mistake"
    for bug in bugs:
        found = find_bug(bug)
        law = "NOT FOUND" if found is None else f"{found.law}"
        yield f"{bug.where:42}  {law:20}  {bug.mistake}"


def table_of_mutants(drawn: Sequence[Mutant], seed: int) -> Iterator[str]:
    """Yield lines of a table that lists each mutant's mistake and the first law that detects it."""
    yield f"{'found by':20}  mistake"
    for mutant in drawn:
        found = find_mutant(mutant, seed)
        yield f"{'NOT FOUND' if found is None else found.law:20}  {mutant}"


def table_of_right_kernels(names: Sequence[str], seeds: int, share: int) -> Iterator[str]:
    """Yield lines of a table that lists each correct kernel's CPU seconds per seed and the laws that it breaks."""
    yield f"{'kernel':40}  seconds per seed  false alarms"
    for name in names:
        began = time.process_time()
        found = [result for seed in range(seeds) for result in false_alarms(name, seed, share)]
        seconds = (time.process_time() - began) / max(seeds, 1)
        accused = "; ".join(f"FALSE ALARM {result}" for result in found[:3]) or "."
        yield f"{name:40}  {seconds:14.1f}  {accused}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of past bugs and cheats. The exit status is 1 if the laws miss at least one of them."""
    parser = argparse.ArgumentParser(prog="python -m saccade.testing.history", description=main.__doc__)
    parser.add_argument("--mutants", type=int, metavar="N", help="check N kernels with random mistakes instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random mistakes and of the input values")
    parser.add_argument(
        "--right", nargs="*", metavar="NAME", help="check correct kernels instead: the named ones, or all"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="number of seeds for the correct kernels, counted from 0"
    )
    parser.add_argument(
        "--share", type=int, default=1, metavar="N", help="run one in N trials, a different subset for each seed"
    )
    options = parser.parse_args(arguments)
    if options.right is not None:
        names = options.right or list(RIGHT_KERNELS)
        what = f"{len(names)} right kernels over {options.seeds} seeds"
        return _print(
            table_of_right_kernels(names, options.seeds, options.share), what, "FALSE ALARM", "with a false alarm"
        )
    if options.mutants is None:
        what = f"{len(PAST_BUGS)} past bugs and {len(CHEATS)} cheats"
        lines = table((*PAST_BUGS, *CHEATS))
    else:
        what = f"{options.mutants} mutants of seed {options.seed}"
        lines = table_of_mutants(mutants(options.mutants, options.seed), options.seed)
    return _print(lines, what)


def _print(lines: Iterator[str], what: str, mark: str = "NOT FOUND", said: str = "not found") -> int:
    """Print lines and the number of lines that contain ``mark``; return 1 if there are any, otherwise 0."""
    marked = 0
    for line in lines:
        print(line, flush=True)
        marked += mark in line
    print(f"{what}, {marked} {said}")
    return 1 if marked else 0


if __name__ == "__main__":
    raise SystemExit(main())
