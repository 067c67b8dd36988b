"""Which queries chose a block of keys, and which of these see only a part of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from saccade.engine.bias.term import HidingTerm
from saccade.engine.block_sparse.selected_blocks import Chosen, at_positions
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import NO_FORWARD_DERIVATIVES, reasons_of_dot_products
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Universe
from saccade.support.torch_modes import has_forward_derivatives, unobserved

__all__ = ["RowsOfBlocks", "Unit", "chosen_pairs", "reasons_of", "rows_of_blocks", "sure_spans", "units_of"]


def reasons_of(inputs: AttentionInputs) -> tuple[str, ...]:
    """Why kernels that read chosen keys cannot run these inputs; empty if they can."""
    why = []
    if not isinstance(inputs.rule, Chosen):
        why.append("its mask chooses no keys for each query")
    why += reasons_of_dot_products(inputs)
    if inputs.bias is not None and not (isinstance(inputs.bias, HidingTerm) and inputs.bias.term is None):
        why.append("it has no bias")
    if has_forward_derivatives():
        why.append(NO_FORWARD_DERIVATIVES)
    return tuple(why)


def chosen_pairs(inputs: AttentionInputs) -> int:
    """Query-key pairs in the chosen blocks, over batch and heads."""
    rule, (batch, heads, _, kv_len) = cast("Chosen", inputs.rule), inputs.shape
    short = int((rule.index == rule.blocks - 1).sum()) * (rule.blocks * rule.size - kv_len)
    pairs = int((rule.index < rule.blocks).sum()) * rule.size - short
    items, sharing = rule.index.shape[:2]
    return pairs * (batch // max(1, items)) * (heads // max(1, sharing))


class Unit(NamedTuple):
    """Heads of one batch item that read the same keys and chose the same blocks.

    Attributes:
        item: the batch item.
        heads: neighbours.
        group: their key head.
        chosen: the head of the index that is theirs.
    """

    item: int
    heads: slice
    group: int
    chosen: int

    @property
    def together(self) -> int:
        """How many heads."""
        return self.heads.stop - self.heads.start

    def rows_of(self, inputs: AttentionInputs, x: Tensor) -> Tensor:
        """A copy of what there is for queries, ``[q_len, heads, width]`` in the compute dtype."""
        return x[self.item, self.heads].transpose(0, 1).contiguous().to(inputs.compute_dtype)

    def keys_of(self, inputs: AttentionInputs, x: Tensor) -> Tensor:
        """What there is for keys, ``[kv_len, width]`` in the compute dtype."""
        return x[self.item, self.group].to(inputs.compute_dtype)

    def positions(self, inputs: AttentionInputs, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Where queries and keys with these indices stand, int64 of their shapes."""
        placed = at_positions(inputs.rule)
        if placed is not None:
            return placed.positions(torch.full_like(rows[:1], self.item), rows, keys)
        return rows + inputs.origin[0], keys + inputs.origin[1]


def units_of(inputs: AttentionInputs) -> Iterator[Unit]:
    """All heads of all items, as many together as can be."""
    batch, heads, _, _ = inputs.shape
    groups, sharing = inputs.key.shape[1], cast("Chosen", inputs.rule).index.shape[1]
    count = max(groups, sharing)  # one divides the other
    for item in range(batch):
        for number in range(count):
            own = slice(number * heads // count, (number + 1) * heads // count)
            yield Unit(item, own, number * groups // count, number * sharing // count)


class RowsOfBlocks:
    """Which queries chose each block of keys.

    Cost: 8 bytes for each chosen block, and 16 for each range of keys that a query surely sees.
    """

    def __init__(self, inputs: AttentionInputs):
        self._rule = cast("Chosen", inputs.rule)
        items, sharing, _, slots = self._rule.index.shape
        self._rows: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        for item in range(items):
            for head in range(sharing):
                blocks, order = self._rule.index[item, head].flatten().sort(stable=True)
                edges = torch.arange(self._rule.blocks + 1, dtype=blocks.dtype, device=blocks.device)
                counts = torch.searchsorted(blocks, edges).diff().tolist()
                chosen = order[: sum(counts)].div_(max(1, slots), rounding_mode="floor")
                self._rows[item, head] = chosen.split(counts)
        self._sure = sure_spans(inputs, self._rule)

    def rows(self, unit: Unit, block: int) -> Tensor:
        """Queries that chose a block, int64 in ascending order."""
        return self._rows[unit.item if len(self._rule.index) > 1 else 0, unit.chosen][block]

    def hide_(self, inputs: AttentionInputs, scores: Tensor, unit: Unit, rows: Tensor, keys: range) -> Tensor:
        """Scores ``[rows, heads, keys]`` with -inf in place where not allowed."""
        starts, ends = (x[unit.item if len(x) > 1 else 0, rows] for x in self._sure)
        part = torch.nonzero(~((starts <= keys.start) & (ends >= keys.stop)).any(1))[:, 0]
        if len(part):
            allowed = self._allowed(unit, rows[part], keys)
            scores[part] = scores[part].masked_fill(~allowed, -math.inf)
        if isinstance(inputs.bias, HidingTerm):
            hidden = inputs.bias.keys[unit.item, unit.heads, keys.start : keys.stop]
            scores.masked_fill_(hidden, -math.inf)
        return scores

    def _allowed(self, unit: Unit, rows: Tensor, keys: range) -> Tensor:
        """What the rule says of some queries, bool ``[rows, heads | 1, keys]``."""
        q_first, kv_first = self._rule.origin
        b = torch.full((1, 1, 1, 1), unit.item, device=rows.device)
        h = torch.arange(unit.heads.start, unit.heads.stop, device=rows.device)[None, :, None, None]
        kv = torch.arange(keys.start, keys.stop, device=rows.device) + kv_first
        allowed = self._rule.rule.allows(b, h, (rows + q_first)[None, None, :, None], kv[None, None, None])
        return allowed.expand(1, -1, len(rows), len(keys))[0].transpose(0, 1)


def rows_of_blocks(inputs: AttentionInputs) -> RowsOfBlocks:
    """Those of a rule, kept with its plan for the backward pass."""
    memo = inputs.plan.memo
    if "rows of blocks" not in memo:
        with unobserved():
            memo["rows of blocks"] = RowsOfBlocks(inputs)
    return cast("RowsOfBlocks", memo["rows of blocks"])


def sure_spans(inputs: AttentionInputs, rule: Chosen) -> tuple[Tensor, Tensor]:
    """Ranges of keys that each query surely sees, by their indices: two int64 ``[items | 1, q_len, ranges]``."""
    (batch, _, q_len, kv_len), (q_first, kv_first) = inputs.shape, rule.origin
    items = [ALL] if rule.rule.shape[0] == 1 else list(range(batch))
    row = np.tile(np.arange(q_first, q_first + q_len, dtype=np.int64), len(items))
    keys = Universe(np.full_like(row, kv_first), np.full_like(row, kv_first + kv_len))
    sure = rule.rule.bounds(Groups(np.repeat(np.asarray(items, dtype=np.int64), q_len), row, row), keys).sure
    own = (torch.from_numpy(x - kv_first).view(len(items), q_len, -1).to(inputs.device) for x in sure)
    return tuple(own)  # type: ignore[return-value]  # two
