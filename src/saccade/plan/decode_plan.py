"""Plans for decoding, where each new token needs a plan for a single row.

Bounds are computed as arrays over groups of rows, so planning one row takes as long as planning a few hundred. The
bounds of many upcoming rows are therefore computed at once, and each decoded token uses the bounds of its row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from saccade.plan import ALL, Box, ColumnRange, Groups, Plan, Ranges, Rule, Tile
from saccade.plan.key_ranges import Ints, KeyDomain, Spans, shift_range

ROWS = 128  # rows whose bounds are computed at once; blocks start at multiples, so decoding steps share them


class _Term(NamedTuple):
    """A mask of a decode plan, with each upcoming row's visible keys and the keys that the bounds leave undecided."""

    rule: Rule
    step: int
    all_rows: list[Ranges]
    undecided: list[Ranges]


class RowsAhead:
    """Bounds of a mask for the next rows to be decoded. Each row has keys up to its own position.

    Args:
        rule: the mask, which must be the same for all batch items.
        first: position of the first row.
        kv_first: position of the first key.
        rows: number of rows.

    Cost: about as much as planning a single row, plus a small amount for each additional row.
    """

    def __init__(self, rule: Rule, first: int, kv_first: int, rows: int = ROWS):
        self.first, self.kv_first = first, kv_first
        position = np.arange(first, first + rows, dtype=np.int64)
        keys = KeyDomain(np.full_like(position, kv_first), position + 1)
        self.terms = [_bounds_ahead(term, step, position, keys) for step, term in rule.terms()]


class RowPlan(Plan):
    """The plan of a single decoded row, with one tile for each of the disjoint masks in `Rule.terms`.

    Args:
        rows: bounds for a block of rows that includes this row.
        position: position of the row.
        shape: (batch, heads, 1, kv_len).
    """

    def __init__(self, rows: RowsAhead, position: int, shape: tuple[int, int, int, int]):
        tiles, width, is_fully_visible, row = [], 0, True, position - rows.first
        for rule, step, all_rows, undecided in rows.terms:
            strips = []
            for keys in all_rows[row]:
                strips.append(ColumnRange(keys, True))
            for keys in undecided[row]:
                partial = rule.partial(Box(ALL, range(position, position + 1, step), keys))
                if partial is not False:
                    strips.append(ColumnRange(keys, partial))
            if rows.kv_first:
                strips = [ColumnRange(shift_range(keys, -rows.kv_first), partial) for keys, partial in strips]
            if len(strips) > 1:
                strips.sort(key=_start_of)
            for keys, partial in strips:
                width += len(keys)
                is_fully_visible &= partial is True
            tiles.append(Tile(slice(0, shape[0]), slice(0, shape[1]), range(0, 1, step), tuple(strips), rule))
        self.shape, self.memo, self.tiles, self.count = shape, {}, tuple(tiles), len(tiles)
        self.overlaps = len(tiles) > 1
        self.pairs = shape[0] * shape[1] * width
        self.is_full = is_fully_visible and width == shape[3] and not self.overlaps


def _bounds_ahead(rule: Rule, step: int, position: Ints, keys: KeyDomain) -> _Term:
    bounds = rule.bounds(Groups(np.full_like(position, ALL), position, position, step), keys)
    undecided = Spans.nothing(keys) if bounds.is_exact else bounds.any_row.minus(bounds.all_rows, keys)
    return _Term(rule, step, *(list(spans.ranges(position, step)) for spans in (bounds.all_rows, undecided)))


def _start_of(strip: ColumnRange) -> int:
    return strip.keys.start
