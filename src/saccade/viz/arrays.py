"""Convert tensors and nested lists to arrays for figures, pool the arrays, and choose the ends of colour scales."""

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from saccade.support.errors import type_error, value_error

DECADES = 4  # decades of a logarithmic scale without limits: down to 1/10,000 of the largest value
Array = npt.NDArray[np.floating[Any]]
_MIN_ROWS = 4  # a sink must be visible to at least this many rows
_SINK = 5.0  # a sink's median weight is at least this multiple of the mean weight
_ROWS = 95.0  # percentage of rows whose largest weight, ignoring sinks, is within the scale
_MAX_CUT = 0.5  # a scale is cut only if it then ends below this fraction of the largest weight
_NARROW = 0.5  # if the smallest value is above this share of the largest, the scale starts at the smallest value
_CUT_DECADES = 3  # a scale is cut by at most this many decades, so that tiny weights do not look large


def as_matrix(weights: object) -> Array:
    """Convert a tensor, an array or nested lists to an array ``[q_len, kv_len]``; infinities become NaN.

    Raises:
        TypeError: the values are not numbers.
        ValueError: the array does not have two axes, is empty, or has no finite value.
    """
    return _checked(weights, "[q_len, kv_len]", axes=(2,))


def as_maps(weights: object) -> Array:
    """Convert weights to an array of maps to draw, ``[layers, heads, q_len, kv_len]`` or ``[heads, q_len, kv_len]``."""
    return _checked(weights, "[heads, q_len, kv_len] or [layers, heads, q_len, kv_len]", axes=(3, 4))


def as_numbers(argument: str, values: object) -> Array:
    """Convert a tensor, an array or nested lists to an array of real numbers.

    Raises:
        TypeError: the values are not real numbers.
        ValueError: rows have different lengths.
    """
    if isinstance(values, torch.Tensor):
        tensor = values.detach()
        if tensor.is_complex():
            raise type_error(argument, "be real numbers", tensor.dtype)
        # NumPy has no bfloat16; float32 is precise enough for figures unless the dtype is float64.
        return tensor.to("cpu", torch.float64 if tensor.dtype == torch.float64 else torch.float32).numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise value_error(argument, "have rows of equal length", "rows of different lengths") from None
    if array.dtype.kind not in "fiub":
        raise type_error(argument, "be real numbers", f"{type(values).__name__} of dtype {array.dtype}")
    return array.astype(np.float64 if array.dtype == np.float64 else np.float32, copy=False)


def max_pool(matrix: Array, rows: int, columns: int) -> Array:
    """Pool an array to at most ``[rows, columns]`` cells for a figure; a cell keeps the value farthest from 0.

    A mean would almost erase a thin diagonal. NaN is ignored if a group contains any number.
    """
    for axis, most in enumerate((rows, columns)):
        if matrix.shape[axis] > most:
            starts = np.arange(most) * matrix.shape[axis] // most
            largest, least = (pick.reduceat(matrix, starts, axis=axis) for pick in (np.fmax, np.fmin))
            matrix = np.where(least < -largest, least, largest)
    return matrix


def limits_of(matrix: Array, limits: tuple[float, float] | None) -> tuple[float, float]:
    """Return the two ends of an array's colour scale: ``limits`` or, if None, ends that are computed from the values.

    If all values have the same sign, one end is 0, so that a weight's colour shows its size.
    """
    if limits is not None:
        low, high = (float(limit) for limit in limits)
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise value_error("limits", "be two finite numbers, low < high", (low, high))
        return low, high
    low, high = float(np.fmin.reduce(matrix, axis=None)), float(np.fmax.reduce(matrix, axis=None))
    if low >= 0:
        low = 0.0
    elif high <= 0:
        high = 0.0
    return (low, high) if low < high else (0.0, 1.0)  # also if no value is finite, because NaN compares False


def contrast_limits(values: Array, limits: tuple[float, float] | None) -> tuple[float, float]:
    """Return the two ends of a colour scale with a bar: ``limits`` or, if None, ends computed from the values.

    If an end is below 0, the scale is made symmetric around 0. Otherwise, a scale without ``limits`` starts at 0; if
    the smallest value is above half of the largest, it starts at the smallest value instead, because all colours would
    otherwise be similar. Values that are all equal and above 0 get the colour in the middle.
    """
    if limits is not None:
        low, high = limits_of(values, limits)
        return (-max(-low, high), max(-low, high)) if low < 0 else (low, high)
    low, high = float(np.fmin.reduce(values, axis=None)), float(np.fmax.reduce(values, axis=None))
    if low < 0:
        return -max(-low, high), max(-low, high)
    if low == high:
        return (0.0, 2.0 * high) if high > 0 else (0.0, 1.0)
    return (low, high) if low > _NARROW * high else (0.0, high)


def log_limits_of(matrix: Array, limits: tuple[float, float] | None) -> tuple[float, float]:
    """Return the two ends of a logarithmic colour scale: ``limits`` or, if None, four decades up to the largest value.

    Raises:
        ValueError: limits are not above 0, or no value is above 0.
    """
    if limits is not None:
        low, high = limits_of(matrix, limits)
        if low <= 0:
            raise value_error("limits", "be above 0 on a logarithmic scale", (low, high))
        return low, high
    high = float(np.fmax.reduce(matrix, axis=None))
    if not high > 0:
        hint = "log=False draws all numbers"
        raise value_error("weights", "contain a number above 0 for a logarithmic scale", "none", hint=hint)
    return high / 10**DECADES, high


def masked(matrix: Array, allowed: object) -> Array:
    """Return a copy of an attention matrix for a figure, with NaN where ``allowed`` is False.

    Args:
        matrix: ``[..., q_len, kv_len]``.
        allowed: bool, broadcastable to the matrix; None if all pairs are visible.
    """
    if allowed is None:
        return matrix
    visible = allowed.detach().cpu().numpy() if isinstance(allowed, torch.Tensor) else np.asarray(allowed)
    if visible.dtype != np.bool_:
        raise type_error("allowed", "be bool", visible.dtype, hint="for instance mask.to_dense(q_len, kv_len)")
    while visible.ndim > matrix.ndim and len(visible) == 1:  # Mask.to_dense returns axes for batch and heads
        visible = visible[0]
    try:
        visible = np.broadcast_to(visible, matrix.shape)
    except ValueError:
        rule = f"be broadcastable to {list(matrix.shape)}"
        raise value_error("allowed", rule, f"shape {list(visible.shape)}") from None
    if not visible.any():
        raise value_error("allowed", "allow at least one pair", "none")
    return np.where(visible, matrix, np.nan)


def _checked(weights: object, shape: str, axes: tuple[int, ...]) -> Array:
    array = as_numbers("weights", weights)
    if array.ndim not in axes:
        raise value_error("weights", f"be {shape}", f"shape {list(array.shape)}")
    if array.size == 0:
        raise value_error("weights", "have no empty axis", f"shape {list(array.shape)}")
    finite = np.isfinite(array)
    if not finite.any():
        raise value_error("weights", "contain at least one finite number", "only NaN and infinities")
    return array if finite.all() else np.where(finite, array, np.nan)


def scale_of(cells: Array, limits: tuple[float, float] | None, *, log: bool = False) -> tuple[float, float, bool]:
    """Return the two ends of an array's colour scale, and whether some values exceed it.

    A linear scale without ``limits`` is symmetric around 0 if any value is below 0.
    """
    low, high = (log_limits_of if log else limits_of)(cells, limits)
    if limits is None and not log and low < 0:
        return -max(high, -low), max(high, -low), False
    top = float(np.fmax.reduce(cells, axis=None))
    if limits is None and not log and (end := robust_top(cells)) < top:
        high = end
    return low, high, top > high


def robust_top(cells: Array) -> float:
    """Return the upper end of a colour scale, ignoring a few keys and queries with much larger weights than the rest.

    A column is a *sink* if at least half of the rows give it five times the mean weight. Sinks are ignored, and so are
    the 5 % of rows with the largest weights outside sinks. If all other weights are below half of the largest weight,
    the scale ends at the largest of the other weights, but never below a thousandth of the largest weight.

    Args:
        cells: ``[rows, columns]``; NaN marks masked cells. If a number is below 0, the numbers are not attention
            weights, and the scale ends at the largest number.
    """
    top = float(np.fmax.reduce(cells, axis=None))
    if not top > 0 or float(np.fmin.reduce(cells, axis=None)) < 0:
        return top
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # warnings about rows and columns that are completely hidden
        is_sink = np.nanmedian(cells, axis=0) >= _SINK * np.nanmean(cells)
    is_sink &= np.isfinite(cells).sum(axis=0) >= _MIN_ROWS
    largest = np.fmax.reduce(cells[:, ~is_sink], axis=1, initial=np.nan)
    largest = largest[np.isfinite(largest)]
    end = float(np.percentile(largest, _ROWS, method="higher")) if largest.size else 0.0
    return max(end, top / 10**_CUT_DECADES) if 0 < end < _MAX_CUT * top else top
