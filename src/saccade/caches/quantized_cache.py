"""QuantizedCache: stores the keys and values of all tokens in 4 or 2 bits, with several codes in a byte."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from saccade.caches.files.file_contents import Contents
from saccade.caches.rounded_cache import RoundedCache
from saccade.caches.state_tensors import Leaf
from saccade.support.errors import value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import check_choice


class Packed(NamedTuple):
    """Keys or values, rounded to a few bits in finished blocks and exact in the unfinished block. Forks share them.

    Args:
        codes: int8 ``[batch, kv_heads, blocks * block_size * bits / 8, width]``: each byte holds the codes of
            adjacent tokens, the first one in the lowest bits.
        steps: the difference between adjacent codes, float32 or float64: for each block and channel, ``[batch,
            kv_heads, blocks, width]``, or for each token, ``[batch, kv_heads, blocks * block_size, 1]``.
        zeros: the value halfway between the lowest and the highest level, with the shape of ``steps``.
        rest: unrounded columns of the unfinished block, ``[batch, kv_heads, fewer than block_size, width]``.
        size: block_size.
        bits: number of bits in a code.
        by_channel: True if each channel of a block has a step (keys); False if each token has one (values).
    """

    codes: Tensor
    steps: Tensor
    zeros: Tensor
    rest: Tensor
    size: int
    bits: int
    by_channel: bool

    @classmethod
    def empty(cls, like: Tensor, size: int, bits: int, by_channel: bool) -> Packed:
        """Return an empty quantized store for tensors of this shape, dtype and device."""
        batch, heads, _, width = like.shape
        none = like.new_empty(batch, heads, 0, width)
        numbers = none.new_empty(batch, heads, 0, width if by_channel else 1, dtype=wide_dtype(like.dtype))
        return cls(none.to(torch.int8), numbers, numbers, none, size, bits, by_channel)

    def extended(self, new: Tensor) -> Packed:
        """Return this store with new columns. Blocks that are now full are rounded and packed."""
        rest = torch.cat([self.rest, new], 2)
        full = rest.shape[2] // self.size
        if not full:
            return self._replace(rest=rest)
        axis, levels = (3 if self.by_channel else 4), (1 << self.bits) - 1
        blocks = rest[:, :, : full * self.size].unflatten(2, (full, self.size)).to(self.steps.dtype)
        some = blocks if blocks.shape[axis] else blocks.new_zeros(*blocks.shape[:4], 1)  # values may have no channels
        least, most = some.amin(axis, keepdim=True), some.amax(axis, keepdim=True)
        # Divide before adding, since the sum or the difference may overflow the dtype.
        zeros, steps = most / 2 + least / 2, (most / 2 - least / 2) / (levels / 2)
        codes = (blocks - zeros) / steps.clamp(min=torch.finfo(steps.dtype).tiny) + levels / 2
        codes = codes.round().clamp(0, levels).to(torch.uint8).flatten(2, 3)
        return self._replace(
            codes=torch.cat([self.codes, _packed(codes, self.bits)], 2),
            steps=torch.cat([self.steps, steps.flatten(2, 3)], 2),
            zeros=torch.cat([self.zeros, zeros.flatten(2, 3)], 2),
            rest=rest[:, :, full * self.size :].clone(),
        )

    def read(self, new: Tensor, rows: slice) -> Tensor:
        """Return stored columns of a slice of key heads as floats, then the new columns, ``[rows, columns, width]``."""
        packed, steps, zeros, rest = (x.flatten(0, 1)[rows] for x in self[:4])
        codes = _unpacked(packed, self.bits).to(steps.dtype) - ((1 << self.bits) - 1) / 2
        if self.by_channel:
            blocks = codes.unflatten(1, (steps.shape[1], self.size)) * steps[:, :, None] + zeros[:, :, None]
            wide = blocks.flatten(1, 2)
        else:
            wide = codes * steps + zeros
        return torch.cat([wide.to(new.dtype), rest, new.flatten(0, 1)[rows]], 1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack the uint8 codes ``[batch, heads, columns, width]`` of adjacent columns into int8 bytes."""
    several = codes.unflatten(2, (-1, 8 // bits))
    packed = torch.zeros_like(several[:, :, :, 0])
    for place in range(8 // bits):
        packed |= several[:, :, :, place] << (bits * place)
    return packed.view(torch.int8)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes ``[rows, bytes, width]`` to uint8 codes: the inverse of `_packed`."""
    whole = packed.contiguous().view(torch.uint8)
    parts = [(whole >> (bits * place)) & ((1 << bits) - 1) for place in range(8 // bits)]
    return torch.stack(parts, 2).flatten(1, 2)


class QuantizedCache(RoundedCache):
    r"""A cache of all keys and values in 4 or 2 bits. As in KIVI, keys are rounded by channel and values by token.

    A few channels of the keys are much larger than the others in all tokens, so each channel of a block of keys has its
    own step and zero. Values have no such channels, so each token of each head has its own. Elements are rounded once,
    when their block is full, to ``2 ** bits`` levels from the smallest to the largest. The error of an element is at
    most

    .. math:: |\hat x - x| \le \frac{\max x - \min x}{2\,(2^{\mathrm{bits}} - 1)}

    over its block and channel (keys), or its token and head (values), plus the rounding of the dtype. The unfinished
    block and the new tokens of a call are read unrounded. The result equals that of a `KVCache` with rounded keys and
    values, and is exact until the first block is finished.

    Models differ in how well they tolerate the error, so compare the logits with those of a `KVCache`.

    Args:
        bits: 4 or 2.
        block_size: number of tokens that are rounded together, a multiple of ``8 / bits``; also the largest number of
            tokens that stay unrounded. A step and a zero take 8 bytes for each channel of a block of keys, and for the
            value of each token and head.

    Raises:
        ValueError: a key or value contains NaN or inf, or the batch size changes.
        UnsupportedError: a crop into a rounded block.

    Cost: ``bits / 8 + 8 / block_size`` bytes of memory for each element of a key, and ``bits / 8 + 8 / value_dim`` for
    each element of a value. A decoding step unpacks the codes of a few key heads at a time. This saves memory, but not
    time.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = QuantizedCache(2, 64), torch.randn(1, 2, 256, 64)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.nbytes, 256 * 2 * 128 * 2  # as bfloat16
        (24576, 131072)

    Reference: Liu et al. 2024, arXiv:2402.02750 (KIVI), section 3.
    """

    settings = ("bits", "block_size")
    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("key.rest", "batch kv_heads rest head_dim"),
        Leaf("key.codes", "batch kv_heads bytes head_dim", "int8"),
        Leaf("key.steps", "batch kv_heads blocks head_dim", "wide"),
        Leaf("key.zeros", "batch kv_heads blocks head_dim", "wide"),
        Leaf("value.rest", "batch kv_heads rest value_dim"),
        Leaf("value.codes", "batch kv_heads bytes value_dim", "int8"),
        Leaf("value.steps", "batch kv_heads rounded one", "wide"),
        Leaf("value.zeros", "batch kv_heads rounded one", "wide"),
    )

    def __init__(self, bits: Literal[4, 2] = 4, block_size: int = 64):
        super().__init__(block_size)
        self.bits: int = check_choice("bits", bits, (4, 2), hint="Int8Cache() uses 8 bits")
        if self.block_size % (8 // self.bits):
            raise value_error(
                "block_size", f"be a multiple of {8 // self.bits}, the number of codes in a byte", block_size
            )

    def _store(self, name: str, like: Tensor) -> Packed:
        by_channel = name == "key"
        if not self._state:
            return Packed.empty(like, self.block_size, self.bits, by_channel)
        return Packed(*self._parts(name), self.block_size, self.bits, by_channel)

    def _sizes(self, contents: Contents) -> dict[str, int]:
        length, size = contents.count("length"), self.block_size
        blocks, rest = divmod(length, size)
        sizes = {"columns": length, "blocks": blocks, "rest": rest, "rounded": blocks * size, "one": 1}
        return sizes | {"bytes": blocks * size * self.bits // 8}
