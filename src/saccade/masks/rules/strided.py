"""Strided: a mask in which each query sees every ``step``-th key."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from torch import Tensor

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import check_field
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints


@argument_hints()
@dataclasses.dataclass(frozen=True)
class Strided(Mask):
    """A strided mask: a query sees the keys whose distance from it is a multiple of ``step``, itself included.

    >>> print(Strided(2).picture(4))
    1 . 1 .
    . 1 . 1
    1 . 1 .
    . 1 . 1

    Kernels process every ``step``-th row and key, as views without copies. If the mask is joined with other masks by
    ``|``, the results are merged using their log-sum-exp (lse).

    Args:
        step: distance between two adjacent visible keys, an int of at least 1.

    Raises:
        ValueError: an argument does not meet the conditions above.

    Reference: Child et al. 2019, arXiv:1904.10509, section 4.3.
    """

    step: int
    is_relative = True

    def __post_init__(self) -> None:
        check_field(self, "step", 1)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv) % self.step == 0

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        everything = Spans.everything(keys)
        # In a group whose stride is a multiple of the mask's step, every row sees all keys that any row sees.
        return Bounds(everything, everything if groups.step % self.step == 0 else Spans.nothing(keys))

    def partial(self, box: Box) -> bool | Hashable:
        offset = (box.rows[0] - box.keys[0]) % self.step
        if box.rows.step % self.step == 0 and box.keys.step % self.step == 0:
            return offset == 0
        return (self, box.rows.step, len(box.rows), len(box.keys), offset)

    def terms(self) -> Sequence[tuple[int, Mask]]:
        return [(self.step, self)]
