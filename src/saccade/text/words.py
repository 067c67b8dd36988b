"""Join the pieces of a tokenizer into words."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from saccade.support.errors import value_error

_APOSTROPHES = frozenset("'’")
_SEPARATORS = frozenset(".,'’")
_WRITTEN = str.maketrans("Ġ▁Ċĉč", "  \n\t\r")  # how vocabularies spell what is not seen


@dataclass(frozen=True)
class Word:
    """One word and the tokens it was made from, ``tokens[start:stop]``.

    Attributes:
        text: the word as it was written; a special token's own name, such as ``[CLS]``.
        start, stop: its tokens, as positions in the encoded sequence.
        special: added by the tokenizer, not part of the text.
        unknown: at least one of its pieces is not in the model's vocabulary, so the model did not see it.
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
        """The pieces, as spelled in the vocabulary."""

    @property
    def word_ids(self) -> list[int | None]:
        """For each piece the word it came from, None for a special token."""

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """For each piece the characters it covers, start and stop."""


def words(encoding: Encoding, text: str | Sequence[str], *, unknown: str = "[UNK]") -> tuple[Word, ...]:
    """Put the pieces of ``encoding`` together to the words of ``text``.

    A word is what the tokenizer's pre-tokenizer calls one, spelled as in ``text`` (capitals and accents
    kept), up to the next space, or a character of a script that is written without spaces; contractions and
    numbers that it cuts (``don't``, ``3.14``) are whole again. Line breaks and tabs that tokens hold stay, and
    tokens of spaces alone are words. Words that were given one by one stay exactly as given. Special tokens are words
    of their own.

    Args:
        encoding: what the tokenizer made of ``text``, without padding.
        text: the encoded text, or the words given when it was encoded as already split.
        unknown: the token that stands for what the vocabulary does not have.

    Returns:
        Words in order; together they cover every token exactly once.

    Raises:
        ValueError: a given word left no token, so there would be nothing to show for it.

    Cost: O(tokens).
    """
    pieces = _pieces(encoding, unknown, text if isinstance(text, str) else "")
    if not isinstance(text, str):
        return _given(pieces, list(text))
    found: list[_Piece] = []
    for piece in pieces:
        found.append(piece)
        while len(found) > 2 and _is_one_word(found[-3], found[-2], found[-1], text):
            first, _, last = found[-3:]
            unseen = any(part.word.unknown for part in found[-3:])
            joined = replace(first.word, stop=last.word.stop, unknown=unseen)
            found[-3:] = [_Piece(joined, first.number, (first.span[0], last.span[1]))]
    return tuple(_spelled(piece, text) for piece in found)


@dataclass(frozen=True)
class _Piece:
    """Neighbouring tokens of one pre-tokenized word: its number and the characters it covers."""

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
    """Return whether a piece belongs to the word before it.

    What a pre-tokenizer calls a word may be a whole text, as in tokenizers of Llama's form: there, a space begins a
    word, and belongs to it. Where a script has no spaces a character is a word, and only its bytes belong together.
    """
    if before.number != number:
        return False
    if span[0] < before.span[1] or text[slice(*before.span)] == " ":
        return True
    border = text[max(before.span[1] - 1, 0) : span[0] + 1]  # the last character before, the first after, all between
    return not (_has_no_spaces(border[-1:]) or any(map(str.isspace, border)))


def _has_no_spaces(character: str) -> bool:
    """Return whether a character is Han, kana or their punctuation."""
    return unicodedata.east_asian_width(character) in ("W", "F") if character else False


def _given(pieces: list[_Piece], given: list[str]) -> tuple[Word, ...]:
    lost = sorted(set(range(len(given))) - {piece.number for piece in pieces if piece.number is not None})
    if lost:
        names = ", ".join(f"{given[number]!a} (word {number + 1})" for number in lost)
        raise value_error("every given word", "leave at least one token", f"nothing for {names}")
    return tuple(
        piece.word if piece.number is None else replace(piece.word, text=given[piece.number]) for piece in pieces
    )


def _is_one_word(first: _Piece, middle: _Piece, last: _Piece, text: str) -> bool:
    """Return whether ``middle`` is an apostrophe inside a word or a separator inside a number."""
    if first.word.special or last.word.special or middle.word.special:
        return False
    # Compare neighbouring characters, not pieces: a space may lie between pieces.
    start, stop = middle.span
    before, sign, after = text[start - 1 : start], text[start:stop], text[stop : stop + 1]
    if before.isdigit() and after.isdigit():
        return sign in _SEPARATORS
    return sign in _APOSTROPHES and before.isalpha() and after.isalpha()


def _spelled(piece: _Piece, text: str) -> Word:
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
