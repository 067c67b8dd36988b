"""The two ways of adding a sublayer to what goes through it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from saccade.engine import dropout
from saccade.errors import type_error, value_error
from saccade.nn.attention import MultiHeadAttention

__all__ = ["add_sublayer", "check_parts"]


def add_sublayer(
    x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: nn.Module, drop: nn.Module, norm_first: bool
) -> Tensor:
    """``x + drop(sublayer(norm(x)))`` where the norm comes first, else ``norm(x + drop(sublayer(x)))``."""
    change = sublayer(norm(x) if norm_first else x)
    if drop.training:  # where one token goes through a model, calls that change nothing take as long as those that do
        change = drop(change)
    return x + change if norm_first else norm(x + change)


def check_parts(
    where: str,
    attentions: dict[str, MultiHeadAttention | None],
    feed_forward: nn.Module,
    dropout_p: float,
    norm_first: bool,
) -> None:
    """Raise unless the parts of a layer are parts, and of one width."""
    width: int | None = None
    for name, part in attentions.items():
        if part is None:
            continue
        if not isinstance(part, MultiHeadAttention):
            hint = "for instance saccade.nn.MultiHeadAttention(64, 8)"
            raise type_error(where, name, "be a saccade.nn.MultiHeadAttention", type(part).__name__, hint=hint)
        width = part.embed_dim if width is None else width
        if part.embed_dim != width:
            raise value_error(where, name, f"have embed_dim {width}, as the first attention", part.embed_dim)
    if not isinstance(feed_forward, nn.Module):
        hint = f"for instance saccade.nn.FeedForward({width}, {4 * (width or 1)})"
        raise type_error(where, "feed_forward", "be a module", type(feed_forward).__name__, hint=hint)
    theirs = getattr(feed_forward, "embed_dim", width)
    if theirs != width:
        raise value_error(where, "feed_forward", f"have embed_dim {width}, as the attention", theirs)
    dropout.check(dropout_p, where)
    if not isinstance(norm_first, bool):
        raise type_error(where, "norm_first", "be True or False", type(norm_first).__name__)
