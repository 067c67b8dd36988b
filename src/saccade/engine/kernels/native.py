"""The compiled kernel of saccade-cpu: one parallel region a product, forward and backward, for processors."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.bias_terms import DenseTerm, HidingTerm, Term, summed_to
from saccade.engine.distance_bias import DistanceTerm
from saccade.engine.dropout import Dropped, Words
from saccade.engine.ingredients import Ingredients
from saccade.engine.kernels.kernel import NO_FORWARD_DERIVATIVES, Backward, KernelByHand, Tensors
from saccade.engine.kernels.native_plan import ROWS, NativePlan, kept_plan, packed
from saccade.engine.memory import Cost, Held
from saccade.engine.tiles import index_of, positions
from saccade.transforms import has_forward_derivatives

__all__ = ["Native", "abilities"]

_FEW_KEYS = 40  # below which, and below so many pairs in all heads, other kernels start sooner
_FEW_PAIRS = {torch.float32: 8192, torch.bfloat16: 1024}
_LANES = 16  # widths that are multiples of it need no copies
_TASKS = 16  # sums over rows are taken in at least so many parts, where heads alone are fewer
_HALF = 3  # of `abilities`: from here on products of bfloat16


@cache
def abilities() -> int | None:
    """What the compiled kernel may use: 0 plain, 1 AVX2, 2 AVX-512, 3 its bfloat16, 4 AMX; None: not installed."""
    try:
        library: Any = import_module("saccade_cpu")
    except ImportError:
        return None
    return int(library.abilities())


@cache
def _is_on() -> bool:
    return os.environ.get("SACCADE_CPU", "on") != "off" and abilities() is not None


class Native(KernelByHand):
    """Exact attention by compiled code: a few rows and all keys that they see at a time.

    Cost: time grows with the pairs that the mask allows, dropout, softcaps and biases included; memory beside inputs
    and outputs is that of the keys and values packed, for each thread.
    """

    name = "native"
    is_choosy = True

    def suits(self, given: Ingredients) -> bool:
        """Where it is installed and switched on, and there is more to do than to pack a few keys."""
        batch, heads, q_len, kv_len = given.shape
        pairs = batch * heads * q_len * kv_len
        return _is_on() and kv_len >= _FEW_KEYS and pairs >= _FEW_PAIRS.get(given.query.dtype, 0)

    def reasons(self, given: Ingredients, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs; empty if it can."""
        found = abilities()
        if found is None:
            return ("saccade-cpu is not installed: pip install saccade-cpu",)
        why = []
        dtype = given.query.dtype
        if not given.query.is_cpu:
            why.append(f"it runs on CPUs, not on {given.query.device.type}")
        if dtype is not torch.float32 and not (dtype is torch.bfloat16 and found >= _HALF):
            why.append(f"it has no {str(dtype).removeprefix('torch.')} on this processor")
        if given.tile_function is not None:
            why.append("it has dot products only, and maps that end in one")
        if given.rule.asks_functions:
            why.append("its mask calls a function")
        if given.bias is not None:
            why += _reasons_of_bias(given.bias, given.shape)
        if has_forward_derivatives():
            why.append(NO_FORWARD_DERIVATIVES)
        if not why and kept_plan(given) is None:
            why.append("its mask says nothing exact about its rows, and a bit for each pair is too much")
        return tuple(why)

    def cost(self, given: Ingredients, value_dim: int, dropout_p: float) -> Cost:
        """What the blocks compute and hold."""
        plan = _plan(given)
        batch, heads, q_len, kv_len = given.shape
        results = batch * heads * q_len * (value_dim * given.query.dtype.itemsize + 4)
        widths = (-(-max(1, size) // _LANES) * _LANES for size in (given.query.shape[3], value_dim))
        sizes = (batch, heads, given.key.shape[1], q_len, kv_len, *widths)
        held = torch.ops.saccade_cpu.held(*sizes, given.query.dtype == torch.bfloat16)
        return Cost(len(plan.runs), plan.pairs(given), Held(results + held, results))

    def pairs(self, given: Ingredients) -> int:
        """Query-key pairs whose scores the blocks compute."""
        return _plan(given).pairs(given)

    def forward(self, given: Ingredients, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        call = _Call.of(given, value, dropped)
        out, lse = torch.ops.saccade_cpu.forward(*call.arguments)
        out = out if out.shape[3] == value.shape[3] else out[..., : value.shape[3]]
        if isinstance(given.bias, HidingTerm):
            out = out.masked_fill(given.bias.queries[..., None], 0.0)
            lse = lse.masked_fill(given.bias.queries, -torch.inf)
        return out, lse

    def backward(
        self, given: Ingredients, value: Tensor, dropped: Dropped | None, results: Backward, wanted: tuple[bool, ...]
    ) -> Tensors:
        """Gradients of query, key, value and the bias's source."""
        call = _Call.of(given, value, dropped)
        batch, _, q_len, _ = given.shape
        grad_out = _prepared(results.grad_out)
        delta = (grad_out[..., : value.shape[3]].float() * results.out.float()).sum(-1)
        if results.grad_lse is not None:
            delta = delta - results.grad_lse
        chunks = max(1, min(-(-_TASKS // max(1, batch * given.key.shape[1])), -(-q_len // ROWS)))
        table = call.table if wanted[3] else -1
        lse = results.lse.contiguous()
        of_query, of_key, of_value, of_bias = torch.ops.saccade_cpu.backward(
            *call.arguments, grad_out, lse, delta.contiguous(), chunks, table
        )
        width = given.query.shape[3]
        bias = _grad_of_bias(given.bias, of_bias, call) if wanted[3] and given.bias is not None else None
        others = (None,) * (len(wanted) - 4)
        return (
            of_query[..., :width],
            of_key.sum(0)[..., :width],
            of_value.sum(0)[..., : value.shape[3]],
            bias,
            *others,
        )


class _Call(NamedTuple):
    """Arguments of the operations, and what the gradient of a bias is read from.

    Attributes:
        arguments: those that forward and backward share.
        places: where each distance stands in the bias's source, from the last query's first key on; None by rows.
        table: how many numbers of a bias all rows share; 0 for a row of its own, -1 without a bias.
    """

    arguments: tuple[Any, ...]
    places: Tensor | None
    table: int

    @classmethod
    def of(cls, given: Ingredients, value: Tensor, dropped: Dropped | None) -> _Call:
        """Tensors as the operations read them."""
        plan, term = _plan(given), given.bias
        visible = None
        if isinstance(term, HidingTerm):
            visible, term = packed(~term.keys), term.term
        bias, index, table = _rows_of(term, given.shape)
        rows, columns, threshold, kept = None, None, 0, 1.0
        if dropped is not None:
            b, h, _ = index_of(given, given.everything)
            words = Words(dropped.seed, b, h, *positions(given, given.everything), dropped.p)
            rows, columns, threshold = words.rows.contiguous(), words.columns.contiguous(), words.threshold
            kept = 1.0 / (1.0 - dropped.p)
        tensors = (_prepared(given.query), _prepared(given.key), _prepared(value))
        capped = 0.0 if given.softcap is None else given.softcap
        options = (bias, index is not None, given.scale, capped, rows, columns, threshold, kept)
        return cls((*tensors, plan.starts, plan.runs, plan.spans, plan.bits, visible, *options), index, table)


def _plan(given: Ingredients) -> NativePlan:
    plan = kept_plan(given)
    assert plan is not None  # `reasons` has looked
    return plan


def _prepared(x: Tensor) -> Tensor:
    """Of a width that vectors fill, its numbers side by side, its rows where a pair of numbers can be read at once."""
    if x.shape[3] % _LANES or not x.shape[3]:
        return F.pad(x, (0, max(1, -(-x.shape[3] // _LANES)) * _LANES - x.shape[3]))
    is_straight = x.stride(3) == 1 and (x.dtype == torch.float32 or not any(step % 2 for step in x.stride()[:3]))
    return x if is_straight and x.data_ptr() % 4 == 0 else x.contiguous()


def _reasons_of_bias(bias: Term, shape: tuple[int, int, int, int]) -> list[str]:
    """Why a bias cannot be read row by row, or its gradient not be taken."""
    if isinstance(bias, HidingTerm):
        return [] if bias.term is None else _reasons_of_bias(bias.term, shape)
    source, wants_grad = bias.source, bias.source.requires_grad and torch.is_grad_enabled()
    if isinstance(bias, DistanceTerm):
        is_even = bias.q_addresses is None and source.shape[2] == 1
        return [] if is_even else ["it reads biases by distance, of tokens that follow one by one"]
    if not isinstance(bias, DenseTerm):
        return [f"it cannot read a {type(bias).__name__}"]
    if source.shape[3] == 1 < shape[3]:
        return ["it reads a bias along its keys, and this one has none"]
    if wants_grad and source.shape[2] > 1 and source.shape[:2] != shape[:2]:
        return ["it has no gradient for a written-out bias that items or heads share"]
    return []


def _rows_of(bias: Term | None, shape: tuple[int, int, int, int]) -> tuple[Tensor | None, Tensor | None, int]:
    """A bias as float32 rows, where distances stand in its source, and how many numbers all rows share."""
    if bias is None:
        return None, None, -1
    source = bias.source
    if isinstance(bias, DistanceTerm):
        q_len, kv_len = shape[2:]
        index = torch.arange(bias.first + q_len - 1, bias.first - kv_len, -1, device=source.device) - bias.lowest
        index = index.clamp_(0, source.shape[3] - 1)
        return source.float().index_select(3, index), index, len(index)
    rows = source.float()
    rows = rows if rows.stride(3) == 1 else rows.contiguous()
    return rows, None, 0 if source.shape[2] > 1 else shape[3]


def _grad_of_bias(bias: Term, found: Tensor, call: _Call) -> Tensor:
    """Gradient of a bias's source from that of its rows, or of the numbers that all rows share."""
    bias = bias.term if isinstance(bias, HidingTerm) and bias.term is not None else bias
    if call.table:
        found = found.sum(0)[:, :, None]
    found = summed_to(found, bias.source)
    if call.places is None:
        return found
    return torch.zeros(bias.source.shape, dtype=found.dtype).index_add_(3, call.places, found)
