"""Reading: the columns that a step over chosen blocks reads, gathered a few key heads at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.caches.columns import Columns
from saccade.caches.scratch import scratch

__all__ = ["Reading"]

_SCRATCH = 1 << 23  # bytes of keys that are gathered at once: they are read again while still in a core's cache


class Reading:
    """The columns that a step reads: whole blocks, and all of the unfinished one.

    Args:
        keys, values: of all tokens.
        chosen: finished blocks, int64 ``[batch, kv_heads, blocks]``.
        spare: which of these are not to be seen, bool of the same shape; None if none is.
        unfinished: columns of the unfinished block.
        size: columns of a block.
    """

    def __init__(
        self, keys: Columns, values: Columns, chosen: Tensor, spare: Tensor | None, unfinished: range, size: int
    ):
        self.chosen, self._spare = chosen, spare
        start, stop = unfinished.start, unfinished.stop
        self.newest: tuple[Tensor, Tensor] | None = None  # with gradients, in place of the last column
        self._start, self._stop, self._size = start, stop, size
        blocks = keys.by_block, values.by_block
        assert blocks[0] is not None
        assert blocks[1] is not None
        self._blocks = (blocks[0], blocks[1])
        held = len(self._blocks[0]) // (chosen.shape[0] * chosen.shape[1])  # blocks allocated for each key head
        rows = torch.arange(chosen.shape[0] * chosen.shape[1], device=chosen.device)[:, None]
        # The unfinished block is read as a whole one, and what stands behind its last column is cut off.
        read = F.pad(chosen, (0, 1), value=start // size) if stop > start else chosen
        self._index = rows * held + read.flatten(0, 1)
        self.count = chosen.shape[2] * size + stop - start

    @property
    def column_bytes(self) -> int:
        """Bytes of one key and its value, in one key head."""
        return sum(x.shape[1] // self._size * x.element_size() for x in self._blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values read."""
        return self.chosen.shape[0] * self.chosen.shape[1] * self.count * self.column_bytes

    def portions(self) -> list[range]:
        """Key heads of all items, as many at once as the scratch memory takes."""
        rows = len(self._index)
        each = self.count * self._blocks[0].shape[1] // self._size * self._blocks[0].element_size()
        step = max(1, _SCRATCH // max(1, each))
        return [range(i, min(i + step, rows)) for i in range(0, rows, step)]

    def read(self, rows: range) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, columns, width]`` of these key heads."""
        k, v = (self._gathered(name, table, rows) for name, table in zip(("keys", "values"), self._blocks, strict=True))
        if self.newest is None:
            return k, v
        new = (x.flatten(0, 1)[rows.start : rows.stop : rows.step] for x in self.newest)
        return tuple(torch.cat([x[:, :-1], own], 1) for x, own in zip((k, v), new, strict=True))  # type: ignore[return-value]

    def columns(self, rows: range) -> Tensor:
        """Which columns these are, int64 ``[rows, columns]``."""
        device = self.chosen.device
        blocks = self.chosen.flatten(0, 1)[rows.start : rows.stop : rows.step]
        whole = (blocks[:, :, None] * self._size + torch.arange(self._size, device=device)).flatten(1)
        rest = torch.arange(self._start, self._stop, device=device).expand(len(whole), -1)
        return torch.cat([whole, rest], 1)

    def is_spare(self, rows: range) -> Tensor | None:
        """Which of the columns are not to be seen, bool ``[rows, columns]``; None if none is."""
        if self._spare is None:
            return None
        spare = self._spare.flatten(0, 1)[rows.start : rows.stop : rows.step].repeat_interleave(self._size, 1)
        return F.pad(spare, (0, self._stop - self._start), value=False)

    def _gathered(self, name: str, table: Tensor, rows: range) -> Tensor:
        index = self._index[rows.start : rows.stop : rows.step]
        shape = (index.numel(), table.shape[1])
        # A graph keeps what it has seen: then the memory is not used again.
        out = scratch(name, shape, table) if self.newest is None else table.new_empty(shape)
        torch.index_select(table, 0, index.flatten(), out=out)
        return out.view(len(rows), index.shape[1] * self._size, table.shape[1] // self._size)[:, : self.count]
