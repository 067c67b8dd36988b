"""KVCache: all keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix
from saccade.caches.checks import check_count, check_crop, check_dense_mask, check_mechanism, check_new, checked_rows
from saccade.caches.columns import Columns
from saccade.caches.layer_cache import LayerCache, MakesMatrix, Traffic
from saccade.caches.places import Places
from saccade.engine.at_positions import Positions
from saccade.errors import type_error, value_error
from saccade.matrix import Matrix

__all__ = ["KVCache", "is_graph", "other_cache"]

_EMPTY = Places()


class KVCache(LayerCache):
    r"""Keys and values of all tokens so far, for every mechanism: exact.

    Keys and values are held as they come, with ``kv_heads`` heads. Where nothing is said, token j stands at position
    j. In a ragged batch the caller says where tokens stand, -1 for padding on either side, and every item continues
    after its own last token (`padded_positions` writes such positions from lengths).

    Gradients flow to the keys and values of the call itself; what is remembered is a constant.

    Args:
        max_len: room for so many columns is taken at the first call, and more do not fit; None to grow, by doubling.

    Raises:
        ValueError: the cache is full; or a batch, heads, width, dtype or device other than before.

    Cost: memory ``batch * kv_heads * columns * (head_dim + value_dim)`` elements, where columns are ``max_len``, or at
    most twice those held. Adding a token copies its own key and value.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        >>> softmax, causal, cache = mechanisms.Softmax(), masks.Causal(), KVCache()
        >>> first = cache.attend(softmax, q[:, :, :4], k[:, :, :4], v[:, :, :4], mask=causal)
        >>> cache.positions(1)
        range(4, 5)
        >>> last = cache.attend(softmax, q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], mask=causal)
        >>> full = softmax(q, k, mask=causal) @ v
        >>> torch.allclose(torch.cat([first, last], 2), full, atol=1e-6)
        True
    """

    hands_on_all = True

    def __init__(self, max_len: int | None = None):
        if max_len is not None:
            check_count("KVCache", "max_len", max_len)
        self.max_len = max_len
        self._keys, self._values = Columns(max_len), Columns(max_len)
        self._places = _EMPTY
        self._moved = (0, 0)  # columns read and appended by the last call, each of one batch item

    @property
    def length(self) -> int:
        return self._places.length

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes + self._places.nbytes

    @property
    def key(self) -> Tensor | None:
        """The keys, ``[batch, kv_heads, length, head_dim]``: a view, to look at; None before the first call."""
        return self._keys.first(self.length)

    @property
    def value(self) -> Tensor | None:
        """The values, ``[batch, kv_heads, length, value_dim]``: a view, to look at; None before the first call."""
        return self._values.first(self.length)

    @property
    def kv_positions(self) -> range | Tensor:
        """Where the tokens held stand: a range, or int64 ``[batch, length]``, -1 where none does."""
        return self._places.held

    @property
    def traffic(self) -> Traffic:
        column = self._keys.column_bytes + self._values.column_bytes
        read, appended = self._moved
        return Traffic(read * column, appended * column)

    def positions(self, q_len: int) -> range | Tensor:
        check_count(f"{type(self).__name__}.positions", "q_len", q_len, 0)
        return self._places.next(q_len)

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
        self._check(query, key, value, where)
        start, q_len = self._places.length, key.shape[2]
        places, q_positions = self._places.extended(positions, key.shape[0], q_len, key.device, where)
        keys, values = self._keys.written(start, key), self._values.written(start, value)
        if is_graph(mechanism, query, key, value):
            # A graph must not hold views of memory that later calls write to; and new keys get their gradients.
            keys = torch.cat([keys[:, :, :start], key], 2)
            values = torch.cat([values[:, :, :start], value], 2)
        matrix = mechanism(query, keys, mask=mask, q_positions=q_positions, kv_positions=places.held)
        self._check_matrix(matrix, mechanism, where)
        out = matrix.matmul(values, dropout_p=dropout_p)
        self._places = places  # only now do the new columns count
        self._moved = (_columns_read(matrix), q_len * key.shape[0])
        return out

    @property
    def exact_len(self) -> int:
        """How many of the columns held, from the first on, come of attention to everything that the mask allows."""
        return self.length

    def fill(self, key: Tensor, value: Tensor, *, positions: range | Tensor | None = None) -> None:
        """Remember tokens whose keys and values are known, such as those of a prefix, without attending to them.

        Args:
            key: ``[batch, kv_heads, len, head_dim]``.
            value: ``[batch, kv_heads, len, value_dim]``.
            positions: where they stand; from 0 on when None.

        Raises:
            ValueError: something is held already, or the shapes do not fit.
        """
        where = f"{type(self).__name__}.fill"
        if self.length:
            raise value_error(where, "cache", "be empty", f"one of {self.length} columns", hint="crop(0) empties it")
        self._check(key, key, value, where)
        length = key.shape[2]
        places, _ = _EMPTY.extended(
            range(length) if positions is None else positions, len(key), length, key.device, where
        )
        self._keys.written(0, key)
        self._values.written(0, value)
        self._places, self._moved = places, (0, length * key.shape[0])

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        like = self._keys.like
        index = checked_rows(f"{type(self).__name__}.reorder", rows, None if like is None else like[0])
        if like is None or index.tolist() == list(range(like[0])):
            return
        self._keys.reorder(index, self.length)
        self._values.reorder(index, self.length)
        self._places = self._places.reordered(index)

    def crop(self, length: int) -> None:
        check_crop(f"{type(self).__name__}.crop", length, self.length)
        self._places = self._places.cropped(length)

    def fork(self) -> Self:
        other = type(self)(self.max_len)
        other._keys, other._values, other._places = self._keys.fork(), self._values.fork(), self._places
        return other

    def __repr__(self) -> str:
        return f"KVCache(max_len={self.max_len}, length={self.length}, nbytes={self.nbytes})"

    def _check_matrix(self, matrix: Matrix, mechanism: MakesMatrix, where: str) -> None:
        """Raise if a matrix is none that this cache can go on with: one of all tokens fits every matrix."""

    def _check(self, query: Tensor, key: Tensor, value: Tensor, where: str) -> None:
        check_new(where, query, key, value)
        for name, columns, new in (("key", self._keys, key), ("value", self._values, value)):
            like, given = columns.like, (new.shape[0], new.shape[1], new.shape[3], new.dtype, new.device)
            if like is not None and like != given:
                raise other_cache(where, name, like, given)
        if self.max_len is not None and self.length + key.shape[2] > self.max_len:
            got = f"{self.length} held and {key.shape[2]} new"
            hint = "KVCache() grows; crop(length) forgets"
            raise value_error(where, "tokens", f"fit in max_len {self.max_len}", got, hint=hint)


def is_graph(mechanism: MakesMatrix, *tensors: Tensor) -> bool:
    """Whether autograd will record the product."""
    if not torch.is_grad_enabled():
        return False
    if any(x.requires_grad for x in tensors):
        return True
    return isinstance(mechanism, torch.nn.Module) and any(x.requires_grad for x in mechanism.parameters())


def _columns_read(matrix: Matrix) -> int:
    """Keys of all items that some query needs. Under a causal rule several need nearly all; one may need few."""
    batch, _, q_len, kv_len = matrix.shape
    if q_len == 1 and isinstance(matrix, AttentionMatrix) and not matrix.ingredients.plan.is_full:
        tiles = matrix.ingredients.plan.tiles
        needed = {(tile.batch.start, tile.batch.stop, strip.keys) for tile in tiles for strip in tile.columns}
        return min(batch * kv_len, sum((stop - start) * len(keys) for start, stop, keys in needed))
    return batch * kv_len if q_len else 0


def other_cache(where: str, name: str, like: tuple[object, ...], got: tuple[object, ...]) -> Exception:
    """Why new columns do not fit those held: (batch, kv_heads, width, dtype, device) of either."""
    for what, old, new in zip(("batch", "kv_heads", "width", "dtype", "device"), like, got, strict=True):
        if old != new:
            held, given = (str(x).removeprefix("torch.") for x in (old, new))
            error = type_error if what == "dtype" else value_error
            hint = "a cache belongs to one layer and one batch: make a new one, or reorder(rows)"
            return error(where, f"{what} of {name}", f"be {held}, as in the cache", given, hint=hint)
    raise AssertionError("they differ")
