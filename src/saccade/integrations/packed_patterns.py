"""Apply a layer's pattern within each sequence of a call, for packed or left-padded sequences."""

from __future__ import annotations

import functools
import itertools
from typing import TypeGuard

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from saccade.integrations.lazy_mask import Placed
from saccade.integrations.tensor_masks import both
from saccade.masks import Dense, Documents, Mask, Padding, PerItem
from saccade.masks.algebra import And
from saccade.masks.rules.documents import joined_with_batch_mask
from saccade.support.errors import unsupported


def with_pattern(placed: Placed, pattern: Mask, position_ids: Tensor | None = None) -> Mask:
    """Combine the mask rule of a call with a pattern whose positions start at the first token of each sequence.

    The sequences are those that the model's mask separates. If it separates none, a sequence starts where
    ``position_ids`` restart at 0. (transformers ignores restarts if there is a cache, which models create unless called
    with ``use_cache=False``.) A pattern that describes the batch itself, such as `Documents` or `Padding`, applies to
    the full row.

    Args:
        placed: the call's mask rule and token positions.
        pattern: the layer's mask.
        position_ids: int ``[batch, q_len]``, as passed to the model's layers.

    Raises:
        UnsupportedError: ``position_ids`` show that the cache also contains sequences other than that of the queries,
            and the pattern depends on the start of the sequence.
    """
    if _describes_batch(pattern):
        return both(placed.rule, pattern)
    texts = placed.texts
    if texts is None and placed.left_padding is None:
        texts = _texts_by_position(placed, position_ids)
    if texts is not None:
        parts = placed.rule.parts if isinstance(placed.rule, And) else (placed.rule,)
        if any(isinstance(part, Documents) for part in parts):
            return joined_with_batch_mask(pattern, placed.rule)
        return both(_inside(texts, pattern), placed.rule)
    if pattern.is_relative:
        return both(placed.rule, pattern)
    if placed.left_padding is not None:
        stop = placed.kv_positions.stop
        return both(_inside(tuple((before, stop - before) for before in placed.left_padding), pattern), placed.rule)
    _check_start(placed, pattern, position_ids)
    return both(placed.rule, pattern)


@functools.lru_cache(16)  # shared by all layers of a model
def _inside(texts: tuple[tuple[int, ...], ...], pattern: Mask) -> Mask:
    return Documents(texts, pattern)


def _describes_batch(pattern: Mask) -> bool:
    """Return whether a pattern describes one specific batch: its documents, its padding, or a rule for each item."""
    describes_batch = isinstance(pattern, Documents | Padding | PerItem) or pattern.shape[0] != 1
    return describes_batch or any(map(_describes_batch, pattern.made_of))


def _texts_by_position(placed: Placed, position_ids: Tensor | None) -> tuple[tuple[int, ...], ...] | None:
    """Infer the lengths of packed sequences from positions that restart at 0; return None for other positions.

    Positions of image patches may also restart at 0, so this applies only to causal rules and dense masks. Any keys
    after the queries are free slots of a static cache.
    """
    rule, q, kv = placed[:3]
    is_whole = q.start == kv.start == 0 and len(q) <= len(kv)
    if not (_has_position_per_query(position_ids, len(q)) and is_whole and (rule.is_causal or isinstance(rule, Dense))):
        return None
    restarts = position_ids[:, 1:] == 0
    is_packed = bool(restarts.any()) and bool((restarts | (position_ids.diff(dim=1) == 1)).all())
    if not is_packed or not bool(position_ids.any()):  # all 0 in a model without positions
        return None
    starts = [[0, *(row.nonzero()[:, 0] + 1).tolist(), len(q), len(kv)] for row in restarts]
    return tuple(tuple(stop - start for start, stop in itertools.pairwise(row)) for row in starts)


def _check_start(placed: Placed, pattern: Mask, position_ids: Tensor | None) -> None:
    """Raise an error if the queries continue one of several sequences in a cache.

    A layer's pattern depends on where its text starts, which the cache does not store.
    """
    q, kv = placed.q_positions, placed.kv_positions
    if not placed.rule.is_causal or len(q) == len(kv) or not _has_position_per_query(position_ids, len(q)):
        return
    if bool((position_ids[:, 0] < q.start).any()):
        reason = f"position_ids start before {q.start}, so the cache contains texts other than that of the queries"
        reasons = [reason, f"{pattern} depends on where a text starts, which a cache does not store"]
        raise unsupported(
            "a continued batch", reasons, hint="put each text in its own batch item, so that it has its own cache"
        )


def _has_position_per_query(position_ids: Tensor | None, length: int) -> TypeGuard[Tensor]:
    """Return whether ``position_ids`` contains one position for each query of the call, and its values can be read."""
    if not isinstance(position_ids, Tensor) or position_ids.is_meta or isinstance(position_ids, FakeTensor):
        return False
    return position_ids.dim() == 2 and position_ids.shape[1] == length
