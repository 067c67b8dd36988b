"""Merge weights between tokens into weights between words."""

from collections.abc import Sequence

import torch

from saccade.support.errors import type_error, value_error
from saccade.text.words import Word


def merge(weights: torch.Tensor, query_words: Sequence[Word], key_words: Sequence[Word] | None = None) -> torch.Tensor:
    """Merge the rows and columns of word pieces into words.

    What a word receives is all that its tokens receive, what a word attends to is what its tokens attend to
    on average; so rows that sum to 1 still do:

        merged[a, b] = mean over tokens i of word a of (sum over tokens j of word b of weights[i, j])

    Args:
        weights: ``[..., q_tokens, kv_tokens]``, of a floating dtype.
        query_words: the words of the rows; together they cover every row once, in order.
        key_words: the words of the columns; ``query_words`` when None.

    Returns:
        ``[..., q_words, kv_words]``, float32 or wider.

    Raises:
        TypeError: ``weights`` is not floating.
        ValueError: the words do not cover the tokens.

    Cost: O(q_tokens * kv_tokens) time.
    """
    if not weights.is_floating_point():
        raise type_error("weights", "be of a floating dtype", weights.dtype)
    if weights.ndim < 2:
        raise value_error("weights", "be [..., q_tokens, kv_tokens]", list(weights.shape))
    columns = query_words if key_words is None else key_words
    q_len, kv_len = weights.shape[-2:]
    row_owner = _owner("query_words", query_words, q_len).to(weights.device)
    column_owner = _owner("query_words" if key_words is None else "key_words", columns, kv_len).to(weights.device)
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    summed = wide.new_zeros(*wide.shape[:-1], len(columns)).index_add_(-1, column_owner, wide)
    totals = summed.new_zeros(*wide.shape[:-2], len(query_words), len(columns)).index_add_(-2, row_owner, summed)
    sizes = torch.tensor([word.stop - word.start for word in query_words], device=weights.device)
    return totals / sizes[:, None]


def _owner(argument: str, words: Sequence[Word], tokens: int) -> torch.Tensor:
    """Return the index of the word of each token, int64 ``[tokens]``."""
    end = 0
    for number, word in enumerate(words):
        if word.start != end or word.stop <= word.start:
            got = f"word {number + 1} at tokens [{word.start}, {word.stop}) after token {end}"
            raise value_error(argument, "cover the tokens one after the other", got)
        end = word.stop
    if end != tokens:
        hint = "cut padding off the weights first; it belongs to no word."
        raise value_error(argument, f"cover all {tokens} tokens", f"words for {end}", hint=hint)
    return torch.tensor([number for number, word in enumerate(words) for _ in range(word.start, word.stop)])
