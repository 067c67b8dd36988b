"""Sampler: a rule that samples the next token from logits."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number


@dataclasses.dataclass(frozen=True)
class Sampler:
    """A sampling rule that applies a temperature, then top-k filtering, then top-p filtering.

    Args:
        temperature: divisor of the logits, above 0. Below 1 it favours likely tokens; near 0 only the likeliest token
            remains (tied tokens share the probability equally).
        top_k: number of likeliest tokens to keep; None for all. Tokens tied with the k-th are also kept.
        top_p: keep the fewest likeliest tokens whose probabilities sum to at least this; above 0, at most 1; None for
            all.

    Raises:
        ValueError, TypeError: an option is out of range or has the wrong type.

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
        hint = "sampler=None always takes the most likely token"
        check_number("temperature", self.temperature, above=0, hint=hint)
        if self.top_k is not None:
            check_int("top_k", self.top_k)
        if self.top_p is not None and check_number("top_p", self.top_p, above=0) > 1:
            raise value_error("top_p", "be above 0 and at most 1", self.top_p)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution from which tokens are sampled, ``[batch, vocab]``. Each row sums to 1."""
        dtype = logits.dtype if logits.is_floating_point() else torch.get_default_dtype()
        # Divide differences from the largest logit, which may become -inf, but never +inf, at any temperature.
        differences = logits.double() - logits.double().amax(-1, keepdim=True)
        divided = (differences / self.temperature).masked_fill(differences == 0, 0.0)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = differences.topk(self.top_k).values[..., -1:]
            divided = divided.masked_fill(differences < least, -math.inf)
        probabilities = divided.softmax(-1).to(dtype)
        if self.top_p is None or self.top_p == 1.0:
            return probabilities
        ordered, index = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        before[..., 0] = 0.0  # keep the likeliest token despite rounding
        top = torch.where(before < self.top_p, ordered, 0.0)
        return torch.zeros_like(top).scatter_(-1, index, top / top.sum(-1, keepdim=True))

    def draw(self, logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample the next token of each text from its logits.

        Return the tokens, int64 ``[batch]``, and their log-probabilities, ``[batch]``.

        Each row uses one random number, so a text's samples do not depend on the lengths of the other texts.
        """
        probabilities = self.probabilities(logits)
        total = probabilities.double().cumsum(-1)
        drawn = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator, device="cpu").to(total.device)
        tokens = torch.searchsorted(total, drawn * total[:, -1:], right=True)
        possible = (probabilities > 0) * torch.arange(probabilities.shape[-1], device=total.device)
        tokens = torch.minimum(tokens, possible.amax(-1, keepdim=True))
        return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log()
