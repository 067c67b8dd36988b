"""A plan as the compiled kernel reads it: for each block of rows, runs of panels of keys, as arrays of integers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.memory_probe import Probe
from saccade.engine.memory_accounting import Held
from saccade.engine.tiles.tile_scores import allowed
from saccade.plan import ALL, Groups, Strip, Tile
from saccade.plan.key_ranges import Bounds, Ints, Spans, Universe
from saccade.support.torch_modes import unobserved

__all__ = ["PANEL", "ROWS", "NativePlan", "held_by_bits", "kept_bits", "kept_plan", "packed", "known_plan"]

ROWS, PANEL = 24, 64  # rows of a block, and keys of a panel; the same stand in native/src/problem.h
_MOST_BITS = 1 << 29  # of a rule that says nothing exact about its rows: 64 MB
_PAIRS_ASKED = 1 << 20  # at a time
_MOST_SPANS = 64  # ranges of a row: with more of them bits are smaller
_WHOLE, _LIMITED, _RESIDUAL = range(3)


class NativePlan(NamedTuple):
    """What a rule allows, in indices of queries and keys.

    Attributes:
        starts: int32 ``[items * blocks + 1]``: where the runs of each block of `ROWS` rows begin; ``items`` is 1 where
            all batch items are alike.
        runs: int32 ``[runs, 3]``: first panel, panel behind the last, and kind: 0, every row sees every key; 1, each
            row sees the keys of its spans; 2, those whose bits are set.
        spans: int32 ``[items, q_len, spans, 2]``: the keys of each row, as ranges.
        is_exact: whether spans say everything, and there are no bits.
    """

    starts: Tensor
    runs: Tensor
    spans: Tensor
    is_exact: bool

    @classmethod
    def of(cls, inputs: AttentionInputs) -> NativePlan | None:
        """The plan of a rule; None if its rows say nothing exact, and bits for all pairs are too many."""
        rule, (batch, _, q_len, kv_len), (q_first, kv_first) = inputs.rule, inputs.shape, inputs.origin
        if 0 in inputs.shape:
            blocks = -(-q_len // ROWS)
            none = [torch.zeros(size, dtype=torch.int32) for size in ((blocks + 1,), (0, 3), (1, q_len, 0, 2))]
            return cls(none[0], none[1], none[2], True)
        if inputs.plan.is_full:
            return _whole(q_len, kv_len)
        items = [ALL] if rule.shape[0] == 1 or batch == 1 else list(range(batch))
        first = np.tile(np.arange(q_first, q_first + q_len, ROWS, dtype=np.int64), len(items))
        last = np.minimum(first + ROWS, q_first + q_len) - 1
        blocks = len(first) // len(items)
        groups = Groups(np.repeat(np.asarray(items, dtype=np.int64), blocks), first, last)
        bounds = rule.bounds(groups, _keys(first, kv_first, kv_len))
        starts, runs = _runs(inputs, bounds, first)
        is_whole = not (runs[:, 2] == _LIMITED).any()
        few = bounds.needed.starts.shape[1] <= _MOST_SPANS and not is_whole
        exact = _spans(inputs, items) if few else None
        is_exact = is_whole or exact is not None
        if not is_exact and math.prod(_told_apart(inputs)) * q_len * kv_len > _MOST_BITS:
            return None
        runs[runs[:, 2] == _LIMITED, 2] = _LIMITED if is_exact else _RESIDUAL
        spans = np.zeros((len(items), q_len, 0, 2), dtype=np.int64) if exact is None else exact
        arrays = [torch.from_numpy(x.astype(np.int32)) for x in (starts, runs, spans)]
        return cls(arrays[0], arrays[1], arrays[2], is_exact)

    def pairs(self, inputs: AttentionInputs) -> int:
        """Query-key pairs whose scores are computed, over batch and heads: whole panels of each block."""
        batch, heads, q_len, kv_len = inputs.shape
        blocks = -(-q_len // ROWS)
        block = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts.numpy())) % max(blocks, 1)
        rows = np.minimum(ROWS, q_len - block * ROWS)
        first, stop, _ = self.runs.numpy().astype(np.int64).T
        pairs = int((rows * (np.minimum(stop * PANEL, kv_len) - first * PANEL)).sum())
        return pairs * heads * (batch if len(self.spans) == 1 else 1)


def kept_plan(inputs: AttentionInputs) -> NativePlan | None:
    """`NativePlan.of`, kept with the plan of the rule."""
    memo = inputs.plan.memo
    if "native" not in memo:
        with unobserved():
            memo["native"] = NativePlan.of(inputs)
    return cast("NativePlan | None", memo["native"])


def known_plan(inputs: AttentionInputs) -> NativePlan:
    """`kept_plan` of a rule that has one, as `Native.reasons` has seen."""
    plan = kept_plan(inputs)
    assert plan is not None
    return plan


def kept_bits(inputs: AttentionInputs) -> Tensor:
    """One bit for each pair, int64 ``[batch | 1, heads | 1, q_len, panels]``, kept with the plan of the rule."""
    memo = inputs.plan.memo
    if "native bits" not in memo:
        with unobserved():
            memo["native bits"] = _bits(inputs)
    return cast("Tensor", memo["native bits"])


def _bits(inputs: AttentionInputs) -> Tensor:
    words = torch.zeros(_shape_of_bits(inputs), dtype=torch.int64, device=inputs.device)
    own = words.numpy().view(np.uint8)
    for tile in _asked(inputs):
        bits = np.packbits(cast("Tensor", allowed(inputs, tile)).numpy(), axis=-1, bitorder="little")
        own[:, :, tile.rows.start : tile.rows.stop, : bits.shape[-1]] = bits
    return words


def held_by_bits(inputs: AttentionInputs) -> Held:
    """Bytes that `kept_bits` holds while it asks the rule, and those that are kept."""
    words = 8 * math.prod(_shape_of_bits(inputs))
    asked = Probe(inputs).held("bits", next(_asked(inputs)), allowed)
    return Held(words + asked.most, words)


@lru_cache
def _whole(q_len: int, kv_len: int) -> NativePlan:
    """Where every query may see every key."""
    blocks = -(-q_len // ROWS)
    runs = torch.tensor([[0, -(-kv_len // PANEL), _WHOLE]], dtype=torch.int32).repeat(blocks, 1)
    spans = torch.zeros((1, q_len, 0, 2), dtype=torch.int32)
    return NativePlan(torch.arange(blocks + 1, dtype=torch.int32), runs, spans, True)


def packed(seen: Tensor) -> Tensor:
    """Bools ``[..., keys]`` as bits of int64 words ``[..., panels]``."""
    found = np.packbits(seen.numpy(force=True), axis=-1, bitorder="little")
    words = np.zeros((*seen.shape[:-1], -(-seen.shape[-1] // PANEL) * 8), dtype=np.uint8)
    words[..., : found.shape[-1]] = found
    return torch.from_numpy(words.view(np.int64))


def _keys(groups: Ints, first: int, count: int) -> Universe:
    return Universe(np.full_like(groups, first), np.full_like(groups, first + count))


def _spans(inputs: AttentionInputs, items: list[int]) -> Ints | None:
    """The keys of each row, ``[items, q_len, spans, 2]``; None if the rule says nothing exact, or too many ranges."""
    (_, _, q_len, kv_len), (q_first, kv_first) = inputs.shape, inputs.origin
    own = np.repeat(np.asarray(items, dtype=np.int64), q_len)
    rows = np.tile(np.arange(q_first, q_first + q_len, dtype=np.int64), len(items))
    asked = inputs.rule.bounds(Groups(own, rows, rows), _keys(rows, kv_first, kv_len))
    is_exact = asked.is_exact or bool((asked.needed.sizes() == asked.sure.sizes()).all())
    if not is_exact or asked.needed.starts.shape[1] > _MOST_SPANS:
        return None
    return (np.stack([asked.needed.starts, asked.needed.ends], 2) - kv_first).reshape(len(items), q_len, -1, 2)


def _runs(inputs: AttentionInputs, bounds: Bounds, first: Ints) -> tuple[Ints, Ints]:
    """Where the runs of each block begin, and the runs: of whole panels, and of limited ones."""
    kv_first, panels = inputs.origin[1], _keys(first, 0, -(-inputs.shape[3] // PANEL))
    touched = _in_panels(bounds.needed, kv_first, panels, out=True)
    whole = _in_panels(bounds.sure, kv_first, panels, kv_len=inputs.shape[3])
    found = []
    for spans, kind in ((whole, _WHOLE), (touched.minus(whole, panels), _LIMITED)):
        block, slot = np.nonzero(spans.starts < spans.ends)
        columns = (block, spans.starts[block, slot], spans.ends[block, slot], np.full_like(block, kind))
        found.append(np.stack(columns, 1))
    runs = np.concatenate(found)
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    return np.searchsorted(runs[:, 0], np.arange(len(first) + 1)), runs[:, 1:]


def _in_panels(keys: Spans, first: int, panels: Universe, *, out: bool = False, kv_len: int = 0) -> Spans:
    """Panels that lie in some ranges of keys or, counted outwards, that hold one of their keys.

    The last panel may hold fewer keys than it has room for, and lies in a range that goes to the end.
    """
    starts, ends = keys.starts - first, keys.ends - first
    if not out:
        return Spans.of(-(-starts // PANEL), np.where(ends == kv_len, ends + PANEL - 1, ends) // PANEL, panels)
    is_some = starts < ends
    return Spans.of(np.where(is_some, starts // PANEL, 0), np.where(is_some, -(-ends // PANEL), 0), panels)


def _told_apart(inputs: AttentionInputs) -> tuple[int, int]:
    """How many batch items and heads have bits of their own."""
    return min(inputs.rule.shape[0], inputs.shape[0]), min(inputs.rule.shape[1], inputs.shape[1])


def _shape_of_bits(inputs: AttentionInputs) -> tuple[int, int, int, int]:
    return (*_told_apart(inputs), inputs.shape[2], -(-inputs.shape[3] // PANEL))


def _asked(inputs: AttentionInputs) -> Iterator[Tile]:
    """Some rows at a time, of all pairs that are told apart."""
    (items, heads), (q_len, kv_len) = _told_apart(inputs), inputs.shape[2:]
    rows = max(1, _PAIRS_ASKED // (items * heads * kv_len))
    for first in range(0, q_len, rows):
        columns = (Strip(range(kv_len), "all pairs"),)
        yield Tile(slice(0, items), slice(0, heads), range(first, min(first + rows, q_len)), columns, inputs.rule)
