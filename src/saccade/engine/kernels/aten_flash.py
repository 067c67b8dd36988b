"""Wrapper of torch's private flash operation for CPUs, with guards against its pitfalls. Only this file calls it.

``aten._scaled_dot_product_flash_attention_for_cpu`` returns the log-sum-exp and has a backward operation. Exact tiled
attention needs both, and no public function offers them. Pitfalls in torch 2.13:

- zero lengths and zero heads end the *process*;
- a head dimension with a stride other than 1 is read out of bounds;
- a row whose scores are all -inf, masked or not, gets lse 0, and -inf in the lse turns gradients into NaN;
- the causal flag aligns upper-left;
- masked scores, already -inf, are multiplied by the scale, which must therefore be above 0;
- scores that are all NaN give 0 and lse 0 if they fit into one vector register, unless something is added to them;
- widths of key and value must be equal;
- if the number of key heads does not divide the number of query heads, the result is meaningless.

Callers pass checked shapes; this file handles the rest. `pairs` and `held` compute the cost of a call from the block
sizes of the operation (``cpu_flash_attention`` in torch's ``FlashAttentionKernel.cpp``). They do not include the
packed copies of float16 keys that it creates on CPUs whose AMX supports float16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from saccade.engine.memory_accounting import Ledger, MemoryUse
from saccade.support.numerics import is_finite, wide_dtype
from saccade.support.torch_modes import unobserved

_FEW = 64  # number of columns: more than fit into any vector register
_NOTHING = {x: torch.zeros(1, 1, 1, 1, dtype=x) for x in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
_FOLDED = 32  # rows that the operation processes at a time, including the heads of a group
_KEYS_AT_ONCE = 512
_PACKED = 64  # smallest numbers of rows and keys for which it may pack keys and values
_ROWS_AGAIN = 256  # number of rows whose scores are recomputed at a time


def forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, empty: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the output and the lse of one tile with torch's flash operation.

    Args:
        q: ``[B, H, R, D]``.
        k, v: ``[B, G, C, D]``. All have the same width, at least 1, and stride 1 in the last axis.
        added: additive mask or bias, ``[B | 1, H | 1, R, C]``; -inf masks a pair.
        empty: rows in which ``added`` masks every column, bool ``[B | 1, H | 1, R]``; None if there are none.
        causal: mask column c for row r where c > r. Requires R == C and no ``added``.
        scale: factor of the scores, above 0.

    Returns:
        Output ``[B, H, R, D]``, and the lse ``[B, H, R]`` in float32 (float64 for float64), -inf for empty rows.
    """
    (batch, heads, rows, _), (_, groups, columns, _) = q.shape, k.shape
    if not batch * heads * rows * groups * columns:
        wide = wide_dtype(q.dtype)
        return torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=wide)
    if heads != groups:
        if _folds_heads(q.shape, groups, causal):
            return _forward_folded(q, k, v, added, empty, scale)
        k, v = _with_query_heads(q, k), _with_query_heads(q, v)
    if added is None and columns < _FEW:
        added = _NOTHING[q.dtype]
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    lse = lse if empty is None else lse.masked_fill(empty, -math.inf)
    if lse.count_nonzero().item() < lse.numel():
        _mark_empty_rows(q, k, added, causal, scale, out, lse)
    return out, lse


def forward_of_short(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """Compute the output and the lse of short sequences, or return None if a guard of `forward` may be needed.

    The arguments are those of `forward`, without empty tensors and with as many key heads as query heads.
    """
    is_contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    if not is_contiguous and not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
    if lse.count_nonzero().item() < lse.numel() or (causal and not is_finite(out)):
        return None
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients with respect to q, k and v for one tile with torch's flash operation.

    ``out`` and ``lse`` belong to *complete* rows, although the tile may contain only a part of their keys. Rows with
    +inf in the lse contribute no gradient.
    """
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    wide_k, wide_v = (k, v) if q.shape[1] == k.shape[1] else (_with_query_heads(q, k), _with_query_heads(q, v))
    gq, gk, gv = _backward(grad_out, q, wide_k, wide_v, out, lse, 0.0, causal, attn_mask=added, scale=scale)
    if wide_k is not k:
        gk, gv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (gk, gv))
    return gq, gk, gv


def pairs(rows: int, columns: int, causal: bool) -> int:
    """Return the number of query-key pairs per head whose scores torch's flash operation computes.

    With its causal flag, the operation skips the blocks of keys after the last row of a block.
    """
    if not causal:
        return rows * columns
    height, width = _block_size(rows, columns)
    total = 0
    for first in range(0, rows, height):
        stop = min(first + height, rows)
        total += (stop - first) * min(-(-stop // width) * width, columns)
    return total


def held(
    q: Sequence[int],
    kv_heads: int,
    columns: int,
    dtype: torch.dtype,
    causal: bool,
    added: tuple[int, int] | None,
    threads: int,
) -> MemoryUse:
    """Return the peak memory of torch's flash operation in a call to `forward`, in bytes, including results.

    Args:
        q: (batch, heads, rows, width).
        kv_heads, columns: numbers of heads and columns of the keys.
        dtype: dtype of all tensors.
        causal: as for `forward`.
        added: numbers of batch items and heads that ``added`` has in `forward`; None if there is none.
        threads: number of threads that torch uses.
    """
    batch, heads, rows, width = q
    wide = 8 if dtype == torch.float64 else 4
    result = batch * heads * rows * (width * dtype.itemsize + wide)
    if batch * heads * rows * width * kv_heads * columns == 0:
        return MemoryUse(result, result)
    ledger = Ledger()
    folds = kv_heads != heads and _folds_heads(q, kv_heads, causal)
    if folds and added is not None and rows * added[1] > 1:
        ledger.allocate(added[0] * heads * rows * columns * dtype.itemsize)
    elif kv_heads != heads and not folds and not reads_groups():
        ledger.allocate(2 * batch * heads * columns * width * dtype.itemsize)
    height, span = _block_size(heads // kv_heads * rows if folds else rows, columns)
    each = height * (span + 2 + width) * wide + (height * span * dtype.itemsize if dtype.itemsize < wide else 0)
    if _packs_keys(dtype) and min(rows, columns) >= _PACKED:
        odd = width % 2
        ledger.allocate(batch * kv_heads * ((width + odd) * columns + width * (columns + columns % 2)) * dtype.itemsize)
        each += (span * width + odd * height * (width + odd)) * dtype.itemsize
    with ledger.holding(result):
        ledger.touch(threads * each)
        ledger.touch(result if folds and kv_heads > 1 and rows > 1 else 0)
    return MemoryUse(ledger.most, result)


def bytes_of_backward(rows: int, columns: int, item: int) -> int:
    """Return the bytes per thread that torch's flash operation uses in the backward pass."""
    height, span = _block_size(rows, columns)
    wide = max(item, 4)
    return 2 * height * span * (wide + (item if item < wide else 0))


def _block_size(rows: int, columns: int) -> tuple[int, int]:
    """Return the numbers of rows and of keys in a block of torch's flash operation."""
    return min(rows, 256 if rows >= 768 else 64 if rows >= 192 else 32), min(columns, _KEYS_AT_ONCE)


def _packs_keys(dtype: torch.dtype) -> bool:
    """Return whether torch's flash operation packs keys and values for the processor's matrix instructions (AMX)."""
    tests = {torch.bfloat16: torch.cpu._is_amx_tile_supported, torch.float16: torch.cpu._is_amx_fp16_supported}
    return dtype in tests and tests[dtype]()


@cache
def multiplies_slowly(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies matrices of a half-precision dtype in plain loops on this processor.

    oneDNN has fast products of bfloat16 on processors with AVX-512, and of float16 on a few others. Without fast
    products, the flash operation's backward pass takes three to five times as long as in float32.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if not torch.backends.mkldnn.is_available():
        return True
    ops = torch.ops.mkldnn
    return not (ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported())


def _folds_heads(q: Sequence[int], kv_heads: int, causal: bool) -> bool:
    """Return whether torch's flash operation should receive the query heads of a group as rows of a single head."""
    _, heads, rows, _ = q
    return heads // kv_heads * rows <= _FOLDED and (rows == 1 or not causal)


def _forward_folded(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, empty: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run torch's flash operation with each group's query heads as rows, so that keys are read once per group.

    Decoding has one row per head, and the operation is slow for single rows.
    """
    (batch, heads, rows, width), groups = q.shape, k.shape[1]
    share = heads // groups
    if added is not None and rows * added.shape[1] > 1:
        # Repeat a mask that all heads share for each head of a group; a single row needs no repetition.
        per_head = added if added.shape[1] == heads else added.expand(-1, heads, -1, -1)
        added = per_head.reshape(per_head.shape[0], groups, share * rows, per_head.shape[3])
    elif added is not None:
        added = added.expand(-1, -1, share, -1)
    out, lse = forward(q.reshape(batch, groups, share * rows, width), k, v, added, None, False, scale)
    out, lse = out.reshape(batch, heads, rows, width), lse.reshape(batch, heads, rows)
    return out, lse if empty is None else lse.masked_fill(empty, -math.inf)


def _with_query_heads(q: Tensor, x: Tensor) -> Tensor:
    """Expand keys or values to the query's number of heads if torch's flash operation does not support groups."""
    share = q.shape[1] // x.shape[1]
    if reads_groups():
        return x
    return x[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2)


def _mark_empty_rows(
    q: Tensor, k: Tensor, added: Tensor | None, causal: bool, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Set the lse of empty rows, for which torch's flash operation returns 0, to -inf in place."""
    share, columns = q.shape[1] // k.shape[1], torch.arange(k.shape[2])
    candidates = (lse == 0.0) & (out == 0.0).all(-1)
    for b, h in candidates.any(-1).nonzero().tolist():
        for rows in candidates[b, h].nonzero()[:, 0].split(_ROWS_AGAIN):
            scores = q[b, h, rows].to(lse.dtype) @ k[b, h // share].to(lse.dtype).mT * scale
            if added is not None:
                mask = added[b % len(added), h % added.shape[1]]
                scores = scores + (mask[rows] if len(mask) > 1 else mask)
            if causal:
                scores = scores.masked_fill(columns > rows[:, None], -math.inf)
            lse[b, h, rows[(scores == -math.inf).all(-1)]] = -math.inf


@cache
def is_available() -> bool:
    """Return whether torch has the flash operation, with the expected arguments and with correct results."""
    if _forward is None or _backward is None:
        return False
    # The caller's modes, autocast, default dtype and default device must not change the result.
    with unobserved(), torch.autocast("cpu", enabled=False):
        x = torch.linspace(-1.0, 1.0, 24, dtype=torch.float32, device="cpu").reshape(1, 2, 3, 4)
        try:
            out, lse = _forward(x, x, x, 0.0, False, attn_mask=torch.zeros_like(x[:, :, :, :3]), scale=0.5)
            grad, _, _ = _backward(out, x, x, x, out, lse, 0.0, False, attn_mask=None, scale=0.5)
        except (RuntimeError, TypeError):
            return False
        weights = (0.5 * x @ x.mT).softmax(-1)
        return bool(torch.allclose(out, weights @ x, atol=1e-5)) and bool(torch.isfinite(grad).all())


@cache
def reads_groups() -> bool:
    """Return whether torch's flash operation supports several query heads per key head (torch 2.13 does)."""
    with unobserved(), torch.autocast("cpu", enabled=False):
        q = torch.linspace(-1.0, 1.0, 48, dtype=torch.float32, device="cpu").reshape(1, 4, 3, 4)
        k = torch.linspace(1.0, -0.5, 24, dtype=torch.float32, device="cpu").reshape(1, 2, 3, 4)
        wide = k.repeat_interleave(2, 1)
        try:
            out, lse = _forward(q, k, k, 0.0, False, attn_mask=None, scale=0.5)
            expected, _ = _forward(q, wide, wide, 0.0, False, attn_mask=None, scale=0.5)
            _, gk, _ = _backward(out, q, k, k, out, lse, 0.0, False, attn_mask=None, scale=0.5)
        except (RuntimeError, TypeError):
            return False
        return gk.shape == k.shape and bool(torch.allclose(out, expected, atol=1e-6))


_NAME = "_scaled_dot_product_flash_attention_for_cpu"
# The binding in the torch module starts a few microseconds faster than the one in torch.ops.
_forward: Any = getattr(torch, _NAME, None) or getattr(torch.ops.aten, _NAME, None)
_backward: Any = getattr(torch.ops.aten, f"{_NAME}_backward", None)
