"""Figures side by side on one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade import viz


def sheet(rows: Sequence[Sequence[Any]], *, title: str = "", shrink: int = 2) -> Any:
    """Draw figures on one sheet.

    Args:
        rows: rows of figures; a column is as wide as its widest, a row as high as its highest.
        title: title of the sheet.
        shrink: factor by which each side of a figure is reduced, for small files.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    drawn = [[_pixels(one, shrink) for one in row] for row in rows]
    heights = [max(one.shape[0] for one in row) for row in drawn]
    columns = max(map(len, drawn))
    widths = [max(row[column].shape[1] for row in drawn if column < len(row)) for column in range(columns)]
    above = 24 if title else 0
    page = np.full((above + sum(heights), sum(widths), 3), 255, np.uint8)
    for row, panels in enumerate(drawn):
        for column, one in enumerate(panels):
            top, left = above + sum(heights[:row]), sum(widths[:column])
            page[top : top + one.shape[0], left : left + one.shape[1]] = one
    figure = Figure(figsize=(page.shape[1] / 100, page.shape[0] / 100), dpi=100)
    FigureCanvasAgg(figure)
    figure.figimage(page)
    if title:
        figure.text(8 / page.shape[1], 1 - 5 / page.shape[0], title, va="top", size=9)
    return figure


def panel(image: Tensor, weights: Tensor | None, title: str, **how: Any) -> Any:
    """Draw a scene with a frame, dark ink on white paper, and weights over it if there are any.

    Args:
        image: ``[1, H, W]``, paper 0 and ink up to 1.
        weights: ``[h, w]``.
        title: title of the panel.
        how: options of `saccade.viz.spatial_map`.
    """
    figure = viz.spatial_map(1 - image, torch.zeros(1, 1) if weights is None else weights, title=title, **how)
    figure.axes[0].spines[:].set(visible=True, color="#c8c8d0")
    if weights is None:
        figure.axes[1].set_visible(False)  # hide the colour scale
    return figure


def _pixels(figure: Any, shrink: int) -> np.ndarray:
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    height, width = (size // shrink for size in pixels.shape[:2])
    own = pixels[: height * shrink, : width * shrink].reshape(height, shrink, width, shrink, 3)
    return own.mean((1, 3)).astype(np.uint8)
