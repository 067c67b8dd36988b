"""Arrays of key sets, stored as sorted ranges, and bounds on the keys that a mask allows.

A `Spans` stores one set of integers per *row group*, as a structure of arrays: ``starts`` and ``ends`` of shape
``[groups, slots]``. Ranges are half-open, sorted and disjoint, with empty slots last. All operations are composed of
unions and complements. Each costs O(groups * slots) in NumPy, regardless of the number of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_FEW_SLOTS, _MANY_ROWS = 6, 512  # so many rows of at most this length are sorted faster column by column
_AT_ONCE = 1024  # groups whose ranges are read at a time: reading them one by one takes ten times as long


class KeyDomain(NamedTuple):
    """The range of existing keys for each row group, ``first <= key < stop``, both int64 ``[groups]``."""

    first: Ints
    stop: Ints


class Spans(NamedTuple):
    """One set of keys per row group, as sorted ranges: ``starts`` and ``ends``, int64 ``[groups, slots]``."""

    starts: Ints
    ends: Ints

    @classmethod
    def within(cls, domain: KeyDomain, first: Ints | int, stop: Ints | int) -> Spans:
        """Return one key range per group, ``first <= key < stop``, restricted to the group's domain."""
        starts = np.clip(first, domain.first, domain.stop)
        ends = np.clip(stop, starts, domain.stop)
        return cls(*_packed(starts[:, None], ends[:, None], domain))

    @classmethod
    def of(cls, starts: Ints, ends: Ints, domain: KeyDomain) -> Spans:
        """Return the sets of keys in the ranges ``starts <= key < ends``, int64 ``[groups, slots]``, and the domain."""
        first, stop = domain.first[:, None], domain.stop[:, None]
        return cls(*_packed(np.clip(starts, first, stop), np.clip(ends, first, stop), domain))

    @classmethod
    def everything(cls, domain: KeyDomain) -> Spans:
        """Return the set of all keys in each group's domain."""
        return cls(domain.first[:, None], domain.stop[:, None])

    @classmethod
    def nothing(cls, domain: KeyDomain) -> Spans:
        """Return an empty set of keys for each group."""
        return cls(domain.stop[:, None], domain.stop[:, None])

    def union(self, other: Spans, domain: KeyDomain) -> Spans:
        """Return the keys that are in at least one of the two sets, for each group."""
        starts = np.concatenate([self.starts, other.starts], axis=1)
        ends = np.concatenate([self.ends, other.ends], axis=1)
        return Spans(*_packed(starts, ends, domain))

    def complement(self, domain: KeyDomain) -> Spans:
        """Return the keys of the domain that are not in the set: the gaps between the set's ranges."""
        starts = np.concatenate([domain.first[:, None], self.ends], axis=1)
        ends = np.concatenate([self.starts, domain.stop[:, None]], axis=1)
        return Spans(*_packed(starts, ends, domain))

    def intersection(self, other: Spans, domain: KeyDomain) -> Spans:
        """Return the keys that are in both sets, for each group."""
        if self.starts.shape[1] == other.starts.shape[1] == 1:
            return Spans(*_packed(np.maximum(self.starts, other.starts), np.minimum(self.ends, other.ends), domain))
        gaps = self.complement(domain).union(other.complement(domain), domain)
        return gaps.complement(domain)

    def minus(self, other: Spans, domain: KeyDomain) -> Spans:
        """Return the keys that are in this set but not in ``other``, for each group."""
        return self.complement(domain).union(other, domain).complement(domain)

    def where(self, choose: npt.NDArray[np.bool_], other: Spans) -> Spans:
        """Return this key set for groups where ``choose`` (bool ``[groups]``) is True, and ``other`` elsewhere."""
        slots = max(self.starts.shape[1], other.starts.shape[1])
        a, b = self._widened(slots), other._widened(slots)
        return Spans(
            np.where(choose[:, None], a.starts, b.starts),
            np.where(choose[:, None], a.ends, b.ends),
        )

    def shifted(self, offset: Ints, domain: KeyDomain) -> Spans:
        """Return each group's key set, shifted by the group's ``offset`` and restricted to a domain."""
        return Spans.of(self.starts + offset[:, None], self.ends + offset[:, None], domain)

    def at(self, which: Ints) -> Spans:
        """Return the key sets of the groups with the given indices."""
        return Spans(self.starts[which], self.ends[which])

    def sizes(self) -> Ints:
        """Return the number of keys in each set, int64 ``[groups]``."""
        return (self.ends - self.starts).sum(axis=1)

    def ranges(self, rows: Ints, step: int = 1) -> Iterator[tuple[range, ...]]:
        """Yield each group's non-empty key ranges, with only the keys at multiples of ``step`` from the group's row."""
        for some in range(0, len(rows), _AT_ONCE):
            chunk = slice(some, some + _AT_ONCE)
            numbers = (self.starts[chunk].tolist(), self.ends[chunk].tolist(), rows[chunk].tolist())
            for starts, ends, row in zip(*numbers, strict=True):
                firsts = starts if step == 1 else [start + (row - start) % step for start in starts]
                yield tuple([range(first, end, step) for first, end in zip(firsts, ends, strict=True) if first < end])

    def _widened(self, slots: int) -> Spans:
        # An empty slot repeats the end of the last range, which keeps the order and adds no key.
        missing = slots - self.starts.shape[1]
        if missing == 0:
            return self
        filler = np.repeat(self.ends[:, -1:], missing, axis=1)
        return Spans(np.concatenate([self.starts, filler], axis=1), np.concatenate([self.ends, filler], axis=1))


def _packed(starts: Ints, ends: Ints, domain: KeyDomain) -> tuple[Ints, Ints]:
    """Sort key ranges, join adjacent ranges and drop empty ranges. The arguments are overwritten."""
    stop = domain.stop[:, None]
    empty = starts >= ends
    np.copyto(starts, stop, where=empty)
    np.copyto(ends, stop, where=empty)
    if starts.shape[1] == 1:
        return starts, ends
    # Starts and ends may be sorted separately: the k-th start opens a segment iff the k ranges that start before it
    # have already ended, and these have the k smallest ends. Slots that open or close no segment are moved to the end.
    _sort_rows(starts)
    _sort_rows(ends)
    inner = starts[:, 1:] <= ends[:, :-1]
    slots = starts.shape[1] - int(inner.sum(axis=1).min(initial=starts.shape[1] - 1))
    np.copyto(starts[:, 1:], stop, where=inner)
    np.copyto(ends[:, :-1], stop, where=inner)
    _sort_rows(starts)
    _sort_rows(ends)
    # A last segment that starts at the end of the domain is an empty slot.
    return starts[:, :slots].copy(), ends[:, :slots].copy()


def _sort_rows(values: Ints) -> None:
    """Sort each row in place. Many short rows are sorted by columns, because NumPy's sort has overhead per row."""
    rows, slots = values.shape
    if slots > _FEW_SLOTS or rows < _MANY_ROWS:
        values.sort(axis=1, kind="stable")  # rows have one or two sorted parts, which this kind only merges
        return
    for last in range(slots - 1, 0, -1):
        for slot in range(last):
            left, right = values[:, slot], values[:, slot + 1]
            larger = np.maximum(left, right)
            np.minimum(left, right, out=left)
            right[:] = larger


class Bounds(NamedTuple):
    """Bounds on the keys that a mask allows for a group of rows.

    ``any_row`` contains every key that is visible to at least one row; ``all_rows`` contains only keys that are visible
    to all rows.
    """

    any_row: Spans
    all_rows: Spans

    @classmethod
    def exactly(cls, keys: Spans) -> Bounds:
        """Return exact key bounds for a mask that allows the same keys for all rows of a group."""
        return cls(keys, keys)

    @property
    def is_exact(self) -> bool:
        """Whether the bounds are exact. Masks signal this by using the same object for both sets, which saves work."""
        return self.any_row is self.all_rows

    @classmethod
    def unknown(cls, domain: KeyDomain) -> Bounds:
        """Return bounds for an unknown mask: any key may be visible to some row, and no key is known to be."""
        return cls(Spans.everything(domain), Spans.nothing(domain))

    def both(self, other: Bounds, domain: KeyDomain) -> Bounds:
        """Return the key bounds of the intersection ``a & b`` of two masks, given the bounds of each."""
        any_row = self.any_row.intersection(other.any_row, domain)
        both_exact = self.is_exact and other.is_exact
        return Bounds(any_row, any_row if both_exact else self.all_rows.intersection(other.all_rows, domain))

    def either(self, other: Bounds, domain: KeyDomain) -> Bounds:
        """Return the key bounds of the union ``a | b`` of two masks, given the bounds of each."""
        any_row = self.any_row.union(other.any_row, domain)
        both_exact = self.is_exact and other.is_exact
        return Bounds(any_row, any_row if both_exact else self.all_rows.union(other.all_rows, domain))

    def inverted(self, domain: KeyDomain) -> Bounds:
        """Return the key bounds of an inverted mask: keys visible to no row become visible to all, and vice versa."""
        any_row = self.all_rows.complement(domain)
        return Bounds(any_row, any_row if self.is_exact else self.any_row.complement(domain))

    def where(self, choose: npt.NDArray[np.bool_], other: Bounds) -> Bounds:
        """Return these key bounds for groups where ``choose`` (bool ``[groups]``) is True, and ``other`` elsewhere."""
        if choose.all():
            return self
        return Bounds(self.any_row.where(choose, other.any_row), self.all_rows.where(choose, other.all_rows))


def shift_range(span: range, by: int) -> range:
    """Return a range of keys with ``by`` added to its start and stop."""
    return range(span.start + by, span.stop + by, span.step)
