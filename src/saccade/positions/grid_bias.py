"""GridTable: a bias with a trainable scalar for each displacement on a grid, as in Swin."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.positions.bias import Bias, check_distances
from saccade.positions.token_positions import as_positions, check_below
from saccade.support.validation import check_int


class GridTable(Bias):
    r"""A bias with a trainable scalar for each head and each displacement (rows, columns) between two grid cells.

    Position p is the cell in row :math:`y = \lfloor p / W \rfloor` and column :math:`x = p \bmod W`. Its *address* is
    :math:`y\,(2W - 1) + x`, so that the difference between two addresses identifies the displacement uniquely. All
    scalars start at 0.

    Args:
        num_heads: number of query heads.
        height, width: size of the grid in cells; ``GridTable(num_heads, 7, 7)`` for Swin's windows.

    Attributes:
        weight: ``[(2 * height - 1) * (2 * width - 1), num_heads]``, laid out like Swin's
            ``relative_position_bias_table``.
        reach: the largest difference between two addresses.

    Raises:
        ValueError: a size is not an int of at least 1, or a position is outside the grid. Positions are checked only on
            the CPU, where reading them is cheap; on other devices, the last cell is used instead.

    Cost: ``(2 * height - 1) * (2 * width - 1) * num_heads`` parameters, for ``height * width`` tokens.

    Example:
        >>> bias = GridTable(1, 2, 3)
        >>> bias.address(torch.arange(6)).tolist()
        [0, 1, 2, 5, 6, 7]
        >>> bias.weight.shape
        torch.Size([15, 1])

    Reference: Liu et al. 2021, arXiv:2103.14030, section 3.2.
    """

    reach: int

    def __init__(self, num_heads: int, height: int, width: int):
        super().__init__()
        self.num_heads = check_int("num_heads", num_heads)
        self.height = check_int("height", height)
        self.width = check_int("width", width)
        self.reach = (height - 1) * (2 * width - 1) + width - 1
        self.weight = nn.Parameter(torch.zeros((2 * height - 1) * (2 * width - 1), num_heads))

    def address(self, positions: Tensor) -> Tensor:
        cells = self.height * self.width
        places = as_positions(positions)
        check_below(places, cells, f"the grid has {self.height} x {self.width} cells")
        cell = places.clamp(0, cells - 1)  # -1 is padding, whose bias is never used, but it needs a valid address
        return cell // self.width * (2 * self.width - 1) + cell % self.width

    def table(self, distances: Tensor) -> Tensor:
        check_distances(distances)
        return self.weight[distances.clamp(-self.reach, self.reach) + self.reach].T

    def extra_repr(self) -> str:
        return f"{self.num_heads}, height={self.height}, width={self.width}"
