"""SinkWindowCache: the first tokens and the last ones, and constant memory however long the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from saccade import masks
from saccade.attention import AttentionMatrix
from saccade.caches.checks import check_count, check_crop, check_dense_mask, check_mechanism, check_new, checked_rows
from saccade.caches.following import following, from_here
from saccade.caches.kv_cache import is_graph, other_cache
from saccade.caches.layer_cache import LayerCache, MakesMatrix, Traffic
from saccade.caches.memory import usable
from saccade.caches.plain import is_plain, is_relative, sees_all_before
from saccade.engine.at_positions import Positions, check_positions
from saccade.errors import type_error, unsupported, value_error
from saccade.masks import Mask, as_mask
from saccade.positions import Rotary

__all__ = ["SinkWindowCache"]


class SinkWindowCache(LayerCache):
    r"""Keys and values of the first ``sink_tokens`` tokens and of the last ``window``; all others are forgotten.

    Without ``rotary`` tokens keep their positions, and it equals the dense run with the layer's mask
    ``& masks.streaming(sink_tokens, window)``: any causal mask, any split of the text into calls, ragged batches too.
    The first tokens then drift ever farther away from the query.

    With ``rotary``, that of the layer, positions are counted inside the cache, as if the text consisted of the tokens
    held: it equals, for each token, the dense run over these at positions 0, 1, 2, …. No distance is then larger than
    in a text of ``sink_tokens + window`` tokens, however long the stream. Keys are held as they came and turned once,
    on reading: the window keeps its distances, and only the first tokens are moved up to it.

    It remembers nothing in between: what leaves the window is gone.

    Args:
        sink_tokens: positions at the beginning that are kept, at least 0.
        window: last tokens that are kept, the newest included, at least 1.
        rotary: the layer's own, to count positions inside the cache; None to leave them as they are.

    Raises:
        ValueError: sizes out of range, tokens that stand before earlier ones, or another batch than before.
        UnsupportedError: a crop to where tokens are missing; with ``rotary``, a mask that reads more than distances,
            tokens that do not stand at 0, 1, 2, …, or a long call with anything but a softmax without a sink logit.

    Cost: memory ``batch * kv_heads * (sink_tokens + window) * (head_dim + value_dim)`` elements, taken at once, and 8
    bytes for each token held of each item (of all, if they stand alike). A step reads what is held.

    Example:
        >>> from saccade import masks, mechanisms
        >>> softmax, cache = mechanisms.Softmax(), SinkWindowCache(2, 4)
        >>> q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
        >>> parts = [cache.attend(softmax, *(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(20)]
        >>> dense = softmax(q, k, mask=masks.streaming(2, 4)) @ v
        >>> torch.allclose(torch.cat(parts, 2), dense, atol=1e-5), cache.nbytes
        (True, 816)

    Reference: Xiao et al. 2024, arXiv:2309.17453, section 3.2 (StreamingLLM).
    """

    def __init__(self, sink_tokens: int, window: int, *, rotary: Rotary | None = None):
        where = "SinkWindowCache"
        check_count(where, "sink_tokens", sink_tokens, 0)
        check_count(where, "window", window)
        if rotary is not None and not isinstance(rotary, Rotary):
            hint = "the layer's own, for instance mha.rotary"
            raise type_error(where, "rotary", "be a saccade Rotary or None", type(rotary).__name__, hint=hint)
        self.sink_tokens, self.window, self.rotary = sink_tokens, window, rotary
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._sinks: Tensor | None = None  # with rotary: the first keys as they came; in the slots they are turned
        self._table: Tensor | None = None  # int64 [batch | 1, slots]: where the tokens in the slots stand, -1: nobody
        self._length = 0
        self._next: int | Tensor = 0
        self._moved = (0, 0)
        self._is_shared = False
        self._is_run = True  # tokens stand at 0, 1, 2, … in every item
        self._slots = sink_tokens + window

    @property
    def length(self) -> int:
        """Columns seen, forgotten ones included."""
        return self._length

    @property
    def nbytes(self) -> int:
        tensors = (
            self._keys,
            self._values,
            self._sinks,
            self._table,
            self._next if isinstance(self._next, Tensor) else None,
        )
        return sum(x.untyped_storage().nbytes() for x in tensors if x is not None)

    @property
    def traffic(self) -> Traffic:
        if self._keys is None or self._values is None:
            return Traffic(0, 0)
        column = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in (self._keys, self._values))
        return Traffic(*(columns * column for columns in self._moved))

    @property
    def kv_positions(self) -> Tensor:
        """Where the tokens held stand, int64 ``[batch | 1, sink_tokens + window]``, in no order; -1 where none is."""
        return torch.full((1, self._slots), -1) if self._table is None else self._table

    def positions(self, q_len: int) -> range | Tensor:
        check_count("SinkWindowCache.positions", "q_len", q_len, 0)
        return from_here(self._next, q_len)

    def attend(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: object = None,
        positions: Positions = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        where = "SinkWindowCache.attend"
        check_mechanism(where, mechanism)
        check_dense_mask(where, mask)
        check_new(where, query, key, value)
        self._check_alike(key, value, where)
        batch, q_len = key.shape[0], key.shape[2]
        rule = None if mask is None else as_mask(mask, (*query.shape[:3], self.length + q_len), where=where)
        positions = self.positions(q_len) if positions is None else positions
        check_positions(positions, "positions", batch, q_len, where)
        after = following(
            self._next, positions, batch, key.device, where, begun=self._length > 0, hint="KVCache() takes any order"
        )
        table = _written_out(positions, key.device)
        is_run = self._is_run and isinstance(after, int) and after == self._length + q_len and bool((table >= 0).all())
        if self.rotary is not None:
            self._check_inside(rule, table, where)
        new = _New(query, key, value, table, rule, is_graph(mechanism, query, key, value))
        if q_len == 1 and self._keys is not None:
            out = self._step(mechanism, new, dropout_p, is_run=is_run)
        else:
            out = self._long(mechanism, new, positions, dropout_p, where)
            if q_len:
                self._store(new)
        self._length, self._next, self._is_run = self._length + q_len, after, is_run
        return out

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        batch = None if self._keys is None else len(self._keys)
        index = checked_rows("SinkWindowCache.reorder", rows, batch)
        if self._keys is None or self._values is None or self._table is None:
            return
        index = index.to(self._keys.device)
        self._keys, self._values, self._is_shared = self._keys[index], self._values[index], False
        self._table = self._table[index] if len(self._table) > 1 else self._table.clone()
        self._sinks = None if self._sinks is None else self._sinks[index]
        if isinstance(self._next, Tensor):
            self._next = self._next[index]

    def crop(self, length: int) -> None:
        """Forget the last columns: back to nothing, or as long as nothing has been forgotten that is needed then."""
        check_crop("SinkWindowCache.crop", length, self._length)
        if length == self._length:
            return
        if length == 0:
            self._keys = self._values = self._sinks = self._table = None
            self._length, self._next, self._is_shared, self._is_run = 0, 0, False, True
            return
        if not self._is_run or self._length > self._slots:
            reason = f"it has let tokens go that were in the window {self._length - length} tokens ago"
            if not self._is_run:
                reason = "the tokens of its items do not stand at 0, 1, 2, …, one in each column"
            hint = "fork() before the tokens that may have to go; KVCache() crops anywhere"
            raise unsupported("SinkWindowCache.crop", f"length={length}", [reason], hint=hint)
        assert self._table is not None
        self._table = self._table.masked_fill(self._table >= length, -1)
        self._length = self._next = length

    def fork(self) -> Self:
        other = type(self)(self.sink_tokens, self.window, rotary=self.rotary)
        other._keys, other._values, other._table = self._keys, self._values, self._table
        other._sinks, other._is_run, other._moved = self._sinks, self._is_run, self._moved
        other._length, other._next = self._length, self._next
        self._is_shared = other._is_shared = True
        return other

    def _tensors(self) -> dict[str, Tensor]:
        """What is held, to be written to a file."""
        held = {"keys": self._keys, "values": self._values, "sinks": self._sinks, "table": self._table}
        held["next"] = self._next if isinstance(self._next, Tensor) else None
        return {name: x for name, x in held.items() if x is not None}

    def _counts(self) -> dict[str, int | bool]:
        """The numbers beside them."""
        following_one = -1 if isinstance(self._next, Tensor) else self._next
        return {"length": self._length, "next": following_one, "is_run": self._is_run}

    def _restore(self, tensors: Mapping[str, Tensor], counts: Mapping[str, Any]) -> None:
        """Take up what another cache of these sizes held."""
        self._keys, self._values = tensors.get("keys"), tensors.get("values")
        self._sinks, self._table = tensors.get("sinks"), tensors.get("table")
        self._length, self._is_run = counts["length"], counts["is_run"]
        self._next = tensors.get("next", counts["next"])

    def __repr__(self) -> str:
        inside = "" if self.rotary is None else ", rotary"
        return f"SinkWindowCache({self.sink_tokens}, {self.window}{inside}, length={self.length}, nbytes={self.nbytes})"

    def _step(self, mechanism: MakesMatrix, new: _New, dropout_p: float, *, is_run: bool) -> Tensor:
        """One token: it takes the place of the one that leaves the window, and attends to what is held."""
        self._make_own(len(new.table))
        keys, values, table = self._held()
        undo = self._write_one(new)
        used = min(self._length + 1, self._slots) if is_run else self._slots  # slots fill up one by one
        try:
            keys, values, table = keys[:, :, :used], values[:, :, :used], table[:, :used]
            q_table = new.table
            if self.rotary is not None:
                q_table, table = self._turn_sinks(q_table, table)
            if new.is_graph:  # it must not hold memory that is written to later; and the new token gets its gradients
                keys, values = (self._with(x, own, new.table) for x, own in ((keys, new.key), (values, new.value)))
            if is_run and sees_all_before(new.rule) and is_plain(mechanism):
                matrix = mechanism(new.query, keys, mask=None, q_positions=None, kv_positions=None)
            else:
                mask = new.rule if self.rotary is not None else self._joined(new.rule)
                matrix = mechanism(new.query, keys, mask=mask, q_positions=q_table, kv_positions=table)
            out = matrix.matmul(values, dropout_p=dropout_p)
        except BaseException:
            undo()  # a call that fails leaves no trace
            raise
        self._moved = (used, 1)
        return out

    def _long(
        self, mechanism: MakesMatrix, new: _New, positions: range | Tensor, dropout_p: float, where: str
    ) -> Tensor:
        """Several tokens: each sees its own window, of what is held and of the others."""
        keys, values, kv_positions = new.key, new.value, positions
        if self._keys is not None:
            held_keys, held_values, held = self._held()
            if self._sinks is not None:
                held_keys = torch.cat([self._sinks, held_keys[:, :, self.sink_tokens :]], 2)
            keys, values = torch.cat([held_keys, keys], 2), torch.cat([held_values, values], 2)
            rows = max(len(held), len(new.table))
            kv_positions = torch.cat([held.expand(rows, -1), new.table.expand(rows, -1)], 1)
        self._moved = (keys.shape[2], new.key.shape[2])
        if self.rotary is None or not new.table.numel() or int(new.table.max()) < self._slots:
            mask = self._joined(new.rule)
            matrix = mechanism(new.query, keys, mask=mask, q_positions=positions, kv_positions=kv_positions)
            return matrix.matmul(values, dropout_p=dropout_p)
        near = masks.Causal() & masks.Window(self.window - 1, 0)
        parts = [(new.query, near if self.sink_tokens == 0 else near & ~masks.Prefix(self.sink_tokens), positions)]
        if self.sink_tokens:
            # To move a key up by so many positions is to move the query back by as many.
            inside = new.table.clamp(max=self._slots - 1)
            turned = self.rotary(self.rotary.unrotate(new.query, new.table), inside)
            parts.append((turned, masks.Causal() & masks.Prefix(self.sink_tokens), inside))
        outs, logs = [], []
        for query, mask, q_positions in parts:
            own = mask if new.rule is None else mask & new.rule
            matrix = mechanism(query, keys, mask=own, q_positions=q_positions, kv_positions=kv_positions)
            if not isinstance(matrix, AttentionMatrix) or not matrix.is_stochastic:
                reason = "tokens beyond sink_tokens + window are seen from two places, and two softmaxes are merged"
                hint = "give the text in calls of one token, or without rotary"
                raise unsupported(where, type(mechanism).__name__, [reason], hint=hint)
            outs.append(matrix.matmul(values, dropout_p=dropout_p))
            logs.append(matrix.lse)
        return _merged(outs, logs)

    def _store(self, new: _New) -> None:
        """Keep of the new tokens what later ones need."""
        if self._keys is None:
            shape = (*new.key.shape[:2], self._slots)
            # Zeros: what is in a slot without a token is hidden, but must not be NaN.
            self._keys = new.key.new_zeros(*shape, new.key.shape[3])
            self._values = new.value.new_zeros(*shape, new.value.shape[3])
            self._table = torch.full((1, self._slots), -1, dtype=torch.int64, device=new.key.device)
            if self.rotary is not None and self.sink_tokens:
                self._sinks = new.key.new_zeros(*shape[:2], self.sink_tokens, new.key.shape[3])
        self._make_own(len(new.table))
        keys, values, table = self._held()
        is_kept = (new.table < self.sink_tokens) | (new.table > new.table.amax(1, keepdim=True) - self.window)
        is_kept &= new.table >= 0
        for row, kept in enumerate(is_kept):
            columns = kept.nonzero()[:, 0]
            where = new.table[row, columns]
            slots = self._slot(where)
            items = slice(row, row + 1) if len(is_kept) > 1 else slice(None)
            table[items if len(table) > 1 else slice(None), slots] = where
            keys[items, :, slots] = new.key[items].detach()[:, :, columns]
            values[items, :, slots] = new.value[items].detach()[:, :, columns]
            if self._sinks is not None:
                first = slots < self.sink_tokens
                self._sinks[items, :, slots[first]] = new.key[items].detach()[:, :, columns[first]]

    def _write_one(self, new: _New) -> Callable[[], None]:
        """Write a token into its slot; what is returned undoes it."""
        keys, values, table = self._held()
        is_there = new.table[:, 0] >= 0
        items = torch.arange(len(keys), device=keys.device)
        place = new.table[:, 0].expand(len(keys))
        if not bool(is_there.all()):
            items, place = items[place >= 0], place[place >= 0]
        slots = self._slot(place)
        rows = items if len(table) > 1 else torch.zeros_like(items)
        pairs = [(keys, new.key.detach()[items, :, 0]), (values, new.value.detach()[items, :, 0])]
        targets: list[tuple[Tensor, tuple[Tensor | slice, ...], Tensor]] = [
            (x, (items, slice(None), slots), own) for x, own in pairs
        ]
        targets.append((table, (rows, slots), place))
        if self._sinks is not None:
            first = slots < self.sink_tokens
            targets.append((self._sinks, (items[first], slice(None), slots[first]), pairs[0][1][first]))
        before = [(x, index, x[index].clone()) for x, index, _ in targets]
        for x, index, own in targets:
            x[index] = own

        def undo() -> None:
            for x, index, old in before:
                x[index] = old

        return undo

    def _turn_sinks(self, q_table: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Move the first tokens up to the window; returns positions inside the cache, of the query and of the slots."""
        shift = (q_table - (self._slots - 1)).clamp(min=0)  # [batch | 1, 1]; of an item without a token 0
        first = torch.arange(table.shape[1], device=table.device) < self.sink_tokens
        inside = torch.where(first | (table < 0), table, table - shift)
        if self._sinks is not None:
            assert self._keys is not None
            assert self.rotary is not None
            own = torch.arange(self.sink_tokens, device=table.device)
            turned = self.rotary(self.rotary.unrotate(self._sinks, own), own + shift)
            self._keys[:, :, : self.sink_tokens] = turned
        return q_table - shift, inside

    def _with(self, held: Tensor, new: Tensor, table: Tensor) -> Tensor:
        """What is held, with the new token as a part of the graph."""
        place = table.clamp(min=0)[:, None, :, None].expand(*new.shape)
        slot = self._slot(place)
        own = torch.where((table >= 0)[:, None, :, None], new, held.gather(2, slot))
        return held.scatter(2, slot, own)

    def _slot(self, positions: Tensor) -> Tensor:
        """Where a token is kept: the first ones for good, the others in turn."""
        later = self.sink_tokens + (positions - self.sink_tokens) % self.window
        return torch.where(positions < self.sink_tokens, positions, later)

    def _joined(self, rule: Mask | None) -> Mask:
        own = masks.streaming(self.sink_tokens, self.window)
        return own if rule is None else own & rule

    def _held(self) -> tuple[Tensor, Tensor, Tensor]:
        assert self._keys is not None
        assert self._values is not None
        assert self._table is not None
        return self._keys, self._values, self._table

    def _make_own(self, rows: int) -> None:
        """Move to memory of one's own, if that held may not be written to; a table of ``rows`` where items differ."""
        copied = torch.clone if self._is_shared else usable
        # Each by itself: a table may be made in another mode than the keys, by a crop or when items come to differ.
        keys, values, table = (copied(x) for x in self._held())
        self._sinks = None if self._sinks is None else copied(self._sinks)
        self._keys, self._values, self._is_shared = keys, values, False
        self._table = table.repeat(rows, 1) if len(table) < rows else table

    def _check_inside(self, rule: Mask | None, table: Tensor, where: str) -> None:
        reasons = []
        if rule is not None and not is_relative(rule):
            reasons.append(f"positions are counted inside the cache, and {rule} reads more than distances")
        before = torch.as_tensor(self._next, device=table.device).expand(len(table))
        count = (table >= 0).cumsum(1) - 1 + before[:, None]
        if bool(((table >= 0) & (table != count)).any()):
            reasons.append("positions are counted inside the cache, and tokens do not stand at 0, 1, 2, … in the text")
        if reasons:
            raise unsupported(where, "rotary", reasons, hint="SinkWindowCache without rotary leaves positions alone")

    def _check_alike(self, key: Tensor, value: Tensor, where: str) -> None:
        for name, held, new in (("key", self._keys, key), ("value", self._values, value)):
            if held is None:
                continue
            like = (held.shape[0], held.shape[1], held.shape[3], held.dtype, held.device)
            given = (new.shape[0], new.shape[1], new.shape[3], new.dtype, new.device)
            if like != given:
                raise other_cache(where, name, like, given)
        if self.rotary is not None and self.rotary.head_dim != key.shape[3]:
            raise value_error(where, "rotary", f"be made for head_dim {key.shape[3]}", self.rotary.head_dim)


class _New(NamedTuple):
    """What a call brings: its tensors, where the tokens stand (int64 ``[batch | 1, q_len]``), and the mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor
    rule: Mask | None
    is_graph: bool


def _merged(outs: list[Tensor], logs: list[Tensor]) -> Tensor:
    """One softmax of several over different keys."""
    total = torch.stack(logs).logsumexp(0)
    shares = [(log - total).nan_to_num(nan=0.0).exp()[..., None] * ~total.isinf()[..., None] for log in logs]
    return sum((share * out for share, out in zip(shares, outs, strict=True)), torch.zeros(())).to(outs[0].dtype)


def _written_out(positions: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)[None]
    return torch.atleast_2d(positions.to(device))
