"""Plans for decoding: the tiles of a single row, which is the last one, for each new token.

Planning one row costs as much as planning a few hundred, since bounds are arrays over groups of rows. So the bounds of
many upcoming rows are computed at once, and each decoded token reads the bounds of one row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from saccade.plan import ALL, Box, ColumnRange, Groups, Plan, Ranges, Rule, Tile
from saccade.plan.key_ranges import Ints, KeyDomain, Spans, shift_range

ROWS = 128  # rows whose bounds are computed at once; blocks begin at multiples, so that decoding steps share them


class _Term(NamedTuple):
    """One of a decode plan's disjoint masks, with the fully and the partially visible keys of each upcoming row."""

    rule: Rule
    step: int
    all_rows: list[Ranges]
    unsure: list[Ranges]


class RowsAhead:
    """Bounds of a mask for consecutive rows that decoding has yet to reach. Each row has keys up to its own position.

    Args:
        rule: the mask; it must not distinguish batch items.
        first: position of the first row.
        kv_first: position of the first key.
        rows: number of rows.

    Cost: that of planning a single row, plus a little for each row.
    """

    def __init__(self, rule: Rule, first: int, kv_first: int, rows: int = ROWS):
        self.first, self.kv_first = first, kv_first
        position = np.arange(first, first + rows, dtype=np.int64)
        keys = KeyDomain(np.full_like(position, kv_first), position + 1)
        self.terms = [_bounds_ahead(own, step, position, keys) for step, own in rule.terms()]


class RowPlan(Plan):
    """The plan of a single row of decoding: one tile for each of the disjoint masks in `Rule.terms`.

    Args:
        rows: bounds of a block of rows that contains the row.
        position: position of the row.
        shape: (batch, heads, 1, kv_len).
    """

    def __init__(self, rows: RowsAhead, position: int, shape: tuple[int, int, int, int]):
        tiles, width, is_sure, row = [], 0, True, position - rows.first
        for rule, step, all_rows, unsure in rows.terms:
            strips = []
            for keys in all_rows[row]:
                strips.append(ColumnRange(keys, True))
            for keys in unsure[row]:
                partial = rule.partial(Box(ALL, range(position, position + 1, step), keys))
                if partial is not False:
                    strips.append(ColumnRange(keys, partial))
            if rows.kv_first:
                strips = [ColumnRange(shift_range(keys, -rows.kv_first), partial) for keys, partial in strips]
            if len(strips) > 1:
                strips.sort(key=_start_of)
            for keys, partial in strips:
                width += len(keys)
                is_sure &= partial is True
            tiles.append(Tile(slice(0, shape[0]), slice(0, shape[1]), range(0, 1, step), tuple(strips), rule))
        self.shape, self.memo, self.tiles, self.count = shape, {}, tuple(tiles), len(tiles)
        self.overlaps = len(tiles) > 1
        self.pairs = shape[0] * shape[1] * width
        self.is_full = is_sure and width == shape[3] and not self.overlaps


def _bounds_ahead(rule: Rule, step: int, position: Ints, keys: KeyDomain) -> _Term:
    bounds = rule.bounds(Groups(np.full_like(position, ALL), position, position, step), keys)
    unsure = Spans.nothing(keys) if bounds.is_exact else bounds.any_row.minus(bounds.all_rows, keys)
    return _Term(rule, step, *(list(spans.ranges(position, step)) for spans in (bounds.all_rows, unsure)))


def _start_of(strip: ColumnRange) -> int:
    return strip.keys.start
