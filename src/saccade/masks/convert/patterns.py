"""Recognition of masks that equal a standard pattern, such as causal, window or padding."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from saccade.masks.algebra import And, Or
from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.padding import Padding
from saccade.masks.rules.prefix import Prefix
from saccade.masks.rules.window import Window


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
            return window_of(*_sides(mask))
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
    window = window_of(pick(lefts), pick(rights))
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


def window_of(left: float, right: float) -> Full | Causal | Window:
    """Return the mask of a window with these numbers of keys before and after the query, which may be infinite."""
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


class PackedPattern(NamedTuple):
    """A mask pattern for packed sequences: queries attend to a window within their own sequence.

    Attributes:
        lengths: lengths of the sequences in each batch item; a single item applies to the full batch.
        left, right: numbers of keys on either side of the query's position; None for no limit.
    """

    lengths: tuple[tuple[int, ...], ...]
    left: int | None
    right: int | None


def packed_of(mask: Mask, length: int) -> PackedPattern | None:
    """Return the packed sequences and window that are equivalent to a mask over ``length`` positions, or None.

    Example:
        >>> packed_of(Documents([2, 3], rule=Causal()), 5)
        PackedPattern(lengths=((2, 3),), left=None, right=0)
    """
    pattern = describe(mask)
    lengths: tuple[tuple[int, ...], ...] = ((length,),)
    if isinstance(pattern, Documents):
        lengths, pattern = pattern.lengths, Full() if pattern.rule is None else pattern.rule
    if not isinstance(pattern, Full | Causal | Window) or any(sum(item) > length for item in lengths):
        return None
    left, right = (None if side == math.inf else int(side) for side in _sides(pattern))
    return PackedPattern(tuple(tuple(size for size in item if size) for item in lengths), left, right)
