"""FlexAttention's BlockMask, made from what a mask knows about itself instead of from all pairs."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from saccade.engine.kernels.block_mask import blocks_of
from saccade.masks import Mask
from saccade.support.errors import value_error
from saccade.support.validation import check_int

__all__ = ["block_mask"]


def block_mask(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """A BlockMask for ``flex_attention`` that allows what the mask allows at default positions (bottom-right).

    Blocks that no row needs are left out, blocks that every row has are marked full, and in the others FlexAttention
    asks the mask itself. Exact for every mask; one that knows nothing about itself has all blocks asked.

    Args:
        mask: any mask.
        q_len, kv_len: lengths; ``kv_len`` is ``q_len`` when None.
        batch: batch items; what the mask tells apart when None.
        block_size: rows and columns of a block, ints of at least 1, or one for both; torch's flash backend wants
            (256, 128).
        device: where FlexAttention will run.

    Returns:
        A BlockMask of ``batch`` items (1 where the mask does not tell them apart) and one head, which stands for all:
        a mask that tells heads apart is asked in every block in which the heads differ.

    Cost: O(blocks²) bytes and no look at pairs; ``create_block_mask`` looks at every pair.

    Example:
        >>> from saccade.masks import Window
        >>> block_mask(Window(64, 64), 512).sparsity()
        37.5
    """
    kv_len = q_len if kv_len is None else kv_len
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2:
        raise value_error("block_size", "be one int or two", block_size)
    height, width = (check_int("block_size", size) for size in sizes)
    if batch is not None and mask.shape[0] not in (1, batch):
        raise value_error("mask", f"tell apart 1 or {batch} batch items", mask.shape[0])
    shape = (mask.shape[0], 1, q_len, kv_len)
    return blocks_of(mask, shape, (kv_len - q_len, 0), torch.device(device), (height, width))
