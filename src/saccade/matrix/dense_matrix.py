"""DenseMatrix: an attention matrix whose weights are in memory, such as weights computed by a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from saccade.engine.tiles.index_ranges import at, take
from saccade.matrix.matrix import Matrix
from saccade.statistics.row_block import Block, as_slice, row_blocks
from saccade.support.errors import describe, value_error
from saccade.support.numerics import wide_dtype


class DenseMatrix(Matrix):
    """A matrix of stored weights, with the same statistics and products as other matrices.

    Args:
        weights: ``[batch, heads, q_len, kv_len]``, floating point; NaN marks unknown weights. Not copied.

    Raises:
        ValueError: the weights do not have four dimensions or a float dtype.

    Example:
        >>> DenseMatrix(torch.eye(2)[None, None]).entropy()
        tensor([[[0., 0.]]])
    """

    def __init__(self, weights: Tensor):
        if weights.dim() != 4 or not weights.is_floating_point():
            raise value_error("weights", "be floats [batch, heads, q_len, kv_len]", describe("weights", weights))
        self.weights = weights

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, q_len, kv_len = self.weights.shape
        return (batch, heads, q_len, kv_len)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def kv_heads(self) -> int:
        return self.shape[1]

    @cached_property
    def is_signed(self) -> bool:
        """Whether any weight of the matrix is negative."""
        return bool((self.weights < 0).any())

    @cached_property
    def is_stochastic(self) -> bool:
        sums = self.weights.detach().to(wide_dtype(self.dtype)).sum(-1)
        tolerance = 0.01 if self.dtype.itemsize < 4 else 1e-4
        is_sum = ((sums - 1).abs() < tolerance) | (sums == 0) | sums.isnan()
        return not self.is_signed and bool(is_sum.all())

    def entries(self, block: Block) -> Tensor:
        rows = at(self.weights[block.batch, block.heads], block.rows, 2)
        return take(rows, block.columns, 3).to(wide_dtype(self.dtype))

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        return row_blocks(self.shape, self._rows_of, batch, head, rows)

    def _rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        return self.weights[batch, head, as_slice(rows)].to(wide_dtype(self.dtype))
