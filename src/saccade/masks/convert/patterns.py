"""Recognition of masks that equal a standard pattern, such as causal, window or padding; transposition of masks."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from saccade.masks.algebra import And, Not, Or
from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.global_tokens import Global
from saccade.masks.rules.padding import Padding
from saccade.masks.rules.prefix import Prefix
from saccade.masks.rules.strided import Strided
from saccade.masks.rules.window import Window
from saccade.plan.key_ranges import Ints


def describe(mask: Mask) -> Mask | None:
    """Return the standard pattern that equals ``mask`` at every length, or None if there is none.

    >>> describe(Causal() & Window(4, 2)), describe(Documents([2, 3]) & Causal()), describe(~Causal())
    (Window(left=4, right=0), Documents(lengths=((2, 3),), rule=Causal()), None)

    Returns:
        `Full`, `Causal`, `Window`, `Prefix`, `Padding`, or `Documents` with the rule None, `Causal` or `Window`.

    Cost: O(parts of the mask); new `Documents` are cached.
    """
    match mask:
        case Full() | Causal() | Prefix() | Padding():
            return mask
        case Window():
            return _window(*_sides(mask))
        case Documents():
            inside = Full() if mask.rule is None else describe(mask.rule)
            return _documents(mask, inside) if isinstance(inside, Full | Causal | Window) else None
        case And() | Or():
            return _describe_join(mask)
    return None


def _describe_join(mask: And | Or) -> Mask | None:
    parts = [describe(part) for part in mask.parts]
    windows = [part for part in parts if isinstance(part, Full | Causal | Window)]
    others = [part for part in parts if not isinstance(part, Full | Causal | Window)]
    # Every window contains distance 0, so the union of two windows is also a window.
    pick = min if isinstance(mask, And) else max
    lefts, rights = zip(*map(_sides, windows), strict=True) if windows else ((math.inf,), (math.inf,))
    window = _window(pick(lefts), pick(rights))
    if not others:
        return window
    if len(others) > 1 or others[0] is None or isinstance(mask, Or):
        return None
    if isinstance(others[0], Documents):
        # A window depends only on distances, which do not change when positions count from the start of a document.
        inside = others[0].rule
        return _documents(others[0], window if inside is None else describe(inside & window))
    return others[0] if isinstance(window, Full) else None


def _documents(mask: Documents, inside: Mask | None) -> Documents:
    inside = None if isinstance(inside, Full) else inside
    return mask if inside == mask.rule else _cached_documents(mask.lengths, inside)


_cached_documents = lru_cache(maxsize=16)(Documents)  # each stores a table as long as the sequence


def _sides(window: Full | Causal | Window) -> tuple[float, float]:
    left, right = (window.left, window.right) if isinstance(window, Window) else (None, None)
    if isinstance(window, Causal):
        right = 0
    return math.inf if left is None else left, math.inf if right is None else right


def _window(left: float, right: float) -> Full | Causal | Window:
    if left == math.inf and right in (0, math.inf):
        return Full() if right else Causal()
    return Window(*(None if side == math.inf else int(side) for side in (left, right)))


def window_sides(mask: Mask) -> tuple[float, float] | None:
    """Return the numbers of keys before and after the query if ``mask`` equals a window; None otherwise.

    >>> window_sides(Causal()), window_sides(Window(2, 3) | Window(4, 1)), window_sides(Prefix(2))
    ((inf, 0), (4, 3), None)
    """
    window = describe(mask)
    return _sides(window) if isinstance(window, Full | Causal | Window) else None


def window_size(mask: Mask) -> int | None:
    """Return n if ``mask`` equals ``sliding_window(n)``, which allows the last n keys; None otherwise."""
    left, right = window_sides(mask) or (math.inf, math.inf)
    return int(left) + 1 if right == 0 and left != math.inf else None


class Packed(NamedTuple):
    """A mask pattern for packed sequences: queries attend to a window within their own sequence.

    Attributes:
        lengths: lengths of the sequences in each batch item; a single item applies to the full batch.
        left, right: numbers of keys on either side of the query's position; None for no limit.
    """

    lengths: tuple[tuple[int, ...], ...]
    left: int | None
    right: int | None


def packed_of(mask: Mask, length: int) -> Packed | None:
    """Return the packed sequences and window that are equivalent to a mask over ``length`` positions, or None.

    Example:
        >>> packed_of(Documents([2, 3], rule=Causal()), 5)
        Packed(lengths=((2, 3),), left=None, right=0)
    """
    pattern = describe(mask)
    lengths: tuple[tuple[int, ...], ...] = ((length,),)
    if isinstance(pattern, Documents):
        lengths, pattern = pattern.lengths, Full() if pattern.rule is None else pattern.rule
    if not isinstance(pattern, Full | Causal | Window) or any(sum(item) > length for item in lengths):
        return None
    left, right = (None if side == math.inf else int(side) for side in _sides(pattern))
    return Packed(tuple(tuple(size for size in item if size) for item in lengths), left, right)


def transposed(mask: Mask) -> Mask | None:
    """Return the transposed mask, which allows (kv, q) where ``mask`` allows (q, kv); None for unsupported masks.

    Example:
        >>> transposed(Causal() & Global([0], sees=False))
        Window(left=0, right=None) & Global(positions=(0,), sees=True, seen=False)
    """
    result: Mask | None = None
    match mask:
        case Full() | Strided() | Documents(rule=None):
            result = mask
        case Causal():
            result = Window(0, None)
        case Window():
            result = Window(mask.right, mask.left)
        case Global():
            result = Global(mask.positions, sees=mask.seen, seen=mask.sees)
        case Documents() | Not():
            inside = transposed(mask.made_of[0])
            if inside is not None:
                result = Not(inside) if isinstance(mask, Not) else Documents(mask.lengths, inside)
        case And() | Or():
            parts = tuple(part for part in map(transposed, mask.parts) if part is not None)
            result = type(mask)(parts) if len(parts) == len(mask.parts) else None
    return result


class RowRanges(NamedTuple):
    """The range of visible keys of each row. Standard mask patterns are recognised from these ranges.

    Attributes:
        starts, ends: int64 ``[items, rows]``; a row without keys starts at ``columns`` and ends at 0.
        columns: number of keys; the last row is aligned with the last key. If there is only one row, it applies to
            every query.
    """

    starts: Ints
    ends: Ints
    columns: int

    @property
    def position(self) -> Ints:
        """Query position of each row of key ranges."""
        rows = self.starts.shape[1]
        return np.arange(self.columns - rows, self.columns)


def describe_ranges(ranges: RowRanges) -> Mask | None:
    """Return the standard pattern, possibly with padding, that allows exactly the given ranges; None if none does.

    A candidate is derived from the ends of the ranges and then compared with every row. Cost: O(items * rows).
    """
    if not (ranges.starts < ranges.ends).any():
        return ~Full()
    mask = _window_of_rows(ranges, 0, ranges.columns)
    if mask is not None:
        return mask
    first, stop = ranges.starts.min(1), ranges.ends.max(1)
    keys = _padding_of_rows(first, stop, ranges.columns)
    mask = None if keys is None else _window_of_rows(ranges, first[:, None], stop[:, None])
    if keys is not None and mask is not None:
        return keys if isinstance(mask, Full) else mask & keys
    return _documents_of_rows(ranges) if ranges.starts.shape[1] == ranges.columns > 1 else None


def _window_of_rows(ranges: RowRanges, first: Ints | int, stop: Ints | int) -> Mask | None:
    """Return the window mask that matches the visible ranges within keys ``first`` to ``stop``; None if none does."""
    (starts, ends, _), position = ranges, ranges.position
    some = starts < ends
    distances = (position - starts)[some & (starts > first)], (ends - 1 - position)[some & (ends < stop)]
    left, right = (int(x.max()) if len(x) else math.inf for x in distances)
    if min(left, right) < 0 or (len(position) == 1 and min(left, right) < math.inf):
        return None
    low = first if left == math.inf else np.maximum(first, position - int(left))
    high = stop if right == math.inf else np.minimum(stop, position + int(right) + 1)
    is_same = np.where(some, (starts == low) & (ends == high), np.greater_equal(low, high))
    return _window(left, right) if is_same.all() else None


def _padding_of_rows(first: Ints, stop: Ints, columns: int) -> Mask | None:
    """Return the padding mask that allows exactly keys ``first[b]`` to ``stop[b]`` of item b; None if none does."""
    nothing = first >= stop
    if (nothing | (first == 0)).all():
        return Prefix(int(stop[0])) if len(stop) == 1 else Padding(stop.tolist())
    if (nothing | (stop == columns)).all():
        return Padding((columns - first).tolist(), side="left", padded_len=columns)
    return None


def _documents_of_rows(ranges: RowRanges) -> Mask | None:
    """Return the documents mask that matches the visible ranges; None if none does.

    A document begins where no row sees keys on the other side.
    """
    (starts, ends, columns), position = ranges, ranges.position
    before = np.maximum.accumulate(ends, 1)[:, :-1]
    behind = np.minimum.accumulate(starts[:, ::-1], 1)[:, -2::-1]
    # Keys after the last visible one belong to no document, because in a document they would see themselves.
    total = ends.max(1)[:, None]
    begins = np.pad((before <= position[1:]) & (behind >= position[1:]), ((0, 0), (1, 0)), constant_values=True)
    begins &= position < total
    first = np.maximum.accumulate(np.where(begins, position, 0), 1)
    stop = np.where(begins, position, total)[:, ::-1]
    stop = np.append(np.minimum.accumulate(stop, 1)[:, -2::-1], total, 1)
    mask = _window_of_rows(ranges, np.where(position < total, first, columns), np.where(position < total, stop, 0))
    if mask is None:
        return None
    lengths = [np.diff(np.flatnonzero(item), append=end).tolist() for item, end in zip(begins, total, strict=True)]
    return Documents(lengths, None if isinstance(mask, Full) else mask)
