"""Powers of masks: who may reach whom through several layers of one rule, written as a rule again.

A layer with a residual connection lets a token see what its rule M allows, and itself (I). So L layers let it reach
what the boolean matrix power (I or M) ** L allows. These forms are exact, at every length:

    any rule                                    L = 1: itself, and every token itself
    transitive: a to b and b to c give a to c   itself: Causal, Full, Documents, Strided, Prefix, Padding, prefix_lm,
                                                and whatever is joined of such by &
    windows, joined by & and |                  L times as wide; also joined with Documents by &
    Documents(lengths, rule)                    Documents(lengths, rule ** L): nothing crosses
    rule.after(n)                               (rule ** L).after(n)
    anything | Global([0, ...])                 L >= 2: Full, since everyone sees token 0, and it sees everyone
    Causal & (window | first tokens)            Causal & (window L times as wide | first tokens); also streaming
    Causal & (Window(s - 1, 0) | Strided(s))    L >= 2: Causal, by a step of s's and one of less

A global token behind the first is no help: a shorter text does not have it. ``&`` does not go through powers in
general: (A & B) ** L lies within A ** L & B ** L and may be less. Where both are windows or contiguous texts it is the
same, because a path can be chosen that never leaves the stretch between its ends.

Reference: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 (L layers of a window); Child et al. 2019,
arXiv:1904.10509, section 4.2 (two steps of a strided pattern lead anywhere).
"""

from __future__ import annotations

import math

from saccade.masks.algebra import After, And, Or
from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.global_tokens import Global
from saccade.masks.rules.prefix import Prefix
from saccade.masks.rules.segments import Segments
from saccade.masks.rules.strided import Strided
from saccade.masks.rules.window import Window
from saccade.support.errors import unsupported
from saccade.support.validation import check_int

__all__ = ["through_layers"]

_ITSELF = Window(0, 0)


def through_layers(rule: Mask, layers: int) -> Mask:
    """What ``rule ** layers`` means; see `Mask.__pow__`.

    Raises:
        TypeError, ValueError: ``layers`` that is no int of at least 1.
        UnsupportedError: a rule that has none of the forms above.
    """
    layers = check_int("layers", layers)
    if isinstance(rule, Or):  # what is joined with I is joined with it again below
        rest = tuple(part for part in rule.parts if part != _ITSELF) or (_ITSELF,)
        rule = rest[0] if len(rest) == 1 else Or(rest)
    if layers == 1 or _is_transitive(rule):
        return _with_itself(rule)
    if _is_contiguous(rule) or _sees_beginning(rule):
        return _with_itself(rule.with_atoms(lambda atom: _widened(atom, layers)))
    match rule:
        case Documents():
            return _with_itself(_widened(rule, layers))
        case After():
            return _with_itself(After(rule.rule**layers, rule.length))
        case Or() | Global() if _goes_through_first(rule):
            return Full()
        case And() if _steps_anywhere(rule):
            return Causal()
    reason = f"{rule} has no power that is exact and one rule again"
    hint = "saccade.auditing.Reach moves sets of tokens through the layers of any rule"
    raise unsupported(f"layers={layers}", [reason], hint=hint)


def _with_itself(rule: Mask) -> Mask:
    return rule if _is_reflexive(rule) else rule | _ITSELF


def _is_reflexive(rule: Mask) -> bool:
    """True if the rule surely lets each position of its domain see itself."""
    match rule:
        case Causal() | Full() | Window() | Strided() | Segments():
            return True
        case Documents():  # behind the texts of a shorter item no one sees anything
            return len(set(map(sum, rule.lengths))) == 1 and (rule.rule is None or _is_reflexive(rule.rule))
        case And():
            return all(map(_is_reflexive, rule.parts))
        case Or():
            return any(map(_is_reflexive, rule.parts))
    return False


def _is_transitive(rule: Mask) -> bool:
    """True if whom a key of mine sees, I surely see."""
    extent = _extent(rule)
    if rule.hides_keys_only or isinstance(rule, Strided):  # all see the same keys, or all of one class do
        return True
    if extent is not None:
        return set(extent) <= {0, math.inf}
    match rule:
        case Documents() | After():
            return rule.rule is None or _is_transitive(rule.rule)
        case And():
            return all(map(_is_transitive, rule.parts))
        case Or():  # causal, and a beginning that all see: whoever stands before one of its tokens is in it too
            rest = tuple(part for part in rule.parts if not (_is_beginning(part) and part.hides_keys_only))
            return rest != () and _extent(Or(rest)) == (math.inf, 0)
    return isinstance(rule, Global) and not rule.seen  # who sees one key sees all


def _is_contiguous(rule: Mask) -> bool:
    """Windows and texts joined by ``&``: with two ends of a path, every position between them may lie on it."""
    match rule:
        case Documents():
            return rule.rule is None or _is_contiguous(rule.rule)
        case And():
            return all(map(_is_contiguous, rule.parts))
    return _extent(rule) is not None


def _sees_beginning(rule: Mask) -> bool:
    """Causal windows and the first tokens: these see but earlier ones, which everybody sees without them."""
    parts = _behind_causal(rule)
    return bool(parts) and all(_is_beginning(part) or _extent(part) is not None for part in parts)


def _steps_anywhere(rule: Mask) -> bool:
    """Strides that a causal window fills: any distance is a number of strides, and less than one more."""
    parts = _behind_causal(rule)
    width = max((extent[0] for extent in map(_extent, parts) if extent is not None), default=-1)
    return any(isinstance(part, Strided) and part.step <= width + 1 for part in parts)


def _goes_through_first(rule: Mask) -> bool:
    """Token 0 sees all and all see it: whatever else is allowed, two steps lead anywhere."""
    if isinstance(rule, Or):
        return any(map(_goes_through_first, rule.parts))
    return isinstance(rule, Global) and rule.sees and rule.seen and 0 in rule.positions


def _behind_causal(rule: Mask) -> tuple[Mask, ...]:
    """The parts that ``|`` joins in what stands beside causal; none for another rule."""
    if not isinstance(rule, And):
        return ()
    limits = tuple(part for part in rule.parts if _extent(part) is not None)
    others = [part for part in rule.parts if _extent(part) is None]
    if len(others) != 1 or not limits or _extent(And(limits)) != (math.inf, 0):
        return ()
    return others[0].parts if isinstance(others[0], Or) else (others[0],)


def _is_beginning(rule: Mask) -> bool:
    """The first tokens, seen by all; what they see besides is nothing where it is causal."""
    if isinstance(rule, Global):
        return rule.seen and rule.positions == tuple(range(len(rule.positions)))
    return isinstance(rule, Prefix)


def _extent(rule: Mask) -> tuple[float, float] | None:
    """Keys before and behind the query that the rule allows, if it is one window; else None."""
    match rule:
        case Causal():
            return (math.inf, 0)
        case Full():
            return (math.inf, math.inf)
        case Window(left=left, right=right):
            return (math.inf if left is None else left, math.inf if right is None else right)
        case And() | Or():
            extents = [_extent(part) for part in rule.parts]
            known = [extent for extent in extents if extent is not None]
            pick = min if isinstance(rule, And) else max
            lefts, rights = zip(*known, strict=True) if len(known) == len(extents) else ((), ())
            return (pick(lefts), pick(rights)) if lefts else None
    return None


def _widened(atom: Mask, layers: int) -> Mask:
    """A part of a rule that goes through layers part by part."""
    if isinstance(atom, Window):
        left, right = (None if width is None else layers * width for width in (atom.left, atom.right))
        return Window(left, right)
    if isinstance(atom, Documents) and atom.rule is not None:
        return Documents(atom.lengths, atom.rule**layers)
    return atom
