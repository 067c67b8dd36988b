"""SomeHeads: a few heads of a matrix, as a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from saccade.errors import value_error
from saccade.matrix import Matrix
from saccade.plan import Ranges
from saccade.statistics import Block

__all__ = ["SomeHeads"]


class SomeHeads(Matrix):
    """Chosen heads of a matrix, in the order in which they are named; nothing is copied.

    Args:
        matrix: the matrix of all heads.
        heads: which, counted from 0.

    Raises:
        ValueError: a head that is not there.

    Example:
        >>> from saccade import AttentionMatrix
        >>> SomeHeads(AttentionMatrix(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8)), [3, 1]).shape
        (1, 2, 3, 3)
    """

    def __init__(self, matrix: Matrix, heads: Sequence[int]):
        there = matrix.shape[1]
        if not all(0 <= head < there for head in heads):
            raise value_error("SomeHeads", "heads", f"be 0 to {there - 1}", list(heads))
        self._matrix, self._heads = matrix, tuple(heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, _, q_len, kv_len = self._matrix.shape
        return (batch, len(self._heads), q_len, kv_len)

    @property
    def dtype(self) -> torch.dtype:
        return self._matrix.dtype

    @property
    def device(self) -> torch.device:
        return self._matrix.device

    @property
    def kv_heads(self) -> int:
        """As many as heads: values for a product are those of each head chosen."""
        return len(self._heads)

    @property
    def is_stochastic(self) -> bool:
        return self._matrix.is_stochastic

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        for number, own in enumerate(self._heads):
            if head is None or head == number:
                for block in self._matrix.blocks(batch, own, rows):
                    yield block._replace(heads=slice(number, number + 1))

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self._matrix.positions(rows, columns)
