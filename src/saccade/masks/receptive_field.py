"""Receptive fields: masks of all token pairs that are connected through several layers with the same mask.

A layer with a residual connection lets a token see itself (I) and the keys that the mask M allows. L layers therefore
connect the pairs of the boolean matrix power (I or M) ** L. The following forms are exact at every length:

    any mask                                    L = 1: the mask, and every token sees itself
    transitive: a to b and b to c give a to c   itself: Causal, Full, Documents, Strided, Prefix, Padding, prefix_lm,
                                                and joins of them by &
    windows, joined by & and |                  L times as wide; also joined with Documents by &
    Documents(lengths, mask)                    Documents(lengths, mask ** L): nothing crosses a boundary
    mask.after(n)                               (mask ** L).after(n)
    anything | Global([0, ...])                 L >= 2: Full, since token 0 sees all tokens and is seen by all
    Causal & (window | first tokens)            Causal & (window L times as wide | first tokens); also streaming
    Causal & (Window(s - 1, 0) | Strided(s))    L >= 2: Causal, since strides and shorter steps reach any key

Global tokens after the first do not help, because a shorter sequence may not contain them. In general, ``&`` does not
commute with powers: (A & B) ** L is contained in A ** L & B ** L and may be smaller. For windows and contiguous
documents, the two are equal, since some path stays between its endpoints.

Reference: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 (L layers of a window); Child et al. 2019,
arXiv:1904.10509, section 4.2 (two steps of a strided pattern reach any position).
"""

from __future__ import annotations

import math

from saccade.masks.algebra import After, And, Or
from saccade.masks.convert.patterns import window_sides
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

_IDENTITY = Window(0, 0)


def through_layers(mask: Mask, layers: int) -> Mask:
    """Return the receptive field ``mask ** layers``; see `Mask.__pow__`.

    Raises:
        TypeError, ValueError: ``layers`` is not an int of at least 1.
        UnsupportedError: the mask has none of the forms listed in the module's docstring.
    """
    layers = check_int("layers", layers)
    if isinstance(mask, Or):  # the identity I is joined again below
        rest = tuple(part for part in mask.parts if part != _IDENTITY) or (_IDENTITY,)
        mask = rest[0] if len(rest) == 1 else Or(rest)
    if layers == 1 or _is_transitive(mask):
        return _with_identity(mask)
    if _is_contiguous(mask) or _is_window_and_first(mask):
        return _with_identity(mask.with_atoms(lambda atom: _over_layers(atom, layers)))
    match mask:
        case Documents():
            return _with_identity(_over_layers(mask, layers))
        case After():
            return _with_identity(After(mask.rule**layers, mask.length))
        case Or() | Global() if _connects_through_first(mask):
            return Full()
        case And() if _reaches_all_earlier(mask):
            return Causal()
    reason = f"the receptive field of {mask} has no known form as a single mask"
    hint = "saccade.auditing.Reach computes which tokens are connected through layers with any mask"
    raise unsupported(f"layers={layers}", [reason], hint=hint)


def _with_identity(mask: Mask) -> Mask:
    return mask if _is_reflexive(mask) else mask | _IDENTITY


def _is_reflexive(mask: Mask) -> bool:
    """Return whether the mask is known to be reflexive, that is, each position in its domain sees itself."""
    match mask:
        case Causal() | Full() | Window() | Strided() | Segments():
            return True
        case Documents():  # positions after the documents of a shorter item see nothing
            return len(set(map(sum, mask.lengths))) == 1 and (mask.rule is None or _is_reflexive(mask.rule))
        case And():
            return all(map(_is_reflexive, mask.parts))
        case Or():
            return any(map(_is_reflexive, mask.parts))
    return False


def _is_transitive(mask: Mask) -> bool:
    """Return whether the mask is known to be transitive, that is, if a sees b and b sees c, then a sees c."""
    extent = window_sides(mask)
    if mask.hides_keys_only or isinstance(mask, Strided):  # all queries, or all of one residue class, see the same keys
        return True
    if extent is not None:
        return set(extent) <= {0, math.inf}
    match mask:
        case Documents() | After():
            return mask.rule is None or _is_transitive(mask.rule)
        case And():
            return all(map(_is_transitive, mask.parts))
        case Or():  # causal, and a prefix visible to all, which contains every position before each of its tokens
            rest = tuple(part for part in mask.parts if not (_shows_first_tokens(part) and part.hides_keys_only))
            return rest != () and window_sides(Or(rest)) == (math.inf, 0)
    return isinstance(mask, Global) and not mask.seen  # a token that sees any key sees all keys


def _is_contiguous(mask: Mask) -> bool:
    """Return whether the mask joins only windows and documents by ``&``, so that some path stays between its ends."""
    match mask:
        case Documents():
            return mask.rule is None or _is_contiguous(mask.rule)
        case And():
            return all(map(_is_contiguous, mask.parts))
    return window_sides(mask) is not None


def _is_window_and_first(mask: Mask) -> bool:
    """Return whether the mask is a union of windows and first tokens, joined with a causal mask."""
    parts = _union_under_causal(mask)
    return bool(parts) and all(_shows_first_tokens(part) or window_sides(part) is not None for part in parts)


def _reaches_all_earlier(mask: Mask) -> bool:
    """Return whether the mask has a causal window as wide as its stride, so that two layers reach any earlier key."""
    parts = _union_under_causal(mask)
    width = max((extent[0] for extent in map(window_sides, parts) if extent is not None), default=-1)
    return any(isinstance(part, Strided) and part.step <= width + 1 for part in parts)


def _connects_through_first(mask: Mask) -> bool:
    """Return whether token 0 sees all tokens and all tokens see token 0, so that two layers connect all pairs."""
    if isinstance(mask, Or):
        return any(map(_connects_through_first, mask.parts))
    return isinstance(mask, Global) and mask.sees and mask.seen and 0 in mask.positions


def _union_under_causal(mask: Mask) -> tuple[Mask, ...]:
    """Return the parts of the union in ``Causal() & (a | b)``; an empty tuple for masks without this form."""
    if not isinstance(mask, And):
        return ()
    limits = tuple(part for part in mask.parts if window_sides(part) is not None)
    others = [part for part in mask.parts if window_sides(part) is None]
    if len(others) != 1 or not limits or window_sides(And(limits)) != (math.inf, 0):
        return ()
    return others[0].parts if isinstance(others[0], Or) else (others[0],)


def _shows_first_tokens(mask: Mask) -> bool:
    """Return whether the mask makes the first tokens visible to all queries."""
    if isinstance(mask, Global):
        return mask.seen and mask.positions == tuple(range(len(mask.positions)))
    return isinstance(mask, Prefix)


def _over_layers(atom: Mask, layers: int) -> Mask:
    """Return the receptive field of one atom of a mask over several layers."""
    if isinstance(atom, Window):
        left, right = (None if width is None else layers * width for width in (atom.left, atom.right))
        return Window(left, right)
    if isinstance(atom, Documents) and atom.rule is not None:
        return Documents(atom.lengths, atom.rule**layers)
    return atom
