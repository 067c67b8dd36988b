"""Join tokens into the words of a text, and merge attention weights from tokens into words."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from saccade.support.errors import type_error, value_error

_APOSTROPHES = frozenset("'’")
_SEPARATORS = frozenset(".,'’")
_WRITTEN = str.maketrans("Ġ▁Ċĉč", "  \n\t\r")  # how vocabularies spell whitespace


@dataclass(frozen=True)
class Word:
    """One word of a text, and the tokens that it was joined from, ``tokens[start:stop]``.

    Attributes:
        text: the word as written in the text, or the name of a special token, such as ``[CLS]``.
        start, stop: index of the word's first token in the encoded sequence, and the index after its last.
        special: True for a token that the tokenizer added.
        unknown: True if a token of the word is not in the vocabulary, so that the model did not see it.
    """

    text: str
    start: int
    stop: int
    special: bool = False
    unknown: bool = False


class Encoding(Protocol):
    """The part of ``tokenizers.Encoding`` that `words` reads."""

    @property
    def tokens(self) -> list[str]:
        """Tokens, as spelled in the vocabulary."""

    @property
    def word_ids(self) -> list[int | None]:
        """Index of the word that each token belongs to; None for a special token."""

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Start and stop of each token's characters in the text."""


def words(encoding: Encoding, text: str | Sequence[str], *, unknown: str = "[UNK]") -> tuple[Word, ...]:
    """Join the tokens of ``encoding`` into the words of ``text``.

    Words are those of the pre-tokenizer, spelled as in ``text`` (with capitals and accents) and split at spaces. In
    scripts without spaces, each character is a word. Contractions and numbers that the pre-tokenizer splits (``don't``,
    ``3.14``) are joined again. Line breaks, tabs, special tokens and tokens that contain only spaces are separate
    words. If ``text`` is a list of words, its words are returned unchanged.

    Args:
        encoding: the tokenizer's encoding of ``text``, without padding.
        text: the encoded text, or the list of words if it was split before encoding.
        unknown: the token for text that is not in the vocabulary.

    Returns:
        Words in order; together they cover every token exactly once.

    Raises:
        ValueError: a word of the list has no token, so there is nothing to show for it.

    Cost: O(tokens).
    """
    pieces = _pieces(encoding, unknown, text if isinstance(text, str) else "")
    if not isinstance(text, str):
        return _words_of_list(pieces, list(text))
    result: list[_Piece] = []
    for piece in pieces:
        result.append(piece)
        while len(result) > 2 and _is_one_word(result[-3], result[-2], result[-1], text):
            first, _, last = result[-3:]
            unseen = any(part.word.unknown for part in result[-3:])
            joined = replace(first.word, stop=last.word.stop, unknown=unseen)
            result[-3:] = [_Piece(joined, first.number, (first.span[0], last.span[1]))]
    return tuple(_as_written(piece, text) for piece in result)


@dataclass(frozen=True)
class _Piece:
    """Adjacent tokens of one word of the pre-tokenizer, with the word's number and its range of characters."""

    word: Word
    number: int | None
    span: tuple[int, int]


def _pieces(encoding: Encoding, unknown: str, text: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    for index, (token, number, span) in enumerate(
        zip(encoding.tokens, encoding.word_ids, encoding.offsets, strict=True)
    ):
        is_unknown = token == unknown and number is not None
        if number is not None and pieces and _continues(pieces[-1], number, span, text):
            before = pieces[-1]
            word = replace(before.word, stop=index + 1, unknown=before.word.unknown or is_unknown)
            pieces[-1] = _Piece(word, number, (before.span[0], span[1]))
        else:
            pieces.append(_Piece(Word(token, index, index + 1, number is None, is_unknown), number, span))
    return pieces


def _continues(before: _Piece, number: int, span: tuple[int, int], text: str) -> bool:
    """Return whether a token belongs to the same word as the tokens before it.

    Some pre-tokenizers, such as Llama's, treat a full text as one word. In their tokens, a space begins a new word and
    belongs to it. In a script without spaces, each character is a word, so only the bytes of one character are joined.
    """
    if before.number != number:
        return False
    if span[0] < before.span[1] or text[slice(*before.span)] == " ":
        return True
    border = text[max(before.span[1] - 1, 0) : span[0] + 1]  # from the last character before the token to its first
    return not (has_no_spaces(border[-1:]) or any(map(str.isspace, border)))


def has_no_spaces(character: str) -> bool:
    """Return whether a character belongs to a script without spaces between words: Han, kana or their punctuation."""
    return unicodedata.east_asian_width(character) in ("W", "F") if character else False


def _words_of_list(pieces: list[_Piece], words: list[str]) -> tuple[Word, ...]:
    lost = sorted(set(range(len(words))) - {piece.number for piece in pieces if piece.number is not None})
    if lost:
        names = ", ".join(f"{words[number]!a} (word {number + 1})" for number in lost)
        raise value_error("every given word", "leave at least one token", f"nothing for {names}")
    return tuple(
        piece.word if piece.number is None else replace(piece.word, text=words[piece.number]) for piece in pieces
    )


def _is_one_word(first: _Piece, middle: _Piece, last: _Piece, text: str) -> bool:
    """Return whether three parts of a text form one word, joined by the middle part.

    The middle part must be an apostrophe between letters, or a separator between digits.
    """
    if first.word.special or last.word.special or middle.word.special:
        return False
    # Compare neighbouring characters, not pieces: a space may lie between pieces.
    start, stop = middle.span
    before, sign, after = text[start - 1 : start], text[start:stop], text[stop : stop + 1]
    if before.isdigit() and after.isdigit():
        return sign in _SEPARATORS
    return sign in _APOSTROPHES and before.isalpha() and after.isalpha()


def _as_written(piece: _Piece, text: str) -> Word:
    if piece.word.special:
        return piece.word
    start, stop = piece.span
    # Normalisers strip accents: a mark after the last letter belongs to the word but to no token.
    while stop < len(text) and unicodedata.category(text[stop]).startswith("M"):
        stop += 1
    written = text[start:stop]
    if not written.strip(" "):  # only spaces, or too short for the tokenizer to report offsets
        written = piece.word.text.translate(_WRITTEN)
    return replace(piece.word, text=written.strip(" ") or written)


def merge(weights: torch.Tensor, query_words: Sequence[Word], key_words: Sequence[Word] | None = None) -> torch.Tensor:
    """Merge the rows and columns of an attention matrix from tokens into words.

    The attention that a word receives is the sum over its tokens, and the attention that it pays is the mean over its
    tokens, so rows that sum to 1 still do:

        merged[a, b] = mean over tokens i of word a of (sum over tokens j of word b of weights[i, j])

    Args:
        weights: ``[..., q_tokens, kv_tokens]``, with a floating dtype.
        query_words: the words of the rows; together they cover every row once, in order.
        key_words: the words of the columns; ``query_words`` if None.

    Returns:
        ``[..., q_words, kv_words]``, float32 or wider.

    Raises:
        TypeError: ``weights`` has no floating dtype.
        ValueError: the words do not cover the tokens.

    Cost: O(q_tokens * kv_tokens) time.
    """
    if not weights.is_floating_point():
        raise type_error("weights", "be of a floating dtype", weights.dtype)
    if weights.ndim < 2:
        raise value_error("weights", "be [..., q_tokens, kv_tokens]", list(weights.shape))
    columns = query_words if key_words is None else key_words
    q_len, kv_len = weights.shape[-2:]
    row_owner = _word_of_token("query_words", query_words, q_len).to(weights.device)
    column_owner = _word_of_token("query_words" if key_words is None else "key_words", columns, kv_len).to(
        weights.device
    )
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    summed = wide.new_zeros(*wide.shape[:-1], len(columns)).index_add_(-1, column_owner, wide)
    totals = summed.new_zeros(*wide.shape[:-2], len(query_words), len(columns)).index_add_(-2, row_owner, summed)
    sizes = torch.tensor([word.stop - word.start for word in query_words], device=weights.device)
    return totals / sizes[:, None]


def _word_of_token(argument: str, words: Sequence[Word], tokens: int) -> torch.Tensor:
    """Return the index of the word that each token belongs to, int64 ``[tokens]``."""
    end = 0
    for number, word in enumerate(words):
        if word.start != end or word.stop <= word.start:
            got = f"word {number + 1} at tokens [{word.start}, {word.stop}) after token {end}"
            raise value_error(argument, "cover the tokens in order", got)
        end = word.stop
    if end != tokens:
        hint = "remove padding from the weights first; it belongs to no word."
        raise value_error(argument, f"cover all {tokens} tokens", f"words for {end}", hint=hint)
    return torch.tensor([number for number, word in enumerate(words) for _ in range(word.start, word.stop)])
