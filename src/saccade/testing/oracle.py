"""The oracle: the definition of attention, dense and in float64, with which every implementation is compared.

This module imports only torch and shares no code with any implementation, so it cannot share a mistake either. The
mask is a bool tensor of all pairs. Inputs must be finite.
"""

from collections.abc import Callable

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
    sink_logit: Tensor | None = None,
    compare: Callable[[Tensor, Tensor], Tensor] | None = None,
    modify: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention by its textbook definition, in float64.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``; query head h uses key head ``h // (heads // kv_heads)``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        allowed: bool ``[batch, heads, q_len, kv_len]``, True = may attend.
        bias: added to the scores after the softcap; broadcasts to the shape of ``allowed``.
        scale: ``head_dim ** -0.5`` when None.
        softcap: if set, scores become ``softcap * tanh(scores / softcap)``.
        sink_logit: ``[heads]``, logits of an additional softmax term without a value, in each row with a visible key.
        compare: ``compare(query, key) -> [batch, heads, q_len, kv_len]`` replaces the dot product. Both inputs are
            float64, and the keys are repeated for every head.
        modify: changes the scores before the bias is added, ``[batch, heads, q_len, kv_len]`` in float64.

    Returns:
        (out, lse) in float64: ``[batch, heads, q_len, value_dim]`` and ``[batch, heads, q_len]``. The lse is the
        natural logarithm of the full denominator, including a sink. A row that may attend to nothing gives 0 and -inf.
    """
    query, key, value = query.double(), key.double(), value.double()
    num_heads, head_dim = query.shape[1], query.shape[3]
    group = torch.arange(num_heads, device=query.device) // (num_heads // key.shape[1])
    key, value = key[:, group], value[:, group]

    scores = query @ key.transpose(2, 3) if compare is None else compare(query, key)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if modify is not None:
        scores = modify(scores)
    if bias is not None:
        scores = scores + bias.double()

    # Compute rows without a visible key as if they saw all keys, then overwrite them, so that their gradients are zero.
    some = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | ~some), -torch.inf)
    if sink_logit is not None:
        sink = sink_logit.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.where(some, torch.softmax(scores, dim=-1), 0.0)[..., : key.shape[2]]
    lse = torch.where(some[..., 0], torch.logsumexp(scores, dim=-1), -torch.inf)
    return weights @ value, lse
