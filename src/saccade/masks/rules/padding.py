"""Padding: a mask under which no query sees padding keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import POSITION_BITS, Table, ints_of
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, value_error
from saccade.support.validation import check_choice, check_int


@argument_hints(lengths="Padding([3, 5]): number of tokens in each item; from_attention_mask takes a tensor of 0 and 1")
@dataclasses.dataclass(frozen=True)
class Padding(Mask):
    """A padding mask: only the ``lengths[b]`` tokens of batch item b are visible.

    Pass it to a module, which joins it with the module's pattern: ``mha(x, mask=Padding(lengths))``. Only keys are
    masked, so the caller should ignore the outputs at padding.

    >>> print(Padding([2]).picture(3))
    1 1 .
    1 1 .
    1 1 .
    >>> print(Padding([2], side="left", padded_len=3).picture(3))
    . 1 1
    . 1 1
    . 1 1

    Args:
        lengths: number of tokens in each batch item, at least 0 (ints or an int tensor).
        side: side of the padding, "right" (after the tokens) or "left" (before them).
        padded_len: length of the padded items; required for "left".

    Raises:
        TypeError: the lengths are not a list.
        ValueError: lengths are negative or not integers, the side is unknown, ``padded_len`` is below the longest
            item, or it is missing for "left".
    """

    lengths: tuple[int, ...]
    side: Literal["right", "left"]
    padded_len: int | None
    _table: ClassVar[Table]
    hides_keys_only = True
    is_fact_of_batch = True

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        side: Literal["right", "left"] = "right",
        padded_len: int | None = None,
    ):
        numbers = ints_of("lengths", lengths, hint="write the length of a single item as a list: [5]")
        if not numbers:
            raise value_error("lengths", "contain a length for each batch item", "none")
        check_choice("side", side, ("right", "left"))
        if padded_len is not None:
            padded_len = check_int("padded_len", padded_len, 0, below=1 << POSITION_BITS)
        if (side == "left" and padded_len is None) or (padded_len is not None and padded_len < max(numbers)):
            hint = "the padded length determines where a left-padded item starts"
            rule = "be at least the longest item" + (" for side='left'" if side == "left" else "")
            raise value_error("padded_len", rule, f"{padded_len} with lengths {shown(numbers)}", hint=hint)
        object.__setattr__(self, "lengths", numbers)
        object.__setattr__(self, "side", side)
        object.__setattr__(self, "padded_len", padded_len if side == "left" else None)
        object.__setattr__(self, "_table", Table(np.stack(self._edges())))

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.lengths), 1)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        item = b if len(self.lengths) > 1 else 0
        start, stop = self._table.on(kv.device).unbind(0)
        return (kv >= start[item]) & (kv < stop[item])

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        start, stop = self._edges()
        if len(self.lengths) > 1:
            if (groups.batch == ALL).any():
                all_rows = Spans.within(keys, start.max(), np.maximum(start.max(), stop.min()))
                return Bounds(Spans.within(keys, start.min(), stop.max()), all_rows)
            start, stop = start[groups.batch], stop[groups.batch]
        return Bounds.exactly(Spans.within(keys, start, stop))

    def partial(self, box: Box) -> bool | Hashable:
        start, stop = self._edges()
        if len(self.lengths) > 1 and box.batch != ALL:
            start, stop = start[box.batch : box.batch + 1], stop[box.batch : box.batch + 1]
        if box.keys[0] >= start.max() and box.keys[-1] < stop.min():
            return True
        if box.keys[-1] < start.min() or box.keys[0] >= stop.max():
            return False
        return (self, box.batch, len(box.rows), box.keys)

    def _edges(self) -> tuple[Ints, Ints]:
        lengths = np.asarray(self.lengths, dtype=np.int64)
        if self.side == "left" and self.padded_len is not None:
            return self.padded_len - lengths, np.full_like(lengths, self.padded_len)
        return np.zeros_like(lengths), lengths

    @property
    def table(self) -> Tensor:
        """Start and end of the tokens of each batch item, int64 ``[2, items]``, on the CPU."""
        return self._table.on(torch.device("cpu"))


def padding_of_table(table: Tensor) -> Padding:
    """Return the padding mask for a table like `Padding.table`."""
    start, stop = table.tolist()
    if not any(start):
        return Padding(stop)
    return Padding([end - first for first, end in zip(start, stop, strict=True)], "left", stop[0])
