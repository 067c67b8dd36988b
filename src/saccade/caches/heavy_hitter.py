"""HeavyHitterCache: the tokens that were attended to most, and the last ones."""

from __future__ import annotations

from torch import Tensor

from saccade.caches.eviction import EvictingCache, Held

__all__ = ["HeavyHitterCache"]


class HeavyHitterCache(EvictingCache):
    r"""Keeps for each key head the tokens that were attended to most, and the last ones.

    After every call, whatever exceeds ``budget`` goes: of the tokens before the last ``recent``, those that received
    least attention from all queries so far, summed over the heads that share the keys. A call reads what was held
    before it and its own tokens, so that a prompt is exact. Padding, wherever it stands, takes no token's place.

    Equals, call by call, the dense run in which the tokens that its key head let go before are hidden; as long as no
    more than ``budget`` tokens came, the run with a `KVCache`. A sum favours early tokens, which more queries have
    seen, and what goes is gone: a fact that is asked for late may not be there.

    Args:
        budget: tokens that each key head holds after a call.
        recent: last tokens that stay; half of the budget when None.

    Raises:
        ValueError: sizes out of range, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a crop to somewhere, or a matrix whose rows are no distributions.

    Cost: memory ``batch * kv_heads * budget`` keys and values, and 12 bytes for each (16 in float64). A call sweeps its
    weights a second time, a prompt of n tokens so n²/2 of them, in O(n) memory.

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
