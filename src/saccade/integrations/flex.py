"""Build FlexAttention's BlockMask from a mask's structure instead of evaluating every pair."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask

from saccade.engine.kernels.block_mask import blocks_of
from saccade.masks import Mask
from saccade.support.errors import value_error
from saccade.support.validation import check_int

CALLED_AS = "block_mask"  # the name in error messages


def block_mask(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Return a BlockMask for ``flex_attention`` that equals the mask with the last query at the last key.

    Blocks without allowed pairs are skipped, blocks with only allowed pairs are marked full, and FlexAttention
    evaluates the mask in all other blocks. This is exact for every mask; a mask without structure is evaluated in all
    blocks.

    Args:
        mask: any mask.
        q_len, kv_len: numbers of queries and keys; ``kv_len`` defaults to ``q_len``.
        batch: number of batch items; defaults to the batch size of the mask.
        block_size: numbers of rows and columns in a block, each at least 1, or one int for both; torch's flash backend
            needs (256, 128).
        device: the device on which FlexAttention will run.

    Returns:
        A BlockMask for ``batch`` items (1 if the mask is the same for all) and a single head that represents all heads:
        FlexAttention evaluates the mask in blocks where the heads differ.

    Cost: O(blocks²) bytes, without evaluating pairs; ``create_block_mask`` evaluates every pair.

    Example:
        >>> from saccade.masks import Window
        >>> block_mask(Window(64, 64), 512).sparsity()
        37.5
    """
    kv_len = q_len if kv_len is None else kv_len
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2:
        raise value_error("block_size", "be an int or a pair of ints", block_size)
    height, width = (check_int("block_size", size) for size in sizes)
    if batch is not None and mask.shape[0] not in (1, batch):
        raise value_error("mask", f"be for 1 or {batch} batch items", mask.shape[0])
    shape = (mask.shape[0], 1, q_len, kv_len)
    return blocks_of(mask, shape, (kv_len - q_len, 0), torch.device(device), (height, width))
