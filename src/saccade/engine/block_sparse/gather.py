"""Chosen keys gathered for each query, some queries at a time: exact, O(queries * chosen keys) time, any device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from saccade.engine import dropout
from saccade.engine.bias.term import HidingTerm
from saccade.engine.block_sparse.index import Unit, chosen_pairs, reasons_of, sure_spans, units_of
from saccade.engine.block_sparse.selected_blocks import Chosen
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, KernelByHand, Tensors
from saccade.engine.memory_accounting import Cost, Held
from saccade.engine.tiles.tile_scores import normalised

__all__ = ["Gathered"]

_ENTRIES = 1 << 20  # numbers of keys that are gathered at a time: 4 MB


class Gathered(KernelByHand):
    """Exact attention to chosen keys, which are copied for each query.

    Cost: time grows with the chosen pairs, but each is dear: a key is read for one query and the heads that share it.
    Memory beside inputs and outputs is that of a few rows.
    """

    name = "gathered"

    def reasons(self, inputs: AttentionInputs, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs; empty if it can."""
        return reasons_of(inputs)

    def pairs(self, inputs: AttentionInputs) -> int:
        """Pairs in the chosen blocks."""
        return chosen_pairs(inputs)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """What the rows compute and hold; nothing is run."""
        batch, heads, q_len, _ = inputs.shape
        wide = inputs.compute_dtype.itemsize
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + wide)
        return Cost(batch * q_len, self.pairs(inputs), Held(results + 4 * _ENTRIES * wide, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        out = value.new_empty(*inputs.shape[:3], value.shape[3])
        lse = value.new_empty(inputs.shape[:3], dtype=inputs.compute_dtype)
        for unit, met in _met(inputs, value):
            weights, logs = normalised(met.scores)
            weights = weights if dropped is None else weights * _kept(inputs, unit, met, dropped)
            own = slice(met.rows.start, met.rows.stop)
            out[unit.item, unit.heads, own] = (weights @ met.value).transpose(0, 1).to(out.dtype)
            lse[unit.item, unit.heads, own] = logs.T
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
        of_query, of_key, of_value = (torch.zeros_like(x, dtype=wide) for x in (inputs.query, inputs.key, value))
        delta = (results.grad_out.to(wide) * results.out.to(wide)).sum(-1)
        if results.grad_lse is not None:
            delta = delta - results.grad_lse.to(wide)
        for unit, met in _met(inputs, value):
            place = (unit.item, unit.heads, slice(met.rows.start, met.rows.stop))
            go, taken, lse = (x[place].transpose(0, 1).to(wide) for x in (results.grad_out, delta, results.lse))
            weights = (met.scores - lse[..., None]).exp_()
            kept = None if dropped is None else _kept(inputs, unit, met, dropped)
            used = weights if kept is None else weights * kept
            keys = met.keys.reshape(-1)
            of_value[unit.item, unit.group].index_add_(0, keys, (used.mT @ go).flatten(0, 1))
            grad = go @ met.value.mT
            grad = grad if kept is None else grad.mul_(kept)
            grad = grad.sub_(taken[..., None]).mul_(weights)
            grad = grad if met.slopes is None else grad.mul_(met.slopes)
            of_query[place] = (grad @ met.key).mul_(inputs.scale).transpose(0, 1)
            of_key[unit.item, unit.group].index_add_(0, keys, (grad.mT @ met.query).flatten(0, 1))
        grads = zip((of_query, of_key, of_value), wanted, strict=False)
        return (*(x if needed else None for x, needed in grads), *(None for _ in wanted[3:]))


class _Met(NamedTuple):
    """Some queries and the keys that each of them chose.

    Attributes:
        rows: the queries.
        keys: int64 ``[rows, keys]``; 0 in places that are not used.
        query: scaled, ``[rows, heads, head_dim]``.
        key, value: ``[rows, keys, width]``.
        scores: ``[rows, heads, keys]``, -inf at hidden pairs.
        slopes: of the softcap; None without one.
    """

    rows: range
    keys: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    slopes: Tensor | None


def _met(inputs: AttentionInputs, value: Tensor) -> Iterator[tuple[Unit, _Met]]:
    """All queries, a few at a time, of all heads that share a choice and their keys."""
    rule, (_, _, q_len, kv_len) = cast("Chosen", inputs.rule), inputs.shape
    within = torch.arange(rule.size, device=inputs.device)
    slots = rule.index.shape[3] * rule.size
    step = max(1, _ENTRIES // max(1, slots * max(inputs.query.shape[3], value.shape[3])))
    sure = sure_spans(inputs, rule)
    for unit in units_of(inputs):
        key, values = unit.keys_of(inputs, inputs.key), unit.keys_of(inputs, value)
        chosen = rule.index[unit.item if len(rule.index) > 1 else 0, unit.chosen]
        for first in range(0, q_len, step):
            rows = range(first, min(first + step, q_len))
            own = slice(rows.start, rows.stop)
            keys = (chosen[own, :, None].long() * rule.size + within).flatten(1)
            hidden = _hidden(inputs, unit, rows, keys, sure)
            keys = keys.masked_fill_(keys >= kv_len, 0)
            q = inputs.query[unit.item, unit.heads, own].transpose(0, 1).to(inputs.compute_dtype) * inputs.scale
            k = key[keys]
            scores, slopes = q @ k.mT, None
            if inputs.softcap is not None:
                scores = scores.div_(inputs.softcap).tanh_()
                slopes = 1.0 - scores.square()
                scores = scores.mul_(inputs.softcap)
            yield unit, _Met(rows, keys, q, k, values[keys], scores.masked_fill_(hidden, -math.inf), slopes)


def _hidden(inputs: AttentionInputs, unit: Unit, rows: range, keys: Tensor, sure: tuple[Tensor, Tensor]) -> Tensor:
    """Which chosen keys a query may not see, bool ``[rows, heads | 1, keys]``."""
    rule, kv_len = cast("Chosen", inputs.rule), inputs.shape[3]
    starts, ends = (x[unit.item if len(x) > 1 else 0, rows.start : rows.stop, None] for x in sure)
    inside = keys < kv_len
    known = ((keys[..., None] >= starts) & (keys[..., None] < ends)).any(-1) | ~inside
    hidden = ~inside[:, None]
    if not bool(known.all()):
        b = torch.full((1, 1, 1, 1), unit.item, device=keys.device)
        h = torch.arange(unit.heads.start, unit.heads.stop, device=keys.device)[None, :, None, None]
        q = torch.arange(rows.start, rows.stop, device=keys.device)[None, None, :, None] + rule.origin[0]
        allowed = rule.rule.allows(b, h, q, keys.clamp(max=kv_len - 1)[None, None] + rule.origin[1])
        hidden = hidden | ~allowed.expand(1, -1, *keys.shape)[0].transpose(0, 1)
    if isinstance(inputs.bias, HidingTerm):
        of_keys = inputs.bias.keys[unit.item, unit.heads][:, keys.clamp(max=kv_len - 1)]
        hidden = hidden | of_keys.transpose(0, 1)
    return hidden


def _kept(inputs: AttentionInputs, unit: Unit, met: _Met, dropped: Dropped) -> Tensor:
    """1 / (1 - p) where a weight is kept, else 0, ``[rows, heads, keys]``."""
    rows = torch.arange(met.rows.start, met.rows.stop, device=met.keys.device)
    q, kv = unit.positions(inputs, rows[:, None], met.keys)
    heads = torch.arange(unit.heads.start, unit.heads.stop, device=q.device)[None, :, None]
    item = torch.full_like(heads[:, :1], unit.item)
    kept = dropout.keep(dropped.seed, dropped.items(item), heads, q[..., None, :], kv[:, None], dropped.p)
    return kept.to(met.scores.dtype) / (1.0 - dropped.p)
