"""Columns: tensors ``[batch, kv_heads, len, width]`` that grow at the end, written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.caches.memory import empty

__all__ = ["Columns"]

_SMALLEST = 16


class Columns:
    """Room for columns. It does not know how many of them count: its owner does, so that a failed call leaves no trace.

    Args:
        room: columns to allocate; None to grow, by doubling.
        multiple: columns are allocated in multiples of it, so that blocks of so many are rows of one table.
    """

    def __init__(self, room: int | None = None, multiple: int = 1):
        self._multiple = multiple
        self._room = None if room is None else self._rounded(room)
        self._held: Tensor | None = None
        self._is_shared = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self._held is None else self._held.nbytes

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of one batch item, over all heads; 0 before the first."""
        x = self._held
        return 0 if x is None else x.shape[1] * x.shape[3] * x.element_size()

    @property
    def like(self) -> tuple[int, int, int, torch.dtype, torch.device] | None:
        """(batch, kv_heads, width, dtype, device) of what is held; None before the first column."""
        x = self._held
        return None if x is None else (x.shape[0], x.shape[1], x.shape[3], x.dtype, x.device)

    def written(self, start: int, new: Tensor) -> Tensor:
        """Write ``new`` behind the first ``start`` columns; returns a view of all of them.

        Cost: a copy of ``new``; now and then, one of everything.
        """
        stop = start + new.shape[2]
        if self._held is None or stop > self._held.shape[2] or not self._is_ours():
            self._move(start, stop, new)
        held = self._held
        assert held is not None
        held.narrow(2, start, stop - start).copy_(new.detach() if new.requires_grad else new)
        return held.narrow(2, 0, stop)

    def first(self, length: int) -> Tensor | None:
        """A view of the first columns."""
        return None if self._held is None else self._held.narrow(2, 0, length)

    @property
    def by_block(self) -> Tensor | None:
        """All columns allocated, ``[batch * kv_heads * blocks, multiple * width]``: a view."""
        x = self._held
        # Sizes are written out: of no elements, none could be told from the others.
        return None if x is None else x.view(x.shape[:3].numel() // self._multiple, self._multiple * x.shape[3])

    def reorder(self, rows: Tensor, length: int) -> None:
        """Keep these batch items of the first ``length`` columns."""
        old = self._held
        if old is None:
            return
        held = empty(old, (len(rows), *old.shape[1:]))
        for i, row in enumerate(rows.tolist()):
            held[i, :, :length].copy_(old[row, :, :length])
        self._held, self._is_shared = held, False

    def fork(self) -> Columns:
        """The same columns; whoever writes first moves to memory of its own."""
        other = Columns(self._room, self._multiple)
        other._held = self._held
        self._is_shared = other._is_shared = True
        return other

    def _is_ours(self) -> bool:
        """Whether the memory may be written to: memory made in inference mode may not be outside of it."""
        assert self._held is not None
        return not self._is_shared and (torch.is_inference_mode_enabled() or not self._held.is_inference())

    def _move(self, start: int, stop: int, new: Tensor) -> None:
        old = self._held
        room = self._room
        if room is None:
            room = max(_SMALLEST, stop) if old is None else old.shape[2]
            if old is not None and stop > room:
                room = max(stop, 2 * room)
            room = self._rounded(room)
        held = empty(new, (*new.shape[:2], room, new.shape[3]))
        if old is not None and start:
            held[:, :, :start].copy_(old[:, :, :start])
        self._held, self._is_shared = held, False

    def _rounded(self, room: int) -> int:
        return -(-room // self._multiple) * self._multiple
