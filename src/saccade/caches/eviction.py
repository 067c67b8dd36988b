"""Caches of a fixed size: each key head evicts the tokens with the lowest score."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
from saccade.support.validation import Shapes, integer

__all__ = ["EvictingCache", "Held", "HeavyHitterCache", "SnapKVCache"]

_SCORES = Shapes("scores [batch, kv_heads, columns]")
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
        """The bytes of all four tensors."""
        return sum(x.nbytes for x in self)

    def at(self, index: Tensor) -> Held:
        """Return these columns, int64 ``[batch, kv_heads, columns]``."""
        wide = [x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in (self.key, self.value)]
        return Held(wide[0], wide[1], self.table.gather(2, index), self.received.gather(2, index))


class EvictingCache(LayerCache):
    r"""Keeps for each key head the last ``recent`` tokens and, of the others, those with the highest `score`.

    A rule of one's own defines `score` alone. After every call, whatever exceeds ``budget`` goes. A call reads what was
    held before it and its own tokens, so that a prompt is exact. Padding, wherever it stands, takes no token's place.

    Equals, call by call, the dense run in which the tokens that its key head let go before are hidden; as long as no
    more than ``budget`` tokens came, the run with a `KVCache`. What goes is gone.

    `crop` goes on as if the last tokens had never come. It is possible as long as nothing was let go (where
    ``evict_once``, for all tokens after the first call), for as many tokens as did not judge, or for the last 32.

    Args:
        budget: tokens that each key head holds after a call.
        recent: last tokens that stay; half of the budget when None.

    Attributes:
        voting_queries: how many of a call's last queries count in what tokens received; None for all, 0 for none: then
            nothing is summed up, and ``received`` is 0.
        evict_once: whether tokens go after the first call only.

    Raises:
        ValueError: sizes out of range, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a crop that is not possible, or, if somebody judges, a matrix whose rows are no distributions.

    Cost: memory ``batch * kv_heads * budget`` keys and values, and 12 bytes for each (16 in float64); as long as
    nothing was let go, and all calls judge, 132 bytes more. A call sweeps its weights a second time, a prompt of n
    tokens so n²/2 of them, in O(n) memory.

    Example:
        >>> from saccade import masks, mechanisms
        >>> class SmallestKeys(EvictingCache):
        ...     voting_queries = 0
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
    equivalent_run = "the dense run in which the tokens that a key head let go before a call are hidden from it"
    voting_queries: int | None = None
    evict_once: ClassVar[bool] = False

    _tokens: Upcoming
    _in_order_from: int  # columns whose order is not known any more, since padding was moved before tokens

    def __init__(self, budget: int, *, recent: int | None = None):
        super().__init__()
        where = type(self).__name__
        self.budget = integer(where, "budget", budget)
        self.recent = integer(where, "recent", max(1, self.budget // 2) if recent is None else recent)
        if self.recent > self.budget:
            raise value_error(where, "recent", f"be at most the budget {budget}", recent)

    def score(self, held: Held) -> Tensor:
        """Return the score of each token, ``[batch, kv_heads, columns]``; tokens with the highest scores stay.

        Args:
            held: all that is held, before something is let go; what stands at -1 goes first, whatever its score.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score(held)")

    @property
    def kv_positions(self) -> Tensor | None:
        """The positions of the stored tokens, int64 ``[batch, kv_heads, columns]``, -1 for padding; None before the
        first.
        """
        return self._state.get("table")

    def advance(self, call: Call) -> Tensor:
        before, q_len, keys, values = self._state, call.key.shape[2], call.key, call.value
        table = call.table[:, None].expand(*keys.shape[:2], -1)
        if before:
            pairs = zip((before["key"], before["value"], before["table"]), (keys, values, table), strict=True)
            keys, values, table = (torch.cat(pair, 2) for pair in pairs)
        judging = None if before and self.evict_once else _judging(call, self.voting_queries)
        is_recent = judging is call and not self.evict_once and 0 < q_len <= MOST
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
            goes = table.shape[2] > self.budget and not (before and self.evict_once)
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
        """Return the product of a call's queries with all keys, and a statistic of their weights."""

        def finish(matrix: Matrix, v: Tensor) -> tuple[Tensor, ...]:
            return (*(call.product(matrix, v) if product else ()), *(matrix.ask(question) if question else ()))

        if not self._state:  # all heads hold the same tokens yet
            where = {"q_positions": call.positions, "kv_positions": call.kv_positions}
            return finish(call.mechanism(call.query, keys, mask=call.mask, **where), values)
        k, v, stand = (x.flatten(0, 1) for x in (keys, values, table))
        return attend_by_head(call, keys.shape[1], lambda own: (k[own], v[own]), lambda own: stand[own], finish)

    def _best(self, held: Held) -> Held:
        """Return the last ``recent`` columns, and the others with the highest scores; ``budget`` in all."""
        scores, (batch, kv_heads, columns) = self.score(held), held.table.shape
        _SCORES.check(f"{type(self).__name__}.score", scores, batch=batch, kv_heads=kv_heads, columns=columns)
        order = scores.masked_fill(held.table < 0, -torch.inf)
        order[..., columns - self.recent :] = torch.inf
        return held.at(order.topk(self.budget, 2, sorted=False).indices.sort(2).values)

    def _forget(self) -> None:
        super()._forget()
        self._in_order_from = 0

    def _why_not_cropped(self, length: int) -> str | None:
        columns, gone = self._state["table"].shape[2], self.length - length
        if columns < self.length and (not self.evict_once or gone > columns - self.budget):
            return "tokens were let go, and others weighed, by the attention of those that would be taken back"
        if length < self._in_order_from:
            return "padding came behind tokens and was moved before them, so that it is not known which came last"
        recent = self._state["rows"].shape[2] if "rows" in self._state else 0
        if self.voting_queries == 0 or self.evict_once or gone <= recent:
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
        is_large = not self.evict_once and table.shape[2] > self.budget
        if is_wrong or is_large or length < max(1, table.shape[2]):
            raise contents.misfit("table")
        self._in_order_from = length if bool((table < 0).any()) else 0


def _judging(call: Call, voting_queries: int | None) -> Call | None:
    """Return the call with its voting queries: the last ones of each item, without padding; None if there are none."""
    query, where = call.query, call.positions
    if voting_queries == 0:
        return None
    if voting_queries is None or query.shape[2] <= voting_queries:
        return call
    if where.run is not None:
        return call._replace(query=query[:, :, -voting_queries:], positions=Positions(where.run[-voting_queries:]))
    table = where.on()
    order = _padding_first(table)[..., -voting_queries:]
    rows = order[:, None, :, None].to(query.device).expand(*query.shape[:2], -1, query.shape[3])
    return call._replace(query=query.gather(2, rows), positions=Positions(None, table.gather(1, order)))


def _padding_first(table: Tensor) -> Tensor:
    """Return an order of the last axis that puts padding before all tokens and keeps their order."""
    return (table >= 0).to(torch.uint8).sort(dim=-1, stable=True).indices


class HeavyHitterCache(EvictingCache):
    r"""Keeps for each key head the tokens that were attended to most, and the last ones.

    After every call, whatever exceeds ``budget`` goes: of the tokens before the last ``recent``, those that received
    least attention from all queries so far, summed over the heads that share the keys. A sum favours early tokens,
    which more queries have seen, and what goes is gone: a fact that is asked for late may not be there.

    Equals, raises and costs what an `EvictingCache` does in which all queries judge.

    Args:
        budget, recent: see `EvictingCache`.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = HeavyHitterCache(4, recent=2), torch.randn(1, 2, 10, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.shape, cache.kv_positions[0, :, -2:].tolist()
        (torch.Size([1, 2, 4]), [[8, 9], [8, 9]])

    Reference: Zhang et al. 2023, arXiv:2306.14048, section 4 (H2O).
    """

    def score(self, held: Held) -> Tensor:
        return held.received


class SnapKVCache(EvictingCache):
    r"""Keeps of a prompt what its last tokens attended to; what comes after it is kept as a whole.

    Once, after the first call, each key head keeps the last ``window`` tokens and, of those before, the
    ``budget - window`` that received most attention from these last ones: summed over them and over the heads that
    share the keys, then averaged over ``pool`` neighbouring tokens, so that what is kept has some context. Padding
    neither judges nor takes a token's place; an item that is nothing but padding in the first call keeps all tokens.

    Equals the dense run, and after the first call that in which the tokens are hidden that a key head let go. It
    depends on the question standing at the end of the prompt: what only a later question asks for may be gone.

    Args:
        budget: tokens of the first call that each key head keeps.
        window: last tokens of the first call, which judge and are kept; at most the budget.
        pool: neighbouring tokens that are averaged, an odd number.

    Raises:
        ValueError: sizes that do not fit together, or what an `EvictingCache` refuses.
        UnsupportedError: a crop into a first call of which tokens were let go, or a matrix whose rows are no
            distributions.

    Cost: memory ``batch * kv_heads * (budget + later tokens)`` keys and values, and 12 bytes for each (16 in float64).
    Judging costs a sweep over ``window`` rows, once.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = SnapKVCache(6, window=2, pool=1), torch.randn(1, 2, 20, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.shape
        torch.Size([1, 2, 6])

    Reference: Li et al. 2024, arXiv:2404.14469, section 4 (SnapKV); here a set for each key head, not each query head.
    """

    settings = ("budget", "window", "pool")
    evict_once = True

    def __init__(self, budget: int, *, window: int = 32, pool: int = 5):
        budget = integer("SnapKVCache", "budget", budget)
        self.window, self.pool = integer("SnapKVCache", "window", window), integer("SnapKVCache", "pool", pool)
        if window > budget:
            raise value_error("SnapKVCache", "window", f"be at most the budget {budget}", window)
        if pool % 2 == 0:
            raise value_error("SnapKVCache", "pool", "be odd", pool)
        super().__init__(budget, recent=window)
        self.voting_queries = window

    def score(self, held: Held) -> Tensor:
        return F.avg_pool1d(held.received, self.pool, 1, self.pool // 2)
