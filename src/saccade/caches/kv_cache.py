"""KVCache: stores the keys and values of all tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from saccade.caches.buffers import empty
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, KeyValueSpec, Traffic
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.matrix import AttentionMatrix, Matrix
from saccade.positions.token_positions import Positions
from saccade.support.errors import unsupported, value_error
from saccade.support.language import Message
from saccade.support.torch_modes import has_values
from saccade.support.validation import check_int

_SMALLEST = 16  # initial number of columns of a growing cache


class KVCache(LayerCache):
    r"""A cache of the exact keys and values of all tokens so far, for every mechanism.

    Keys and values are stored unchanged, with ``kv_heads`` heads. By default, token j is at position j. For a ragged
    batch, pass positions with -1 for padding on either side; `padded_positions` computes them from lengths. Every item
    then continues after its own last token.

    Gradients flow to the keys and values of the current call. Stored keys and values are constants.

    Args:
        max_len: largest number of columns; the first call allocates memory for all of them. When None, the memory
            doubles whenever it is full.

    Raises:
        ValueError: the cache is full, or the batch size, number of heads, width, dtype or device differs from earlier
            calls.

    Cost: memory for ``batch * kv_heads * columns * (head_dim + value_dim)`` elements, where columns is ``max_len``, or
    at most twice the number of stored columns. Adding a token copies only its own key and value.

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

    settings: ClassVar[tuple[str, ...]] = ("max_len",)
    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("key", "batch kv_heads columns head_dim"),
        Leaf("value", "batch kv_heads columns value_dim"),
    )
    keeps_order = exposes_all_keys = True
    needs_softmax: ClassVar[bool] = False
    block_size: int = 1  # memory is allocated in multiples of this many columns

    _tokens: Positions

    def __init__(self, max_len: int | None = None):
        super().__init__()
        self.max_len = None if max_len is None else check_int("max_len", max_len)

    @property
    def key(self) -> Tensor | None:
        """All stored keys, ``[batch, kv_heads, length, head_dim]``, as a read-only view; None before the first call."""
        return self._state["key"][:, :, : self.length] if self._state else None

    @property
    def value(self) -> Tensor | None:
        """Stored values, ``[batch, kv_heads, length, value_dim]``, as a read-only view; None before the first call."""
        return self._state["value"][:, :, : self.length] if self._state else None

    @property
    def kv_positions(self) -> range | Tensor:
        """Positions of the stored tokens: a range, or int64 ``[batch, length]`` with -1 for padding."""
        return self._tokens.given

    @property
    def exact_len(self) -> int:
        """Number of leading columns whose keys were computed with exact attention, without skipping blocks."""
        return self.length

    def advance(self, call: Call) -> Tensor:
        key, value, start = call.key, call.value, self._length
        keys, values = self._write_columns("key", start, key), self._write_columns("value", start, value)
        if torch.is_grad_enabled() and call.needs_graph:
            # An autograd graph must not contain views of memory that later calls write to, and new keys need gradients.
            keys = torch.cat([keys[:, :, :start], key], 2)
            values = torch.cat([values[:, :, :start], value], 2)
        matrix = call.mechanism(
            call.query, keys, mask=call.mask, q_positions=call.positions, kv_positions=call.kv_positions
        )
        if self.needs_softmax:
            check_softmax(matrix, call)
        out = matrix.matmul(values, dropout_p=call.dropout_p)
        read = keys.nbytes + values.nbytes
        if key.shape[2] != 1:
            read = read if key.shape[2] else 0
        elif isinstance(matrix, AttentionMatrix) and not matrix.inputs.plan.is_full:
            read = self._bytes_read(matrix, read)
        self._traffic = Traffic(read, key.nbytes + value.nbytes)
        return out

    def _bytes_read(self, matrix: AttentionMatrix, stored: int) -> int:
        """Return how many of all ``stored`` bytes of keys and values a call reads under its mask."""
        batch, _, _, kv_len = matrix.shape
        tiles = matrix.inputs.plan.tiles
        needed = {(tile.batch.start, tile.batch.stop, strip.keys) for tile in tiles for strip in tile.columns}
        columns = sum((stop - start) * len(keys) for start, stop, keys in needed)
        return stored * min(batch * kv_len, columns) // max(1, batch * kv_len)

    def fill(self, key: Tensor, value: Tensor, *, positions: range | Tensor | None = None) -> None:
        """Store keys and values that were computed earlier, such as those of a prefix, without attending.

        Args:
            key: ``[batch, kv_heads, len, head_dim]``.
            value: ``[batch, kv_heads, len, value_dim]``.
            positions: positions of the tokens; 0, 1, 2, … when None.

        Raises:
            ValueError: the cache is not empty, or the shapes do not match.
        """
        self.check_not_replayed()
        if self.length:
            raise value_error("cache", "be empty", f"{self.length} columns", hint="crop(0) empties it")
        self._check_new(key, key, value)
        batch, _, length, _ = key.shape
        given = range(length) if positions is None else positions
        tokens = Positions.of(given, length=length, batch=batch)
        tokens, _ = Positions(range(0)).extended(tokens, batch, key.device)
        self._write_columns("key", 0, key)
        self._write_columns("value", 0, value)
        self._tokens, self._length, self._spec = tokens, length, KeyValueSpec.of(key, value)
        self._traffic = Traffic(0, key.nbytes + value.nbytes)

    def restore(self, contents: Contents) -> None:
        super().restore(contents)
        for name in [name for name in ("key", "value") if name in self._state]:
            self._write_columns(name, 0, self._state.pop(name))

    def _write_columns(self, name: str, start: int, new: Tensor) -> Tensor:
        """Write new columns of one cached tensor after its first ``start`` columns, and return a view of all columns.

        Cost: copies ``new``, and all earlier columns if the memory has to grow.
        """
        x, stop = self._state.get(name), start + new.shape[2]
        is_read_only = x is not None and x.is_inference() and not torch.is_inference_mode_enabled()
        if x is None or stop > x.shape[2] or name in self._shared or is_read_only:
            x = self._grow(name, start, stop, new)
        x.narrow(2, start, stop - start).copy_(new.detach() if new.requires_grad else new)
        return x.narrow(2, 0, stop)

    def _grow(self, name: str, start: int, stop: int, new: Tensor) -> Tensor:
        """Copy the first ``start`` columns of a cached tensor to new memory with room for at least ``stop`` columns."""
        old = self._state.get(name)
        size, room = (self.block_size, self.max_len) if name in ("key", "value") else (1, None)
        if room is None:
            capacity = _SMALLEST if old is None else old.shape[2]
            room = max(stop, capacity if stop <= capacity or old is None else 2 * capacity)
        grown = empty(new, (*new.shape[:2], -(-room // size) * size, new.shape[3]))
        if old is not None and start:
            grown[:, :, :start].copy_(old[:, :, :start])
        self._state[name] = grown
        self._shared.discard(name)
        return grown

    def _selected(self, x: Tensor, rows: Tensor) -> Tensor:
        if not has_values(rows):
            return x[rows]
        copy = empty(x, (len(rows), *x.shape[1:]))
        for i, row in enumerate(rows.tolist()):
            copy[i, :, : self.length].copy_(x[row, :, : self.length])
        return copy

    def _why_not_cropped(self, length: int) -> None:
        """Return None, since a KVCache can be cropped to any length."""

    def _empty(self) -> None:
        self._crop(0)

    def _crop(self, length: int) -> None:
        self._tokens = self._tokens.cropped(length)  # the memory stays allocated

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        key, value = state["key"], state["value"]
        contents.check_room(key, value, max(key.shape[2], self.max_len or 0) + self.block_size)


def check_softmax(matrix: Matrix, call: Call) -> None:
    """Raise an error unless a matrix is a softmax, since some caches select tokens by their softmax weights."""
    if not isinstance(matrix, AttentionMatrix):
        words = "a {matrix} is not a softmax, so there are no largest terms to select"
        reason = Message(words, matrix=type(matrix).__name__)
        hint = "KVCache() supports every mechanism"
        raise unsupported(type(call.mechanism).__name__, [reason], hint=hint)
