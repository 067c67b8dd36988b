"""Multiply attention by its gradient, block by block; masked pairs are never computed."""

from __future__ import annotations

from collections.abc import Iterator

from saccade.statistics.row_block import Block
from saccade.statistics.statistic import MatrixLike


def product_blocks(
    first: MatrixLike,
    second: MatrixLike,
    *,
    keep_positive: bool = False,
    batch: int | None = None,
    head: int | None = None,
    rows: range | None = None,
) -> Iterator[Block]:
    """Yield the elementwise product of two matrices of the same shape, in the blocks of the first matrix.

    Args:
        first, second: the matrices; the second matrix is read only in the blocks of the first.
        keep_positive: whether to set negative entries of the product to 0.
        batch, head, rows: see `saccade.Matrix.blocks`.

    Cost: computing the blocks of the first matrix, and the same entries of the second matrix.
    """
    for block in first.blocks(batch, head, rows):
        weights = block.weights * second.entries(block).to(block.weights.dtype)
        yield Block(*block[:4], weights.clamp_min_(0.0) if keep_positive else weights)
