"""SnapKVCache: of a prompt, what its last tokens attended to."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from saccade.caches.eviction import EvictingCache, Held
from saccade.support.errors import value_error
from saccade.support.validation import check_int

__all__ = ["SnapKVCache"]


class SnapKVCache(EvictingCache):
    r"""Keeps of a prompt what its last tokens attended to; what comes after it is kept as a whole.

    Once, after the first call, each key head keeps the last ``window`` tokens and, of those before, the
    ``budget - window`` that received most attention from these last ones: summed over them and over the heads that
    share the keys, then averaged over ``pool`` neighbouring tokens, so that what is kept has some context. Padding
    neither judges nor takes a token's place; an item that is nothing but padding in the first call keeps all tokens.

    Equals the dense run, and after the first call that in which the tokens are hidden that a key head let go. It
    depends on the question standing at the end of the prompt: what only a later question asks for may be gone.

    Args:
        budget: tokens of the first call that each key head keeps.
        window: last tokens of the first call, which judge and are kept; at most the budget.
        pool: neighbouring tokens that are averaged, an odd number.

    Raises:
        ValueError: sizes that do not fit together, or what an `EvictingCache` refuses.
        UnsupportedError: a crop into a first call of which tokens were let go, or a matrix whose rows are no
            distributions.

    Cost: memory ``batch * kv_heads * (budget + later tokens)`` keys and values, and 12 bytes for each (16 in float64).
    Judging costs a sweep over ``window`` rows, once.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = SnapKVCache(6, window=2, pool=1), torch.randn(1, 2, 20, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.shape
        torch.Size([1, 2, 6])

    Reference: Li et al. 2024, arXiv:2404.14469, section 4 (SnapKV); here a set for each key head, not each query head.
    """

    settings = ("budget", "window", "pool")
    evicts_once = True

    def __init__(self, budget: int, *, window: int = 32, pool: int = 5):
        budget = check_int("budget", budget)
        self.window, self.pool = check_int("window", window), check_int("pool", pool)
        if window > budget:
            raise value_error("window", f"be at most the budget {budget}", window)
        if pool % 2 == 0:
            raise value_error("pool", "be odd", pool)
        super().__init__(budget, recent=window)
        self.judges = window

    def score(self, held: Held) -> Tensor:
        return F.avg_pool1d(held.received, self.pool, 1, self.pool // 2)
