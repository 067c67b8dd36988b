"""Positions: validated token positions, stored as a range or as a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import describe, hidden_by_vmap, type_error, value_error
from saccade.support.numerics import any_true
from saccade.support.torch_modes import has_values, is_mapped, is_tracing, is_transformed
from saccade.support.validation import is_integer

_LARGEST = 1 << 62  # sums of positions must fit into int64


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
    """Validated token positions, for queries, keys or the columns of a cache.

    A range takes no memory, whatever its length; a table takes 8 bytes per token. A cache that does not store the order
    of tokens needs only the last position of each batch item; see `ending_before` and `advanced`.

    Args:
        run: the positions of all batch items as a range; None if they are in the table.
        table: int64 ``[len]`` or ``[batch | 1, len]``; -1 marks padding.

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
        """Validate positions that a user passed and convert them to `Positions`.

        Args:
            given: a range, an int64 tensor, or a list of ints (or one list for each batch item).
            name: name of the argument, for the error message.
            length: expected number of tokens; any shape is accepted when None.
            batch: number of batch items.

        Raises:
            TypeError, ValueError: the positions have the wrong type or shape, or a position is below -1.
        """
        if type(given) is Positions:
            run, stored_table = given.run, given.table
            # For a table, read the size from its shape, because `len` would fix a symbolic size during tracing.
            size = len(run) if stored_table is None else stored_table.shape[-1]  # type: ignore[arg-type]
            if length is None or length == size:
                return given
            given = given.given
        if isinstance(given, range):
            if length is not None and len(given) != length:
                raise value_error(name, f"hold {length} positions", len(given))
            if given and min(given[0], given[-1]) < 0:  # min(given) would iterate over the whole range
                raise value_error(name, "start at 0 or later", given)
            return cls(given)
        table = _from_list(given, name) if isinstance(given, list | tuple) else given
        if not isinstance(table, Tensor) or table.dtype != torch.int64:
            got = str(getattr(table, "dtype", type(table).__name__)).removeprefix("torch.")
            raise type_error(name, "be a range, an int64 tensor or a list of ints", got)
        if length is not None and not _has_length(table, length, batch):
            raise value_error(name, f"have shape [{length}] or [{batch}, {length}]", list(table.shape))
        if length is not None and is_mapped(table):
            raise hidden_by_vmap(name)
        # Reading values from another device would wait for it, so there all negative positions count as padding.
        if can_be_read(table) and int(table.min()) < -1:
            facts, hint = [describe(name, table)], "-1 marks padding"
            raise value_error(name, "be at least -1", "a smaller position", facts=facts, hint=hint)
        return cls(None, table)

    @classmethod
    def between(cls, start: int, stop: int) -> Positions:
        """Return the positions from ``start`` to ``stop``, as a range.

        During tracing, they are a table instead, because a range would fix the length in the graph.
        """
        if is_tracing():
            return cls(None, torch.arange(start, stop))
        return cls(range(start, stop))

    @classmethod
    def ending_before(cls, after: int | Tensor) -> Positions:
        """Return positions with a single token per batch item, at ``after - 1`` (an int or int64 ``[batch]``).

        This suffices for a cache, because the positions of later tokens depend only on the last position.
        """
        if isinstance(after, Tensor) and len(after) and has_values(after) and bool((after == after[0]).all()):
            after = int(after[0])
        return _consecutive(after - 1, 1)

    @property
    def given(self) -> range | Tensor:
        """The positions as they are stored: a range or a table."""
        return self.table if self.run is None else self.run  # type: ignore[return-value]

    def __len__(self) -> int:
        return self.table.shape[-1] if self.run is None else len(self.run)  # type: ignore[union-attr]

    @property
    def first(self) -> int | None:
        """Position of the first token if the positions are a range with step 1; None otherwise."""
        run = self.run
        return None if run is None or (run.step != 1 and len(run) > 1) else run.start

    @property
    def ends(self) -> tuple[int, int] | None:
        """Lowest and highest token position; None if there are no tokens, or if the table cannot be read now."""
        if self.run is not None:
            run = self.run
            return (min(run[0], run[-1]), max(run[0], run[-1])) if run else None
        table = self.table
        assert table is not None
        if not can_be_read(table) or is_transformed():
            return None
        tokens = table[table >= 0]
        return (int(tokens.min()), int(tokens.max())) if len(tokens) else None

    @property
    def items(self) -> int:
        """Number of batch items with separate positions; 1 if all items share their positions."""
        return 1 if self.table is None or self.table.dim() < 2 else len(self.table)

    @property
    def nbytes(self) -> int:
        """Size of the position table in bytes."""
        return 0 if self.table is None else self.table.untyped_storage().nbytes()

    @property
    def after(self) -> int | Tensor:
        """Position of the next token, one after the last token; int64 ``[batch]`` for a table."""
        if self.run is not None:
            return self.run.stop
        table = torch.atleast_2d(self.on())
        return (table.amax(1) + 1).clamp(min=0) if table.shape[1] else table.new_zeros(len(table))

    def following(self, count: int) -> Positions:
        """Return the positions of the next ``count`` tokens, after the last token of each batch item."""
        if self.run is not None:
            return Positions(range(self.run.stop, self.run.stop + count))
        return _consecutive(self.after, count)

    def extended(self, new: Positions, batch: int, device: torch.device) -> tuple[Positions, Positions]:
        """Append new positions, and return all positions and the new ones.

        Consecutive positions are returned as ranges, other positions as tables.
        """
        run, added = self.run, new.run
        if not (added if new.table is None else new.table.shape[-1]):
            return self, new  # without new tokens, nothing changes
        if run is not None and added is not None and added.step == 1 and (not run or run.stop == added.start):
            return Positions(range(run.start if run else added.start, added.stop)), new
        first = None if run is None else new.consecutive_start()
        if run is not None and first is not None and (not run or run.stop == first):
            added = range(first, first + len(new))
            return Positions(range(run.start if run else first, added.stop)), Positions(added)
        before, table = (x.on(device).expand(batch, -1) for x in (self, new))
        return Positions(None, torch.cat([before, table], 1)), Positions(None, table)

    def advanced(self, new: Positions, batch: int, device: torch.device) -> Positions | None:
        """Return the last position of each batch item after adding ``new``, or None if the positions do not ascend."""
        run, added = self.run, new.run
        if run is not None and added is not None:
            if added and (added[0] < run.stop or (added.step != 1 and len(added) > 1)):
                return None
            return _consecutive(added[-1], 1) if added else self
        if not len(new):
            return self
        table = new.on(device).expand(batch, -1)
        last = torch.as_tensor(self.after, device=device).expand(batch) - 1
        reached = torch.cat([last[:, None], table], 1).cummax(1).values
        if any_true((table >= 0) & (table <= reached[:, :-1])):
            return None
        return Positions.ending_before(reached[:, -1] + 1)

    def consecutive_start(self) -> int | None:
        """Return the first position if all batch items have the same, consecutive positions; None otherwise."""
        if self.run is not None:
            return self.run.start if self.run.step == 1 or len(self.run) == 1 else None
        table = self.on()
        if not table.numel() or not has_values(table):
            return None
        first = int(table[0, 0])
        run = torch.arange(first, first + table.shape[1], device=table.device)
        return first if first >= 0 and bool((table == run).all()) else None

    def reordered(self, rows: Tensor) -> Positions:
        """Return the positions of the batch items ``rows``, in that order."""
        return self if self.table is None else Positions(None, self.table[rows.to(self.table.device)])

    def cropped(self, length: int) -> Positions:
        """Return the positions of the first ``length`` tokens."""
        if self.table is None:
            assert self.run is not None
            return Positions(self.run[:length])
        return Positions(None, self.table[:, :length].clone()) if length else Positions(range(0))

    def on(self, device: torch.device | str | None = None) -> Tensor:
        """Return the positions as an int64 tensor ``[batch | 1, len]`` on ``device``.

        If it is None, a table stays on its device and a range goes to the CPU.
        """
        run = self.run
        if run is None:
            assert self.table is not None
            return torch.atleast_2d(self.table if device is None else self.table.to(device))
        return torch.arange(run.start, run.stop, run.step, device=device or "cpu")[None]


GivenPositions = Positions | range | Tensor | Sequence[int] | Sequence[Sequence[int]] | None
"""Types of positions that a user may pass; None means the default."""


def _has_length(table: Tensor, length: int, batch: int) -> bool:
    """Return whether positions have the shape ``[length]``, ``[1, length]`` or ``[batch, length]``.

    Sizes are compared one at a time, the likeliest first, because during tracing each comparison with a different size
    would fix a symbolic size.
    """
    if table.dim() not in (1, 2) or table.shape[-1] != length:
        return False
    return table.dim() == 1 or table.shape[0] == batch or table.shape[0] == 1


def can_be_read(x: Tensor) -> bool:
    """Return whether the values of positions can be read now: on the CPU, but not during tracing or under `vmap`."""
    if x.device.type != "cpu" or not x.numel() or is_tracing():
        return False
    return has_values(x) and not is_mapped(x)


def as_positions(positions: GivenPositions, device: torch.device | None = None) -> Tensor:
    """Convert positions to an int64 tensor; a range becomes ``[len]``, a tensor keeps its shape."""
    checked = Positions.of(positions)
    if checked.table is None:
        return checked.on(device)[0]
    return checked.table if device is None else checked.table.to(device)


def check_below(positions: Tensor, limit: int, hint: str) -> None:
    """Raise an error if a position is at least ``limit``; positions that cannot be read now are not checked."""
    if can_be_read(positions) and int(positions.max()) >= limit:
        facts = [describe("positions", positions)]
        raise value_error("positions", f"be below {limit}", "a larger position", facts=facts, hint=hint)


def _consecutive(first: int | Tensor, count: int) -> Positions:
    """Return ``count`` consecutive positions that start at ``first``, an int or int64 ``[batch]``."""
    if isinstance(first, int):
        return Positions(range(first, first + count))
    return Positions(None, first[:, None] + torch.arange(count, device=first.device))


def _from_list(given: Sequence[Any], name: str) -> Tensor:
    rows = [row if isinstance(row, list | tuple) else [row] for row in given]
    if not all(is_integer(position) for row in rows for position in row):
        raise type_error(name, "be a range, an int64 tensor or a list of ints", "a list with other values")
    if len({len(row) for row in rows}) > 1 or len({isinstance(row, list | tuple) for row in given}) > 1:
        raise value_error(name, "have rows of one length", "rows of different lengths")
    if any(abs(int(position)) >= _LARGEST for row in rows for position in row):
        raise value_error(name, "be below 2**62", "a larger position")
    return torch.tensor(given, dtype=torch.int64, device="cpu")
