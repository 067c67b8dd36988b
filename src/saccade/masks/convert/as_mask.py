"""What users hand over as a mask, made into a `Mask`."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks.convert.causal_bias import from_causal_bias
from saccade.masks.mask import Mask
from saccade.masks.rules.dense import NO_BOOL, Dense
from saccade.masks.rules.full import Full
from saccade.masks.rules.predicate import Predicate
from saccade.support.errors import kind, shown, type_error, value_error
from saccade.support.validation import is_causal_bias

__all__ = ["as_mask", "check_told_apart"]

_FULL = Full()


def as_mask(mask: object, shape: tuple[int, int, int, int]) -> Mask:
    """A `Mask` from anything that is accepted as one.

    Args:
        mask: None, a `Mask`, a bool tensor, a function ``(b, h, q, kv) -> bool``, or torch's ``causal_lower_right``
            or ``causal_upper_left``.
        shape: (batch, heads, q_len, kv_len) that it must fit.

    Raises:
        TypeError: a float or integer tensor, or something else altogether; a shape that is no tuple of four.
        ValueError: a shape that does not fit.
    """
    if not isinstance(shape, tuple) or len(shape) != 4:
        raise type_error("shape", "be a tuple (batch, heads, q_len, kv_len)", shown(shape))
    if mask is None:
        return _FULL
    if isinstance(mask, Mask):
        # Sizes may be symbols while a program is traced, which a comparison would fix; what then runs looks itself.
        if not torch.compiler.is_compiling():
            check_told_apart(mask, shape)
        return mask
    if is_causal_bias(mask):
        return from_causal_bias(mask, *shape[2:], "mask")
    if isinstance(mask, Tensor):
        return _from_tensor(mask, shape)
    if callable(mask) and not isinstance(mask, type):
        return Predicate(mask)
    rule = "be None, a saccade mask, a bool tensor or a function (b, h, q, kv) -> bool"
    raise type_error("mask", rule, kind(mask), hint=_hint_for_words(mask))


def _hint_for_words(mask: object) -> str | None:
    """What to write instead of a mask's text, or of its class."""
    if isinstance(mask, str):
        return "masks.parse(...) reads one: masks.parse('causal & window(4, 0)')"
    if isinstance(mask, type) and issubclass(mask, Mask):
        return f"make one: masks.{mask.__name__}(...)"
    return None


def check_told_apart(mask: Mask, shape: tuple[int, int, int, int]) -> None:
    """Raise unless a mask tells apart as many batch items and heads as there are, or none."""
    if mask.shape == (1, 1):
        return
    for own, size, name in zip(mask.shape, shape, ("batch items", "heads"), strict=False):
        if own not in (1, size):
            raise value_error("mask", f"tell apart 1 or {size} {name}", own, facts=[f"mask   {mask}"])


def _from_tensor(mask: Tensor, shape: tuple[int, int, int, int]) -> Mask:
    if mask.dtype != torch.bool:
        hint = _hint_for_keys(mask, shape, ".bool()") or NO_BOOL
        got = str(mask.dtype).removeprefix("torch.")
        raise type_error("mask", "be bool, True = may attend", got, hint=hint)
    dense = Dense(mask)
    pairs = zip(dense.allowed.shape, shape, strict=True)
    if any(own not in (1, expected) for own, expected in pairs):
        batch, _, q_len, kv_len = shape
        rule = f"have shape [{q_len}, {kv_len}], [{batch}, {q_len}, {kv_len}] or broadcast to {list(shape)}"
        raise value_error("mask", rule, list(mask.shape), hint=_hint_for_keys(mask, shape))
    # One column for all keys: written out as a view, since rows are counted from the last column.
    return dense if dense.allowed.shape[3] == shape[3] else Dense(dense.allowed.expand(-1, -1, -1, shape[3]))


def _hint_for_keys(mask: Tensor, shape: tuple[int, int, int, int], cast: str = "") -> str | None:
    """What to write instead of a mask that says of each item's keys which are tokens."""
    batch, _, _, kv_len = shape
    if mask.shape != (batch, kv_len) or mask.is_floating_point():
        return None
    return f"a mask of keys for each item, [batch, kv_len], is mask{cast}[:, None, None, :], with True at tokens"
