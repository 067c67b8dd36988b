"""``torch.nn.functional.scaled_dot_product_attention`` in the kit's calling convention."""

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["with_flag", "with_mask"]


def with_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The mask as ``attn_mask``, where True = may attend as with us; a bias makes it a float mask."""
    if bias is not None:
        mask = bias.expand(mask.shape).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)


def with_flag(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """A causal mask as ``is_causal=True``, any other as ``attn_mask``."""
    q_len, kv_len = mask.shape[2:]
    causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=mask.device).tril(kv_len - q_len)
    if not bool((mask == causal).all()):
        return with_mask(query, key, value, mask, scale=scale)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
