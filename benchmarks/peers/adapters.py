"""Helpers for adapters: read padding off a mask, and make self-attention modules that apply no projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["causal_with_padding", "pairs", "pick", "picked", "same_for_all_heads", "tokens_of"]


def causal_with_padding(mask: Tensor) -> Tensor:
    """Return which keys are no padding, bool ``[batch, kv_len]``, for a mask that is causal apart from padding.

    Raises:
        NotImplementedError: the mask is another one.
    """
    batch, _, _, kv_len = mask.shape
    q, kv = pairs(mask)
    # No query can see a key after all queries, so it counts as a token.
    tokens = mask.any(2).any(1) | ~(kv <= q).any(0)
    if not bool((mask == ((kv <= q) & tokens.view(batch, 1, 1, kv_len))).all()):
        raise NotImplementedError("takes only causal masks, with padding")
    return tokens


def same_for_all_heads(mask: Tensor) -> Tensor:
    """Return the mask without its axis of heads, bool ``[batch, q_len, kv_len]``.

    Raises:
        NotImplementedError: heads differ.
    """
    if mask.shape[1] == 0 or not bool((mask == mask[:, :1]).all()):
        raise NotImplementedError("takes no mask of heads that differ")
    return mask[:, 0]


def pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions of queries ``[q_len, 1]`` and keys ``[1, kv_len]``, the last query at the last key."""
    q_len, kv_len = mask.shape[-2:]
    q = torch.arange(kv_len - q_len, kv_len, device=mask.device)
    return q[:, None], torch.arange(kv_len, device=mask.device)[None]


class _Pick(nn.Module):
    """A projection that returns, for each head, one of the three parts of its token, padded with zeros."""

    def __init__(self, part: int, heads: int, *, widened: bool):
        super().__init__()
        self.part, self.heads, self.widened = part, heads, widened

    def forward(self, x: Tensor) -> Tensor:
        part = x.unflatten(-1, (self.heads, 3, -1))[..., self.part, :]
        if not self.widened:
            return part.flatten(-2)
        factor = 3**0.5 if self.part == 0 else 1.0  # undoes the smaller scale of heads three times as wide
        return F.pad(factor * part, (0, 2 * part.shape[-1])).flatten(-2)


def pick(module: nn.Module, heads: int, *suffixes: str, widened: bool) -> None:
    """Replace the projections ``query``, ``key`` and ``value`` by ones that copy a part of each token.

    Args:
        module: a self-attention module.
        heads: number of heads.
        suffixes: of the names of the projections.
        widened: heads are as wide as tokens, three times the width of the copied part.
    """
    for suffix in suffixes:
        for part, name in enumerate(("query", "key", "value")):
            setattr(module, name + suffix, _Pick(part, heads, widened=widened))


def tokens_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Join query, key and value of each head into tokens ``[batch, len, heads * 3 * head_dim]``.

    Raises:
        NotImplementedError: the shapes differ, or are empty: a self-attention module has one sequence.
    """
    if not query.shape == key.shape == value.shape or 0 in query.shape:
        raise NotImplementedError("takes as many queries as keys, values as wide as them, and something of each")
    return torch.stack([x.transpose(1, 2) for x in (query, key, value)], 3).flatten(2)


def picked(out: Tensor, query: Tensor) -> Tensor:
    """Return the module's output as ``[batch, heads, len, head_dim]``."""
    return out.unflatten(2, (query.shape[1], -1)).transpose(1, 2)[..., : query.shape[3]]
