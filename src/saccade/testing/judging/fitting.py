"""Fit cases to the sizes that a kernel claims, so that laws can be tried on kernels of few sizes."""

from __future__ import annotations

import dataclasses

from saccade.support.errors import UnsupportedError
from saccade.testing.case import Case
from saccade.testing.judging.declaration import Declaration


def fitted(case: Case, declaration: Declaration) -> Case:
    """Return the case with the nearest widths and lengths that a kernel claims; unchanged if its mask needs others."""
    width, value_width = case.head_dim, case.value_dim
    if declaration.widths is not None and case.key_dim is None and case.score is None and case.relative is None:
        width = _nearest(width, declaration.widths)
        value_width = width if case.value_dim == case.head_dim else value_width
    if isinstance(declaration.value_widths, tuple):
        value_width = _nearest(value_width, declaration.value_widths)
    changes = {"head_dim": width, "value_dim": width if declaration.value_widths == "same" else value_width}
    wide = dataclasses.replace(case, **changes) if _differs(case, changes) else case
    changes = {"q_len": _length(case.q_len, declaration), "kv_len": _length(case.kv_len, declaration)}
    if not _differs(case, changes) or case.explicit_positions:
        return wide
    if case.bias is not None:
        sizes = (changes["q_len"], changes["kv_len"])
        bias = (*case.bias[:2], *(new if old > 1 else old for old, new in zip(case.bias[2:], sizes, strict=True)))
        long = dataclasses.replace(wide, **changes, bias=bias)
    else:
        long = dataclasses.replace(wide, **changes)
    return long if is_possible(long) else wide


def is_possible(case: Case) -> bool:
    """Return whether the mask of a case exists at its sizes."""
    try:
        return case.allowed.shape == (case.batch, case.num_heads, case.q_len, case.kv_len)
    except (ValueError, IndexError, RuntimeError, UnsupportedError):  # a mask of other lengths
        return False


def _differs(case: Case, changes: dict[str, int]) -> bool:
    return any(getattr(case, name) != size for name, size in changes.items())


def _nearest(size: int, claimed: tuple[int, ...]) -> int:
    return min(claimed, key=lambda one: (abs(one - size), one))


def _length(length: int, declaration: Declaration) -> int:
    """Return the next length that a kernel claims; lengths of 0 and 1 stay, which say something of their own."""
    if length <= 1:
        return length
    step, least = declaration.lengths.get("multiple", 1), declaration.lengths.get("min", 0)
    up = max(-(-length // step), -(-least // step)) * step
    most = declaration.lengths.get("max", up)
    return min(up, most // step * step)
