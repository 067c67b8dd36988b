"""NativeSparse: a gated sum of attention to block means, to selected blocks and to a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Causal, Full, Mask, Padding, Segments, sliding_window
from saccade.matrix import AttentionMatrix
from saccade.matrix.algebra import Sum
from saccade.matrix.block_sparse import restrict_to_blocks, select_blocks
from saccade.mechanisms.block_mean_matrix import BlockMeanMatrix, block_means
from saccade.mechanisms.checked_mechanism import CheckedMechanism, Inputs, parts_of, scale_of
from saccade.mechanisms.readable_tensors import is_dry_run
from saccade.positions.token_positions import GivenPositions
from saccade.scorers.scorer import ScoreRows, exact_dtype
from saccade.support.errors import hidden_by_vmap, unsupported, value_error
from saccade.support.language import Message
from saccade.support.torch_modes import CHOSEN_BY_VALUES, is_mapped, is_tracing, outside_graph, without_autocast
from saccade.support.validation import ShapeSpec, check_int, check_number

_GATES = ShapeSpec("gates [batch, heads, q_len, 3]")
_ROWS = 256  # number of rows whose selection a dry run forecasts at a time


class NativeSparse(CheckedMechanism):
    r"""Native sparse attention: a gated sum of attention to block means, to selected blocks and to nearby tokens.

    .. math:: A = g^{\mathrm{cmp}} A^{\mathrm{cmp}} + g^{\mathrm{slc}} A^{\mathrm{slc}}
              + g^{\mathrm{win}} A^{\mathrm{win}}, \qquad
              A^{\mathrm{cmp}} = \mathrm{softmax}(Q \bar K^\top)\, M, \quad \bar K = M K

    M takes the mean of each block of keys. A query reads the means of the blocks that end at its position or before;
    if there are none, its row of :math:`A^{\mathrm{cmp}}` is 0. :math:`A^{\mathrm{slc}}` is an exact softmax over
    ``k`` blocks: those with the largest weights in the first branch, summed over the query heads that share a key head.
    The block that contains the query is always among them. :math:`A^{\mathrm{win}}` is an exact softmax over the last
    ``window`` keys. All three branches read the same keys and values.

    The matrix is a lazy sum. Selection follows the rules of `TopK`: scores are computed in float64 and compared in
    float32, the first of several equal blocks is selected, and no gradient flows through the selection. The weights of
    the first branch have gradients, so they are trained through it.

    The paper compresses blocks, which may overlap, with a trained network, and its branches have separate keys and
    values. Here blocks are compressed by their means and do not overlap, as in the implementation of fla.

    Args:
        block_size: number of keys in a block; the first block begins at position 0.
        k: number of blocks that a query reads in the second branch, including its own.
        window: number of keys that a query reads in the third branch, including its own.
        sink_blocks: number of first blocks of the sequence that are always selected.
        local_blocks: number of last blocks before a query that are always selected, including the one that contains it.
        scale: scale of the dot products; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: a size is out of range, ``sink_blocks + local_blocks`` exceeds ``k``, or gates have the wrong shape.
        UnsupportedError: any mask except Causal, alone or with padding on the right; positions with gaps.

    Cost: O(n * (n / block_size + k * block_size + window) * head_dim). A decoding step with a `saccade.caches.KVCache`
    reads all keys and values once, to take their means. Under `torch.compile`, the matrix causes a graph break.

    Example:
        >>> from saccade.masks import Causal
        >>> query = key = torch.zeros(1, 1, 6, 4)
        >>> A = NativeSparse(2, 1, 1)(query, key, mask=Causal(), gates=torch.ones(1, 1, 6, 3))
        >>> A[0, 0]
        tensor([[2.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
                [1.0000, 2.0000, 0.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 2.0000, 0.0000, 0.0000, 0.0000],
                [0.2500, 0.2500, 0.7500, 1.7500, 0.0000, 0.0000],
                [0.2500, 0.2500, 0.2500, 0.2500, 2.0000, 0.0000],
                [0.1667, 0.1667, 0.1667, 0.1667, 0.6667, 1.6667]])

    Reference: Yuan et al. 2025, arXiv:2502.11089, section 3.
    """

    forecasts_with_cache = True

    def __init__(
        self,
        block_size: int = 64,
        k: int = 16,
        window: int = 512,
        *,
        sink_blocks: int = 0,
        local_blocks: int = 1,
        scale: float | None = None,
    ):
        super().__init__()
        self.block_size, self.k = check_int("block_size", block_size), check_int("k", k)
        self.window = check_int("window", window)
        self.sink_blocks = check_int("sink_blocks", sink_blocks, 0)
        self.local_blocks = check_int("local_blocks", local_blocks)
        if sink_blocks + local_blocks > k:
            rule, got = "be at least sink_blocks + local_blocks", f"{k} with {sink_blocks} + {local_blocks}"
            raise value_error("k", rule, got)
        self.scale = None if scale is None else check_number("scale", scale)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return reasons_against_blocks(mask)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        gates: Tensor | None = None,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Sum:
        """Return the matrix of native sparse attention.

        Args:
            query, key: ``[batch, heads, q_len, head_dim]`` and ``[batch, kv_heads, kv_len, head_dim]``.
            gates: weights of the three branches (block means, selected blocks, window) for each query, ``[batch, heads,
                q_len, 3]``; 1/3 each when None.
            mask: Causal, alone or with padding on the right.
            q_positions, kv_positions: as in `saccade.attention`, but without gaps, and keys begin at 0.
        """
        inputs = self._inputs(query, key, mask, q_positions, kv_positions)
        if inputs.starts[0] is None or inputs.starts[1] != 0:
            reason = "blocks are counted from position 0, without gaps; a mask can hide padding on the right"
            raise unsupported("positions", [reason], hint="one text at a time, or masks.Padding(lengths)")
        batch, heads, q_len, _ = inputs.shape
        if gates is not None:
            _GATES.check(gates, batch=batch, heads=heads, q_len=q_len)
        if is_tracing():
            return outside_graph(self._sum_of, CHOSEN_BY_VALUES)(inputs, gates)
        return self._sum_of(inputs, gates)

    def _matrix_of(self, inputs: Inputs) -> Sum:
        return self._sum_of(inputs, None)

    def _sum_of(self, inputs: Inputs, gates: Tensor | None) -> Sum:
        branches = self._compressed(inputs), self._selected(inputs), self._exact(inputs, sliding_window(self.window))
        if gates is None:
            return Sum(*((1 / 3, branch) for branch in branches))
        return Sum(*zip(gates.split(1, -1), branches, strict=True))

    def _exact(self, inputs: Inputs, mask: Mask) -> AttentionMatrix:
        """Return exact attention under both the mask of the inputs and ``mask``."""
        return AttentionMatrix(
            inputs.query,
            inputs.key,
            inputs.rule & mask,
            scale=self.scale,
            q_positions=inputs.q_positions,
            kv_positions=inputs.kv_positions,
        )

    def _compressed(self, inputs: Inputs) -> BlockMeanMatrix:
        start, q_len, kv_len = self._start(inputs), *inputs.shape[2:]
        with without_autocast(inputs.query.device):
            means = block_means(inputs.key, self.block_size)
        count = means.shape[2]
        ends = range(self.block_size - 1, count * self.block_size, self.block_size) if count else range(0)
        rows: range | Tensor = range(start, start + q_len)
        if start < 0:  # with more queries than keys, the first queries are before all keys
            rows = torch.arange(start, start + q_len, device=means.device).clamp(min=-1)
        attention = AttentionMatrix(
            inputs.query, means, inputs.rule, scale=self.scale, q_positions=rows, kv_positions=ends
        )
        return BlockMeanMatrix(attention, self.block_size, kv_len, start)

    def _selected(self, inputs: Inputs) -> AttentionMatrix:
        matrix = self._exact(inputs, Causal())
        if -(-inputs.shape[3] // self.block_size) <= self.k or 0 in inputs.shape:
            return matrix
        if is_mapped(inputs.query) or is_mapped(inputs.key):
            raise hidden_by_vmap("queries and keys")
        with torch.no_grad(), without_autocast(inputs.query.device):
            score = self._importance(inputs)
            if inputs.query.device.type == "meta" or is_dry_run():
                for first in range(0, inputs.shape[2], _ROWS):
                    score(range(first, min(first + _ROWS, inputs.shape[2])), inputs.shape[3])
                # Any selection reads as many pairs as the last k blocks.
                return self._exact(inputs, Segments(self.block_size, (self.k - 1) * self.block_size))
            index = select_blocks(matrix.inputs.current(), score, self.k, self.block_size)
        return restrict_to_blocks(matrix, index, self.block_size)

    def _importance(self, inputs: Inputs) -> ScoreRows:
        """Return a function that scores blocks by the weights of their means, summed over the heads of a key head."""
        wide, size, kv_heads = exact_dtype(inputs.query.device), self.block_size, inputs.key.shape[1]
        means, start = block_means(inputs.key.to(wide), size), self._start(inputs)
        scale, device = scale_of(self.scale, inputs.query.shape[3]), inputs.query.device
        items = torch.arange(inputs.shape[0], device=device)[:, None, None, None]
        nothing = torch.zeros_like(items)

        def score(rows: range, stop: int) -> Tensor:
            count, done = -(-stop // size), min(-(-stop // size), means.shape[2])
            query = inputs.query[:, :, rows.start : rows.stop].to(wide).unflatten(1, (kv_heads, -1))
            scores = (query @ means[:, :, None, :done].mT * scale).flatten(1, 2)
            position = torch.arange(rows.start + start, rows.stop + start, device=device)[:, None]
            block = torch.arange(count, device=device)
            visible = inputs.rule.allows(
                items, nothing, position[None, None], (block[:done] * size + size - 1)[None, None]
            )
            scores = scores.masked_fill(~visible, -torch.inf)
            weights = scores.softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
            importance = weights.unflatten(1, (kv_heads, -1)).sum(2)
            importance = torch.nn.functional.pad(importance, (0, count - done))
            own_block = position.div(size, rounding_mode="floor")
            is_forced = (block < self.sink_blocks) | ((block > own_block - self.local_blocks) & (block <= own_block))
            return importance.masked_fill(is_forced, torch.inf)

        return score

    def _start(self, inputs: Inputs) -> int:
        """Return the position of the first query."""
        start = inputs.starts[0]
        assert start is not None  # `forward` has checked it
        return start

    def extra_repr(self) -> str:
        sizes = f"block_size={self.block_size}, k={self.k}, window={self.window}"
        return f"{sizes}, sink_blocks={self.sink_blocks}, local_blocks={self.local_blocks}, scale={self.scale}"


def reasons_against_blocks(mask: Mask) -> tuple[str, ...]:
    """Return the reasons why blocks cannot be counted from position 0 and compressed after their last token."""
    parts = parts_of(mask)
    neither = "{mask} is neither Causal nor padding on the right: blocks are counted from position 0"
    reasons = [
        Message(neither, mask=type(part).__name__)
        for part in parts
        if not (isinstance(part, Causal | Full) or (isinstance(part, Padding) and part.side == "right"))
    ]
    if not any(isinstance(part, Causal) for part in parts) and not reasons:
        words = "{mask} is not causal: a block is compressed after its last token"
        reasons.append(Message(words, mask=type(mask).__name__))
    return tuple(reasons)
