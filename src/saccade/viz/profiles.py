"""Numbers along a line: by position, by distance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from saccade.errors import type_error, value_error
from saccade.viz.arrays import Array, as_numbers
from saccade.viz.canvas import INK, blank
from saccade.viz.fonts import drawable_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["profile"]

_WIDTH, _HEIGHT, _POINTS = 6.4, 2.8, 960  # inches, and the points that this many pixels can show
# Apart in lightness as well as in hue, so that they are told apart without colour too.
_INKS = ("#3b0f70", "#de4968", "#0f7a8a", "#8c6d1f", "#fe9f6d", "#51127c", "#5a6b2f", "#8a8a99")


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
        title: stands above the picture.
        x_name: what the points are.
        y_name: what the numbers are, with their unit.
        log: both axes are logarithmic, and show what is above 0.

    Returns:
        A figure that belongs to the caller: pyplot does not know it, nothing is shown. `save` writes it.

    Raises:
        TypeError: not real numbers, or names are one string.
        ValueError: other axes, too many lines, lengths that do not fit, or nothing to show.
        ImportError: matplotlib is not installed.

    Cost: O(lines * points).
    """
    lines = as_numbers("profile", "values", values)
    lines = lines[None] if lines.ndim == 1 else lines
    _check(lines, names)
    points = lines.shape[1]
    places = np.arange(points, dtype=np.float64) if x is None else as_numbers("profile", "x", x).astype(np.float64)
    _check_line("x", places, points)
    if (np.diff(places) <= 0).any():
        raise value_error("profile", "x", "ascend", "places that do not")
    even = None if baseline is None else as_numbers("profile", "baseline", baseline)
    if even is not None:
        _check_line("baseline", even, points)
    shown = places > 0 if log else np.ones(points, dtype=bool)
    if not np.isfinite(lines[:, shown]).any() or (log and not (np.nan_to_num(lines[:, shown]) > 0).any()):
        raise value_error("profile", "values", "hold a number to show", "none", hint="log=True shows what is above 0")
    canvas = blank("profile")
    axes = canvas.axes
    for number, line in enumerate(lines):
        ink = _INKS[number % len(_INKS)]
        where, most, least = _grouped(places[shown], line[shown], log)
        name, _ = drawable_title(names[number]) if names is not None else ("_", [])
        axes.plot(where, most, color=ink, linewidth=1.2, label=name)
        if (most != least).any():
            axes.fill_between(where, least, most, color=ink, alpha=0.18, linewidth=0)
    if even is not None:
        where, most, _ = _grouped(places[shown], even[shown], log)
        axes.plot(where, most, color="#6b6b76", linewidth=1.0, linestyle="--", label="uniform attention")
    if log:
        axes.set(xscale="log", yscale="log")
    _dress(canvas.axes, x_name, y_name, legend=names is not None or even is not None)
    if title is not None:
        canvas.head(title, _WIDTH)
    canvas.fit(_WIDTH, _HEIGHT)
    return canvas.figure


def _grouped(x: Array, y: Array, log: bool) -> tuple[Array, Array, Array]:
    """Places, largest and smallest of groups of neighbours."""
    if len(x) <= _POINTS:
        return x, y, y
    even = np.geomspace(x[0], x[-1], _POINTS) if log else np.linspace(x[0], x[-1], _POINTS)  # a pixel each
    starts = np.unique(np.searchsorted(x, even))
    return x[starts], np.fmax.reduceat(y, starts), np.fmin.reduceat(y, starts)


def _dress(axes: object, x_name: str, y_name: str, *, legend: bool) -> None:
    from matplotlib.axes import Axes  # noqa: PLC0415  matplotlib is optional

    assert isinstance(axes, Axes)
    for axis, name in ((axes.xaxis, x_name), (axes.yaxis, y_name)):
        shown, families = drawable_title(name)
        axis.set_label_text(shown, size=9, family=families, style="italic", color=INK, parse_math=False, usetex=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(labelsize=8, length=2, color=INK, labelcolor=INK)
    axes.margins(x=0.01)
    if legend:
        box = axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
        for text in box.get_texts():
            text.set(color=INK, parse_math=False, usetex=False)
            text.set_fontfamily(drawable_title(text.get_text())[1])


def _check(lines: Array, names: Sequence[str] | None) -> None:
    if lines.ndim != 2 or 0 in lines.shape:
        raise value_error("profile", "values", "be [points] or [lines, points]", f"shape {list(lines.shape)}")
    if len(lines) > len(_INKS):
        raise value_error("profile", "values", f"have at most {len(_INKS)} lines", len(lines), hint="choose some heads")
    if isinstance(names, str):
        raise type_error("profile", "names", "be a list of strings", "one string")
    if names is not None and len(names) != len(lines):
        raise value_error("profile", "names", f"have one for each of the {len(lines)} lines", len(names))


def _check_line(argument: str, values: Array, points: int) -> None:
    if values.shape != (points,):
        raise value_error("profile", argument, f"have one number for each of the {points} points", list(values.shape))
