"""Arrays of key sets, stored as sorted ranges, and bounds on the keys that a mask allows.

A `Spans` stores one set of integers per *row group*, as a structure of arrays: ``starts`` and ``ends`` of shape
``[groups, slots]``. Ranges are half-open, sorted and disjoint, with empty slots last. All operations are composed of
unions and complements. Each costs O(groups * slots) in NumPy, regardless of the number of keys.

There are many groups and few slots, and NumPy is fast along contiguous memory. The arrays are therefore stored in
Fortran order, slot after slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_FEW_SLOTS, _MANY_ROWS = 16, 512  # so many rows of at most this length are sorted faster slot by slot
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
        starts = np.minimum(np.maximum(first, domain.first), domain.stop)
        ends = np.minimum(np.maximum(stop, starts), domain.stop)
        return cls(*_packed(starts[:, None], ends[:, None], domain))

    @classmethod
    def of(cls, starts: Ints, ends: Ints, domain: KeyDomain) -> Spans:
        """Return the sets of keys in the ranges ``starts <= key < ends``, int64 ``[groups, slots]``, and the domain."""
        return cls(*_packed(_restricted(starts, domain), _restricted(ends, domain), domain))

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
        return Spans(*_packed(_joined(self.starts, other.starts), _joined(self.ends, other.ends), domain))

    def complement(self, domain: KeyDomain) -> Spans:
        """Return the keys of the domain that are not in the set: the gaps between the set's ranges."""
        starts = _joined(domain.first[:, None], self.ends)
        ends = _joined(self.starts, domain.stop[:, None])
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
        return Spans(_joined(self.starts, filler), _joined(self.ends, filler))


def _restricted(edges: Ints, domain: KeyDomain) -> Ints:
    """Return a copy of the starts or ends of ranges, moved into each group's domain."""
    inside = np.maximum(edges, domain.first[:, None], order="F")
    return np.minimum(inside, domain.stop[:, None], out=inside)


def _joined(left: Ints, right: Ints) -> Ints:
    """Return the slots of two arrays with the same groups in a new array."""
    slots = left.shape[1]
    both = np.empty((len(left), slots + right.shape[1]), dtype=np.int64, order="F")
    both[:, :slots], both[:, slots:] = left, right
    return both


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
    sort_rows(starts)
    sort_rows(ends)
    inner = starts[:, 1:] <= ends[:, :-1]
    if len(inner) and not inner.any():
        return starts, ends
    slots = starts.shape[1] - int(inner.sum(axis=1).min(initial=starts.shape[1] - 1))
    np.copyto(starts[:, 1:], stop, where=inner)
    np.copyto(ends[:, :-1], stop, where=inner)
    sort_rows(starts)
    sort_rows(ends)
    # A last segment that starts at the end of the domain is an empty slot.
    return starts[:, :slots].copy("F"), ends[:, :slots].copy("F")


def sort_rows(values: Ints) -> None:
    """Sort each row of an array ``[groups, slots]`` in place.

    Many short rows are sorted slot by slot, because NumPy's sort has overhead per row: Batcher's odd-even merge sort
    compares pairs of slots in a fixed order.
    """
    rows, slots = values.shape
    if not (values[:, :-1] > values[:, 1:]).any():
        return
    if slots > _FEW_SLOTS or rows < _MANY_ROWS:
        values.sort(axis=1)
        return
    for left, right in _compared_slots(slots):
        larger = np.maximum(values[:, left], values[:, right])
        np.minimum(values[:, left], values[:, right], out=values[:, left])
        values[:, right] = larger


@lru_cache
def _compared_slots(slots: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of slots that Batcher's odd-even merge sort compares, in order (Knuth, volume 3, 5.2.2 M)."""
    pairs, part = [], 1
    while part < slots:
        distance = part
        while distance:
            for start in range(distance % part, slots - distance, 2 * distance):
                for left in range(start, min(start + distance, slots - distance)):
                    if left // (2 * part) == (left + distance) // (2 * part):
                        pairs.append((left, left + distance))
            distance //= 2
        part *= 2
    return tuple(pairs)


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
