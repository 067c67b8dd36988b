"""Overlays: the patches of an image that the words of a text attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from saccade.matrix import Matrix
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import kind, shown, type_error, value_error
from saccade.support.validation import check_number, is_integer
from saccade.viz.arrays import Array, as_numbers, contrast_limits
from saccade.viz.blending import add_blended_scale, blend
from saccade.viz.canvas import blank
from saccade.viz.overlays import as_colours, as_grey, resized
from saccade.viz.pooled_maps import check_batch_and_head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE, _GAP, _NAME = 330, 18, 26  # pixels: longer side of an image, gap between images, space for a name
_ACROSS = 4  # maximum number of images in a row
_MAX_PREFIX = 8  # maximum number of keys (class and register tokens) that are skipped before the patches

Queries = int | range | Mapping[str, int | range]
"""The tokens of one word, or of several words by name."""


@argument_hints({})
def overlay(
    image: object,
    weights: object,
    *,
    queries: Queries | None = None,
    head: int | None = None,
    batch: int = 0,
    patches: object = None,
    grid: tuple[int, int] | None = None,
    title: str | None = None,
    opacity: float = 0.75,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw the patches of an image that words attend to: first the image, then the image under each word's weights.

    The patches are drawn as the model sees them, in squares. All words share one colour scale. Its bar shows weight
    from bottom to top and the image's brightness from left to right, so it contains every colour of the figure. If the
    smallest weight is above half of the largest, the scale starts at the smallest weight instead of 0.

    Args:
        image: ``[H, W]``, ``[1, H, W]`` or ``[3, H, W]`` (red, green, blue): a tensor, an array or nested lists.
        weights: a lazy matrix, such as that of a recorded layer; or a row of weights, ``[kv_len]`` or, with the shape
            of the grid, ``[rows, columns]``; or a dict from words to rows.
        queries: for a lazy matrix, the index of a word's token or the ``range`` of its tokens, over which weights are
            averaged; or a dict from words to either of these. `saccade.text.locate` finds the tokens of a word.
        head, batch: the head and batch item of a lazy matrix; the mean over all heads if ``head`` is None.
        patches: which keys are patches, in rows from the top left: a ``range`` or a list of indices, or bool
            ``[kv_len]`` such as ``ids[0] == image_token_id``. If None, the patches are the last keys, after any class
            and register tokens.
        grid: rows and columns of the patches, such as ``(14, 14)``; a square if None.
        title: text above the figure.
        opacity: opacity of the strongest colour: at 0 the image stays grey, at 1 the colour covers it.
        limits: the values at the two ends of the colour scale; computed from the weights if None.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: the image or weights are not real numbers, or queries or patches are not indices.
        ValueError: the number of axes is wrong, a value is not finite, a token, a patch or the head does not exist, or
            the patches do not fill the grid.
        ImportError: matplotlib is not installed.

    Cost: the rows of the query tokens, O(tokens · kv_len) for each head.

    Example:
        >>> image, row = torch.rand(3, 64, 96), torch.rand(1 + 4 * 6)  # a class token, and 4 x 6 patches
        >>> figure = overlay(image, {"cat": row}, grid=(4, 6), title="The patches that a word looks at")
    """
    check_number("opacity", opacity)
    if not 0 <= opacity <= 1:
        raise value_error("opacity", "be between 0 and 1", repr(opacity))
    grey, colours = as_grey(image), as_colours(image)
    maps = {name: _as_map(row, patches, grid) for name, row in _rows_by_word(weights, queries, batch, head).items()}
    ends = contrast_limits(np.stack(list(maps.values())), limits)
    canvas = blank()
    height, width = (max(round(side * _SIDE / max(grey.shape)), 1) for side in grey.shape)
    plain = _sized(grey, height, width)
    pictures = [np.stack([_sized(channel, height, width) for channel in np.moveaxis(colours, -1, 0)], -1).clip(0, 1)]
    pictures += [blend(plain, _enlarged_patches(cells, height, width), ends, opacity) for cells in maps.values()]
    names = ["", *maps]
    columns = ceil(len(pictures) / ceil(len(pictures) / _ACROSS))
    above = _NAME if any(names) else 0
    sheet = np.ones(
        (ceil(len(pictures) / columns) * (height + above + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3)
    )
    for number, (name, picture) in enumerate(zip(names, pictures, strict=True)):
        row, column = divmod(number, columns)
        top, left = row * (height + above + _GAP) + above, column * (width + _GAP)
        sheet[top : top + height, left : left + width] = picture
        if name:
            canvas.write(left, top - 6, name, size=9, va="bottom")
    add_blended_scale(canvas, plain, ends, opacity)
    return canvas.show_pixels(sheet, title)


def _rows_by_word(weights: object, queries: object, batch: object, head: object) -> dict[str, Array]:
    """Return a dict from words to weights, ``[kv_len]`` or ``[rows, columns]``; an unnamed word has the key ""."""
    if not isinstance(weights, Matrix):
        for name, choice in (("queries", queries), ("head", head), ("batch", batch or None)):
            if choice is not None:
                hint = "index an array yourself: weights[batch, head, query]"
                raise value_error(name, "be omitted for an array of weights", shown(choice), hint=hint)
        given: dict[Any, object] = dict(weights) if isinstance(weights, Mapping) else {"": weights}
        if not given:
            raise value_error("weights", "contain at least one row", "none")
        return {_checked_name(name): _finite(as_numbers("weights", row)) for name, row in given.items()}
    item, first = check_batch_and_head(weights, batch, 0 if head is None else head)
    heads = slice(None) if head is None else slice(first, first + 1)
    words: dict[Any, object] = dict(queries) if isinstance(queries, Mapping) else {"": queries}
    if queries is None or not words:
        hint = 'queries=5, queries=range(5, 7) or queries={"cat": 5}; saccade.text.locate finds the tokens of a word'
        raise value_error("queries", "name the tokens of a word for a lazy matrix", None, hint=hint)
    rows: dict[str, Array] = {}
    for name, tokens in words.items():
        span = _span(tokens, weights.shape[2])
        part = weights[item, heads, span.start : span.stop].detach().mean((0, 1))
        rows[_checked_name(name)] = _finite(as_numbers("weights", part))
    return rows


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise type_error("names of words", "be strings", kind(name))
    return name


def _finite(row: Array) -> Array:
    if not np.isfinite(row).all():
        raise value_error("weights", "be finite everywhere", "NaN or infinities")
    return row


def _span(tokens: object, q_len: int) -> range:
    """Return the range of a word's query tokens."""
    if not (is_integer(tokens) or isinstance(tokens, range)):
        raise type_error("queries", "be an index or a range of tokens", shown(tokens))
    span = tokens if isinstance(tokens, range) else range(int(tokens), int(tokens) + 1)
    if span.step != 1 or not 0 <= span.start < span.stop <= q_len:
        raise value_error("queries", f"be tokens from 0 to {q_len - 1}", shown(tokens))
    return span


def _as_map(row: Array, patches: object, grid: tuple[int, int] | None) -> Array:
    """Return a word's weights with the shape of the patch grid, ``[rows, columns]``."""
    if row.ndim == 2 and patches is None and grid in (None, row.shape) and row.size:
        return row
    if row.ndim != 1 or not row.size:
        rule = "be [kv_len], or [rows, columns] in the shape of the grid"
        raise value_error("weights", rule, f"shape {list(row.shape)}")
    if patches is not None:
        row = row[_indices(patches, len(row))]
    shape = _grid(grid, len(row), is_exact=patches is not None)
    return row[len(row) - shape[0] * shape[1] :].reshape(shape)


def _indices(patches: object, length: int) -> list[int]:
    """Return the indices of the keys that are patches."""
    if isinstance(patches, torch.Tensor):
        patches = patches.tolist()
    if isinstance(patches, np.ndarray):
        patches = patches.tolist()
    if not isinstance(patches, Sequence) or isinstance(patches, str):
        raise type_error("patches", "be indices, or one bool for each key", kind(patches))
    listed = list(patches)
    if listed and all(isinstance(entry, bool) for entry in listed):
        if len(listed) != length:
            raise value_error("patches", f"be one bool for each of {length} keys", len(listed))
        return [index for index, entry in enumerate(listed) if entry]
    for entry in listed:
        if not is_integer(entry):
            raise type_error("patches", "be indices, or one bool for each key", shown(entry))
        if not 0 <= entry < length:
            raise value_error("patches", f"be from 0 to {length - 1}", entry)
    return listed


def _grid(grid: object, count: int, *, is_exact: bool) -> tuple[int, int]:
    """Return the numbers of rows and columns of the patch grid.

    Unless ``is_exact``, keys that are not patches may precede the patches.
    """
    if grid is None:
        side = isqrt(count)
        before = count - side * side
        if not side or before > (0 if is_exact else min(_MAX_PREFIX, count // 5)):
            hint = "grid=(rows, columns) is the image's size divided by the patch size"
            raise value_error("grid", f"be given where {count} patches do not form a square", None, hint=hint)
        return side, side
    if not (isinstance(grid, Sequence) and len(grid) == 2 and all(is_integer(side) and side > 0 for side in grid)):
        raise type_error("grid", "be (rows, columns)", shown(grid))
    rows, columns = int(grid[0]), int(grid[1])
    if rows * columns > count or (is_exact and rows * columns < count):
        hint = "models that merge patches have a smaller grid: half as many rows and columns for 2 x 2"
        raise value_error("grid", f"have as many cells as there are patches, {count}", f"{rows} x {columns}", hint=hint)
    return rows, columns


def _sized(plane: Array, height: int, width: int) -> Array:
    return resized(plane, (height, width))


def _enlarged_patches(cells: Array, height: int, width: int) -> Array:
    """Enlarge the patches of a map to the size of an image, without smoothing."""
    rows, columns = (np.arange(side) * count // side for side, count in zip((height, width), cells.shape, strict=True))
    return cells[rows][:, columns]
