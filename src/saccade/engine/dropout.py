"""Dropout of attention weights as a pure function of seed, batch item, head and positions.

The same weights are therefore dropped with any tiling, when the backward pass recomputes the weights, and on all ranks
of a sharded sequence, without storing a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import take
from saccade.plan import Ranges
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.torch_modes import mapped_levels
from saccade.support.validation import is_integer, is_number

_WORD = 0xFFFFFFFF


class Dropped(NamedTuple):
    """Dropout settings for one call to attention: probability, seed, and how `vmap` changed the batch.

    Attributes:
        p: probability that a weight is dropped.
        seed: seed of the random numbers.
        levels: levels of ``vmap`` with ``randomness="different"``, for which each sample drops different weights.
        repeats: for every other axis that ``vmap`` has folded into the batch, the batch size before folding and the
            size of the axis. The samples along such an axis drop the same weights.
    """

    p: float
    seed: int
    levels: tuple[int, ...] = ()
    repeats: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, p: float, drawn: Tensor) -> Dropped:
        """Return the dropout settings for a seed from `draw`. Under `vmap`, the seed may differ between samples."""
        levels, value = mapped_levels(drawn)
        return cls(p, int(value.flatten()[0].item()), levels)  # the sample index distinguishes the samples

    def folded(self, batch: int, size: int, level: int) -> Dropped:
        """Return the dropout settings after `vmap` has folded ``size`` samples into a batch of ``batch`` items."""
        return self if level in self.levels else self._replace(repeats=(*self.repeats, (batch, size)))

    def items(self, b: Tensor) -> Tensor:
        """Convert indices in a batch folded by `vmap` to the batch indices that dropout depends on."""
        for batch, size in reversed(self.repeats):
            b = b // (batch * size) * batch + b % batch
        return b


def check(dropout_p: float, seed: int | None = None) -> None:
    """Raise an error unless the dropout probability is at least 0 and below 1, and the seed is valid."""
    check_seed(seed)
    if not is_number(dropout_p):
        raise type_error("dropout_p", "be a float", type(dropout_p).__name__)
    if not 0.0 <= dropout_p < 1.0:
        raise value_error("dropout_p", "be at least 0 and below 1", dropout_p)


def check_seed(seed: int | None) -> None:
    """Raise an error unless the dropout seed is None, or an int from 0 to 2**63 - 1."""
    if seed is None:
        return
    rule = "be an int from 0 to 2**63 - 1, or None"
    if not is_integer(seed):
        raise type_error("seed", rule, repr(seed))
    if not 0 <= seed < 1 << 63:
        raise value_error("seed", rule, seed)


def draw() -> Tensor:
    """Generate a dropout seed with torch's generator, so that ``torch.manual_seed`` makes dropout reproducible."""
    return torch.randint(0, 1 << 31, (), device="cpu")


def draw_seed() -> int:
    """Generate a dropout seed like `draw`, but raise an error if `vmap` would need a seed for each sample.

    Raises:
        UnsupportedError: each sample of ``vmap`` would need a different seed.
    """
    drawn = Dropped.of(0.0, draw())
    if drawn.levels:
        reason = "its dropout is drawn once for all samples"
        raise unsupported('vmap with randomness="different"', [reason], hint='randomness="same" runs')
    return drawn.seed


def keep(seed: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, dropout_p: float) -> Tensor:
    """Return the dropout mask, True where a weight is kept, with the broadcast shape of the index tensors.

    Each row and each column is hashed with full avalanche, which costs O(rows + columns). Each pair then costs one xor,
    one multiplication and one comparison of 32-bit words.

    Args:
        seed: an int, of which the lowest 64 bits are used.
        b, h, q, kv: int64 batch items, heads and positions, broadcastable against each other.
        dropout_p: probability that a weight is dropped, 0 <= dropout_p < 1.
    """
    rows, columns = _hashes_of(seed, b, h, q, kv)
    return (rows ^ columns) * (rows | 1) >= _threshold(dropout_p)


class Words:
    """The dropout mask of a matrix as 32-bit words, which are computed block by block for `drop_`.

    Words are computed and applied four times faster than bools. Hashes of rows and of columns are computed only once.

    Args:
        seed: an int, of which the lowest 64 bits are used.
        b, h, q, kv: int64 ``[batch, 1, 1, 1]``, ``[1, heads, 1, 1]``, ``[batch | 1, 1, q_len, 1]`` and
            ``[batch | 1, 1, 1, kv_len]``.
        dropout_p: probability that a weight is dropped, 0 <= dropout_p < 1.
    """

    def __init__(self, seed: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, dropout_p: float):
        self.rows, self.columns = _hashes_of(seed, b, h, q, kv)
        self.threshold = _threshold(dropout_p)

    def block(self, batch: slice, heads: slice, rows: range, columns: Ranges, *, out: Tensor) -> Tensor:
        """Write a block's dropout words to ``out``, int32 ``[batch, heads, rows, columns]``: 1 to keep, 0 to drop."""
        row_words = take(self.rows[batch, heads], (rows,), 2)
        column_words = take(self.columns[batch] if len(self.columns) > 1 else self.columns, columns, 3)
        torch.bitwise_xor(row_words, column_words, out=out)
        return out.mul_(row_words | 1).ge_(self.threshold)


def drop_(weights: Tensor, words: Tensor) -> Tensor:
    """Set weights to 0 in place where the dropout words are 0. Weights must be contiguous float32 or float64."""
    if weights.dtype == torch.float32:
        weights.view(torch.int32).mul_(words)  # multiply the bits by 1 or 0
        return weights
    return weights.masked_fill_(words == 0, 0.0)


def dropped(weights: Tensor, words: Tensor, *, out: Tensor) -> Tensor:
    """Write a copy of the weights to ``out``, with 0 where the dropout words are 0, and return it."""
    if weights.dtype == torch.float32:
        torch.mul(weights.view(torch.int32), words, out=out.view(torch.int32))
        return out
    return drop_(out.copy_(weights), words)


def _threshold(dropout_p: float) -> int:
    return int(dropout_p * 2**32) - 2**31


def _hashes_of(seed: int, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 hashes of the rows and of the columns. Together, they determine which pairs are dropped."""
    low, high = seed & _WORD, seed >> 32 & _WORD
    start = _mix(torch.full_like(q, low) ^ _mix(torch.full_like(q, high)))
    rows = _mix(_mix(_mix(start ^ (b & _WORD)) ^ (h & _WORD)) ^ (q & _WORD))
    columns = _mix(_mix(torch.full_like(kv, low ^ 0x9E3779B9)) ^ (kv & _WORD))
    return _as_int32(rows), _as_int32(columns)


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit dropout words, stored as int64, with the finaliser of Murmur3."""
    x = x ^ (x >> 16)  # a new tensor, which is changed in place from here on
    x.mul_(0x85EBCA6B).bitwise_and_(_WORD)
    x.bitwise_xor_(x >> 13)
    x.mul_(0xC2B2AE35).bitwise_and_(_WORD)
    return x.bitwise_xor_(x >> 16)


def _as_int32(x: Tensor) -> Tensor:
    return torch.where(x >= 2**31, x - 2**32, x).to(torch.int32)
