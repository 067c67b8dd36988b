"""Tiled: a kernel for any device that computes complete rows, block by block, in torch operations and linear memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine import dropout
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import (
    CAN_RUN,
    NO_FORWARD_DERIVATIVES,
    Backward,
    KernelWithBackward,
    Request,
    Tensors,
    Verdict,
)
from saccade.engine.kernels.tiled_cost import blocks_of, bytes_of_backward, cost_of, pairs_of
from saccade.engine.memory_accounting import Cost
from saccade.engine.tiles.grouped_heads import folded, groups_of, product, transposed_product
from saccade.engine.tiles.index_ranges import add_at, at, joined, take
from saccade.engine.tiles.tile_scores import (
    biased,
    capped,
    compared,
    index_of,
    mask_,
    modified,
    positions,
    score_mod_indices,
)
from saccade.plan import Tile
from saccade.support.torch_modes import has_forward_derivatives

_LARGEST = 40.0  # largest score that needs no shift: e^40 times a million keys is far from overflow


class Tiled(KernelWithBackward):
    """Exact attention, computed in blocks of complete rows. The backward pass recomputes the weights.

    Unlike torch's flash operation, it supports dropout, gradients of the bias, softcaps, and scores other than dot
    products.

    Cost: beyond inputs and outputs, memory is needed for a few blocks of scores, 4 or 8 MB each.
    """

    name = "tiled"

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why the tiled kernel does not support these inputs."""
        return Verdict((NO_FORWARD_DERIVATIVES,)) if has_forward_derivatives() else CAN_RUN

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of the tiled kernel's forward pass, without running it."""
        return cost_of(inputs, value_dim, dropout_p)

    def backward_bytes(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Return the peak memory of the tiled kernel's backward pass, in bytes."""
        return bytes_of_backward(inputs, value_dim)

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs in the tiled kernel's blocks."""
        return pairs_of(inputs)

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Compute the output and the lse of attention block by block."""
        return _forward(inputs, value, dropped)

    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Compute gradients of query, key, value, bias, parameters and captured tensors; None where not ``wanted``."""
        return _backward(inputs, value, dropped, results, wanted)


def _forward(inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = inputs.shape
    # [batch, len, heads, width] in memory, so that heads merge without a copy.
    out = value.new_zeros(batch, q_len, heads, value.shape[3]).transpose(1, 2)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=inputs.compute_dtype, device=value.device)
    scratch, of_all = _Scratch(inputs), _dropout_words(inputs, dropped)
    is_small = _is_small(inputs)
    for piece in blocks_of(inputs):
        block = _compute_block(inputs, value, piece, scratch)
        weights = block.scores
        if is_small:
            total = weights.exp_().sum(-1, keepdim=True)
            block.rows(lse).copy_(total.log()[..., 0])
        else:
            peak = weights.amax(-1, keepdim=True)
            total = weights.sub_(peak.masked_fill(peak == -math.inf, 0.0)).exp_().sum(-1, keepdim=True)
            block.rows(lse).copy_((total.log() + peak)[..., 0])
        total = total.masked_fill_(total == 0.0, 1.0)  # empty rows: weights 0, lse -inf
        words = block.words(of_all, scratch)
        if words is not None and dropped is not None:
            dropout.drop_(weights, words)
            total = total * (1.0 - dropped.p)
        block.rows(out).copy_(product(weights, block.value) / total)
        del block, weights, words  # free them before the next block is computed
    return out, lse


def _backward(
    inputs: AttentionInputs, value: Tensor, dropped: Dropped | None, results: Backward, wanted: tuple[bool, ...]
) -> Tensors:
    wide, bias = inputs.compute_dtype, inputs.bias
    grads = [
        torch.zeros(x.shape, dtype=wide, device=x.device) if x is not None and any_row else None
        for x, any_row in zip(inputs.sources(value), wanted, strict=True)
    ]
    gq, gk, gv, gb, *gp = grads
    grad_out, lse = results.grad_out, results.lse
    # Row sums that the softmax backward pass subtracts. Computed from a half-precision output, they would be too
    # inaccurate for sums over many rows. Since rows are complete, each block then computes them in one more pass.
    is_exact = results.out.dtype == wide
    delta = (grad_out * results.out).sum(-1) if is_exact else torch.zeros_like(lse)
    if results.grad_lse is not None:
        delta = delta - results.grad_lse.to(wide)
    scratch, of_all = _Scratch(inputs), _dropout_words(inputs, dropped)
    # If exponentials need no shift, multiply unnormalised weights, and divide the other factor of each product by the
    # denominator instead.
    share = (-lse).exp() if _is_small(inputs) else None
    delta = delta if share is None else delta * share
    for piece in blocks_of(inputs):
        block = _compute_block(inputs, value, piece, scratch, slopes=True)
        weights = block.scores if share is not None else block.scores.sub_(block.rows(lse)[..., None])
        weights = weights.exp_()
        go = block.rows(grad_out).to(wide)
        go = go if dropped is None else go / (1.0 - dropped.p)
        go = go if share is None else go * block.rows(share)[..., None]
        grad_weights = scratch.product(go, block.value.mT, 1)
        words = block.words(of_all, scratch)
        if words is not None:
            dropout.drop_(grad_weights, words)
        if gv is not None:
            after_dropout = weights if words is None else dropout.dropped(weights, words, out=scratch.like(weights, 2))
            block.add_transposed(gv, after_dropout, go)
        taken = block.rows(delta)
        if not is_exact:
            row_sums = torch.linalg.vecdot(grad_weights, weights)
            taken = taken + (row_sums if share is None else row_sums * block.rows(share))
        grad_scores = grad_weights.sub_(taken[..., None]).mul_(weights)
        if gb is not None and bias is not None:
            bias.accumulate_gradient(gb, block.tile, grad_scores)
        grad_scores = _backward_of_modification(inputs, block, grad_scores, gp)
        if block.slopes is not None:
            grad_scores *= block.slopes
        _backward_of_scores(inputs, block, grad_scores, gq, gk, gp)
        del block, weights, words, grad_weights, grad_scores  # free them before the next block is computed
    return tuple(grads)


def _backward_of_modification(
    inputs: AttentionInputs, block: _Block, grad_scores: Tensor, gp: list[Tensor | None]
) -> Tensor:
    """Return the gradient of a block's scores before modification. Add gradients of captured tensors to ``gp``."""
    if inputs.modification is None or block.capped is None:
        return grad_scores
    place = score_mod_indices(inputs, block.tile)
    of_scores, captured = inputs.modification.gradients(grad_scores, block.capped, place)
    for total, part in zip(gp[len(inputs.parameters) :], captured, strict=True):
        if total is not None and part is not None:
            total.add_(part)
    return torch.zeros_like(grad_scores) if of_scores is None else of_scores


def _backward_of_scores(
    inputs: AttentionInputs,
    block: _Block,
    grad_scores: Tensor,
    gq: Tensor | None,
    gk: Tensor | None,
    gp: list[Tensor | None],
) -> None:
    """Add a block's contribution to the gradients of query, key and parameters, from the gradient of its scores."""
    if inputs.tile_function is None:
        if gq is not None:
            block.rows(gq).add_(product(grad_scores, block.key), alpha=inputs.scale)
        if gk is not None:
            block.add_transposed(gk, grad_scores, block.query * inputs.scale)
        return
    of_query, of_key, *others = _gradients_of_tile(inputs, block, grad_scores * inputs.scale)
    if gq is not None and of_query is not None:
        block.rows(gq).add_(of_query)
    if gk is not None and of_key is not None:
        block.add_columns(gk, of_key)
    for total, part in zip(gp, others, strict=False):  # captured tensors follow the parameters
        if total is not None and part is not None:
            total.add_(part)


def _gradients_of_tile(inputs: AttentionInputs, block: _Block, grad: Tensor) -> Sequence[Tensor | None]:
    """Return the gradients of a block's query, key and parameters, by the score's own formula or by autograd."""
    function, groups = inputs.tile_function, block.key.shape[1]
    assert function is not None  # callers have checked
    q, grad = folded(block.query, groups), folded(grad, groups)
    gradients = getattr(function, "gradients", None)
    if gradients is not None:
        of_query, *others = gradients(grad, q, block.key, *inputs.parameters)
        return (of_query.reshape(block.query.shape), *others)
    leaves = [x.detach().requires_grad_() for x in (q, block.key, *inputs.parameters)]
    with torch.enable_grad():
        scores = function(*leaves)
    of_query, *others = torch.autograd.grad(scores, leaves, grad, allow_unused=True)
    return (None if of_query is None else of_query.reshape(block.query.shape), *others)


class _Block(NamedTuple):
    """A block of complete rows in the tiled kernel: its scores, and the queries, keys and values they come from."""

    tile: Tile
    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    capped: Tensor | None
    slopes: Tensor | None
    groups: slice

    def rows(self, x: Tensor) -> Tensor:
        """Return a view of ``x [batch, heads, q_len, ...]`` for the rows of the block."""
        return at(x[self.tile.batch, self.tile.heads], self.tile.rows, 2)

    def add_transposed(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add ``left.mT @ right``, summed over the heads of each group, to the block's columns of ``total``."""
        columns, groups = self.tile.columns, self.key.shape[1]
        if len(left) > 1 or len(columns) > 1:
            self.add_columns(total, transposed_product(left, right, groups))
            return
        # Accumulate within the matrix product: a separate sum would need another pass over all keys.
        total_of_block = at(total[self.tile.batch, self.groups], columns[0].keys, 2)[0]
        total_of_block.baddbmm_(folded(left, groups)[0].mT, folded(right, groups)[0])

    def add_columns(self, total: Tensor, part: Tensor) -> None:
        """Add ``part [batch, groups, columns, width]`` to the block's columns of ``total`` in place."""
        add_at(total[self.tile.batch, self.groups], part, self.tile.spans, 2)

    def words(self, of_all: dropout.Words | None, scratch: _Scratch) -> Tensor | None:
        """Return the block's dropout words for `dropout.drop_`, shaped like the scores; None without dropout."""
        if of_all is None:
            return None
        batch, heads, rows, columns, _ = self.tile
        out = scratch.like(self.scores, 3, torch.int32)
        return of_all.block(batch, heads, rows, tuple(strip.keys for strip in columns), out=out)


def _is_small(inputs: AttentionInputs) -> bool:
    """Return whether scores are too small for exponentials to overflow, so that row maxima need not be subtracted."""
    if not inputs.is_plain or inputs.query.numel() * inputs.key.numel() == 0:
        return False
    longest = [
        torch.linalg.vector_norm(x.detach(), dim=-1, dtype=inputs.compute_dtype).max()
        for x in (inputs.query, inputs.key)
    ]
    return float(longest[0] * longest[1]) * abs(inputs.scale) <= _LARGEST


def _dropout_words(inputs: AttentionInputs, dropped: Dropped | None) -> dropout.Words | None:
    if dropped is None:
        return None
    b, h, _ = index_of(inputs, inputs.everything)
    return dropout.Words(dropped.seed, dropped.items(b), h, *positions(inputs, inputs.everything), dropped.p)


def _compute_block(
    inputs: AttentionInputs, value: Tensor, piece: Tile, scratch: _Scratch, *, slopes: bool = False
) -> _Block:
    """Compute a block of scores, with -inf for masked pairs. The next block reuses the memory."""
    groups = groups_of(piece.heads, inputs.shape[1], inputs.key.shape[1])
    columns = joined(piece.spans)
    wide = inputs.compute_dtype
    q = at(inputs.query[piece.batch, piece.heads], piece.rows, 2).to(wide)
    k, v = (take(x[piece.batch, groups], columns, 2).to(wide) for x in (inputs.key, value))
    is_dot = inputs.tile_function is None
    scores = scratch.product(q * inputs.scale, k.mT, 0) if is_dot else compared(inputs, q, k)
    scores = capped(inputs, scores)
    slope = 1.0 - (scores / inputs.softcap).square_() if slopes and inputs.softcap is not None else None
    before = scores.clone() if slopes and inputs.modification is not None else None
    scores = modified(inputs, scores, piece)
    if inputs.bias is not None:
        # The bias is unnamed, so that it is freed before the mask is computed.
        scores = biased(inputs, scores, inputs.bias.read(piece))
    scores = mask_(inputs, scores, piece)
    return _Block(piece, q, k, v, scores, before, slope, groups)


class _Scratch:
    """Memory that the tiled kernel reuses for its blocks, because allocating it takes as long as a matrix product."""

    def __init__(self, inputs: AttentionInputs):
        self._wide, self._device = inputs.compute_dtype, inputs.device
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def like(self, x: Tensor, number: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialised scratch memory shaped like ``x``. Each ``number`` has a separate buffer."""
        return self._shaped(x.shape, number, self._wide if dtype is None else dtype)

    def product(self, left: Tensor, right: Tensor, number: int) -> Tensor:
        """Compute ``left [B, H, R, D] @ right [B, G, D, C]``, each head with its group, in buffer ``number``."""
        batch, heads, rows, _ = left.shape
        out = self._shaped((batch, heads, rows, right.shape[3]), number, self._wide)
        left = folded(left, right.shape[1])
        torch.matmul(left, right, out=out.view(*left.shape[:3], right.shape[3]))
        return out

    def _shaped(self, shape: tuple[int, ...], number: int, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.pop((number, dtype), None)
        if buffer is None or buffer.numel() < size:
            buffer = None  # free it before a larger one is allocated
            buffer = torch.empty(size, dtype=dtype, device=self._device)
        self._buffers[number, dtype] = buffer
        return buffer[:size].view(shape)
