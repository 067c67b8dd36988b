"""as_mask: convert a user's mask argument to a `Mask`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.masks.convert.deferred_masks import TensorMask
from saccade.masks.mask import Mask
from saccade.masks.mask_fields import check_readable
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.dense import NO_BOOL, Dense
from saccade.masks.rules.full import Full
from saccade.masks.rules.predicate import Predicate
from saccade.masks.rules.window import Window
from saccade.support.errors import kind, shown, type_error, value_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import is_causal_bias

_FULL = Full()


def as_mask(mask: object, shape: tuple[int, int, int, int]) -> Mask:
    """Convert any accepted mask argument to a `Mask`.

    Args:
        mask: None, a `Mask`, a bool tensor, a function ``(b, h, q, kv) -> bool``, or torch's ``causal_lower_right``
            or ``causal_upper_left``.
        shape: (batch, heads, q_len, kv_len) of the attention, which the mask must fit.

    Raises:
        TypeError: the mask is a float or integer tensor or has an unsupported type; the shape is not a tuple of four.
        ValueError: the mask does not fit the shape.
    """
    if not isinstance(shape, tuple) or len(shape) != 4:
        raise type_error("shape", "be a tuple (batch, heads, q_len, kv_len)", shown(shape))
    if mask is None:
        return _FULL
    if isinstance(mask, Mask):
        # During tracing, a comparison would specialise symbolic sizes; the traced program checks them.
        if not is_tracing():
            check_batch_and_heads(mask, shape)
        return mask
    if is_causal_bias(mask):
        return from_causal_bias(mask, *shape[2:], "mask")
    if isinstance(mask, Tensor):
        return _from_tensor(mask, shape)
    if callable(mask) and not isinstance(mask, type):
        return Predicate(mask)
    rule = "be None, a saccade mask, a bool tensor or a function (b, h, q, kv) -> bool"
    raise type_error("mask", rule, kind(mask), hint=_hint_for_text_or_class(mask))


def _hint_for_text_or_class(mask: object) -> str | None:
    """Return an error hint if the user passed text or a class as a mask; None otherwise."""
    if isinstance(mask, str):
        return "to parse text, call masks.parse('causal & window(4, 0)')"
    if isinstance(mask, type) and issubclass(mask, Mask):
        return f"create an instance: masks.{mask.__name__}(...)"
    return None


def check_batch_and_heads(mask: Mask, shape: tuple[int, int, int, int]) -> None:
    """Raise an error unless the mask's numbers of batch items and heads are each 1 or match ``shape``."""
    if mask.shape == (1, 1):
        return
    for count, size, name in zip(mask.shape, shape, ("batch items", "heads"), strict=False):
        if count not in (1, size):
            allowed = "1" if size == 1 else f"1 or {size}"
            raise value_error("mask", f"be for {allowed} {name}", count, facts=[f"mask   {mask}"])


def _from_tensor(mask: Tensor, shape: tuple[int, int, int, int]) -> Mask:
    if mask.dtype != torch.bool:
        hint = _hint_for_keys(mask, shape, ".bool()") or NO_BOOL
        got = str(mask.dtype).removeprefix("torch.")
        raise type_error("mask", "be bool, True = may attend", got, hint=hint)
    if is_tracing():
        if mask.dim() > 4:
            raise value_error("mask", "have at most 4 dimensions", list(mask.shape))
        check_readable("mask", mask)
        return TensorMask(mask)
    dense = Dense(mask)
    pairs = zip(dense.allowed.shape, shape, strict=True)
    if any(size not in (1, expected) for size, expected in pairs):
        batch, _, q_len, kv_len = shape
        rule = f"have shape [{q_len}, {kv_len}], [{batch}, {q_len}, {kv_len}] or broadcast to {list(shape)}"
        raise value_error("mask", rule, list(mask.shape), hint=_hint_for_keys(mask, shape))
    # Expand a single column, because row positions count from the last column.
    return dense if dense.allowed.shape[3] == shape[3] else Dense(dense.allowed.expand(-1, -1, -1, shape[3]))


def _hint_for_keys(mask: Tensor, shape: tuple[int, int, int, int], cast: str = "") -> str | None:
    """Return an error hint if a mask tensor has the shape of a key mask, ``[batch, kv_len]``; None otherwise."""
    batch, _, _, kv_len = shape
    if mask.shape != (batch, kv_len) or mask.is_floating_point():
        return None
    return f"for a mask of each item's keys, [batch, kv_len], pass mask{cast}[:, None, None, :] with True at tokens"


def starts_at_first_key(bias: Any) -> bool:
    """Return whether torch's ``CausalBias`` aligns query 0 with key 0, as ``is_causal=True`` does."""
    return bias.seq_len_q == bias.seq_len_kv or bias.variant.name == "UPPER_LEFT"


def from_causal_bias(bias: Any, q_len: int, kv_len: int, name: str) -> Mask:
    """Convert torch's ``CausalBias`` to a mask with default positions.

    Args:
        bias: a result of ``causal_upper_left`` or ``causal_lower_right``.
        q_len, kv_len: expected lengths of the bias.
        name: name of the argument, for the error message.

    Raises:
        ValueError: the bias has different lengths, or is the result of an operation on a ``CausalBias``.

    >>> from torch.nn.attention.bias import causal_upper_left
    >>> print(from_causal_bias(causal_upper_left(2, 4), 2, 4, "mask").picture(2, 4))
    1 . . .
    1 1 . .
    """
    if not hasattr(bias, "variant"):
        rule = "be a result of causal_lower_right or causal_upper_left"
        raise value_error(name, rule, "the result of an operation on it", hint="mask=masks.Causal()")
    lengths = (bias.seq_len_q, bias.seq_len_kv)
    if lengths != (q_len, kv_len):
        got = f"causal_{bias.variant.name.lower()}({lengths[0]}, {lengths[1]})"
        raise value_error(name, f"be made for {q_len} queries and {kv_len} keys", got)
    later = kv_len - q_len  # position of the first query
    if bias.variant.name == "LOWER_RIGHT" or later == 0:
        return Causal()
    # Query i is at position i + later and sees the keys up to i.
    return Window(None, -later) if later < 0 else ~Window(later - 1, None)
