"""Tokens: queries or keys in line, segment by segment."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.mechanisms.checked_mechanism import Inputs

__all__ = ["Tokens"]


class Tokens(NamedTuple):
    """Where queries or keys stand in a line that holds one segment after another.

    Where tokens stand one by one, that is their own order. Else items have the same number of places in each segment,
    as many as the one that needs most; those that are left hold nothing.

    Attributes:
        segments: int64 ``[batch | 1, len]``, the segment of each token; -1 where none stands.
        names: the segments in line, the same for queries and keys.
        spans: the places of each.
        first: tokens before the first place, where nothing is moved.
        places: int64 ``[batch | 1, len]``, the place of each token, behind all places where none stands; None where
            nothing is moved.
    """

    segments: Tensor
    names: tuple[int, ...]
    spans: tuple[slice, ...]
    first: int = 0
    places: Tensor | None = None

    @classmethod
    def pair(cls, inputs: Inputs, q: Tensor, kv: Tensor, segment: int) -> tuple[Tokens, Tokens]:
        """Of queries and keys that stand at ``q`` and ``kv``, int64 ``[batch | 1, len]``."""
        tables = [x.div(segment, rounding_mode="floor").clamp(min=-1) for x in (q, kv)]
        starts = [start for start in inputs.starts if start is not None]
        if None not in inputs.starts:
            runs = [range(start, start + length) for start, length in zip(starts, inputs.shape[2:], strict=True)]
            low = max(0, min(run.start for run in runs)) // segment
            ends = range(low, -(-max(0, *(run.stop for run in runs)) // segment))
            return tuple(cls._of_run(*both, ends, segment) for both in zip(tables, runs, strict=True))  # type: ignore[return-value]  # two
        named = torch.cat([x.flatten() for x in tables]).unique()
        return tuple(cls._of_table(x, named[named >= 0]) for x in tables)  # type: ignore[return-value]  # two

    @classmethod
    def _of_run(cls, table: Tensor, run: range, named: range, segment: int) -> Tokens:
        first = min(max(0, -run.start), len(run))
        edges = [min(max(run.start + first, n * segment), run.stop) for n in (*named, named.stop)]
        return cls(table, tuple(named), _between([edge - run.start - first for edge in edges]), first)

    @classmethod
    def _of_table(cls, table: Tensor, named: Tensor) -> Tokens:
        (batch, length), count = table.shape, len(named)
        which = torch.where(table < 0, count, torch.searchsorted(named, table.clamp(min=0)))
        held = torch.zeros(batch, count + 1, dtype=torch.int64, device=table.device)
        held.scatter_add_(1, which, torch.ones_like(which))
        order = which.argsort(dim=1, stable=True)
        rank = torch.arange(length, device=table.device) - (held.cumsum(1) - held).gather(1, which.gather(1, order))
        rank = torch.empty_like(rank).scatter_(1, order, rank)
        sizes = held[:, :count].amax(0) if batch else held.new_zeros(count)
        edges = F.pad(sizes.cumsum(0), (1, 0))
        places = torch.where(table < 0, edges[-1], edges[which] + rank)
        return cls(table, tuple(named.tolist()), _between(edges.tolist()), 0, places)

    @property
    def size(self) -> int:
        """Number of places."""
        return self.spans[-1].stop if self.spans else 0

    def of(self, items: slice) -> Tokens:
        """Of some batch items."""
        is_one = self.places is None or len(self.places) == 1
        return self if is_one else self._replace(places=self.places[items])  # type: ignore[index]  # they are there

    def in_line(self, x: Tensor) -> Tensor:
        """``[batch, heads, len, width]`` at their places; 0 at those that hold nothing."""
        if self.places is None:
            return x[:, :, self.first :] if self.first else x
        length = x.shape[2]
        index = torch.full((len(self.places), self.size + 1), length, device=x.device)
        index = index.scatter_(1, self.places, torch.arange(length, device=x.device).expand_as(self.places))
        return _taken(F.pad(x, (0, 0, 0, 1)), index[:, : self.size])

    def back(self, x: Tensor) -> Tensor:
        """What stands at their places, ``[batch, heads, len, width]``; 0 for tokens without one."""
        if self.places is None:
            return F.pad(x, (0, 0, self.first, 0)) if self.first else x
        return _taken(F.pad(x, (0, 0, 0, 1)), self.places)


def _between(edges: list[int]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in itertools.pairwise(edges))


def _taken(x: Tensor, places: Tensor) -> Tensor:
    if len(places) == 1:
        return x.index_select(2, places[0])
    return x.gather(2, places[:, None, :, None].expand(len(x), x.shape[1], -1, x.shape[3]))
