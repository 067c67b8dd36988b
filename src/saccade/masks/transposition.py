"""Transposition of masks: the mask that allows (kv, q) where another allows (q, kv)."""

from __future__ import annotations

from saccade.masks.algebra import And, Not, Or
from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.global_tokens import Global
from saccade.masks.rules.strided import Strided
from saccade.masks.rules.window import Window


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
