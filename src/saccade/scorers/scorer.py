"""Scorer: the base class for ranking keys, or blocks of keys, by how much a query is expected to need them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.support.argument_hints import ArgumentHints
from saccade.support.validation import check_type

ScoreRows = Callable[[range, int], Tensor]
"""``(rows, stop) -> scores [batch | 1, 1 | kv_heads | heads, rows, columns]``; see `Scorer.on`."""


class Scorer(ArgumentHints, ABC):
    """Base class for ranking keys or blocks in `saccade.mechanisms.TopK`. Scores are not used as weights.

    Subclass `BlockScorer` to rank blocks by their summaries. Other scorers define `on`; a plain function
    ``(query, key, rows) -> scores`` works as well.
    """

    @property
    def index_key(self) -> Tensor | None:
        """Additional key tensor that the scorer needs, ``[batch, 1, kv_len, dim]``; None if there is none.

        A `saccade.caches.IndexedCache` stores this tensor.
        """
        return None

    def with_index_key(self, index_key: Tensor) -> Scorer:
        """Return a copy of this scorer with different index keys, such as cached index keys."""
        raise NotImplementedError(f"{type(self).__name__} has no index keys")

    @abstractmethod
    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        """Return a function that scores a range of rows. Work shared by all rows is done once, in this call.

        Args:
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, kv_heads, kv_len, head_dim]``.
            block_size: number of keys in a block.

        Returns:
            ``(rows, stop) -> scores``: scores of the queries ``rows``, a range of indices, for the first ``stop`` keys
            or for the blocks that contain them; ``[batch | 1, 1 | kv_heads | heads, rows, stop or blocks]``. If keys
            are scored, the score of a block is the largest among its keys that are visible to the query. Keys and
            blocks with a score of +inf are always selected.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class FunctionScorer(Scorer):
    """A scorer that calls a user's function.

    Args:
        function: ``(query, key, rows) -> scores`` of the queries ``rows`` for all keys, or for all blocks.
    """

    def __init__(self, function: Callable[[Tensor, Tensor, range], Tensor]):
        self.function = function

    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        kv_len = key.shape[2]

        def scores_of(rows: range, stop: int) -> Tensor:
            scores = check_type("scorer", self.function(query, key, rows), Tensor, "return a tensor of scores")
            width = stop if scores.shape[-1:] == (kv_len,) else -(-stop // block_size)
            is_whole = scores.shape[-1:] in ((kv_len,), (-(-kv_len // block_size),))
            return scores[..., :width] if is_whole else scores

        return scores_of


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of a scorer's scores: wide enough that decoding and a full run select the same keys."""
    return torch.float32 if device.type == "mps" else torch.float64
