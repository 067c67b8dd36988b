"""``F.scaled_dot_product_attention`` as it is, and ``nn.MultiheadAttention`` without its projections.

The module takes ``[batch, len, embed_dim]`` and masks in which True = *ignore*; both are converted here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.peer import Library, Peer

__all__ = ["TORCH", "across", "with_flag", "with_mask", "within"]


def with_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Pass the mask as ``attn_mask``, where True = may attend as with us; with a bias, as a float mask."""
    if bias is not None:
        mask = bias.expand(mask.shape).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)


def with_flag(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Pass a causal mask as ``is_causal=True``, any other as ``attn_mask``."""
    q_len, kv_len = mask.shape[2:]
    causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=mask.device).tril(kv_len - q_len)
    if not bool((mask == causal).all()):
        return with_mask(query, key, value, mask, scale=scale)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def across(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    need_weights: bool,
    training: bool,
) -> Tensor:
    """Call ``module(query, key, value)`` with identity projections; with a bias the mask is a float mask."""
    module = _module(query, value, 1).train(training)
    hidden = ~mask if bias is None else bias.expand(mask.shape).masked_fill(~mask, -torch.inf)
    tensors = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
    out, _ = module(*tensors, attn_mask=hidden.flatten(0, 1), need_weights=need_weights)
    return out.unflatten(2, (query.shape[1], query.shape[3])).transpose(1, 2)


def within(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, need_weights: bool, training: bool) -> Tensor:
    """Call ``module(x, x, x)``: only self-attention takes the module's fast path in evaluation.

    The sequence x holds a token for each query and then one for each key and value. A token is as wide as query, key,
    value and as much again, out of which the projections pick, so that the scale is half of what it would be, and
    the query is doubled for it. A query's token may attend to the keys' tokens that the mask allows.
    """
    (batch, heads, q_len, head_dim), kv_len = query.shape, key.shape[2]
    module = _module(query, value, 4).train(training)
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
    width = q.shape[2]
    queries, keys = F.pad(q, (0, 3 * width)), F.pad(torch.cat([k, v], 2), (width, width))
    x = torch.cat([queries, keys], 1)
    hidden = mask.new_zeros(batch, heads, q_len + kv_len, q_len + kv_len)
    hidden[:, :, :q_len] = F.pad(~mask, (q_len, 0), value=True)
    out, _ = module(x, x, x, attn_mask=hidden.flatten(0, 1), need_weights=need_weights)
    return out[:, :q_len, :width].unflatten(2, (heads, head_dim)).transpose(1, 2)


def _module(query: Tensor, value: Tensor, parts: int) -> nn.MultiheadAttention:
    if value.shape[3] != query.shape[3]:
        raise NotImplementedError("takes no values of another width than the keys")
    return _picking(query.shape[1], query.shape[3], parts, query.dtype, query.device)


@cache
def _picking(heads: int, head_dim: int, parts: int, dtype: torch.dtype, device: torch.device) -> nn.MultiheadAttention:
    """Build a module that copies each head's query, key and value from tokens of 1 part or of 4."""
    width, embed_dim = heads * head_dim, heads * head_dim * parts
    module = nn.MultiheadAttention(embed_dim, heads, batch_first=True, dtype=dtype, device=device)
    for parameter in module.requires_grad_(False).parameters():
        parameter.zero_()
    columns = torch.arange(width)
    rows = columns + columns // head_dim * head_dim * (parts - 1)  # the first row of each head
    for number in range(3):
        factor = parts**0.5 if number == 0 else 1.0
        first = 0 if parts == 1 else number * width
        module.in_proj_weight[number * embed_dim + rows, first + columns] = factor
    module.out_proj.weight[columns, rows] = 1.0
    return module


def _attention_module(call: str, adapter: Callable[..., Tensor], *, need_weights: bool, training: bool) -> Peer:
    return Peer(call, partial(adapter, need_weights=need_weights, training=training))


TORCH = Library(
    "torch",
    "torch",
    (
        Peer("F.scaled_dot_product_attention(q, k, v, mask)", with_mask, gqa=True),
        Peer("F.scaled_dot_product_attention(q, k, v, is_causal=True)", with_flag, gqa=True),
        _attention_module("mha(q, k, v, need_weights=True)", across, need_weights=True, training=True),
        _attention_module("mha(q, k, v, need_weights=False)", across, need_weights=False, training=True),
        _attention_module("mha.train()(x, x, x, need_weights=False)", within, need_weights=False, training=True),
        _attention_module("mha.eval()(x, x, x, need_weights=False)", within, need_weights=False, training=False),
        _attention_module("mha.eval()(x, x, x, need_weights=True)", within, need_weights=True, training=False),
    ),
)
