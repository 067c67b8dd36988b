"""Fit cases to the sizes that a kernel claims, so that laws can be tried on kernels that support only a few sizes."""

from __future__ import annotations

import dataclasses

from saccade.support.errors import UnsupportedError
from saccade.testing.case import Case
from saccade.testing.judging.declaration import Declaration


def fitted(case: Case, declaration: Declaration) -> Case:
    """Return the case with its widths and lengths replaced by the nearest ones that a kernel claims.

    Lengths stay unchanged if the case has explicit positions, or if its mask does not support other lengths.
    """
    width, value_width = case.head_dim, case.value_dim
    if isinstance(declaration.widths, tuple) and case.key_dim is None and case.score is None and case.relative is None:
        width = _nearest(width, declaration.widths)
        value_width = width if case.value_dim == case.head_dim else value_width
    if isinstance(declaration.value_widths, tuple):
        value_width = _nearest(value_width, declaration.value_widths)
    value_width = width if declaration.value_widths == "same" else value_width
    wide = dataclasses.replace(case, head_dim=width, value_dim=value_width)
    q_len, kv_len = _length(case.q_len, declaration), _length(case.kv_len, declaration)
    if (q_len, kv_len) == (case.q_len, case.kv_len) or case.explicit_positions:
        return wide
    bias = case.bias
    if bias is not None:
        rows, columns = (new if old > 1 else old for old, new in zip(bias[2:], (q_len, kv_len), strict=True))
        bias = (bias[0], bias[1], rows, columns)
    long = dataclasses.replace(wide, q_len=q_len, kv_len=kv_len, bias=bias)
    return long if is_possible(long) else wide


def is_possible(case: Case) -> bool:
    """Return whether the case's mask can be constructed at the case's sizes."""
    try:
        return case.allowed.shape == (case.batch, case.num_heads, case.q_len, case.kv_len)
    except (ValueError, IndexError, RuntimeError, UnsupportedError):  # the mask requires other lengths
        return False


def _nearest(size: int, claimed: tuple[int, ...]) -> int:
    return min(claimed, key=lambda width: (abs(width - size), width))


def _length(length: int, declaration: Declaration) -> int:
    """Round a length up to one that a kernel claims, or down to the maximum. The special lengths 0 and 1 are kept."""
    if length <= 1:
        return length
    step, least = declaration.lengths.get("multiple", 1), declaration.lengths.get("min", 0)
    up = max(-(-length // step), -(-least // step)) * step
    most = declaration.lengths.get("max", up)
    return min(up, most // step * step)
