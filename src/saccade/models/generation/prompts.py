"""Prompts: tokens in any form that a user has them in, as a left-padded batch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from saccade.errors import type_error, value_error

__all__ = ["as_prompts", "check_count", "left_padded", "stop_tokens"]


def as_prompts(where: str, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Lists of ints, one per prompt.

    Args:
        tokens: int ``[batch, len]``, or a list of lists of ints, which may differ in length.
    """
    rule = "be an int tensor [batch, len] or a list of lists of ints"
    if isinstance(tokens, Tensor):
        if tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
            got = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            raise type_error(where, "tokens", rule, got, hint="one prompt: tokens[None]")
        prompts = tokens.tolist()
    else:
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
            got = type(tokens).__name__
            raise type_error(where, "tokens", rule, got, hint="a tokenizer makes tokens of text")
        prompts = [one.tolist() if isinstance(one, Tensor) else one for one in tokens]
        for one in prompts:
            if not isinstance(one, Sequence) or isinstance(one, str | bytes):
                raise type_error(where, "tokens", rule, f"a list with {one!r}", hint="one prompt: [tokens]")
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in one):
                raise type_error(where, "tokens", rule, "something else in a prompt")
    if not prompts:
        raise value_error(where, "tokens", "hold at least one prompt", "none")
    for number, one in enumerate(prompts):
        if not len(one):
            hint = "a text begins with some token: that for the beginning of a text, if the model has one"
            raise value_error(
                where, "tokens", "have at least one token in every prompt", f"none in prompt {number}", hint=hint
            )
        if min(one) < 0:
            hint = "padding is done inside: give lists of different lengths"
            raise value_error(where, "tokens", "be at least 0", min(one), hint=hint)
    return [list(one) for one in prompts]


def left_padded(prompts: list[list[int]], starts: list[int], device: torch.device) -> tuple[Tensor, range | Tensor]:
    """Tokens ``[batch, len]``, the last of each text in the last column, and where they stand.

    Args:
        prompts: the tokens.
        starts: where each text goes on.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=device)
    if len(set(starts)) == 1 and all(len(one) == longest for one in prompts):
        return tokens, range(starts[0], starts[0] + longest)
    rows = [
        [-1] * (longest - len(one)) + list(range(start, start + len(one)))
        for one, start in zip(prompts, starts, strict=True)
    ]
    return tokens, torch.tensor(rows, device=device)


def stop_tokens(where: str, stop: int | Collection[int] | None) -> frozenset[int]:
    """The tokens that end a text."""
    given = () if stop is None else (stop,) if isinstance(stop, int) else stop
    if isinstance(given, str) or not isinstance(given, Collection):
        raise type_error(where, "stop", "be a token, several tokens or None", type(stop).__name__)
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise value_error(where, "stop", "be tokens, ints of at least 0", repr(token))
    return frozenset(given)


def check_count(where: str, name: str, count: object, least: int) -> None:
    """Raise unless ``count`` is an int of at least ``least``, and no more than anything can be counted to."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise value_error(where, name, f"be an int of at least {least}", repr(count))
    if count > sys.maxsize:
        raise value_error(where, name, f"be at most {sys.maxsize}", count)
