"""Join tokens into the words of a text, and merge attention weights from tokens to words."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from saccade.support.errors import type_error, value_error

_APOSTROPHES = frozenset("'’")
_SEPARATORS = frozenset(".,'’")
_WHITESPACE = str.maketrans("Ġ▁Ċĉč", "  \n\t\r")  # characters for whitespace in vocabularies


@dataclass(frozen=True)
class Word:
    """A word of a text, joined from the tokens ``tokens[start:stop]``.

    Attributes:
        text: the word as written in the text, or the name of a special token, such as ``[CLS]``.
        start, stop: index of the word's first token in the encoded sequence, and the index after its last token.
        special: True for a token that the tokenizer added.
        unknown: True if a token of the word is the unknown token, so that the model did not see this part of the word.
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
        """The tokens, in the spelling of the vocabulary."""

    @property
    def word_ids(self) -> list[int | None]:
        """The word index of each token; None for a special token."""

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """The start and stop of each token's characters in the text."""


def words(encoding: Encoding, text: str | Sequence[str], *, unknown: str = "[UNK]") -> tuple[Word, ...]:
    """Join the tokens of ``encoding`` into the words of ``text``.

    The pre-tokenizer's words are used, spelled as in ``text`` (with capitals and accents) and split at spaces. In
    scripts without spaces, each character is a word. Contractions and numbers that the pre-tokenizer splits (``don't``,
    ``3.14``) are joined again. Line breaks, tabs, special tokens and tokens that contain only spaces are separate
    words. If ``text`` is a list of words, its words are returned unchanged.

    Args:
        encoding: the tokenizer's encoding of ``text``, without padding.
        text: the encoded text, or the list of words if it was split before encoding.
        unknown: the token for out-of-vocabulary text.

    Returns:
        The words in order; together they cover every token exactly once.

    Raises:
        ValueError: a word of the list has no token.

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
            is_unknown = any(part.word.unknown for part in result[-3:])
            joined = replace(first.word, stop=last.word.stop, unknown=is_unknown)
            result[-3:] = [_Piece(joined, first.word_id, (first.offsets[0], last.offsets[1]))]
    return tuple(_as_written(piece, text) for piece in result)


@dataclass(frozen=True)
class _Piece:
    """Adjacent tokens that the pre-tokenizer assigns to one word; several pieces may form a `Word`.

    Attributes:
        word: the word that the tokens form so far.
        word_id: the pre-tokenizer's word index; None for a special token.
        offsets: start and stop of the tokens' characters in the text.
    """

    word: Word
    word_id: int | None
    offsets: tuple[int, int]


def _pieces(encoding: Encoding, unknown: str, text: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    for index, (token, word_id, offsets) in enumerate(
        zip(encoding.tokens, encoding.word_ids, encoding.offsets, strict=True)
    ):
        is_unknown = token == unknown and word_id is not None
        if word_id is not None and pieces and _continues(pieces[-1], word_id, offsets, text):
            before = pieces[-1]
            word = replace(before.word, stop=index + 1, unknown=before.word.unknown or is_unknown)
            pieces[-1] = _Piece(word, word_id, (before.offsets[0], offsets[1]))
        else:
            pieces.append(_Piece(Word(token, index, index + 1, word_id is None, is_unknown), word_id, offsets))
    return pieces


def _continues(before: _Piece, word_id: int, offsets: tuple[int, int], text: str) -> bool:
    """Return whether a token belongs to the same word as the tokens before it.

    Some pre-tokenizers, such as Llama's, treat a full text as one word; their tokens start a new word at each space and
    include the space. In a script without spaces, each character is a word, so only one character's bytes are joined.
    """
    if before.word_id != word_id:
        return False
    if offsets[0] < before.offsets[1] or text[slice(*before.offsets)] == " ":
        return True
    border = text[max(before.offsets[1] - 1, 0) : offsets[0] + 1]  # from the last character before it to its first
    return not (has_no_spaces(border[-1:]) or any(map(str.isspace, border)))


def has_no_spaces(character: str) -> bool:
    """Return whether a character belongs to a script without spaces between words: Han, kana or their punctuation."""
    return unicodedata.east_asian_width(character) in ("W", "F") if character else False


def _words_of_list(pieces: list[_Piece], words: list[str]) -> tuple[Word, ...]:
    missing = sorted(set(range(len(words))) - {piece.word_id for piece in pieces if piece.word_id is not None})
    if missing:
        names = ", ".join(f"{words[index]!a} (word {index + 1})" for index in missing)
        raise value_error("every given word", "leave at least one token", f"nothing for {names}")
    return tuple(
        piece.word if piece.word_id is None else replace(piece.word, text=words[piece.word_id]) for piece in pieces
    )


def _is_one_word(first: _Piece, middle: _Piece, last: _Piece, text: str) -> bool:
    """Return whether three parts of a text form one word, joined by the middle part.

    The middle part must be an apostrophe between letters, or a decimal or thousands separator between digits.
    """
    if first.word.special or last.word.special or middle.word.special:
        return False
    # Compare adjacent characters, not pieces, because a space may separate pieces.
    start, stop = middle.offsets
    before, sign, after = text[start - 1 : start], text[start:stop], text[stop : stop + 1]
    if before.isdigit() and after.isdigit():
        return sign in _SEPARATORS
    return sign in _APOSTROPHES and before.isalpha() and after.isalpha()


def _as_written(piece: _Piece, text: str) -> Word:
    if piece.word.special:
        return piece.word
    start, stop = piece.offsets
    # Normalisers strip accents, so a combining mark after the last letter belongs to the word but to no token.
    while stop < len(text) and unicodedata.category(text[stop]).startswith("M"):
        stop += 1
    written = text[start:stop]
    if not written.strip(" "):  # only spaces, or too short for the tokenizer to report offsets
        written = piece.word.text.translate(_WHITESPACE)
    return replace(piece.word, text=written.strip(" ") or written)


def merge(weights: torch.Tensor, query_words: Sequence[Word], key_words: Sequence[Word] | None = None) -> torch.Tensor:
    """Merge the rows and columns of an attention matrix from tokens to words.

    The attention that a word receives is summed over its tokens, and the attention that it pays is averaged over its
    tokens, so rows that sum to 1 still do:

        merged[a, b] = mean over tokens i of word a of (sum over tokens j of word b of weights[i, j])

    Args:
        weights: ``[..., q_tokens, kv_tokens]``, with a floating dtype.
        query_words: the words for the rows, in order; together they cover every row once.
        key_words: the words for the columns; ``query_words`` if None.

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
    """Return the word index of each token, int64 ``[tokens]``."""
    end = 0
    for index, word in enumerate(words):
        if word.start != end or word.stop <= word.start:
            got = f"word {index + 1} at tokens [{word.start}, {word.stop}) after token {end}"
            raise value_error(argument, "cover the tokens in order", got)
        end = word.stop
    if end != tokens:
        hint = "remove padding from the weights first; it belongs to no word."
        raise value_error(argument, f"cover all {tokens} tokens", f"words for {end}", hint=hint)
    return torch.tensor([index for index, word in enumerate(words) for _ in range(word.start, word.stop)])
