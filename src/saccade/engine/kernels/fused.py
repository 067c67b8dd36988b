"""Torch's own flash operation, tile by tile over views: exact, linear memory, forward and backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.autograd import NO_FORWARD_DERIVATIVES, Backward, Dropped, Tensors, run
from saccade.engine.grouping import at, groups_of, take
from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.kernels import aten
from saccade.engine.kernels.fused_calls import Call, calls_of, route_of, tiles_of
from saccade.engine.kernels.fused_cost import cost_of, pairs_of
from saccade.engine.kernels.fused_terms import added
from saccade.engine.memory import Cost
from saccade.plan import Tile
from saccade.transforms import has_forward_derivatives

__all__ = ["Fused"]


class Fused:
    """Exact attention by the operation behind ``F.scaled_dot_product_attention``, run on the tiles of a plan.

    Cost: time grows with the pairs in the tiles; memory beside inputs and outputs is that of one tile.
    """

    name = "fused"

    def reasons(self, scores: ScoreMatrix, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs; empty if it can."""
        why = []
        if scores.query.device.type != "cpu":
            why.append(f"it runs on CPUs, not on {scores.query.device.type}")
        elif not aten.is_available():
            why.append(f"torch {torch.__version__} lacks the operation (or changed its arguments)")
        if dropout_p > 0.0:
            why.append("it has no dropout")
        if scores.softcap is not None:
            why.append("it has no softcap")
        if scores.tile_function is not None:
            why.append("it has dot products only, and maps that end in one")
        if scores.bias is not None and scores.bias.source.requires_grad and torch.is_grad_enabled():
            why.append("it has no gradient for bias")
        if has_forward_derivatives():
            why.append(NO_FORWARD_DERIVATIVES)
        return tuple(why)

    def cost(self, scores: ScoreMatrix, value_dim: int, dropout_p: float) -> Cost:
        """What the calls of the operation compute and hold; nothing is run."""
        del dropout_p
        return cost_of(scores, value_dim)

    def pairs(self, scores: ScoreMatrix) -> int:
        """Query-key pairs whose scores the calls compute."""
        return pairs_of(scores)

    def run(
        self, scores: ScoreMatrix, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``, both differentiable."""
        del dropout_p, seed
        return run(self, scores, value, None)

    def forward(self, scores: ScoreMatrix, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        del dropped
        value_dim = value.shape[3]
        out, lse = _forward(*_ready(scores, value))
        return (out if out.shape[3] == value_dim else out[..., :value_dim]), lse

    def backward(
        self, scores: ScoreMatrix, value: Tensor, dropped: Dropped | None, given: Backward, wanted: tuple[bool, ...]
    ) -> Tensors:
        """Gradients of query, key and value."""
        del dropped
        (width, value_dim), sign = (scores.query.shape[3], value.shape[3]), _sign(scores)
        scores, value = _ready(scores, value)
        wide = value.shape[3]
        out, grad_out = (_prepared(x, wide) for x in (given.out, given.grad_out))
        query, key = scores.query, scores.key
        of_query, of_key, of_value = _backward(scores, query, key, value, out, given.lse, grad_out, given.grad_lse)
        of_query = of_query if sign is None else of_query * sign
        return (of_query[..., :width], of_key[..., :width], of_value[..., :value_dim], *(None for _ in wanted[3:]))


def _ready(scores: ScoreMatrix, value: Tensor) -> tuple[ScoreMatrix, Tensor]:
    """Inputs as the operation wants them: of one width, with stride 1, and a scale above 0."""
    query, key = scores.query, scores.key
    if (
        query.shape[3] == value.shape[3]
        and scores.scale > 0.0
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    ):
        return scores, value
    # A few more zeros change no product.
    width = max(value.shape[3], query.shape[3], 1)
    query, key, value = _prepared(query, width), _prepared(key, width), _prepared(value, width)
    sign = _sign(scores)
    if sign is not None:
        # The operation multiplies hidden scores, already -inf, by the scale too; so the sign goes to the query.
        return scores.replaced(query * sign, key, scale=-scores.scale or 1.0), value
    if query is not scores.query or key is not scores.key:
        scores = scores.replaced(query, key)
    return scores, value


def _sign(scores: ScoreMatrix) -> float | None:
    """What the query is multiplied with instead of a scale that is not above 0."""
    return None if scores.scale > 0.0 else -1.0 if scores.scale < 0.0 else 0.0


def _prepared(x: Tensor, width: int) -> Tensor:
    if x.shape[3] != width:
        return F.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()


def _forward(scores: ScoreMatrix, value: Tensor) -> tuple[Tensor, Tensor]:
    query, plan = scores.query, scores.plan
    batch, heads, q_len, _ = scores.shape
    route = route_of(scores)
    if route.single is not None:
        k, v = _columns(scores, value, route.single)
        return aten.forward(query, k, v, *added(scores, route.single), route.single.causal, scores.scale)
    width = value.shape[3]
    # [batch, len, heads, width] in memory, so that heads merge without a copy.
    out = query.new_empty(batch, q_len, heads, width).transpose(1, 2)
    lse = query.new_empty(batch, heads, q_len, dtype=scores.compute_dtype)
    if plan.overlaps or not len(plan):
        out.zero_()
        lse.fill_(-math.inf)
    for tile in route.tiles:
        own = (tile.batch, tile.heads)
        out_rows, lse_rows = at(out[own], tile.rows, 2), at(lse[own], tile.rows, 2)
        _run_tile(scores, value, tile, (out_rows, lse_rows), is_merged=plan.overlaps)
    return out, lse


def _run_tile(
    scores: ScoreMatrix, value: Tensor, tile: Tile, results: tuple[Tensor, Tensor], *, is_merged: bool
) -> None:
    """One tile, written to the results of its rows or merged with what they are; nothing of it is held after."""
    merged = results if is_merged else None
    for call in calls_of(scores, tile):
        piece = _run_call(scores, value, call)
        merged = piece if merged is None else _merge(merged, piece)
        del piece
    out, lse = results
    if merged is None:
        out.zero_()
        lse.fill_(-math.inf)
    else:
        out.copy_(merged[0])
        lse.copy_(merged[1])


def _run_call(scores: ScoreMatrix, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    tile = call.tile
    terms = added(scores, call)
    groups = (tile.batch, groups_of(tile.heads, scores.shape[1], scores.key.shape[1]))
    q, columns = at(scores.query[tile.batch, tile.heads], tile.rows, 2), call.columns
    k, v = (take(x[groups], columns, 2) for x in (scores.key, value))
    return aten.forward(q, k, v, *terms, call.causal, scores.scale)


def _columns(scores: ScoreMatrix, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Keys and values of a call that takes every row, and one range of columns."""
    strips = call.tile.columns
    width = len(strips[0].keys) if len(strips) == 1 else call.tile.width
    if width == scores.shape[3]:
        return scores.key, value
    span = call.columns[0]
    return at(scores.key, span, 2), at(value, span, 2)


def _merge(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each."""
    (a, lse_a), (b, lse_b) = left, right
    lse = torch.logaddexp(lse_a, lse_b)
    share = (lse_b - lse.masked_fill(lse == -math.inf, 0.0)).exp()[..., None]
    return torch.lerp(a.to(share.dtype), b.to(share.dtype), share).to(a.dtype), lse


def _backward(
    scores: ScoreMatrix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    width, dtype, plan, scale = query.shape[3], query.dtype, scores.plan, scores.scale
    if grad_lse is not None:
        query, key, value, out, grad_out = _with_lse(query, key, value, out, grad_out, grad_lse)
        scores = scores.replaced(query, key)
    grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
    single = route_of(scores).single
    if single is not None and single.tile.width == scores.shape[3]:
        terms = added(scores, single).terms
        grads = aten.backward(grad_out, query, key, value, out, lse, terms, single.causal, scale)
        return tuple(grad[..., :width].to(dtype) for grad in grads)  # type: ignore[return-value]
    gq = torch.zeros_like(query, dtype=scores.compute_dtype if plan.overlaps else query.dtype)
    # Many tiles add to one key: sums are kept in float32, and rounded once.
    gk, gv = (torch.zeros(x.shape, dtype=scores.compute_dtype, device=x.device) for x in (key, value))
    for tile in tiles_of(scores):
        own = (tile.batch, tile.heads)
        groups = (tile.batch, groups_of(tile.heads, query.shape[1], key.shape[1]))
        q, o, go, tile_lse, gq_rows = (at(x[own], tile.rows, 2) for x in (query, out, grad_out, lse, gq))
        for number, call in enumerate(calls_of(scores, tile)):
            columns = call.columns
            k, v = (take(x[groups], columns, 2) for x in (key, value))
            terms = added(scores, call).terms
            gq_part, gk_part, gv_part = aten.backward(go, q, k, v, o, tile_lse, terms, call.causal, scale)
            if number or plan.overlaps:
                gq_rows += gq_part
            else:
                gq_rows.copy_(gq_part)
            _add_columns(gk[groups], gk_part, columns)
            _add_columns(gv[groups], gv_part, columns)
    return tuple(grad[..., :width].to(dtype) for grad in (gq, gk, gv))  # type: ignore[return-value]


def _add_columns(total: Tensor, part: Tensor, columns: tuple[range, ...]) -> None:
    start = 0
    for span in columns:
        at(total, span, 2).add_(part[:, :, start : start + len(span)])
        start += len(span)


def _with_lse(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One more column through which the operation also propagates the gradient of the lse.

    It computes dS = P * (dP - rowsum(grad_out * out)); a column of 1 in grad_out and of -grad_lse in out adds
    grad_lse to the bracket, and a column of 0 in query, key and value changes nothing else. All in the dtype of the
    lse: the operation keeps dS in that of its inputs, where a half-precision type may not hold it.
    """
    query, key, value = (F.pad(x.to(grad_lse.dtype), (0, 1)) for x in (query, key, value))
    out = torch.cat([out.to(grad_lse.dtype), -grad_lse[..., None]], 3)
    return query, key, value, out, F.pad(grad_out.to(grad_lse.dtype), (0, 1), value=1.0)
