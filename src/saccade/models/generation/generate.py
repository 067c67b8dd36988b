"""Text generation: continue texts token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from types import NoneType
from typing import Literal

import torch
from torch import Tensor

from saccade.caches import Cache, LayerCache
from saccade.engine import dropout
from saccade.models.generation.prompts import FOREIGN_NAMES, as_prompts, stop_tokens
from saccade.models.generation.sampler import Sampler
from saccade.models.generation.stepper import LanguageModel, Reader, new_reader
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_type

Tokens = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The result of one model call during text generation: the new tokens and the amount of work.

    Args:
        phase: "prefill" if the model read the prompt, "decode" if it read the last generated tokens.
        tokens: the generated tokens, int64 ``[batch]``; -1 for a text that has already ended.
        log_probs: log-probabilities of the tokens under the sampling distribution, ``[batch]``; 0 without a sampler.
        processed: number of tokens that the model read in this call, not counting padding and texts that have ended.
        bytes_read: bytes of keys and values that attention read from the caches of all layers; None without a cache.
        bytes_appended: bytes of keys and values that were added to the caches; None without a cache.
    """

    phase: Literal["prefill", "decode"]
    tokens: Tensor
    log_probs: Tensor
    processed: int
    bytes_read: int | None
    bytes_appended: int | None


@argument_hints(FOREIGN_NAMES)
def generate(
    model: LanguageModel,
    tokens: Tokens,
    max_new_tokens: int,
    *,
    cache: Cache | LayerCache | None = None,
    sampler: Sampler | None = None,
    stop: int | Collection[int] | None = None,
    seed: int | None = None,
) -> list[list[int]]:
    """Continue prompts one token at a time, and return the new tokens.

    Args:
        model: ``model(tokens, cache=cache, positions=positions) -> logits [batch, len, vocab]`` with ``new_cache()``,
            in eval mode; or a model without a cache, ``model(tokens, positions=positions)``, which reads the full texts
            each time. If the model has ``hidden`` and ``logits``, only the logits of the last token are computed.
        tokens: the prompts: a list of lists of ints, which may differ in length, or an int tensor ``[batch, len]``.
        max_new_tokens: maximum number of tokens to add to a text.
        cache: a cache of the text before the prompts, to be extended; a new cache if None. The last generated token is
            not yet in the cache, so start the next call with that token.
        sampler: how tokens are sampled; if None, the likeliest token is always taken.
        stop: tokens that end a text; they are not included in the result.
        seed: seed for sampling, from 0 to 2**63 - 1. If None, it is drawn from torch's global generator; sampling does
            not change the global random state in any other way. Passing a seed without a sampler raises an error.

    Returns:
        The new tokens for each prompt, without the prompt, padding and stop token.

    Raises:
        ValueError, TypeError: an argument is invalid; raised before the model is called.

    Cost: one forward pass over the prompts, then one for each new token, which reads the cache once.

    Example:
        >>> from saccade.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(vocab_size=9, max_len=32, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
        >>> model = Decoder(config).eval()
        >>> [len(text) for text in generate(model, [[1, 2, 3], [4]], 5)]
        [5, 5]
    """
    prompts, ends, steps = _prepare(model, tokens, max_new_tokens, cache, sampler, stop, seed)
    texts: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for text, token in zip(texts, step.tokens.tolist(), strict=True):
            if token >= 0 and token not in ends:
                text.append(token)
    return texts


@argument_hints(FOREIGN_NAMES)
def stream(
    model: LanguageModel,
    tokens: Tokens,
    max_new_tokens: int,
    *,
    cache: Cache | LayerCache | None = None,
    sampler: Sampler | None = None,
    stop: int | Collection[int] | None = None,
    seed: int | None = None,
) -> Iterator[Step]:
    """Generate text like `generate`, but yield a `Step` with one new token per text after each model call.

    Example:
        >>> from saccade.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(vocab_size=9, max_len=32, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
        >>> model = Decoder(config).eval()
        >>> for step in stream(model, [[1, 2, 3]], 3):
        ...     print(step.phase, step.processed, step.bytes_appended)
        prefill 3 192
        decode 1 64
        decode 1 64
    """
    return _prepare(model, tokens, max_new_tokens, cache, sampler, stop, seed)[2]


def _prepare(
    model: LanguageModel,
    tokens: Tokens,
    max_new_tokens: int,
    cache: Cache | LayerCache | None,
    sampler: Sampler | None,
    stop: int | Collection[int] | None,
    seed: int | None,
) -> tuple[list[list[int]], frozenset[int], Iterator[Step]]:
    """Check the arguments of `generate`. Return the prompts, the stop tokens and an iterator over `Step` objects."""
    prompts = as_prompts(tokens)
    check_int("max_new_tokens", max_new_tokens, 0)
    hint = "for instance saccade.models.Sampler(temperature=0.8, top_p=0.95)"
    check_type("sampler", sampler, (Sampler, NoneType), "be a Sampler or None", hint=hint)
    dropout.check_seed(seed)
    if seed is not None and sampler is None:
        hint = "sampler=saccade.models.Sampler() samples; without a sampler, the most likely token is taken"
        raise value_error("seed", "be None without sampling", seed, hint=hint)
    reader, ends = new_reader(model, cache), stop_tokens(stop)
    return prompts, ends, _steps(reader, prompts, max_new_tokens, sampler, ends, seed)


def _steps(
    reader: Reader, new: list[list[int]], most: int, sampler: Sampler | None, ends: frozenset[int], seed: int | None
) -> Iterator[Step]:
    generator = torch.Generator()
    if sampler is not None:
        generator.manual_seed(int(torch.randint(1 << 62, (), device="cpu")) if seed is None else seed)
    is_open = [True] * len(new)
    for number in range(most):
        logits = reader.read(new)
        if sampler is None:
            chosen, log_probs = logits.argmax(-1), logits.new_zeros(len(new))
        else:
            chosen, log_probs = sampler.draw(logits, generator)
        open_rows = torch.tensor(is_open, device=chosen.device)
        yield Step(
            "decode" if number else "prefill",
            chosen.masked_fill(~open_rows, -1),
            log_probs.masked_fill(~open_rows, 0.0),
            reader.processed,
            None if reader.traffic is None else reader.traffic.bytes_read,
            None if reader.traffic is None else reader.traffic.bytes_appended,
        )
        listed = chosen.tolist()
        is_open = [was and token not in ends for was, token in zip(is_open, listed, strict=True)]
        if not any(is_open):
            return
        new = [[token] if goes_on else [] for token, goes_on in zip(listed, is_open, strict=True)]
