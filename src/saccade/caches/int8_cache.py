"""Int8Cache: stores the keys and values of all tokens, rounded to 8 bits block by block."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.caches.files.file_contents import Contents
from saccade.caches.rounded_cache import RoundedCache
from saccade.caches.state_tensors import Leaf
from saccade.support.numerics import wide_dtype

_MAX_CODE = 127  # the largest code; the smallest is -127


class Rounded(NamedTuple):
    """Keys or values, rounded to int8 in finished blocks and exact in the unfinished block. Forks share the tensors.

    Args:
        codes: int8 ``[batch, kv_heads, blocks * block_size, width]``.
        steps: the difference between adjacent codes in each block and channel, float32 or float64 ``[batch, kv_heads,
            blocks, width]``.
        zeros: the value that code 0 represents, with the shape of ``steps``.
        rest: unrounded columns of the unfinished block, ``[batch, kv_heads, fewer than block_size, width]``.
        size: block_size.
    """

    codes: Tensor
    steps: Tensor
    zeros: Tensor
    rest: Tensor
    size: int

    @classmethod
    def empty(cls, like: Tensor, size: int) -> Rounded:
        """Return an empty int8 store for tensors of this shape, dtype and device."""
        batch, heads, _, width = like.shape
        none = like.new_empty(batch, heads, 0, width)
        numbers = none.to(wide_dtype(like.dtype))
        return cls(none.to(torch.int8), numbers, numbers, none, size)

    def extended(self, new: Tensor) -> Rounded:
        """Return this int8 store with new columns. Blocks that are now full are rounded to int8."""
        size = self.size
        rest = torch.cat([self.rest, new], 2)
        full = rest.shape[2] // size
        if not full:
            return self._replace(rest=rest)
        blocks = rest[:, :, : full * size].unflatten(2, (full, size)).to(self.steps.dtype)
        least, most = blocks.amin(3), blocks.amax(3)
        # Divide before adding, since the sum or the difference may overflow the dtype.
        zeros, steps = most / 2 + least / 2, (most / 2 - least / 2) / _MAX_CODE
        levels = (blocks - zeros[:, :, :, None]) / steps.clamp(min=torch.finfo(steps.dtype).tiny)[:, :, :, None]
        codes = levels.round().clamp(-_MAX_CODE, _MAX_CODE).to(torch.int8)
        return Rounded(
            torch.cat([self.codes, codes.flatten(2, 3)], 2),
            torch.cat([self.steps, steps], 2),
            torch.cat([self.zeros, zeros], 2),
            rest[:, :, full * size :].clone(),
            size,
        )

    def read(self, new: Tensor, rows: slice) -> Tensor:
        """Return stored columns of a slice of key heads as floats, then the new columns, ``[rows, columns, width]``."""
        codes, steps, zeros, rest = (x.flatten(0, 1)[rows] for x in self[:4])
        blocks = steps.shape[1]
        wide = codes.view(len(codes), blocks, codes.shape[1] // max(1, blocks), codes.shape[2]) * steps[:, :, None]
        wide += zeros[:, :, None]
        return torch.cat([wide.flatten(1, 2).to(new.dtype), rest, new.flatten(0, 1)[rows]], 1)


class Int8Cache(RoundedCache):
    r"""A cache of all keys and values that needs about a quarter of the memory of float32, or half that of bfloat16.

    A finished block is rounded once. In each channel, there are 255 evenly spaced levels from the smallest to the
    largest element of that channel in the block, so the error of an element is at most half a step,

    .. math:: |\hat x - x| \le \frac{\max_{\text{block, channel}} x - \min_{\text{block, channel}} x}{508}

    (plus the rounding of the dtype), and the error of a score is at most ``scale * sum(|q_i| * step_i) / 2``. The
    unfinished block and the new tokens of a call are read unrounded. The result equals that of a `KVCache` with
    rounded keys and values, and is exact until the first block is finished.

    Args:
        block_size: number of tokens that share a step. Smaller blocks are more accurate, but need memory for more
            steps.

    Raises:
        ValueError: a key or value contains NaN or inf, or the batch size changes.
        UnsupportedError: a crop into a rounded block.

    Cost: ``(1 + 8 / block_size)`` bytes of memory for each element. A decoding step converts the codes to floats, a few
    key heads at a time (all heads if they must run together). This saves memory, but not time.

    Example:
        >>> from saccade import masks, mechanisms
        >>> cache, x = Int8Cache(16), torch.randn(1, 2, 160, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x, mask=masks.Causal())
        >>> cache.nbytes, 160 * 2 * 16 * 4  # as float32
        (7680, 20480)

    Reference: Liu et al. 2024, arXiv:2402.02750 (KIVI), which also rounds keys by channel.
    """

    settings = ("block_size",)
    leaves: ClassVar[tuple[Leaf, ...]] = tuple(
        leaf
        for name, width in (("key", "head_dim"), ("value", "value_dim"))
        for leaf in (
            Leaf(f"{name}.rest", f"batch kv_heads rest {width}"),
            Leaf(f"{name}.codes", f"batch kv_heads rounded {width}", "int8"),
            Leaf(f"{name}.steps", f"batch kv_heads blocks {width}", "wide"),
            Leaf(f"{name}.zeros", f"batch kv_heads blocks {width}", "wide", is_optional=True),  # absent in version 0.1
        )
    )

    def __init__(self, block_size: int = 64):
        super().__init__(block_size)

    def _store(self, name: str, like: Tensor) -> Rounded:
        if not self._state:
            return Rounded.empty(like, self.block_size)
        return Rounded(*self._parts(name), self.block_size)

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        for name in ("key", "value"):  # in files of version 0.1, code 0 represents 0
            state.setdefault(f"{name}.zeros", torch.zeros_like(state[f"{name}.steps"]))

    def _sizes(self, contents: Contents) -> dict[str, int]:
        length, size = contents.count("length"), self.block_size
        blocks, rest = divmod(length, size)
        return {"columns": length, "rounded": blocks * size, "blocks": blocks, "rest": rest}
