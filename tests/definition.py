"""Softmax attention as its definition in float64, shared with none of the library's code."""

import math

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse; ``allowed`` is bool and broadcasts to [batch, heads, q_len, kv_len]."""
    q, k, v = query.double(), key.double(), value.double()
    share = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("bhld,bhsd->bhls", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    allowed = allowed.expand(scores.shape)
    empty = ~allowed.any(-1, keepdim=True)
    scores = torch.where(empty, 0.0, scores.masked_fill(~allowed, -math.inf))
    weights = torch.where(empty, 0.0, scores.softmax(-1)) if scores.shape[-1] else scores
    lse = (
        torch.where(empty[..., 0], -math.inf, scores.logsumexp(-1)) if scores.shape[-1] else -scores.sum(-1) - math.inf
    )
    return torch.einsum("bhls,bhse->bhle", weights, v), lse
