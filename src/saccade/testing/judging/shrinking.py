"""Shrink a case on which a law is broken: fewer batch items, heads, tokens and channels, and fewer options."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from saccade.masks import Causal
from saccade.testing.case import Case
from saccade.testing.judging.fitting import is_possible

_OPTIONS = ("bias", "scale", "softcap", "score", "relative", "q_positions", "kv_positions", "key_dim")


def shrunk(case: Case, still_broken: Callable[[Case], bool], deadline: float) -> Case:
    """Simplify a case step by step, as long as the same law is still broken; return the simplest case.

    Args:
        case: the case to begin with.
        still_broken: returns whether the law is broken in the same way on another case.
        deadline: the value of `time.monotonic` at which the search ends.
    """
    while True:
        for candidate in simpler(case):
            if time.monotonic() > deadline:
                return case
            if is_possible(candidate) and still_broken(candidate):
                case = candidate
                break
        else:
            return case


def simpler(case: Case) -> Iterator[Case]:
    """Yield simpler versions of a case, changing one property at a time, the simplest version first."""
    for name in _OPTIONS:
        if getattr(case, name) is not None:
            changes: dict[str, Any] = {name: None}
            yield dataclasses.replace(case, **changes)
    if case.sink:
        yield dataclasses.replace(case, sink=False)
    if case.mask is not None or case.rule is not None:
        yield dataclasses.replace(case, mask=None, rule=None)
        if not isinstance(case.mask, Causal):
            yield dataclasses.replace(case, mask=Causal(), rule=lambda b, h, q, kv: kv <= q)
    if case.batch > 1:
        yield dataclasses.replace(case, batch=1)
    for heads in ((1, 1), (2, 1), (case.num_kv_heads, case.num_kv_heads)):
        if heads[0] < case.num_heads:
            yield dataclasses.replace(case, num_heads=heads[0], num_kv_heads=heads[1])
    yield from _shorter(case)
    for width in _smaller(case.head_dim):
        value_dim = width if case.value_dim == case.head_dim else case.value_dim
        yield dataclasses.replace(case, head_dim=width, value_dim=value_dim)
    for width in _smaller(case.value_dim):
        yield dataclasses.replace(case, value_dim=width)


def _shorter(case: Case) -> Iterator[Case]:
    """Yield versions of a case with fewer tokens, unless the case has a bias or explicit positions."""
    if case.bias is not None or case.explicit_positions:
        return
    if case.q_len == case.kv_len:
        for length in _smaller(case.q_len):
            yield dataclasses.replace(case, q_len=length, kv_len=length)
    for length in _smaller(case.q_len):
        yield dataclasses.replace(case, q_len=length)
    for length in _smaller(case.kv_len):
        yield dataclasses.replace(case, kv_len=length)


def _smaller(size: int) -> list[int]:
    """Return smaller sizes to try: 1, 2, 3, 4, 8, half, three quarters, 8 less and 1 less, in ascending order."""
    tried = {1, 2, 3, 4, 8, size // 2, 3 * size // 4, size - 8, size - 1}
    return sorted(x for x in tried if 0 < x < size)
