"""Encode a page's numbers compactly as bytes, and bytes as text that browsers decode without libraries."""

import base64
import json
import math
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.viz.arrays import Array

DECADES = 6  # number of decades below its largest weight that a map's colours cover
_ZERO = 128  # the level of 0 if weights have both signs


def largest_weights(cells: Array) -> list[float]:
    """Return the largest absolute weight in each head's map, or 0 if no weight is finite.

    Args:
        cells: the maps, ``[heads, rows, columns]``.
    """
    sizes = np.abs(np.where(np.isfinite(cells), cells, 0.0))
    return [float(top) for top in sizes.max(axis=(1, 2), initial=0.0)]


def levels(cells: Array, top: float, *, is_signed: bool) -> npt.NDArray[np.uint8]:
    """Encode a map as one byte per cell, on a logarithmic scale of six decades.

    Neighbouring levels differ by 6 %, or by 12 % if weights may be below 0. Weights are rounded away from 0, so that no
    weight exceeds its level. Level 0 marks a masked cell. Without signs, 255 is ``top``, and 1 is any weight more than
    six decades below it. With signs, 255 is ``top``, 128 is 0 and 1 is ``-top``.

    Args:
        cells: the weights; NaN marks masked cells.
        top: the largest absolute weight.
        is_signed: whether weights may be below 0.
    """
    steps = 254 - _ZERO if is_signed else 253
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(np.abs(cells) / top) if top > 0 else np.full(cells.shape, -np.inf)
    scaled = np.clip(logs / DECADES + 1.0, -1.0, 1.0)  # 1 for the largest, 0 at six decades below it
    level = np.where(scaled >= 0, np.ceil(scaled * steps) + 1, 0)
    shown = _ZERO + np.where(cells < 0, -level, level) if is_signed else 1 + level
    return np.where(np.isnan(cells), 0, shown).astype(np.uint8)


def halves(numbers: Array, top: float) -> bytes:
    """Encode numbers for a page as float16 fractions of ``top``, with an accuracy of 0.05 %."""
    parts = numbers / top if top > 0 else np.zeros_like(numbers)
    return np.clip(np.nan_to_num(parts), -1.0, 1.0).astype("<f2").tobytes()


def packed(data: bytes) -> str:
    """Compress bytes for a page and encode them in base64."""
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def as_json(value: Any) -> bytes:
    """Encode a value as JSON for a page; numbers are rounded to six digits, and become null if they are not finite."""
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
