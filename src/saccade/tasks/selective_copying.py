"""Selective copying: a few tokens among blanks, to be said again in order."""

from __future__ import annotations

import torch

from saccade.support.errors import value_error
from saccade.tasks.recall import IGNORED, Recall, begin

__all__ = ["selective_copying"]


def selective_copying(examples: int, length: int, *, copied: int, vocab_size: int, seed: int) -> Recall:
    """Blanks with a few tokens at random places; then a sign for each of them, where they are to be said in order.

    Token 0 is the blank, token 1 the sign; the others are copied.

    Args:
        examples: number of texts.
        length: tokens in a text, signs included.
        copied: tokens that are copied, at most half of ``length``.
        vocab_size: number of tokens, at least 3.
        seed: of all draws.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> task = selective_copying(1, 9, copied=3, vocab_size=10, seed=0)
        >>> task.tokens.tolist(), task.targets[0, 6:].tolist()
        ([[0, 0, 5, 9, 3, 0, 1, 1, 1]], [5, 9, 3])

    Reference: Gu and Dao 2023, arXiv:2312.00752, section 3.1.
    """
    random = begin(seed, examples=examples, length=length, copied=copied, vocab_size=vocab_size)
    context = length - copied
    if copied > context:
        raise value_error("copied", f"be at most half of length {length}", copied)
    if vocab_size < 3:
        raise value_error("vocab_size", "hold a blank, a sign and a token to copy", vocab_size)
    places = torch.rand(examples, context, generator=random).argsort(1)[:, :copied].sort(1).values
    said = torch.randint(2, vocab_size, (examples, copied), generator=random)
    tokens = torch.zeros(examples, length, dtype=torch.int64).scatter_(1, places, said)
    tokens[:, context:] = 1
    targets = torch.full_like(tokens, IGNORED)
    targets[:, context:] = said
    return Recall(tokens, targets, context)
