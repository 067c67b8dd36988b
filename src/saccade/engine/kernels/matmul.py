"""Matmul: a kernel for short sequences that computes complete score matrices in a few matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.additive_masks import NOTHING, Added, added_terms, hidden_terms, with_bias
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
from saccade.engine.memory_accounting import Cost, Ledger, MemoryUse, Probe
from saccade.engine.tiles.grouped_heads import folded
from saccade.plan import Tile
from saccade.support.language import Message
from saccade.support.numerics import is_finite
from saccade.support.torch_modes import has_forward_derivatives, wants_gradient

_SHORT = 128  # keys; other kernels are faster with more
_FEW, _MANY = 1 << 13, 1 << 17  # pairs over all heads; with fewer than many, kernels that need one call start faster
_DENSE, _SPLIT = 3, 64  # with more keys, it pays off to skip masked pairs if fewer than a third are visible
_AT_ONCE = 1 << 18  # scores of some batch items: a megabyte in float32
_MOST = 1 << 24  # scores of a batch item
_NO_TERMS = {x: torch.zeros(1, 1, 1, dtype=x) for x in (torch.float32, torch.float64)}


class Matmul(KernelWithBackward):
    """Exact attention of short sequences: two matrix products and a softmax over complete rows, also of masked pairs.

    It runs fewer operations than the other kernels, and each of them for many batch items.

    Cost: O(q_len * kv_len) time and memory per head; a megabyte of scores, or those of one batch item, at a time.
    """

    name = "matmul"
    adds_to_masked = True

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why the kernel does not support these inputs, or why other kernels are faster."""
        _, heads, q_len, kv_len = inputs.shape
        if request.impl == "auto":
            if kv_len > _SHORT or q_len > _SHORT:
                return _TOO_LONG
            # torch's flash operation is slow in half precision with gradients.
            is_slow = inputs.dtype.itemsize == 2 and torch.is_grad_enabled() and _wants_gradient(inputs)
            if not is_slow and ((pairs := math.prod(inputs.shape)) < _FEW or _starts_slowly(inputs, pairs)):
                return _TOO_FEW
            if kv_len > _SPLIT and inputs.plan.pairs * _DENSE < math.prod(inputs.shape):
                return _TOO_SPARSE
        why: list[str] = []
        if not inputs.query.is_cpu:
            why.append(f"it runs on CPUs, not on {inputs.query.device.type}")
        if heads * q_len * kv_len > _MOST:
            why.append(Message("the scores of a batch item would take more than {most} MB", most=_MOST * 4 >> 20))
        if request.dropout_p > 0.0:
            why.append("it has no dropout")
        if inputs.softcap is not None:
            why.append("it has no softcap")
        if inputs.scale == 0.0:
            why.append("it needs a scale other than 0")
        if inputs.tile_function is not None or inputs.modification is not None:
            why += reasons_unless_dot_product(inputs)
        if has_forward_derivatives():
            why.append(NO_FORWARD_DERIVATIVES)
        return Verdict(tuple(why)) if why else CAN_RUN

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of all query-key pairs, because the kernel computes every score."""
        return math.prod(inputs.shape)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of the forward pass, without running it."""
        (batch, heads, q_len, kv_len), wide = inputs.shape, inputs.compute_dtype.itemsize
        results = batch * heads * q_len * (value_dim * inputs.dtype.itemsize + wide)
        items = min(batch, _items_at_once(inputs))
        scores = items * heads * q_len * kv_len * wide
        parts = 0 if items == batch else items * heads * q_len * (value_dim + 1) * wide
        ledger, cached, is_masked = Ledger(), 0, not inputs.plan.is_full
        ledger.allocate(items * self._numbers_copied(inputs, value_dim) * wide)
        part, freed = inputs.everything._replace(batch=slice(0, items)), 0
        if is_masked:
            hidden = Probe(inputs).held("hidden", part, hidden_terms)
            ledger.step(hidden)
            if inputs.rule.is_value:
                cached = hidden.left * (-(-batch // items) if inputs.rule.shape[0] > 1 else 1)
                ledger.allocate(cached - hidden.left)
            else:
                freed = hidden.left
        if inputs.bias is not None:

            def read(inputs: AttentionInputs, tile: Tile) -> Added:
                sizes = min(items, inputs.rule.shape[0]), inputs.rule.shape[1]
                hidden = torch.zeros(()).expand(*sizes, tile.height, tile.width)
                return with_bias(inputs, tile, hidden if is_masked else None)

            bias = Probe(inputs).held("bias", part, read)
            ledger.step(bias)
            freed += bias.left
        ledger.touch(scores)
        ledger.free(freed)
        ledger.touch(2 * scores + parts)
        return Cost(1, self.pairs(inputs), MemoryUse(ledger.most + results, results + cached))

    def backward_bytes(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Return the peak memory of the backward pass, in bytes, including gradients."""
        (batch, heads, q_len, kv_len), wide = inputs.shape, inputs.compute_dtype.itemsize
        width, groups = inputs.query.shape[3], inputs.key.shape[1]
        of_item = heads * q_len * width + groups * kv_len * (width + value_dim)
        items = min(batch, _items_at_once(inputs))
        of_bias = 0 if inputs.bias is None else inputs.bias.source.numel()
        copies = self._numbers_copied(inputs, value_dim) + heads * q_len * value_dim
        return batch * of_item * inputs.dtype.itemsize + wide * (
            of_bias + items * (3 * heads * q_len * kv_len + of_item + copies)
        )

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Compute the output and the lse."""
        (batch, heads, q_len, _), wide = inputs.shape, inputs.compute_dtype
        if 0 in inputs.shape:
            out = value.new_zeros(batch, heads, q_len, value.shape[3])
            return out, out.new_full((batch, heads, q_len), -math.inf, dtype=wide)
        results: tuple[Tensor, Tensor] | None = None
        for part in _parts(inputs):
            q, k, v = _flat(inputs, part, inputs.query, inputs.key, value)
            scores = _scores(inputs, q, k, part)
            weights = scores.softmax(-1)
            peak = scores.amax(-1)
            del scores
            lse = peak - weights.amax(-1).log_()
            out = torch.bmm(weights, v)
            del weights  # free it before the next scores are computed
            if not is_finite(lse):
                empty = peak == -math.inf
                out, lse = out.masked_fill_(empty[..., None], 0.0), lse.masked_fill_(empty, -math.inf)
            size = len(range(*part.indices(batch)))
            out, lse = out.view(size, heads, q_len, -1), lse.view(size, heads, q_len)
            if size == batch:
                return (out if out.dtype == value.dtype else out.to(value.dtype)), lse
            if results is None:
                results = (
                    value.new_empty(batch, heads, q_len, value.shape[3]),
                    lse.new_empty(batch, heads, q_len),
                )
            results[0][part], results[1][part] = out, lse
        assert results is not None  # the batch is not empty
        return results

    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Compute the gradients of query, key, value and the source of the bias."""
        (batch, heads, q_len, kv_len), sources = inputs.shape, (inputs.query, inputs.key, value)
        of_bias = None
        if wanted[3] and inputs.bias is not None:
            of_bias = torch.zeros_like(inputs.bias.source, dtype=inputs.compute_dtype)
        others = (of_bias, *(None,) * (len(wanted) - 4))
        if 0 in inputs.shape:
            return *(torch.zeros_like(x) for x in sources), *others
        totals = None
        for part in _parts(inputs):
            q, k, v = _flat(inputs, part, *sources)
            grad_out = _flat(inputs, part, results.grad_out)[0]
            weights = _scores(inputs, q, k, part).sub_(_flat(inputs, part, results.lse[..., None])[0]).exp_()
            grad_lse = None if results.grad_lse is None else _flat(inputs, part, results.grad_lse[..., None])[0]
            *grads, of_scores = _gradients(weights, q, k, v, inputs.scale, grad_out, grad_lse)
            size = len(range(*part.indices(batch)))
            if of_bias is not None and inputs.bias is not None:
                of_scores = of_scores.view(size, heads, q_len, kv_len)
                inputs.bias.accumulate_gradient(of_bias, inputs.everything._replace(batch=part), of_scores)
            del weights, of_scores
            grads = [grad.view(size, *x.shape[1:]) for grad, x in zip(grads, sources, strict=True)]
            if size == batch:
                return *grads, *others
            totals = [torch.empty_like(x) for x in sources] if totals is None else totals
            for total, grad in zip(totals, grads, strict=True):
                total[part] = grad
        assert totals is not None  # the batch is not empty
        return *totals, *others

    def _numbers_copied(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Return how many numbers of query, key and value of a batch item are copied, if all that may be are."""
        _, heads, q_len, kv_len = inputs.shape
        width, groups = inputs.query.shape[3], inputs.key.shape[1]
        if inputs.query.dtype == inputs.compute_dtype and inputs.query.is_contiguous() and inputs.key.is_contiguous():
            return 0
        return heads * q_len * width + groups * kv_len * (width + value_dim)


def _gradients(
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and scores of single heads, from their weights.

    Args:
        weights: ``[heads, q_len, kv_len]``.
        query, grad_out: ``[heads, q_len, width]``.
        key, value: ``[heads, kv_len, width]``.
        scale: factor of the scores.
        grad_lse: ``[heads, q_len, 1]``; None if the lse has no gradient.
    """
    of_value = torch.bmm(weights.mT, grad_out)
    of_weights = torch.bmm(grad_out, value.mT)
    of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
    if grad_lse is not None:
        of_scores = torch.addcmul(of_scores, weights, grad_lse)
    none = _NO_TERMS[weights.dtype]
    of_query = torch.baddbmm(none, of_scores, key, beta=0, alpha=scale)
    of_key = torch.baddbmm(none, of_scores.mT, query, beta=0, alpha=scale)
    return of_query, of_key, of_value, of_scores


def _multiplied(query: Tensor, key: Tensor, terms: Tensor | None, scale: float) -> Tensor:
    if terms is None:
        return torch.baddbmm(_NO_TERMS[query.dtype], query, key.mT, beta=0, alpha=scale)
    return torch.baddbmm(terms, query, key.mT, alpha=scale)


def _scores(inputs: AttentionInputs, q: Tensor, k: Tensor, part: slice) -> Tensor:
    """Return the scores of some batch items, one key head after another, with the query heads of a group as rows."""
    terms = _terms_of(inputs, part).terms
    if terms is not None:
        if terms.shape[:2] == (1, 1) and (inputs.shape[1] == inputs.key.shape[1] or terms.shape[2] == 1):
            terms = terms[0]
        else:
            size = len(range(*part.indices(inputs.shape[0])))
            terms = terms.expand(size, inputs.shape[1], inputs.shape[2], -1)
            terms = folded(terms, inputs.key.shape[1]).flatten(0, 1)
        terms = terms.to(q.dtype)
    return _multiplied(q, k, terms, inputs.scale)


def _flat(inputs: AttentionInputs, part: slice, *tensors: Tensor) -> list[Tensor]:
    """Return tensors of some batch items as ``[batch * kv_heads, rows, width]``, in the compute dtype."""
    groups, wide = inputs.key.shape[1], inputs.compute_dtype
    return [folded(x[part], groups).flatten(0, 1).to(wide) for x in tensors]


def _terms_of(inputs: AttentionInputs, part: slice) -> Added:
    is_full = inputs.plan.is_full
    if is_full and inputs.bias is None:
        return NOTHING
    return added_terms(inputs, inputs.everything._replace(batch=part), not is_full)


def _items_at_once(inputs: AttentionInputs) -> int:
    return max(1, _AT_ONCE // math.prod(inputs.shape[1:]))


def _parts(inputs: AttentionInputs) -> Iterator[slice]:
    """Yield slices of batch items whose scores are computed at once."""
    batch, step = inputs.shape[0], _items_at_once(inputs)
    return (slice(start, min(start + step, batch)) for start in range(0, batch, step))


def _wants_gradient(inputs: AttentionInputs) -> bool:
    return any(map(wants_gradient, inputs.leaves))


def _starts_slowly(inputs: AttentionInputs, pairs: int) -> bool:
    """Return whether another kernel computes the same in one call that starts faster."""
    if inputs.plan.count > 1 or (inputs.bias is not None and wants_gradient(inputs.bias.source)):
        return False
    return pairs < _MANY or not (torch.get_num_threads() > 1 or _wants_gradient(inputs))


_TOO_LONG = Verdict((), (Message("it is for short sequences: at most {most} queries and keys", most=_SHORT),))
_TOO_FEW = Verdict((), (Message("with fewer than {least:,} pairs, other kernels start faster", least=_MANY),))
_TOO_SPARSE = Verdict((), ("it would compute all pairs, and fewer than a third of them are visible",))
