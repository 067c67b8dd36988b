"""A mask on positions, read at the indices of a matrix: only here are the two translated."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from saccade.engine.positions.position_index import TokenOrder
from saccade.masks import Mask
from saccade.masks.domain import EVERYWHERE
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, Spans, Universe
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import value_error

__all__ = ["AtPositions", "check_domain", "placed"]

_FEW_GAPS = 4  # positions per row, up to which a mask is asked where it would like to cut
_FEW_ROWS = 16
_FEWEST = 1 << 20  # keys times rows, and some more for each key, below which a plan saves less than it costs
_NOWHERE = 1 << 62


def placed(
    rule: Mask,
    q: Positions | None,
    kv: Positions | None,
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> tuple[Mask, tuple[int, int]]:
    """The rule as a plan counts, and what it calls the first query and the first key.

    Tokens that follow one by one are counted by their positions, others by their indices.

    Args:
        rule: on positions.
        q, kv: where the tokens stand, as `checked_positions` tells; bottom-right when None.
        shape: (batch, heads, q_len, kv_len).
        device: of the matrix.
    """
    _, _, q_len, kv_len = shape
    if rule.domain is not EVERYWHERE:
        check_domain(rule, q, kv, q_len, kv_len)
    if q is None:
        return rule, (kv_len - q_len, 0)
    q_first, kv_first = q.first, 0 if kv is None else kv.first
    if q_first is not None and kv_first is not None:
        return rule, (q_first, kv_first)
    return AtPositions.of(rule, q, Positions.between(0, kv_len) if kv is None else kv, device), (0, 0)


def checked_positions(
    q_given: GivenPositions, kv_given: GivenPositions, shape: tuple[int, int, int, int]
) -> tuple[Positions, Positions | None]:
    """Where queries and keys stand, of which one at least is given. Raises unless they fit the matrix."""
    batch, _, q_len, kv_len = shape
    if q_given is None:
        hint = "without it the last query stands at the last key's index, which kv_positions may contradict"
        raise value_error("q_positions", "be given together with kv_positions", None, hint=hint)
    q = Positions.of(q_given, "q_positions", length=q_len, batch=batch)
    if kv_given is None:
        return q, None
    return q, Positions.of(kv_given, "kv_positions", length=kv_len, batch=batch)


def check_domain(mask: Mask, q: Positions | None, kv: Positions | None, q_len: int, kv_len: int) -> None:
    """Raise unless the mask covers the positions of all queries and keys; those of no token do not count."""
    domain = mask.domain
    if domain == EVERYWHERE:
        return
    for name, own, positions, default in (
        ("keys", domain.keys, kv, range(kv_len)),
        ("queries", domain.rows, q, range(kv_len - q_len, kv_len)),
    ):
        ends = (Positions(default) if positions is None else positions).ends
        if own is None or ends is None:
            continue
        # Of more queries than keys the first stand before position 0, where no rule that begins there sees anything.
        if ends[1] < own.stop and (ends[0] >= own.start or own.start == 0):
            continue
        rule = f"cover the positions of all {name}, {ends[0]} to {ends[1]}"
        hint = "make the mask for this length; a token that sees nothing and is not seen has position -1"
        if own == range(1) and kv_len > 1:
            hint = f"a tensor with one column for all keys: tensor.expand(..., {kv_len})"
        raise value_error("mask", rule, f"{mask}, which covers {own.start} to {own.stop - 1}", hint=hint)


@dataclasses.dataclass(frozen=True, eq=False)
class AtPositions(Mask):
    """A mask on *indices*, made from a mask on positions and the positions of the tokens.

    Where positions never decrease from token to token of an item, whatever padding stands between them, the mask's
    own bounds say which keys a row needs: those whose positions they hold. Other tables are looked at pair by pair.

    Args:
        mask: the rule on positions.
        q_positions, kv_positions: int64 ``[batch | 1, len]``; below 0: no token stands here, it sees nothing and
            nothing sees it.
    """

    mask: Mask
    q_positions: Tensor
    kv_positions: Tensor

    @classmethod
    def of(cls, mask: Mask, q: Positions, kv: Positions, device: torch.device) -> AtPositions:
        """Written out as tensors of its own: the plan is made from what they hold now, and products may come later."""
        return cls(mask, *(x.on(device) if x.table is None else x.on(device).clone() for x in (q, kv)))

    @property
    def shape(self) -> tuple[int, int]:
        return (max(self.mask.shape[0], len(self.q_positions), len(self.kv_positions)), self.mask.shape[1])

    @property
    def is_value(self) -> bool:
        return False

    @property
    def asks_functions(self) -> bool:
        return self.mask.asks_functions

    def __repr__(self) -> str:
        return f"{self.mask} at given positions"

    def positions(self, b: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the tokens with these indices."""
        return tuple(  # type: ignore[return-value]
            table[b if len(table) > 1 else 0, index]
            for table, index in ((self.q_positions, q), (self.kv_positions, kv))
        )

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_position, kv_position = self.positions(b, q, kv)
        here = (q_position >= 0) & (kv_position >= 0)
        return here & self.mask.allows(b, h, q_position, kv_position)

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        together = groups.batch == ALL
        if self._orders is None or (self._items > 1 and together.any() and not together.all()):
            return Bounds.unknown(keys)
        if self._items == 1 or not together.any():
            return self._bounds(groups, keys)
        # What some item needs is needed, and what all of them have is sure.
        count, items = len(groups.first), self._items
        first, last, *universe = (edge.repeat(items) for edge in (groups.first, groups.last, *keys))
        each = Universe(*universe)
        found = self._bounds(Groups(np.tile(np.arange(items), count), first, last), each)
        if (groups.rows <= _FEW_ROWS).all():
            return _one_range(found, items, keys)
        missing = found.sure.complement(each)
        needed, missing = (
            Spans.of(x.starts.reshape(count, -1), x.ends.reshape(count, -1), keys) for x in (found.needed, missing)
        )
        return Bounds(needed, missing.complement(keys))

    def residual(self, box: Box) -> bool | Hashable:
        unknown = (id(self), box)
        if self._orders is None or (self._items > 1 and box.batch == ALL):
            return unknown
        spans = [
            order.one_by_one(0 if order.items == 1 else box.batch, indices)
            for order, indices in zip(self._orders, (box.rows, box.keys), strict=True)
        ]
        rows, columns = spans
        if rows is None or columns is None:
            return unknown
        # A function may answer for each item, though its rule tells none apart.
        is_alike = self.mask.shape[0] == 1 and not self.mask.asks_functions
        return self.mask.residual(Box(ALL if is_alike else box.batch, rows, columns))

    def cuts(self, batch: int, rows: range) -> Ints:
        if self._orders is None or len(rows) <= 1:
            return np.zeros(0, dtype=np.int64)
        order, _ = self._orders
        edges = []
        for item in range(self._items) if batch == ALL else [batch]:
            row = 0 if order.items == 1 else item
            span = order.span(row)
            # A rule may list its cuts, and of positions far apart these would be many more than there are rows.
            is_dense = len(span) <= _FEW_GAPS * len(rows)
            asked = batch if self._items == 1 else item
            cuts = self.mask.cuts(ALL if self.mask.shape[0] == 1 else asked, span) if is_dense else ()
            edges.append(order.edges(row, np.asarray(cuts, dtype=np.int64)))
        return np.concatenate(edges)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_positions, self.kv_positions, *self.mask.tensors())

    @cached_property
    def _orders(self) -> tuple[TokenOrder, TokenOrder] | None:
        """Of queries and keys, where both are known and worth it: to plan takes as long as a few pairs do."""
        if self._items * self.kv_positions.shape[1] * (self.q_positions.shape[1] + 256) < _FEWEST:
            return None
        q = TokenOrder.of(self.q_positions)
        kv = None if q is None else TokenOrder.of(self.kv_positions)
        return None if q is None or kv is None else (q, kv)

    @property
    def _items(self) -> int:
        """Batch items that the tables tell apart."""
        return max(len(self.q_positions), len(self.kv_positions))

    def _bounds(self, groups: Groups, keys: Universe) -> Bounds:
        """Of groups that belong to one item, or to all if the tables tell none apart."""
        assert self._orders is not None  # who calls has looked
        q, kv = self._orders
        q_item, kv_item = (np.zeros_like(groups.batch) if order.items == 1 else groups.batch for order in (q, kv))
        rows = q.among(q_item, groups.first, groups.last)
        batch = np.full_like(groups.batch, ALL) if self.mask.shape[0] == 1 else groups.batch
        inner = self.mask.bounds(Groups(batch, rows.first, rows.last), kv.universe(kv_item))
        found = kv.columns(kv_item, inner.needed, keys)
        nothing = Spans.nothing(keys)
        needed = found.needed.where(rows.some, nothing)
        if inner.is_exact and found.is_exact and bool((rows.every == rows.some).all()):
            return Bounds.exactly(needed)
        sure = found.sure if inner.is_exact else kv.columns(kv_item, inner.sure, keys).sure
        return Bounds(needed, sure.where(rows.every & rows.some, nothing))


def _one_range(found: Bounds, items: int, keys: Universe) -> Bounds:
    """Bounds for all items at once, of a single range of keys each.

    For a few rows, to gather keys costs more than to compute some in vain: one range of keys is one view.
    """
    needed, sure = found
    first = np.where(needed.starts < needed.ends, needed.starts, _NOWHERE)[:, 0]  # empty slots stand last
    stop = np.where(needed.starts < needed.ends, needed.ends, 0).max(axis=1)
    slot = (sure.ends - sure.starts).argmax(axis=1)[:, None]
    sure_first, sure_stop = (np.take_along_axis(edge, slot, 1).reshape(-1, items) for edge in sure)
    return Bounds(
        Spans.within(keys, first.reshape(-1, items).min(axis=1), stop.reshape(-1, items).max(axis=1)),
        Spans.within(keys, sure_first.max(axis=1), sure_stop.min(axis=1)),
    )
