"""Grouped-query attention: products in which several query heads share a key head, without expanding the keys.

Head h reads key head ``h // (heads // kv_heads)``. The heads of a group are adjacent, so they are folded into the rows.
Axis legend: batch B · heads H · kv_heads G · rows R · columns C · width D.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.plan import Ranges


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply each query head by its key head, ``left [B, H, R, C] @ right [B, G, C, D] -> [B, H, R, D]``."""
    return grouped(torch.matmul, left, right)


def grouped(function: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Return ``function(left, right)``, called with the query heads of each group in ``left`` folded into the rows."""
    if left.shape[1] == right.shape[1]:
        return function(left, right)
    out = function(folded(left, right.shape[1]), right)
    return out.reshape(*left.shape[:3], out.shape[3])


def transposed_product(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """Compute ``left.mT [B, H, C, R] @ right [B, H, R, D] -> [B, G, C, D]``, summed over the heads of each group."""
    return folded(left, groups).mT @ folded(right, groups)


def folded(x: Tensor, groups: int) -> Tensor:
    """Fold the query heads of each group into the rows, ``[B, H, R, D] -> [B, G, H // G * R, D]``."""
    batch, heads, rows, width = x.shape
    return x if heads == groups else x.reshape(batch, groups, heads // groups * rows, width)


def groups_of(heads: slice, num_heads: int, num_kv_heads: int) -> slice:
    """Return the slice of key heads for a slice of query heads, which must be a single head or whole groups."""
    if num_kv_heads == 0:
        return slice(0, 0)
    share = num_heads // num_kv_heads
    return slice(heads.start // share, (heads.stop - 1) // share + 1)


_SEVERAL = 4  # from this number of ranges on, testing for regularity pays off


def at(x: Tensor, span: range, dim: int) -> Tensor:
    """Return a view of ``x`` at the indices ``span`` along ``dim``, such as some rows or some keys."""
    if span.step == 1:
        return x.narrow(dim, span.start, len(span))
    return x[(slice(None),) * dim + (slice(span.start, span.stop, span.step),)]


def take(x: Tensor, ranges: Ranges, dim: int) -> Tensor:
    """Return ``x`` at the given ranges of indices along ``dim``: a view for a single range, a copy for several."""
    if len(ranges) == 1:
        return at(x, ranges[0], dim)
    if len(ranges) >= _SEVERAL and _is_regular(ranges):
        first, width, gap = ranges[0].start, len(ranges[0]), ranges[1].start - ranges[0].start
        # Copying equally spaced windows at once is twice as fast as concatenating them.
        windows = x.narrow(dim, first, gap * (len(ranges) - 1) + width).unfold(dim, width, gap)
        return windows.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return torch.cat([at(x, span, dim) for span in ranges], dim)


def add_at(total: Tensor, part: Tensor, ranges: Ranges, dim: int) -> None:
    """Add ``part`` to ``total`` in place, at the given ranges of indices along ``dim`` (the transpose of `take`)."""
    start = 0
    for span in ranges:
        at(total, span, dim).add_(part.narrow(dim, start, len(span)))
        start += len(span)


def joined(columns: Ranges) -> Ranges:
    """Join adjacent ranges of columns, because a single range of keys is a view, whereas several require a copy."""
    spans: list[range] = []
    for span in columns:
        last = spans[-1] if spans else None
        if last is not None and last.step == span.step and last.start + len(last) * last.step == span.start:
            spans[-1] = range(last.start, span.stop, last.step)
        else:
            spans.append(span)
    return tuple(spans)


def _is_regular(ranges: Ranges) -> bool:
    """Return whether ranges of step 1 have equal lengths and equal gaps, so that one view can cover them."""
    gap = ranges[1].start - ranges[0].start
    return all(
        span.step == 1 and len(span) == len(ranges[0]) and span.start == ranges[0].start + number * gap
        for number, span in enumerate(ranges)
    )
