"""The key blocks that a decoding step reads (`BlockRead`), and the columns visible to it (`VisibleColumns`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.caches.buffers import reused
from saccade.caches.call_arguments import Call
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.support.numerics import any_true
from saccade.support.torch_modes import is_plain

_AT_ONCE = 1 << 23  # bytes of keys to gather at a time, few enough to stay in a core's cache


class BlockRead:
    """The columns that a decoding step reads: the selected blocks, and the unfinished block at the end.

    Args:
        keys, values: cached keys and values, ``[batch, kv_heads, room, width]``. The number of allocated columns,
            ``room``, is a multiple of ``size``.
        chosen: indices of the selected finished blocks, int64 ``[batch, kv_heads, blocks]``.
        spare: bool with the shape of ``chosen``, True for entries that only pad ``chosen`` and are masked; None if
            there are none.
        unfinished: the columns of the unfinished block; may be empty.
        size: number of columns in a block.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, chosen: Tensor, spare: Tensor | None, unfinished: range, size: int
    ):
        self.chosen, self._spare = chosen, spare
        start, stop = unfinished.start, unfinished.stop
        self.newest: tuple[Tensor, Tensor] | None = None  # new key and value with gradients, read as last column
        self._start, self._stop, self._size = start, stop, size
        # A block is a row. Sizes are explicit, since -1 is ambiguous for tensors without elements.
        count = keys.shape[:3].numel() // size
        self._blocks = keys.view(count, size * keys.shape[3]), values.view(count, size * values.shape[3])
        per_head = keys.shape[2] // size  # blocks allocated for each key head
        rows = torch.arange(chosen.shape[0] * chosen.shape[1], device=chosen.device)[:, None]
        # The unfinished block is read in full, and the columns after its last token are cut off.
        read = F.pad(chosen, (0, 1), value=start // size) if stop > start else chosen
        self._index = rows * per_head + read.flatten(0, 1)
        self.count = chosen.shape[2] * size + stop - start

    @property
    def column_bytes(self) -> int:
        """Size of one column (a key and its value in one key head) in bytes."""
        return sum(x.shape[1] // self._size * x.element_size() for x in self._blocks)

    @property
    def ranges(self) -> KeyRanges:
        """The columns that the step reads, as key ranges with one row for each key head of each batch item."""
        stop = self._stop
        first = self.chosen.flatten(0, 1).sort(1).values * self._size
        last = first + self._size
        if self._stop > self._start:
            first, last = F.pad(first, (0, 1), value=self._start), F.pad(last, (0, 1), value=stop)
        starts, ends = (x[:, None].numpy(force=True) for x in (first, last))
        return KeyRanges(starts, ends, stop)

    @property
    def nbytes(self) -> int:
        """Size of all keys and values in the blocks that the step reads, in bytes."""
        return self.chosen.shape[0] * self.chosen.shape[1] * self.count * self.column_bytes

    def portions(self) -> list[slice]:
        """Return slices of the (item, head) rows, each small enough for its selected keys to fit into one buffer."""
        row_bytes = self.count * self._blocks[0].shape[1] // self._size * self._blocks[0].element_size()
        step = max(1, _AT_ONCE // max(1, row_bytes))
        return [slice(i, i + step) for i in range(0, len(self._index), step)]

    def read(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the selected keys and values for a slice of (item, head) rows, ``[rows, columns, width]`` each."""
        k, v = (self._gathered(name, table, rows) for name, table in zip(("keys", "values"), self._blocks, strict=True))
        if self.newest is None:
            return k, v
        new_k, new_v = (x.flatten(0, 1)[rows] for x in self.newest)
        return torch.cat([k[:, :-1], new_k], 1), torch.cat([v[:, :-1], new_v], 1)

    def columns(self, rows: slice) -> Tensor:
        """Return the column indices that a step reads for a slice of (item, head) rows, int64 ``[rows, columns]``."""
        device = self.chosen.device
        blocks = self.chosen.flatten(0, 1)[rows]
        whole = (blocks[:, :, None] * self._size + torch.arange(self._size, device=device)).flatten(1)
        rest = torch.arange(self._start, self._stop, device=device).expand(len(whole), -1)
        return torch.cat([whole, rest], 1)

    def is_spare(self, rows: slice) -> Tensor | None:
        """Return which columns only pad the selection and are masked, bool ``[rows, columns]``.

        If there are no such columns, return None.
        """
        if self._spare is None:
            return None
        spare = self._spare.flatten(0, 1)[rows].repeat_interleave(self._size, 1)
        return F.pad(spare, (0, self._stop - self._start), value=False)

    def _gathered(self, name: str, table: Tensor, rows: slice) -> Tensor:
        """Gather the selected blocks of one tensor into a reused buffer."""
        index = self._index[rows]
        shape = (index.numel(), table.shape[1])
        # An autograd graph stores its inputs, so the memory is not reused if there is one. Fake tensors have no memory.
        out = reused(name, shape, table) if self.newest is None and is_plain(table) else table.new_empty(shape)
        torch.index_select(table, 0, index.flatten(), out=out)
        return out.view(len(index), index.shape[1] * self._size, table.shape[1] // self._size)[:, : self.count]


class VisibleColumns(NamedTuple):
    """The cached columns that are visible to the single new token of a step, and their positions.

    Args:
        allowed: bool ``[batch | 1, heads | 1, 1, columns]``, True at visible columns; None if all are visible.
        real: bool ``[batch | 1, columns]``, False at padding.
        is_all_real: whether there is no padding.
        kv_positions: a range, or int64 ``[batch, columns]``.
    """

    allowed: Tensor | None
    real: Tensor
    is_all_real: bool
    kv_positions: range | Tensor

    @classmethod
    def of(cls, call: Call) -> VisibleColumns:
        """Return the cached columns that are visible to the single new token of a call."""
        device, rule, kv_positions = call.query.device, call.mask, call.kv_positions.given
        if isinstance(kv_positions, range) and call.attends_to_all_earlier:
            return cls(
                None, torch.ones(1, 1, dtype=torch.bool, device=device).expand(1, len(kv_positions)), True, kv_positions
            )
        kv = call.kv_positions.on(device)
        real = kv >= 0
        allowed = real[:, None, None]
        if rule is not None:
            batch, heads = call.query.shape[:2] if call.differs_between_heads else (1, 1)
            b = torch.arange(batch, device=device)[:, None, None, None]
            h = torch.arange(heads, device=device)[None, :, None, None]
            allowed = allowed & rule.allows(b, h, call.table[:, None, :, None], kv[:, None, None, :])
        return cls(allowed, real, isinstance(kv_positions, range) or not any_true(~real), kv_positions)

    def tokens(self, blocks: int, size: int) -> Tensor:
        """Return the number of real tokens in each of the first ``blocks`` blocks, int64 ``[batch | 1, blocks]``."""
        return self.real[:, : blocks * size].unflatten(1, (blocks, size)).sum(2)

    def positions(self, read: BlockRead, rows: slice) -> Tensor:
        """Return the positions of the columns that a step reads, int64 ``[rows, columns]``; -1 for masked columns."""
        columns = read.columns(rows)
        if isinstance(self.kv_positions, range):
            return columns + self.kv_positions.start
        batch, kv_heads = read.chosen.shape[:2]
        items = torch.arange(batch, device=columns.device).repeat_interleave(kv_heads)[rows]
        where = self.kv_positions[items].gather(1, columns)
        spare = read.is_spare(rows)
        return where if spare is None else where.masked_fill(spare, -1)
