"""SelectedBlocks: a mask that restricts each query to the key blocks selected for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch
from torch import Tensor

from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.masks import Mask
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans


def at_positions(rule: Mask) -> PositionedMask | None:
    """Return the mask (or the mask that a `SelectedBlocks` restricts) if it is a `PositionedMask`; otherwise None."""
    rule = rule.rule if isinstance(rule, SelectedBlocks) else rule
    return rule if isinstance(rule, PositionedMask) else None


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedBlocks(Mask):
    """A mask that restricts another mask, ``rule``, to the key blocks selected for each query.

    Args:
        rule: the mask to restrict, as stored in the checked inputs.
        origin: positions of the first query and the first key in ``rule``.
        index: int32 ``[batch | 1, heads | head groups, q_len, slots]``: distinct block numbers in ascending order.
            Unused slots contain the total number of blocks.
        size: number of keys in a block.
        heads: number of heads of the matrix. Heads that share an index are adjacent.
        blocks: total number of blocks.

    Cost: memory for the index. Evaluating R rows takes R bools per block.
    """

    rule: Mask
    origin: tuple[int, int]
    index: Tensor
    size: int
    heads: int
    blocks: int
    is_value = False

    @property
    def shape(self) -> tuple[int, int]:
        batch, heads = self.rule.shape
        return max(batch, len(self.index)), max(heads, self.heads if self.index.shape[1] > 1 else 1)

    @property
    def calls_functions(self) -> bool:
        return self.rule.calls_functions

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.rule.allows(b, h, q, kv) & self.holds(b, h, q - self.origin[0], kv - self.origin[1])

    def holds(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return whether each key is in a block that is selected for its query, given indices instead of positions."""
        items, sharing, _, _ = self.index.shape
        item = b if items > 1 else torch.zeros_like(b)
        head = h // (self.heads // sharing) if sharing > 1 else torch.zeros_like(h)
        item, head, row = torch.broadcast_tensors(item, head, q)
        selected, block = self.index[item, head, row], kv // self.size
        if row.dim() and row.shape[-1] == 1 and kv.dim() and kv.numel() == kv.shape[-1]:
            table = torch.zeros(*row.shape[:-1], self.blocks + 1, dtype=torch.bool, device=selected.device)
            table.scatter_(-1, selected[..., 0, :].long(), True)
            return table[..., block.reshape(-1)]
        return (selected == block[..., None]).any(-1)

    def keys_read(self, groups: int, kv_len: int) -> int:
        """Return the number of keys selected by at least one query, summed over ``groups`` key heads and the batch."""
        items, sharing, q_len, _ = self.index.shape
        if q_len == sharing == self.size == 1:
            return int((self.index < self.blocks).sum()) * groups
        table = torch.zeros(items, sharing, self.blocks + 1, dtype=torch.bool, device=self.index.device)
        table = table.scatter_(-1, self.index.flatten(2).long(), True)[..., : self.blocks]
        if sharing > groups:
            table = table.unflatten(1, (groups, -1)).any(2)
        beyond_end = table[..., -1].sum() * (self.blocks * self.size - kv_len)  # the last block may be short
        return int(table.sum() * self.size - beyond_end) * (groups // table.shape[1])

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        return Bounds(self.rule.bounds(groups, keys).any_row, Spans.nothing(keys))

    def partial(self, box: Box) -> bool | Hashable:
        return False if self.rule.partial(box) is False else (id(self), box)

    def cuts(self, batch: int, rows: range) -> Ints:
        return self.rule.cuts(batch, rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.index, *self.rule.tensors())

    def __repr__(self) -> str:
        _, _, _, slots = self.index.shape
        unit = "keys" if self.size == 1 else f"blocks of {self.size} keys"
        return f"{self.rule}, at most {slots} {unit} per query"
