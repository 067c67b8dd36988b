"""Prefix: a mask in which every query sees the first positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from torch import Tensor

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import check_field
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints


@argument_hints()
@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """A prefix mask: every query sees the first ``length`` positions.

    Combine it with other masks: ``Causal() | Prefix(n)`` is a prefix LM.

    >>> from saccade.masks import Causal
    >>> print((Causal() | Prefix(3)).picture(5))
    1 1 1 . .
    1 1 1 . .
    1 1 1 . .
    1 1 1 1 .
    1 1 1 1 1

    Args:
        length: number of positions at the beginning, an int of at least 0.

    Raises:
        ValueError: an argument does not meet the conditions above.

    Reference: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1.
    """

    length: int
    hides_keys_only = True

    def __post_init__(self) -> None:
        check_field(self, "length", 0)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < self.length) & (q == q)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        return Bounds.exactly(Spans.within(keys, keys.first, self.length))

    def partial(self, box: Box) -> bool | Hashable:
        if box.keys[-1] < self.length:
            return True
        if box.keys[0] >= self.length:
            return False
        return (self, len(box.rows), box.keys)
