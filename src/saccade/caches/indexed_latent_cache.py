"""IndexedLatentCache: stores one latent and one index key per token."""

from __future__ import annotations

from typing import ClassVar

from saccade.caches.indexed_cache import IndexedCache
from saccade.caches.latent_cache import LatentCache
from saccade.caches.state_tensors import Leaf


class IndexedLatentCache(IndexedCache, LatentCache):
    """A cache for latent attention with an indexer: the latents of a `LatentCache` and the keys of an `IndexedCache`.

    `saccade.nn.LatentAttention.new_cache` returns one if the layer has an indexer.

    Args:
        latent_dim, max_len: see `LatentCache`.

    Raises:
        ValueError: see `LatentCache`.
        UnsupportedError: see `IndexedCache`.

    Cost: as for a `LatentCache`, plus ``batch * columns * dim`` elements for index keys.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> from saccade.scorers import LightningIndexer
        >>> cache, query, latents = IndexedLatentCache(8), torch.randn(1, 4, 5, 10), torch.randn(1, 1, 5, 10)
        >>> scorer = LightningIndexer(torch.randn(1, 4, 5, 6), torch.randn(1, 1, 5, 6), torch.ones(1, 4, 5))
        >>> out = cache.attend(mechanisms.TopK(scorer, 3), query, latents, latents[..., :8], mask=masks.Causal())
        >>> cache.value.shape, cache.index_key.shape
        (torch.Size([1, 1, 5, 8]), torch.Size([1, 1, 5, 6]))

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1.
    """

    leaves: ClassVar[tuple[Leaf, ...]] = (*LatentCache.leaves, *IndexedCache.leaves[-1:])
