"""selected: exact softmax over the blocks of keys that were chosen for each query."""

from __future__ import annotations

from typing import Literal, cast

from torch import Tensor

from saccade.engine.block_sparse.by_key import ByBlock
from saccade.engine.block_sparse.gather import Gathered
from saccade.engine.block_sparse.index import reasons_of
from saccade.engine.block_sparse.selected_blocks import Chosen
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel
from saccade.matrix.attention_matrix import AttentionMatrix, matrix_from_inputs

__all__ = ["selected"]

_BY_BLOCK, _GATHERED = ByBlock(), Gathered()
_GATHER, _FEW = 32, 8  # times that a gathered key costs a key of a tile; queries of a step
_SMALLEST = 16  # keys of a block, from which on products with it are worth the rows that are gathered for it


def selected(matrix: AttentionMatrix, index: Tensor, size: int) -> AttentionMatrix:
    """A softmax matrix of which each query sees chosen blocks only.

    Args:
        matrix: any; what it allows is allowed still.
        index: see `saccade.engine.block_sparse.selected_blocks.Chosen`.
        size: keys of a block.
    """
    inputs = matrix.inputs.current()
    _, heads, _, kv_len = inputs.shape
    rule = Chosen(inputs.rule, inputs.origin, index, size, heads, -(-kv_len // size))
    made = inputs.replaced(rule=rule, is_live=False)
    return matrix_from_inputs(made, _impl_of(made) if matrix.impl == "auto" else matrix.impl)


def _impl_of(inputs: AttentionInputs) -> Kernel | Literal["auto"]:
    """The kernel that reads nothing but what was chosen, if it runs the scores and pays; else any, with the mask."""
    rule, (_, heads, q_len, kv_len) = cast("Chosen", inputs.rule), inputs.shape
    if reasons_of(inputs):
        return "auto"
    if rule.size >= _SMALLEST and q_len > 1:
        return _BY_BLOCK
    sharing = heads // max(1, inputs.key.shape[1], rule.index.shape[1])
    slots = rule.index.shape[3] * rule.size
    return _GATHERED if slots * _GATHER <= sharing * kv_len or q_len <= _FEW else "auto"
