"""Locate a word in a tokenized text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from saccade.support.errors import kind, type_error, value_error
from saccade.text.detokenize import spelled
from saccade.text.words import has_no_spaces


def locate(word: str, tokens: Sequence[str]) -> range:
    """Return the range of tokens that a word of a text was split into.

    Only whole words match; spaces around ``word`` are ignored. If the exact spelling does not occur, case is ignored.
    ``word`` may consist of several words, such as a full name.

    Args:
        word: a word that occurs once in the text.
        tokens: the tokens of the text, from ``tokenizer.convert_ids_to_tokens(ids)`` or ``tokenizers.Encoding.tokens``.

    Raises:
        TypeError: the word is not a string, or the tokens are not a list of strings.
        ValueError: the word does not occur, or occurs several times.

    Cost: O(characters).

    Example:
        >>> locate("camera", ["The", "Ġcam", "era", "Ġbroke", "."])
        range(1, 3)
        >>> locate("camera", ["[CLS]", "the", "cam", "##era", "broke", "[SEP]"])
        range(2, 4)
    """
    if not isinstance(word, str):
        raise type_error("word", "be a string", kind(word))
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise type_error("tokens", "be a list of strings", kind(tokens), hint="tokenizer.convert_ids_to_tokens(ids)")
    pieces = spelled(tokens)
    if not any(" " in piece for piece in pieces[1:]) and tuple(tokens) == pieces:  # each token is a word
        pieces = tuple(f" {piece}" for piece in pieces)
    pieces = tuple(piece[1:] if piece[:1] == " " and has_no_spaces(piece[1:2]) else piece for piece in pieces)
    matches = _occurrences(word, pieces) or _occurrences(word.casefold(), [piece.casefold() for piece in pieces])
    if len(matches) != 1:
        positions = ", ".join(
            str(match.start) if len(match) == 1 else f"{match.start} to {match.stop - 1}" for match in matches
        )
        got = f"{word!r} at tokens {positions}" if matches else f"{word!r}, which does not"
        hint = (
            f"name one by its token: {matches[-1].start}"
            if matches
            else "words are compared without spaces around them"
        )
        raise value_error("word", "occur once in the text", got, hint=hint)
    return matches[0]


def _occurrences(word: str, pieces: Sequence[str]) -> list[range]:
    """Return the token range of each occurrence of a word in a text, except within longer words."""
    word = word.strip()
    text, ends = "".join(pieces), [*accumulate(map(len, pieces))]
    found = []
    for match in re.finditer(re.escape(word), text) if word else ():
        before, after = text[: match.start()][-1:], text[match.end() :][:1]
        if _is_inside(before, word[0]) or _is_inside(word[-1], after):
            continue
        first = next(index for index, end in enumerate(ends) if end > match.start())
        last = next(index for index, end in enumerate(ends) if end >= match.end())
        found.append(range(first, last + 1))
    return found


def _is_inside(left: str, right: str) -> bool:
    """Return whether two adjacent characters belong to one word; each Han or kana character is a separate word."""
    return left.isalnum() and right.isalnum() and not (has_no_spaces(left) or has_no_spaces(right))
