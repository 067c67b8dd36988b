"""Block-sparse attention for mechanisms and caches: restrict each query to selected key blocks."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from saccade.engine.block_sparse.by_key import ByBlock
from saccade.engine.block_sparse.gather import Gathered
from saccade.engine.block_sparse.selected_blocks_mask import SelectedBlocks
from saccade.engine.block_sparse.selection import select_blocks, stable_topk
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.matrix.attention_matrix import AttentionMatrix, matrix_from_inputs

__all__ = ["SelectedBlocks", "reads_only_selected", "restrict_to_blocks", "select_blocks", "stable_topk"]

_BY_BLOCK, _GATHERED = ByBlock(), Gathered()
_GATHER, _FEW = 32, 8  # cost of a gathered key relative to a key in a tile; maximum number of queries to decode
_SMALLEST = 16  # smallest block for which matrix products take longer than gathering rows


def restrict_to_blocks(matrix: AttentionMatrix, index: Tensor, size: int) -> AttentionMatrix:
    """Return a softmax matrix in which each query may attend only to the key blocks selected for it.

    Args:
        matrix: any softmax matrix. Its masked pairs stay masked.
        index: see `saccade.engine.block_sparse.selected_blocks_mask.SelectedBlocks`.
        size: number of keys in a block.
    """
    inputs = matrix.inputs.current()
    _, heads, _, kv_len = inputs.shape
    mask = SelectedBlocks(inputs.rule, inputs.origin, index, size, heads, -(-kv_len // size))
    result = inputs.replaced(rule=mask, is_live=False)
    return matrix_from_inputs(result, _kernel_for(result, mask) if matrix.impl == "auto" else matrix.impl)


def _kernel_for(inputs: AttentionInputs, mask: SelectedBlocks) -> Kernel | Literal["auto"]:
    """Return the fastest block-sparse kernel for the inputs, or "auto" if other kernels are needed or faster."""
    if _BY_BLOCK.verdict(inputs, Request()).cannot:
        return "auto"
    if not reads_only_selected(inputs, mask.index.shape[1], mask.index.shape[3], mask.size):
        return "auto"
    return _BY_BLOCK if mask.size >= _SMALLEST and inputs.shape[2] > 1 else _GATHERED


def reads_only_selected(inputs: AttentionInputs, index_heads: int, slots: int, size: int) -> bool:
    """Return whether a block-sparse kernel, which reads only selected keys, is faster than a mask over all tiles.

    Args:
        inputs: the inputs.
        index_heads: number of heads with a selection of their own.
        slots: number of blocks that a query reads.
        size: number of keys in a block.
    """
    _, heads, q_len, kv_len = inputs.shape
    if size >= _SMALLEST and q_len > 1:
        return True
    sharing = heads // max(1, inputs.key.shape[1], index_heads)
    return slots * size * _GATHER <= sharing * kv_len or q_len <= _FEW
