"""How far away a query looks."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.statistics.block import Block
from saccade.statistics.masses import check_places
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.places import Places

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
        >>> AttentionMatrix(x, x, masks.Causal()).ask(Distance())[0]
        tensor([[[0.0000, 0.5000, 1.0000, 1.5000]]])

    Reference: Vig and Belinkov 2019, arXiv:1906.04284, section 4.3.
    """

    places: Places | None = None

    def __post_init__(self) -> None:
        check_places("Distance", self.places)

    @property
    def needs_distributions(self) -> bool:
        return True

    @property
    def given_places(self) -> Places | None:
        return self.places

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        q, kv = placing.places.of_block(block)
        if placing.offset is None or not block.is_ascending:
            return (block.weights * (q - kv).abs()).sum(-1)
        return _regular(block.weights, q[0, 0, :, 0].contiguous(), kv[0, 0, 0].contiguous())


def _regular(weights: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Where rows and columns ascend: two products with what lies before all rows and after all of them.

    Distances are taken to the nearest row first, so that nothing is subtracted and nothing cancels.
    """
    nearest, farthest = q[0], q[-1]
    before, after = (int(x) for x in torch.searchsorted(kv, torch.stack([nearest, farthest + 1])))
    sides = [
        (weights[..., :before], nearest - kv[:before], q - nearest),
        (weights[..., after:], kv[after:] - farthest, farthest - q),
    ]
    middle = weights[..., before:after] * (q[:, None] - kv[before:after]).abs()
    total = middle.sum(-1)
    for part, far, near in sides:
        if part.shape[-1]:
            features = torch.stack([far, torch.ones_like(far)], -1).to(weights.dtype)
            sums = part @ features
            total = total + sums[..., 0] + near * sums[..., 1]
    return total
