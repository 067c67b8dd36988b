"""Full: the mask by which every query may attend to every key."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from torch import Tensor

from saccade.masks.mask import Mask
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints


@argument_hints(more="a mask is a rule on positions and has no length: Full() fits any")
@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """The full mask: every query may attend to every key; the meaning of ``mask=None``.

    >>> print(Full().picture(2, 3))
    1 1 1
    1 1 1
    """

    is_value = is_relative = True
    hides_keys_only = True

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # Depend on q and kv, so that the result broadcasts like that of every other mask, also under vmap.
        return (q == q) & (kv == kv)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        return Bounds.exactly(Spans.everything(keys))

    def partial(self, box: Box) -> bool | Hashable:
        return True
