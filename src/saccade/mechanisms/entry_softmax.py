"""EntrySoftmax: one softmax over the last tokens and over compressed entries, one for each earlier block of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Never

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.masks import Causal, Mask, as_mask, sliding_window
from saccade.matrix import AttentionMatrix
from saccade.matrix.block_sparse import restrict_to_blocks, stable_topk
from saccade.mechanisms.native_sparse import reasons_against_blocks
from saccade.mechanisms.readable_tensors import is_dry_run
from saccade.mechanisms.selecting import has_no_values
from saccade.mechanisms.softmax import Softmax
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.scorers import LightningIndexer
from saccade.support.errors import hidden_by_vmap, unsupported, value_error
from saccade.support.torch_modes import CHOSEN_BY_VALUES, is_mapped, is_tracing, outside_graph, without_autocast
from saccade.support.validation import check_int

_SCORES, _FEWEST = 1 << 18, 32  # number of scores computed at a time, and the smallest number of rows
_FARTHEST = 1 << 62


@dataclasses.dataclass(frozen=True)
class EntriesAndWindow(Mask):
    """A mask on columns that contain the entries of blocks, followed by tokens.

    A query sees the last ``window`` tokens, and the entries of the blocks that end at its position or before. Entry e
    has the position of the last token of block e.

    Args:
        rule: a causal mask on positions, such as Causal, alone or with padding.
        entries: number of entries.
        offset: column of the token at position 0; it may be negative or among the entries.
        window: number of tokens that a query sees, including its own.
        block_size: number of tokens in a block.
        last: number of most recent entries that a query sees; None for all.
    """

    rule: Mask
    entries: int
    offset: int
    window: int
    block_size: int
    last: int | None = None
    is_causal = True

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self.rule,)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        is_entry, row = kv < self.entries, q - self.offset
        place = torch.where(is_entry, (kv + 1) * self.block_size - 1, kv - self.offset)
        allowed = self.rule.allows(b, h, row, place) & (is_entry | (q - kv < self.window))
        if self.last is None:
            return allowed
        first = (row + 1).div(self.block_size, rounding_mode="floor") - self.last
        return allowed & (~is_entry | (kv >= first))

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        tokens, near = Spans.within(keys, self.entries, _FARTHEST), sliding_window(self.window).bounds(groups, keys)
        low, high = self._finished(groups.first), self._finished(groups.last)
        starts = (0, 0) if self.last is None else (low - self.last, high - self.last)
        any_row = Spans.within(keys, starts[0], high).union(near.any_row.intersection(tokens, keys), keys)
        if type(self.rule) is not Causal:
            return Bounds(any_row, Spans.nothing(keys))
        all_rows = Spans.within(keys, starts[1], low).union(near.all_rows.intersection(tokens, keys), keys)
        return Bounds(any_row, all_rows)

    def partial(self, box: Box) -> bool | Hashable:
        if type(self.rule) is not Causal or self.last is not None:
            return super().partial(box)
        if box.keys[0] >= self.entries:
            return sliding_window(self.window).partial(box)
        if box.keys[-1] >= self.entries:
            return (self, box)
        size, row = self.block_size, box.rows[0] - self.offset
        if (box.keys[-1] + 1) * size - 1 <= row:
            return True
        if (box.keys[0] + 1) * size - 1 > box.rows[-1] - self.offset:
            return False
        shape = (box.rows.step, len(box.rows), box.keys.step, len(box.keys))
        return (EntriesAndWindow, size, *shape, row - box.keys[0] * size)

    def __repr__(self) -> str:
        return f"{self.rule} with the last {self.window} tokens and {self.entries} entries of {self.block_size} tokens"

    def _finished(self, rows: Ints) -> Ints:
        """Return the number of blocks that end at the position of each query or before."""
        finished: Ints = np.clip(np.floor_divide(rows - self.offset + 1, self.block_size), 0, self.entries)
        return finished


class EntrySoftmax(Softmax):
    """The softmax of `saccade.nn.CompressedAttention`, over compressed entries and the last tokens.

    Columns are entries, then tokens. Its matrix is an `AttentionMatrix` with a mask, so products and statistics read
    only visible columns.

    Args:
        block_size: number of tokens in a block.
        window: number of tokens that a query reads, including its own.
        k: largest number of entries that a query reads; None for all.
        scale, sink_logit: see `Softmax`.

    Raises:
        ValueError: sizes below 1.
        UnsupportedError: any mask except Causal, alone or with padding on the right.

    Cost: as for an `AttentionMatrix` over the visible pairs. With ``k``, also an index of 4 bytes for each of
    ``k + window`` columns of each query, and the scores of the entries, computed a few rows at a time. Under
    `torch.compile`, a selection breaks the graph.
    """

    forecasts_with_cache = True

    def __init__(
        self,
        block_size: int,
        window: int,
        k: int | None = None,
        *,
        scale: float | None = None,
        sink_logit: Tensor | int | None = None,
    ):
        super().__init__(scale=scale, sink_logit=sink_logit)
        self.block_size, self.window = check_int("block_size", block_size), check_int("window", window)
        self.k = None if k is None else check_int("k", k)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return reasons_against_blocks(mask)

    def with_bias(self, bias: Tensor | Bias) -> Never:
        """Raise an error.

        Raises:
            UnsupportedError: always.
        """
        reason = "an entry stands for a block of tokens, so it has no single position"
        raise unsupported("bias", [reason], hint="bias=None: the rotation of queries and keys encodes distances")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        entries: int = 0,
        start: int | None = None,
        indexer: LightningIndexer | None = None,
        window_first: bool = False,
    ) -> AttentionMatrix:
        """Return the softmax matrix over entries and tokens.

        Args:
            query: ``[batch, heads, q_len, head_dim]``, the last tokens.
            key: ``[batch, 1, entries + tokens, head_dim]``.
            mask: a causal mask on positions; Causal if None.
            q_positions, kv_positions: must be None, because the columns determine the positions.
            entries: number of entries among the columns.
            start: position of the first query; None if the columns contain all tokens.
            indexer: scores of the entries, to select ``k`` of them; None to read all.
            window_first: whether the columns are the tokens of the window, in any order, and then the entries, all of
                them visible to a single query.
        """
        if not (q_positions is None and kv_positions is None):
            raise value_error("positions", "be None, because the columns determine them", "positions")
        q_len, kv_len = query.shape[2], key.shape[2]
        stored = kv_len - entries - q_len  # tokens before the queries
        start = stored if start is None else start
        rule: EntriesAndWindow | None = None
        if not window_first:
            causal = Causal() if mask is None else as_mask(mask, (*query.shape[:3], kv_len))
            reasons = self.reasons(causal)
            if reasons:
                raise unsupported(type(self).__name__, reasons)
            rule = EntriesAndWindow(causal, entries, entries + stored - start, self.window, self.block_size)
        if indexer is None or self.k is None or (not is_tracing() and entries <= self.k) or 0 in query.shape:
            return super().forward(query, key, mask=rule)
        if is_tracing() and not is_dry_run():
            selected = outside_graph(self._selected, CHOSEN_BY_VALUES)
            return selected(query, key, rule, indexer, start, stored)
        return self._selected(query, key, rule, indexer, start, stored)

    def _selected(
        self,
        query: Tensor,
        key: Tensor,
        rule: EntriesAndWindow | None,
        indexer: LightningIndexer,
        start: int,
        stored: int,
    ) -> AttentionMatrix:
        """Return the matrix in which each query reads the window and the ``k`` entries that the indexer selects."""
        entries = key.shape[2] - stored - query.shape[2]
        if self.k is None or entries <= self.k:
            return super().forward(query, key, mask=rule)
        if is_mapped(query) or is_mapped(key):
            raise hidden_by_vmap("queries and keys")
        with torch.no_grad(), without_autocast(query.device):
            if rule is None:
                index = self._index_of_step(query, indexer, entries)
            else:
                index = self._index(query, indexer, entries, start, stored)
        if index is None:  # no values: any selection reads as many pairs as the last k entries
            if rule is None:
                return super().forward(query, key[:, :, : self.window + self.k])
            return super().forward(query, key, mask=dataclasses.replace(rule, last=self.k))
        return restrict_to_blocks(super().forward(query, key, mask=rule), index, 1)

    def _index_of_step(self, query: Tensor, indexer: LightningIndexer, entries: int) -> Tensor | None:
        """Return the columns that a single query reads if the tokens of the window come first; see `_index`."""
        assert self.k is not None
        scores = indexer.on(query, indexer.index_key, 1)(range(1), entries).float()
        if has_no_values(query):
            return None
        tokens = torch.arange(self.window, device=query.device).expand(len(query), 1, 1, -1)
        chosen = stable_topk(scores, self.k).sort(-1).values + self.window
        return torch.cat([tokens, chosen], 3).int()

    def _index(self, query: Tensor, indexer: LightningIndexer, entries: int, start: int, stored: int) -> Tensor | None:
        """Return the columns that each query reads, int32 ``[batch, 1, q_len, k + window]``; None without values."""
        assert self.k is not None
        (batch, _, q_len, _), device = query.shape, query.device
        unused, parts = entries + stored + q_len, []
        has_values = not has_no_values(query)
        score = indexer.on(query, indexer.index_key, 1)
        step = max(_FEWEST, _SCORES // max(1, batch * entries))
        near = torch.arange(min(self.window, stored + q_len), device=device)
        for first in range(0, q_len, step):
            rows = range(first, min(first + step, q_len))
            stop = (start + rows.stop) // self.block_size
            scores = score(rows, stop).float()
            if not has_values:
                continue
            row = torch.arange(rows.start, rows.stop, device=device)[:, None]
            finished = (start + row + 1).div(self.block_size, rounding_mode="floor")
            scores = scores.masked_fill(torch.arange(stop, device=device) >= finished, -torch.inf)
            chosen = stable_topk(scores, min(self.k, stop))
            is_used = chosen < finished
            tokens = entries + stored + row - near
            tokens = tokens.masked_fill(tokens < entries, unused).expand(batch, 1, -1, -1)
            chosen = chosen.masked_fill(~is_used, unused)
            chosen = F.pad(chosen, (0, self.k - chosen.shape[3]), value=unused)
            parts.append(torch.cat([chosen, tokens], 3).sort(-1).values.int())
        return torch.cat(parts, 2) if has_values else None

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, window={self.window}, k={self.k}, scale={self.scale}"
