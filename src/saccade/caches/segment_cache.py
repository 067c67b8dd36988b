"""SegmentCache: the open segment and some tokens before it, as Transformer-XL remembers."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.caches.ring_buffer import RingCache
from saccade.masks import Segments
from saccade.support.validation import check_int

__all__ = ["SegmentCache"]


class SegmentCache(RingCache):
    r"""Keys and values of the open segment and of the ``memory`` tokens before it; all others are forgotten.

    It equals the dense run with the layer's mask ``& masks.Segments(segment, memory)``: any causal mask, any split of
    the text into calls, ragged batches too. Segments are counted in positions, so that each item has its own.

    Gradients flow to the keys and values of the call itself; what is remembered is a constant. To train as the paper
    does, give the text in calls of one segment.

    Args:
        segment: positions of a segment, at least 1.
        memory: tokens before the open segment that are kept, at least 0.

    Raises:
        ValueError: sizes out of range, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a crop to where tokens are missing, or a mechanism that does not take the mask.

    Cost: memory ``batch * kv_heads * (segment + memory) * (head_dim + value_dim)`` elements, taken at once, and 8 bytes
    for each token held of each item (of all, if they stand alike). A step reads what is held.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> softmax, cache = mechanisms.Softmax(), SegmentCache(4, 2)
        >>> q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
        >>> parts = [cache.attend(softmax, *(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(20)]
        >>> dense = softmax(q, k, mask=masks.Segments(4, 2)) @ v
        >>> torch.allclose(torch.cat(parts, 2), dense, atol=1e-5), cache.nbytes
        (True, 816)

    Reference: Dai et al. 2019, arXiv:1901.02860, section 3.2 (Transformer-XL).
    """

    settings = ("segment", "memory")
    equals = "the dense run with masks.Segments(segment, memory)"

    def __init__(self, segment: int, memory: int):
        self.segment, self.memory = check_int("segment", segment), check_int("memory", memory, 0)
        super().__init__(Segments(self.segment, self.memory), 0, self.segment + self.memory)

    def _seen(self, x: Tensor, place: int) -> Tensor:
        first = max(0, place // self.segment * self.segment - self.memory) % self._slots
        stop = place % self._slots + 1
        return x[:, :, first:stop] if first < stop else torch.cat([x[:, :, first:], x[:, :, :stop]], 2)
