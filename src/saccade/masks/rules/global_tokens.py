"""Global: a mask with a few global tokens, which see all keys and are visible to all queries."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Hashable, Iterable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import Table, ints_of
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.validation import check_bool


@argument_hints(positions="Global([0]): positions of the tokens that see all keys and are visible to all queries")
@dataclasses.dataclass(frozen=True)
class Global(Mask):
    """A mask of global tokens, which see all keys and are visible to all queries, as in ``window | Global([0])``.

    >>> print(Global([1]).picture(4))
    . 1 . .
    1 1 1 1
    . 1 . .
    . 1 . .
    >>> print(Global([1], sees=False).picture(3))
    . 1 .
    . 1 .
    . 1 .

    Args:
        positions: positions of the global tokens: ints of at least 0 in any order (or an int tensor).
        sees: whether global tokens may attend to every key.
        seen: whether every query may attend to the global tokens.

    Raises:
        TypeError: the positions are not a list.
        ValueError: a position is negative or not an integer, or ``sees`` and ``seen`` are both False.

    Reference: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.
    """

    positions: tuple[int, ...]
    sees: bool = True
    seen: bool = True
    _table: ClassVar[Table]

    def __init__(self, positions: Iterable[int], sees: bool = True, seen: bool = True):
        numbers = global_positions(positions)
        sees, seen = check_bool("sees", sees), check_bool("seen", seen)
        if not (sees or seen):
            raise value_error("sees or seen", "be true", "neither")
        object.__setattr__(self, "positions", tuple(sorted(set(numbers))))
        object.__setattr__(self, "sees", sees)
        object.__setattr__(self, "seen", seen)
        object.__setattr__(self, "_table", Table(np.array(self.positions, dtype=np.int64)))

    @property
    def hides_keys_only(self) -> bool:
        return not self.sees

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        by_query = self._is_global(q) if self.sees else q != q
        by_key = self._is_global(kv) if self.seen else kv != kv
        return by_query | by_key

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        everything, nothing = Spans.everything(keys), Spans.nothing(keys)
        visible = nothing
        if self.seen and self.positions:
            starts, ends = self._runs()[:, None].repeat(len(groups.first), axis=1)
            visible = Spans.of(starts, ends, keys)
        if not self.sees:
            return Bounds.exactly(visible)
        hits = self._count(groups.first, groups.last + 1)
        all_hit = (hits == groups.rows) & (groups.step == 1)  # with a larger step, the count includes other rows
        any_row = everything.where(hits > 0, visible)
        return Bounds(any_row, any_row if ((hits > 0) == all_hit).all() else everything.where(all_hit, visible))

    def partial(self, box: Box) -> bool | Hashable:
        rows = self._inside(box.rows) if self.sees else ()
        columns = self._inside(box.keys) if self.seen else ()
        if len(rows) == len(box.rows) or len(columns) == len(box.keys):
            return True
        if not rows and not columns:
            return False
        return (Global, len(box.rows), len(box.keys), rows, columns)

    def cuts(self, batch: int, rows: range) -> Ints:
        return self._runs().ravel() if self.sees else np.zeros(0, dtype=np.int64)

    def _is_global(self, x: Tensor) -> Tensor:
        """Return whether each position belongs to a global token, by bisection."""
        if not self.positions:
            return x != x
        tokens = self._table.on(x.device)
        low, left = torch.zeros_like(x), len(self.positions)
        while left > 1:  # like searchsorted, but one entry at a time, which compilers can fuse
            half = left // 2
            low = low + half * (tokens[low + half] <= x)
            left -= half
        return tokens[low] == x

    def _runs(self) -> Ints:
        """Return the starts and stops of runs of adjacent global tokens, ``[2, runs]``; tiles are split there."""
        where = np.asarray(self.positions, dtype=np.int64)
        is_new = np.diff(where, prepend=-2) != 1
        return np.stack([where[is_new], where[np.roll(is_new, -1)] + 1])

    def _count(self, first: Ints, stop: Ints) -> Ints:
        where = np.asarray(self.positions, dtype=np.int64)
        return np.searchsorted(where, stop) - np.searchsorted(where, first)

    def _inside(self, span: range) -> tuple[int, ...]:
        inside = self.positions[bisect_left(self.positions, span.start) : bisect_left(self.positions, span.stop)]
        return tuple(span.index(position) for position in inside if position in span)


def global_positions(positions: object) -> tuple[int, ...]:
    """Validate the positions of global tokens and return them as a tuple.

    Raises:
        TypeError, ValueError: the positions are not a list, or a position is negative or not an integer.
    """
    return ints_of("positions", positions, is_ordered=False, hint="write a single position as a list: [0]")
