"""Sampler: how a token is drawn from what may come next."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number

__all__ = ["Sampler"]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws tokens: temperature first, then the ``top_k`` likeliest, then the fewest that reach ``top_p``.

    Args:
        temperature: logits are divided by it; above 0. Below 1 the likely becomes likelier; near 0 only the likeliest
            stay, those that are equally likely with equal shares.
        top_k: how many tokens stay; None for all. Where the k-th and others are equally likely, all of them stay.
        top_p: the likeliest tokens stay until their probabilities sum to it; above 0, at most 1; None for all.

    Raises:
        ValueError, TypeError: anything else.

    Example:
        >>> logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        >>> Sampler(top_k=2).probabilities(logits)
        tensor([[0.0000, 0.0000, 0.2689, 0.7311]])
        >>> Sampler(temperature=0.5, top_p=0.8).probabilities(logits)
        tensor([[0., 0., 0., 1.]])

    Reference: Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al. 2020, arXiv:1904.09751 (top-p).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        hint = "sampler=None always takes the likeliest token"
        check_number("temperature", self.temperature, above=0, hint=hint)
        if self.top_k is not None:
            check_int("top_k", self.top_k)
        if self.top_p is not None and check_number("top_p", self.top_p, above=0) > 1:
            raise value_error("top_p", "be above 0 and at most 1", self.top_p)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What tokens are drawn by: ``[batch, vocab]``, rows sum to 1."""
        dtype = logits.dtype if logits.is_floating_point() else torch.get_default_dtype()
        # Divided is what a logit lacks to the largest: that may become -inf, but never inf, whatever the temperature.
        lacks = logits.double() - logits.double().amax(-1, keepdim=True)
        divided = (lacks / self.temperature).masked_fill(lacks == 0, 0.0)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = lacks.topk(self.top_k).values[..., -1:]
            divided = divided.masked_fill(lacks < least, -math.inf)
        probabilities = divided.softmax(-1).to(dtype)
        if self.top_p is None or self.top_p == 1.0:
            return probabilities
        ordered, index = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        before[..., 0] = 0.0  # the likeliest token stays, whatever was rounded
        kept = torch.where(before < self.top_p, ordered, 0.0)
        return torch.zeros_like(kept).scatter_(-1, index, kept / kept.sum(-1, keepdim=True))

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens, int64 ``[batch]``, and their log-probabilities, ``[batch]``.

        One number is taken from the generator for each row, so that a draw says nothing about how long others are.
        """
        probabilities = self.probabilities(logits)
        total = probabilities.double().cumsum(-1)
        drawn = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator, device="cpu").to(total.device)
        tokens = torch.searchsorted(total, drawn * total[:, -1:], right=True)
        possible = (probabilities > 0) * torch.arange(probabilities.shape[-1], device=total.device)
        tokens = torch.minimum(tokens, possible.amax(-1, keepdim=True))
        return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log()
