"""Checks of the tokens that a model is called with, and their positions in packed documents."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Documents
from saccade.masks.algebra import And
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import type_error, value_error

__all__ = ["check_tokens", "positions_in_documents"]


def check_tokens(where: str, argument: str, tokens: object, vocab_size: int | None = None) -> None:
    """Raise unless ``tokens`` is int ``[batch, len]``, each below ``vocab_size``.

    Values are checked on the CPU only: reading them would block other devices, where torch's lookup raises anyway, as
    it does in a compiled program.
    """
    if not isinstance(tokens, Tensor):
        raise type_error(where, argument, "be a tensor", type(tokens).__name__)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise type_error(where, argument, "be int64 or int32", tokens.dtype)
    if tokens.ndim != 2:
        raise value_error(where, argument, "be [batch, len]", list(tokens.shape))
    if vocab_size is None or tokens.device.type != "cpu" or not tokens.numel() or torch.compiler.is_compiling():
        return
    least, most = map(int, tokens.aminmax())
    if least < 0 or most >= vocab_size:
        hint = "padding is any token, at position -1"
        rule = f"be from 0 to {vocab_size - 1}, the vocabulary"
        raise value_error(where, argument, rule, least if least < 0 else most, hint=hint)


def positions_in_documents(positions: GivenPositions, mask: object, where: str) -> range | Tensor:
    """Return the positions for a table of position vectors: counted within each document if documents are packed.

    Masks and relative positions do not need this: they count over the whole sequence or distinguish documents.
    """
    resolved = Positions.of(positions, where)
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Documents):
            return part.places(resolved.on())
    return resolved.given
