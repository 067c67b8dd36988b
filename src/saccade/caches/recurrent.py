"""RecurrentCache: the sum over all keys so far, and nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from saccade.caches.checks import check_count, check_crop, check_dense_mask, check_mechanism, check_new, checked_rows
from saccade.caches.following import following, from_here
from saccade.caches.layer_cache import LayerCache, MakesMatrix, Traffic
from saccade.caches.memory import usable
from saccade.engine.at_positions import Positions, check_positions
from saccade.errors import type_error, unsupported, value_error

__all__ = ["Memory", "Recurrent", "RecurrentCache"]


class Memory(NamedTuple):
    """What is left of the keys and values so far.

    Attributes:
        state: ``[batch, kv_heads, features, value_dim + 1]``, sums of features times values, and of features alone.
        peak: ``[batch, kv_heads]``, the logarithm that was taken out of the sums.
        segment: int64 ``[batch | 1]``, the document of the last token; None without documents.
        tainted: bool ``[batch, kv_heads]``, where a NaN or inf was remembered.
        source: equal for states of the same features.
    """

    state: Tensor
    peak: Tensor
    segment: Tensor | None
    tainted: Tensor
    source: Hashable


@runtime_checkable
class Recurrent(Protocol):
    """A matrix of new tokens only, to which a `Memory` stands for all tokens before."""

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """The product with the values of old and new tokens, and what is to be remembered of all of them."""
        ...


class RecurrentCache(LayerCache):
    """The sums that causal linear attention needs of the past: constant memory, however long the text.

    For mechanisms whose matrix is made of features (`saccade.mechanisms.Linear`, `saccade.mechanisms.Performer`) and
    causal masks that these take. Equals the run with a `saccade.caches.KVCache`, and the full run. The mask must be
    the same in every call. A sum cannot be taken apart again: `crop` goes back to nothing or nowhere; `fork` before a
    guess costs nothing.

    Gradients flow to the keys and values of the call itself; what is remembered is a constant.

    Args:
        max_len: most tokens; None for any number. The memory is the same.

    Raises:
        ValueError: no causal mask, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a mechanism without features, a crop to somewhere, or dropout.

    Cost: memory ``batch * kv_heads * features * (value_dim + 1)`` elements; a token costs as many multiplications.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
        >>> linear, causal = mechanisms.Linear(), masks.Causal()
        >>> cache = linear.new_cache()
        >>> parts = [cache.attend(linear, *(x[:, :, i : i + 1] for x in (q, k, v)), mask=causal) for i in range(100)]
        >>> torch.allclose(torch.cat(parts, 2), linear(q, k, mask=causal) @ v, atol=1e-5)
        True
        >>> cache.nbytes
        586
    """

    def __init__(self, max_len: int | None = None):
        if max_len is not None:
            check_count("RecurrentCache", "max_len", max_len)
        self.max_len = max_len
        self._memory: Memory | None = None
        self._length = 0
        self._next: int | Tensor = 0  # where the next token of each item will stand
        self._moved = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        tensors = [x for x in (*(self._memory or ()), self._next) if isinstance(x, Tensor)]
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def traffic(self) -> Traffic:
        """The sums are read and written as a whole, however many tokens come."""
        return Traffic(self._moved, self._moved)

    def positions(self, q_len: int) -> range | Tensor:
        check_count("RecurrentCache.positions", "q_len", q_len, 0)
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
        where = "RecurrentCache.attend"
        check_mechanism(where, mechanism)
        check_dense_mask(where, mask)
        check_new(where, query, key, value)
        if dropout_p:
            reason = "dropout_p is not 0, and single weights of earlier tokens cannot be dropped from a sum"
            raise unsupported(where, type(mechanism).__name__, [reason], hint="KVCache() keeps the tokens themselves")
        batch, q_len = key.shape[0], key.shape[2]
        self._check(key, value, where)
        positions = self.positions(q_len) if positions is None else positions
        check_positions(positions, "positions", batch, q_len, where)
        hint = "a sum holds no order: KVCache() does"
        after = following(self._next, positions, batch, key.device, where, begun=self._length > 0, hint=hint)
        matrix = mechanism(query, key, mask=mask, q_positions=positions, kv_positions=positions)
        if not isinstance(matrix, Recurrent):
            reason = f"a {type(matrix).__name__} is no sum over keys that could be carried on"
            raise unsupported(where, type(mechanism).__name__, [reason], hint="KVCache() fits every mechanism")
        out, memory = matrix.advance(value, None if self._memory is None else _usable(self._memory))
        if q_len:
            self._memory = memory._replace(state=memory.state.detach())
        self._moved = memory.state.numel() * memory.state.element_size()
        self._length, self._next = self._length + q_len, after
        return out

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        memory = self._memory
        index = checked_rows("RecurrentCache.reorder", rows, None if memory is None else len(memory.state))
        if memory is None:
            return
        index = index.to(memory.state.device)
        segment = memory.segment
        self._memory = memory._replace(
            state=memory.state[index],
            peak=memory.peak[index],
            segment=segment if segment is None or len(segment) == 1 else segment[index],
            tainted=memory.tainted[index],
        )
        if isinstance(self._next, Tensor):
            self._next = self._next[index]

    def crop(self, length: int) -> None:
        """Forget everything (0) or nothing (the length held); a sum cannot be cut anywhere else."""
        check_crop("RecurrentCache.crop", length, self._length)
        if length == self._length:
            return
        if length:
            reason = f"it holds one sum over {self._length} tokens, from which the last ones cannot be taken"
            hint = "fork() before the tokens that may have to go; KVCache() crops anywhere"
            raise unsupported("RecurrentCache.crop", f"length={length}", [reason], hint=hint)
        self._memory, self._length, self._next = None, 0, 0

    def fork(self) -> Self:
        other = type(self)(self.max_len)
        other._memory, other._length, other._next = self._memory, self._length, self._next  # never written in place
        return other

    def __repr__(self) -> str:
        return f"RecurrentCache(max_len={self.max_len}, length={self.length}, nbytes={self.nbytes})"

    def _check(self, key: Tensor, value: Tensor, where: str) -> None:
        if self.max_len is not None and self._length + key.shape[2] > self.max_len:
            got = f"{self._length} held and {key.shape[2]} new"
            raise value_error(where, "tokens", f"fit in max_len {self.max_len}", got, hint="max_len=None sets no limit")
        if self._memory is None:
            return
        held = self._memory.state
        like = (held.shape[0], held.shape[1], held.shape[3] - 1)
        given = (key.shape[0], key.shape[1], value.shape[3])
        hint = "a cache belongs to one layer and one batch: make a new one, or reorder(rows)"
        for name, old, new in zip(("batch", "kv_heads", "value_dim"), like, given, strict=True):
            if old != new:
                raise value_error(where, name, f"be {old}, as in the cache", new, hint=hint)
        if held.device != key.device:
            raise value_error(where, "device", f"be {held.device}, as in the cache", key.device, hint=hint)
        if (held.dtype == torch.float64) != (key.dtype == torch.float64):
            raise type_error(where, "dtype", f"fit the {held.dtype} in the cache", key.dtype, hint=hint)


def _usable(memory: Memory) -> Memory:
    state, peak, tainted = (usable(x) for x in (memory.state, memory.peak, memory.tainted))
    segment = None if memory.segment is None else usable(memory.segment)
    return Memory(state, peak, segment, tainted, memory.source)
