"""Mosaics: the small attention maps of all heads in one figure."""

from collections.abc import Sequence
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np

from saccade.matrix import Matrix
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.language import translated
from saccade.viz.arrays import DECADES, Array, as_maps, limits_of, log_limits_of, masked, max_pool, robust_top, scale_of
from saccade.viz.canvas import blank, colours
from saccade.viz.pooled_maps import check_no_lazy_options, maps_of
from saccade.viz.titles import short_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# All in pixels: the longer side of a map, the minimum of the shorter side, the gap between maps, the space above each
# map for its name, and the frame of the highlighted map.
_TILE, _SLIMMEST, _GAP, _NAME, _EDGE = 112, 32, 16, 34, 4
_FEW = 4  # up to this number, maps are always in one row
_TINY = 1e-30  # stands for 0 on a logarithmic scale
SCALES = {
    (False, False): "Each map has its own colour scale, from 0 to its largest weight, sinks aside.",
    (True, False): "All maps share one colour scale, from 0 to the largest weight, sinks aside.",
    (False, True): "Each map has its own logarithmic colour scale: four decades up to its largest weight.",
    (True, True): "All maps share one logarithmic colour scale: four decades up to the largest weight.",
}
"""The sentence about the colour scales of a mosaic, by whether all maps share one and whether it is logarithmic."""
_FRAME, _CHOSEN = (0.80, 0.80, 0.83), (0.0, 0.45, 0.55)


@argument_hints({})
def mosaic(
    weights: object,
    *,
    batch: int = 0,
    title: str | None = None,
    highlight: tuple[int, ...] | None = None,
    shared_scale: bool = False,
    allowed: object = None,
    log: bool = False,
) -> "Figure":
    """Draw the small attention maps of all heads in one figure, each under its name: ``L0 H3`` is layer 0, head 3.

    Each map has its own scale from 0 to its largest weight (or less if there are sinks; see `heatmap`), so that a
    diffuse head shows its shape as clearly as a sharp one. With ``shared_scale``, equal colours mean equal weights in
    all maps. A subtitle says whether maps share a scale. Maps with more cells than pixels show the largest value in
    each group of neighbours.

    Args:
        weights: a lazy matrix of any length, or a list of lazy matrices, one per layer, such as
            ``encoder.matrices(tokens)``; or a tensor, an array or nested lists of shape
            ``[layers, heads, q_len, kv_len]`` (drawn with one row per layer) or ``[heads, q_len, kv_len]``.
        batch: the batch item of lazy matrices to draw.
        title: text above the figure; "every head of every layer" if None, and "" for no title.
        highlight: the map to frame, ``(layer, head)`` or ``(head,)``.
        shared_scale: whether all maps share one colour scale.
        allowed: bool, broadcastable to the weights: True for visible pairs, False for pairs to draw in grey. All pairs
            are visible if None. Not needed for lazy matrices, which have a mask.
        log: whether the colour scale is logarithmic, over four decades below the largest weight; smaller values are
            white.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: ``weights`` are not real numbers.
        ValueError: the number of axes is wrong, no weight is finite, or the ``highlight`` does not exist.
        ImportError: matplotlib is not installed.

    Cost: O(layers * heads * q_len * kv_len) time, and as much memory for dense weights; each lazy matrix takes one
    pass, and memory linear in the lengths. The figure is one image, regardless of the number of maps.
    """
    maps, shape = _read_maps(weights, batch, allowed)
    grid = maps.shape[:-2]
    _check_highlight(highlight, grid)
    canvas = blank()
    flat, limits = _scaled(maps, shared_scale, log)
    height, width = _tile_size(*shape)
    columns = grid[1] if len(grid) == 2 else min(len(flat), max(_FEW, ceil(sqrt(2 * len(flat)))))
    columns = ceil(len(flat) / ceil(len(flat) / columns))  # make the last row as long as possible
    down = ceil(len(flat) / columns) * (height + _NAME) + _EDGE
    sheet = np.ones((down, columns * (width + _GAP) - _GAP + 2 * _EDGE, 3))
    palettes = {signed: colours(signed=signed) for signed in (False, True)}
    for number, index in enumerate(np.ndindex(grid)):
        row, column = divmod(number, columns)
        top, left = row * (height + _NAME) + _NAME, column * (width + _GAP) + _EDGE
        chosen = index == highlight
        edge, ink = (_EDGE, _CHOSEN) if chosen else (1, _FRAME)
        sheet[top - edge : top + height + edge, left - edge : left + width + edge] = ink
        low, high = limits[number]
        pixels = (_enlarged(flat[number], height, width) - low) / (high - low)  # values above 1 get the last colour
        sheet[top : top + height, left : left + width] = palettes[low < 0 and not log](pixels)[..., :3]
        name = short_name(**dict(zip(("layer", "head")[-len(index) :], index, strict=True)))
        weight = "bold" if chosen and name.isascii() else "normal"  # Chinese fonts often have no bold face
        canvas.write(left, top - 5, name, size=7.5, weight=weight, va="bottom")
    if title is None:
        title = translated("Every head (H) of every layer (L)" if len(grid) == 2 else "Every head (H)")
    return canvas.show_pixels(sheet, title, translated(SCALES[shared_scale, log]))


def _read_maps(weights: object, batch: int, allowed: object) -> tuple[Array, tuple[int, int]]:
    """Read the maps of a mosaic; maps of lazy matrices are pooled.

    Return two values: the maps ``[(layers,) heads, rows, columns]``, and the lengths ``(q_len, kv_len)``.
    """
    lazy = weights if isinstance(weights, Matrix) else _layers(weights)
    if lazy is None:
        check_no_lazy_options(batch=batch)
        maps = masked(as_maps(weights), allowed)
        return maps, (maps.shape[-2], maps.shape[-1])
    if allowed is not None:
        raise value_error("allowed", "be omitted for lazy matrices, which have their own mask", "a mask")
    maps = as_maps(maps_of(lazy, batch, _TILE))
    return maps, (lazy if isinstance(lazy, Matrix) else lazy[0]).shape[2:]


def _layers(weights: object) -> Sequence[Matrix] | None:
    """Return the list of lazy matrices passed to a mosaic. If `weights` are dense, return None."""
    given = weights if isinstance(weights, list | tuple) else ()
    layers = [layer for layer in given if isinstance(layer, Matrix)]
    return layers if layers and len(layers) == len(given) else None


def _scaled(maps: Array, shared_scale: bool, log: bool) -> tuple[Array, list[tuple[float, float]]]:
    """Return the maps of a mosaic ``[maps, rows, columns]``, and the two ends of each map's colour scale.

    With ``log``, both are logarithms.
    """
    flat = maps.reshape(-1, *maps.shape[-2:])
    if not log:
        if not shared_scale:
            return flat, [scale_of(cells, None)[:2] for cells in flat]
        low, high = limits_of(maps, None)
        end = float(np.fmax.reduce([robust_top(cells) for cells in flat]))
        return flat, [(low, end if 0 < end < high else high)] * len(flat)
    log_limits_of(maps, None)  # raises if no value is above 0
    flat = np.log10(np.maximum(flat, _TINY))
    tops = np.fmax.reduce(flat, axis=(1, 2))
    tops = np.full_like(tops, np.nanmax(tops)) if shared_scale else tops
    return flat, [(float(top) - DECADES, float(top)) if top > np.log10(_TINY) else (0.0, 1.0) for top in tops]


def _check_highlight(highlight: tuple[int, ...] | None, grid: tuple[int, ...]) -> None:
    if highlight is None:
        return
    if len(highlight) != len(grid) or not all(0 <= i < n for i, n in zip(highlight, grid, strict=True)):
        names = "(layer, head)" if len(grid) == 2 else "(head,)"
        raise value_error("highlight", f"be {names} below {grid}", highlight)


def _tile_size(q_len: int, kv_len: int) -> tuple[int, int]:
    """Return the height and width in pixels of each map in a mosaic."""
    longer = max(q_len, kv_len)
    return max(round(_TILE * q_len / longer), _SLIMMEST), max(round(_TILE * kv_len / longer), _SLIMMEST)


def _enlarged(matrix: Array, height: int, width: int) -> Array:
    """Resize a map of a mosaic to ``[height, width]`` pixels: enlarge cells, or pool them to their largest value."""
    pooled = max_pool(matrix, height, width)
    y = np.arange(height) * pooled.shape[0] // height
    x = np.arange(width) * pooled.shape[1] // width
    return pooled[y][:, x]
