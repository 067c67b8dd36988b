"""Places: where the tokens of a cache stand, and where the next ones will."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches.following import from_here
from saccade.engine.at_positions import check_positions

__all__ = ["Places"]


class Places(NamedTuple):
    """One after the other from ``first`` on, as long as nothing else is said; a table after that.

    A range costs nothing, however long; a table costs 8 bytes for each token, and plans that are made anew.

    Args:
        first: where the first token stands.
        length: number of columns.
        table: int64 ``[batch, length]``, -1 where no token stands; None as long as tokens follow one by one.
        upcoming: int64 ``[batch]``, where the next token of each item will stand; given with the table.
    """

    first: int = 0
    length: int = 0
    table: Tensor | None = None
    upcoming: Tensor | None = None

    @classmethod
    def of(cls, table: Tensor) -> Places:
        """Those of a table, int64 ``[batch, length]``."""
        return cls(0, table.shape[1], table, _after(table))

    @property
    def held(self) -> range | Tensor:
        """Of the tokens held."""
        return range(self.first, self.first + self.length) if self.table is None else self.table

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        if self.table is None or self.upcoming is None:
            return 0
        return self.table.untyped_storage().nbytes() + self.upcoming.untyped_storage().nbytes()

    def next(self, q_len: int) -> range | Tensor:
        """Of the next tokens."""
        return from_here(self.first + self.length if self.upcoming is None else self.upcoming, q_len)

    def extended(
        self, positions: range | Tensor | None, batch: int, q_len: int, device: torch.device, where: str
    ) -> tuple[Places, range | Tensor]:
        """With new tokens, and the positions of these."""
        if positions is None:
            positions = self.next(q_len)
            if isinstance(positions, range):
                return Places(self.first, self.length + q_len), positions
        else:
            check_positions(positions, "positions", batch, q_len, where)
        if not q_len:
            return self, positions  # a call of no tokens says nothing of where tokens stand
        if self.table is None:
            follows = _one_by_one(positions, None if self.length == 0 else self.first + self.length)
            if follows is not None:
                return Places(follows if self.length == 0 else self.first, self.length + q_len), _run(follows, q_len)
        new = _table(positions, batch, device)
        old = self.held if self.table is None else self.table
        table = torch.cat([_table(old, batch, device), new], 1)
        return Places(0, self.length + q_len, table, _after(table)), new

    def reordered(self, rows: Tensor) -> Places:
        """Of other batch items."""
        if self.table is None or self.upcoming is None:
            return self
        rows = rows.to(self.table.device)
        return self._replace(table=self.table[rows], upcoming=self.upcoming[rows])

    def cropped(self, length: int) -> Places:
        """Of the first columns."""
        if self.table is None:
            return Places(self.first, length)
        table = self.table[:, :length].clone()
        return Places(0, length, table, _after(table)) if length else Places()


def _run(first: int, length: int) -> range:
    return range(first, first + length)


def _one_by_one(positions: range | Tensor, expected: int | None) -> int | None:
    """The first position if all items have the same ones, without gaps, beginning where expected; else None."""
    if isinstance(positions, range):
        if len(positions) > 1 and positions.step != 1:
            return None
        first = positions.start
    else:
        if not positions.numel():  # of a batch of nobody
            return expected
        first = int(positions.flatten()[0])
        run = torch.arange(first, first + positions.shape[-1], device=positions.device)
        if first < 0 or not bool((positions == run).all()):
            return None
    return first if expected in (None, first) else None


def _table(positions: range | Tensor, batch: int, device: torch.device) -> Tensor:
    if isinstance(positions, range):
        positions = torch.arange(positions.start, positions.stop, positions.step)
    positions = positions.to(device)
    return (positions[None] if positions.dim() == 1 else positions).expand(batch, -1)


def _after(table: Tensor) -> Tensor:
    """Behind the last token of each item; 0 for an item without one."""
    return (table.amax(1) + 1).clamp(min=0)
