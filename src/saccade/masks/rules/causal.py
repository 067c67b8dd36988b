"""Causal: the mask under which a query sees no later keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import numpy as np
from torch import Tensor

from saccade.masks.mask import Mask
from saccade.plan import Box, Groups, Triangle
from saccade.plan.key_ranges import Bounds, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints


@argument_hints(more="a mask is a rule on positions and has no length: Causal() fits any")
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """The causal mask: a query sees the keys at its own position and before.

    The last query is at the position of the last key (bottom-right), so fewer queries than keys are the last tokens of
    the sequence:

    >>> print(Causal().picture(4))
    1 . . .
    1 1 . .
    1 1 1 .
    1 1 1 1
    >>> print(Causal().picture(2, 4))
    1 1 1 .
    1 1 1 1
    """

    is_causal = True
    is_relative = True

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= q

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        # For several rows, exclude the first row's own key, although all rows see it: the rest is the square triangle
        # that kernels support natively.
        sure_stop = np.where(groups.last > groups.first, groups.first, groups.first + 1)
        return Bounds(Spans.within(keys, keys.first, groups.last + 1), Spans.within(keys, keys.first, sure_stop))

    def partial(self, box: Box) -> bool | Hashable:
        if box.keys[-1] <= box.rows[0]:
            return True
        if box.keys[0] > box.rows[-1]:
            return False
        return Triangle(len(box.rows), len(box.keys), (box.rows[0] - box.keys[0]) // box.rows.step)
