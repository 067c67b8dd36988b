"""Build FlexAttention's BlockMask from the bounds of a mask, without evaluating all pairs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from saccade.plan import ALL, Groups, Rule
from saccade.plan.key_ranges import Ints, KeyDomain, Spans


def blocks_of(
    rule: Rule,
    shape: tuple[int, int, int, int],
    origin: tuple[int, int],
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
) -> BlockMask:
    """Build FlexAttention's BlockMask from the bounds of a mask.

    Args:
        rule: the mask, evaluated at positions.
        shape: shape of the matrix, ``(batch, heads, q_len, kv_len)``.
        origin: positions of the first query and the first key.
        device: the device on which FlexAttention will run.
        block_size: number of rows and columns in a block.
    """
    _, _, q_len, kv_len = shape
    (q_first, kv_first), (height, width) = origin, block_size
    items = list(range(rule.shape[0])) if rule.shape[0] > 1 else [ALL]
    starts = np.arange(0, q_len, height)
    ends = np.minimum(starts + height, q_len) - 1
    groups = Groups(
        np.repeat(items, len(starts)), np.tile(starts, len(items)) + q_first, np.tile(ends, len(items)) + q_first
    )
    keys = KeyDomain(np.full_like(groups.first, kv_first), np.full_like(groups.first, kv_first + kv_len))
    bounds = rule.bounds(groups, keys)
    columns = -(-kv_len // width)
    sizes = (len(items), len(starts), columns)
    edges = kv_first + np.minimum(np.arange(columns + 1) * width, kv_len)
    some = (_keys_per_block(bounds.any_row, edges) > 0).reshape(sizes)
    full = (_keys_per_block(bounds.all_rows, edges) == np.diff(edges)).reshape(sizes)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # FlexAttention passes indices, 32 bits on a GPU; the mask reads 64-bit positions.
        return rule.allows(b, h, q.to(torch.int64) + q_first, kv.to(torch.int64) + kv_first)

    zero = torch.zeros((), dtype=torch.int64, device=device)
    rule.allows(zero, zero, zero, zero)  # moves the mask's tensors to the device before a compiler traces it
    return BlockMask.from_kv_blocks(
        *_block_lists(some & ~full, device),
        *_block_lists(full, device),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


def _keys_per_block(spans: Spans, edges: Ints) -> Ints:
    """Count the keys of each row group in each column block of a BlockMask, int64 ``[groups, len(edges) - 1]``."""
    below = np.zeros((len(spans.starts), len(edges)), dtype=np.int64)
    for slot in range(spans.starts.shape[1]):
        start, end = spans.starts[:, slot, None], spans.ends[:, slot, None]
        below += np.clip(edges, start, end) - start
    return np.diff(below, axis=1)


def _block_lists(which: npt.NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return the number of blocks that each row of a BlockMask needs, int32 ``[items, 1, rows]``, and their indices.

    The indices, int32 ``[items, 1, rows, columns]``, list needed blocks first, then all others.
    """
    marked = torch.from_numpy(which).to(device)[:, None]
    order = torch.argsort(marked.to(torch.int8), dim=-1, descending=True, stable=True)
    return marked.sum(-1).to(torch.int32), order.to(torch.int32)
