"""Panels side by side, as in all figures of the claims. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.viz.canvas import DPI, INK, blank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["head", "legend", "side_by_side"]


def side_by_side(count: int, width: float) -> tuple[Figure, tuple[Axes, ...]]:
    """Return a figure outside of pyplot with panels side by side, each about ``width`` inches wide."""
    canvas = blank("theory.pictures")
    figure = canvas.figure
    figure.clear()
    figure.set_size_inches(width * count + 0.8, min(width, 3.0) + 0.6)
    figure.set_layout_engine("constrained")
    panels = tuple(figure.add_subplot(1, count, number + 1) for number in range(count))
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
        axes.xaxis.label.set(size=8, color=INK)
        axes.yaxis.label.set(size=8, color=INK)
    assert figure.dpi == DPI, "blank() made it so"
    return figure, panels


def head(axes: Axes, title: str, size: float = 10) -> None:
    """Write a title above the left end of a panel."""
    axes.set_title(title, loc="left", size=size, color=INK)


def legend(axes: Axes, **place: Any) -> None:
    """Add the legend of a panel."""
    axes.legend(frameon=False, fontsize=8, **place)
