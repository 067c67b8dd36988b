"""Ring-buffer caches. Their memory is constant because a new token overwrites the slot of an old one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.caches.buffers import usable
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, Traffic
from saccade.caches.files.file_contents import Contents
from saccade.caches.state_tensors import Leaf
from saccade.masks import Mask, Segments
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.numerics import any_true
from saccade.support.torch_modes import has_values
from saccade.support.validation import check_int

_FARTHEST = 1 << 62  # beyond all positions
Index = Tensor | slice


class RingCache(LayerCache):
    r"""A cache of the first few and the last few positions. The result equals dense attention with the mask `rule`.

    This is the base class of caches that evict tokens by position alone. A subclass passes the number of positions to
    keep and the mask.

    Args:
        rule: the mask of the equivalent dense attention, which masks all tokens that are not stored.
        kept_first: number of positions to keep at the beginning, at least 0.
        kept_last: number of positions to keep at the end, including the newest, at least 1.

    Cost: memory for ``batch * kv_heads * (kept_first + kept_last) * (head_dim + value_dim)`` elements, allocated by the
    first call, and 8 bytes for each slot of each item (or of all items together if they have the same positions). A
    step reads all stored tokens.
    """

    leaves: ClassVar[tuple[Leaf, ...]] = (
        Leaf("keys", "batch kv_heads slots head_dim"),
        Leaf("values", "batch kv_heads slots value_dim"),
        Leaf("table", "batch|1 slots", "positions"),
    )
    numbers = ("is_run",)

    is_run: bool  # whether positions are 0, 1, 2, … in every item

    def __init__(self, rule: Mask, kept_first: int, kept_last: int):
        super().__init__()
        self.rule = rule
        self._first_slots, self._last_slots, self._slots = kept_first, kept_last, kept_first + kept_last

    @property
    def kv_positions(self) -> Tensor:
        """Positions of the tokens in the slots, int64 ``[batch | 1, slots]``, unordered; -1 for an empty slot."""
        return self._state["table"] if self._state else torch.full((1, self._slots), -1)

    def advance(self, call: Call) -> Tensor:
        table, q_len = call.table, call.key.shape[2]
        run = range(self.length, self.length + q_len)
        is_run = self.is_run and (call.positions.run == run or not any_true(table != Positions(run).on(table.device)))
        if q_len == 1 and self._state:
            out = self._step(call, table, is_run=is_run)
        else:
            out = self._attend_many(call, table)
            if q_len:
                self._write(call, table)
        self.is_run = is_run
        return out

    def _forget(self) -> None:
        super()._forget()
        self.is_run = True

    def _why_not_cropped(self, length: int) -> str | None:
        if not self.is_run:
            return "its tokens are not at positions 0, 1, 2, …, one per column"
        if self.length > self._slots:
            return f"it has evicted tokens that were in the window {self.length - length} tokens ago"
        return None

    def _crop(self, length: int) -> None:
        self._state["table"] = self._state["table"].masked_fill(self._state["table"] >= length, -1)
        self._tokens = Positions.ending_before(length)

    def _step(self, call: Call, table: Tensor, *, is_run: bool) -> Tensor:
        """Attend with one new token. It overwrites the slot of the token that leaves the ring buffer."""
        before = self._write(call, table)
        used = min(self.length + 1, self._slots) if is_run else self._slots  # slots are filled in order
        try:
            mask, q_positions, kv_positions = self._step_mask(call, table, self._state["table"][:, :used])
            keys, values = self._state["keys"], self._state["values"]
            if call.needs_graph:  # the graph must not use memory that is overwritten later; new tokens need gradients
                keys, values = keys.clone(), values.clone()
                self._put({"keys": keys, "values": values}, call, table)
            if is_run and call.attends_to_all_earlier and call.treats_heads_alike:
                keys, values = (self._visible_slots(x, self.length) for x in (keys, values))
                matrix = call.mechanism(call.query, keys, mask=None, q_positions=None, kv_positions=None)
            else:
                keys, values = keys[:, :, :used], values[:, :, :used]
                matrix = call.mechanism(call.query, keys, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
            out = matrix.matmul(values, dropout_p=call.dropout_p)
        except BaseException:
            for x, index, old in before:  # a failed call changes nothing
                x[index] = old
            raise
        self._traffic = Traffic(keys.nbytes + values.nbytes, call.key.nbytes + call.value.nbytes)
        return out

    def _attend_many(self, call: Call, table: Tensor) -> Tensor:
        """Attend with several new tokens. Each of them sees a different part of the stored and new tokens."""
        keys, values, kv_positions = self._stored_and_new(call, table)
        self._traffic = Traffic(keys.nbytes + values.nbytes, call.key.nbytes + call.value.nbytes)
        mask, where = self._combined_mask(call.mask), call.positions
        matrix = call.mechanism(call.query, keys, mask=mask, q_positions=where, kv_positions=kv_positions)
        return matrix.matmul(values, dropout_p=call.dropout_p)

    def _stored_and_new(self, call: Call, table: Tensor) -> tuple[Tensor, Tensor, GivenPositions]:
        """Return the keys, values and positions of the stored tokens, in slot order, followed by the new tokens."""
        if not self._state:
            return call.key, call.value, call.positions
        stored = self._state["table"]
        rows = max(len(stored), len(table))
        kv_positions = torch.cat([stored.expand(rows, -1), table.expand(rows, -1)], 1)
        values = torch.cat([self._state["values"], call.value], 2)
        return torch.cat([self._unrotated_keys(), call.key], 2), values, kv_positions

    def _unrotated_keys(self) -> Tensor:
        """Return the keys in the slots, as they were passed to the cache."""
        return self._state["keys"]

    def _step_mask(self, call: Call, q_table: Tensor, table: Tensor) -> tuple[Mask | None, Tensor, Tensor]:
        """Return the mask, the query's position and the positions of the slots for a decoding step."""
        return self._combined_mask(call.mask), q_table, table

    def _visible_slots(self, x: Tensor, position: int) -> Tensor:
        """Return the slots of ``x`` that a query at ``position`` sees, if all positions so far are 0, 1, 2, …"""
        return x[:, :, : min(position + 1, self._slots)]

    def _combined_mask(self, rule: Mask | None) -> Mask:
        return self.rule if rule is None else self.rule & rule

    def _new_leaves(self, key: Tensor, value: Tensor) -> dict[str, tuple[Tensor, int]]:
        """Return the new entries and the number of slots for each tensor in the ring buffer."""
        return {"keys": (key, self._slots), "values": (value, self._slots)}

    def _prepare_memory(self, call: Call, table: Tensor) -> None:
        """Make the slots writable, and give each batch item its own row of positions if the items differ."""
        key, value = call.key, call.value
        if not self._state:
            # Fill slots with zeros: an empty slot has weight 0, but NaN in it would spread.
            sizes = self._new_leaves(key, value)
            self._state = {name: x.new_zeros(*x.shape[:2], size, x.shape[3]) for name, (x, size) in sizes.items()}
            self._state["table"] = torch.full((1, self._slots), -1, dtype=torch.int64, device=key.device)
        for name, x in self._state.items():
            self._state[name] = x.clone() if name in self._shared else usable(x)
        self._shared.clear()
        if len(self._state["table"]) < len(table):
            self._state["table"] = self._state["table"].repeat(len(table), 1)

    def _write(self, call: Call, table: Tensor) -> list[tuple[Tensor, Any, Tensor]]:
        """Store the new tokens that later calls need. Return the overwritten entries, to undo a failed call."""
        self._prepare_memory(call, table)
        return self._put(self._state, call._replace(key=call.key.detach(), value=call.value.detach()), table)

    def _put(self, leaves: dict[str, Tensor], call: Call, table: Tensor) -> list[tuple[Tensor, Any, Tensor]]:
        """Write new tokens into their slots. Return (tensor, index, overwritten entries) for each tensor."""
        new = {name: x for name, (x, _) in self._new_leaves(call.key, call.value).items()}
        new["table"] = table[:, None, :, None]
        before, all_targets = [], self._slots_to_write(call.positions.run, table, _FARTHEST)
        for name, x in leaves.items():
            slots = x[:, None, :, None] if name == "table" else x
            # A leaf with fewer slots stores only the first positions.
            has_all = slots.shape[2] == self._slots
            targets = all_targets if has_all else self._slots_to_write(call.positions.run, table, slots.shape[2])
            if targets is not None:
                row, column, slot = targets
                index = (row, slice(None), slot)
                before.append((slots, index, slots[index].detach().clone()))
                slots[index] = new[name][row, :, column]
        return before

    def _slots_to_write(self, run: range | None, table: Tensor, stop: int) -> tuple[Index, Index, Index] | None:
        """Return the batch items, columns and slots of the new tokens to store, restricted to positions below ``stop``.

        Return None if there is only one new token and its position is not below ``stop``, or if the positions
        are fake tensors without values.
        """
        if run is not None and len(run) == 1:
            position, sinks = run[0], self._first_slots
            slot = position if position < sinks else sinks + (position - sinks) % self._last_slots
            return (slice(None), slice(None), slice(slot, slot + 1)) if position < stop else None
        if run is not None and run:  # computed without tensor values, which a dry run lacks
            positions = np.arange(run.start, run.stop, run.step)
            is_last = positions > max(run[0], run[-1]) - self._last_slots
            kept = (((positions < self._first_slots) | is_last) & (positions < stop)).nonzero()[0]
            columns, stored = (torch.from_numpy(x).to(table.device) for x in (kept, positions[kept]))
            return slice(None), columns, self._slot(stored)
        if not has_values(table):
            return None
        is_kept = (table < self._first_slots) | (table > table.amax(1, keepdim=True) - self._last_slots)
        rows, columns = (is_kept & (table >= 0) & (table < stop)).nonzero(as_tuple=True)
        return rows if len(table) > 1 else slice(None), columns, self._slot(table[rows, columns])

    def _slot(self, positions: Tensor) -> Tensor:
        """Return the slot of each position. The first positions have fixed slots; later ones cycle through the rest."""
        later = self._first_slots + (positions - self._first_slots) % self._last_slots
        return torch.where(positions < self._first_slots, positions, later)

    def _sizes(self, contents: Contents) -> dict[str, int]:
        return {"slots": self._slots}

    def restore(self, contents: Contents) -> None:
        super().restore(contents)
        if contents.value("is_run") is not self.is_run:
            raise contents.misfit("is_run")

    def _check_restored(self, contents: Contents, state: dict[str, Tensor]) -> None:
        self.is_run = contents.value("is_run") is True
        # The position determines the slot. If positions are 0, 1, 2, …, the contents of every slot are known.
        slot, table = torch.arange(self._slots, device=state["table"].device), state["table"]
        is_wrong = (table >= 0) & (self._slot(table) != slot)
        if self.is_run:
            turns = (self.length - 1 - slot).div(self._last_slots, rounding_mode="floor")
            newest = torch.where(slot < self._first_slots, slot, slot + turns * self._last_slots)
            is_wrong |= table != torch.where(slot < self.length, newest, -1)
        if bool(is_wrong.any()) or (self.is_run and (contents.has("next") or self._tokens.after != self.length)):
            raise contents.misfit("table")


class SegmentCache(RingCache):
    r"""A cache of the open segment and the ``memory`` tokens before it. Earlier tokens are forgotten.

    The result equals dense attention with the layer's mask ``& masks.Segments(segment, memory)``, for any causal mask,
    any split of the sequence into calls, and ragged batches. Segments are defined by positions, so they may be in
    different columns of each item.

    Gradients flow to the keys and values of the current call. Stored keys and values are constants. To train as in
    the paper, pass one segment in each call.

    Args:
        segment: number of positions in a segment, at least 1.
        memory: number of tokens to keep before the open segment, at least 0.

    Raises:
        ValueError: a size is out of range, positions do not increase, or the batch size changes.
        UnsupportedError: a crop that would need tokens that are already forgotten, or a mechanism that does not support
            the mask.

    Cost: memory for ``batch * kv_heads * (segment + memory) * (head_dim + value_dim)`` elements, allocated by the first
    call, and 8 bytes for each slot of each item (or of all items together if they have the same positions). A step
    reads all stored tokens.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> softmax, cache = mechanisms.Softmax(), SegmentCache(4, 2)
        >>> q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
        >>> parts = [cache.attend(softmax, *(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(20)]
        >>> dense = softmax(q, k, mask=masks.Segments(4, 2)) @ v
        >>> torch.allclose(torch.cat(parts, 2), dense, atol=1e-5), cache.nbytes
        (True, 816)

    Reference: Dai et al. 2019, arXiv:1901.02860, section 3.2 (Transformer-XL).
    """

    settings = ("segment", "memory")
    equivalent_run = "the dense run with masks.Segments(segment, memory)"

    def __init__(self, segment: int, memory: int):
        self.segment, self.memory = check_int("segment", segment), check_int("memory", memory, 0)
        super().__init__(Segments(self.segment, self.memory), 0, self.segment + self.memory)

    def _visible_slots(self, x: Tensor, position: int) -> Tensor:
        first = max(0, position // self.segment * self.segment - self.memory) % self._slots
        stop = position % self._slots + 1
        return x[:, :, first:stop] if first < stop else torch.cat([x[:, :, first:], x[:, :, :stop]], 2)
