"""The tokens that a model is called with: their check, and where they stand in their own texts."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Documents
from saccade.masks.algebra import And
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import type_error, value_error

__all__ = ["check_tokens", "in_own_texts"]


def check_tokens(argument: str, tokens: object, vocab_size: int | None = None) -> None:
    """Raise unless ``tokens`` is int ``[batch, len]``, each below ``vocab_size``.

    The numbers are read on the CPU only: on other devices that would wait, and torch's own lookup raises there, as it
    does in a compiled program.
    """
    if not isinstance(tokens, Tensor):
        raise type_error(argument, "be a tensor", type(tokens).__name__)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise type_error(argument, "be int64 or int32", tokens.dtype)
    if tokens.ndim != 2:
        raise value_error(argument, "be [batch, len]", list(tokens.shape))
    if vocab_size is None or tokens.device.type != "cpu" or not tokens.numel() or torch.compiler.is_compiling():
        return
    least, most = map(int, tokens.aminmax())
    if least < 0 or most >= vocab_size:
        hint = "padding is any token, at position -1"
        rule = f"be from 0 to {vocab_size - 1}, the vocabulary"
        raise value_error(argument, rule, least if least < 0 else most, hint=hint)


def in_own_texts(positions: GivenPositions, mask: object) -> range | Tensor:
    """Where a table of positions is read: at those given, or where texts are packed, at those in the own text.

    Masks and relative positions need not know: they count on the whole line, or tell texts apart themselves.
    """
    placed = Positions.of(positions)
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Documents):
            return part.places(placed.on())
    return placed.given
