"""Blocks: a block-sparse mask, with a layout for all heads or one per head."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import SIZE_BITS, Table, check_readable
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, type_error, value_error
from saccade.support.validation import check_int

Layout = tuple[tuple[tuple[bool, ...], ...], ...]


@argument_hints()
@dataclasses.dataclass(frozen=True)
class Blocks(Mask):
    """A block-sparse mask: queries in block i see the keys in block j if ``layout[i][j]`` is True.

    >>> print(Blocks([[True, False], [True, True]], 2).picture(4))
    1 1 . .
    1 1 . .
    1 1 1 1
    1 1 1 1

    Positions outside the layout attend to nothing and are never visible; attention over them raises an error.

    Args:
        layout: bool ``[blocks, blocks]``, or ``[heads, blocks, blocks]`` for a layout per head (nested lists or a
            tensor, which is copied).
        block_size: number of positions along one side of a block, an int of at least 1.

    Raises:
        TypeError: the layout is not bool.
        ValueError: the layout has a different shape, or the block size is below 1.

    Reference: Gray, Radford & Kingma 2017, "GPU Kernels for Block-Sparse Weights".
    """

    layout: Layout
    block_size: int
    _table: ClassVar[Table]

    def __init__(self, layout: Tensor | Sequence[Sequence[bool]] | Sequence[Sequence[Sequence[bool]]], block_size: int):
        array = _layout_array(layout)
        block_size = check_int("block_size", block_size, below=1 << SIZE_BITS)
        nested = array.reshape(-1, *array.shape[-2:]).tolist()
        object.__setattr__(self, "layout", tuple(tuple(tuple(row) for row in head) for head in nested))
        object.__setattr__(self, "block_size", block_size)
        object.__setattr__(self, "_table", Table(np.array(self.layout)))

    @property
    def shape(self) -> tuple[int, int]:
        return (1, len(self.layout))

    @property
    def domain(self) -> Domain:
        rows, columns = (len(side) * self.block_size for side in (self.layout[0], self.layout[0][0]))
        return Domain(range(rows), range(columns))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        table = self._table.on(q.device)
        heads, rows, columns = table.shape
        row, column = q.div(self.block_size, rounding_mode="floor"), kv.div(self.block_size, rounding_mode="floor")
        inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
        return table[h if heads > 1 else 0, row.clamp(0, rows - 1), column.clamp(0, columns - 1)] & inside

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        table = np.asarray(self.layout)
        low, high = (np.floor_divide(edge, self.block_size) for edge in (groups.first, groups.last))
        outside = (low < 0) | (high >= table.shape[1])
        # Cumulative number of rows that see each block. A group sees a block if this number grows within the group.
        counts = np.concatenate([np.zeros_like(table[:, :1], dtype=np.int64), np.cumsum(table, axis=1)], axis=1)
        first, stop = (np.clip(edge, 0, table.shape[1]) for edge in (low, high + 1))
        hits = counts[:, stop] - counts[:, first]  # [heads, groups, blocks]
        any_row = (hits > 0).any(0)
        all_rows = (hits == (stop - first)[:, None]).all(0) & ~outside[:, None]
        starts = np.broadcast_to(np.arange(table.shape[2]) * self.block_size, any_row.shape)
        return Bounds(*(Spans.of(starts, starts + self.block_size * which, keys) for which in (any_row, all_rows)))

    def partial(self, box: Box) -> bool | Hashable:
        size = self.block_size
        rows = range(box.rows[0] // size, box.rows[-1] // size + 1)
        columns = range(box.keys[0] // size, box.keys[-1] // size + 1)
        table = np.asarray(self.layout)
        inside = rows[0] >= 0 and rows[-1] < table.shape[1] and columns[0] >= 0 and columns[-1] < table.shape[2]
        part = table[:, max(rows[0], 0) : rows[-1] + 1, max(columns[0], 0) : columns[-1] + 1]
        if not part.any():
            return False
        if inside and part.all():
            return True
        return (self, box.rows, box.keys)

    def cuts(self, batch: int, rows: range) -> Ints:
        return np.arange(len(self.layout[0]) + 1) * self.block_size

    def __repr__(self) -> str:
        layouts = [[list(row) for row in head] for head in self.layout]
        return f"Blocks({layouts if len(layouts) > 1 else layouts[0]}, {self.block_size})"


def _layout_array(layout: object) -> npt.NDArray[np.bool_]:
    """Convert a block layout to an array with two or three dimensions."""
    if isinstance(layout, Tensor):
        check_readable("layout", layout)
        layout = layout.detach().cpu()
    try:
        array = np.asarray(layout)
    except (TypeError, ValueError, RuntimeError):  # for example, rows of different lengths
        rule = "be bool, in rows of equal lengths"
        raise type_error("layout", rule, shown(layout), hint="torch.stack joins tensors") from None
    if array.dtype != np.bool_ and array.size:
        got = array.dtype if array.dtype.kind in "biufc" else shown(layout)
        raise type_error("layout", "be bool, True = may attend", got, hint="layout.bool()")
    if array.ndim not in (2, 3) or 0 in array.shape:
        rule = "have shape [blocks, blocks] or [heads, blocks, blocks]"
        raise value_error("layout", rule, list(array.shape))
    return array
