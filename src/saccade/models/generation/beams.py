"""Beam search: several continuations of a text side by side, the likeliest kept."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches import Cache, LayerCache
from saccade.models.argument_hints import OF_GENERATION
from saccade.models.generation.generate import Tokens
from saccade.models.generation.prompts import as_prompts, stop_tokens
from saccade.models.generation.stepper import LanguageModel, new_reader
from saccade.support.argument_hints import answers
from saccade.support.validation import check_int, check_number

__all__ = ["Hypothesis", "beam_search"]


class Hypothesis(NamedTuple):
    """A continuation and how good it is.

    Args:
        tokens: without the prompt and the stop token.
        score: sum of the log-probabilities, the stop token's included, divided by
            ``number_of_tokens ** length_penalty``.
    """

    tokens: list[int]
    score: float


@answers(OF_GENERATION)
def beam_search(
    model: LanguageModel,
    tokens: Tokens,
    max_new_tokens: int,
    *,
    beams: int,
    length_penalty: float = 1.0,
    cache: Cache | LayerCache | None = None,
    stop: int | Collection[int] | None = None,
) -> list[list[Hypothesis]]:
    r"""Continue texts so that each continuation as a whole is likely, instead of each token by itself.

    .. math:: \mathrm{score}(y) = \frac{\sum_t \ln p(y_t \mid y_{<t})}{|y|^{\mathrm{length\_penalty}}}

    Each step extends the open continuations by every token and keeps the ``beams`` likeliest that do not end; those
    among the ``beams`` likeliest that end are put aside. A prompt is done when no open continuation can become better
    than those put aside.

    Args:
        model, tokens, max_new_tokens, stop: see `generate`.
        beams: continuations side by side, at least 1.
        length_penalty: 0 compares sums of log-probabilities, which favours short texts; 1 compares their means.
        cache: what the model remembers of earlier text; it is not changed.

    Returns:
        For each prompt at most ``beams`` continuations, best first.

    Raises:
        ValueError, TypeError: arguments that do not fit; before the model is called.

    Cost: that of `generate` for ``beams`` times as many texts, and a copy of the cache in each step that changes the
    order of the beams.

    Example:
        >>> from saccade.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(vocab_size=9, max_len=32, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
        >>> model = Decoder(config).eval()
        >>> best, second = beam_search(model, [[1, 2, 3]], 4, beams=2)[0]
        >>> best.score >= second.score, len(best.tokens)
        (True, 4)

    Reference: Wu et al. 2016, arXiv:1609.08144, section 7, with a plain power of the length.
    """
    prompts = as_prompts(tokens)
    max_new_tokens = check_int("max_new_tokens", max_new_tokens)
    beams = check_int("beams", beams)
    length_penalty = check_number("length_penalty", length_penalty)
    ends = stop_tokens(stop)
    if cache is not None and isinstance(cache, Cache | LayerCache):
        cache = cache.fork()
    reader = new_reader(model, cache)

    searches = [_Search(beams, length_penalty, max_new_tokens, ends) for _ in prompts]
    active, logits = searches, reader.read(prompts)
    while True:
        # Each active search has as many rows as it has open beams.
        sizes = [len(search.open) for search in active]
        pieces = zip(active, itertools.accumulate(sizes, initial=0), logits.log_softmax(-1).split(sizes), strict=False)
        kept = [
            (search, start + parent, token)
            for search, start, log_probs in pieces
            for parent, token in search.extend(log_probs)
        ]
        if not kept:
            return [search.done for search in searches]
        active = list(dict.fromkeys(search for search, _, _ in kept))
        reader.reorder([row for _, row, _ in kept])
        logits = reader.read([[token] for _, _, token in kept])


class _Open(NamedTuple):
    tokens: list[int]
    total: float


@dataclasses.dataclass(eq=False)
class _Search:
    """The beams of one prompt: those that may grow, and the finished ones, best first."""

    beams: int
    length_penalty: float
    max_new_tokens: int
    ends: frozenset[int]
    open: list[_Open] = dataclasses.field(default_factory=lambda: [_Open([], 0.0)])
    done: list[Hypothesis] = dataclasses.field(default_factory=list)

    def extend(self, log_probs: Tensor) -> list[tuple[int, int]]:
        """One token more; returns (parent, token) of the beams that go on, none if the search is over.

        Args:
            log_probs: ``[open beams, vocab]``.
        """
        vocab = log_probs.shape[1]
        totals = log_probs.double() + torch.tensor([one.total for one in self.open], device=log_probs.device)[:, None]
        # Beams that end leave room for others: with so many candidates there are always enough that do not.
        count = min(totals.numel(), self.beams * (1 + len(self.ends)))
        values, index = totals.flatten().topk(count)
        grown: list[_Open] = []
        kept: list[tuple[int, int]] = []
        for rank, (total, place) in enumerate(zip(values.tolist(), index.tolist(), strict=True)):
            parent, token = divmod(place, vocab)
            if total == -math.inf or len(grown) == self.beams:
                break
            before = self.open[parent].tokens
            if token not in self.ends:
                grown.append(_Open([*before, token], total))
                kept.append((parent, token))
            elif rank < self.beams:
                self.done.append(Hypothesis(before, self._score(total, len(before) + 1)))
        self.open = grown
        length = len(grown[0].tokens) if grown else self.max_new_tokens
        is_over = length == self.max_new_tokens
        if is_over:
            self.done += [Hypothesis(one.tokens, self._score(one.total, length)) for one in grown]
        self.done = sorted(self.done, key=lambda one: -one.score)[: self.beams]
        return [] if is_over or self._cannot_improve(length) else kept

    def _score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty

    def _cannot_improve(self, length: int) -> bool:
        """Whether no open beam, however it goes on, can score better than the worst that is put aside."""
        if len(self.done) < self.beams:
            return False
        # Totals only fall; what they are divided by may grow.
        most = self.max_new_tokens if self.length_penalty > 0 else length + 1
        return self._score(self.open[0].total, most) <= self.done[-1].score
