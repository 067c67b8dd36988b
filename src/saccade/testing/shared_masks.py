"""Masks that several cases share, each with its rule as a function of plain integers, and sizes of large cases."""

from __future__ import annotations

from typing import Any

from saccade.masks import Causal, Documents, Global, Mask, Padding, Predicate, Strided, Window, sparse_transformer
from saccade.testing.case import Rule

MaskAndRule = tuple[Mask, Rule]
LARGE: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "q_len": 450, "kv_len": 450}


def _is_mixed(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q + kv + h + b) % 3 != 0


CAUSAL: MaskAndRule = (Causal(), lambda b, h, q, kv: kv <= q)
MIXED: MaskAndRule = (Predicate(_is_mixed), _is_mixed)  # depends on item, head, query and key


def window(left: int, right: int) -> MaskAndRule:
    """Return a window mask for test cases, and the same rule as a plain function of ints."""
    return Window(left, right), lambda b, h, q, kv: q - left <= kv <= q + right


def streaming(left: int, *tokens: int) -> MaskAndRule:
    """Return a causal window mask with global tokens, and the same rule as a plain function of ints."""
    mask = Causal() & (Window(left, 0) | Global(tokens))
    return mask, lambda b, h, q, kv: kv <= q and (kv >= q - left or q in tokens or kv in tokens)


def strided(step: int) -> MaskAndRule:
    """Return a strided mask for test cases, and the same rule as a plain function of ints."""
    return Strided(step), lambda b, h, q, kv: q % step == kv % step


def sparse(step: int) -> MaskAndRule:
    """Return the mask of the Sparse Transformer, and the same rule as a plain function of ints."""
    return sparse_transformer(step), lambda b, h, q, kv: kv <= q and (kv >= q - step or q % step == kv % step)


def padding(*lengths: int) -> MaskAndRule:
    """Return a mask for padding after the tokens of each item, and the same rule as a plain function of ints."""
    return Padding(lengths), lambda b, h, q, kv: kv < lengths[b]


def left_padding(padded_len: int, *lengths: int) -> MaskAndRule:
    """Return a causal mask for padding on the left of each item, and the same rule as a plain function of ints."""
    mask = Padding(lengths, side="left", padded_len=padded_len) & Causal()
    return mask, lambda b, h, q, kv: padded_len - lengths[b] <= kv <= q


def documents(*lengths: int) -> MaskAndRule:
    """Return a mask that separates documents of given lengths, and the same rule as a plain function of ints."""
    document = document_of(*lengths)
    return Documents(lengths), lambda b, h, q, kv: document[q] == document[kv]


def document_of(*lengths: int) -> tuple[int, ...]:
    """Return the document index of each position, to compute the expected values of document masks."""
    return tuple(document for document, length in enumerate(lengths) for _ in range(length))
