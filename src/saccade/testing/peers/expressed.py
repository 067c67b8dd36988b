"""What a mask says, for functions that take no mask but settings: which keys are tokens, and what is refused."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["causal_with_padding", "pairs", "same_for_all_heads"]


def causal_with_padding(mask: Tensor) -> Tensor:
    """Which keys are tokens, bool ``[batch, kv_len]``, of a mask that is causal but for padding.

    Raises:
        NotImplementedError: the mask is another one.
    """
    batch, _, _, kv_len = mask.shape
    q, kv = pairs(mask)
    # Of a key that comes after all queries nobody can tell: it stays a token.
    tokens = mask.any(2).any(1) | ~(kv <= q).any(0)
    if not bool((mask == ((kv <= q) & tokens.view(batch, 1, 1, kv_len))).all()):
        raise NotImplementedError("takes causal masks alone, with padding")
    return tokens


def same_for_all_heads(mask: Tensor) -> Tensor:
    """The mask without its heads, bool ``[batch, q_len, kv_len]``.

    Raises:
        NotImplementedError: heads differ.
    """
    if mask.shape[1] == 0 or not bool((mask == mask[:, :1]).all()):
        raise NotImplementedError("takes no mask of heads that differ")
    return mask[:, 0]


def pairs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a mask's queries ``[q_len, 1]`` and keys ``[1, kv_len]``, the last query at the last key."""
    q_len, kv_len = mask.shape[-2:]
    q = torch.arange(kv_len - q_len, kv_len, device=mask.device)
    return q[:, None], torch.arange(kv_len, device=mask.device)[None]
