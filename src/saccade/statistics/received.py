"""Received: how much attention a key gets."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.fold import Fold, Outline
from saccade.statistics.fused_sweep import Swept
from saccade.statistics.row_block import Block, as_slice

__all__ = ["Received", "ReceivedSums"]


class ReceivedSums(NamedTuple):
    """Column sums, and the outline of their matrix."""

    sums: Tensor
    outline: Outline


@dataclasses.dataclass(frozen=True)
class Received(Fold[ReceivedSums, Tensor]):
    r"""Sum of each column, ``[batch, heads, kv_len]``: the attention that a key gets from all queries together.

    .. math:: c_j = \sum_i A_{ij}, \qquad \sum_j c_j = \text{number of queries that may attend to something}

    The unit is one query's whole attention. Under a causal mask early keys are seen by more queries: uniform causal
    attention over n tokens gives key j (from 0) the sum of 1/i over i = j+1, …, n, about ``log(n / (j + 1))``.
    Compare with that before calling a key a sink.

    Cost: one addition per weight; O(kv_len) memory; sums are kept in float64.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).ask(Received())[0]
        tensor([[[1.8333, 0.8333, 0.3333]]])

    Reference: Zhang et al. 2023 (H2O), arXiv:2306.14048, section 4.
    """

    def start(self, outline: Outline) -> ReceivedSums:
        batch, heads, _, kv_len = outline.shape
        return ReceivedSums(torch.zeros(batch, heads, kv_len, dtype=outline.sum_dtype, device=outline.device), outline)

    def add(self, state: ReceivedSums, block: Block) -> ReceivedSums:
        for span, sums in block.by_range(block.column_sums):
            state.sums[block.batch, block.heads, as_slice(span)] += sums
        return state

    def merge(self, state: ReceivedSums, other: ReceivedSums) -> ReceivedSums:
        return state._replace(sums=state.sums + other.sums)

    def finish(self, state: ReceivedSums) -> Tensor:
        return state.sums.to(state.outline.dtype)

    def by_sweep(self, outline: Outline) -> Swept | None:
        return Swept(("received",), lambda sums: self.finish(ReceivedSums(sums, outline)))
