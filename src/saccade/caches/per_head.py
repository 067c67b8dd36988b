"""Attention in which each key head holds other tokens, and what every token received."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.caches.layer_cache import MakesMatrix
from saccade.caches.plain import is_plain, tells_heads_apart
from saccade.masks import Mask
from saccade.statistics import Received

__all__ = ["attend_per_head"]


def attend_per_head(
    mechanism: MakesMatrix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Mask | None,
    q_table: Tensor,
    kv_table: Tensor,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """The product, ``[batch, heads, q_len, value_dim]``, and what keys received, ``[batch, heads, columns]``.

    Args:
        mechanism, rule, dropout_p: see `saccade.caches.LayerCache.attend`.
        query: ``[batch, heads, q_len, head_dim]``.
        key, value: ``[batch, kv_heads, columns, width]``.
        q_table: where the queries stand, int64 ``[batch | 1, q_len]``.
        kv_table: where the keys of each key head stand, int64 ``[batch, kv_heads, columns]``.
    """
    batch, heads, q_len, width = query.shape
    kv_heads, columns = key.shape[1:3]
    if is_plain(mechanism) and not tells_heads_apart(rule):
        folded = query.reshape(batch * kv_heads, heads // kv_heads, q_len, width)
        own = q_table.expand(batch, -1).repeat_interleave(kv_heads, 0)
        matrix = mechanism(
            folded, key.flatten(0, 1)[:, None], mask=rule, q_positions=own, kv_positions=kv_table.flatten(0, 1)
        )
        out = matrix.matmul(value.flatten(0, 1)[:, None], dropout_p=dropout_p)
        received = matrix.ask(Received())[0]
        return out.reshape(batch, heads, q_len, value.shape[3]), received.reshape(batch, heads, columns)
    group, outs, all_received = heads // kv_heads, [], []
    for g in range(kv_heads):
        k, v = (x[:, g : g + 1].expand(-1, kv_heads, -1, -1) for x in (key, value))
        matrix = mechanism(query, k, mask=rule, q_positions=q_table, kv_positions=kv_table[:, g])
        outs.append(matrix.matmul(v, dropout_p=dropout_p)[:, g * group : (g + 1) * group])
        all_received.append(matrix.ask(Received())[0][:, g * group : (g + 1) * group])
    return torch.cat(outs, 1), torch.cat(all_received, 1)
