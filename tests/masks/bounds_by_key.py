"""Bounds written out, key by key."""

import numpy as np

from saccade.plan.key_ranges import KeyDomain, Spans

__all__ = ["universe_of", "written"]


def universe_of(of: tuple[int, int], groups: int) -> KeyDomain:
    """The same keys for each of so many groups."""
    return KeyDomain(*(np.full(groups, edge) for edge in of))


def written(spans: Spans, of: tuple[int, int]) -> np.ndarray:
    """bool [groups, keys of the universe]."""
    found = np.zeros((len(spans.starts), of[1] - of[0]), dtype=bool)
    for row, ranges in zip(found, spans.ranges(np.zeros(len(found), dtype=np.int64)), strict=True):
        for part in ranges:
            assert of[0] <= part.start < part.stop <= of[1]
            row[part.start - of[0] : part.stop - of[0]] = True
    return found
