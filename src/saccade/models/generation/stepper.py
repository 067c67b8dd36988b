"""Reader: feeds new tokens to a language model step by step, with a cache or without."""

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
    """The interface of models for generation. Without ``new_cache()`` they read the whole texts in each step."""

    def __call__(self, tokens: Tensor, *, positions: GivenPositions) -> Tensor:
        """Return logits ``[batch, len, vocab]`` of ``tokens [batch, len]``; with a cache also ``cache=``."""
        ...


class Reader(Protocol):
    """A language model together with the texts that it has read so far.

    Attributes:
        processed: number of tokens that the model read in the last call of `read`.
        traffic: bytes that its caches moved; None without a cache.
    """

    processed: int = 0
    traffic: Traffic | None = None

    def read(self, new: list[list[int]]) -> Tensor:
        """Read new tokens of each text, none if it has ended; return logits of the next, float ``[batch, vocab]``."""
        ...

    def reorder(self, rows: list[int]) -> None:
        """Keep only these texts of the batch, in this order; they may repeat (beams)."""
        ...


def new_reader(model: LanguageModel, cache: Cache | LayerCache | None) -> Reader:
    """Return the reader for a model: one with a cache if the model has caches."""
    if not callable(model):
        raise type_error("model", "be a model, model(tokens, ...) -> logits", type(model).__name__)
    check_type("cache", cache, (Cache, LayerCache, NoneType), "be what model.new_cache() gives, or None")
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
                rule = f"hold {len(new)} texts, one for each prompt"
                raise value_error("cache", rule, len(following))
            starts = following.flatten().tolist()
        else:
            starts = [0 if following is None else following.start] * len(new)
        tokens, positions = left_padded(new, starts, self._device)
        self.processed = sum(map(len, new))
        logits = _last(self._model, tokens, cache=self._cache, positions=positions)
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
        return _last(self._model, tokens, positions=positions)

    def reorder(self, rows: list[int]) -> None:
        self._texts = [self._texts[row] for row in rows]


def _last(model: LanguageModel, tokens: Tensor, **how: object) -> Tensor:
    """Return logits of the last token; the others are not computed if the model has ``hidden`` and ``logits``."""
    hidden, project = getattr(model, "hidden", None), getattr(model, "logits", None)
    with torch.no_grad():
        if callable(hidden) and callable(project):
            logits = project(hidden(tokens, **how)[:, -1])
        else:
            out = model(tokens, **how)  # type: ignore[arg-type]
            if not isinstance(out, Tensor) or out.dim() != 3 or out.shape[:2] != tokens.shape:
                got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
                rule = f"return logits [{tokens.shape[0]}, {tokens.shape[1]}, vocab]"
                raise value_error("model", rule, got)
            logits = out[:, -1]
        logits = logits.to(wide_dtype(logits.dtype))
        # The largest logit of a row is NaN if any is, and -inf if all are.
        if not bool(logits.amax(-1).isfinite().all()):
            raise value_error("model", "return logits without NaN and inf", "some")
        return logits


def _device(model: object) -> torch.device:
    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return torch.device("cpu") if first is None else first.device
