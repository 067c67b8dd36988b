"""Key block by key block: each block of keys meets the queries that chose it. Exact, linear memory, any device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from saccade.engine import dropout
from saccade.engine.block_sparse.index import (
    RowsOfBlocks,
    Unit,
    chosen_pairs,
    reasons_of,
    rows_of_blocks,
    units_of,
)
from saccade.engine.block_sparse.selected_blocks import Chosen
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, KernelByHand, Tensors
from saccade.engine.memory_accounting import Cost, Held

__all__ = ["ByBlock"]

_NEVER = -1e30  # a peak of nothing: exp of what lies below it is 0, and no difference of two is NaN
_ENTRIES = 1 << 19  # scores of a block at a time: 2 MB, which stays in a core's cache


class ByBlock(KernelByHand):
    """Exact attention to chosen blocks of keys: nothing is gathered but queries, and their sums are merged.

    Cost: time grows with the chosen pairs; memory beside inputs and outputs is that of the sums of one group of heads,
    and of a place for each chosen block.
    """

    name = "by_block"

    def reasons(self, inputs: AttentionInputs, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs; empty if it can."""
        return reasons_of(inputs)

    def pairs(self, inputs: AttentionInputs) -> int:
        """Pairs in the chosen blocks."""
        return chosen_pairs(inputs)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """What the blocks compute and hold; nothing is run."""
        batch, heads, q_len, _ = inputs.shape
        wide, rule = inputs.compute_dtype.itemsize, cast("Chosen", inputs.rule)
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + wide)
        together = heads // max(1, inputs.key.shape[1], rule.index.shape[1])
        sums = together * q_len * (inputs.query.shape[3] + value_dim + 2) * wide
        order = rule.index.numel() * 8
        return Cost(rule.blocks, self.pairs(inputs), Held(results + sums + order + 4 * _ENTRIES * wide, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        batch, heads, q_len, _ = inputs.shape
        out = value.new_zeros(batch, heads, q_len, value.shape[3])
        lse = value.new_full((batch, heads, q_len), -math.inf, dtype=inputs.compute_dtype)
        order = rows_of_blocks(inputs)
        for unit in units_of(inputs):
            query = unit.rows_of(inputs, inputs.query)
            key, values = unit.keys_of(inputs, inputs.key), unit.keys_of(inputs, value)
            sums = query.new_zeros(q_len, unit.together, value.shape[3] + 1)
            peaks = query.new_full((q_len, unit.together), _NEVER)
            for met in _met(inputs, unit, order, query * inputs.scale, key):
                before = peaks.index_select(0, met.rows)
                peak = torch.maximum(before, met.scores.amax(2))
                weights = met.scores.sub_(peak[..., None]).exp_()
                own = sums.index_select(0, met.rows).mul_(before.sub_(peak).exp_()[..., None])
                own[..., -1] += weights.sum(2)
                if dropped is not None:
                    weights *= _kept(inputs, unit, met, dropped)
                own[..., :-1] += weights @ values[met.keys.start : met.keys.stop]
                sums.index_copy_(0, met.rows, own)
                peaks.index_copy_(0, met.rows, peak)
            total = sums[..., -1:]
            logs = (total.log() + peaks[..., None])[..., 0]  # a row of nothing has total 0
            out[unit.item, unit.heads] = (sums[..., :-1] / total.masked_fill(total == 0.0, 1.0)).transpose(0, 1)
            lse[unit.item, unit.heads] = logs.transpose(0, 1)
        return out, lse

    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Gradients of query, key and value."""
        wide = inputs.compute_dtype
        grads = [torch.zeros_like(x, dtype=wide) for x in (inputs.query, inputs.key, value)]
        delta = (results.grad_out.to(wide) * results.out.to(wide)).sum(-1)
        if results.grad_lse is not None:
            delta = delta - results.grad_lse.to(wide)
        order = rows_of_blocks(inputs)
        for unit in units_of(inputs):
            query = unit.rows_of(inputs, inputs.query)
            key, values = unit.keys_of(inputs, inputs.key), unit.keys_of(inputs, value)
            grad_out = unit.rows_of(inputs, results.grad_out)
            taken, lse = (x[unit.item, unit.heads].transpose(0, 1).contiguous() for x in (delta, results.lse))
            of_query, query = torch.zeros_like(query), query * inputs.scale
            for met in _met(inputs, unit, order, query, key, slopes=True):
                span = slice(met.keys.start, met.keys.stop)
                weights = met.scores.sub_(lse.index_select(0, met.rows)[..., None]).exp_()
                go = grad_out.index_select(0, met.rows)
                kept = None if dropped is None else _kept(inputs, unit, met, dropped)
                used = weights if kept is None else weights * kept
                grads[2][unit.item, unit.group, span] += used.flatten(0, 1).mT @ go.flatten(0, 1)
                grad_scores = go @ values[span].mT
                grad_scores = grad_scores if kept is None else grad_scores.mul_(kept)
                grad_scores = grad_scores.sub_(taken.index_select(0, met.rows)[..., None]).mul_(weights)
                if met.slopes is not None:
                    grad_scores *= met.slopes
                of_query.index_add_(0, met.rows, grad_scores @ key[span], alpha=inputs.scale)
                grads[1][unit.item, unit.group, span] += grad_scores.flatten(0, 1).mT @ met.query.flatten(0, 1)
            grads[0][unit.item, unit.heads] = of_query.transpose(0, 1)
        others = (None,) * (len(wanted) - 3)
        return (*(x if needed else None for x, needed in zip(grads, wanted, strict=False)), *others)


class _Met(NamedTuple):
    """A block of keys and queries that chose it.

    Attributes:
        keys: the block.
        rows: indices of queries, int64 ``[rows]``.
        query: scaled, ``[rows, heads, head_dim]``.
        scores: ``[rows, heads, keys]``, -inf at hidden pairs; may be changed.
        slopes: of the softcap, where they are wanted and there is one.
    """

    keys: range
    rows: Tensor
    query: Tensor
    scores: Tensor
    slopes: Tensor | None


def _met(
    inputs: AttentionInputs, unit: Unit, order: RowsOfBlocks, query: Tensor, key: Tensor, *, slopes: bool = False
) -> Iterator[_Met]:
    """All blocks, each with the queries that chose it, some at a time."""
    rule = cast("Chosen", inputs.rule)
    step = max(1, _ENTRIES // (rule.size * unit.together))
    for number in range(rule.blocks):
        keys = range(number * rule.size, min((number + 1) * rule.size, inputs.shape[3]))
        for rows in order.rows(unit, number).split(step):
            q = query.index_select(0, rows)
            scores, slope = q @ key[keys.start : keys.stop].mT, None
            if inputs.softcap is not None:
                scores = scores.div_(inputs.softcap).tanh_()
                slope = 1.0 - scores.square() if slopes else None
                scores = scores.mul_(inputs.softcap)
            yield _Met(keys, rows, q, order.hide_(inputs, scores, unit, rows, keys), slope)


def _kept(inputs: AttentionInputs, unit: Unit, met: _Met, dropped: Dropped) -> Tensor:
    """1 / (1 - p) where a weight is kept, else 0, ``[rows, heads, keys]``."""
    columns = torch.arange(met.keys.start, met.keys.stop, device=met.rows.device)
    q, kv = unit.positions(inputs, met.rows, columns)
    heads = torch.arange(unit.heads.start, unit.heads.stop, device=q.device)[None, :, None]
    item = torch.full_like(heads[:, :1], unit.item)
    kept = dropout.keep(dropped.seed, dropped.items(item), heads, q[:, None, None], kv[None, None], dropped.p)
    return kept.to(met.scores.dtype) / (1.0 - dropped.p)
