"""Neighborhood: a mask that lets each cell of a grid see nearby cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from saccade.masks.grid.grid import Grid, Rectangle, Squares, check_grid
from saccade.masks.mask_fields import SIZE_BITS
from saccade.support.errors import shown, value_error
from saccade.support.validation import check_int

_UNLIMITED = 1 << SIZE_BITS  # wider than any grid; sums of coordinates and radii must fit int64


@dataclasses.dataclass(frozen=True)
class Neighborhood(Grid):
    r"""A mask on a grid: a cell sees the cells at most ``radius`` rows and columns away, itself included.

    Position p is the cell in row ``p // width`` and column ``p % width``, for queries and keys. Positions outside the
    grid attend to nothing and are never visible; ``Neighborhood(...).after(1)`` leaves room for a class token.

    For a grid of 3 rows and 5 columns, the cells visible from the centre, then from a corner:

    >>> seen = Neighborhood(3, 5, 1).to_dense(15)[0, 0]
    >>> print("\n".join(" ".join(".1"[see] for see in row) for row in seen[7].view(3, 5).tolist()))
    . 1 1 1 .
    . 1 1 1 .
    . 1 1 1 .
    >>> print("\n".join(" ".join(".1"[see] for see in row) for row in seen[0].view(3, 5).tolist()))
    1 1 . . .
    1 1 . . .
    . . . . .

    The neighbourhood is cut off at the border, as if the grid were padded with masked cells, so the mask is symmetric.
    NATTEN shifts the neighbourhood inwards instead, so that every cell sees the same number of cells.

    Args:
        height, width: rows and columns of the grid, ints of at least 1.
        radius: number of visible rows above and below, and of columns left and right of the cell; an int of at least 0,
            or (vertical, horizontal). A convolution's ``kernel_size`` corresponds to ``2 * radius + 1``.

    Raises:
        ValueError: an argument does not meet the conditions above.

    Cost: rows are processed in squares of 8 x 8 cells if that is cheaper, with about ``(2 * radius + 8) ** 2`` keys for
    each square; see the page on grids.

    Reference: Parmar et al. 2018, arXiv:1802.05751, section 3.3; Hassani et al. 2023, arXiv:2204.07143, section 3.1.
    """

    height: int
    width: int
    radius: tuple[int, int]
    depends_on_displacement = True
    squares = Squares(8, 8)

    def __init__(self, height: int, width: int, radius: int | tuple[int, int]):
        object.__setattr__(self, "height", height)
        object.__setattr__(self, "width", width)
        check_grid(self)
        object.__setattr__(self, "radius", radii_of(radius))

    def _visible_rectangles(self, y: Any, x: Any) -> Sequence[Rectangle]:
        vertical, horizontal = self.radius
        return [Rectangle(y - vertical, y + vertical + 1, x - horizontal, x + horizontal + 1)]


def radii_of(radius: int | tuple[int, int]) -> tuple[int, int]:
    """Validate the radius of a neighborhood, and return its vertical and horizontal radius."""
    both = radius if isinstance(radius, tuple | list) else (radius, radius)
    if len(both) != 2:
        raise value_error("radius", "be one int, or (vertical, horizontal)", shown(radius))
    hint = "it counts the cells on each side of the query's cell; a pair is (vertical, horizontal)"
    vertical, horizontal = (min(check_int("radius", r, 0, hint=hint), _UNLIMITED) for r in both)
    return vertical, horizontal
