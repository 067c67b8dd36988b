"""Try the laws on one entry of the table, at small sizes and at the sizes of models."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from benchmarks.field.entries import Entry
from saccade.testing.case import Case
from saccade.testing.conformance import trials, try_law
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import LAWS, SIZE_LAWS, Law
from saccade.testing.report import Result

__all__ = ["CASES", "SEED", "SIZES", "is_tried", "judged"]

SEED = 0
_MASKED = ("causal", "causal-extend", "causal-decode", "window-past", "padding", "documents", "nothing")
CASES = frozenset([*_MASKED, "none", "all-heads-share", "widths-differ", "biased"])
"""Names of the small cases, of those that an entry has; cases of its own come besides."""
SIZES = ("sizes", "gradients_at_sizes", "large_scores", "memory_of_calls")
"""Names of the laws at the sizes of models that are tried; the others look for ways to pass tests."""
_MOST = 150_000  # pairs of a case at the sizes of models


def judged(entry: Entry, device: str = "cpu") -> dict[str, Any]:
    """Return the verdicts on an entry as plain values: by law its verdict, its counts and its first counter-example."""
    laws: dict[str, dict[str, Any]] = {}
    for law in (*LAWS, *(law for law in SIZE_LAWS if law.name in SIZES)):
        if entry.only is not None and law.name not in entry.only:
            continue
        results = list(_results(entry, law, device))
        counts = Counter(result.verdict for result in results)
        broken = next((result for result in results if result.verdict == "broken"), None)
        verdict = next((name for name in ("broken", "kept", "not offered") if counts[name]), "not applicable")
        laws[law.name] = {"verdict": verdict, "kept": counts["kept"], "broken": counts["broken"]}
        if broken is not None:
            laws[law.name]["first"] = f"{broken.case}: {broken.message}"[:240].rstrip()
    return {"package": entry.package, "version": version(entry.package).partition("+")[0], "laws": laws}


def _results(entry: Entry, law: Law, device: str) -> Iterator[Result]:
    peer = entry.peer
    subject = Subject(peer.function, with_lse=peer.with_lse, gqa=peer.gqa, gradients=peer.gradients, device=device)
    own = [case for case in peer.cases() if case.name in CASES or peer.definition is not None]
    is_free = law.dtypes is None or peer.dtype in law.dtypes
    now = dataclasses.replace(law, dtypes=(peer.dtype,)) if is_free else law
    for _, case, dtype in trials([now], own, [peer.dtype], SEED):
        tried = peer.case_for(law, case)
        if law in SIZE_LAWS and not is_tried(entry, case):
            continue
        if tried is not None:
            yield try_law(subject, law, tried, dtype)


def is_tried(entry: Entry, case: Case) -> bool:
    """Return whether an entry is tried on a case at the sizes of models."""
    is_small = case.batch * case.num_heads * case.q_len * case.kv_len <= _MOST
    is_short = entry.longest is None or case.kv_len <= entry.longest
    return is_small and is_short and (entry.only is None or case.name in entry.only)
