"""PositionInformation: how much the place of a query says about where it looks."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.fused_sweep import SweepFormula
from saccade.statistics.received import Received, ReceivedSums
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import MatrixInfo, Statistic

__all__ = ["PositionInformation"]


class _State(NamedTuple):
    received: ReceivedSums
    entropy: Tensor
    seeing: Tensor


@dataclasses.dataclass(frozen=True)
class PositionInformation(Statistic[_State, Tensor]):
    r"""Mutual information of a query's place and a key's, ``[batch, heads]``, in nats.

    .. math:: I = H(\bar a) - \frac1n \sum_i H(a_i), \qquad \bar a = \frac1n \sum_i a_i

    with the n rows that attend to something. 0 if all rows are alike, as with a sink or with uniform attention; at
    most log n, if every query looks at a key of its own. Low entropy of the rows with little of this is a sink; with
    much of it, a pattern. A causal mask alone gives more than 0: compare with uniform attention.

    Raises:
        UnsupportedError: asked of a matrix whose rows are not distributions.

    Cost: that of `Entropy` and `Received`, which it shares with them; O(kv_len) memory.

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
        own = (block.batch, block.heads)
        state.entropy[own] += block.entropy.sum(-1, dtype=state.entropy.dtype)
        state.seeing[own] += (block.largest > 0).sum(-1)
        return state

    def merge(self, state: _State, other: _State) -> _State:
        received = Received().merge(state.received, other.received)
        return _State(received, state.entropy + other.entropy, state.seeing + other.seeing)

    def finish(self, state: _State) -> Tensor:
        sums, info = state.received
        count = state.seeing.clamp_min(1)
        mean = torch.special.entr(sums / count[..., None]).sum(-1)
        return (mean - state.entropy / count).clamp_min(0.0).to(info.dtype)

    def sweep_formula(self, info: MatrixInfo) -> SweepFormula | None:
        def answer(received: Tensor, entropy: Tensor, largest: Tensor) -> Tensor:
            sums = entropy.sum(-1, dtype=received.dtype)
            return self.finish(_State(ReceivedSums(received, info), sums, (largest > 0).sum(-1)))

        return SweepFormula(("received", "entropy", "largest_weight"), answer)
