"""Warn if a text is longer than a model's training sequences, because rotary positions are untrained there."""

from __future__ import annotations

import warnings

from saccade.caches import Cache, SinkWindowCache
from saccade.masks import Documents, Mask, Segments, Window
from saccade.masks.algebra import And
from saccade.masks.convert.patterns import describe


class UntrainedLengthWarning(UserWarning):
    """A warning that a language model attends over distances that it was not trained on, so its outputs are unreliable.

    It is issued once for each `Decoder` with rotary positions and published weights, when a token may attend to tokens
    farther away than ``config.max_len``.
    """


def warn_beyond(trained: int, end: int, mask: Mask, cache: Cache | None) -> bool:
    """Warn if a token may attend to tokens farther away than the trained length. Return whether a warning was issued.

    Args:
        trained: length of the longest training sequence.
        end: number of tokens so far.
        mask: the model's mask combined with the call's mask.
        cache: the cache passed to the call.
    """
    if end <= trained or longest_reach(mask, end) <= trained or _limits_distances(cache):
        return False
    hint = (
        f"masks.sliding_window({trained}), or caches.SinkWindowCache(..., "
        "rotary=), limits attention to trained distances"
    )
    warnings.warn(
        f"Decoder: the text has {end} tokens, and the model was trained on {trained}: at longer distances its rotary "
        f"positions are untrained, so its predictions and attention are unreliable, and full attention may look worse "
        f"than a window.\nHint: {hint}",
        UntrainedLengthWarning,
        stacklevel=2,
    )
    return True


def longest_reach(mask: Mask, length: int) -> int:
    """Return the largest number of tokens from a visible key to its query, including both.

    It is exact for windows, segments and documents, and an upper bound for all other masks.
    """
    segments = [part for part in (mask.parts if isinstance(mask, And) else (mask,)) if isinstance(part, Segments)]
    if segments:
        return min(length, *(part.segment + part.memory for part in segments))
    pattern = describe(mask)
    if isinstance(pattern, Window) and pattern.left is not None:
        return min(length, pattern.left + 1)
    if isinstance(pattern, Documents):
        longest = max((size for lengths in pattern.lengths for size in lengths), default=0)
        return min(longest, longest if pattern.rule is None else longest_reach(pattern.rule, longest))
    return length


def _limits_distances(cache: Cache | None) -> bool:
    """Return whether all layers count positions within their caches, so that no distance exceeds the cache size."""
    if cache is None:
        return False
    return all(isinstance(layer, SinkWindowCache) and layer.rotary is not None for layer in cache.flat)
