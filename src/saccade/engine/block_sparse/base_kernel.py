"""BlockSparseKernel: the base class of kernels that read only selected blocks of keys."""

from __future__ import annotations

from saccade.engine.bias.term import MaskedTerm
from saccade.engine.block_sparse.index import selected_blocks
from saccade.engine.block_sparse.selected_blocks_mask import SelectedBlocks
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import (
    NO_FORWARD_DERIVATIVES,
    KernelWithBackward,
    Request,
    Verdict,
    reasons_unless_dot_product,
)
from saccade.support.torch_modes import has_forward_derivatives


class BlockSparseKernel(KernelWithBackward):
    """Base class of kernels that read only selected blocks of keys."""

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return the reasons why a block-sparse kernel does not support these inputs."""
        why = []
        if not isinstance(inputs.rule, SelectedBlocks):
            why.append("its mask does not select blocks of keys for each query")
        why += reasons_unless_dot_product(inputs)
        if inputs.bias is not None and not (isinstance(inputs.bias, MaskedTerm) and inputs.bias.term is None):
            why.append("it has no bias")
        if has_forward_derivatives():
            why.append(NO_FORWARD_DERIVATIVES)
        return Verdict(tuple(why))

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs in the selected blocks, summed over batch and heads."""
        mask, (batch, heads, _, kv_len) = selected_blocks(inputs), inputs.shape
        beyond_end = int((mask.index == mask.blocks - 1).sum()) * (mask.blocks * mask.size - kv_len)
        pairs = int((mask.index < mask.blocks).sum()) * mask.size - beyond_end
        items, sharing = mask.index.shape[:2]
        return pairs * (batch // max(1, items)) * (heads // max(1, sharing))
