"""Window: a mask in which each query sees nearby keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from torch import Tensor

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import POSITION_BITS
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints
from saccade.support.validation import check_int

_UNLIMITED = 1 << POSITION_BITS  # wider than any sequence; sums of positions and widths must fit int64


@argument_hints(
    left="Window(4, 4) sees 4 keys back and 4 ahead, Window(4, 0) only 4 back",
    right="Window(4, 4) sees 4 keys back and 4 ahead, Window(4, 0) only 4 back; "
    "from_sliding_window(5) takes the value used by transformers",
)
@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """A window mask: a query sees the key at its position, ``left`` keys before it and ``right`` keys after it.

    ``Window(256, 0)`` allows 257 keys. `sliding_window` counts as most papers do: ``sliding_window(256)`` allows the
    last 256 keys, including the query's own.

    >>> print(Window(2, 0).picture(5))
    1 . . . .
    1 1 . . .
    1 1 1 . .
    . 1 1 1 .
    . . 1 1 1
    >>> print(Window(1, 1).picture(4))
    1 1 . .
    1 1 1 .
    . 1 1 1
    . . 1 1

    Args:
        left, right: numbers of keys, *not counting* the key at the query's position, at least 0; None means no limit.

    Raises:
        ValueError: a width is negative or not an integer.
    """

    left: int | None
    right: int | None
    is_relative = True

    def __post_init__(self) -> None:
        hint = "it counts the keys on that side without the query's own key; None means no limit"
        for name in ("left", "right"):
            width = getattr(self, name)
            if width is not None:
                width = check_int(name, width, 0, hint=hint)
                object.__setattr__(self, name, None if width >= _UNLIMITED else width)

    @property
    def keys(self) -> int | None:
        """Number of keys that a query sees, including its own; None if a side has no limit."""
        return None if self.left is None or self.right is None else self.left + 1 + self.right

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = q - kv
        if self.left is None:
            return distance == distance if self.right is None else distance >= -self.right
        near = distance <= self.left
        return near if self.right is None else near & (distance >= -self.right)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        def between(low_row: object, high_row: object) -> Spans:
            first = keys.first if self.left is None else low_row - self.left  # type: ignore[operator]
            stop = keys.stop if self.right is None else high_row + self.right + 1  # type: ignore[operator]
            return Spans.within(keys, first, stop)

        any_row = between(groups.first, groups.last)
        if (groups.first == groups.last).all():
            return Bounds.exactly(any_row)
        return Bounds(any_row, between(groups.last, groups.first))

    def partial(self, box: Box) -> bool | Hashable:
        least = box.rows[0] - box.keys[-1]
        most = box.rows[-1] - box.keys[0]
        low = least if self.right is None else -self.right
        high = most if self.left is None else self.left
        if low <= least and most <= high:
            return True
        if most < low or least > high:
            return False
        return (self, box.rows.step, len(box.rows), len(box.keys), box.rows[0] - box.keys[0])
