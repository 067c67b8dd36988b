"""Scorer: how much a query is expected to want of keys, or of blocks of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.support.argument_hints import ArgumentHints

__all__ = ["ScoreRows", "Scorer", "exact_dtype"]

ScoreRows = Callable[[range, int], Tensor]
"""``(rows, stop) -> scores [batch | 1, 1 | kv_heads | heads, rows, columns]``; see `Scorer.on`."""


class Scorer(ArgumentHints, ABC):
    """Ranks keys, or blocks of keys, for `saccade.mechanisms.TopK`. Scores only rank, and are never used as weights.

    A scorer of one's own defines `on`; a plain function ``(query, key, rows) -> scores`` will do as well.
    """

    @property
    def index_key(self) -> Tensor | None:
        """What it knows of the keys besides themselves, ``[batch, 1, kv_len, dim]``; None for nothing.

        A `saccade.caches.IndexedCache` keeps it.
        """
        return None

    def with_index_key(self, index_key: Tensor) -> Scorer:
        """The same for more keys."""
        raise NotImplementedError(f"{type(self).__name__} has no index keys")

    @abstractmethod
    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        """A function that scores rows: what is needed of all keys is computed here, once.

        Args:
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, kv_heads, kv_len, head_dim]``.
            block_size: keys of a block.

        Returns:
            ``(rows, stop) -> scores``: of queries ``rows``, a range of indices, for the first ``stop`` keys, or for the
            blocks that hold them; ``[batch | 1, 1 | kv_heads | heads, rows, stop or blocks]``. Of scores of keys, a
            block counts by the largest that the query may see. +inf is always chosen.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def exact_dtype(device: torch.device) -> torch.dtype:
    """What scores are computed in, so that a step and a prompt, whose sums run in another order, agree on them."""
    return torch.float32 if device.type == "mps" else torch.float64
