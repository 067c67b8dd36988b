"""Fixed-size caches in which each key head evicts the tokens with the lowest scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.caches.attend_by_head import attend_by_head
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, Traffic, check_readable
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.matrix import Matrix
from saccade.positions.token_positions import Positions
from saccade.statistics import Block, Received, Statistic
from saccade.statistics.row_block import as_slice
from saccade.statistics.statistic import MatrixInfo
from saccade.support.errors import value_error
from saccade.support.numerics import any_true, wide_dtype
from saccade.support.validation import ShapeSpec, check_int

_SCORES = ShapeSpec("scores [batch, kv_heads, columns]")
_MAX_ROWS = 32  # number of last queries whose weights are stored separately, so that `crop` can subtract them
_RECENT = (("earlier", "columns"), ("rows", "queries columns"))


class StoredTokens(NamedTuple):
    """The tokens stored by each key head of an evicting cache: padding first, then tokens from oldest to newest.

    Args:
        key, value: ``[batch, kv_heads, columns, width]``.
        table: positions of the tokens, int64 ``[batch, kv_heads, columns]``; -1 for padding.
        received: attention that each token received, summed over the voting queries (see
            `EvictingCache.voting_queries`) and over the heads that share the keys; float32 or float64
            ``[batch, kv_heads, columns]``.
    """

    key: Tensor
    value: Tensor
    table: Tensor
    received: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes of all four tensors of the stored tokens."""
        return sum(x.nbytes for x in self)

    def at(self, index: Tensor) -> StoredTokens:
        """Return the tokens of an evicting cache at the given columns, int64 ``[batch, kv_heads, columns]``."""
        wide = [x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in (self.key, self.value)]
        return StoredTokens(wide[0], wide[1], self.table.gather(2, index), self.received.gather(2, index))


class EvictingCache(LayerCache):
    r"""A cache that keeps each key head's last ``recent`` tokens and the earlier tokens with the highest `score`.

    A custom rule only needs to define `score`. After every call, tokens beyond ``budget`` are evicted. A call attends
    to all tokens stored before it as well as its own, so the prompt is processed exactly. Padding never displaces a
    token.

    Each call is equivalent to dense attention in which the tokens that a key head has already evicted are masked. The
    result equals that of a `KVCache` until more than ``budget`` tokens have been passed. Evicted tokens cannot be read
    again.

    After `crop`, the cache continues as if the removed tokens had never been passed. Cropping is possible only while
    no token has been evicted, and not into a call in which padding followed tokens. If attention is summed in every
    call, at most the last 32 tokens can be removed. With ``evict_once``, all tokens after the first call can be
    removed, even after an eviction.

    Args:
        budget: number of tokens that each key head stores after a call.
        recent: number of last tokens that are never evicted; half of the budget when None.

    Attributes:
        voting_queries: number of queries at the end of each call whose attention is summed in ``received`` (the *voting
            queries*); None for all. With 0, ``received`` is 0.
        evict_once: whether tokens are evicted only after the first call.

    Raises:
        ValueError: a size is out of range, positions do not increase, or the batch size changes.
        UnsupportedError: a crop that is not possible, or, with voting queries, a matrix whose rows are not
            distributions.

    Cost: memory for ``batch * kv_heads * budget`` keys and values, and 12 bytes for each key (16 in float64). If
    ``voting_queries`` is None, another 132 bytes for each key until a token is evicted. A call computes the weights of
    its voting queries a second time: n²/2 weights for a prompt of n tokens if there is no limit, in O(n) memory.

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
    equivalent_run = "the dense run that hides from each key head the tokens it evicted before the call"
    voting_queries: int | None = None
    evict_once: ClassVar[bool] = False

    _in_order_from: int  # number of leading columns whose arrival order was lost when padding was moved before tokens

    def __init__(self, budget: int, *, recent: int | None = None):
        super().__init__()
        self.budget = check_int("budget", budget)
        self.recent = check_int("recent", max(1, self.budget // 2) if recent is None else recent)
        if self.recent > self.budget:
            raise value_error("recent", f"be at most the budget {budget}", recent)

    def score(self, held: StoredTokens) -> Tensor:
        """Return a score for each token, ``[batch, kv_heads, columns]``. Tokens with the lowest scores are evicted.

        Args:
            held: all stored tokens before the eviction; padding is evicted first, whatever its score.
        """
        raise NotImplementedError(f"{type(self).__name__} must define score(held)")

    @property
    def kv_positions(self) -> Tensor | None:
        """Positions of the stored tokens, int64 ``[batch, kv_heads, columns]``, -1 for padding; None if empty."""
        return self._state.get("table")

    def advance(self, call: Call) -> Tensor:
        check_readable(call.query, call.key, call.value)
        before, q_len, keys, values = self._state, call.key.shape[2], call.key, call.value
        table = call.table[:, None].expand(*keys.shape[:2], -1)
        if before:
            pairs = zip((before["key"], before["value"], before["table"]), (keys, values, table), strict=True)
            keys, values, table = (torch.cat(pair, 2) for pair in pairs)
        voting_call = None if before and self.evict_once else _voting_call(call, self.voting_queries)
        is_recent = voting_call is call and not self.evict_once and 0 < q_len <= _MAX_ROWS
        is_recent &= table.shape[2] == self.length + q_len <= self.budget  # nothing was evicted
        statistic = _AllWeights() if is_recent else Received() if voting_call is call else None
        out, *received = self._product_and_statistic(call, keys, values, table, statistic)
        if voting_call is not None and voting_call is not call:
            received = list(self._product_and_statistic(voting_call, keys, values, table, Received(), product=False))
        summed = torch.zeros(table.shape, dtype=wide_dtype(keys.dtype), device=keys.device)
        if before:
            summed[..., : -q_len or None] = before["received"]
        recent = {name: x for name, x in before.items() if name in dict(_RECENT) and not q_len}
        if is_recent:
            recent = _add_rows(before, summed, _sum_by_kv_head(received[0], keys.shape[1]))
            summed = recent["earlier"] + recent["rows"].sum(2)
        elif received:
            summed += _sum_by_kv_head(received[0], keys.shape[1])
        held = StoredTokens(keys.detach(), values.detach(), table, summed)
        is_padding = table < 0
        if any_true(is_padding[..., 1:] & ~is_padding[..., :-1]):
            held, recent, self._in_order_from = held.at(_padding_first(table)), {}, self.length + q_len
        self._traffic = Traffic(held.nbytes, held.nbytes // max(1, table.shape[2]) * q_len)
        if before or q_len:  # an empty first call does not count as a prompt
            must_evict = table.shape[2] > self.budget and not (before and self.evict_once)
            self._state = (self._retained(held) if must_evict else held)._asdict() | recent
        return out

    def _product_and_statistic(
        self,
        call: Call,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        statistic: Statistic[Any, Tensor] | None,
        *,
        product: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return the output of a call over all keys, and the weight statistic on which evictions are based."""

        def finish(matrix: Matrix, v: Tensor) -> tuple[Tensor, ...]:
            return (*(call.product(matrix, v) if product else ()), *(matrix.compute(statistic) if statistic else ()))

        if not self._state:  # all heads still store the same tokens
            where = {"q_positions": call.positions, "kv_positions": call.kv_positions}
            return finish(call.mechanism(call.query, keys, mask=call.mask, **where), values)
        k, v, positions = (x.flatten(0, 1) for x in (keys, values, table))
        return attend_by_head(
            call, keys.shape[1], lambda rows: (k[rows], v[rows]), lambda rows: positions[rows], finish
        )

    def _retained(self, held: StoredTokens) -> StoredTokens:
        """Return the tokens to keep: the last ``recent`` tokens, and those with the highest scores."""
        scores, (batch, kv_heads, columns) = self.score(held), held.table.shape
        _SCORES.check(scores, batch=batch, kv_heads=kv_heads, columns=columns)
        order = scores.masked_fill(held.table < 0, -torch.inf)
        order[..., columns - self.recent :] = torch.inf
        return held.at(order.topk(self.budget, 2, sorted=False).indices.sort(2).values)

    def _forget(self) -> None:
        super()._forget()
        self._in_order_from = 0

    def _why_not_cropped(self, length: int) -> str | None:
        columns, removed = self._state["table"].shape[2], self.length - length
        if columns < self.length and (not self.evict_once or removed > columns - self.budget):
            return "tokens were evicted and scored by the attention of queries that cropping would remove"
        if length < self._in_order_from:
            return "padding arrived after tokens and was moved before them, so the order of arrival is lost"
        recent = self._state["rows"].shape[2] if "rows" in self._state else 0
        if self.voting_queries == 0 or self.evict_once or removed <= recent:
            return None
        return (
            f"only the attention of the last {recent} queries is stored, and "
            "removing more would need that of earlier ones"
        )

    def _crop(self, length: int) -> None:
        removed = self.length - length
        columns = self._state["table"].shape[2] - removed
        self._state = {
            name: x[:, :, :columns].clone() if name != "rows" else x[:, :, : x.shape[2] - removed, :columns].clone()
            for name, x in self._state.items()
        }
        if "rows" in self._state:
            self._state["received"] = self._state["earlier"] + self._state["rows"].sum(2)
        after = (self._state["table"][:, 0].amax(1) + 1).clamp(min=0)
        self._tokens = Positions.ending_before(after)

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        table, length = state["table"], contents.position("length")
        earlier, later = table[..., :-1], table[..., 1:]
        is_wrong = bool(((earlier >= 0) & (later <= earlier)).any())  # padding, then ascending positions
        is_large = not self.evict_once and table.shape[2] > self.budget
        if is_wrong or is_large or length < max(1, table.shape[2]):
            raise contents.misfit("table")
        self._in_order_from = length if bool((table < 0).any()) else 0


def _voting_call(call: Call, voting_queries: int | None) -> Call | None:
    """Return the call restricted to its voting queries (the last ones of each item), or None if there are none."""
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
    """Return the column order that moves padding to the front and keeps the tokens in order."""
    return (table >= 0).to(torch.uint8).sort(dim=-1, stable=True).indices


class HeavyHitterCache(EvictingCache):
    r"""A cache that keeps each key head's last tokens and the tokens that have received the most attention.

    After every call, tokens beyond ``budget`` are evicted. The last ``recent`` tokens stay; of the others, those that
    received the least attention are evicted. Attention is summed over all queries so far and over the heads that share
    the keys. A sum favours early tokens, because more queries attend to them. Tokens that a later question needs may
    be evicted.

    The equivalent run, errors and cost are the same as for an `EvictingCache` with ``voting_queries=None``.

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

    def score(self, held: StoredTokens) -> Tensor:
        return held.received


class SnapKVCache(EvictingCache):
    r"""A cache of the prompt tokens to which the end of the prompt attends most, and of all later tokens.

    After the first call, and only then, each key head selects the tokens to keep: the last ``window`` tokens and, of
    the earlier tokens, the ``budget - window`` that received the most attention from the window. This attention is
    summed over the last tokens and over the heads that share the keys. It is then averaged over ``pool`` neighbouring
    tokens, so that some context of important tokens is kept. Padding neither affects the sum nor displaces a token. An
    item that consists only of padding in the first call keeps all tokens.

    The first call equals dense attention. Later calls equal dense attention in which the tokens that a key head evicted
    are masked. The question must be at the end of the prompt, since tokens that only a later question needs may be
    evicted.

    Args:
        budget: number of tokens of the first call that each key head keeps.
        window: number of tokens at the end of the first call, at most the budget. They are always retained, and their
            attention selects the other tokens.
        pool: number of neighbouring tokens to average over; must be odd.

    Raises:
        ValueError: sizes do not fit together, or an `EvictingCache` rejects an argument.
        UnsupportedError: a crop into the first call after an eviction, or a matrix whose rows are not distributions.

    Cost: memory for ``batch * kv_heads * (budget + later tokens)`` keys and values, and 12 bytes for each key (16 in
    float64). The selection takes one pass over ``window`` rows in the first call.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = SnapKVCache(6, window=2, pool=1), torch.randn(1, 2, 20, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.shape
        torch.Size([1, 2, 6])

    Reference: Li et al. 2024, arXiv:2404.14469, section 4 (SnapKV); here tokens are selected for each key head, not
    each query head.
    """

    settings = ("budget", "window", "pool")
    evict_once = True

    def __init__(self, budget: int, *, window: int = 32, pool: int = 5):
        budget = check_int("budget", budget)
        self.window, self.pool = check_int("window", window), check_int("pool", pool)
        if window > budget:
            raise value_error("window", f"be at most the budget {budget}", window)
        if pool % 2 == 0:
            raise value_error("pool", "be odd", pool)
        super().__init__(budget, recent=window)
        self.voting_queries = window

    def score(self, held: StoredTokens) -> Tensor:
        return F.avg_pool1d(held.received, self.pool, 1, self.pool // 2)


@dataclasses.dataclass(frozen=True)
class _AllWeights(Statistic[Tensor, Tensor]):
    """A statistic that collects all weights of a call, ``[batch, heads, q_len, kv_len]``."""

    def start(self, info: MatrixInfo) -> Tensor:
        return torch.zeros(info.shape, dtype=info.dtype, device=info.device)

    def add(self, state: Tensor, block: Block) -> Tensor:
        for span, weights in block.by_range(block.weights):
            state[block.batch, block.heads, as_slice(block.rows), as_slice(span)] = weights
        return state

    def merge(self, state: Tensor, other: Tensor) -> Tensor:
        return state + other

    def finish(self, state: Tensor) -> Tensor:
        return state


def _sum_by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Sum the attention that tokens received, ``[batch, heads, ...]``, over the heads that share keys."""
    return x.unflatten(1, (kv_heads, x.shape[1] // kv_heads)).sum(2)


def _add_rows(before: Mapping[str, Tensor], summed: Tensor, new: Tensor) -> dict[str, Tensor]:
    """Return the weights of the last 32 voting queries, one row each, and the summed weights of all earlier queries.

    Args:
        before: the cache's state. It contains the previous result if weights are already stored separately.
        summed: sums of earlier weights, ``[batch, kv_heads, columns]``, 0 for new tokens.
        new: weights of the new queries, ``[batch, kv_heads, queries, columns]``.
    """
    more, rows, earlier = new.shape[2], new, summed
    if "rows" in before:
        rows, earlier = torch.cat([F.pad(before["rows"], (0, more)), new], 2), F.pad(before["earlier"], (0, more))
    return {"earlier": earlier + rows[:, :, :-_MAX_ROWS].sum(2), "rows": rows[:, :, -_MAX_ROWS:]}
