"""Int8Cache: keys and values of all tokens, rounded to 8 bits block by block."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.caches.attend_call import Call, Traffic
from saccade.caches.cache import LayerCache
from saccade.caches.files.file_contents import Contents, Leaf
from saccade.caches.per_head import attend_by_head
from saccade.positions.token_positions import Positions
from saccade.support.errors import value_error
from saccade.support.numerics import is_finite, not_finite, wide_dtype
from saccade.support.validation import check_int

_MOST = 127  # the largest code; the smallest is -127
_AT_ONCE = 1 << 21  # bytes of keys that are converted at once, small enough to stay in a core's cache


class Rounded(NamedTuple):
    """Keys or values, rounded to int8 in finished blocks and exact in the unfinished block; shared by forks.

    Args:
        codes: int8 ``[batch, kv_heads, blocks * block_size, width]``.
        steps: float32 or float64 ``[batch, kv_heads, blocks, width]``: the step between adjacent codes in each block
            and channel.
        zeros: the number that code 0 represents, with the shape of ``steps``.
        rest: unrounded columns of the unfinished block, ``[batch, kv_heads, fewer than block_size, width]``.
    """

    codes: Tensor
    steps: Tensor
    zeros: Tensor
    rest: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> Rounded:
        """Return an empty int8 store for tensors of this shape, dtype and device."""
        batch, heads, _, width = like.shape
        none = like.new_empty(batch, heads, 0, width)
        numbers = none.to(wide_dtype(like.dtype))
        return cls(none.to(torch.int8), numbers, numbers, none)

    def extended(self, new: Tensor, size: int) -> Rounded:
        """Return this int8 store with new columns. Blocks that are now full are rounded to int8."""
        rest = torch.cat([self.rest, new], 2)
        full = rest.shape[2] // size
        if not full:
            return self._replace(rest=rest)
        blocks = rest[:, :, : full * size].unflatten(2, (full, size)).to(self.steps.dtype)
        least, most = blocks.amin(3), blocks.amax(3)
        # Halves, since the sum or the difference may overflow the dtype.
        zeros, steps = most / 2 + least / 2, (most / 2 - least / 2) / _MOST
        levels = (blocks - zeros[:, :, :, None]) / steps.clamp(min=torch.finfo(steps.dtype).tiny)[:, :, :, None]
        codes = levels.round().clamp(-_MOST, _MOST).to(torch.int8)
        return Rounded(
            torch.cat([self.codes, codes.flatten(2, 3)], 2),
            torch.cat([self.steps, steps], 2),
            torch.cat([self.zeros, zeros], 2),
            rest[:, :, full * size :].clone(),
        )

    def read(self, new: Tensor, rows: slice) -> Tensor:
        """Return the stored columns of some key heads as floats, then new columns, ``[rows, columns, width]``."""
        codes, steps, zeros, rest = (x.flatten(0, 1)[rows] for x in self)
        blocks = steps.shape[1]
        wide = codes.view(len(codes), blocks, codes.shape[1] // max(1, blocks), codes.shape[2]) * steps[:, :, None]
        wide += zeros[:, :, None]
        return torch.cat([wide.flatten(1, 2).to(new.dtype), rest, new.flatten(0, 1)[rows]], 1)


class Int8Cache(LayerCache):
    r"""Keys and values of all tokens in about a quarter of the memory of float32, or half that of bfloat16.

    A finished block is rounded once, separately for each channel, to 255 levels that are evenly spaced from the
    smallest to the largest number of the channel in that block. So the error of an element is at most half a step,

    .. math:: |\hat x - x| \le \frac{\max_{\text{block, channel}} x - \min_{\text{block, channel}} x}{508}

    (plus the rounding of the dtype), and the error of a score is at most ``scale * sum(|q_i| * step_i) / 2``. The
    unfinished block and the new tokens of a call are read unrounded. The result equals the run with a `KVCache` of
    rounded keys and values, and is exact until the first block is finished.

    Args:
        block_size: number of tokens that share a step. Smaller blocks are more accurate, but need memory for more
            steps.

    Raises:
        ValueError: NaN or inf in a key or value, or a different batch size than before.
        UnsupportedError: a crop into a rounded block.

    Cost: memory ``(1 + 8 / block_size)`` bytes for each element. A decoding step reads the codes and writes them as
    floats, a few key heads at a time (all heads if they must run together). This saves memory, but not time.

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
            Leaf(f"{name}.zeros", f"batch kv_heads blocks {width}", "wide", is_optional=True),  # in files
        )
    )
    numbers = ("length",)
    equivalent_run = "the run with a KVCache that holds rounded keys and values"
    keeps_order = exposes_all_keys = True

    _tokens: Positions

    def __init__(self, block_size: int = 64):
        super().__init__()
        self.block_size = check_int("block_size", block_size)

    def advance(self, call: Call) -> Tensor:
        new = {"key": call.key, "value": call.value}
        stored = {name: self._rounded(name) if self._state else Rounded.empty(x) for name, x in new.items()}

        def read(rows: slice) -> tuple[Tensor, Tensor]:
            return stored["key"].read(call.key, rows), stored["value"].read(call.value, rows)

        batch, kv_heads, q_len, width = call.key.shape
        each = max(1, _AT_ONCE // max(1, (self.length + q_len) * width * call.key.element_size()))
        portions = [slice(start, start + each) for start in range(0, batch * kv_heads, each)]
        (out,) = attend_by_head(call, kv_heads, read, None, call.product, portions=portions)
        moved = call.key.nbytes + call.value.nbytes
        self._traffic = Traffic(sum(x.nbytes for x in self._state.values()) + moved, moved)
        for name, x in new.items() if q_len else ():
            parts = stored[name].extended(x.detach(), self.block_size)._asdict()
            self._state |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        return out

    def _rounded(self, name: str) -> Rounded:
        """Return the int8 store of keys or values, as named."""
        return Rounded(*(self._state[f"{name}.{part}"] for part in Rounded._fields))

    def _check_new(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super()._check_new(query, key, value)
        for name, x in (("key", key), ("value", value)):
            if not is_finite(x) and bool(not_finite(x).any()):
                hint = "rounded beside others, a NaN or inf would spoil its whole block; KVCache() holds it"
                raise value_error(name, "be finite", "NaN or inf", hint=hint)

    def _why_not_cropped(self, length: int) -> str | None:
        rounded = self._state["key.codes"].shape[2]
        if length >= rounded:
            return None
        return f"the first {rounded} columns are rounded in blocks, which cannot be opened again"

    def _crop(self, length: int) -> None:
        for name in ("key.rest", "value.rest"):
            self._state[name] = self._state[name][:, :, : length % self.block_size].clone()
        self._tokens = self._tokens.cropped(length)

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        for name in ("key", "value"):  # in files of version 0.1, code 0 represents 0
            state.setdefault(f"{name}.zeros", torch.zeros_like(state[f"{name}.steps"]))

    def _sizes(self, contents: Contents) -> dict[str, int]:
        length, size = contents.count("length"), self.block_size
        blocks, rest = divmod(length, size)
        return {"columns": length, "rounded": blocks * size, "blocks": blocks, "rest": rest}
