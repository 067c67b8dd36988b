"""IndexerLoss: a loss that trains an indexer's key-selection scores to match attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.statistics.row_block import Block
from saccade.statistics.statistic import MatrixInfo, Statistic
from saccade.support.errors import type_error, value_error

_HIDDEN = -1000.0  # upper bound for the log weights of masked keys


class RowScorer(Protocol):
    """Interface of scorers that compute scores a few rows at a time, such as `saccade.scorers.LightningIndexer`."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Tensors that receive the scores' gradients; ``type(self)(*leaves)`` rebuilds the scorer."""
        ...

    def scores(self, rows: range, stop: int) -> Tensor:
        """Return the scores between the queries ``rows`` and the first ``stop`` keys, ``[batch, 1, rows, stop]``."""
        ...


class _State:
    """State of an `IndexerLoss`: the sums so far, and the rows for which some heads have not been added yet."""

    def __init__(self, info: MatrixInfo, leaves: tuple[Tensor, ...]):
        self.info = info
        self.loss = torch.zeros((), dtype=info.sum_dtype, device=info.device)
        self.rows = 0
        self.grads = [torch.zeros_like(x, dtype=info.dtype) for x in leaves]
        self.pending: dict[tuple[int, int, int], _Pending] = {}


class _Pending(NamedTuple):
    """The weights of a range of rows for the indexer loss, summed over the heads added so far.

    Attributes:
        weights: ``[rows, kv_len]``.
        seen: keys that at least one head may attend to, bool with the same shape.
        heads: number of heads in the sum.
    """

    weights: Tensor
    seen: Tensor
    heads: int


class IndexerLoss(Statistic[_State, Tensor]):
    r"""A loss for training the scores that select keys: the mean over queries of ``KL(p ‖ softmax(scores))``.

    .. math:: p_t = \frac{1}{H} \sum_h A_{ht}, \qquad
              L = \frac{1}{n} \sum_t \sum_{s \in S_t} p_{ts} \log \frac{p_{ts}}{\mathrm{softmax}_{S_t}(I_t)_s}, \qquad
              n \frac{\partial L}{\partial I_{ts}} = \mathrm{softmax}_{S_t}(I_t)_s - p_{ts}

    S_t is the set of keys that query t may attend to: all earlier keys with ``Softmax`` (for the warm-up), or the
    selected keys with ``TopK``. The attention rows are treated as constants, so gradients flow only through the scores.
    A query that attends to nothing does not count.

    Args:
        scores: a `saccade.scorers.LightningIndexer`, which computes scores a few rows at a time; or the scores
            themselves, ``[batch, 1, q_len, kv_len]``.

    Returns:
        A scalar tensor, differentiable once.

    Raises:
        TypeError: the scores are neither a `saccade.scorers.LightningIndexer` nor a tensor.
        ValueError: the shape of the scores does not match the matrix.
        UnsupportedError: the rows of the matrix are not distributions.

    Cost: one pass over the matrix; memory for the weights of a few rows in all heads, their scores and the gradients.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x, scores = torch.zeros(1, 2, 4, 8), torch.zeros(1, 1, 4, 4, requires_grad=True)
        >>> round(AttentionMatrix(x, x).compute(IndexerLoss(scores))[0].item(), 6)
        0.0

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1.1.
    """

    needs_distributions = needs_all_heads = True

    def __init__(self, scores: RowScorer | Tensor):
        if not isinstance(scores, Tensor) and not (hasattr(scores, "leaves") and hasattr(scores, "scores")):
            hint = "scorers.LightningIndexer(index_query, index_key, weight), or a tensor"
            raise type_error("scores", "be a tensor or a scorer of rows", type(scores).__name__, hint=hint)
        self.scores = scores

    def start(self, info: MatrixInfo) -> _State:
        if isinstance(self.scores, Tensor):
            batch, _, q_len, kv_len = info.shape
            if self.scores.shape != (batch, 1, q_len, kv_len):
                rule = f"have shape {[batch, 1, q_len, kv_len]}"
                raise value_error("scores", rule, list(self.scores.shape))
        return _State(info, self._leaves)

    def add(self, state: _State, block: Block) -> _State:
        kv_len = state.info.shape[3]
        allowed = block.weights > 0 if block.log_weights is None else block.log_weights > _HIDDEN
        for item in range(block.batch.start, block.batch.stop):
            index = item - block.batch.start
            weights = torch.zeros(len(block.rows), kv_len, dtype=state.info.dtype, device=state.info.device)
            seen = torch.zeros_like(weights, dtype=torch.bool)
            weights[:, block.keys] = block.weights[index].sum(0, dtype=weights.dtype)
            seen[:, block.keys] = allowed[index].any(0)
            part = _Pending(weights, seen, block.heads.stop - block.heads.start)
            self._add_heads(state, (item, block.rows.start, block.rows.stop), part)
        return state

    def merge(self, state: _State, other: _State) -> _State:
        merged = _State(state.info, self._leaves)
        merged.loss, merged.rows = state.loss + other.loss, state.rows + other.rows
        merged.grads = [first + second for first, second in zip(state.grads, other.grads, strict=True)]
        merged.pending = dict(state.pending)
        for key, part in other.pending.items():
            self._add_heads(merged, key, part)
        return merged

    def finish(self, state: _State) -> Tensor:
        leaves, count = self._leaves, max(1, state.rows)
        loss = (state.loss / count).to(state.info.dtype)
        with torch.enable_grad():
            return _PrecomputedLoss.apply(loss, *(grad / count for grad in state.grads), *leaves)

    @property
    def _leaves(self) -> tuple[Tensor, ...]:
        return (self.scores,) if isinstance(self.scores, Tensor) else self.scores.leaves

    def _add_heads(self, state: _State, key: tuple[int, int, int], part: _Pending) -> None:
        """Add one or more heads to the sums of a range of rows; after the last head, compute the rows' loss."""
        before = state.pending.pop(key, None)
        if before is not None:
            weights, seen = before.weights + part.weights, before.seen | part.seen
            part = _Pending(weights, seen, before.heads + part.heads)
        if part.heads < state.info.shape[1]:
            state.pending[key] = part
        else:
            self._add_rows(state, key[0], range(key[1], key[2]), part)

    def _add_rows(self, state: _State, item: int, rows: range, part: _Pending) -> None:
        total = part.weights.sum(-1, keepdim=True)
        has_mass = total > 0.0
        p = part.weights / total.masked_fill(~has_mass, 1.0)
        leaves = [x.detach().requires_grad_() for x in self._leaves]
        with torch.enable_grad():
            scores = self._scores_of(leaves, item, rows, p.shape[1])
        logs = scores.detach().to(p.dtype).masked_fill(~part.seen, -math.inf).log_softmax(-1)
        divergence = (p.xlogy(p) - torch.where(p > 0.0, p * logs, 0.0)).sum(-1, keepdim=True)
        state.loss += divergence.masked_fill(~has_mass, 0.0).sum(dtype=state.loss.dtype)
        state.rows += int(has_mass.sum())
        slope = (logs.exp() - p).masked_fill(~(part.seen & has_mass), 0.0).to(scores.dtype)
        for total_grad, grad in zip(state.grads, torch.autograd.grad(scores, leaves, slope), strict=True):
            total_grad.add_(grad)

    def _scores_of(self, leaves: list[Tensor], item: int, rows: range, kv_len: int) -> Tensor:
        """Return the indexer's scores for rows of a batch item, ``[rows, kv_len]``."""
        if isinstance(self.scores, Tensor):
            return leaves[0][item, 0, rows.start : rows.stop]
        scorer: Any = type(self.scores)
        return scorer(*(x[item : item + 1] for x in leaves)).scores(rows, kv_len)[0, 0]


class _PrecomputedLoss(torch.autograd.Function):
    """Autograd function of the indexer loss; its gradients were already computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *tensors: Tensor) -> Tensor:
        half = len(tensors) // 2
        ctx.save_for_backward(*(grad.to(x.dtype) for grad, x in zip(tensors[:half], tensors[half:], strict=True)))
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        known = ctx.saved_tensors
        return (None, *(None for _ in known), *(grad * x for x in known))
