"""Information in a head's attention: between positions of queries and keys, and beyond key popularity and distance."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.received import Received, ReceivedSums
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import MatrixInfo, Statistic, SweepFormula, compute_from_weights
from saccade.support.numerics import widest_dtype


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

    Cost: as for `Entropy` and `Received`, with which it shares computations; O(kv_len) memory.

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


def position_information(weights: Tensor) -> Tensor:
    """Compute `PositionInformation` of dense weights; rows are scaled to sum to 1 first.

    Args:
        weights: ``[..., q_len, kv_len]``, nonnegative.

    Returns:
        float64 ``[...]``, in nats.
    """
    rows = _distributions(weights)
    heads = rows.reshape(-1, 1, *rows.shape[-2:])
    information: Tensor = compute_from_weights(heads, PositionInformation())[0]
    return information.reshape(rows.shape[:-2])


def unexplained_information(weights: Tensor) -> Tensor:
    r"""Compute the information in a head's attention that key popularity and distance do not explain, in nats.

    .. math:: I = s \cdot \frac1n \sum_i \mathrm{KL}(a_i \,\|\, e_i), \qquad e_{ij} \propto m_j\, o_{j-i}

    where m is the mean row and o the mean weight at each distance, after rows are scaled to sum to 1, and s is the mean
    sum of a row before scaling. The result is 0 for a sink and for a head that attends to the previous token. Rows of
    zeros do not count in the mean of the divergences.

    Args:
        weights: ``[..., q_len, kv_len]``, nonnegative; a row that lacks part of its attention sums to less than 1.

    Returns:
        float64 ``[...]``.

    Example:
        >>> previous = torch.eye(4).roll(-1, 1).tril()
        >>> unexplained_information(previous).item()
        0.0
    """
    rows = _distributions(weights)
    q_len, kv_len = rows.shape[-2:]
    queries, keys = (torch.arange(length, device=rows.device) for length in (q_len, kv_len))
    distance = keys - queries[:, None] + q_len - 1  # [q_len, kv_len], from 0
    pairs = torch.bincount(distance.flatten())
    at_distance = rows.new_zeros(*rows.shape[:-2], len(pairs)).index_add_(-1, distance.flatten(), rows.flatten(-2))
    expected = rows.sum(-2, keepdim=True) * (at_distance / pairs)[..., distance]
    expected = expected / expected.sum(-1, keepdim=True)
    surprise = torch.where(rows > 0, rows * (rows / expected).log(), 0.0)
    count = (rows.sum(-1) > 0).sum(-1).clamp(min=1)
    share = weights.to(widest_dtype(weights.device)).sum(-1).mean(-1)
    return (share * surprise.sum((-2, -1)) / count).clamp(min=0)


def _distributions(weights: Tensor) -> Tensor:
    """Scale rows of attention weights to sum to 1; empty rows stay 0."""
    weights = weights.to(widest_dtype(weights.device))
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, 0.0)
