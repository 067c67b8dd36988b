"""Statistic: base class of numbers computed from the rows of a matrix, block by block; MatrixLike: what they need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from saccade.engine.kernels.native_statistics import Band
from saccade.plan import Ranges
from saccade.statistics.row_block import Block
from saccade.support.numerics import widest_dtype

_ROWS = 32  # rows of which all heads come before the next rows, for statistics that need all heads

State = TypeVar("State")
Result = TypeVar("Result")

DENSE_LIMIT = 1 << 26
"""Default limit of `Matrix.to_dense`: 64 million weights, 256 MB in float32."""


class MatrixInfo(NamedTuple):
    """Properties of a matrix that a statistic knows before the first block.

    Attributes:
        shape: (batch, heads, q_len, kv_len).
        dtype: of the weights and of the results, float32 or wider.
        device: of the weights.
        hidden: the value of pairs in no block: 0, or -inf in a matrix of scores.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    hidden: float = 0.0

    @classmethod
    def of(cls, matrix: MatrixLike) -> MatrixInfo:
        """Return the properties of a matrix; its weights are computed in float32 or wider."""
        return cls(matrix.shape, torch.promote_types(matrix.dtype, torch.float32), matrix.device, matrix.hidden)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of long sums: the widest, so that a million small terms are not lost in a large one."""
        return widest_dtype(self.device)


class Far(NamedTuple):
    """A number of a fused sweep: the mean distance, with query i so many positions ahead of key i."""

    ahead: int


Quantity = str | Far | Band
"""One number a row in a fused sweep: one of `NUMBERS`, a distance, the sum of a band; or "received", one a key."""


class SweepFormula(NamedTuple):
    """A formula that computes a statistic from the numbers of a fused sweep.

    Attributes:
        quantities: the numbers that it needs.
        formula: the result as a function of these: tensors ``[batch, heads, q_len]``, or float64 ``[batch, heads,
            kv_len]`` for keys. It must neither return nor change its arguments: other statistics read them.
    """

    quantities: tuple[Quantity, ...]
    formula: Callable[..., Any]


class Statistic(ABC, Generic[State, Result]):
    """Base class of statistics of a matrix, computed in memory that does not grow with the number of weights.

    `start` returns the state of a matrix without rows. `add` adds a block of complete rows, each row once; `merge`
    joins the states of different rows of one matrix (batch items, heads, ranges of queries, steps of decoding), in any
    order and grouping; `finish` returns the result. ``Matrix.compute`` runs many statistics in one sweep.

    Blocks must not be changed: other statistics read the same tensors.

    Example: count how often the first key has the largest weight.

        >>> from saccade import AttentionMatrix, masks
        >>> from saccade.statistics import Statistic
        >>> class FirstWins(Statistic[int, int]):
        ...     def start(self, info):
        ...         return 0
        ...     def add(self, state, block):
        ...         strongest = block.weights.argmax(-1)
        ...         return state + int((strongest == 0).sum()) if 0 in block.columns[0] else state
        ...     def merge(self, state, other):
        ...         return state + other
        ...     def finish(self, state):
        ...         return state
        >>> x = torch.eye(4)[None, None]
        >>> AttentionMatrix(x, x, masks.Causal()).compute(FirstWins())
        (1,)
    """

    @property
    def needs_distributions(self) -> bool:
        """True if the statistic is defined only for rows that are distributions: at least 0, with sum 1 (or 0)."""
        return False

    @property
    def needs_all_heads(self) -> bool:
        """True if blocks must come a few rows at a time, with all heads of these rows before the next rows."""
        return False

    @abstractmethod
    def start(self, info: MatrixInfo) -> State:
        """Return the statistic's state before the first row."""

    @abstractmethod
    def add(self, state: State, block: Block) -> State:
        """Return the statistic's state with one more block; `state` may be changed, and is not used again."""

    @abstractmethod
    def merge(self, state: State, other: State) -> State:
        """Return the statistic's state for the rows of both states, which are different rows; change neither."""

    def sweep_formula(self, info: MatrixInfo) -> SweepFormula | None:
        """Return how to compute the statistic from the numbers of a fused sweep; None if it needs blocks."""
        return None

    @abstractmethod
    def finish(self, state: State) -> Result:
        """Return the statistic's result; do not change the state."""


class MatrixLike(Protocol):
    """The interface of `saccade.Matrix` that statistics read from."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The matrix's shape, (batch, heads, q_len, kv_len)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix's products."""

    @property
    def device(self) -> torch.device:
        """The device of queries and keys."""

    @property
    def is_stochastic(self) -> bool:
        """True if the matrix's rows are distributions."""

    @property
    def hidden(self) -> float:
        """The matrix's entry at pairs in no block."""

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        """Return the positions of some queries and keys of the matrix."""

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        """Yield the complete rows of the matrix."""

    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        """Compute several statistics in one sweep."""

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x``."""

    def to_dense(self, *, limit: int) -> Tensor:
        """Return all weights, ``[batch, heads, q_len, kv_len]``."""


def blocks_for(matrix: MatrixLike, statistics: Collection[Statistic[Any, Any]]) -> Iterator[Block]:
    """Yield the blocks of a matrix in the order that the statistics need; none without statistics."""
    if not any(statistic.needs_all_heads for statistic in statistics):
        return iter(matrix.blocks() if statistics else ())
    q_len = matrix.shape[2]
    few = [range(first, min(first + _ROWS, q_len)) for first in range(0, q_len, _ROWS)]
    return (block for rows in few for block in matrix.blocks(rows=rows))


def compute_from_weights(weights: Tensor, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
    """Compute several statistics of weights that are written out, ``[batch, heads, q_len, kv_len]``."""
    batch, heads, q_len, kv_len = weights.shape
    block = Block(slice(0, batch), slice(0, heads), range(q_len), (range(kv_len),), weights)
    info = MatrixInfo((batch, heads, q_len, kv_len), weights.dtype, weights.device)
    return tuple(statistic.finish(statistic.add(statistic.start(info), block)) for statistic in statistics)
