"""RowPlan: the plan of a last row, which decoding asks for token by token.

Planning one row costs as much as planning a few hundred, since bounds are arrays over groups of rows. So the bounds of
many rows ahead are asked for at once, and each step reads its own.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from saccade.plan import ALL, Box, Groups, Plan, Ranges, Rule, Strip, Tile
from saccade.plan.spans import Ints, Spans, Universe

__all__ = ["RowPlan", "RowsAhead"]

_ROWS = 128


class RowPlan(Plan):
    """The tiles of a single row of queries: one for each term of the rule."""

    def __init__(self, shape: tuple[int, int, int, int], tiles: tuple[Tile, ...]):
        super().__init__(shape, ())
        self.overlaps = len(tiles) > 1
        self._tiles = tiles

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return self._tiles

    @cached_property
    def pairs(self) -> int:
        """How many query-key pairs the tiles hold, over batch and heads."""
        return self.shape[0] * self.shape[1] * sum(tile.width for tile in self._tiles)

    @cached_property
    def is_full(self) -> bool:
        """True if every query may attend to every key."""
        sure = all(strip.residual is True for tile in self._tiles for strip in tile.columns)
        return sure and self.pairs == math.prod(self.shape)

    def __len__(self) -> int:
        return len(self._tiles)


class _Term(NamedTuple):
    """A term of the rule, and the ranges of keys that each row is sure of, or not."""

    rule: Rule
    step: int
    sure: list[Ranges]
    unsure: list[Ranges]


class RowsAhead:
    """What a rule says about consecutive rows, each of which sees keys up to its own position at most.

    Args:
        rule: must not tell batch items apart.
        first: position of the first row.
        kv_first: position of the first key.
        rows: how many rows.

    Cost: that of planning one row, and a little for each.
    """

    def __init__(self, rule: Rule, first: int, kv_first: int, rows: int = _ROWS):
        self._first, self._kv_first = first, kv_first
        position = np.arange(first, first + rows, dtype=np.int64)
        keys = Universe(np.full_like(position, kv_first), position + 1)
        self._terms = [_asked(own, step, position, keys) for step, own in rule.terms()]

    @staticmethod
    def start_of(position: int) -> int:
        """Where the block of rows begins that holds a position, so that steps share blocks."""
        return position - position % _ROWS

    def plan(self, position: int, shape: tuple[int, int, int, int]) -> RowPlan:
        """The plan of one of the rows."""
        tiles = (self._tile(term, position, shape) for term in self._terms)
        return RowPlan(shape, tuple(tiles))

    def _tile(self, term: _Term, position: int, shape: tuple[int, int, int, int]) -> Tile:
        row, kv_first, step = position - self._first, self._kv_first, term.step
        strips = [Strip(_from(keys, kv_first), True) for keys in term.sure[row]]
        for keys in term.unsure[row]:
            residual = term.rule.residual(Box(ALL, range(position, position + 1, step), keys))
            if residual is not False:
                strips.append(Strip(_from(keys, kv_first), residual))
        strips.sort(key=_start)
        return Tile(slice(0, shape[0]), slice(0, shape[1]), range(0, 1, step), tuple(strips), term.rule)


def _asked(rule: Rule, step: int, position: Ints, keys: Universe) -> _Term:
    bounds = rule.bounds(Groups(np.full_like(position, ALL), position, position, step), keys)
    unsure = Spans.nothing(keys) if bounds.is_exact else bounds.needed.minus(bounds.sure, keys)
    return _Term(rule, step, _ranges(bounds.sure, position, step), _ranges(unsure, position, step))


def _ranges(spans: Spans, position: Ints, step: int) -> list[Ranges]:
    found = []
    for starts, ends, row in zip(spans.starts.tolist(), spans.ends.tolist(), position.tolist(), strict=True):
        spread = ((start + (row - start) % step, end) for start, end in zip(starts, ends, strict=True))
        found.append(tuple(range(start, end, step) for start, end in spread if start < end))
    return found


def _from(keys: range, first: int) -> range:
    return keys if first == 0 else range(keys.start - first, keys.stop - first, keys.step)


def _start(strip: Strip) -> int:
    return strip.keys.start
