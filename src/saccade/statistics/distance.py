"""Distance statistics: how far away queries attend, and how much attention goes to each distance."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.positions.token_positions import Positions
from saccade.statistics.per_row import (
    PerRow,
    PositionPair,
    block_positions,
    checked_pair,
    lead_of,
    positions_or_default,
)
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import Far, MatrixInfo, Quantity, Statistic


@dataclasses.dataclass(frozen=True)
class Distance(PerRow):
    r"""Mean distance between a query and the keys that it attends to, ``[batch, heads, q_len]``, in tokens.

    .. math:: D_i = \sum_j A_{ij} \, |p_i - p_j|

    where p are the positions. Uniform causal attention has distance i / 2 at position i. Compare a result with this
    value before concluding that a head attends to distant keys. The result is 0 for a row that attends to nothing.

    Args:
        positions: positions of the queries and of the keys; when None, the last query is aligned with the last key.

    Raises:
        TypeError, ValueError: ``positions`` are invalid.
        UnsupportedError: the rows of the matrix are not distributions.

    Cost: two multiplications and two additions per weight; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 4, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).compute(Distance())[0]
        tensor([[[0.0000, 0.5000, 1.0000, 1.5000]]])

    Reference: Vig and Belinkov 2019, arXiv:1906.04284, section 4.3.
    """

    positions: PositionPair | None = None

    needs_distributions = True

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        span, lead = block.columns[0], lead_of(q, kv)
        if lead is None or len(block.columns) > 1 or span.step > 1:
            row, column = block_positions(block, q, kv)
            return (block.weights * (row - column).abs()).sum(-1)
        ramps = _ramps(len(kv), block.weights.dtype, block.weights.device)
        return _range_distances(block.weights, block.queries + (lead - span.start), *ramps)

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        lead = lead_of(q, kv)
        return None if lead is None else Far(lead)


class Lags(NamedTuple):
    """Result of `LagProfile`: the attention that goes to each distance (lag).

    Attributes:
        lags: query position minus key position, int64 ``[lags]``, ascending: 0 is the query's own token, 1
            the previous token.
        sums: sum of the weights of all queries at each lag, ``[batch, heads, lags]``.
    """

    lags: Tensor
    sums: Tensor


class _State(NamedTuple):
    sums: Tensor
    least: int
    q: Positions
    kv: Positions
    info: MatrixInfo


@dataclasses.dataclass(frozen=True)
class LagProfile(Statistic[_State, Lags]):
    r"""Attention by distance: the sum of the weights on each diagonal, as `Lags`.

    .. math:: \ell_\delta = \sum_i A_{i, j}, \quad p_i - p_j = \delta

    A peak at 1 indicates a previous-token head. Equally high peaks at several lags indicate a pattern of offsets, and a
    slope indicates a preference for nearby keys. The sum over all lags is the number of queries that attend to
    something.

    Args:
        positions: positions of the queries and of the keys; when None, the last query is aligned with the last key.

    Raises:
        TypeError, ValueError: ``positions`` are invalid.

    Cost: one copy of the weights and one addition per weight; O(q_len + kv_len) memory (with `positions`, O(their
    range)). Sums are computed in float64.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> profile = AttentionMatrix(x, x, masks.Causal()).compute(LagProfile())[0]
        >>> profile.lags.tolist(), profile.sums[0, 0]
        ([-2, -1, 0, 1, 2], tensor([0.0000, 0.0000, 1.8333, 0.8333, 0.3333]))
    """

    positions: PositionPair | None = None

    def __post_init__(self) -> None:
        if self.positions is not None:
            object.__setattr__(self, "positions", checked_pair(self.positions))

    def start(self, info: MatrixInfo) -> _State:
        batch, heads, q_len, kv_len = info.shape
        q, kv = positions_or_default(self.positions, info)
        least, most = 0, -1
        if q_len and kv_len:
            q_ends, kv_ends = _ends(q), _ends(kv)
            if q_ends is not None and kv_ends is not None:
                least, most = q_ends[0] - kv_ends[1], q_ends[1] - kv_ends[0]
        sums = torch.zeros(batch, heads, most - least + 1, dtype=info.sum_dtype, device=info.device)
        return _State(sums, least, q, kv, info)

    def add(self, state: _State, block: Block) -> _State:
        totals = state.sums[block.batch, block.heads]
        if not totals.shape[-1]:  # all queries or keys are padding, so there are no lags, and all weights are 0
            return state
        lead = lead_of(state.q, state.kv)
        if lead is None:
            self._scatter(state, block, totals)
            return state
        for span, weights in block.by_range(block.weights):
            if span.step != block.rows.step:
                self._scatter(state, block._replace(columns=(span,), weights=weights, log_weights=None), totals)
                continue
            sums = _diagonals(weights)  # indexed by column index minus row index, from -(rows - 1) on
            first = block.rows.start + lead - span.start + (len(block.rows) - 1) * span.step - state.least
            last = first - (sums.shape[-1] - 1) * span.step
            totals[..., last : first + 1 : span.step] += sums.flip(-1)
        return state

    @staticmethod
    def _scatter(state: _State, block: Block, totals: Tensor) -> None:
        row, column = block_positions(block, state.q, state.kv)
        lags = (row - column - state.least).clamp(0, totals.shape[-1] - 1)  # padding has weight 0
        lags = lags.expand(block.weights.shape)
        totals.scatter_add_(-1, lags.flatten(-2), block.weights.flatten(-2).to(totals.dtype))

    def merge(self, state: _State, other: _State) -> _State:
        return state._replace(sums=state.sums + other.sums)

    def finish(self, state: _State) -> Lags:
        lags = torch.arange(state.least, state.least + state.sums.shape[-1], device=state.sums.device)
        return Lags(lags, state.sums.to(state.info.dtype))


def _range_distances(weights: Tensor, q: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute the mean distance of each row of ``weights`` over consecutive keys; query i is at key index ``q[i]``.

    The indices ascend, so most keys are before or after all queries, and two matrix products suffice for them. Their
    distances are measured from the first or last query, so that no subtraction loses precision.
    """
    columns, length = weights.shape[-1], len(up)
    first, last = min(max(int(q[0]), 0), columns), min(max(int(q[-1]), 0), columns)
    total = (weights[..., first:last] * (q[:, None] - torch.arange(first, last, device=q.device)).abs()).sum(-1)
    # First the keys before all queries, by their distance from the first query; then the keys after all queries.
    for part, far, near in (
        (weights[..., :first], down[length - first :], (q - first).abs()),
        (weights[..., last:], up[: columns - last], (last - q).abs()),
    ):
        if part.shape[-1]:
            total = total + (part @ far + near * part.sum(-1))
    return total


@lru_cache(maxsize=4)
def _ramps(length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return an ascending ramp (0, 1, 2, …) and a descending ramp (length, length - 1, …, 1)."""
    up = torch.arange(length, dtype=dtype, device=device)
    return up, length - up


def _ends(x: Positions) -> tuple[int, int] | None:
    """Return the lowest and highest token position, on any device; None if there are no tokens."""
    if x.table is None:
        return x.ends
    tokens = x.table[x.table >= 0]
    return (int(tokens.min()), int(tokens.max())) if tokens.numel() else None


def _diagonals(weights: Tensor) -> Tensor:
    """Return the sum of each diagonal, starting at the lower left: ``[batch, heads, rows + columns - 1]``."""
    batch, heads, rows, columns = weights.shape
    pitch = rows + columns
    # In a row-major copy with padding between rows, increasing the row stride by one makes columns of the diagonals.
    padded = F.pad(weights, (rows - 1, 1, 0, 1)).contiguous()
    slanted = padded.as_strided((batch, heads, rows, pitch - 1), (padded.stride(0), padded.stride(1), pitch + 1, 1))
    return slanted.sum(-2)
