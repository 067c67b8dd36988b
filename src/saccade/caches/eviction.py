"""Caches that let tokens go by what was attended to: memory that does not grow, and no way back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.caches.checks import check_count, check_crop, check_dense_mask, check_mechanism, check_new, checked_rows
from saccade.caches.following import following, from_here
from saccade.caches.kv_cache import other_cache
from saccade.caches.layer_cache import LayerCache, MakesMatrix, Traffic
from saccade.caches.per_head import attend_per_head
from saccade.engine.at_positions import Positions, check_positions
from saccade.errors import unsupported, value_error
from saccade.masks import Mask, as_mask
from saccade.statistics import Received

__all__ = ["Held", "HeavyHitterCache", "SnapKVCache"]


class Held(NamedTuple):
    """The tokens that each key head holds, oldest first; never written in place, so that forks may share it.

    Args:
        key, value: ``[batch, kv_heads, columns, width]``.
        table: where the tokens stand, int64 ``[batch, kv_heads, columns]``; -1 for nobody.
        received: attention that each token has got, float32 or float64 ``[batch, kv_heads, columns]``.
    """

    key: Tensor
    value: Tensor
    table: Tensor
    received: Tensor

    def at(self, index: Tensor) -> Held:
        """Of these columns, int64 ``[batch, kv_heads, columns]``."""
        wide = [x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in (self.key, self.value)]
        return Held(wide[0], wide[1], self.table.gather(2, index), self.received.gather(2, index))

    def in_order(self) -> Held:
        """With padding before all tokens, so that the last columns are the last tokens."""
        index = _padding_first(self.table)
        return self if index is None else self.at(index)


def _padding_first(table: Tensor) -> Tensor | None:
    """An order of the last axis in which padding stands before all tokens; None where it does already."""
    real = table >= 0
    if not bool((real[..., :-1] & ~real[..., 1:]).any()):
        return None
    return real.to(torch.uint8).sort(dim=-1, stable=True).indices


class _EvictingCache(LayerCache):
    """Tokens of which each key head holds its own, and what they received."""

    def __init__(self, budget: int):
        check_count(type(self).__name__, "budget", budget)
        self.budget = budget
        self._held: Held | None = None
        self._length = 0
        self._next: int | Tensor = 0
        self._traffic = Traffic(0, 0)

    @property
    def length(self) -> int:
        """Columns seen, those let go included."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Keys, values, where they stand, and what they received."""
        tensors = [*(self._held or ()), *((self._next,) if isinstance(self._next, Tensor) else ())]
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def traffic(self) -> Traffic:
        """Positions and what tokens received are read and written with them, and count."""
        return self._traffic

    @property
    def kv_positions(self) -> Tensor | None:
        """Where the tokens held stand, int64 ``[batch, kv_heads, columns]``, -1 for nobody; None before the first."""
        return None if self._held is None else self._held.table

    def positions(self, q_len: int) -> range | Tensor:
        check_count(f"{type(self).__name__}.positions", "q_len", q_len, 0)
        return from_here(self._next, q_len)

    def attend(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: object = None,
        positions: Positions = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        where = f"{type(self).__name__}.attend"
        check_mechanism(where, mechanism)
        check_dense_mask(where, mask)
        check_new(where, query, key, value)
        self._check_alike(key, value, where)
        batch, q_len = key.shape[0], key.shape[2]
        rule = None if mask is None else as_mask(mask, (*query.shape[:3], self.length + q_len), where=where)
        positions = self.positions(q_len) if positions is None else positions
        check_positions(positions, "positions", batch, q_len, where)
        hint = "KVCache() takes any order"
        after = following(self._next, positions, batch, key.device, where, begun=self._length > 0, hint=hint)
        table = _written_out(positions, key.device)
        if self._held is None:
            matrix = mechanism(query, key, mask=rule, q_positions=positions, kv_positions=positions)
            out = matrix.matmul(value, dropout_p=dropout_p)
            received = self._of_prompt(mechanism, query, key, rule, positions)
        else:
            out, received = self._with_held(mechanism, query, key, value, rule, table, dropout_p)
        all_held = self._joined(key.detach(), value.detach(), table, received).in_order()
        if self._length + q_len:  # a call of no tokens before all others is no prompt
            self._held = self._kept(all_held, q_len)
        self._length, self._next = self._length + q_len, after
        self._traffic = Traffic(_size(all_held), _size(all_held) // max(1, all_held.key.shape[2]) * q_len)
        return out

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        held = self._held
        index = checked_rows(f"{type(self).__name__}.reorder", rows, None if held is None else len(held.key))
        if held is None:
            return
        index = index.to(held.key.device)
        self._held = Held(*(x[index] for x in held))
        if isinstance(self._next, Tensor):
            self._next = self._next[index]

    def crop(self, length: int) -> None:
        """Forget everything (0) or nothing (the length seen): what later tokens attended to has left its mark."""
        where = f"{type(self).__name__}.crop"
        check_crop(where, length, self._length)
        if length == self._length:
            return
        if length:
            reason = "tokens were let go, and others weighed, by the attention of those that would be taken back"
            hint = "fork() before the tokens that may have to go; KVCache() crops anywhere"
            raise unsupported(where, f"length={length}", [reason], hint=hint)
        self._held, self._length, self._next, self._traffic = None, 0, 0, Traffic(0, 0)

    def _copied_to(self, other: Self) -> Self:
        other._held, other._length, other._next = self._held, self._length, self._next
        other._traffic = self._traffic
        return other

    @abstractmethod
    def _of_prompt(
        self, mechanism: MakesMatrix, query: Tensor, key: Tensor, rule: Mask | None, positions: range | Tensor
    ) -> Tensor:
        """What the keys of a first call received, ``[batch, heads, columns]``."""

    @abstractmethod
    def _kept(self, held: Held, q_len: int) -> Held:
        """What stays after a call of ``q_len`` tokens."""

    def _with_held(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: Mask | None,
        table: Tensor,
        dropout_p: float,
    ) -> tuple[Tensor, Tensor]:
        held = self._held
        assert held is not None
        keys, values = torch.cat([held.key, key], 2), torch.cat([held.value, value], 2)
        kv_table = torch.cat([held.table, _of_heads(table, key)], 2)
        return attend_per_head(mechanism, query, keys, values, rule, table, kv_table, dropout_p)

    def _joined(self, key: Tensor, value: Tensor, table: Tensor, received: Tensor) -> Held:
        """Everything held before something is let go; what heads received that share keys is added up."""
        kv_heads = key.shape[1]
        summed = received.unflatten(1, (kv_heads, received.shape[1] // kv_heads)).sum(2)
        placed, held = _of_heads(table, key), self._held
        if held is None:
            return Held(key, value, placed, summed)
        before = F.pad(held.received, (0, key.shape[2]))
        return Held(
            torch.cat([held.key, key], 2),
            torch.cat([held.value, value], 2),
            torch.cat([held.table, placed], 2),
            before + summed,
        )

    def _check_alike(self, key: Tensor, value: Tensor, where: str) -> None:
        held = self._held
        for name, own, new in () if held is None else (("key", held.key, key), ("value", held.value, value)):
            like = (own.shape[0], own.shape[1], own.shape[3], own.dtype, own.device)
            given = (new.shape[0], new.shape[1], new.shape[3], new.dtype, new.device)
            if like != given:
                raise other_cache(where, name, like, given)


class HeavyHitterCache(_EvictingCache):
    r"""Keeps for each key head the tokens that were attended to most, and the last ones.

    After every call, whatever exceeds ``budget`` goes: of the tokens before the last ``recent``, those that received
    least attention from all queries so far, summed over the heads that share the keys. A call reads what was held
    before it and its own tokens, so that a prompt is exact. Padding, wherever it stands, takes no token's place.

    Equals, call by call, the dense run in which the tokens that its key head let go before are hidden; as long as no
    more than ``budget`` tokens came, the run with a `KVCache`. A sum favours early tokens, which more queries have
    seen, and what goes is gone: a fact that is asked for late may not be there.

    Args:
        budget: tokens that each key head holds after a call.
        recent: last tokens that stay; half of the budget when None.

    Raises:
        ValueError: sizes out of range, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a crop to somewhere, or a matrix whose rows are no distributions.

    Cost: memory ``batch * kv_heads * budget`` keys and values, and 12 bytes for each (16 in float64). A call sweeps its
    weights a second time, a prompt of n tokens so n²/2 of them, in O(n) memory.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = HeavyHitterCache(4, recent=2), torch.randn(1, 2, 10, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.shape, cache.kv_positions[0, :, -2:].tolist()
        (torch.Size([1, 2, 4]), [[8, 9], [8, 9]])

    Reference: Zhang et al. 2023, arXiv:2306.14048, section 4 (H2O).
    """

    def __init__(self, budget: int, *, recent: int | None = None):
        super().__init__(budget)
        recent = max(1, budget // 2) if recent is None else recent
        check_count("HeavyHitterCache", "recent", recent)
        if recent > budget:
            raise value_error("HeavyHitterCache", "recent", f"be at most the budget {budget}", recent)
        self.recent = recent

    def fork(self) -> Self:
        return self._copied_to(type(self)(self.budget, recent=self.recent))

    def __repr__(self) -> str:
        return f"HeavyHitterCache({self.budget}, recent={self.recent}, length={self.length}, nbytes={self.nbytes})"

    def _of_prompt(
        self, mechanism: MakesMatrix, query: Tensor, key: Tensor, rule: Mask | None, positions: range | Tensor
    ) -> Tensor:
        matrix = mechanism(query.detach(), key.detach(), mask=rule, q_positions=positions, kv_positions=positions)
        return matrix.ask(Received())[0]

    def _kept(self, held: Held, q_len: int) -> Held:
        del q_len
        return _best(held, held.received, self.budget, self.recent)


class SnapKVCache(_EvictingCache):
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
        ValueError: sizes that do not fit together, or what `HeavyHitterCache` refuses.
        UnsupportedError: a crop to somewhere, or a matrix whose rows are no distributions.

    Cost: memory ``batch * kv_heads * (budget + later tokens)`` keys and values, and 12 bytes for each (16 in float64).
    Judging costs a sweep over ``window`` rows.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = SnapKVCache(6, window=2, pool=1), torch.randn(1, 2, 20, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.kv_positions.shape
        torch.Size([1, 2, 6])

    Reference: Li et al. 2024, arXiv:2404.14469, section 4 (SnapKV); here a set for each key head, not each query head.
    """

    def __init__(self, budget: int, *, window: int = 32, pool: int = 5):
        super().__init__(budget)
        check_count("SnapKVCache", "window", window)
        check_count("SnapKVCache", "pool", pool)
        if window > budget:
            raise value_error("SnapKVCache", "window", f"be at most the budget {budget}", window)
        if pool % 2 == 0:
            raise value_error("SnapKVCache", "pool", "be odd", pool)
        self.window, self.pool = window, pool

    def fork(self) -> Self:
        return self._copied_to(type(self)(self.budget, window=self.window, pool=self.pool))

    def __repr__(self) -> str:
        sizes = f"{self.budget}, window={self.window}, pool={self.pool}"
        return f"SnapKVCache({sizes}, length={self.length}, nbytes={self.nbytes})"

    def _of_prompt(
        self, mechanism: MakesMatrix, query: Tensor, key: Tensor, rule: Mask | None, positions: range | Tensor
    ) -> Tensor:
        judges, own = self._last(query.detach(), positions)
        matrix = mechanism(judges, key.detach(), mask=rule, q_positions=own, kv_positions=positions)
        return matrix.ask(Received())[0]

    def _last(self, query: Tensor, positions: range | Tensor) -> tuple[Tensor, range | Tensor]:
        """The last ``window`` queries of each item, and where they stand; padding judges nothing."""
        last = slice(max(0, query.shape[2] - self.window), None)
        if isinstance(positions, range):
            return query[:, :, last], positions[last]
        order = _padding_first(torch.atleast_2d(positions))
        if order is None:
            return query[:, :, last], positions[..., last]
        index = order[:, last].to(query.device)
        rows = index.expand(query.shape[0], -1)[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        return query.gather(2, rows), torch.atleast_2d(positions).gather(1, index.to(positions.device))

    def _kept(self, held: Held, q_len: int) -> Held:
        if self._held is not None or q_len <= self.budget:
            return held
        smooth = F.avg_pool1d(held.received, self.pool, 1, self.pool // 2)
        return _best(held, smooth, self.budget, self.window)


def _best(held: Held, rank: Tensor, budget: int, recent: int) -> Held:
    """The ``recent`` last columns, and those of the others that rank highest; ``budget`` in all."""
    columns = rank.shape[2]
    if columns <= budget:
        return held
    order = rank.masked_fill(held.table < 0, -torch.inf)
    order[..., columns - recent :] = torch.inf
    return held.at(order.topk(budget, 2, sorted=False).indices.sort(2).values)


def _size(held: Held) -> int:
    return sum(x.numel() * x.element_size() for x in held)


def _of_heads(table: Tensor, key: Tensor) -> Tensor:
    """Positions ``[batch | 1, len]`` for each key head, ``[batch, kv_heads, len]``."""
    return table[:, None].expand(key.shape[0], key.shape[1], -1)


def _written_out(positions: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)[None]
    return torch.atleast_2d(positions.to(device))
