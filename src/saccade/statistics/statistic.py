"""Statistic: a question to a matrix, answered from its rows one block at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.statistics.fused_sweep import SweepFormula
from saccade.statistics.row_block import Block
from saccade.support.numerics import widest_dtype

if TYPE_CHECKING:
    from saccade.statistics.protocol import MatrixLike

__all__ = ["Statistic", "MatrixInfo", "answers_about", "blocks_for"]

_ROWS = 32  # of which all heads come before the next ones

State = TypeVar("State")
Answer = TypeVar("Answer")


class MatrixInfo(NamedTuple):
    """What is known of a matrix before its first block.

    Attributes:
        shape: (batch, heads, q_len, kv_len).
        dtype: of the weights and of the answers, float32 or wider.
        device: where the weights are.
        hidden: what stands at pairs that no block names: 0, or -inf in a matrix of scores.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    hidden: float = 0.0

    @classmethod
    def of(cls, matrix: MatrixLike) -> MatrixInfo:
        """The info of a matrix, whose weights are computed in float32 or wider."""
        return cls(matrix.shape, torch.promote_types(matrix.dtype, torch.float32), matrix.device, matrix.hidden)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of long sums: the widest, so that a million small terms are not lost in a large one."""
        return widest_dtype(self.device)


class Statistic(ABC, Generic[State, Answer]):
    """A question to a matrix, with memory that does not grow with the number of weights.

    A state starts out as that of a matrix with no rows at all. `add` takes in a block of complete rows, each row
    once; `merge` joins the states of different rows of one matrix (batch items, heads, stretches of queries, steps of
    decoding), in any order and grouping; `finish` answers. ``Matrix.compute`` runs many statistics in one sweep.

    Blocks are read, never changed: other statistics see the same tensors.

    Example: how often is the first key the strongest?

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
        """True if the question makes sense only where rows are distributions: at least 0, with sum 1 (or 0)."""
        return False

    @property
    def needs_all_heads(self) -> bool:
        """True if blocks should come a few rows at a time, with all heads of them one after another."""
        return False

    @abstractmethod
    def start(self, info: MatrixInfo) -> State:
        """The state of a matrix of which no row has been seen."""

    @abstractmethod
    def add(self, state: State, block: Block) -> State:
        """The state with the rows of one more block; the given state may be changed, and is not used again."""

    @abstractmethod
    def merge(self, state: State, other: State) -> State:
        """The state of the rows of both, which are different rows; neither is changed."""

    def sweep_formula(self, info: MatrixInfo) -> SweepFormula | None:
        """How numbers of rows and columns answer this, where compiled code finds them; None: only blocks do."""
        return None

    @abstractmethod
    def finish(self, state: State) -> Answer:
        """The answer; the state is not changed."""


def blocks_for(matrix: MatrixLike, statistics: Collection[Statistic[Any, Any]]) -> Iterator[Block]:
    """The blocks of a matrix in the order that some questions want; none where there are none."""
    if not any(statistic.needs_all_heads for statistic in statistics):
        return iter(matrix.blocks() if statistics else ())
    q_len = matrix.shape[2]
    few = [range(first, min(first + _ROWS, q_len)) for first in range(0, q_len, _ROWS)]
    return (block for rows in few for block in matrix.blocks(rows=rows))


def answers_about(weights: Tensor, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
    """Answers to several questions about weights that are written out, ``[batch, heads, q_len, kv_len]``."""
    batch, heads, q_len, kv_len = weights.shape
    block = Block(slice(0, batch), slice(0, heads), range(q_len), (range(kv_len),), weights)
    info = MatrixInfo((batch, heads, q_len, kv_len), weights.dtype, weights.device)
    return tuple(statistic.finish(statistic.add(statistic.start(info), block)) for statistic in statistics)
