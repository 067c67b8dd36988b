"""Induction: what came after a token before comes after it again."""

from __future__ import annotations

import torch

from saccade.errors import value_error
from saccade.tasks.recall import IGNORED, Recall, begin

__all__ = ["induction"]


def induction(examples: int, length: int, *, copied: int, vocab_size: int, seed: int) -> Recall:
    """Random tokens, with one piece repeated at the end: each of its tokens but the first can be predicted.

    No token occurs twice in the first part, so that there is one answer.

    Args:
        examples: number of texts.
        length: tokens in a text.
        copied: length of the repeated piece, at least 2; it starts at a random place.
        vocab_size: number of tokens; token 0 is not used.
        seed: of all draws.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> task = induction(1, 9, copied=3, vocab_size=20, seed=0)
        >>> task.tokens.tolist(), task.targets[0, 6:].tolist()
        ([[16, 11, 15, 4, 18, 3, 15, 4, 18]], [4, 18, -100])

    Reference: Olsson et al. 2022, arXiv:2209.11895.
    """
    random = begin("induction", seed, examples=examples, length=length, copied=copied, vocab_size=vocab_size)
    if copied < 2 or length < 2 * copied:
        raise value_error("induction", "copied", f"be from 2 to half of length {length}", copied)
    first = length - copied
    if vocab_size - 1 < first:
        raise value_error("induction", "vocab_size", f"have {first} tokens besides 0", vocab_size)
    tokens = torch.stack([1 + torch.randperm(vocab_size - 1, generator=random)[:first] for _ in range(examples)])
    start = torch.randint(first - copied + 1, (examples, 1), generator=random)
    again = tokens.gather(1, start + torch.arange(copied))
    tokens = torch.cat([tokens, again], 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, first:-1] = again[:, 1:]
    return Recall(tokens, targets, first)
