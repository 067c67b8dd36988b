"""Checks of model inputs: tokens, images and feature maps."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.support.errors import describe, type_error, value_error
from saccade.support.torch_modes import has_values, is_tracing, mapped_levels
from saccade.support.validation import ShapeSpec


def check_tokens(argument: str, tokens: object, vocab_size: int | None = None) -> None:
    """Raise an error unless a model's tokens are int ``[batch, len]``, with values from 0 to ``vocab_size - 1``.

    Values are checked on the CPU only, because reading them from another device would force it to synchronize. On other
    devices, and in compiled programs, torch's embedding lookup raises an error for wrong values.
    """
    if not isinstance(tokens, Tensor):
        raise type_error(argument, "be a tensor", type(tokens).__name__)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise type_error(argument, "be int64 or int32", tokens.dtype)
    if tokens.ndim != 2:
        raise value_error(argument, "have shape [batch, len]", list(tokens.shape))
    is_unread = tokens.device.type != "cpu" or not has_values(tokens) or is_tracing()
    if vocab_size is None or is_unread or not tokens.numel():
        return
    least, most = map(int, mapped_levels(tokens)[1].aminmax())  # of all samples under vmap
    if least < 0 or most >= vocab_size:
        hint = "padding may be any token of the vocabulary, with position -1"
        rule = f"be from 0 to {vocab_size - 1}, the vocabulary"
        raise value_error(argument, rule, least if least < 0 else most, hint=hint)


def check_map(name: str, x: Tensor, channels: int, weight: Tensor | None) -> None:
    """Raise an error unless a model's input images or feature maps have the right shape and dtype.

    They must be ``[batch, channels, H, W]``, with at least one row and column, and have the dtype of ``weight``.
    """
    hint = f"{name}[None] adds the batch axis" if isinstance(x, Tensor) and x.dim() == 3 else None
    sizes = ShapeSpec(f"{name} [batch, channels, H, W]").check(x, hint=hint, channels=channels)
    if not sizes["H"] * sizes["W"]:
        raise value_error(name, "have at least one row and column", list(x.shape))
    if weight is not None and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        rule = f"be {str(weight.dtype).removeprefix('torch.')}, like the parameters"
        got = str(x.dtype).removeprefix("torch.")
        raise value_error(name, rule, got, facts=[describe(name, x)])
