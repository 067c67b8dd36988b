"""Decode tokens from their spelling in the vocabulary to readable text."""

import codecs
import re
from collections.abc import Iterator, Sequence
from functools import cache

_SPECIAL = re.compile(r"\[[A-Z]+\d*\]|<[|｜].*[|｜]>|</?s>|<(pad|unk|bos|eos|mask|sep|cls|start_of_turn|end_of_turn)>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_LONGEST = 12  # maximum number of tokens per character


def is_special(token: str) -> bool:
    """Return whether a token looks like one that a tokenizer adds, such as ``[CLS]``, ``<s>`` and ``<|endoftext|>``."""
    return _SPECIAL.fullmatch(token) is not None


def spelled(tokens: Sequence[str]) -> tuple[str, ...]:
    """Decode tokens to readable text, with real spaces and with bytes decoded to characters.

    Three spellings are recognised: GPT-2's, with a character for each byte and Ġ for the space; SentencePiece's, with ▁
    for the space and ``<0xE4>`` for a byte; and BERT's, where ## continues a word. Tokens in other spellings stay
    unchanged. If several tokens form one character, each shows the character and its own index, as in ``你(1/3)``.

    Args:
        tokens: from ``tokenizer.convert_ids_to_tokens(ids)`` or ``tokenizers.Encoding.tokens``.

    Returns:
        One string for each token.

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
    if _is_gpt2_spelling(plain):
        return tuple(_texts(tokens, [_gpt2_bytes(token) for token in tokens]))
    if any("▁" in token for token in plain) or any(_BYTE.fullmatch(token) for token in plain):
        return tuple(_texts(tokens, [_sentencepiece_bytes(token) for token in tokens]))
    if any(token.startswith("##") and len(token) > 2 for token in plain):
        return tuple(_wordpiece_text(token, is_first=index == 0) for index, token in enumerate(tokens))
    return tuple(tokens)


@cache
def _gpt2_alphabet() -> dict[str, int]:
    """Return a dict from the characters of GPT-2's vocabulary to the bytes that they encode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


def _gpt2_bytes(token: str) -> bytes | None:
    """Return the bytes that a token in GPT-2's spelling encodes; None for any other token."""
    alphabet = _gpt2_alphabet()
    if is_special(token) or any(character not in alphabet for character in token):
        return None
    return bytes(alphabet[character] for character in token)


def _is_gpt2_spelling(plain: Sequence[str]) -> bool:
    """Return whether tokens are in GPT-2's spelling: they contain Ġ or Ċ, or their bytes decode to non-ASCII text."""
    if any("▁" in token for token in plain):
        return False
    data = [piece for token in plain if (piece := _gpt2_bytes(token)) is not None]
    if any(sign in token for token in plain for sign in "ĠĊ"):
        return True
    try:
        whole = b"".join(data).lstrip(bytes(range(0x80, 0xC0)))  # a text may begin within a character
        return not codecs.getincrementaldecoder("utf-8")().decode(whole).isascii()  # and end within a character
    except UnicodeDecodeError:  # characters of another language, not of GPT-2's alphabet
        return False


def _sentencepiece_bytes(token: str) -> bytes | None:
    if is_special(token):
        return None
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode("utf-8", "surrogatepass")


def _wordpiece_text(token: str, *, is_first: bool) -> str:
    if token.startswith("##"):
        return token[2:]
    return token if is_first or is_special(token) else f" {token}"


def _texts(tokens: Sequence[str], pieces: Sequence[bytes | None]) -> Iterator[str]:
    start = 0
    while start < len(tokens):
        if pieces[start] is None:
            yield tokens[start]
            start += 1
            continue
        count, text = _character(pieces[start : start + _LONGEST])
        if count == 1:
            yield text
        else:
            space, character = text[: len(text) - len(text.lstrip(" "))], text.lstrip(" ")
            for index in range(count):
                yield f"{space if index == 0 else ''}{character}({index + 1}/{count})"
        start += count


def _character(pieces: Sequence[bytes | None]) -> tuple[int, str]:
    """Decode the shortest run of leading tokens that forms complete characters.

    Return the number of tokens and the characters. If there is no such run, return 1 and the first token with its bytes
    escaped.
    """
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
