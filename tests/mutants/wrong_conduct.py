"""Mistakes in what surrounds the arithmetic: gradients, precision, memory, inputs."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from saccade.testing import Stepwise


class KeyDetached(Stepwise, caught_by=("gradients_of_inputs", "gradcheck", "gradients_through_lse")):
    """Keys receive no gradient."""

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        return super().scores(query, key.detach(), allowed, factor)


class ConstantNormaliser(Stepwise, caught_by=("gradients_of_inputs", "gradcheck")):
    """The backward pass forgets that the sum of a row depends on its scores."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        lse = super().normalise(scores, allowed)[1]
        level = lse.detach().masked_fill(lse.isneginf(), 0.0)[..., None]
        return torch.where(allowed, (torch.where(allowed, scores, level) - level).exp(), 0.0), lse


class GradientLeak(Stepwise, caught_by=("sensitivity", "gradients_of_inputs")):
    """Every value receives a gradient from every row, although the output is right."""

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        everyone = value.sum(2, keepdim=True)
        return super().product(weights, value, allowed) + (everyone - everyone.detach())


class BiasDetached(Stepwise, caught_by=("gradient_of_bias",)):
    """A bias receives no gradient."""

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        return super().add(scores, None if bias is None else bias.detach())


class ParameterGradientMissing(Stepwise, caught_by=("gradients_of_parameters", "gradcheck")):
    """Scores, relative biases and sinks are read as if they were constants."""

    def read_parameters(self, given: Any) -> Any:
        if isinstance(given, nn.Module):
            return copy.deepcopy(given).requires_grad_(False)
        return given.detach() if isinstance(given, Tensor) and given.dim() == 1 else given


class LseDetached(Stepwise, caught_by=("gradients_through_lse",)):
    """The lse is a by-product without a gradient."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalise(scores, allowed)
        return weights, lse.detach()


class HalfSoftmax(Stepwise, caught_by=("half_precision",)):
    """Scores leave the first product in half precision."""

    def block(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.narrow = query.dtype
        return super().block(query, key, value, allowed, **kwargs)

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        return super().scores(query, key, allowed, factor).to(self.narrow).to(query.dtype)


class Float32Inside(Stepwise, caught_by=("oracle",)):
    """Everything is computed in float32, also for float64."""

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        return super().scores(query.float(), key.float(), allowed, factor).to(query.dtype)


class WideOutput(Stepwise, caught_by=("dtypes",)):
    """The output stays in the dtype of the accumulators."""

    def finish(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x


class InPlace(Stepwise, caught_by=("pure",)):
    """The caller's query is scaled where it lies."""

    def read_query(self, query: Tensor) -> Tensor:
        return query if query.requires_grad else query.mul_(1 + 1e-6)


class DropoutLeftOn(Stepwise, caught_by=("determinism", "ones")):
    """A tenth of the weights is dropped in evaluation, too."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        weights, lse = super().normalise(scores, allowed)
        kept = torch.rand(weights.shape, generator=self.generator) >= 0.1
        return weights * kept.to(weights.device) / 0.9, lse


class StridesIgnored(Stepwise, caught_by=("strides",)):
    """The query is read as if it were contiguous."""

    def read_query(self, query: Tensor) -> Tensor:
        return query.as_strided(query.shape, torch.empty(query.shape, device="meta").stride())


class NoEmptyLengths(Stepwise, caught_by=("zero_lengths",)):
    """The largest score of a row is asked for, of which there is none without keys."""

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        largest = scores.detach().nan_to_num(nan=0.0).amax(-1, keepdim=True)
        weights, lse = super().normalise(scores - largest, allowed)
        return weights, lse + largest[..., 0]


class HiddenSquare(Stepwise, caught_by=("cost",)):
    """All rows are computed at once."""

    rows_at_once = 1 << 30
