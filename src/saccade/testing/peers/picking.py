"""Tokens out of which a module's projections pick, so that a self-attention module is an attention and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["pick", "tokens_of", "with_heads"]


class _Pick(nn.Module):
    """A projection that gives one of three parts of a token."""

    def __init__(self, part: int):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        # Cloned, as a projection gives something new: who writes into it changes no input.
        return x.chunk(3, -1)[self.part].clone()


def pick(module: nn.Module, *suffixes: str) -> None:
    """Put in place of the module's projections ``query``, ``key`` and ``value`` what only picks."""
    for suffix in suffixes or ("",):
        for part, name in enumerate(("query", "key", "value")):
            setattr(module, name + suffix, _Pick(part))


def tokens_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``[batch, len, 3 * heads * head_dim]``: each token's query, key and value beside one another.

    Raises:
        NotImplementedError: a self-attention has other queries than keys, or other widths.
    """
    if not query.shape == key.shape == value.shape or 0 in query.shape:
        raise NotImplementedError("takes as many queries as keys, values as wide as them, and something of each")
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], 2)


def with_heads(out: Tensor, heads: int) -> Tensor:
    """``[batch, heads, len, head_dim]`` of what the module gives."""
    return out.unflatten(2, (heads, -1)).transpose(1, 2)
