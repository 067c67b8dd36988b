"""Reading from and adding to a tensor at ranges of indices along one axis."""

import torch
from torch import Tensor

from saccade.plan import Ranges

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
