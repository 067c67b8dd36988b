"""Charts: profiles (lines), bars of channel weights, and the tradeoff between error and time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.mechanisms.comparison_result import CLOSE, ROUGH, Comparison
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.language import translated
from saccade.support.validation import check_type
from saccade.viz.arrays import Array, as_matrix, as_numbers, limits_of, max_pool
from saccade.viz.canvas import DPI, GREY, INK, INKS, PLAIN, blank, colours, dress, whole_pixels
from saccade.viz.fonts import drawable_title
from saccade.viz.ticks import WEIGHT, check_labels, name_axis, name_columns, number_logarithmically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALIKE = 0.05  # relative difference up to which a line covers another one
_PROFILE_WIDTH, _PROFILE_HEIGHT = 6.4, 2.8  # inches
_POINTS, _LOG_POINTS = 960, 160  # maximum number of points: the width in pixels; fewer on a log axis, where lines blur


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
    """Draw a line chart of numbers, such as the attention that keys receive or a `saccade.statistics.LagProfile`.

    If there are more points than pixels, the line follows the largest number in each group of neighbours, and a shaded
    area reaches down to the smallest, so that even a single peak stays visible.

    Args:
        values: ``[points]`` or ``[lines, points]``, with at most 8 lines.
        x: coordinates of the points, ``[points]``, ascending; 0, 1, 2, … if None.
        names: one name for each line.
        baseline: ``[points]``, drawn as a dashed line, such as the values for uniform attention.
        title: text above the figure.
        x_name: name of the horizontal axis.
        y_name: name of the vertical axis, with its unit.
        log: whether both axes are logarithmic; only numbers above 0 are then drawn.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: the values are not real numbers, or ``names`` is a single string.
        ValueError: the number of axes is wrong, there are too many lines, lengths do not match, or there is nothing to
            show.
        ImportError: matplotlib is not installed.

    Cost: O(lines * points).
    """
    coordinates, lines, even = _read_lines(values, x, baseline, log)
    check_labels("names", names, len(lines), "lines")
    canvas = blank()
    axes = canvas.axes
    for number, line in enumerate(lines):
        ink = INKS[number % len(INKS)]
        group_x, most, least = _grouped(coordinates, line, log)
        name, _ = drawable_title(names[number]) if names is not None else ("_", [])
        above = sum(np.allclose(line, other, rtol=_ALIKE, equal_nan=True) for other in lines[number + 1 :])
        axes.plot(group_x, most, color=ink, linewidth=1.2 + 2.0 * above, label=name)  # wider, so that it is visible
        if (most != least).any():
            axes.fill_between(group_x, least, most, color=ink, alpha=0.18, linewidth=0)
    if even is not None:
        group_x, most, _ = _grouped(coordinates, even, log)
        axes.plot(group_x, most, color="#6b6b76", linewidth=1.0, linestyle="--", label=translated("uniform attention"))
    if log:
        axes.set(xscale="log", yscale="log")
        for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            number_logarithmically(axis, *ends)
    _label_axes(axes, x_name, y_name, legend=names is not None or even is not None)
    return canvas.finished(_PROFILE_WIDTH, _PROFILE_HEIGHT, title)


def _read_lines(values: object, x: object, baseline: object, log: bool) -> tuple[Array, Array, Array | None]:
    """Check the data of a profile; return its coordinates, its lines ``[lines, points]``, and its baseline."""
    lines = as_numbers("values", values)
    lines = lines[None] if lines.ndim == 1 else lines
    if lines.ndim != 2 or 0 in lines.shape:
        raise value_error("values", "be [points] or [lines, points]", f"shape {list(lines.shape)}")
    if len(lines) > len(INKS):
        raise value_error("values", f"have at most {len(INKS)} lines", len(lines), hint="choose some heads")
    points = lines.shape[1]
    coordinates = np.arange(points, dtype=np.float64) if x is None else _line("x", x, points).astype(np.float64)
    if (np.diff(coordinates) <= 0).any():
        raise value_error("x", "increase", "values that do not")
    even = None if baseline is None else _line("baseline", baseline, points)
    drawn = coordinates > 0 if log else np.ones(points, dtype=bool)
    lines = lines[:, drawn]
    if not np.isfinite(lines).any() or (log and not (np.nan_to_num(lines) > 0).any()):
        raise value_error("values", "contain a number to show", "none", hint="log=True shows numbers above 0")
    return coordinates[drawn], lines, None if even is None else even[drawn]


def _line(argument: str, values: object, points: int) -> Array:
    line = as_numbers(argument, values)
    if line.shape != (points,):
        raise value_error(argument, f"have one number for each of the {points} points", list(line.shape))
    return line


def _grouped(x: Array, y: Array, log: bool) -> tuple[Array, Array, Array]:
    """Pool neighbouring points of a profile chart.

    Return three arrays: the coordinate of each group, its largest number and its smallest number.
    """
    groups = _LOG_POINTS if log else _POINTS
    if len(x) <= groups:
        return x, y, y
    even = np.geomspace(x[0], x[-1], groups) if log else np.linspace(x[0], x[-1], groups)
    starts = np.unique(np.searchsorted(x, even))
    return x[starts], np.fmax.reduceat(y, starts), np.fmin.reduceat(y, starts)


def _label_axes(axes: "Axes", x_name: str, y_name: str, *, legend: bool) -> None:
    for axis, name in ((axes.xaxis, x_name), (axes.yaxis, y_name)):
        name_axis(axis, name)
    dress(axes)
    axes.margins(x=0.01)
    if legend:
        box = axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
        for text in box.get_texts():
            text.set(**PLAIN)
            text.set_fontfamily(drawable_title(text.get_text())[1])


_BAR, _NARROWEST, _WIDEST, _BAR_HEIGHT = 0.16, 2.4, 9.0, 1.5  # inches: a bar, limits of the width, and the height
_GATE = (0.0, 1.0)


@argument_hints({})
def channel_weights(
    weights: object,
    *,
    x_labels: Sequence[str] | None = None,
    title: str | None = None,
    x_name: str = "channel",
    y_name: str = WEIGHT,
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """Draw a bar chart of channel weights, in channel order.

    The height and the colour of a bar both show its weight. If there are too many channels, each bar shows the largest
    weight in a group of neighbours, but the axis still counts channels. A weight that is not finite gets no bar.

    Args:
        weights: ``[channels]``: a tensor of any dtype and device, an array or a list, such as one row of
            `saccade.vision.ChannelAttention.weights`.
        x_labels: one per channel, shown literally, without math mode; numbers from 0 if None.
        title: text above the figure.
        x_name: name of the horizontal axis.
        y_name: name of the vertical axis.
        limits: the two ends of the vertical axis. If None, they are 0 and 1 if all weights lie between 0 and 1;
            otherwise they are computed from the weights.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: ``weights`` are not real numbers, or the labels are a single string.
        ValueError: the weights do not have one axis, none is finite, or the number of labels is wrong.
        ImportError: matplotlib is not installed.

    Cost: O(channels).
    """
    row = as_numbers("weights", weights)
    if row.ndim != 1:
        hint = "gates[0] is the row of the first image" if row.ndim == 2 else None
        raise value_error("weights", "be [channels]", f"shape {list(row.shape)}", hint=hint)
    row = as_matrix(row[None])
    channels = row.shape[1]
    check_labels("x_labels", x_labels, channels, "channels")
    if limits is None and np.nanmin(row) >= 0 and np.nanmax(row) <= 1:
        limits = _GATE
    low, high = limits_of(row, limits)
    canvas = blank()
    width = whole_pixels(float(np.clip(channels * _BAR, _NARROWEST, _WIDEST)))
    # At least two pixels per bar, so that neighbours do not share a pixel.
    bars = max_pool(row, 1, int(width * DPI / 2))[0]
    step = channels / len(bars)
    centres = (np.arange(len(bars)) + 0.5) * step - 0.5
    share = np.nan_to_num((bars - low) / (high - low)).clip(0, 1)
    axes = canvas.axes
    base = min(max(0.0, low), high)
    gap = 0.8 if width * DPI / len(bars) > 6 else 1.0
    axes.bar(centres, bars - base, bottom=base, width=gap * step, color=colours()(0.25 + 0.65 * share))
    axes.set(xlim=(-0.5, channels - 0.5), ylim=(low, high))
    name_columns(axes, x_labels, x_name, channels, width, below=True)
    name_axis(axes.yaxis, y_name)
    dress(axes)
    axes.tick_params(axis="x", length=0 if x_labels is not None else 2)
    return canvas.finished(width, _BAR_HEIGHT, title)


_WIDTH, _HEIGHT = 4.4, 3.2  # inches
_EXACT = "#7a1f5c"
_TOUCHING = 1.12  # the numbers of two points overlap if their times and their errors differ by less than this ratio


@argument_hints({})
def tradeoff(comparison: Comparison, *, title: str | None = None) -> "Figure":
    """Draw a tradeoff chart of mechanisms: points further left are faster, and points further down more accurate.

    Points are numbered, with their names listed at the side. A dashed line marks the time of exact attention, and
    dotted lines mark the largest errors that count as "close" and as "rough". Mechanisms without an error (because they
    do not support the inputs) are omitted. Both axes are logarithmic; an error of 0 is drawn at the bottom.

    Args:
        comparison: the result of `saccade.compare`.
        title: text above the figure.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: the argument is not a comparison.
        ValueError: no mechanism in the comparison has an error.
        ImportError: matplotlib is not installed.
    """
    check_type("comparison", comparison, Comparison, "be a result of saccade.compare")
    rows = [row for row in comparison.rows if math.isfinite(row.error_median) and math.isfinite(row.seconds)]
    if not rows:
        raise value_error("comparison", "contain a mechanism with an error", "none")
    canvas = blank()
    axes = canvas.axes
    floor = min([row.error_median for row in rows if row.error_median > 0] + [CLOSE]) / 3
    axes.set(xscale="log", yscale="log")
    name_axis(axes.xaxis, "milliseconds")
    name_axis(axes.yaxis, "median relative error")
    times = [row.seconds * 1e3 for row in rows]
    errors = [max(row.error_median, floor) for row in rows]
    axes.scatter(times, errors, s=26, color=INK, zorder=3)
    for number, row in enumerate(rows, start=1):
        beside = (1.12, 1 - number * 0.07)
        axes.annotate(f"{number}  {row.name}", beside, xycoords="axes fraction", size=8, **PLAIN)
    for x, y, numbers in _close_together(times, errors):
        axes.annotate(", ".join(numbers), (x, y), (5, 4), textcoords="offset points", size=8, color=INK)
    exact = comparison.exact_seconds * 1e3
    axes.axvline(exact, color=_EXACT, linestyle="--", linewidth=1)
    label, families = drawable_title(translated("exact"))
    style: dict[str, Any] = {"textcoords": "offset points", "size": 8, "color": _EXACT, "family": families}
    axes.annotate(label, (exact, floor), (3, 2), **style)
    for limit, name in ((CLOSE, translated("close")), (ROUGH, translated("rough"))):
        axes.axhline(limit, color=INK, linestyle=":", linewidth=0.8)
        where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "family": drawable_title(name)[1]}
        axes.annotate(name, (1.01, limit), size=8, color=GREY, va="center", **where)
    ends = [*times, exact]
    axes.set(xlim=(min(ends) / 2, max(ends) * 2), ylim=(floor / 1.5, max(*errors, ROUGH) * 2))
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        number_logarithmically(axis, *limits)
    dress(axes)
    return canvas.finished(_WIDTH, _HEIGHT, title)


def _close_together(times: Sequence[float], errors: Sequence[float]) -> list[tuple[float, float, list[str]]]:
    """Return the points of a tradeoff chart with their numbers; points that are too close to each other are merged."""
    groups: list[tuple[float, float, list[str]]] = []
    for number, (x, y) in enumerate(zip(times, errors, strict=True), start=1):
        for left, low, numbers in groups:
            if max(x / left, left / x) < _TOUCHING and max(y / low, low / y) < _TOUCHING:
                numbers.append(str(number))
                break
        else:
            groups.append((x, y, [str(number)]))
    return groups
