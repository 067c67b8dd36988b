"""Int8Cache: keys and values of all tokens, rounded to 8 bits block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from saccade.caches.checks import check_count, check_crop, check_dense_mask, check_mechanism, check_new, checked_rows
from saccade.caches.kv_cache import other_cache
from saccade.caches.layer_cache import LayerCache, MakesMatrix, Traffic
from saccade.caches.places import Places
from saccade.caches.plain import is_plain, tells_heads_apart
from saccade.engine.at_positions import Positions
from saccade.errors import unsupported, value_error
from saccade.masks import as_mask

__all__ = ["Int8Cache", "Rounded"]

_LEVELS = 127


class Rounded(NamedTuple):
    """Keys or values of finished blocks, and of the unfinished one; never written in place, so that forks share it.

    Args:
        codes: int8 ``[batch, kv_heads, blocks * block_size, width]``.
        steps: float32 or float64 ``[batch, kv_heads, blocks, width]``: what a code counts, in each block and channel.
        rest: of the unfinished block, as it came, ``[batch, kv_heads, fewer than block_size, width]``.
    """

    codes: Tensor
    steps: Tensor
    rest: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Rounded:
        """Nothing, for tensors like this one."""
        batch, heads, _, width = like.shape
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        none = (batch, heads, 0, width)
        return cls(like.new_empty(none, dtype=torch.int8), like.new_empty(none, dtype=wide), like.new_empty(none))

    def extended(self, new: Tensor, size: int) -> Rounded:
        """With new columns; blocks that are full now are rounded."""
        rest = torch.cat([self.rest, new], 2)
        full = rest.shape[2] // size
        if not full:
            return self._replace(rest=rest)
        blocks = rest[:, :, : full * size].unflatten(2, (full, size)).to(self.steps.dtype)
        steps = blocks.abs().amax(3) / _LEVELS
        codes = (blocks / steps.clamp(min=torch.finfo(steps.dtype).tiny)[:, :, :, None]).round()
        codes = codes.clamp(-_LEVELS, _LEVELS).to(torch.int8)
        return Rounded(
            torch.cat([self.codes, codes.flatten(2, 3)], 2),
            torch.cat([self.steps, steps], 2),
            rest[:, :, full * size :].clone(),
        )

    def read(self, heads: slice, size: int, dtype: torch.dtype) -> Tensor:
        """All columns of some key heads, as floats."""
        codes, steps = self.codes[:, heads], self.steps[:, heads]
        wide = codes.unflatten(2, (steps.shape[2], size)) * steps[:, :, :, None]
        return torch.cat([wide.flatten(2, 3).to(dtype), self.rest[:, heads]], 2)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, steps and the rest."""
        return sum(x.numel() * x.element_size() for x in self)


class Int8Cache(LayerCache):
    r"""Keys and values of all tokens at about a quarter of the memory of float32, or half of bfloat16.

    A finished block is rounded once, each channel by itself: to multiples of a step, 1/127 of the largest magnitude of
    the channel in that block. So no element is off by more than half a step,

    .. math:: |\hat x - x| \le \frac{\max_{\text{block, channel}} |x|}{254}

    (and the rounding of the dtype), and no score by more than ``scale * sum(|q_i| * step_i) / 2``. The unfinished block
    and the tokens of a call itself are read as they came. Equals the run with a `KVCache` that holds rounded keys and
    values; as long as no block is finished, the run with a `KVCache`.

    Args:
        block_size: tokens that share a step. Smaller ones are more exact, and hold more steps.

    Raises:
        ValueError: NaN or inf in a key or value, or another batch than before.
        UnsupportedError: a crop into a block that is rounded.

    Cost: memory ``(1 + 4 / block_size)`` bytes for each element. A step reads these, and writes the floats of one key
    head at a time (of all, where heads must be run together): it saves memory, not time.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = Int8Cache(16), torch.randn(1, 2, 160, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.nbytes, 160 * 2 * 16 * 4  # as float32
        (6400, 20480)

    Reference: Liu et al. 2024, arXiv:2402.02750 (KIVI), which rounds keys by channel too.
    """

    hands_on_all = True

    def __init__(self, block_size: int = 64):
        check_count("Int8Cache", "block_size", block_size)
        self.block_size = block_size
        self._keys: Rounded | None = None
        self._values: Rounded | None = None
        self._places = Places()
        self._traffic = Traffic(0, 0)

    @property
    def length(self) -> int:
        return self._places.length

    @property
    def nbytes(self) -> int:
        held = sum(x.nbytes for x in (self._keys, self._values) if x is not None)
        return held + self._places.nbytes

    @property
    def traffic(self) -> Traffic:
        """Codes and steps count as they are held."""
        return self._traffic

    def positions(self, q_len: int) -> range | Tensor:
        check_count("Int8Cache.positions", "q_len", q_len, 0)
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
        where = "Int8Cache.attend"
        check_mechanism(where, mechanism)
        check_dense_mask(where, mask)
        check_new(where, query, key, value)
        self._check(key, value, where)
        batch, heads, q_len, _ = query.shape
        kv_heads = key.shape[1]
        rule = None if mask is None else as_mask(mask, (batch, heads, q_len, self.length + q_len), where=where)
        places, q_positions = self._places.extended(positions, batch, q_len, key.device, where)
        keys = Rounded.empty(key) if self._keys is None else self._keys
        values = Rounded.empty(value) if self._values is None else self._values
        apart = is_plain(mechanism) and not tells_heads_apart(rule)
        outs = []
        for g in range(kv_heads) if apart else (0,):
            own = slice(g, g + 1) if apart else slice(0, kv_heads)
            group = slice(g * heads // kv_heads, (g + 1) * heads // kv_heads) if apart else slice(0, heads)
            k, v = (
                torch.cat([held.read(own, self.block_size, new.dtype), new[:, own]], 2)
                for held, new in ((keys, key), (values, value))
            )
            matrix = mechanism(query[:, group], k, mask=rule, q_positions=q_positions, kv_positions=places.held)
            outs.append(matrix.matmul(v, dropout_p=dropout_p))
        new_bytes = sum(x.numel() * x.element_size() for x in (key, value))
        read = keys.nbytes + values.nbytes + new_bytes
        self._keys = keys.extended(key.detach(), self.block_size)
        self._values = values.extended(value.detach(), self.block_size)
        self._places, self._traffic = places, Traffic(read, new_bytes)
        return torch.cat(outs, 1)

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        batch = None if self._keys is None else len(self._keys.rest)
        index = checked_rows("Int8Cache.reorder", rows, batch)
        if self._keys is None or self._values is None:
            return
        index = index.to(self._keys.rest.device)
        self._keys, self._values = (Rounded(*(x[index] for x in held)) for held in (self._keys, self._values))
        self._places = self._places.reordered(index)

    def crop(self, length: int) -> None:
        """Forget the last columns, as far as they are not rounded; or everything."""
        where = "Int8Cache.crop"
        check_crop(where, length, self.length)
        if length == 0:
            self._keys, self._values, self._places = None, None, Places()
            return
        if self._keys is None or self._values is None:
            return
        rounded = self._keys.codes.shape[2]
        if length < rounded:
            reason = f"the first {rounded} columns are rounded in blocks, which cannot be opened again"
            hint = "fork() before the tokens that may have to go; KVCache() crops anywhere"
            raise unsupported(where, f"length={length}", [reason], hint=hint)
        self._keys, self._values = (
            held._replace(rest=held.rest[:, :, : length - rounded].clone()) for held in (self._keys, self._values)
        )
        self._places = self._places.cropped(length)

    def fork(self) -> Self:
        other = type(self)(self.block_size)
        other._keys, other._values, other._places = self._keys, self._values, self._places
        other._traffic = self._traffic
        return other

    def __repr__(self) -> str:
        return f"Int8Cache({self.block_size}, length={self.length}, nbytes={self.nbytes})"

    def _check(self, key: Tensor, value: Tensor, where: str) -> None:
        for name, held, new in (("key", self._keys, key), ("value", self._values, value)):
            if held is not None:
                old = held.rest
                like = (old.shape[0], old.shape[1], old.shape[3], old.dtype, old.device)
                given = (new.shape[0], new.shape[1], new.shape[3], new.dtype, new.device)
                if like != given:
                    raise other_cache(where, name, like, given)
            if not bool(new.detach().isfinite().all()):
                hint = "rounded beside others, a NaN or inf would spoil its whole block; KVCache() holds it"
                raise value_error(where, name, "be finite", "NaN or inf", hint=hint)
