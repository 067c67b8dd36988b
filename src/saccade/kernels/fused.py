"""Torch's own flash operation, tile by tile over views: exact, linear memory, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.grouping import at, groups_of, joined, take
from saccade.kernels import aten
from saccade.kernels.differentiable import Backward, Dropped, Tensors, run
from saccade.kernels.pieces import pieces
from saccade.plan import Strip, Tile, Triangle
from saccade.score_matrix import ScoreMatrix

__all__ = ["Fused"]

# A tile whose sure columns are many is run in two parts, which saves adding zeros to most of its scores.
_WIDE = 2048
_FEW_ROWS, _LONG = 16, 256  # rows of a tile, and keys of a range, from which on a copy of the keys is dear
_READ_ROWS, _READ_ENTRIES = 256, 1 << 22  # of a tile whose bias has to be read from a table: 16 MB in float32
_MEMO_ENTRIES = 1 << 22  # entries of residual tensors that a plan may keep: 16 MB in float32


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
        return tuple(why)

    def cost(self, scores: ScoreMatrix, dropout_p: float) -> tuple[int, int]:
        """The pairs of the plan, and the largest residual mask of a tile, as bools and as terms."""
        del dropout_p
        plan = scores.plan
        unsure = (
            tile.height * tile.width for tile in plan.tiles if any(strip.residual is not True for strip in tile.columns)
        )
        extra = max(unsure, default=0) * math.prod(scores.rule.shape) * (1 + scores.query.dtype.itemsize)
        if scores.bias is not None and not scores.bias.is_written_out:
            extra += min(plan.pairs, _READ_ENTRIES) * scores.query.dtype.itemsize
        return plan.pairs, extra

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


class _Part(NamedTuple):
    """Columns of a tile that one call of the operation takes."""

    strips: tuple[Strip, ...]
    causal: bool

    @property
    def columns(self) -> tuple[range, ...]:
        """The columns, neighbouring ranges joined, so that most parts are one view."""
        return joined(tuple(strip.keys for strip in self.strips))

    @property
    def is_sure(self) -> bool:
        """Whether every row has every column."""
        return not self.causal and _all_sure(self.strips)


def _all_sure(strips: tuple[Strip, ...]) -> bool:
    return all(strip.residual is True for strip in strips)


def _parts(tile: Tile) -> Iterator[_Part]:
    if not tile.columns:
        return
    sure = tuple(strip for strip in tile.columns if strip.residual is True)
    unsure = tuple(strip for strip in tile.columns if strip.residual is not True)
    if len(unsure) == 1 and isinstance(unsure[0].residual, Triangle) and unsure[0].residual.is_square:
        width = sum(len(strip.keys) for strip in sure)
        if not sure or width >= min(_WIDE, tile.height):
            if sure:
                yield _Part(sure, False)
            yield _Part(unsure, True)
            return
    if unsure and sum(len(strip.keys) for strip in sure) >= _WIDE:
        yield _Part(sure, False)
        yield _Part(unsure, False)
    elif tile.height <= _FEW_ROWS and not unsure:
        yield from _runs(sure)
    else:
        yield _Part(tile.columns, False)


def _runs(sure: tuple[Strip, ...]) -> Iterator[_Part]:
    """Long ranges one by one, as views: a few rows are computed faster than the keys of a range are copied."""
    short = []
    for strip in sure:
        if len(strip.keys) >= _LONG:
            yield _Part((strip,), False)
        else:
            short.append(strip)
    if short:
        yield _Part(tuple(short), False)


def _tiles(scores: ScoreMatrix) -> Iterable[Tile]:
    """The tiles of the plan, cut where reading the bias of a whole one would take much memory."""
    if scores.bias is None or scores.bias.is_written_out:
        return scores.plan.tiles
    share = scores.query.shape[1] // scores.key.shape[1] if scores.key.shape[1] else 1
    cut = (pieces(tile, share=share, rows=_READ_ROWS, entries=_READ_ENTRIES) for tile in scores.plan.tiles)
    return itertools.chain.from_iterable(cut)


def _whole(scores: ScoreMatrix) -> tuple[Tile, _Part] | None:
    """The one tile and part that take every row and column in one call; None if there are several."""
    plan = scores.plan
    if scores.bias is not None and not scores.bias.is_written_out:
        return None
    if "whole" not in plan.memo:
        plan.memo["whole"] = None
        if len(plan) == 1:
            (tile,) = plan.tiles
            parts = list(_parts(tile))
            items = tile.batch.stop - tile.batch.start
            if len(parts) == 1 and items * plan.shape[1] * tile.height * tile.width == math.prod(plan.shape):
                plan.memo["whole"] = (tile, parts[0])
    return cast("tuple[Tile, _Part] | None", plan.memo["whole"])


def _one_view(scores: ScoreMatrix) -> tuple[Tile, _Part] | None:
    """The one tile and part that take every row, and one range of columns, in one call; None if there are several."""
    plan = scores.plan
    if len(plan) != 1 or scores.bias is not None:
        return None
    if "view" not in plan.memo:
        (tile,) = plan.tiles
        parts = list(_parts(tile))
        items = tile.batch.stop - tile.batch.start
        covers = items * plan.shape[1] * tile.height == math.prod(plan.shape[:3])
        is_view = covers and len(parts) == 1 and len(parts[0].columns) == 1
        plan.memo["view"] = (tile, parts[0]) if is_view else None
    return cast("tuple[Tile, _Part] | None", plan.memo["view"])


def _causal(scores: ScoreMatrix, part: _Part) -> bool:
    """Whether the operation's own causal flag says all; with a bias, the triangle is added to the terms instead."""
    return part.causal and scores.bias is None


class _Added(NamedTuple):
    """What the operation adds to the scores of a part, and the rows of it that this leaves without a key."""

    terms: Tensor | None
    empty: Tensor | None

    @classmethod
    def of(cls, terms: Tensor) -> _Added:
        """Look for empty rows once, where the terms are made."""
        empty = (terms == -math.inf).all(-1)
        return cls(terms, empty if bool(empty.any()) else None)


_NOTHING = _Added(None, None)


def _added(scores: ScoreMatrix, tile: Tile, part: _Part) -> _Added:
    """Bias, and -inf at hidden pairs, for the rows and columns of a part."""
    if scores.bias is None and (part.causal or part.is_sure):
        return _NOTHING
    piece = tile._replace(columns=part.strips)
    if scores.bias is None:
        return _hidden(scores, piece)
    bias = scores.bias.read(piece)
    bias = bias if bias.dtype == torch.float32 else bias.to(scores.query.dtype)  # the operation takes these two
    hidden = _hidden(scores, piece).terms
    # Filled, not added: a NaN in the bias at a hidden pair is hidden too.
    terms = bias if hidden is None else bias.masked_fill(hidden == -math.inf, -math.inf)
    return _Added.of(terms.expand(*terms.shape[:2], piece.height, piece.width))


def _hidden(scores: ScoreMatrix, piece: Tile) -> _Added:
    """0 where allowed and -inf elsewhere, in the query's dtype; kept with the plan where the rule is a value."""
    if _all_sure(piece.columns):
        return _NOTHING
    key = (
        scores.query.dtype,
        scores.device,
        piece.height,
        *((piece.batch.start, piece.batch.stop) if scores.rule.shape[0] > 1 else ()),
        *((piece.heads.start, piece.heads.stop) if scores.rule.shape[1] > 1 else ()),
        *((len(strip.keys), strip.residual) for strip in piece.columns),
    )
    memo = scores.plan.memo if scores.rule.is_value else {}
    kept = memo.get(key)
    if isinstance(kept, _Added):
        return kept
    allowed = scores.allowed(piece)
    assert allowed is not None  # some strip is unsure
    if scores.rule.is_value:  # what is kept is for all items and heads that the rule does not tell apart
        items, heads = scores.rule.shape
        allowed = allowed[: 1 if items == 1 else None, : 1 if heads == 1 else None]
    terms = torch.zeros(allowed.shape, dtype=scores.query.dtype, device=scores.device)
    made = _Added.of(terms.masked_fill_(~allowed, -math.inf))
    held = sum(x.terms.numel() for x in memo.values() if isinstance(x, _Added) and x.terms is not None)
    if terms.numel() + held <= _MEMO_ENTRIES:
        memo[key] = made
    return made


def _forward(scores: ScoreMatrix, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, scale, plan = scores.query, scores.key, scores.scale, scores.plan
    batch, heads, q_len, _ = scores.shape
    whole = _whole(scores)
    if whole is not None:
        tile, part = whole
        return aten.forward(query, key, value, *_added(scores, tile, part), _causal(scores, part), scale)
    view = _one_view(scores)
    if view is not None:
        tile, part = view
        k, v = (at(x, part.columns[0], 2) for x in (key, value))
        return aten.forward(query, k, v, *_added(scores, tile, part), _causal(scores, part), scale)
    width = value.shape[3]
    # [batch, len, heads, width] in memory, so that heads merge without a copy.
    out = query.new_empty(batch, q_len, heads, width).transpose(1, 2)
    lse = query.new_empty(batch, heads, q_len, dtype=scores.compute_dtype)
    if plan.overlaps or not len(plan):
        out.zero_()
        lse.fill_(-math.inf)
    for tile in _tiles(scores):
        own, groups = (tile.batch, tile.heads), (tile.batch, groups_of(tile.heads, heads, key.shape[1]))
        q, k, v = at(query[own], tile.rows, 2), key[groups], value[groups]
        out_rows, lse_rows = at(out[own], tile.rows, 2), at(lse[own], tile.rows, 2)
        merged = (out_rows, lse_rows) if plan.overlaps else None
        for part in _parts(tile):
            columns = part.columns
            added = _added(scores, tile, part)
            causal = _causal(scores, part)
            piece = aten.forward(q, take(k, columns, 2), take(v, columns, 2), *added, causal, scale)
            merged = piece if merged is None else _merge(merged, piece)
        if merged is None:
            out_rows.zero_()
            lse_rows.fill_(-math.inf)
        else:
            out_rows.copy_(merged[0])
            lse_rows.copy_(merged[1])
    return out, lse


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
    whole = _whole(scores)
    if whole is not None:
        tile, part = whole
        added = _added(scores, tile, part).terms
        grads = aten.backward(grad_out, query, key, value, out, lse, added, _causal(scores, part), scale)
        return tuple(grad[..., :width].to(dtype) for grad in grads)  # type: ignore[return-value]
    gq = torch.zeros_like(query, dtype=scores.compute_dtype if plan.overlaps else query.dtype)
    # Many tiles add to one key: sums are kept in float32, and rounded once.
    gk, gv = (torch.zeros(x.shape, dtype=scores.compute_dtype, device=x.device) for x in (key, value))
    for tile in _tiles(scores):
        own = (tile.batch, tile.heads)
        groups = (tile.batch, groups_of(tile.heads, query.shape[1], key.shape[1]))
        q, o, go, tile_lse, gq_rows = (at(x[own], tile.rows, 2) for x in (query, out, grad_out, lse, gq))
        for number, part in enumerate(_parts(tile)):
            columns = part.columns
            k, v = (take(x[groups], columns, 2) for x in (key, value))
            added = _added(scores, tile, part).terms
            causal = _causal(scores, part)
            gq_part, gk_part, gv_part = aten.backward(go, q, k, v, o, tile_lse, added, causal, scale)
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
