"""PerRow: the base class of statistics with one result per query, and helpers for token positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.positions.token_positions import GivenPositions, Positions
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo, MatrixLike, Quantity, Statistic, SweepFormula
from saccade.support.errors import type_error

PositionPair = tuple[GivenPositions, GivenPositions]
"""Positions of the queries and of the keys of a matrix."""
CheckedPair = tuple[Positions, Positions]


class RowState(NamedTuple):
    """State of a `PerRow` statistic: the results of all rows, ``[batch, heads, q_len, ...]``, and the positions."""

    values: Tensor
    q: Positions
    kv: Positions


class PerRow(Statistic[RowState, Tensor]):
    """Base class of statistics that are computed for each row separately; the result for an empty row is usually 0.

    Attributes:
        positions: positions of queries and keys, for statistics that depend on them; when None, the last query is
            aligned with the last key.
    """

    positions: PositionPair | None = None

    def __post_init__(self) -> None:
        if self.positions is not None:
            object.__setattr__(self, "positions", checked_pair(self.positions))

    @abstractmethod
    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        """Compute the statistic for each row of a block, ``[batch, heads, rows]``.

        Args:
            block: complete rows.
            q, kv: positions of all queries and keys.
        """

    def of_nothing(self, info: MatrixInfo) -> Tensor:
        """Return the initial results of all rows; rows that attend to no key keep them."""
        return torch.zeros(info.shape[:3], dtype=info.dtype, device=info.device)

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        """Return the quantity of a compiled pass that equals the statistic; None if there is no such quantity."""
        return None

    def sweep_formula(self, info: MatrixInfo) -> SweepFormula | None:
        quantity = self.quantity(*positions_or_default(self.positions, info))
        return None if quantity is None else SweepFormula((quantity,), Tensor.clone)

    def start(self, info: MatrixInfo) -> RowState:
        return RowState(self.of_nothing(info), *positions_or_default(self.positions, info))

    def add(self, state: RowState, block: Block) -> RowState:
        state.values[block.batch, block.heads, as_slice(block.rows)] = self.of_rows(block, state.q, state.kv)
        return state

    def merge(self, state: RowState, other: RowState) -> RowState:
        return state._replace(values=state.values + other.values)

    def finish(self, state: RowState) -> Tensor:
        return state.values


def positions_of(matrix: MatrixLike) -> CheckedPair:
    """Return the positions of a matrix's queries and keys, for statistics that depend on distances.

    Example:
        >>> import torch
        >>> from saccade import AttentionMatrix, masks
        >>> from saccade.statistics import LagMass, positions_of
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> A = AttentionMatrix(x[:, :, :1], x, masks.Causal(), q_positions=range(1, 2), kv_positions=range(3))
        >>> A.compute(LagMass(0), LagMass(0, positions_of(A)))
        (tensor([[[0.]]]), tensor([[[0.5000]]]))
    """
    _, _, q_len, kv_len = matrix.shape
    q, kv = matrix.positions(range(q_len), (range(kv_len),))
    tables = q.expand(-1, 1, q_len, 1)[:, 0, :, 0], kv.expand(-1, 1, 1, kv_len)[:, 0, 0]
    return _as_run(Positions(None, tables[0])), _as_run(Positions(None, tables[1]))


def checked_pair(positions: object) -> CheckedPair:
    """Validate the query and key positions that a user passed to a statistic."""
    if not isinstance(positions, tuple) or len(positions) != 2:
        rule = "be a pair, positions of the queries and of the keys, or None"
        raise type_error("positions", rule, type(positions).__name__, hint="positions_of(A)")
    q, kv = (Positions.of(x, name) for x, name in zip(positions, ("q_positions", "kv_positions"), strict=True))
    return _as_run(q), _as_run(kv)


def positions_or_default(positions: PositionPair | None, info: MatrixInfo) -> CheckedPair:
    """Return ``positions``, or if None, positions that align the last query with the last key."""
    if positions is None:
        _, _, q_len, kv_len = info.shape
        return Positions(range(kv_len - q_len, kv_len)), Positions(range(kv_len))
    return positions  # type: ignore[return-value]  # checked when the statistic was built


def lead_of(q: Positions, kv: Positions) -> int | None:
    """Return the position of query i minus that of key i; None unless all positions are consecutive."""
    return None if q.first is None or kv.first is None else q.first - kv.first


def block_positions(block: Block, q: Positions, kv: Positions) -> tuple[Tensor, Tensor]:
    """Return the positions of a block: rows ``[batch | 1, 1, rows, 1]`` and columns ``[batch | 1, 1, 1, columns]``."""
    return _at(q, block, block.queries)[:, None, :, None], _at(kv, block, block.keys)[:, None, None]


def _at(x: Positions, block: Block, indices: Tensor) -> Tensor:
    """Return the token positions at the given indices for a block's batch items, ``[batch | 1, len(indices)]``."""
    if x.run is not None:
        return (x.run.start + x.run.step * indices)[None]
    table = x.on(block.weights.device)
    return (table if len(table) == 1 else table[block.batch])[:, indices]


def _as_run(x: Positions) -> Positions:
    """Convert positions to a range if all batch items have the same consecutive positions."""
    table = x.table
    if table is None or x.items > 1 or not table.numel() or not bool((table.diff() == 1).all()):
        return x
    first = int(table.flatten()[0])
    return Positions(range(first, first + len(x)))
