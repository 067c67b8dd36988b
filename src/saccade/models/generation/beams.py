"""Beam search: extend several continuations of a text in parallel, and keep the likeliest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches import Cache, LayerCache
from saccade.models.generation.generate import Tokens
from saccade.models.generation.prompts import FOREIGN_NAMES, as_prompts, stop_tokens
from saccade.models.generation.stepper import LanguageModel, new_reader
from saccade.support.argument_hints import argument_hints
from saccade.support.validation import check_int, check_number


class Hypothesis(NamedTuple):
    """A continuation that beam search returns, with its score.

    Args:
        tokens: the new tokens, without the prompt and the stop token.
        score: sum of the log-probabilities, including the stop token's, divided by
            ``number_of_tokens ** length_penalty``.
    """

    tokens: list[int]
    score: float


@argument_hints(FOREIGN_NAMES)
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
    r"""Continue texts by beam search, which looks for likely continuations instead of likely individual tokens.

    .. math:: \mathrm{score}(y) = \frac{\sum_t \ln p(y_t \mid y_{<t})}{|y|^{\mathrm{length\_penalty}}}

    Each iteration extends the open continuations by every possible token. Of the results that do not end, the ``beams``
    likeliest stay open. Those that end are finished if they are among the ``beams`` likeliest of all. The search for a
    prompt stops when no open continuation can become better than the finished ones.

    Args:
        model, tokens, max_new_tokens, stop: see `generate`.
        beams: number of parallel continuations, at least 1.
        length_penalty: 0 to compare sums of log-probabilities, which favours short texts; 1 to compare their means.
        cache: a cache of earlier text, which is not modified.

    Returns:
        For each prompt, at most ``beams`` continuations, best first.

    Raises:
        ValueError, TypeError: an argument is invalid; raised before the model is called.

    Cost: the same as for `generate` with ``beams`` times as many texts, plus a copy of the cache whenever beams are
    reordered.

    Example:
        >>> from saccade.models import Decoder, DecoderConfig
        >>> config = DecoderConfig(vocab_size=9, max_len=32, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
        >>> model = Decoder(config).eval()
        >>> best, second = beam_search(model, [[1, 2, 3]], 4, beams=2)[0]
        >>> best.score >= second.score, len(best.tokens)
        (True, 4)

    Reference: Wu et al. 2016, arXiv:1609.08144, section 7, but with a plain power of the length as the divisor.
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
        # Each active search has one row per open beam.
        sizes = [len(search.open) for search in active]
        pieces = zip(active, itertools.accumulate(sizes, initial=0), logits.log_softmax(-1).split(sizes), strict=False)
        extended = [
            (search, start + parent, token)
            for search, start, log_probs in pieces
            for parent, token in search.extend(log_probs)
        ]
        if not extended:
            return [search.done for search in searches]
        active = list(dict.fromkeys(search for search, _, _ in extended))
        reader.reorder([row for _, row, _ in extended])
        logits = reader.read([[token] for _, _, token in extended])


class _Open(NamedTuple):
    tokens: list[int]
    total: float


@dataclasses.dataclass(eq=False)
class _Search:
    """The state of the beam search for one prompt: its open and finished beams, both sorted from best to worst."""

    beams: int
    length_penalty: float
    max_new_tokens: int
    ends: frozenset[int]
    open: list[_Open] = dataclasses.field(default_factory=lambda: [_Open([], 0.0)])
    done: list[Hypothesis] = dataclasses.field(default_factory=list)

    def extend(self, log_probs: Tensor) -> list[tuple[int, int]]:
        """Extend all open beams by one token.

        Args:
            log_probs: log-probabilities of the next token, ``[open beams, vocab]``.

        Returns:
            For each new open beam, the index of the beam that it extends, and its new token; an empty list if the
            search is over.
        """
        vocab = log_probs.shape[1]
        totals = log_probs.double() + torch.tensor([beam.total for beam in self.open], device=log_probs.device)[:, None]
        # Take enough candidates to fill all beams even if some end.
        count = min(totals.numel(), self.beams * (1 + len(self.ends)))
        values, index = totals.flatten().topk(count)
        grown: list[_Open] = []
        origins: list[tuple[int, int]] = []
        for rank, (total, flat) in enumerate(zip(values.tolist(), index.tolist(), strict=True)):
            parent, token = divmod(flat, vocab)
            if total == -math.inf or len(grown) == self.beams:
                break
            before = self.open[parent].tokens
            if token not in self.ends:
                grown.append(_Open([*before, token], total))
                origins.append((parent, token))
            elif rank < self.beams:
                self.done.append(Hypothesis(before, self._score(total, len(before) + 1)))
        self.open = grown
        length = len(grown[0].tokens) if grown else self.max_new_tokens
        is_over = length == self.max_new_tokens
        if is_over:
            self.done += [Hypothesis(beam.tokens, self._score(beam.total, length)) for beam in grown]
        self.done = sorted(self.done, key=lambda beam: -beam.score)[: self.beams]
        return [] if is_over or self._cannot_improve(length) else origins

    def _score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty

    def _cannot_improve(self, length: int) -> bool:
        """Return whether the search can stop because no open beam can still beat the worst finished beam."""
        if len(self.done) < self.beams:
            return False
        # Totals only decrease, but the divisor may grow.
        most = self.max_new_tokens if self.length_penalty > 0 else length + 1
        return self._score(self.open[0].total, most) <= self.done[-1].score
