"""A correct attention, taken apart into steps: each mutant gets one of them wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.positions import Bias, ShawKeys
from saccade.scores import Additive, Bilinear, Cosine, Dot, Gaussian, Score
from saccade.support.errors import unsupported

__all__ = ["Stepwise"]


class Stepwise:
    """Exact attention for a bool mask, some rows at a time; keeps every law, slowly.

    A forbidden key or value is replaced by 0 before anything is multiplied with it: 0 * NaN is NaN. It has no
    dropout, and says so beforehand.
    """

    caught_by: tuple[str, ...] = ()
    rows_at_once: int = 64
    offers: tuple[str, ...] | None = (
        *("bias", "scale", "softcap", "sink_logit", "score"),
        *("relative", "q_positions", "kv_positions"),
    )

    def __init_subclass__(cls, *, caught_by: tuple[str, ...] = ()) -> None:
        """A mutant names the laws that must notice its mistake."""
        cls.caught_by = caught_by

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """The output, ``[batch, heads, q_len, value_dim]``; options are those of `with_lse`."""
        return self.with_lse(query, key, value, mask, **options)[0]

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: object) -> tuple[str, ...]:
        """Why it will not run these inputs; empty if it will."""
        return ("it has no dropout",) if options.get("dropout_p") else ()

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
        """The output and the lse of each row."""
        self.refuse(softcap, dropout_p)
        allowed = self.read(mask)
        query = self.sighted(self.take(query), allowed)
        score = self.trained(score)
        bias = self.trained(bias)
        standing = self.standing(query, key, q_positions, kv_positions) if isinstance(bias, Bias) else None
        blocks = []
        for first in range(0, max(query.shape[2], 1), self.rows_at_once):
            rows = slice(first, first + self.rows_at_once)
            some, added = query[:, :, rows], None
            if isinstance(bias, Bias) and standing is not None:
                apart = self.apart(bias, standing[0][:, rows], standing[1])
                added = self.relative(bias, some, apart, self.factor(scale, query, score))
            elif isinstance(bias, Tensor):
                added = bias[:, :, rows] if bias.shape[2] > 1 else bias
            # fmt: off
            blocks.append(self.block(
                some, key, value, allowed[:, :, rows],
                bias=added, scale=scale, softcap=softcap, sink_logit=self.trained(sink_logit), score=score,
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
        """(out, lse) of a few rows."""
        wide = torch.promote_types(query.dtype, torch.float32)
        repeats = query.shape[1] // key.shape[1]
        k, v = self.share(key.to(wide), repeats), self.share(value.to(wide), repeats)
        factor = self.factor(scale, query, score)
        if score is None:
            scores = self.scores(query.to(wide), k, allowed, factor)
        else:
            scores = self.compare(score, query.to(wide)[:, :, :, None], _seen(k, allowed)) * factor
        scores = self.add(self.cap(scores, softcap), bias)
        weights, lse = self.normalise(scores, allowed)
        weights, lse = self.sink(weights, lse, None if sink_logit is None else sink_logit.to(wide)[:, None])
        return self.give(self.product(weights, v, allowed), query.dtype), lse

    def refuse(self, softcap: float | None, dropout_p: float) -> None:
        """Raise an error for what it does not run."""
        if dropout_p:
            raise unsupported("stepwise", "it", ("it has no dropout",))

    def take(self, query: Tensor) -> Tensor:
        """The query as it was handed over."""
        return query

    def sighted(self, query: Tensor, allowed: Tensor) -> Tensor:
        """Queries with 0 where they see nothing: what stands there, a NaN even, must not flow back."""
        return query.masked_fill(~allowed.any(-1, keepdim=True), 0.0)

    def give(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """The output as it is handed back, in the dtype of the query."""
        return out.to(dtype)

    def read(self, mask: Tensor) -> Tensor:
        """The mask, True = may attend."""
        return mask

    def share(self, x: Tensor, repeats: int) -> Tensor:
        """Each head's keys or values: head h reads group h // repeats."""
        return x.repeat_interleave(repeats, dim=1)

    def trained(self, given: Any) -> Any:
        """A score, a bias or a sink, as it trains."""
        return given

    def factor(self, scale: float | None, query: Tensor, score: Score | None) -> float:
        """What scores are multiplied by."""
        if scale is not None:
            return scale
        return query.shape[3] ** -0.5 if score is None else score.default_scale(query.shape[3])

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        """Scaled scores of dot products, ``[batch, heads, rows, kv_len]``."""
        return (query[:, :, :, None] * _seen(key, allowed)).sum(-1) * factor

    def compare(self, score: Score, q: Tensor, k: Tensor) -> Tensor:
        """Scores of ``q [batch, heads, rows, 1, query_dim]`` and ``k [batch, heads, rows, kv_len, key_dim]``."""
        kinds = {Dot: self.dot, Bilinear: self.bilinear, Additive: self.additive, Cosine: self.cosine}
        kinds[Gaussian] = self.gaussian
        return kinds[type(score)](score, q, k)

    def dot(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """The dot product."""
        return (q * k).sum(-1)

    def bilinear(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """A dot product with a mapped query."""
        return (q @ score.weight.to(q.dtype) * k).sum(-1)

    def additive(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """A network with one hidden layer."""
        hidden = q @ score.query_weight.T.to(q.dtype) + k @ score.key_weight.T.to(q.dtype)
        return self.bend(hidden) @ score.output_weight.to(q.dtype)

    def bend(self, hidden: Tensor) -> Tensor:
        """What the hidden layer does to each number."""
        return hidden.tanh()

    def cosine(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """A dot product of vectors of length 1."""
        return (F.normalize(q, dim=-1) * F.normalize(k, dim=-1)).sum(-1)

    def gaussian(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        """A dot product, less half of both squared lengths."""
        precision = torch.exp(-2 * score.log_bandwidth.to(q.dtype))
        return ((q * k).sum(-1) - self.half_square(k) - self.half_square(q)) * precision

    def half_square(self, x: Tensor) -> Tensor:
        """Half of the squared length."""
        return x.square().sum(-1) / 2

    def standing(
        self, query: Tensor, key: Tensor, q_positions: Tensor | None, kv_positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Where queries and keys stand, ``[batch | 1, len]``: by default, the last query with the last key."""
        q_len, kv_len = query.shape[2], key.shape[2]
        if q_positions is None or kv_positions is None:
            early = max(0, q_len - kv_len)  # all one later, so that none stands before 0
            q_positions = torch.arange(q_len, device=query.device) + kv_len - q_len + early
            kv_positions = torch.arange(kv_len, device=query.device) + early
        return torch.atleast_2d(q_positions), torch.atleast_2d(kv_positions)

    def apart(self, bias: Bias, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
        """How far queries stand behind keys, ``[batch | 1, rows, kv_len]``."""
        return self.distances(bias.address(q_positions)[:, :, None], bias.address(kv_positions)[:, None])

    def distances(self, q: Tensor, kv: Tensor) -> Tensor:
        """A query's position minus a key's."""
        return q - kv

    def relative(self, bias: Bias, query: Tensor, apart: Tensor, factor: float) -> Tensor:
        """What a relative bias adds, ``[batch, heads, rows, kv_len]``."""
        if not apart.numel():
            return query.new_zeros(1, 1, *apart.shape[1:])
        lowest, highest = int(apart.min()), int(apart.max())
        table = self.table(bias, torch.arange(lowest, highest + 1, device=apart.device), query, factor)
        sizes = torch.broadcast_shapes(table.shape[:3], (len(apart), 1, apart.shape[1]))
        places = (apart - lowest)[:, None].expand(*sizes, -1)
        return table.expand(*sizes, -1).gather(3, places)

    def table(self, bias: Bias, distances: Tensor, query: Tensor, factor: float) -> Tensor:
        """The numbers of a relative bias at some distances, ``[batch | 1, heads | 1, rows | 1, distances]``."""
        if isinstance(bias, ShawKeys):
            return bias.values(distances, query, self.shaw_factor(factor))
        return bias.values(distances, query, factor)

    def shaw_factor(self, factor: float) -> float:
        """What products with vectors of distances are multiplied by."""
        return factor

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        """Soft-capped scores."""
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Scores with their bias."""
        return scores if bias is None else scores + bias

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and lse; a row that sees nothing has weights 0 and lse -inf."""
        some = allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | ~some), -torch.inf)
        weights = torch.where(some, scores.softmax(-1), 0.0)
        return weights, torch.where(some[..., 0], scores.logsumexp(-1), -torch.inf)

    def sink(self, weights: Tensor, lse: Tensor, sink_logit: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and lse with one more term ``[heads, 1]`` in the denominator of every row that sees something."""
        if sink_logit is None:
            return weights, lse
        whole = torch.where(lse.isneginf(), -torch.inf, torch.logaddexp(lse, sink_logit))
        return weights * torch.where(lse.isneginf(), 0.0, (lse - whole).exp())[..., None], whole

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Weights times values."""
        return (weights[..., None] * _seen(value, allowed)).sum(-2)


def _seen(x: Tensor, allowed: Tensor) -> Tensor:
    """Keys or values as each row sees them, ``[batch, heads, rows, kv_len, dim]``: 0 where it may not."""
    return torch.where(allowed[..., None], x[:, :, None], 0.0)
