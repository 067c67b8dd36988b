"""Domain: the positions that a rule covers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["EVERYWHERE", "Domain"]


class Domain(NamedTuple):
    """The positions of queries and of keys that a rule covers, as ranges with step 1; None for all.

    A rule made for 4 positions says nothing of a fifth. Attention over 5 keys refuses it: to hide the fifth would give
    rows of 0 silently.
    """

    rows: range | None = None
    keys: range | None = None

    def both(self, other: Domain) -> Domain:
        """Positions that both cover."""
        return Domain(_both(self.rows, other.rows), _both(self.keys, other.keys))

    def either(self, other: Domain) -> Domain:
        """Positions that one of them covers, and those between."""
        return Domain(_either(self.rows, other.rows), _either(self.keys, other.keys))

    def after(self, length: int) -> Domain:
        """Moved behind ``length`` other positions, which see nothing."""
        return Domain(*(None if x is None else range(x.stop + length) for x in self))

    def times(self, size: int) -> Domain:
        """In positions, where this counts blocks of ``size`` of them."""
        return Domain(*(None if x is None else range(x.start * size, x.stop * size) for x in self))


EVERYWHERE = Domain()


def _both(one: range | None, other: range | None) -> range | None:
    if one is None or other is None:
        return other if one is None else one
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _either(one: range | None, other: range | None) -> range | None:
    if one is None or other is None:
        return None
    return range(min(one.start, other.start), max(one.stop, other.stop))
