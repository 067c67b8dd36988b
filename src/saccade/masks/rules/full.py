"""Full: everyone may attend to everyone."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from torch import Tensor

from saccade.masks.mask import Mask
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Spans, Universe
from saccade.support.argument_hints import answers_class

__all__ = ["Full"]


@answers_class(more="a mask is a rule on positions and has no length: Full() fits any")
@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query may attend to every key; what ``mask=None`` means.

    >>> print(Full().picture(2, 3))
    1 1 1
    1 1 1
    """

    is_value = is_relative = True
    hides_keys_only = True

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # Written with q and kv so that it broadcasts like every other rule, also under vmap.
        return (q == q) & (kv == kv)

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        return Bounds.exactly(Spans.everything(keys))

    def residual(self, box: Box) -> bool | Hashable:
        return True
