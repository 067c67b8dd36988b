"""MQAR: many pairs, and a question about each of them."""

from __future__ import annotations

import torch

from saccade.errors import value_error
from saccade.tasks.recall import IGNORED, Recall, begin

__all__ = ["mqar"]


def mqar(examples: int, length: int, num_pairs: int, *, vocab_size: int, seed: int) -> Recall:
    """Multi-query associative recall: pairs of a key and a value, then the keys again; after each comes its value.

    Token 0 fills what is left. Keys are drawn without repetition from the lower half of the other tokens, values from
    the upper. The pairs stand at the beginning, the questions at random places behind them, two tokens each.

    Args:
        examples: number of texts.
        length: tokens in a text, at least ``4 * num_pairs``.
        num_pairs: pairs in a text.
        vocab_size: number of tokens.
        seed: of all draws.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> task = mqar(1, 12, 2, vocab_size=9, seed=1)
        >>> task.tokens.shape, task.context_len, int((task.targets >= 0).sum())
        (torch.Size([1, 12]), 4, 2)

    Reference: Arora et al. 2023, arXiv:2312.04927, section 3.2; here with uniform gaps.
    """
    random = begin("mqar", seed, examples=examples, length=length, num_pairs=num_pairs, vocab_size=vocab_size)
    if length < 4 * num_pairs:
        raise value_error("mqar", "length", f"hold {num_pairs} pairs and as many questions, {4 * num_pairs}", length)
    keys = (vocab_size - 1) // 2
    if keys < num_pairs:
        raise value_error("mqar", "vocab_size", f"have {num_pairs} keys, at least {2 * num_pairs + 1}", vocab_size)
    tokens = torch.zeros(examples, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    places = (length - 2 * num_pairs) // 2
    for row in range(examples):
        own_keys = 1 + torch.randperm(keys, generator=random)[:num_pairs]
        values = 1 + keys + torch.randint(vocab_size - 1 - keys, (num_pairs,), generator=random)
        tokens[row, : 2 * num_pairs] = torch.stack([own_keys, values], 1).flatten()
        order = torch.randperm(num_pairs, generator=random)
        place = 2 * num_pairs + 2 * torch.randperm(places, generator=random)[:num_pairs]
        tokens[row, place], tokens[row, place + 1] = own_keys[order], values[order]
        targets[row, place] = values[order]
    return Recall(tokens, targets, 2 * num_pairs)
