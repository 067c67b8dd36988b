"""The scores of an attention as a matrix: what its softmax is taken of."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.grouped_heads import joined
from saccade.engine.tiles.tile_scores import scores_of
from saccade.engine.tiles.tile_splitting import part_of
from saccade.matrix.from_inputs import OfInputs
from saccade.statistics.row_block import Block, as_slice
from saccade.support.errors import unsupported
from saccade.support.torch_modes import without_autocast

_ENTRIES = 1 << 18  # scores that are held at once: a megabyte


class ScoreMatrix(OfInputs):
    """Scores of an `AttentionMatrix`, scaled, capped and biased; -inf where the mask hides a pair. Lazy, like weights.

    Any part by index, `to_dense`, `topk` and ``pooled(bins, how="max")`` are what one asks of it; sums are -inf where
    a hidden pair is among them. It has no products: what values are multiplied with are weights.

    Cost: rows over all keys, a megabyte at a time.

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
        b, h = (slice(0, size) if one is None else slice(one, one + 1) for one, size in ((batch, items), (head, heads)))
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
                        found = scores_of(inputs, piece)
                    items_of, heads_of = (
                        _moved(own, first.start) for own, first in ((piece.batch, b), (piece.heads, h))
                    )
                    own_rows = slice(piece.rows.start - start, piece.rows.stop - start, piece.rows.step)
                    at = 0
                    for span in joined(piece.spans):
                        scores[items_of, heads_of, own_rows, as_slice(span)] = found[..., at : at + len(span)]
                        at += len(span)
            yield Block(b, h, some, (range(kv_len),), scores, hidden=self.hidden)


def _moved(own: slice, by: int) -> slice:
    return slice(own.start - by, own.stop - by)


def _no_product() -> Exception:
    return unsupported("a product", ["values are multiplied with weights"], hint="A @ value")
