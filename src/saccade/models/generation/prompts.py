"""Validate prompts for text generation, and convert them to a left-padded batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_int, is_integer

_SAMPLER = "sampler=Sampler(temperature=..., top_k=..., top_p=...); without a sampler, the most likely token is taken"

FOREIGN_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "do_sample"), _SAMPLER),
    "num_beams": "beam_search(model, tokens, max_new_tokens, beams=...)",
    **dict.fromkeys(("max_length", "max_tokens", "max_len"), "max_new_tokens=, which does not count the prompt"),
    **dict.fromkeys(("eos_token_id", "stop_token", "eos"), "stop="),
    **dict.fromkeys(("past_key_values", "use_cache"), "cache=model.new_cache()"),
    **dict.fromkeys(("input_ids", "prompt", "prompts", "inputs"), "tokens="),
}


def as_prompts(tokens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Check the prompts passed to `generate`, and convert them to lists of ints.

    Args:
        tokens: int ``[batch, len]``, or a list of lists of ints, which may differ in length.
    """
    rule = "be an int tensor [batch, len] or a list of lists of ints"
    if isinstance(tokens, Tensor):
        if tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
            got = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            raise type_error("tokens", rule, got, hint="one prompt: tokens[None]")
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise type_error("tokens", rule, type(tokens).__name__, hint="a tokenizer turns text into tokens")
    if not tokens:
        raise value_error("tokens", "contain at least one prompt", "none")
    return [_as_prompt(rule, number, prompt) for number, prompt in enumerate(tokens)]


def _as_prompt(rule: str, number: int, given: object) -> list[int]:
    given = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise type_error("tokens", rule, f"a list with {given!r}", hint="one prompt: [tokens]")
    if not all(map(is_integer, given)):
        raise type_error("tokens", rule, "a prompt with a value that is not an int")
    if not given:
        rule = "have at least one token in every prompt"
        hint = "begin the text with the model's token for the beginning of a text, if there is one"
        raise value_error("tokens", rule, f"none in prompt {number}", hint=hint)
    if min(given) < 0:
        hint = "pass lists of different lengths; they are padded internally"
        raise value_error("tokens", "be at least 0", min(given), hint=hint)
    return list(map(int, given))


def left_padded(prompts: list[list[int]], starts: list[int], device: torch.device) -> tuple[Tensor, range | Tensor]:
    """Pad prompts on the left to a common length.

    Return the tokens, ``[batch, len]``, and their positions: int64 ``[batch, len]`` with -1 for padding, or a range if
    there is no padding and all prompts start at the same position.

    Args:
        prompts: the tokens of each prompt; an empty list for a text that has ended.
        starts: position of the first token of each prompt.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    if len(set(starts)) == 1 and all(len(prompt) == longest for prompt in prompts):
        return tokens, range(starts[0], starts[0] + longest)
    rows = [
        [-1] * (longest - len(prompt)) + list(range(start, start + len(prompt)))
        for prompt, start in zip(prompts, starts, strict=True)
    ]
    return tokens, torch.tensor(rows, device=device)


def stop_tokens(stop: int | Collection[int] | None) -> frozenset[int]:
    """Check the stop tokens passed to `generate`, and return them as a set of ints."""
    tokens = () if stop is None else (stop,) if is_integer(stop) else stop
    if isinstance(tokens, str) or not isinstance(tokens, Collection):
        raise type_error("stop", "be a token, several tokens or None", type(stop).__name__)
    return frozenset(check_int("stop", token, 0) for token in tokens)
