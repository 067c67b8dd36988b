"""The declared rule beside what was measured, as a figure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from saccade.viz.canvas import HIDDEN, INK, INKS, PLAIN, blank
from saccade.viz.fonts import drawable_title
from saccade.viz.ticks import name_columns, name_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "drawn"]

COLOURS = {"allowed": "#ffffff", "hidden": HIDDEN, "leak": "#d55e00", "blind": INKS[0]}
"""Colour is what is wrong. All differ in lightness too: who sees no red, or prints in grey, tells them apart."""
_ALLOWED, _HIDDEN, _LEAK, _BLIND = range(4)
_SIDE, _AROUND, _PAD = 3.6, (1.4, 1.6), 0.12  # inches of a panel, of what is around both, between any two things
_LINES, _LINED = "#e4e4e9", 40  # between cells, where they are not too many
_COLUMNS = 90  # of text in a line of the title


def drawn(declared: Tensor, measured: Tensor, title: str) -> Figure:
    """Two panels: rows are outputs from the top, columns the tokens that they may depend on, and do.

    Args:
        declared, measured: bool ``[length, length]``.
        title: stands above both.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = blank("Report.figure").figure
    from matplotlib.colors import ListedColormap  # noqa: PLC0415  matplotlib is optional
    from matplotlib.patches import Patch  # noqa: PLC0415

    may, does = declared.numpy(), measured.numpy()
    rule = np.where(may, _ALLOWED, _HIDDEN)
    found = np.where(may & ~does, _BLIND, np.where(does & ~may, _LEAK, rule))
    figure.clear()
    figure.set_size_inches(2 * _SIDE + _AROUND[0], _SIDE + _AROUND[1])
    figure.set_layout_engine("constrained", h_pad=_PAD, w_pad=_PAD)
    for axes, kinds, name in zip(
        figure.subplots(1, 2), (rule, found), ("declared", "measured by gradients"), strict=True
    ):
        axes.imshow(kinds, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=3, interpolation="nearest")
        axes.spines[:].set(color=_LINES, linewidth=1.2)
        if len(may) <= _LINED:
            axes.set_xticks(np.arange(1, len(may)) - 0.5, minor=True)
            axes.set_yticks(np.arange(1, len(may)) - 0.5, minor=True)
            axes.grid(which="minor", color=_LINES, linewidth=0.8)
            axes.tick_params(which="minor", length=0)
        name_columns(axes, None, "token", len(may), _SIDE)
        name_rows(axes, None, "output", len(may), _SIDE)
        axes.set_title(name, loc="left", size=10, color=INK)
    leaks, blind = (f"{int((found == kind).sum()):,}" for kind in (_LEAK, _BLIND))
    told = {"leak": f"leak: hidden, but seen ({leaks})", "blind": f"blind: allowed, but not seen ({blind})"}
    handles = [Patch(fc=ink, ec=INK, lw=0.5, label=told.get(kind, kind)) for kind, ink in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    shown, families = drawable_title(title)
    figure.suptitle(textwrap.fill(shown, _COLUMNS), x=0.014, ha="left", size=11, family=families, **PLAIN)
    return figure
