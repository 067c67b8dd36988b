"""Coarse: a mask that applies another mask to blocks of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import SIZE_BITS, check_field
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.validation import check_type


@dataclasses.dataclass(frozen=True)
class Coarse(Mask):
    """A mask on blocks of positions: ``rule`` is applied to block indices (positions divided by ``block_size``).

    >>> from saccade.masks import Causal
    >>> print(Coarse(Causal(), 2).picture(4))
    1 1 . .
    1 1 . .
    1 1 1 1
    1 1 1 1

    Args:
        rule: a mask on block indices.
        block_size: number of positions along one side of a block, an int of at least 1.

    Raises:
        TypeError: the rule is not a mask.
        ValueError: the block size is below 1.
    """

    rule: Mask
    block_size: int

    def __post_init__(self) -> None:
        check_type("rule", self.rule, Mask, "be a mask")
        check_field(self, "block_size", 1, bits=SIZE_BITS)

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self.rule,)

    @property
    def domain(self) -> Domain:
        return self.rule.domain.times(self.block_size)

    @property
    def hides_keys_only(self) -> bool:
        return self.rule.hides_keys_only

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row, column = (x.div(self.block_size, rounding_mode="floor") for x in (q, kv))
        return self.rule.allows(b, h, row, column)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        size = self.block_size
        rows = Groups(groups.batch, np.floor_divide(groups.first, size), np.floor_divide(groups.last, size))
        columns = KeyDomain(np.floor_divide(keys.first, size), -np.floor_divide(-keys.stop, size))
        inner = self.rule.bounds(rows, columns)
        any_row = Spans.of(inner.any_row.starts * size, inner.any_row.ends * size, keys)
        if inner.is_exact:
            return Bounds.exactly(any_row)
        return Bounds(any_row, Spans.of(inner.all_rows.starts * size, inner.all_rows.ends * size, keys))

    def partial(self, box: Box) -> bool | Hashable:
        size = self.block_size
        rows, keys = (range(x[0] // size, x[-1] // size + 1) for x in (box.rows, box.keys))
        partial = self.rule.partial(Box(box.batch, rows, keys))
        if isinstance(partial, bool):
            return partial
        inside = (box.rows[0] % size, box.rows.step, len(box.rows), box.keys[0] % size, len(box.keys))
        return (Coarse, size, inside, partial)

    def cuts(self, batch: int, rows: range) -> Ints:
        return np.arange(rows.start // self.block_size * self.block_size, rows.stop, self.block_size)
