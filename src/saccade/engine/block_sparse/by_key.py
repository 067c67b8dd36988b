"""ByBlock: a block-sparse kernel that processes each key block together with the queries that selected it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.block_sparse.base_kernel import BlockSparseKernel
from saccade.engine.block_sparse.index import (
    HeadGroup,
    QueriesByBlock,
    cap_,
    head_groups,
    selected_blocks,
    start_of_backward,
)
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, Tensors
from saccade.engine.memory_accounting import Cost, MemoryUse

_LOWEST = -1e30  # the maximum of an empty row: finite, so that the difference of two maxima is never NaN
_ENTRIES = 1 << 19  # scores of a block processed at a time: 2 MB, which fit into a core's cache


class ByBlock(BlockSparseKernel):
    """Exact block-sparse attention that computes one key block at a time, with all queries that selected it.

    The partial results of each query are merged.

    Cost: time grows with the number of selected pairs. Beyond inputs and outputs, memory is needed for the partial
    results of one group of heads and for one index entry per selected block.
    """

    name = "by_block"

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the FLOPs and bytes of a block-sparse forward pass."""
        batch, heads, q_len, _ = inputs.shape
        wide, mask = inputs.compute_dtype.itemsize, selected_blocks(inputs)
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + wide)
        num_heads = heads // max(1, inputs.key.shape[1], mask.index.shape[1])
        sums = num_heads * q_len * (inputs.query.shape[3] + value_dim + 2) * wide
        order = mask.index.numel() * 8
        return Cost(mask.blocks, self.pairs(inputs), MemoryUse(results + sums + order + 4 * _ENTRIES * wide, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Compute the output and the lse of block-sparse attention, one key block at a time."""
        batch, heads, q_len, _ = inputs.shape
        out = value.new_zeros(batch, heads, q_len, value.shape[3])
        lse = value.new_full((batch, heads, q_len), -math.inf, dtype=inputs.compute_dtype)
        for group in head_groups(inputs):
            query, key = group.of_queries(inputs, inputs.query) * inputs.scale, group.of_keys(inputs, inputs.key)
            values = group.of_keys(inputs, value)
            sums = query.new_zeros(q_len, group.num_heads, value.shape[3] + 1)  # of weighted values, and of weights
            peaks = query.new_full((q_len, group.num_heads), _LOWEST)
            for step in _steps(inputs, group, query, key):
                before = peaks.index_select(0, step.rows)
                peak = torch.maximum(before, step.scores.amax(2))
                weights = step.scores.sub_(peak[..., None]).exp_()
                total = sums.index_select(0, step.rows).mul_(before.sub_(peak).exp_()[..., None])
                total[..., -1] += weights.sum(2)
                if dropped is not None:
                    weights *= group.dropout_factors(inputs, step.rows, step.columns, dropped)
                total[..., :-1] += weights @ values[step.keys.start : step.keys.stop]
                sums.index_copy_(0, step.rows, total)
                peaks.index_copy_(0, step.rows, peak)
            denominator = sums[..., -1:]  # 0 for a row that attends to nothing
            logs = (denominator.log() + peaks[..., None])[..., 0]
            mean = sums[..., :-1] / denominator.masked_fill(denominator == 0.0, 1.0)
            out[group.item, group.heads], lse[group.item, group.heads] = mean.transpose(0, 1), logs.transpose(0, 1)
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Compute the gradients with respect to query, key and value, one key block at a time."""
        grads, delta = start_of_backward(inputs, value, results)
        for group in head_groups(inputs):
            query, key, values = (
                group.of_queries(inputs, inputs.query),
                group.of_keys(inputs, inputs.key),
                group.of_keys(inputs, value),
            )
            grad_out = group.of_queries(inputs, results.grad_out)
            row_delta, lse = (x[group.item, group.heads].transpose(0, 1).contiguous() for x in (delta, results.lse))
            grad_query, query = torch.zeros_like(query), query * inputs.scale
            for step in _steps(inputs, group, query, key, needs_slopes=True):
                span = slice(step.keys.start, step.keys.stop)
                weights = step.scores.sub_(lse.index_select(0, step.rows)[..., None]).exp_()
                go = grad_out.index_select(0, step.rows)
                grad_scores, used = go @ values[span].mT, weights
                if dropped is not None:
                    factors = group.dropout_factors(inputs, step.rows, step.columns, dropped)
                    grad_scores, used = grad_scores.mul_(factors), weights * factors
                grads[2][group.item, group.kv_head, span] += used.flatten(0, 1).mT @ go.flatten(0, 1)
                grad_scores = grad_scores.sub_(row_delta.index_select(0, step.rows)[..., None]).mul_(weights)
                if step.slopes is not None:
                    grad_scores *= step.slopes
                grad_query.index_add_(0, step.rows, grad_scores @ key[span], alpha=inputs.scale)
                grads[1][group.item, group.kv_head, span] += grad_scores.flatten(0, 1).mT @ step.query.flatten(0, 1)
            grads[0][group.item, group.heads] = grad_query.transpose(0, 1)
        others = (None,) * (len(wanted) - 3)
        return (*(x if any_row else None for x, any_row in zip(grads, wanted, strict=False)), *others)


class _Step(NamedTuple):
    """A block of keys and a chunk of the queries that selected it.

    Attributes:
        keys: the keys of the block.
        rows: indices of the queries, int64 ``[rows]``.
        query: the scaled queries, ``[rows, heads, head_dim]``.
        scores: ``[rows, heads, keys]``, -inf for masked pairs. The kernel may overwrite this tensor.
        slopes: derivatives of the softcap for the backward pass; None if there is no softcap or no backward pass.
    """

    keys: range
    rows: Tensor
    query: Tensor
    scores: Tensor
    slopes: Tensor | None

    @property
    def columns(self) -> Tensor:
        """Indices of the keys in the block, int64 ``[1, keys]``."""
        return torch.arange(self.keys.start, self.keys.stop, device=self.rows.device)[None]


def _steps(
    inputs: AttentionInputs, group: HeadGroup, query: Tensor, key: Tensor, *, needs_slopes: bool = False
) -> Iterator[_Step]:
    """Yield each key block together with the queries that selected it, split into chunks of queries."""
    mask, by_block = selected_blocks(inputs), QueriesByBlock.of(inputs)
    most = max(1, _ENTRIES // (mask.size * group.num_heads))
    for block in range(mask.blocks):
        keys = range(block * mask.size, min((block + 1) * mask.size, inputs.shape[3]))
        for rows in by_block.rows(group, block).split(most):
            q = query.index_select(0, rows)
            scores, slopes = cap_(q @ key[keys.start : keys.stop].mT, inputs.softcap, needs_slopes=needs_slopes)
            yield _Step(keys, rows, q, by_block.hide_(inputs, scores, group, rows, keys), slopes)
