"""Run the laws on past bugs, cheats and mutants, which must break one, and on right kernels, which must break none."""

from __future__ import annotations

import itertools

import torch

from saccade.testing.case import Case
from saccade.testing.cases import CASES
from saccade.testing.conformance import trials, try_law
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import LAWS, SIZE_LAWS
from saccade.testing.past_bug import PastBug
from saccade.testing.report import Result
from saccade.testing.right_kernels import RIGHT_KERNELS
from saccade.testing.seeded_mutants import Mutant

_STRICT = ("isolation", "blindness")
"""Laws that most correct kernels break, including torch's, because a masked NaN enters their sums as 0 times NaN."""


def find_bug(bug: PastBug) -> Result | None:
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
