"""Gathered: a block-sparse kernel that copies the selected keys for each query. It runs on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.bias.term import MaskedTerm
from saccade.engine.block_sparse.base_kernel import BlockSparseKernel
from saccade.engine.block_sparse.index import (
    HeadGroup,
    cap_,
    head_groups,
    selected_blocks,
    start_of_backward,
    visible_ranges,
)
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, Tensors
from saccade.engine.memory_accounting import Cost, MemoryUse
from saccade.engine.tiles.tile_scores import normalised

_ENTRIES = 1 << 20  # number of key entries gathered at a time: 4 MB


class Gathered(BlockSparseKernel):
    """Exact block-sparse attention that gathers (copies) the selected keys and values of each query.

    Cost: time grows with the number of selected pairs. Each pair is expensive, because a copy of a key is used for only
    one query and its group of heads. Beyond inputs and outputs, memory is needed for the copies of a few rows.
    """

    name = "gathered"

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the FLOPs and bytes of a forward pass with gathered keys."""
        batch, heads, q_len, _ = inputs.shape
        wide = inputs.compute_dtype.itemsize
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + wide)
        return Cost(batch * q_len, self.pairs(inputs), MemoryUse(results + 4 * _ENTRIES * wide, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Compute the output and the lse of attention to gathered keys."""
        out = value.new_empty(*inputs.shape[:3], value.shape[3])
        lse = value.new_empty(inputs.shape[:3], dtype=inputs.compute_dtype)
        for group, step in _steps(inputs, value):
            weights, logs = normalised(step.scores)
            if dropped is not None:
                weights = weights * group.dropout_factors(inputs, step.row_index, step.keys, dropped)
            rows = slice(step.rows.start, step.rows.stop)
            out[group.item, group.heads, rows] = (weights @ step.value).transpose(0, 1).to(out.dtype)
            lse[group.item, group.heads, rows] = logs.T
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Compute the gradients with respect to query, key and value, using gathered keys."""
        grads, delta = start_of_backward(inputs, value, results)
        for group, step in _steps(inputs, value):
            place = (group.item, group.heads, slice(step.rows.start, step.rows.stop))
            go, row_delta, lse = (
                x[place].transpose(0, 1).to(inputs.compute_dtype) for x in (results.grad_out, delta, results.lse)
            )
            weights = (step.scores - lse[..., None]).exp_()
            grad_scores, used = go @ step.value.mT, weights
            if dropped is not None:
                factors = group.dropout_factors(inputs, step.row_index, step.keys, dropped)
                grad_scores, used = grad_scores.mul_(factors), weights * factors
            keys = step.keys.reshape(-1)
            grads[2][group.item, group.kv_head].index_add_(0, keys, (used.mT @ go).flatten(0, 1))
            grad_scores = grad_scores.sub_(row_delta[..., None]).mul_(weights)
            grad_scores = grad_scores if step.slopes is None else grad_scores.mul_(step.slopes)
            grads[0][place] = (grad_scores @ step.key).mul_(inputs.scale).transpose(0, 1)
            grads[1][group.item, group.kv_head].index_add_(0, keys, (grad_scores.mT @ step.query).flatten(0, 1))
        others = (None,) * (len(wanted) - 3)
        return (*(x if any_row else None for x, any_row in zip(grads, wanted, strict=False)), *others)


class _Step(NamedTuple):
    """A chunk of queries, and the gathered keys that each query selected.

    Attributes:
        rows: range of query indices.
        keys: indices of the gathered keys, int64 ``[rows, keys]``; 0 in unused slots.
        query: the scaled queries, ``[rows, heads, head_dim]``.
        key, value: the gathered keys and values, ``[rows, keys, width]``.
        scores: ``[rows, heads, keys]``, -inf for masked pairs.
        slopes: derivatives of the softcap; None without a softcap.
    """

    rows: range
    keys: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    slopes: Tensor | None

    @property
    def row_index(self) -> Tensor:
        """Indices of the chunk's queries, int64 ``[rows]``."""
        return torch.arange(self.rows.start, self.rows.stop, device=self.keys.device)


def _steps(inputs: AttentionInputs, value: Tensor) -> Iterator[tuple[HeadGroup, _Step]]:
    """Yield chunks of queries with gathered keys. Heads with the same selection and key head are processed together."""
    mask, (_, _, q_len, kv_len) = selected_blocks(inputs), inputs.shape
    within = torch.arange(mask.size, device=inputs.device)
    slots = mask.index.shape[3] * mask.size
    most = max(1, _ENTRIES // max(1, slots * max(inputs.query.shape[3], value.shape[3])))
    visible = visible_ranges(inputs)
    for group in head_groups(inputs):
        key, values = group.of_keys(inputs, inputs.key), group.of_keys(inputs, value)
        blocks = mask.index[group.item if len(mask.index) > 1 else 0, group.index_head]
        for first in range(0, q_len, most):
            rows = range(first, min(first + most, q_len))
            span = slice(rows.start, rows.stop)
            keys = (blocks[span, :, None].long() * mask.size + within).flatten(1)
            hidden = _hidden(inputs, group, rows, keys, visible)
            keys = keys.masked_fill_(keys >= kv_len, 0)
            q = inputs.query[group.item, group.heads, span].transpose(0, 1).to(inputs.compute_dtype) * inputs.scale
            k = _rows_of(key, keys)
            v = k[..., : values.shape[1]] if _are_channels(values, key) else _rows_of(values, keys)
            scores, slopes = cap_(q @ k.mT, inputs.softcap, needs_slopes=True)
            yield group, _Step(rows, keys, q, k, v, scores.masked_fill_(hidden, -math.inf), slopes)


def _rows_of(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x[index]``, which `index_select` copies several times as fast."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


def _are_channels(values: Tensor, key: Tensor) -> bool:
    """Return whether the values are the first channels of the keys, as in latent and in compressed attention."""
    same_rows = values.stride() == key.stride() and values.shape[1] <= key.shape[1] and values.dtype == key.dtype
    return same_rows and values.data_ptr() == key.data_ptr()


def _hidden(
    inputs: AttentionInputs, group: HeadGroup, rows: range, keys: Tensor, visible: tuple[Tensor, Tensor]
) -> Tensor:
    """Return which of the gathered keys are masked for each query, bool ``[rows, heads | 1, keys]``."""
    mask, kv_len = selected_blocks(inputs), inputs.shape[3]
    starts, ends = (x[group.item if len(x) > 1 else 0, rows.start : rows.stop, None] for x in visible)
    exists = keys < kv_len
    is_known = ((keys[..., None] >= starts) & (keys[..., None] < ends)).any(-1) | ~exists
    hidden, inside = ~exists[:, None], keys.clamp(max=kv_len - 1)
    if not bool(is_known.all()):
        row_index = torch.arange(rows.start, rows.stop, device=keys.device)
        hidden = hidden | ~group.allowed(mask, row_index, inside)
    if isinstance(inputs.bias, MaskedTerm):
        hidden = hidden | inputs.bias.keys[group.item, group.heads][:, inside].transpose(0, 1)
    return hidden
