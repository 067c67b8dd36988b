"""Build the attention matrix of a call to ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.integrations.call_output import CallOutput
from saccade.integrations.mha_inputs import projected, rule_of
from saccade.matrix import AttentionMatrix


def layer_matrix(
    module: Any,
    query: Tensor,
    key: Tensor,
    batch_first: bool,
    *,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    norm: nn.Module | None = None,
) -> AttentionMatrix:
    """Project the queries and keys of a call to ``nn.MultiheadAttention`` again, and return the attention matrix.

    Args:
        module: an object with the weights and options of an ``nn.MultiheadAttention``.
        query, key: the arguments of the call; nested tensors are allowed.
        batch_first: whether the batch is the first dimension of the arguments; True if they have no batch dimension.
        attn_mask, key_padding_mask: the masks of the call.
        norm: the norm that the enclosing layer applies before the attention, or None.
    """
    is_token = None
    if query.is_nested:
        is_self = key is query
        query, is_token = _padded(query)
        key, key_padding_mask = (query, ~is_token) if is_self else _padded(key)
        key_padding_mask = ~is_token if is_self else ~key_padding_mask
    is_self = key is query
    query, key = (x if x.dim() == 3 else x[None] for x in (query, key))
    if not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if norm is not None:
        query = norm(query)
        key = query if is_self else norm(key)
    q, k, _ = projected(module, query, key)
    batch, heads, kv_len, _ = k.shape
    rule, bias = rule_of(attn_mask, key_padding_mask, (batch, heads, q.shape[2], kv_len))
    positions: dict[str, Any] = {}
    if is_token is not None:  # position -1 marks padding
        position = torch.arange(kv_len, device=k.device).expand(batch, -1)
        positions = {"q_positions": torch.where(is_token, position, -1), "kv_positions": range(kv_len)}
    return AttentionMatrix(q, k, rule, bias=bias, **positions)


def layer_output(
    module: Any, inputs: Sequence[Tensor], out: Tensor, batch_first: bool, dropout_p: float
) -> CallOutput | None:
    """Wrap the output of a call to ``nn.MultiheadAttention`` as a `CallOutput`; return None for nested tensors.

    Args:
        module: an object with the weights and options of an ``nn.MultiheadAttention``.
        inputs: query, key and value of the call.
        out: the output of the call.
        batch_first: whether the batch is the first dimension of the arguments; True if they have no batch dimension.
        dropout_p: dropout probability of the call.
    """
    if any(x.is_nested for x in inputs):
        return None

    def arranged(x: Tensor) -> Tensor:
        x = x if x.dim() == 3 else x[None]
        return x if batch_first else x.transpose(0, 1)

    def to_heads(grad: Tensor) -> Tensor:
        # The output projection y = x W.T is linear, so dL/dx = dL/dy W.
        weight = module.out_proj_weight if hasattr(module, "out_proj_weight") else module.out_proj.weight
        return (arranged(grad) @ weight.detach()).unflatten(2, (module.num_heads, -1)).transpose(1, 2)

    def value() -> Tensor:
        heads = projected(module, *map(arranged, inputs)).value
        assert heads is not None  # values were passed
        return heads

    return CallOutput(out, to_heads, value, dropout_p)


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pad a nested input of ``nn.MultiheadAttention`` to ``[batch, longest, width]``; also return a token mask."""
    lengths = torch.tensor([len(item) for item in x.unbind()], device=x.device)
    padded = x.to_padded_tensor(0.0)
    return padded, torch.arange(padded.shape[1], device=x.device) < lengths[:, None]
