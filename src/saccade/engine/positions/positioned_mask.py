"""PositionedMask: a mask on positions that is evaluated at matrix indices. Only this file converts between the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from saccade.engine.positions.position_index import TokenOrder
from saccade.masks import Mask
from saccade.masks.mask import EVERYWHERE
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.positions.token_positions import GivenPositions, Positions, can_be_read
from saccade.support.errors import value_error
from saccade.support.torch_modes import is_tracing

_FEW_GAPS = 4  # maximum number of positions per row for which the cuts of the mask are used
_FEW_ROWS = 16
_FEWEST = 1 << 20  # below this value of keys times (rows + 256), planning costs more than it saves
_NOWHERE = 1 << 62


def resolve_positions(
    rule: Mask,
    q: Positions | None,
    kv: Positions | None,
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> tuple[Mask, tuple[int, int]]:
    """Return the mask in the coordinates of a plan, and the coordinates of the first query and the first key.

    The coordinates are positions if all tokens are consecutive, and indices if not.

    Args:
        rule: the mask, evaluated at positions.
        q, kv: positions of queries and keys, as `checked_positions` returns them; if None, the last query is aligned
            with the last key.
        shape: (batch, heads, q_len, kv_len).
        device: device of the matrix.
    """
    _, _, q_len, kv_len = shape
    # Positions are unknown during tracing, so the operator checks the domain of the mask when it runs.
    if not is_tracing() and rule.domain is not EVERYWHERE:
        check_domain(rule, q, kv, q_len, kv_len)
    if q is None:
        return rule, (kv_len - q_len, 0)
    q_first, kv_first = q.first, 0 if kv is None else kv.first
    if q_first is not None and kv_first is not None:
        return rule, (q_first, kv_first)
    return PositionedMask.of(rule, q, Positions.between(0, kv_len) if kv is None else kv, device), (0, 0)


def at_origin(rule: Mask, origin: tuple[int, int], shape: tuple[int, int, int, int]) -> tuple[Mask, tuple[int, int]]:
    """Return the mask of a traced program in the coordinates of a plan, as `resolve_positions` does without tracing.

    Positions are always tables in a traced program. A table of consecutive positions is replaced by its first position.

    Raises:
        ValueError: the mask does not cover the positions of all queries and keys.
    """
    if not isinstance(rule, PositionedMask):
        if rule.domain is not EVERYWHERE:
            (q_first, kv_first), (_, _, q_len, kv_len) = origin, shape
            runs = range(q_first, q_first + q_len), range(kv_first, kv_first + kv_len)
            check_domain(rule, Positions(runs[0]), Positions(runs[1]), q_len, kv_len)
        return rule, origin
    q, kv = (Positions(None, table) for table in (rule.q_positions, rule.kv_positions))
    if rule.mask.domain is not EVERYWHERE:
        check_domain(rule.mask, q, kv, *shape[2:])
    firsts = [x.consecutive_start() if can_be_read(x.on()) else None for x in (q, kv)]
    if firsts[0] is None or firsts[1] is None:
        return rule, origin
    return rule.mask, (firsts[0], firsts[1])


def checked_positions(
    q_given: GivenPositions, kv_given: GivenPositions, shape: tuple[int, int, int, int]
) -> tuple[Positions, Positions | None]:
    """Check the positions that a user passed for queries, keys or both, and return them."""
    batch, _, q_len, kv_len = shape
    if q_given is None:
        hint = "without it the last query is at the last key's index, which kv_positions may contradict"
        raise value_error("q_positions", "be given together with kv_positions", None, hint=hint)
    q = Positions.of(q_given, "q_positions", length=q_len, batch=batch)
    if kv_given is None:
        return q, None
    return q, Positions.of(kv_given, "kv_positions", length=kv_len, batch=batch)


def check_domain(mask: Mask, q: Positions | None, kv: Positions | None, q_len: int, kv_len: int) -> None:
    """Raise an error unless the mask covers the positions of all queries and keys. Padding is not checked."""
    domain = mask.domain
    if domain == EVERYWHERE:
        return
    for name, covered, positions, default in (
        ("keys", domain.keys, kv, range(kv_len)),
        ("queries", domain.rows, q, range(kv_len - q_len, kv_len)),
    ):
        ends = (Positions(default) if positions is None else positions).ends
        if covered is None or ends is None:
            continue
        # With more queries than keys the first positions are below 0; a mask that begins at 0 hides everything there.
        if ends[1] < covered.stop and (ends[0] >= covered.start or covered.start == 0):
            continue
        rule = f"cover the positions of all {name}, {ends[0]} to {ends[1]}"
        hint = "create the mask for this length; padding has position -1"
        if covered == range(1) and kv_len > 1:
            hint = f"for one column that applies to all keys, pass tensor.expand(..., {kv_len})"
        raise value_error("mask", rule, f"{mask}, which covers {covered.start} to {covered.stop - 1}", hint=hint)


@dataclasses.dataclass(frozen=True, eq=False)
class PositionedMask(Mask):
    """A mask on the *indices* of a matrix: a mask on positions, combined with the positions of the tokens.

    If positions never decrease from token to token within an item (with padding anywhere), the bounds of the mask
    determine which keys a row needs. If positions decrease, every pair is evaluated.

    Args:
        mask: the mask on positions.
        q_positions, kv_positions: int64 ``[batch | 1, len]``. Positions below 0 mark padding, which attends to nothing
            and is never visible.
    """

    mask: Mask
    q_positions: Tensor
    kv_positions: Tensor

    @classmethod
    def of(cls, mask: Mask, q: Positions, kv: Positions, device: torch.device) -> PositionedMask:
        """Build a positioned mask with copies of the position tables, because products may run later."""
        return cls(mask, *(x.on(device) if x.table is None else x.on(device).clone() for x in (q, kv)))

    @property
    def shape(self) -> tuple[int, int]:
        return (max(self.mask.shape[0], len(self.q_positions), len(self.kv_positions)), self.mask.shape[1])

    @property
    def is_value(self) -> bool:
        return False

    @property
    def calls_functions(self) -> bool:
        return self.mask.calls_functions

    def __repr__(self) -> str:
        return f"{self.mask} at given positions"

    def positions(self, b: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of queries ``q`` and keys ``kv``, both indices, in batch items ``b``."""
        return tuple(  # type: ignore[return-value]
            table[b if len(table) > 1 else 0, index]
            for table, index in ((self.q_positions, q), (self.kv_positions, kv))
        )

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_position, kv_position = self.positions(b, q, kv)
        is_token = (q_position >= 0) & (kv_position >= 0)
        return is_token & self.mask.allows(b, h, q_position, kv_position)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        is_shared = groups.batch == ALL
        if self._orders is None or (self._items > 1 and is_shared.any() and not is_shared.all()):
            return Bounds.unknown(keys)
        if self._items == 1 or not is_shared.any():
            return self._bounds(groups, keys)
        # any_row: the keys that any item needs; all_rows: the keys that all items see.
        count, items = len(groups.first), self._items
        first, last, *edges = (edge.repeat(items) for edge in (groups.first, groups.last, *keys))
        each = KeyDomain(*edges)
        bounds = self._bounds(Groups(np.tile(np.arange(items), count), first, last), each)
        if (groups.rows <= _FEW_ROWS).all():
            return _one_range(bounds, items, keys)
        missing = bounds.all_rows.complement(each)
        any_row, missing = (
            Spans.of(x.starts.reshape(count, -1), x.ends.reshape(count, -1), keys) for x in (bounds.any_row, missing)
        )
        return Bounds(any_row, missing.complement(keys))

    def partial(self, box: Box) -> bool | Hashable:
        unknown = (id(self), box)
        if self._orders is None or (self._items > 1 and box.batch == ALL):
            return unknown
        spans = [
            order.consecutive_range(0 if order.items == 1 else box.batch, indices)
            for order, indices in zip(self._orders, (box.rows, box.keys), strict=True)
        ]
        rows, columns = spans
        if rows is None or columns is None:
            return unknown
        # A user's function may depend on the item, even if the mask's shape does not show it.
        is_alike = self.mask.shape[0] == 1 and not self.mask.calls_functions
        return self.mask.partial(Box(ALL if is_alike else box.batch, rows, columns))

    def cuts(self, batch: int, rows: range) -> Ints:
        if self._orders is None or len(rows) <= 1:
            return np.zeros(0, dtype=np.int64)
        order, _ = self._orders
        edges = []
        for item in range(self._items) if batch == ALL else [batch]:
            row = 0 if order.items == 1 else item
            span = order.span(row)
            # If positions are far apart, the cuts that a mask lists could outnumber the rows.
            is_dense = len(span) <= _FEW_GAPS * len(rows)
            mask_item = batch if self._items == 1 else item
            cuts = self.mask.cuts(ALL if self.mask.shape[0] == 1 else mask_item, span) if is_dense else ()
            edges.append(order.edges(row, np.asarray(cuts, dtype=np.int64)))
        return np.concatenate(edges)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_positions, self.kv_positions, *self.mask.tensors())

    @cached_property
    def _orders(self) -> tuple[TokenOrder, TokenOrder] | None:
        """Token orders of queries and keys; None if positions decrease, cannot be read, or are too few for a plan."""
        if self._items * self.kv_positions.shape[1] * (self.q_positions.shape[1] + 256) < _FEWEST:
            return None
        q = TokenOrder.of(self.q_positions)
        kv = None if q is None else TokenOrder.of(self.kv_positions)
        return None if q is None or kv is None else (q, kv)

    @property
    def _items(self) -> int:
        """Number of batch items in the position tables."""
        return max(len(self.q_positions), len(self.kv_positions))

    def _bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        """Return the mask's bounds as indices, for row groups of one batch item, or of all if positions are shared."""
        assert self._orders is not None  # callers have checked
        q, kv = self._orders
        q_item, kv_item = (np.zeros_like(groups.batch) if order.items == 1 else groups.batch for order in (q, kv))
        rows = q.among(q_item, groups.first, groups.last)
        batch = np.full_like(groups.batch, ALL) if self.mask.shape[0] == 1 else groups.batch
        inner = self.mask.bounds(Groups(batch, rows.first, rows.last), kv.key_domain(kv_item))
        columns = kv.columns(kv_item, inner.any_row, keys)
        nothing = Spans.nothing(keys)
        any_row = columns.any_row.where(rows.some, nothing)
        if inner.is_exact and columns.is_exact and bool((rows.every == rows.some).all()):
            return Bounds.exactly(any_row)
        all_rows = columns.all_rows if inner.is_exact else kv.columns(kv_item, inner.all_rows, keys).all_rows
        return Bounds(any_row, all_rows.where(rows.every & rows.some, nothing))


def _one_range(bounds: Bounds, items: int, keys: KeyDomain) -> Bounds:
    """Merge the bounds of all batch items into a single range of keys for each group of rows.

    The keys in a single range are a view. With few rows, gathering keys costs more than computing unneeded pairs.
    """
    any_row, all_rows = bounds
    first = np.where(any_row.starts < any_row.ends, any_row.starts, _NOWHERE)[:, 0]  # empty slots come last
    stop = np.where(any_row.starts < any_row.ends, any_row.ends, 0).max(axis=1)
    slot = (all_rows.ends - all_rows.starts).argmax(axis=1)[:, None]
    sure_first, sure_stop = (np.take_along_axis(edge, slot, 1).reshape(-1, items) for edge in all_rows)
    return Bounds(
        Spans.within(keys, first.reshape(-1, items).min(axis=1), stop.reshape(-1, items).max(axis=1)),
        Spans.within(keys, sure_first.max(axis=1), sure_stop.min(axis=1)),
    )
