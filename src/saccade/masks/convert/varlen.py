"""Packed texts with a plain window: the masks that kernels for packed sequences are made for."""

from __future__ import annotations

from typing import NamedTuple

from saccade.masks.algebra import And
from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.window import Window

__all__ = ["Packed", "packed_of"]


class Packed(NamedTuple):
    """Texts one behind the other, in each of which a query sees its window.

    Attributes:
        lengths: of the texts of each batch item; one item stands for all.
        left, right: keys on either side of the query's own; None for no limit.
    """

    lengths: tuple[tuple[int, ...], ...]
    left: int | None
    right: int | None


def packed_of(rule: Mask, length: int) -> Packed | None:
    """The texts and the window that a rule over so many positions from 0 on says; None if it says anything else.

    Example:
        >>> packed_of(Documents([2, 3], rule=Causal()), 5)
        Packed(lengths=((2, 3),), left=None, right=0)
    """
    lengths: tuple[tuple[int, ...], ...] = ((length,),)
    inside: Mask | None = rule
    if isinstance(rule, Documents):
        lengths, inside = rule.lengths, rule.rule
    window = _window_of(Full() if inside is None else inside)
    if window is None or any(sum(item) > length for item in lengths):
        return None
    return Packed(tuple(tuple(size for size in item if size) for item in lengths), *window)


def _window_of(rule: Mask) -> tuple[int | None, int | None] | None:
    """Keys to the left and to the right; None if the rule is no window."""
    match rule:
        case Full():
            return None, None
        case Causal():
            return None, 0
        case Window():
            return rule.left, rule.right
        case And():
            windows = [_window_of(part) for part in rule.parts]
            sides = list(zip(*(window for window in windows if window is not None), strict=True))
            return None if None in windows else (_narrowest(sides[0]), _narrowest(sides[1]))
    return None


def _narrowest(widths: tuple[int | None, ...]) -> int | None:
    return min((width for width in widths if width is not None), default=None)
