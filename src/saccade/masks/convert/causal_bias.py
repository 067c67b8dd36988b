"""Masks from torch's ``causal_upper_left`` and ``causal_lower_right`` of ``torch.nn.attention.bias``."""

from __future__ import annotations

from typing import Any

from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.window import Window
from saccade.support.errors import value_error

__all__ = ["from_causal_bias", "starts_at_first_key"]


def starts_at_first_key(bias: Any) -> bool:
    """Return whether query 0 sees key 0 and no other key, as with ``is_causal=True``."""
    return bias.seq_len_q == bias.seq_len_kv or bias.variant.name == "UPPER_LEFT"


def from_causal_bias(bias: Any, q_len: int, kv_len: int, name: str) -> Mask:
    """Return the mask that a ``CausalBias`` means, on default positions.

    Args:
        bias: of ``causal_upper_left`` or ``causal_lower_right``.
        q_len, kv_len: lengths that it must be made for.
        where, name: the function and its argument, for the error.

    Raises:
        ValueError: it is made for other lengths, or is what an operation made of one.

    >>> from torch.nn.attention.bias import causal_upper_left
    >>> print(from_causal_bias(causal_upper_left(2, 4), 2, 4, "mask").picture(2, 4))
    1 . . .
    1 1 . .
    """
    if not hasattr(bias, "variant"):
        rule = "be what causal_lower_right or causal_upper_left returns"
        raise value_error(name, rule, "the result of an operation on it", hint="mask=masks.Causal()")
    own = (bias.seq_len_q, bias.seq_len_kv)
    if own != (q_len, kv_len):
        got = f"causal_{bias.variant.name.lower()}({own[0]}, {own[1]})"
        raise value_error(name, f"be made for {q_len} queries and {kv_len} keys", got)
    later = kv_len - q_len  # position of the first query
    if bias.variant.name == "LOWER_RIGHT" or later == 0:
        return Causal()
    # Query i is at position i + later and sees the keys up to i.
    return Window(None, -later) if later < 0 else ~Window(later - 1, None)
