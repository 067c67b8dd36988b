"""The examples as objects, and the tokens that mechanisms and caches are run on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from answers.examples import CACHES, FEW, MASKS, MECHANISMS
from saccade import caches, masks, mechanisms, scorers
from saccade.masks import Mask


class ShortKeys(caches.EvictingCache):
    """The rule of one's own that an `EvictingCache` wants: tokens with the longest keys go."""

    voting_queries = 0

    def score(self, held: caches.StoredTokens) -> Tensor:
        return -held.key.norm(dim=-1)


@cache
def mask_named(name: str) -> Mask:
    """Return an example of a mask, for `TOKENS` tokens."""
    made: Mask = eval(MASKS[name], {"torch": torch} | {one: getattr(masks, one) for one in masks.__all__})
    return made


@cache
def tokens() -> tuple[Tensor, ...]:
    """Query, key and value of two heads, and an indexer's query, key and weight."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = (drawn(1, 2, FEW, 8) for _ in range(3))
    key = torch.nn.functional.normalize(key, dim=-1)  # as the delta rule wants them
    return query, key, value, drawn(1, 3, FEW, 4), drawn(1, 1, FEW, 4), drawn(1, 3, FEW)


def mechanism_named(
    name: str,
    queries: slice = slice(None),
    keys: slice = slice(None),
    *,
    heads: int = 2,
    head_dim: int = 8,
    kv_len: int = FEW,
    segment: int = 8,
) -> Any:
    """Return an example of a mechanism, for these tokens."""
    query, key, weight = tokens()[3:]
    indexer = query[:, :, queries], key[:, :, keys], weight[:, :, queries]
    names = {one: getattr(mechanisms, one) for one in mechanisms.__all__} | vars(scorers)
    names |= dict(zip("qkw", indexer, strict=True)) | {"heads": heads, "head_dim": head_dim}
    names |= {"kv_len": kv_len, "segment": segment}
    torch.manual_seed(0)
    return eval(MECHANISMS[name], names).double()


def cache_named(name: str, head_dim: int = 8) -> Any:
    """Return an example of a cache."""
    names = {one: getattr(caches, one) for one in caches.__all__}
    return eval(CACHES[name], names | {"head_dim": head_dim, "ShortKeys": ShortKeys})
