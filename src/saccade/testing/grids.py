"""The cases of masks on grids, where a position is a cell."""

from __future__ import annotations

from saccade.masks import Axial, Neighborhood, ShiftedWindows, Window
from saccade.positions import GridTable
from saccade.testing.case import Case
from saccade.testing.seeded import seeded

__all__ = ["GRIDS"]


def _is_near(q: int, kv: int) -> bool:
    """At most one row and two columns apart on a grid that is 5 wide."""
    return abs(q // 5 - kv // 5) <= 1 and abs(q % 5 - kv % 5) <= 2


def _share_window(q: int, kv: int) -> bool:
    """The same window of 2 x 2 cells, the first of which begins at (1, 1), on a grid that is 4 wide."""
    return (q // 4 + 1) // 2 == (kv // 4 + 1) // 2 and (q % 4 + 1) // 2 == (kv % 4 + 1) // 2


GRIDS: tuple[Case, ...] = (
    Case("neighborhood", Neighborhood(2, 5, (1, 2)), lambda b, h, q, kv: _is_near(q, kv), q_len=10, kv_len=10),
    Case("neighborhood-extend", Neighborhood(3, 5, (1, 2)), lambda b, h, q, kv: _is_near(q, kv), q_len=4, kv_len=12),
    Case("axial", Axial(3, 4), lambda b, h, q, kv: q // 4 == kv // 4 or q % 4 == kv % 4, q_len=12, kv_len=12),
    Case(
        "shifted-windows",
        ShiftedWindows(3, 4, 2, shift=1),
        lambda b, h, q, kv: _share_window(q, kv),
        q_len=12,
        kv_len=12,
        relative=seeded(lambda: GridTable(4, 3, 4)),
    ),
    Case("window-after", Window(1, 1).after(2), lambda b, h, q, kv: min(q, kv) >= 2 and abs(q - kv) <= 1),
)
