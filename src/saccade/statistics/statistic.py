"""Statistic: the base class of statistics of an attention matrix, computed block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from saccade.engine.kernels.native_statistics import Band
from saccade.plan import Ranges
from saccade.statistics.row_block import Block
from saccade.support.errors import kind, type_error
from saccade.support.numerics import widest_dtype

_ROWS = 32  # number of rows to compute in all heads before the next rows, for statistics that need all heads

State = TypeVar("State")
Result = TypeVar("Result")

DENSE_LIMIT = 1 << 26
"""Default limit of `Matrix.to_dense`: 64 million weights, 256 MB in float32."""


class MatrixInfo(NamedTuple):
    """Properties of a matrix that a statistic receives before the first block.

    Attributes:
        shape: (batch, heads, q_len, kv_len).
        dtype: dtype of the weights and of the results, float32 or wider.
        device: device of the weights.
        hidden: the value of pairs outside all blocks: 0, or -inf in a matrix of scores.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    hidden: float = 0.0

    @classmethod
    def of(cls, matrix: MatrixLike) -> MatrixInfo:
        """Return the `MatrixInfo` of a matrix; the dtype is float32 or wider, like the weights in blocks."""
        return cls(matrix.shape, torch.promote_types(matrix.dtype, torch.float32), matrix.device, matrix.hidden)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The device's widest float dtype, used for long sums so that rounding does not lose small terms."""
        return widest_dtype(self.device)


class Far(NamedTuple):
    """The mean distance as a quantity of a compiled pass. Query i is ``ahead`` positions after key i."""

    ahead: int


Quantity = str | Far | Band
"""A quantity of a compiled pass: per row, one of `NUMBERS`, a distance or a band's sum; per key, "received"."""


class SweepFormula(NamedTuple):
    """A formula for a statistic in terms of the quantities that a compiled pass over the matrix returns.

    Attributes:
        quantities: the quantities that the formula needs.
        formula: computes the result from the quantities: ``[batch, heads, q_len]`` per row, and float64
            ``[batch, heads, kv_len]`` per key. It must neither return nor modify its arguments, because other
            statistics use the same tensors.
    """

    quantities: tuple[Quantity, ...]
    formula: Callable[..., Any]


class Statistic(ABC, Generic[State, Result]):
    """Base class of statistics of a matrix, computed in memory that does not grow with the number of weights.

    `start` returns the state before the first row. `add` adds a block of complete rows, and each row is added once.
    `merge` combines the states of different rows of a matrix (batch items, heads, ranges of queries, decoding steps),
    in any order and grouping. `finish` returns the result. ``Matrix.compute`` computes many statistics in one pass over
    the matrix.

    Blocks must not be modified, because other statistics read the same tensors.

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
        """Whether rows must be distributions (nonnegative, with sum 1 or 0) for the statistic to be defined."""
        return False

    @property
    def needs_all_heads(self) -> bool:
        """Whether the statistic must receive all heads of a few rows before it receives the next rows."""
        return False

    @abstractmethod
    def start(self, info: MatrixInfo) -> State:
        """Return the initial state of the statistic."""

    @abstractmethod
    def add(self, state: State, block: Block) -> State:
        """Add a block to the statistic's state and return the new state; ``state`` may be modified in place."""

    @abstractmethod
    def merge(self, state: State, other: State) -> State:
        """Combine two of the statistic's states, from different rows of a matrix, without modifying them."""

    def sweep_formula(self, info: MatrixInfo) -> SweepFormula | None:
        """Return the formula of the statistic for a compiled pass; None if the statistic needs blocks."""
        return None

    @abstractmethod
    def finish(self, state: State) -> Result:
        """Return the result of the statistic without modifying the state."""

    def uniform(self, matrix: MatrixLike) -> Result:
        """Return the statistic's uniform baseline: its result if every query attended evenly to its visible keys.

        Compare a result with its baseline before interpreting it: under a causal mask, early keys receive a lot of
        attention in any case.

        Args:
            matrix: the measured matrix; only its mask is read.

        Raises:
            UnsupportedError: the statistic has no baseline, or the matrix has no mask.

        Cost: the same as for the statistic itself; see `saccade.Matrix.uniform`. For several baselines in one pass, use
        ``matrix.uniform().compute(...)``.

        Example:
            >>> from saccade import AttentionMatrix, masks
            >>> from saccade.statistics import Received
            >>> x = torch.randn(1, 1, 3, 4)
            >>> Received().uniform(AttentionMatrix(x, x, masks.Causal()))
            tensor([[[1.8333, 0.8333, 0.3333]]])
        """
        answer: Result = matrix.uniform().compute(self)[0]
        return answer


class MatrixLike(Protocol):
    """The part of `saccade.Matrix`'s interface that statistics use."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the matrix, (batch, heads, q_len, kv_len)."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the product of the matrix and a tensor."""

    @property
    def device(self) -> torch.device:
        """Device of the queries and keys of the matrix."""

    @property
    def is_stochastic(self) -> bool:
        """Whether the matrix's rows are distributions."""

    @property
    def hidden(self) -> float:
        """Value of the matrix for pairs outside all blocks."""

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        """Return the positions of the given queries and keys of the matrix."""

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        """Yield blocks of complete rows of the matrix."""

    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        """Compute several statistics in one pass over the matrix."""

    def entries(self, block: Block) -> Tensor:
        """Return the matrix's entries at the rows and columns of a block."""

    def uniform(self) -> MatrixLike:
        """Return uniform attention under the mask of the matrix."""

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return the product of the transposed matrix and a tensor, ``A.mT @ x``."""

    def to_dense(self, *, limit: int) -> Tensor:
        """Return the matrix as a dense tensor, ``[batch, heads, q_len, kv_len]``."""


def blocks_for(matrix: MatrixLike, statistics: Collection[Statistic[Any, Any]]) -> Iterator[Block]:
    """Return the blocks of a matrix in the order that the statistics need; none if there are no statistics."""
    if not any(statistic.needs_all_heads for statistic in statistics):
        return iter(matrix.blocks() if statistics else ())
    q_len = matrix.shape[2]
    row_ranges = [range(first, min(first + _ROWS, q_len)) for first in range(0, q_len, _ROWS)]
    return (block for rows in row_ranges for block in matrix.blocks(rows=rows))


def compute_from_weights(weights: Tensor, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
    """Compute several statistics of dense weights, ``[batch, heads, q_len, kv_len]``."""
    batch, heads, q_len, kv_len = weights.shape
    block = Block(slice(0, batch), slice(0, heads), range(q_len), (range(kv_len),), weights)
    info = MatrixInfo((batch, heads, q_len, kv_len), weights.dtype, weights.device)
    return tuple(statistic.finish(statistic.add(statistic.start(info), block)) for statistic in statistics)


def check_statistics(statistics: Iterable[object]) -> None:
    """Raise an error unless all objects are instances of `Statistic`."""
    for statistic in statistics:
        if not isinstance(statistic, Statistic):
            rule, hint = "be instances of saccade.statistics.Statistic", "pass an instance, such as Entropy()"
            raise type_error("statistics", rule, kind(statistic), hint=hint)
