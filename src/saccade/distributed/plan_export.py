"""Export exchange plans to other engines: FlexAttention, TransformerEngine and MagiAttention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from saccade.distributed.exchange_plan import Exchange
from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.masks import Full, Mask
from saccade.masks.convert.patterns import window_sides
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Ints, KeyDomain
from saccade.positions.token_positions import Positions
from saccade.support.errors import unsupported
from saccade.support.validation import check_int, check_type

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CommType = Literal["p2p", "all_gather", "a2a"]
Kind = Literal["full", "causal", "inv_causal", "bi_causal"]
_KINDS: dict[tuple[int, int], Kind] = {
    (0, 0): "full",
    (0, 1): "causal",
    (1, 0): "inv_causal",
    (1, 1): "bi_causal",
}
"""Segment kinds by how far the first and the last key move from one query to the next."""
_ROWS = 1024  # rows in a block


def block_mask(
    plan: Exchange, rank: int, block_size: tuple[int, int] = (128, 128), device: torch.device | str = "cpu"
) -> BlockMask:
    """Convert one rank's part of a plan to a FlexAttention BlockMask over its rows and its keys after the exchange.

    Args:
        plan: a plan with strategy "fetch" or "gather".
        rank: the rank whose rows the BlockMask covers.
        block_size: rows and columns of a block, as the backend requires.
        device: the device that FlexAttention will run on.

    Returns:
        A BlockMask over ``[local rows, local and fetched keys in the order of their positions]``.
    """
    from saccade.engine.kernels.block_mask import blocks_of  # noqa: PLC0415  imports a compiler

    if plan.strategy == "ulysses":
        reason = "each rank then has all rows of its heads: use saccade.integrations.flex.block_mask"
        raise unsupported('strategy="ulysses"', [reason])
    rows, columns = plan.layout.tokens(rank), plan.rank(rank).columns
    where = torch.device(device)
    q, kv = (Positions(None, torch.from_numpy(positions)[None]) for positions in (rows, columns))
    mask = PositionedMask.of(plan.mask, q, kv, where)
    return blocks_of(mask, (plan.mask.shape[0], 1, len(rows), len(columns)), (0, 0), where, block_size)


def cp_comm_types(layers: Sequence[Mask | None]) -> list[CommType]:
    """Return the TransformerEngine ``cp_comm_type`` that each layer's mask requires.

    TransformerEngine's ring ("p2p") supports full and causal masks. Windows need "a2a", which gives each rank all rows
    of some heads. Other masks are not supported.

    Raises:
        UnsupportedError: a mask is neither full, causal nor a causal window.
    """
    return [_comm_type(Full() if mask is None else mask, number) for number, mask in enumerate(layers)]


def _comm_type(mask: Mask, number: int) -> CommType:
    left, right = window_sides(mask) or (0, None)
    if left == math.inf and right in (0, math.inf):
        return "p2p"
    if right == 0:
        return "a2a"
    reason = f"TransformerEngine supports full masks, causal masks and causal windows, but layer {number} has {mask}"
    raise unsupported("a mask", [reason], hint="saccade.distributed runs every mask")


class QKRanges(NamedTuple):
    """Segments of a mask that together cover each allowed pair exactly once: query range, key range and kind.

    Attributes:
        q_ranges, k_ranges: (start, stop) of each segment.
        attn_mask_type: type of each segment. "full": every query sees all keys. "causal": the last query sees all keys,
            and each earlier query one key fewer at the end. "inv_causal": the first query sees all keys, and each later
            query one key fewer at the beginning. "bi_causal": both restrictions apply.
    """

    q_ranges: list[tuple[int, int]]
    k_ranges: list[tuple[int, int]]
    attn_mask_type: list[Kind]


def qk_ranges(mask: Mask, seq_len: int) -> QKRanges:
    """Export a self-attention mask to MagiAttention as segments of adjacent queries.

    Args:
        mask: a mask that is the same for all batch items and heads.
        seq_len: number of tokens.

    Raises:
        UnsupportedError: the mask differs between batch items or heads.

    Cost: the same as the mask's bounds for each query; if they are not exact, also ``seq_len`` numbers per query.

    Example:
        >>> from saccade import masks
        >>> qk_ranges(masks.Documents([3, 2], rule=masks.Causal()), 5)
        QKRanges(q_ranges=[(0, 3), (3, 5)], k_ranges=[(0, 3), (3, 5)], attn_mask_type=['causal', 'causal'])

    Reference: MagiAttention's ``magi_attn_flex_key``.
    """
    check_type("mask", mask, Mask, "be a saccade mask")
    seq_len = check_int("seq_len", seq_len)
    if mask.shape != (1, 1):
        reason = "its ranges apply to all batch items and heads"
        raise unsupported(f"mask={mask}", [reason], hint="pack the items: masks.Documents(lengths)")
    ranges = QKRanges([], [], [])
    for q, k, kind in sorted(_pieces(mask, seq_len)):
        ranges.q_ranges.append(q)
        ranges.k_ranges.append(k)
        ranges.attn_mask_type.append(kind)
    return ranges


class _Open(NamedTuple):
    """A mask segment under construction: its first row, the key ranges of its first and last rows, and the step.

    The step is how far the first and the last key move from one row to the next; None while there is one row.
    """

    row: int
    first: tuple[int, int]
    last: tuple[int, int]
    step: tuple[int, int] | None

    def closed(self, stop: int) -> tuple[tuple[int, int], tuple[int, int], Kind]:
        """Return the mask segment for export, with its rows ending before ``stop``."""
        return (self.row, stop), (self.first[0], self.last[1]), _KINDS[self.step or (0, 0)]


def _pieces(mask: Mask, seq_len: int) -> Iterator[tuple[tuple[int, int], tuple[int, int], Kind]]:
    """Yield the segments of a mask for export: query range, key range and kind."""
    open_pieces: list[_Open] = []
    keys: list[list[tuple[int, int]]] = []
    for row in range(seq_len):
        if row % _ROWS == 0:
            keys = _keys(mask, row, min(row + _ROWS, seq_len), seq_len)
        remaining, continued = list(keys[row % _ROWS]), list[_Open]()
        for piece in open_pieces:
            follower = next((span for span in remaining if _follows(piece, span)), None)
            if follower is None:
                yield piece.closed(row)
                continue
            remaining.remove(follower)
            step = (follower[0] - piece.last[0], follower[1] - piece.last[1])
            continued.append(piece._replace(last=follower, step=step))
        open_pieces = continued + [_Open(row, span, span, None) for span in remaining]
    for piece in open_pieces:
        yield piece.closed(seq_len)


def _follows(piece: _Open, keys: tuple[int, int]) -> bool:
    """Return whether a row with the key range ``keys`` continues the mask segment under construction."""
    step = (keys[0] - piece.last[0], keys[1] - piece.last[1])
    return step in _KINDS and piece.step in (None, step)


def _keys(mask: Mask, start: int, stop: int, seq_len: int) -> list[list[tuple[int, int]]]:
    """Return the visible key ranges of each row of an exported mask."""
    rows = np.arange(start, stop)
    whole = KeyDomain(np.zeros_like(rows), np.full_like(rows, seq_len))
    bounds = mask.bounds(Groups(np.full_like(rows, ALL), rows, rows), whole)
    is_exact = bounds.any_row.sizes() == bounds.all_rows.sizes()
    ranges = [_ranges(*pair) for pair in zip(bounds.any_row.starts, bounds.any_row.ends, strict=True)]
    for index in np.flatnonzero(~is_exact).tolist():
        zero, keys = torch.zeros(1, 1, dtype=torch.int64), torch.arange(seq_len)[None]
        allowed = mask.allows(zero, zero, zero + int(rows[index]), keys).expand(1, seq_len)[0]
        edges = np.flatnonzero(np.diff(np.concatenate([[0], allowed.numpy().astype(np.int8), [0]])))
        ranges[index] = _ranges(edges[::2], edges[1::2])
    return ranges


def _ranges(starts: Ints, ends: Ints) -> list[tuple[int, int]]:
    """Return the key ranges in order, with adjacent ranges joined and empty ranges removed."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start < end and joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return joined
