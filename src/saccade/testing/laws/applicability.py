"""Conditions of laws. A condition returns the reason why a law does not apply to a case, or None if the law applies."""

from __future__ import annotations

from collections.abc import Callable

from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject


def _unless(reason: str, holds: Callable[[Case], bool]) -> Callable[[Subject, Case], str | None]:
    """Build a condition that returns ``reason`` for cases for which ``holds`` is false."""

    def condition(subject: Subject, case: Case) -> str | None:
        """Return the reason why a law does not apply to the case, or None if it applies."""
        return None if holds(case) else reason

    return condition


is_causal = _unless("a query can see later keys", lambda case: case.is_causal)
is_full = _unless("the mask hides some keys", lambda case: bool(case.allowed.all()))
is_small = _unless("too long to check every derivative", lambda case: case.q_len * case.kv_len <= 400)
has_empty_rows = _unless("every row has a visible key", lambda case: not bool(case.allowed.any(-1).all()))
has_no_sink = _unless("a sink would count once in each part", lambda case: not case.sink)
has_queries_and_keys = _unless("there are no queries or no keys", lambda case: bool(case.allowed.numel()))
hides_something = _unless("the mask hides no key", lambda case: not bool(case.allowed.all()))
shows_something = _unless("no key is visible", lambda case: bool(case.allowed.any()))
has_several_queries = _unless("there is a single query", lambda case: case.q_len > 1)
default_positions = _unless("positions are given", lambda case: not case.explicit_positions)
shares_keys = _unless("every head has its own keys", lambda case: case.num_kv_heads < case.num_heads)
has_several_items = _unless("a single batch item", lambda case: case.batch > 1)


def claims_memory(subject: Subject, case: Case) -> str | None:
    """Return a reason to skip a law if the subject claims nothing about the growth of its memory, otherwise None."""
    return None if subject.claims.memory_exponent is not None else "no memory exponent is claimed"


def trains_parameters(subject: Subject, case: Case) -> str | None:
    """Return a reason to skip a law if none of the subject's options has trainable parameters, otherwise None."""
    takes = subject.offers.intersection({"score", "relative", "sink_logit"})
    return None if takes else "none of its options has parameters"
