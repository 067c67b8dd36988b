"""RoundedCache: the base class of caches that store finished blocks of keys and values in a few bits."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, Self

from torch import Tensor

from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, Traffic, check_readable
from saccade.caches.per_head import attend_by_head
from saccade.positions.token_positions import Positions
from saccade.support.errors import value_error
from saccade.support.numerics import is_finite, not_finite
from saccade.support.validation import check_int

_PARTS = ("codes", "steps", "zeros", "rest")
_AT_ONCE = 1 << 21  # bytes of keys to convert at a time, few enough to stay in a core's cache


class Store(Protocol):
    """The interface of a store of keys or values that rounds finished blocks, but not the unfinished block.

    The cache stores its tensors ``codes``, ``steps``, ``zeros`` and ``rest`` as leaves.
    """

    def extended(self, new: Tensor) -> Self:
        """Return this store with new columns ``[batch, kv_heads, len, width]``. Blocks that become full are rounded."""
        ...

    def read(self, new: Tensor, rows: slice) -> Tensor:
        """Return stored columns of a slice of key heads as floats, then the new columns, ``[rows, columns, width]``."""
        ...


class RoundedCache(LayerCache):
    """The base class of caches that store all tokens, rounded block by block.

    A subclass defines `_store`, and has the leaves ``key.rest`` and ``value.rest`` for the unfinished block.

    Args:
        block_size: number of tokens that are rounded together.
    """

    numbers = ("length",)
    equivalent_run = "the run with a KVCache that stores rounded keys and values"
    keeps_order = exposes_all_keys = True

    _tokens: Positions

    def __init__(self, block_size: int):
        super().__init__()
        self.block_size = check_int("block_size", block_size)

    @abstractmethod
    def _store(self, name: str, like: Tensor) -> Store:
        """Return the store of keys or values. Before the first call, it is an empty store for tensors like ``like``."""

    def advance(self, call: Call) -> Tensor:
        new = {"key": call.key, "value": call.value}
        stored = {name: self._store(name, x) for name, x in new.items()}

        def read(rows: slice) -> tuple[Tensor, Tensor]:
            return stored["key"].read(call.key, rows), stored["value"].read(call.value, rows)

        batch, kv_heads, q_len, width = call.key.shape
        rows_at_once = max(1, _AT_ONCE // max(1, (self.length + q_len) * width * call.key.element_size()))
        portions = [slice(start, start + rows_at_once) for start in range(0, batch * kv_heads, rows_at_once)]
        (out,) = attend_by_head(call, kv_heads, read, None, call.product, portions=portions)
        moved = call.key.nbytes + call.value.nbytes
        self._traffic = Traffic(sum(x.nbytes for x in self._state.values()) + moved, moved)
        for name, x in new.items() if q_len else ():
            store = stored[name].extended(x.detach())
            self._state |= {f"{name}.{part}": getattr(store, part) for part in _PARTS}
        return out

    def _parts(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the codes, steps, zeros and rest of the stored keys or values."""
        codes, steps, zeros, rest = (self._state[f"{name}.{part}"] for part in _PARTS)
        return codes, steps, zeros, rest

    def _check_new(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super()._check_new(query, key, value)
        check_readable(key, value)
        for name, x in (("key", key), ("value", value)):
            if not is_finite(x) and bool(not_finite(x).any()):
                hint = "a NaN or inf would spoil the rounding of its whole block; KVCache() can store it"
                raise value_error(name, "be finite", "NaN or inf", hint=hint)

    def _why_not_cropped(self, length: int) -> str | None:
        rounded = self.length // self.block_size * self.block_size
        if length >= rounded:
            return None
        return f"the first {rounded} columns are rounded in blocks, which cannot be undone"

    def _crop(self, length: int) -> None:
        for name in ("key.rest", "value.rest"):
            self._state[name] = self._state[name][:, :, : length % self.block_size].clone()
        self._tokens = self._tokens.cropped(length)
