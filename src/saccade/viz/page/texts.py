"""The tokens on a page: one for each query and key of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from saccade.support.errors import kind, type_error, value_error
from saccade.text import spelled
from saccade.text.detokenize import is_special
from saccade.text.labels import legible

Text = Sequence[str]
Tokens = Text | tuple[Text, Text] | Mapping[str, Text | tuple[Text, Text]] | None
"""Tokens of one sequence, a pair of query and key tokens, or a dict of either by layer name; ``*`` matches anything."""


class Labels(NamedTuple):
    """The tokens of a layer's queries and keys on a page; both may come from one sequence."""

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    is_one_text: bool


def check_tokens(tokens: Tokens) -> None:
    """Raise an error unless the ``tokens`` argument of a page is valid. The layers are not needed for this check.

    Raises:
        TypeError: the argument is a single string, or an entry is not a string.
    """
    for entry in tokens.values() if isinstance(tokens, Mapping) else [] if tokens is None else [tokens]:
        for text in entry if _is_pair(entry) else [entry]:
            _checked_text(text)


def labels_of(tokens: Tokens, name: str, q_len: int, kv_len: int) -> Labels:
    """Return the tokens of the queries and keys of one layer on a page.

    If the queries are the last tokens of the key sequence, one list of tokens is enough.

    Raises:
        TypeError: tokens are not strings.
        ValueError: the number of tokens differs from the number of queries or keys, or no name matches the layer.
    """
    entry = _tokens_of_layer(tokens, name)
    if entry is None:
        numbers = tuple(map(str, range(kv_len)))
        if q_len <= kv_len:
            return Labels(numbers[kv_len - q_len :], numbers, True)
        return Labels(tuple(map(str, range(q_len))), numbers, False)
    queries, keys = (_checked_text(text) for text in (entry if _is_pair(entry) else (entry, entry)))
    is_one = queries == keys
    if is_one and q_len < kv_len == len(keys):  # with a cache, the queries are the last tokens
        queries = queries[kv_len - q_len :]
    for what, text, length in (("keys", keys, kv_len), ("queries", queries, q_len)):
        if len(text) != length:
            rule = f"be one for each of the {length:,} {what} of layer {name}"
            hint = "pass two texts as a pair, tokens=(of queries, of keys), or by layer: tokens={'decoder*': ...}"
            raise value_error("tokens", rule, f"{len(text):,}", hint=hint)
    return Labels(queries, keys, is_one)


def shown_tokens(text: Sequence[str]) -> dict[str, object]:
    """Return a dict with the tokens as a page displays them, and the indices of the special tokens."""
    return {
        "tokens": [legible(token) for token in spelled(text)],
        "special": [index for index, token in enumerate(text) if is_special(token)],
    }


def _tokens_of_layer(tokens: Tokens, name: str) -> Any:
    if not isinstance(tokens, Mapping):
        return tokens
    for pattern, text in tokens.items():
        if fnmatchcase(name, str(pattern)):
            return text
    names = ", ".join(map(str, tokens)) or "none"
    raise value_error("tokens", f"have a name that matches layer {name}", names, hint="'*' matches all")


def _is_pair(entry: object) -> bool:
    """Return whether ``tokens`` is a pair of token sequences rather than a single sequence of two tokens."""
    return isinstance(entry, tuple) and len(entry) == 2 and not any(isinstance(text, str) for text in entry)


def _checked_text(text: object) -> tuple[str, ...]:
    if isinstance(text, str) or not isinstance(text, Sequence):
        raise type_error("tokens", "be a list of strings", kind(text), hint="tokenizer.convert_ids_to_tokens")
    for token in text:
        if not isinstance(token, str):
            raise type_error("tokens", "be strings", kind(token), hint="tokenizer.convert_ids_to_tokens(ids)")
    return tuple(text)
