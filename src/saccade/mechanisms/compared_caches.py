"""Measurements of the size and error of caches, for compare()."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches import KVCache, LayerCache
from saccade.masks import Mask
from saccade.mechanisms.comparison_contenders import Case
from saccade.mechanisms.softmax import Softmax
from saccade.support.errors import UnsupportedError, type_error, value_error
from saccade.support.language import Message

_STEP = 64  # tokens per call; with more, more keys would be read before they are rounded


class ComparedCache(NamedTuple):
    """Accuracy and size of a cache on one sequence with causal attention, compared with exact attention.

    Attributes:
        name: class and settings of the cache.
        error_median, error_worst: median and largest relative error of the output's rows.
        stored_bytes: size of the cache after the sequence, in bytes.
        share: ``stored_bytes`` divided by the size of a `saccade.caches.KVCache`.
        reasons: why the cache does not support these tensors; if there are any, errors and sizes are NaN.
    """

    name: str
    error_median: float = math.nan
    error_worst: float = math.nan
    stored_bytes: float = math.nan
    share: float = math.nan
    reasons: tuple[str, ...] = ()


def check_caches(caches: object) -> None:
    """Raise an error unless ``caches`` is a list of empty layer caches."""
    hint = "[saccade.caches.Int8Cache(), saccade.caches.QuantizedCache(4)]"
    if not isinstance(caches, Sequence) or not all(isinstance(one, LayerCache) for one in caches):
        raise type_error("caches", "be a list of caches of one layer", repr(caches)[:80], hint=hint)
    for one in caches:
        if one.length:
            raise value_error("caches", "be empty", f"{one.length} tokens", hint=hint)


def compared_caches(
    caches: Sequence[LayerCache], case: Case, rule: Mask, expected: Tensor
) -> tuple[ComparedCache, ...]:
    """Run causal attention through a copy of each cache, and return their sizes and errors.

    Args:
        caches: empty caches.
        case: the queries, keys and values; queries and keys must belong to the same tokens.
        rule: the mask.
        expected: the output of exact attention.
    """
    if not caches:
        return ()
    if not rule.is_causal or case.query.shape[2] != case.key.shape[2]:
        reason = Message("a cache needs a causal mask, and a key for each query")
        return tuple(ComparedCache(_name(one), reasons=(reason,)) for one in caches)
    _, whole = _attend_through(KVCache(), case, rule)
    return tuple(_compared_cache(one, case, rule, expected, whole) for one in caches)


def _compared_cache(cache: LayerCache, case: Case, rule: Mask, expected: Tensor, whole: int) -> ComparedCache:
    """Return the size and error of one cache; ``whole`` is the size of a `saccade.caches.KVCache`."""
    try:
        out, size = _attend_through(cache.fork(), case, rule)
    except UnsupportedError as error:
        return ComparedCache(_name(cache), reasons=(str(error),))
    return ComparedCache(_name(cache), *row_errors(out, expected), size, size / whole)


def _name(cache: LayerCache) -> str:
    settings = [str(getattr(cache, name)) for name in cache.settings if name != "max_len"]
    return f"{type(cache).__name__}({', '.join(settings)})"


def _attend_through(cache: LayerCache, case: Case, rule: Mask) -> tuple[Tensor, int]:
    """Return the output of attention through a cache, and the size of the cache afterwards, in bytes."""
    softmax, parts = Softmax(), []
    for some in zip(*(x.split(_STEP, 2) for x in case[:3]), strict=True):
        parts.append(cache.attend(softmax, *some, mask=rule))
    return torch.cat(parts, 2), cache.nbytes


def row_errors(out: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the median and the largest relative error of the rows in which the expected output is not 0."""
    size = expected.norm(dim=-1)
    return median_and_worst(((out.to(expected) - expected).norm(dim=-1) / size)[size > 0])


def median_and_worst(x: Tensor) -> tuple[float, float]:
    """Return the median and the maximum of a tensor, or NaN for both if it is empty."""
    return (float(x.median()), float(x.max())) if x.numel() else (math.nan, math.nan)
