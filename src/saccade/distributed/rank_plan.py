"""RankPlan: what one rank does in an exchange."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from saccade.distributed.layouts import numbers
from saccade.plan.key_ranges import Ints

__all__ = ["RankPlan"]


class RankPlan(NamedTuple):
    """What one rank does.

    Attributes:
        rank: its number.
        rows: the tokens that it holds, in order.
        receives, sends: (peer, keys): tokens whose keys and values come from, or go to, another rank; none with
            "ulysses", which exchanges all rows.
        bytes_sent, bytes_received: of one forward pass; a backward pass takes the same way back.
        pairs: of queries and keys that it computes, over all heads; reckoned.
        peak_bytes: of keys and values, its own and others'.
    """

    rank: int
    rows: tuple[range, ...]
    receives: tuple[tuple[int, range], ...]
    sends: tuple[tuple[int, range], ...]
    bytes_sent: int
    bytes_received: int
    pairs: int
    peak_bytes: int

    @property
    def columns(self) -> Ints:
        """Positions of the keys that it has after the exchange, its own and others', ascending, int64."""
        return np.sort(np.concatenate([numbers(self.rows), numbers([keys for _, keys in self.receives])]))
