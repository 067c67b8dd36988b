"""Weights of the last queries, kept so that `crop` can subtract them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.statistics import Block, Statistic
from saccade.statistics.row_block import as_slice
from saccade.statistics.statistic import MatrixInfo

__all__ = ["MOST", "GivenByEach", "by_kv_head", "with_rows"]

MOST = 32
"""How many of the last queries are known one by one."""


@dataclasses.dataclass(frozen=True)
class GivenByEach(Statistic[Tensor, Tensor]):
    """All weights, ``[batch, heads, q_len, kv_len]``: what `saccade.statistics.Received` sums up. For few queries."""

    def start(self, info: MatrixInfo) -> Tensor:
        return torch.zeros(info.shape, dtype=info.dtype, device=info.device)

    def add(self, state: Tensor, block: Block) -> Tensor:
        for span, weights in block.by_range(block.weights):
            state[block.batch, block.heads, as_slice(block.rows), as_slice(span)] = weights
        return state

    def merge(self, state: Tensor, other: Tensor) -> Tensor:
        return state + other

    def finish(self, state: Tensor) -> Tensor:
        return state


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Return sums over the heads that share keys, of ``[batch, heads, ...]``."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads)).sum(2)


def with_rows(before: Mapping[str, Tensor], summed: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Return what the last queries gave to each token, one by one, and what all earlier ones gave together.

    Args:
        before: the same without the new queries; empty where their earlier ones are not known one by one.
        summed: what was received before, ``[batch, kv_heads, columns]``, 0 for new tokens.
        new: what the new queries give, ``[batch, kv_heads, queries, columns]``.
    """
    more, rows, earlier = new.shape[2], new, summed
    if "rows" in before:
        rows, earlier = torch.cat([F.pad(before["rows"], (0, more)), new], 2), F.pad(before["earlier"], (0, more))
    return {"earlier": earlier + rows[:, :, :-MOST].sum(2), "rows": rows[:, :, -MOST:]}
