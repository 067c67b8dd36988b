"""Turn word pieces, as vocabularies spell them, back into text."""

import codecs
import re
from collections.abc import Iterator, Sequence
from functools import cache

_SPECIAL = re.compile(r"\[[A-Z]+\d*\]|<[|｜].*[|｜]>|</?s>|<(pad|unk|bos|eos|mask|sep|cls|start_of_turn|end_of_turn)>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LONGEST = 12  # most tokens of one character


def is_special(token: str) -> bool:
    """Return whether a token looks like one that a tokenizer adds, such as ``[CLS]``, ``<s>`` and ``<|endoftext|>``."""
    return _SPECIAL.fullmatch(token) is not None


def spelled(tokens: Sequence[str]) -> tuple[str, ...]:
    """Return readable tokens: spaces as spaces, bytes as the characters that they encode.

    Three ways to write pieces are known: that of GPT-2, with a letter for each byte and Ġ for the space; that of
    SentencePiece, with ▁ for the space and ``<0xE4>`` for a byte; that of BERT, in which ## goes on with a word. Which
    it is, is told by these signs, or by letters that stand for bytes that make characters; tokens of other forms stay
    as they are. Of a character that several tokens make, each shows it, with its number.

    Args:
        tokens: as ``tokenizer.convert_ids_to_tokens(ids)`` or ``tokenizers.Encoding.tokens`` give them.

    Returns:
        As many texts.

    Cost: O(tokens).

    Example:
        >>> spelled(["Hello", "Ġä", "½", "ł", "å¥½"])
        ('Hello', ' 你(1/3)', '你(2/3)', '你(3/3)', '好')
        >>> spelled(["ä½łå¥½", "ä¸ĸçķĮ"])
        ('你好', '世界')
        >>> spelled(["▁to", "ken", "<0xE4>", "<0xBD>", "<0xA0>"])
        (' to', 'ken', '你(1/3)', '你(2/3)', '你(3/3)')
        >>> spelled(["[CLS]", "un", "##likely"])
        ('[CLS]', ' un', 'likely')
    """
    plain = [token for token in tokens if not is_special(token)]
    if _are_letters(plain):
        return _joined(tokens, [_of_letters(token) for token in tokens])
    if any("▁" in token for token in plain) or any(_BYTE.fullmatch(token) for token in plain):
        return _joined(tokens, [_of_sentencepiece(token) for token in tokens])
    if any(token.startswith("##") and len(token) > 2 for token in plain):
        return tuple(_of_wordpiece(token, is_first=place == 0) for place, token in enumerate(tokens))
    return tuple(tokens)


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of GPT-2's vocabulary encodes: printable ones themselves, others from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {**{chr(byte): byte for byte in seen}, **{chr(256 + place): byte for place, byte in enumerate(unseen)}}


def _of_letters(token: str) -> bytes | None:
    """Return the bytes of a token; None for an added token, which is plain text."""
    letters = _bytes_of_letters()
    if is_special(token) or any(letter not in letters for letter in token):
        return None
    return bytes(letters[letter] for letter in token)


def _are_letters(plain: Sequence[str]) -> bool:
    """Return whether letters encode bytes: by their spaces, or, since Chinese has none, by forming characters."""
    if any("▁" in token for token in plain):
        return False
    data = [own for token in plain if (own := _of_letters(token)) is not None]
    if any(sign in token for token in plain for sign in "ĠĊ"):
        return True
    try:
        whole = b"".join(data).lstrip(bytes(range(0x80, 0xC0)))  # a text may begin within a character
        return not codecs.getincrementaldecoder("utf-8")().decode(whole).isascii()  # and end within one
    except UnicodeDecodeError:  # letters of another language
        return False


def _of_sentencepiece(token: str) -> bytes | None:
    if is_special(token):
        return None
    found = _BYTE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace("▁", " ").encode("utf-8", "surrogatepass")


def _of_wordpiece(token: str, *, is_first: bool) -> str:
    if token.startswith("##"):
        return token[2:]
    return token if is_first or is_special(token) else f" {token}"


def _joined(tokens: Sequence[str], pieces: Sequence[bytes | None]) -> tuple[str, ...]:
    """Return the texts of the pieces; None is a token in plain text."""
    return tuple(_texts(tokens, pieces))


def _texts(tokens: Sequence[str], pieces: Sequence[bytes | None]) -> Iterator[str]:
    start = 0
    while start < len(tokens):
        own = pieces[start]
        if own is None:
            yield tokens[start]
            start += 1
            continue
        count, text = _character(pieces[start : start + _LONGEST])
        if count == 1:
            yield text
        else:
            space, letter = text[: len(text) - len(text.lstrip(" "))], text.lstrip(" ")
            for place in range(count):
                yield f"{space if place == 0 else ''}{letter}({place + 1}/{count})"
        start += count


def _character(pieces: Sequence[bytes | None]) -> tuple[int, str]:
    """Return how many pieces form whole characters, and these; else one piece with its bytes escaped."""
    data = b""
    for count, piece in enumerate(pieces, 1):
        if piece is None:
            break
        data += piece
        try:
            return count, data.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":  # no further byte can complete it
                break
    return 1, (pieces[0] or b"").decode(errors="backslashreplace")
