"""Varlen: a kernel for packed sequences that calls torch's ``varlen_attn``, flash attention on GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request, Verdict, disabled_reasons, reasons_unless_dot_product
from saccade.engine.memory_accounting import Cost, MemoryUse
from saccade.support.language import Message
from saccade.support.torch_modes import is_transformed, unobserved

if TYPE_CHECKING:
    from saccade.masks.convert.patterns import PackedPattern

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST, _EVEN = 256, 8  # largest head width of flash kernels; all widths are multiples of the second


class Varlen(Kernel):
    """Exact attention over packed sequences, each with a window: causal, sliding, or the full sequence.

    Cost: time grows with the number of pairs in the windows, and memory beyond inputs and outputs with the length. If
    some positions belong to no sequence, the positions in sequences are copied first.
    """

    name = "varlen"
    is_checked = True
    has_second_derivatives = False
    supports_masked_rows = False
    devices: tuple[str, ...] = ("cuda",)

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why torch's ``varlen_attn`` does not support these inputs, or why ``impl="auto"`` should skip it."""
        why = []
        if inputs.device.type not in self.devices:
            why.append(f"it runs on {' and '.join(self.devices)}, not on {inputs.device.type}")
            if request.impl == "auto":
                return Verdict(tuple(why))
        if inputs.query.dtype not in _DTYPES:
            why.append(Message("it has no {dtype}", dtype=str(inputs.query.dtype).removeprefix("torch.")))
        if 0 in inputs.shape or inputs.query.shape[3] > _WIDEST:
            why.append(f"it needs heads at most {_WIDEST} wide, and no empty inputs")
        elif _packed_mask(inputs) is None:
            why.append("it supports windows over full sequences, in Documents or alone, with as many queries as keys")
        if not inputs.scale > 0.0:
            why.append("it needs a scale above 0")
        if request.dropout_p > 0.0:
            why.append("it has no dropout")
        if inputs.softcap is not None or inputs.bias is not None:
            why.append("it has no softcap and no bias")
        why += reasons_unless_dot_product(inputs)
        if is_transformed():
            why.append("it is not run inside transforms of torch.func")
        if request.needs_lse and torch.is_grad_enabled():  # torch silently drops a gradient through the lse
            why.append("its lse has no gradient")
        return Verdict(tuple(why), disabled_reasons(inputs))

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs in the windows of all sequences."""
        packed, heads = _packed_mask(inputs), inputs.shape[1]
        assert packed is not None  # `verdict` has checked
        items = packed.lengths * (inputs.shape[0] if len(packed.lengths) == 1 else 1)
        return heads * sum(_pairs_in_window(length, packed.left, packed.right) for item in items for length in item)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the number of pairs and the bytes of the results. The memory that torch uses internally is unknown."""
        batch, heads, q_len, _ = inputs.shape
        results = batch * heads * q_len * (value_dim * inputs.query.dtype.itemsize + 4)
        return Cost(1, self.pairs(inputs), MemoryUse(results, results))

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor | None]:
        """Run torch's ``varlen_attn`` and return its output and lse."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: PLC0415  only in later versions of torch

        texts, width = _cached_sequences(inputs), value.shape[3]
        batch, heads, length, _ = inputs.shape
        wide = -(-max(inputs.query.shape[3], width) // _EVEN) * _EVEN
        q, k, v = (texts.rows_of(F.pad(x, (0, wide - x.shape[3]))) for x in (inputs.query, inputs.key, value))
        window = tuple(-1 if side is None else side for side in (texts.packed.left, texts.packed.right))
        rows, lse = varlen_attn(
            q,
            k,
            v,
            texts.ends,
            texts.ends,
            texts.longest,
            texts.longest,
            return_aux=AuxRequest(lse=True),
            scale=inputs.scale,
            window_size=cast("tuple[int, int]", window),
            **_gqa_option(varlen_attn, heads != inputs.key.shape[1]),
        )
        out = texts.scatter(rows, 0.0, batch * length).view(batch, length, heads, wide).transpose(1, 2)
        # The lse's memory layout is [heads, rows], contrary to torch's documentation.
        of_rows = texts.scatter(lse.reshape(heads, -1).T, -torch.inf, batch * length).view(batch, length, heads)
        return out if wide == width else out[..., :width], of_rows.transpose(1, 2)


@cache
def _gqa_option(function: Callable[..., Any], is_grouped: bool) -> dict[str, Any]:
    """Return the keyword argument with which ``varlen_attn`` allows fewer key heads than query heads; {} if none."""
    return {"enable_gqa": is_grouped} if "enable_gqa" in inspect.signature(function).parameters else {}


class _Sequences(NamedTuple):
    """Packed sequences in the format of ``varlen_attn``.

    Attributes:
        packed: lengths and window of the sequences.
        ends: cumulative sequence lengths over all batch items, starting with 0, int32 ``[sequences + 1]``.
        longest: number of tokens in the longest sequence.
        places: indices of the rows that belong to a sequence, int64; None if all do.
    """

    packed: PackedPattern
    ends: Tensor
    longest: int
    places: Tensor | None

    def rows_of(self, x: Tensor) -> Tensor:
        """Select the rows of all sequences, ``[B, H, L, D] -> [rows, H, D]``."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)

    def scatter(self, rows: Tensor, fill: float, count: int) -> Tensor:
        """Scatter the rows of all sequences into ``count`` rows, and fill the other rows with ``fill``."""
        if self.places is None:
            return rows
        return rows.new_full((count, *rows.shape[1:]), fill).index_copy(0, self.places, rows)


def _packed_mask(inputs: AttentionInputs) -> PackedPattern | None:
    """Return the lengths and the window of a packed-sequence mask; None for any other mask."""
    from saccade.masks.convert.patterns import packed_of  # noqa: PLC0415  imports masks that a product does not need

    _, _, q_len, kv_len = inputs.shape
    is_square = q_len == kv_len and inputs.origin == (0, 0) and inputs.row_positions is None
    return packed_of(inputs.rule, q_len) if is_square else None


def _cached_sequences(inputs: AttentionInputs) -> _Sequences:
    """Return the packed sequences for ``varlen_attn`` on the inputs' device, cached with the plan."""
    key, memo = ("texts of varlen", inputs.device), inputs.plan.memo
    if key not in memo:
        packed = _packed_mask(inputs)
        assert packed is not None  # `verdict` has checked
        with unobserved():
            memo[key] = _sequences_of(packed, inputs.shape[0], inputs.shape[2], inputs.device)
    return cast("_Sequences", memo[key])


def _sequences_of(packed: PackedPattern, batch: int, length: int, device: torch.device) -> _Sequences:
    items = packed.lengths * (batch if len(packed.lengths) == 1 else 1)
    sizes = torch.tensor([0, *(size for item in items for size in item)])
    places = None
    if any(sum(item) < length for item in items):
        parts = [torch.arange(sum(item)) + number * length for number, item in enumerate(items)]
        places = torch.cat(parts).to(device)
    return _Sequences(packed, sizes.cumsum(0).to(device, torch.int32), int(sizes.max()), places)


def _pairs_in_window(length: int, left: int | None, right: int | None) -> int:
    """Return the number of query-key pairs in a sequence if queries see ``left`` earlier and ``right`` later keys."""
    sides = (min(length - 1 if side is None else side, length - 1) for side in (left, right))
    return length + sum(side * length - side * (side + 1) // 2 for side in sides)
