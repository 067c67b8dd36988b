"""Positions: where the tokens of an axis stand, as a run or a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import describe, hidden_by_vmap, type_error, value_error
from saccade.support.torch_modes import has_values, is_mapped, is_transformed
from saccade.support.validation import is_integer

__all__ = ["GivenPositions", "Positions", "behind", "can_be_read"]

_LARGEST = 1 << 62  # sums of positions must fit int64


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Where the tokens of an axis stand. Whoever is handed this value need not check it again.

    A run costs nothing, however long; a table costs 8 bytes for each token.

    Args:
        run: the positions of all batch items, as a range; None if they are in the table.
        table: int64 ``[len]`` or ``[batch | 1, len]``; -1 means that no token stands here.

    Example:
        >>> Positions.of([[-1, 0, 1], [0, 1, 2]], "example").first is None
        True
        >>> Positions.of(range(5, 8), "example").first
        5
    """

    run: range | None = None
    table: Tensor | None = None

    @classmethod
    def of(
        cls,
        given: GivenPositions,
        name: str = "positions",
        *,
        length: int | None = None,
        batch: int = 1,
    ) -> Positions:
        """What a user handed over, checked.

        Args:
            given: a range, an int64 tensor, or a list of ints (or one for each item).
            where, name: the function and its argument, for the error.
            length: number of tokens; any shape will do when None.
            batch: number of batch items.

        Raises:
            TypeError, ValueError: something else, another shape, a position below -1.
        """
        if type(given) is Positions:
            run = given.run
            if length is None or length == (len(given) if run is None else len(run)):
                return given
            given = given.given
        if isinstance(given, range):
            if length is not None and len(given) != length:
                raise value_error(name, f"hold {length} positions", len(given))
            if given and min(given[0], given[-1]) < 0:  # not min(given), which walks through it
                raise value_error(name, "start at 0 or later", given)
            return cls(given)
        table = _from_list(given, name) if isinstance(given, list | tuple) else given
        if not isinstance(table, Tensor) or table.dtype != torch.int64:
            got = str(getattr(table, "dtype", type(table).__name__)).removeprefix("torch.")
            raise type_error(name, "be a range, an int64 tensor or a list of ints", got)
        if length is not None and table.shape not in ((length,), (1, length), (batch, length)):
            raise value_error(name, f"have shape [{length}] or [{batch}, {length}]", list(table.shape))
        if length is not None and is_mapped(table):
            raise hidden_by_vmap(name)
        # Reading the contents would wait for any other device; there, all negative positions mean "no token".
        if can_be_read(table) and int(table.min()) < -1:
            facts, hint = [describe(name, table)], "-1 means that no token stands here"
            raise value_error(name, "be at least -1", "a smaller one", facts=facts, hint=hint)
        return cls(None, table)

    @classmethod
    def between(cls, start: int, stop: int) -> Positions:
        """One by one; as a table where this is traced, since a range would fix the length."""
        if torch.compiler.is_compiling():
            return cls(None, torch.arange(start, stop))
        return cls(range(start, stop))

    @property
    def given(self) -> range | Tensor:
        """The run or the table."""
        return self.table if self.run is None else self.run  # type: ignore[return-value]

    def __len__(self) -> int:
        return self.table.shape[-1] if self.run is None else len(self.run)  # type: ignore[union-attr]

    @property
    def first(self) -> int | None:
        """The position of the first token if the others follow one by one in all items; None if that is not known."""
        run = self.run
        return None if run is None or (run.step != 1 and len(run) > 1) else run.start

    @property
    def ends(self) -> tuple[int, int] | None:
        """The lowest and the highest position of a token; None if there is none, or only another device knows."""
        if self.run is not None:
            run = self.run
            return (min(run[0], run[-1]), max(run[0], run[-1])) if run else None
        table = self.table
        assert table is not None
        if not can_be_read(table) or is_transformed():
            return None
        found = table[table >= 0]
        return (int(found.min()), int(found.max())) if len(found) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return 0 if self.table is None else self.table.untyped_storage().nbytes()

    @property
    def after(self) -> int | Tensor:
        """Where the next token will stand: behind the last one, int64 ``[batch]`` where there is a table."""
        if self.run is not None:
            return self.run.stop
        table = torch.atleast_2d(self.on())
        return (table.amax(1) + 1).clamp(min=0) if table.shape[1] else table.new_zeros(len(table))

    def next(self, count: int) -> Positions:
        """Where the next tokens will stand, one by one behind the last token of each item."""
        return behind(self.after, count)

    def extended(self, new: Positions, batch: int, device: torch.device) -> tuple[Positions, Positions]:
        """These and then new ones, and the new ones: as runs where all follow one by one, else as tables."""
        run, added = self.run, new.run
        if not (added if new.table is None else new.table.shape[-1]):
            return self, new  # a call of no tokens says nothing of where tokens stand
        if run is not None and added is not None and added.step == 1 and (not run or run.stop == added.start):
            return Positions(range(run.start if run else added.start, added.stop)), new
        first = None if run is None else new.one_by_one()
        if run is not None and first is not None and (not run or run.stop == first):
            added = range(first, first + len(new))
            return Positions(range(run.start if run else first, added.stop)), Positions(added)
        old, table = (x.on(device).expand(batch, -1) for x in (self, new))
        return Positions(None, torch.cat([old, table], 1)), Positions(None, table)

    def one_by_one(self) -> int | None:
        """The first position if all items have the same ones, each behind the one before; None if not."""
        if self.run is not None:
            return self.run.start if self.run.step == 1 or len(self.run) == 1 else None
        table = self.on()
        if not table.numel():
            return None
        first = int(table[0, 0])
        run = torch.arange(first, first + table.shape[1], device=table.device)
        return first if first >= 0 and bool((table == run).all()) else None

    def reordered(self, rows: Tensor) -> Positions:
        """Of other batch items."""
        return self if self.table is None else Positions(None, self.table[rows.to(self.table.device)])

    def cropped(self, length: int) -> Positions:
        """Of the first tokens."""
        if self.table is None:
            assert self.run is not None
            return Positions(self.run[:length])
        return Positions(None, self.table[:, :length].clone()) if length else Positions(range(0))

    def on(self, device: torch.device | str | None = None) -> Tensor:
        """Written out, int64 ``[batch | 1, len]``; a run stands on the CPU if no device is named."""
        run = self.run
        if run is None:
            assert self.table is not None
            return torch.atleast_2d(self.table if device is None else self.table.to(device))
        return torch.arange(run.start, run.stop, run.step, device=device or "cpu")[None]


GivenPositions = Positions | range | Tensor | Sequence[int] | Sequence[Sequence[int]] | None
"""Positions as users hand them over; None for those that are usual."""


def behind(after: int | Tensor, count: int) -> Positions:
    """So many positions one by one: from a number on, or from one for each item, int64 ``[batch]``."""
    if isinstance(after, int):
        return Positions(range(after, after + count))
    return Positions(None, after[:, None] + torch.arange(count, device=after.device))


def can_be_read(x: Tensor) -> bool:
    """Whether x has elements that can be read: without waiting for a device, outside of a compiler and of ``vmap``."""
    if x.device.type != "cpu" or not x.numel() or torch.compiler.is_compiling():
        return False
    return has_values(x) and not is_mapped(x)


def _from_list(given: Sequence[Any], name: str) -> Tensor:
    rows = [row if isinstance(row, list | tuple) else [row] for row in given]
    if not all(is_integer(one) for row in rows for one in row):
        raise type_error(name, "be a range, an int64 tensor or a list of ints", "a list of something else")
    if len({len(row) for row in rows}) > 1 or len({isinstance(row, list | tuple) for row in given}) > 1:
        raise value_error(name, "have rows of one length", "rows of several lengths")
    if any(abs(int(one)) >= _LARGEST for row in rows for one in row):
        raise value_error(name, "be below 2**62", "a larger one")
    return torch.tensor(given, dtype=torch.int64, device="cpu")
