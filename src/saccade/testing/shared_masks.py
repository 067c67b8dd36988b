"""Masks that several cases share, each with the same over again in plain integers; and sizes of large cases."""

from __future__ import annotations

from typing import Any

from saccade.masks import Causal, Documents, Global, Mask, Padding, Predicate, Strided, Window, sparse_transformer
from saccade.testing.case import Rule

__all__ = [
    "CAUSAL",
    "LARGE",
    "MIXED",
    "document_of",
    "documents",
    "left_padding",
    "padding",
    "sparse",
    "streaming",
    "strided",
    "window",
]

Said = tuple[Mask, Rule]
LARGE: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "q_len": 450, "kv_len": 450}


def _is_mixed(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q + kv + h + b) % 3 != 0


CAUSAL: Said = (Causal(), lambda b, h, q, kv: kv <= q)
MIXED: Said = (Predicate(_is_mixed), _is_mixed)  # tells everything apart


def window(left: int, right: int) -> Said:
    """Neighbours on both sides."""
    return Window(left, right), lambda b, h, q, kv: q - left <= kv <= q + right


def streaming(left: int, *tokens: int) -> Said:
    """The last keys, and global tokens."""
    mask = Causal() & (Window(left, 0) | Global(tokens))
    return mask, lambda b, h, q, kv: kv <= q and (kv >= q - left or q in tokens or kv in tokens)


def strided(step: int) -> Said:
    """Every so many keys."""
    return Strided(step), lambda b, h, q, kv: q % step == kv % step


def sparse(step: int) -> Said:
    """The last keys, and every so many before."""
    return sparse_transformer(step), lambda b, h, q, kv: kv <= q and (kv >= q - step or q % step == kv % step)


def padding(*lengths: int) -> Said:
    """So many tokens in each item, and padding behind them."""
    return Padding(lengths), lambda b, h, q, kv: kv < lengths[b]


def left_padding(padded_len: int, *lengths: int) -> Said:
    """Causal, with padding before the tokens of each item."""
    mask = Padding(lengths, side="left", padded_len=padded_len) & Causal()
    return mask, lambda b, h, q, kv: padded_len - lengths[b] <= kv <= q


def documents(*lengths: int) -> Said:
    """Documents one behind the other."""
    own = document_of(*lengths)
    return Documents(lengths), lambda b, h, q, kv: own[q] == own[kv]


def document_of(*lengths: int) -> tuple[int, ...]:
    """The document of each position."""
    return tuple(document for document, length in enumerate(lengths) for _ in range(length))
