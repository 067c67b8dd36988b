"""EvictingCache: memory that does not grow, as tokens are let go by what they are worth; one method says how much."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.caches.attend_call import Call, Traffic
from saccade.caches.cache import LayerCache, Leaf
from saccade.caches.files.record import Contents
from saccade.caches.next_position import Upcoming
from saccade.caches.per_head import attend_by_head
from saccade.caches.recent_rows import MOST, GivenByEach, by_kv_head, with_rows
from saccade.matrix import Matrix
from saccade.positions.token_positions import Positions
from saccade.statistics import Fold, Received
from saccade.support.errors import value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import ShapeSpec, check_int

__all__ = ["EvictingCache", "Held"]

_SCORES = ShapeSpec("scores [batch, kv_heads, columns]")
_RECENT = (("earlier", "columns"), ("rows", "queries columns"))


class Held(NamedTuple):
    """The tokens that each key head holds, oldest first, and padding before them.

    Args:
        key, value: ``[batch, kv_heads, columns, width]``.
        table: where the tokens stand, int64 ``[batch, kv_heads, columns]``; -1 for nobody.
        received: attention that each token has got from the queries that judge, summed over the heads that share the
            keys, float32 or float64 ``[batch, kv_heads, columns]``.
    """

    key: Tensor
    value: Tensor
    table: Tensor
    received: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all four."""
        return sum(x.nbytes for x in self)

    def at(self, index: Tensor) -> Held:
        """Of these columns, int64 ``[batch, kv_heads, columns]``."""
        wide = [x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in (self.key, self.value)]
        return Held(wide[0], wide[1], self.table.gather(2, index), self.received.gather(2, index))


class EvictingCache(LayerCache):
    r"""Keeps for each key head the last ``recent`` tokens and, of the others, those with the highest `score`.

    A rule of one's own defines `score` alone. After every call, whatever exceeds ``budget`` goes. A call reads what was
    held before it and its own tokens, so that a prompt is exact. Padding, wherever it stands, takes no token's place.

    Equals, call by call, the dense run in which the tokens that its key head let go before are hidden; as long as no
    more than ``budget`` tokens came, the run with a `KVCache`. What goes is gone.

    `crop` goes on as if the last tokens had never come. It is possible as long as nothing was let go (where
    ``evicts_once``, for all tokens after the first call), for as many tokens as did not judge, or for the last 32.

    Args:
        budget: tokens that each key head holds after a call.
        recent: last tokens that stay; half of the budget when None.

    Attributes:
        judges: how many of a call's last queries count in what tokens received; None for all, 0 for none: then
            nothing is summed up, and ``received`` is 0.
        evicts_once: whether tokens go after the first call only.

    Raises:
        ValueError: sizes out of range, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a crop that is not possible, or, if somebody judges, a matrix whose rows are no distributions.

    Cost: memory ``batch * kv_heads * budget`` keys and values, and 12 bytes for each (16 in float64); as long as
    nothing was let go, and all calls judge, 132 bytes more. A call sweeps its weights a second time, a prompt of n
    tokens so n²/2 of them, in O(n) memory.

    Example:
        >>> from saccade import masks, mechanisms
        >>> class SmallestKeys(EvictingCache):
        ...     judges = 0
        ...     def score(self, held):
        ...         return -held.key.norm(dim=-1)
        >>> cache, x = SmallestKeys(4), torch.arange(5.0, 0.0, -1.0).view(1, 1, 5, 1)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.tolist()
        [[[1, 2, 3, 4]]]
    """

    settings: ClassVar[tuple[str, ...]] = ("budget", "recent")
    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("key", "batch kv_heads columns head_dim"),
        Leaf("value", "batch kv_heads columns value_dim"),
        Leaf("table", "batch kv_heads columns", "positions"),
        Leaf("received", "batch kv_heads columns", "wide"),
        *(Leaf(name, f"batch kv_heads {axes}", "wide", is_optional=True, is_saved=False) for name, axes in _RECENT),
    )
    equals = "the dense run in which the tokens that a key head let go before a call are hidden from it"
    judges: int | None = None
    evicts_once: ClassVar[bool] = False

    _tokens: Upcoming
    _in_order_from: int  # columns whose order is not known any more, since padding was moved before tokens

    def __init__(self, budget: int, *, recent: int | None = None):
        super().__init__()
        self.budget = check_int("budget", budget)
        self.recent = check_int("recent", max(1, self.budget // 2) if recent is None else recent)
        if self.recent > self.budget:
            raise value_error("recent", f"be at most the budget {budget}", recent)

    def score(self, held: Held) -> Tensor:
        """What each token is worth, ``[batch, kv_heads, columns]``; those with the highest scores stay.

        Args:
            held: all that is held, before something is let go; what stands at -1 goes first, whatever its score.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score(held)")

    @property
    def kv_positions(self) -> Tensor | None:
        """Where the tokens held stand, int64 ``[batch, kv_heads, columns]``, -1 for nobody; None before the first."""
        return self._state.get("table")

    def advance(self, call: Call) -> Tensor:
        before, q_len, keys, values = self._state, call.key.shape[2], call.key, call.value
        table = call.table[:, None].expand(*keys.shape[:2], -1)
        if before:
            pairs = zip((before["key"], before["value"], before["table"]), (keys, values, table), strict=True)
            keys, values, table = (torch.cat(pair, 2) for pair in pairs)
        judging = None if before and self.evicts_once else _judging(call, self.judges)
        is_recent = judging is call and not self.evicts_once and 0 < q_len <= MOST
        is_recent &= table.shape[2] == self.length + q_len <= self.budget  # nothing was let go
        question = GivenByEach() if is_recent else Received() if judging is call else None
        out, *received = self._asked(call, keys, values, table, question)
        if judging is not None and judging is not call:
            received = list(self._asked(judging, keys, values, table, Received(), product=False))
        summed = torch.zeros(table.shape, dtype=wide_dtype(keys.dtype), device=keys.device)
        if before:
            summed[..., : -q_len or None] = before["received"]
        recent = {name: x for name, x in before.items() if name in dict(_RECENT) and not q_len}
        if is_recent:
            recent = with_rows(before, summed, by_kv_head(received[0], keys.shape[1]))
            summed = recent["earlier"] + recent["rows"].sum(2)
        elif received:
            summed += by_kv_head(received[0], keys.shape[1])
        held = Held(keys.detach(), values.detach(), table, summed)
        is_padding = table < 0
        if bool((is_padding[..., 1:] & ~is_padding[..., :-1]).any()):
            held, recent, self._in_order_from = held.at(_padding_first(table)), {}, self.length + q_len
        self._traffic = Traffic(held.nbytes, held.nbytes // max(1, table.shape[2]) * q_len)
        if before or q_len:  # a call of no tokens before all others is no prompt
            goes = table.shape[2] > self.budget and not (before and self.evicts_once)
            self._state = (self._best(held) if goes else held)._asdict() | recent
        return out

    def _asked(
        self,
        call: Call,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        question: Fold[Any, Tensor] | None,
        *,
        product: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return the product of a call's queries with all keys, and the answer to a question about their weights."""

        def finish(matrix: Matrix, v: Tensor) -> tuple[Tensor, ...]:
            return (*(call.product(matrix, v) if product else ()), *(matrix.ask(question) if question else ()))

        if not self._state:  # all heads hold the same tokens yet
            where = {"q_positions": call.positions, "kv_positions": call.kv_positions}
            return finish(call.mechanism(call.query, keys, mask=call.mask, **where), values)
        k, v, stand = (x.flatten(0, 1) for x in (keys, values, table))
        return attend_by_head(call, keys.shape[1], lambda own: (k[own], v[own]), lambda own: stand[own], finish)

    def _best(self, held: Held) -> Held:
        """The last ``recent`` columns, and those of the others that score highest; ``budget`` in all."""
        scores, (batch, kv_heads, columns) = self.score(held), held.table.shape
        _SCORES.check(scores, batch=batch, kv_heads=kv_heads, columns=columns)
        order = scores.masked_fill(held.table < 0, -torch.inf)
        order[..., columns - self.recent :] = torch.inf
        return held.at(order.topk(self.budget, 2, sorted=False).indices.sort(2).values)

    def _forget(self) -> None:
        super()._forget()
        self._in_order_from = 0

    def _why_not_cropped(self, length: int) -> str | None:
        columns, gone = self._state["table"].shape[2], self.length - length
        if columns < self.length and (not self.evicts_once or gone > columns - self.budget):
            return "tokens were let go, and others weighed, by the attention of those that would be taken back"
        if length < self._in_order_from:
            return "padding came behind tokens and was moved before them, so that it is not known which came last"
        recent = self._state["rows"].shape[2] if "rows" in self._state else 0
        if self.judges == 0 or self.evicts_once or gone <= recent:
            return None
        return f"tokens were weighed by the attention of more than the last {recent}, whose part alone is known"

    def _crop(self, length: int) -> None:
        gone = self.length - length
        kept = self._state["table"].shape[2] - gone
        self._state = {
            name: x[:, :, :kept].clone() if name != "rows" else x[:, :, : x.shape[2] - gone, :kept].clone()
            for name, x in self._state.items()
        }
        if "rows" in self._state:
            self._state["received"] = self._state["earlier"] + self._state["rows"].sum(2)
        after = (self._state["table"][:, 0].amax(1) + 1).clamp(min=0)
        is_one = len(after) > 0 and bool((after == after[0]).all())
        self._tokens = Upcoming(length, int(after[0]) if is_one else after)

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        table, length = state["table"], contents.position("length")
        earlier, later = table[..., :-1], table[..., 1:]
        is_wrong = bool(((earlier >= 0) & (later <= earlier)).any())  # padding, and then one behind the other
        is_large = not self.evicts_once and table.shape[2] > self.budget
        if is_wrong or is_large or length < max(1, table.shape[2]):
            raise contents.misfit("table")
        self._in_order_from = length if bool((table < 0).any()) else 0


def _judging(call: Call, judges: int | None) -> Call | None:
    """The call with the queries that judge: the last ones of each item, and no padding; None where there are none."""
    query, where = call.query, call.positions
    if judges == 0:
        return None
    if judges is None or query.shape[2] <= judges:
        return call
    if where.run is not None:
        return call._replace(query=query[:, :, -judges:], positions=Positions(where.run[-judges:]))
    table = where.on()
    order = _padding_first(table)[..., -judges:]
    rows = order[:, None, :, None].to(query.device).expand(*query.shape[:2], -1, query.shape[3])
    return call._replace(query=query.gather(2, rows), positions=Positions(None, table.gather(1, order)))


def _padding_first(table: Tensor) -> Tensor:
    """An order of the last axis in which padding stands before all tokens, and these as they stood."""
    return (table >= 0).to(torch.uint8).sort(dim=-1, stable=True).indices
