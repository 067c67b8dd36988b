"""The figure of trained models: several heads against one, and the few keys that a trained decoder needs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from saccade.theory.panels import head, legend, side_by_side
from saccade.theory.sparsity import TEXT, by_chance, decoder_loss, strongest
from saccade.theory.trained import attentive, learned, neighbours, recall
from saccade.viz.canvas import INK, INKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["trained"]

_KEYS = (1, 2, 4, 9, 18, 37, 74)


def trained() -> Figure:
    """Plot accuracy by number of heads, and lost nats by number of keys that each query of a decoder reads."""
    figure, (left, right) = side_by_side(2, 3.4)
    cases = (
        ("both neighbours", neighbours(1, 2), 32, 0.01, 200),
        ("one of 16 keys", recall(), 16, 0.03, 400),
    )
    counts = (1, 2, 4, 8)
    for shift, colour, (label, task, width, rate, steps) in zip((-0.2, 0.2), INKS[:2], cases, strict=True):
        runs = [learned(attentive(heads), task, width=width, rate=rate, steps=steps) for heads in counts]
        found = [float(run.accuracy.mean()) for run in runs]
        places = [place + shift for place in range(len(counts))]
        left.bar(places, found, width=0.38, color=colour, label=label)
        for place, accuracy in zip(places, found, strict=True):
            left.text(place, accuracy + 0.02, f"{accuracy:.0%}", ha="center", size=7, color=INK)
    left.set_xticks(range(len(counts)), [str(heads) for heads in counts])
    left.set(xlabel="heads, of the same total width", ylabel="accuracy", ylim=(0, 1.35), yticks=(0, 0.5, 1))
    head(left, "Which is better depends on the task", 9)
    legend(left, loc="upper left", ncols=2)
    whole = decoder_loss(TEXT)
    for label, choose, colour in (("drawn by lot", by_chance, INKS[1]), ("the strongest", strongest, INKS[0])):
        lost = [decoder_loss(TEXT, partial(choose, keys=keys)) - whole for keys in _KEYS]
        right.plot(_KEYS, lost, color=colour, marker="o", markersize=3, label=label)
    right.set(xscale="log", xlabel="keys that a query reads, of 74", ylabel="nats a token lost")
    right.set_xticks(_KEYS, [str(keys) for keys in _KEYS])
    right.minorticks_off()
    head(right, "Most keys matter little to a decoder", 9)
    legend(right)
    return figure
