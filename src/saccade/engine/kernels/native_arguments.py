"""What the compiled operations are handed, and how many bytes of it are made for the call."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.bias.relative import DistanceTerm
from saccade.engine.bias.term import HidingTerm, Term
from saccade.engine.dropout import Dropped, Words
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.native_plan import ROWS, held_by_bits, kept_bits, known_plan, packed
from saccade.engine.memory_accounting import Cost, Held, Ledger
from saccade.engine.tiles.tile_scores import index_of, positions

__all__ = ["Call", "bytes_of_backward", "chunks_of", "cost_of", "prepared"]

_LANES = 16  # widths that are multiples of it need no copies
_TASKS = 16  # sums over rows are taken in at least so many parts, where heads alone are fewer


class Call(NamedTuple):
    """Arguments of the operations, and what the gradient of a bias is read from.

    Attributes:
        arguments: those that forward and backward share.
        places: where each distance stands in the bias's source, from the last query's first key on; None by rows.
        table: how many numbers of a bias all rows share; 0 for a row of its own, -1 without a bias.
    """

    arguments: tuple[Any, ...]
    places: Tensor | None
    table: int

    @property
    def of_scores(self) -> tuple[Any, ...]:
        """The arguments without the value and what belongs to dropout."""
        return (*self.arguments[:2], *self.arguments[3:-4])

    @classmethod
    def of(cls, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> Call:
        """Tensors as the operations read them."""
        plan, term = known_plan(inputs), inputs.bias
        bits = None if plan.is_exact else kept_bits(inputs)
        visible = None
        if isinstance(term, HidingTerm):
            visible, term = packed(~term.keys), term.term
        bias, index, table = _rows_of(term, inputs.shape)
        rows, columns, threshold, kept = None, None, 0, 1.0
        if dropped is not None:
            b, h, _ = index_of(inputs, inputs.everything)
            words = Words(dropped.seed, dropped.items(b), h, *positions(inputs, inputs.everything), dropped.p)
            rows, columns, threshold = words.rows.contiguous(), words.columns.contiguous(), words.threshold
            kept = 1.0 / (1.0 - dropped.p)
        tensors = (prepared(inputs.query), prepared(inputs.key), prepared(value))
        capped = 0.0 if inputs.softcap is None else inputs.softcap
        options = (bias, index is not None, inputs.scale, capped, rows, columns, threshold, kept)
        return cls((*tensors, plan.starts, plan.runs, plan.spans, bits, visible, *options), index, table)


def prepared(x: Tensor) -> Tensor:
    """Of a width that vectors fill, its numbers side by side, its rows where a pair of numbers can be read at once."""
    if _is_ready(x):
        return x
    missing = _filled(x.shape[3]) - x.shape[3]
    return F.pad(x, (0, missing)) if missing else x.clone(memory_format=torch.contiguous_format)


def cost_of(inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
    """What a forward product costs: what `Call.of` makes, the results, and what each thread packs."""
    (batch, heads, q_len, kv_len), query, key = inputs.shape, inputs.query, inputs.key
    plan, ledger, rows = known_plan(inputs), Ledger(), batch * heads * q_len
    if not plan.is_exact:
        ledger.step(held_by_bits(inputs))
    kept = ledger.now
    if inputs.bias is not None:
        ledger.step(_held_by_bias(inputs.bias, q_len + kv_len - 1))
    if dropout_p:
        ledger.step(Held(32 * max(rows, kv_len), 4 * (rows + kv_len)))
    widths, item = (_filled(query.shape[3]), _filled(value_dim)), query.dtype.itemsize
    ledger.take(sum(0 if _is_ready(x) else math.prod(x.shape[:3]) * widths[0] * item for x in (query, key)))
    ledger.take(0 if value_dim == widths[1] else math.prod(key.shape[:3]) * widths[1] * item)
    results = rows * (widths[1] * item + 4)
    ledger.take(results)
    sizes = (batch, heads, key.shape[1], q_len, kv_len, *widths)
    ledger.touch(torch.ops.saccade_cpu.held(*sizes, query.dtype == torch.bfloat16))
    return Cost(len(plan.runs), plan.pairs(inputs), Held(ledger.most, kept + results))


def chunks_of(inputs: AttentionInputs) -> int:
    """Parts in which the backward pass sums over rows, where heads alone are fewer than its tasks."""
    batch, _, q_len, _ = inputs.shape
    return max(1, min(-(-_TASKS // max(1, batch * inputs.key.shape[1])), -(-q_len // ROWS)))


def bytes_of_backward(inputs: AttentionInputs, value_dim: int) -> int:
    """Most bytes that a backward pass holds, gradients included."""
    (batch, heads, q_len, kv_len), kv_heads = inputs.shape, inputs.key.shape[1]
    rows, widths = batch * heads * q_len, (_filled(inputs.query.shape[3]), _filled(value_dim))
    of_keys = 4 * batch * kv_heads * kv_len * sum(widths)
    narrow = inputs.query.dtype.itemsize
    rounded = 0 if narrow == 4 else narrow * (rows * widths[0] + batch * kv_heads * kv_len * sum(widths))
    return 4 * rows * (widths[0] + 1) + max((chunks_of(inputs) + 1) * of_keys, of_keys + rounded)


def _filled(width: int) -> int:
    """The next width that vectors fill."""
    return -(-max(1, width) // _LANES) * _LANES


def _is_ready(x: Tensor) -> bool:
    """Whether `prepared` has nothing to do."""
    if x.shape[3] % _LANES or not x.shape[3] or x.stride(3) != 1 or x.data_ptr() % 4:
        return False
    return x.dtype == torch.float32 or not any(step % 2 for step in x.stride()[:3])


def _rows_of(bias: Term | None, shape: tuple[int, int, int, int]) -> tuple[Tensor | None, Tensor | None, int]:
    """A bias as float32 rows, where distances stand in its source, and how many numbers all rows share."""
    if bias is None:
        return None, None, -1
    source = bias.source
    if isinstance(bias, DistanceTerm):
        q_len, kv_len = shape[2:]
        top = bias.first + q_len - 1
        index = torch.arange(top, min(top, bias.first - kv_len), -1, device=source.device)
        index = index.sub_(bias.lowest).clamp_(0, source.shape[3] - 1)
        return source.float().index_select(3, index), index, len(index)
    rows = source.float()
    rows = rows if rows.stride(3) == 1 else rows.contiguous()
    return rows, None, 0 if source.shape[2] > 1 else shape[3]


def _held_by_bias(bias: Term, distances: int) -> Held:
    """Bytes that `_rows_of` holds, and those that it returns."""
    source = bias.source
    if isinstance(bias, DistanceTerm):
        read = (8 + 4 * source.shape[0] * source.shape[1]) * distances
        return Held(read, read)
    widened = 0 if source.dtype == torch.float32 else 4 * source.numel()
    straight = 0 if source.stride(3) == 1 else 4 * source.numel()
    return Held(widened + straight, straight or widened)
