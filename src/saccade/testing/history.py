"""``python -m saccade.testing.history``: check kernels with past bugs and cheats, and print which law detects each.

A wrong kernel that passes reveals a gap in the laws. ``--mutants 200`` checks kernels with mistakes drawn from a seed,
and ``--right --seeds 20`` checks correct kernels, which must not break any law.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence

import torch

from saccade.testing.case import Case
from saccade.testing.cases import CASES
from saccade.testing.cheats import CHEATS
from saccade.testing.conformance import trials, try_law
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import LAWS, SIZE_LAWS
from saccade.testing.past_bug import PastBug
from saccade.testing.past_bugs import PAST_BUGS
from saccade.testing.report import Result
from saccade.testing.right_kernels import RIGHT_KERNELS
from saccade.testing.seeded_mutants import Mutant, mutants

_STRICT = ("isolation", "blindness")
"""Laws that most correct kernels break, including torch's, because a masked NaN enters their sums as 0 times NaN."""


def find(bug: PastBug) -> Result | None:
    """Return the result of the first broken law among those that must detect the bug, or None if all hold."""
    subject = Subject(bug.make(), offers=(), gqa=True)
    chosen = [law for law in (*LAWS, *SIZE_LAWS) if law.name in bug.laws]
    results = (try_law(subject, *trial) for trial in trials(chosen, CASES, (torch.float32,)))
    return next((result for result in results if result.verdict == "broken"), None)


def find_mutant(mutant: Mutant, seed: int = 0) -> Result | None:
    """Return the result of the first law that a mutant breaks, or None if all laws hold.

    Trials in float32 run first; inputs that trigger the mistake come before others, and short ones before long ones.
    """

    def cost(trial: tuple[object, Case, torch.dtype]) -> tuple[bool, bool, int]:
        _, case, dtype = trial
        sizes = (case.batch, case.num_heads, case.num_kv_heads, case.q_len, case.kv_len, case.head_dim)
        return dtype != torch.float32, not mutant.reaches(sizes), case.kv_len

    subject = Subject(mutant.kernel(), offers=(), gqa=True)
    laws = [law for law in (*SIZE_LAWS, *LAWS) if law.name not in _STRICT]
    chosen = sorted(trials(laws, CASES, (torch.float32,), seed), key=cost)
    results = (try_law(subject, *trial) for trial in chosen)
    return next((result for result in results if result.verdict == "broken"), None)


def false_alarms(name: str, seed: int, share: int = 1) -> list[Result]:
    """Return the results, for one seed, in which a correct kernel breaks a law. There should be none.

    Args:
        name: a name in `RIGHT_KERNELS`.
        seed: seed of the values.
        share: only every ``share``-th trial runs, starting at a different trial for each seed.
    """
    ours = name.startswith("saccade")
    subject = Subject(RIGHT_KERNELS[name])
    laws = [law for law in (*SIZE_LAWS, *LAWS) if ours or law.name not in _STRICT]
    chosen = itertools.islice(trials(laws, CASES, (torch.float64, torch.float32), seed), seed % share, None, share)
    results = (try_law(subject, *trial) for trial in chosen)
    return [result for result in results if result.verdict == "broken"]


def table(bugs: Sequence[PastBug]) -> Iterator[str]:
    """Yield lines of a table that lists each bug's report, the first law that detects the bug, and the mistake."""
    yield f"{'where':42}  {'found by':20}  mistake"
    for bug in bugs:
        found = find(bug)
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
