"""Segments: a causal mask in which a query sees its segment and some tokens before it (Transformer-XL)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np
from torch import Tensor

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import SIZE_BITS, check_field
from saccade.masks.rules.causal import Causal
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints


@argument_hints(
    memory="Segments(4, 2) sees its segment of 4 and the last 2 tokens before it, Segments(4, 0) only the segment"
)
@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """A segment mask: a query sees itself, earlier tokens of its segment, and ``memory`` tokens before the segment.

    Segments are ``segment`` positions long, and the first one begins at 0. The number of visible keys grows from token
    to token and drops at the start of the next segment, whereas a window moves with the query.

    >>> print(Segments(3, 2).picture(7))
    1 . . . . . .
    1 1 . . . . .
    1 1 1 . . . .
    . 1 1 1 . . .
    . 1 1 1 1 . .
    . 1 1 1 1 1 .
    . . . . 1 1 1

    Args:
        segment: number of positions in a segment, at least 1.
        memory: number of visible tokens before the segment, at least 0.

    Raises:
        ValueError: an argument does not meet the conditions above.

    Reference: Dai et al. 2019, arXiv:1901.02860, section 3.2 (Transformer-XL).
    """

    segment: int
    memory: int
    is_causal = True

    def __post_init__(self) -> None:
        check_field(self, "segment", 1, bits=SIZE_BITS)
        check_field(self, "memory", 0, bits=SIZE_BITS)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (kv >= q.div(self.segment, rounding_mode="floor") * self.segment - self.memory)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        low, high = (np.floor_divide(row, self.segment) * self.segment - self.memory for row in groups[1:3])
        sure_stop = np.where(groups.last > groups.first, groups.first, groups.first + 1)  # as in `Causal`
        return Bounds(Spans.within(keys, low, groups.last + 1), Spans.within(keys, high, sure_stop))

    def partial(self, box: Box) -> bool | Hashable:
        low, high = (row // self.segment * self.segment - self.memory for row in (box.rows[0], box.rows[-1]))
        if box.keys[0] >= high:
            return Causal().partial(box)
        if box.keys[-1] < low:
            return False
        shape = (box.rows.step, len(box.rows), box.keys.step, len(box.keys))
        return (self, *shape, box.rows[0] % self.segment, box.rows[0] - box.keys[0])

    def cuts(self, batch: int, rows: range) -> Ints:
        return np.arange(rows.start // self.segment * self.segment, rows.stop, self.segment)
