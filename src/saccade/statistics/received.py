"""The attention that each key receives, and the mutual information between query and key positions."""

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


class _State(NamedTuple):
    received: ReceivedSums
    entropy: Tensor
    nonempty: Tensor  # number of rows that attend to something


@dataclasses.dataclass(frozen=True)
class PositionInformation(Statistic[_State, Tensor]):
    r"""Mutual information between the positions of queries and keys, ``[batch, heads]``, in nats.

    .. math:: I = H(\bar a) - \frac1n \sum_i H(a_i), \qquad \bar a = \frac1n \sum_i a_i

    where n is the number of rows that attend to something. It is 0 if all rows are equal, as with a sink or uniform
    attention, and at most log n, if every query attends to a different key. Low row entropy indicates a sink if this
    number is small, and a pattern if it is large. A causal mask alone makes the result positive, so compare it with
    uniform attention.

    Raises:
        UnsupportedError: the rows of the matrix are not distributions.

    Cost: that of `Entropy` and `Received`, with which it shares computations; O(kv_len) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 4, 4)
        >>> AttentionMatrix(x, x, masks.Window(0, 0)).compute(PositionInformation())[0].exp()
        tensor([[4.]])
    """

    needs_distributions = True

    def start(self, info: MatrixInfo) -> _State:
        zeros = torch.zeros(info.shape[:2], dtype=info.sum_dtype, device=info.device)
        return _State(Received().start(info), zeros, zeros.clone())

    def add(self, state: _State, block: Block) -> _State:
        Received().add(state.received, block)
        index = (block.batch, block.heads)
        state.entropy[index] += block.entropy.sum(-1, dtype=state.entropy.dtype)
        state.nonempty[index] += (block.largest > 0).sum(-1)
        return state

    def merge(self, state: _State, other: _State) -> _State:
        received = Received().merge(state.received, other.received)
        return _State(received, state.entropy + other.entropy, state.nonempty + other.nonempty)

    def finish(self, state: _State) -> Tensor:
        sums, info = state.received
        count = state.nonempty.clamp_min(1)
        mean = torch.special.entr(sums / count[..., None]).sum(-1)
        return (mean - state.entropy / count).clamp_min(0.0).to(info.dtype)

    def sweep_formula(self, info: MatrixInfo) -> SweepFormula | None:
        def formula(received: Tensor, entropy: Tensor, largest: Tensor) -> Tensor:
            sums = entropy.sum(-1, dtype=received.dtype)
            return self.finish(_State(ReceivedSums(received, info), sums, (largest > 0).sum(-1)))

        return SweepFormula(("received", "entropy", "largest_weight"), formula)
