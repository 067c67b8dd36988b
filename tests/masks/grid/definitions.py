"""Rules on a grid as tables of cells: the tests' own reading of each definition."""

import torch
from torch import Tensor

from saccade import masks


def _apart(height: int, width: int) -> tuple[Tensor, Tensor]:
    y, x = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    return (y[:, None] - y).abs(), (x[:, None] - x).abs()


def neighbors(height: int, width: int, vertical: int, horizontal: int) -> Tensor:
    """bool [cells, cells]: at most so many rows and columns apart."""
    down, right = _apart(height, width)
    return (down <= vertical) & (right <= horizontal)


def axial(height: int, width: int, axis: str) -> Tensor:
    """bool [cells, cells]: in one row, one column, or either."""
    down, right = _apart(height, width)
    return {"rows": down == 0, "columns": right == 0, "both": (down == 0) | (right == 0)}[axis]


def swin(height: int, width: int, window: int, shift: int) -> Tensor:
    """bool [cells, cells], as Swin's code makes it: regions of the shifted grid, cut into windows, shifted back."""
    regions = torch.zeros(height, width)
    parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None)) if shift else (slice(0, None),)
    for i, rows in enumerate(parts):
        for j, columns in enumerate(parts):
            regions[rows, columns] = i * len(parts) + j
    y, x = torch.arange(height)[:, None], torch.arange(width)
    windows = y // window * (width // window) + x // window
    labels = torch.stack([regions, windows.float()]).roll((shift, shift), (1, 2)).flatten(1)
    return (labels[:, :, None] == labels[:, None]).all(0)


def behind(allowed: Tensor, before: int, after: int) -> Tensor:
    """With positions before and after that see nothing and are not seen."""
    return torch.nn.functional.pad(allowed, (before, after, before, after))


GRIDS: dict[str, tuple[masks.Mask, Tensor]] = {
    "neighborhood": (masks.Neighborhood(5, 7, 1), neighbors(5, 7, 1, 1)),
    "wide neighborhood": (masks.Neighborhood(6, 4, (0, 2)), neighbors(6, 4, 0, 2)),
    "radius beyond the grid": (masks.Neighborhood(3, 4, 9), neighbors(3, 4, 9, 9)),
    "huge radius": (masks.Neighborhood(3, 4, (2**62, 1)), neighbors(3, 4, 9, 1)),
    "one column": (masks.Neighborhood(9, 1, 2), neighbors(9, 1, 2, 2)),
    "rows": (masks.Axial(4, 5, "rows"), axial(4, 5, "rows")),
    "columns": (masks.Axial(4, 5, "columns"), axial(4, 5, "columns")),
    "both": (masks.Axial(4, 5), axial(4, 5, "both")),
    "a column's cross": (masks.Axial(6, 1), axial(6, 1, "both")),
    "windows": (masks.ShiftedWindows(6, 4, 2), swin(6, 4, 2, 0)),
    "shifted windows": (masks.ShiftedWindows(6, 9, 3, 1), swin(6, 9, 3, 1)),
}
