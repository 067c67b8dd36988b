"""A piano roll of notes, with the attention to each."""

from __future__ import annotations

from typing import Any

import numpy as np

from chorales import VOICES, Chorale
from saccade.viz.canvas import GREY, INK, colours

SHOWN = 16  # eighths before the note


def draw(chorale: Chorale, step: int, voice: int, panels: dict[str, np.ndarray]) -> Any:
    """Draw the bars before a note; darker notes have more attention.

    Args:
        chorale: all of it.
        step, voice: of the note, which is framed.
        panels: weights of the symbols before it, ``[symbols]``, by their name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    first = max(0, step - SHOWN)
    page = Figure(figsize=(8, 6.4), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(page)
    for axes, (name, weights) in zip(page.subplots(2, 1, sharex=True), panels.items(), strict=True):
        scale, most = colours(), weights.max()
        # If voices coincide, draw the one with more attention on top.
        for index in sorted(range(first * len(VOICES), len(weights)), key=weights.__getitem__):
            when, who = divmod(index, len(VOICES))
            own = chorale.pitch[when, who]
            if own:
                axes.add_patch(Rectangle((when, own - 0.5), 1, 1, color=scale(weights[index] / most), lw=0))
                if chorale.starts[when, who]:
                    axes.plot([when, when], [own - 0.5, own + 0.5], color=INK, lw=1)
                axes.plot([when, when + 1], [own - 0.5] * 2, color=GREY, lw=0.4)
                axes.plot([when, when + 1], [own + 0.5] * 2, color=GREY, lw=0.4)
        due = chorale.pitch[step, voice]
        axes.add_patch(Rectangle((step, due - 0.5), 1, 1, fill=False, edgecolor="#0f7a8a", lw=2))
        _dress(axes, chorale, first, step)
        axes.set_title(name, loc="left", size=10, color=INK)
        told = page.colorbar(_scale(most), ax=axes, pad=0.01)
        told.outline.set_visible(False)
    axes.set_xlabel("bar")
    start = chorale.starts[step, voice]
    what = f"the {VOICES[voice].lower()}'s {_name(due)}" + ("" if start else ", which goes on")
    page.suptitle(f"{chorale.name}: what is looked at to say {what} (framed)", size=11, color=INK, x=0.02, ha="left")
    return page


def _scale(most: float) -> Any:
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415
    from matplotlib.colors import Normalize  # noqa: PLC0415

    return ScalarMappable(Normalize(0, most), colours())


def _dress(axes: Any, chorale: Chorale, first: int, step: int) -> None:
    """Label bars and pitches."""
    heard = chorale.pitch[first : step + 1]
    low, high = heard[heard > 0].min(), heard.max()
    bars = np.cumsum(chorale.beat == 0)
    lines = [own for own in range(first, step + 1) if chorale.beat[own] == 0]
    axes.set(xlim=(first, step + 1.5), ylim=(low - 1.5, high + 1.5))
    axes.set_xticks(lines, [str(bars[own]) for own in lines])
    named = [own for own in range(low, high + 1) if own % 12 in (0, 4, 7)]
    axes.set_yticks(named, list(map(_name, named)))
    for own in lines:
        axes.axvline(own, color=GREY, lw=0.6, zorder=0)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)


def _name(pitch: int) -> str:
    """Return the name of a pitch: C4 is the middle C."""
    return f"{['C', 'C♯', 'D', 'E♭', 'E', 'F', 'F♯', 'G', 'A♭', 'A', 'B♭', 'B'][pitch % 12]}{pitch // 12 - 1}"
