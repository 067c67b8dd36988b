"""The declared rule beside what was measured, as a figure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from saccade.viz.canvas import HIDDEN, INK, INKS, PLAIN, blank
from saccade.viz.fonts import drawable_title
from saccade.viz.heatmaps import rule_cells
from saccade.viz.ticks import name_columns, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kinds = npt.NDArray[np.int_]

COLOURS = {"allowed": "#ffffff", "hidden": HIDDEN, "leak": "#d55e00", "blind": INKS[0]}
"""Colour is what is wrong. All differ in lightness too: who sees no red, or prints in grey, tells them apart."""
_ALLOWED, _HIDDEN, _LEAK, _BLIND = range(4)
_SIDE, _AROUND, _PAD = 3.6, (1.4, 1.6), 0.12  # inches of a panel, of what is around both, between any two things
_COLUMNS = 90  # of text in a line of the title


def drawn(declared: Tensor, measured: Tensor, title: str) -> Figure:
    """Two panels: rows are outputs from the top, columns the tokens that they may depend on, and do.

    Args:
        declared, measured: bool ``[length, length]``.
        title: stands above both.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = blank().figure
    figure.clear()
    figure.set_size_inches(2 * _SIDE + _AROUND[0], _SIDE + _AROUND[1])
    figure.set_layout_engine("constrained", h_pad=_PAD, w_pad=_PAD)
    left, right = figure.subplots(1, 2)
    may, does = declared.numpy(), measured.numpy()
    rule = np.where(may, _ALLOWED, _HIDDEN)
    leaks, blind = does & ~may, may & ~does
    _draw(left, "declared", rule)
    _draw(right, "measured by gradients", np.where(leaks, _LEAK, np.where(blind, _BLIND, rule)))
    _explain(figure, int(leaks.sum()), int(blind.sum()))
    shown, families = drawable_title(title)
    figure.suptitle(textwrap.fill(shown, _COLUMNS), x=0.014, ha="left", size=11, family=families, **PLAIN)
    return figure


def _draw(axes: Axes, name: str, kinds: Kinds) -> None:
    from matplotlib.colors import ListedColormap  # noqa: PLC0415  matplotlib is optional

    length = len(kinds)
    axes.imshow(kinds, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=3, interpolation="nearest")
    rule_cells(axes, length, length)
    name_columns(axes, None, "token", length, _SIDE)
    name_rows(axes, None, "output", length, _SIDE)
    axes.set_title(name, loc="left", size=10, color=INK)


def _explain(figure: Figure, leaks: int, blind: int) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415  matplotlib is optional

    words = ("allowed", "hidden", f"leak: hidden, but seen ({leaks:,})", f"blind: allowed, but not seen ({blind:,})")
    handles = [Patch(fc=ink, ec=INK, lw=0.5, label=word) for ink, word in zip(COLOURS.values(), words, strict=True)]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
