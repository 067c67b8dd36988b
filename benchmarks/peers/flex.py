"""FlexAttention without ``torch.compile``: unfused, on any CPU."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from benchmarks.peers.peer import Library, Peer

__all__ = ["FLEX", "attend", "attend_with_lse"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Pass the mask as a ``mask_mod``, bias and softcap as a ``score_mod``."""
    return attend_with_lse(query, key, value, mask, bias=bias, scale=scale, softcap=softcap)[0]


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Do the same and return the log-sum-exp as well."""
    batch, heads, q_len, kv_len = mask.shape
    added = None if bias is None else bias.expand(mask.shape)

    def allows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask[b, h, q, kv]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if added is None else score + added[b, h, q, kv]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning about the missing torch.compile
        out, aux = flex_attention(
            query,
            key,
            value,
            score_mod=None if bias is None and softcap is None else score_mod,
            block_mask=create_block_mask(allows, batch, heads, q_len, kv_len, device=str(mask.device))
            if q_len
            else None,
            scale=scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
    assert aux.lse is not None
    return out, aux.lse


FLEX = Library(
    "flex",
    "torch",
    (Peer("flex_attention(q, k, v, score_mod, block_mask)", attend, with_lse=attend_with_lse, gqa=True),),
)
