"""How far away a query looks."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
from torch import Tensor

from saccade.statistics.fused_sweep import Far, Quantity
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.places import Places
from saccade.statistics.row_block import Block

__all__ = ["Distance"]


@dataclasses.dataclass(frozen=True)
class Distance(PerRow):
    r"""Mean distance of what a query attends to, ``[batch, heads, q_len]``, in tokens.

    .. math:: D_i = \sum_j A_{ij} \, |p_i - p_j|

    with p the positions. Uniform causal attention has i / 2 at position i: compare with that before calling a head
    far-sighted. A row that attends to nothing has 0.

    Args:
        places: where the tokens stand; bottom-right when None.

    Raises:
        TypeError: ``places`` are none.
        UnsupportedError: asked of a matrix whose rows are not distributions.

    Cost: two multiplications and additions per weight; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 4, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).compute(Distance())[0]
        tensor([[[0.0000, 0.5000, 1.0000, 1.5000]]])

    Reference: Vig and Belinkov 2019, arXiv:1906.04284, section 4.3.
    """

    places: Places | None = None

    needs_distributions = True

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        span = block.columns[0]
        if placing.offset is None or len(block.columns) > 1 or span.step > 1:
            q, kv = placing.places.of_block(block)
            return (block.weights * (q - kv).abs()).sum(-1)
        ramps = _ramps(placing.places.kv.shape[-1], block.weights.dtype, block.weights.device)
        return _of_range(block.weights, block.queries + (placing.offset - span.start), *ramps)

    def quantity(self, placing: Placing) -> Quantity | None:
        return None if placing.offset is None else Far(placing.offset)


def _of_range(weights: Tensor, q: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Where keys follow one by one, with rows standing at ascending places q among them.

    Most keys lie before all rows or after all of them: two products. Distances are taken to the nearest row first, so
    that nothing is subtracted and nothing cancels.
    """
    columns, length = weights.shape[-1], len(up)
    first, last = min(max(int(q[0]), 0), columns), min(max(int(q[-1]), 0), columns)
    total = (weights[..., first:last] * (q[:, None] - torch.arange(first, last, device=q.device)).abs()).sum(-1)
    # Sums of what lies before, by its distance from the first row; and of what lies after, by that from the last.
    for part, far, near in (
        (weights[..., :first], down[length - first :], (q - first).abs()),
        (weights[..., last:], up[: columns - last], (last - q).abs()),
    ):
        if part.shape[-1]:
            total = total + (part @ far + near * part.sum(-1))
    return total


@lru_cache(maxsize=4)
def _ramps(length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Distances 0, 1, 2, … and length, length - 1, … 1."""
    up = torch.arange(length, dtype=dtype, device=device)
    return up, length - up
