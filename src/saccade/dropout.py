"""Which weights dropout keeps: a function of seed, batch item, head and positions, and of nothing else.

Tilings, recomputation in the backward pass and ranks of a sharded sequence therefore agree without storing a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import type_error, value_error

__all__ = ["check", "draw_seed", "keep"]

_WORD = 0xFFFFFFFF


def check(dropout_p: float, where: str) -> None:
    """Raise unless ``dropout_p`` is a probability below 1."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise type_error(where, "dropout_p", "be a float", type(dropout_p).__name__)
    if not 0.0 <= dropout_p < 1.0:
        raise value_error(where, "dropout_p", "be at least 0 and below 1", dropout_p)


def draw_seed() -> int:
    """A fresh seed from torch's generator, so that ``torch.manual_seed`` makes dropout repeatable."""
    return int(torch.randint(0, 1 << 31, ()).item())


def keep(seed: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, dropout_p: float) -> Tensor:
    """True where a weight is kept, bool of the shape that the index tensors broadcast to.

    Rows and columns get a full avalanche each (O(rows + columns)); a pair costs one xor, one multiplication and one
    comparison of 32-bit words.

    Args:
        seed: any int.
        b, h, q, kv: int64 batch items, heads and positions, broadcasting against each other.
        dropout_p: probability that a weight is dropped, 0 <= dropout_p < 1.
    """
    rows = _mix(_mix(_mix(_mix(torch.full_like(q, seed & _WORD)) ^ (b & _WORD)) ^ (h & _WORD)) ^ (q & _WORD))
    columns = _mix(_mix(torch.full_like(kv, (seed ^ 0x9E3779B9) & _WORD)) ^ (kv & _WORD))
    row_words, column_words = _as_int32(rows), _as_int32(columns)
    threshold = int(dropout_p * 2**32) - 2**31
    return (row_words ^ column_words) * (row_words | 1) >= threshold


def _mix(x: Tensor) -> Tensor:
    """Murmur3's finaliser on 32-bit words that are held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _WORD
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def _as_int32(x: Tensor) -> Tensor:
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)
