"""The rule of queries and keys exchanged: who is attended to by whom."""

from __future__ import annotations

from saccade.masks.algebra import And, Not, Or
from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.global_tokens import Global
from saccade.masks.rules.strided import Strided
from saccade.masks.rules.window import Window

__all__ = ["transposed"]


def transposed(rule: Mask) -> Mask | None:
    """The mask that allows (kv, q) where another allows (q, kv); None where no mask is known to.

    Example:
        >>> transposed(Causal() & Global([0], sees=False))
        Window(left=0, right=None) & Global(positions=(0,), sees=True, seen=False)
    """
    if isinstance(rule, And | Or | Not):
        parts = [transposed(part) for part in rule.made_of]
        found = tuple(part for part in parts if part is not None)
        if len(found) < len(parts):
            return None
        return Not(found[0]) if isinstance(rule, Not) else type(rule)(found)
    if isinstance(rule, Documents):
        inside = transposed(Full() if rule.rule is None else rule.rule)
        return None if inside is None else Documents(rule.lengths, None if rule.rule is None else inside)
    return _of_atom(rule)


def _of_atom(rule: Mask) -> Mask | None:
    match rule:
        case Full() | Strided():
            return rule
        case Causal():
            return Window(0, None)
        case Window():
            return Window(rule.right, rule.left)
        case Global():
            return Global(rule.positions, sees=rule.seen, seen=rule.sees)
    return None
