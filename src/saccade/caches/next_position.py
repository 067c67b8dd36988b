"""Upcoming: where the next token will stand, for caches that hold no order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.positions.token_positions import Positions, behind
from saccade.support.errors import value_error

__all__ = ["Upcoming"]


class Upcoming(NamedTuple):
    """How many columns came, and where the next token of each item will stand: for caches that hold no order."""

    length: int = 0
    at: int | Tensor = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a table, if there is one."""
        return self.at.nbytes if isinstance(self.at, Tensor) else 0

    def next(self, q_len: int) -> Positions:
        """Where the next tokens will stand."""
        return behind(self.at, q_len)

    def extended(self, new: Positions, batch: int, device: torch.device) -> Upcoming:
        """With new tokens; raises where they do not come after the ones before."""
        rule, hint = "come after those in the cache, one behind the other", "KVCache() takes any order"
        run, count = new.run, self.length + len(new)
        if run is not None and isinstance(self.at, int):
            goes_back = self.length > 0 and len(run) > 0 and run[0] < self.at
            if goes_back or (run.step != 1 and len(run) > 1):
                raise value_error("positions", rule, run, hint=hint)
            return Upcoming(count, run[-1] + 1 if len(run) else self.at)
        if not len(new):
            return self  # a call of no tokens says nothing of where tokens stand
        table = new.on(device).expand(batch, -1)
        reached = torch.as_tensor(self.at, device=device).expand(batch)
        floor = reached if self.length else torch.zeros_like(reached)
        before = torch.cat([floor[:, None] - 1, table], 1).cummax(1).values
        if bool(((table >= 0) & (table <= before[:, :-1])).any()):
            raise value_error("positions", rule, "others", hint=hint)
        after = before[:, -1] + 1
        # The same for all: a number, which costs nothing.
        is_one = len(after) > 0 and bool((after == after[0]).all())
        return Upcoming(count, int(after[0]) if is_one else after)

    def reordered(self, rows: Tensor) -> Upcoming:
        """Of other batch items."""
        return self._replace(at=self.at[rows.to(self.at.device)]) if isinstance(self.at, Tensor) else self
