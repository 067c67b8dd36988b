"""Mistakes in scores, relative biases and sinks."""

from typing import Any

import torch
from torch import Tensor

from saccade.positions import T5, Bias, Clipped
from saccade.scores import Score
from saccade.testing import Stepwise


class SinkIgnored(Stepwise, caught_by=("sink", "oracle", "gradients_of_parameters")):
    """A sink is accepted and not used."""

    def sink(self, weights: Tensor, lse: Tensor, sink_logit: Tensor | None) -> tuple[Tensor, Tensor]:
        return weights, lse


class SinkAddsItsValue(Stepwise, caught_by=("sink", "ones")):
    """The sink's share is not lost, but spread over all keys that the row sees."""

    def sink(self, weights: Tensor, lse: Tensor, sink_logit: Tensor | None) -> tuple[Tensor, Tensor]:
        left, whole = super().sink(weights, lse, sink_logit)
        seen = (weights > 0).to(weights.dtype)
        taken = (weights - left).sum(-1, keepdim=True)
        return left + taken * seen / seen.sum(-1, keepdim=True).clamp_min(1), whole


class SinkOutsideLse(Stepwise, caught_by=("sink", "lse")):
    """The lse does not count the sink."""

    def sink(self, weights: Tensor, lse: Tensor, sink_logit: Tensor | None) -> tuple[Tensor, Tensor]:
        return super().sink(weights, lse, sink_logit)[0], lse


class SinkOnEmptyRows(Stepwise, caught_by=("empty_rows", "lse")):
    """A row that sees nothing has the sink's logit for its lse."""

    def sink(self, weights: Tensor, lse: Tensor, sink_logit: Tensor | None) -> tuple[Tensor, Tensor]:
        left, whole = super().sink(weights, lse, sink_logit)
        return left, whole if sink_logit is None else torch.logaddexp(lse, sink_logit)


class ScoreIgnored(Stepwise, caught_by=("score", "oracle")):
    """A score is accepted, and the dot product used, as far as both are of one width."""

    def read_parameters(self, given: Any) -> Any:
        return None if isinstance(given, Score) else given


class ScoreWithDotsScale(Stepwise, caught_by=("score",)):
    """The default scale is that of dot products, whatever the score."""

    def factor(self, scale: float | None, query: Tensor, score: Score | None) -> float:
        return super().factor(scale, query, None)


class GaussianWithoutKeyNorm(Stepwise, caught_by=("oracle",)):
    """The squared length of the key is left out, as if only that of the query mattered to no weight."""

    def gaussian(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        return super().gaussian(score, q, k) + self.half_square(k) * torch.exp(-2 * score.log_bandwidth.to(q.dtype))


class CosineOfQueryOnly(Stepwise, caught_by=("score", "oracle")):
    """Only the query is brought to length 1."""

    def cosine(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        return (torch.nn.functional.normalize(q, dim=-1) * k).sum(-1)


class AdditiveWithoutTanh(Stepwise, caught_by=("score", "oracle")):
    """The hidden layer of the additive score is linear."""

    def activate(self, hidden: Tensor) -> Tensor:
        return hidden


class BilinearTransposed(Stepwise, caught_by=("oracle", "gradients_of_parameters")):
    """The matrix of the bilinear score is applied from the wrong side, where both widths are alike."""

    def bilinear(self, score: Any, q: Tensor, k: Tensor) -> Tensor:
        if q.shape[-1] != k.shape[-1]:
            return super().bilinear(score, q, k)
        return (q @ score.weight.T.to(q.dtype) * k).sum(-1)


class DistanceReversed(Stepwise, caught_by=("relative", "oracle")):
    """A distance is the key's position minus the query's."""

    def distances(self, q: Tensor, kv: Tensor) -> Tensor:
        return kv - q


class DistanceFromIndices(Stepwise, caught_by=("relative", "decode", "key_order", "oracle")):
    """Distances are taken between indices, whatever the positions: the first query stands with the first key."""

    def positions(
        self, query: Tensor, key: Tensor, q_positions: Tensor | None, kv_positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, kv = (torch.arange(x.shape[2], device=x.device)[None] for x in (query, key))
        return q, kv


class RelativeBeforeScale(Stepwise, caught_by=("relative", "oracle")):
    """A relative bias is scaled together with the scores."""

    def relative(self, bias: Bias, query: Tensor, distances: Tensor, factor: float) -> Tensor:
        return super().relative(bias, query, distances, factor) * factor


class RelativeHeadsMixed(Stepwise, caught_by=("relative", "heads", "oracle")):
    """Each head reads the numbers of the head before it."""

    def table(self, bias: Bias, distances: Tensor, query: Tensor, factor: float) -> Tensor:
        return super().table(bias, distances, query, factor).roll(1, 1)


class BucketOffByOne(Stepwise, caught_by=("oracle",)):
    """The buckets of T5 begin one distance later than they should."""

    def table(self, bias: Bias, distances: Tensor, query: Tensor, factor: float) -> Tensor:
        late = distances - distances.sign() if isinstance(bias, T5) else distances
        return super().table(bias, late, query, factor)


class ReachOneShort(Stepwise, caught_by=("relative", "oracle")):
    """Clipped distances are clipped one too early."""

    def table(self, bias: Bias, distances: Tensor, query: Tensor, factor: float) -> Tensor:
        if isinstance(bias, Clipped):
            distances = distances.clamp(1 - bias.reach, bias.reach - 1)
        return super().table(bias, distances, query, factor)


class ShawUnscaled(Stepwise, caught_by=("oracle",)):
    """Products with the vectors of distances are not scaled, although those with keys are."""

    def shaw_factor(self, factor: float) -> float:
        return 1.0
