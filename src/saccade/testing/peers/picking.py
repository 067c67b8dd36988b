"""Tokens out of which a module's projections pick, so that a self-attention module is an attention and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["pick", "picked", "tokens_of"]


class _Pick(nn.Module):
    """A projection that gives, for each head, one of the three parts of its token, with zeros behind it."""

    def __init__(self, part: int, heads: int, *, widened: bool):
        super().__init__()
        self.part, self.heads, self.widened = part, heads, widened

    def forward(self, x: Tensor) -> Tensor:
        mine = x.unflatten(-1, (self.heads, 3, -1))[..., self.part, :]
        if not self.widened:
            return mine.flatten(-2)
        factor = 3**0.5 if self.part == 0 else 1.0  # heads three times as wide have a scale that is so much less
        return F.pad(factor * mine, (0, 2 * mine.shape[-1])).flatten(-2)


def pick(module: nn.Module, heads: int, *suffixes: str, widened: bool) -> None:
    """Put in place of the projections ``query``, ``key`` and ``value`` what only picks.

    Args:
        module: its self-attention.
        heads: how many it has.
        suffixes: of the names of the projections.
        widened: its heads are as wide as its tokens: three times as wide as what is picked.
    """
    for suffix in suffixes:
        for part, name in enumerate(("query", "key", "value")):
            setattr(module, name + suffix, _Pick(part, heads, widened=widened))


def tokens_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``[batch, len, heads * 3 * head_dim]``: each token's query, key and value for a head beside one another.

    Raises:
        NotImplementedError: a self-attention has other queries than keys, or other widths.
    """
    if not query.shape == key.shape == value.shape or 0 in query.shape:
        raise NotImplementedError("takes as many queries as keys, values as wide as them, and something of each")
    return torch.stack([x.transpose(1, 2) for x in (query, key, value)], 3).flatten(2)


def picked(out: Tensor, query: Tensor) -> Tensor:
    """``[batch, heads, len, head_dim]`` of what the module gives for these queries."""
    return out.unflatten(2, (query.shape[1], -1)).transpose(1, 2)[..., : query.shape[3]]
