"""Draw numbers along a line: by position or by distance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.viz.arrays import Array, as_numbers
from saccade.viz.canvas import INKS, PLAIN, blank, dress
from saccade.viz.fonts import drawable_title
from saccade.viz.ticks import check_labels, name_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 6.4, 2.8  # inches
_POINTS, _LOG_POINTS = 960, 160  # most groups for the width in pixels; fewer on a logarithmic axis, where lines blur


@argument_hints({})
def profile(
    values: object,
    *,
    x: object = None,
    names: Sequence[str] | None = None,
    baseline: object = None,
    title: str | None = None,
    x_name: str = "position",
    y_name: str = "",
    log: bool = False,
) -> "Figure":
    """Draw numbers along a line, such as the attention that keys receive or `saccade.statistics.LagProfile`.

    With more points than pixels a line follows the largest of every group of neighbours, and a shade reaches down to
    the smallest: a single peak is never lost.

    Args:
        values: ``[points]`` or ``[lines, points]``; at most 8 lines.
        x: where the points stand, ``[points]``, ascending; 0, 1, 2, … when None.
        names: one for each line.
        baseline: ``[points]``, drawn dashed: what uniform attention would have.
        title: text above the figure.
        x_name: what the points are.
        y_name: what the numbers are, with their unit.
        log: both axes are logarithmic, and show what is above 0.

    Returns:
        A figure outside pyplot: it is neither shown nor to be closed. `save` writes it.

    Raises:
        TypeError: not real numbers, or names are one string.
        ValueError: other axes, too many lines, lengths that do not fit, or nothing to show.
        ImportError: matplotlib is not installed.

    Cost: O(lines * points).
    """
    places, lines, even = _read(values, x, baseline, log)
    check_labels("names", names, len(lines), "lines")
    canvas = blank()
    axes = canvas.axes
    for number, line in enumerate(lines):
        ink = INKS[number % len(INKS)]
        where, most, least = _grouped(places, line, log)
        name, _ = drawable_title(names[number]) if names is not None else ("_", [])
        axes.plot(where, most, color=ink, linewidth=1.2, label=name)
        if (most != least).any():
            axes.fill_between(where, least, most, color=ink, alpha=0.18, linewidth=0)
    if even is not None:
        where, most, _ = _grouped(places, even, log)
        axes.plot(where, most, color="#6b6b76", linewidth=1.0, linestyle="--", label="uniform attention")
    if log:
        axes.set(xscale="log", yscale="log")
    _name(axes, x_name, y_name, legend=names is not None or even is not None)
    return canvas.finished(_WIDTH, _HEIGHT, title)


def _read(values: object, x: object, baseline: object, log: bool) -> tuple[Array, Array, Array | None]:
    """Return x of the points, the lines ``[lines, points]``, and the baseline."""
    lines = as_numbers("values", values)
    lines = lines[None] if lines.ndim == 1 else lines
    if lines.ndim != 2 or 0 in lines.shape:
        raise value_error("values", "be [points] or [lines, points]", f"shape {list(lines.shape)}")
    if len(lines) > len(INKS):
        raise value_error("values", f"have at most {len(INKS)} lines", len(lines), hint="choose some heads")
    points = lines.shape[1]
    places = np.arange(points, dtype=np.float64) if x is None else _line("x", x, points).astype(np.float64)
    if (np.diff(places) <= 0).any():
        raise value_error("x", "ascend", "places that do not")
    even = None if baseline is None else _line("baseline", baseline, points)
    shown = places > 0 if log else np.ones(points, dtype=bool)
    lines = lines[:, shown]
    if not np.isfinite(lines).any() or (log and not (np.nan_to_num(lines) > 0).any()):
        raise value_error("values", "hold a number to show", "none", hint="log=True shows what is above 0")
    return places[shown], lines, None if even is None else even[shown]


def _line(argument: str, values: object, points: int) -> Array:
    line = as_numbers(argument, values)
    if line.shape != (points,):
        raise value_error(argument, f"have one number for each of the {points} points", list(line.shape))
    return line


def _grouped(x: Array, y: Array, log: bool) -> tuple[Array, Array, Array]:
    """Group neighbouring points: return x of each group, its largest and its smallest number."""
    groups = _LOG_POINTS if log else _POINTS
    if len(x) <= groups:
        return x, y, y
    even = np.geomspace(x[0], x[-1], groups) if log else np.linspace(x[0], x[-1], groups)
    starts = np.unique(np.searchsorted(x, even))
    return x[starts], np.fmax.reduceat(y, starts), np.fmin.reduceat(y, starts)


def _name(axes: "Axes", x_name: str, y_name: str, *, legend: bool) -> None:
    for axis, name in ((axes.xaxis, x_name), (axes.yaxis, y_name)):
        name_axis(axis, name)
    dress(axes)
    axes.margins(x=0.01)
    if legend:
        box = axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
        for text in box.get_texts():
            text.set(**PLAIN)
            text.set_fontfamily(drawable_title(text.get_text())[1])
