"""Clipped: a bias with a trainable scalar for each distance up to a maximum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.positions.bias import Bias, check_distances
from saccade.support.validation import check_int


class Clipped(Bias):
    r"""A bias with a trainable scalar for each head and distance. Distances are clipped to ``reach``.

    .. math:: b_h(i - j) = w_{h,\; \mathrm{clip}(i - j,\, -r,\, r) + r}

    Distances are clipped as in `ShawKeys`, but each has a scalar instead of an embedding. All start at 0.

    Args:
        num_heads: number of query heads.
        reach: largest distance with a separate scalar, at least 0.

    Attributes:
        weight: ``[num_heads, 2 * reach + 1]``, ordered from the latest key within reach to the earliest.

    Raises:
        ValueError: a size is not an int, or too small.

    Cost: ``num_heads * (2 * reach + 1)`` parameters.

    Example:
        >>> bias = Clipped(1, reach=1)
        >>> _ = bias.weight.data.copy_(torch.tensor([[5.0, 6.0, 7.0]]))
        >>> bias.table(torch.arange(-3, 4)).tolist()
        [[5.0, 5.0, 5.0, 6.0, 7.0, 7.0, 7.0]]

    Reference: after Shaw et al. 2018, arXiv:1803.02155, section 3.2.
    """

    reach: int

    def __init__(self, num_heads: int, reach: int):
        super().__init__()
        self.num_heads = check_int("num_heads", num_heads)
        self.reach = check_int("reach", reach, 0)
        self.weight = nn.Parameter(torch.zeros(num_heads, 2 * reach + 1))

    def table(self, distances: Tensor) -> Tensor:
        check_distances(distances)
        return self.weight[:, distances.clamp(-self.reach, self.reach) + self.reach]

    def extra_repr(self) -> str:
        return f"{self.num_heads}, reach={self.reach}"
