"""UniformMatrix: attention in which every query spreads its weight evenly over its visible keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.matrix.matrix import DerivedMatrix, Matrix
from saccade.plan import Ranges
from saccade.statistics.row_block import Block


class UniformMatrix(DerivedMatrix):
    """Uniform attention over the visible keys of a matrix, computed block by block; see `saccade.Matrix.uniform`.

    Args:
        matrix: the matrix whose visible keys get equal weights.
        allowed: a function that returns the visible pairs of a block, bool and broadcastable to the block's weights.

    Cost: the same as computing the blocks of ``matrix``.

    Example:
        >>> from saccade.matrix import DenseMatrix
        >>> DenseMatrix(torch.tensor([[[[0.9, 0.1, 0.0]]]])).uniform()[0, 0, 0]
        tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(self, matrix: Matrix, allowed: Callable[[Block], Tensor]):
        super().__init__(matrix)
        self._allowed = allowed

    @property
    def is_stochastic(self) -> bool:
        return True

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        for block in self.inner.blocks(batch, head, rows):
            visible = self._allowed(block).expand(block.weights.shape).to(block.weights.dtype)
            yield Block(*block[:4], visible / visible.sum(-1, keepdim=True).clamp_min(1.0))

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self.inner.positions(rows, columns)


def uniform_inputs(inputs: AttentionInputs) -> AttentionInputs:
    """Return inputs with the same mask and all scores 0, so that each query attends evenly to its visible keys."""
    batch, heads, q_len, kv_len = inputs.shape
    dtype = inputs.compute_dtype
    return inputs.replaced(
        dtype=dtype,
        query=torch.zeros(batch, heads, q_len, 1, dtype=dtype, device=inputs.device),
        key=torch.zeros(batch, inputs.key.shape[1], kv_len, 1, dtype=dtype, device=inputs.device),
        scale=1.0,
        softcap=None,
        bias=None,
        sink_logit=None,
        tile_function=None,
        parameters=(),
        modification=None,
        fingerprints=None,
    )
