"""Feed new tokens to a language model during text generation, with or without a cache."""

from __future__ import annotations

from types import NoneType
from typing import Protocol

import torch
from torch import Tensor

from saccade.caches import Cache, LayerCache, Traffic
from saccade.models.generation.prompts import left_padded
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import type_error, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import check_type


class LanguageModel(Protocol):
    """The interface of models that can generate text.

    A model without a ``new_cache()`` method reads the full text again for each new token.
    """

    def __call__(self, tokens: Tensor, *, positions: GivenPositions) -> Tensor:
        """Return next-token logits, ``[batch, len, vocab]``; a model with a cache also accepts ``cache=``."""
        ...


class Reader(Protocol):
    """The interface of objects that pass texts to a language model and keep track of what it has read.

    Attributes:
        processed: number of tokens that the model read in the last call of `read`.
        traffic: bytes that attention read from the caches and appended to them in that call; None without a cache.
    """

    processed: int = 0
    traffic: Traffic | None = None

    def read(self, new: list[list[int]]) -> Tensor:
        """Feed new tokens to the language model, and return next-token logits, float ``[batch, vocab]``.

        Args:
            new: the new tokens of each text; an empty list for a text that has ended.
        """
        ...

    def reorder(self, rows: list[int]) -> None:
        """Replace the texts of the batch by those at the indices ``rows``; in beam search, an index may repeat."""
        ...


def new_reader(model: LanguageModel, cache: Cache | LayerCache | None) -> Reader:
    """Return a `Reader` for a language model, with a cache if the model supports caches."""
    if not callable(model):
        raise type_error("model", "be a model, model(tokens, ...) -> logits", type(model).__name__)
    check_type("cache", cache, (Cache, LayerCache, NoneType), "be a cache from model.new_cache(), or None")
    if cache is None:
        new_cache = getattr(model, "new_cache", None)
        if new_cache is None:
            return _WholeTextReader(model)
        cache = new_cache()
    return _CachedReader(model, cache)


class _CachedReader(Reader):
    def __init__(self, model: LanguageModel, cache: Cache | LayerCache):
        self._model, self._cache, self._device = model, cache, _device(model)

    def read(self, new: list[list[int]]) -> Tensor:
        following = self._cache.positions(1)
        if isinstance(following, Tensor):
            if len(following) != len(new):
                rule = f"contain {len(new)} texts, one for each prompt"
                raise value_error("cache", rule, len(following))
            starts = following.flatten().tolist()
        else:
            starts = [0 if following is None else following.start] * len(new)
        tokens, positions = left_padded(new, starts, self._device)
        self.processed = sum(map(len, new))
        logits = _last_logits(self._model, tokens, cache=self._cache, positions=positions)
        self.traffic = self._cache.traffic
        return logits

    def reorder(self, rows: list[int]) -> None:
        self._cache.reorder(rows)


class _WholeTextReader(Reader):
    def __init__(self, model: LanguageModel):
        self._model = model
        self._texts: list[list[int]] = []

    def read(self, new: list[list[int]]) -> Tensor:
        texts = self._texts or [[] for _ in new]
        self._texts = [text + more for text, more in zip(texts, new, strict=True)]
        tokens, positions = left_padded(self._texts, [0] * len(self._texts), _device(self._model))
        self.processed = sum(map(len, self._texts))
        return _last_logits(self._model, tokens, positions=positions)

    def reorder(self, rows: list[int]) -> None:
        self._texts = [self._texts[row] for row in rows]


def _last_logits(model: LanguageModel, tokens: Tensor, **options: object) -> Tensor:
    """Return a language model's logits at the last token of each text, ``[batch, vocab]``.

    If the model has the methods ``hidden`` and ``logits``, logits are computed for these tokens only.
    """
    hidden, project = getattr(model, "hidden", None), getattr(model, "logits", None)
    with torch.no_grad():
        if callable(hidden) and callable(project):
            logits = project(hidden(tokens, **options)[:, -1])
        else:
            out = model(tokens, **options)  # type: ignore[arg-type]
            if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != tokens.shape:
                got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
                rule = f"return logits [{tokens.shape[0]}, {tokens.shape[1]}, vocab]"
                raise value_error("model", rule, got)
            logits = out[:, -1]
        logits = logits.to(wide_dtype(logits.dtype))
        # A row's largest logit is NaN if any logit is NaN, and -inf if all are -inf.
        if not bool(logits.amax(-1).isfinite().all()):
            raise value_error("model", "return finite logits", "NaN or inf")
        return logits


def _device(model: object) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return torch.device("cpu") if first is None else first.device
