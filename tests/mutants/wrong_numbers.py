"""Mistakes in the arithmetic: scores, options, softmax, product."""

import math

import torch
from torch import Tensor

from saccade.scores import Score
from saccade.testing import Stepwise


class ScaleIgnored(Stepwise, caught_by=("scale",)):
    """A scale that is given is not used."""

    def factor(self, scale: float | None, query: Tensor, score: Score | None) -> float:
        return super().factor(None, query, score)


class ScaleOrDefault(Stepwise, caught_by=("scale",)):
    """`scale or default`: a scale of 0 becomes the default."""

    def factor(self, scale: float | None, query: Tensor, score: Score | None) -> float:
        return scale or super().factor(None, query, score)


class SoftcapIgnored(Stepwise, caught_by=("softcap",)):
    """A softcap is accepted and not used."""

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        return scores


class SoftcapAfterBias(Stepwise, caught_by=("order",)):
    """The bias is capped together with the scores."""

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        self.softcap = softcap
        return scores

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        return super().cap(super().add(scores, bias), self.softcap)


class BiasIgnored(Stepwise, caught_by=("bias", "gradient_of_bias")):
    """A bias is accepted and not used."""

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        return scores


class NoMaximum(Stepwise, caught_by=("shift",)):
    """Scores are exponentiated as they come, so that large ones overflow."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.where(allowed, scores.exp(), 0.0)
        total = powers.sum(-1, keepdim=True)
        return powers / torch.where(total > 0, total, 1.0), total[..., 0].log()


class OneMaximum(Stepwise, caught_by=("rows",)):
    """The largest score of all rows, instead of the row's own, is taken off before the exponential."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        if not scores.numel():
            return super().normalise(scores, allowed)
        largest = scores.detach().amax()
        weights, lse = super().normalise(scores - largest, allowed)
        return weights, lse + largest


class NaNOnEmpty(Stepwise, caught_by=("empty_rows", "oracle")):
    """A row that sees nothing is divided by its sum, which is 0."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1), scores.logsumexp(-1)


class NaNGradientOnEmpty(Stepwise, caught_by=("empty_rows", "gradients_of_inputs")):
    """NaN in a row that sees nothing is cleared in the result, but not in its gradient."""

    def zero_blind_queries(self, query: Tensor, allowed: Tensor) -> Tensor:
        return query

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores + torch.zeros_like(scores).masked_fill(~allowed, -torch.inf)
        return torch.where(allowed, scores.softmax(-1), 0.0), scores.logsumexp(-1)


class UniformOnEmpty(Stepwise, caught_by=("empty_rows", "oracle")):
    """Forbidden scores become the smallest number: a row that sees nothing gives the mean of all values."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(-1), scores.logsumexp(-1)

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value, allowed | ~allowed.any(-1, keepdim=True))


class Base2Lse(Stepwise, caught_by=("lse", "merge")):
    """The kernel works with powers of two, and so does the lse that it returns."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalise(scores, allowed)
        return weights, lse / math.log(2)


class LseOfAllKeys(Stepwise, caught_by=("lse", "merge", "empty_rows")):
    """The lse counts keys that may not be attended to."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        return super().normalise(scores, allowed)[0], scores.logsumexp(-1)


class FutureLeak(Stepwise, caught_by=("causality", "polarity", "ones")):
    """A thousandth of the mean of all values, the future included, is taken off."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value, allowed) - 0.001 * value.sum(2, keepdim=True) / max(value.shape[2], 1)


class ZeroTimesNaN(Stepwise, caught_by=("isolation",)):
    """Weights of 0 are multiplied with whatever stands in the values."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return weights @ value


class BlindQueriesScored(Stepwise, caught_by=("blindness",)):
    """The content of a query that sees nothing is cleared in the result, but not in its gradient."""

    def zero_blind_queries(self, query: Tensor, allowed: Tensor) -> Tensor:
        return query


class HiddenKeysScored(Stepwise, caught_by=("blindness",)):
    """Queries are multiplied with all keys and the products then hidden: 0 times a NaN flows back to all keys."""

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        return query @ key.transpose(2, 3) * factor


class MaskAddedToScores(HiddenKeysScored, caught_by=("isolation",)):
    """Forbidden scores have -inf added to them, which leaves a NaN a NaN."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        some = allowed.any(-1, keepdim=True)
        scores = scores + torch.zeros_like(scores).masked_fill(~(allowed | ~some), -torch.inf)
        return super().normalise(scores, allowed | (scores.isnan() & some))


class NaNScrubbed(Stepwise, caught_by=("honesty",)):
    """The output passes through `nan_to_num`, which hides every fault upstream."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value, allowed).nan_to_num()


class ValuesClipped(Stepwise, caught_by=("linear", "oracle")):
    """Values saturate at 2, as in a narrow number format."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value.clamp(-2, 2), allowed)
