"""AttentionMatrix = softmax(ScoreMatrix); attention() and attention_with_lse() in three lines each."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

from saccade.engine import dropout
from saccade.engine.at_positions import GivenPositions
from saccade.engine.checks import autocast
from saccade.engine.explanation import Explanation
from saccade.engine.grouping import joined
from saccade.engine.guard import is_clean, isolate
from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.kernels import choose
from saccade.engine.pieces import few_rows
from saccade.engine.row_order import reordered
from saccade.engine.sink import with_sink
from saccade.engine.softmax import softmax_rows
from saccade.engine.tracing import execute, product, reasons
from saccade.errors import unsupported
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.plan import Ranges, Strip, Tile
from saccade.positions import Bias
from saccade.scores import Score
from saccade.statistics.block import Block, as_slice
from saccade.statistics.summary import Summary, summary_of

__all__ = ["AttentionMatrix", "Impl", "attention", "attention_with_lse"]

Impl = Literal["auto", "fused", "tiled", "flex", "reference"]
_BLOCK_ENTRIES = 1 << 18  # about a megabyte of weights, which stays in a core's L2 cache


class AttentionMatrix(Matrix):
    r"""The matrix of exact softmax attention, held as its ingredients: O(n·d) memory, nothing is computed yet.

    .. math:: A_{ij} = \frac{\exp(s_{ij})}{\sum_{j' \in V(i)} \exp(s_{ij'})},\quad j \in V(i), \qquad
              s_{ij} = \mathrm{softcap}(\mathrm{scale} \cdot \mathrm{score}(q_i, k_j)) + \mathrm{bias}_{ij}

    where V(i) are the keys that query i may attend to. A row with none is 0. A sink logit adds one more term to the
    denominator, and no key: rows then sum to less than 1.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, float32, float64, bfloat16 or float16.
        key: ``[batch, kv_heads, kv_len, head_dim]``; ``kv_heads`` divides ``heads``, and head h reads key head
            ``h // (heads // kv_heads)``. Keys are never expanded in memory.
        mask: who may attend to whom; None (everyone), a `saccade.masks.Mask`, a bool tensor ``[q, kv]``,
            ``[batch, q, kv]`` or broadcastable to ``[batch, heads, q, kv]``, or a function
            ``(b, h, q, kv) -> bool``. True = may attend. Two dimensions are always ``[q, kv]``: which keys of each item
            are tokens, ``[batch, kv]``, is ``mask[:, None, None, :]``.
        score: how alike a query and a key are, a `saccade.scores.Score`; the dot product when None.
        bias: added to the scores after the softcap; a tensor broadcastable to ``[batch, heads, q_len, kv_len]``, or a
            `saccade.positions.Bias` (ALiBi, T5, …), which is read at distances and never written out.
        scale: factor of the scores; ``head_dim ** -0.5`` for dot products and 1 for other scores when None.
        softcap: scores become ``softcap * tanh(score / softcap)``; no cap when None.
        sink_logit: ``[heads]``: the logarithm of a term added to each denominator; none when None.
        impl: "auto" picks the fastest kernel that is exact for the inputs; see `explain`. "flex", torch's FlexAttention
            on a GPU, runs by this name only.
        q_positions, kv_positions: where the tokens stand, for the mask: a range, or int64 ``[len]`` or
            ``[batch, len]``, also as a list; -1 means that no token stands here. By default key j stands at j and query
            i at ``kv_len - q_len + i`` (bottom-right).

    Raises:
        ValueError, TypeError: ingredients that do not fit together; before any work is done.

    Cost: making it costs checks and a (kept) plan. ``A @ value`` runs the chosen kernel.

    Example:
        >>> q = k = torch.ones(1, 2, 4, 8)
        >>> from saccade.masks import Causal
        >>> AttentionMatrix(q, k, Causal())[0, 0, 1].tolist()
        [0.5, 0.5, 0.0, 0.0]

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: object = None,
        *,
        score: Score | None = None,
        bias: Tensor | Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logit: Tensor | None = None,
        impl: Impl = "auto",
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ):
        self.scores = ScoreMatrix(
            query,
            key,
            mask,
            score=score,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sink_logit=sink_logit,
            q_positions=q_positions,
            kv_positions=kv_positions,
            where="AttentionMatrix",
        )
        self.impl = impl
        self._lse: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.scores.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.scores.dtype

    @property
    def device(self) -> torch.device:
        return self.scores.query.device

    @property
    def kv_heads(self) -> int:
        return self.scores.key.shape[1]

    @property
    def mask(self) -> Mask:
        """Who may attend to whom."""
        return self.scores.rule

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """``A @ value`` by the fastest exact kernel.

        Args:
            value: ``[batch, kv_heads, kv_len, value_dim]``; ``value_dim`` may differ from ``head_dim``.
            dropout_p: probability that a weight is dropped *in this product*; A itself is never changed.
            seed: of the dropout, from 0 to 2**63 - 1; drawn from torch's generator when None. The same seed drops
                the same (batch item, head, query position, key position).

        Returns:
            ``[batch, heads, q_len, value_dim]`` in the query's dtype; 0 for a row that may attend to nothing.
        """
        out, lse = _product(self.scores, value, dropout_p, self.impl, seed)
        if not lse.requires_grad:
            self._lse = lse
        return out

    @property
    def lse(self) -> Tensor:
        """Natural log of each row's denominator, ``[batch, heads, q_len]``; -inf for an empty row.

        float32, or float64 for float64 inputs. Cost: one product the first time, kept after that (with gradients,
        one product each time).
        """
        if self._lse is not None and not self._wants_grad():
            return self._lse
        nothing = self.scores.key.new_zeros(*self.scores.key.shape[:3], 1, dtype=self.dtype)
        return _product(self.scores, nothing, 0.0, self.impl)[1]

    @property
    def is_stochastic(self) -> bool:
        """Whether rows sum to 1 (or 0): True, unless a sink takes a share."""
        return self.scores.sink_logit is None

    def summary(self) -> Summary:
        return summary_of(self, self.scores)

    def explain(self, *, value_dim: int | None = None, dropout_p: float = 0.0) -> Explanation:
        """Which kernel ``A @ value`` runs, why not the others, and what it costs."""
        dropout.check(dropout_p, "AttentionMatrix.explain")
        choice = choose(self.scores, dropout_p, self.impl)
        other = reordered(self.scores, choice.kernel, dropout_p)
        value_dim = self.scores.query.shape[3] if value_dim is None else value_dim
        scores = other.scores if other else self.scores
        return Explanation.of(scores, choice, value_dim, dropout_p, is_reordered=other is not None)

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        batch, heads, _, _ = self.shape
        strips = tuple(Strip(span, True) for span in columns)
        return self.scores.positions(Tile(slice(0, batch), slice(0, heads), rows, strips, self.scores.rule))

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        return self._blocks(batch, head, rows)  # what is refused is refused at once, not with the first block

    def _blocks(self, batch: int | None, head: int | None, rows: range | None) -> Iterator[Block]:
        scores, bad = self.scores, None
        if not is_clean(scores, scores.query, scores.key):
            isolated = isolate(scores, scores.key)
            if isolated:
                scores, bad = isolated.scores, isolated.in_scores
        for tile in scores.row_plan.tiles:
            for piece in _pieces(tile, batch, head, rows):
                with torch.autocast(self.device.type, enabled=False):
                    weights, logs, lse = softmax_rows(scores, piece, differentiable=self._wants_grad())
                span = piece.rows
                if bad is not None:
                    marked = bad[piece.batch, piece.heads, as_slice(span)]
                    weights, lse = weights.masked_fill(marked[..., None], math.nan), lse.masked_fill(marked, math.nan)
                    logs = None if logs is None else logs.masked_fill(marked[..., None], math.nan)
                columns = joined(tuple(strip.keys for strip in piece.columns))
                yield Block(piece.batch, piece.heads, span, columns, weights, logs, lse)

    def _wants_grad(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.scores.ingredients)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object = None,
    *,
    score: Score | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
    q_positions: GivenPositions = None,
    kv_positions: GivenPositions = None,
) -> Tensor:
    """Exact softmax attention: ``AttentionMatrix(query, key, mask, ...) @ value``.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        mask, score, bias, scale, softcap, sink_logit, impl, q_positions, kv_positions: see `AttentionMatrix`.
        dropout_p: probability that a weight is dropped; the caller passes 0 in evaluation.

    Returns:
        ``[batch, heads, q_len, value_dim]`` in the query's dtype; scores and softmax are computed in float32 or
        wider. A row that may attend to nothing is exactly 0, its lse is -inf, its gradients are 0.

    Raises:
        ValueError, TypeError: ingredients that do not fit together.
        UnsupportedError: the kernel named by ``impl`` cannot run these inputs; every reason is listed.

    Cost: time O(pairs in the mask's plan · head_dim); memory beside inputs and output is that of one tile, or a few
    blocks of scores of 4 or 8 MB; O(q_len · kv_len) with ``impl="reference"``. Exact: yes. Deterministic: yes, dropout
    aside.

    Example:
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> attention(q, k, v).shape
        torch.Size([1, 2, 4, 8])
    """
    # fmt: off
    scores = ScoreMatrix(
        query, key, mask, score=score, bias=bias, scale=scale, softcap=softcap, sink_logit=sink_logit,
        q_positions=q_positions, kv_positions=kv_positions, where="attention",
    )
    # fmt: on
    return _product(scores, value, dropout_p, impl)[0]


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object = None,
    *,
    score: Score | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
    q_positions: GivenPositions = None,
    kv_positions: GivenPositions = None,
) -> tuple[Tensor, Tensor]:
    """Same as `attention`, and the log-sum-exp of each row's scores, ``[batch, heads, q_len]``.

    Two results over disjoint keys merge by it: ``lse = logaddexp(lse1, lse2)``,
    ``out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)``. It is the natural log, in float32 (float64 for float64
    inputs), -inf for a row that may attend to nothing, and differentiable. Dropout does not change it.
    """
    # fmt: off
    scores = ScoreMatrix(
        query, key, mask, score=score, bias=bias, scale=scale, softcap=softcap, sink_logit=sink_logit,
        q_positions=q_positions, kv_positions=kv_positions, where="attention_with_lse",
    )
    # fmt: on
    return _product(scores, value, dropout_p, impl)


def _product(
    scores: ScoreMatrix, value: Tensor, dropout_p: float, impl: str, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output and lse by the kernel that fits."""
    if scores.device.type != "meta" and torch.is_autocast_enabled(scores.device.type):
        # Projections have been cast by now; scores and softmax are computed in float32 or wider, always.
        value = autocast(value, scores.dtype)
        with torch.autocast(scores.device.type, enabled=False):
            return _product(scores, value, dropout_p, impl, seed)
    scores.check_value(value)
    dropout.check(dropout_p, scores.where)
    dropout.check_seed(seed, scores.where)
    if value.dtype != scores.query.dtype:  # prepared in float32, since scores are computed in float32 or wider
        value = value.to(scores.query.dtype)
    out, lse = _executed(scores, value, dropout_p, impl, seed)
    if scores.sink_logit is not None:
        out, lse = with_sink(out, lse, scores.sink_logit)
    return (out if out.dtype == scores.dtype else out.to(scores.dtype)), lse


def _executed(
    scores: ScoreMatrix, value: Tensor, dropout_p: float, impl: str, seed: int | None
) -> tuple[Tensor, Tensor]:
    if scores.device.type == "meta":
        out = value.new_empty(*scores.shape[:3], value.shape[3])
        return out, out.new_empty(scores.shape[:3], dtype=scores.compute_dtype)
    if not torch.compiler.is_compiling():
        return execute(scores, value, dropout_p, impl, seed)
    traced = product(scores, value, dropout_p, impl, seed)
    if traced is not None:
        return traced
    why = reasons(scores, impl)
    if not torch.compiler.is_dynamo_compiling():  # but exporting: here an error may be raised
        hint = "masks of saccade.masks and bool tensors go into an exported program, and so do its scores"
        raise unsupported(scores.where, "torch.export", why, hint=hint)
    # What cannot cross into an operation is a break in the compiler's graph; where there may be none, it says why. A
    # decorator would do the same, and import the compiler with `import saccade`.
    torch._dynamo.graph_break(msg=f"{scores.where} cannot be one operation: {'; '.join(why)}")
    outside: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(execute)
    return outside(scores, value, dropout_p, impl, seed)


def _pieces(tile: Tile, batch: int | None, head: int | None, rows: range | None) -> Iterator[Tile]:
    """A tile in pieces of about `_BLOCK_ENTRIES`: all of it, or one head of one batch item, a few rows at a time."""
    first, last = (0, tile.height) if rows is None else (bisect_left(tile.rows, end) for end in (rows.start, rows.stop))
    items, heads = tile.batch, tile.heads
    if batch is not None:
        items = slice(max(items.start, batch), min(items.stop, batch + 1))
    if head is not None:
        heads = slice(max(heads.start, head), min(heads.stop, head + 1))
    if first >= last or items.start >= items.stop or heads.start >= heads.stop:
        return
    whole = few_rows(tile._replace(batch=items, heads=heads), first, last)
    if (items.stop - items.start) * (heads.stop - heads.start) * whole.height * whole.width <= _BLOCK_ENTRIES:
        if whole.width:
            yield whole
        return
    for b in range(items.start, items.stop):
        for h in range(heads.start, heads.stop):
            start = first
            while start < last:
                # A triangle widens from row to row. Products of fewer than 32 rows are slow, unless rows are so long
                # that even 32 of them are many times a block.
                width = max(1, few_rows(tile, start, min(last, start + math.isqrt(_BLOCK_ENTRIES))).width)
                height = max(1, _BLOCK_ENTRIES // width, min(32, 16 * _BLOCK_ENTRIES // width))
                few = few_rows(tile, start, min(last, start + height))
                if few.width:
                    yield few._replace(batch=slice(b, b + 1), heads=slice(h, h + 1))
                start += height
