"""AttentionMatrix, the lazy matrix of exact softmax attention, and ScoreMatrix, its scores before the softmax."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from saccade.engine import custom_op, dropout
from saccade.engine.dispatch import attend, attend_with_lse, choose_kernel
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.engine.nonfinite import is_clean, sanitize
from saccade.engine.tiles.index_ranges import joined
from saccade.engine.tiles.tile_scores import positions, scores_of, softmax_rows
from saccade.engine.tiles.tile_splitting import part_of
from saccade.engine.to_device import target_of
from saccade.engine.vmap import are_mapped, of_all_samples
from saccade.masks import Mask
from saccade.matrix.graph_break import outside_graphs
from saccade.matrix.indexing import Index
from saccade.matrix.matrix import Matrix
from saccade.plan import ColumnRange, Ranges, Tile
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.scores import Score
from saccade.scores.base import ScoreMod
from saccade.statistics.one_pass import compute_by_sweep
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import DENSE_LIMIT, MatrixInfo, Statistic
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_one_operation, is_transformed, wants_gradient, without_autocast

if TYPE_CHECKING:
    from saccade.engine.explanation import Explanation
    from saccade.statistics import Parts, Summary


class OfInputs(Matrix):
    """Base class of `AttentionMatrix` and `ScoreMatrix`, which are both computed from checked inputs."""

    inputs: AttentionInputs

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.inputs.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.dtype

    @property
    def device(self) -> torch.device:
        return self.inputs.query.device

    @property
    def kv_heads(self) -> int:
        return self.inputs.key.shape[1]

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        batch, heads, _, _ = self.shape
        strips = tuple(ColumnRange(span, True) for span in columns)
        inputs = self.inputs
        return positions(inputs, Tile(slice(0, batch), slice(0, heads), rows, strips, inputs.rule))

    def after_tracing(self) -> Self:
        return self._of(self.inputs.after_tracing())

    # Under vmap, values cannot be read or written in place, so all samples are computed as one batch.

    @abstractmethod
    def _of(self, inputs: AttentionInputs) -> Self:
        """Return a matrix of the same class as this one, computed from different inputs."""

    @outside_graphs
    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        if not are_mapped(self.inputs):
            return super().compute(*statistics)
        specs: list[Any] = []

        def compute_samples(inputs: AttentionInputs) -> tuple[Tensor, ...]:
            tensors, spec = tree_flatten(self._of(inputs).compute(*statistics))
            for x in tensors:
                if not isinstance(x, Tensor) or x.shape[:1] != (inputs.shape[0],):
                    reason = "a result is not a tensor whose first axis is the batch"
                    raise unsupported("vmap", [reason], hint="put the mapped axis into the batch")
            specs.append(spec)
            return tuple(tensors)

        with torch.no_grad():
            tensors = of_all_samples(self.inputs, compute_samples)
        return cast("tuple[Any, ...]", tree_unflatten(tensors, specs[-1]))

    @outside_graphs
    def to_dense(self, *, limit: int = DENSE_LIMIT) -> Tensor:
        if not are_mapped(self.inputs):
            return super().to_dense(limit=limit)
        return of_all_samples(self.inputs, lambda inputs: (self._of(inputs).to_dense(limit=limit),))[0]

    @outside_graphs
    def rmatmul(self, x: Tensor) -> Tensor:
        if not are_mapped(self.inputs, x):
            return super().rmatmul(x)
        return of_all_samples(self.inputs, lambda inputs, samples: (self._of(inputs).rmatmul(samples),), x)[0]

    @outside_graphs
    def __getitem__(self, index: Index) -> Tensor:
        return self.to_dense()[index] if are_mapped(self.inputs) else super().__getitem__(index)


_ENTRIES = 1 << 18  # number of scores in memory at a time: a megabyte


class ScoreMatrix(OfInputs):
    """The lazy matrix of attention scores: scaled, capped and biased, -inf for masked pairs.

    Useful operations are indexing, `to_dense`, `topk` and ``pooled(bins, how="max")``. Sums that include a masked pair
    are -inf. The matrix has no products, because values are multiplied by weights, not by scores.

    Cost: complete rows are computed, a megabyte at a time.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.eye(2)[None, None]
        >>> AttentionMatrix(x, x, masks.Causal(), scale=1.0).scores[0, 0]
        tensor([[1., -inf],
                [0., 1.]])
    """

    def __init__(self, inputs: AttentionInputs):
        self.inputs = inputs

    @property
    def is_stochastic(self) -> bool:
        return False

    @property
    def hidden(self) -> float:
        return -math.inf

    def _of(self, inputs: AttentionInputs) -> ScoreMatrix:
        return ScoreMatrix(inputs)

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        raise _no_product()

    def rmatmul(self, x: Tensor) -> Tensor:
        raise _no_product()

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        return self._blocks(batch, head, rows)

    def _blocks(self, batch: int | None, head: int | None, rows: range | None) -> Iterator[Block]:
        inputs = self.inputs.current()
        items, heads, q_len, kv_len = self.shape
        b, h = (
            slice(0, size) if index is None else slice(index, index + 1)
            for index, size in ((batch, items), (head, heads))
        )
        rows = range(q_len) if rows is None else range(q_len)[as_slice(rows)]
        each = (b.stop - b.start) * (h.stop - h.start)
        step = max(1, _ENTRIES // max(each * kv_len, 1))
        for start in range(rows.start, rows.stop, step):
            some = range(start, min(start + step, rows.stop))
            shape = (b.stop - b.start, h.stop - h.start, len(some), kv_len)
            scores = torch.full(shape, -math.inf, dtype=inputs.compute_dtype, device=self.device)
            for tile in inputs.row_plan.tiles:
                for piece in part_of(tile, batch, head, some):
                    with without_autocast(self.device):
                        scores_of_piece = scores_of(inputs, piece)
                    items_of, heads_of = (
                        _shifted_slice(span_of_piece, first.start)
                        for span_of_piece, first in ((piece.batch, b), (piece.heads, h))
                    )
                    own_rows = slice(piece.rows.start - start, piece.rows.stop - start, piece.rows.step)
                    at = 0
                    for span in joined(piece.spans):
                        scores[items_of, heads_of, own_rows, as_slice(span)] = scores_of_piece[..., at : at + len(span)]
                        at += len(span)
            yield Block(b, h, some, (range(kv_len),), scores, hidden=self.hidden)


def _shifted_slice(span: slice, by: int) -> slice:
    return slice(span.start - by, span.stop - by)


def _no_product() -> Exception:
    return unsupported("a product", ["values are multiplied by weights, not by scores"], hint="A @ value")


Impl = Literal["auto", "native", "matmul", "fused", "sdpa", "varlen", "flex", "tiled", "reference"] | Kernel


class AttentionMatrix(OfInputs):
    r"""The lazy matrix of exact softmax attention. It stores only its inputs, O(n·d), until a result is needed.

    .. math:: A_{ij} = \frac{\exp(s_{ij})}{\sum_{j' \in V(i)} \exp(s_{ij'})},\quad j \in V(i), \qquad
              s_{ij} = f(\mathrm{softcap}(\mathrm{scale} \cdot \mathrm{score}(q_i, k_j)),\ b,\ h,\ i,\ j)
              + \mathrm{bias}_{ij}

    where V(i) is the set of keys that query i may attend to, and f is the identity unless the score has a function (see
    `saccade.scores.Modified`). A row without visible keys is 0. A sink logit adds a term to the denominator but no key,
    so rows then sum to less than 1.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, float32, float64, bfloat16 or float16.
        key: ``[batch, kv_heads, kv_len, head_dim]``; ``kv_heads`` divides ``heads``, and head h reads key head
            ``h // (heads // kv_heads)``. Keys are never expanded in memory.
        mask: which query may attend to which key: None (all pairs), a `saccade.masks.Mask`, a bool tensor ``[q, kv]``,
            ``[batch, q, kv]`` or broadcastable to ``[batch, heads, q, kv]``, or a function ``(b, h, q, kv) -> bool``.
            True = may attend. Two dimensions always mean ``[q, kv]``; pass a padding mask ``[batch, kv]`` as
            ``mask[:, None, None, :]``. torch's ``causal_lower_right`` and ``causal_upper_left`` are also accepted as
            masks, even if passed as ``bias``.
        score: similarity of a query and a key: a `saccade.scores.Score`, or a function that changes scaled dot
            products, ``(score, b, h, q, kv) -> score`` (see `saccade.scores.Modified`). The dot product when None.
        bias: added to the scores after the softcap: a tensor broadcastable to ``[batch, heads, q_len, kv_len]``, or a
            `saccade.positions.Bias` (ALiBi, T5, …), which is evaluated from distances and never materialised.
        scale: multiplies the scores. When None, it is ``head_dim ** -0.5`` for dot products and 1 for other scores.
        softcap: scores become ``softcap * tanh(score / softcap)``; no cap when None.
        sink_logit: ``[heads]``: the logarithm of a term added to each row's denominator; no term when None.
        impl: "auto" selects the fastest kernel that is exact for the inputs; see `explain`. An instance of your own
            kernel is also accepted.
        q_positions, kv_positions: positions of the tokens, for the mask: a range, or int64 ``[len]`` or ``[batch,
            len]`` as a tensor or list; -1 marks padding. By default, key j is at position j and query i at
            ``kv_len - q_len + i`` (bottom-right).

    Raises:
        ValueError, TypeError: arguments do not match. Raised before any work is done.

    Cost: construction checks the arguments and looks up or creates a plan. ``A @ value`` runs the selected kernel.

    Example:
        >>> q = k = torch.ones(1, 2, 4, 8)
        >>> from saccade.masks import Causal
        >>> AttentionMatrix(q, k, Causal())[0, 0, 1].tolist()
        [0.5, 0.5, 0.0, 0.0]

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """

    @argument_hints(value="pass the values to A @ value")
    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        mask: object = None,
        *,
        score: Score | ScoreMod | None = None,
        bias: Tensor | Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logit: Tensor | None = None,
        impl: Impl = "auto",
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ):
        self.inputs = AttentionInputs.of(
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
        )
        self.impl = impl
        self._lse: Tensor | None = None

    @property
    def mask(self) -> Mask:
        """Mask of the matrix: which query may attend to which key."""
        return self.inputs.rule

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """Compute ``A @ value`` with the fastest exact kernel.

        Args:
            value: ``[batch, kv_heads, kv_len, value_dim]``; ``value_dim`` may differ from ``head_dim``.
            dropout_p: probability that a weight is dropped *in this product*; A itself is never changed.
            seed: dropout seed, from 0 to 2**63 - 1; drawn from torch's generator when None. The same seed drops the
                same weights: those with the same batch item, head, query position and key position.

        Returns:
            ``[batch, heads, q_len, value_dim]`` in the query's dtype; 0 for a row without visible keys.
        """
        request = Request(dropout_p, self.impl, seed)
        if is_one_operation():
            return custom_op.attend(self.inputs, value, request)[0]
        out, lse = attend(self.inputs, value, request)
        if type(lse) is Tensor and not lse.requires_grad and not is_transformed():
            self._lse = lse
        return out

    @property
    def lse(self) -> Tensor:
        """Natural log of each row's denominator, ``[batch, heads, q_len]``; -inf for an empty row.

        It includes the sink. To merge results over disjoint keys, compute them without a sink and apply the sink last.

        The dtype is float32, or float64 for float64 inputs. Cost: one product the first time; the result is then
        cached. With gradients, one product each time.
        """
        if self._lse is not None and not self._wants_grad():
            return self._lse
        key = self.inputs.key
        nothing = key.new_zeros(*key.shape[:3], 1, dtype=self.dtype)
        run = custom_op.attend_with_lse if is_one_operation() else attend_with_lse
        return run(self.inputs, nothing, Request(impl=self.impl))[1]

    @property
    def scores(self) -> ScoreMatrix:
        """Lazy matrix of the scores before the softmax: scaled, capped and biased, -inf for masked pairs."""
        return ScoreMatrix(self.inputs)

    def to(
        self, *target: torch.device | str | torch.dtype, **kwargs: torch.device | str | torch.dtype | None
    ) -> AttentionMatrix:
        return matrix_from_inputs(self.inputs.to(*target_of(target, kwargs)), self.impl)

    @property
    def is_stochastic(self) -> bool:
        """Whether rows sum to 1 (or 0 without visible keys), which is the case unless there is a sink."""
        return self.inputs.sink_logit is None

    @outside_graphs
    def summary(self, parts: Parts | None = None) -> Summary:
        from saccade.statistics.summary import summary_of  # noqa: PLC0415  only this method needs it

        return summary_of(self, self.inputs.current(), parts)

    @outside_graphs
    def explain(self, *, value_dim: int | None = None, dropout_p: float = 0.0) -> Explanation:
        """Return a report on ``A @ value``: the kernel that runs, why other kernels do not run, and the cost."""
        from saccade.engine.explanation import Explanation  # noqa: PLC0415  only this method needs it

        dropout.check(dropout_p)
        inputs = self.inputs.current()
        request = Request(dropout_p, self.impl)
        kernel = choose_kernel(inputs, request)
        value_dim = inputs.query.shape[3] if value_dim is None else value_dim
        return Explanation.of(inputs, kernel, value_dim, request, mask=self.mask)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        return self._blocks(batch, head, rows)  # raise errors at once, not with the first block

    def _blocks(self, batch: int | None, head: int | None, rows: range | None) -> Iterator[Block]:
        inputs, bad = self.inputs.current(), None
        if not is_clean(inputs, inputs.query, inputs.key):
            sanitized = sanitize(inputs, inputs.key)
            if sanitized:
                inputs, bad = sanitized.inputs, sanitized.nan_scores
        for tile in inputs.row_plan.tiles:
            for piece in part_of(tile, batch, head, rows):
                with without_autocast(self.device):
                    weights, logs, lse = softmax_rows(inputs, piece, differentiable=self._wants_grad())
                span = piece.rows
                if bad is not None:
                    marked = bad[piece.batch, piece.heads, as_slice(span)]
                    weights, lse = weights.masked_fill(marked[..., None], math.nan), lse.masked_fill(marked, math.nan)
                    logs = None if logs is None else logs.masked_fill(marked[..., None], math.nan)
                columns = joined(piece.spans)
                yield Block(piece.batch, piece.heads, span, columns, weights, logs, lse)

    def uniform(self) -> Matrix:
        from saccade.matrix.uniform_matrix import uniform_inputs  # noqa: PLC0415  rarely needed

        return matrix_from_inputs(uniform_inputs(self.inputs), "auto")

    def _of(self, inputs: AttentionInputs) -> AttentionMatrix:
        return matrix_from_inputs(inputs, self.impl)

    def _compute_by_sweep(self, statistics: Sequence[Statistic[Any, Any]], info: MatrixInfo) -> dict[int, Any]:
        return compute_by_sweep(self.inputs.current(), self.impl, statistics, info)

    def _wants_grad(self) -> bool:
        return any(wants_gradient(x) for x in self.inputs.leaves)


def matrix_from_inputs(inputs: AttentionInputs, impl: Impl = "auto") -> AttentionMatrix:
    """Return the attention matrix for checked inputs."""
    matrix = object.__new__(AttentionMatrix)
    matrix.inputs, matrix.impl, matrix._lse = inputs, impl, None
    return matrix
