"""Draw error against time, one point for each mechanism."""

import math
from typing import TYPE_CHECKING

from saccade.mechanisms.compare import CLOSE, ROUGH, Comparison
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.validation import check_type
from saccade.viz.canvas import INK, PLAIN, blank, dress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 4.4, 3.2  # inches
_EXACT = "#7a1f5c"


@argument_hints({})
def tradeoff(comparison: Comparison, *, title: str | None = None) -> "Figure":
    """Draw the error of mechanisms against their time: further left is faster, further down is more accurate.

    Points are numbered, and named at the side. A dashed line marks the time of exact attention, two dotted ones the
    errors up to which a result is close, or of any use. Mechanisms that were refused, or have no error, are left out.
    Both axes are logarithmic; an error of 0 is drawn at the bottom.

    Args:
        comparison: as `saccade.compare` returns it.
        title: text above the figure.

    Returns:
        A figure outside pyplot: it is neither shown nor to be closed. `save` writes it.

    Raises:
        TypeError: no comparison.
        ValueError: no mechanism in it has an error.
        ImportError: matplotlib is not installed.
    """
    check_type("comparison", comparison, Comparison, "be what saccade.compare returns")
    rows = [row for row in comparison.rows if math.isfinite(row.error_median) and math.isfinite(row.seconds)]
    if not rows:
        raise value_error("comparison", "hold a mechanism with an error", "none")
    canvas = blank()
    axes = canvas.axes
    floor = min([row.error_median for row in rows if row.error_median > 0] + [CLOSE]) / 3
    axes.set(xscale="log", yscale="log", xlabel="milliseconds", ylabel="median relative error")
    times = [row.seconds * 1e3 for row in rows]
    errors = [max(row.error_median, floor) for row in rows]
    axes.scatter(times, errors, s=26, color=INK, zorder=3)
    for number, (row, x, y) in enumerate(zip(rows, times, errors, strict=True), start=1):
        axes.annotate(str(number), (x, y), (5, 4), textcoords="offset points", size=8, color=INK)
        beside = (1.03, 1 - number * 0.07)
        axes.annotate(f"{number}  {row.name}", beside, xycoords="axes fraction", size=8, **PLAIN)
    exact = comparison.exact_seconds * 1e3
    axes.axvline(exact, color=_EXACT, linestyle="--", linewidth=1)
    axes.annotate("exact", (exact, floor), (3, 2), textcoords="offset points", size=8, color=_EXACT)
    for limit in (CLOSE, ROUGH):
        axes.axhline(limit, color=INK, linestyle=":", linewidth=0.8)
    ends = [*times, exact]
    axes.set(xlim=(min(ends) / 2, max(ends) * 4), ylim=(floor / 1.5, max(*errors, ROUGH) * 2))
    dress(axes)
    return canvas.finished(_WIDTH, _HEIGHT, title)
