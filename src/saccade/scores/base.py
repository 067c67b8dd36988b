"""Score: a module that says how alike queries and keys are."""

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
"""``(score, b, h, q, kv) -> score``: another score for each pair, from its batch item, head and positions."""

TileFunction = Callable[..., Tensor]
"""``(query [..., rows, width], key [..., columns, width], *parameters) -> [..., rows, columns]``, differentiable.

Gradients are autograd's, unless it has a method ``gradients(grad_scores, query, key, *parameters)`` that returns one
for each argument: that saves a pass over the pairs. With a method ``held_bytes(itemsize)`` it says how much memory it
takes at most beside its answer, for `AttentionMatrix.explain`; else that is counted on a few pairs.
"""


class Prepared(NamedTuple):
    """Queries and keys ready to be compared pair by pair; tensors only.

    Attributes:
        query: ``[batch, heads, q_len, width]``.
        key: ``[batch, kv_heads, kv_len, width]``.
        tile: how a few queries and a few keys are compared; None for the plain dot product.
        parameters: further tensors that ``tile`` takes.
        modify: what changes scores once they are scaled and capped; None for nothing.
    """

    query: Tensor
    key: Tensor
    tile: TileFunction | None = None
    parameters: tuple[Tensor, ...] = ()
    modify: ScoreMod | None = None


class Score(ArgumentHints, nn.Module):
    """HOW ALIKE are a query and a key: one number for a pair, before scale, softcap and bias.

    A subclass maps queries and keys once, in O(n·d), so that a plain dot product follows; or it brings a function
    that compares a few queries with a few keys. Both are differentiable, and the latter is called tile by tile, so that
    nothing of size n·m·d is ever built.
    """

    @property
    def widths(self) -> tuple[int, int] | None:
        """Widths of query and key that it takes; None where any will do, as long as both are alike."""
        return None

    def default_scale(self, head_dim: int) -> float:
        """Return the scale for ``scale=None``: 1, except for dot products."""
        return 1.0

    @abstractmethod
    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        """Map ``query [batch, heads, q_len, query_dim]`` and ``key [batch, kv_heads, kv_len, key_dim]``.

        Row i of a result may depend on row i of the argument only, or masks would leak.
        """

    def to_dense(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores written out, ``[batch, heads, q_len, kv_len]``: before scale, softcap and bias.

        A `saccade.scores.Modified` changes scores that are scaled: these are, as ``scale=None`` does it.

        Args:
            query: ``[batch, heads, q_len, query_dim]``.
            key: ``[batch, kv_heads, kv_len, key_dim]``; head h reads group ``h // (heads // kv_heads)``.
        """
        self.check(query, key)
        made = prepared(self, query, key)
        heads, groups = query.shape[1], key.shape[1]
        q, k = widened(made.query), widened(made.key).repeat_interleave(heads // groups, 1)
        scores = q @ k.mT if made.tile is None else made.tile(q, k, *made.parameters)
        if made.modify is None:
            return scores
        index = (torch.arange(size, device=query.device) for size in scores.shape)
        b, h, i, j = torch.meshgrid(*index, indexing="ij")
        scores = scores * self.default_scale(query.shape[3])
        return made.modify(scores, b, h, i + j.shape[3] - i.shape[2], j).expand(j.shape)

    def check(self, query: Tensor, key: Tensor) -> None:
        """Check that the widths of query and key are those that the score takes."""
        widths, own = (query.shape[-1], key.shape[-1]), self.widths
        if widths == own or (own is None and widths[0] == widths[1]):
            return
        facts = [describe("query", query), describe("key", key)]
        if own is None:
            got = f"{widths[0]} and {widths[1]}"
            raise value_error("head_dim", "be the same for query and key", got, facts=facts)
        name, index = ("query", 0) if widths[0] != own[0] else ("key", 1)
        rule = f"be {own[index]}, like {type(self).__name__}'s"
        raise value_error(f"width of {name}", rule, widths[index], facts=facts)


def prepared(score: Score, query: Tensor, key: Tensor) -> Prepared:
    """Prepare queries and keys for a score; no gradient flows into or through a row that is not finite.

    Its upstream gradient is 0 where a mask hides the row, and 0 * NaN would reach the row itself and all parameters.
    """
    made = score.prepare(query, key)
    is_trained = made.query.requires_grad or made.key.requires_grad
    # What is traced or transformed cannot be looked at.
    if not (is_trained and is_plain(query) and is_plain(key)) or is_finite(query, key):
        return made
    bad_query, bad_key = (not_finite(x)[..., None] for x in (query, key))
    clean = score.prepare(query.masked_fill(bad_query, 0), key.masked_fill(bad_key, 0))
    return clean._replace(
        query=torch.where(bad_query, made.query.detach(), clean.query),
        key=torch.where(bad_key, made.key.detach(), clean.key),
    )


def widened(x: Tensor) -> Tensor:
    """In float32, unless it is float64: scores are computed in float32 or wider."""
    return x if x.dtype == torch.float64 else x.float()
