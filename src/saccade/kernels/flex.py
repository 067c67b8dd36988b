"""FlexAttention's BlockMask, made from what a mask knows about itself instead of from all pairs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from saccade.errors import value_error
from saccade.masks import Mask
from saccade.plan import ALL, Groups
from saccade.spans import Ints, Spans, Universe

__all__ = ["block_mask"]


def block_mask(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    block_size: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """A BlockMask for ``flex_attention`` that allows what the mask allows at default positions (bottom-right).

    Blocks that no row needs are left out, blocks that every row has are marked full, and in the others FlexAttention
    asks the mask itself. Exact for every mask; one that knows nothing about itself has all blocks asked.

    Args:
        mask: any mask.
        q_len, kv_len: lengths; ``kv_len`` is ``q_len`` when None.
        batch: batch items; what the mask tells apart when None.
        block_size: rows and columns of a block, an int of at least 1.
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
    if not isinstance(block_size, int) or block_size < 1:
        raise value_error("block_mask", "block_size", "be an int of at least 1", repr(block_size))
    items = list(range(mask.shape[0])) if mask.shape[0] > 1 else [ALL]
    if batch is not None and mask.shape[0] not in (1, batch):
        raise value_error("block_mask", "mask", f"tell apart 1 or {batch} batch items", mask.shape[0])
    offset = kv_len - q_len
    starts = np.arange(0, q_len, block_size)
    ends = np.minimum(starts + block_size, q_len) - 1
    groups = Groups(
        np.repeat(items, len(starts)), np.tile(starts, len(items)) + offset, np.tile(ends, len(items)) + offset
    )
    keys = Universe(np.zeros_like(groups.first), np.full_like(groups.first, kv_len))
    bounds = mask.bounds(groups, keys)
    columns = -(-kv_len // block_size)
    shape = (len(items), len(starts), columns)
    some = (_overlap(bounds.needed, columns, block_size, kv_len) > 0).reshape(shape)
    width = np.minimum((np.arange(columns) + 1) * block_size, kv_len) - np.arange(columns) * block_size
    full = (_overlap(bounds.sure, columns, block_size, kv_len) == width).reshape(shape)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # FlexAttention counts indices, the mask positions.
        return mask.allows(b, h, q + offset, kv)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full, device),
        *_listed(full, device),
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


def _overlap(spans: Spans, columns: int, block_size: int, kv_len: int) -> Ints:
    """How many keys of each block a set holds, int64 ``[groups, columns]``."""
    edges = np.minimum(np.arange(columns + 1) * block_size, kv_len)
    below = np.zeros((len(spans.starts), columns + 1), dtype=np.int64)
    for slot in range(spans.starts.shape[1]):
        start, end = spans.starts[:, slot, None], spans.ends[:, slot, None]
        below += np.clip(edges, start, end) - start
    return np.diff(below, axis=1)


def _listed(which: npt.NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """How many blocks are marked, int32 ``[items, 1, rows]``, and all blocks, the marked ones first."""
    marked = torch.from_numpy(which).to(device)[:, None]
    order = torch.argsort(marked.to(torch.int8), dim=-1, descending=True, stable=True)
    return marked.sum(-1).to(torch.int32), order.to(torch.int32)
