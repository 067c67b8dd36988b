"""The upper end of a colour scale, such that a key that everybody looks at does not bleach the rest."""

from __future__ import annotations

import warnings

import numpy as np

from saccade.viz.arrays import Array, limits_of, log_limits_of

__all__ = ["robust_top", "scale_of"]

_FEWEST = 4  # rows that see a column: fewer say nothing of what most rows do
_SINK = 5.0  # times the mean weight: the median of what a sink receives is at least that
_ROWS = 95.0  # percent of rows whose largest weight, sinks aside, is inside of the scale
_WORTH_IT = 0.5  # of the largest weight: a scale that would end above that ends at the largest weight
_DECADES = 3  # below the largest weight: the scale never ends lower, or nothing at all would look like much


def scale_of(cells: Array, limits: tuple[float, float] | None, *, log: bool = False) -> tuple[float, float, bool]:
    """The two ends of a scale, and whether values lie above the upper one; numbers of both signs have one around 0."""
    low, high = (log_limits_of if log else limits_of)(cells, limits)
    if limits is None and not log and low < 0:
        return -max(high, -low), max(high, -low), False
    top = float(np.fmax.reduce(cells, axis=None))
    if limits is None and not log and (end := robust_top(cells)) < top:
        high = end
    return low, high, top > high


def robust_top(cells: Array) -> float:
    """Where the scale of a map of weights ends: at the largest, unless a few keys or queries stand far above the rest.

    Columns that at least half of their rows give five times the mean weight are *sinks*, and do not count; nor do the
    5 % of rows whose largest remaining weight is largest. If what remains stays below half of the largest weight,
    the scale ends there, but never below a thousandth of the largest weight.

    Args:
        cells: ``[rows, columns]``; NaN for what is hidden. Numbers below 0 are no weights: the largest is the end.
    """
    top = float(np.fmax.reduce(cells, axis=None))
    if not top > 0 or float(np.fmin.reduce(cells, axis=None)) < 0:
        return top
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows and columns that are hidden whole
        is_sink = np.nanmedian(cells, axis=0) >= _SINK * np.nanmean(cells)
    is_sink &= np.isfinite(cells).sum(axis=0) >= _FEWEST
    largest = np.fmax.reduce(cells[:, ~is_sink], axis=1, initial=np.nan)
    largest = largest[np.isfinite(largest)]
    end = float(np.percentile(largest, _ROWS, method="higher")) if largest.size else 0.0
    return max(end, top / 10**_DECADES) if 0 < end < _WORTH_IT * top else top
