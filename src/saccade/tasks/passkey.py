"""Passkey: a few tokens hidden in a long meaningless text, and asked for at its end."""

from __future__ import annotations

import torch

from saccade.errors import value_error
from saccade.tasks.recall import IGNORED, Recall, begin

__all__ = ["passkey"]


def passkey(examples: int, length: int, *, key_len: int, vocab_size: int, seed: int) -> Recall:
    """The same few filler tokens over and over, somewhere among them a sign and a key; at the end the sign again.

    Token 0 is the sign, tokens 1 to 8 fill, the others make keys, in which no token comes twice. The key is asked for
    token by token.

    Args:
        examples: number of texts.
        length: tokens in a text.
        key_len: tokens of a key.
        vocab_size: number of tokens, more than ``9 + key_len``.
        seed: of all draws.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> task = passkey(1, 14, key_len=2, vocab_size=20, seed=3)
        >>> task.tokens[0, -3:].tolist() == [0, *task.targets[0, -3:-1].tolist()]
        True

    Reference: Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2, with token numbers for words.
    """
    random = begin("passkey", seed, examples=examples, length=length, key_len=key_len, vocab_size=vocab_size)
    context = length - key_len - 1
    if context < key_len + 1:
        raise value_error("passkey", "length", f"hold a key of {key_len} and its sign twice", length)
    if vocab_size < 9 + key_len:
        raise value_error("passkey", "vocab_size", f"be at least {9 + key_len}", vocab_size)
    filler = 1 + torch.arange(context) % 8
    tokens = torch.zeros(examples, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    for row in range(examples):
        key = 9 + torch.randperm(vocab_size - 9, generator=random)[:key_len]
        depth = int(torch.randint(context - key_len, (), generator=random))
        tokens[row, :context] = filler
        tokens[row, depth] = 0
        tokens[row, depth + 1 : depth + 1 + key_len] = key
        tokens[row, context + 1 :] = key
        targets[row, context:-1] = key
    return Recall(tokens, targets, context)
