"""Fused: a kernel for CPUs that runs torch's flash operation on the tiles of a plan, forward and backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.engine.kernels.additive_masks import NOTHING, added_terms
from saccade.engine.kernels.fused_calls import Call, single_call
from saccade.engine.kernels.fused_cost import bytes_of_backward, cost_of, pairs_of, time_of_plan
from saccade.engine.kernels.fused_threads import each_call
from saccade.engine.kernels.kernel import (
    CAN_RUN,
    NO_FORWARD_DERIVATIVES,
    Backward,
    KernelWithBackward,
    Request,
    Tensors,
    Verdict,
    reasons_unless_dot_product,
)
from saccade.engine.memory_accounting import Cost
from saccade.engine.tiles.grouped_heads import groups_of
from saccade.engine.tiles.index_ranges import add_at, at, take
from saccade.support.torch_modes import has_forward_derivatives, wants_gradient

_FEW_SCORES = 4096  # per head; slow half-precision products of so few scores cost no more than starting another kernel
_PAIR_OF_ROWS = 3.0  # time per pair with complete rows, relative to this kernel


class Fused(KernelWithBackward):
    """Exact attention with torch's flash operation, which ``F.scaled_dot_product_attention`` also uses on CPUs.

    The operation runs on the tiles of a plan.

    Cost: time grows with the number of pairs in the tiles. Beyond inputs and outputs, memory is needed for one tile.
    """

    name = "fused"
    adds_to_masked = True
    defers_to = "tiled"

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why torch's flash operation does not support these inputs, or why another kernel is faster."""
        plan, why = inputs.plan, []
        if request.impl == "auto" and aten_flash.multiplies_slowly(inputs.query.dtype) and _has_large_gradient(inputs):
            name = str(inputs.query.dtype).removeprefix("torch.")
            return Verdict(
                (), (f"torch multiplies {name} matrices slowly on this processor, and gradients need many products",)
            )
        if (
            request.impl == "auto"
            and plan.overlaps
            and time_of_plan(plan, 1.0) > time_of_plan(inputs.row_plan, _PAIR_OF_ROWS)
        ):
            rows = len(inputs.row_plan)
            return Verdict((), (f"its mask is strided: {len(plan)} tiles take more time than {rows} of full rows",))
        if not inputs.query.is_cpu:
            why.append(f"it runs on CPUs, not on {inputs.query.device.type}")
        elif not aten_flash.is_available():
            why.append(f"torch {torch.__version__} lacks the operation (or changed its arguments)")
        if request.dropout_p > 0.0:
            why.append("it has no dropout")
        if inputs.softcap is not None:
            why.append("it has no softcap")
        if inputs.tile_function is not None or inputs.modification is not None:
            why += reasons_unless_dot_product(inputs)
        if inputs.bias is not None and wants_gradient(inputs.bias.source):
            why.append("it has no gradient for bias")
        if has_forward_derivatives():
            why.append(NO_FORWARD_DERIVATIVES)
        return Verdict(tuple(why)) if why else CAN_RUN

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of the fused kernel's forward pass, without running it."""
        return cost_of(inputs, value_dim)

    def backward_bytes(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Return the peak memory of the fused kernel's backward pass, in bytes."""
        return bytes_of_backward(inputs, value_dim)

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs whose scores torch's flash operation computes."""
        return pairs_of(inputs)

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Compute the output and the lse with torch's flash operation, in a single call or tile by tile."""
        value_dim = value.shape[3]
        inputs, value = _prepared_inputs(inputs, value)
        single = single_call(inputs)
        if single is None:
            out, lse = _forward_of_tiles(inputs, value)
        else:
            is_plain = inputs.bias is None and (single.causal or single.is_fully_visible)
            terms = NOTHING if is_plain else added_terms(inputs, single.tile, single.is_masked)
            key = inputs.key
            if len(single.tile.columns[0].keys) != key.shape[2]:
                key, value = _keys_of_one_range(inputs, value, single)
            out, lse = aten_flash.forward(inputs.query, key, value, *terms, single.causal, inputs.scale)
        return (out if out.shape[3] == value_dim else out[..., :value_dim]), lse

    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Compute the gradients with respect to query, key and value with torch's flash operation."""
        (width, value_dim), sign = (inputs.query.shape[3], value.shape[3]), _sign(inputs)
        inputs, value = _prepared_inputs(inputs, value)
        out, grad_out = (_padded(x, value.shape[3]) for x in (results.out, results.grad_out))
        of_query, of_key, of_value = _backward(inputs, value, results._replace(out=out, grad_out=grad_out))
        of_query = of_query if sign is None else of_query * sign
        others = (None,) * (len(wanted) - 3)
        return (
            _first_columns(of_query, width),
            _first_columns(of_key, width),
            _first_columns(of_value, value_dim),
            *others,
        )


def _has_large_gradient(inputs: AttentionInputs) -> bool:
    """Return whether query or key needs a gradient, and enough scores make the overhead of a call negligible."""
    is_large = inputs.shape[2] * inputs.shape[3] > _FEW_SCORES
    return is_large and (wants_gradient(inputs.query) or wants_gradient(inputs.key))


def _prepared_inputs(inputs: AttentionInputs, value: Tensor) -> tuple[AttentionInputs, Tensor]:
    """Return inputs with equal widths, stride 1 and a scale above 0, as torch's flash operation requires."""
    query, key = inputs.query, inputs.key
    if query.shape[3] == value.shape[3] and inputs.scale > 0.0:
        # Contiguity is faster to test than strides.
        is_contiguous = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        if is_contiguous or query.stride(3) == key.stride(3) == value.stride(3) == 1:
            return inputs, value
    # Columns of zeros change no dot product.
    width = max(value.shape[3], query.shape[3], 1)
    query, key, value = _padded(query, width), _padded(key, width), _padded(value, width)
    sign = _sign(inputs)
    if sign is not None:
        # The operation also multiplies masked scores, already -inf, by the scale, so move the sign to the query.
        return inputs.replaced(query=query * sign, key=key, scale=-inputs.scale or 1.0), value
    if query is not inputs.query or key is not inputs.key:
        inputs = inputs.replaced(query=query, key=key)
    return inputs, value


def _first_columns(x: Tensor, width: int) -> Tensor:
    return x if x.shape[3] == width else x[..., :width]


def _sign(inputs: AttentionInputs) -> float | None:
    """Return the factor of queries that makes the scale positive: -1, or 0 for scale 0; None if no factor is needed."""
    return None if inputs.scale > 0.0 else -1.0 if inputs.scale < 0.0 else 0.0


def _padded(x: Tensor, width: int) -> Tensor:
    if x.shape[3] != width:
        x = F.pad(x, (0, width - x.shape[3]))  # keeps the memory order of the axes
    return x if x.stride(3) == 1 else x.contiguous()


def _forward_of_tiles(inputs: AttentionInputs, value: Tensor) -> tuple[Tensor, Tensor]:
    query, plan = inputs.query, inputs.plan
    batch, heads, q_len, _ = inputs.shape
    width = value.shape[3]
    # [batch, len, heads, width] in memory, so that heads merge without a copy.
    out = query.new_empty(batch, q_len, heads, width).transpose(1, 2)
    lse = query.new_empty(batch, heads, q_len, dtype=inputs.compute_dtype)
    if plan.overlaps or not len(plan):
        out.zero_()
        lse.fill_(-math.inf)

    def compute(call: Call) -> tuple[Tensor, Tensor]:
        # Computed before keys are copied, to lower the peak memory.
        terms = added_terms(inputs, call.tile, call.is_masked)
        return aten_flash.forward(
            _rows(query, call), *_keys_and_values(inputs, value, call), *terms, call.causal, inputs.scale
        )

    def add(call: Call, part: tuple[Tensor, Tensor]) -> None:
        own_out, own_lse = _rows(out, call), _rows(lse, call)
        if plan.overlaps or not call.is_first:
            part = _merge((own_out, own_lse), part)
        own_out.copy_(part[0])
        own_lse.copy_(part[1])

    each_call(inputs, compute, add)
    return out, lse


def _rows(x: Tensor, call: Call) -> Tensor:
    """Return a view of ``x [batch, heads, q_len, ...]`` for the rows of one call to torch's flash operation."""
    return at(x[call.tile.batch, call.tile.heads], call.tile.rows, 2)


def _key_heads(inputs: AttentionInputs, call: Call) -> tuple[slice, slice]:
    return call.tile.batch, groups_of(call.tile.heads, inputs.shape[1], inputs.key.shape[1])


def _keys_and_values(inputs: AttentionInputs, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the keys and values for one call to torch's flash operation."""
    groups, columns = _key_heads(inputs, call), call.columns
    return take(inputs.key[groups], columns, 2), take(value[groups], columns, 2)


def _keys_of_one_range(inputs: AttentionInputs, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Return the keys and values for a single flash call, which covers all rows and one range of columns."""
    if call.tile.width == inputs.shape[3]:
        return inputs.key, value
    span = call.columns[0]
    return at(inputs.key, span, 2), at(value, span, 2)


def _merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the output and the lse over all keys, given the results (output, lse) over two disjoint sets of keys."""
    (a, lse_a), (b, lse_b) = left, right
    lse = torch.logaddexp(lse_a, lse_b)
    share = (lse_b - lse.masked_fill(lse == -math.inf, 0.0)).exp()[..., None]
    return torch.lerp(a.to(share.dtype), b.to(share.dtype), share).to(a.dtype), lse


def _backward(inputs: AttentionInputs, value: Tensor, results: Backward) -> tuple[Tensor, Tensor, Tensor]:
    width, scale = inputs.query.shape[3], inputs.scale
    out, lse, grad_out, grad_lse = results
    query, key = inputs.query, inputs.key
    if grad_lse is not None:
        query, key, value, out, grad_out = _with_lse(query, key, value, out, grad_out, grad_lse)
        inputs = inputs.replaced(query=query, key=key)
    single = single_call(inputs)
    if single is not None and single.tile.width == inputs.shape[3]:
        terms = added_terms(inputs, single.tile, single.is_masked).terms
        grads = aten_flash.backward(grad_out, query, key, value, out, lse, terms, single.causal, scale)
    else:
        grads = _backward_of_tiles(inputs, value, Backward(out, lse, grad_out, None))
    of_query, of_key, of_value = (_first_columns(grad, width) for grad in grads)
    return of_query, of_key, of_value


def _backward_of_tiles(inputs: AttentionInputs, value: Tensor, results: Backward) -> tuple[Tensor, Tensor, Tensor]:
    query, key, overlaps = inputs.query, inputs.key, inputs.plan.overlaps
    gq = torch.zeros_like(query, dtype=inputs.compute_dtype if overlaps else query.dtype)
    # Many tiles add to the same key, so sum in float32 and round once.
    gk, gv = (torch.zeros(x.shape, dtype=inputs.compute_dtype, device=x.device) for x in (key, value))

    def compute(call: Call) -> tuple[Tensor, Tensor, Tensor]:
        terms = added_terms(inputs, call.tile, call.is_masked).terms
        q, o, own_lse, go = (_rows(x, call) for x in (query, *results[:3]))
        return aten_flash.backward(
            go, q, *_keys_and_values(inputs, value, call), o, own_lse, terms, call.causal, inputs.scale
        )

    def add(call: Call, parts: tuple[Tensor, Tensor, Tensor]) -> None:
        groups, rows = _key_heads(inputs, call), _rows(gq, call)
        if overlaps or not call.is_first:
            rows += parts[0]
        else:
            rows.copy_(parts[0])
        add_at(gk[groups], parts[1], call.columns, 2)
        add_at(gv[groups], parts[2], call.columns, 2)

    each_call(inputs, compute, add)
    return gq, gk, gv


def _with_lse(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Append a column to the inputs of torch's flash backward pass, so that it includes the gradient of the lse.

    The operation computes dS = P * (dP - rowsum(grad_out * out)). A column of 1 in grad_out and of -grad_lse in out
    adds grad_lse to the bracket, and a column of 0 in query, key and value changes nothing else. All tensors have the
    dtype of the lse: the operation stores dS in the dtype of its inputs, and half precision may be too narrow for it.
    """
    query, key, value = (F.pad(x.to(grad_lse.dtype), (0, 1)) for x in (query, key, value))
    out = torch.cat([out.to(grad_lse.dtype), -grad_lse[..., None]], 3)
    return query, key, value, out, F.pad(grad_out.to(grad_lse.dtype), (0, 1), value=1.0)
