"""Continue texts token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from types import NoneType
from typing import Literal

import torch
from torch import Tensor

from saccade.caches import Cache, LayerCache
from saccade.engine import dropout
from saccade.models.argument_hints import OF_GENERATION
from saccade.models.generation.prompts import as_prompts, stop_tokens
from saccade.models.generation.sampler import Sampler
from saccade.models.generation.stepper import LanguageModel, Reader, new_reader
from saccade.support.argument_hints import answers
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_type

__all__ = ["Step", "generate", "stream"]

Tokens = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A step of generation.

    Args:
        phase: "prefill" where the model read the prompt, "decode" where it read the tokens chosen before.
        tokens: the tokens chosen, int64 ``[batch]``; -1 for a text that had ended before.
        log_probs: their log-probabilities under the distribution they were drawn from, ``[batch]``; 0 where greedy.
        processed: tokens that the model read in this step, padding and ended texts left out.
        bytes_read: of keys and values that attention needed from the caches, in all layers; None without a cache.
        bytes_appended: of keys and values that the caches took in; None without a cache.
    """

    phase: Literal["prefill", "decode"]
    tokens: Tensor
    log_probs: Tensor
    processed: int
    bytes_read: int | None
    bytes_appended: int | None


@answers(OF_GENERATION)
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
    """Continue texts.

    Args:
        model: ``model(tokens, cache=cache, positions=positions) -> logits [batch, len, vocab]`` with ``new_cache()``,
            in eval mode; or one without, ``model(tokens, positions=positions)``, which reads the texts anew each time.
            A model with ``hidden`` and ``logits`` computes the logits of the last token only.
        tokens: the prompts: a list of lists of ints, which may differ in length, or an int tensor ``[batch, len]``.
        max_new_tokens: most tokens to add to a text.
        cache: what the model remembers of the text before the prompts; it is extended. The last token chosen has not
            been read yet: the next call begins with it. A new cache when None.
        sampler: how tokens are drawn; the likeliest each time when None.
        stop: tokens that end a text; they are not part of it.
        seed: of the draws, from 0 to 2**63 - 1; taken from torch's generator when None. The draws leave the random
            state of the process as it is. Without a sampler nothing is drawn, and a seed is refused.

    Returns:
        The new tokens of each prompt, without the prompt, padding and stop token.

    Raises:
        ValueError, TypeError: arguments that do not fit; before the model is called.

    Cost: one pass over the prompts, then one for each new token of the batch, which reads the cache once.

    Example:
        >>> from saccade.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(vocab_size=9, max_len=32, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
        >>> model = Decoder(config).eval()
        >>> [len(text) for text in generate(model, [[1, 2, 3], [4]], 5)]
        [5, 5]
    """
    prompts, ends, steps = _begun(model, tokens, max_new_tokens, cache, sampler, stop, seed)
    texts: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for text, token in zip(texts, step.tokens.tolist(), strict=True):
            if token >= 0 and token not in ends:
                text.append(token)
    return texts


@answers(OF_GENERATION)
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
    """As `generate`, step by step: each `Step` has one token of every text, and says what it cost.

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
    return _begun(model, tokens, max_new_tokens, cache, sampler, stop, seed)[2]


def _begun(
    model: LanguageModel,
    tokens: Tokens,
    max_new_tokens: int,
    cache: Cache | LayerCache | None,
    sampler: Sampler | None,
    stop: int | Collection[int] | None,
    seed: int | None,
) -> tuple[list[list[int]], frozenset[int], Iterator[Step]]:
    """The prompts, the tokens that end a text, and the steps, once everything is checked."""
    prompts = as_prompts(tokens)
    check_int("max_new_tokens", max_new_tokens, 0)
    hint = "for instance saccade.models.Sampler(temperature=0.8, top_p=0.95)"
    check_type("sampler", sampler, (Sampler, NoneType), "be a Sampler or None", hint=hint)
    dropout.check_seed(seed)
    if seed is not None and sampler is None:
        hint = "sampler=saccade.models.Sampler() draws; without one the likeliest token is taken"
        raise value_error("seed", "be None where nothing is drawn", seed, hint=hint)
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
        still = torch.tensor(is_open, device=chosen.device)
        yield Step(
            "decode" if number else "prefill",
            chosen.masked_fill(~still, -1),
            log_probs.masked_fill(~still, 0.0),
            reader.processed,
            None if reader.traffic is None else reader.traffic.bytes_read,
            None if reader.traffic is None else reader.traffic.bytes_appended,
        )
        picked = chosen.tolist()
        is_open = [was and token not in ends for was, token in zip(is_open, picked, strict=True)]
        if not any(is_open):
            return
        new = [[token] if goes_on else [] for token, goes_on in zip(picked, is_open, strict=True)]
