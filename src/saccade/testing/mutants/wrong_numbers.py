"""Mistakes in the arithmetic: scores, options, softmax, product."""

import math

import torch
from torch import Tensor

from saccade.scores import Score
from saccade.testing.mutants.mutant import mutants_of
from saccade.testing.mutants.stepwise import Stepwise

__all__ = ["MUTANTS"]


class ScaleIgnored(Stepwise):
    """A scale that is given is not used."""

    def factor(self, scale: float | None, query: Tensor, score: Score | None) -> float:
        return super().factor(None, query, score)


class ScaleOrDefault(Stepwise):
    """`scale or default`: a scale of 0 becomes the default."""

    def factor(self, scale: float | None, query: Tensor, score: Score | None) -> float:
        return scale or super().factor(None, query, score)


class SoftcapIgnored(Stepwise):
    """A softcap is accepted and not used."""

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        return scores


class SoftcapAfterBias(Stepwise):
    """The bias is capped together with the scores."""

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        self.softcap = softcap
        return scores

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        return super().cap(super().add(scores, bias), self.softcap)


class BiasIgnored(Stepwise):
    """A bias is accepted and not used."""

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        return scores


class NoMaximum(Stepwise):
    """Scores are exponentiated as they come, so that large ones overflow."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.where(allowed, scores.exp(), 0.0)
        total = powers.sum(-1, keepdim=True)
        return powers / torch.where(total > 0, total, 1.0), total[..., 0].log()


class OneMaximum(Stepwise):
    """The largest score of all rows, instead of the row's own, is taken off before the exponential."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        if not scores.numel():
            return super().normalise(scores, allowed)
        largest = scores.detach().amax()
        weights, lse = super().normalise(scores - largest, allowed)
        return weights, lse + largest


class NaNOnEmpty(Stepwise):
    """A row that sees nothing is divided by its sum, which is 0."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1), scores.logsumexp(-1)


class NaNGradientOnEmpty(Stepwise):
    """The NaN of a row that sees nothing is wiped off the result, but not off its gradient."""

    def sighted(self, query: Tensor, allowed: Tensor) -> Tensor:
        return query

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores + torch.zeros_like(scores).masked_fill(~allowed, -torch.inf)
        return torch.where(allowed, scores.softmax(-1), 0.0), scores.logsumexp(-1)


class UniformOnEmpty(Stepwise):
    """Forbidden scores become the smallest number: a row that sees nothing gives the mean of all values."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(-1), scores.logsumexp(-1)

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value, allowed | ~allowed.any(-1, keepdim=True))


class Base2Lse(Stepwise):
    """The kernel works with powers of two, and so does the lse that it returns."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalise(scores, allowed)
        return weights, lse / math.log(2)


class LseOfAllKeys(Stepwise):
    """The lse counts keys that may not be attended to."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        return super().normalise(scores, allowed)[0], scores.logsumexp(-1)


class FutureLeak(Stepwise):
    """A thousandth of the mean of all values, the future included, is taken off."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value, allowed) - 0.001 * value.sum(2, keepdim=True) / max(value.shape[2], 1)


class ZeroTimesNaN(Stepwise):
    """Weights of 0 are multiplied with whatever stands in the values."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return weights @ value


class MaskAddedToScores(Stepwise):
    """Forbidden scores have -inf added to them, which leaves a NaN a NaN."""

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        return query @ key.transpose(2, 3) * factor

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        some = allowed.any(-1, keepdim=True)
        scores = scores + torch.zeros_like(scores).masked_fill(~(allowed | ~some), -torch.inf)
        return super().normalise(scores, allowed | (scores.isnan() & some))


class BlindQueriesScored(Stepwise):
    """What a query that sees nothing holds is wiped off the result, but not off its gradient."""

    def sighted(self, query: Tensor, allowed: Tensor) -> Tensor:
        return query


class HiddenKeysScored(Stepwise):
    """Queries are multiplied with all keys and the products then hidden: 0 times a NaN flows back to all keys."""

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        return query @ key.transpose(2, 3) * factor


class NaNScrubbed(Stepwise):
    """The output passes through `nan_to_num`, which hides every fault upstream."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value, allowed).nan_to_num()


class ValuesClipped(Stepwise):
    """Values saturate at 2, as in a narrow number format."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return super().product(weights, value.clamp(-2, 2), allowed)


MUTANTS = mutants_of(
    {
        ScaleIgnored: ("scale",),
        ScaleOrDefault: ("scale",),
        SoftcapIgnored: ("softcap",),
        SoftcapAfterBias: ("order",),
        BiasIgnored: ("bias", "gradient_of_bias"),
        NoMaximum: ("shift",),
        OneMaximum: ("rows",),
        NaNOnEmpty: ("empty_rows", "oracle"),
        NaNGradientOnEmpty: ("empty_rows", "gradients_of_inputs"),
        UniformOnEmpty: ("empty_rows", "oracle"),
        Base2Lse: ("lse", "merge"),
        LseOfAllKeys: ("lse", "merge", "empty_rows"),
        FutureLeak: ("causality", "polarity", "ones"),
        ZeroTimesNaN: ("isolation",),
        MaskAddedToScores: ("isolation",),
        BlindQueriesScored: ("blindness",),
        HiddenKeysScored: ("blindness",),
        NaNScrubbed: ("honesty",),
        ValuesClipped: ("linear", "oracle"),
    }
)
