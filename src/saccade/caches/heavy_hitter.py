"""HeavyHitterCache: the tokens that were attended to most, and the last ones."""

from __future__ import annotations

from torch import Tensor

from saccade.caches.eviction import EvictingCache, Held

__all__ = ["HeavyHitterCache"]


class HeavyHitterCache(EvictingCache):
    r"""Keeps for each key head the tokens that were attended to most, and the last ones.

    After every call, whatever exceeds ``budget`` goes: of the tokens before the last ``recent``, those that received
    least attention from all queries so far, summed over the heads that share the keys. A sum favours early tokens,
    which more queries have seen, and what goes is gone: a fact that is asked for late may not be there.

    Equals, raises and costs what an `EvictingCache` does in which all queries judge.

    Args:
        budget, recent: see `EvictingCache`.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = HeavyHitterCache(4, recent=2), torch.randn(1, 2, 10, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.shape, cache.kv_positions[0, :, -2:].tolist()
        (torch.Size([1, 2, 4]), [[8, 9], [8, 9]])

    Reference: Zhang et al. 2023, arXiv:2306.14048, section 4 (H2O).
    """

    def score(self, held: Held) -> Tensor:
        return held.received
