"""`Stepwise`: a correct attention function, split into methods that subclasses (mutants) override to make mistakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.positions import Bias, ShawKeys
from saccade.scores import Additive, Bilinear, Cosine, Dot, Gaussian, Score
from saccade.support.errors import unsupported


class Stepwise:
    """Exact attention, split into methods that mutants override.

    It satisfies every law, but is slow, because it processes a few rows at a time. Masked keys and values are replaced
    by 0 before any multiplication, because 0 * NaN is NaN. Dropout is not supported, as `reasons` states.
    """

    caught_by: tuple[str, ...] = ()
    rows_at_once: int = 64
    offers: tuple[str, ...] | None = (
        *("bias", "scale", "softcap", "sink_logit", "score"),
        *("relative", "q_positions", "kv_positions"),
    )

    def __init_subclass__(cls, *, caught_by: tuple[str, ...] = ()) -> None:
        """Store the names of the laws that must detect this mutant's mistake."""
        cls.caught_by = caught_by

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
        """Return the attention output ``[batch, heads, q_len, value_dim]``, with options as in `with_lse`."""
        return self.with_lse(query, key, value, mask, **kwargs)[0]

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: object) -> tuple[str, ...]:
        """Return the reasons why this attention function cannot take the inputs; empty if it can."""
        return ("it has no dropout",) if kwargs.get("dropout_p") else ()

    def with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        *,
        bias: Tensor | Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logit: Tensor | None = None,
        score: Score | None = None,
        dropout_p: float = 0.0,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse): the attention output and the log-sum-exp of each row."""
        self.refuse(softcap, dropout_p)
        allowed = self.read_mask(mask)
        query = self.zero_blind_queries(self.read_query(query), allowed)
        score = self.read_parameters(score)
        bias = self.read_parameters(bias)
        placed = self.positions(query, key, q_positions, kv_positions) if isinstance(bias, Bias) else None
        blocks = []
        for first in range(0, max(query.shape[2], 1), self.rows_at_once):
            rows = slice(first, first + self.rows_at_once)
            some, added = query[:, :, rows], None
            if isinstance(bias, Bias) and placed is not None:
                distances = self.pairwise_distances(bias, placed[0][:, rows], placed[1])
                added = self.relative(bias, some, distances, self.factor(scale, query, score))
            elif isinstance(bias, Tensor):
                added = bias[:, :, rows] if bias.shape[2] > 1 else bias
            # fmt: off
            blocks.append(self.block(
                some, key, value, allowed[:, :, rows],
                bias=added, scale=scale, softcap=softcap, sink_logit=self.read_parameters(sink_logit), score=score,
            ))
            # fmt: on
        outs, lses = zip(*blocks, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor,
        *,
        bias: Tensor | None,
        scale: float | None,
        softcap: float | None,
        sink_logit: Tensor | None,
        score: Score | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention for a few query rows and return (out, lse)."""
        wide = torch.promote_types(query.dtype, torch.float32)
        num_heads = query.shape[1]
        k, v = self.repeat_heads(key.to(wide), num_heads), self.repeat_heads(value.to(wide), num_heads)
        factor = self.factor(scale, query, score)
        if score is None:
            scores = self.scores(query.to(wide), k, allowed, factor)
        else:
            scores = self.compare(score, query.to(wide)[:, :, :, None], _visible_only(k, allowed)) * factor
        scores = self.add(self.cap(scores, softcap), bias)
        weights, lse = self.normalise(scores, allowed)
        weights, lse = self.sink(weights, lse, None if sink_logit is None else sink_logit.to(wide)[:, None])
        return self.finish(self.product(weights, v, allowed), query.dtype), lse

    def refuse(self, softcap: float | None, dropout_p: float) -> None:
        """Raise an error for options that this attention function does not support."""
        if dropout_p:
            raise unsupported("it", ("it has no dropout",))

    def read_query(self, query: Tensor) -> Tensor:
        """Return the query unchanged; a mutant may change the query."""
        return query

    def zero_blind_queries(self, query: Tensor, allowed: Tensor) -> Tensor:
        """Replace query rows without a visible key by 0, so that a NaN in such a row does not affect any gradient."""
        return query.masked_fill(~allowed.any(-1, keepdim=True), 0.0)

    def finish(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert the attention output to the dtype of the query."""
        return x.to(dtype)

    def read_mask(self, mask: Tensor) -> Tensor:
        """Return the mask unchanged, True = may attend; a mutant may change the mask."""
        return mask

    def repeat_heads(self, x: Tensor, num_heads: int) -> Tensor:
        """Repeat keys or values for all query heads; consecutive heads share the same keys."""
        return x.repeat_interleave(num_heads // x.shape[1], dim=1)

    def read_parameters(self, module: Any) -> Any:
        """Return a score, bias or sink unchanged; a mutant may detach the parameters."""
        return module

    def factor(self, scale: float | None, query: Tensor, score: Score | None) -> float:
        """Return the explicit scale of the scores if there is one, or the default scale of the score."""
        if scale is not None:
            return scale
        return query.shape[3] ** -0.5 if score is None else score.default_scale(query.shape[3])

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        """Compute the scaled dot products of queries and keys, ``[batch, heads, rows, kv_len]``."""
        return (query[:, :, :, None] * _visible_only(key, allowed)).sum(-1) * factor

    def compare(self, score: Score, q: Tensor, k: Tensor) -> Tensor:
        """Compute a score of queries ``[batch, heads, rows, 1, query_dim]`` and keys ``[..., kv_len, key_dim]``."""
        kinds = {Dot: self.dot, Bilinear: self.bilinear, Additive: self.additive, Cosine: self.cosine}
        kinds[Gaussian] = self.gaussian
        return kinds[type(score)](score, q, k)

    def dot(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """Compute the `Dot` score, the dot product of query and key."""
        return (q * k).sum(-1)

    def bilinear(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """Compute the `Bilinear` score, the dot product of the key with a linearly transformed query."""
        return (q @ score.weight.to(q.dtype) * k).sum(-1)

    def additive(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """Compute the `Additive` score, a network with one hidden layer."""
        hidden = q @ score.query_weight.T.to(q.dtype) + k @ score.key_weight.T.to(q.dtype)
        return self.activate(hidden) @ score.output_weight.to(q.dtype)

    def activate(self, hidden: Tensor) -> Tensor:
        """Apply the activation of the `Additive` score's hidden layer."""
        return hidden.tanh()

    def cosine(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """Compute the `Cosine` score, the dot product of query and key after both are normalised to norm 1."""
        return (F.normalize(q, dim=-1) * F.normalize(k, dim=-1)).sum(-1)

    def gaussian(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """Compute the `Gaussian` score, the negative squared distance divided by twice the squared bandwidth."""
        precision = torch.exp(-2 * score.log_bandwidth.to(q.dtype))
        return ((q * k).sum(-1) - self.half_square(k) - self.half_square(q)) * precision

    def half_square(self, x: Tensor) -> Tensor:
        """Return half the squared norm of each query or key, for the `Gaussian` score."""
        return x.square().sum(-1) / 2

    def positions(
        self, query: Tensor, key: Tensor, q_positions: Tensor | None, kv_positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, ``[batch | 1, len]``; the default aligns the last query and key."""
        q_len, kv_len = query.shape[2], key.shape[2]
        if q_positions is None or kv_positions is None:
            early = max(0, q_len - kv_len)  # shift both so that no position is negative
            q_positions = torch.arange(q_len, device=query.device) + kv_len - q_len + early
            kv_positions = torch.arange(kv_len, device=query.device) + early
        return torch.atleast_2d(q_positions), torch.atleast_2d(kv_positions)

    def pairwise_distances(self, bias: Bias, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
        """Compute the distances of all pairs for a relative bias, ``[batch | 1, rows, kv_len]``."""
        return self.distances(bias.address(q_positions)[:, :, None], bias.address(kv_positions)[:, None])

    def distances(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return the distances between queries and keys, the query's position minus the key's position."""
        return q - kv

    def relative(self, bias: Bias, query: Tensor, distances: Tensor, factor: float) -> Tensor:
        """Compute a relative bias for all pairs, ``[batch, heads, rows, kv_len]``."""
        if not distances.numel():
            return query.new_zeros(1, 1, *distances.shape[1:])
        lowest, highest = int(distances.min()), int(distances.max())
        table = self.table(bias, torch.arange(lowest, highest + 1, device=distances.device), query, factor)
        sizes = torch.broadcast_shapes(table.shape[:3], (len(distances), 1, distances.shape[1]))
        indices = (distances - lowest)[:, None].expand(*sizes, -1)
        return table.expand(*sizes, -1).gather(3, indices)

    def table(self, bias: Bias, distances: Tensor, query: Tensor, factor: float) -> Tensor:
        """Return the values of a relative bias at ``distances``, ``[batch | 1, heads | 1, rows | 1, distances]``."""
        if isinstance(bias, ShawKeys):
            return bias.values(distances, query, self.shaw_factor(factor))
        return bias.values(distances, query, factor)

    def shaw_factor(self, factor: float) -> float:
        """Return the scale of the dot products with the `ShawKeys` embeddings."""
        return factor

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        """Apply the softcap, if any, to the scores."""
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Add the bias, if any, to the scores."""
        return scores if bias is None else scores + bias

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the weights and the lse of the softmax. A row without a visible key has weights 0 and lse -inf."""
        some = allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | ~some), -torch.inf)
        weights = torch.where(some, scores.softmax(-1), 0.0)
        return weights, torch.where(some[..., 0], scores.logsumexp(-1), -torch.inf)

    def sink(self, weights: Tensor, lse: Tensor, sink_logit: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the sink ``[heads, 1]`` to the denominators of the softmax, and return the new weights and lse."""
        if sink_logit is None:
            return weights, lse
        whole = torch.where(lse.isneginf(), -torch.inf, torch.logaddexp(lse, sink_logit))
        return weights * torch.where(lse.isneginf(), 0.0, (lse - whole).exp())[..., None], whole

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Compute the attention output as weights times values."""
        return (weights[..., None] * _visible_only(value, allowed)).sum(-2)


def _visible_only(x: Tensor, allowed: Tensor) -> Tensor:
    """Broadcast keys or values to ``[batch, heads, rows, kv_len, dim]``, and set those that a row may not see to 0."""
    return torch.where(allowed[..., None], x[:, :, None], 0.0)
