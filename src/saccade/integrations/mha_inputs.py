"""Convert the inputs of ``nn.MultiheadAttention`` to per-head tensors, a mask rule and a bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.integrations.tensor_masks import both, mask_of_tensor, rule_of_tensor
from saccade.masks import Dense, Full, Mask, from_key_padding_mask
from saccade.support.validation import check_holds_values

CALLED_AS = "nn.MultiheadAttention"  # the name in error messages


class Projected(NamedTuple):
    """Projected inputs of ``nn.MultiheadAttention``, ``[batch, heads, len, head_dim]``, including added keys."""

    query: Tensor
    key: Tensor
    value: Tensor | None


def projected(module: Any, query: Tensor, key: Tensor, value: Tensor | None = None) -> Projected:
    """Project queries, keys and values ``[batch, len, width]`` and split them into heads.

    Args:
        module: an object with the weights and options of an ``nn.MultiheadAttention``.
        query, key, value: the arguments of the call, with the batch first.
    """
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    parts = zip((query, key, value), weights, biases, (None, module.bias_k, module.bias_v), strict=True)
    heads: list[Tensor] = []
    for x, weight, bias, more in parts:
        if x is None:
            continue
        rows = F.linear(x, weight, bias)
        if more is not None:
            rows = torch.cat([rows, more.to(rows.dtype).expand(len(rows), -1, -1)], 1)
        if module.add_zero_attn and heads:  # keys and values
            rows = F.pad(rows, (0, 0, 0, 1))
        heads.append(rows.unflatten(2, (module.num_heads, -1)).transpose(1, 2))
    return Projected(heads[0], heads[1], heads[2] if value is not None else None)


def rule_of(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, shape: tuple[int, int, int, int]
) -> tuple[Mask, Tensor | None]:
    """Convert the masks of ``nn.MultiheadAttention``, where True means *ignore*, to a mask rule and a bias.

    Raises:
        TypeError: ``attn_mask`` has no values, so torch's layers would add uninitialized memory.
    """
    batch, heads, _, kv_len = shape
    rule: Mask = Full()
    bias: Tensor | None = None
    if attn_mask is not None:
        hint = "a bool tensor, True = ignore; saccade.replace_attention(model) makes it accept a CausalBias"
        check_holds_values("attn_mask", attn_mask, causal_hint=hint)
        mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
        mask = mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask[None, None]
        rule, bias = rule_of_tensor(_wider(mask, kv_len), kv_len)
    if key_padding_mask is not None:
        padding = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
        padding = ~padding if padding.dtype == torch.bool else padding
        allowed, added = mask_of_tensor(_wider(padding, kv_len))
        rule = rule if allowed is None else both(rule, from_key_padding_mask(~allowed))
        if added is not None:
            bias = added[:, None, None] if bias is None else bias + added[:, None, None]
    return rule, bias


def with_added_keys(pattern: Mask, q_len: int, kv_len: int, num_added: int) -> Mask:
    """Append ``num_added`` keys that every query may attend to, and return the pattern as a dense mask."""
    if not num_added:
        return pattern
    return Dense(F.pad(pattern.to_dense(q_len, kv_len), (0, num_added), value=True))


def _wider(mask: Tensor, kv_len: int) -> Tensor:
    """Add columns to a mask tensor for the keys that ``nn.MultiheadAttention`` adds; every query may attend to them."""
    more = kv_len - mask.shape[-1]
    return F.pad(mask, (0, more), value=mask.dtype == torch.bool) if more else mask
