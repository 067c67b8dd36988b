"""Masks parsed from text such as ``Causal() & (Window(255, 0) | Global([0]))``, which is never evaluated."""

import ast

from saccade import masks
from saccade.masks import Mask

_KNOWN = {name: getattr(masks, name) for name in masks.__all__}


def mask_of(text: str) -> Mask:
    """Parse a mask from text: names of `saccade.masks` with literals or masks as arguments, joined by ``& | ~``.

    Raises:
        ValueError: anything else, in one sentence.
    """
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, NotImplementedError, RecursionError, MemoryError) as error:
        raise ValueError(f"a mask is written like Window(256, 256) & Causal(); got {text!r} ({error})") from None
    if not isinstance(found, Mask):
        raise ValueError(f"a mask is written like Window(256, 256) & Causal(); got {text!r}")
    return found


def _value(node: ast.expr) -> object:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _KNOWN:
            given = {keyword.arg: _value(keyword.value) for keyword in keywords if keyword.arg is not None}
            if len(given) != len(keywords):
                raise ValueError("** is not read")
            return _KNOWN[name](*map(_value, args), **given)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left) & _mask(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left) | _mask(right)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Call(func=func):
            raise ValueError(f"{ast.unparse(func)} is none of {', '.join(_KNOWN)}")
    return ast.literal_eval(node)


def _mask(node: ast.expr) -> Mask:
    found = _value(node)
    if not isinstance(found, Mask):
        raise ValueError(f"{ast.unparse(node)} is no mask")
    return found
