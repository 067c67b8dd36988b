"""Score: the base class of modules that measure the similarity of queries and keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import describe, value_error
from saccade.support.numerics import is_finite, not_finite
from saccade.support.torch_modes import is_plain

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(score, b, h, q, kv) -> score``: changes the score of each pair, given its batch item, head and positions."""

TileFunction = Callable[..., Tensor]
"""``(query [..., rows, width], key [..., columns, width], *parameters) -> [..., rows, columns]``, differentiable.

Autograd differentiates the function unless it has a method ``gradients(grad_scores, query, key, *parameters)`` that
returns a gradient for each argument. This saves a pass over the pairs. A method ``held_bytes(itemsize)`` returns the
peak memory in bytes beyond the result, for `AttentionMatrix.explain`. Without it, the peak is measured on a few pairs.
"""


class Prepared(NamedTuple):
    """Queries and keys prepared for a score, as tensors that can be compared pair by pair.

    Attributes:
        query: ``[batch, heads, q_len, width]``.
        key: ``[batch, kv_heads, kv_len, width]``.
        tile: a function that scores a few queries and keys; None for the dot product.
        parameters: further tensor arguments of ``tile``.
        modify: a function that changes scores after scale and softcap; None if there is none.
    """

    query: Tensor
    key: Tensor
    tile: TileFunction | None = None
    parameters: tuple[Tensor, ...] = ()
    modify: ScoreMod | None = None


class Score(ArgumentHints, nn.Module):
    """Base class of scores, which measure the similarity of a query and a key before scale, softcap and bias.

    A subclass either maps queries and keys once, in O(n·d), so that a plain dot product follows, or provides a function
    that compares a few queries with a few keys. Both are differentiable. The function is called tile by tile, so that
    no tensor of size n·m·d is ever created.
    """

    @property
    def widths(self) -> tuple[int, int] | None:
        """Widths of query and key that the score requires; None if it accepts any equal widths."""
        return None

    def default_scale(self, head_dim: int) -> float:
        """Return the scale of the scores for ``scale=None``: 1, except for dot products."""
        return 1.0

    @abstractmethod
    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        """Prepare queries ``[batch, heads, q_len, query_dim]`` and keys ``[batch, kv_heads, kv_len, key_dim]``.

        Row i of a result may depend only on row i of its argument; otherwise, information would leak past masks.
        """

    def to_dense(self, query: Tensor, key: Tensor) -> Tensor:
        """Return all scores, ``[batch, heads, q_len, kv_len]``, before scale, softcap and bias.

        `saccade.scores.Modified` changes scaled scores, so its scores are scaled as with ``scale=None``.

        Args:
            query: ``[batch, heads, q_len, query_dim]``.
            key: ``[batch, kv_heads, kv_len, key_dim]``; head h reads group ``h // (heads // kv_heads)``.
        """
        self.check(query, key)
        ready = prepared(self, query, key)
        heads, groups = query.shape[1], key.shape[1]
        q, k = widened(ready.query), widened(ready.key).repeat_interleave(heads // groups, 1)
        scores = q @ k.mT if ready.tile is None else ready.tile(q, k, *ready.parameters)
        if ready.modify is None:
            return scores
        index = (torch.arange(size, device=query.device) for size in scores.shape)
        b, h, i, j = torch.meshgrid(*index, indexing="ij")
        scores = scores * self.default_scale(query.shape[3])
        return ready.modify(scores, b, h, i + j.shape[3] - i.shape[2], j).expand(j.shape)

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raise an error unless the score supports the widths of the query and the key."""
        widths, required = (query.shape[-1], key.shape[-1]), self.widths
        if widths == required or (required is None and widths[0] == widths[1]):
            return
        facts = [describe("query", query), describe("key", key)]
        if required is None:
            got = f"{widths[0]} and {widths[1]}"
            raise value_error("head_dim", "be the same for query and key", got, facts=facts)
        name, index = ("query", 0) if widths[0] != required[0] else ("key", 1)
        rule = f"be {required[index]}, like {type(self).__name__}'s"
        raise value_error(f"width of {name}", rule, widths[index], facts=facts)


def prepared(score: Score, query: Tensor, key: Tensor) -> Prepared:
    """Prepare queries and keys for a score. No gradient flows through rows that contain NaN or inf.

    The upstream gradient of a masked row is 0, but 0 * NaN is NaN and would reach the row and all parameters.
    """
    ready = score.prepare(query, key)
    is_trained = ready.query.requires_grad or ready.key.requires_grad
    # Values of traced or transformed tensors cannot be read.
    if not (is_trained and is_plain(query) and is_plain(key)) or is_finite(query, key):
        return ready
    bad_query, bad_key = (not_finite(x)[..., None] for x in (query, key))
    clean = score.prepare(query.masked_fill(bad_query, 0), key.masked_fill(bad_key, 0))
    return clean._replace(
        query=torch.where(bad_query, ready.query.detach(), clean.query),
        key=torch.where(bad_key, ready.key.detach(), clean.key),
    )


def widened(x: Tensor) -> Tensor:
    """Convert queries or keys to float32 unless they are float64, because scores need float32 or wider."""
    return x if x.dtype == torch.float64 else x.float()
