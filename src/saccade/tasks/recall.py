"""Recall: texts, and the tokens that must be predicted in them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.arguments import integer
from saccade.errors import value_error

__all__ = ["IGNORED", "Recall", "begin"]

IGNORED = -100
"""The target where nothing is asked; torch's cross entropy leaves it out by default."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recall:
    """Texts whose later tokens ask for earlier ones.

    Args:
        tokens: int64 ``[examples, length]``.
        targets: int64 ``[examples, length]``: what comes after each token where it can be known, else `IGNORED`.
        context_len: tokens that a model may read at once; what comes after them asks, and is read token by token, so
            that nothing can be prepared for the question.
    """

    tokens: Tensor
    targets: Tensor
    context_len: int

    def accuracy(self, logits: Tensor) -> float:
        """The share of targets that are predicted: where the target is the likeliest token.

        Args:
            logits: ``[examples, length, vocab]``, or those of the last tokens only, ``[examples, n, vocab]``.
        """
        targets = self.targets[:, self.targets.shape[1] - logits.shape[1] :]
        asked = targets != IGNORED
        if logits.dim() != 3 or len(logits) != len(targets) or not bool(asked.any()):
            rule = "be [examples, length, vocab], with a target among the tokens"
            raise value_error("Recall.accuracy", "logits", rule, list(logits.shape))
        return float((logits.argmax(-1) == targets)[asked].double().mean())


def begin(where: str, seed: int, **sizes: int) -> torch.Generator:
    """Check that all sizes are ints of at least 1, and return a generator of random numbers for one task."""
    for name, size in sizes.items():
        integer(where, name, size)
    return torch.Generator().manual_seed(integer(where, "seed", seed, 0))
