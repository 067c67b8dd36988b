"""The attention that each key receives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo, Statistic, SweepFormula


class ReceivedSums(NamedTuple):
    """State of the `Received` statistic: the column sums so far, and the matrix's `MatrixInfo`."""

    sums: Tensor
    info: MatrixInfo


@dataclasses.dataclass(frozen=True)
class Received(Statistic[ReceivedSums, Tensor]):
    r"""Sum of each column, ``[batch, heads, kv_len]``: the attention that a key receives from all queries.

    .. math:: c_j = \sum_i A_{ij}, \qquad \sum_j c_j = \text{number of queries that may attend to something}

    A value of 1 is the total attention of one query. Under a causal mask, more queries see early keys: uniform causal
    attention over n tokens gives key j (from 0) the sum of 1/i over i = j+1, …, n, about ``log(n / (j + 1))``. Compare
    a result with this value before calling a key a sink.

    Cost: one addition per weight; O(kv_len) memory; sums are computed in float64.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).compute(Received())[0]
        tensor([[[1.8333, 0.8333, 0.3333]]])

    Reference: Zhang et al. 2023 (H2O), arXiv:2306.14048, section 4.
    """

    def start(self, info: MatrixInfo) -> ReceivedSums:
        batch, heads, _, kv_len = info.shape
        return ReceivedSums(torch.zeros(batch, heads, kv_len, dtype=info.sum_dtype, device=info.device), info)

    def add(self, state: ReceivedSums, block: Block) -> ReceivedSums:
        for span, sums in block.by_range(block.column_sums):
            state.sums[block.batch, block.heads, as_slice(span)] += sums
        return state

    def merge(self, state: ReceivedSums, other: ReceivedSums) -> ReceivedSums:
        return state._replace(sums=state.sums + other.sums)

    def finish(self, state: ReceivedSums) -> Tensor:
        return state.sums.to(state.info.dtype)

    def sweep_formula(self, info: MatrixInfo) -> SweepFormula | None:
        return SweepFormula(("received",), lambda sums: self.finish(ReceivedSums(sums, info)))
