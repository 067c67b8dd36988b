"""qk_ranges: a mask as ranges of queries and keys, exactly, as MagiAttention takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch

from saccade.masks import Mask
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Ints, Universe
from saccade.support.errors import unsupported
from saccade.support.validation import check_int, check_type

__all__ = ["QKRanges", "qk_ranges"]

Kind = Literal["full", "causal", "inv_causal", "bi_causal"]
_KINDS: dict[tuple[int, int], Kind] = {
    (0, 0): "full",
    (0, 1): "causal",
    (1, 0): "inv_causal",
    (1, 1): "bi_causal",
}
"""How far the first and the last key of a range move from one query to the next."""
_ROWS = 1024  # that are asked about at once


class QKRanges(NamedTuple):
    """Pieces of a mask, which cover each allowed pair once.

    Attributes:
        q_ranges, k_ranges: (first, behind the last) of each piece.
        attn_mask_type: of each piece: "full"; "causal", where the last query sees all keys and each one before it a
            key less at the end; "inv_causal", where the first sees all and each one after it a key less at the
            beginning; "bi_causal", both.
    """

    q_ranges: list[tuple[int, int]]
    k_ranges: list[tuple[int, int]]
    attn_mask_type: list[Kind]


def qk_ranges(mask: Mask, seq_len: int) -> QKRanges:
    """A mask of self-attention as few pieces as neighbouring queries allow.

    Args:
        mask: the same for all batch items and heads.
        seq_len: tokens.

    Raises:
        UnsupportedError: a mask that tells batch items or heads apart.

    Cost: that of asking for the keys of each query; a mask that does not know its own costs ``seq_len`` numbers each.

    Example:
        >>> from saccade import masks
        >>> qk_ranges(masks.Documents([3, 2], rule=masks.Causal()), 5)
        QKRanges(q_ranges=[(0, 3), (3, 5)], k_ranges=[(0, 3), (3, 5)], attn_mask_type=['causal', 'causal'])

    Reference: MagiAttention's ``magi_attn_flex_key``.
    """
    check_type("mask", mask, Mask, "be a saccade mask")
    seq_len = check_int("seq_len", seq_len)
    if mask.shape != (1, 1):
        reason = "its ranges are those of all batch items and heads"
        raise unsupported(f"mask={mask}", [reason], hint="pack the items: masks.Documents(lengths)")
    found = QKRanges([], [], [])
    for q, k, kind in sorted(_pieces(mask, seq_len)):
        found.q_ranges.append(q)
        found.k_ranges.append(k)
        found.attn_mask_type.append(kind)
    return found


class _Open(NamedTuple):
    """A piece that may go on: its first row, the keys of this one and of the last, and how these move."""

    row: int
    first: tuple[int, int]
    last: tuple[int, int]
    step: tuple[int, int] | None

    def closed(self, stop: int) -> tuple[tuple[int, int], tuple[int, int], Kind]:
        """The piece of the rows up to ``stop``."""
        return (self.row, stop), (self.first[0], self.last[1]), _KINDS[self.step or (0, 0)]


def _pieces(mask: Mask, seq_len: int) -> Iterator[tuple[tuple[int, int], tuple[int, int], Kind]]:
    going: list[_Open] = []
    keys: list[list[tuple[int, int]]] = []
    for row in range(seq_len):
        if row % _ROWS == 0:
            keys = _keys(mask, row, min(row + _ROWS, seq_len), seq_len)
        left, now = list(keys[row % _ROWS]), list[_Open]()
        for piece in going:
            follower = next((own for own in left if _follows(piece, own)), None)
            if follower is None:
                yield piece.closed(row)
                continue
            left.remove(follower)
            step = (follower[0] - piece.last[0], follower[1] - piece.last[1])
            now.append(piece._replace(last=follower, step=step))
        going = now + [_Open(row, own, own, None) for own in left]
    for piece in going:
        yield piece.closed(seq_len)


def _follows(piece: _Open, keys: tuple[int, int]) -> bool:
    step = (keys[0] - piece.last[0], keys[1] - piece.last[1])
    return step in _KINDS and piece.step in (None, step)


def _keys(mask: Mask, start: int, stop: int, seq_len: int) -> list[list[tuple[int, int]]]:
    """The ranges of keys of each row."""
    rows = np.arange(start, stop)
    whole = Universe(np.zeros_like(rows), np.full_like(rows, seq_len))
    bounds = mask.bounds(Groups(np.full_like(rows, ALL), rows, rows), whole)
    known = bounds.needed.sizes() == bounds.sure.sizes()
    found = [_ranges(*pair) for pair in zip(bounds.needed.starts, bounds.needed.ends, strict=True)]
    for place in np.flatnonzero(~known).tolist():
        zero, keys = torch.zeros(1, 1, dtype=torch.int64), torch.arange(seq_len)[None]
        allowed = mask.allows(zero, zero, zero + int(rows[place]), keys).expand(1, seq_len)[0]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], allowed.numpy().astype(np.int8), [0]])))
        found[place] = _ranges(edges[::2], edges[1::2])
    return found


def _ranges(starts: Ints, ends: Ints) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start < end and joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined
