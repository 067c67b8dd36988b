"""Names and tick labels along the axes of a map; some labels are skipped if there are too many to read."""

import re
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.plan.key_ranges import Ints
from saccade.support.columns import display_width
from saccade.support.errors import type_error, value_error
from saccade.support.language import translated
from saccade.viz.canvas import INK, PLAIN
from saccade.viz.fonts import drawable_labels, drawable_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis, YAxis

_SIZE = 9.0  # points
_SMALL = 1e-6  # smallest number that is written in full on a logarithmic axis
_FEW_DECADES = 2  # a logarithmic axis that is shorter than this is also numbered at 2 and 5
_COLUMN = 0.62 * _SIZE  # points of one column of text, with a margin
# Names of the columns, rows and entries of an attention matrix in all figures, also where words are the tick labels.
KEY, QUERY, WEIGHT = "key", "query", "weight"
# CJK characters and punctuation.
_WIDE = "\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"
_STACKED = re.compile(rf"（[^）]*）|[{_WIDE}]|[^{_WIDE}]+")


def check_labels(argument: str, labels: Sequence[str] | None, count: int, lines: str) -> None:
    """Raise an error unless `labels` is None or has one tick label for each of ``count`` rows or columns."""
    if isinstance(labels, str):
        hint = "list(text) is one label per character."
        raise type_error(argument, "be a list of strings", "one string", hint=hint)
    if labels is not None and len(labels) != count:
        raise value_error(argument, f"have one label for each of the {count} {lines}", len(labels))


def name_columns(
    axes: "Axes",
    labels: Sequence[str] | None,
    name: str,
    count: int,
    width: float,
    positions: Ints | None = None,
    *,
    below: bool = False,
) -> None:
    """Write tick labels, or numbers, above or ``below`` a map ``width`` inches wide, slanted if they do not fit."""
    if not below:
        axes.xaxis.set_label_position("top")
        axes.xaxis.tick_top()
    slanted = _write_ticks(axes.xaxis, labels, name, count, width, positions, across=True)
    anchor: dict[str, Any] = {"ha": "right", "va": "top"} if below else {"ha": "left", "va": "bottom"}
    for label in axes.get_xticklabels() if slanted else ():
        label.set(rotation=45, rotation_mode="anchor", **anchor)


def name_rows(
    axes: "Axes",
    labels: Sequence[str] | None,
    name: str,
    count: int,
    height: float,
    positions: Ints | None = None,
) -> None:
    """Write tick labels, or numbers, to the left of a map ``height`` inches high."""
    _write_ticks(axes.yaxis, labels, name, count, height, positions, across=False)


def name_axis(axis: "Axis", name: str) -> None:
    """Write the name of a map's axis next to the axis; the Chinese characters of a vertical name stay upright."""
    from matplotlib.axis import YAxis  # noqa: PLC0415  matplotlib is optional

    shown, families = drawable_title(translated(name))
    style = "normal" if _has_chinese(shown) else "italic"
    axis.set_label_text(shown, size=_SIZE, family=families, style=style, **PLAIN)
    if isinstance(axis, YAxis):
        keep_upright(axis)


def keep_upright(axis: "YAxis") -> None:
    """Stack the characters of a vertical axis's name if it contains Chinese, which is hard to read when rotated."""
    name = axis.label.get_text()
    if _has_chinese(name):
        side = "right" if str(axis.get_label_position()) == "left" else "left"
        axis.label.set(rotation=0, rotation_mode="default", ha=side, va="center", multialignment="center")
        axis.label.set(text=stacked(name), linespacing=1.0)


def stacked(name: str) -> str:
    """Put each Chinese character of a name on a line of its own; other words, and a unit in parentheses, are not split.

    Example:
        >>> stacked("延迟（毫秒）").splitlines()
        ['延', '迟', '（毫秒）']
        >>> stacked("第 10 层").splitlines()
        ['第', '10', '层']
    """
    return "\n".join(piece for match in _STACKED.finditer(name) if (piece := match[0].strip()))


def _has_chinese(name: str) -> bool:
    return re.search(f"[{_WIDE}]", name) is not None


def plain_number(x: float) -> str:
    """Format a positive number for a logarithmic axis: ``1,000``, ``0.00001``, and ``1e-07`` if it is even smaller."""
    return f"{x:,.0f}" if x >= 1 else f"{x:.6f}".rstrip("0") if x >= _SMALL else f"{x:g}"


def number_logarithmically(axis: "Axis", low: float, high: float) -> None:
    """Write plain numbers along a logarithmic axis from ``low`` to ``high``.

    Powers of ten are numbered. On an axis of less than two decades, 2 and 5 times these powers are also numbered.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415  matplotlib is optional

    is_short = high < low * 10**_FEW_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_short else (1.0,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda x, _: plain_number(x)))
    axis.set_minor_formatter(NullFormatter())


def _write_ticks(
    axis: "Axis",
    labels: Sequence[str] | None,
    name: str,
    count: int,
    length: float,
    positions: Ints | None,
    *,
    across: bool,
) -> bool:
    """Write tick labels along an axis of a map; return whether they must be slanted to fit."""
    name_axis(axis, name)
    if labels is None:
        axis.set_tick_params(which="major", length=3, color=INK, labelcolor=INK, labelsize=_SIZE)
        _write_numbers(axis, np.arange(count) if positions is None else positions, length)
        return False
    drawable, families = drawable_labels(labels)
    room = length * 72 / count  # points per cell
    slanted = across and max(map(display_width, drawable)) * _COLUMN > room
    every = ceil((1.45 if slanted else 1.2) * _SIZE / room) if slanted or not across else 1
    axis.set_ticks(range(0, count, every), labels=drawable[::every], size=_SIZE, family=families, **PLAIN)
    axis.set_tick_params(which="major", length=0)
    return slanted


def _write_numbers(axis: "Axis", positions: Ints, length: float) -> None:
    """Number the ticks of an axis with round numbers or, if positions are not consecutive, with selected positions."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  matplotlib is optional

    # As many ticks as fit across, also on the other axis, so that a square map is numbered alike on both. Small maps
    # number every cell.
    room = (len(f"{positions.max():,}") + 3) * _COLUMN
    steps = max(1, min(len(positions), int(length * 72 / room), 12))
    locator = MaxNLocator(nbins=steps, integer=True, steps=[1, 2, 5, 10])
    first = int(positions[0]) if (np.diff(positions) == 1).all() else 0
    ticks = np.asarray(locator.tick_values(first, first + len(positions) - 1)).astype(np.int64) - first
    ticks = np.unique(ticks[(ticks >= 0) & (ticks < len(positions))])
    # -1 marks padding.
    axis.set_ticks(ticks, labels=[f"{position:,}" if position >= 0 else "–" for position in positions[ticks].tolist()])
