"""Indexing for block-sparse kernels: heads that share a selection, the queries of each block, and masked pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from saccade.engine import dropout
from saccade.engine.bias.term import MaskedTerm
from saccade.engine.block_sparse.selected_blocks_mask import SelectedBlocks, at_positions
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward
from saccade.masks import Mask
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Bounds, KeyDomain
from saccade.support.torch_modes import unobserved


def selected_blocks(inputs: AttentionInputs) -> SelectedBlocks:
    """Return the `SelectedBlocks` mask of a block-sparse kernel's inputs."""
    return cast("SelectedBlocks", inputs.rule)


def start_of_backward(inputs: AttentionInputs, value: Tensor, results: Backward) -> tuple[list[Tensor], Tensor]:
    """Return zeros for the gradients of query, key and value, and the row sums that the softmax gradient subtracts."""
    wide = inputs.compute_dtype
    grads = [torch.zeros_like(x, dtype=wide) for x in (inputs.query, inputs.key, value)]
    delta = (results.grad_out.to(wide) * results.out.to(wide)).sum(-1)
    return grads, delta if results.grad_lse is None else delta - results.grad_lse.to(wide)


def cap_(scores: Tensor, softcap: float | None, *, needs_slopes: bool) -> tuple[Tensor, Tensor | None]:
    """Cap block-sparse scores in place. Return the scores and, if ``needs_slopes``, the derivatives of the softcap."""
    if softcap is None:
        return scores, None
    scores = scores.div_(softcap).tanh_()
    slopes = 1.0 - scores.square() if needs_slopes else None
    return scores.mul_(softcap), slopes


class HeadGroup(NamedTuple):
    """A group of heads of one batch item that share a key head and a selection of blocks.

    Attributes:
        item: index of the batch item.
        heads: range of adjacent heads.
        kv_head: the key head that the heads share.
        index_head: the head of the block index that the heads share.
    """

    item: int
    heads: slice
    kv_head: int
    index_head: int

    @property
    def num_heads(self) -> int:
        """Number of query heads in the group."""
        return self.heads.stop - self.heads.start

    def of_queries(self, inputs: AttentionInputs, x: Tensor) -> Tensor:
        """Return a copy of this head group's part of a query tensor, ``[q_len, heads, width]`` in the compute dtype."""
        return x[self.item, self.heads].transpose(0, 1).contiguous().to(inputs.compute_dtype)

    def of_keys(self, inputs: AttentionInputs, x: Tensor) -> Tensor:
        """Return this head group's part of a key or value tensor, ``[kv_len, width]`` in the compute dtype."""
        return x[self.item, self.kv_head].to(inputs.compute_dtype)

    def allowed(self, mask: SelectedBlocks, rows: Tensor, keys: Tensor) -> Tensor:
        """Return which query-key pairs ``mask.rule`` allows for these heads, bool ``[rows, heads | 1, keys]``.

        Args:
            mask: the selected blocks. Only ``mask.rule`` is evaluated, because all keys are in selected blocks.
            rows: indices of queries, int64 ``[rows]``.
            keys: indices of keys, int64 ``[rows | 1, keys]``.
        """
        q_first, kv_first = mask.origin
        b = torch.full((1, 1, 1, 1), self.item, device=rows.device)
        h = torch.arange(self.heads.start, self.heads.stop, device=rows.device)[None, :, None, None]
        allowed = mask.rule.allows(b, h, (rows + q_first)[None, None, :, None], keys[None, None] + kv_first)
        return allowed.expand(1, -1, len(rows), keys.shape[1])[0].transpose(0, 1)

    def dropout_factors(self, inputs: AttentionInputs, rows: Tensor, keys: Tensor, dropped: Dropped) -> Tensor:
        """Return the dropout factors ``[rows, heads, keys]``: 0 for dropped weights, 1 / (1 - p) for kept weights.

        Args:
            inputs: the checked inputs.
            rows: indices of queries, int64 ``[rows]``.
            keys: indices of keys, int64 ``[rows | 1, keys]``.
            dropped: the dropout settings of the call.
        """
        rows, at = rows[:, None], at_positions(inputs.rule)
        if at is None:
            q, kv = rows + inputs.origin[0], keys + inputs.origin[1]
        else:
            q, kv = at.positions(torch.full_like(rows[:1], self.item), rows, keys)
        heads = torch.arange(self.heads.start, self.heads.stop, device=q.device)[None, :, None]
        item = torch.full_like(heads[:, :1], self.item)
        stays = dropout.keep(dropped.seed, dropped.items(item), heads, q[..., None, :], kv[:, None], dropped.p)
        return stays.to(inputs.compute_dtype) / (1.0 - dropped.p)


def head_groups(inputs: AttentionInputs) -> Iterator[HeadGroup]:
    """Yield, for each batch item, the largest groups of heads that share both a key head and the selected blocks."""
    batch, heads, _, _ = inputs.shape
    kv_heads, sharing = inputs.key.shape[1], selected_blocks(inputs).index.shape[1]
    count = max(kv_heads, sharing)  # one divides the other
    for item in range(batch):
        for i in range(count):
            of_group = slice(i * heads // count, (i + 1) * heads // count)
            yield HeadGroup(item, of_group, i * kv_heads // count, i * sharing // count)


class QueriesByBlock:
    """An index that lists, for each block of keys, the queries that selected it.

    Cost: 8 bytes for each selected block, and 16 for each range of keys that is known to be visible to a query.
    """

    def __init__(self, inputs: AttentionInputs):
        self._mask = selected_blocks(inputs)
        items, sharing, _, slots = self._mask.index.shape
        self._rows: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for item in range(items):
            for head in range(sharing):
                blocks, order = self._mask.index[item, head].flatten().sort(stable=True)
                edges = torch.arange(self._mask.blocks + 1, dtype=blocks.dtype, device=blocks.device)
                counts = torch.searchsorted(blocks, edges).diff().tolist()
                rows = order[: sum(counts)].div_(max(1, slots), rounding_mode="floor")
                self._rows[item, head] = rows.split(counts)
        self._visible = visible_ranges(inputs)

    @classmethod
    def of(cls, inputs: AttentionInputs) -> QueriesByBlock:
        """Return the index of queries by block from the plan, or build it and cache it there for the backward pass."""
        memo = inputs.plan.memo
        if "queries by block" not in memo:
            with unobserved():
                memo["queries by block"] = cls(inputs)
        return cast("QueriesByBlock", memo["queries by block"])

    def rows(self, group: HeadGroup, block: int) -> Tensor:
        """Return the indices of the queries that selected the given block, int64 in ascending order."""
        return self._rows[group.item if len(self._mask.index) > 1 else 0, group.index_head][block]

    def hide_(self, inputs: AttentionInputs, scores: Tensor, group: HeadGroup, rows: Tensor, keys: range) -> Tensor:
        """Set the scores of masked pairs to -inf in ``scores [rows, heads, keys]``, and return the scores."""
        starts, ends = (x[group.item if len(x) > 1 else 0, rows] for x in self._visible)
        partial = torch.nonzero(~((starts <= keys.start) & (ends >= keys.stop)).any(1))[:, 0]
        if len(partial):
            columns = torch.arange(keys.start, keys.stop, device=rows.device)[None]
            allowed = group.allowed(self._mask, rows[partial], columns)
            scores[partial] = scores[partial].masked_fill(~allowed, -math.inf)
        if isinstance(inputs.bias, MaskedTerm):
            hidden = inputs.bias.keys[group.item, group.heads, keys.start : keys.stop]
            scores.masked_fill_(hidden, -math.inf)
        return scores


def row_bounds(inputs: AttentionInputs, mask: Mask, rows: range) -> Bounds:
    """Return bounds on the keys visible to each row, with separate bounds per batch item only if the masks differ."""
    (batch, _, _, kv_len), (q_first, kv_first) = inputs.shape, inputs.origin
    items = [ALL] if mask.shape[0] == 1 else list(range(batch))
    row = np.tile(np.arange(rows.start + q_first, rows.stop + q_first, dtype=np.int64), len(items))
    keys = KeyDomain(np.full_like(row, kv_first), np.full_like(row, kv_first + kv_len))
    return mask.bounds(Groups(np.repeat(np.asarray(items, dtype=np.int64), len(rows)), row, row), keys)


def visible_ranges(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return the starts and ends of key ranges known to be visible to each query, ``[items | 1, q_len, ranges]``."""
    mask, (batch, _, q_len, _) = selected_blocks(inputs), inputs.shape
    all_rows, items = row_bounds(inputs, mask.rule, range(q_len)).all_rows, 1 if mask.rule.shape[0] == 1 else batch
    starts, ends = (
        torch.from_numpy(x - mask.origin[1]).view(items, q_len, -1).to(inputs.device)
        for x in (all_rows.starts, all_rows.ends)
    )
    return starts, ends
